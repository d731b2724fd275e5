//! Equal prompts that come together are computed once.

use super::*;

/// Prompt tokens of all steps so far.
fn computed(world: &mut World) -> usize {
    let mut prefilled = 0;
    loop {
        world.now += Duration::from_millis(1);
        let plan = world.machine.plan(world.now);
        world.act();
        let Some(plan) = plan else { return prefilled };
        let chunks = world.machine.chunks(&plan);
        let output = world.engine.step(&chunks).expect("the simulator does not fail");
        prefilled += world.machine.complete(&plan, &output, Duration::from_millis(1), world.now).prefill_tokens as usize;
        world.act();
    }
}

#[test]
fn a_burst_of_one_prompt_is_computed_once_and_the_rest_is_cached() {
    let mut world = World::new(2_048, SETTINGS);
    let text = prompt("the same for all", 1_000);
    for id in 0..8 {
        world.machine.prefill(id, prefill(text.clone()), world.now).expect("the job fits");
    }
    let mut job = generate(text.clone(), 5);
    job.sampling.seed = 9;
    world.machine.generate(8, job.clone(), world.now).expect("the job fits");
    world.step();
    let load = world.machine.load();
    assert_eq!((load.running_sequences, load.waiting_requests), (1, 8), "one computes, the others hold nothing");
    // 935 left of the first, 7 of each other prefill and 8 of the generation: what is computed for another counts once.
    assert_eq!(load.pending_prefill_tokens, 935 + 7 * 7 + 7, "what another computes counts there");
    for id in 0..8 {
        world.machine.send_blocks(id, vec![0]);
    }
    let prefilled = 64 + computed(&mut world);
    assert!(prefilled <= 999 + 8 * 16, "{prefilled} tokens are computed");
    assert_eq!((world.cached(0), world.cached(1), world.cached(8)), (Some(0), Some(992), Some(992)));
    assert_eq!(world.tokens(8, 0), alone(job)[0]);
    (0..8).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}

#[test]
fn who_waits_for_another_lets_others_pass_and_takes_over_when_it_leaves() {
    let mut world = World::new(256, EngineSettings { chunk_budget: 32, ..SETTINGS });
    let text = prompt("the first one leaves", 500);
    world.machine.prefill(0, prefill(text.clone()), world.now).expect("the job fits");
    world.machine.prefill(1, prefill([text.as_slice(), &prompt("and more", 100)].concat()), world.now).expect("the job fits");
    world.machine.prefill(2, prefill(prompt("another", 100)), world.now).expect("the job fits");
    world.step();
    world.step();
    assert_eq!((world.cached(0), world.cached(1), world.cached(2)), (Some(0), None, Some(0)));
    world.machine.cancel(0);
    world.run();
    assert_eq!(world.cached(1), Some(64), "what was computed until then");
    (1..3).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}

#[test]
fn waiting_for_another_is_bounded() {
    let mut world = World::new(256, EngineSettings { chunk_budget: 16, ..SETTINGS });
    let text = prompt("slow", 400);
    for id in 0..2 {
        world.machine.prefill(id, prefill(text.clone()), world.now).expect("the job fits");
    }
    world.step();
    assert_eq!(world.cached(1), None);
    world.now += Duration::from_secs(31);
    world.step();
    assert_eq!(world.cached(1), Some(16));
    world.run();
    (0..2).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}

#[test]
fn nobody_waits_for_what_will_not_be_found() {
    let text = prompt("not to be found", 400);
    for change in [0, 1, 2] {
        let mut world = World::new(256, EngineSettings { prefix_caching: change != 0, ..SETTINGS });
        world.machine.prefill(0, prefill(text.clone()), world.now).expect("the job fits");
        world.step();
        let second = match change {
            0 => prefill(text.clone()),
            1 => Prefill { namespace: Namespace::new("sim", "", "", "salt"), ..prefill(text.clone()) },
            _ => prefill([&prompt("x", 1), text.as_slice()].concat()),
        };
        world.machine.prefill(1, second, world.now).expect("the job fits");
        world.step();
        assert_eq!(world.cached(1), Some(0), "case {change}");
        (0..2).for_each(|id| world.machine.cancel(id));
        world.assert_idle();
    }
}
