//! A cluster that receives several times as many requests as it can serve, in simulated time.

use super::{
    audit_findings,
    client::{self, End, Outcome},
    cluster::{Limits, SimulatedCluster},
    log::Log,
    plan::{BLOCK_SIZE, Plan, RequestSpec, Role},
    random::Random,
    settle,
};
use anyhow::{Context, Result, ensure};
use std::time::Duration;
use tandem_devices::sim::SimSettings;
use tandem_engine::EngineSettings;
use tandem_kv::HashKey;
use tandem_router::PrefillPlace;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep_until},
};

/// The number of clients that keep the cluster saturated while its capacity is measured.
const SATURATING: usize = 60;
/// The cluster's capacity is measured over this time, which begins when the cluster is saturated.
const MEASURED: Duration = Duration::from_secs(20);
const SATURATED_AFTER: Duration = Duration::from_secs(10);
const PROMPT_TOKENS: usize = 1_000;
/// The number of requests to the idle cluster. The first of them has the id below, and no other request has these ids.
const IDLE: usize = 20;
const IDLE_FIRST: usize = 90_000_000;

/// Clients that send requests at a constant rate.
#[derive(Clone, Copy, Debug)]
pub struct Overload {
    /// The time for which a request may wait in the queue; `None`: any time.
    pub max_wait: Option<Duration>,
    /// The rate of requests, as a multiple of the cluster's capacity.
    pub load: f64,
    /// The time for which requests are sent.
    pub lasts: Duration,
    /// The fraction of the clients that leave before the end of their answers, in percent.
    pub leaving_percent: u64,
    /// Whether prompts are prefilled on prefill workers or on decode workers.
    pub prefill: PrefillPlace,
    /// The fraction of the requests that have the priority [`URGENT`], in percent. The others have the default.
    pub urgent_percent: u64,
}

/// The better of the two priorities.
pub const URGENT: i32 = -1;

/// A request that was sent under overload. Times count from the start of the overload.
#[derive(Clone, Debug)]
pub struct Sent {
    /// When the request was sent.
    pub at: Duration,
    /// The priority of the request.
    pub priority: i32,
    /// Time to the first token; `None`: there was none.
    pub first_token: Option<Duration>,
    /// Time to the end of the response, or until the client left.
    pub ended: Duration,
    /// The status of the response; `None`: the client left before.
    pub status: Option<u16>,
    /// The response's header `retry-after`, in seconds.
    pub retry_after: Option<u64>,
    /// Whether the whole response arrived.
    pub complete: bool,
}

/// The measurements of a cluster under overload.
#[derive(Debug)]
pub struct Overloaded {
    /// The number of first tokens per second of the saturated cluster.
    pub capacity: f64,
    /// Times to the first tokens of requests that were sent one after the other to the idle cluster; empty if no request is urgent.
    pub idle_first_tokens: Vec<Duration>,
    /// Times to the first tokens of the urgent requests if a cluster receives only these requests, at the same times.
    pub alone_first_tokens: Vec<Duration>,
    /// All requests, in the order of their times.
    pub requests: Vec<Sent>,
    /// The time from the last request until the cluster was idle and held no resource.
    pub quiet_after: Duration,
    /// Attempts that failed.
    pub failed_attempts: f64,
    /// Findings of the audit of usage, ledger and metrics.
    pub findings: Vec<String>,
}

/// Runs the overload in this thread.
///
/// # Errors
/// Fails if the cluster does not become idle.
pub fn run(overload: Overload) -> Result<Overloaded> {
    fastrand::seed(1);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?;
    runtime.block_on(overload.run())
}

impl Overload {
    async fn run(self) -> Result<Overloaded> {
        let folder = tempfile::tempdir()?;
        let ledger = folder.path().join("ledger");
        let (log, mut random) = (Log::new(), Random::new(1));
        let measured = SimulatedCluster::new(&self.plan(), &folder.path().join("measured"), &mut random, log.clone())?;
        let capacity = capacity(&measured).await?;
        let idle_first_tokens = if self.urgent_percent > 0 { idle(&measured).await? } else { Vec::new() };
        drop(measured);
        let limits = Limits { max_wait: self.max_wait, ..Limits::default() };
        let cluster = SimulatedCluster::limited(&self.plan(), &ledger, &mut random, log, limits)?;
        settled(&cluster).await?;
        let count = (capacity * self.load * self.lasts.as_secs_f64()) as usize;
        let specs = (0..count).map(|number| {
            let at = self.lasts.mul_f64(number as f64 / count as f64);
            let leaves = random.chance(self.leaving_percent).then(|| random.millis(100..9_000));
            let urgent = self.urgent_percent > 0 && random.chance(self.urgent_percent);
            let priority = if urgent { URGENT } else { 0 };
            RequestSpec { disconnect_after: leaves, priority, ..request(number, at) }
        });
        let specs: Vec<_> = specs.collect();
        let started = Instant::now();
        let mut outcomes = self.send(&cluster, specs.iter().cloned()).await?;
        settled(&cluster).await?;
        let quiet_after = started.elapsed().saturating_sub(self.lasts);
        let findings = audit_findings(outcomes.iter().map(|(_, outcome, _)| outcome), &ledger, &cluster.metrics)?;
        let failed_attempts = crate::sum(&cluster.metrics.render(), "tandem_frontend_attempts_failed_total", "");
        outcomes.sort_by_key(|(spec, ..)| spec.at);
        drop(cluster);
        let mut alone_first_tokens = Vec::new();
        if self.urgent_percent > 0 {
            let cluster = SimulatedCluster::new(&self.plan(), &folder.path().join("alone"), &mut random, Log::new())?;
            settled(&cluster).await?;
            let urgent = specs.into_iter().filter(|spec| spec.priority == URGENT);
            alone_first_tokens.extend(self.send(&cluster, urgent).await?.into_iter().filter_map(|(_, sent, _)| sent.first_event));
        }
        let requests = outcomes.into_iter().map(|(spec, outcome, ended)| sent(&spec, &outcome, ended));
        Ok(Overloaded {
            capacity,
            idle_first_tokens,
            alone_first_tokens,
            requests: requests.collect(),
            quiet_after,
            failed_attempts,
            findings,
        })
    }

    /// Sends the requests at their times. Returns them in the order in which they ended.
    async fn send(
        &self,
        cluster: &SimulatedCluster,
        requests: impl Iterator<Item = RequestSpec>,
    ) -> Result<Vec<(RequestSpec, Outcome, Duration)>> {
        let (started, mut clients) = (Instant::now(), JoinSet::new());
        for spec in requests {
            let (at, exchange) = (spec.at, exchange(cluster, spec));
            clients.spawn(async move {
                sleep_until(started + at).await;
                exchange.await
            });
        }
        // At this time, the last request has been sent.
        sleep_until(started + self.lasts).await;
        let mut outcomes = Vec::new();
        while let Some(client) = clients.join_next().await {
            outcomes.push(client?);
        }
        Ok(outcomes)
    }

    fn plan(&self) -> Plan {
        Plan {
            engine: EngineSettings {
                chunk_budget: 512,
                itl_max: None,
                batch_max: 64,
                queue_max: 4_096,
                prefix_caching: true,
                hash_key: HashKey::NONE,
                max_buffered_events: 1_024,
                step_max: Duration::from_secs(60),
            },
            sim: SimSettings { block_size: BLOCK_SIZE, capacity_blocks: 8_192, speedup: 0.12, ..SimSettings::default() },
            prefill: self.prefill,
            requests: Vec::new(),
            faults: Vec::new(),
            afterwards: Vec::new(),
        }
    }
}

/// A cluster whose places or memory are taken by long answers when further requests arrive.
#[derive(Clone, Copy, Debug)]
pub struct Full {
    /// Whether prompts are prefilled on prefill workers or on decode workers.
    pub prefill: PrefillPlace,
    /// The number of places of each worker.
    pub batch_max: u32,
    /// The number of KV blocks of each worker.
    pub capacity_blocks: u32,
    /// The number of long answers.
    pub long: usize,
    /// Whether the router can know the lengths of the long answers.
    pub known_length: bool,
    /// The time for which a request may wait in the queue.
    pub max_wait: Duration,
}

/// The outcomes of the requests that arrived at a full cluster.
#[derive(Debug)]
pub struct FullCluster {
    /// The requests that arrived while the long answers ran.
    pub requests: Vec<Sent>,
    /// Whether all long answers are complete.
    pub long_complete: bool,
    /// Failed attempts of requests that had not waited for their whole limit.
    pub failed_attempts: f64,
    /// Findings of the audit of usage, ledger and metrics.
    pub findings: Vec<String>,
}

/// The number of short answers before the long ones, from which the router learns how long answers are.
const WARM: usize = 48;
/// The number of tokens of a long answer.
const LONG: u32 = 6_500;
/// Short requests arrive for this time, one each half second.
const ARRIVALS: Duration = Duration::from_secs(30);
const ARRIVE_EVERY: Duration = Duration::from_millis(500);

impl Full {
    /// Runs the scenario in this thread.
    ///
    /// # Errors
    /// Fails if the cluster does not become idle.
    pub fn run(self) -> Result<FullCluster> {
        fastrand::seed(1);
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build()?.block_on(self.arrivals())
    }

    async fn arrivals(self) -> Result<FullCluster> {
        let folder = tempfile::tempdir()?;
        let ledger = folder.path().join("ledger");
        let Self { prefill, batch_max, capacity_blocks, max_wait, .. } = self;
        let mut plan =
            Overload { max_wait: None, load: 0.0, lasts: ARRIVALS, leaving_percent: 0, prefill, urgent_percent: 0 }.plan();
        plan.engine.batch_max = batch_max;
        plan.sim = SimSettings { capacity_blocks, speedup: 1.0, ..plan.sim };
        let limits = Limits { max_wait: Some(max_wait), ..Limits::default() };
        let cluster = SimulatedCluster::limited(&plan, &ledger, &mut Random::new(1), Log::new(), limits)?;
        settled(&cluster).await?;
        let short =
            |number, at| RequestSpec { prompt: format!("{number:03} of the short requests; ").repeat(8), ..request(number, at) };
        let mut outcomes = Vec::new();
        for number in 0..WARM {
            outcomes.push(exchange(&cluster, short(number, Duration::ZERO)).await.1);
        }
        let mut long = JoinSet::new();
        for number in WARM..WARM + self.long {
            let never = (!self.known_length).then(|| "a text that no answer has".to_owned());
            long.spawn(exchange(&cluster, RequestSpec { max_tokens: LONG, stop: never, ..short(number, Duration::ZERO) }));
        }
        // At this time, all long answers have begun.
        sleep_until(Instant::now() + Duration::from_secs(2)).await;
        let mut arriving = JoinSet::new();
        let started = Instant::now();
        for at in 0..ARRIVALS.div_duration_f64(ARRIVE_EVERY) as usize {
            sleep_until(started + ARRIVE_EVERY * at as u32).await;
            arriving.spawn(exchange(&cluster, short(1_000 + at, started.elapsed())));
        }
        let mut requests = Vec::new();
        while let Some(ended) = arriving.join_next().await {
            let (spec, outcome, ended) = ended?;
            requests.push(sent(&spec, &outcome, ended));
            outcomes.push(outcome);
        }
        let ended: Vec<Outcome> = long.join_all().await.into_iter().map(|(_, outcome, _)| outcome).collect();
        let long_complete = ended.iter().all(|outcome| outcome.end == End::Complete && outcome.status == Some(200));
        outcomes.extend(ended);
        settled(&cluster).await?;
        let findings = audit_findings(outcomes.iter(), &ledger, &cluster.metrics)?;
        let metrics = cluster.metrics.render();
        let failed = |labels| crate::sum(&metrics, "tandem_frontend_attempts_failed_total", labels);
        let failed_attempts = failed("") - failed(r#"reason="overloaded""#);
        requests.sort_by_key(|sent| sent.at);
        Ok(FullCluster { requests, long_complete, failed_attempts, findings })
    }
}

/// Measures the capacity: a constant number of clients sends one request after the other.
async fn capacity(cluster: &SimulatedCluster) -> Result<f64> {
    settled(cluster).await?;
    let (started, mut clients) = (Instant::now(), JoinSet::new());
    let (mut number, mut served) = (0, 0);
    while started.elapsed() < SATURATED_AFTER + MEASURED {
        while clients.len() < SATURATING {
            clients.spawn(exchange(cluster, request(number, Duration::ZERO)));
            number += 1;
        }
        clients.join_next().await.context("a client has ended")??;
        served += usize::from(started.elapsed() >= SATURATED_AFTER);
    }
    while clients.join_next().await.is_some() {}
    settled(cluster).await?;
    Ok(served as f64 / MEASURED.as_secs_f64())
}

/// Sends requests one after the other. Returns the times to their first tokens.
async fn idle(cluster: &SimulatedCluster) -> Result<Vec<Duration>> {
    let mut first_tokens = Vec::new();
    for number in 0..IDLE {
        let (_, outcome, _) = exchange(cluster, request(IDLE_FIRST + number, Duration::ZERO)).await;
        first_tokens.push(outcome.first_event.context("the idle cluster did not answer a request")?);
    }
    settled(cluster).await?;
    Ok(first_tokens)
}

async fn settled(cluster: &SimulatedCluster) -> Result<()> {
    let unsettled = settle(cluster).await?;
    ensure!(unsettled.is_none(), "{}", unsettled.unwrap_or_default());
    Ok(())
}

/// Returns a request whose prompt shares no block with those of other requests.
fn request(number: usize, at: Duration) -> RequestSpec {
    let prompt = format!("{number:08} of all the requests; ");
    RequestSpec {
        at,
        prompt: prompt.repeat(PROMPT_TOKENS.div_ceil(prompt.len())),
        samples: 1,
        max_tokens: 16,
        temperature: 0.0,
        seed: number as u64,
        stop: None,
        ignore_end: true,
        stream: true,
        disconnect_after: None,
        priority: 0,
    }
}

fn sent(spec: &RequestSpec, outcome: &Outcome, ended: Duration) -> Sent {
    let (status, retry_after) = outcome.verdict();
    Sent {
        at: spec.at,
        priority: spec.priority,
        first_token: outcome.first_event.filter(|_| status == Some(200)),
        ended,
        status,
        retry_after,
        complete: outcome.end == End::Complete,
    }
}

/// Sends the request; returns it with its outcome, and the time until it ended.
fn exchange(cluster: &SimulatedCluster, spec: RequestSpec) -> impl Future<Output = (RequestSpec, Outcome, Duration)> + use<> {
    let (network, frontend) = (cluster.network.clone(), cluster.hosts[cluster.first_host(Role::Frontend)].name.clone());
    async move {
        let sent = Instant::now();
        let outcome = client::send(network, frontend, spec.clone()).await;
        (spec, outcome, sent.elapsed())
    }
}
