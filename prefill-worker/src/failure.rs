//! The causes for which an attempt ends early, and the only table from these causes to the reasons that the decode worker receives.

use tandem_engine::Refusal;
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{Failure, FailureReason},
};
use tandem_transfer::{TicketError, TransferError};
use tandem_worker::{Disconnected, InvalidSampling, NotServed};
use tonic::Status;

#[derive(Debug, thiserror::Error)]
pub(crate) enum PrefillEnd {
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
    #[error("the requested worker instance has ended; request a new placement")]
    WrongInstance { requested: String },
    #[error("the worker is draining; try another worker")]
    Draining,
    #[error(
        "request_id, traceparent and account may have at most {TEXT_BYTES_MAX} bytes each, cache_namespace at most {NAMESPACE_BYTES_MAX}"
    )]
    TooLong,
    #[error("a token id of the prompt is not in the model's vocabulary")]
    UnknownToken,
    #[error(transparent)]
    Sampling(#[from] InvalidSampling),
    #[error(transparent)]
    NotServed(#[from] NotServed),
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the decode worker's engine did not pull the prompt's KV in time; try again")]
    HandleExpired,
    #[error("the decode worker sent no ticket for the prompt's KV in time; try again (the prompt's blocks stay cached)")]
    NoTicket,
    #[error("the decode worker named no room for the prompt's KV in time; try again")]
    NoRoom,
    #[error("the prompts of the decode worker and of the prefill worker differ; try again")]
    OtherPrompt,
    #[error("the transfer of the prompt's KV to the decode worker failed; try again: {0}")]
    Transfer(#[from] TransferError),
    #[error("the engine failed; try another worker")]
    Engine,
    #[error("the engine hangs; try another worker")]
    Hung,
    #[error("{0}")]
    Protocol(Protocol),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Protocol {
    #[error("the stream's first message must be `start`, and must be sent immediately")]
    MissingStart,
    #[error("`start` must have `sampling`, because this worker's engine samples the first token of the answer")]
    MissingSampling,
    #[error("after `start`, the stream may have only one more message: `ticket`, `room`, or `pulled` for a KV handle")]
    UnexpectedMessage,
    #[error("the ticket names a block twice, or one that the prompt does not have")]
    UnknownBlock,
    #[error(transparent)]
    Ticket(#[from] TicketError),
}

impl From<Protocol> for Status {
    fn from(protocol: Protocol) -> Self {
        Status::invalid_argument(protocol.to_string())
    }
}

/// The last message of an attempt that ended early.
pub(crate) enum LastMessage {
    Nothing(Disconnected),
    Failure(Failure),
    Error(Status),
}

impl PrefillEnd {
    /// Returns the attempt's last message to the client. `instance_id` is the id of this worker's instance.
    pub(crate) fn report(self, instance_id: &str) -> LastMessage {
        let (message, mut instance_id) = (self.to_string(), instance_id.to_owned());
        let reason = match self {
            Self::Disconnected(disconnected) => return LastMessage::Nothing(disconnected),
            Self::Protocol(protocol) => return LastMessage::Error(protocol.into()),
            Self::Transfer(TransferError::Ticket(invalid)) => return LastMessage::Error(Protocol::Ticket(invalid).into()),
            Self::WrongInstance { requested } => {
                instance_id = requested;
                FailureReason::WrongInstance
            }
            Self::Draining => FailureReason::Draining,
            Self::NoTicket | Self::NoRoom | Self::HandleExpired => FailureReason::Timeout,
            Self::Refused(Refusal::Full) => FailureReason::AtCapacity,
            Self::Refused(Refusal::Unsupported(_))
            | Self::TooLong
            | Self::UnknownToken
            | Self::Sampling(_)
            | Self::Refused(
                Refusal::BeyondContext { .. } | Refusal::BeyondCapacity { .. } | Refusal::Empty | Refusal::LongAccount { .. },
            ) => FailureReason::InvalidRequest,
            Self::NotServed(_) | Self::Refused(Refusal::Unloaded(_)) => FailureReason::ModelNotServed,
            // The engine has not run this request, so the request is not the cause.
            Self::OtherPrompt | Self::Refused(Refusal::Gone | Refusal::Unusable(_)) => FailureReason::Unspecified,
            Self::Engine | Self::Hung => FailureReason::EngineFailed,
            Self::Transfer(TransferError::Refused(_) | TransferError::Closed(_)) => FailureReason::PrefillLost,
        };
        LastMessage::Failure(Failure { reason: reason.into(), message, instance_id, retry_after_ms: 0 })
    }
}
