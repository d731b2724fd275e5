//! Classifies failed calls: the peer ended during the call, was unreachable, or refused the call. Describes each case in words.

use std::{error::Error, iter};
use tonic::{ConnectError, Status};

/// Returns whether the call failed because its connection ended after the call was sent: the peer's process has ended, or the network was
/// interrupted. Returns false if the peer was never reached, or if it has answered with an error.
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

/// Returns a status in words for operators: the peer's answer, or why there is none. The status's own `Display` writes the cause as Rust's debug
/// output.
pub fn status_text(status: &Status) -> String {
    let causes = iter::successors(status.source(), |cause| (**cause).source());
    match causes.last() {
        Some(cause) => cause.to_string(),
        None if status.message().is_empty() => status.code().description().to_owned(),
        None => status.message().to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_text_has_no_debug_output() {
        #[derive(Debug, thiserror::Error)]
        #[error("transport error")]
        struct Outer(#[source] std::io::Error);
        let broken = Status::from_error(Box::new(Outer(std::io::ErrorKind::BrokenPipe.into())));
        for (status, expected) in [
            (broken, "broken pipe"),
            (Status::unavailable("the engine hangs"), "the engine hangs"),
            (Status::unavailable(""), "The service is currently unavailable"),
        ] {
            assert_eq!(status_text(&status), expected);
        }
    }
}
