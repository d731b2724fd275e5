//! Tests of the back ends of workers. `conformance` tests the behaviour that all of them share; the other modules test properties of
//! external engines. The adapter is tested with fake vLLM, SGLang and llama.cpp servers, over real sockets.

mod cluster;
mod conformance;
mod exchange;
mod images;
mod jobs;
mod llama_cpp;
mod rooms;
mod sglang;

use anyhow::{Context, Result};
use futures::FutureExt;
use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use tandem_adapter::{
    Adapter, EngineEnded,
    kv_events::KvEvents,
    vllm::{VllmSettings, connect},
};
use tandem_engine::{CachedTokens, Event, FinishReason, Generate, KvSource, Sampling};
use tandem_kv::{HashKey, Namespace, Priority, TokenId};
use tandem_tests::fake_vllm::{FakeSettings, FakeVllm, engine::next_token};
use tandem_worker::{Backend, Job};
use tokio::{task::JoinSet, time::timeout};

/// Time limit of every wait. Only a failing test waits this long.
const LIMIT: Duration = Duration::from_secs(20);

struct External {
    fake: FakeVllm,
    adapter: Adapter,
    follower: JoinSet<EngineEnded>,
}

fn settings(fake: &FakeVllm) -> VllmSettings {
    VllmSettings {
        url: fake.url(),
        key: None,
        ca: None,
        rank: None,
        events: KvEvents::Discover,
        block_size: Some(16),
        hash_key: HashKey::new([7; 16]),
        running_max: 8,
        waiting_max: 8,
        nixl: true,
        kv_lease: Duration::from_secs(30),
        shared_store: None,
        silence_max: Duration::from_secs(60),
        server_failed: Default::default(),
        observed_at: None,
    }
}

async fn external(fake: FakeSettings, change: impl FnOnce(&mut VllmSettings)) -> Result<External> {
    let fake = FakeVllm::start(fake).await?;
    let mut settings = settings(&fake);
    change(&mut settings);
    let (adapter, follower) = connect(settings).await?.into_parts();
    let mut following = JoinSet::new();
    following.spawn(follower);
    Ok(External { fake, adapter, follower: following })
}

fn namespace() -> Namespace {
    Namespace::new("fake", "", "", "tenant")
}

fn prompt(seed: u32, len: u32) -> Vec<TokenId> {
    (0..len).map(|at| (at * 31 + seed * 7) % 250).collect()
}

fn generate(prompt: &[TokenId], max_tokens: u32) -> Generate {
    Generate {
        request_id: "request".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: namespace(),
        prompt: prompt.to_vec(),
        sampling: Sampling { max_tokens: Some(max_tokens), temperature: 0.0, ..Sampling::default() },
        samples: 1,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    }
}

#[derive(Debug, Default, PartialEq)]
struct Report {
    cached: Option<Option<CachedTokens>>,
    started: usize,
    tokens: Vec<(u32, TokenId)>,
    finished: Vec<(u32, FinishReason)>,
    other: Vec<String>,
}

impl Report {
    fn tokens_of(&self, sample: u32) -> Vec<TokenId> {
        self.tokens.iter().filter(|(of, _)| *of == sample).map(|(_, token)| *token).collect()
    }

    fn take(&mut self, event: Event) {
        match event {
            Event::Submitted => {}
            Event::Scheduled { cached } => self.cached = Some(cached),
            Event::Started(_) => self.started += 1,
            Event::Token { sample, token, .. } => self.tokens.push((sample, token)),
            Event::Finished { sample, reason } => self.finished.push((sample, reason)),
            other => self.other.push(format!("{other:?}")),
        }
    }
}

async fn next(job: &mut dyn Job) -> Result<Option<Event>> {
    timeout(LIMIT, job.next()).await.context("the job reports nothing")
}

async fn read(job: &mut dyn Job) -> Result<Report> {
    let mut report = Report::default();
    while let Some(event) = next(job).await? {
        report.take(event);
    }
    Ok(report)
}

async fn run(adapter: &Adapter, generate: Generate) -> Result<Report> {
    read(&mut *adapter.generate(generate).await?).await
}

/// Returns the next `tokens` tokens that the fake model generates after the prompt.
fn continuation(prompt: &[TokenId], tokens: usize, seed: Option<u64>) -> Vec<TokenId> {
    let mut all = prompt.to_vec();
    for _ in 0..tokens {
        all.push(next_token(&all, seed));
    }
    all.split_off(prompt.len())
}

/// Lets a job work once, because jobs work while they are polled. Returns its next event, if there is one.
fn poll(job: &mut dyn Job) -> Option<Event> {
    job.next().now_or_never().flatten()
}

async fn until(what: &str, mut holds: impl FnMut() -> bool) -> Result<()> {
    let polling = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    timeout(LIMIT, polling).await.with_context(|| format!("timeout, but not reached: {what}"))
}
