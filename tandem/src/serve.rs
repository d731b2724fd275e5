//! A process that serves: what a person needs to know about it, and an orderly end.

use crate::{cluster::StartError, settings::TelemetryFlags};
use anyhow::Context;
use std::{future::Future, time::Duration};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// What serves: the whole cluster, or one role of it.
pub trait Served {
    /// What runs where, for people.
    fn introduction(&self) -> String;
    /// Resolves when it cannot go on. Cancel-safe.
    fn failed(&mut self) -> impl Future<Output = StartError>;
    /// Refuses new work, lets running work finish for `grace`, then stops everything.
    fn drain(&self, grace: Duration) -> impl Future<Output = ()>;
}

/// Serves until Ctrl-C or SIGTERM, then drains. A second signal ends the draining. `settings` are told in the log.
pub fn run<S: Served>(
    telemetry: &TelemetryFlags,
    grace: Duration,
    settings: &str,
    start: impl Future<Output = Result<S, StartError>>,
) -> anyhow::Result<()> {
    tandem_node::telemetry::init(&telemetry.log, telemetry.log_format.into())?;
    raise_file_limit();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no threads to run on")?;
    tracing::info!(settings = settings.replace('\n', ", "), "starting");
    let done = runtime.block_on(serve(grace, start));
    // A download or a load that nobody waits for any more must not hold up the end.
    runtime.shutdown_background();
    done
}

/// Raises the limit on open files to its maximum. Each connection is an open file, and many systems allow a process 1,024 unless it raises
/// the limit. With a limit below `--max-connections`, one client's connections could keep the process from opening any file.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let maximum = getrlimit(Resource::Nofile).maximum;
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: maximum, maximum }) {
        tracing::warn!(%error, "the limit on open files cannot be raised to its maximum; keep --max-connections below it");
    }
}

async fn serve<S: Served>(grace: Duration, start: impl Future<Output = Result<S, StartError>>) -> anyhow::Result<()> {
    let mut signals = Signals::new().context("signals cannot be received")?;
    let mut served = tokio::select! {
        served = start => served?,
        () = signals.next() => return Ok(()),
    };
    let end = format!("\nCtrl-C lets running requests finish (for {} s at most); a second one stops at once.\n", grace.as_secs());
    print(&(served.introduction() + &end));
    tokio::select! {
        error = served.failed() => return Err(error.into()),
        () = signals.next() => {}
    }
    tracing::info!(grace_s = grace.as_secs(), "draining; a second signal stops at once");
    tokio::select! {
        () = served.drain(grace) => Ok(()),
        () = signals.next() => anyhow::bail!("stopped at once, as a second signal asked; running requests were cut off"),
    }
}

#[expect(clippy::print_stdout, reason = "what the user waits for")]
fn print(text: &str) {
    print!("{text}");
}

/// Both ways of asking a process to end.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
