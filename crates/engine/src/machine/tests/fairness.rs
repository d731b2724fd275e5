//! Tests of several accounts and requests that together need more than the engine's capacity.

use super::*;
use proptest::prelude::*;

fn of(account: &str, job: Generate) -> Generate {
    Generate { account: account.to_owned(), ..job }
}

fn samples(text: &str, len: usize, samples: u32, tokens: u32) -> Generate {
    let mut job = generate(prompt(text, len), tokens);
    job.samples = samples;
    job.sampling.min_tokens = tokens;
    job
}

fn first_token(world: &mut World, job: JobId) -> usize {
    let before = world.steps;
    while !world.events.get(&job).is_some_and(|events| events.iter().any(|event| matches!(event, Event::Token { .. }))) {
        assert!(world.step() && world.steps < before + 1_000, "job {job} gets no token");
    }
    world.steps - before
}

fn assert_texts(world: &World, jobs: &[(JobId, Generate)]) {
    for (id, job) in jobs {
        for (sample, expected) in (0..).zip(alone(job.clone())) {
            assert_eq!(world.tokens(*id, sample), expected, "job {id} sample {sample}");
        }
    }
    world.assert_idle();
}

#[test]
fn samples_that_exceed_the_batch_limit_hold_no_blocks() {
    let job = samples("many samples", 100, 12, 20);
    let mut world = World::new(256, EngineSettings { batch_max: 4, ..SETTINGS });
    world.machine.generate(0, job.clone(), world.now).expect("the job fits in the cache");
    for _ in 0..6 {
        world.step();
    }
    let load = world.machine.load();
    assert_eq!(load.running_sequences, 12, "all samples count in the load");
    // The samples share six full blocks. Each of the four running samples has one more block, and the prompt's last block is kept for the samples
    // that wait.
    assert_eq!(load.in_use_blocks, 6 + 4 + 1);
    world.run();
    assert_eq!(world.machine.preemptions, 0);
    assert_texts(&world, &[(0, job)]);
}

#[test]
fn request_with_many_samples_does_not_delay_other_requests() {
    for account in ["", "another"] {
        let mut world = World::new(512, EngineSettings { batch_max: 8, ..SETTINGS });
        let mut jobs: Vec<(JobId, Generate)> =
            (0..3).map(|id| (id, samples(["one", "two", "three"][id as usize], 40, 16, 60))).collect();
        for (id, job) in &jobs {
            world.machine.generate(*id, job.clone(), world.now).expect("the job fits in the cache");
        }
        for _ in 0..20 {
            world.step();
        }
        jobs.push((3, of(account, generate(prompt("comes later", 50), 10))));
        world.machine.generate(3, jobs[3].1.clone(), world.now).expect("the job fits in the cache");
        let steps = first_token(&mut world, 3);
        assert!(steps <= 2, "the first token took {steps} steps, not two");
        world.run();
        assert_texts(&world, &jobs);
    }
}

#[test]
fn account_with_many_requests_does_not_delay_other_accounts() {
    let mut world = World::new(512, EngineSettings { batch_max: 4, ..SETTINGS });
    let mut jobs: Vec<(JobId, Generate)> =
        (0..8).map(|id| (id, of("greedy", samples(&format!("{id} of many"), 30, 1, 80)))).collect();
    jobs.push((8, of("modest", generate(prompt("the only one", 30), 10))));
    for (id, job) in &jobs[..8] {
        world.machine.generate(*id, job.clone(), world.now).expect("the job fits in the cache");
    }
    for _ in 0..5 {
        world.step();
    }
    world.machine.generate(8, jobs[8].1.clone(), world.now).expect("the job fits in the cache");
    assert!(first_token(&mut world, 8) <= 2);
    world.run();
    assert_texts(&world, &jobs);
}

#[test]
fn sample_of_a_large_request_is_preempted_for_a_waiting_request() {
    let mut jobs: Vec<(JobId, Generate)> = (0..2).map(|id| (id, samples(["takes", "all"][id as usize], 40, 8, 60))).collect();
    let mut world = World::new(44, SETTINGS);
    for (id, job) in &jobs {
        world.machine.generate(*id, job.clone(), world.now).expect("the job fits in the cache");
    }
    while world.machine.load().free_blocks + world.machine.load().cached_blocks >= 4 {
        assert!(world.step());
    }
    jobs.push((2, generate(prompt("has nothing yet", 49), 5)));
    world.machine.generate(2, jobs[2].1.clone(), world.now).expect("the job fits in the cache");
    let before = world.machine.preemptions;
    assert!(first_token(&mut world, 2) <= 2);
    assert!(world.machine.preemptions > before, "a sample of another request is preempted");
    world.run();
    assert_texts(&world, &jobs);
}

#[test]
fn single_sequence_of_a_request_is_not_preempted_for_other_requests() {
    let first = samples("one long answer", 300, 1, 100);
    let mut world = World::new(26, SETTINGS);
    world.machine.generate(0, first.clone(), world.now).expect("the job fits in the cache");
    for _ in 0..20 {
        world.step();
    }
    let second = generate(prompt("waits for it", 150), 5);
    world.machine.generate(1, second.clone(), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!(world.machine.preemptions, 0);
    assert_texts(&world, &[(0, first), (1, second)]);
}

#[test]
fn prefill_tokens_are_shared_between_accounts() {
    let mut world = World::new(4_096, EngineSettings { chunk_budget: 512, ..SETTINGS });
    for id in 0..10 {
        let long = Prefill { account: "greedy".to_owned(), ..prefill(prompt(&format!("{id} of many"), 3_000)) };
        world.machine.prefill(id, long, world.now).expect("the job fits in the cache");
    }
    world.step();
    let text = prompt("from another account", 1_000);
    world
        .machine
        .prefill(10, Prefill { account: "modest".to_owned(), ..prefill(text) }, world.now)
        .expect("the job fits in the cache");
    world.machine.send_blocks(10, vec![], BlockAccess::Copied);
    let before = world.steps;
    while !world.events.get(&10).is_some_and(|events| events.iter().any(|event| matches!(event, Event::Computed(_)))) {
        assert!(world.step());
    }
    // The prompt gets half of each step's budget of 512 tokens, so its 999 tokens take four steps.
    assert_eq!(world.steps - before, 4);
    (0..11).for_each(|id| world.machine.cancel(id));
    world.step();
    world.assert_idle();
}

#[test]
fn short_prompt_precedes_a_long_prompt_that_has_started() {
    let mut world = World::new(4_096, EngineSettings { chunk_budget: 64, ..SETTINGS });
    world.machine.generate(0, generate(prompt("a whole book", 5_000), 1), world.now).expect("the job fits in the cache");
    world.step();
    world.machine.generate(1, generate(prompt("a question", 60), 1), world.now).expect("the job fits in the cache");
    assert!(first_token(&mut world, 1) <= 2);
    world.run();
    world.assert_idle();
}

#[test]
fn long_prompt_does_not_starve() {
    let mut world = World::new(4_096, EngineSettings { chunk_budget: 64, ..SETTINGS });
    world.machine.prefill(0, prefill(prompt("a whole book", 2_000)), world.now).expect("the job fits in the cache");
    world.machine.send_blocks(0, vec![], BlockAccess::Copied);
    let done =
        |world: &World| world.events.get(&0).is_some_and(|events| events.iter().any(|event| matches!(event, Event::Computed(_))));
    let mut next = 1;
    while !done(&world) {
        let id = next;
        world
            .machine
            .prefill(id, prefill(prompt(&format!("{id} comes later"), 65)), world.now)
            .expect("the job fits in the cache");
        assert!(world.step() && world.steps < 200, "the long prompt is not computed");
        for job in 1..id {
            if world.machine.held.iter().any(|held| held.job == job) {
                world.machine.cancel(job);
            }
        }
        next += 1;
    }
    // The tokens of the long prompt take 32 steps. The prompts that overtake it take about as many.
    assert!((32..=70).contains(&world.steps), "{} steps", world.steps);
    (0..next).for_each(|job| world.machine.cancel(job));
    world.step();
    world.assert_idle();
}

#[test]
fn prompt_is_not_admitted_while_earlier_prompts_need_several_full_steps() {
    let mut world = World::new(100, EngineSettings { chunk_budget: 64, ..SETTINGS });
    for id in 0..3 {
        world.machine.prefill(id, prefill(prompt(&format!("{id} is long"), 500)), world.now).expect("the job fits in the cache");
    }
    world.step();
    assert_eq!((world.cached(0), world.cached(1)), (Some(0), None), "the first prompt needs more than four steps");
    world.machine.prefill(3, prefill(prompt("short", 100)), world.now).expect("the job fits in the cache");
    world.step();
    assert_eq!((world.cached(3), world.cached(1)), (Some(0), None));
    (0..4).for_each(|id| world.machine.cancel(id));
    world.step();
    world.assert_idle();
}

#[test]
fn preempted_sequences_precede_new_requests_of_their_account() {
    let mut world = World::new(8, SETTINGS);
    let jobs: Vec<(JobId, Generate)> = (0..3).map(|id| (id, samples(["a", "bc", "def"][id as usize], 20, 1, 60))).collect();
    for (id, job) in &jobs {
        world.machine.generate(*id, job.clone(), world.now).expect("the job fits in the cache");
    }
    while world.machine.preemptions == 0 {
        assert!(world.step());
    }
    world.machine.generate(3, generate(prompt("new", 17), 1), world.now).expect("the job fits in the cache");
    while world.machine.waiting.iter().any(|waiting| waiting.sequence.job < 3) {
        assert!(world.cached(3).is_none(), "the new job waits for the preempted jobs");
        assert!(world.step());
    }
    world.run();
    assert_texts(&world, &jobs);
}

#[test]
fn long_account_name_is_refused() {
    let mut world = World::new(8, SETTINGS);
    let long = of(&"x".repeat(257), generate(prompt("x", 10), 1));
    assert_eq!(world.machine.generate(0, long, world.now), Err(Refusal::LongAccount { len: 257 }));
    world.assert_idle();
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Each answer equals the answer of the same job when it runs alone, however many accounts compete, and no block is left in use.
    #[test]
    fn answers_in_a_mix_of_accounts_priorities_and_samples_equal_those_of_single_requests(
        jobs in prop::collection::vec((0..3usize, 1..120usize, 1..10u32, 1..40u32, 0..6usize), 1..12),
        priorities in prop::collection::vec((-1..2i32, -1..2i32), 12),
        capacity in 50..80u32,
        batch_max in 1..12u32,
        prefix_caching in any::<bool>(),
    ) {
        let mut world = World::new(capacity, EngineSettings { batch_max, prefix_caching, ..SETTINGS });
        let mut sent = Vec::new();
        for (id, (account, len, count, tokens, steps)) in (0..).zip(jobs) {
            let job = of(["", "a", "b"][account], samples(["one", "once", "zzz"][account], len, count, tokens));
            let (across, within) = priorities[id as usize];
            let job = Generate { priority: Priority { across, within }, ..job };
            if world.machine.generate(id, job.clone(), world.now).is_ok() {
                sent.push((id, job));
            }
            for _ in 0..steps {
                world.step();
            }
        }
        world.run();
        assert_texts(&world, &sent);
    }
}
