//! The causes for which an attempt ends before its last token, and the only table from these causes to the failure reasons that the client
//! receives.

use crate::convert::Invalid;
use tandem_engine::Refusal;
use tandem_proto::v1::{Failure, FailureReason};
use tandem_worker::{Disconnected, NotServed};

#[derive(Debug, thiserror::Error)]
pub(crate) enum DecodeEnd {
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
    #[error("the requested worker instance has ended; request a new placement")]
    WrongInstance { requested: String },
    #[error("the worker is draining; try another worker")]
    Draining,
    #[error(transparent)]
    Invalid(#[from] Invalid),
    #[error("the prefill worker's address is not signed by a router of this cluster; send requests through a frontend")]
    UnsignedAddress,
    #[error("too many requests on this worker wait for a prefill; try again later or on another worker")]
    RemoteWaitingFull,
    #[error(transparent)]
    NotServed(#[from] NotServed),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the KV blocks reserved for the prompt were needed for running requests; try again later or on another worker")]
    Revoked,
    #[error("the prompt's prefill did not begin in time; try another worker")]
    NotStarted { culprit: String },
    #[error("the request has waited in the queue for longer than its limit; try again later")]
    Overloaded,
    #[error("no KV blocks became free in time; try again later or on another worker")]
    NoBlocks,
    #[error("the prompt's KV did not arrive in time; try another prefill worker")]
    NotReceived { prefill: String },
    #[error(
        "the worker refused a write that the prompt's ticket does not allow, and dropped the prompt's blocks; try another prefill worker"
    )]
    WriteRefused { prefill: String },
    #[error("the prefill worker is unreachable, or does not follow the protocol; try another prefill worker")]
    PrefillLost { prefill: String },
    /// The prefill worker had accepted the prompt.
    #[error("the prefill worker has ended or its connection was interrupted; try another prefill worker")]
    PrefillGone { prefill: String },
    #[error("the engine could not pull the prompt's KV from the prefill worker's engine; try another prefill worker")]
    NotPulled { prefill: String },
    #[error("the prefill worker's KV handle is for another prompt, was used before, or has expired; try another prefill worker")]
    BadHandle { prefill: String },
    #[error(
        "this worker's engine cannot receive KV from another worker; update the router, which should have placed the prompt on one worker"
    )]
    NoKvExchange,
    /// The failure that the prefill worker reported.
    #[error("the prefill worker reported a failure")]
    Prefill(Failure),
    #[error("the engine failed; try another worker")]
    Engine,
    #[error("the engine hangs; try another worker")]
    Hung,
}

impl DecodeEnd {
    /// Returns the failure to report to the client, unless the client has disconnected. `instance_id` is the id of this worker's instance.
    pub(crate) fn report(self, instance_id: &str) -> Result<Failure, Disconnected> {
        let (message, this) = (self.to_string(), instance_id.to_owned());
        let (reason, instance_id) = match self {
            Self::Disconnected(disconnected) => return Err(disconnected),
            Self::Prefill(failure) => return Ok(failure),
            Self::WrongInstance { requested } => (FailureReason::WrongInstance, requested),
            Self::PrefillLost { prefill } | Self::NotPulled { prefill } | Self::BadHandle { prefill } => {
                (FailureReason::PrefillLost, prefill)
            }
            Self::PrefillGone { prefill } => (FailureReason::WorkerEnded, prefill),
            Self::WriteRefused { prefill } => (FailureReason::WriteRefused, prefill),
            Self::NotStarted { culprit } => (FailureReason::Timeout, culprit),
            Self::NotReceived { prefill } => (FailureReason::Timeout, prefill),
            Self::Draining => (FailureReason::Draining, this),
            Self::NoBlocks => (FailureReason::Timeout, this),
            Self::Overloaded => (FailureReason::Overloaded, this),
            Self::RemoteWaitingFull | Self::Revoked | Self::Refused(Refusal::Full) => (FailureReason::AtCapacity, this),
            Self::Invalid(_)
            | Self::UnsignedAddress
            | Self::NoKvExchange
            | Self::Refused(Refusal::Unsupported(_))
            | Self::Refused(
                Refusal::BeyondContext { .. } | Refusal::BeyondCapacity { .. } | Refusal::Empty | Refusal::LongAccount { .. },
            ) => (FailureReason::InvalidRequest, this),
            Self::NotServed(_) | Self::Refused(Refusal::Unloaded(_)) => (FailureReason::ModelNotServed, this),
            // The engine has not run this request, so the request is not the cause.
            Self::Refused(Refusal::Gone | Refusal::Unusable(_)) => (FailureReason::Unspecified, this),
            Self::Engine | Self::Hung => (FailureReason::EngineFailed, this),
        };
        Ok(Failure { reason: reason.into(), message, instance_id, retry_after_ms: 0 })
    }
}
