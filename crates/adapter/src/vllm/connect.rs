//! Connects to a vLLM server, and applies its events and checks its health as long as it runs.

use super::{
    client::{ClientSettings, VllmClient},
    metrics::{self, EngineConstants, RankReport},
};
use crate::{
    adapter::EngineExchange,
    http::EngineHttp,
    kv_events::{self, KvEvents, MIRRORED_BLOCKS_MAX, SharedStore},
    mirror::{Mirror, MirrorSettings},
    served::{self, Loras, ServedModels},
    server::{self, ConnectError, Connected, ConnectedEngine, ModelDescription, ServerDescription},
    server_failed::ServerFailed,
    shared::AdapterState,
    slots::{SlotLimits, Slots},
};
use futures::FutureExt;
use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};
use tandem_engine::EngineInfo;
use tandem_kv::HashKey;
use tandem_process::Secret;
use tokio::time::{sleep, timeout};

/// The time within which the engine must have rendered an image. The first one may take long, because vLLM then loads the model's processor.
const RENDER_WAIT: Duration = Duration::from_secs(60);

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
    /// Whether the server has failed. The settings of all its ranks share this value.
    pub server_failed: ServerFailed,
    /// The address at which a gateway's requests reach the server. The adapter then only observes the server. `None`: it sends requests to it.
    pub observed_at: Option<SocketAddr>,
}

/// The time between two readings of an observed engine's load. A reading costs a server milliseconds, and routers count placed requests
/// without it.
const OBSERVE_INTERVAL: Duration = Duration::from_millis(250);

impl VllmSettings {
    /// Returns the settings for one of several ranks.
    pub(crate) fn with_rank(self, rank: u32) -> Self {
        Self { rank: Some(rank), events: self.events.of_rank(rank), ..self }
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
    let (served, _, metrics) = describe(&client, settings).await?;
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
    let (served, version, metrics) = describe(&client, &settings).await?;
    let constants = EngineConstants::parse(&metrics, rank).ok_or(ConnectError::NoCacheConfig { rank })?;
    let (model, loras) = (model_description(&served), Arc::new(Loras::new(&served.id, served.loras)));
    let client = Arc::new(client.serving(model.context_length, Arc::clone(&loras), &constants));
    let accepts_images = match timeout(RENDER_WAIT, server::wait_until(client.http(), || client.reads_images())).await {
        Ok(reads) => reads?,
        Err(_) => {
            tracing::warn!(engine = %url, "the engine has not rendered an image within {RENDER_WAIT:?}, so the worker accepts no images");
            false
        }
    };
    let is_observed = settings.observed_at.is_some();
    if is_observed && RankReport::parse(&metrics, rank).is_none() {
        return Err(ConnectError::NoLoad);
    }
    let block_size = settings.block_size.unwrap_or(constants.block_size);
    let capacity_blocks = u32::try_from(constants.capacity_tokens() / u64::from(block_size.max(1))).unwrap_or(u32::MAX);
    let subscription = match constants.prefix_caching {
        true => kv_events::subscribe(&settings.events, client.event_source(rank), rank, &host).await?,
        false => None,
    };
    let (endpoint, subscription) = subscription.unzip();
    let approximate = subscription.is_none() && constants.prefix_caching;
    if is_observed && approximate {
        return Err(ConnectError::NoEvents);
    }
    let mirror = Mirror::new(MirrorSettings {
        hash_key: settings.hash_key,
        block_size,
        engine_block_size: constants.block_size,
        device_blocks: capacity_blocks,
        // An engine reports hits only if a request asks for it, and an observed engine gets no requests from the adapter.
        hits_are_reported: !is_observed && !constants.has_groups(),
        store: settings.shared_store.as_ref().map(|store| store.tier),
        engine_blocks_max: MIRRORED_BLOCKS_MAX,
    })?;
    let info =
        EngineInfo { vocab_size: usize::MAX, context_length: model.context_length, block_size, capacity_blocks, block_bytes: 0 };
    let limits = SlotLimits { running: settings.running_max, blocks: capacity_blocks.into(), waiting: settings.waiting_max };
    let shared_store = settings.shared_store.map(|store| store.name).unwrap_or_default();
    let mut shared = AdapterState::new(info, Slots::new(limits), mirror, approximate);
    shared.shared_store = shared_store;
    shared.server_failed = settings.server_failed;
    shared.engine_endpoint = settings.observed_at.map(|address| address.to_string()).unwrap_or_default();
    let shared = Arc::new(shared);
    let family = settings.nixl.then(|| {
        let EngineConstants { block_size, cache_dtype, .. } = &constants;
        Arc::<str>::from(format!("nixl/vllm-{version}/{cache_dtype}/{block_size}"))
    });
    tracing::info!(
        engine = %url,
        version,
        model = model.id,
        engine_blocks = constants.blocks,
        engine_block_size = constants.block_size,
        block_size,
        kv_events = endpoint.as_deref().unwrap_or("none"),
        family = family.as_deref().unwrap_or("none"),
        accepts_images,
        "connected to a vLLM engine"
    );
    if approximate {
        tracing::warn!(
            engine = %url,
            "the engine publishes no KV events, so its cache is assumed from the prompts routed to it; start vLLM with --kv-events-config \
             '{{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}}'"
        );
    }
    let (following, silence_max) = (kv_events::follow(Arc::clone(&shared), subscription), settings.silence_max);
    let events = match is_observed {
        true => {
            let observing = observe(Arc::clone(&client), Arc::clone(&shared), rank, constants.capacity_tokens());
            async move {
                tokio::select! { ended = following => ended, never = observing => match never {} }
            }
            .boxed()
        }
        false => following.boxed(),
    };
    let instance = Some(constants.started.to_string());
    let exchange = family.map_or(EngineExchange::None, EngineExchange::Handles);
    let mut connected = Connected::new(client, ConnectedEngine { shared, exchange, instance, silence_max, events }, model, loras);
    connected.adapter.accepts_images = accepts_images;
    Ok(connected)
}

/// Follows the load that the engine reports. A reading that fails is followed by another one; the health checks notice an engine that has ended.
async fn observe(client: Arc<VllmClient>, shared: Arc<AdapterState>, rank: u32, capacity_tokens: u64) -> Infallible {
    let mut before = None;
    loop {
        if let Ok(page) = client.metrics().await
            && let Some(now) = RankReport::parse(&page, rank)
        {
            shared.engine_load.observed(&now.load(before.as_ref().unwrap_or(&now), capacity_tokens));
            before = Some(now);
        }
        sleep(OBSERVE_INTERVAL).await;
    }
}

fn model_description(served: &ServedModels) -> ModelDescription {
    ModelDescription { id: served.id.clone(), root: served.root.clone(), context_length: served.context_length }
}

/// Waits until the server answers, and returns its models, its version and its metrics.
async fn describe(client: &VllmClient, settings: &VllmSettings) -> Result<(ServedModels, String, String), ConnectError> {
    let described = || async { Ok((served::models(client.http()).await?, client.version().await?, client.metrics().await?)) };
    let (served, version, metrics) = server::wait_until(client.http(), described).await?;
    if settings.observed_at.is_some() && metrics::ranks(&metrics).len() > 1 {
        return Err(ConnectError::ObservedRanks);
    }
    Ok((served.ok_or(ConnectError::NoModel)?, version, metrics))
}
