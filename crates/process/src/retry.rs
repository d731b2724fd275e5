//! Retries without a limit on their number: exponential backoff with jitter. Each error is logged only once.

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use std::{error::Error, time::Duration};
use tandem_proto::channel::status_text;
use tonic::Status;

/// The state of retries since the last success.
///
/// The first delay is between `min` and twice `min`. Delays double until they are between `max` and twice `max`. Each delay is random
/// within its range, so that the peers of a process that restarts do not all return at the same moment.
#[derive(Debug)]
pub struct Backoff {
    min: Duration,
    max: Duration,
    delays: ExponentialBackoff,
    reported: Option<String>,
}

impl Backoff {
    /// Returns a backoff that has had no failures yet. Its delays grow from `min` to `max`.
    pub fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, delays: exponential(min, max).build(), reported: None }
    }

    /// Returns the delay before the next attempt. Later delays are longer.
    pub fn next_delay(&mut self) -> Duration {
        self.delays.next().unwrap_or(self.max)
    }

    /// Starts again with the shortest delay; to be called after a success.
    pub fn reset(&mut self) {
        *self = Self::new(self.min, self.max);
    }

    /// Returns whether this error differs from the previous one, or is the first since a success. So a caller can log a repeated error only once.
    pub fn is_new_error(&mut self, error: &str) -> bool {
        let is_new = self.reported.as_deref() != Some(error);
        if is_new {
            self.reported = Some(error.to_owned());
        }
        is_new
    }
}

/// Returns the delay before attempt number `attempt`, counted from 0, for callers that do not keep a [`Backoff`].
pub fn delay(min: Duration, max: Duration, attempt: usize) -> Duration {
    exponential(min, max).build().nth(attempt).unwrap_or(max)
}

fn exponential(min: Duration, max: Duration) -> ExponentialBuilder {
    ExponentialBuilder::new().with_min_delay(min).with_max_delay(max).without_max_times().with_jitter()
}

/// Returns an error and its causes in one line.
pub fn error_chain(error: &(dyn Error + 'static)) -> String {
    let (mut line, mut next) = words(error);
    while let Some(cause) = next {
        let text;
        (text, next) = words(cause);
        // Some errors repeat their cause in their own text.
        if !line.contains(&text) {
            line += &format!(": {text}");
        }
    }
    line
}

/// Returns an error's text and its cause. The text of gRPC's errors, alone or within those of etcd, would have a cause as Rust's debug output.
fn words<'a>(error: &'a (dyn Error + 'static)) -> (String, Option<&'a (dyn Error + 'static)>) {
    if let Some(status) = error.downcast_ref::<Status>().or_else(|| error.downcast_ref::<Box<Status>>().map(Box::as_ref)) {
        return (status_text(status), None);
    }
    match error.downcast_ref() {
        Some(etcd_client::Error::GRpcStatus(status)) => (format!("etcd: {}", status_text(status)), None),
        Some(etcd_client::Error::TransportError(error)) => ("etcd cannot be reached".to_owned(), error.source()),
        _ => (error.to_string(), error.source()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn backoff_doubles_with_jitter_and_reports_each_new_error_once() {
        let ms = Duration::from_millis;
        let mut backoff = Backoff::new(ms(100), ms(350));
        for least in [100, 200, 350, 350] {
            let delay = backoff.next_delay();
            assert!((ms(least)..=ms(2 * least)).contains(&delay), "{delay:?}, not {least} to {} ms", 2 * least);
        }
        let is_new = ["a", "a", "b", "b"].map(|error| backoff.is_new_error(error));
        assert_eq!(is_new, [true, false, true, false]);
        backoff.reset();
        assert!(backoff.is_new_error("b"));
        assert!(backoff.next_delay() <= ms(200));
    }

    #[test]
    fn two_processes_do_not_retry_at_the_same_moments() {
        let delays =
            || (0..8).map(|attempt| delay(Duration::from_millis(100), Duration::from_secs(1), attempt)).collect::<Vec<_>>();
        assert_ne!(delays(), delays());
    }

    #[test]
    fn error_chain_has_no_debug_output_of_failed_connections() {
        #[derive(Debug, thiserror::Error)]
        #[error("the call failed")]
        struct Call<E: Error + 'static>(#[source] E);
        let broken = || {
            let cause = Call(std::io::Error::from(std::io::ErrorKind::BrokenPipe));
            Status::from_error(Box::new(cause))
        };
        assert!(broken().to_string().contains("BrokenPipe"), "the status's own text has debug output");
        assert_eq!(error_chain(&broken()), "broken pipe");
        assert_eq!(error_chain(&Call(broken())), "the call failed: broken pipe");
        assert_eq!(error_chain(&Call(Box::new(broken()))), "the call failed: broken pipe");
        assert_eq!(error_chain(&Call(etcd_client::Error::GRpcStatus(broken()))), "the call failed: etcd: broken pipe");
    }

    #[test]
    fn error_chain_names_each_cause_once() {
        #[derive(Debug, thiserror::Error)]
        #[error("outer")]
        struct Outer(#[source] Middle);
        #[derive(Debug, thiserror::Error)]
        #[error("middle (inner); try again")]
        struct Middle(#[source] Inner);
        #[derive(Debug, thiserror::Error)]
        #[error("inner")]
        struct Inner;
        assert_eq!(error_chain(&Outer(Middle(Inner))), "outer: middle (inner); try again");
    }
}
