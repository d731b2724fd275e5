//! Why a cluster does not start, or has ended.

use crate::{
    model::ModelError,
    settings::{DiscoveryArgsError, KeyFileError},
};
use std::{net::SocketAddr, path::PathBuf};
use tandem_engine::cuda::CudaError;
use tandem_node::{events::NatsError, trace::TraceError};

/// Why a cluster or a process does not start, or has ended. Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The socket cannot be bound.
    #[error("cannot listen on {address} ({cause}); stop what listens there, or choose another address with {flag}")]
    Listen {
        /// The address to listen on.
        address: SocketAddr,
        /// The flag that sets it.
        flag: &'static str,
        /// The error of the operating system.
        #[source]
        cause: std::io::Error,
    },
    /// The process cannot register.
    #[error(transparent)]
    Discovery(#[from] DiscoveryArgsError),
    /// The file of the cluster key cannot be used.
    #[error(transparent)]
    Key(#[from] KeyFileError),
    /// The settings of NATS cannot be used.
    #[error(transparent)]
    Nats(#[from] NatsError),
    /// The collector of traces cannot be used.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The ledger cannot be opened.
    #[error("the ledger {} cannot be opened ({cause}); choose another file with --ledger", .path.display())]
    Ledger {
        /// The ledger's path.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        cause: std::io::Error,
    },
    /// The port that the system has chosen cannot be read.
    #[error("the address of a socket cannot be read ({0})")]
    LocalAddress(#[source] std::io::Error),
    /// Tensor parallelism is for GPUs only.
    #[error("--tp needs --engine cuda; leave it out, or see --threads for the CPU")]
    OneDevice,
    /// The GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// All prompts must be computed on prefill workers, and there are none.
    #[error("--prefill remote needs a prefill worker; set --prefill-workers to 1 or more")]
    NoPrefillWorker,
    /// The model cannot be found or downloaded.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's file cannot be served.
    #[error("{} cannot be served: {cause}", .path.display())]
    Unservable {
        /// The path of the model's file.
        path: PathBuf,
        /// What is missing or wrong.
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The engine rejects its settings.
    #[error("the engine cannot be created ({0}); change --kv-capacity-tokens or --block-size")]
    Engine(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A part has failed.
    #[error("the {part} failed: {cause}; restart it; if it fails again, see the log (--log debug)")]
    Part {
        /// The part's name, such as `router`.
        part: String,
        /// The error of the part.
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A part has ended without an error.
    #[error("the {0} ended unexpectedly; restart it; if it happens again, see the log (--log debug)")]
    PartEnded(String),
    /// All parts run, but the frontend is not ready.
    #[error("the cluster was not ready in time; see the log (--log debug)")]
    NotReady,
}
