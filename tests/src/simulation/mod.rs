//! Simulates the whole cluster on a simulated network, in simulated time. A seed determines the clients' requests and the faults.
//!
//! The result of [`run`] depends on the seed only: it uses one thread, paused time, and no other source of randomness. `client` checks the
//! answers. `cluster` checks that all resources are released and that the router's index is correct. The usage is audited as an operator
//! would audit it.

mod client;
mod cluster;
mod coverage;
mod log;
mod network;
mod oracle;
pub mod overload;
mod plan;
mod random;

use anyhow::{Context, Result};
use client::{Allowed, Outcome};
pub use coverage::Coverage;
use parking_lot::Mutex;

use cluster::SimulatedCluster;
use log::Log;
use oracle::Expected;
use plan::{BLOCK_SIZE, Fault, Plan, RequestSpec, Role};
pub use random::Random;
use std::{
    cell::Cell,
    collections::BTreeMap,
    path::Path,
    sync::{
        Once,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tandem::audit;
use tandem_kv::{Namespace, sequence_hashes};
use tandem_process::Metrics;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};

/// Time limit of a request after all faults have ended: the duration of the last attempt on the slowest engine, from the wait for the first
/// token to the last token.
const REQUEST_MAX: Duration = Duration::from_secs(180);
/// Time limit, after the end of the last request, until all resources are released and each process knows the state of the others.
const SETTLE_MAX: Duration = Duration::from_secs(90);
/// The interval at which the cluster's state is polled.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A frontend closes a connection on which no complete request head has arrived within this time. So a fault that delays a client for
/// longer breaks the client's connection.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// After this time all circuit breakers admit requests again.
const RECOVERY: Duration = Duration::from_secs(31);

/// The result of simulating a seed.
pub struct Report {
    /// The seed that was simulated.
    pub seed: u64,
    /// The invariants that the run violated.
    pub violations: Vec<String>,
    /// The log, with one line per event. If an invariant was violated, the lines of the ledger follow.
    pub log: Vec<String>,
    /// A hash of all events, which includes the time of each byte on the network. It is equal in every run of the seed.
    pub trace: u64,
    /// Counts of the events that the run exercised.
    pub coverage: Coverage,
}

impl Report {
    /// Returns a message with the violated invariants and the command that repeats the run.
    pub fn failure(&self) -> String {
        let Self { seed, violations, .. } = self;
        format!("seed {seed}: {}\n  rerun: cargo run --release -p tandem-tests -- --seed {seed}", violations.join("\n  "))
    }
}

/// Simulates one seed in this thread.
pub fn run(seed: u64) -> Report {
    let panics = count_panics();
    let mut random = Random::new(seed);
    // The jitter of retries comes from this thread's random generator.
    fastrand::seed(seed);
    let plan = Plan::of(&mut random);
    let expected = |requests: &[RequestSpec]| requests.iter().map(oracle::expected).collect::<Vec<_>>();
    let expected = [expected(&plan.requests), expected(&plan.afterwards)];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without I/O needs nothing from the system");
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let ledger = folder.path().join("ledger");
    let (log, metrics, cluster_run) = runtime.block_on(async {
        let log = Log::new();
        let (metrics, cluster_run) = run_cluster(&plan, &expected, &ledger, &mut random, &log).await;
        (log, metrics, cluster_run)
    });
    // Dropping the runtime ends the last tasks. The ledger is complete afterwards.
    drop(runtime);
    let (trace, mut lines) = log.finish();
    let (mut violations, coverage) = match cluster_run {
        Ok(ClusterRun { mut violations, outcomes, settled }) => {
            let coverage = Coverage::count(&outcomes, &metrics);
            if settled {
                violations.extend(
                    audit_findings(outcomes.iter(), &ledger, &metrics).unwrap_or_else(|error| vec![format!("{error:#}")]),
                );
            }
            (violations, coverage)
        }
        Err(error) => (vec![format!("{error:#}")], Coverage::default()),
    };
    if PANICS.get() > panics {
        violations.push("a task panicked; its message is above".to_owned());
    }
    if !violations.is_empty() {
        lines.extend(std::fs::read_to_string(&ledger).unwrap_or_default().lines().map(str::to_owned));
    }
    Report { seed, violations, log: lines, trace, coverage }
}

/// Simulates these seeds on all cores. Passes each result to `on_report`, in any order, and starts no more seeds once `on_report` has
/// returned false.
pub fn run_all(seeds: std::ops::Range<u64>, on_report: impl FnMut(Report) -> bool + Send) {
    let (next, on_report) = (AtomicU64::new(seeds.start), Mutex::new(on_report));
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..cores {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Relaxed);
                    if seed >= seeds.end {
                        return;
                    }
                    let report = run(seed);
                    let mut on_report = on_report.lock();
                    if !on_report(report) {
                        next.store(seeds.end, Relaxed);
                    }
                }
            });
        }
    });
}

struct ClusterRun {
    violations: Vec<String>,
    outcomes: Vec<Outcome>,
    /// Whether the cluster became idle at the end of the run.
    settled: bool,
}

async fn run_cluster(
    plan: &Plan,
    expected: &[Vec<Expected>; 2],
    ledger: &Path,
    random: &mut Random,
    log: &Log,
) -> (Metrics, Result<ClusterRun>) {
    let mut cluster = match SimulatedCluster::new(plan, ledger, random, log.clone()) {
        Ok(cluster) => cluster,
        Err(error) => return (Metrics::default(), Err(error)),
    };
    (cluster.metrics.clone(), simulate(plan, expected, &mut cluster, log).await)
}

async fn simulate(
    plan: &Plan,
    [expected, expected_afterwards]: &[Vec<Expected>; 2],
    cluster: &mut SimulatedCluster,
    log: &Log,
) -> Result<ClusterRun> {
    settle(cluster).await?.map_or(Ok(()), |why| Err(anyhow::anyhow!("the cluster does not start: {why}")))?;
    let clients = send(cluster, &plan.requests, log);
    inject_faults(plan, cluster).await;
    let (mut violations, mut outcomes) = (Vec::new(), Vec::new());
    let (frontend, client) = (cluster.first_host(Role::Frontend), cluster.client());
    let any_fault = |condition: &dyn Fn(&Fault) -> bool| plan.faults.iter().any(|planned| condition(&planned.fault));
    let delaying = plan.faults.iter().filter(|planned| planned.fault.blocks_clients(frontend, client));
    let allowed = Allowed {
        errors: !plan.must_answer_all(),
        broken: any_fault(&|fault| fault.breaks_clients_connections(frontend, client))
            || delaying.map(|planned| planned.lasts).sum::<Duration>() >= HEAD_MAX,
        draining: any_fault(&|fault| *fault == Fault::Restart { host: frontend }),
    };
    check(clients, &plan.requests, expected, allowed, &mut outcomes, &mut violations).await;
    if let Some(why) = settle(cluster).await? {
        violations.push(format!("all faults and requests have ended, but {why}"));
        return Ok(ClusterRun { violations, outcomes, settled: false });
    }
    sleep(RECOVERY).await;
    let afterwards = send(cluster, &plan.afterwards, log);
    let may_be_refused = plan.engine.queue_max < plan.afterwards.len() as u32;
    check(
        afterwards,
        &plan.afterwards,
        expected_afterwards,
        Allowed { errors: may_be_refused, broken: false, draining: false },
        &mut outcomes,
        &mut violations,
    )
    .await;
    let unsettled = settle(cluster).await?;
    let settled = unsettled.is_none();
    violations.extend(unsettled.map(|reason| format!("the cluster is idle, but {reason}")));
    for spec in plan.requests.iter().chain(&plan.afterwards) {
        let tokens: Vec<u32> = spec.prompt.bytes().map(u32::from).collect();
        let namespace = Namespace::new("sim", "sim", "", "");
        let hashes = sequence_hashes(&cluster.hash_key(), &namespace, BLOCK_SIZE as usize, &tokens[..tokens.len() - 1]);
        violations.extend(cluster.check_index(&hashes, tokens.len() as u32).await.err());
    }
    violations.dedup();
    Ok(ClusterRun { violations, outcomes, settled })
}

type Clients = JoinSet<(usize, Outcome)>;

fn send(cluster: &SimulatedCluster, requests: &[RequestSpec], log: &Log) -> Clients {
    let mut clients = JoinSet::new();
    let frontend = cluster.hosts[cluster.first_host(Role::Frontend)].name.clone();
    for (number, spec) in requests.iter().cloned().enumerate() {
        let (network, frontend, log) = (cluster.network.clone(), frontend.clone(), log.clone());
        clients.spawn(async move {
            sleep(spec.at).await;
            log.record(format_args!(
                "request {number}: {} prompt tokens, {} samples of at most {} tokens, disconnects after {:?}",
                spec.prompt.len(),
                spec.samples,
                spec.max_tokens,
                spec.disconnect_after
            ));
            let outcome = client::send(network, frontend, spec).await;
            log.record(format_args!("request {number}: {}", outcome.summary()));
            (number, outcome)
        });
    }
    clients
}

/// Waits until all clients have ended, and checks their outcomes.
async fn check(
    mut clients: Clients,
    requests: &[RequestSpec],
    expected: &[Expected],
    allowed: Allowed,
    outcomes: &mut Vec<Outcome>,
    violations: &mut Vec<String>,
) {
    let mut ended = BTreeMap::new();
    let all = async {
        while let Some(client) = clients.join_next().await {
            let (number, outcome) = client.expect("clients do not panic");
            ended.insert(number, outcome);
        }
    };
    if timeout(REQUEST_MAX, all).await.is_err() {
        let hang: Vec<usize> = (0..requests.len()).filter(|number| !ended.contains_key(number)).collect();
        violations.push(format!("requests {hang:?} have not ended {REQUEST_MAX:?} after the last fault"));
    }
    for (number, outcome) in ended {
        if let Err(why) = outcome.check(&requests[number], &expected[number], allowed) {
            violations.push(format!("request {number}: {why}"));
        }
        outcomes.push(outcome);
    }
}

/// Starts and ends all planned faults.
async fn inject_faults(plan: &Plan, cluster: &mut SimulatedCluster) {
    let start = Instant::now();
    let begins = plan.faults.iter().enumerate().map(|(number, planned)| (planned.at, true, number));
    let ends = plan.faults.iter().enumerate().map(|(number, planned)| (planned.at + planned.lasts, false, number));
    let mut schedule: Vec<_> = begins.chain(ends).collect();
    schedule.sort_unstable();
    for (at, begins, number) in schedule {
        sleep_until(start + at).await;
        let planned = &plan.faults[number];
        match begins {
            true => cluster.begin(planned.fault, planned.lasts),
            false => cluster.end(planned.fault),
        }
    }
}

/// Waits until the cluster is idle and the router's view of it is correct. If the time limit passes first, returns a description of the
/// first problem.
async fn settle(cluster: &SimulatedCluster) -> Result<Option<String>> {
    let deadline = Instant::now() + SETTLE_MAX;
    loop {
        let unsettled = cluster.unsettled().await.context("the router does not answer")?;
        if unsettled.is_none() || Instant::now() > deadline {
            return Ok(unsettled);
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Reconciles the usage that clients received, the workers' ledger and the metrics.
fn audit_findings<'a>(outcomes: impl Iterator<Item = &'a Outcome>, ledger: &Path, metrics: &Metrics) -> Result<Vec<String>> {
    let mut evidence = audit::read(&[], &[ledger.to_owned()], &[])?;
    evidence.client = outcomes.map(Outcome::line).collect();
    evidence.metrics.add(&metrics.render());
    Ok(audit::check(&evidence).1.iter().map(ToString::to_string).collect())
}

thread_local! {
    /// The number of panics in this thread so far. The panic hook counts them, because the `JoinHandle` of a task that panics may not be
    /// awaited.
    static PANICS: Cell<u64> = const { Cell::new(0) };
}

fn count_panics() -> u64 {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |panic| {
            PANICS.set(PANICS.get() + 1);
            before(panic);
        }));
    });
    PANICS.get()
}
