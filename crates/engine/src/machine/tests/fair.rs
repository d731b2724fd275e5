//! Tests the three rules of fair sharing against naive models.

use crate::machine::{
    fair::{Demand, QUANTUM_TOKENS, RoundRobin, Shares, due, fair_order},
    sequence::{JobId, Owner},
};
use proptest::prelude::*;
use std::{collections::BTreeMap, sync::Arc};
use tandem_kv::Priority;

const NAMES: [&str; 4] = ["", "acme", "both", "zoo"];
const RANKS: std::ops::RangeInclusive<i32> = -1..=1;

/// Sorts `places`, which are places of sequences of one account, by the definition of the account's fair order: by priority, and within a priority in
/// rounds, each with one sequence of each request.
fn naive_account(sequences: &[Owner], places: &[usize]) -> Vec<usize> {
    let mut order = Vec::new();
    for within in RANKS {
        let mut jobs: BTreeMap<JobId, Vec<usize>> = BTreeMap::new();
        for place in places.iter().filter(|place| sequences[**place].priority.within == within) {
            jobs.entry(sequences[*place].job).or_default().push(*place);
        }
        for round in 0..places.len() {
            order.extend(jobs.values().filter_map(|places| places.get(round).copied()));
        }
    }
    order
}

/// Returns the fair order by its definition: first the exempt sequence, then by rank, and within a rank in rounds, each with one sequence of each
/// account.
fn naive_order(sequences: &[Owner], exempt: Option<JobId>) -> Vec<usize> {
    let first = (0..sequences.len()).find(|place| Some(sequences[*place].job) == exempt);
    let mut order = Vec::from_iter(first);
    for across in RANKS {
        let of_account = |account: &str| {
            let is_of = |place: &usize| {
                *sequences[*place].account == *account && sequences[*place].priority.across == across && Some(*place) != first
            };
            naive_account(sequences, &(0..sequences.len()).filter(is_of).collect::<Vec<_>>())
        };
        let accounts = NAMES.map(of_account);
        for round in 0..sequences.len() {
            let mut places: Vec<usize> = accounts.iter().filter_map(|places| places.get(round).copied()).collect();
            places.sort_by_key(|place| sequences[*place].job);
            order.append(&mut places);
        }
    }
    order
}

/// The priorities of requests by number. A third of all cases have only one priority.
fn priorities() -> impl Strategy<Value = [Priority; 6]> {
    let any = prop::array::uniform6((RANKS, RANKS)).prop_map(|drawn| drawn.map(|(across, within)| Priority { across, within }));
    prop_oneof![1 => Just([Priority::default(); 6]), 2 => any]
}

/// Returns the owner of a sequence. All sequences of a job belong to one account, so the number of the job determines the account.
fn owner(account: usize, number: u64, priorities: &[Priority; 6]) -> Owner {
    Owner { account: NAMES[account].into(), priority: priorities[number as usize], job: number * 4 + account as u64 }
}

fn sequences() -> impl Strategy<Value = (Vec<Owner>, [Priority; 6])> {
    (prop::collection::vec((0..4usize, 0..6u64), 0..60), priorities()).prop_map(|(drawn, priorities)| {
        let mut drawn: Vec<Owner> = drawn.into_iter().map(|(account, number)| owner(account, number, &priorities)).collect();
        drawn.sort_by_key(|owner| owner.job);
        (drawn, priorities)
    })
}

fn shares_of(sequences: &[Owner], exempt: Option<JobId>) -> Shares {
    let mut shares = Shares::new(exempt);
    sequences.iter().for_each(|owner| shares.add(owner));
    shares
}

proptest! {
    #[test]
    fn fair_order_equals_naive_rotation((sequences, _) in sequences(), exempt in prop::option::of(0..24u64)) {
        prop_assert_eq!(fair_order(&sequences, exempt), naive_order(&sequences, exempt));
    }

    #[test]
    fn last_job_by_shares_equals_the_last_of_the_fair_order((sequences, _) in sequences(), exempt in prop::option::of(0..24u64)) {
        let last = fair_order(&sequences, exempt).last().map(|place| sequences[*place].job);
        let shares = shares_of(&sequences, exempt);
        prop_assert_eq!(shares.last(), last);
    }

    /// A sequence is admitted only if its predicted place in the fair order is within the batch. So the prediction must not be too early:
    /// otherwise an admitted sequence would not be among those that the batch computes.
    #[test]
    fn predicted_place_of_a_new_sequence_in_the_fair_order_is_never_too_early(
        (sequences, priorities) in sequences(), account in 0..4usize, number in 0..6u64, exempt in prop::option::of(0..24u64),
    ) {
        let new = owner(account, number, &priorities);
        let before = shares_of(&sequences, exempt).before(&new);
        let mut with = sequences.clone();
        let place = with.partition_point(|other| other.job <= new.job);
        with.insert(place, new);
        let found = fair_order(&with, exempt).iter().position(|other| *other == place).expect("the fair order has every waiting sequence");
        prop_assert!(found <= before, "predicted {before}, found {found}");
    }

    /// A rank receives tokens only if all demands of the ranks before it are met.
    #[test]
    fn round_robin_meets_the_demands_of_outranking_requests_first(
        steps in prop::collection::vec(1..2_000usize, 1..10),
        prompts in prop::collection::vec((0..3usize, RANKS, 1..3_000usize), 0..30),
    ) {
        let mut round_robin = RoundRobin::default();
        let mut demands: Vec<Demand> =
            prompts.iter().map(|(account, across, tokens)| Demand { account: NAMES[*account].into(), across: *across, tokens: *tokens }).collect();
        for budget in steps {
            let allotted = round_robin.allot(&demands, budget);
            let wanted: usize = demands.iter().map(|demand| demand.tokens).sum();
            prop_assert_eq!(allotted.iter().sum::<usize>(), budget.min(wanted));
            let worst_served = demands.iter().zip(&allotted).filter(|(_, tokens)| **tokens > 0).map(|(demand, _)| demand.across).max();
            for (demand, allotted) in demands.iter_mut().zip(allotted) {
                prop_assert!(worst_served.is_none_or(|worst| demand.across >= worst) || allotted == demand.tokens);
                demand.tokens -= allotted;
            }
            demands.retain(|demand| demand.tokens > 0);
        }
    }

    /// The whole budget is spent while accounts have demands, the demands of an account are met in their order, and the tokens allotted to accounts
    /// that always have demands differ by two quanta at most.
    #[test]
    fn round_robin_spends_the_budget_and_accounts_differ_by_two_quanta_at_most(
        steps in prop::collection::vec(1..2_000usize, 1..40),
        prompts in prop::collection::vec((0..3usize, 1..3_000usize), 0..30),
        greedy in prop::collection::vec(any::<bool>(), 3),
    ) {
        let mut round_robin = RoundRobin::default();
        let mut demands: Vec<Demand> =
            prompts.iter().map(|(account, tokens)| Demand { account: Arc::from(NAMES[*account]), across: 0, tokens: *tokens }).collect();
        for (account, greedy) in greedy.iter().enumerate() {
            if *greedy {
                demands.push(Demand { account: Arc::from(NAMES[account]), across: 0, tokens: 1_000_000 });
            }
        }
        let mut had: BTreeMap<String, usize> = BTreeMap::new();
        for budget in steps {
            let allotted = round_robin.allot(&demands, budget);
            let wanted: usize = demands.iter().map(|demand| demand.tokens).sum();
            prop_assert_eq!(allotted.iter().sum::<usize>(), budget.min(wanted));
            for (place, demand) in demands.iter().enumerate() {
                prop_assert!(allotted[place] <= demand.tokens);
                let earlier = (0..place).filter(|earlier| demands[*earlier].account == demand.account);
                prop_assert!(allotted[place] == 0 || earlier.clone().all(|earlier| allotted[earlier] == demands[earlier].tokens));
                *had.entry(demand.account.to_string()).or_default() += allotted[place];
            }
            for (demand, allotted) in demands.iter_mut().zip(allotted) {
                demand.tokens -= allotted;
            }
            demands.retain(|demand| demand.tokens > 0);
        }
        let always: Vec<usize> = (0..3).filter(|account| greedy[*account]).map(|account| had.get(NAMES[account]).copied().unwrap_or_default()).collect();
        if let (Some(least), Some(most)) = (always.iter().min(), always.iter().max()) {
            prop_assert!(most - least <= 2 * QUANTUM_TOKENS, "{always:?}");
        }
    }

    /// Prompts that arrive together finish in the same order as if all of them were computed at the same speed.
    #[test]
    fn due_order_of_prompts_equals_the_finishing_order_of_processor_sharing(costs in prop::collection::vec(1..50usize, 1..12)) {
        let dues: Vec<u64> = (0..costs.len()).map(|last| due(0, costs[last], costs[..last].iter().copied())).collect();
        let mut by_due: Vec<usize> = (0..costs.len()).collect();
        by_due.sort_by_key(|place| (dues[*place], *place));
        let mut shared: Vec<usize> = (0..costs.len()).collect();
        shared.sort_by_key(|place| (costs[*place], *place));
        for pair in shared.windows(2) {
            let place = |wanted| by_due.iter().position(|place| *place == wanted).expect("every sequence has a due time");
            // Of two neighbours in the order `shared`, the first may be due later only if it arrived later.
            prop_assert!(place(pair[0]) < place(pair[1]) || pair[1] < pair[0], "costs {costs:?}, due {dues:?}");
        }
    }

    /// The number of tokens that are computed from a prompt's arrival until it is done is limited to D × (1 + H), however many short prompts arrive
    /// later. D is the prompt's due value minus the arrival (in tokens) of the oldest prompt that was waiting when this prompt arrived. H is the
    /// harmonic number of the maximum number of waiting prompts. Equal prompts are done in the order of their arrival.
    #[test]
    fn delay_of_each_prompt_is_bounded(arrivals in prop::collection::vec((0..30u64, prop_oneof![1..5usize, 50..51usize, 1..400usize]), 1..60)) {
        struct Prompt { arrived: u64, oldest: u64, due: u64, cost: usize, left: usize }
        let (mut computed, mut waiting): (u64, Vec<Prompt>) = (0, Vec::new());
        let mut waiting_max = 0;
        let mut done: Vec<(Prompt, u64)> = Vec::new();
        let mut arrivals = arrivals.into_iter().peekable();
        while arrivals.peek().is_some() || !waiting.is_empty() {
            if let Some((_, cost)) = arrivals.next_if(|(gap, _)| waiting.is_empty() || *gap < 10) {
                let due = due(computed, cost, waiting.iter().map(|other| other.left));
                let oldest = waiting.first().map_or(computed, |oldest| oldest.arrived);
                waiting.push(Prompt { arrived: computed, oldest, due, cost, left: cost });
                waiting_max = waiting_max.max(waiting.len());
                continue;
            }
            let next = (0..waiting.len()).min_by_key(|place| (waiting[*place].due, *place)).expect("a sequence is waiting");
            let step = waiting[next].left.min(16);
            waiting[next].left -= step;
            computed += step as u64;
            if waiting[next].left == 0 {
                done.push((waiting.remove(next), computed));
            }
            if let Some(first) = arrivals.peek_mut() {
                first.0 = first.0.saturating_sub(5);
            }
        }
        let harmonic: f64 = (1..=waiting_max).map(|number| 1.0 / number as f64).sum();
        for (prompt, at) in &done {
            let allowed = (prompt.due - prompt.oldest) as f64 * (1.0 + harmonic) + 16.0;
            prop_assert!((at - prompt.arrived) as f64 <= allowed, "{} tokens, {allowed} allowed", at - prompt.arrived);
        }
        for (place, (prompt, _)) in done.iter().enumerate() {
            let later = done[..place].iter().filter(|(other, _)| other.cost == prompt.cost && other.arrived > prompt.arrived);
            prop_assert_eq!(later.count(), 0, "equal prompts are done in the order of their arrival");
        }
    }
}

#[test]
fn account_without_demand_leaves_the_round_robin() {
    let mut round_robin = RoundRobin::default();
    let demand = |account: &str| Demand { account: Arc::from(account), across: 0, tokens: 10_000 };
    round_robin.allot(&[demand("a"), demand("b")], 100);
    assert!(!round_robin.is_empty());
    assert_eq!(round_robin.allot(&[demand("b")], 300), [300], "the account that has left receives no share");
    assert!(round_robin.allot(&[], 300).is_empty());
    assert!(round_robin.is_empty());
}
