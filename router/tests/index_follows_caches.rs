//! The index receives the events and snapshots of real prefix caches, and equals their content after any history.

use proptest::{collection::vec, prelude::*};
use std::collections::BTreeSet;
use tandem_kv::{
    BlockId, CacheSettings, Change, HashKey, Namespace, PrefixCache, SequenceHash, StoredChain, TokenId, Wanted, sequence_hashes,
};
use tandem_router::{PrefixIndex, Skipped};

const BLOCK: usize = 2;

#[derive(Clone, Debug)]
enum Op {
    /// A prompt is computed if the cache has space for it, and its blocks stay in use.
    Compute(Vec<TokenId>),
    /// The blocks of the oldest prompt in use are released.
    End,
    Clear,
    /// The router has lost its stream and requests a snapshot.
    Rejoin,
}

fn op() -> impl Strategy<Value = Op> {
    // There are few distinct tokens, so that prompts share prefixes, and more blocks than the caches hold, so that caches evict.
    prop_oneof![
        8 => vec(0..2_u32, 0..14).prop_map(Op::Compute),
        6 => Just(Op::End),
        1 => Just(Op::Clear),
        1 => Just(Op::Rejoin),
    ]
}

struct Worker {
    cache: PrefixCache,
    in_use: std::collections::VecDeque<Vec<BlockId>>,
}

impl Worker {
    fn new() -> Self {
        let settings =
            CacheSettings { capacity_blocks: 12, block_size: BLOCK as u32, prefix_caching: true, hash_key: HashKey::NONE };
        Self { cache: PrefixCache::new(settings), in_use: Default::default() }
    }

    fn compute(&mut self, namespace: &Namespace, prompt: &[TokenId]) {
        let len_blocks = prompt.len().div_ceil(BLOCK) as u32;
        let reuse_max = prompt.len().saturating_sub(1) / BLOCK;
        let Ok(acquired) =
            self.cache.acquire(namespace, prompt, Wanted { reuse_max_blocks: reuse_max as u32, len_blocks, spare_blocks: 0 })
        else {
            return;
        };
        let mut blocks = acquired.blocks;
        for (at, tokens) in prompt.chunks_exact(BLOCK).enumerate().skip(acquired.cached_blocks as usize) {
            let parent = at.checked_sub(1).map(|before| blocks[before]);
            blocks[at] = self.cache.commit(namespace, parent, blocks[at], tokens);
        }
        self.in_use.push_back(blocks);
    }

    fn end(&mut self) {
        for block in self.in_use.pop_front().into_iter().flatten() {
            self.cache.release(block);
        }
    }

    fn held(&self) -> BTreeSet<SequenceHash> {
        self.cache.snapshot().stored.into_iter().flat_map(|chain: StoredChain| chain.sequence_hashes).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(300))]
    #[test]
    fn index_equals_cache_contents_after_any_history(
        ops in vec((0..3_usize, op()), 1..60),
        asked in vec(vec(0..2_u32, 0..14), 1..20),
    ) {
        let namespace = Namespace::new("m", "r", "", "");
        let mut workers = [Worker::new(), Worker::new(), Worker::new()];
        let index = PrefixIndex::new(1);
        let slots = [(); 3].map(|()| index.add_worker());
        for (at, op) in &ops {
            let (worker, slot) = (&mut workers[*at], slots[*at]);
            match op {
                Op::Compute(prompt) => worker.compute(&namespace, prompt),
                Op::End => worker.end(),
                Op::Clear => worker.cache.clear(),
                Op::Rejoin => {
                    worker.cache.take_events();
                    prop_assert_eq!(index.replace(slot, &worker.cache.snapshot()), Skipped::default());
                }
            }
            for event in worker.cache.take_events() {
                let removed_all = matches!(event.change, Change::Cleared);
                prop_assert_eq!(index.apply(slot, &event.change), Skipped::default());
                prop_assert!(!removed_all || index.blocks(slot) == 0);
            }
            prop_assert_eq!(index.blocks(slot), worker.held().len() as u64);
        }
        while index.sweep() {}
        for prompt in asked {
            let hashes = sequence_hashes(&HashKey::NONE, &namespace, BLOCK, &prompt);
            let leading = index.overlap(&hashes);
            for (at, worker) in workers.iter().enumerate() {
                let held = worker.held();
                let expected = hashes.iter().take_while(|hash| held.contains(hash)).count();
                prop_assert_eq!(leading.get(at).copied().unwrap_or(0) as usize, expected);
            }
        }
    }
}
