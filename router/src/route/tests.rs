//! Tables of placements: a query, the candidates, and the workers that must be chosen.

mod family;

use super::*;
use crate::{rates::Measurement, settings::PolicyKind};

fn measured(value: f64) -> Option<Measurement> {
    Measurement::log(value).map(|log| Measurement::new(log, 1.0))
}

/// Returns an idle worker with measured rates. It computes 1 token/ms and sends 1 MB/s, and a block of 16 tokens is 16 kB, so a block takes
/// 16 ms to compute or to send.
fn worker(role: WorkerRole) -> Candidate {
    Candidate {
        role,
        family: Some(FamilyId(0)),
        needs_prefill_worker: false,
        excluded: false,
        tokens_max: 100_000,
        held_blocks: 0,
        reported_blocks: 0,
        known_blocks: 0,
        overlap_blocks: 0,
        tiers: None,
        predicted_blocks: 0,
        cache_filled: 0.0,
        queued_tokens: 0,
        behind_tokens: 0.0,
        behind_prompts: 0,
        sequences: 0,
        running: 0,
        available_blocks: 6_250,
        in_use_blocks: 0,
        answer_tokens: 0,
        step_tokens: 0,
        local_share: 0.0,
        block_bytes: 16_000,
        prefill_tokens_per_second: measured(1_000.0),
        prefill_fixed_ms: None,
        decode_step_ms: measured(10.0),
        prompt_share: 1.0,
        transfer_bytes_per_second: measured(1e6),
    }
}

fn prefill() -> Candidate {
    worker(WorkerRole::Prefill)
}

fn decode() -> Candidate {
    Candidate { transfer_bytes_per_second: None, ..worker(WorkerRole::Decode) }
}

fn query(prompt_tokens: u32) -> PlacementQuery {
    PlacementQuery { prompt_tokens, block_size: 16, prefill: PrefillPlace::Auto, prompt_logits: false }
}

fn remote(prompt_tokens: u32) -> PlacementQuery {
    PlacementQuery { prefill: PrefillPlace::Remote, ..query(prompt_tokens) }
}

/// Places the request with the costs of this policy.
fn place_by(
    kind: PolicyKind,
    query: &PlacementQuery,
    workers: &[Candidate],
    placement: PlacementSeed,
) -> Result<(usize, Option<usize>), NoEligibleWorker> {
    let costs = costs_by_use(kind, &Costs::default(), ByRole::default(), query, workers);
    place(&costs, query, workers, placement).map(|RouteChoice { decode, prefill }| (decode, prefill))
}

fn placed(query: &PlacementQuery, workers: &[Candidate]) -> Result<(usize, Option<usize>), NoEligibleWorker> {
    place_by(PolicyKind::KvAware, query, workers, PlacementSeed { seed: 1, number: 0 })
}

#[test]
fn prefill_worker_with_the_lowest_cost_is_chosen() {
    let base = [decode(), prefill(), prefill(), prefill()];
    let chosen = |change: &dyn Fn(&mut [Candidate])| {
        let mut workers = base.clone();
        change(&mut workers);
        placed(&remote(1_601), &workers).expect("a worker is eligible").1.expect("the placement has a prefill worker")
    };
    // All workers are equal except for one value.
    assert_eq!(chosen(&|w| w[2].overlap_blocks = 1), 2);
    assert_eq!(chosen(&|w| w[3].predicted_blocks = 1), 3);
    assert_eq!(chosen(&|w| (w[1].queued_tokens, w[2].queued_tokens) = (1, 1)), 3);
    assert_eq!(chosen(&|w| w[2].prefill_tokens_per_second = measured(2_000.0)), 2);
    // 50 cached blocks are 800 tokens. They outweigh a queue of up to 1,000 tokens, 1.25 times as many.
    assert_eq!(chosen(&|w| (w[1].overlap_blocks, w[1].queued_tokens) = (50, 999)), 1);
    assert_ne!(chosen(&|w| (w[1].overlap_blocks, w[1].queued_tokens) = (50, 1_001)), 1);
    // Eviction from a full cache costs as much as computing the evicted tokens again: 1,600.
    assert_ne!(chosen(&|w| w[1].cache_filled = 0.01), 1);
    assert_eq!(chosen(&|w| (w[1].cache_filled, w[2].queued_tokens, w[3].queued_tokens) = (1.0, 1_601, 1_601)), 1);
    assert_ne!(chosen(&|w| (w[1].cache_filled, w[2].queued_tokens) = (1.0, 1_599)), 1);
    // A worker without a measurement is assumed to be as fast as the others.
    assert_ne!(chosen(&|w| (w[1].prefill_tokens_per_second, w[1].queued_tokens) = (None, 1)), 1);
    assert_eq!(chosen(&|w| (w[1].prefill_tokens_per_second, w[1].overlap_blocks) = (None, 1)), 1);
}

#[test]
fn decode_worker_with_the_least_transfer_and_load_is_chosen() {
    let chosen =
        |one: Candidate, other: Candidate| placed(&remote(1_601), &[one, other, prefill()]).expect("the request can be placed").0;
    assert_eq!(chosen(Candidate { overlap_blocks: 1, ..decode() }, decode()), 0);
    assert_eq!(chosen(decode(), Candidate { sequences: 1, ..decode() }), 0);
    // The transfer of a block takes 16 ms, and a running sequence costs 10 ms.
    assert_eq!(chosen(Candidate { overlap_blocks: 2, sequences: 3, ..decode() }, decode()), 0);
    assert_eq!(chosen(Candidate { overlap_blocks: 2, sequences: 4, ..decode() }, decode()), 1);
    // The transfer time of a block follows from the bandwidth that senders have measured.
    let faster = |rate| {
        let prefill = Candidate { transfer_bytes_per_second: measured(rate), ..prefill() };
        let with_overlap = Candidate { overlap_blocks: 2, sequences: 3, ..decode() };
        placed(&remote(1_601), &[with_overlap, decode(), prefill]).expect("the request can be placed").0
    };
    assert_eq!((faster(1e6), faster(2e6)), (0, 1));
}

#[test]
fn decode_worker_prefills_when_local_prefill_is_faster() {
    let auto = |prompt_tokens, decode: Candidate, prefill: Candidate| {
        placed(&query(prompt_tokens), &[decode, prefill]).expect("a worker is eligible").1.is_none()
    };
    let busy = || Candidate { sequences: 1, running: 1, ..decode() };
    let fast_wire = || Candidate { transfer_bytes_per_second: measured(1e9), ..prefill() };
    assert!(auto(1_000, decode(), prefill()), "no stream is delayed and nothing is transferred");
    assert!(!auto(1_000, busy(), fast_wire()), "a running stream would be delayed");
    assert!(auto(1_000, busy(), prefill()), "the transfer costs as much as the delay of a stream");
    assert!(auto(2, busy(), fast_wire()), "a short prompt is not worth the handoff");
    let next_turn = Candidate { overlap_blocks: 62, ..busy() };
    assert!(auto(1_000, next_turn, fast_wire()), "the decode worker has cached the conversation");
    let queue = Candidate { queued_tokens: 500, ..decode() };
    assert!(!auto(1_000, queue.clone(), fast_wire()), "the decode worker has queued prompts");
    assert!(auto(1_000, queue, Candidate { queued_tokens: 600, ..fast_wire() }), "the prefill worker has a longer queue");
}

#[test]
fn prefill_place_depends_on_setting_and_length_and_is_local_for_prompt_logits() {
    let workers = [decode(), prefill()];
    let busy = [Candidate { queued_tokens: 50_000, sequences: 100, ..decode() }, prefill()];
    let forced = |prefill, query: PlacementQuery| PlacementQuery { prefill, ..query };
    let logits = PlacementQuery { prompt_logits: true, ..query(500) };
    for (query, workers, expected) in [
        (forced(PrefillPlace::Remote, query(500)), &workers, Some(1)),
        (forced(PrefillPlace::Remote, query(2)), &workers, Some(1)),
        (forced(PrefillPlace::Local, query(5_000)), &busy, None),
        (query(5_000), &busy, Some(1)),
        (forced(PrefillPlace::Remote, logits), &busy, None),
        (forced(PrefillPlace::Auto, logits), &busy, None),
        (forced(PrefillPlace::Remote, query(1)), &busy, None),
    ] {
        assert_eq!(placed(&query, workers), Ok((0, expected)), "{query:?}");
    }
}

/// Such a decode worker gets even a prompt of one token, and the last attempt, which other decode workers prefill themselves.
#[test]
fn decode_worker_that_computes_no_prompts_is_always_paired() {
    let half = || Candidate { needs_prefill_worker: true, ..decode() };
    let logits = PlacementQuery { prompt_logits: true, ..query(500) };
    for place in [PrefillPlace::Auto, PrefillPlace::Local, PrefillPlace::Remote] {
        let query = |tokens| PlacementQuery { prefill: place, ..query(tokens) };
        let logits = PlacementQuery { prefill: place, ..logits };
        for tokens in [1, 2, 500] {
            assert_eq!(placed(&query(tokens), &[half(), prefill()]), Ok((0, Some(1))), "{place:?} {tokens}");
        }
        assert_eq!(placed(&logits, &[half(), prefill()]), Err(NoEligibleWorker::NoPromptLogprobs));
        assert_eq!(placed(&logits, &[half(), prefill(), decode()]), Ok((2, None)));
    }
    let alone = |place| placed(&PlacementQuery { prefill: place, ..query(500) }, &[half()]);
    assert_eq!(alone(PrefillPlace::Auto), Err(NoEligibleWorker::NoPartner));
    assert_eq!(alone(PrefillPlace::Local), Err(NoEligibleWorker::NoPartner));
    let busy = Candidate { sequences: 100, queued_tokens: 90_000, ..decode() };
    assert_eq!(placed(&query(500), &[busy.clone(), half(), prefill()]), Ok((1, Some(2))));
    assert_eq!(placed(&PlacementQuery { prefill: PrefillPlace::Local, ..query(500) }, &[busy, half(), prefill()]), Ok((0, None)));
}

#[test]
fn excluded_and_too_small_workers_are_not_chosen_and_the_error_names_the_reason() {
    let out = |worker: Candidate| Candidate { excluded: true, ..worker };
    let small = |worker: Candidate| Candidate { tokens_max: 99, ..worker };
    let local = |prompt_tokens| PlacementQuery { prefill: PrefillPlace::Local, ..query(prompt_tokens) };
    let best = |worker: Candidate| Candidate { overlap_blocks: 6, ..worker };
    for (query, workers, expected) in [
        (remote(100), vec![out(best(decode())), decode(), out(best(prefill())), prefill()], Ok((1, Some(3)))),
        (remote(100), vec![small(best(decode())), decode(), small(best(prefill())), prefill()], Ok((1, Some(3)))),
        (remote(99), vec![small(decode()), small(prefill())], Ok((0, Some(1)))),
        (query(100), vec![Candidate { sequences: 9, ..decode() }, out(prefill())], Ok((0, None))),
        (remote(100), vec![], Err(NoEligibleWorker::NoDecodeWorker)),
        (query(100), vec![prefill()], Err(NoEligibleWorker::NoDecodeWorker)),
        (local(100), vec![prefill()], Err(NoEligibleWorker::NoDecodeWorker)),
        (remote(100), vec![decode()], Err(NoEligibleWorker::NoPrefillWorker)),
        (query(100), vec![out(decode()), prefill()], Err(NoEligibleWorker::AllFailed)),
        (remote(100), vec![decode(), out(prefill())], Err(NoEligibleWorker::AllFailed)),
        (remote(100), vec![decode(), small(prefill())], Err(NoEligibleWorker::PromptTooLong)),
        (query(100), vec![out(small(decode())), small(decode())], Err(NoEligibleWorker::PromptTooLong)),
        (query(100), vec![small(decode()), out(decode())], Err(NoEligibleWorker::AllFailed)),
    ] {
        assert_eq!(placed(&query, &workers), expected, "{query:?} {workers:?}");
    }
}

/// Returns the pairs of workers that a policy chooses in its first placements.
fn first_choices(
    kind: PolicyKind,
    seed: u64,
    query: &PlacementQuery,
    workers: &[Candidate],
    count: u64,
) -> Vec<(usize, Option<usize>)> {
    let choice = |number| place_by(kind, query, workers, PlacementSeed { seed, number }).expect("a worker is eligible");
    (0..count).map(choice).collect()
}

#[test]
fn least_loaded_policy_ignores_caches() {
    let workers = [
        decode(),
        Candidate { overlap_blocks: 99, queued_tokens: 1, ..prefill() },
        prefill(),
        Candidate { predicted_blocks: 99, queued_tokens: 2, ..prefill() },
    ];
    assert_eq!(first_choices(PolicyKind::LeastLoaded, 1, &remote(1_601), &workers, 1), [(0, Some(2))]);
}

#[test]
fn ties_are_broken_uniformly_and_reproducibly_by_seed() {
    let mut workers = vec![decode()];
    workers.extend(std::iter::repeat_n(prefill(), 8));
    let chosen = first_choices(PolicyKind::KvAware, 5, &remote(100), &workers, 8_000);
    for prefill in 1..=8 {
        let count = chosen.iter().filter(|(_, chosen)| *chosen == Some(prefill)).count();
        assert!((850..1_150).contains(&count), "{prefill}: {count}");
    }
    assert_eq!(chosen, first_choices(PolicyKind::KvAware, 5, &remote(100), &workers, 8_000));
}

#[test]
fn worker_with_extreme_reports_is_chosen_last() {
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
        prefill_tokens_per_second: measured(f64::MIN_POSITIVE),
        transfer_bytes_per_second: measured(f64::MIN_POSITIVE),
        decode_step_ms: measured(f64::MAX),
        ..worker
    };
    for place in [PrefillPlace::Auto, PrefillPlace::Remote, PrefillPlace::Local] {
        let query = PlacementQuery { prefill: place, ..query(100) };
        let expected = if place == PrefillPlace::Remote { (1, Some(3)) } else { (1, None) };
        let idle = [odd(decode()), decode(), odd(prefill()), prefill()];
        assert_eq!(placed(&query, &idle), Ok(expected), "{place:?}");
        assert!(placed(&query, &[odd(decode()), odd(prefill())]).is_ok());
    }
}

#[test]
fn cost_that_is_not_a_number_is_never_the_lowest() {
    // An infinite prefill time, multiplied by zero running sequences that it delays, is NaN.
    let odd =
        |worker: Candidate| Candidate { prefill_tokens_per_second: measured(1e-320), transfer_bytes_per_second: None, ..worker };
    let busy = |worker: Candidate| Candidate { queued_tokens: 100_000, sequences: 50, running: 50, ..worker };
    let local = PlacementQuery { prefill: PrefillPlace::Local, ..query(1_000) };
    assert_eq!(placed(&local, &[odd(decode()), busy(decode())]), Ok((1, None)));
    assert_eq!(placed(&remote(1_000), &[decode(), odd(prefill()), busy(prefill())]), Ok((0, Some(2))));
    assert!(placed(&local, &[odd(decode())]).is_ok());
    for bad in [f64::NAN, -f64::NAN, f64::NEG_INFINITY + f64::INFINITY] {
        assert_eq!(Cost { interference_ms: bad, ..Cost::default() }.total(), f64::INFINITY);
    }
}

#[test]
fn short_prompt_is_charged_the_fixed_time_of_a_step() {
    let slow_start = |ms| Candidate { prefill_fixed_ms: measured(ms), ..prefill() };
    let chosen = |prompt_tokens, queued_tokens| {
        let workers = [decode(), slow_start(100.0), Candidate { queued_tokens, ..slow_start(1.0) }];
        placed(&remote(prompt_tokens), &workers).expect("the request can be placed").1
    };
    // A step's fixed time is measured as 100 ms and as 1 ms; their mean is 10 ms. The tolerance of 1.25 moves both measured times closer to
    // the mean: to 80 ms and 1.25 ms.
    assert_eq!((chosen(10, 78), chosen(10, 80)), (Some(2), Some(1)));
    // A prompt whose blocks are cached needs no prefill step.
    let cached = Candidate { overlap_blocks: 10, ..slow_start(100.0) };
    assert_eq!(placed(&remote(161), &[decode(), cached, slow_start(1.0)]), Ok((0, Some(1))));
}

#[test]
fn local_prefill_is_charged_for_the_answers_that_it_delays() {
    let local = PlacementQuery { prefill: PrefillPlace::Local, ..query(1_000) };
    let is_first = |one: Candidate, queued_tokens| {
        let workers = [one, Candidate { queued_tokens, ..decode() }];
        placed(&local, &workers).expect("the request can be placed").0 == 0
    };
    // The prompt takes a second, and each sequence costs 10 ms of a step. The delay of 16 answers costs 8 times (16 to the power ¾) as much
    // as of one.
    for (sequences, tokens) in [(1, 710), (16, 5_760)] {
        let busy = Candidate { sequences, ..decode() };
        assert!(is_first(busy.clone(), tokens + 1) && !is_first(busy, tokens - 1), "{sequences}");
    }
}

#[test]
fn delay_of_prompts_that_are_computed_later_and_of_the_answer_is_charged() {
    let chosen = |query: &PlacementQuery, workers: [Candidate; 3]| placed(query, &workers).expect("the request can be placed");
    let waiting =
        |behind_tokens, worker: Candidate| Candidate { queued_tokens: 5_000, behind_tokens, behind_prompts: 1, ..worker };
    let queue = |queued_tokens, worker: Candidate| Candidate { queued_tokens, ..worker };
    // The prompt takes a second. A longer one waits for it, and is computed after it.
    let prefills = |tokens| chosen(&remote(1_001), [decode(), waiting(5_000.0, prefill()), queue(tokens, prefill())]).1;
    assert_eq!((prefills(1_001), prefills(999)), (Some(1), Some(2)));
    // On a worker that decodes, the five seconds of the longer prompt also delay the answer. This delay has the weight 0.7.
    let local = PlacementQuery { prefill: PrefillPlace::Local, ..query(1_000) };
    let decodes = |tokens| chosen(&local, [waiting(5_000.0, decode()), queue(tokens, decode()), prefill()]).0;
    assert_eq!((decodes(4_501), decodes(4_499)), (0, 1));
    // A worker that only decodes the answer delays it by the prompts in the worker's queue.
    let receives = |tokens| chosen(&remote(1_001), [queue(1_000, decode()), queue(tokens, decode()), prefill()]).0;
    assert_eq!((receives(1_001), receives(999)), (0, 1));
}

#[test]
fn charge_for_later_prompts_is_proportional_to_the_queue_of_the_worker() {
    let costs = |queued_tokens, demand| {
        let demands = {
            let mut of = ByRole::default();
            *of.of_mut(WorkerRole::Prefill) = demand;
            of
        };
        let workers = [decode(), Candidate { queued_tokens, ..prefill() }];
        let policy = PolicyKind::KvAware;
        let by_use = costs_by_use(policy, &Costs::default(), demands, &remote(1_001), &workers);
        by_use[1].prefill.expect("it can be used").interference_ms
    };
    let idle = costs(0, WorkerDemand::default());
    // Ten prompts of 50 ms arrive in a second, half of what the worker can compute. So it is idle after 2 s, or after 8 s if 3 s of work
    // are queued.
    let demand = WorkerDemand { prompts: 10.0, tokens: 500.0 };
    assert!((costs(0, demand) - idle - 2.0 * 10.0 * 50.0).abs() < 1e-6);
    assert!((costs(3_000, demand) - idle - 8.0 * 10.0 * 50.0).abs() < 1e-6);
    // A demand above the worker's rate is treated as 0.9 of that rate.
    let beyond = WorkerDemand { prompts: 1.0, tokens: 5_000.0 };
    assert!((costs(0, beyond) - idle - 10.0 * 1_000.0).abs() < 1e-6);
}

#[test]
fn prompt_waits_for_half_of_a_running_step_of_prompts_that_it_precedes() {
    let queue_ms = |behind_tokens, step_tokens| {
        let worker = Candidate { queued_tokens: 5_000, behind_tokens, behind_prompts: 1, step_tokens, ..prefill() };
        let policy = PolicyKind::KvAware;
        let workers = [decode(), worker];
        let by_use = costs_by_use(policy, &Costs::default(), ByRole::default(), &remote(101), &workers);
        by_use[1].prefill.expect("it can be used").queue_ms.round()
    };
    // A token takes a millisecond.
    for ((behind_tokens, step_tokens), expected) in [((0.0, 512), 5_000.0), ((5_000.0, 512), 256.0), ((100.0, 512), 4_950.0)] {
        assert_eq!(queue_ms(behind_tokens, step_tokens), expected, "{behind_tokens} {step_tokens}");
    }
    assert_eq!(queue_ms(5_000.0, 0), 0.0, "the steps of external engines are not known");
    // Prompts have half of each step, and answers the other half, 10 ms. So a step takes 20 ms. On average, half of the running step is
    // left.
    let short = Candidate { queued_tokens: 5_000, behind_tokens: 5_000.0, step_tokens: 512, prompt_share: 0.5, ..decode() };
    let policy = PolicyKind::KvAware;
    let by_use = costs_by_use(policy, &Costs::default(), ByRole::default(), &query(100), &[short]);
    assert_eq!(by_use[0].local.expect("it can be used").queue_ms.round(), 10.0);
}

#[test]
fn running_answers_slow_prompts_but_do_not_increase_the_delay_of_answers() {
    let cost = |prompt_share| {
        let prefill_fixed_ms = measured(10.0);
        let (queued_tokens, behind_tokens) = (500, 400.0);
        let worker = Candidate { prompt_share, queued_tokens, behind_tokens, prefill_fixed_ms, sequences: 1, ..decode() };
        let policy = PolicyKind::KvAware;
        let by_use = costs_by_use(policy, &Costs::default(), ByRole::default(), &query(1_000), &[worker, prefill()]);
        (by_use[0].local.expect("it can be used"), by_use[0].decode.expect("it can be used"))
    };
    let ((alone, receives), (half, receives_half)) = (cost(1.0), cost(0.5));
    assert!((half.queue_ms - 2.0 * alone.queue_ms).abs() < 1e-6, "{alone:?} {half:?}");
    assert!((half.compute_ms - alone.compute_ms - 1_000.0).abs() < 1e-6, "{alone:?} {half:?}");
    let delayed_ms = Costs::default().work_weight * 1_000.0;
    assert!((half.interference_ms - alone.interference_ms - delayed_ms).abs() < 1e-6, "{alone:?} {half:?}");
    assert_eq!(receives.interference_ms, receives_half.interference_ms);
}

#[test]
fn answers_are_placed_on_workers_that_prefill_little_if_other_workers_can_prefill() {
    let chosen = |remote_tokens| {
        let demands = {
            let mut of = ByRole::default();
            *of.of_mut(WorkerRole::Prefill) = WorkerDemand { prompts: 1.0, tokens: remote_tokens };
            *of.of_mut(WorkerRole::Decode) = WorkerDemand { prompts: 1.0, tokens: 500.0 };
            of
        };
        // The idle worker spends half of its time on prompts; the other one has twenty answers, which delay one more by 200 ms.
        let workers = [Candidate { local_share: 0.5, ..decode() }, Candidate { sequences: 20, ..decode() }, prefill()];
        let policy = PolicyKind::KvAware;
        let costs = Costs::default();
        let query = remote(101);
        let by_use = costs_by_use(policy, &costs, demands, &query, &workers);
        place(&by_use, &query, &workers, PlacementSeed::default()).expect("the request can be placed").decode
    };
    assert_eq!((chosen(500.0), chosen(1.0)), (1, 0));
}

#[test]
fn only_transfer_time_that_does_not_overlap_the_computation_is_charged() {
    // A token takes a millisecond to compute or to send.
    let transfer = |step_tokens, cached| {
        let workers = [decode(), Candidate { step_tokens, overlap_blocks: cached, ..prefill() }];
        let policy = PolicyKind::KvAware;
        let by_use = costs_by_use(policy, &Costs::default(), ByRole::default(), &remote(1_601), &workers);
        by_use[0].decode.expect("it can be used").transfer_ms.round()
    };
    assert_eq!(transfer(0, 0), 1_600.0, "external engines send nothing before the prompt is computed");
    assert_eq!(transfer(160, 0), 160.0, "only the last step remains");
    assert_eq!(transfer(160, 50), 800.0, "cached blocks are sent while the others are computed");
}

#[test]
fn prompt_without_enough_free_blocks_is_charged_the_wait_for_running_answers() {
    let local = PlacementQuery { prefill: PrefillPlace::Local, ..query(1_600) };
    // Running answers release all 100 blocks within the 5 s of an answer, so 50 blocks are released in half of that time.
    let full = |available_blocks| Candidate { available_blocks, in_use_blocks: 100 - available_blocks, ..decode() };
    let queue = |queued_tokens| Candidate { queued_tokens, ..decode() };
    let waits = |available, queued| placed(&local, &[full(available), queue(queued)]).expect("the request can be placed").0 == 0;
    assert!(waits(0, 5_001) && !waits(0, 4_999));
    assert!(waits(50, 2_501) && !waits(50, 2_499));
    assert!(waits(100, 1));
    // The queued prompts get released blocks first: 50 blocks are lacking. Their computation takes 0.8 s in addition.
    let both = |other| placed(&local, &[Candidate { queued_tokens: 800, ..full(100) }, queue(other)]).expect("it is placed").0;
    assert_eq!((both(3_299), both(3_301)), (1, 0));
    // A worker that has not reported its blocks has nothing to wait for.
    let nothing_runs = Candidate { available_blocks: 0, in_use_blocks: 0, ..decode() };
    assert_eq!(placed(&local, &[nothing_runs, queue(1)]).expect("the request can be placed").0, 0);
    // A worker that receives KV needs blocks, too.
    let receives = [full(0), decode(), prefill()];
    assert_eq!(placed(&remote(1_601), &receives).expect("the request can be placed").0, 1);
}

#[test]
fn blocks_that_running_answers_are_expected_to_need_are_charged() {
    let local = PlacementQuery { prefill: PrefillPlace::Local, ..query(1_600) };
    let busy = |answer_tokens| Candidate { available_blocks: 110, in_use_blocks: 90, answer_tokens, ..decode() };
    let queue = |queued_tokens| Candidate { queued_tokens, ..decode() };
    let waits =
        |answer_tokens, queued| placed(&local, &[busy(answer_tokens), queue(queued)]).expect("the request can be placed").0 == 0;
    // 110 blocks are available. The prompt needs 100, and running answers of 1,600 tokens are expected to need 50 more. So 40 blocks are
    // lacking, a fifth of the 200 that answers release within 5 s.
    assert!(waits(0, 1) && waits(320, 1));
    assert!(waits(1_600, 1_001) && !waits(1_600, 999));
}
