//! The way to other workers as a simulated engine sees it: blocks pass one after another, each for its time.

use parking_lot::Mutex;
use std::time::Duration;
use tokio::time::Instant;

/// Timers are no finer than this.
const TICK: Duration = Duration::from_millis(1);

/// Shared by all transfers of a worker. Takes no time when `block` is zero.
#[derive(Debug)]
pub(crate) struct Link {
    block: Duration,
    free_at: Mutex<Option<Instant>>,
}

impl Link {
    pub(crate) fn new(block: Duration) -> Self {
        Self { block, free_at: Mutex::default() }
    }

    /// Waits until one more block has passed; up to a tick of it may be left to [`Link::settle`].
    pub(crate) async fn pass(&self) {
        if self.block.is_zero() {
            return;
        }
        let now = Instant::now();
        let passed = {
            let mut free_at = self.free_at.lock();
            let passed = free_at.map_or(now, |free_at| free_at.max(now)) + self.block;
            *free_at = Some(passed);
            passed
        };
        // A timer may be late by a tick: early by one, it never leaves the link idle between two blocks.
        if passed - now > TICK {
            tokio::time::sleep_until(passed - TICK).await;
        }
    }

    /// Waits until all that has been sent so far has passed.
    pub(crate) async fn settle(&self) {
        let free_at = *self.free_at.lock();
        if let Some(free_at) = free_at {
            tokio::time::sleep_until(free_at).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn blocks_take_their_time_one_after_another() {
        let link = Link::new(Duration::from_micros(210));
        let started = Instant::now();
        let transfer = || async {
            for _ in 0..500 {
                link.pass().await;
            }
            link.settle().await;
        };
        tokio::join!(transfer(), transfer());
        let elapsed = started.elapsed();
        assert!((Duration::from_millis(210)..Duration::from_millis(215)).contains(&elapsed), "{elapsed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn an_idle_link_saves_nothing_up_and_a_real_one_takes_no_time() {
        let link = Link::new(Duration::from_millis(5));
        link.pass().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let started = Instant::now();
        link.pass().await;
        link.settle().await;
        assert_eq!(started.elapsed(), Duration::from_millis(5));
        let started = Instant::now();
        let real = Link::new(Duration::ZERO);
        real.pass().await;
        real.settle().await;
        assert_eq!(started.elapsed(), Duration::ZERO);
    }
}
