//! The three rules of fairness against naive models.

use crate::machine::fair::{Claim, QUANTUM_TOKENS, Shares, Turns, due, fair_order};
use proptest::prelude::*;
use std::{collections::BTreeMap, sync::Arc};

const NAMES: [&str; 4] = ["", "acme", "both", "zoo"];

/// Takes the sequences round by round: of each account one, of each of its requests one after the other.
fn naive_order(sequences: &[(&'static str, u64)]) -> Vec<usize> {
    // By account: its sequences in the order in which its requests take turns.
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

/// Sequences of jobs that belong to one account each.
fn sequences() -> impl Strategy<Value = Vec<(&'static str, u64)>> {
    prop::collection::vec((0..4usize, 0..6u64), 0..60).prop_map(|drawn| {
        // A job is of one account: its number says of which.
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
    fn the_fair_order_is_that_of_taking_turns(sequences in sequences()) {
        prop_assert_eq!(fair_order(&sequences), naive_order(&sequences));
    }

    #[test]
    fn the_last_of_the_shares_is_the_last_of_the_order(sequences in sequences()) {
        let last = fair_order(&sequences).last().map(|place| sequences[*place]);
        let shares = shares_of(&sequences);
        prop_assert_eq!(shares.last().map(|(account, job)| (&**account, job)), last);
    }

    /// A sequence that is taken because fewer than a batch come before it is then one of the batch.
    #[test]
    fn one_more_sequence_comes_no_later_than_foreseen(sequences in sequences(), account in 0..4usize, job in 0..6u64) {
        let (account, job) = (NAMES[account], job * 4 + account as u64);
        let before = shares_of(&sequences).before(account, job);
        let mut with = sequences.clone();
        let place = with.partition_point(|(_, other)| *other <= job);
        with.insert(place, (account, job));
        let found = fair_order(&with).iter().position(|other| *other == place).expect("it is in the order");
        prop_assert!(found <= before, "foreseen {before}, found {found}");
    }

    /// Nothing of a budget is left while something is wanted, claims of an account are met in their order, and accounts that want
    /// more all the time have never had more than two quanta more or less than each other.
    #[test]
    fn tokens_are_dealt_in_turn_and_all(
        steps in prop::collection::vec(1..2_000usize, 1..40),
        prompts in prop::collection::vec((0..3usize, 1..3_000usize), 0..30),
        greedy in prop::collection::vec(any::<bool>(), 3),
    ) {
        let mut turns = Turns::default();
        let mut claims: Vec<Claim> =
            prompts.iter().map(|(account, tokens)| Claim { account: Arc::from(NAMES[*account]), tokens: *tokens }).collect();
        for (account, greedy) in greedy.iter().enumerate() {
            if *greedy {
                claims.push(Claim { account: Arc::from(NAMES[account]), tokens: 1_000_000 });
            }
        }
        let mut had: BTreeMap<String, usize> = BTreeMap::new();
        for budget in steps {
            let dealt = turns.deal(&claims, budget);
            let wanted: usize = claims.iter().map(|claim| claim.tokens).sum();
            prop_assert_eq!(dealt.iter().sum::<usize>(), budget.min(wanted));
            for (place, claim) in claims.iter().enumerate() {
                prop_assert!(dealt[place] <= claim.tokens);
                let earlier = (0..place).filter(|earlier| claims[*earlier].account == claim.account);
                prop_assert!(dealt[place] == 0 || earlier.clone().all(|earlier| dealt[earlier] == claims[earlier].tokens));
                *had.entry(claim.account.to_string()).or_default() += dealt[place];
            }
            for (claim, dealt) in claims.iter_mut().zip(dealt) {
                claim.tokens -= dealt;
            }
            claims.retain(|claim| claim.tokens > 0);
        }
        let always: Vec<usize> = (0..3).filter(|account| greedy[*account]).map(|account| had.get(NAMES[account]).copied().unwrap_or_default()).collect();
        if let (Some(least), Some(most)) = (always.iter().min(), always.iter().max()) {
            prop_assert!(most - least <= 2 * QUANTUM_TOKENS, "{always:?}");
        }
    }

    /// Prompts that come together are done in the order in which they would be if all were computed at the same speed.
    #[test]
    fn prompts_are_due_in_the_order_of_equal_sharing(costs in prop::collection::vec(1..50usize, 1..12)) {
        let dues: Vec<u64> = (0..costs.len()).map(|last| due(0, costs[last], costs[..last].iter().copied())).collect();
        let mut by_due: Vec<usize> = (0..costs.len()).collect();
        by_due.sort_by_key(|place| (dues[*place], *place));
        // Each has one token computed in each round.
        let mut shared: Vec<usize> = (0..costs.len()).collect();
        shared.sort_by_key(|place| (costs[*place], *place));
        for pair in shared.windows(2) {
            let place = |wanted| by_due.iter().position(|place| *place == wanted).expect("all are due");
            // Of two that come one after the other, the later is behind only if it is not the shorter.
            prop_assert!(place(pair[0]) < place(pair[1]) || pair[1] < pair[0], "costs {costs:?}, due {dues:?}");
        }
    }

    /// However many short prompts come later: what is computed before a prompt is done is at most (1 + the harmonic number of the
    /// prompts that wait) times what lies between the arrival of the oldest prompt that it meets and the time at which it is due.
    /// Equal prompts are done in the order of their arrival.
    #[test]
    fn no_prompt_is_passed_for_ever(arrivals in prop::collection::vec((0..30u64, prop_oneof![1..5usize, 50..51usize, 1..400usize]), 1..60)) {
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
            // 16 tokens until the next look.
            let next = (0..waiting.len()).min_by_key(|place| (waiting[*place].due, *place)).expect("some wait");
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
fn an_account_without_claims_leaves_the_ring() {
    let mut turns = Turns::default();
    let claim = |account: &str| Claim { account: Arc::from(account), tokens: 10_000 };
    turns.deal(&[claim("a"), claim("b")], 100);
    assert!(!turns.is_empty());
    assert_eq!(turns.deal(&[claim("b")], 300), [300], "its turn is not waited for");
    assert!(turns.deal(&[], 300).is_empty());
    assert!(turns.is_empty());
}
