//! Constructors of a worker's reports about a prompt that it prefills.

use crate::v1;
use std::time::Duration;

/// The only tier: the device's memory.
const DEVICE: &str = "device";

impl v1::Scheduled {
    /// Reports the tokens that were found in the device's prefix cache. `None` reports nothing, which differs from 0.
    pub fn on_device(cached_tokens: Option<u32>) -> Self {
        let by_tier = cached_tokens.map(|tokens| (DEVICE.to_owned(), tokens));
        Self { cached_tokens, cached_tokens_by_tier: by_tier.into_iter().collect() }
    }
}

impl v1::PrefillChunk {
    /// Reports `tokens` tokens that were computed in a step. `begun`: from Scheduled to the beginning of the step; `took`: its duration.
    pub fn new(begun: Duration, took: Duration, tokens: u32) -> Self {
        let ms = |time: Duration| time.as_secs_f32() * 1e3;
        Self { start_ms: ms(begun), duration_ms: ms(took), tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_report_differs_from_zero_cached_tokens() {
        for tokens in [0, 48] {
            let reported = v1::Scheduled::on_device(Some(tokens));
            assert_eq!((reported.cached_tokens, reported.cached_tokens_by_tier[DEVICE]), (Some(tokens), tokens));
            assert_eq!(reported.cached_tokens_by_tier.len(), 1);
        }
        assert_eq!(v1::Scheduled::on_device(None), v1::Scheduled::default());
    }
}
