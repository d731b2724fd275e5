//! Conversions of loads, and plausibility checks of the rates in them.

use crate::v1;
use std::{collections::HashMap, ops::RangeInclusive};
use tandem_kv::{ByTier, Load, Tier};

/// The plausible range of prompt tokens per second: from one token in ten seconds to a thousand times the speed of the fastest device.
const PREFILL_TOKENS_PER_SECOND: RangeInclusive<f64> = 0.1..=1e9;

/// The plausible range of a step's duration in milliseconds: from a picosecond, as in simulations, to ten minutes, which is longer than any engine is
/// allowed to take.
const STEP_MS: RangeInclusive<f64> = 1e-9..=600_000.0;

/// The lowest share of prompts in the time of a step. A lower reported share counts as this one, because receivers divide by the share.
const PROMPT_SHARE_MIN: f64 = 0.01;

/// The plausible range of transfer rates in bytes per second: from a rate that is too low for any use to a thousand times the rate of the
/// fastest network.
const TRANSFER_BYTES_PER_SECOND: RangeInclusive<f64> = 1.0..=1e15;

/// Leaves `included_request_ids`, `transfer_bytes_per_second`, `cache` and `steps` empty, because [`Load`] does not have them. The sender
/// of the message sets them.
impl From<&Load> for v1::Load {
    fn from(load: &Load) -> Self {
        Self {
            running_sequences: load.running_sequences,
            waiting_requests: load.waiting_requests,
            pending_prefill_tokens: load.pending_prefill_tokens,
            free_blocks: load.free_blocks,
            cached_blocks: load.cached_blocks,
            in_use_blocks: load.in_use_blocks,
            tier_blocks: tier_names(load.tier_blocks),
            prefill_tokens_per_second: load.prefill_tokens_per_second,
            prefill_measurements: load.prefill_measurements,
            prefill_fixed_ms: load.prefill_fixed_ms,
            decode_step_ms: load.decode_step_ms,
            prompt_share: load.prompt_share,
            ..Self::default()
        }
    }
}

/// An implausible rate becomes 0, which means that it was not measured. The message does not contain `preemptions`,
/// `invariant_violations` and `refused_graphs`, so they become 0.
impl From<&v1::Load> for Load {
    fn from(load: &v1::Load) -> Self {
        Self {
            running_sequences: load.running_sequences,
            waiting_requests: load.waiting_requests,
            pending_prefill_tokens: load.pending_prefill_tokens,
            free_blocks: load.free_blocks,
            cached_blocks: load.cached_blocks,
            in_use_blocks: load.in_use_blocks,
            tier_blocks: Tier::ALL.map(|tier| load.tier_blocks.get(tier.name()).copied().unwrap_or(0)),
            prefill_tokens_per_second: measured(load.prefill_tokens_per_second, PREFILL_TOKENS_PER_SECOND),
            prefill_measurements: load.prefill_measurements,
            prefill_fixed_ms: measured(load.prefill_fixed_ms, STEP_MS),
            decode_step_ms: measured(load.decode_step_ms, STEP_MS),
            prompt_share: prompt_share(load.prompt_share),
            ..Self::default()
        }
    }
}

/// Returns the numbers that are not 0, by the names of their tiers.
pub fn tier_names(numbers: ByTier<u32>) -> HashMap<String, u32> {
    let tiers = Tier::ALL.into_iter().zip(numbers).filter(|(_, number)| *number > 0);
    tiers.map(|(tier, number)| (tier.name().to_owned(), number)).collect()
}

/// Returns the load's transfer rate in bytes per second; 0 if it was not measured or is implausible.
pub fn transfer_bytes_per_second(load: &v1::Load) -> f64 {
    measured(load.transfer_bytes_per_second, TRANSFER_BYTES_PER_SECOND)
}

/// Returns the share of prompts in the time of a step, raised to [`PROMPT_SHARE_MIN`] if it is lower; 0 if it is not known.
fn prompt_share(share: f64) -> f64 {
    if share > 0.0 && share <= 1.0 { share.max(PROMPT_SHARE_MIN) } else { 0.0 }
}

/// Returns the value if it is plausible, else 0. Receivers divide by rates and compare the results, so NaN, infinite, negative, subnormal
/// and implausible values must not reach them.
fn measured(value: f64, plausible: RangeInclusive<f64>) -> f64 {
    if plausible.contains(&value) { value } else { 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn load_round_trips(
            (running_sequences, waiting_requests, pending_prefill_tokens) in any::<(u32, u32, u64)>(),
            (free_blocks, cached_blocks, in_use_blocks) in any::<(u32, u32, u32)>(),
            prefill_measurements in any::<u64>(),
            (prefill_tokens_per_second, prefill_fixed_ms, decode_step_ms) in (0.1..1e9_f64, 1e-3..1e5_f64, 1e-3..6e5_f64),
            prompt_share in 0.01..=1.0_f64,
            tier_blocks in any::<[u32; 4]>(),
        ) {
            let load = Load {
                running_sequences,
                waiting_requests,
                pending_prefill_tokens,
                free_blocks,
                cached_blocks,
                in_use_blocks,
                tier_blocks,
                prefill_tokens_per_second,
                prefill_measurements,
                prefill_fixed_ms,
                decode_step_ms,
                prompt_share,
                preemptions: 0,
                invariant_violations: 0,
                refused_graphs: 0,
            };
            prop_assert_eq!(Load::from(&v1::Load::from(&load)), load);
        }
    }

    #[test]
    fn implausible_rates_count_as_not_measured() {
        for bad in [f64::NAN, -f64::NAN, f64::INFINITY, f64::NEG_INFINITY, -1.0, 1e-320, f64::MIN_POSITIVE, 1e300, 0.0, -0.0] {
            let load = v1::Load {
                prefill_tokens_per_second: bad,
                prefill_fixed_ms: bad,
                decode_step_ms: bad,
                prompt_share: if bad > 0.0 { f64::INFINITY } else { bad },
                transfer_bytes_per_second: bad,
                running_sequences: 7,
                ..Default::default()
            };
            assert_eq!(Load::from(&load), Load { running_sequences: 7, ..Default::default() }, "{bad}");
            assert_eq!(transfer_bytes_per_second(&load).to_bits(), 0, "{bad}");
        }
    }
}
