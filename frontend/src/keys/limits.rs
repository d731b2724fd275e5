//! Limits per minute, as token buckets.

use std::{num::NonZeroU32, time::Duration};
use tokio::time::Instant;

const SECONDS: f64 = 60.0;

/// An allowance that refills evenly and holds at most what a minute allows. A charge may take more than is left; the debt is then refilled
/// first.
#[derive(Debug)]
pub(super) struct Bucket {
    per_minute: NonZeroU32,
    level: f64,
    /// The time to which `level` applies.
    at: Instant,
}

/// The limit of a bucket and what is left of it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Quota {
    pub(crate) limit: u32,
    pub(crate) remaining: u32,
    /// The time until the bucket is full.
    pub(crate) reset: Duration,
}

/// The reason for which an amount was not taken.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Shortage {
    /// The amount will be available after this time, if nothing else is taken meanwhile.
    Later(Duration),
    /// The amount is more than the bucket can hold.
    Never,
}

impl Bucket {
    pub(super) fn full(per_minute: NonZeroU32, now: Instant) -> Self {
        Self { per_minute, level: per_minute.get().into(), at: now }
    }

    /// Sets another limit. What was taken before stays taken.
    pub(super) fn resize(&mut self, per_minute: NonZeroU32, now: Instant) {
        self.refill(now);
        let missing = self.max() - self.level;
        self.per_minute = per_minute;
        self.level = self.max() - missing;
    }

    /// Takes the amount, or nothing and fails.
    ///
    /// # Errors
    /// Less than the amount is left.
    pub(super) fn take(&mut self, amount: u32, now: Instant) -> Result<(), Shortage> {
        self.refill(now);
        let amount = f64::from(amount);
        if amount > self.max() {
            return Err(Shortage::Never);
        }
        if amount > self.level {
            return Err(Shortage::Later(self.time_for(amount - self.level)));
        }
        self.level -= amount;
        Ok(())
    }

    /// Takes the amount even if less is left.
    pub(super) fn charge(&mut self, amount: u32, now: Instant) {
        self.refill(now);
        self.level -= f64::from(amount);
    }

    pub(super) fn quota(&mut self, now: Instant) -> Quota {
        self.refill(now);
        let reset = self.time_for(self.max() - self.level);
        Quota { limit: self.per_minute.get(), remaining: self.level.max(0.0) as u32, reset }
    }

    fn refill(&mut self, now: Instant) {
        let refilled = now.saturating_duration_since(self.at).as_secs_f64() * self.max() / SECONDS;
        self.level = (self.level + refilled).min(self.max());
        self.at = self.at.max(now);
    }

    fn max(&self) -> f64 {
        self.per_minute.get().into()
    }

    fn time_for(&self, amount: f64) -> Duration {
        Duration::from_secs_f64(amount.max(0.0) * SECONDS / self.max())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limit(per_minute: u32) -> NonZeroU32 {
        NonZeroU32::new(per_minute).expect("the limit is not 0")
    }

    #[tokio::test(start_paused = true)]
    async fn token_bucket_holds_the_limit_of_one_minute_and_refills_evenly() {
        let start = Instant::now();
        let after = |seconds: f64| start + Duration::from_secs_f64(seconds);
        let mut bucket = Bucket::full(limit(60), start);
        assert_eq!(bucket.take(60, start), Ok(()));
        assert_eq!(bucket.take(1, start), Err(Shortage::Later(Duration::from_secs(1))));
        assert_eq!(bucket.take(61, start), Err(Shortage::Never));
        assert_eq!(bucket.take(1, after(0.5)), Err(Shortage::Later(Duration::from_millis(500))));
        assert_eq!(bucket.take(1, after(1.0)), Ok(()));
        assert_eq!(bucket.quota(after(31.0)), Quota { limit: 60, remaining: 30, reset: Duration::from_secs(30) });
        assert_eq!(bucket.quota(after(1e6)).remaining, 60, "a bucket never holds more than a minute allows");
    }

    #[tokio::test(start_paused = true)]
    async fn debt_of_a_bucket_is_refilled_first() {
        let start = Instant::now();
        let mut bucket = Bucket::full(limit(60), start);
        bucket.charge(90, start);
        assert_eq!(bucket.quota(start), Quota { limit: 60, remaining: 0, reset: Duration::from_secs(90) });
        assert_eq!(bucket.take(1, start), Err(Shortage::Later(Duration::from_secs(31))));
        assert_eq!(bucket.take(1, start + Duration::from_secs(31)), Ok(()));
    }

    #[tokio::test(start_paused = true)]
    async fn changing_a_limit_does_not_refund_used_tokens() {
        let now = Instant::now();
        let mut bucket = Bucket::full(limit(60), now);
        bucket.charge(50, now);
        bucket.resize(limit(100), now);
        assert_eq!(bucket.quota(now).remaining, 50);
        bucket.resize(limit(20), now);
        assert_eq!((bucket.quota(now).remaining, bucket.quota(now).reset), (0, Duration::from_secs(150)));
    }
}
