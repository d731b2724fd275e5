//! Tests of prefills whose blocks are sent to another worker.

use super::*;

#[test]
fn prefill_keeps_its_blocks_until_its_job_is_cancelled() {
    let mut world = World::new(64, SETTINGS);
    world.machine.prefill(0, prefill(prompt("held", 50)), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!(world.machine.load().in_use_blocks, 4, "blocks are held until the job knows which to send");
    world.machine.cancel(0);
    world.assert_idle();
    assert_eq!(world.machine.load().cached_blocks, 3, "computed blocks stay cached");
    world.machine.prefill(1, prefill(prompt("held", 50)), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!(world.cached(1), Some(48));
    world.machine.send_blocks(1, vec![0, 3, 3, 900], BlockAccess::Copied);
    world.act();
    assert_eq!(world.blocks(1).iter().map(|block| block.0).collect::<Vec<_>>(), [0, 3]);
    assert_eq!(world.events[&1].iter().filter(|event| matches!(event, Event::Computed(_))).count(), 1);
    world.machine.cancel(1);
    world.assert_idle();
}

#[test]
fn preempted_prefill_still_sends_its_blocks() {
    let mut world = World::new(37, EngineSettings { chunk_budget: 16, ..SETTINGS });
    world.machine.generate(0, generate(prompt("grows", 60), 90), world.now).expect("the job fits in the cache");
    world.machine.prefill(1, prefill(prompt("pushed back", 500)), world.now).expect("the job fits in the cache");
    while world.machine.preemptions == 0 {
        assert!(world.step(), "a sequence runs out of blocks");
    }
    assert!(world.blocks(1).is_empty() && world.machine.held.is_empty());
    world.machine.send_blocks(1, (0..5).collect(), BlockAccess::Copied);
    world.run();
    assert_eq!(world.blocks(1).iter().map(|block| block.0).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    world.machine.cancel(1);
    world.assert_idle();
}

#[test]
fn computed_blocks_are_reported_before_later_chunks_are_computed() {
    let mut world = World::new(64, EngineSettings { chunk_budget: 32, ..SETTINGS });
    world.machine.prefill(0, prefill(prompt("early", 97)), world.now).expect("the job fits in the cache");
    world.step();
    world.machine.send_blocks(0, (0..6).collect(), BlockAccess::Copied);
    world.act();
    assert_eq!(world.blocks(0).len(), 2, "one chunk of two blocks is computed");
    world.step();
    assert_eq!(world.blocks(0).len(), 4);
}

#[test]
fn blocks_requested_in_place_are_reported_without_copies() {
    let mut world = World::new(64, EngineSettings { chunk_budget: 32, ..SETTINGS });
    world.machine.prefill(0, prefill(prompt("early", 97)), world.now).expect("the job fits in the cache");
    world.step();
    world.machine.send_blocks(0, vec![1, 0, 3, 5], BlockAccess::InPlace);
    world.run();
    let ready: Vec<&Vec<ReadyBlock>> = world.events[&0]
        .iter()
        .filter_map(|event| match event {
            Event::BlocksReady(blocks) => Some(blocks),
            _ => None,
        })
        .collect();
    let indices: Vec<Vec<u32>> = ready.iter().map(|blocks| blocks.iter().map(|block| block.index).collect()).collect();
    assert_eq!(indices, [vec![0, 1], vec![3], vec![5]], "each step reports the requested blocks that it completed");
    assert!(matches!(world.events[&0].last(), Some(Event::Computed(_))));
    let expected = kv(&prompt("early", 97));
    for ReadyBlock { index, block, content } in ready.into_iter().flatten() {
        assert_eq!(world.read(*block), expected[*index as usize].1, "the KV memory holds block {index}");
        assert!(content.is_empty(), "the block is not copied");
    }
    world.machine.cancel(0);
    world.assert_idle();
}
