//! Connects to a SGLang server, and applies its events and checks its health as long as it runs.

use super::{
    client::SglangClient,
    info::{self, KvSizes, ServerInfo},
    request::SglangOptions,
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
use std::{
    hash::{BuildHasher, RandomState},
    sync::Arc,
    time::Duration,
};
use tandem_engine::EngineInfo;
use tandem_kv::HashKey;
use tandem_process::Secret;

/// The settings of the connection to a SGLang server.
#[derive(Clone, Debug)]
pub struct SglangSettings {
    /// The server's address: `http://HOST:PORT`, or `https://`.
    pub url: String,
    /// The key that the server requires (its `--api-key`); `None` if it requires none.
    pub key: Option<Secret>,
    /// PEM certificates of authorities that may identify the server, in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
    /// The data-parallel rank that this worker uses; `None` if the server has one rank.
    pub rank: Option<u32>,
    /// The source of the server's KV events.
    pub events: KvEvents,
    /// The number of tokens in a block of the cluster; `None` for the engine's block size.
    pub block_size: Option<u32>,
    /// The key with which the cluster's sequence hashes are computed.
    pub hash_key: HashKey,
    /// Maximum number of requests that the engine runs at the same time. If the server reports a smaller number, that one applies.
    pub running_max: usize,
    /// The maximum number of requests that may wait for a slot in the engine.
    pub waiting_max: usize,
    /// The store that other servers share with this one; `None`: there is none.
    pub shared_store: Option<SharedStore>,
    /// After this time without an answer to a health check and without progress, the engine is treated as hung.
    pub silence_max: Duration,
    /// Whether the server has failed. The settings of all its ranks share this value.
    pub server_failed: ServerFailed,
}

impl SglangSettings {
    /// Returns the settings for one of several ranks.
    pub(crate) fn with_rank(self, rank: u32) -> Self {
        Self { rank: Some(rank), events: self.events.of_rank(rank), ..self }
    }
}

struct DescribedSglang {
    served: ServedModels,
    info: ServerInfo,
    sizes: KvSizes,
    vocab_size: Option<usize>,
}

impl DescribedSglang {
    fn model(&self) -> ModelDescription {
        let ServedModels { id, context_length, .. } = &self.served;
        // The server refuses prompts of this length, although the context would have room for an answer.
        let context_length = self.info.max_req_input_len.map_or(*context_length, |prompt_max| prompt_max.min(*context_length));
        ModelDescription { id: id.clone(), root: self.info.root(), context_length }
    }

    /// Logs the server, and what its operator can improve. `kv_events` is the endpoint of its KV events.
    fn log(&self, url: &str, host: &str, exchange: &EngineExchange, kv_events: Option<&str>) {
        let Self { served, info, sizes, vocab_size } = self;
        tracing::info!(
            engine = url,
            version = info.version.as_deref().unwrap_or("unknown"),
            model = served.id,
            block_size = sizes.block,
            capacity_tokens = sizes.capacity,
            kv_events = kv_events.unwrap_or("none"),
            "connected to a SGLang engine"
        );
        if vocab_size.is_none() {
            tracing::warn!(
                engine = url,
                "the engine does not report the size of its vocabulary; a prompt with a token beyond it would end the server"
            );
        }
        if kv_events.is_none() && !info.disable_radix_cache {
            tracing::warn!(
                engine = url,
                "the engine publishes no KV events, so its cache is assumed from the prompts routed to it; start SGLang with \
                 --kv-events-config '{{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}}'"
            );
        }
        let is_loopback = ["127.", "localhost", "[::1]"].iter().any(|start| host.starts_with(start));
        if is_loopback && matches!(exchange, EngineExchange::Rooms { address: Some(_), .. }) {
            tracing::warn!(
                engine = url,
                "only decode servers of this host can reach the prefill server at its loopback address; if there are others, name the \
                 server by the address at which they see it"
            );
        }
        if !info.incremental_streaming_output {
            tracing::warn!(
                engine = url,
                "the engine repeats all tokens of an answer with each new token; start SGLang with --incremental-streaming-output"
            );
        }
    }
}

/// Waits until the server answers, and returns the server's description.
///
/// # Errors
/// Fails if the settings are invalid, or if the server cannot be used.
pub async fn inspect(settings: &SglangSettings) -> Result<ServerDescription, ConnectError> {
    let described = describe(&http(settings)?, settings.rank).await?;
    let ranks = match settings.rank {
        Some(rank) => vec![rank],
        None => (0..described.info.ranks()).collect(),
    };
    let ranks = ranks.into_iter().map(|rank| (rank, described.sizes.capacity)).collect();
    Ok(ServerDescription { model: described.model(), loras: described.served.loras, ranks })
}

/// Waits until the server answers, and connects to it.
///
/// # Errors
/// Fails if the settings are invalid, or if the server cannot be used.
pub async fn connect(settings: SglangSettings) -> Result<Connected, ConnectError> {
    let http = http(&settings)?;
    let described = describe(&http, settings.rank).await?;
    let model = described.model();
    let exchange = described.info.exchange(&model.id, http.host())?;
    let (info, sizes) = (&described.info, described.sizes);
    let SglangSettings { url, rank, hash_key, waiting_max, silence_max, .. } = settings;
    let of_rank = rank.unwrap_or(0);
    let block_size = settings.block_size.unwrap_or(sizes.block);
    let capacity_blocks = u32::try_from(sizes.capacity / u64::from(block_size.max(1))).unwrap_or(u32::MAX);
    let mirror = Mirror::new(MirrorSettings {
        hash_key,
        block_size,
        engine_block_size: sizes.block,
        device_blocks: capacity_blocks,
        hits_are_reported: false,
        store: settings.shared_store.as_ref().map(|store| store.tier),
        engine_blocks_max: MIRRORED_BLOCKS_MAX,
    })?;
    let subscription = match info.disable_radix_cache {
        true => None,
        false => {
            let discovered = std::future::ready(info.event_source(of_rank));
            kv_events::subscribe(&settings.events, discovered, of_rank, http.host()).await?
        }
    };
    let (endpoint, subscription) = subscription.unzip();
    let approximate = subscription.is_none() && !info.disable_radix_cache;
    let context_length = model.context_length;
    let vocab_size = described.vocab_size.unwrap_or(usize::MAX);
    let engine = EngineInfo { vocab_size, context_length, block_size, capacity_blocks, block_bytes: 0 };
    let running = info.running_max(of_rank).map_or(settings.running_max, |of_server| of_server.min(settings.running_max).max(1));
    let limits = SlotLimits { running, blocks: capacity_blocks.into(), waiting: waiting_max };
    let mut shared = AdapterState::new(engine, Slots::new(limits), mirror, approximate);
    shared.shared_store = settings.shared_store.map(|store| store.name).unwrap_or_default();
    shared.server_failed = settings.server_failed;
    let shared = Arc::new(shared);
    described.log(&url, http.host(), &exchange, endpoint.as_deref());
    let (uses_seeds, finds_reasoning) = (info.enable_deterministic_inference, info.reasoning_parser.is_some());
    let connection = RandomState::new().hash_one(&url);
    let loras = Arc::new(Loras::new(&described.served.id, described.served.loras));
    let body =
        SglangOptions { connection, rank, hash_key, loras: Arc::clone(&loras), context_length, uses_seeds, finds_reasoning };
    let events = kv_events::follow(Arc::clone(&shared), subscription).boxed();
    let engine = ConnectedEngine { shared, exchange, instance: info.instance(), silence_max, events };
    Ok(Connected::new(Arc::new(SglangClient::new(http, body)), engine, model, loras))
}

fn http(settings: &SglangSettings) -> Result<EngineHttp, ConnectError> {
    Ok(EngineHttp::new(&settings.url, settings.key.clone(), settings.ca.as_deref())?)
}

async fn describe(http: &EngineHttp, rank: Option<u32>) -> Result<DescribedSglang, ConnectError> {
    let describe = || async { Ok((served::models(http).await?, ServerInfo::read(http).await?, info::vocab_size(http).await?)) };
    let (served, info, vocab_size) = server::wait_until(http, describe).await?;
    let (sizes, ranks) = (info.kv_sizes()?, info.ranks());
    if let Some(rank) = rank.filter(|rank| *rank >= ranks) {
        return Err(ConnectError::NoRank { rank, ranks });
    }
    Ok(DescribedSglang { served: served.ok_or(ConnectError::NoModel)?, info, sizes, vocab_size })
}
