//! Labels of failure reasons.

use crate::v1::FailureReason;

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
        }
    }
}
