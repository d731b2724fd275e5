//! Loads: kv's numbers on the wire.

use crate::{WireError, v1};
use tandem_kv::Load;

/// `taken_in`, `transfer_bytes_per_second`, `cache` and `steps` are not the cache's to know: they stay empty, for the sender to fill in.
impl From<&Load> for v1::Load {
    fn from(load: &Load) -> Self {
        Self {
            running_sequences: load.running_sequences,
            waiting_requests: load.waiting_requests,
            pending_prefill_tokens: load.pending_prefill_tokens,
            free_blocks: load.free_blocks,
            cached_blocks: load.cached_blocks,
            in_use_blocks: load.in_use_blocks,
            prefill_tokens_per_second: load.prefill_tokens_per_second,
            decode_step_ms: load.decode_step_ms,
            transfer_bytes_per_second: 0.0,
            taken_in: Vec::new(),
            cache: None,
            steps: None,
        }
    }
}

/// Checks every number. `preemptions` is not on the wire: 0.
impl TryFrom<&v1::Load> for Load {
    type Error = WireError;

    fn try_from(load: &v1::Load) -> Result<Self, WireError> {
        measurement("transfer_bytes_per_second", load.transfer_bytes_per_second)?;
        Ok(Self {
            running_sequences: load.running_sequences,
            waiting_requests: load.waiting_requests,
            pending_prefill_tokens: load.pending_prefill_tokens,
            free_blocks: load.free_blocks,
            cached_blocks: load.cached_blocks,
            in_use_blocks: load.in_use_blocks,
            prefill_tokens_per_second: measurement("prefill_tokens_per_second", load.prefill_tokens_per_second)?,
            decode_step_ms: measurement("decode_step_ms", load.decode_step_ms)?,
            preemptions: 0,
        })
    }
}

fn measurement(field: &'static str, value: f64) -> Result<f64, WireError> {
    if value.is_finite() && value >= 0.0 { Ok(value) } else { Err(WireError::NotAMeasurement { field }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_load_comes_back_as_it_went(
            (running_sequences, waiting_requests, pending_prefill_tokens) in any::<(u32, u32, u64)>(),
            (free_blocks, cached_blocks, in_use_blocks) in any::<(u32, u32, u32)>(),
            (prefill_tokens_per_second, decode_step_ms) in (0.0..1e12_f64, 0.0..1e6_f64),
        ) {
            let load = Load {
                running_sequences,
                waiting_requests,
                pending_prefill_tokens,
                free_blocks,
                cached_blocks,
                in_use_blocks,
                prefill_tokens_per_second,
                decode_step_ms,
                preemptions: 0,
            };
            prop_assert_eq!(Load::try_from(&v1::Load::from(&load)), Ok(load));
        }
    }

    #[test]
    fn numbers_that_are_no_measurement_are_refused() {
        for bad in [f64::NAN, f64::INFINITY, -1.0] {
            for (field, load) in [
                ("prefill_tokens_per_second", v1::Load { prefill_tokens_per_second: bad, ..Default::default() }),
                ("decode_step_ms", v1::Load { decode_step_ms: bad, ..Default::default() }),
                ("transfer_bytes_per_second", v1::Load { transfer_bytes_per_second: bad, ..Default::default() }),
            ] {
                assert_eq!(Load::try_from(&load), Err(WireError::NotAMeasurement { field }));
            }
        }
    }
}
