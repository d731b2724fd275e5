//! Labels of failure reasons, and the gRPC status with which a router refuses a stream for such a reason.

use crate::v1::{Failure, FailureReason};
use prost::Message;
use tonic::{Code, Status};

impl FailureReason {
    /// Returns the reason's label, which metrics, traces and messages use.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unreachable",
            Self::AtCapacity => "at_capacity",
            Self::PrefillLost => "prefill_lost",
            Self::Timeout => "timeout",
            Self::WrongInstance => "wrong_instance",
            Self::EngineFailed => "engine_failed",
            Self::InvalidRequest => "invalid_request",
            Self::Draining => "draining",
            Self::WriteRefused => "write_refused",
            Self::NoWorker => "no_worker",
            Self::Overloaded => "overloaded",
            Self::Starting => "starting",
            Self::WorkerEnded => "worker_ended",
            Self::ModelNotServed => "model_not_served",
        }
    }

    /// Returns the status of a call that is refused for this reason, and that may succeed later or on another router.
    pub fn refusal(self, message: impl Into<String>) -> Status {
        let failure = Failure { reason: self.into(), message: message.into(), instance_id: String::new(), retry_after_ms: 0 };
        let details = failure.encode_to_vec().into();
        Status::with_details(Code::Unavailable, failure.message, details)
    }

    /// Returns the reason of a status that [`FailureReason::refusal`] has made; `None` for any other status, such as that of a lost
    /// connection.
    pub fn of_refusal(status: &Status) -> Option<Self> {
        let is_refusal = status.code() == Code::Unavailable && !status.details().is_empty();
        is_refusal.then(|| Failure::decode(status.details()).ok()).flatten().map(|failure| failure.reason())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refusal_has_its_reason_and_other_statuses_have_none() {
        let refused = FailureReason::Starting.refusal("two of three workers");
        assert_eq!((refused.code(), refused.message()), (Code::Unavailable, "two of three workers"));
        assert_eq!(FailureReason::of_refusal(&refused), Some(FailureReason::Starting));
        for other in [
            Status::unavailable("the connection was lost"),
            Status::internal("x"),
            Status::with_details(Code::Unavailable, "", vec![255].into()),
        ] {
            assert_eq!(FailureReason::of_refusal(&other), None, "{other}");
        }
    }
}
