//! Tests of the cache, one behaviour each. All blocks have two tokens.

mod model;

use super::{CacheSettings, Counts, Full, PrefixCache};
use crate::{BlockId, Change, HashKey, Namespace, SequenceHash, StoredChain, TokenId, Wanted, sequence_hashes};

pub(super) const SETTINGS: CacheSettings =
    CacheSettings { capacity_blocks: 6, block_size: 2, prefix_caching: true, hash_key: HashKey::NONE };

fn wanted(reuse_max_blocks: u32, len_blocks: u32) -> Wanted {
    Wanted { reuse_max_blocks, len_blocks, spare_blocks: 0 }
}

fn namespace() -> Namespace {
    Namespace::new("model", "", "", "")
}

fn other_namespace() -> Namespace {
    Namespace::new("model", "", "", "another tenant")
}

/// Acquires blocks for `prompt`, commits all full ones and releases nothing.
fn run(cache: &mut PrefixCache, namespace: &Namespace, prompt: &[TokenId]) -> Vec<BlockId> {
    let acquired =
        cache.acquire(namespace, prompt, wanted(u32::MAX, prompt.len().div_ceil(2) as u32)).expect("enough blocks are free");
    let mut blocks = acquired.blocks;
    for (i, tokens) in prompt.chunks_exact(2).enumerate() {
        let parent = i.checked_sub(1).map(|before| blocks[before]);
        blocks[i] = cache.commit(namespace, parent, blocks[i], tokens);
    }
    cache.check_invariants().unwrap();
    blocks
}

fn release(cache: &mut PrefixCache, blocks: &[BlockId]) {
    for block in blocks {
        cache.release(*block);
        cache.check_invariants().unwrap();
    }
}

pub(super) fn run_and_release(cache: &mut PrefixCache, prompt: &[TokenId]) {
    let blocks = run(cache, &namespace(), prompt);
    release(cache, &blocks);
}

fn overlap(cache: &PrefixCache, prompt: &[TokenId]) -> usize {
    cache.find(&namespace(), prompt, u32::MAX).len()
}

fn changes(cache: &mut PrefixCache) -> Vec<Change> {
    cache.take_events().into_iter().map(|event| event.change).collect()
}

fn hashes(prompt: &[TokenId]) -> Vec<SequenceHash> {
    sequence_hashes(&HashKey::NONE, &namespace(), 2, prompt)
}

fn stored(parent: Option<SequenceHash>, sequence_hashes: &[SequenceHash]) -> Change {
    Change::Stored(StoredChain { parent, sequence_hashes: sequence_hashes.to_vec() })
}

#[test]
fn prompt_reuses_the_blocks_of_an_earlier_prompt() {
    let mut cache = PrefixCache::new(SETTINGS);
    let first = run(&mut cache, &namespace(), &[1, 1, 2, 2, 3]);
    let second = cache.acquire(&namespace(), &[1, 1, 2, 2, 4, 4, 5], wanted(3, 4)).unwrap();
    assert_eq!(second.cached_blocks, 2);
    assert_eq!(second.blocks[..2], first[..2]);
    assert!(!first.contains(&second.blocks[2]) && !first.contains(&second.blocks[3]));
    assert_eq!(cache.counts(), Counts { free: 1, cached: 0, in_use: 5 });

    release(&mut cache, &first);
    release(&mut cache, &second.blocks);
    assert_eq!(cache.counts(), Counts { free: 4, cached: 2, in_use: 0 });
}

#[test]
fn only_full_blocks_are_reused_up_to_the_callers_limit() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[1, 1, 2, 2, 3, 3]);
    for (tokens, reuse_max_blocks, len_blocks, expected) in [
        (&[1, 1, 2, 2, 3, 3][..], 9, 3, 3),
        (&[1, 1, 2, 2, 3, 3], 2, 3, 2),
        (&[1, 1, 2, 2, 3, 3], 0, 3, 0),
        (&[1, 1, 2, 2, 3, 3], 9, 1, 1),
        (&[1, 1, 2, 2, 3], 9, 3, 2),
        (&[1], 9, 1, 0),
        (&[], 9, 0, 0),
        (&[1, 1, 9, 9, 3, 3], 9, 3, 1),
        (&[2, 2, 3, 3], 9, 2, 0),
    ] {
        let acquired = cache.acquire(&namespace(), tokens, wanted(reuse_max_blocks, len_blocks)).unwrap();
        assert_eq!(acquired.cached_blocks, expected, "{tokens:?}, at most {reuse_max_blocks} of {len_blocks}");
        assert_eq!(acquired.blocks.len(), len_blocks as usize);
        release(&mut cache, &acquired.blocks);
    }
}

#[test]
fn namespaces_share_no_blocks() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[1, 1, 2, 2]);
    let other = cache.acquire(&other_namespace(), &[1, 1, 2, 2], wanted(2, 2)).unwrap();
    assert_eq!(other.cached_blocks, 0);
}

#[test]
fn least_recently_used_block_is_evicted_first() {
    let mut cache = PrefixCache::new(SETTINGS);
    for prompt in [[1, 1, 2, 2], [3, 3, 4, 4], [5, 5, 6, 6]] {
        run_and_release(&mut cache, &prompt);
    }
    run_and_release(&mut cache, &[1, 1, 2, 2]);
    cache.take_events();

    let taken: Vec<_> = (0..4).map(|_| cache.allocate().unwrap()).collect();
    let (older, newer) = (hashes(&[3, 3, 4, 4]), hashes(&[5, 5, 6, 6]));
    assert_eq!(changes(&mut cache), [Change::Removed(vec![older[1], older[0], newer[1], newer[0]])]);
    assert_eq!(overlap(&cache, &[1, 1, 2, 2]), 2);
    release(&mut cache, &taken);
}

#[test]
fn leaves_are_evicted_before_their_parents_in_any_order_of_release() {
    let all = [[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]];
    for order in all {
        let mut cache = PrefixCache::new(SETTINGS);
        let blocks = run(&mut cache, &namespace(), &[1, 1, 2, 2, 3, 3]);
        for i in order {
            cache.release(blocks[i]);
            cache.check_invariants().unwrap();
        }
        for left in [3, 3, 3, 2, 1, 0] {
            cache.allocate().unwrap();
            cache.check_invariants().unwrap();
            assert_eq!(overlap(&cache, &[1, 1, 2, 2, 3, 3]), left, "blocks were released in order {order:?}");
        }
        assert_eq!(cache.allocate(), Err(Full));
    }
}

#[test]
fn recently_used_prefix_is_evicted_after_its_unused_continuations() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[1, 1, 2, 2]);
    run_and_release(&mut cache, &[1, 1, 3, 3]);
    run_and_release(&mut cache, &[4, 4, 5, 5]);
    run_and_release(&mut cache, &[1, 1]);
    cache.take_events();
    let taken: Vec<_> = (0..6).map(|_| cache.allocate().unwrap()).collect();
    let (left, right, other) = (hashes(&[1, 1, 2, 2]), hashes(&[1, 1, 3, 3]), hashes(&[4, 4, 5, 5]));
    assert_eq!(changes(&mut cache), [Change::Removed(vec![left[1], right[1], other[1], other[0], right[0]])]);
    release(&mut cache, &taken);
}

#[test]
fn block_is_in_use_while_a_descendant_is_in_use() {
    let mut cache = PrefixCache::new(SETTINGS);
    let blocks = run(&mut cache, &namespace(), &[1, 1, 2, 2, 3, 3]);
    release(&mut cache, &blocks[..2]);
    assert_eq!(cache.counts(), Counts { free: 3, cached: 0, in_use: 3 });
    let taken: Vec<_> = (0..3).map(|_| cache.allocate().unwrap()).collect();
    assert_eq!(cache.allocate(), Err(Full));
    assert_eq!(overlap(&cache, &[1, 1, 2, 2, 3, 3]), 3);
    release(&mut cache, &blocks[2..]);
    release(&mut cache, &taken);
    assert_eq!(cache.counts(), Counts { free: 3, cached: 3, in_use: 0 });
}

#[test]
fn acquire_allocates_all_blocks_or_none() {
    let mut cache = PrefixCache::new(SETTINGS);
    let held = run(&mut cache, &namespace(), &[9, 9, 8, 8]);
    run_and_release(&mut cache, &[1, 1, 2, 2]);
    let (events, counts) = (cache.last_event_id(), cache.counts());
    assert_eq!(counts, Counts { free: 2, cached: 2, in_use: 2 });

    let prompt = [1, 1, 2, 2, 3, 3, 4, 4, 5];
    assert_eq!(cache.acquire(&namespace(), &prompt, wanted(4, 5)), Err(Full));
    assert_eq!(cache.acquire(&namespace(), &prompt, wanted(4, u32::MAX)), Err(Full));
    assert_eq!(cache.acquire(&namespace(), &prompt, wanted(0, 5)), Err(Full));
    cache.check_invariants().unwrap();
    assert_eq!((cache.last_event_id(), cache.counts()), (events, counts));

    let sparing = Wanted { spare_blocks: 1, ..wanted(3, 4) };
    assert_eq!(cache.acquire(&namespace(), &prompt[..7], sparing), Err(Full), "the prompt would leave no spare block");
    cache.check_invariants().unwrap();

    let fits = cache.acquire(&namespace(), &prompt[..7], wanted(3, 4)).unwrap();
    assert_eq!(fits.cached_blocks, 2);
    assert_eq!(cache.counts(), Counts { free: 0, cached: 0, in_use: 6 });
    assert_eq!(cache.allocate(), Err(Full));
    release(&mut cache, &fits.blocks);
    release(&mut cache, &held);
}

#[test]
fn failed_acquire_does_not_change_the_eviction_order() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[1, 1]);
    run_and_release(&mut cache, &[2, 2]);
    assert_eq!(cache.acquire(&namespace(), &[1, 1], wanted(1, 7)), Err(Full));
    let taken: Vec<_> = (0..5).map(|_| cache.allocate().unwrap()).collect();
    assert_eq!((overlap(&cache, &[1, 1]), overlap(&cache, &[2, 2])), (0, 1));
    release(&mut cache, &taken);
}

#[test]
fn free_blocks_are_used_before_cached_blocks_are_evicted() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[1, 1, 2, 2]);
    let acquired = cache.acquire(&other_namespace(), &[7; 8], wanted(0, 4)).unwrap();
    assert_eq!(overlap(&cache, &[1, 1, 2, 2]), 2);
    release(&mut cache, &acquired.blocks);
    assert_eq!(cache.counts(), Counts { free: 4, cached: 2, in_use: 0 });
}

#[test]
fn equal_blocks_are_merged_and_stored_once() {
    let mut cache = PrefixCache::new(SETTINGS);
    // Both requests acquire blocks before either of them commits, as two requests in one engine step do.
    let first = cache.acquire(&namespace(), &[1, 1, 2, 2], wanted(1, 2)).unwrap().blocks;
    let second = cache.acquire(&namespace(), &[1, 1, 2, 2], wanted(1, 2)).unwrap().blocks;
    let root = cache.commit(&namespace(), None, first[0], &[1, 1]);
    assert_eq!(root, first[0]);
    assert_eq!(cache.commit(&namespace(), None, second[0], &[1, 1]), root);
    assert_eq!(cache.commit(&namespace(), Some(root), second[1], &[2, 2]), second[1]);
    assert_eq!(cache.commit(&namespace(), Some(root), first[1], &[2, 2]), second[1]);
    cache.check_invariants().unwrap();
    assert_eq!(cache.counts(), Counts { free: 4, cached: 0, in_use: 2 });
    assert_eq!(changes(&mut cache), [stored(None, &hashes(&[1, 1, 2, 2]))]);

    release(&mut cache, &[root, second[1]]);
    assert_eq!(cache.counts().in_use, 2);
    release(&mut cache, &[root, second[1]]);
    assert_eq!(cache.counts(), Counts { free: 4, cached: 2, in_use: 0 });
}

#[test]
fn committing_a_block_equal_to_an_unused_cached_block_pins_the_cached_one() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[1, 1, 2, 2]);
    let fresh = cache.acquire(&namespace(), &[1, 1, 2, 2], wanted(0, 2)).unwrap().blocks;
    let root = cache.commit(&namespace(), None, fresh[0], &[1, 1]);
    let leaf = cache.commit(&namespace(), Some(root), fresh[1], &[2, 2]);
    cache.check_invariants().unwrap();
    assert_eq!(cache.counts(), Counts { free: 4, cached: 0, in_use: 2 });
    release(&mut cache, &[root, leaf]);
    assert_eq!(cache.counts(), Counts { free: 4, cached: 2, in_use: 0 });
}

#[test]
fn block_committed_by_two_owners_is_stored_once() {
    let mut cache = PrefixCache::new(SETTINGS);
    let block = cache.allocate().unwrap();
    cache.pin(block);
    assert_eq!(cache.commit(&namespace(), None, block, &[1, 1]), block);
    assert_eq!(cache.commit(&namespace(), None, block, &[1, 1]), block);
    assert_eq!(changes(&mut cache).len(), 1);
    release(&mut cache, &[block]);
    assert_eq!(cache.counts().in_use, 1);
    release(&mut cache, &[block]);
    assert_eq!(cache.counts(), Counts { free: 5, cached: 1, in_use: 0 });
}

#[test]
fn block_with_a_colliding_hash_is_never_a_hit() {
    // With 0 bits, every block has hash 0.
    let mut cache = PrefixCache::with_hash_bits(SETTINGS, 0);
    let first = run(&mut cache, &namespace(), &[1, 1, 2, 2]);
    assert_eq!(cache.take_events().len(), 1, "only the first block has the hash");
    let tenant = other_namespace();
    for (namespace, prompt, expected) in [
        (&namespace(), [1, 1, 2, 2], 1),
        (&namespace(), [2, 2, 1, 1], 0),
        (&namespace(), [1, 1, 1, 1], 1),
        (&tenant, [1, 1, 2, 2], 0),
    ] {
        let acquired = cache.acquire(namespace, &prompt, wanted(2, 2)).unwrap();
        assert_eq!(acquired.cached_blocks, expected, "{prompt:?}");
        assert_eq!(cache.commit(namespace, None, acquired.blocks[1], &[7, 7]), acquired.blocks[1]);
        release(&mut cache, &acquired.blocks);
    }
    release(&mut cache, &first);
    assert_eq!(cache.counts(), Counts { free: 5, cached: 1, in_use: 0 });
}

#[test]
fn colliding_block_is_evicted_when_unpinned() {
    let mut cache = PrefixCache::with_hash_bits(SETTINGS, 0);
    let foreign = run(&mut cache, &namespace(), &[1, 1]);
    run_and_release(&mut cache, &[2, 2]);
    assert_eq!((overlap(&cache, &[2, 2]), overlap(&cache, &[1, 1])), (0, 1), "a pinned block keeps its hash");
    release(&mut cache, &foreign);
    run_and_release(&mut cache, &[2, 2]);
    assert_eq!((overlap(&cache, &[2, 2]), overlap(&cache, &[1, 1])), (1, 0), "an unpinned block loses its hash");
    assert_eq!(cache.counts(), Counts { free: 5, cached: 1, in_use: 0 });
    let hash = SequenceHash(0);
    let removed = Change::Removed(vec![hash]);
    assert_eq!(changes(&mut cache), [stored(None, &[hash]), removed, stored(None, &[hash])]);
}

#[test]
fn colliding_block_is_evicted_with_its_descendants() {
    let mut cache = PrefixCache::new(SETTINGS);
    let short = run(&mut cache, &namespace(), &[1, 1, 2, 2, 3, 3]);
    run_and_release(&mut cache, &[1, 1, 2, 2, 4, 4]);
    release(&mut cache, &short);
    run_and_release(&mut cache, &[9, 9]);
    cache.take_events();
    let second = cache.find(&namespace(), &[1, 1, 2, 2], u32::MAX)[1];
    cache.evict_with_descendants(second);
    cache.check_invariants().unwrap();
    let [Change::Removed(removed)] = &changes(&mut cache)[..] else { panic!("one event reports all removed blocks") };
    let (three, four) = (hashes(&[1, 1, 2, 2, 3, 3])[2], hashes(&[1, 1, 2, 2, 4, 4])[2]);
    assert!(removed[..2].contains(&three) && removed[..2].contains(&four), "children are evicted first");
    assert_eq!(removed[2..], hashes(&[1, 1, 2, 2])[1..]);
    assert_eq!((overlap(&cache, &[1, 1, 2, 2]), overlap(&cache, &[9, 9])), (1, 1), "no other block is evicted");
    assert_eq!(cache.counts(), Counts { free: 4, cached: 2, in_use: 0 });
}

#[test]
fn child_of_a_private_block_is_private() {
    let mut cache = PrefixCache::new(SETTINGS);
    let blocks = cache.acquire(&namespace(), &[1, 1, 2, 2], wanted(0, 2)).unwrap().blocks;
    assert_eq!(cache.commit(&namespace(), Some(blocks[0]), blocks[1], &[2, 2]), blocks[1]);
    cache.check_invariants().unwrap();
    assert_eq!(cache.take_events(), []);
    release(&mut cache, &blocks);
    assert_eq!(cache.counts(), Counts { free: 6, cached: 0, in_use: 0 });
}

#[test]
fn disabled_cache_stores_and_finds_no_blocks_and_reports_no_events() {
    let mut cache = PrefixCache::new(CacheSettings { prefix_caching: false, ..SETTINGS });
    let blocks = run(&mut cache, &namespace(), &[1, 1, 2, 2]);
    assert_eq!(cache.acquire(&namespace(), &[1, 1, 2, 2], wanted(2, 2)).unwrap().cached_blocks, 0);
    release(&mut cache, &blocks);
    assert_eq!(cache.counts(), Counts { free: 4, cached: 0, in_use: 2 });
    cache.clear();
    cache.check_invariants().unwrap();
    assert_eq!((cache.take_events(), cache.last_event_id()), (vec![], 0));
    assert_eq!(cache.snapshot().stored, []);
}

#[test]
fn block_in_use_when_the_cache_is_cleared_is_not_shared_afterwards() {
    let mut cache = PrefixCache::new(SETTINGS);
    run_and_release(&mut cache, &[5, 5]);
    let blocks = cache.acquire(&namespace(), &[1, 1, 2, 2, 3, 3], wanted(0, 3)).unwrap().blocks;
    cache.commit(&namespace(), None, blocks[0], &[1, 1]);
    cache.commit(&namespace(), Some(blocks[0]), blocks[1], &[2, 2]);
    cache.take_events();

    cache.clear();
    cache.check_invariants().unwrap();
    assert_eq!(changes(&mut cache), [Change::Cleared]);
    assert_eq!(cache.snapshot().stored, []);
    assert_eq!(cache.counts(), Counts { free: 3, cached: 0, in_use: 3 });
    assert_eq!((overlap(&cache, &[1, 1, 2, 2]), overlap(&cache, &[5, 5])), (0, 0));

    // A block that follows an outdated block is not shared, and neither is an outdated block itself, even if it begins a prompt.
    let after = cache.allocate().unwrap();
    assert_eq!(cache.commit(&namespace(), Some(blocks[1]), after, &[3, 3]), after);
    assert_eq!(cache.commit(&namespace(), None, blocks[2], &[3, 3]), blocks[2]);
    assert_eq!(cache.take_events(), []);

    let again = run(&mut cache, &namespace(), &[1, 1]);
    assert_eq!(overlap(&cache, &[1, 1]), 1);
    release(&mut cache, &blocks);
    release(&mut cache, &[after]);
    release(&mut cache, &again);
    assert_eq!(cache.counts(), Counts { free: 5, cached: 1, in_use: 0 });

    run_and_release(&mut cache, &[6, 6, 7, 7, 8, 8, 9, 9, 4, 4]);
    assert_eq!(cache.counts(), Counts { free: 0, cached: 6, in_use: 0 });
}

#[test]
fn clear_frees_an_unused_block_whose_child_is_in_use() {
    let mut cache = PrefixCache::new(SETTINGS);
    let blocks = run(&mut cache, &namespace(), &[1, 1, 2, 2]);
    cache.release(blocks[0]);
    cache.clear();
    cache.check_invariants().unwrap();
    assert_eq!(cache.counts(), Counts { free: 5, cached: 0, in_use: 1 });
    release(&mut cache, &blocks[1..]);
    assert_eq!(cache.counts().free, 6);
}

#[test]
fn successive_changes_of_one_kind_are_merged_into_one_event() {
    let mut cache = PrefixCache::new(CacheSettings { capacity_blocks: 3, ..SETTINGS });
    run_and_release(&mut cache, &[1, 1, 2, 2, 3, 3]);
    run_and_release(&mut cache, &[1, 1, 4, 4, 5, 5]);
    let (left, right) = (hashes(&[1, 1, 2, 2, 3, 3]), hashes(&[1, 1, 4, 4, 5, 5]));
    assert_eq!(
        changes(&mut cache),
        [stored(None, &left), Change::Removed(vec![left[2], left[1]]), stored(Some(right[0]), &right[1..])]
    );
    assert_eq!(cache.last_event_id(), 3);
    run_and_release(&mut cache, &[6, 6, 7, 7]);
    assert_eq!(changes(&mut cache).len(), 2, "later changes are merged again");
}

#[test]
fn stored_event_contains_only_one_chain() {
    let mut cache = PrefixCache::new(SETTINGS);
    for prompt in [&[1, 1][..], &[2, 2], &[1, 1, 3, 3]] {
        run_and_release(&mut cache, prompt);
    }
    let long = hashes(&[1, 1, 3, 3]);
    let expected = [stored(None, &long[..1]), stored(None, &hashes(&[2, 2])), stored(Some(long[0]), &long[1..])];
    assert_eq!(changes(&mut cache), expected);
}

#[test]
fn changes_after_the_last_event_id_was_returned_are_a_new_event() {
    let mut cache = PrefixCache::new(SETTINGS);
    let blocks = cache.acquire(&namespace(), &[1, 1, 2, 2], wanted(0, 2)).unwrap().blocks;
    cache.commit(&namespace(), None, blocks[0], &[1, 1]);
    let snapshot = cache.snapshot();
    cache.commit(&namespace(), Some(blocks[0]), blocks[1], &[2, 2]);

    // A subscriber that starts from the snapshot skips event 1, so the second block must come with event 2.
    assert_eq!(snapshot.at_event_id, 1);
    let ids: Vec<_> = cache.take_events().iter().map(|event| event.event_id).collect();
    assert_eq!(ids, [1, 2]);
}

#[test]
fn snapshot_has_one_chain_per_leaf() {
    let mut cache = PrefixCache::new(CacheSettings { capacity_blocks: 16, ..SETTINGS });
    for prompt in [&[1, 1, 2, 2, 3, 3][..], &[1, 1, 2, 2, 4, 4], &[1, 1, 5, 5], &[6, 6]] {
        run_and_release(&mut cache, prompt);
    }
    let snapshot = cache.snapshot();
    assert_eq!(snapshot.at_event_id, cache.last_event_id());
    assert_eq!(snapshot.stored.len(), 4);
    let mut known = Vec::new();
    for chain in &snapshot.stored {
        assert!(chain.parent.is_none_or(|parent| known.contains(&parent)), "a child came before its parent");
        known.extend(&chain.sequence_hashes);
    }
    known.sort();
    let prompts = [&[1, 1, 2, 2, 3, 3][..], &[1, 1, 2, 2, 4, 4], &[1, 1, 5, 5], &[6, 6]];
    let mut expected: Vec<_> = prompts.iter().flat_map(|prompt| hashes(prompt)).collect();
    expected.sort();
    expected.dedup();
    assert_eq!(known, expected);
}

#[test]
#[should_panic(expected = "released as often as it was pinned")]
fn releasing_a_block_twice_panics() {
    let mut cache = PrefixCache::new(SETTINGS);
    let block = cache.allocate().unwrap();
    cache.release(block);
    cache.release(block);
}

#[test]
#[should_panic(expected = "only full blocks are shared")]
fn committing_a_partial_block_panics() {
    let mut cache = PrefixCache::new(SETTINGS);
    let block = cache.allocate().unwrap();
    cache.commit(&namespace(), None, block, &[1]);
}

#[test]
#[should_panic(expected = "a cached block keeps its content")]
fn committing_other_content_for_a_cached_block_panics() {
    let mut cache = PrefixCache::new(SETTINGS);
    let block = cache.allocate().unwrap();
    cache.commit(&namespace(), None, block, &[1, 1]);
    cache.commit(&namespace(), None, block, &[2, 2]);
}

#[test]
#[should_panic(expected = "only an owner of a block can share it")]
fn pinning_a_free_block_panics() {
    let mut cache = PrefixCache::new(SETTINGS);
    cache.pin(BlockId(0));
}

#[test]
fn allocation_from_a_cache_of_zero_blocks_fails() {
    let mut cache = PrefixCache::new(CacheSettings { capacity_blocks: 0, ..SETTINGS });
    assert_eq!(cache.allocate(), Err(Full));
    assert_eq!(cache.acquire(&namespace(), &[1], wanted(0, 1)), Err(Full));
    cache.clear();
    cache.check_invariants().unwrap();
}
