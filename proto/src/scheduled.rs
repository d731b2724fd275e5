//! What a worker reports of a prompt it prefills.

use crate::v1;
use std::time::Duration;

/// The memory KV is found in; the only tier there is.
const DEVICE: &str = "device";

impl v1::Scheduled {
    /// Tokens found in the device's prefix cache. `None` reports nothing, which is not 0.
    pub fn on_device(cached_tokens: Option<u32>) -> Self {
        let by_tier = cached_tokens.map(|tokens| (DEVICE.to_owned(), tokens));
        Self { cached_tokens, cached_tokens_by_tier: by_tier.into_iter().collect() }
    }
}

impl v1::PrefillChunk {
    /// A step that began so long after Scheduled.
    pub fn new(begun: Duration, took: Duration, tokens: u32) -> Self {
        let ms = |time: Duration| time.as_secs_f32() * 1e3;
        Self { start_ms: ms(begun), duration_ms: ms(took), tokens }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_report_adds_up_and_no_report_is_not_zero() {
        for tokens in [0, 48] {
            let reported = v1::Scheduled::on_device(Some(tokens));
            assert_eq!((reported.cached_tokens, reported.cached_tokens_by_tier[DEVICE]), (Some(tokens), tokens));
            assert_eq!(reported.cached_tokens_by_tier.len(), 1);
        }
        assert_eq!(v1::Scheduled::on_device(None), v1::Scheduled::default());
    }
}
