//! Blocks in other tiers than the device's memory.

use super::*;

#[test]
fn block_in_host_memory_stays_routable_when_the_device_evicts_the_block() {
    let mut mirror = mirror();
    let prompt = tokens(1, 3);
    let on_host = |engine_hashes: &[u64]| {
        // vLLM's offloading reports hashes without tokens, unless it is configured to report the tokens, too.
        let blocks = BlocksStored { block_size: 0, tier: Ok(Tier::Host), ..first_blocks(engine_hashes, Vec::new()) };
        EngineEvent::Stored(BlocksStored { kind: None, ..blocks })
    };
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[1, 2, 3], prompt.clone())), on_host(&[2]), on_host(&[3])]);
    mirror.take();
    mirror.apply(&[removed(3), removed(2)]);
    assert_eq!(mirror.tier_blocks(), [2, 4, 0, 0]);
    let on_device: Vec<_> = hashes(&prompt).into_iter().map(|hash| hash.in_tier(Tier::Device)).collect();
    let dropped = on_device[2..].iter().rev().copied().collect();
    assert_eq!(changes(&mut mirror), [Change::Removed(dropped)], "only the device's chain becomes shorter");
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[]), [2, 4, 0, 0]);
    // Block 2 is in no tier now, so block 3 cannot be used.
    mirror.apply(&[removed_from(2, Tier::Host)]);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[]), [2, 0, 0, 0]);
    assert_eq!(mirror.cached_blocks(), K);
    mirror.apply(&[on_host(&[9])]);
    assert_eq!(mirror.unroutable().block_size, 1);
}

#[test]
fn chains_of_the_tiers_begin_with_the_first_block_outside_of_the_device_and_end_with_the_cache() {
    let mut mirror = mirror_with(|settings| settings.store = Some(Tier::Disk));
    let prompt = tokens(1, 2);
    let in_tier = |tier| EngineEvent::Stored(BlocksStored { tier: Ok(tier), ..first_blocks(&[1], tokens(1, 1)) });
    let chain = |tier: Tier, from: usize| hashes(&prompt)[from..].iter().map(|hash| hash.in_tier(tier)).collect::<Vec<_>>();
    mirror.apply(&[EngineEvent::Stored(first_blocks(&[1, 2], prompt.clone()))]);
    assert_eq!((mirror.tier_blocks(), changes(&mut mirror)), ([0; 4], vec![stored(None, &hashes(&prompt))]));
    // The device's blocks are in the chain of the tier before the store, and the stored one in the store's.
    mirror.apply(&[in_tier(Tier::Disk)]);
    let begun = [
        stored(None, &[Tier::Disk.note()]),
        stored(None, &chain(Tier::Disk, 0)),
        stored(None, &[Tier::Store.note()]),
        stored(None, &chain(Tier::Store, 0)[..K]),
    ];
    assert_eq!((mirror.tier_blocks(), changes(&mut mirror)), ([4, 0, 0, 2], begun.to_vec()));
    assert_eq!(mirror.cached_blocks(), 2 * K);
    mirror.apply(&[removed_from(1, Tier::Device)]);
    assert_eq!(mirror.cached_prefix(&namespace(), &prompt, &[]), [0, 0, 0, 2 + 2]);
    mirror.apply(&[EngineEvent::Cleared]);
    assert_eq!((mirror.tier_blocks(), mirror.snapshot().stored), ([0; 4], Vec::new()));
}
