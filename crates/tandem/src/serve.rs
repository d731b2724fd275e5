//! Runs a serving process: its introduction on stdout, signals, and draining.

use crate::{
    cluster::{ServedProcess, StartError},
    files,
    settings::TelemetryArgs,
};
use anyhow::Context;
use futures::future::OptionFuture;
use std::{
    future::Future,
    io::{ErrorKind, Write, stdout},
    time::Duration,
};
use tandem_process::{
    Metrics,
    telemetry::{self, tell},
};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What is said of environment variables that only look like settings.
pub const UNKNOWN_VARIABLES: &str =
    "these environment variables are ignored, because no setting has them; --help names those of all settings";

/// Serves until Ctrl-C, SIGTERM or SIGHUP. Then the process announces its end, drains after `delay`, and gives running requests `grace`. A
/// second signal ends the process at once. The settings that differ from the defaults (`changed`), and the environment variables that only
/// look like settings (`unknown`), are logged at the start.
///
/// # Errors
/// Fails if the log filter is invalid, if the start fails, if one of the process's services fails, or if a second signal ends the draining.
pub fn run<S: ServedProcess>(
    telemetry: &TelemetryArgs,
    (delay, grace): (Duration, Duration),
    changed: &str,
    unknown: &[String],
    start: impl Future<Output = Result<S, StartError>>,
) -> anyhow::Result<()> {
    // Dropped at the end, so that the last lines are written.
    let _logging = telemetry::init(&telemetry.log, telemetry.log_format)?;
    files::raise_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("the process cannot start threads")?;
    let changed = Some(changed).filter(|changed| !changed.is_empty());
    tracing::info!(version = env!("CARGO_PKG_VERSION"), changed, "starting; --print-config prints all settings");
    if !unknown.is_empty() {
        let variables = unknown.join(", ");
        tracing::warn!(variables, "{UNKNOWN_VARIABLES}");
    }
    let done = runtime.block_on(serve(delay, grace, start));
    // The process may be downloading or loading a model. Its end must not wait for that, because the model is no longer needed.
    runtime.shutdown_background();
    done
}

async fn serve<S: ServedProcess>(
    delay: Duration,
    grace: Duration,
    start: impl Future<Output = Result<S, StartError>>,
) -> anyhow::Result<()> {
    let mut signals = Signals::new().context("the process cannot receive signals")?;
    let mut served = tokio::select! {
        served = start => served?,
        () = signals.next() => return Ok(()),
    };
    let end = format!(
        "\nCtrl-C lets running requests finish (for {} s at most{}); a second Ctrl-C stops immediately.\n",
        grace.as_secs(),
        if delay.is_zero() { String::new() } else { format!(", after a delay of {} s", delay.as_secs()) },
    );
    tell(stdout(), &(served.introduction() + &end));
    tokio::select! {
        error = served.failed() => return Err(error.into()),
        () = signals.next() => {}
    }
    served.announce_drain();
    if !delay.is_zero() {
        tracing::info!(
            delay_s = delay.as_secs(),
            "requests are accepted until the delay ends; a second signal stops immediately"
        );
        tokio::select! {
            error = served.failed() => return Err(error.into()),
            () = tokio::time::sleep(delay) => {}
            () = signals.next() => return Err(aborted()),
        }
    }
    tracing::info!(grace_s = grace.as_secs(), "draining; a second signal stops immediately");
    let before = AnswerCounts::of(served.metrics());
    let draining = served.drain(grace);
    tokio::select! {
        () = draining => {}
        () = signals.next() => return Err(aborted()),
    }
    let AnswerCounts { finished, ended_early } = AnswerCounts::of(served.metrics());
    let (finished, ended_early) = (finished - before.finished, ended_early - before.ended_early);
    tracing::info!(finished, ended_early, "stopped; the numbers are those of the answers since the signal");
    Ok(())
}

/// The numbers of answers of the process's frontend; 0 without a frontend.
#[derive(Debug, Default, PartialEq, Eq)]
struct AnswerCounts {
    finished: u64,
    /// The answers that were cancelled, refused or cut off.
    ended_early: u64,
}

impl AnswerCounts {
    fn of(metrics: &Metrics) -> Self {
        let mut counts = Self::default();
        for line in metrics.render().lines().filter_map(|line| line.strip_prefix("tandem_frontend_requests_total{")) {
            let count = line.rsplit(' ').next().and_then(|count| count.parse::<u64>().ok()).unwrap_or_default();
            *(if line.contains("code=\"200\"") { &mut counts.finished } else { &mut counts.ended_early }) += count;
        }
        counts
    }
}

fn aborted() -> anyhow::Error {
    anyhow::anyhow!("stopped by a second signal; running requests were aborted")
}

/// Returns the text with a replacement character for each control character except tab and line feed. Servers and models choose parts of what
/// commands print, and escape codes would change the terminal's title or clipboard.
pub fn printable(text: &str) -> String {
    let visible = |c: char| if c.is_control() && !matches!(c, '\n' | '\t') { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().map(visible).collect()
}

/// Prints the [`printable`] result of a command to stdout. A program such as `head` may close the pipe before it has read all of the text; that is no error.
///
/// # Errors
/// Fails if stdout cannot be written for another reason, such as a full disk.
pub fn print(text: &str) -> anyhow::Result<()> {
    match stdout().write_all(printable(text).as_bytes()).and_then(|()| stdout().flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.context("the output cannot be written to stdout; check the free space of the disk"),
    }
}

pub(crate) struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// SIGHUP, which a closed terminal sends; `None` if `nohup` has made the process ignore it.
    hangup: Option<Signal>,
}

impl Signals {
    pub(crate) fn new() -> std::io::Result<Self> {
        let hangup = (!hangup_is_ignored()).then(|| signal(SignalKind::hangup())).transpose()?;
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())?, hangup })
    }

    pub(crate) async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
            Some(_) = OptionFuture::from(self.hangup.as_mut().map(Signal::recv)) => {}
        }
    }
}

/// Returns whether the process ignores SIGHUP; also true if the system does not report it, so that no handler replaces the signal's effect.
fn hangup_is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("SigIgn:")?.trim(), 16).ok());
    // Bit 0 stands for signal 1.
    mask.is_none_or(|mask| mask & 1 << (SignalKind::hangup().as_raw_value() - 1) != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_counted_by_how_they_ended() {
        let metrics = Metrics::default();
        for (code, count) in [("200", 3), ("499", 2), ("503", 1)] {
            let labels = [("endpoint", "/v1/chat/completions"), ("model", "m"), ("code", code)];
            metrics.counter("tandem_frontend_requests_total", "Requests.", &labels).increment(count);
        }
        assert_eq!(AnswerCounts::of(&metrics), AnswerCounts { finished: 3, ended_early: 3 });
        assert_eq!(AnswerCounts::of(&Metrics::default()), AnswerCounts::default());
    }

    #[test]
    fn escape_codes_of_a_server_do_not_reach_the_terminal() {
        let title = "\u{1b}]0;owned\u{7}\u{1b}]52;c;YQ==\u{7}\u{9b}31m\r\u{7f}";
        assert!(!printable(title).chars().any(char::is_control));
        assert_eq!(printable("a\tb\nc é 漢"), "a\tb\nc é 漢");
    }
}
