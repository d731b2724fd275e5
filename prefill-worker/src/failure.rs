//! Why an attempt ends early, and what the other side hears: the one table from causes to reasons.

use tandem_engine::Refusal;
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{Failure, FailureReason},
};
use tandem_transfer::{TicketError, TransferError};
use tandem_worker::ClientGone;
use tonic::Status;

/// Why an attempt ended before its blocks had landed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error(transparent)]
    ClientGone(#[from] ClientGone),
    #[error("the worker that was asked for is not running any more; ask for a new placement")]
    WrongInstance { asked_for: String },
    #[error("the worker is leaving; try another")]
    Draining,
    #[error("request_id, traceparent and account have at most {TEXT_BYTES_MAX} bytes, cache_namespace {NAMESPACE_BYTES_MAX}")]
    TooLong,
    #[error("a token id of the prompt is not in the model's vocabulary")]
    UnknownToken,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the decode worker's engine did not pull the prompt's KV in time; try again")]
    HandleExpired,
    #[error("no ticket came in time; the prompt's blocks stay cached, try again")]
    NoTicket,
    #[error("the transfer of KV to the decode worker failed, try again: {0}")]
    Transfer(#[from] TransferError),
    #[error("the engine failed; try another worker")]
    Engine,
    #[error("the engine hangs; try another worker")]
    Hung,
    /// Not a failure of the attempt but of the peer.
    #[error("{0}")]
    Protocol(Protocol),
}

/// What a peer must not send.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Protocol {
    #[error("the first message must be a start, and come at once")]
    MissingStart,
    #[error("after the start only one ticket may come")]
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

/// How an attempt's end is told.
pub(crate) enum Told {
    Nobody(ClientGone),
    Failure(Failure),
    Error(Status),
}

impl Ended {
    pub(crate) fn tell(self, instance_id: &str) -> Told {
        let message = self.to_string();
        let (reason, culprit) = match self {
            Self::ClientGone(gone) => return Told::Nobody(gone),
            Self::Protocol(protocol) => return Told::Error(protocol.into()),
            Self::Transfer(TransferError::Ticket(invalid)) => return Told::Error(Protocol::Ticket(invalid).into()),
            Self::WrongInstance { asked_for } => (FailureReason::WrongInstance, asked_for),
            Self::Draining => (FailureReason::Draining, instance_id.to_owned()),
            Self::NoTicket | Self::HandleExpired => (FailureReason::Timeout, instance_id.to_owned()),
            Self::Refused(Refusal::Full) => (FailureReason::AtCapacity, instance_id.to_owned()),
            Self::Refused(Refusal::Unsupported(_))
            | Self::TooLong
            | Self::UnknownToken
            | Self::Refused(
                Refusal::BeyondContext { .. } | Refusal::BeyondCapacity { .. } | Refusal::Empty | Refusal::LongAccount { .. },
            ) => (FailureReason::InvalidRequest, instance_id.to_owned()),
            Self::Engine | Self::Hung | Self::Refused(Refusal::Gone) => (FailureReason::EngineFailed, instance_id.to_owned()),
            Self::Transfer(TransferError::Refused(_) | TransferError::Closed(_)) => {
                (FailureReason::PrefillLost, instance_id.to_owned())
            }
        };
        Told::Failure(Failure { reason: reason.into(), message, instance_id: culprit })
    }
}
