//! The circuit breaker of each worker. It keeps requests from a worker that fails them, and decides when to try the worker again.
//!
//! Consecutive faults open the circuit: for a pause, no request is placed on the worker. After the pause one request is admitted as a
//! probe. The probe's first token closes the circuit; its fault opens the circuit again for a longer pause. While the circuit is open,
//! faults of requests that were placed earlier are ignored, but the first token of such a request closes the circuit, because it shows that
//! the worker serves.

use crate::worker_bookings::BookingId;
use std::time::Duration;
use tandem_process::Backoff;
use tandem_proto::v1::FailureReason;
use tokio::time::Instant;

/// The number of consecutive faults that open the circuit. It equals the default number of attempts of a request, so that one request can
/// open the circuit.
const FAULTS_MAX: u32 = 3;

/// The first pause. Jitter lengthens it to at most twice this time. It is short, because the worker may only have been busy.
const PAUSE_MIN: Duration = Duration::from_secs(1);

/// The longest pause. Jitter lengthens it to at most twice this time. A worker that has not recovered fails one attempt after each pause.
const PAUSE_MAX: Duration = Duration::from_secs(15);

/// The circuit breaker of one worker.
#[derive(Debug, Default)]
pub(crate) struct Breaker {
    faults: u32,
    /// The state of the open circuit; `None` while the circuit is closed.
    open: Option<Open>,
}

#[derive(Debug)]
struct Open {
    /// The lengths of the pauses. Their jitter keeps several routers from probing a worker at the same moment.
    pauses: Backoff,
    until: Instant,
    probe: Option<BookingId>,
}

/// Whether a failure for this reason suggests that the worker is broken. A worker that is at capacity, drains, was restarted or received an
/// invalid request is not broken. No worker is at fault for a refused write.
pub(crate) fn is_fault(reason: FailureReason) -> bool {
    use FailureReason as Reason;
    match reason {
        Reason::Unspecified | Reason::WorkerEnded | Reason::PrefillLost | Reason::Timeout | Reason::EngineFailed => true,
        Reason::AtCapacity
        | Reason::WrongInstance
        | Reason::InvalidRequest
        | Reason::ModelNotServed
        | Reason::Draining
        | Reason::WriteRefused
        | Reason::NoWorker
        | Reason::Starting
        | Reason::Overloaded => false,
    }
}

impl Breaker {
    /// Whether a request may be placed on the worker.
    pub(crate) fn admits(&self, now: Instant) -> bool {
        self.open.as_ref().is_none_or(|open| open.probe.is_none() && now >= open.until)
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.is_some()
    }

    /// Records that a request was placed on the worker. While the circuit is open, that request is the probe.
    pub(crate) fn on_placed(&mut self, booking: BookingId) {
        if let Some(open) = &mut self.open {
            open.probe.get_or_insert(booking);
        }
    }

    /// Closes the circuit: a request that was placed on the worker has its first token.
    pub(crate) fn on_success(&mut self) {
        *self = Self::default();
    }

    /// Records that a request failed because of the worker. Returns whether this fault opened the circuit.
    pub(crate) fn on_fault(&mut self, booking: BookingId, now: Instant) -> bool {
        self.faults = self.faults.saturating_add(1);
        let mut pauses = match self.open.take_if(|open| open.probe == Some(booking)) {
            Some(open) => open.pauses,
            None if self.open.is_none() && self.faults >= FAULTS_MAX => Backoff::new(PAUSE_MIN, PAUSE_MAX),
            None => return false,
        };
        self.open = Some(Open { until: now + pauses.next_delay(), pauses, probe: None });
        true
    }

    /// Records that the request has ended. If it was the probe and had neither a first token nor a fault, the next request becomes the
    /// probe.
    pub(crate) fn on_released(&mut self, booking: BookingId) {
        if let Some(open) = &mut self.open {
            open.probe.take_if(|probe| *probe == booking);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn circuit_opens_after_consecutive_faults_and_probes_with_growing_pauses() {
        let (mut breaker, now) = (Breaker::default(), Instant::now());
        for _ in 0..2 {
            assert!(!breaker.on_fault(BookingId(0), now) && !breaker.on_fault(BookingId(0), now) && breaker.admits(now));
            breaker.on_success();
        }
        assert!(!breaker.on_fault(BookingId(0), now) && !breaker.on_fault(BookingId(0), now));
        assert!(breaker.on_fault(BookingId(0), now));
        let (mut now, mut pause) = (now, PAUSE_MIN);
        assert!(!breaker.admits(now));
        for probe in 1..9 {
            // Faults of requests that were placed before the circuit opened are ignored.
            assert!(!breaker.on_fault(BookingId(0), now));
            assert!(!breaker.admits(now + pause - Duration::from_millis(1)));
            now += 2 * pause;
            assert!(breaker.admits(now), "jitter at most doubles the pause");
            breaker.on_placed(BookingId(probe));
            assert!(!breaker.admits(now + 2 * PAUSE_MAX), "one probe at a time");
            breaker.on_released(BookingId(0));
            assert!(!breaker.admits(now));
            assert!(breaker.on_fault(BookingId(probe), now));
            breaker.on_released(BookingId(probe));
            pause = (pause * 2).min(PAUSE_MAX);
        }
        now += 2 * PAUSE_MAX;
        breaker.on_placed(BookingId(20));
        breaker.on_released(BookingId(20));
        assert!(breaker.admits(now), "a cancelled probe is not a result");
        breaker.on_placed(BookingId(21));
        breaker.on_success();
        breaker.on_placed(BookingId(22));
        assert!(breaker.admits(now) && !breaker.on_fault(BookingId(22), now));
    }

    #[tokio::test(start_paused = true)]
    async fn two_routers_do_not_probe_a_worker_at_the_same_moment() {
        let now = Instant::now();
        let until = || {
            let mut breaker = Breaker::default();
            assert!((0..FAULTS_MAX).map(|_| breaker.on_fault(BookingId(0), now)).eq([false, false, true]));
            breaker.open.map(|open| open.until)
        };
        assert_ne!(until(), until());
    }
}
