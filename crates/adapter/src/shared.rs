//! The state that all jobs of an adapter share: the mirror of the engine's cache, the slots in the engine, and the load.

use crate::{api::EngineCall, engine_load::EngineLoad, mirror::Mirror, server_failed::ServerFailed, slots::Slots};
use parking_lot::Mutex;
use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};
use tandem_engine::{CachedTokens, EngineInfo};
use tandem_kv::{ByTier, ImageStart, KvBatch, Load, Namespace, Snapshot, TokenId};
use tandem_worker::CacheWatch;
use tokio::sync::broadcast;

/// Maximum number of batches of KV events that wait for a slow reader. A reader that falls further behind starts again from a snapshot.
const BATCHES_MAX: usize = 1_024;

pub(crate) struct AdapterState {
    pub info: EngineInfo,
    pub slots: Arc<Slots>,
    pub engine_load: Arc<EngineLoad>,
    /// Whether the mirror is filled from the requests that were routed to this worker, because the engine publishes no KV events.
    pub approximate: bool,
    pub cached_blocks_max: u32,
    /// The name of the store that other workers share with this one; empty if there is none.
    pub shared_store: String,
    /// The ip:port at which gateways reach the engine, if this adapter only observes it; else empty.
    pub engine_endpoint: String,
    /// Whether the engine's server has failed, as a worker of any of its ranks has found.
    pub server_failed: ServerFailed,
    mirror: Mutex<Mirror>,
    /// The sender of all batches of KV events; `None` once the engine has ended.
    batches: Mutex<Option<broadcast::Sender<Arc<KvBatch>>>>,
    last: Mutex<Load>,
    calls: AtomicU64,
}

/// The number of a prompt's leading blocks that were cached in each tier when the prompt was submitted.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Tiers {
    prefix: ByTier<u32>,
    block_size: u32,
    prompt_tokens: u32,
}

impl Tiers {
    /// Returns how many leading tokens of the prompt the mirror assumed to be cached.
    pub fn known(&self) -> usize {
        (self.prefix.iter().sum::<u32>() * self.block_size) as usize
    }

    /// Divides the cached tokens that the engine reported, at most as many as the prompt has, between the tiers in the order in which their blocks
    /// follow each other. Tokens beyond all known blocks came from the last of these tiers.
    pub fn split(&self, tokens: u32) -> CachedTokens {
        let mut left = tokens.min(self.prompt_tokens);
        let mut found = self.prefix.map(|blocks| {
            let tokens = left.min(blocks.saturating_mul(self.block_size));
            left -= tokens;
            tokens
        });
        found[self.prefix.iter().rposition(|blocks| *blocks > 0).unwrap_or(0)] += left;
        CachedTokens(found)
    }
}

impl AdapterState {
    pub fn new(info: EngineInfo, slots: Arc<Slots>, mirror: Mirror, approximate: bool) -> Self {
        let (batches, _) = broadcast::channel(BATCHES_MAX);
        let shared = Self {
            info,
            slots,
            engine_load: Arc::default(),
            approximate,
            cached_blocks_max: mirror.cached_blocks_max(),
            shared_store: String::new(),
            engine_endpoint: String::new(),
            server_failed: ServerFailed::default(),
            mirror: Mutex::new(mirror),
            batches: Mutex::new(Some(batches)),
            last: Mutex::default(),
            calls: AtomicU64::default(),
        };
        *shared.last.lock() = shared.load(0);
        shared
    }

    /// Returns how many blocks the KV of this many tokens needs.
    pub fn blocks(&self, tokens: usize) -> u64 {
        tokens.div_ceil(self.info.block_size as usize) as u64
    }

    /// Returns an id that is unique in the engine, even if a client makes several attempts with the same request id.
    pub fn request_id(&self, request_id: &str) -> String {
        format!("{request_id}-{}", self.calls.fetch_add(1, Ordering::Relaxed))
    }

    /// Returns the number of the prompt's leading blocks that each tier holds now.
    pub fn tiers(&self, call: &EngineCall) -> Tiers {
        self.tiers_of(&call.namespace, &call.tokens, &call.image_starts())
    }

    fn tiers_of(&self, namespace: &Namespace, tokens: &[TokenId], images: &[ImageStart]) -> Tiers {
        let prefix = self.mirror.lock().cached_prefix(namespace, tokens, images);
        Tiers { prefix, block_size: self.info.block_size, prompt_tokens: tokens.len() as u32 }
    }

    /// Returns how many leading tokens of the prompt are cached. The prompt's last token is never counted, because the engine always computes it.
    pub fn known_tokens(&self, namespace: &Namespace, tokens: &[TokenId], images: &[ImageStart]) -> usize {
        self.tiers_of(namespace, tokens, images).known().min(tokens.len().saturating_sub(1))
    }

    /// Records that the engine has computed the call's tokens: a prompt, or a prompt and its answer. An approximate mirror then assumes that their
    /// blocks are cached.
    pub fn computed(&self, call: &EngineCall) {
        if self.approximate {
            self.mirror.lock().assume_stored(&call.namespace, &call.tokens, &call.image_starts());
            self.engine_load.changed.notify_one();
        }
    }

    /// Changes the mirror, and publishes the changes.
    pub fn update(&self, change: impl FnOnce(&mut Mirror)) {
        change(&mut self.mirror.lock());
        self.publish();
    }

    /// Publishes the mirror's changes and the load.
    pub fn publish(&self) {
        let batches = self.batches.lock();
        let Some(batches) = &*batches else { return };
        let batch = {
            let mut mirror = self.mirror.lock();
            let tier_blocks = mirror.tier_blocks();
            let on_device = if tier_blocks == [0; 4] { mirror.cached_blocks() } else { tier_blocks[0] as usize };
            let load = Load { tier_blocks, ..self.load(on_device) };
            *self.last.lock() = load.clone();
            let included_request_ids = self.engine_load.take_included();
            KvBatch { last_event_id: mirror.last_id(), events: mirror.take(), load, included_request_ids, step: None }
        };
        // Publishing fails only if there are no watchers.
        drop(batches.send(Arc::new(batch)));
    }

    /// Returns the current snapshot and load, and a receiver of all later batches; `None` if the engine has ended.
    pub fn watch(&self) -> Option<CacheWatch> {
        // While this lock is held, no batch is published.
        let batches = self.batches.lock();
        let batches = batches.as_ref()?.subscribe();
        let snapshot: Snapshot = self.mirror.lock().snapshot();
        Some(CacheWatch { snapshot, load: self.last.lock().clone(), batches })
    }

    /// Ends all watches, because the engine has ended.
    pub fn end(&self) {
        self.batches.lock().take();
    }

    fn load(&self, mirrored: usize) -> Load {
        let (load, tokens) = self.engine_load.load();
        let capacity = self.info.capacity_blocks;
        let in_use = u32::try_from(self.blocks(tokens as usize)).unwrap_or(u32::MAX).min(capacity);
        let cached = u32::try_from(mirrored).unwrap_or(u32::MAX).saturating_sub(in_use).min(capacity - in_use);
        Load { in_use_blocks: in_use, cached_blocks: cached, free_blocks: capacity - in_use - cached, ..load }
    }
}
