//! Text in, text out: OpenAI's HTTP in front of a cluster of token ids.
//!
//! A request's way: `http` reads it, `request` checks it, `prompt` makes tokens of it, `dispatch` has it placed and opens the
//! decode worker's stream, `stream` makes text of what comes, `usage` says what it cost. Everything taken for a request (a
//! permit, a booking, a generation) is held by values that live in its response, and goes when the client goes.

mod admission;
mod dispatch;
mod error;
mod http;
mod metrics;
mod model;
mod prompt;
mod request;
mod stream;
mod usage;

pub use model::{ServedModel, ServedModelError};
pub use prompt::{EncodeError, Special, Tokenizer};

use axum::serve::ListenerExt;
use std::{sync::Arc, time::Duration};
use tandem_node::{Metrics, Shutdown};
use tokio::net::TcpListener;

/// How a frontend behaves. [`FrontendSettings::new`] has the defaults.
pub struct FrontendSettings {
    /// `host:port` of the router's gRPC.
    pub router: String,
    /// The operator's name of the cluster; a router of another is not used.
    pub cluster: String,
    /// What is served.
    pub model: ServedModel,
    /// Tokens in a block: the cluster's constant.
    pub block_size: u32,
    /// Prompts that run at a time; beyond, requests are refused with 503. Bounds memory and the load a cluster can be given.
    pub concurrent_requests: usize,
    /// The longest body that is read.
    pub body_max_bytes: usize,
    /// How long a request may wait for its first token, all attempts together.
    pub first_token_timeout: Duration,
    /// Placements tried before a request is given up.
    pub attempts: u32,
    /// An attempt whose prefill has not begun in this time is tried elsewhere, but for the last: a worker that is stuck, or
    /// whose queue is longer than others', costs so much and not the whole wait for the first token.
    pub attempt_timeout: Duration,
    /// Times a generation whose worker is lost goes on elsewhere with the same text. 0: it ends with an error event.
    pub resumes: u32,
}

impl FrontendSettings {
    /// The defaults for a router and a model.
    pub fn new(router: impl Into<String>, model: ServedModel) -> Self {
        Self {
            router: router.into(),
            cluster: "tandem".to_owned(),
            model,
            block_size: 16,
            concurrent_requests: 1024,
            body_max_bytes: 32 << 20,
            first_token_timeout: Duration::from_secs(60),
            attempts: 3,
            attempt_timeout: Duration::from_secs(30),
            resumes: 8,
        }
    }
}

/// The frontend cannot run.
#[derive(Debug, thiserror::Error)]
pub enum FrontendError {
    /// The router's address is not one.
    #[error(transparent)]
    Router(#[from] tandem_proto::link::InvalidAddress),
    /// Blocks have at least one token.
    #[error("block_size must be at least 1")]
    BlockSize,
    /// The socket failed.
    #[error("the HTTP server failed: {0}")]
    Serve(#[from] std::io::Error),
}

/// Serves HTTP until the process drains and every request has ended, or until it stops. While it drains, new requests are
/// refused with 503; what still runs at the stop ends with an error event.
pub async fn run(
    listener: TcpListener,
    settings: FrontendSettings,
    metrics: Metrics,
    shutdown: Shutdown,
) -> Result<(), FrontendError> {
    if settings.block_size == 0 {
        return Err(FrontendError::BlockSize);
    }
    let app = Arc::new(http::App::new(settings, &metrics, shutdown.clone())?);
    let drained = app.admission().clone().drained();
    let listener = listener.tap_io(|socket| {
        // Without it a small event waits for the client's delayed acknowledgement of the one before: 40 ms.
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "TCP_NODELAY cannot be set");
        }
    });
    let server = axum::serve(listener, http::routes(Arc::clone(&app))).with_graceful_shutdown(drained);
    tokio::select! {
        result = server => Ok(result?),
        () = after_stop(&shutdown) => Ok(()),
        never = app.tell_readiness() => match never {},
    }
}

/// Streams hear of the stop themselves; this much later the last of their bytes are on the way.
async fn after_stop(shutdown: &Shutdown) {
    const LAST_BYTES: Duration = Duration::from_millis(200);
    shutdown.stopped().await;
    tokio::time::sleep(LAST_BYTES).await;
}
