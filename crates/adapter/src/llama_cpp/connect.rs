//! Connects to a llama.cpp server.

use super::{
    client::{self, ListedModel, LlamaCppClient, Props},
    request::BodySettings,
};
use crate::{
    adapter::EngineExchange,
    http::EngineHttp,
    mirror::{Mirror, MirrorSettings},
    server::{self, ConnectError, Connected, ConnectedEngine, ModelDescription, ServerDescription},
    shared::AdapterState,
    slots::{SlotLimits, Slots},
};
use futures::FutureExt;
use std::{sync::Arc, time::Duration};
use tandem_engine::EngineInfo;
use tandem_kv::{HashKey, TokenId};
use tandem_process::Secret;

/// The settings of the connection to a llama.cpp server.
#[derive(Clone, Debug)]
pub struct LlamaCppSettings {
    /// The server's address: `http://HOST:PORT`, or `https://`.
    pub url: String,
    /// The key that the server requires (its `--api-key`); `None` if it requires none.
    pub key: Option<Secret>,
    /// PEM certificates of authorities that may identify the server, in addition to the public authorities.
    pub ca: Option<Vec<u8>>,
    /// The number of tokens in a block of the cluster.
    pub block_size: u32,
    /// The key with which the cluster's sequence hashes are computed.
    pub hash_key: HashKey,
    /// The maximum number of requests that may wait for the engine.
    pub waiting_max: usize,
    /// Whether prompts reuse the KV of earlier prompts. The server does not separate the caches of clients, so with this option its worker serves
    /// only requests without a cache salt and without an account.
    pub prefix_caching: bool,
    /// After this time without an answer to a health check and without progress, the engine is treated as hung.
    pub silence_max: Duration,
}

struct Described {
    model: ListedModel,
    props: Props,
    slots: u32,
    context_length: u32,
    end_token: Option<TokenId>,
}

impl Described {
    fn model(&self) -> ModelDescription {
        let root = self.props.model_path.clone();
        ModelDescription { id: self.model.id.clone(), root, context_length: self.context_length }
    }
}

/// Waits until the server answers, and returns the server's description.
///
/// # Errors
/// Fails if the settings are invalid, or if the server cannot be used.
pub async fn inspect(settings: &LlamaCppSettings) -> Result<ServerDescription, ConnectError> {
    let described = describe(&http(settings)?).await?;
    let ranks = vec![(0, u64::from(described.slots) * u64::from(described.context_length))];
    Ok(ServerDescription { model: described.model(), loras: Vec::new(), ranks })
}

/// Waits until the server answers, and connects to it.
///
/// # Errors
/// Fails if the settings are invalid, or if the server cannot be used.
pub async fn connect(settings: LlamaCppSettings) -> Result<Connected, ConnectError> {
    let http = http(&settings)?;
    let LlamaCppSettings { url, block_size, hash_key, waiting_max, prefix_caching, silence_max, .. } = settings;
    let described = describe(&http).await?;
    let of_model = described.model();
    let Described { model, props, slots, context_length, end_token } = described;
    let capacity_blocks = (context_length / block_size.max(1)).saturating_mul(slots);
    let mirror = Mirror::new(MirrorSettings {
        hash_key,
        block_size,
        engine_block_size: block_size,
        device_blocks: capacity_blocks,
        hits_are_reported: false,
        store: None,
        engine_blocks_max: 0,
    })?;
    let vocab_size = model.meta.and_then(|meta| meta.n_vocab).unwrap_or(usize::MAX);
    let info = EngineInfo { vocab_size, context_length, block_size, capacity_blocks, block_bytes: 0 };
    let limits = SlotLimits { running: slots as usize, blocks: capacity_blocks.into(), waiting: waiting_max };
    let shared = Arc::new(AdapterState::new(info, Slots::new(limits), mirror, prefix_caching));
    tracing::info!(
        engine = %url,
        build = props.build_info.as_deref().unwrap_or("unknown"),
        model = model.id,
        slots,
        context_length,
        prefix_caching,
        "connected to a llama.cpp engine"
    );
    let client = LlamaCppClient::new(http, BodySettings { context_length, prefix_caching, end_token });
    let events = std::future::pending().boxed();
    let engine = ConnectedEngine { shared, exchange: EngineExchange::None, instance: props.instance(), silence_max, events };
    Ok(Connected::new(Arc::new(client), engine, of_model, Arc::default()))
}

fn http(settings: &LlamaCppSettings) -> Result<EngineHttp, ConnectError> {
    Ok(EngineHttp::new(&settings.url, settings.key.clone(), settings.ca.as_deref())?)
}

async fn describe(http: &EngineHttp) -> Result<Described, ConnectError> {
    let describe = || async {
        let (models, props) = (client::models(http).await?, client::props(http).await?);
        let end_token = match props.eos_token.as_deref() {
            None | Some("") => None,
            Some(text) => client::special_token(http, text).await?,
        };
        Ok((models, props, end_token))
    };
    let (models, props, end_token) = server::wait_until(http, describe).await?;
    let context_length = props.default_generation_settings.as_ref().map(|slot| slot.n_ctx);
    let (Some(slots @ 1..), Some(context_length @ 1..)) = (props.total_slots, context_length) else {
        return Err(ConnectError::NoSlots);
    };
    let model = models.into_iter().next().ok_or(ConnectError::NoModel)?;
    Ok(Described { model, props, slots, context_length, end_token })
}
