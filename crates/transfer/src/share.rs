//! Divides the time of a sender's network between the transfers that use it at the same time.

use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tokio::time::Instant;

/// The clock of a sender's network: while several transfers have bytes in flight, each of them is charged an equal part of the time. So the
/// bytes of one transfer divided by its charged time equal the bandwidth of the network, however many transfers share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct SharedClock(Arc<Mutex<ShareState>>);

#[derive(Debug, Default)]
struct ShareState {
    sending: u32,
    /// The time up to which charges are included in `each`; `None` before the first transfer.
    at: Option<Instant>,
    /// The total time that would have been charged to a transfer with bytes in flight during the whole time since the start.
    each: Duration,
}

/// A transfer that has bytes in flight, until it is dropped.
pub(crate) struct InFlight {
    clock: SharedClock,
    began: Duration,
}

impl SharedClock {
    pub(crate) fn begin(&self) -> InFlight {
        let mut state = self.0.lock();
        state.advance();
        state.sending += 1;
        InFlight { clock: self.clone(), began: state.each }
    }
}

impl InFlight {
    /// Returns the time charged to the transfer so far.
    pub(crate) fn charged(&self) -> Duration {
        let mut state = self.clock.0.lock();
        state.advance();
        state.each - self.began
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        let mut state = self.clock.0.lock();
        state.advance();
        state.sending -= 1;
    }
}

impl ShareState {
    fn advance(&mut self) {
        let now = Instant::now();
        let before = self.at.replace(now).unwrap_or(now);
        if self.sending > 0 {
            self.each += (now - before) / self.sending;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::time::advance;

    #[tokio::test(start_paused = true)]
    async fn network_time_is_divided_between_concurrent_transfers() {
        let clock = SharedClock::default();
        let first = clock.begin();
        advance(Duration::from_secs(1)).await;
        let second = clock.begin();
        advance(Duration::from_secs(2)).await;
        assert_eq!((first.charged(), second.charged()), (Duration::from_secs(2), Duration::from_secs(1)));
        drop(first);
        advance(Duration::from_secs(3)).await;
        assert_eq!(second.charged(), Duration::from_secs(4));
        drop(second);
        advance(Duration::from_secs(5)).await;
        assert_eq!(clock.begin().charged(), Duration::ZERO, "no transfer is charged while nothing is sent");
    }
}
