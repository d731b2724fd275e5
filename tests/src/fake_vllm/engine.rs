//! The engine of a fake vLLM server: a prefix cache, and tokens that depend only on the tokens before them and on the seed.

use super::images::Placed;
use std::collections::{HashMap, HashSet, VecDeque};
use tandem_adapter::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys};
use tandem_kv::{ImageId, ImageStart, Tier};

/// The size of the fake model's vocabulary.
const VOCABULARY: u64 = 256;

/// The prefix cache of one engine. It drops the least recently used block first.
#[derive(Debug)]
pub struct Cache {
    block_size: usize,
    capacity: usize,
    used: VecDeque<u64>,
    held: HashSet<u64>,
    /// The blocks in host memory, which keeps a copy of each block forever; `None`: blocks are on the device only.
    host: Option<HashSet<u64>>,
}

/// The properties of a prompt that decide which of its blocks are cached.
#[derive(Clone, Copy, Debug)]
pub struct Prompt<'a> {
    /// The token ids of the prompt.
    pub tokens: &'a [u32],
    /// The `cache_salt` of the request.
    pub salt: &'a str,
    /// The name of the LoRA with which the prompt is computed; `None` if it is computed without a LoRA.
    pub lora: Option<&'a str>,
    /// The images among the tokens.
    pub images: &'a [Placed],
}

/// The result of storing a prompt.
#[derive(Debug)]
pub struct Stored {
    /// The number of leading tokens that were cached.
    pub cached_tokens: usize,
    /// The events that the engine publishes about the change.
    pub events: Vec<EngineEvent>,
}

impl Cache {
    /// Returns an empty cache.
    pub fn new(block_size: usize, capacity: usize) -> Self {
        Self { block_size, capacity, used: VecDeque::new(), held: HashSet::new(), host: None }
    }

    /// Returns this cache with a copy of each block in host memory, as with vLLM's `OffloadingConnector` and `self_describing_kv_events`.
    #[must_use]
    pub fn offloading(self, offloads: bool) -> Self {
        Self { host: offloads.then(HashSet::new), ..self }
    }

    /// Finds the leading blocks of a prompt, stores its other blocks, and drops the oldest blocks beyond the capacity. If `report_hits` is
    /// true, the events include the found blocks. If `lookup` is false, no block is found.
    pub fn store(&mut self, prompt: Prompt<'_>, report_hits: bool, lookup: bool) -> Stored {
        let (hashes, Prompt { tokens, salt, lora, images }) = (hashes(prompt, self.block_size), prompt);
        // The last token is always computed, so the block that ends with it is not reused.
        let reusable = tokens.len().saturating_sub(1) / self.block_size;
        let found = if lookup { hashes.iter().take(reusable).take_while(|hash| self.held.contains(hash)).count() } else { 0 };
        let is_on_host = |hash: &&u64| self.host.as_ref().is_some_and(|host| host.contains(hash));
        let loaded = if lookup { hashes[..reusable].iter().skip(found).take_while(is_on_host).count() } else { 0 };
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
                lora: lora.map(str::to_owned),
                extra_keys: (from..from + blocks.len()).map(|at| extra_keys(at, self.block_size, salt, images)).collect(),
                tier: Ok(Tier::Device),
                group: Some(0),
                kind: Some("full_attention".to_owned()),
                window_tokens: None,
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
            events.push(EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(Tier::Device), group: Some(0) }));
        }
        if !new.is_empty() {
            events.push(stored(&hashes[hashes.len() - new.len()..], hashes.len() - new.len()));
        }
        if let Some(host) = &mut self.host {
            let from = hashes.iter().position(|hash| !host.contains(hash)).unwrap_or(hashes.len());
            host.extend(&hashes[from..]);
            if let EngineEvent::Stored(blocks) = stored(&hashes[from..], from)
                && from < hashes.len()
            {
                events.push(EngineEvent::Stored(BlocksStored { tier: Ok(Tier::Host), ..blocks }));
            }
        }
        for hash in new {
            self.held.insert(hash);
            self.used.push_back(hash);
        }
        Stored { cached_tokens: (found + loaded) * self.block_size, events }
    }

    /// Drops all blocks. Returns the events that report this.
    pub fn clear(&mut self) -> Vec<EngineEvent> {
        self.used.clear();
        self.held.clear();
        self.host.iter_mut().for_each(HashSet::clear);
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

/// Returns the images that have a token in the block at this position.
fn images_of(at: usize, block_size: usize, images: &[Placed]) -> impl Iterator<Item = &Placed> {
    images.iter().filter(move |image| image.offset < (at + 1) * block_size && image.offset + image.length > at * block_size)
}

fn extra_keys(at: usize, block_size: usize, salt: &str, images: &[Placed]) -> ExtraKeys {
    let salt = (at == 0).then(|| salt.to_owned());
    if images_of(at, block_size, images).next().is_none() {
        return salt.map_or(ExtraKeys::None, ExtraKeys::Text);
    }
    let start = |image: &Placed| {
        let at = image.offset.checked_sub(at * block_size)?;
        Some(ImageStart { at, id: ImageId::from_text(&image.uuid)? })
    };
    ExtraKeys::Images { salt, images: images_of(at, block_size, images).filter_map(start).collect() }
}

fn hashes(Prompt { tokens, salt, lora, images }: Prompt<'_>, block_size: usize) -> Vec<u64> {
    let mut last = hash_text(hash_text(0xcbf2_9ce4_8422_2325, salt), lora.unwrap_or_default());
    let blocks = tokens.chunks_exact(block_size).enumerate().map(|(at, block)| {
        // As in vLLM, the identity that the client has chosen is all that is hashed of an image.
        last =
            images_of(at, block_size, images).fold(last, |hash, image| mix(hash_text(hash, &image.uuid) ^ image.offset as u64));
        last = block.iter().fold(last, |hash, token| mix(hash ^ u64::from(*token)));
        last
    });
    blocks.collect()
}

fn hash_text(hash: u64, text: &str) -> u64 {
    text.bytes().fold(hash, |hash, byte| mix(hash ^ u64::from(byte)))
}

fn mix(value: u64) -> u64 {
    tandem_kv::mix(value)
}

/// Returns the token that the fake model generates after these tokens. Without a seed the model samples greedily.
pub fn next_token(tokens: &[u32], seed: Option<u64>) -> u32 {
    next_token_of("", tokens, seed)
}

/// Returns the token that the fake model generates with a LoRA of this name. The empty name stands for the model without a LoRA.
pub fn next_token_of(lora: &str, tokens: &[u32], seed: Option<u64>) -> u32 {
    let of_tokens = tokens.iter().fold(hash_text(7, lora), |hash, token| mix(hash ^ u64::from(*token)));
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

/// The network between the fake engines. It maps the ids of engine and request to the KV that the engine holds.
pub type Fabric = std::sync::Arc<parking_lot::Mutex<HashMap<(String, String), HeldKv>>>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fake_cache_finds_stored_prefixes_and_drops_the_oldest() {
        let mut cache = Cache::new(4, 3);
        let tokens: Vec<u32> = (0..12).collect();
        let prompt = Prompt { tokens: &tokens, salt: "s", lora: None, images: &[] };
        let mut cached = |prompt| cache.store(prompt, true, true).cached_tokens;
        assert_eq!([cached(prompt), cached(prompt)], [0, 8], "the last block is computed again for its last token");
        for other in [Prompt { salt: "other", ..prompt }, Prompt { lora: Some("lora"), ..prompt }, prompt] {
            assert_eq!(cached(other), 0, "the oldest prompt was dropped");
        }
        assert_eq!(cache.len(), 3);
    }
}
