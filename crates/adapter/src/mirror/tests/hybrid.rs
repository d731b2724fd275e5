//! Hybrid models: a mirror returns the same reusable prefix as a plain model of vLLM's rule.

use super::*;

/// What a group of layers needs to continue after `n` blocks of a prompt: all blocks, the last window, or the last block.
#[derive(Clone, Copy, Debug)]
enum Layers {
    Full,
    Window(u32),
    State,
}

/// The kind of each group. With blocks of 4 tokens, the windows of 6, 9 and 14 tokens need the last 2, 2 and 4 blocks.
const LAYERS: [Layers; 6] = [Layers::Window(6), Layers::Window(9), Layers::State, Layers::Full, Layers::Full, Layers::Window(14)];
/// The first group with full attention, whose blocks are mirrored.
const FULL: usize = 3;

/// Twelve blocks in a tree: block `n` follows block `PARENTS[n]`.
const PARENTS: [Option<usize>; 12] =
    [None, Some(0), Some(1), Some(2), Some(3), Some(4), Some(2), Some(6), Some(7), Some(1), Some(9), Some(10)];

fn path(block: usize) -> Vec<usize> {
    let mut path: Vec<_> = std::iter::successors(Some(block), |block| PARENTS[*block]).collect();
    path.reverse();
    path
}

fn tokens_of(path: &[usize]) -> Vec<TokenId> {
    path.iter().flat_map(|block| tokens(*block as u32 + 1, 1)).collect()
}

fn store(group: usize, blocks: &[usize]) -> EngineEvent {
    let (kind, window_tokens) = match LAYERS[group] {
        Layers::Full => ("full_attention", None),
        Layers::Window(tokens) => ("sliding_window", Some(tokens)),
        Layers::State => ("mamba", None),
    };
    let hashes: Vec<_> = blocks.iter().map(|block| *block as u64).collect();
    // vLLM lists the tokens of all blocks since the parent, even if it stores only some of them in a group with a window.
    let from = PARENTS[blocks[0]];
    let stored = match (from, group) {
        (None, _) => first_blocks(&hashes, tokens_of(&path(blocks[blocks.len() - 1]))),
        (Some(parent), FULL) => later_blocks(parent as u64, &hashes, tokens_of(blocks)),
        (Some(parent), _) => later_blocks(parent as u64, &hashes, tokens(9, 7)),
    };
    EngineEvent::Stored(BlocksStored { group: Some(group as u32), kind: Some(kind.to_owned()), window_tokens, ..stored })
}

fn drop_from(group: usize, block: usize) -> EngineEvent {
    let hashes = vec![number(block as u64)];
    EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(Tier::Device), group: Some(group as u32) })
}

/// The largest prefix that every group can continue.
fn usable(held: &[BTreeMap<usize, u32>], path: &[usize]) -> usize {
    let fits = |n: usize| {
        LAYERS.iter().zip(held).all(|(layers, held)| {
            let needed = match layers {
                Layers::Full => n,
                Layers::Window(tokens) => (*tokens as usize - 1).div_ceil(ENGINE_BLOCK).min(n),
                Layers::State => n.min(1),
            };
            path[n - needed..n].iter().all(|block| held.contains_key(block))
        })
    };
    (0..=path.len()).rev().find(|n| fits(*n)).unwrap_or(0)
}

#[derive(Clone, Debug)]
enum Step {
    /// A group stores the last blocks of a path, at most this many.
    Store(usize, usize, usize),
    Drop(usize, usize),
    Clear,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let (group, block) = (0..LAYERS.len(), 0..PARENTS.len());
    let step = prop_oneof![
        12 => (group.clone(), block.clone(), 1_usize..7).prop_map(|(group, block, last)| Step::Store(group, block, last)),
        5 => (group, block).prop_map(|(group, block)| Step::Drop(group, block)),
        1 => Just(Step::Clear),
    ];
    prop::collection::vec(step, 1..120)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn cached_prefix_is_the_longest_prefix_that_every_group_can_continue(steps in steps()) {
        let mut mirror = mirror();
        let mut held = vec![BTreeMap::new(); LAYERS.len()];
        // All groups are known from the first prompt on, as in vLLM, where each prompt is stored in every group.
        let first: Vec<_> = (0..LAYERS.len()).map(|group| store(group, &[0])).collect();
        mirror.apply(&first);
        held.iter_mut().for_each(|held| { held.insert(0, 1); });
        for step in steps {
            match step {
                Step::Store(group, block, last) => {
                    let path = path(block);
                    let blocks = &path[path.len().saturating_sub(last)..];
                    // The mirror follows only blocks whose parents it knows.
                    let is_known = PARENTS[blocks[0]].is_none_or(|parent| held[FULL].contains_key(&parent));
                    if group == FULL && !is_known {
                        continue;
                    }
                    blocks.iter().for_each(|block| *held[group].entry(*block).or_insert(0) += 1);
                    mirror.apply(&[store(group, blocks)]);
                }
                Step::Drop(group, block) => {
                    mirror.apply(&[drop_from(group, block)]);
                    if let Some(copies) = held[group].get_mut(&block) {
                        *copies -= 1;
                        if *copies == 0 {
                            held[group].remove(&block);
                        }
                    }
                }
                Step::Clear => {
                    mirror.apply(&[EngineEvent::Cleared]);
                    held.iter_mut().for_each(BTreeMap::clear);
                }
            }
            for block in 0..PARENTS.len() {
                let path = path(block);
                let promised = mirror.cached_prefix(&namespace(), &tokens_of(&path), &[]);
                prop_assert_eq!(promised[0] as usize, K * usable(&held, &path), "blocks {:?} of {:?}", path, held);
            }
            let reported: HashSet<_> = mirror.snapshot().stored.into_iter().flat_map(|chain| chain.sequence_hashes).collect();
            prop_assert!(reported.contains(&SequenceHash::REUSE_POINTS));
            prop_assert_eq!(reported.iter().filter(|hash| !hash.is_marker()).count(), mirror.cached_blocks());
        }
    }
}

#[test]
fn prefix_is_reusable_only_if_the_window_at_its_end_is_cached() {
    let mut mirror = mirror();
    let prompt = tokens(1, 5);
    let all = hashes(&prompt);
    let window = |blocks: &[u64]| {
        EngineEvent::Stored(BlocksStored {
            window_tokens: Some(9),
            ..match of_group(1, "sliding_window", later_blocks(3, blocks, prompt.clone())) {
                EngineEvent::Stored(stored) => stored,
                _ => unreachable!("the event stores blocks"),
            }
        })
    };
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[1, 2, 3, 4, 5], prompt.clone()))]);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[])[0] as usize, 5 * K, "the model may have one group only");
    mirror.apply(&[window(&[4, 5])]);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[])[0] as usize, 5 * K);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt[..4 * ENGINE_BLOCK], &[])[0], 0, "block 3 is not kept");
    assert!(reports(&mirror, all[5 * K - 1].reuse_point()) && !reports(&mirror, all[4 * K - 1].reuse_point()));
    mirror.apply(&[EngineEvent::Removed(BlocksRemoved { hashes: vec![number(4)], tier: Ok(Tier::Device), group: Some(1) })]);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[])[0], 0);
    assert_eq!(mirror.cached_blocks(), 5 * K, "the blocks themselves are still cached");
}

/// For a prefix found in its cache, vLLM lists all blocks for every group, although a group with a window may hold only the last ones.
#[test]
fn cache_hit_counts_only_the_blocks_that_a_window_needs() {
    let mut mirror = mirror_with(|settings| settings.hits_are_reported = true);
    let prompt = tokens(1, 5);
    let window = |hashes: &[u64]| {
        let stored = BlocksStored { window_tokens: Some(9), ..first_blocks(hashes, prompt.clone()) };
        of_group(1, "sliding_window", stored)
    };
    let full = || EngineEvent::Stored(first_blocks(&[1, 2, 3, 4, 5], prompt.clone()));
    mirror.apply(&[window(&[4, 5]), full()]);
    let promised = |mirror: &Mirror| -> Vec<usize> {
        let until = |blocks: usize| mirror.cached_prefix(&namespace(), &prompt[..blocks * ENGINE_BLOCK], &[])[0] as usize / K;
        (1..=5).map(until).collect()
    };
    assert_eq!(promised(&mirror), [0, 0, 0, 0, 5]);
    mirror.apply(&[window(&[1, 2, 3, 4, 5]), full()]);
    assert_eq!(promised(&mirror), [0, 0, 0, 0, 5], "a found prefix stores nothing");
    // A copy that was found is no second copy: one removal is enough.
    mirror.apply(&[EngineEvent::Removed(BlocksRemoved { hashes: vec![number(5)], tier: Ok(Tier::Device), group: Some(1) })]);
    assert_eq!(promised(&mirror), [0; 5]);
    // After lost events, a found prefix shows which blocks the window holds.
    mirror.clear();
    mirror.apply(&[window(&[1, 2, 3, 4, 5]), full()]);
    assert_eq!(promised(&mirror), [0, 0, 0, 0, 5]);
}

#[test]
fn order_of_the_groups_events_does_not_matter() {
    let prompt = tokens(1, 5);
    let stored = BlocksStored { window_tokens: Some(9), ..first_blocks(&[1, 2, 3, 4, 5], prompt.clone()) };
    let window = of_group(1, "sliding_window", stored);
    let full = EngineEvent::Stored(first_blocks(&[1, 2, 3, 4, 5], prompt.clone()));
    for events in [[full.clone(), window.clone()], [window, full]] {
        let mut mirror = mirror();
        mirror.apply(&events);
        for blocks in 1..=5 {
            let cached = mirror.cached_prefix(&namespace(), &prompt[..blocks * ENGINE_BLOCK], &[]);
            assert_eq!(cached[0] as usize, blocks * K, "a new prompt is held as a whole");
        }
    }
}
