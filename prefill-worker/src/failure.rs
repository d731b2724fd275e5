//! The causes for which an attempt ends early, and the only table from these causes to the reasons that the decode worker receives.

use tandem_engine::Refusal;
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{Failure, FailureReason},
};
use tandem_transfer::{TicketError, TransferError};
use tandem_worker::Disconnected;
use tonic::Status;

/// The cause for which an attempt ended before its blocks were written.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Ended {
    #[error(transparent)]
    Disconnected(#[from] Disconnected),
    #[error("the requested worker has ended; request a new placement")]
    WrongInstance { requested: String },
    #[error("the worker is draining; try another")]
    Draining,
    #[error("request_id, traceparent and account have at most {TEXT_BYTES_MAX} bytes, cache_namespace {NAMESPACE_BYTES_MAX}")]
    TooLong,
    #[error("a token id of the prompt is not in the model's vocabulary")]
    UnknownToken,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("the decode worker's engine did not pull the prompt's KV in time; try again")]
    HandleExpired,
    #[error("no ticket arrived in time; the prompt's blocks stay cached, try again")]
    NoTicket,
    #[error("the transfer of KV to the decode worker failed, try again: {0}")]
    Transfer(#[from] TransferError),
    #[error("the engine failed; try another worker")]
    Engine,
    #[error("the engine hangs; try another worker")]
    Hung,
    /// The client broke the protocol.
    #[error("{0}")]
    Protocol(Protocol),
}

/// A violation of the protocol by the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Protocol {
    #[error("the first message must be a start, sent immediately")]
    MissingStart,
    #[error("only one ticket may follow the start")]
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
pub(crate) enum Report {
    Nothing(Disconnected),
    Failure(Failure),
    Error(Status),
}

impl Ended {
    /// Returns what to report to the client; `instance_id` is this worker's.
    pub(crate) fn report(self, instance_id: &str) -> Report {
        let (message, mut instance_id) = (self.to_string(), instance_id.to_owned());
        let reason = match self {
            Self::Disconnected(disconnected) => return Report::Nothing(disconnected),
            Self::Protocol(protocol) => return Report::Error(protocol.into()),
            Self::Transfer(TransferError::Ticket(invalid)) => return Report::Error(Protocol::Ticket(invalid).into()),
            Self::WrongInstance { requested } => {
                instance_id = requested;
                FailureReason::WrongInstance
            }
            Self::Draining => FailureReason::Draining,
            Self::NoTicket | Self::HandleExpired => FailureReason::Timeout,
            Self::Refused(Refusal::Full) => FailureReason::AtCapacity,
            Self::Refused(Refusal::Unsupported(_))
            | Self::TooLong
            | Self::UnknownToken
            | Self::Refused(
                Refusal::BeyondContext { .. } | Refusal::BeyondCapacity { .. } | Refusal::Empty | Refusal::LongAccount { .. },
            ) => FailureReason::InvalidRequest,
            Self::Engine | Self::Hung | Self::Refused(Refusal::Gone) => FailureReason::EngineFailed,
            Self::Transfer(TransferError::Refused(_) | TransferError::Closed(_)) => FailureReason::PrefillLost,
        };
        Report::Failure(Failure { reason: reason.into(), message, instance_id })
    }
}
