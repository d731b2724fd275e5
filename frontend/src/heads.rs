//! Compares the head (the first blocks) of each prompt with the client's recent prompts, and with prompts in other cache namespaces.
//!
//! A changed block near the beginning of a prompt, such as a time in a system prompt, changes the sequence hashes of all later blocks, even
//! if their tokens equal those of an earlier prompt. Here, each block is hashed without the blocks before it, so blocks after a difference
//! are found if they are at the same position. Only 32-bit hashes are kept, for the latest prompts of a bounded number of clients.

use foldhash::fast::RandomState;
use lru::LruCache;
use metrics::Counter;
use parking_lot::Mutex;
use serde::Serialize;
use std::{collections::VecDeque, hash::BuildHasher, num::NonZero, sync::Arc};
use tandem_kv::{Namespace, TokenId};
use tandem_process::Metrics;

/// The maximum number of blocks in a head.
const HEAD_BLOCKS: usize = 1_024;
/// The maximum number of pairs of client and model. Their heads, [`PROMPTS_MAX`] each, take 4 MiB at most.
const CLIENTS_MAX: NonZero<usize> = NonZero::new(256).expect("not 0");
/// The number of recent heads that are kept for a client and model.
const PROMPTS_MAX: usize = 4;
/// The maximum number of first blocks in [`KnownHeads::by_first`]. Their heads, [`NAMESPACES_MAX`] each, take 4 MiB at most.
const FIRST_BLOCKS_MAX: NonZero<usize> = NonZero::new(512).expect("not 0");
const NAMESPACES_MAX: usize = 2;
/// The lower bounds of the buckets of [`FirstDifferences`], in tokens.
const FROM_TOKENS: [u32; 10] = [0, 16, 32, 64, 128, 256, 512, 1_024, 2_048, 4_096];

/// The hashes of a prompt's first blocks, each computed without the blocks before it.
type PromptHead = Arc<[u32]>;

pub(crate) struct Heads {
    hasher: RandomState,
    registry: Metrics,
    state: Mutex<KnownHeads>,
}

struct KnownHeads {
    clients: LruCache<(String, String), ClientHeads>,
    /// The latest heads by model and hash of the first block, each with the hash of its namespace.
    by_first: LruCache<(String, u32), VecDeque<(u64, PromptHead)>>,
}

struct ClientHeads {
    /// Owns the client's metric series, which are removed when the client is evicted.
    _series: Metrics,
    recent: VecDeque<PromptHead>,
    broken: BrokenPrefixes,
    prompts_lost: Counter,
    tokens_lost: Counter,
}

/// Counts of one client's prompts to one model, and of the broken ones: those that repeat tokens of an earlier prompt after a difference.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct BrokenPrefixes {
    client: String,
    model: String,
    prompts: u64,
    broken_prompts: u64,
    /// Tokens of the blocks after the first difference that equal the block at the same position of an earlier prompt.
    lost_tokens: u64,
    first_difference: [FirstDifferences; FROM_TOKENS.len()],
}

/// The broken prompts whose first difference is in the bucket that begins at `from_token`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct FirstDifferences {
    from_token: u32,
    prompts: u64,
    lost_tokens: u64,
}

impl Heads {
    pub(crate) fn new(registry: Metrics) -> Self {
        let state = KnownHeads { clients: LruCache::new(CLIENTS_MAX), by_first: LruCache::new(FIRST_BLOCKS_MAX) };
        Self { hasher: RandomState::default(), registry, state: Mutex::new(state) }
    }

    /// Records a client's prompt. Returns the number of leading blocks that it has in common with a recent prompt in another namespace.
    pub(crate) fn record(&self, client: &str, model: &str, namespace: &Namespace, block_size: u32, tokens: &[TokenId]) -> u32 {
        let reusable = &tokens[..tokens.len().saturating_sub(1)];
        let blocks = reusable.chunks_exact(block_size.max(1) as usize).take(HEAD_BLOCKS);
        let head: PromptHead = blocks.map(|block| self.hasher.hash_one(block) as u32).collect();
        let Some(first) = head.first() else { return 0 };
        let namespace = self.hasher.hash_one(namespace);
        let mut state = self.state.lock();
        let heads = state.by_first.get_or_insert_mut((model.to_owned(), *first), VecDeque::new);
        let others = heads.iter().filter(|(other, _)| *other != namespace);
        let equal = others.map(|(_, other)| common(other, &head)).max().unwrap_or(0);
        heads.retain(|(other, _)| *other != namespace);
        heads.truncate(NAMESPACES_MAX - 1);
        heads.push_front((namespace, Arc::clone(&head)));
        let client = state.clients.get_or_insert_mut((client.to_owned(), model.to_owned()), || self.client(client, model));
        client.add(head, block_size);
        equal
    }

    /// Returns the counts of each client and model, sorted by lost tokens, the most first.
    pub(crate) fn broken(&self) -> Vec<BrokenPrefixes> {
        let mut broken: Vec<_> = self.state.lock().clients.iter().map(|(_, client)| client.broken.clone()).collect();
        broken.sort_by_key(|client| std::cmp::Reverse(client.lost_tokens));
        broken
    }

    fn client(&self, client: &str, model: &str) -> ClientHeads {
        let registry = self.registry.part(&format!("{client}\n{model}"));
        let counter = |name, help| registry.counter(name, help, &[("model", model), ("client", client)]);
        let help = "Prompts with tokens that equal those of an earlier prompt of the client, but come after a difference.";
        let prompts_lost = counter("tandem_frontend_broken_prefix_prompts_total", help);
        let help = "Prompt tokens that equal those of an earlier prompt of the client but come after a difference, so that their KV cannot be reused.";
        let tokens_lost = counter("tandem_frontend_broken_prefix_tokens_total", help);
        let buckets = FROM_TOKENS.map(|from_token| FirstDifferences { from_token, ..Default::default() });
        let (client, model) = (client.to_owned(), model.to_owned());
        let broken = BrokenPrefixes { client, model, first_difference: buckets, ..Default::default() };
        ClientHeads { _series: registry, recent: VecDeque::new(), broken, prompts_lost, tokens_lost }
    }
}

impl ClientHeads {
    fn add(&mut self, head: PromptHead, block_size: u32) {
        self.broken.prompts += 1;
        let reused = self.recent.iter().map(|earlier| common(earlier, &head)).max().unwrap_or(0);
        let equal_after = |earlier: &PromptHead| {
            let after = earlier.iter().zip(&*head).skip(reused as usize);
            (after.filter(|(one, other)| one == other).count() as u64, common(earlier, &head))
        };
        let (lost_blocks, first) = self.recent.iter().map(equal_after).max().unwrap_or_default();
        if lost_blocks > 0 {
            let (lost, position) = (lost_blocks * u64::from(block_size), first.saturating_mul(block_size));
            self.broken.broken_prompts += 1;
            self.broken.lost_tokens += lost;
            let bucket = FROM_TOKENS.iter().rposition(|from| *from <= position).unwrap_or(0);
            self.broken.first_difference[bucket].prompts += 1;
            self.broken.first_difference[bucket].lost_tokens += lost;
            self.prompts_lost.increment(1);
            self.tokens_lost.increment(lost);
        }
        self.recent.truncate(PROMPTS_MAX - 1);
        self.recent.push_front(head);
    }
}

/// Returns how many leading blocks two heads have in common.
fn common(one: &[u32], other: &[u32]) -> u32 {
    one.iter().zip(other).take_while(|(one, other)| one == other).count() as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    fn namespace(salt: &str) -> Namespace {
        Namespace::new("m", "r", "", salt)
    }

    /// Returns a prompt of 40 blocks and one token. The tokens of the blocks in `changed` depend on `seed`.
    fn prompt(changed: &[u32], seed: u32) -> Vec<TokenId> {
        let block = |at: u32| if changed.contains(&at) { 1_000 + seed } else { 10 + at };
        (0..40).flat_map(|at| [block(at); 16]).chain([7]).collect()
    }

    #[test]
    fn tokens_after_a_changed_block_are_counted_by_client_and_position() {
        let (metrics, shared) = (Metrics::default(), namespace(""));
        let heads = Heads::new(metrics.clone());
        let record = |client: &str, tokens: &[TokenId]| heads.record(client, "m", &shared, 16, tokens);
        for seed in 0..5 {
            record("key:clock", &prompt(&[3], seed));
            // Neither a growing conversation nor prompts that differ only at their ends are broken.
            record("key:chat", &prompt(&[], 0)[..200 + seed as usize * 50]);
            record("key:rag", &prompt(&(20..40).collect::<Vec<_>>(), seed));
        }
        let broken = heads.broken();
        let clock = &broken[0];
        assert_eq!(
            (clock.client.as_str(), clock.prompts, clock.broken_prompts, clock.lost_tokens),
            ("key:clock", 5, 4, 4 * 36 * 16)
        );
        let bucket = clock.first_difference.iter().find(|bucket| bucket.prompts > 0).expect("prompts differ");
        assert_eq!((bucket.from_token, bucket.prompts, bucket.lost_tokens), (32, 4, 4 * 36 * 16), "block 3 is at token 48");
        assert!(broken[1..].iter().all(|client| client.prompts == 5 && client.broken_prompts == 0), "{broken:?}");
        let series = r#"tandem_frontend_broken_prefix_tokens_total{model="m",client="key:clock"} 2304"#;
        assert!(metrics.render().contains(series), "{}", metrics.render());
    }

    #[test]
    fn only_prompts_in_other_namespaces_are_matched() {
        let heads = Heads::new(Metrics::default());
        let record = |salt: &str, tokens: &[TokenId]| heads.record("c", "m", &namespace(salt), 16, tokens);
        assert_eq!(record("a", &prompt(&[], 0)), 0);
        assert_eq!(record("a", &prompt(&[], 0)), 0);
        assert_eq!(record("b", &prompt(&[12], 0)), 12);
        assert_eq!(record("b", &prompt(&[], 0)), 40);
        assert_eq!(heads.record("c", "other", &namespace("d"), 16, &prompt(&[], 0)), 0, "models have nothing in common");
        assert_eq!(record("e", &[1; 16]), 0, "no block can be reused");
    }

    #[test]
    fn memory_for_many_clients_is_bounded() {
        let metrics = Metrics::default();
        let heads = Heads::new(metrics.clone());
        for client in 0..CLIENTS_MAX.get() as u32 + 50 {
            let tokens: Vec<TokenId> = (0..64_000).map(|at| at + client).collect();
            heads.record(&format!("agent:{client}"), "m", &namespace(""), 16, &tokens);
        }
        let state = heads.state.lock();
        assert_eq!(state.clients.len(), CLIENTS_MAX.get());
        assert!(state.clients.iter().all(|(_, client)| client.recent.iter().all(|head| head.len() <= HEAD_BLOCKS)));
        assert!(!metrics.render().contains(r#"client="agent:0""#), "the series of forgotten clients end");
    }
}
