//! The whole cluster on a simulated network, in simulated time, with clients and faults that a seed determines.
//!
//! [`run`] is a function of the seed: one thread, paused time, no randomness but the seed's. The invariants are in
//! `client` (answers) and `world` (nothing is held, the router's index is right); usage is audited as by an operator.

mod client;
mod coverage;
mod log;
mod network;
mod oracle;
mod plan;
mod random;
mod world;

use anyhow::{Context, Result};
use client::{Allowed, Seen, ask};
pub use coverage::Coverage;
use parking_lot::Mutex;

use log::Log;
use oracle::Expected;
use plan::{BLOCK_SIZE, Fault, Plan, Role, Wanted};
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
use tandem_node::Metrics;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use world::World;

/// The longest that a request may take after all faults: a last attempt's wait for its first token and the tokens after it, on
/// the slowest engine.
const REQUEST_MAX: Duration = Duration::from_secs(180);
/// How long after the last request everything must be released and every process must know the state of the others.
const SETTLE_MAX: Duration = Duration::from_secs(90);
/// Interval of polling for that.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// A frontend closes a connection whose request head is incomplete after this time from its acceptance: a client that a fault
/// delays for longer finds its connection closed.
const HEAD_MAX: Duration = Duration::from_secs(10);
/// The time after which circuit breakers admit requests again.
const RECOVERY: Duration = Duration::from_secs(31);

/// The result of a seed.
pub struct Report {
    /// The seed.
    pub seed: u64,
    /// The violated invariants.
    pub wrong: Vec<String>,
    /// The log, one line per event; followed by the ledger if an invariant was violated.
    pub log: Vec<String>,
    /// Hash of all events, including the time of each byte: equal in every run of the seed.
    pub trace: u64,
    /// What it covered.
    pub coverage: Coverage,
}

impl Report {
    /// Returns what went wrong and how to reproduce it.
    pub fn failure(&self) -> String {
        let Self { seed, wrong, .. } = self;
        format!("seed {seed}: {}\n  rerun: cargo run --release -p tandem-tests -- --seed {seed}", wrong.join("\n  "))
    }
}

/// Simulates one seed in this thread.
pub fn run(seed: u64) -> Report {
    let panics = count_panics();
    let mut random = Random::new(seed);
    // The jitter of retries comes from this thread's generator.
    fastrand::seed(seed);
    let plan = Plan::of(&mut random);
    let expected = |requests: &[Wanted]| requests.iter().map(oracle::expected).collect::<Vec<_>>();
    let expected = [expected(&plan.requests), expected(&plan.afterwards)];
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without I/O needs nothing from the system");
    let folder = tempfile::tempdir().expect("a folder");
    let ledger = folder.path().join("ledger");
    let (log, metrics, lifecycle) = runtime.block_on(async {
        let log = Log::new();
        let (metrics, lifecycle) = live(&plan, &expected, &ledger, &mut random, &log).await;
        (log, metrics, lifecycle)
    });
    // After the last task has ended the ledger is closed and complete.
    drop(runtime);
    let (trace, mut lines) = log.end();
    let (mut wrong, coverage) = match lifecycle {
        Ok(Lifecycle { mut wrong, seen, settled }) => {
            let coverage = Coverage::of(&seen, &metrics);
            if settled {
                wrong.extend(audited(&seen, &ledger, &metrics).unwrap_or_else(|error| vec![format!("{error:#}")]));
            }
            (wrong, coverage)
        }
        Err(error) => (vec![format!("{error:#}")], Coverage::default()),
    };
    if PANICS.get() > panics {
        wrong.push("a task panicked; its message is above".to_owned());
    }
    if !wrong.is_empty() {
        lines.extend(std::fs::read_to_string(&ledger).unwrap_or_default().lines().map(str::to_owned));
    }
    Report { seed, wrong, log: lines, trace, coverage }
}

/// Simulates these seeds on all cores and passes each result to `on_report`, in any order, until it returns false.
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

struct Lifecycle {
    wrong: Vec<String>,
    seen: Vec<Seen>,
    /// The time at which nothing ran any more.
    settled: bool,
}

async fn live(
    plan: &Plan,
    expected: &[Vec<Expected>; 2],
    ledger: &Path,
    random: &mut Random,
    log: &Log,
) -> (Metrics, Result<Lifecycle>) {
    let mut world = match World::new(plan, ledger, random, log.clone()) {
        Ok(world) => world,
        Err(error) => return (Metrics::default(), Err(error)),
    };
    (world.metrics.clone(), simulate(plan, expected, &mut world, log).await)
}

async fn simulate(
    plan: &Plan,
    [expected, expected_afterwards]: &[Vec<Expected>; 2],
    world: &mut World,
    log: &Log,
) -> Result<Lifecycle> {
    settle(world).await?.map_or(Ok(()), |why| Err(anyhow::anyhow!("the cluster does not come up: {why}")))?;
    let clients = send(world, &plan.requests, log);
    go_wrong(plan, world).await;
    let (mut wrong, mut seen) = (Vec::new(), Vec::new());
    let (frontend, client) = (world.named(Role::Frontend), world.client());
    let any = |of: &dyn Fn(&Fault) -> bool| plan.faults.iter().any(|planned| of(&planned.fault));
    let held_up = plan.faults.iter().filter(|planned| planned.fault.holds_up_clients(frontend, client));
    let allowed = Allowed {
        errors: !plan.is_calm(),
        broken: any(&|fault| fault.breaks_clients_connections(frontend, client))
            || held_up.map(|planned| planned.lasts).sum::<Duration>() >= HEAD_MAX,
        draining: any(&|fault| *fault == Fault::Restart { host: frontend }),
    };
    check(clients, &plan.requests, expected, allowed, &mut seen, &mut wrong).await;
    if let Some(why) = settle(world).await? {
        wrong.push(format!("all is well and no client is left, but {why}"));
        return Ok(Lifecycle { wrong, seen, settled: false });
    }
    sleep(RECOVERY).await;
    let afterwards = send(world, &plan.afterwards, log);
    let full = plan.engine.queue_max < plan.afterwards.len() as u32;
    check(
        afterwards,
        &plan.afterwards,
        expected_afterwards,
        Allowed { errors: full, broken: false, draining: false },
        &mut seen,
        &mut wrong,
    )
    .await;
    let unsettled = settle(world).await?;
    let settled = unsettled.is_none();
    wrong.extend(unsettled.map(|reason| format!("the cluster is idle, but {reason}")));
    for wanted in plan.requests.iter().chain(&plan.afterwards) {
        let tokens: Vec<u32> = wanted.prompt.bytes().map(u32::from).collect();
        let namespace = Namespace::new("sim", "sim", "", "");
        let hashes = sequence_hashes(&world.hash_key(), &namespace, BLOCK_SIZE as usize, &tokens[..tokens.len() - 1]);
        wrong.extend(world.check_index(&hashes, tokens.len() as u32).await.err());
    }
    wrong.dedup();
    Ok(Lifecycle { wrong, seen, settled })
}

/// Running clients, each with the number of its request.
type Clients = JoinSet<(usize, Seen)>;

fn send(world: &World, requests: &[Wanted], log: &Log) -> Clients {
    let mut clients = JoinSet::new();
    let frontend = world.hosts[world.named(Role::Frontend)].name.clone();
    for (number, wanted) in requests.iter().cloned().enumerate() {
        let (wires, frontend, log) = (world.wires.clone(), frontend.clone(), log.clone());
        clients.spawn(async move {
            sleep(wanted.at).await;
            log.record(format_args!(
                "request {number}: {} tokens, {} × {} to come, patience {:?}",
                wanted.prompt.len(),
                wanted.samples,
                wanted.max_tokens,
                wanted.patience
            ));
            let seen = ask(wires, frontend, wanted).await;
            log.record(format_args!("request {number}: {}", seen.summary()));
            (number, seen)
        });
    }
    clients
}

/// Waits for all clients and checks their outcomes.
async fn check(
    mut clients: Clients,
    requests: &[Wanted],
    expected: &[Expected],
    allowed: Allowed,
    seen: &mut Vec<Seen>,
    wrong: &mut Vec<String>,
) {
    let mut ended = BTreeMap::new();
    let all = async {
        while let Some(client) = clients.join_next().await {
            let (number, seen) = client.expect("clients do not panic");
            ended.insert(number, seen);
        }
    };
    if timeout(REQUEST_MAX, all).await.is_err() {
        let hang: Vec<usize> = (0..requests.len()).filter(|number| !ended.contains_key(number)).collect();
        wrong.push(format!("requests {hang:?} have not ended {REQUEST_MAX:?} after all was well"));
    }
    for (number, client) in ended {
        if let Err(why) = client.check(&requests[number], &expected[number], allowed) {
            wrong.push(format!("request {number}: {why}"));
        }
        seen.push(client);
    }
}

/// Starts and ends all planned faults.
async fn go_wrong(plan: &Plan, world: &mut World) {
    let start = Instant::now();
    let begins = plan.faults.iter().enumerate().map(|(number, planned)| (planned.at, true, number));
    let ends = plan.faults.iter().enumerate().map(|(number, planned)| (planned.at + planned.lasts, false, number));
    let mut agenda: Vec<_> = begins.chain(ends).collect();
    agenda.sort_unstable();
    for (at, begins, number) in agenda {
        sleep_until(start + at).await;
        let planned = &plan.faults[number];
        match begins {
            true => world.begin(planned.fault, planned.lasts),
            false => world.end(planned.fault),
        }
    }
}

/// Waits until the cluster is idle and every process knows it; returns what prevents it after the time limit.
async fn settle(world: &World) -> Result<Option<String>> {
    let deadline = Instant::now() + SETTLE_MAX;
    loop {
        let unsettled = world.unsettled().await.context("the router does not answer")?;
        if unsettled.is_none() || Instant::now() > deadline {
            return Ok(unsettled);
        }
        sleep(POLL_INTERVAL).await;
    }
}

/// Reconciles the usage that clients received, the workers' ledger and the metrics.
fn audited(seen: &[Seen], ledger: &Path, metrics: &Metrics) -> Result<Vec<String>> {
    let mut evidence = audit::read(&[], &[ledger.to_owned()], &[])?;
    evidence.client = seen.iter().map(Seen::line).collect();
    evidence.metrics.add(&metrics.render());
    Ok(audit::check(&evidence).1.iter().map(ToString::to_string).collect())
}

thread_local! {
    /// Panics in this thread so far. A task's panic ends in its `JoinHandle`, which may not be awaited.
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
