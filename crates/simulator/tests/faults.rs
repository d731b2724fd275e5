//! Tests of clusters in which workers are lost or slow.

mod support;

use proptest::{collection::vec, prelude::*, sample::select};
use std::{ops::ControlFlow, time::Duration};
use support::{print, traffic};
use tandem_load::report::{FailureClass, MeasuredAnswer, RequestOutcome};
use tandem_router::WorkerRole;
use tandem_simulator::{
    Faults, Loss, RandomLosses, RoutingRule, SimulatedCluster, SimulatedDevice, SimulatedRequest, Size, Totals, simulate,
};

const BLOCK: u64 = 16;

fn run(cluster: &SimulatedCluster, requests: &[SimulatedRequest]) -> (Vec<RequestOutcome>, Totals) {
    let mut outcomes = Vec::new();
    let totals = simulate(cluster, requests.iter().cloned(), &mut |outcome| {
        outcomes.push(outcome.clone());
        ControlFlow::Continue(())
    });
    (outcomes, totals)
}

fn answer(outcome: &RequestOutcome) -> &MeasuredAnswer {
    outcome.result.as_ref().expect("the request is answered")
}

/// Returns the cluster with one loss: this worker is lost at the time `at_us`, in microseconds, for the time `lasts`.
fn without(cluster: &SimulatedCluster, worker: usize, at_us: u64, lasts: Option<Duration>) -> SimulatedCluster {
    let mut lost = cluster.clone();
    lost.faults.losses.push(Loss { worker, at: Duration::from_micros(at_us), lasts });
    lost
}

fn request(at_ms: u64, blocks: std::ops::Range<u64>, answer_tokens: u64) -> SimulatedRequest {
    let prompt_tokens = ((blocks.end - blocks.start) * BLOCK + 4) as u32;
    SimulatedRequest { at: Duration::from_millis(at_ms), prompt_tokens, blocks: blocks.collect(), answer_tokens, max_tokens: 0 }
}

#[test]
fn answer_continues_on_another_worker_after_the_tokens_that_the_client_has_received() {
    for policy in [RoutingRule::Tandem, RoutingRule::Dynamo, RoutingRule::RoundRobin] {
        let device = SimulatedDevice { step_tokens: 100, ..SimulatedDevice::default() };
        let cluster = SimulatedCluster { device, block_tokens: BLOCK, ..SimulatedCluster::new(policy, Size::Mixed(2)) };
        let requests = [request(0, 0..6, 20)];
        let (undisturbed, _) = run(&cluster, &requests);
        let first = answer(&undisturbed[0]).decode_worker.clone().expect("the worker is known");
        let number = usize::from(&*first == "worker-1");
        // The prompt's first 99 tokens take 8.95 ms, and each token of the answer 6.1 ms. The worker is lost during the step of the seventh
        // token.
        let lost_at = 8_950 + 6 * 6_100 + 3_000;
        let (outcomes, totals) = run(&without(&cluster, number, lost_at, None), &requests);
        assert_eq!((totals.losses, totals.resumed, totals.retried), (1, 1, 0), "{policy:?}");
        let resumed = answer(&outcomes[0]);
        assert_eq!((resumed.output_tokens, resumed.decode_worker.clone()), (20, Some(first)), "it began on the first worker");
        assert_eq!(outcomes[0].ttft(), Some(Duration::from_micros(8_950 + 6_100)));
        // The other worker computes the prompt and the first six tokens of the answer, except the last one, in steps of 100 and 5 tokens. Then
        // it generates 14 more tokens.
        assert_eq!(outcomes[0].e2e(), Some(Duration::from_micros(lost_at + 9_000 + 4_250 + 14 * 6_100)));
    }
}

#[test]
fn prompt_whose_worker_is_lost_before_the_first_token_is_placed_again() {
    let device = SimulatedDevice { step_tokens: 100, prefill_tokens_per_second: 1_000.0, ..SimulatedDevice::default() };
    let cluster = SimulatedCluster {
        device,
        block_tokens: BLOCK,
        ..SimulatedCluster::new(RoutingRule::Tandem, Size::Split { prefill: 1, decode: 2 })
    };
    let requests = [request(0, 0..60, 3)];
    // Worker 0 is a prefill worker; workers 1 and 2 are decode workers. The prefill of the prompt takes almost a second.
    let lose = |worker| run(&without(&cluster, worker, 400_000, None), &requests);
    let (undisturbed, _) = run(&cluster, &requests);
    let on_prefill_worker = answer(&undisturbed[0]).prefill_worker.as_deref() == Some("prefill-0");
    let decodes_on = answer(&undisturbed[0]).decode_worker.clone().expect("the worker is known");
    let decode = if &*decodes_on == "decode-0" { 1 } else { 2 };
    for lost in if on_prefill_worker { vec![0, decode] } else { vec![decode] } {
        let (outcomes, totals) = lose(lost);
        assert_eq!((totals.resumed, totals.retried), (0, 1), "worker {lost}");
        assert_eq!(answer(&outcomes[0]).output_tokens, 3);
        assert!(outcomes[0].ttft() > undisturbed[0].ttft().map(|time| time + Duration::from_millis(390)), "{outcomes:?}");
    }
}

#[test]
fn lost_worker_returns_with_an_empty_cache_and_receives_requests() {
    let cluster = SimulatedCluster { block_tokens: BLOCK, ..SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(1)) };
    let requests = [request(0, 0..6, 2), request(5_000, 0..6, 2), request(20_000, 0..6, 2), request(25_000, 0..6, 2)];
    let lost = without(&cluster, 0, 10_000_000, Some(Duration::from_secs(5)));
    let (outcomes, _) = run(&lost, &requests);
    let cached: Vec<_> = outcomes.iter().map(|outcome| answer(outcome).cached.tokens()).collect();
    assert_eq!(cached, [Some(0), Some(6 * BLOCK), Some(0), Some(6 * BLOCK)]);
    // While no worker is present, requests are refused.
    let (outcomes, _) = run(&lost, &[request(0, 0..6, 2), request(12_000, 0..6, 2), request(20_000, 0..6, 2)]);
    let classes: Vec<_> = outcomes.iter().map(|outcome| outcome.result.as_ref().err().map(|failure| failure.class)).collect();
    assert_eq!(classes, [None, Some(FailureClass::Status(503)), None]);
}

#[test]
fn request_fails_if_the_only_worker_is_lost_forever() {
    let mut cluster = SimulatedCluster { block_tokens: BLOCK, ..SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(1)) };
    let forever = Loss { worker: 0, at: Duration::from_millis(50), lasts: None };
    cluster.faults.losses.push(forever);
    let (outcomes, totals) = run(&cluster, &[request(0, 0..6, 100)]);
    assert_eq!(outcomes[0].result.as_ref().err().map(|failure| failure.class), Some(FailureClass::ErrorEvent));
    assert_eq!((totals.requests, totals.losses), (1, 1));
}

#[test]
fn lost_workers_and_slow_workers_lengthen_waits_but_no_request_fails() {
    let requests = traffic::conversations(500, 1.5, 4.0, 1);
    let cluster = SimulatedCluster { seed: 1, ..SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(8)) };
    let random = RandomLosses { every: Duration::from_secs(10), lasts: Duration::from_secs(10) };
    let faults = Faults { random: Some(random), ..Faults::default() };
    let lost = SimulatedCluster { faults, ..cluster.clone() };
    let mut slow = cluster.clone();
    slow.workers[0].slower = 4.0;
    let calm = support::figures(&cluster, &requests);
    print("no faults", &calm);
    for (name, cluster) in [("a worker lost every 10 s for 10 s", &lost), ("one worker four times slower", &slow)] {
        // `figures` asserts that all requests are answered.
        let disturbed = support::figures(cluster, &requests);
        print(name, &disturbed);
        assert!(
            disturbed.ttft_mean_s > calm.ttft_mean_s && disturbed.end_mean_s > calm.end_mean_s,
            "{name}: {disturbed:?} {calm:?}"
        );
        assert!(disturbed.ttft_mean_s < 5.0 * calm.ttft_mean_s, "{name}: {disturbed:?} {calm:?}");
    }
    let (_, totals) = run(&lost, &requests);
    assert!(totals.losses > 5 && totals.resumed > 50 && totals.retried > 0, "{totals:?}");
}

fn requests() -> impl Strategy<Value = Vec<SimulatedRequest>> {
    let one = (0..100_u64, vec(0..3_u64, 0..12), 1..=BLOCK as u32, 1..40_u64);
    vec(one, 1..40).prop_map(|all| {
        let mut at = 0;
        let requests = all.into_iter().map(|(gap, blocks, rest, answer_tokens)| {
            at += gap;
            let prompt_tokens = blocks.len() as u32 * BLOCK as u32 + rest;
            SimulatedRequest { at: Duration::from_millis(at), prompt_tokens, blocks: blocks.into(), answer_tokens, max_tokens: 0 }
        });
        requests.collect()
    })
}

/// Returns clusters with at least two decode workers, and their faults.
fn cluster() -> impl Strategy<Value = SimulatedCluster> {
    let size = prop_oneof![
        (2..5_usize).prop_map(Size::Mixed),
        (1..3_usize, 2..4_usize).prop_map(|(prefill, decode)| Size::Split { prefill, decode }),
    ];
    let loss = (0..5_usize, 0..1_000_u64, prop::option::of(1..500_u64));
    let random = prop::option::of((1..300_u64, 1..300_u64));
    let policy =
        select(vec![RoutingRule::Tandem, RoutingRule::RoundRobin, RoutingRule::Dynamo, RoutingRule::LlmD, RoutingRule::Sglang]);
    (size, policy, 16..40_u64, 1..5_usize, 8..300_u64, any::<u64>(), vec(loss, 0..4), random).prop_map(
        |(size, policy, blocks, sequences_max, step_tokens, seed, losses, random)| {
            let device = SimulatedDevice {
                capacity_tokens: blocks * BLOCK,
                sequences_max,
                step_tokens,
                prefill_tokens_per_second: 2_000.0,
                ..SimulatedDevice::default()
            };
            let ms = Duration::from_millis;
            let losses = losses.into_iter().map(|(worker, at, lasts)| Loss {
                worker: worker % size.workers(),
                at: ms(at),
                lasts: lasts.map(ms),
            });
            let random = random.map(|(every, lasts)| RandomLosses { every: ms(every), lasts: ms(lasts) });
            let faults = Faults { losses: losses.collect(), random };
            SimulatedCluster { device, block_tokens: BLOCK, seed, faults, ..SimulatedCluster::new(policy, size) }
        },
    )
}

proptest! {
    // The simulation itself asserts that no block is in use and no request is booked at its end.
    #[test]
    fn every_request_ends_once_whichever_workers_are_lost(cluster in cluster(), requests in requests()) {
        let (outcomes, totals) = run(&cluster, &requests);
        prop_assert_eq!((outcomes.len(), totals.requests as usize), (requests.len(), requests.len()));
        for outcome in &outcomes {
            match &outcome.result {
                Ok(answer) => {
                    let first = answer.first_token.expect("every answer has a token");
                    let gaps: Duration = answer.gaps.iter().map(|gap| gap.length * gap.count).sum();
                    prop_assert_eq!(first + gaps, outcome.ended);
                    prop_assert_eq!(answer.gaps.iter().map(|gap| u64::from(gap.count)).sum::<u64>() + 1, answer.output_tokens);
                }
                Err(failure) => {
                    prop_assert!(matches!(failure.class, FailureClass::Status(503) | FailureClass::ErrorEvent), "{:?}", failure);
                }
            }
        }
        prop_assert_eq!(run(&cluster, &requests), (outcomes, totals), "equal input has equal results");
    }

    #[test]
    fn no_request_fails_after_two_worker_losses_if_a_decode_worker_remains(cluster in cluster(), requests in requests(), kept in 0..5_usize) {
        let decode: Vec<usize> = (0..cluster.workers.len()).filter(|at| cluster.workers[*at].role == WorkerRole::Decode).collect();
        let kept = decode[kept % decode.len()];
        let mut losses = cluster.faults.losses.clone();
        losses.retain(|loss| loss.worker != kept);
        losses.truncate(2);
        let (outcomes, totals) = run(&SimulatedCluster { faults: Faults { losses, random: None }, ..cluster }, &requests);
        prop_assert!(totals.losses <= 2);
        let mut asked: Vec<_> = requests.iter().map(|request| (u64::from(request.prompt_tokens), request.answer_tokens)).collect();
        let mut answered = Vec::new();
        for outcome in &outcomes {
            let answer = outcome.result.as_ref().map_err(|failure| TestCaseError::fail(failure.message.clone()))?;
            answered.push((answer.prompt_tokens.unwrap_or(0), answer.output_tokens));
        }
        asked.sort_unstable();
        answered.sort_unstable();
        prop_assert_eq!(asked, answered);
    }
}
