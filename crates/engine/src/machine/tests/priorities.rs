//! Tests of requests of different priorities that together need more than the engine's capacity.

use super::*;

impl World {
    /// Checks two rules: few steps leave budget unused; and if such a step leaves a prompt out, the step has a request that outranks the
    /// prompt and awaits its first token.
    pub(super) fn check_left_out(&mut self, plan: &Plan) {
        let Machine { running, settings, .. } = &self.machine;
        let decodes = plan.chunks.iter().filter(|chunk| running[chunk.sequence].is_decoding()).count();
        let lens: BTreeMap<usize, usize> = plan.chunks.iter().map(|chunk| (chunk.sequence, chunk.len)).collect();
        let room = self.machine.prompt_budget(decodes);
        let has_room = lens.values().sum::<usize>() - decodes < room;
        let is_left_out = |(index, sequence): &(usize, &Sequence)| {
            let len = lens.get(index).copied().unwrap_or_default();
            let is_late = matches!(&sequence.role, Role::Sample(sample) if sample.is_late);
            !sequence.paused && !is_late && len < sequence.remaining() && !sequence.wants_prompt_logprobs()
        };
        let left_out: Vec<&Sequence> = running.iter().enumerate().filter(is_left_out).map(|(_, sequence)| sequence).collect();
        let all_in_batch = running.iter().filter(|sequence| !sequence.paused).count() <= settings.batch_max as usize;
        if !has_room || !all_in_batch || left_out.is_empty() {
            self.short_steps = self.short_steps.saturating_sub(1);
            return;
        }
        for sequence in left_out {
            let urgent = lens.keys().map(|index| &running[*index]).find(|of| of.awaits_first_token() && of.outranks(sequence));
            assert!(urgent.is_some(), "job {} waits without a reason", sequence.job);
        }
        self.short_steps += 1;
        assert!(self.short_steps <= 8, "too many steps are short");
    }
}

/// The rank of a request across accounts and within its account.
fn ranked(across: i32, within: i32, job: Generate) -> Generate {
    Generate { priority: Priority { across, within }, ..job }
}

fn answer(text: &str, len: usize, tokens: u32) -> Generate {
    let mut job = generate(prompt(text, len), tokens);
    job.sampling.min_tokens = tokens;
    job
}

fn submit(world: &mut World, id: JobId, job: Generate) {
    world.machine.generate(id, job, world.now).expect("the job fits in the cache");
}

fn generated(world: &World, job: JobId) -> usize {
    let events = world.events.get(&job).into_iter().flatten();
    events.filter(|event| matches!(event, Event::Token { .. })).count()
}

fn has_token(world: &World, job: JobId) -> bool {
    generated(world, job) > 0
}

/// Runs until all jobs have a token. Returns them in the order of their first tokens.
fn first_tokens(world: &mut World, jobs: &[JobId]) -> Vec<JobId> {
    let mut order = Vec::new();
    while order.len() < jobs.len() {
        assert!(world.step() && world.steps < 10_000, "only {order:?} have a token");
        let new: Vec<JobId> = jobs.iter().copied().filter(|job| !order.contains(job) && has_token(world, *job)).collect();
        order.extend(new);
    }
    order
}

#[test]
fn prompts_are_computed_by_priority_within_their_account() {
    // Each prompt fills a step.
    let mut world = World::new(256, EngineSettings { chunk_budget: 100, ..SETTINGS });
    for (id, within) in [(0, 3), (1, 0), (2, i32::MIN), (3, 0), (4, i32::MAX)] {
        submit(&mut world, id, ranked(0, within, answer(&format!("{id} of five"), 101, 1)));
    }
    assert_eq!(first_tokens(&mut world, &[0, 1, 2, 3, 4]), [2, 1, 3, 0, 4]);
    world.run();
    world.assert_idle();
}

#[test]
fn only_priorities_that_the_operator_sets_delay_other_accounts() {
    for (across, expected) in [(0, [0, 9, 1, 2]), (-1, [0, 1, 2, 9])] {
        let mut world = World::new(512, EngineSettings { chunk_budget: 256, ..SETTINGS });
        for id in 0..3 {
            let greedy = ranked(across, -1_000, answer(&format!("{id} of the greedy"), 257, 1));
            submit(&mut world, id, Generate { account: "greedy".to_owned(), ..greedy });
        }
        submit(&mut world, 9, Generate { account: "modest".to_owned(), ..answer("of the modest", 257, 1) });
        assert_eq!(first_tokens(&mut world, &[0, 1, 2, 9]), expected, "the rank across accounts is {across}");
        world.run();
        world.assert_idle();
    }
}

#[test]
fn request_that_outranks_a_running_one_gets_its_place_in_a_full_batch() {
    let mut world = World::new(256, EngineSettings { batch_max: 2, ..SETTINGS });
    let mut jobs: Vec<(JobId, Generate)> = (0..2).map(|id| (id, answer(["one", "two"][id as usize], 40, 40))).collect();
    jobs.push((2, ranked(0, -1, answer("first of all", 40, 10))));
    for (id, job) in &jobs[..2] {
        submit(&mut world, *id, job.clone());
    }
    (0..10).for_each(|_| assert!(world.step()));
    submit(&mut world, 2, jobs[2].1.clone());
    assert_eq!(first_tokens(&mut world, &[2]), [2]);
    assert_eq!(world.steps, 12, "one step computes the prompt, and one samples");
    let before = (generated(&world, 0), generated(&world, 1));
    (0..5).for_each(|_| assert!(world.step()));
    let after = (generated(&world, 0), generated(&world, 1));
    assert_eq!((after.0 - before.0, after.1 - before.1), (5, 0), "the later one of two equal requests pauses");
    world.run();
    assert_eq!(world.machine.preemptions, 0, "a request without a place keeps its blocks");
    for (id, job) in jobs {
        assert_eq!(world.tokens(id, 0), alone(job)[0], "job {id}");
    }
    world.assert_idle();
}

#[test]
fn only_outranked_sequences_release_their_blocks_to_a_request() {
    // The cache has 20 blocks. Each of the first two requests has nine of them.
    let start = || {
        let mut world = World::new(20, SETTINGS);
        submit(&mut world, 0, ranked(0, -1, answer("the first one", 130, 14)));
        submit(&mut world, 1, answer("the second one", 130, 14));
        (0..3).for_each(|_| assert!(world.step()));
        world
    };
    let mut world = start();
    submit(&mut world, 2, ranked(0, -2, answer("outranks both", 100, 3)));
    assert_eq!(first_tokens(&mut world, &[2]), [2]);
    assert_eq!(world.machine.preemptions, 1, "one preemption releases enough blocks");
    assert!(world.machine.waiting.iter().all(|queued| queued.sequence.job == 1), "the last sequence of the order is preempted");
    world.run();
    world.assert_idle();

    // All sequences that the request outranks have too few blocks for it. So none of them loses its blocks.
    let mut world = start();
    submit(&mut world, 2, ranked(0, 0, answer("outranks none", 100, 3)));
    submit(&mut world, 3, ranked(0, -1, answer("outranks the second one", 250, 3)));
    (0..3).for_each(|_| assert!(world.step()));
    assert_eq!(world.machine.preemptions, 0);
    world.run();
    world.assert_idle();
}

#[test]
fn growing_sequence_revokes_reservations_except_those_that_outrank_it() {
    for (within, revoked) in [(0, true), (-1, false)] {
        let mut world = World::new(8, SETTINGS);
        let remote = Generate { kv: KvSource::Remote, ..ranked(0, within, generate(prompt("reserved", 40), 4)) };
        submit(&mut world, 0, remote);
        world.step();
        submit(&mut world, 1, answer("takes the rest and grows", 56, 40));
        (0..40).for_each(|_| _ = world.step());
        let is_revoked = world.events[&0].iter().any(|event| matches!(event, Event::Revoked));
        assert_eq!(is_revoked, revoked, "the priority of the reservation is {within}");
        world.machine.cancel(0);
        world.machine.cancel(1);
        world.machine.check_invariants().unwrap();
    }
}

/// While requests that outrank it arrive all the time, the last request gets its place, its share of prompt tokens and its blocks soon after
/// [`EXEMPT_AFTER`].
#[test]
fn outranked_request_does_not_starve() {
    for (batch_max, capacity, len) in [(1, 256, 40), (4, 256, 700), (4, 24, 200)] {
        let settings = EngineSettings { batch_max, chunk_budget: 64, ..SETTINGS };
        let mut world = World::new(capacity, settings);
        let worst = ranked(1, 1, answer("the worst one", len, 20));
        let mut next = 1;
        let feed = |world: &mut World, next: &mut JobId| {
            // The requests that outrank it always have more work than a step can do.
            while world.machine.waiting.len() < 8 {
                submit(world, *next, answer(&format!("{next} of many"), 60, 4));
                *next += 1;
            }
        };
        feed(&mut world, &mut next);
        world.step();
        submit(&mut world, next, worst.clone());
        let id = next;
        next += 1;
        for _ in 0..200 {
            feed(&mut world, &mut next);
            assert!(world.step());
        }
        assert!(!has_token(&world, id), "the others precede it");
        world.now += EXEMPT_AFTER;
        let before = world.steps;
        while generated(&world, id) < 20 {
            feed(&mut world, &mut next);
            assert!(world.step());
            // The exempt request gets an eighth of the 64 tokens of a step, waits a few steps for the blocks of answers, and generates one token per
            // step.
            assert!(world.steps - before < len / 8 + 60, "{batch_max} {capacity}: {:?}", world.machine.load());
        }
        assert_eq!(world.tokens(id, 0), alone(worst)[0]);
        world.run();
        world.assert_idle();
    }
}

#[test]
fn exempt_request_gets_only_its_share_of_the_prompt_tokens() {
    let mut world = World::new(1_024, EngineSettings { batch_max: 8, chunk_budget: 256, ..SETTINGS });
    submit(&mut world, 0, ranked(1, 1, answer("a whole book", 8_000, 1)));
    world.now += EXEMPT_AFTER;
    world.step();
    submit(&mut world, 1, answer("a question", 1_000, 1));
    let before = world.steps;
    first_tokens(&mut world, &[1]);
    // Of the 256 tokens of a step, the question gets all but 32. One more step samples its first token.
    assert_eq!(world.steps - before, 999_usize.div_ceil(256 - 32) + 1);
    world.run();
    world.assert_idle();
}

#[test]
fn outranked_prompts_are_left_out_of_steps_until_the_urgent_prompt_has_its_first_token() {
    let of = |account: &str, job: Generate| Generate { account: account.to_owned(), ..job };
    let book = |account| of(account, answer("a book of a thousand tokens", 1_000, 1));
    let urgent = || of("a", answer("urgent", 101, 2));
    // A step has at most 64 tokens, one of which belongs to an answer. The urgent prompt has 100 tokens before its last one.
    for (name, book, urgent, expected) in [
        ("prompts of equal priority share steps", ranked(0, 0, book("a")), ranked(0, 0, urgent()), [64, 64, 64]),
        ("a prompt of the same account is left out", ranked(0, 0, book("a")), ranked(0, -1, urgent()), [64, 38, 2]),
        ("a client does not choose for other accounts", ranked(0, 0, book("b")), ranked(0, -1, urgent()), [64, 64, 64]),
        ("the operator does", ranked(1, 1, book("b")), ranked(0, 0, urgent()), [64, 38, 2]),
    ] {
        let mut world = World::new(256, SETTINGS);
        submit(&mut world, 0, ranked(-2, -2, answer("generates all the time", 20, 200)));
        first_tokens(&mut world, &[0]);
        submit(&mut world, 1, book);
        assert!(world.step());
        submit(&mut world, 2, urgent);
        let mut lens = Vec::new();
        while !has_token(&world, 2) {
            assert!(world.step() && world.steps < 100, "{name}");
            lens.push(world.chunks.iter().map(|(_, len)| len).sum::<usize>());
        }
        assert_eq!(lens[lens.len() - 3..], expected, "{name}");
        assert!(world.step());
        assert!(world.chunks.contains(&(1, 62)), "{name}: the book gets what the two answers leave, not {:?}", world.chunks);
        world.run();
        world.assert_idle();
    }
}

/// Urgent prompts arrive in every step and need a small part of it. The outranked prompts of three accounts get half of the steps, in rotation.
#[test]
fn outranked_prompts_get_every_second_step_while_urgent_ones_arrive_all_the_time() {
    let mut world = World::new(1_024, EngineSettings { chunk_budget: 256, ..SETTINGS });
    let mut computed = [0; 3];
    for (id, account) in (0..).zip(["a", "b", "c"]) {
        let prefill = Prefill { account: account.to_owned(), ..prefill(prompt(account, 5_000)) };
        world.machine.prefill(id, prefill, world.now).expect("the job fits in the cache");
    }
    let mut steps_with_others = 0;
    for id in 3..103 {
        let urgent = prefill(prompt(&format!("{id}th urgent prompt"), 17));
        let urgent = Prefill { account: "d".to_owned(), priority: Priority { across: -1, within: -1 }, ..urgent };
        world.machine.prefill(id, urgent, world.now).expect("the job fits in the cache");
        assert!(world.step());
        assert!(world.chunks.contains(&(id, 16)), "{:?}", world.chunks);
        world.machine.cancel(id);
        for (job, len) in world.chunks.iter().filter(|(job, _)| *job < 3) {
            computed[*job as usize] += len;
        }
        steps_with_others += usize::from(world.chunks.len() > 1);
    }
    assert_eq!(steps_with_others, (100 - 8) / 2);
    assert_eq!(computed.iter().sum::<usize>(), steps_with_others * (256 - 16));
    assert!(computed.iter().max().zip(computed.iter().min()).is_some_and(|(most, least)| most - least <= 256), "{computed:?}");
}
