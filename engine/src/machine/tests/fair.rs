//! Tests the three rules of fair sharing against naive models.

use crate::machine::fair::{Demand, QUANTUM_TOKENS, RoundRobin, Shares, due, fair_order};
use proptest::prelude::*;
use std::{collections::BTreeMap, sync::Arc};

const NAMES: [&str; 4] = ["", "acme", "both", "zoo"];

/// Returns the fair order by its definition: in each round one sequence of each account, and inside an account one of each request.
fn naive_order(sequences: &[(&'static str, u64)]) -> Vec<usize> {
    let mut accounts: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for account in NAMES {
        let mut jobs: BTreeMap<u64, Vec<usize>> = BTreeMap::new();
        for (place, (_, job)) in sequences.iter().enumerate().filter(|(_, (of, _))| *of == account) {
            jobs.entry(*job).or_default().push(place);
        }
        for round in 0..sequences.len() {
            let places = jobs.values().filter_map(|places| places.get(round).copied());
            accounts.entry(account).or_default().extend(places);
        }
    }
    let mut order = Vec::new();
    for round in 0..sequences.len() {
        let mut places: Vec<usize> = accounts.values().filter_map(|places| places.get(round).copied()).collect();
        places.sort_by_key(|place| sequences[*place].1);
        order.append(&mut places);
    }
    order
}

fn sequences() -> impl Strategy<Value = Vec<(&'static str, u64)>> {
    prop::collection::vec((0..4usize, 0..6u64), 0..60).prop_map(|drawn| {
        // All sequences of a job belong to one account, so the number of the job determines the account.
        let mut drawn: Vec<(&str, u64)> =
            drawn.into_iter().map(|(account, job)| (NAMES[account], job * 4 + account as u64)).collect();
        drawn.sort_by_key(|(_, job)| *job);
        drawn
    })
}

fn shares_of(sequences: &[(&'static str, u64)]) -> Shares {
    let mut shares = Shares::default();
    for (account, job) in sequences {
        shares.add(&Arc::from(*account), *job);
    }
    shares
}

proptest! {
    #[test]
    fn fair_order_equals_naive_rotation(sequences in sequences()) {
        prop_assert_eq!(fair_order(&sequences), naive_order(&sequences));
    }

    #[test]
    fn shares_return_the_last_job_of_the_fair_order(sequences in sequences()) {
        let last = fair_order(&sequences).last().map(|place| sequences[*place].1);
        let shares = shares_of(&sequences);
        prop_assert_eq!(shares.last(), last);
    }

    /// A sequence is admitted only if its predicted place in the fair order is within the batch. So the prediction must not be too early:
    /// otherwise an admitted sequence would not be among those that the batch computes.
    #[test]
    fn new_sequence_is_no_later_in_the_fair_order_than_predicted(sequences in sequences(), account in 0..4usize, job in 0..6u64) {
        let (account, job) = (NAMES[account], job * 4 + account as u64);
        let before = shares_of(&sequences).before(account, job);
        let mut with = sequences.clone();
        let place = with.partition_point(|(_, other)| *other <= job);
        with.insert(place, (account, job));
        let found = fair_order(&with).iter().position(|other| *other == place).expect("the fair order has every waiting sequence");
        prop_assert!(found <= before, "predicted {before}, found {found}");
    }

    /// The whole budget is spent while accounts have demands, the demands of an account are met in their order, and the tokens allotted to accounts
    /// that always have demands differ by two quanta at most.
    #[test]
    fn round_robin_spends_the_budget_and_is_fair_within_two_quanta(
        steps in prop::collection::vec(1..2_000usize, 1..40),
        prompts in prop::collection::vec((0..3usize, 1..3_000usize), 0..30),
        greedy in prop::collection::vec(any::<bool>(), 3),
    ) {
        let mut round_robin = RoundRobin::default();
        let mut demands: Vec<Demand> =
            prompts.iter().map(|(account, tokens)| Demand { account: Arc::from(NAMES[*account]), tokens: *tokens }).collect();
        for (account, greedy) in greedy.iter().enumerate() {
            if *greedy {
                demands.push(Demand { account: Arc::from(NAMES[account]), tokens: 1_000_000 });
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
    fn prompts_are_due_in_the_order_in_which_processor_sharing_finishes_them(costs in prop::collection::vec(1..50usize, 1..12)) {
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
fn account_without_prompt_tokens_leaves_the_round_robin() {
    let mut round_robin = RoundRobin::default();
    let demand = |account: &str| Demand { account: Arc::from(account), tokens: 10_000 };
    round_robin.allot(&[demand("a"), demand("b")], 100);
    assert!(!round_robin.is_empty());
    assert_eq!(round_robin.allot(&[demand("b")], 300), [300], "the account that has left receives no share");
    assert!(round_robin.allot(&[], 300).is_empty());
    assert!(round_robin.is_empty());
}
