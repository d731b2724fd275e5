//! Tests of the time that answers wait for steps with prompts.

use super::*;

/// Returns the duration of a step on the simulator's default device.
fn device(tokens: u32, sequences: u32) -> Duration {
    let prefill = if tokens > 0 { 4.0 + f64::from(tokens) / 20.0 } else { 0.0 };
    let decode = if sequences > 0 { 6.0 + 0.1 * f64::from(sequences) } else { 0.0 };
    Duration::from_secs_f64((prefill + decode) / 1e3)
}

/// Runs two answers while prompts arrive all the time. Returns the longest step after the first prompts, the total time of steps with
/// prompts, and the part of that total time that prompt tokens took.
fn longest_step(itl_max: Option<Duration>) -> (Duration, Duration, Duration) {
    let mut world = World::new(16_384, EngineSettings { chunk_budget: 2_048, itl_max, ..SETTINGS });
    world.device = device;
    let add = |world: &mut World, id: JobId, job: Generate| {
        world.machine.generate(id, job, world.now).expect("the job fits in the cache");
    };
    // The engine measures its rates with the first prompts and answers.
    for id in 0..2 {
        let mut job = generate(prompt(&format!("answer {id} "), 9_000), 900);
        job.sampling.min_tokens = 900;
        add(&mut world, id, job);
    }
    while world.events.get(&1).is_none_or(|events| events.len() < 20) {
        assert!(world.step(), "two answers run");
    }
    let (mut longest, mut mixed, mut prompts) = (Duration::ZERO, Duration::ZERO, Duration::ZERO);
    for id in 2..22 {
        add(&mut world, id, generate(prompt(&format!("prompt {id} "), 3_000), 1));
        while !world.ended.contains(&id) {
            assert!(world.step(), "the prompt is computed");
            let tokens: usize = world.chunks.iter().map(|(_, len)| len).filter(|len| **len > 1).sum();
            // While all steps with prompts have been equally long, the fixed time of a step is not known, so the first shorter steps are too long.
            if tokens > 0 && id >= 5 {
                longest = longest.max(world.took);
                mixed += world.took;
                prompts += device(tokens as u32, 0);
            }
        }
    }
    assert!(!world.ended.contains(&0) && !world.ended.contains(&1), "the answers ran all the time");
    (longest, mixed, prompts)
}

#[test]
fn steps_with_prompts_do_not_exceed_the_limit_on_the_time_between_tokens() {
    let answers_alone = device(0, 2);
    for (itl_max, expected_ms) in [(None, 99.2), (Some(40), 40.0), (Some(25), 25.0), (Some(8), 20.4)] {
        let (longest, mixed, prompts) = longest_step(itl_max.map(Duration::from_millis));
        let longest_ms = longest.as_secs_f64() * 1e3;
        assert!((expected_ms * 0.9..expected_ms * 1.05).contains(&longest_ms), "{itl_max:?}: {longest_ms} ms");
        assert!(prompts * 2 >= mixed, "{itl_max:?}: prompts have {prompts:?} of {mixed:?}");
        assert!(longest > answers_alone);
    }
}
