//! Tests that equal prompts which arrive together are computed once.

use super::*;

fn computed(world: &mut World) -> usize {
    let mut prefilled = 0;
    loop {
        world.now += Duration::from_millis(1);
        let plan = world.machine.plan(world.now);
        world.act();
        let Some(plan) = plan else { return prefilled };
        let chunks = world.machine.chunks(&plan);
        let output = world.engine.step(&chunks).expect("the simulator does not fail");
        prefilled += world.machine.complete(&plan, output, Duration::from_millis(1), world.now).prefill_tokens as usize;
        world.act();
    }
}

#[test]
fn burst_of_equal_prompts_is_computed_once() {
    let mut world = World::new(2_048, SETTINGS);
    let text = prompt("the same for all", 1_000);
    for id in 0..8 {
        world.machine.prefill(id, prefill(text.clone()), world.now).expect("the job fits in the cache");
    }
    let mut job = generate(text.clone(), 5);
    job.sampling.seed = 9;
    world.machine.generate(8, job.clone(), world.now).expect("the job fits in the cache");
    world.step();
    let load = world.machine.load();
    assert_eq!((load.running_sequences, load.waiting_requests), (1, 8), "one sequence computes, the others hold no blocks");
    // Job 0 has 935 tokens left. Each of the other jobs has only 7 tokens left, because the tokens that it shares with an earlier job are
    // counted for that earlier job.
    assert_eq!(load.pending_prefill_tokens, 935 + 7 * 7 + 7, "a token that several prompts need counts once");
    for id in 0..8 {
        world.machine.send_blocks(id, vec![0], BlockAccess::Copied);
    }
    let prefilled = 64 + computed(&mut world);
    assert!(prefilled <= 999 + 8 * 16, "{prefilled} tokens are computed");
    assert_eq!((world.cached(0), world.cached(1), world.cached(8)), (Some(0), Some(992), Some(992)));
    assert_eq!(world.tokens(8, 0), alone(job)[0]);
    (0..8).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}

#[test]
fn prompt_that_waits_for_a_prefix_owner_delays_no_other_prompt_and_is_computed_if_the_owner_is_cancelled() {
    let mut world = World::new(256, EngineSettings { chunk_budget: 32, ..SETTINGS });
    let text = prompt("the first one leaves", 500);
    world.machine.prefill(0, prefill(text.clone()), world.now).expect("the job fits in the cache");
    world
        .machine
        .prefill(1, prefill([text.as_slice(), &prompt("and more", 100)].concat()), world.now)
        .expect("the job fits in the cache");
    world.machine.prefill(2, prefill(prompt("another", 100)), world.now).expect("the job fits in the cache");
    for _ in 0..6 {
        world.step();
    }
    assert_eq!((world.cached(0), world.cached(1), world.cached(2)), (Some(0), None, Some(0)));
    world.machine.cancel(0);
    world.run();
    // The six steps computed 192 tokens: 99 of job 2's prompt and 93 of job 0's prompt, which fill 5 blocks.
    assert_eq!(world.cached(1), Some(80), "the tokens that the cancelled owner had computed");
    (1..3).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}

#[test]
fn wait_for_a_prefix_owner_is_bounded() {
    let mut world = World::new(256, EngineSettings { chunk_budget: 100, ..SETTINGS });
    let text = prompt("slow", 400);
    for id in 0..2 {
        world.machine.prefill(id, prefill(text.clone()), world.now).expect("the job fits in the cache");
    }
    world.step();
    assert_eq!(world.cached(1), None);
    world.now += Duration::from_secs(31);
    world.step();
    assert_eq!(world.cached(1), Some(96));
    world.run();
    (0..2).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}

#[test]
fn prompt_does_not_wait_for_blocks_that_it_cannot_reuse() {
    let text = prompt("not to be found", 400);
    for change in [0, 1, 2] {
        let mut world = World::new(256, EngineSettings { chunk_budget: 128, prefix_caching: change != 0, ..SETTINGS });
        world.machine.prefill(0, prefill(text.clone()), world.now).expect("the job fits in the cache");
        world.step();
        let second = match change {
            0 => prefill(text.clone()),
            1 => Prefill { namespace: Namespace::new("sim", "", "", "salt"), ..prefill(text.clone()) },
            _ => prefill([&prompt("x", 1), text.as_slice()].concat()),
        };
        world.machine.prefill(1, second, world.now).expect("the job fits in the cache");
        world.step();
        assert_eq!(world.cached(1), Some(0), "case {change}");
        (0..2).for_each(|id| world.machine.cancel(id));
        world.step();
        world.assert_idle();
    }
}

fn remote(text: &[TokenId], max_tokens: u32) -> Generate {
    Generate { kv: KvSource::Remote, ..generate(text.to_vec(), max_tokens) }
}

#[test]
fn equal_prompts_reuse_the_blocks_received_for_the_first_prompt() {
    let mut world = World::new(2_048, SETTINGS);
    let text = prompt("sent once", 1_000);
    for id in 0..8 {
        world.machine.generate(id, remote(&text, 5), world.now).expect("the job fits in the cache");
    }
    let part = [&text[..500], &prompt("and then another way", 300)].concat();
    world.machine.generate(8, remote(&part, 5), world.now).expect("the job fits in the cache");
    world.machine.generate(9, generate(text.clone(), 5), world.now).expect("the job fits in the cache");
    world.run();
    let (ticket, missing) = world.reserved(0).expect("blocks are available");
    assert_eq!(missing.len(), 63);
    let others = [1, 2, 3, 4, 5, 6, 7, 9];
    assert!(
        others.iter().all(|id| world.reserved(*id).is_none() && world.cached(*id).is_none()),
        "waiting sequences hold no blocks"
    );
    assert_eq!(world.reserved(8).expect("the sequence does not wait for 31 of 63 blocks").1, (0..50).collect::<Vec<_>>());
    let kv_of = kv(&text);
    for index in (0..63).rev() {
        world.write(ticket, index, &kv_of[index as usize].1).expect("the ticket allows the write");
    }
    world.run();
    assert!(world.reserved(1).is_none() && world.cached(9).is_none(), "the received blocks are not confirmed");
    world.confirm(ticket);
    world.step();
    let expected = alone(remote(&text, 5)).swap_remove(0);
    for id in 1..8 {
        let (ticket, missing) = world.reserved(id).expect("all full blocks are cached");
        assert_eq!(missing, [62], "a partial block is not shared");
        world.write(ticket, 62, &kv_of[62].1).expect("the ticket allows the write");
        world.confirm(ticket);
    }
    world.machine.cancel(8);
    world.run();
    assert_eq!(world.cached(9), Some(992), "a local prompt waits for the transfer, too");
    for id in (0..8).chain([9]) {
        assert_eq!(world.tokens(id, 0), expected, "job {id}");
    }
    world.assert_idle();
}

#[test]
fn wait_for_a_transfer_ends_when_the_prefix_owner_ends_or_the_deadline_passes() {
    for leaves in [true, false] {
        let mut world = World::new(256, SETTINGS);
        let text = prompt("half of it", 400);
        for id in 0..3 {
            world.machine.generate(id, remote(&text, 5), world.now).expect("the job fits in the cache");
        }
        world.run();
        let (ticket, _) = world.reserved(0).expect("blocks are available");
        let kv = kv(&text);
        for (index, payload) in &kv[..12] {
            world.write(ticket, *index, payload).expect("the ticket allows the write");
        }
        world.run();
        assert!((1..3).all(|id| world.reserved(id).is_none()));
        let deadline = world.machine.next_deadline(world.now).expect("the wait for the prefix owner has a deadline");
        assert!(deadline <= world.now + Duration::from_secs(5));
        if leaves {
            world.machine.cancel(0);
        } else {
            world.now = deadline;
        }
        world.run();
        let (ticket, missing) = world.reserved(1).expect("the next sequence takes the ticket over");
        assert_eq!(missing, (0..25).collect::<Vec<_>>(), "unconfirmed blocks are not used");
        assert_eq!(
            world.reserved(2).is_none(),
            leaves,
            "the third sequence waits for the second one unless the wait has reached its limit"
        );
        for index in missing {
            world.write(ticket, index, &kv[index as usize].1).expect("the ticket allows the write");
        }
        world.confirm(ticket);
        world.run();
        assert_eq!(world.tokens(1, 0), alone(remote(&text, 5))[0]);
        (0..3).for_each(|id| world.machine.cancel(id));
        world.assert_idle();
    }
}

#[test]
fn pending_prefill_tokens_exclude_the_reusable_tokens_of_waiting_prompts() {
    let mut world = World::new(80, SETTINGS);
    let (cached, fills) = (prompt("known before", 400), prompt("fills the cache", 900));
    world.machine.prefill(0, prefill(cached.clone()), world.now).expect("the job fits in the cache");
    world.run();
    world.machine.cancel(0);
    world.machine.prefill(1, prefill(fills.clone()), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!(world.machine.load().in_use_blocks, 57, "the other 23 of 80 blocks are cached");
    let load = |world: &World| world.machine.load().pending_prefill_tokens;
    world.machine.prefill(2, prefill(cached.clone()), world.now).expect("the job fits in the cache");
    world.run();
    assert_eq!((world.cached(2), load(&world)), (None, 399 - 23 * 16), "the prompt needs more than the 23 blocks that are left");
    let burst = prompt("all the same", 300);
    for id in 3..7 {
        world.machine.prefill(id, prefill(burst.clone()), world.now).expect("the job fits in the cache");
    }
    let waits = 399 - 23 * 16;
    assert_eq!(load(&world), waits + 299 + 3 * (299 - 18 * 16));
    world.machine.cancel(3);
    assert_eq!(load(&world), waits + 299 + 2 * (299 - 18 * 16), "the next prompt computes the shared blocks");
    (1..7).for_each(|id| world.machine.cancel(id));
    world.assert_idle();
}
