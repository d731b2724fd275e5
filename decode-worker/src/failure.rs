//! Why an attempt ends before its last token, and what the client hears: the one table from causes to reasons.

use crate::convert::Invalid;
use tandem_engine::Refusal;
use tandem_proto::v1::{Failure, FailureReason};
use tandem_worker::ClientGone;

/// Why an attempt ended early.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error(transparent)]
    ClientGone(#[from] ClientGone),
    #[error("the worker that was asked for is not running any more; ask for a new placement")]
    WrongInstance { asked_for: String },
    #[error("the worker is leaving; try another")]
    Draining,
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("the prefill worker's address is not signed by a router of this cluster; send requests through a frontend")]
    UnsignedAddress,
    #[error("too many requests wait for a prefill; try again later or elsewhere")]
    RemoteWaitingFull,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the blocks set aside for the prompt were needed for running requests; try again later or elsewhere")]
    Revoked,
    #[error("the prompt's prefill did not begin in time; try another worker")]
    NotStarted { culprit: String },
    #[error("no blocks became free in time; try again later or elsewhere")]
    NoBlocks,
    #[error("the prompt's KV did not come in time; try another prefill worker")]
    NotReceived { prefill: String },
    #[error(
        "the worker refused a write that the prompt's ticket does not allow, and dropped the prompt's blocks; try another prefill worker"
    )]
    WriteRefused { prefill: String },
    #[error("the prefill worker is gone; try another")]
    PrefillLost { prefill: String },
    /// The prefill worker's own words.
    #[error("the prefill worker gave up")]
    Prefill(Failure),
    #[error("the engine failed; try another worker")]
    Engine,
    #[error("the engine hangs; try another worker")]
    Hung,
}

impl Ended {
    /// What the client hears, unless there is none.
    pub(crate) fn tell(self, instance_id: &str) -> Result<Failure, ClientGone> {
        let message = self.to_string();
        let (reason, culprit) = match self {
            Self::ClientGone(gone) => return Err(gone),
            Self::Prefill(failure) => return Ok(failure),
            Self::WrongInstance { asked_for } => (FailureReason::WrongInstance, asked_for),
            Self::PrefillLost { prefill } => (FailureReason::PrefillLost, prefill),
            Self::WriteRefused { prefill } => (FailureReason::WriteRefused, prefill),
            Self::NotStarted { culprit } => (FailureReason::Timeout, culprit),
            Self::NotReceived { prefill } => (FailureReason::Timeout, prefill),
            Self::Draining => (FailureReason::Draining, instance_id.to_owned()),
            Self::NoBlocks => (FailureReason::Timeout, instance_id.to_owned()),
            Self::RemoteWaitingFull | Self::Revoked | Self::Refused(Refusal::Full) => {
                (FailureReason::AtCapacity, instance_id.to_owned())
            }
            Self::Invalid(_)
            | Self::UnsignedAddress
            | Self::Refused(
                Refusal::BeyondContext { .. } | Refusal::BeyondCapacity { .. } | Refusal::Empty | Refusal::LongAccount { .. },
            ) => (FailureReason::InvalidRequest, instance_id.to_owned()),
            Self::Engine | Self::Hung | Self::Refused(Refusal::Gone) => (FailureReason::EngineFailed, instance_id.to_owned()),
        };
        Ok(Failure { reason: reason.into(), message, instance_id: culprit })
    }
}
