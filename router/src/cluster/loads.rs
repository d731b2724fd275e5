//! How long a worker's engine takes to load a token from each tier to its device, learned from the times to first tokens.
//!
//! A prompt that loads blocks takes longer than the router estimates without the load. This rest, less the usual error of the estimate, is divided by
//! the loaded tokens. Medians of the latest prompts are used, so that single outliers change nothing and a change is soon followed; the age of the
//! latest one is the weight of the measurement (`rates.rs`). Fixed times of a load count as a part of its tokens.

use crate::{
    rates::Measurement,
    route::{Candidate, RouteChoice},
    settings::Costs,
};
use std::{collections::VecDeque, time::Duration};
use tandem_kv::{ByTier, Tier};
use tokio::time::Instant;

/// The number of prompts from which a time is learned. Older ones are forgotten.
const RECENT: usize = 16;
/// No time is learned from fewer prompts.
const RECENT_MIN: usize = 4;
/// Prompts that load fewer tokens say little: the error of their estimates is divided by few tokens.
const TOKENS_MIN: u32 = 256;
/// The shortest time that is learned, in milliseconds for a token: logarithms need a time above 0.
const MS_MIN: f64 = 1e-6;

/// What the router expected of a prompt's prefill when it placed the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct ExpectedLoads {
    placed: Instant,
    /// The estimated time to the first token without loads.
    first_token_ms: f64,
    /// The number of leading blocks that the engine was expected to find.
    found: u32,
    /// The tokens of the `found` blocks, by the tier from which they are loaded.
    tokens: ByTier<u32>,
    /// The time from the placement to the first token; `None` before it.
    took: Option<Duration>,
}

/// What the latest prompts of one worker showed.
#[derive(Default)]
pub(super) struct LoadTimes {
    /// The errors of the estimates for prompts that loaded nothing, in milliseconds.
    errors: LatestValues,
    /// The milliseconds for a token from each tier.
    per_token: ByTier<LatestValues>,
}

#[derive(Default)]
struct LatestValues {
    values: VecDeque<f64>,
    at: Option<Instant>,
}

impl LatestValues {
    fn add(&mut self, value: f64, now: Instant) {
        if self.values.len() == RECENT {
            self.values.pop_front();
        }
        self.values.push_back(value);
        self.at = Some(now);
    }

    /// Returns the median; `None` if there are too few values.
    fn median(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.values.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        (sorted.len() >= RECENT_MIN).then(|| sorted[sorted.len() / 2])
    }
}

impl ExpectedLoads {
    /// Returns what is expected of a prompt that is placed on `choice` now. `first_token_ms` is the estimate without loads.
    pub(super) fn new(candidates: &[Candidate], choice: RouteChoice, first_token_ms: f64, block_size: u32, now: Instant) -> Self {
        let computes = &candidates[choice.prefill.unwrap_or(choice.decode)];
        Self {
            placed: now,
            first_token_ms,
            found: computes.overlap_blocks + computes.predicted_blocks,
            tokens: computes.tier_blocks().map(|blocks| blocks.saturating_mul(block_size)),
            took: None,
        }
    }

    /// Records the first token.
    pub(super) fn on_first_token(&mut self, now: Instant) {
        self.took.get_or_insert(now.duration_since(self.placed));
    }
}

impl LoadTimes {
    /// Learns from a prompt of which the engine found this many blocks. A prompt that found others than expected says nothing of loads.
    pub(super) fn learn(&mut self, expected: &ExpectedLoads, found: u32, now: Instant) {
        let Some(took) = expected.took.filter(|_| found == expected.found) else { return };
        let rest = took.as_secs_f64() * 1e3 - expected.first_token_ms;
        let loaded: u32 = expected.tokens[1..].iter().sum();
        if loaded == 0 {
            return self.errors.add(rest, now);
        }
        // The tier with most of the tokens learns. What the others took is known from prompts of which they had most.
        let slow = Tier::ALL.into_iter().skip(1);
        let Some(most) = slow.clone().max_by_key(|tier| expected.tokens[tier.index()]) else { return };
        let other_ms = |tier: Tier| self.ms_per_token(tier).unwrap_or(0.0) * f64::from(expected.tokens[tier.index()]);
        let others: f64 = slow.filter(|tier| *tier != most).map(other_ms).sum();
        let tokens = expected.tokens[most.index()];
        if tokens >= TOKENS_MIN {
            let usual = self.errors.median().unwrap_or(0.0);
            self.per_token[most.index()].add((rest - usual - others) / f64::from(tokens), now);
        }
    }

    /// Returns the milliseconds that loading a token from the tier takes; `None` if they were not learned yet.
    pub(super) fn ms_per_token(&self, tier: Tier) -> Option<f64> {
        self.per_token[tier.index()].median().map(|ms| ms.max(MS_MIN))
    }

    /// Returns the learned times as measurements of this age.
    pub(super) fn measurements(&self, now: Instant, costs: &Costs) -> ByTier<Option<Measurement>> {
        Tier::ALL.map(|tier| {
            let age = now.duration_since(self.per_token[tier.index()].at?);
            Some(Measurement::new(self.ms_per_token(tier)?.ln(), Measurement::weight(age, costs)))
        })
    }
}

/// Returns how many of a prompt's first `overlap` blocks are used from each tier. `chains` has the leading blocks in the chain of each tier
/// that the worker reports, `indexed` the number of leading blocks in all of its tiers, and `on_device` the number on its device, although
/// not reported.
pub(super) fn tier_blocks(chains: ByTier<Option<u32>>, indexed: u32, on_device: u32, overlap: u32) -> ByTier<u32> {
    let mut end = overlap;
    let mut within = [overlap; 4];
    for tier in [Tier::Disk, Tier::Host, Tier::Device] {
        // A worker does not report a chain while the next tier is empty: then this tier has all blocks that the next one's chain has.
        let all = if tier == Tier::Disk { indexed } else { end };
        end = chains[tier.index()].unwrap_or(all).max(on_device).min(end);
        within[tier.index()] = end;
    }
    let [device, host, disk, all] = within;
    [device, host - device, disk - host, all - disk]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expected(tokens: ByTier<u32>, took_ms: u64) -> ExpectedLoads {
        let took = Some(Duration::from_millis(took_ms));
        ExpectedLoads { placed: Instant::now(), first_token_ms: 100.0, found: 10, tokens, took }
    }

    #[test]
    fn load_time_per_token_is_learned_despite_outliers_and_follows_a_change() {
        let (mut times, now) = (LoadTimes::default(), Instant::now());
        // The estimate is 30 ms too low for each prompt; one prompt in four takes much longer.
        (0..20).for_each(|prompt| times.learn(&expected([160, 0, 0, 0], if prompt % 4 == 0 { 9_000 } else { 130 }), 10, now));
        let load = |tokens: u32, prompt: u64| {
            let took = if prompt.is_multiple_of(4) { 9_000 } else { 130 + u64::from(tokens) / 20 };
            expected([160, tokens, 0, 0], took)
        };
        (0..3).for_each(|prompt| times.learn(&load(1_000, prompt), 10, now));
        assert_eq!(times.ms_per_token(Tier::Host), None, "three prompts are too few");
        (0..20).for_each(|prompt| times.learn(&load(1_000 + 400 * (prompt as u32 % 4), prompt), 10, now));
        let learned = times.ms_per_token(Tier::Host).expect("it is learned");
        assert!((learned - 0.05).abs() < 0.002, "{learned}");
        // Prompts that found less than expected, or loaded little, say nothing.
        (0..20).for_each(|_| times.learn(&expected([160, 1_000, 0, 0], 5_000), 9, now));
        (0..20).for_each(|_| times.learn(&expected([160, 16, 0, 0], 5_000), 10, now));
        assert_eq!(times.ms_per_token(Tier::Host), Some(learned));
        // The load becomes ten times slower.
        (0..16).for_each(|_| times.learn(&expected([160, 1_000, 0, 0], 630), 10, now));
        assert!((times.ms_per_token(Tier::Host).expect("it is learned") - 0.5).abs() < 0.02);
        // A prompt that loads from two tiers teaches the one with more tokens, less what the other takes.
        (0..16).for_each(|_| times.learn(&expected([0, 1_000, 2_000, 0], 130 + 500 + 4_000), 10, now));
        assert!((times.ms_per_token(Tier::Disk).expect("it is learned") - 2.0).abs() < 0.05);
        assert_eq!(times.ms_per_token(Tier::Store), None);
    }

    #[test]
    fn load_that_takes_no_time_is_a_valid_measurement() {
        let (mut times, now) = (LoadTimes::default(), Instant::now());
        (0..8).for_each(|_| times.learn(&expected([0, 1_000, 0, 0], 90), 10, now));
        assert_eq!(times.ms_per_token(Tier::Host), Some(MS_MIN));
        assert!(times.measurements(now, &Costs::default())[Tier::Host.index()].is_some());
    }

    #[test]
    fn blocks_of_a_prompt_are_divided_between_the_tiers() {
        let none = [None; 4];
        for (chains, indexed, on_device, overlap, blocks) in [
            (none, 10, 0, 10, [10, 0, 0, 0]),
            ([Some(4), None, None, None], 10, 0, 10, [4, 6, 0, 0]),
            ([Some(4), None, None, None], 10, 0, 3, [3, 0, 0, 0]),
            ([Some(4), Some(7), Some(9), Some(10)], 10, 0, 10, [4, 3, 2, 1]),
            // Device and store only.
            ([None, None, Some(4), Some(10)], 10, 0, 10, [4, 0, 0, 6]),
            // Another worker has stored the rest in the shared store.
            (none, 2, 0, 10, [2, 0, 0, 8]),
            // Another prompt that loads the blocks is about to be computed.
            ([Some(4), None, None, None], 10, 8, 10, [8, 2, 0, 0]),
            (none, 2, 10, 10, [10, 0, 0, 0]),
        ] {
            assert_eq!(tier_blocks(chains, indexed, on_device, overlap), blocks, "{chains:?} {indexed} {on_device} {overlap}");
        }
    }
}
