//! The error of a prompt that got no result.

use std::time::Duration;
use tandem_proto::v1::FailureReason;
use tonic::{Code, Status};

/// Why a prompt got no result.
#[derive(Debug, thiserror::Error)]
pub(crate) enum DispatchError {
    /// The request can never run on this cluster. The message of the worker or router says why, and what to change.
    #[error("The request cannot run here: {message}.")]
    Refused { message: String },
    /// The workers on which the request was placed have unloaded the LoRA that it names.
    #[error("The model does not exist any more; GET /v1/models lists the served models.")]
    NotServed,
    /// The request would wait in the queue for longer than its limit. After `retry_after`, the wait is short enough, unless other requests
    /// come first.
    #[error("The first token would come later than this request may wait (--max-wait, x-max-wait), because the workers are busy or slow; try again in {} s.", seconds(*.retry_after))]
    Overloaded { retry_after: Duration },
    /// The message of the router has the reason, as `/ready` has, and then advice for the operator.
    #[error("No worker can take the request: {}; try again later, or ask the operator of this server.", reason_of(message))]
    NoWorker { message: String },
    #[error("No router is known to this server; try again shortly.")]
    NoRouter,
    #[error("The router cannot be reached; try again shortly.")]
    Router(#[source] Box<Status>),
    /// The router is starting or draining, and places no request meanwhile.
    #[error("{}; try again shortly.", unready(*.reason))]
    RouterUnready { reason: FailureReason },
    #[error(
        "The configurations of frontend and router differ (model, block size, version or cluster key); contact the operator."
    )]
    ClusterMismatch,
    #[error("The router closed the connection, or did not answer in time, before it placed the request; try again shortly.")]
    RouterClosed,
    #[error("The request failed {attempts} times before its first token (last: {}); try again shortly.", .reason.label())]
    Attempts { attempts: u32, reason: FailureReason, worker: String },
    #[error("The first token did not come within {} seconds; try again later.", .limit.as_secs_f64())]
    Timeout { limit: Duration },
    #[error("The worker was lost while it generated ({}); send the request again.", .reason.label())]
    Lost { reason: FailureReason, worker: String },
    /// The request may be the reason why the workers have ended, so the client must not send it again.
    #[error(
        "Two workers ended or failed while they ran this request, so it is not sent to a third; do not send it again, and tell the operator of this server."
    )]
    EndsWorkers { workers: String },
    #[error("This server is shutting down; send the request again.")]
    Stopped,
}

/// Returns a time in whole seconds, as `retry-after` has it: at least 1.
pub(crate) fn seconds(time: Duration) -> u16 {
    time.as_secs_f64().ceil().max(1.0) as u16
}

/// Returns the part of the router's message that says why no worker can take a request.
fn reason_of(message: &str) -> &str {
    message.split_once("; ").map_or(message, |(reason, _)| reason)
}

/// Describes, for clients, the state of a router that places no request.
fn unready(reason: FailureReason) -> &'static str {
    match reason {
        FailureReason::Draining => "The router is shutting down, and no other router can place the request",
        _ => "The router has just started, and is still connecting to its workers",
    }
}

impl DispatchError {
    /// Returns the names of the workers that have failed the prompt, for the log; `None` if no worker is at fault. Clients do not see them.
    pub(crate) fn workers(&self) -> Option<&str> {
        match self {
            Self::Attempts { worker, .. } | Self::Lost { worker, .. } => Some(worker),
            Self::EndsWorkers { workers } => Some(workers),
            _ => None,
        }
    }

    /// Whether the answer has failed, and was not refused because of the request itself or of the load.
    pub(crate) fn is_failure(&self) -> bool {
        !matches!(self, Self::Refused { .. } | Self::NotServed | Self::Overloaded { .. })
    }

    /// Whether no router has answered the request, as when the only router restarts. The same request may be placed a moment later.
    pub(super) fn is_router_lost(&self) -> bool {
        match self {
            Self::NoRouter | Self::RouterUnready { .. } | Self::RouterClosed => true,
            Self::Router(status) => !matches!(status.code(), Code::InvalidArgument | Code::ResourceExhausted),
            _ => false,
        }
    }
}

impl From<Status> for DispatchError {
    /// Converts the status of a failed call to a router.
    fn from(status: Status) -> Self {
        match FailureReason::of_refusal(&status) {
            Some(reason @ (FailureReason::Starting | FailureReason::Draining)) => Self::RouterUnready { reason },
            _ => Self::Router(Box::new(status)),
        }
    }
}
