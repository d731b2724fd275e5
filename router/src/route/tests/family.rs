//! Tests of transfer families, and a comparison with a model that compares all pairs.

use super::*;
use proptest::{collection::vec, option, prelude::*};

fn of(family: &str, worker: Candidate) -> Candidate {
    Candidate { family: Some(FamilyId(family.len() as u16)), ..worker }
}

fn alone(worker: Candidate) -> Candidate {
    Candidate { family: None, ..worker }
}

#[test]
fn only_workers_of_one_family_are_paired() {
    let queued = |queued_tokens, worker: Candidate| Candidate { queued_tokens, ..worker };
    let busy = |sequences, worker: Candidate| Candidate { sequences, running: sequences, ..worker };
    let out = |worker: Candidate| Candidate { excluded: true, ..worker };
    let small = |worker: Candidate| Candidate { tokens_max: 99, ..worker };
    let slow_local = || queued(50_000, decode());
    for (query, workers, expected) in [
        // The sum decides: one family has the cheapest prefill worker, the other one the cheapest decode worker.
        (remote(100), vec![busy(9, of("a", decode())), of("a", prefill()), decode(), queued(89, prefill())], Ok((2, Some(3)))),
        (remote(100), vec![busy(9, of("a", decode())), of("a", prefill()), decode(), queued(91, prefill())], Ok((0, Some(1)))),
        // A worker without a partner in its family is not eligible, however cheap it is.
        (remote(100), vec![decode(), of("a", prefill()), queued(9_000, prefill())], Ok((0, Some(2)))),
        (remote(100), vec![of("a", decode()), busy(9, decode()), prefill()], Ok((1, Some(2)))),
        (remote(100), vec![decode(), out(of("a", decode())), of("a", prefill()), queued(9, prefill())], Ok((0, Some(3)))),
        (query(100), vec![slow_local(), of("a", prefill())], Ok((0, None))),
        (query(100), vec![slow_local(), prefill()], Ok((0, Some(1)))),
        // A worker that never exchanges KV prefills what it decodes.
        (query(100), vec![alone(slow_local()), alone(prefill()), prefill()], Ok((0, None))),
        (remote(100), vec![alone(decode()), alone(prefill())], Err(NoEligibleWorker::NoCommonFamily)),
        (remote(100), vec![decode(), of("a", prefill())], Err(NoEligibleWorker::NoCommonFamily)),
        (remote(100), vec![alone(decode()), prefill()], Err(NoEligibleWorker::NoCommonFamily)),
        (remote(100), vec![alone(decode())], Err(NoEligibleWorker::NoPrefillWorker)),
        (remote(100), vec![decode(), out(prefill()), of("a", prefill())], Err(NoEligibleWorker::AllFailed)),
        (remote(100), vec![small(decode()), prefill(), of("a", prefill())], Err(NoEligibleWorker::PromptTooLong)),
    ] {
        assert_eq!(placed(&query, &workers), expected, "{query:?} {workers:#?}");
    }
}

#[test]
fn bandwidth_is_estimated_for_each_transfer_family_separately() {
    // The first decode worker would receive two blocks less than the second one, for 30 ms of load more. The bandwidth decides.
    let decode_worker = |workers: &[Candidate]| placed(&remote(1_601), workers).expect("the request can be placed").0;
    let pair = |bandwidth| {
        let with_overlap = Candidate { overlap_blocks: 2, sequences: 3, ..decode() };
        vec![with_overlap, decode(), Candidate { transfer_bytes_per_second: measured(bandwidth), ..prefill() }]
    };
    let fast = of("a", Candidate { transfer_bytes_per_second: measured(1e12), ..prefill() });
    assert_eq!((decode_worker(&pair(1e6)), decode_worker(&pair(2e6))), (0, 1));
    assert_eq!(decode_worker(&[pair(1e6), vec![fast]].concat()), 0, "the fast sender is of another family");
}

fn any_worker() -> impl Strategy<Value = Candidate> {
    let family = option::of(prop_oneof![Just(0), Just(1), Just(2)]);
    (any::<(bool, bool, bool, bool)>(), family, 0..2_000_u64, 0..20_u32, 0..6_u32).prop_map(
        |((prefills, excluded, is_small, needs_prefill_worker), family, queued_tokens, sequences, overlap_blocks)| Candidate {
            family: family.map(FamilyId),
            excluded,
            tokens_max: if is_small { 99 } else { 100_000 },
            queued_tokens,
            sequences,
            overlap_blocks,
            needs_prefill_worker: needs_prefill_worker && !prefills,
            ..if prefills { prefill() } else { decode() }
        },
    )
}

proptest! {
    #[test]
    fn choice_is_the_cheapest_of_all_pairs(workers in vec(any_worker(), 0..9), remote_only in any::<bool>(), number in any::<u64>()) {
        let query = if remote_only { remote(100) } else { query(100) };
        let placement = PlacementSeed { seed: 1, number };
        // The costs are computed as if all workers were in one family, so that every worker has the cost that it would have in a pair.
        let one_family: Vec<Candidate> = workers.iter().cloned().map(|worker| of("", worker)).collect();
        let costs = costs_by_use(PolicyKind::KvAware, &Costs::default(), ByRole::default(), &query, &one_family);
        let pairs = |is_one: &dyn Fn(&Candidate) -> bool| {
            let of_role = |role| workers.iter().enumerate().filter(move |(_, worker)| worker.role == role && is_one(worker));
            let all = of_role(WorkerRole::Decode).flat_map(|(decode, to)| of_role(WorkerRole::Prefill).map(move |from| (decode, to, from)));
            let pairs = all.filter(|(_, to, (_, from))| to.family.is_some() && to.family == from.family);
            pairs.map(|(decode, _, (prefill, _))| (decode, Some(prefill))).collect::<Vec<_>>()
        };
        let total = |(decode, prefill): (usize, Option<usize>)| {
            let parts = match prefill {
                Some(prefill) => [costs[prefill].prefill, costs[decode].decode],
                None => [costs[decode].local, Some(Cost::default())],
            };
            parts.into_iter().map(|cost| cost.expect("the worker is eligible").total()).sum::<f64>()
        };
        let is_eligible = |worker: &Candidate| !worker.excluded && worker.tokens_max >= 100;
        let mut choices = pairs(&is_eligible);
        if !remote_only {
            let is_alone = |worker: &Candidate| worker.role == WorkerRole::Decode && !worker.needs_prefill_worker;
            let decode = workers.iter().enumerate().filter(|(_, worker)| is_alone(worker) && is_eligible(worker));
            let mut local: Vec<_> = decode.map(|(at, _)| (at, None)).collect();
            choices.append(&mut local);
        }
        let lowest = choices.iter().map(|choice| total(*choice)).min_by(f64::total_cmp);
        match (place_by(PolicyKind::KvAware, &query, &workers, placement), lowest) {
            (Ok(choice), Some(lowest)) => {
                prop_assert!(choices.contains(&choice), "{choice:?}");
                prop_assert_eq!(total(choice), lowest);
            }
            (Err(error), None) => {
                let has = |role| workers.iter().any(|worker| worker.role == role);
                let fits = |worker: &Candidate| worker.tokens_max >= 100;
                let alone: Vec<_> =
                    workers.iter().filter(|worker| worker.role == WorkerRole::Decode && !worker.needs_prefill_worker).collect();
                let any_pair = !pairs(&|_| true).is_empty() || !remote_only && !alone.is_empty();
                let any_fitting = !pairs(&fits).is_empty() || !remote_only && alone.iter().any(|worker| fits(worker));
                let expected = match error {
                    NoEligibleWorker::NoDecodeWorker => !has(WorkerRole::Decode),
                    NoEligibleWorker::NoPrefillWorker => remote_only && has(WorkerRole::Decode) && !has(WorkerRole::Prefill),
                    NoEligibleWorker::NoCommonFamily => remote_only && has(WorkerRole::Decode) && has(WorkerRole::Prefill) && !any_pair,
                    NoEligibleWorker::NoPartner => !remote_only && has(WorkerRole::Decode) && !any_pair,
                    NoEligibleWorker::NoPromptLogprobs => false,
                    NoEligibleWorker::PromptTooLong => has(WorkerRole::Decode) && any_pair && !any_fitting,
                    NoEligibleWorker::AllFailed => any_fitting,
                };
                prop_assert!(expected, "{error}");
            }
            (placed, lowest) => prop_assert!(false, "{placed:?} {lowest:?}"),
        }
    }
}
