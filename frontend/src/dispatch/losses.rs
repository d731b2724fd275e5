//! Recognizes requests that end the workers that run them, so that one such request cannot end a whole cluster.

use std::fmt;
use tandem_proto::v1::FailureReason;

/// After this many workers have ended or failed while they ran a request, the request fails. Two losses may be chance, or the request may
/// have caused both, so it is not sent to a third worker.
const LOSSES_MAX: usize = 2;

/// If a request has generated this many tokens since its last loss, the request did not cause that loss: otherwise the worker that resumed
/// it after the same tokens would have ended soon, too. The number exceeds the tokens that are lost in transit when a worker ends.
const PROGRESS_TOKENS: usize = 64;

/// The workers that ended or failed while they ran one request.
#[derive(Debug, Default)]
pub(super) struct Losses {
    workers: Vec<String>,
    /// The number of generated tokens at the last loss.
    generated: usize,
}

impl Losses {
    /// Adds a failed attempt of a request with this number of generated tokens. Returns whether another worker may run the request.
    pub(super) fn add(&mut self, reason: FailureReason, worker: &str, generated: usize) -> bool {
        if !matches!(reason, FailureReason::WorkerEnded | FailureReason::EngineFailed) {
            return true;
        }
        if generated >= self.generated + PROGRESS_TOKENS {
            self.workers.clear();
        }
        self.generated = generated;
        self.workers.push(worker.to_owned());
        self.workers.len() < LOSSES_MAX
    }
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.workers.join(", "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FailureReason::{EngineFailed, Timeout, Unspecified, WorkerEnded};

    #[test]
    fn second_loss_ends_the_request() {
        let mut losses = Losses::default();
        assert!(losses.add(WorkerEnded, "a", 0));
        assert!(losses.add(Timeout, "b", 0), "a worker that is slow has not ended");
        assert!(losses.add(Unspecified, "b", 0), "a worker that could not be reached did not run the request");
        assert!(!losses.add(EngineFailed, "c", 10));
        assert_eq!(losses.to_string(), "a, c");
    }

    #[test]
    fn loss_is_forgotten_after_progress() {
        let mut losses = Losses::default();
        assert!(losses.add(WorkerEnded, "a", 100), "the first loss");
        for loss in 1..10 {
            assert!(losses.add(WorkerEnded, "b", 100 + loss * PROGRESS_TOKENS));
        }
        assert!(!losses.add(WorkerEnded, "c", 100 + 10 * PROGRESS_TOKENS - 1));
    }
}
