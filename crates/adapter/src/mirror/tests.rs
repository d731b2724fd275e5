use super::*;
use crate::UnknownMedium;
use proptest::{prelude::*, sample::Index};
use std::collections::{BTreeMap, HashSet};
use tandem_kv::{Change, ImageId, StoredChain, cache_salt, sequence_hashes};

const BLOCK: usize = 2;
/// The number of the cluster's blocks in one engine block.
const K: usize = 2;
const ENGINE_BLOCK: usize = BLOCK * K;

const KEY: HashKey = HashKey::NONE;

fn mirror() -> Mirror {
    mirror_with(|_| {})
}

fn mirror_with(change: impl FnOnce(&mut MirrorSettings)) -> Mirror {
    let mut settings = MirrorSettings {
        hash_key: KEY,
        block_size: BLOCK as u32,
        engine_block_size: ENGINE_BLOCK as u32,
        device_blocks: 8,
        hits_are_reported: false,
        store: None,
        engine_blocks_max: 1000,
    };
    change(&mut settings);
    Mirror::new(settings).unwrap()
}

fn namespace() -> Namespace {
    Namespace::new("model", "main", "", "")
}

fn tokens(seed: u32, blocks: usize) -> Vec<TokenId> {
    (0..(blocks * ENGINE_BLOCK) as u32).map(|index| seed * 1000 + index).collect()
}

fn hashes(tokens: &[TokenId]) -> Vec<SequenceHash> {
    sequence_hashes(&KEY, &namespace(), BLOCK, tokens)
}

fn number(hash: u64) -> EngineHash {
    EngineHash::Number(hash)
}

fn first_blocks(engine_hashes: &[u64], tokens: Vec<TokenId>) -> BlocksStored {
    let mut extra_keys = vec![ExtraKeys::None; engine_hashes.len()];
    extra_keys[0] = ExtraKeys::Text(cache_salt(&KEY, &namespace()));
    BlocksStored {
        hashes: engine_hashes.iter().copied().map(number).collect(),
        parent: None,
        tokens,
        block_size: ENGINE_BLOCK as u32,
        lora: None,
        extra_keys,
        tier: Ok(Tier::Device),
        group: Some(0),
        kind: Some("full_attention".to_owned()),
        window_tokens: None,
        session: None,
    }
}

fn later_blocks(parent: u64, engine_hashes: &[u64], tokens: Vec<TokenId>) -> BlocksStored {
    BlocksStored { parent: Some(number(parent)), extra_keys: Vec::new(), ..first_blocks(engine_hashes, tokens) }
}

fn removed(engine_hash: u64) -> EngineEvent {
    removed_from(engine_hash, Tier::Device)
}

fn removed_from(engine_hash: u64, tier: Tier) -> EngineEvent {
    EngineEvent::Removed(BlocksRemoved { hashes: vec![number(engine_hash)], tier: Ok(tier), group: Some(0) })
}

fn changes(mirror: &mut Mirror) -> Vec<Change> {
    mirror.take().into_iter().map(|event| event.change).collect()
}

fn stored(parent: Option<SequenceHash>, sequence_hashes: &[SequenceHash]) -> Change {
    Change::Stored(StoredChain { parent, sequence_hashes: sequence_hashes.to_vec() })
}

#[test]
fn engine_blocks_are_reported_as_the_clusters_sequence_hashes() {
    let mut mirror = mirror();
    let prompt = tokens(1, 3);
    let all = hashes(&prompt);
    let (head, tail) = (prompt[..ENGINE_BLOCK].to_vec(), prompt[ENGINE_BLOCK..].to_vec());
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[11], head)), EngineEvent::Stored(later_blocks(11, &[12, 13], tail))]);
    assert_eq!(changes(&mut mirror), [stored(None, &all)]);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[]), [6, 0, 0, 0]);
    assert_eq!(mirror.snapshot().stored, [StoredChain { parent: None, sequence_hashes: all.clone() }]);
    mirror.apply(&[removed(13)]);
    assert_eq!(changes(&mut mirror), [Change::Removed(vec![all[5], all[4]])]);
    assert_eq!((mirror.cached_blocks(), mirror.last_id()), (4, 2));
    mirror.apply(&[EngineEvent::Cleared, EngineEvent::Cleared]);
    assert_eq!(changes(&mut mirror), [Change::Cleared]);
    assert_eq!(*mirror.unroutable(), Unroutable::default());
}

#[test]
fn block_stored_twice_stays_cached_until_both_copies_are_removed() {
    let mut mirror = mirror();
    let block = || EngineEvent::Stored(first_blocks(&[1], tokens(1, 1)));
    mirror.apply(&[block(), block(), removed(1)]);
    assert_eq!(changes(&mut mirror), [stored(None, &hashes(&tokens(1, 1)))]);
    mirror.apply(&[removed(1), removed(1)]);
    assert_eq!(changes(&mut mirror).len(), 1);
    assert_eq!(mirror.cached_blocks(), 0);
}

#[test]
fn cache_hit_that_is_reported_as_stored_is_not_counted_as_a_copy() {
    let mut mirror = mirror_with(|settings| settings.hits_are_reported = true);
    let prompt = tokens(1, 2);
    let both = || EngineEvent::Stored(first_blocks(&[1, 2], prompt.clone()));
    mirror.apply(&[both(), both(), removed(2)]);
    assert_eq!(mirror.cached_blocks(), K);
    mirror.apply(&[both()]);
    assert_eq!(mirror.cached_blocks(), 2 * K);
    mirror.apply(&[removed(2), removed(1)]);
    assert_eq!(mirror.cached_blocks(), 0);
}

#[test]
fn children_of_a_removed_block_are_reported_again_when_the_block_is_stored_again() {
    let mut mirror = mirror();
    let prompt = tokens(1, 3);
    let all = hashes(&prompt);
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[1, 2, 3], prompt.clone()))]);
    mirror.take();
    mirror.apply(&[removed(1)]);
    let children_first: Vec<_> = all.iter().rev().copied().collect();
    assert_eq!(changes(&mut mirror), [Change::Removed(children_first)]);
    assert_eq!(mirror.snapshot().stored, []);
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[1], prompt[..ENGINE_BLOCK].to_vec()))]);
    assert_eq!(changes(&mut mirror), [stored(None, &all)]);
}

#[test]
fn blocks_that_cannot_be_identified_are_not_routable() {
    let first = || first_blocks(&[1, 2], tokens(1, 2));
    let keys = |keys: [ExtraKeys; 2]| keys.to_vec();
    let text = |text: &str| ExtraKeys::Text(text.to_owned());
    let salt = || ExtraKeys::Text(cache_salt(&KEY, &namespace()));
    let count = |change: fn(&mut Unroutable)| {
        let mut unroutable = Unroutable::default();
        change(&mut unroutable);
        unroutable
    };
    let namespace_and_parent = count(|unroutable| (unroutable.namespace, unroutable.parent) = (1, 1));
    let keys_and_parent = count(|unroutable| (unroutable.extra_keys, unroutable.parent) = (1, 1));
    for (blocks, routable, expected) in [
        (BlocksStored { extra_keys: Vec::new(), ..first() }, 0, namespace_and_parent),
        (BlocksStored { extra_keys: keys([text("tenant-a"), ExtraKeys::None]), ..first() }, 0, namespace_and_parent),
        (BlocksStored { extra_keys: keys([ExtraKeys::Other, ExtraKeys::None]), ..first() }, 0, keys_and_parent),
        (BlocksStored { lora: Some("lora".to_owned()), ..first() }, 2 * K, Unroutable::default()),
        (BlocksStored { extra_keys: keys([salt(), text("image")]), ..first() }, K, count(|unroutable| unroutable.extra_keys = 1)),
        (
            BlocksStored { extra_keys: keys([salt(), ExtraKeys::Other]), ..first() },
            K,
            count(|unroutable| unroutable.extra_keys = 1),
        ),
        (BlocksStored { parent: Some(number(7)), ..first() }, 0, count(|unroutable| unroutable.parent = 2)),
        (
            BlocksStored { kind: Some("chunked_local_attention".to_owned()), ..first() },
            0,
            count(|unroutable| unroutable.group = 2),
        ),
        (BlocksStored { tier: Err(UnknownMedium("TAPE".to_owned())), ..first() }, 0, count(|unroutable| unroutable.medium = 2)),
        (BlocksStored { block_size: BLOCK as u32, ..first() }, 0, count(|unroutable| unroutable.block_size = 2)),
        (BlocksStored { tokens: tokens(1, 1), ..first() }, 0, count(|unroutable| unroutable.block_size = 2)),
    ] {
        let mut mirror = mirror();
        mirror.apply(&[EngineEvent::Stored(blocks.clone()), removed(1), removed(2), EngineEvent::Stored(blocks.clone())]);
        assert_eq!(mirror.cached_blocks(), routable, "{blocks:?}");
        let twice = |of: fn(&Unroutable) -> u64| (of(mirror.unroutable()), 2 * of(&expected));
        for (found, expected) in [
            twice(|unroutable| unroutable.namespace),
            twice(|unroutable| unroutable.parent),
            twice(|unroutable| unroutable.extra_keys),
            twice(|unroutable| unroutable.group),
            twice(|unroutable| unroutable.block_size),
            twice(|unroutable| unroutable.medium),
        ] {
            assert_eq!(found, expected, "{blocks:?}");
        }
    }
}

fn of_group(group: u32, kind: &str, blocks: BlocksStored) -> EngineEvent {
    EngineEvent::Stored(BlocksStored { group: Some(group), kind: Some(kind.to_owned()), ..blocks })
}

fn reports(mirror: &Mirror, hash: SequenceHash) -> bool {
    mirror.snapshot().stored.iter().any(|chain| chain.sequence_hashes.contains(&hash))
}

#[test]
fn layers_without_a_rule_are_ignored_listed_and_reported() {
    let mut mirror = mirror();
    let chunked = |group| of_group(group, "chunked_local_attention", first_blocks(&[1], tokens(1, 1)));
    mirror.apply(&[of_group(1, "mla_attention", first_blocks(&[1], tokens(1, 1)))]);
    assert!(!reports(&mirror, SequenceHash::UNFOLLOWED_LAYERS));
    mirror.apply(&[chunked(0)]);
    assert_eq!((mirror.cached_blocks(), mirror.unroutable().group), (K, 1));
    assert_eq!(mirror.ignored_kinds().iter().collect::<Vec<_>>(), ["chunked_local_attention"]);
    assert!(reports(&mirror, SequenceHash::UNFOLLOWED_LAYERS));
    mirror.apply(&[EngineEvent::Cleared]);
    assert_eq!(mirror.cached_blocks(), 0);
    assert!(reports(&mirror, SequenceHash::UNFOLLOWED_LAYERS), "the layers are still not followed");
    for kind in 0..100 {
        mirror.apply(&[of_group(0, &format!("kind {kind}"), first_blocks(&[1], tokens(1, 1)))]);
    }
    assert_eq!(mirror.ignored_kinds().len(), IGNORED_KINDS_MAX);
}

#[test]
fn blocks_beyond_the_mirrors_capacity_are_not_mirrored() {
    let mut mirror = mirror_with(|settings| settings.engine_blocks_max = 2);
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[1, 2, 3, 4], tokens(1, 4)))]);
    assert_eq!((mirror.cached_blocks(), mirror.unroutable().excess, mirror.unroutable().parent), (2 * K, 1, 1));
    let device_blocks = mirror.settings.device_blocks as usize;
    assert_eq!(mirror.cached_blocks_max() as usize, device_blocks.max(2 * (5 * K + 1) + 6));
    assert_eq!(
        mirror_with(|settings| settings.engine_blocks_max = device_blocks).cached_blocks_max() as usize,
        (5 * K + 1) * device_blocks + 6
    );
}

#[test]
fn engine_block_size_that_is_not_a_multiple_of_the_cluster_block_size_is_refused() {
    let wrong = |engine_block_size| {
        let settings = MirrorSettings { engine_block_size, ..mirror().settings };
        Mirror::new(settings).err()
    };
    assert_eq!(wrong(BLOCK as u32), None);
    for size in [0, 1, 3] {
        assert_eq!(wrong(size), Some(WrongBlockSize { engine_block_size: size, block_size: BLOCK as u32 }));
    }
}

#[test]
fn assumed_blocks_are_those_of_the_latest_prompts() {
    let mut mirror = mirror();
    // The device's memory has 8 blocks, which hold two prompts of 2 engine blocks each.
    let prompts = [1, 2, 3].map(|seed| tokens(seed, 2));
    let cached = |mirror: &Mirror, prompt: &[TokenId]| mirror.cached_prefix(&namespace(), prompt, &[])[0];
    for prompt in &prompts[..2] {
        mirror.assume_stored(&namespace(), prompt, &[]);
    }
    mirror.assume_stored(&namespace(), &prompts[0], &[]);
    mirror.take();
    // The first engine block of prompt 3 displaces the last one of prompt 2, the least recently used prompt. Prompt 3's last, partial block
    // is not cached.
    mirror.assume_stored(&namespace(), &prompts[2][..ENGINE_BLOCK + 3], &[]);
    let (second, third) = (hashes(&prompts[1]), hashes(&prompts[2]));
    assert_eq!(changes(&mut mirror), [stored(None, &third[..2]), Change::Removed(vec![second[3], second[2]])]);
    assert_eq!([&prompts[0], &prompts[1], &prompts[2]].map(|prompt| cached(&mirror, prompt)), [4, 2, 2]);
    mirror.assume_stored(&namespace(), &tokens(4, 5), &[]);
    assert_eq!((mirror.cached_blocks(), cached(&mirror, &tokens(4, 5))), (8, 8));
    mirror.clear();
    assert_eq!(mirror.cached_blocks(), 0);
    mirror.assume_stored(&namespace(), &prompts[0], &[]);
    assert_eq!(cached(&mirror, &prompts[0]), 4);
}

/// A set of blocks that is built from events, as in a router's index, and that checks each event.
#[derive(Default)]
struct Replica {
    blocks: BTreeMap<SequenceHash, Option<SequenceHash>>,
    last_id: u64,
}

impl Replica {
    fn of(snapshot: &Snapshot) -> Self {
        let mut replica = Self { last_id: snapshot.at_event_id, ..Self::default() };
        for chain in &snapshot.stored {
            replica.store(chain);
        }
        replica
    }

    fn apply(&mut self, events: &[KvEvent]) {
        let last_id = self.last_id;
        for event in events.iter().filter(|event| event.event_id > last_id) {
            assert_eq!(event.event_id, self.last_id + 1, "the event ids have a gap");
            self.last_id = event.event_id;
            match &event.change {
                Change::Stored(chain) => self.store(chain),
                Change::Removed(hashes) => {
                    for hash in hashes {
                        assert!(self.blocks.remove(hash).is_some(), "an absent block was removed");
                        assert!(
                            !self.blocks.values().any(|parent| *parent == Some(*hash)),
                            "a parent was removed before its child"
                        );
                    }
                }
                Change::Cleared => self.blocks.clear(),
            }
        }
    }

    fn store(&mut self, chain: &StoredChain) {
        let mut parent = chain.parent;
        for hash in &chain.sequence_hashes {
            assert!(parent.is_none_or(|parent| self.blocks.contains_key(&parent)), "a child was stored before its parent");
            assert_eq!(self.blocks.insert(*hash, parent), None, "a block was stored twice");
            parent = Some(*hash);
        }
    }

    fn hashes(&self) -> HashSet<SequenceHash> {
        self.blocks.keys().copied().collect()
    }
}

/// A block of the simulated engine: the number of one of two salts, and one to four binary choices. The choices determine the tokens of the
/// block and of the blocks before it. Both salts belong to one namespace.
type Path = (u8, Vec<bool>);

#[derive(Clone, Debug)]
enum Op {
    /// Stores the blocks of the path from this depth on in the tier.
    Store(Path, usize, Tier),
    /// Removes one of the stored blocks, which need not be a leaf.
    Remove(Index),
    Clear,
    /// Starts a replica from a snapshot.
    Follow,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let path = (0..2_u8, proptest::collection::vec(any::<bool>(), 1..5));
    let tier = prop_oneof![12 => Just(Tier::Device), 3 => Just(Tier::Host), 1 => Just(Tier::Disk), 1 => Just(Tier::Store)];
    let op = prop_oneof![
        8 => (path, 0..4_usize, tier).prop_map(|(path, from, tier)| Op::Store(path, from, tier)),
        8 => any::<Index>().prop_map(Op::Remove),
        1 => Just(Op::Clear),
        2 => Just(Op::Follow),
    ];
    proptest::collection::vec(op, 0..60)
}

/// Returns the engine's hash of a block. Under the two salts one block has different engine hashes, but the same sequence hash, because
/// both salts have the same root hash.
fn engine_hash((salt, choices): &Path) -> EngineHash {
    EngineHash::Bytes(std::iter::once(*salt).chain(choices.iter().map(|choice| u8::from(*choice))).collect())
}

fn path_tokens(choices: &[bool]) -> Vec<TokenId> {
    choices.iter().flat_map(|choice| [u32::from(*choice); ENGINE_BLOCK]).collect()
}

/// The expected state: how often the engine has stored each identified block in each tier, and which tiers have held blocks.
#[derive(Default)]
struct Model(BTreeMap<Path, ByTier<u32>>, ByTier<bool>);

impl Model {
    fn held(&self, of: impl Fn(&ByTier<u32>) -> bool) -> HashSet<SequenceHash> {
        let held = self.0.iter().filter(|(_, counts)| of(counts));
        held.flat_map(|((_, choices), _)| hashes(&path_tokens(choices)).split_off((choices.len() - 1) * K)).collect()
    }

    /// Returns the blocks that are reported, those of the tiers' chains included.
    fn all_reported(&self) -> HashSet<SequenceHash> {
        let mut reported = self.reported(|_| true);
        let begun = |tier: &Tier| *tier == Tier::Store && self.1[3] || tier.index() < 3 && self.1[tier.index() + 1];
        for tier in Tier::ALL.into_iter().filter(begun) {
            let first = if tier == Tier::Store { 3 } else { 0 };
            let chain = self.reported(|counts| counts[first..=tier.index()].iter().any(|count| *count > 0));
            reported.insert(tier.note());
            reported.extend(chain.into_iter().map(|hash| hash.in_tier(tier)));
        }
        reported
    }

    fn reported(&self, of: impl Fn(&ByTier<u32>) -> bool) -> HashSet<SequenceHash> {
        let held = self.held(of);
        let chains = self.0.keys().map(|(_, choices)| hashes(&path_tokens(choices)));
        chains.flat_map(|chain| chain.into_iter().take_while(|hash| held.contains(hash)).collect::<Vec<_>>()).collect()
    }
}

fn event_of((salt, choices): &Path, from: usize, tier: Tier) -> BlocksStored {
    let ends = from + 1..=choices.len();
    let mut digits = cache_salt(&KEY, &namespace());
    digits.replace_range(79.., &salt.to_string());
    let mut extra_keys = vec![ExtraKeys::None; choices.len() - from];
    if from == 0 {
        extra_keys[0] = ExtraKeys::Text(digits);
    }
    BlocksStored {
        hashes: ends.map(|end| engine_hash(&(*salt, choices[..end].to_vec()))).collect(),
        parent: (from > 0).then(|| engine_hash(&(*salt, choices[..from].to_vec()))),
        extra_keys,
        tier: Ok(tier),
        ..first_blocks(&[0], path_tokens(choices).split_off(from * ENGINE_BLOCK))
    }
}

proptest! {
    #[test]
    fn mirror_and_the_replay_of_its_events_equal_a_naive_model(ops in ops()) {
        let (mut mirror, mut model) = (mirror(), Model::default());
        let mut replicas = vec![Replica::default()];
        let mut physical: Vec<(Path, Tier)> = Vec::new();
        for op in ops {
            match op {
                Op::Store(path, from, tier) => {
                    let from = from.min(path.1.len() - 1);
                    mirror.apply(&[EngineEvent::Stored(event_of(&path, from, tier))]);
                    let mut identified = from == 0 || model.0.contains_key(&(path.0, path.1[..from].to_vec()));
                    for end in from + 1..=path.1.len() {
                        let block = (path.0, path.1[..end].to_vec());
                        identified |= model.0.contains_key(&block);
                        if identified {
                            model.0.entry(block.clone()).or_default()[tier.index()] += 1;
                            model.1[tier.index()] = true;
                        }
                        physical.push((block, tier));
                    }
                }
                Op::Remove(index) if !physical.is_empty() => {
                    let (path, tier) = physical.swap_remove(index.index(physical.len()));
                    let hashes = vec![engine_hash(&path)];
                    mirror.apply(&[EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(tier), group: Some(0) })]);
                    if let Some(counts) = model.0.get_mut(&path) {
                        let count = &mut counts[tier.index()];
                        *count = count.saturating_sub(1);
                        if *counts == [0; 4] {
                            model.0.remove(&path);
                        }
                    }
                }
                Op::Remove(_) => {}
                Op::Clear => {
                    mirror.apply(&[EngineEvent::Cleared]);
                    model = Model::default();
                    physical.clear();
                }
                Op::Follow => replicas.push(Replica::of(&mirror.snapshot())),
            }
            let events = mirror.take();
            prop_assert_eq!(mirror.cached_blocks(), model.reported(|_| true).len());
            let expected = model.all_reported();
            for replica in &mut replicas {
                replica.apply(&events);
                prop_assert_eq!(replica.last_id, mirror.last_id());
                prop_assert_eq!(&replica.hashes(), &expected);
            }
            prop_assert_eq!(Replica::of(&mirror.snapshot()).hashes(), expected);
            let within = Tier::ALL.map(|tier| model.held(|counts| counts[..=tier.index()].iter().any(|count| *count > 0)));
            for choices in [[true; 4], [false; 4], [true, false, true, false]] {
                let prompt = path_tokens(&choices);
                let chain = hashes(&prompt);
                let found = mirror.cached_prefix(&namespace(), &prompt, &[]);
                for (tier, within) in within.iter().enumerate() {
                    let leading = chain.iter().take_while(|hash| within.contains(hash)).count();
                    prop_assert_eq!(found[..=tier].iter().sum::<u32>() as usize, leading);
                }
            }
        }
    }

    #[test]
    fn assumed_blocks_equal_those_of_a_naive_lru_model(prompts in proptest::collection::vec(proptest::collection::vec(any::<bool>(), 1..5), 1..30)) {
        let mut mirror = mirror();
        let mut replica = Replica::default();
        let mut model: Vec<(SequenceHash, usize, usize)> = Vec::new();
        for (time, choices) in prompts.into_iter().enumerate() {
            let prompt = path_tokens(&choices);
            mirror.assume_stored(&namespace(), &prompt, &[]);
            for (position, hash) in hashes(&prompt).into_iter().enumerate() {
                model.retain(|(other, ..)| *other != hash);
                model.push((hash, time, position));
            }
            while model.len() > 8 {
                let oldest = (0..model.len()).min_by_key(|index| (model[*index].1, std::cmp::Reverse(model[*index].2))).unwrap();
                model.swap_remove(oldest);
            }
            replica.apply(&mirror.take());
            prop_assert_eq!(replica.hashes(), model.iter().map(|(hash, ..)| *hash).collect::<HashSet<_>>());
            prop_assert_eq!(mirror.cached_blocks(), model.len());
        }
    }
}

mod cost;
mod hybrid;
mod images;
mod tiers;
