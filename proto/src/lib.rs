//! The wire protocol between Tandem's processes: messages, checked conversions to the types of `kv`, and connections.

mod causes;
pub mod channel;
mod error;
mod event;
mod identity;
mod key;
mod load;
mod prefill_chunk;
mod priority;
mod reason;
mod signed_address;
mod snapshot;
mod ticket;

pub use causes::{Cause, Causes, Funnel};
pub use error::WireError;
pub use event::{event_batch, split_batch};
pub use identity::Difference;
pub use key::{ClusterKey, Purpose, SECRET_BYTES_MIN, SIGNATURE_BYTES, TooShort};
pub use load::{tier_names, transfer_bytes_per_second};
pub use snapshot::{CHUNK_HASHES_MAX, SnapshotAssembly, snapshot_chunks};

/// Maximum length in bytes of an id, a name, an account or a trace context in a message. Frontends send less than a tenth of it.
pub const TEXT_BYTES_MAX: usize = 1_024;

/// Maximum number of images in a prompt.
pub const IMAGES_MAX: usize = 16;

/// Maximum length in bytes of a cache namespace in a message. A namespace has the names of a model, a revision and a LoRA, and a salt.
pub const NAMESPACE_BYTES_MAX: usize = 4_096;

/// Makes a module with the code that is generated from a package's .proto files.
macro_rules! generated {
    ($(#[$doc:meta])* $name:ident, $package:literal) => {
        $(#[$doc])*
        #[allow(
            missing_docs,
            rustdoc::all,
            clippy::all,
            clippy::missing_errors_doc,
            clippy::allow_attributes_without_reason,
            reason = "generated code"
        )]
        pub mod $name {
            tonic::include_proto!($package);
        }
    };
}

generated!(
    /// The messages and services of package `tandem.v1`.
    v1,
    "tandem.v1"
);
generated!(
    /// The messages and the service with which gateways that are built on Envoy call external processors. They hold the text of prompts and
    /// answers, so they are never logged.
    ext_proc,
    "envoy.service.ext_proc.v3"
);
generated!(
    /// The messages and the service of gRPC's health checks.
    health,
    "grpc.health.v1"
);

/// Logs that a message on a stream is of a kind that this version does not know (an unset `oneof`). The receiver skips such messages. A later
/// version may add a kind if every receiver can do without it (docs/versions.md).
pub fn unknown_message(stream: &'static str) {
    tracing::debug!(stream, "skipping a kind of message that this version does not know");
}

impl v1::worker_info::Role {
    /// Returns the role's name, as used in metrics, JSON and worker ids.
    pub fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Unspecified => "unknown",
        }
    }
}
