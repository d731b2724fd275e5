//! Distinguishes a peer that ended during a call from one that was unreachable, or that refused the call.

use std::error::Error;
use tonic::{ConnectError, Status};

/// Whether the call failed because its connection ended after the call was sent: the peer's process has ended, or the network was interrupted. False
/// if the peer was never reached, or has answered with an error.
pub fn has_ended(status: &Status) -> bool {
    // Only the status of a failed connection has a source. A peer's answer consists of a code and a message.
    let mut cause = status.source();
    let has_cause = cause.is_some();
    while let Some(error) = cause {
        if error.is::<ConnectError>() || error.downcast_ref::<hyper::Error>().is_some_and(hyper::Error::is_canceled) {
            return false;
        }
        cause = error.source();
    }
    has_cause
}
