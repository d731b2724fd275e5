//! Connects to a vLLM server, and applies its events and checks its health as long as it runs.

use super::{
    InvalidEndpoint, Subscription, SubscriptionSettings, Update,
    client::{Client, ClientSettings, EventSource, Model},
    metrics::{self, EngineConstants},
};
use crate::{
    Adapter,
    api::EngineFailure,
    http::{ClientError, HttpClient, HttpError},
    mirror::{Mirror, MirrorSettings, WrongBlockSize},
    shared::Shared,
    slots::{SlotLimits, Slots},
};
use std::{sync::Arc, time::Duration};
use tandem_engine::EngineInfo;
use tandem_kv::HashKey;
use tandem_node::{Backoff, retry::error_chain};
use tokio::{sync::watch, time::sleep};

/// The shortest and the longest pause between attempts to reach a server that is starting.
const PAUSES: (Duration, Duration) = (Duration::from_millis(200), Duration::from_secs(2));

/// Time between two checks of the engine's health.
const HEALTH_INTERVAL: Duration = Duration::from_secs(1);

/// The number of consecutive failed checks after which the engine counts as ended.
const FAILED_CHECKS_MAX: u32 = 3;

/// The shortest time between two reports of the load.
const LOAD_INTERVAL: Duration = Duration::from_millis(20);

/// Time limit for connecting the event socket, and for the arrival of each batch of a replay.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// If no events arrive for this long, the adapter checks whether events were lost.
const EVENTS_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// The most engine blocks that the mirror holds. The number is large because host memory may hold many times as many blocks as the device.
const MIRRORED_BLOCKS_MAX: usize = 1 << 22;

/// The settings of the connection to a vLLM server.
#[derive(Clone, Debug)]
pub struct VllmSettings {
    /// The server's address: `http://HOST:PORT`, or `https://`.
    pub url: String,
    /// The server's `--api-key`; `None` if it has none.
    pub key: Option<String>,
    /// Certificates (PEM) of authorities that may identify the server, in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
    /// The data-parallel rank that this worker uses; `None` if the server has one rank.
    pub rank: Option<u32>,
    /// Where the server publishes KV events.
    pub events: KvEvents,
    /// Tokens in a block of the cluster; `None` for the engine's block size.
    pub block_size: Option<u32>,
    /// The key with which the cluster's sequence hashes are computed.
    pub hash_key: HashKey,
    /// The most requests that the engine runs at a time (vLLM's `--max-num-seqs`).
    pub running_max: usize,
    /// The most requests that wait for a place in the engine.
    pub waiting_max: usize,
    /// Whether the engine has `--kv-transfer-config` with `NixlConnector`, so that it exchanges KV with other workers' engines.
    pub nixl: bool,
    /// vLLM's `kv_lease_duration`: the time for which a prompt's KV is held for another engine.
    pub kv_lease: Duration,
}

/// Where an engine publishes KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvents {
    /// At the addresses that the server reports. If the server reports no address, the cached blocks are assumed from the requests that
    /// were routed to it.
    Discover,
    /// The engine publishes KV events at these addresses.
    At {
        /// `tcp://HOST:PORT` or `ipc://PATH`.
        endpoint: String,
        /// The address for replays; `None`: the engine offers no replays.
        replay: Option<String>,
        /// The ZMQ topic under which the engine publishes its batches of KV events.
        topic: String,
    },
    /// The engine publishes no events. The cached blocks are assumed from the requests that were routed to the server.
    None,
}

/// Why a server cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConnectError {
    /// The server's address, key or certificate is invalid.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The server refuses the adapter's API key (401 or 403).
    #[error("{0}")]
    Denied(String),
    /// The server's metrics do not describe the KV cache of the adapter's data-parallel rank.
    #[error("the engine's /metrics has no cache_config_info of rank {rank}; use vLLM 0.30 or later, and a rank that it runs")]
    NoCacheConfig {
        /// The data-parallel rank that the metrics lack.
        rank: u32,
    },
    /// The server serves no model.
    #[error("the engine serves no model; start it with one")]
    NoModel,
    /// The engine's block size is not a multiple of the cluster's.
    #[error(transparent)]
    BlockSize(#[from] WrongBlockSize),
    /// An event address is invalid.
    #[error(transparent)]
    Endpoint(#[from] InvalidEndpoint),
}

/// Why the engine of an adapter counts as ended. A server that is started again is another instance.
#[derive(Debug, thiserror::Error)]
pub enum EngineEnded {
    /// The server does not answer.
    #[error("the engine no longer answers")]
    Gone,
    /// Another process answers at the server's address.
    #[error("the engine was restarted")]
    Restarted,
}

/// A server to which the adapter is connected.
pub struct Connected {
    /// The back end for a worker whose engine is this server.
    pub adapter: Adapter,
    /// The id of the model that the server serves.
    pub model: String,
    follower: Follower,
}

struct Follower {
    client: Arc<Client>,
    shared: Arc<Shared>,
    subscription: Option<Subscription>,
    started: f64,
    hung: watch::Sender<bool>,
}

/// The properties that a server reports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerDescription {
    /// The id of the model that the server serves.
    pub model: String,
    /// The name or path from which the server loaded the model; `None` if the server does not report it.
    pub root: Option<String>,
    /// The maximum length of a sequence, in tokens.
    pub context_length: u32,
    /// The data-parallel ranks, at least one, each with the number of tokens that fit into its KV memory.
    pub ranks: Vec<(u32, u64)>,
}

/// Waits until the server answers, and returns the properties that it reports.
///
/// # Errors
/// The settings are invalid, or the server cannot be used.
pub async fn inspect(settings: &VllmSettings) -> Result<ServerDescription, ConnectError> {
    let http = HttpClient::new(&settings.url, settings.key.as_deref(), settings.ca.as_deref())?;
    let client = Client::new(ClientSettings {
        http,
        rank: settings.rank,
        hash_key: settings.hash_key,
        handle_valid: settings.kv_lease / 2,
    });
    let (model, _, metrics) = describe(&client, &settings.url).await?;
    let mut ranks = metrics::ranks(&metrics);
    ranks.retain(|(rank, _)| settings.rank.is_none_or(|wanted| wanted == *rank));
    if ranks.is_empty() {
        return Err(ConnectError::NoCacheConfig { rank: settings.rank.unwrap_or(0) });
    }
    let context_length = model.max_model_len.unwrap_or(u32::MAX);
    Ok(ServerDescription { model: model.id, root: model.root, context_length, ranks })
}

/// Waits until the server answers, and connects to it.
///
/// # Errors
/// The settings are invalid, or the server cannot be used.
pub async fn connect(settings: VllmSettings) -> Result<Connected, ConnectError> {
    let url = &settings.url;
    let http = HttpClient::new(url, settings.key.as_deref(), settings.ca.as_deref())?;
    let host = http.host().to_owned();
    let client = Client::new(ClientSettings {
        http,
        rank: settings.rank,
        hash_key: settings.hash_key,
        handle_valid: settings.kv_lease / 2,
    });
    let rank = settings.rank.unwrap_or(0);
    let (model, version, metrics) = describe(&client, url).await?;
    let constants = EngineConstants::parse(&metrics, rank).ok_or(ConnectError::NoCacheConfig { rank })?;
    let context_length = model.max_model_len.unwrap_or(u32::MAX);
    let client = Arc::new(client.with_context_length(context_length));
    let block_size = settings.block_size.unwrap_or(constants.block_size);
    // vLLM never stores KV in its first block.
    let capacity_blocks = constants.blocks.saturating_sub(1).saturating_mul(constants.block_size / block_size.max(1));
    let source = match &settings.events {
        _ if !constants.prefix_caching => None,
        KvEvents::None => None,
        KvEvents::At { endpoint, replay, topic } => Some((endpoint.clone(), replay.clone(), topic.clone())),
        KvEvents::Discover => client.event_source(rank).await.map(|source| reachable(source, &host)),
    };
    let subscription = match &source {
        None => None,
        Some((endpoint, replay, topic)) => Some(Subscription::start(SubscriptionSettings {
            endpoint: endpoint.clone(),
            replay_endpoint: replay.clone(),
            topic: topic.clone(),
            data_parallel_rank: rank,
            timeout: EVENTS_TIMEOUT,
            check_interval: EVENTS_CHECK_INTERVAL,
        })?),
    };
    let approximate = subscription.is_none() && constants.prefix_caching;
    let mirror = Mirror::new(MirrorSettings {
        hash_key: settings.hash_key,
        block_size,
        engine_block_size: constants.block_size,
        device_blocks: capacity_blocks,
        hits_are_reported: true,
        engine_blocks_max: MIRRORED_BLOCKS_MAX,
    })?;
    let info = EngineInfo { vocab_size: usize::MAX, context_length, block_size, capacity_blocks, block_bytes: 0 };
    let limits = SlotLimits { running: settings.running_max, blocks: capacity_blocks.into(), waiting: settings.waiting_max };
    let shared = Arc::new(Shared::new(info, Slots::new(limits), mirror, approximate));
    let family = settings.nixl.then(|| {
        let EngineConstants { block_size, cache_dtype, .. } = &constants;
        format!("nixl/vllm-{version}/{cache_dtype}/{block_size}").into()
    });
    tracing::info!(
        engine = %url,
        version,
        model = model.id,
        engine_blocks = constants.blocks,
        engine_block_size = constants.block_size,
        block_size,
        kv_events = source.as_ref().map_or("none", |(endpoint, ..)| endpoint),
        family = family.as_deref().unwrap_or("none"),
        "connected to a vLLM engine"
    );
    if approximate {
        tracing::warn!(
            engine = %url,
            "the engine publishes no KV events, so its cache is assumed from what was routed to it; start vLLM with --kv-events-config \
             '{{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}}'"
        );
    }
    let (hung, is_hung) = watch::channel(false);
    let adapter = Adapter { shared: Arc::clone(&shared), api: client.clone(), family, hung: is_hung };
    let follower = Follower { client, shared, subscription, started: constants.started, hung };
    Ok(Connected { adapter, model: model.id, follower })
}

impl Connected {
    /// Returns the back end, and the future that applies the server's KV events and checks its health until the engine has ended.
    pub fn into_parts(self) -> (Adapter, impl Future<Output = EngineEnded> + Send) {
        (self.adapter, self.follower.run())
    }
}

/// Waits until the server answers; returns its model, its version and its metrics.
async fn describe(client: &Client, url: &str) -> Result<(Model, String, String), ConnectError> {
    let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
    loop {
        let described =
            async { Ok::<_, EngineFailure>((client.models().await?, client.version().await?, client.metrics().await?)) };
        let error = match described.await {
            Ok((models, version, metrics)) => {
                let model = models.into_iter().next().ok_or(ConnectError::NoModel)?;
                return Ok((model, version, metrics));
            }
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

/// Returns the source's addresses and topic. In an address that stands for all interfaces, such as `tcp://*:5557`, the host is replaced by
/// the server's host.
fn reachable(source: EventSource, host: &str) -> (String, Option<String>, String) {
    let at = |endpoint: String| {
        ["tcp://*:", "tcp://0.0.0.0:", "tcp://[::]:"]
            .iter()
            .find_map(|all| Some(format!("tcp://{host}:{}", endpoint.strip_prefix(all)?)))
            .unwrap_or(endpoint)
    };
    (at(source.endpoint), source.replay_endpoint.map(at), source.topic)
}

impl Follower {
    /// Applies KV events, publishes the load and checks the health until the engine has ended.
    async fn run(self) -> EngineEnded {
        let Self { client, shared, subscription, started, hung } = self;
        let ended = tokio::select! {
            ended = follow_events(&shared, subscription) => ended,
            ended = check_health(&client, started, &hung) => ended,
            () = publish_load(&shared) => EngineEnded::Gone,
        };
        shared.end();
        ended
    }
}

async fn follow_events(shared: &Shared, subscription: Option<Subscription>) -> EngineEnded {
    let Some(mut subscription) = subscription else { return std::future::pending().await };
    let mut ignored = 0;
    loop {
        match subscription.next().await {
            Update::Batch(events) => shared.update(|mirror| {
                mirror.apply(&events);
                let kinds = mirror.ignored_kinds();
                if kinds.len() > ignored {
                    ignored = kinds.len();
                    tracing::warn!(?kinds, "the engine has layers without full attention; their cached blocks are ignored");
                }
            }),
            Update::Lost(reason) => {
                tracing::warn!(%reason, "KV events of the engine were lost; its cache counts as empty until it reports blocks again");
                shared.update(Mirror::clear);
            }
            Update::Restarted => return EngineEnded::Restarted,
        }
    }
}

async fn publish_load(shared: &Shared) {
    loop {
        shared.books.changed.notified().await;
        shared.publish();
        sleep(LOAD_INTERVAL).await;
    }
}

async fn check_health(client: &Client, started: f64, hung: &watch::Sender<bool>) -> EngineEnded {
    let mut failed = 0;
    loop {
        sleep(HEALTH_INTERVAL).await;
        let checked = async {
            client.check_health().await?;
            client.metrics().await
        };
        match checked.await {
            Ok(text) => {
                if metrics::started(&text).is_some_and(|now| now != started) {
                    return EngineEnded::Restarted;
                }
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
