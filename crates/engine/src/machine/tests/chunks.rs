//! Tests of the chunks that a prefill reports.

use super::*;
use crate::PrefillChunk;

fn chunks(world: &World, job: JobId) -> Vec<PrefillChunk> {
    let of = |event: &Event| match event {
        Event::Computed(chunks) => Some(chunks.clone()),
        Event::Started(started) => Some(started.chunks.clone()),
        _ => None,
    };
    world.events[&job].iter().find_map(of).expect("the engine computed the prompt")
}

/// Returns the chunks of a job. Each has the time at which it began, in milliseconds after the allocation of blocks, and its number of tokens.
fn steps(chunks: &[PrefillChunk]) -> Vec<(u128, u32)> {
    assert!(chunks.iter().all(|chunk| chunk.took == Duration::from_millis(1)), "a step takes 1 ms: {chunks:?}");
    chunks.iter().map(|chunk| (chunk.begun.as_millis(), chunk.tokens)).collect()
}

#[test]
fn reported_chunks_cover_the_uncached_prompt_tokens() {
    let mut world = World::new(64, SETTINGS);
    world.machine.prefill(0, prefill(prompt("cut", 150)), world.now).expect("the job fits in the cache");
    world.run();
    world.machine.send_blocks(0, vec![], BlockAccess::Copied);
    world.act();
    // The simulated clock advances only between steps, so each step of 1 ms seems to begin 1 ms too early. The first step would seem to begin before
    // the allocation of its blocks, so the reported time is 0.
    assert_eq!(steps(&chunks(&world, 0)), [(0, 64), (0, 64), (1, 21)]);
    world.machine.cancel(0);
    world.machine.generate(1, generate(prompt("cut", 150), 4), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!((world.cached(1), steps(&chunks(&world, 1))), (Some(144), vec![(0, 5)]));
    world.machine.generate(2, generate(prompt("cut", 145), 4), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!((world.cached(2), chunks(&world, 2)), (Some(144), vec![]), "the last token is not part of the prefill");
}

#[test]
fn chunks_beyond_the_report_limit_are_merged_into_the_last_one() {
    let mut world = World::new(200, EngineSettings { chunk_budget: 16, ..SETTINGS });
    world.machine.generate(0, generate(prompt("long", 1_601), 1), world.now).expect("the job fits in the cache");
    world.run();
    let chunks = chunks(&world, 0);
    assert_eq!((chunks.len(), chunks.iter().map(|chunk| chunk.tokens).sum::<u32>()), (64, 1_600));
    let last = chunks[63];
    assert_eq!((last.tokens, last.begun + last.took), (37 * 16, Duration::from_millis(99)));
}

#[test]
fn preempted_prefill_reports_the_chunks_after_its_preemption() {
    let mut world = World::new(37, EngineSettings { chunk_budget: 16, ..SETTINGS });
    world.machine.generate(0, generate(prompt("grows", 60), 90), world.now).expect("the job fits in the cache");
    world.step();
    world.machine.prefill(1, prefill(prompt("pushed back", 500)), world.now).expect("the job fits in the cache");
    world.run();
    assert!(world.machine.preemptions > 0, "the cache has too few blocks for both jobs");
    world.machine.send_blocks(1, vec![], BlockAccess::Copied);
    world.act();
    let computed: u32 = chunks(&world, 1).iter().map(|chunk| chunk.tokens).sum();
    assert!((1..=499).contains(&computed), "{computed} tokens of 499 computed, according to the chunks");
    world.machine.cancel(1);
    world.assert_idle();
}
