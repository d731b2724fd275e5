//! Why an attempt failed, in a word.

use crate::v1::Reason;

impl Reason {
    /// As a metric's label, in traces and for people.
    pub fn label(self) -> &'static str {
        match self {
            Self::Unspecified => "unreachable",
            Self::Full => "full",
            Self::PrefillLost => "prefill_lost",
            Self::Timeout => "timeout",
            Self::WrongInstance => "wrong_instance",
            Self::Engine => "engine",
            Self::Invalid => "invalid",
            Self::Draining => "draining",
            Self::WriteRefused => "write_refused",
        }
    }
}
