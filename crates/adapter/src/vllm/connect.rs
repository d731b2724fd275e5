//! Connects to a vLLM server, and applies its events and checks its health as long as it runs.

use super::{
    InvalidEndpoint, MirrorUpdate, Subscription, SubscriptionSettings,
    client::{ClientSettings, EventSource, ServedModels, VllmClient},
    events::tier_of_medium,
    metrics::{self, EngineConstants},
};
use crate::{
    http::EngineHttp,
    mirror::{Mirror, MirrorSettings},
    server::{self, ConnectError, Connected, ConnectedEngine, EngineEnded, ModelDescription, ServerDescription},
    shared::AdapterState,
    slots::{SlotLimits, Slots},
};
use futures::FutureExt;
use std::{str::FromStr, sync::Arc, time::Duration};
use tandem_engine::EngineInfo;
use tandem_kv::{HashKey, Tier};
use tandem_process::Secret;

/// Time limit for connecting the event socket, and for the arrival of each batch of a replay.
const EVENTS_TIMEOUT: Duration = Duration::from_secs(5);

/// If no events arrive for this long, the adapter checks whether events were lost.
const EVENTS_CHECK_INTERVAL: Duration = Duration::from_secs(10);

/// Maximum number of engine blocks in the mirror. The number is large because host memory may hold many times as many blocks as the device.
const MIRRORED_BLOCKS_MAX: usize = 1 << 22;

/// The settings of the connection to a vLLM server.
#[derive(Clone, Debug)]
pub struct VllmSettings {
    /// The server's address: `http://HOST:PORT`, or `https://`.
    pub url: String,
    /// The key that the server requires (its `--api-key`); `None` if it requires none.
    pub key: Option<Secret>,
    /// Certificates (PEM) of authorities that may identify the server, in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
    /// The data-parallel rank that this worker uses; `None` if the server has one rank.
    pub rank: Option<u32>,
    /// The source of the server's KV events.
    pub events: KvEvents,
    /// The number of tokens in a block of the cluster; `None` for the engine's block size.
    pub block_size: Option<u32>,
    /// The key with which the cluster's sequence hashes are computed.
    pub hash_key: HashKey,
    /// Maximum number of requests that the engine runs at the same time (vLLM's `--max-num-seqs`).
    pub running_max: usize,
    /// The maximum number of requests that may wait for a slot in the engine.
    pub waiting_max: usize,
    /// Whether the engine has `--kv-transfer-config` with `NixlConnector`, so that it exchanges KV with other workers' engines.
    pub nixl: bool,
    /// vLLM's `kv_lease_duration`: the time for which a prompt's KV is held for another engine.
    pub kv_lease: Duration,
    /// The store that other servers share with this one; `None`: there is none.
    pub shared_store: Option<SharedStore>,
    /// After this time without an answer to a health check and without progress, the engine is treated as hung.
    pub silence_max: Duration,
}

/// A store outside of the server's host, from which several servers load each other's blocks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedStore {
    /// The tier that the server's events name for blocks in the store.
    tier: Tier,
    /// The store's name, equal for all servers that use it.
    name: String,
}

impl FromStr for SharedStore {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (medium, name) = text.split_once('=').filter(|(_, name)| !name.is_empty()).ok_or("write MEDIUM=NAME")?;
        match tier_of_medium(medium) {
            None | Some(Tier::Device) => Err(format!("{medium:?} is no medium of a store; use CPU, DISK, STORAGE or EXTERNAL")),
            Some(tier) => Ok(Self { tier, name: name.to_owned() }),
        }
    }
}

impl VllmSettings {
    /// Returns the settings for one of several ranks. Addresses of KV events are those of rank 0: vLLM adds the rank to their ports.
    pub(crate) fn with_rank(self, rank: u32) -> Self {
        let of_rank = |endpoint: String| {
            let moved = endpoint.rsplit_once(':').and_then(|(host, port)| Some((host, port.parse::<u16>().ok()?)));
            moved.map_or(endpoint.clone(), |(host, port)| format!("{host}:{}", u32::from(port) + rank))
        };
        let events = match self.events {
            KvEvents::At { endpoint, replay, topic } => {
                KvEvents::At { endpoint: of_rank(endpoint), replay: replay.map(of_rank), topic }
            }
            other => other,
        };
        Self { rank: Some(rank), events, ..self }
    }
}

/// The addresses at which an engine publishes KV events.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KvEvents {
    /// The server reports the addresses. If it reports none, the cached blocks are assumed from the requests that were routed to it.
    Discover,
    /// The engine publishes KV events at the addresses in the settings.
    At {
        /// The address of the events: `tcp://HOST:PORT` or `ipc://PATH`.
        endpoint: String,
        /// The address for replays; `None` if the engine offers no replays.
        replay: Option<String>,
        /// The ZMQ topic under which the engine publishes its batches of KV events.
        topic: String,
    },
    /// The engine publishes no events. The cached blocks are assumed from the requests that were routed to the server.
    None,
}

impl From<InvalidEndpoint> for ConnectError {
    fn from(error: InvalidEndpoint) -> Self {
        Self::Endpoint(error.to_string())
    }
}

/// Waits until the server answers, and returns the server's description.
///
/// # Errors
/// Fails if the settings are invalid, or if the server cannot be used.
pub async fn inspect(settings: &VllmSettings) -> Result<ServerDescription, ConnectError> {
    let http = EngineHttp::new(&settings.url, settings.key.clone(), settings.ca.as_deref())?;
    let client = VllmClient::new(ClientSettings {
        http,
        rank: settings.rank,
        hash_key: settings.hash_key,
        handle_valid: settings.kv_lease / 2,
    });
    let (served, _, metrics) = describe(&client).await?;
    let mut ranks = metrics::ranks(&metrics);
    ranks.retain(|(rank, _)| settings.rank.is_none_or(|wanted| wanted == *rank));
    if ranks.is_empty() {
        return Err(ConnectError::NoCacheConfig { rank: settings.rank.unwrap_or(0) });
    }
    Ok(ServerDescription { model: model_description(&served), loras: served.loras, ranks })
}

/// Waits until the server answers, and connects to it.
///
/// # Errors
/// Fails if the settings are invalid, or if the server cannot be used.
pub async fn connect(settings: VllmSettings) -> Result<Connected, ConnectError> {
    let url = &settings.url;
    let http = EngineHttp::new(url, settings.key.clone(), settings.ca.as_deref())?;
    let host = http.host().to_owned();
    let client = VllmClient::new(ClientSettings {
        http,
        rank: settings.rank,
        hash_key: settings.hash_key,
        handle_valid: settings.kv_lease / 2,
    });
    let rank = settings.rank.unwrap_or(0);
    let (served, version, metrics) = describe(&client).await?;
    let constants = EngineConstants::parse(&metrics, rank).ok_or(ConnectError::NoCacheConfig { rank })?;
    let (model, loras) = (model_description(&served), served.loras.clone());
    let client = Arc::new(client.serving(served, &constants));
    let block_size = settings.block_size.unwrap_or(constants.block_size);
    let capacity_blocks = u32::try_from(constants.capacity_tokens() / u64::from(block_size.max(1))).unwrap_or(u32::MAX);
    let subscription = match constants.prefix_caching {
        true => subscribe(&settings.events, &client, rank, &host).await?,
        false => None,
    };
    let (endpoint, subscription) = subscription.unzip();
    let approximate = subscription.is_none() && constants.prefix_caching;
    let mirror = Mirror::new(MirrorSettings {
        hash_key: settings.hash_key,
        block_size,
        engine_block_size: constants.block_size,
        device_blocks: capacity_blocks,
        hits_are_reported: !constants.has_groups(),
        store: settings.shared_store.as_ref().map(|store| store.tier),
        engine_blocks_max: MIRRORED_BLOCKS_MAX,
    })?;
    let info =
        EngineInfo { vocab_size: usize::MAX, context_length: model.context_length, block_size, capacity_blocks, block_bytes: 0 };
    let limits = SlotLimits { running: settings.running_max, blocks: capacity_blocks.into(), waiting: settings.waiting_max };
    let shared_store = settings.shared_store.map(|store| store.name).unwrap_or_default();
    let mut shared = AdapterState::new(info, Slots::new(limits), mirror, approximate);
    shared.shared_store = shared_store;
    let shared = Arc::new(shared);
    let family = settings.nixl.then(|| {
        let EngineConstants { block_size, cache_dtype, .. } = &constants;
        format!("nixl/vllm-{version}/{cache_dtype}/{block_size}").into()
    });
    tracing::info!(
        engine = %url,
        version,
        model = model.id,
        ?loras,
        engine_blocks = constants.blocks,
        engine_block_size = constants.block_size,
        block_size,
        kv_events = endpoint.as_deref().unwrap_or("none"),
        family = family.as_deref().unwrap_or("none"),
        "connected to a vLLM engine"
    );
    if approximate {
        tracing::warn!(
            engine = %url,
            "the engine publishes no KV events, so its cache is assumed from the prompts routed to it; start vLLM with --kv-events-config \
             '{{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}}'"
        );
    }
    let (events, silence_max) = (follow_events(Arc::clone(&shared), subscription).boxed(), settings.silence_max);
    let instance = Some(constants.started.to_string());
    Ok(Connected::new(client, ConnectedEngine { shared, family, instance, silence_max, events }, model, loras))
}

/// Subscribes to the engine's KV events. Returns the endpoint and the subscription; `None` if the engine publishes no events.
async fn subscribe(
    events: &KvEvents,
    client: &VllmClient,
    rank: u32,
    host: &str,
) -> Result<Option<(String, Subscription)>, ConnectError> {
    let source = match events {
        KvEvents::None => None,
        KvEvents::At { endpoint, replay, topic } => Some((endpoint.clone(), replay.clone(), topic.clone())),
        KvEvents::Discover => client.event_source(rank).await.map(|source| reachable(source, host)).transpose()?,
    };
    let Some((endpoint, replay_endpoint, topic)) = source else { return Ok(None) };
    let subscription = Subscription::start(SubscriptionSettings {
        endpoint: endpoint.clone(),
        replay_endpoint,
        topic,
        data_parallel_rank: rank,
        timeout: EVENTS_TIMEOUT,
        check_interval: EVENTS_CHECK_INTERVAL,
    })?;
    Ok(Some((endpoint, subscription)))
}

fn model_description(served: &ServedModels) -> ModelDescription {
    ModelDescription { id: served.id.clone(), root: served.root.clone(), context_length: served.context_length }
}

async fn describe(client: &VllmClient) -> Result<(ServedModels, String, String), ConnectError> {
    let described = || async { Ok((client.models().await?, client.version().await?, client.metrics().await?)) };
    let (served, version, metrics) = server::wait_until(client.http(), described).await?;
    Ok((served.ok_or(ConnectError::NoModel)?, version, metrics))
}

/// Returns the source's addresses and topic. The engine's host replaces wildcard addresses, such as `*`, and loopback addresses.
///
/// # Errors
/// Fails if an address is on another host. So an engine cannot make the worker connect to other servers.
fn reachable(source: EventSource, host: &str) -> Result<(String, Option<String>, String), ConnectError> {
    const LOOPBACK: [&str; 3] = ["127.0.0.1", "[::1]", "localhost"];
    const ALL: [&str; 3] = ["*", "0.0.0.0", "[::]"];
    let at = |endpoint: String| {
        let address = endpoint.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':'));
        match address {
            Some((of, port)) if of.eq_ignore_ascii_case(host) || LOOPBACK.contains(&of) || ALL.contains(&of) => {
                Ok(format!("tcp://{host}:{port}"))
            }
            None if endpoint.starts_with("ipc://") && LOOPBACK.contains(&host) => Ok(endpoint),
            _ => Err(ConnectError::Endpoint(format!(
                "the engine at {host} reports {endpoint:?} as an address of its KV events, which is not on that host; if the address is right, set \
                 --engine-events to it, otherwise change vLLM's --kv-events-config"
            ))),
        }
    };
    Ok((at(source.endpoint)?, source.replay_endpoint.map(at).transpose()?, source.topic))
}

async fn follow_events(shared: Arc<AdapterState>, subscription: Option<Subscription>) -> EngineEnded {
    let Some(mut subscription) = subscription else { return std::future::pending().await };
    let mut ignored = 0;
    loop {
        match subscription.next().await {
            Some(MirrorUpdate::Batch(events)) => shared.update(|mirror| {
                mirror.apply(&events);
                let kinds = mirror.ignored_kinds();
                if kinds.len() > ignored {
                    ignored = kinds.len();
                    tracing::warn!(?kinds, "the engine has layers whose rule for reuse is unknown; their cached blocks are ignored, so more cached tokens may be predicted than the engine finds");
                }
            }),
            Some(MirrorUpdate::Lost(reason)) => {
                tracing::warn!(%reason, "KV events of the engine were lost; its cache counts as empty until it reports blocks again");
                shared.update(Mirror::clear);
            }
            Some(MirrorUpdate::Restarted) => return EngineEnded::Restarted,
            None => {
                tracing::error!("the task that receives KV events has failed; the worker connects to its engine again");
                return EngineEnded::Gone;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_are_read_only_from_the_engines_host() {
        let from = |host: &str, endpoint: &str, replay: &str| {
            let source = json!({ "endpoint": endpoint, "replay_endpoint": replay, "topic": "kv" });
            reachable(serde_json::from_value(source).expect("the source is complete"), host)
        };
        for (host, endpoint, at) in [
            ("gpu-1", "tcp://*:5557", "tcp://gpu-1:5557"),
            ("gpu-1", "tcp://[::]:5557", "tcp://gpu-1:5557"),
            ("gpu-1", "tcp://127.0.0.1:5557", "tcp://gpu-1:5557"),
            ("gpu-1", "tcp://GPU-1:5557", "tcp://gpu-1:5557"),
            ("[::1]", "tcp://0.0.0.0:5557", "tcp://[::1]:5557"),
            ("127.0.0.1", "ipc:///run/events", "ipc:///run/events"),
        ] {
            let (endpoint, replay, topic) = from(host, endpoint, endpoint).expect(endpoint);
            assert_eq!((&*endpoint, replay.as_deref(), &*topic), (at, Some(at), "kv"));
        }
        for (host, foreign) in [
            ("gpu-1", "tcp://gpu-2:5557"),
            ("127.0.0.1", "tcp://169.254.169.254:80"),
            ("gpu-1", "tcp://gpu-1@gpu-2:5557"),
            ("gpu-1", "ipc:///run/events"),
            ("gpu-1", "inproc://events"),
        ] {
            for (endpoint, replay) in [(foreign, "tcp://*:1"), ("tcp://*:1", foreign)] {
                let error = from(host, endpoint, replay).expect_err(foreign).to_string();
                assert!(error.contains(foreign) && error.contains("--engine-events"), "{error}");
            }
        }
    }

    #[test]
    fn rank_is_added_to_the_ports_of_kv_events() {
        let at = |endpoint: &str, replay: &str| KvEvents::At {
            endpoint: endpoint.to_owned(),
            replay: Some(replay.to_owned()),
            topic: "kv".to_owned(),
        };
        let settings = VllmSettings {
            url: "http://engine:8000".to_owned(),
            key: None,
            ca: None,
            rank: None,
            events: at("tcp://engine:5557", "tcp://[::1]:5657"),
            block_size: None,
            hash_key: HashKey::NONE,
            running_max: 1,
            waiting_max: 1,
            nixl: false,
            kv_lease: Duration::from_secs(30),
            shared_store: None,
            silence_max: Duration::from_secs(60),
        };
        let of_rank = settings.clone().with_rank(3);
        assert_eq!((of_rank.rank, of_rank.events), (Some(3), at("tcp://engine:5560", "tcp://[::1]:5660")));
        assert_eq!(settings.with_rank(0).events, at("tcp://engine:5557", "tcp://[::1]:5657"));
    }
}
