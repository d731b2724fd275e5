//! The settings of processes that serve.
//!
//! Each group of settings is one struct of clap arguments. A role is composed of the groups that apply to it ([`roles`]). A new setting
//! needs a field in a group and the code that uses it. Rules that concern several settings are in `cli/rules.rs`.

mod cluster_tls;
mod common;
mod discovery;
mod events;
mod external;
mod frontend;
mod key;
mod limits;
mod model;
mod parsers;
mod passthrough;
mod restart;
pub mod roles;
mod router;
mod sim;
mod telemetry;
mod tenants;
mod worker;

pub use cluster_tls::{ClusterTlsArgs, ClusterTlsArgsError};
pub use common::CommonArgs;
pub use discovery::{DiscoveryArgs, DiscoveryArgsError};
pub use events::NatsArgs;
pub(crate) use external::{EngineLimits, KV_LEASE_SECONDS};
pub use external::{ExternalArgs, KvConnector};
pub use frontend::{ExtraModel, FrontendArgs};
pub use key::{KeyArgs, KeyFileError, KeySource};
pub use limits::{HostArgs, LimitArgs};
pub use model::{EngineKind, ModelArgs};
pub use parsers::{ForModel, ParserArgs};
pub use passthrough::PassthroughArgs;
pub use restart::RestartArgs;
pub use roles::{EppProcess, FrontendProcess, PickerArgs, PickerPorts, ProcessArgs, RouterProcess, UpSettings, WorkerProcess};
pub use router::{ItlArgs, RouterArgs};
pub use sim::SimArgs;
pub use tandem_router::{PolicyKind, PrefillPlace};
pub use telemetry::TelemetryArgs;
pub use tenants::TenantArgs;
pub use worker::{KvTransfer, WorkerArgs};

pub(crate) use common::address;
pub(crate) use discovery::{CLUSTER, cluster_name};
