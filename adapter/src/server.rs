//! The connection of an adapter to the server of its engine, for all kinds of engines.

use crate::{
    Adapter,
    api::{Api, EngineFailure},
    http::{ClientError, HttpError},
    mirror::WrongBlockSize,
    shared::Shared,
};
use futures::future::BoxFuture;
use std::{sync::Arc, time::Duration};
use tandem_node::{Backoff, retry::error_chain};
use tokio::{sync::watch, time::sleep};

/// The shortest and the longest pause between attempts to reach a server that is starting.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// The time between two health checks of the engine.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// The number of consecutive failed checks after which the engine counts as ended.
const FAILED_CHECKS_MAX: u32 = 3;

/// The shortest time between two reports of the load.
const LOAD_INTERVAL: Duration = Duration::from_millis(20);

/// The reason why a server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The server's address, key or certificate is invalid.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The server refuses the key of the adapter.
    #[error("{0}")]
    Denied(String),
    /// The server does not report its KV cache.
    #[error("the engine's /metrics has no cache_config_info of rank {rank}; use vLLM 0.30 or later, and a rank that it runs")]
    NoCacheConfig {
        /// The data-parallel rank that the metrics lack.
        rank: u32,
    },
    /// The server does not report its number of slots.
    #[error("the engine's /props has no total_slots and n_ctx; use llama.cpp's server with one model")]
    NoSlots,
    /// The server serves no model.
    #[error("the engine serves no model; start it with one")]
    NoModel,
    /// The engine's block size is not a multiple of the cluster's.
    #[error(transparent)]
    BlockSize(#[from] WrongBlockSize),
    /// An address of KV events is invalid.
    #[error("{0}")]
    Endpoint(String),
}

/// The reason why the engine of an adapter counts as ended. A server that is started again is another instance.
#[derive(Debug, thiserror::Error)]
pub enum EngineEnded {
    /// The server no longer answers.
    #[error("the engine no longer answers")]
    Gone,
    /// Another process answers at the server's address.
    #[error("the engine was restarted")]
    Restarted,
}

/// The description of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerDescription {
    /// The id of the model that the server serves.
    pub model: String,
    /// The names of the model's LoRAs, which it serves as further models.
    pub loras: Vec<String>,
    /// The name or path from which the server loaded the model.
    pub root: Option<String>,
    /// The maximum length of a sequence in tokens.
    pub context_length: u32,
    /// The data-parallel ranks, each with the number of tokens that fit into its KV memory. There is at least one rank.
    pub ranks: Vec<(u32, u64)>,
}

/// A value that differs between two runs of a server at one address; `None` if the server reports no such value.
pub(crate) type Instance = Option<String>;

#[tonic::async_trait]
pub(crate) trait Server: Send + Sync + 'static {
    /// Checks that the engine can work.
    ///
    /// # Errors
    /// Fails if the server does not answer, or if it reports that the engine has failed.
    async fn check_health(&self) -> Result<Instance, EngineFailure>;
}

pub(crate) struct Engine {
    pub shared: Arc<Shared>,
    pub family: Option<Arc<str>>,
    pub instance: Instance,
    /// Applies the engine's KV events until it has ended.
    pub events: BoxFuture<'static, EngineEnded>,
}

/// An adapter that is connected to its engine's server.
pub struct Connected {
    /// The back end for a worker, which calls the server.
    pub adapter: Adapter,
    /// The id of the model that the server serves.
    pub model: String,
    follower: BoxFuture<'static, EngineEnded>,
}

impl Connected {
    pub(crate) fn new<S: Api + Server>(server: Arc<S>, engine: Engine, model: String, loras: Vec<String>) -> Self {
        let Engine { shared, family, instance, events } = engine;
        let (hung, is_hung) = watch::channel(false);
        let api: Arc<dyn Api> = server.clone();
        let adapter = Adapter { shared: Arc::clone(&shared), api, family, loras: loras.into(), hung: is_hung };
        let follower = async move {
            let ended = tokio::select! {
                ended = events => ended,
                ended = check_health(&*server, &instance, &hung) => ended,
                () = publish_load(&shared) => EngineEnded::Gone,
            };
            shared.end();
            ended
        };
        Self { adapter, model, follower: Box::pin(follower) }
    }

    /// Returns the back end, and the future that applies the server's KV events and checks its health until the engine has ended.
    pub fn into_parts(self) -> (Adapter, impl Future<Output = EngineEnded> + Send) {
        (self.adapter, self.follower)
    }
}

/// Describes a server, with retries until it answers.
///
/// # Errors
/// Fails if the server refuses the adapter.
pub(crate) async fn wait_until<T, F>(url: &str, describe: impl Fn() -> F) -> Result<T, ConnectError>
where
    F: Future<Output = Result<T, EngineFailure>>,
{
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    loop {
        let error = match describe().await {
            Ok(described) => return Ok(described),
            Err(EngineFailure::Denied { status: 401 | 403, message }) => {
                let reason = format!("the engine does not accept this worker's key ({message}); check --engine-key-file");
                return Err(ConnectError::Denied(reason));
            }
            Err(error) => error_chain(&error),
        };
        if backoff.is_new_error(&error) {
            tracing::info!(engine = %url, %error, "the engine does not answer yet; retrying");
        }
        sleep(backoff.next_delay()).await;
    }
}

async fn publish_load(shared: &Shared) {
    loop {
        shared.books.changed.notified().await;
        shared.publish();
        sleep(LOAD_INTERVAL).await;
    }
}

async fn check_health(server: &impl Server, instance: &Instance, hung: &watch::Sender<bool>) -> EngineEnded {
    let mut failed = 0;
    loop {
        sleep(HEALTH_INTERVAL).await;
        match server.check_health().await {
            Ok(now) if now.is_some() && now != *instance => return EngineEnded::Restarted,
            Ok(_) => {
                failed = 0;
                hung.send_replace(false);
            }
            Err(EngineFailure::Connection(HttpError::Timeout(_))) => {
                if !hung.send_replace(true) {
                    tracing::warn!("the engine does not answer its health check in time; its requests are aborted");
                }
            }
            Err(error) => {
                failed += 1;
                tracing::debug!(error = %error_chain(&error), failed, "the engine's health check failed");
                if failed >= FAILED_CHECKS_MAX {
                    return EngineEnded::Gone;
                }
            }
        }
    }
}
