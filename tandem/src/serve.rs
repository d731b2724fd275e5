//! `tandem up`: a cluster, what a person needs to know about it, and an orderly end.

use crate::{
    cluster::{Cluster, reachable},
    settings::{EngineKind, UpSettings},
};
use anyhow::Context;
use std::fmt::Write;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// Serves until Ctrl-C or SIGTERM, then drains. A second signal ends the draining.
pub fn run(settings: UpSettings) -> anyhow::Result<()> {
    tandem_node::telemetry::init(&settings.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().context("no threads to run on")?;
    let done = runtime.block_on(serve(settings));
    // A download or a load that nobody waits for any more must not hold up the end.
    runtime.shutdown_background();
    done
}

async fn serve(settings: UpSettings) -> anyhow::Result<()> {
    let mut signals = Signals::new().context("signals cannot be received")?;
    tracing::info!(settings = settings.to_toml().replace('\n', ", "), "starting");
    let mut cluster = tokio::select! {
        cluster = Cluster::start(settings.clone()) => cluster?,
        () = signals.next() => return Ok(()),
    };
    print(&introduction(&cluster, &settings));
    tokio::select! {
        error = cluster.failed() => return Err(error.into()),
        () = signals.next() => {}
    }
    tracing::info!(grace_s = settings.grace_period, "draining; a second signal stops at once");
    tokio::select! {
        () = cluster.drain(settings.grace()) => Ok(()),
        () = signals.next() => anyhow::bail!("stopped at once, as a second signal asked; running requests were cut off"),
    }
}

/// What runs where, and how to ask it something.
fn introduction(cluster: &Cluster, settings: &UpSettings) -> String {
    let url = format!("http://{}", reachable(cluster.frontend()));
    let model = cluster.model_id();
    let engine = match settings.engine {
        EngineKind::Cpu => "on the CPU",
        EngineKind::Cuda => "on GPUs",
        EngineKind::Sim => "simulated",
    };
    let mut text = String::new();
    let mut line = |name: &str, place: &str| {
        writeln!(text, "  {name:<12} {place}").expect("a string takes all");
    };
    line("frontend", &url);
    line("router", &cluster.router().to_string());
    for worker in cluster.workers() {
        let tokens = worker.engine.info().capacity_blocks * worker.engine.info().block_size;
        line(&worker.id, &format!("{}, KV of {tokens} tokens", worker.address));
    }
    let body = format!(
        r#"{{"model": "{model}", "stream": true, "stream_options": {{"include_usage": true}}, "max_tokens": 100, "messages": [{{"role": "user", "content": "What is a tandem bicycle?"}}]}}"#
    );
    format!(
        "{model} is ready ({engine}):\n{text}\nTry:\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n\n\
         Ctrl-C lets running requests finish (for {} s at most); a second one stops at once.\n",
        settings.grace_period
    )
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
