//! Properties that hold for every cluster and every load.

use proptest::{collection::vec, prelude::*, sample::select};
use std::{collections::BTreeMap, ops::ControlFlow, time::Duration};
use tandem_load::report::{FailureClass, RequestOutcome};
use tandem_router::PrefillPlace;
use tandem_simulator::{RoutingRule, SimulatedCluster, SimulatedDevice, SimulatedRequest, Size, Totals, simulate};

const BLOCK: u64 = 16;
const POLICIES: [RoutingRule; 7] = [
    RoutingRule::Tandem,
    RoutingRule::RoundRobin,
    RoutingRule::Random,
    RoutingRule::FewestRequests,
    RoutingRule::Dynamo,
    RoutingRule::LlmD,
    RoutingRule::Sglang,
];

fn run(cluster: &SimulatedCluster, requests: &[SimulatedRequest]) -> (Vec<RequestOutcome>, Totals) {
    let mut outcomes = Vec::new();
    let totals = simulate(cluster, requests.iter().cloned(), &mut |outcome| {
        outcomes.push(outcome.clone());
        ControlFlow::Continue(())
    });
    (outcomes, totals)
}

fn requests() -> impl Strategy<Value = Vec<SimulatedRequest>> {
    // There are few block ids, so that prompts have common prefixes, and gaps of at most 100 ms, so that requests are queued.
    let one = (0..100_u64, vec(0..3_u64, 0..12), 1..=BLOCK as u32, 1..40_u64);
    vec(one, 1..40).prop_map(|all| {
        let mut at = 0;
        let requests = all.into_iter().map(|(gap, blocks, rest, answer_tokens)| {
            at += gap;
            let prompt_tokens = blocks.len() as u32 * BLOCK as u32 + rest;
            // If the tokens after the named blocks fill a block, the prompt's last block is full, but the trace need not name it.
            SimulatedRequest { at: Duration::from_millis(at), prompt_tokens, blocks: blocks.into(), answer_tokens, max_tokens: 0 }
        });
        requests.collect()
    })
}

fn cluster() -> impl Strategy<Value = SimulatedCluster> {
    let size = prop_oneof![
        (1..5_usize).prop_map(Size::Mixed),
        (1..3_usize, 1..4_usize).prop_map(|(prefill, decode)| Size::Split { prefill, decode }),
    ];
    let place = select(vec![PrefillPlace::Auto, PrefillPlace::Local]);
    (size, select(POLICIES.to_vec()), place, 4..24_u64, 1..5_usize, 8..300_u64, any::<u64>(), prop::option::of(1..6_usize))
        .prop_map(|(size, policy, prefill, blocks, sequences_max, step_tokens, seed, concurrency)| {
            let device = SimulatedDevice {
                capacity_tokens: blocks * BLOCK,
                sequences_max,
                step_tokens,
                prefill_tokens_per_second: 2_000.0,
                ..SimulatedDevice::default()
            };
            SimulatedCluster { device, block_tokens: BLOCK, prefill, seed, concurrency, ..SimulatedCluster::new(policy, size) }
        })
}

proptest! {
    // The simulation itself asserts that no block is in use and no request is booked at its end, and the prefix cache that blocks never
    // exceed its capacity.
    #[test]
    fn every_request_ends_once_with_its_tokens(cluster in cluster(), requests in requests()) {
        let (outcomes, totals) = run(&cluster, &requests);
        prop_assert_eq!((outcomes.len(), totals.requests as usize), (requests.len(), requests.len()));
        let capacity = cluster.device.capacity_tokens;
        // Outcomes do not identify their requests. So the multiset of token counts that the requests ask for is compared with the multiset of
        // token counts in the answers.
        let (mut asked, mut answered) = (BTreeMap::<(u64, u64), u32>::new(), BTreeMap::<(u64, u64), u32>::new());
        let mut too_long = 0;
        for request in &requests {
            let prompt = u64::from(request.prompt_tokens);
            match capacity.saturating_sub(prompt) {
                0 => too_long += 1,
                rest => *asked.entry((prompt, request.answer_tokens.min(rest))).or_default() += 1,
            }
        }
        let mut last_end = Duration::ZERO;
        for outcome in &outcomes {
            prop_assert!(outcome.ended >= last_end, "outcomes are in the order of their ends");
            last_end = outcome.ended;
            match &outcome.result {
                Ok(answer) => {
                    let prompt = answer.prompt_tokens.expect("prompts are counted");
                    *answered.entry((prompt, answer.output_tokens)).or_default() += 1;
                    let first = answer.first_token.expect("every answer has a token");
                    prop_assert!(outcome.due < first && first <= outcome.ended);
                    let gaps: Duration = answer.gaps.iter().map(|gap| gap.length * gap.count).sum();
                    prop_assert_eq!(first + gaps, outcome.ended);
                    prop_assert_eq!(answer.gaps.iter().map(|gap| u64::from(gap.count)).sum::<u64>() + 1, answer.output_tokens);
                    prop_assert!(answer.cached.tokens().is_some_and(|cached| cached < prompt));
                }
                Err(failure) => {
                    too_long -= 1;
                    prop_assert_eq!(failure.class, FailureClass::Status(400));
                }
            }
        }
        prop_assert_eq!((asked, too_long), (answered, 0));
    }

    #[test]
    fn equal_input_gives_equal_results(cluster in cluster(), requests in requests()) {
        prop_assert_eq!(run(&cluster, &requests), run(&cluster, &requests));
    }

    /// The times of a single request are known exactly.
    #[test]
    fn single_request_takes_the_time_of_its_steps(policy in select(POLICIES.to_vec()), blocks in 0..60_u64, answer_tokens in 1..50_u64) {
        let device = SimulatedDevice { step_tokens: 100, ..SimulatedDevice::default() };
        let cluster = SimulatedCluster { device, block_tokens: BLOCK, ..SimulatedCluster::new(policy, Size::Mixed(3)) };
        let prompt = blocks * BLOCK + 5;
        let request = SimulatedRequest {
            at: Duration::from_secs(1),
            prompt_tokens: prompt as u32,
            blocks: (0..blocks).collect(),
            answer_tokens,
            max_tokens: 0,
        };
        let (outcomes, _) = run(&cluster, &[request]);
        // The last token of the prompt is computed by the step that samples the first token.
        let prefill = (prompt - 1).div_ceil(100) * 4_000 + (prompt - 1) * 50;
        prop_assert_eq!(outcomes[0].ttft(), Some(Duration::from_micros(prefill + 6_100)));
        prop_assert_eq!(outcomes[0].e2e(), Some(Duration::from_micros(prefill + answer_tokens * 6_100)));
    }
}

#[test]
fn second_request_finds_the_blocks_of_the_first() {
    for policy in POLICIES {
        for size in [Size::Mixed(1), Size::Split { prefill: 1, decode: 1 }] {
            let cluster = SimulatedCluster { block_tokens: BLOCK, ..SimulatedCluster::new(policy, size) };
            let request = |at, blocks: &[u64]| SimulatedRequest {
                at: Duration::from_secs(at),
                prompt_tokens: (blocks.len() as u64 * BLOCK) as u32,
                blocks: blocks.into(),
                answer_tokens: 2,
                max_tokens: 0,
            };
            // The last block of the second prompt is known as well, but its last token is always computed.
            let (outcomes, _) =
                run(&cluster, &[request(0, &[1, 2, 3, 4]), request(9, &[1, 2, 3]), request(18, &[1, 2, 9, 4, 5])]);
            let cached: Vec<_> =
                outcomes.iter().map(|outcome| outcome.result.as_ref().expect("it is answered").cached.tokens()).collect();
            assert_eq!(cached, [Some(0), Some(2 * BLOCK), Some(2 * BLOCK)], "{policy:?} {size}");
        }
    }
}

#[test]
fn transfer_delays_the_first_token_only_by_its_last_chunk() {
    let device = SimulatedDevice { step_tokens: 160, prefill_tokens_per_second: 1_000.0, ..SimulatedDevice::default() };
    let size = Size::Split { prefill: 1, decode: 1 };
    let ttft = |transfer_bytes_per_second: f64| {
        let device = SimulatedDevice { transfer_bytes_per_second, ..device };
        let cluster = SimulatedCluster {
            device,
            block_tokens: BLOCK,
            prefill: PrefillPlace::Remote,
            ..SimulatedCluster::new(RoutingRule::Tandem, size)
        };
        let request = SimulatedRequest {
            at: Duration::ZERO,
            prompt_tokens: 330,
            blocks: (0..20).collect(),
            answer_tokens: 1,
            max_tokens: 0,
        };
        run(&cluster, &[request]).0[0].ttft().expect("it is answered").as_micros()
    };
    // Three chunks of 160, 160 and 9 tokens, a transfer, and a decode step that computes the last token.
    let computed = 3 * 4_000 + 329_000;
    let bytes = 131_072.0;
    assert_eq!(ttft(bytes * 1e4), computed + 9 * 100 + 6_100);
    // Transfers of 500 tokens a second are slower than the computation.
    assert_eq!(ttft(bytes * 500.0), 329 * 2_000 + 6_100);
}

#[test]
fn sequence_that_lacks_blocks_is_preempted_and_still_ends() {
    let device = SimulatedDevice { capacity_tokens: 12 * BLOCK, ..SimulatedDevice::default() };
    let cluster = SimulatedCluster { device, block_tokens: BLOCK, ..SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(1)) };
    let request = |id: u64| SimulatedRequest {
        at: Duration::ZERO,
        prompt_tokens: 2 * BLOCK as u32,
        blocks: [id, id + 1].into(),
        answer_tokens: 8 * BLOCK,
        max_tokens: 0,
    };
    let (outcomes, totals) = run(&cluster, &[request(1), request(7)]);
    assert_eq!(totals, Totals { requests: 2, preemptions: 1, prefix: totals.prefix, ..Totals::default() });
    let lengths: Vec<_> = outcomes.iter().filter_map(|outcome| Some(outcome.result.as_ref().ok()?.output_tokens)).collect();
    assert_eq!(lengths, [8 * BLOCK; 2]);
}
