//! Tables: what is asked, what is known, who is chosen.

use super::*;

/// Just measured.
fn new(value: f64) -> Option<Measured> {
    Some(Measured { value, weight: 1.0 })
}

/// An idle worker with measured rates: 1 token/ms, a block of 16 tokens is 16 kB at 1 MB/s, thus 16 ms to compute or to send.
fn worker(role: Role) -> Candidate {
    Candidate {
        role,
        excluded: false,
        tokens_max: 100_000,
        overlap_blocks: 0,
        predicted_blocks: 0,
        cache_filled: 0.0,
        queued_tokens: 0,
        sequences: 0,
        running: 0,
        available_blocks: 6_250,
        in_use_blocks: 0,
        block_bytes: 16_000,
        prefill_tokens_per_second: new(1_000.0),
        prefill_fixed_ms: None,
        decode_step_ms: new(10.0),
        transfer_bytes_per_second: new(1e6),
    }
}

fn prefill() -> Candidate {
    worker(Role::Prefill)
}

fn decode() -> Candidate {
    Candidate { transfer_bytes_per_second: None, ..worker(Role::Decode) }
}

fn question(prompt_tokens: u32) -> Question {
    Question { prompt_tokens, block_size: 16, prefill: PrefillPlace::Auto, prompt_logits: false }
}

fn remote(prompt_tokens: u32) -> Question {
    Question { prefill: PrefillPlace::Remote, ..question(prompt_tokens) }
}

fn placed(question: &Question, workers: &[Candidate]) -> Result<(usize, Option<usize>), Unplaced> {
    let turn = Turn { seed: 1, number: 0 };
    place(&*policy(PolicyKind::KvAware), &Costs::default(), question, workers, turn)
        .map(|Choice { decode, prefill }| (decode, prefill))
}

#[test]
fn the_prefill_worker_with_the_shortest_wait_wins() {
    let base = [decode(), prefill(), prefill(), prefill()];
    let chosen = |change: &dyn Fn(&mut [Candidate])| {
        let mut workers = base.clone();
        change(&mut workers);
        placed(&remote(1_601), &workers).expect("it can be placed").1.expect("it is remote")
    };
    // All that is equal but one thing.
    assert_eq!(chosen(&|w| w[2].overlap_blocks = 1), 2);
    assert_eq!(chosen(&|w| w[3].predicted_blocks = 1), 3);
    assert_eq!(chosen(&|w| (w[1].queued_tokens, w[2].queued_tokens) = (1, 1)), 3);
    assert_eq!(chosen(&|w| w[2].prefill_tokens_per_second = new(2_000.0)), 2);
    // 50 blocks are 800 tokens; they are worth a queue of their compute and a quarter, and no more.
    assert_eq!(chosen(&|w| (w[1].overlap_blocks, w[1].queued_tokens) = (50, 999)), 1);
    assert_ne!(chosen(&|w| (w[1].overlap_blocks, w[1].queued_tokens) = (50, 1_001)), 1);
    // What it would push out of a full cache counts a quarter of the new tokens: 400 of 1,600.
    assert_ne!(chosen(&|w| w[1].cache_filled = 0.01), 1);
    assert_eq!(chosen(&|w| (w[1].cache_filled, w[2].queued_tokens, w[3].queued_tokens) = (1.0, 401, 401)), 1);
    assert_ne!(chosen(&|w| (w[1].cache_filled, w[2].queued_tokens) = (1.0, 399)), 1);
    // Not measured: as good as the others, neither better nor worse.
    assert_ne!(chosen(&|w| (w[1].prefill_tokens_per_second, w[1].queued_tokens) = (None, 1)), 1);
    assert_eq!(chosen(&|w| (w[1].prefill_tokens_per_second, w[1].overlap_blocks) = (None, 1)), 1);
}

#[test]
fn the_decode_worker_with_the_least_to_receive_and_to_run_wins() {
    let chosen = |one: Candidate, other: Candidate| placed(&remote(1_601), &[one, other, prefill()]).expect("placed").0;
    assert_eq!(chosen(Candidate { overlap_blocks: 1, ..decode() }, decode()), 0);
    assert_eq!(chosen(decode(), Candidate { sequences: 1, ..decode() }), 0);
    // A block is 16 ms on the wire, a sequence 10 ms.
    assert_eq!(chosen(Candidate { overlap_blocks: 2, sequences: 3, ..decode() }, decode()), 0);
    assert_eq!(chosen(Candidate { overlap_blocks: 2, sequences: 4, ..decode() }, decode()), 1);
    // What senders have measured is the price of a block.
    let faster = |rate| {
        let prefill = Candidate { transfer_bytes_per_second: new(rate), ..prefill() };
        let holder = Candidate { overlap_blocks: 2, sequences: 3, ..decode() };
        placed(&remote(1_601), &[holder, decode(), prefill]).expect("placed").0
    };
    assert_eq!((faster(1e6), faster(2e6)), (0, 1));
}

#[test]
fn decode_prefills_when_that_is_faster() {
    let auto = |prompt_tokens, decode: Candidate, prefill: Candidate| {
        placed(&question(prompt_tokens), &[decode, prefill]).expect("it can be placed").1.is_none()
    };
    let busy = || Candidate { sequences: 1, running: 1, ..decode() };
    let fast_wire = || Candidate { transfer_bytes_per_second: new(1e9), ..prefill() };
    assert!(auto(1_000, decode(), prefill()), "nobody is held up, and nothing is to be sent");
    assert!(!auto(1_000, busy(), fast_wire()), "a running stream would be held up");
    assert!(auto(1_000, busy(), prefill()), "sending takes as long as holding a stream up");
    assert!(auto(2, busy(), fast_wire()), "a short prompt is not worth the handoff");
    let next_turn = Candidate { overlap_blocks: 62, ..busy() };
    assert!(auto(1_000, next_turn, fast_wire()), "decode holds the conversation");
    let queue = Candidate { queued_tokens: 500, ..decode() };
    assert!(!auto(1_000, queue.clone(), fast_wire()), "decode has prompts waiting");
    assert!(auto(1_000, queue, Candidate { queued_tokens: 600, ..fast_wire() }), "prefill has more waiting");
}

#[test]
fn the_place_can_be_forced_and_some_prompts_force_it_themselves() {
    let workers = [decode(), prefill()];
    let busy = [Candidate { queued_tokens: 50_000, sequences: 100, ..decode() }, prefill()];
    let forced = |prefill, question: Question| Question { prefill, ..question };
    let logits = Question { prompt_logits: true, ..question(500) };
    for (question, workers, expected) in [
        (forced(PrefillPlace::Remote, question(500)), &workers, Some(1)),
        (forced(PrefillPlace::Remote, question(2)), &workers, Some(1)),
        (forced(PrefillPlace::Local, question(5_000)), &busy, None),
        (question(5_000), &busy, Some(1)),
        (forced(PrefillPlace::Remote, logits), &busy, None),
        (forced(PrefillPlace::Auto, logits), &busy, None),
        (forced(PrefillPlace::Remote, question(1)), &busy, None),
    ] {
        assert_eq!(placed(&question, workers), Ok((0, expected)), "{question:?}");
    }
}

#[test]
fn who_is_excluded_or_too_small_is_not_chosen_and_the_reason_is_told() {
    let out = |worker: Candidate| Candidate { excluded: true, ..worker };
    let small = |worker: Candidate| Candidate { tokens_max: 99, ..worker };
    let local = |prompt_tokens| Question { prefill: PrefillPlace::Local, ..question(prompt_tokens) };
    let best = |worker: Candidate| Candidate { overlap_blocks: 6, ..worker };
    for (question, workers, expected) in [
        (remote(100), vec![out(best(decode())), decode(), out(best(prefill())), prefill()], Ok((1, Some(3)))),
        (remote(100), vec![small(best(decode())), decode(), small(best(prefill())), prefill()], Ok((1, Some(3)))),
        (remote(99), vec![small(decode()), small(prefill())], Ok((0, Some(1)))),
        (question(100), vec![Candidate { sequences: 9, ..decode() }, out(prefill())], Ok((0, None))),
        (remote(100), vec![], Err(Unplaced::NoDecode)),
        (question(100), vec![prefill()], Err(Unplaced::NoDecode)),
        (local(100), vec![prefill()], Err(Unplaced::NoDecode)),
        (remote(100), vec![decode()], Err(Unplaced::NoPrefill)),
        (question(100), vec![out(decode()), prefill()], Err(Unplaced::AllFailed)),
        (remote(100), vec![decode(), out(prefill())], Err(Unplaced::AllFailed)),
        (remote(100), vec![decode(), small(prefill())], Err(Unplaced::TooLong)),
        (question(100), vec![out(small(decode())), small(decode())], Err(Unplaced::TooLong)),
        (question(100), vec![small(decode()), out(decode())], Err(Unplaced::AllFailed)),
    ] {
        assert_eq!(placed(&question, &workers), expected, "{question:?} {workers:?}");
    }
}

/// The pairs that a policy chooses in its first turns.
fn turns(kind: PolicyKind, seed: u64, question: &Question, workers: &[Candidate], count: u64) -> Vec<(usize, Option<usize>)> {
    let choice =
        |number| place(&*policy(kind), &Costs::default(), question, workers, Turn { seed, number }).expect("it can be placed");
    (0..count).map(choice).map(|choice| (choice.decode, choice.prefill)).collect()
}

#[test]
fn the_least_loaded_policy_looks_at_no_cache() {
    let workers = [
        decode(),
        Candidate { overlap_blocks: 99, queued_tokens: 1, ..prefill() },
        prefill(),
        Candidate { predicted_blocks: 99, queued_tokens: 2, ..prefill() },
    ];
    assert_eq!(turns(PolicyKind::LeastLoaded, 1, &remote(1_601), &workers, 1), [(0, Some(2))]);
}

#[test]
fn round_robin_takes_everybody_in_turn_and_decode_alone_only_without_prefill() {
    let all = [decode(), prefill(), decode(), prefill(), prefill()];
    let expected = [(0, Some(1)), (2, Some(3)), (0, Some(4)), (2, Some(1)), (0, Some(3)), (2, Some(4))];
    assert_eq!(turns(PolicyKind::RoundRobin, 1, &question(100), &all, 6), expected);
    assert_eq!(turns(PolicyKind::RoundRobin, 1, &question(100), &[decode(), decode()], 3), [(0, None), (1, None), (0, None)]);
}

#[test]
fn the_random_policy_takes_everybody_alike_and_the_same_with_the_same_seed() {
    let all = [decode(), prefill(), decode(), prefill()];
    let chosen = turns(PolicyKind::Random, 1, &question(100), &all, 4_000);
    for pair in [(0, Some(1)), (0, Some(3)), (2, Some(1)), (2, Some(3))] {
        let count = chosen.iter().filter(|chosen| **chosen == pair).count();
        assert!((900..1_100).contains(&count), "{pair:?}: {count}");
    }
    assert_eq!(chosen, turns(PolicyKind::Random, 1, &question(100), &all, 4_000));
    assert_ne!(chosen, turns(PolicyKind::Random, 2, &question(100), &all, 4_000));
}

#[test]
fn ties_are_broken_by_the_seed_and_evenly() {
    let mut workers = vec![decode()];
    workers.extend(std::iter::repeat_n(prefill(), 8));
    let chosen = turns(PolicyKind::KvAware, 5, &remote(100), &workers, 8_000);
    for prefill in 1..=8 {
        let count = chosen.iter().filter(|(_, chosen)| *chosen == Some(prefill)).count();
        assert!((850..1_150).contains(&count), "{prefill}: {count}");
    }
    assert_eq!(chosen, turns(PolicyKind::KvAware, 5, &remote(100), &workers, 8_000));
}

#[test]
fn absurd_reports_are_survived() {
    let odd = |worker: Candidate| Candidate {
        queued_tokens: u64::MAX,
        sequences: u32::MAX,
        running: u32::MAX,
        available_blocks: 0,
        in_use_blocks: 1,
        block_bytes: u64::MAX,
        overlap_blocks: u32::MAX,
        predicted_blocks: u32::MAX,
        cache_filled: 1.0,
        prefill_tokens_per_second: new(f64::MIN_POSITIVE),
        transfer_bytes_per_second: new(f64::MIN_POSITIVE),
        decode_step_ms: new(f64::MAX),
        ..worker
    };
    for place in [PrefillPlace::Auto, PrefillPlace::Remote, PrefillPlace::Local] {
        let question = Question { prefill: place, ..question(100) };
        let expected = if place == PrefillPlace::Remote { (1, Some(3)) } else { (1, None) };
        let idle = [odd(decode()), decode(), odd(prefill()), prefill()];
        assert_eq!(placed(&question, &idle), Ok(expected), "{place:?}");
        assert!(placed(&question, &[odd(decode()), odd(prefill())]).is_ok());
    }
}

#[test]
fn a_cost_that_is_no_number_is_never_the_lowest() {
    // No time at all for the streams that it holds up, of which there are none: infinity times zero.
    let odd = |worker: Candidate| Candidate { prefill_tokens_per_second: new(1e-320), transfer_bytes_per_second: None, ..worker };
    let busy = |worker: Candidate| Candidate { queued_tokens: 100_000, sequences: 50, running: 50, ..worker };
    let local = Question { prefill: PrefillPlace::Local, ..question(1_000) };
    assert_eq!(placed(&local, &[odd(decode()), busy(decode())]), Ok((1, None)));
    assert_eq!(placed(&remote(1_000), &[decode(), odd(prefill()), busy(prefill())]), Ok((0, Some(2))));
    assert!(placed(&local, &[odd(decode())]).is_ok());
    for bad in [f64::NAN, -f64::NAN, f64::NEG_INFINITY + f64::INFINITY] {
        assert_eq!(Cost { interference_ms: bad, ..Cost::default() }.total(), f64::INFINITY);
    }
}

#[test]
fn a_short_prompt_costs_the_fixed_time_of_a_step() {
    let slow_start = |ms| Candidate { prefill_fixed_ms: new(ms), ..prefill() };
    let chosen = |prompt_tokens, queued_tokens| {
        let workers = [decode(), slow_start(100.0), Candidate { queued_tokens, ..slow_start(1.0) }];
        placed(&remote(prompt_tokens), &workers).expect("placed").1
    };
    // The mean is 10 ms, and what is within a quarter of it counts as the mean: 80 ms and 1.25 ms.
    assert_eq!((chosen(10, 78), chosen(10, 80)), (Some(2), Some(1)));
    // What is in the cache needs no step.
    let cached = Candidate { overlap_blocks: 10, ..slow_start(100.0) };
    assert_eq!(placed(&remote(161), &[decode(), cached, slow_start(1.0)]), Ok((0, Some(1))));
}

#[test]
fn only_running_sequences_are_held_up_and_by_a_tenth() {
    let local = Question { prefill: PrefillPlace::Local, ..question(1_000) };
    let chosen = |one: Candidate, other: Candidate| placed(&local, &[one, other]).expect("placed").0;
    // A step of 10 ms for each sequence, and 100 ms of the prompt's second for each that runs.
    assert_eq!(chosen(Candidate { sequences: 10, ..decode() }, Candidate { sequences: 1, running: 1, ..decode() }), 0);
    assert_eq!(chosen(Candidate { sequences: 12, ..decode() }, Candidate { sequences: 1, running: 1, ..decode() }), 1);
}

#[test]
fn a_prompt_that_lacks_blocks_waits_for_running_answers() {
    let local = Question { prefill: PrefillPlace::Local, ..question(1_600) };
    // All 100 blocks of the prompt come back within an answer's 5 s, half of them in half of it.
    let full = |available_blocks| Candidate { available_blocks, in_use_blocks: 100, ..decode() };
    let queue = |queued_tokens| Candidate { queued_tokens, ..decode() };
    let waits = |available, queued| placed(&local, &[full(available), queue(queued)]).expect("placed").0 == 0;
    assert!(waits(0, 5_001) && !waits(0, 4_999));
    assert!(waits(50, 2_501) && !waits(50, 2_499));
    assert!(waits(100, 1));
    // What waits there takes its blocks first; nothing is in use, so nothing is waited for.
    let both = Candidate { queued_tokens: 800, ..full(100) };
    assert_eq!(placed(&local, &[both, queue(3_299)]).expect("placed").0, 1);
    let nothing_runs = Candidate { available_blocks: 0, in_use_blocks: 0, ..decode() };
    assert_eq!(placed(&local, &[nothing_runs, queue(1)]).expect("placed").0, 0);
    // What is to be received needs blocks, too.
    let receives = [full(0), decode(), prefill()];
    assert_eq!(placed(&remote(1_601), &receives).expect("placed").0, 1);
}
