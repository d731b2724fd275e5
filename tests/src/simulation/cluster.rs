//! The cluster of a simulation: hosts that start, crash and restart, on one simulated network and in one thread.

use super::{
    log::Log,
    network::{Link, Name, SimulatedNetwork},
    plan::{BLOCK_SIZE, CLIENT, Fault, HOSTS, Plan, Role},
    random::Random,
};
use crate::services::worker_settings;
use anyhow::Result;
use std::{
    collections::BTreeSet,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};
use tandem_decode_worker::DecodeWorkerSettings;
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::{Chunk, Engine, EngineError, EngineHandle, EngineInfo, EngineSettings, StepOutput};
use tandem_frontend::FrontendSettings;
use tandem_kv::{BlockId, HashKey, SequenceHash};
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{
    ClusterKey,
    channel::{Channel, endpoint},
    v1::{WorkersReply, WorkersRequest, router_client::RouterClient},
};
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_text::ServedModel;
use tandem_transfer::TransferMode;
use tandem_worker::{Ledger, WorkerSettings};
use tokio::{task::JoinSet, time::timeout};

/// The maximum time to a first token, as in production (`crates/tandem/src/cluster/parts.rs`).
const FIRST_TOKEN_WAIT: Duration = Duration::from_secs(60);
/// The host from which the router is queried; its links have no faults.
const OBSERVER: &str = "observer";
const SECRET: &[u8] = b"the secret of every simulated cluster";

/// All hosts, their network, and the faults that are active.
pub(super) struct SimulatedCluster {
    pub(super) network: SimulatedNetwork,
    pub(super) metrics: Metrics,
    pub(super) hosts: Vec<Host>,
    log: Log,
    ledger: Ledger,
    random: Random,
    engine: EngineSettings,
    sim: SimSettings,
    prefill: PrefillPlace,
    limits: Limits,
    faults: Vec<Fault>,
}

/// The frontend's limits on requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Limits {
    pub(super) sequences: usize,
    pub(super) max_wait: Option<Duration>,
}

impl Default for Limits {
    /// Returns limits under which no request is refused for its wait, however slow the engines are.
    fn default() -> Self {
        Self { sequences: 1_024, max_wait: None }
    }
}

/// A machine and the process on it, if one runs.
pub(super) struct Host {
    pub(super) name: Name,
    role: Role,
    /// This time is added to each step of the host's engine.
    extra_step_ms: Arc<AtomicU64>,
    process: Option<Process>,
}

struct Process {
    engine: Option<EngineHandle>,
    shutdown: Shutdown,
    tasks: JoinSet<()>,
}

impl SimulatedCluster {
    pub(super) fn new(plan: &Plan, ledger: &Path, random: &mut Random, log: Log) -> Result<Self> {
        Self::limited(plan, ledger, random, log, Limits::default())
    }

    pub(super) fn limited(plan: &Plan, ledger: &Path, random: &mut Random, log: Log, limits: Limits) -> Result<Self> {
        let key = ClusterKey::new(SECRET).expect("the secret is long enough");
        let engine = EngineSettings { hash_key: key.hash_key(), ..plan.engine };
        let network = SimulatedNetwork::new(random.fork(), key, log.clone());
        let host = |(role, number): (Role, usize)| {
            let name = format!("{}-{number}", format!("{role:?}").to_lowercase()).into();
            Host { name, role, extra_step_ms: Arc::default(), process: None }
        };
        let numbered = HOSTS.iter().flat_map(|(role, count)| (0..*count).map(|number| (*role, number)));
        let mut cluster = Self {
            network,
            metrics: Metrics::default(),
            hosts: numbered.map(host).collect(),
            log,
            ledger: Ledger::open(ledger)?,
            random: random.fork(),
            engine,
            sim: plan.sim,
            prefill: plan.prefill,
            limits,
            faults: Vec::new(),
        };
        let names: Vec<Name> =
            cluster.hosts.iter().map(|host| host.name.clone()).chain([CLIENT.into(), OBSERVER.into()]).collect();
        for (from, to) in names.iter().flat_map(|from| names.iter().map(move |to| (from, to))) {
            cluster.network.add_link(from, to);
        }
        for host in 0..cluster.hosts.len() {
            cluster.start(host);
        }
        Ok(cluster)
    }

    pub(super) fn first_host(&self, role: Role) -> usize {
        self.hosts.iter().position(|host| host.role == role).expect("there is a host of each role")
    }

    /// Returns the number of the clients' host, by which faults name it.
    pub(super) fn client(&self) -> usize {
        self.hosts.len()
    }

    fn start(&mut self, host: usize) {
        let seed = self.random.next();
        let (role, name) = (self.hosts[host].role, self.hosts[host].name.clone());
        self.log.record(format_args!("{name} starts"));
        let (listener, shutdown, metrics) = (self.network.listen(&name), Shutdown::default(), self.metrics.clone());
        let mut tasks = JoinSet::new();
        let extra_step_ms = self.hosts[host].extra_step_ms.clone();
        let (engine_settings, sim) = (self.engine, self.sim);
        let mut engine = None;
        let mut start_engine = |tasks: &mut JoinSet<()>| {
            let sim_engine = SimEngine::new(sim);
            let clock = sim_engine.clock();
            let device = SlowableEngine { engine: sim_engine, extra_step_ms: extra_step_ms.clone() };
            let (handle, running) = EngineHandle::simulated(Box::new(device), clock, engine_settings, seed);
            tasks.spawn(running);
            engine.insert(handle).clone()
        };
        let own_shutdown = shutdown.clone();
        let worker = WorkerSettings { ledger: self.ledger.clone(), ..worker_settings(&name, "sim") };
        match role {
            Role::Prefill => {
                let settings = PrefillWorkerSettings {
                    worker,
                    ticket_wait: FIRST_TOKEN_WAIT,
                    transfer_mode: TransferMode::Simulated { block: sim.block_transfer() },
                };
                let engine = start_engine(&mut tasks);
                run(&mut tasks, tandem_prefill_worker::run(listener, engine, settings, metrics, own_shutdown));
            }
            Role::Decode => {
                let settings = DecodeWorkerSettings {
                    worker,
                    advertise: Some(format!("{name}:1")),
                    remote_waiting_max: self.limits.sequences,
                    receive_timeout: FIRST_TOKEN_WAIT,
                    transfer_mode: TransferMode::Tcp,
                };
                let engine = start_engine(&mut tasks);
                run(&mut tasks, tandem_decode_worker::run(listener, engine, settings, metrics, own_shutdown));
            }
            Role::Router => {
                let workers = self.hosts.iter().filter(|host| host.role <= Role::Decode).map(|host| format!("{}:1", host.name));
                let settings =
                    RouterSettings { workers: workers.collect(), prefill: self.prefill, seed, ..RouterSettings::default() };
                run(&mut tasks, tandem_router::run(listener, settings, metrics, own_shutdown));
            }
            Role::Frontend => {
                let router = format!("{}:1", self.hosts[self.first_host(Role::Router)].name);
                let model = ServedModel::sim("sim").with_context_length(sim.capacity_blocks * BLOCK_SIZE);
                let settings = FrontendSettings {
                    block_size: BLOCK_SIZE,
                    concurrent_sequences: self.limits.sequences,
                    max_wait: self.limits.max_wait,
                    ..FrontendSettings::new(router, model)
                };
                run(&mut tasks, tandem_frontend::run(listener, settings, metrics, own_shutdown));
            }
        }
        self.hosts[host].process = Some(Process { engine, shutdown, tasks });
    }

    fn kill(&mut self, host: usize) {
        let Host { name, process, .. } = &mut self.hosts[host];
        if let Some(Process { shutdown, .. }) = process.take() {
            self.log.record(format_args!("{name} is down"));
            self.network.stop(name);
            shutdown.stop();
        }
    }

    /// Starts a fault. A host that is down because of another fault stays down.
    pub(super) fn begin(&mut self, fault: Fault, lasts: Duration) {
        self.log.record(format_args!("begins, for {lasts:?}: {}", self.describe(fault)));
        self.faults.push(fault);
        self.update_links();
        match fault {
            Fault::Crash { host } | Fault::PowerLoss { host } => self.kill(host),
            Fault::Restart { host } => {
                if let Some(process) = &mut self.hosts[host].process {
                    let shutdown = process.shutdown.clone();
                    process.tasks.spawn(async move { shutdown.run(lasts.mul_f64(0.8)).await });
                }
            }
            Fault::Cut { between: (one, other) } => self.network.cut(&self.name(one), &self.name(other)),
            Fault::Busy { host, step } => self.hosts[host].extra_step_ms.store(step.as_millis() as u64, Relaxed),
            Fault::Slow { .. } | Fault::Throttle { .. } | Fault::Partition { .. } | Fault::Isolation { .. } => {}
        }
    }

    pub(super) fn end(&mut self, fault: Fault) {
        self.log.record(format_args!("ends: {}", self.describe(fault)));
        if let Some(at) = self.faults.iter().position(|other| *other == fault) {
            self.faults.remove(at);
        }
        self.update_links();
        match fault {
            Fault::Restart { host } | Fault::Crash { host } | Fault::PowerLoss { host } => {
                self.kill(host);
                // Another fault may keep the host down.
                let down =
                    |fault: &Fault| matches!(fault, Fault::Crash { host: of } | Fault::PowerLoss { host: of } if *of == host);
                if !self.faults.iter().any(down) {
                    self.start(host);
                }
            }
            Fault::Busy { host, .. } => self.hosts[host].extra_step_ms.store(0, Relaxed),
            _ => {}
        }
    }

    fn update_links(&self) {
        let number = |name: &Name| self.hosts.iter().position(|host| host.name == *name).unwrap_or(self.hosts.len());
        self.network.set(|from, to| {
            if &**from == OBSERVER || &**to == OBSERVER {
                return Link::CLEAR;
            }
            self.faults.iter().fold(Link::CLEAR, |link, fault| fault.on(link, number(from), number(to)))
        });
    }

    fn name(&self, host: usize) -> Name {
        self.hosts.get(host).map_or_else(|| CLIENT.into(), |host| host.name.clone())
    }

    fn describe(&self, fault: Fault) -> String {
        let name = |host| self.name(host);
        match fault {
            Fault::Slow { between: (one, other), delay } => {
                format!("{one} – {other} is slow: {delay:?}", one = name(one), other = name(other))
            }
            Fault::Throttle { between: (one, other), pause } => {
                format!("{} – {} is throttled: {pause:?}", name(one), name(other))
            }
            Fault::Partition { from, to, both_ways: false } => format!("nothing passes from {} to {}", name(from), name(to)),
            Fault::Partition { from, to, both_ways: true } => format!("nothing passes between {} and {}", name(from), name(to)),
            Fault::Isolation { host } => format!("{} is isolated", name(host)),
            Fault::Cut { between: (one, other) } => format!("connections between {} and {} break", name(one), name(other)),
            Fault::Crash { host } => format!("{} crashes", name(host)),
            Fault::PowerLoss { host } => format!("{} loses its power", name(host)),
            Fault::Restart { host } => format!("{} is restarted", name(host)),
            Fault::Busy { host, step } => format!("{} is busy: {step:?} a step", name(host)),
        }
    }

    fn router(&self) -> Result<RouterClient<Channel>> {
        let address = format!("{}:1", self.hosts[self.first_host(Role::Router)].name);
        Ok(RouterClient::new(self.network.of(&OBSERVER.into()).connect_lazy(&endpoint(&address)?)))
    }

    pub(super) fn hash_key(&self) -> HashKey {
        self.engine.hash_key
    }

    /// Returns a description of the first sign that the cluster is not idle; `None` if it is idle.
    pub(super) async fn unsettled(&self) -> Result<Option<String>> {
        let mut router = self.router()?;
        let view: WorkersReply = match timeout(Duration::from_secs(5), router.workers(WorkersRequest {})).await? {
            Ok(view) => view.into_inner(),
            Err(status) => return Ok(Some(format!("the router does not answer: {status}"))),
        };
        if view.bookings > 0 {
            return Ok(Some(format!("{} bookings", view.bookings)));
        }
        for Host { name, process, .. } in &self.hosts {
            let Some(engine) = process.as_ref().and_then(|process| process.engine.as_ref()) else { continue };
            let load = engine.load();
            if load.in_use_blocks > 0 || load.waiting_requests > 0 || load.running_sequences > 0 {
                return Ok(Some(format!("{name} is not idle: {load:?}")));
            }
            if load.free_blocks + load.cached_blocks != engine.info().capacity_blocks {
                return Ok(Some(format!("{name} has lost blocks: {load:?}")));
            }
            let known = view.workers.iter().find(|known| known.info.as_ref().is_some_and(|info| *info.worker_id == **name));
            let Some(known) = known else { return Ok(Some(format!("{name} has not joined"))) };
            if known.bookings > 0 || known.indexed_blocks != u64::from(load.cached_blocks) {
                let (blocks, bookings) = (known.indexed_blocks, known.bookings);
                return Ok(Some(format!(
                    "{name}: {bookings} bookings, {blocks} blocks in the index, {} cached",
                    load.cached_blocks
                )));
            }
        }
        let inflight = "tandem_frontend_inflight_requests";
        let text = self.metrics.render();
        Ok(text.lines().find(|line| line.starts_with(inflight) && !line.ends_with(" 0")).map(str::to_owned))
    }

    /// Checks, for each worker, that the overlap reported by the router equals the number of the prompt's leading blocks that the worker
    /// has cached.
    pub(super) async fn check_index(&self, hashes: &[SequenceHash], prompt_tokens: u32) -> Result<(), String> {
        let request = tandem_proto::v1::ExplainRequest {
            model: "sim".to_owned(),
            sequence_hashes: hashes.iter().map(|hash| hash.0).collect(),
            prompt_tokens,
            samples: 1,
            ..Default::default()
        };
        let mut router = self.router().map_err(|error| error.to_string())?;
        let explained =
            router.explain(request).await.map_err(|status| format!("the router cannot explain: {status}"))?.into_inner();
        for Host { name, process, .. } in &self.hosts {
            let Some(engine) = process.as_ref().and_then(|process| process.engine.as_ref()) else { continue };
            let (snapshot, _) = engine.watch().await.ok_or("an engine has stopped")?;
            let cached: BTreeSet<SequenceHash> =
                snapshot.stored.iter().flat_map(|chain| chain.sequence_hashes.iter().copied()).collect();
            let held = hashes.iter().take_while(|hash| cached.contains(hash)).count();
            let indexed =
                explained.workers.iter().find(|of| of.worker.as_ref().is_some_and(|worker| *worker.worker_id == **name));
            let indexed = indexed.map_or(0, |of| of.overlap_blocks as usize);
            if indexed != held {
                return Err(format!("{name} has cached {held} blocks of a prompt, the router has indexed {indexed}"));
            }
        }
        Ok(())
    }
}

/// Runs a service until it is stopped.
fn run<E: std::error::Error + Send + 'static>(
    tasks: &mut JoinSet<()>,
    service: impl Future<Output = Result<(), E>> + Send + 'static,
) {
    tasks.spawn(async move { service.await.expect("a service runs until it is stopped") });
}

/// A simulated device whose steps can be made slower.
struct SlowableEngine {
    engine: SimEngine,
    extra_step_ms: Arc<AtomicU64>,
}

impl Engine for SlowableEngine {
    fn describe(&self) -> EngineInfo {
        self.engine.describe()
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        let output = self.engine.step(chunks)?;
        self.engine.clock().add(Duration::from_millis(self.extra_step_ms.load(Relaxed)));
        Ok(output)
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        self.engine.read_block(block, into)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        self.engine.write_block(block, bytes)
    }
}
