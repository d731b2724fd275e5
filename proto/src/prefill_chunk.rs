//! The constructor of `PrefillChunk`.

use crate::v1;
use std::time::Duration;

impl v1::PrefillChunk {
    /// Returns the chunk of `tokens` tokens that one engine step computed. `begun` is the time from the message `Scheduled` to the beginning of the
    /// step, and `took` the duration of the step.
    pub fn new(begun: Duration, took: Duration, tokens: u32) -> Self {
        let ms = |time: Duration| time.as_secs_f32() * 1e3;
        Self { start_ms: ms(begun), duration_ms: ms(took), tokens }
    }
}
