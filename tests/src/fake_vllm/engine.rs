//! The engine of a fake vLLM server: a prefix cache, and tokens that depend only on the tokens before them and on the seed.

use std::collections::{HashMap, HashSet, VecDeque};
use tandem_adapter::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys, Medium};

/// The size of the fake model's vocabulary.
const VOCABULARY: u64 = 256;

/// The prefix cache of one engine. It drops the least recently used block first.
#[derive(Debug)]
pub struct Cache {
    block_size: usize,
    capacity: usize,
    used: VecDeque<u64>,
    held: HashSet<u64>,
}

/// The result of storing a prompt.
#[derive(Debug)]
pub struct Stored {
    /// The number of leading tokens that were cached.
    pub cached_tokens: usize,
    /// The events that the engine publishes.
    pub events: Vec<EngineEvent>,
}

impl Cache {
    /// Returns an empty cache.
    pub fn new(block_size: usize, capacity: usize) -> Self {
        Self { block_size, capacity, used: VecDeque::new(), held: HashSet::new() }
    }

    /// Finds the leading blocks of a prompt with this salt, stores its other blocks, and drops the oldest blocks beyond the capacity. If
    /// `report_hits` is true, the events include the found blocks. If `lookup` is false, no block is found.
    pub fn store(&mut self, tokens: &[u32], salt: &str, report_hits: bool, lookup: bool) -> Stored {
        let hashes = hashes(tokens, salt, self.block_size);
        // The last token is always computed, so the block that ends with it is not reused.
        let reusable = tokens.len().saturating_sub(1) / self.block_size;
        let found = if lookup { hashes.iter().take(reusable).take_while(|hash| self.held.contains(hash)).count() } else { 0 };
        let (hits, new) = hashes.split_at(found);
        for hash in hits {
            self.touch(*hash);
        }
        let stored = |blocks: &[u64], from: usize| {
            EngineEvent::Stored(BlocksStored {
                hashes: blocks.iter().map(|hash| EngineHash::Number(*hash)).collect(),
                parent: from.checked_sub(1).map(|parent| EngineHash::Number(hashes[parent])),
                tokens: tokens[from * self.block_size..(from + blocks.len()) * self.block_size].to_vec(),
                block_size: self.block_size as u32,
                lora: false,
                extra_keys: (from..from + blocks.len())
                    .map(|at| if at == 0 { ExtraKeys::Text(salt.to_owned()) } else { ExtraKeys::None })
                    .collect(),
                medium: Medium::Device,
                group: Some(0),
                kind: Some("full_attention".to_owned()),
                session: None,
            })
        };
        let new: Vec<u64> = new.iter().copied().filter(|hash| !self.held.contains(hash)).collect();
        let mut events = Vec::new();
        if report_hits && found > 0 {
            events.push(stored(hits, 0));
        }
        // As in vLLM, blocks are removed before others are stored in their place, so that the events never exceed the capacity.
        while self.used.len() + new.len() > self.capacity {
            let Some(hash) = self.used.pop_front() else { break };
            self.held.remove(&hash);
            let hashes = vec![EngineHash::Number(hash)];
            events.push(EngineEvent::Removed(BlocksRemoved { hashes, medium: Medium::Device, group: Some(0) }));
        }
        if !new.is_empty() {
            events.push(stored(&hashes[hashes.len() - new.len()..], hashes.len() - new.len()));
        }
        for hash in new {
            self.held.insert(hash);
            self.used.push_back(hash);
        }
        Stored { cached_tokens: found * self.block_size, events }
    }

    /// Drops all blocks.
    pub fn clear(&mut self) -> Vec<EngineEvent> {
        self.used.clear();
        self.held.clear();
        vec![EngineEvent::Cleared]
    }

    /// Returns the number of cached blocks.
    pub fn len(&self) -> usize {
        self.held.len()
    }

    /// Returns whether no block is cached.
    pub fn is_empty(&self) -> bool {
        self.held.is_empty()
    }

    fn touch(&mut self, hash: u64) {
        self.used.retain(|other| *other != hash);
        self.used.push_back(hash);
    }
}

fn hashes(tokens: &[u32], salt: &str, block_size: usize) -> Vec<u64> {
    let mut last = salt.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| mix(hash ^ u64::from(byte)));
    let blocks = tokens.chunks_exact(block_size).map(|block| {
        last = block.iter().fold(last, |hash, token| mix(hash ^ u64::from(*token)));
        last
    });
    blocks.collect()
}

fn mix(value: u64) -> u64 {
    tandem_kv::mix(value)
}

/// Returns the token that the fake model generates after these tokens. Without a seed the model samples greedily.
pub fn next_token(tokens: &[u32], seed: Option<u64>) -> u32 {
    let of_tokens = tokens.iter().fold(7, |hash, token| mix(hash ^ u64::from(*token)));
    (mix(of_tokens ^ seed.map_or(0, |seed| mix(seed ^ tokens.len() as u64))) % VOCABULARY) as u32
}

/// The KV of a prompt that an engine holds until another engine pulls it.
#[derive(Clone, Debug)]
pub struct HeldKv {
    /// The tokens of the prompt.
    pub tokens: Vec<u32>,
    /// The time at which the engine's lease on the blocks ends.
    pub until: tokio::time::Instant,
}

/// The network between the fake engines: the held KV of all engines, by the ids of engine and request.
pub type Fabric = std::sync::Arc<parking_lot::Mutex<HashMap<(String, String), HeldKv>>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fake_cache_finds_stored_prefixes_and_drops_the_oldest() {
        let mut cache = Cache::new(4, 3);
        let prompt: Vec<u32> = (0..12).collect();
        assert_eq!(cache.store(&prompt, "s", true, true).cached_tokens, 0);
        assert_eq!(cache.store(&prompt, "s", true, true).cached_tokens, 8, "the last block is computed again for its last token");
        assert_eq!(cache.store(&prompt, "other", true, true).cached_tokens, 0);
        assert_eq!(cache.len(), 3);
        assert_eq!(cache.store(&prompt, "s", true, true).cached_tokens, 0, "the oldest prompt was dropped");
    }
}
