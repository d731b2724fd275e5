//! Why a cluster does not start, or does not go on.

use crate::{
    model::ModelError,
    settings::{DiscoveryFlagsError, KeyFileError, TenantFlagsError},
};
use std::{net::SocketAddr, path::PathBuf};
use tandem_engine::cuda::CudaError;
use tandem_node::{events::NatsError, trace::TraceError};

/// Each message says what to do.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The port is taken, or not ours to take.
    #[error("cannot listen on {address} ({cause}); stop what listens there, or choose another address with {flag}")]
    Listen {
        /// As it was set.
        address: SocketAddr,
        /// What sets it.
        flag: &'static str,
        /// Why not.
        #[source]
        cause: std::io::Error,
    },
    /// Others could not find it.
    #[error(transparent)]
    Discovery(#[from] DiscoveryFlagsError),
    /// Requests with an account would be refused.
    #[error(transparent)]
    Tenants(#[from] TenantFlagsError),
    /// The router refuses this process as a member of its cluster.
    #[error("{}", tandem_node::retry::error_chain(.0))]
    Key(#[from] KeyFileError),
    /// What is set for NATS.
    #[error("{}", tandem_node::retry::error_chain(.0))]
    Nats(#[from] NatsError),
    /// Nobody would see its traces.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// Nobody could audit what it serves.
    #[error("the ledger {} cannot be opened ({cause}); choose another file with --ledger", .path.display())]
    Ledger {
        /// As it was set.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: std::io::Error,
    },
    /// The system does not tell which port it chose.
    #[error("the address of a socket cannot be read ({0})")]
    LocalAddress(#[source] std::io::Error),
    /// Only GPUs compute a model together.
    #[error("--tp needs --engine cuda; leave it out, or see --threads for the CPU")]
    OneDevice,
    /// The GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// Nobody could do it.
    #[error("--prefill remote needs a prefill worker; set --prefill-workers to 1 or more")]
    NoPrefillWorker,
    /// There is no model file.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model's file is not what it should be.
    #[error("{} cannot be served: {cause}", .path.display())]
    Unservable {
        /// The model's file.
        path: PathBuf,
        /// What is missing or wrong.
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// There is no device of this size.
    #[error("the engine cannot be made ({0}); change --kv-capacity-tokens or --block-size")]
    Engine(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// A part gave up.
    #[error("the {part} failed: {cause}; start anew, and see the log (--log debug) if it fails again")]
    Part {
        /// Such as `router`.
        part: String,
        /// Its error.
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A part ended without saying why.
    #[error("the {0} ended unexpectedly; start anew, and see the log (--log debug) if it happens again")]
    PartEnded(String),
    /// All parts run, but no request could be served.
    #[error("the cluster did not get ready in time; see the log (--log debug)")]
    NotReady,
}
