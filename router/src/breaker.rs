//! When a worker that fails requests is left alone, and when it is tried again.
//!
//! Faults in a row open the breaker: nobody is placed there for a pause. After it one request is let in as a probe; its first
//! token closes the breaker, its fault opens it again for twice as long. What comes of requests placed before does not matter
//! while it is open, except that a token shows that the worker works.

use crate::booked::BookingId;
use std::time::Duration;
use tandem_proto::v1::FailureReason;
use tokio::time::Instant;

/// In a row. As many as one request may have attempts: it alone cannot do without a worker.
const FAULTS_MAX: u32 = 3;

/// Soon enough for a worker that was only busy.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// A worker that is well again is found within it, and one that is not costs one attempt in it.
const PAUSE_MAX: Duration = Duration::from_secs(30);

/// One worker's.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    faults: u32,
    /// While it is open.
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    pause: Duration,
    until: Instant,
    probe: Option<BookingId>,
}

/// Whether this may mean that a worker is broken. That it is full, leaving or another instance by now does not, nor that a
/// request is nonsense.
pub(crate) fn is_fault(reason: FailureReason) -> bool {
    match reason {
        FailureReason::Unspecified | FailureReason::PrefillLost | FailureReason::Timeout | FailureReason::EngineFailed => true,
        FailureReason::AtCapacity
        | FailureReason::WrongInstance
        | FailureReason::InvalidRequest
        | FailureReason::Draining
        | FailureReason::WriteRefused => false,
    }
}

impl Breaker {
    /// Whether a request may be placed here.
    pub(crate) fn admits(&self, now: Instant) -> bool {
        self.open.as_ref().is_none_or(|open| open.probe.is_none() && now >= open.until)
    }

    /// A request was placed here.
    pub(crate) fn placed(&mut self, booking: BookingId) {
        if let Some(open) = &mut self.open {
            open.probe.get_or_insert(booking);
        }
    }

    /// A request that was placed here has its first token.
    pub(crate) fn worked(&mut self) {
        *self = Self::default();
    }

    /// A request failed because of this worker; true when nobody is placed here for a while now.
    pub(crate) fn failed(&mut self, booking: BookingId, now: Instant) -> bool {
        self.faults = self.faults.saturating_add(1);
        let pause = match &self.open {
            None if self.faults < FAULTS_MAX => return false,
            None => PAUSE_MIN,
            Some(open) if open.probe == Some(booking) => (open.pause * 2).min(PAUSE_MAX),
            Some(_) => return false,
        };
        self.open = Some(Open { pause, until: now + pause, probe: None });
        true
    }

    /// The request has ended: if it was the probe without having shown anything, another may be.
    pub(crate) fn ended(&mut self, booking: BookingId) {
        if let Some(open) = &mut self.open {
            open.probe.take_if(|probe| *probe == booking);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn it_opens_after_faults_in_a_row_probes_and_backs_off() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..2 {
            assert!(!breaker.failed(BookingId(0), now) && !breaker.failed(BookingId(0), now) && breaker.admits(now));
            breaker.worked();
        }
        assert!(!breaker.failed(BookingId(0), now) && !breaker.failed(BookingId(0), now));
        assert!(breaker.failed(BookingId(0), now));
        let (mut now, mut pause) = (now, PAUSE_MIN);
        for probe in 1..9 {
            // Others that fail now were placed before.
            assert!(!breaker.failed(BookingId(0), now));
            assert!(!breaker.admits(now + pause - Duration::from_millis(1)));
            now += pause;
            assert!(breaker.admits(now));
            breaker.placed(BookingId(probe));
            assert!(!breaker.admits(now + PAUSE_MAX), "one probe at a time");
            breaker.ended(BookingId(0));
            assert!(!breaker.admits(now));
            assert!(breaker.failed(BookingId(probe), now));
            breaker.ended(BookingId(probe));
            pause = (pause * 2).min(PAUSE_MAX);
        }
        now += PAUSE_MAX;
        breaker.placed(BookingId(20));
        breaker.ended(BookingId(20));
        assert!(breaker.admits(now), "a probe whose client left has shown nothing");
        breaker.placed(BookingId(21));
        breaker.worked();
        breaker.placed(BookingId(22));
        assert!(breaker.admits(now) && !breaker.failed(BookingId(22), now));
    }
}
