//! The connection of an adapter to the server of its engine, for all kinds of engines.

use crate::{
    Adapter,
    adapter::EngineExchange,
    api::{Api, EngineFailure, EngineServer, Instance},
    engine_load::EngineLoad,
    failure,
    http::{ClientError, EngineHttp, HttpError},
    mirror::WrongBlockSize,
    served::Loras,
    shared::AdapterState,
};
use futures::{FutureExt, future::BoxFuture};
use hyper::Method;
use std::{sync::Arc, time::Duration};
use tandem_process::{Backoff, retry::error_chain, starting};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};

/// The shortest and the longest pause between attempts to reach a server that is starting.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// The time between two health checks of the engine.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// The time after which a warning says that the engine is still not ready.
const REMINDER: Duration = Duration::from_secs(30);

/// The time between two readings of the engine's LoRAs.
const LORAS_INTERVAL: Duration = Duration::from_secs(1);

/// Time limit of a health check. A check without an answer is followed by another one.
const CHECK_TIMEOUT: Duration = Duration::from_secs(10);

/// After this number of consecutive failed checks, the engine is treated as ended.
const FAILED_CHECKS_MAX: u32 = 3;

/// The shortest time between two reports of the load.
const LOAD_INTERVAL: Duration = Duration::from_millis(20);

/// The time after which generated tokens are reported. Workers report a load without events no more often.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);

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
    #[error(
        "the engine's /metrics has no cache_config_info of rank {rank}; use vLLM 0.32 or later without --disable-log-stats, and a rank that it runs"
    )]
    NoCacheConfig {
        /// The data-parallel rank that the metrics lack.
        rank: u32,
    },
    /// The server does not report its number of slots.
    #[error("the engine's /props lacks total_slots or default_generation_settings.n_ctx; use llama.cpp's server with one model")]
    NoSlots,
    /// The server does not report the sizes of its KV memory.
    #[error("the engine's /server_info has no page_size or no max_total_num_tokens; use SGLang 0.5.23 or later")]
    NoKvSizes,
    /// The server has no such data-parallel rank.
    #[error("the engine has {ranks} data-parallel ranks, counted from 0, so there is no rank {rank}; change --engine-rank")]
    NoRank {
        /// The rank in the settings.
        rank: u32,
        /// The number of ranks that the server has.
        ranks: u32,
    },
    /// The server's half of each request is not one that Tandem can use.
    #[error("{0}")]
    Disaggregated(String),
    /// An observed server does not report its load.
    #[error("the engine's /metrics has no vllm:num_requests_running; start vLLM without --disable-log-stats")]
    NoLoad,
    /// An observed server publishes no KV events.
    #[error(
        "the engine publishes no KV events, and its requests do not pass this worker, so nothing would be known of its cache; start vLLM with \
         --kv-events-config '{{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}}', \
         or set --engine-events to their address"
    )]
    NoEvents,
    /// An observed server has several data-parallel ranks.
    #[error("the engine has several data-parallel ranks, among which a gateway cannot choose; start a server for each rank")]
    ObservedRanks,
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

/// The reason why an adapter's engine is treated as ended. A restarted server is another instance.
#[derive(Debug, thiserror::Error)]
pub enum EngineEnded {
    /// The server no longer answers.
    #[error("the engine no longer answers")]
    Gone,
    /// Another process answers at the server's address.
    #[error("the engine was restarted")]
    Restarted,
}

/// The description of a server's model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelDescription {
    /// The model's id.
    pub id: String,
    /// The name or path from which the server loaded the model; `None` if the server does not report it.
    pub root: Option<String>,
    /// The maximum length of a sequence in tokens.
    pub context_length: u32,
}

/// The description of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerDescription {
    /// The model that the server serves.
    pub model: ModelDescription,
    /// The names of the model's LoRAs, which it serves as further models.
    pub loras: Vec<String>,
    /// The data-parallel ranks, each with the number of tokens that fit into its KV memory. There is at least one rank.
    pub ranks: Vec<(u32, u64)>,
}

pub(crate) struct ConnectedEngine {
    pub shared: Arc<AdapterState>,
    pub exchange: EngineExchange,
    pub instance: Instance,
    /// After this time without an answer to a health check and without progress, the engine is treated as hung.
    pub silence_max: Duration,
    /// Applies the engine's KV events until it has ended.
    pub events: BoxFuture<'static, EngineEnded>,
}

/// An adapter that is connected to its engine's server.
pub struct Connected {
    /// The back end for a worker, which calls the server.
    pub adapter: Adapter,
    /// The model that the server serves.
    pub model: ModelDescription,
    follower: BoxFuture<'static, EngineEnded>,
}

impl Connected {
    pub(crate) fn new<S: Api>(server: Arc<S>, engine: ConnectedEngine, model: ModelDescription, loras: Arc<Loras>) -> Self {
        let ConnectedEngine { shared, exchange, instance, silence_max, events } = engine;
        shared.server_failed.reset();
        let (hung, is_hung) = watch::channel(false);
        let api: Arc<dyn Api> = server.clone();
        let adapter = Adapter {
            shared: Arc::clone(&shared),
            api,
            exchange,
            loras: Arc::clone(&loras),
            accepts_images: false,
            hung: is_hung,
        };
        let follower = async move {
            let ended = tokio::select! {
                ended = events => ended,
                ended = check_health(&*server, &instance, silence_max, &shared.engine_load, &hung) => ended,
                () = shared.server_failed.happened() => EngineEnded::Gone,
                () = publish_load(&shared) => EngineEnded::Gone,
                () = follow_loras(&*server, &loras) => EngineEnded::Gone,
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

/// Checks `/health`, at which a server answers 503 while its engine starts, and after its engine has failed.
///
/// # Errors
/// Fails if the server does not answer, or answers with an error.
pub(crate) async fn check_engine(http: &EngineHttp) -> Result<(), EngineFailure> {
    match failure::check(http.read(Method::GET, "/health", None, CHECK_TIMEOUT).await?) {
        Err(EngineFailure::Full(message)) => Err(EngineFailure::Failed(format!("/health: {message}"))),
        checked => checked.map(drop),
    }
}

/// Describes a server. Retries until the engine is healthy and `describe` succeeds.
///
/// # Errors
/// Fails if the server refuses the adapter's key.
pub(crate) async fn wait_until<T, F>(http: &EngineHttp, describe: impl Fn() -> F) -> Result<T, ConnectError>
where
    F: Future<Output = Result<T, EngineFailure>>,
{
    let (mut backoff, mut reported) = (Backoff::new(PAUSES.0, PAUSES.1), Instant::now());
    loop {
        let described = async {
            check_engine(http).await?;
            describe().await
        };
        let error = match described.await {
            Ok(described) => return Ok(described),
            Err(EngineFailure::Denied { status: 401 | 403, message }) => {
                let reason = format!("the engine does not accept this worker's key ({message}); check --engine-key-file");
                return Err(ConnectError::Denied(reason));
            }
            Err(error) => error_chain(&error),
        };
        starting::report(format!("waits for the engine at {}: {error}", http.url()));
        if backoff.is_new_error(&error) {
            tracing::info!(engine = http.url(), %error, "the engine is not ready yet; retrying");
        } else if reported.elapsed() >= REMINDER {
            tracing::warn!(engine = http.url(), %error, "the engine is still not ready: start it, or correct --engine-url");
            reported = Instant::now();
        }
        sleep(backoff.next_delay()).await;
    }
}

/// Reads again and again which LoRAs the server serves. Never returns.
async fn follow_loras(server: &impl EngineServer, loras: &Loras) {
    loop {
        sleep(LORAS_INTERVAL).await;
        match server.loras().await {
            Ok(now) => loras.set(now),
            Err(error) => tracing::debug!(error = %error_chain(&error), "the engine's LoRAs could not be read"),
        }
    }
}

async fn publish_load(shared: &AdapterState) {
    loop {
        tokio::select! {
            () = shared.engine_load.changed.notified() => {}
            () = shared.engine_load.progressed.notified().then(|()| sleep(PROGRESS_INTERVAL)) => {}
        }
        shared.publish();
        sleep(LOAD_INTERVAL).await;
    }
}

/// Checks the engine's health until the engine has ended. A slow answer alone does not show a hang, because the machine may be busy. The engine is
/// treated as hung if for `silence_max` no check is answered and no request makes progress.
async fn check_health(
    server: &impl EngineServer,
    instance: &Instance,
    silence_max: Duration,
    engine_load: &EngineLoad,
    hung: &watch::Sender<bool>,
) -> EngineEnded {
    let (mut failed, mut answered_at) = (0, Instant::now());
    let limit = CHECK_TIMEOUT.min(silence_max);
    loop {
        sleep(HEALTH_INTERVAL).await;
        let checked = timeout(limit, server.check_health()).await;
        match checked.unwrap_or(Err(EngineFailure::Connection(HttpError::Timeout(limit)))) {
            Ok(now) if now.is_some() && now != *instance => return EngineEnded::Restarted,
            Ok(_) => {
                (failed, answered_at) = (0, Instant::now());
                hung.send_replace(false);
            }
            Err(EngineFailure::Connection(HttpError::Timeout(_))) => {
                let alive_at = engine_load.progress_at().map_or(answered_at, |progress_at| progress_at.max(answered_at));
                if alive_at.elapsed() >= silence_max && !hung.send_replace(true) {
                    tracing::warn!(
                        silence_s = silence_max.as_secs(),
                        "the engine answers no health check and makes no progress; its requests are aborted"
                    );
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        ServerFailed, ServerSettings, engine_load::LoadShare, http::testing::serve, job, kv_events::KvEvents,
        llama_cpp::LlamaCppSettings, sglang::SglangSettings, vllm::VllmSettings,
    };
    use parking_lot::Mutex;
    use std::sync::atomic::{AtomicBool, Ordering};
    use tandem_kv::HashKey;

    /// A server that accepts connections, and answers only while the value is true.
    struct Silent(AtomicBool);

    #[tonic::async_trait]
    impl EngineServer for Silent {
        async fn check_health(&self) -> Result<Instance, EngineFailure> {
            if self.0.load(Ordering::Relaxed) { Ok(None) } else { std::future::pending().await }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn requests_are_reported_at_once_and_generated_tokens_together() {
        let shared = job::tests::shared();
        let mut batches = shared.watch().expect("the engine has not ended").batches;
        let requests = async {
            let work = LoadShare::new(&shared.engine_load, "a".to_owned(), 1, (1, 1));
            work.submitted();
            for _ in 0..100 {
                sleep(Duration::from_millis(10)).await;
                work.generated(1, Some(Instant::now()));
            }
            drop(work);
            sleep(LOAD_INTERVAL).await;
        };
        tokio::select! {
            () = publish_load(&shared) => {}
            () = requests => {}
        }
        let loads: Vec<_> = std::iter::from_fn(|| batches.try_recv().ok()).map(|batch| batch.load.in_use_blocks).collect();
        assert!(loads.starts_with(&[1]) && loads.ends_with(&[0]), "{loads:?}");
        assert!((10..14).contains(&loads.len()), "{loads:?}");
    }

    /// Returns the settings for a server at this URL of each kind.
    fn of_all_kinds(url: &str) -> [ServerSettings; 3] {
        let vllm = VllmSettings {
            url: url.to_owned(),
            key: None,
            ca: None,
            rank: None,
            events: KvEvents::None,
            block_size: None,
            hash_key: HashKey::NONE,
            running_max: 1,
            waiting_max: 1,
            nixl: false,
            kv_lease: Duration::from_secs(30),
            shared_store: None,
            silence_max: Duration::from_secs(60),
            server_failed: ServerFailed::default(),
            observed_at: None,
        };
        let llama_cpp = LlamaCppSettings {
            url: url.to_owned(),
            key: None,
            ca: None,
            block_size: 16,
            hash_key: HashKey::NONE,
            waiting_max: 1,
            prefix_caching: false,
            silence_max: Duration::from_secs(60),
        };
        let sglang = SglangSettings {
            url: url.to_owned(),
            key: None,
            ca: None,
            rank: None,
            events: KvEvents::None,
            block_size: None,
            hash_key: HashKey::NONE,
            running_max: 1,
            waiting_max: 1,
            shared_store: None,
            silence_max: Duration::from_secs(60),
            server_failed: ServerFailed::default(),
        };
        [ServerSettings::Vllm(vllm), ServerSettings::LlamaCpp(llama_cpp), ServerSettings::Sglang(sglang)]
    }

    #[tokio::test]
    async fn server_is_not_used_before_its_engine_is_healthy() {
        let paths = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&paths);
        let url = serve(move |path| {
            let mut seen = seen.lock();
            seen.push(path.to_owned());
            // The answers lack fields that a connection needs, so that the attempt ends.
            let body = r#"{"data":[{"id":"m"}],"version":"1"}"#.to_owned();
            (if *seen == ["/health"] { 503 } else { 200 }, body.len(), body)
        })
        .await;
        for settings in of_all_kinds(&url) {
            paths.lock().clear();
            settings.inspect().await.expect_err("the server reports no KV cache");
            assert_eq!(paths.lock()[..3], ["/health", "/health", "/v1/models"]);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn engine_is_treated_as_hung_if_it_is_silent_for_long_and_makes_no_progress() {
        let (server, engine_load) = (Silent(AtomicBool::new(true)), Arc::new(EngineLoad::default()));
        let (hung, is_hung) = watch::channel(false);
        let work = LoadShare::new(&engine_load, "a".to_owned(), 0, (1, 1));
        work.submitted();
        let story = async {
            let after = async |seconds| {
                sleep(Duration::from_secs(seconds)).await;
                *is_hung.borrow()
            };
            assert!(!after(60).await, "the engine answers");
            server.0.store(false, Ordering::Relaxed);
            assert!(!after(20).await, "the engine is silent for less than the limit");
            work.generated(1, Some(Instant::now()));
            assert!(!after(25).await, "the engine has generated a token within the limit");
            assert!(after(20).await, "the engine is silent and makes no progress");
            server.0.store(true, Ordering::Relaxed);
            assert!(!after(15).await, "the engine answers again");
        };
        tokio::select! {
            () = story => {}
            _ended = check_health(&server, &None, Duration::from_secs(30), &engine_load, &hung) => panic!("the engine has not ended"),
        }
    }
}
