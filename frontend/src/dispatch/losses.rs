//! Recognizes requests that end the workers that run them, so that one such request cannot end a whole cluster.

use std::fmt;
use tandem_proto::v1::FailureReason;

/// The number of workers that may end or fail while they run a request. Two may be a coincidence of faults, or one fault that the request has caused
/// twice: the request is then not sent to a third worker.
const LOSSES_MAX: usize = 2;

/// If a request has generated this many tokens more since its last loss, that loss was not the request's fault: a worker that resumes the request
/// after the tokens generated so far would otherwise have ended at once, too. The number exceeds the tokens that are lost on the way when a worker ends.
const PROGRESS_TOKENS: usize = 64;

/// The workers that ended or failed while they ran one request.
#[derive(Debug, Default)]
pub(super) struct Losses {
    workers: Vec<String>,
    /// The number of generated tokens at the last loss.
    generated: usize,
}

impl Losses {
    /// Adds a failed attempt of a request that has generated this number of tokens. Returns whether the request may be sent to another worker.
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
    fn loss_before_much_progress_is_not_counted() {
        let mut losses = Losses::default();
        assert!(losses.add(WorkerEnded, "a", 100), "the first loss");
        for loss in 1..10 {
            assert!(losses.add(WorkerEnded, "b", 100 + loss * PROGRESS_TOKENS));
        }
        assert!(!losses.add(WorkerEnded, "c", 100 + 10 * PROGRESS_TOKENS - 1));
    }
}
