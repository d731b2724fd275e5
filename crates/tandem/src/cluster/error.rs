//! Errors that prevent the start of a cluster or end it.

use crate::settings::{ClusterTlsArgsError, DiscoveryArgsError, KeyFileError};
use std::{error::Error, io, net::SocketAddr, path::PathBuf};
#[cfg(feature = "cuda")]
use tandem_devices::cuda::CudaError;
use tandem_frontend::{ApiKeyFileError, PassthroughError, TlsFilesError};
use tandem_model_store::ModelStoreError;
use tandem_process::{events::NatsError, trace::TraceError};

/// The reason why a cluster or a process does not start or has ended. Each message says what to do.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum StartError {
    #[error("cannot listen on {address}; {}choose another address with {flag}", remedy(.source))]
    Listen { address: SocketAddr, flag: &'static str, source: io::Error },
    #[error(transparent)]
    Discovery(#[from] DiscoveryArgsError),
    #[error(transparent)]
    Key(#[from] KeyFileError),
    #[error(transparent)]
    ClusterTls(#[from] ClusterTlsArgsError),
    #[error(transparent)]
    Nats(#[from] NatsError),
    #[error(transparent)]
    Trace(#[from] TraceError),
    #[error("the ledger {} cannot be opened; choose another file with --ledger", .path.display())]
    Ledger { path: PathBuf, source: io::Error },
    #[error("--tls-cert and --tls-key cannot be used")]
    Tls(#[from] TlsFilesError),
    #[error("--api-keys-file cannot be used")]
    ApiKeys(#[from] ApiKeyFileError),
    #[error("the audit log {} cannot be opened; choose another file with --audit-log", .path.display())]
    AuditLog { path: PathBuf, source: io::Error },
    #[error("the address of a listening socket cannot be read")]
    LocalAddress(#[source] io::Error),
    #[error("--tp needs --engine cuda; leave --tp out, or set --threads to use more of the CPU")]
    OneDevice,
    #[cfg(feature = "cuda")]
    #[error(transparent)]
    Cuda(#[from] CudaError),
    #[cfg(not(feature = "cuda"))]
    #[error(
        "this binary was built without the feature `cuda`; build it with the feature for --engine cuda, or choose another --engine"
    )]
    WithoutCuda,
    #[error(
        "--prefill remote needs a prefill worker; set --prefill-workers to 1 or more, or --prefill-engine-url with --engine vllm"
    )]
    NoPrefillWorker,
    #[error(
        "`tandem up` starts engines of one model; for --extra-model, start workers of each model, a router and `tandem frontend`"
    )]
    OneModel,
    #[error("{} cannot be read; set {flag} to a file with a CA certificate", .path.display())]
    Ca { path: PathBuf, flag: &'static str, source: io::Error },
    #[error("--passthrough cannot be used")]
    Passthrough(#[from] PassthroughError),
    #[error("--passthrough names {0}, which is also a served model; give one of the two another name (--served-model-name)")]
    PassthroughServed(String),
    #[error("the engine at {url} cannot be used")]
    ExternalEngine { url: String, source: Box<dyn Error + Send + Sync> },
    #[error("gateways reach an engine by its address, so an endpoint picker needs ip:port in each --engine-url, not {url}")]
    ObservedName { url: String },
    #[error("{0} is the name of a LoRA and of another model or another model's LoRA; give each model and LoRA a name of its own")]
    AmbiguousModel(String),
    #[error("--extra-model names {0}, but no engine serves it; write the model's id as its engine lists it in /v1/models")]
    NoEngineOfModel(String),
    #[error("--tool-call-parser or --reasoning-parser names the model {0}, which is not served; write the id of a served model")]
    ParserOfUnknownModel(String),
    #[error(
        "the engine at {url} does not report where its model comes from, or names a directory of another machine; set --model to the model, for its tokenizer and chat template (or --extra-model ID=MODEL, if --model is another engine's model)"
    )]
    UnknownModel { url: String },
    #[error(
        "the engine at {url} says that its model is {model}, but an engine of another machine must not choose the tokenizer and chat template; set --model {model} if that model is right, or --trust-engine-model to accept the models that engines name (--extra-model ID=MODEL for another engine's model)"
    )]
    UntrustedModel { url: String, model: String },
    #[error(transparent)]
    Model(#[from] ModelStoreError),
    #[error("the model {} cannot be served", .path.display())]
    Unservable { path: PathBuf, source: Box<dyn Error + Send + Sync> },
    #[error("the engine cannot be created; change --kv-capacity-tokens or --block-size")]
    Engine(#[source] Box<dyn Error + Send + Sync>),
    #[error("the {part} failed; restart the process; if it fails again, see the log (--log debug)")]
    Part { part: String, source: Box<dyn Error + Send + Sync> },
    #[error("the {part} has no usable addresses of other processes; correct --workers, --workers-file, --router or --peers")]
    Members { part: String, source: Box<dyn Error + Send + Sync> },
    /// A service of the cluster has ended without an error.
    #[error("the {0} ended unexpectedly; restart the process; if it happens again, see the log (--log debug)")]
    PartEnded(String),
    /// All services of the cluster run, but the frontend is not ready.
    #[error("the cluster was not ready in time; see the log (--log debug)")]
    NotReady,
}

/// Returns what to do if a process cannot listen, before the advice to choose another address.
fn remedy(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::AddrNotAvailable => "no network interface of this machine has the address: ",
        io::ErrorKind::PermissionDenied => "let this user listen on the port, or ",
        _ => "stop the process that listens there, or ",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_for_an_address_depends_on_why_nothing_can_listen_there() {
        for (kind, expected) in [
            (io::ErrorKind::AddrInUse, "stop the process that listens there, or choose another address with --listen"),
            (io::ErrorKind::AddrNotAvailable, "no network interface of this machine has the address: choose"),
            (io::ErrorKind::PermissionDenied, "let this user listen on the port, or choose"),
        ] {
            let error = StartError::Listen { address: ([10, 9, 9, 9], 1).into(), flag: "--listen", source: kind.into() };
            assert!(error.to_string().starts_with(&format!("cannot listen on 10.9.9.9:1; {expected}")), "{error}");
        }
    }
}
