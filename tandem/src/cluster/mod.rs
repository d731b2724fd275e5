//! Runs a whole cluster in one process: the router, workers and frontend that can also run as separate processes. They are connected by
//! gRPC on loopback sockets.

mod error;
mod external;
mod parts;
mod process;
mod weights;

pub use error::StartError;
pub use process::Process;

use crate::{
    http,
    settings::{CLUSTER, EngineKind, KeyArgs, KvConnector, PrefillPlace, UpSettings},
};
use parts::Parts;
use std::{net::SocketAddr, time::Duration};
use tandem_engine::EngineHandle;
use tandem_frontend::ServedModel;
use tandem_node::{Shutdown, discovery::MemberSource};
use tandem_proto::{
    ClusterKey,
    channel::Channel,
    v1::{WorkersRequest, router_client::RouterClient, worker_info::Role},
};
use tokio::{
    net::{TcpListener, TcpSocket},
    time::Instant,
};
use weights::EngineConfig;

/// Limit on the time from the loaded model to a ready frontend. Connecting takes milliseconds, so a longer time means that something is
/// broken.
const READY_WAIT: Duration = Duration::from_secs(30);
/// The pause between checks of the frontend's readiness.
const READY_POLL: Duration = Duration::from_millis(10);

/// A serving process: a whole cluster, or one of its roles.
pub trait Served {
    /// Returns a text for the operator that lists what runs and at which addresses.
    fn introduction(&self) -> String;
    /// Resolves when a part has failed, so that the process cannot serve any more. Cancel-safe.
    fn failed(&mut self) -> impl Future<Output = StartError>;
    /// Refuses new work, lets running work finish for `grace`, then stops everything.
    fn drain(&self, grace: Duration) -> impl Future<Output = ()>;
}

/// A running cluster. Dropping it stops everything immediately; [`Served::drain`] lets running requests finish first.
pub struct Cluster {
    /// The id that clients send as `model`.
    pub model_id: String,
    /// The address of the OpenAI API.
    pub frontend: SocketAddr,
    /// The workers: first prefill workers, then decode workers.
    pub workers: Vec<Worker>,
    /// The address of the router's gRPC listener.
    pub router: SocketAddr,
    engine: EngineKind,
    /// The frontend has a shutdown of its own: requests that it has accepted still need router and workers while it drains.
    front: Shutdown,
    back: Shutdown,
    parts: Parts,
}

/// One worker of a cluster.
pub struct Worker {
    /// The worker's name, and the label of its metrics.
    pub id: String,
    /// Prefill or decode.
    pub role: Role,
    /// The address of the worker's gRPC listener.
    pub address: SocketAddr,
    /// The host:port at which other workers reach this worker; `None`: they reach it at `address`.
    pub advertise: Option<String>,
    /// The engine in this process; `None`: the worker's engine is another process.
    pub engine: Option<EngineHandle>,
    /// The tokens that fit into the engine's KV memory.
    kv_tokens: u64,
}

/// Returns the tokens that fit into the engine's KV memory.
fn kv_tokens(engine: &EngineHandle) -> u64 {
    let info = engine.info();
    u64::from(info.capacity_blocks) * u64::from(info.block_size)
}

impl Cluster {
    /// Binds all sockets, loads the model (downloading it first if necessary), starts every part, and waits until requests can be served.
    ///
    /// # Errors
    /// The settings do not work together, a socket cannot be bound, the model cannot be loaded, or a part fails.
    pub async fn start(settings: UpSettings) -> Result<Self, StartError> {
        let config = EngineConfig::new(&settings.common, &settings.model, &settings.worker);
        config.check_device()?;
        let prefills = match settings.model.engine {
            EngineKind::Vllm | EngineKind::LlamaCpp => !settings.prefill_engine_url.is_empty(),
            EngineKind::Cpu | EngineKind::Cuda | EngineKind::Sim => settings.prefill_workers > 0,
        };
        if settings.router.prefill == PrefillPlace::Remote && !prefills {
            return Err(StartError::NoPrefillWorker);
        }
        let frontend = listen(settings.common.listen, "--listen").await?;
        let mut cluster = Self::run(settings, config, frontend).await?;
        cluster.wait_until_ready().await?;
        Ok(cluster)
    }

    /// Returns a connection to the router. Must be called within a runtime.
    pub fn to_router(&self) -> Channel {
        self.parts.channel(self.router)
    }

    /// Stops immediately: running requests are cancelled.
    pub async fn stop(self) {
        self.drain(Duration::ZERO).await;
    }

    async fn run(settings: UpSettings, mut config: EngineConfig, frontend: TcpListener) -> Result<Self, StartError> {
        let (front, back) = (Shutdown::default(), Shutdown::default());
        // All users of this machine can connect to the cluster's sockets. The key keeps them from calling its services.
        let key = if settings.common.key == KeyArgs::default() { ClusterKey::random() } else { settings.common.key.read()? };
        let mut parts = Parts::new("tandem", CLUSTER, key, &settings.common)?;
        parts.open_ledger(&settings.worker)?;
        let (workers, served) = match settings.model.engine {
            EngineKind::Vllm | EngineKind::LlamaCpp => external_workers(&parts, &settings, &mut config, &back).await?,
            EngineKind::Cpu | EngineKind::Cuda | EngineKind::Sim => own_workers(&parts, &settings, &config, &back).await?,
        };
        let router_listener = loopback().await?;
        let router = local_address(&router_listener)?;
        let (model_id, address) = (served.id.clone(), local_address(&frontend)?);
        let listed = workers.iter().map(|worker| worker.address.to_string()).collect();
        let peers = MemberSource::List(Vec::new());
        parts.router(router_listener, (listed, peers), Some(&model_id), &settings.router, &back);
        // The frontend refuses a prompt that does not fit on every worker, so the smallest worker limits the context.
        let capacity_tokens = workers.iter().map(|worker| worker.kv_tokens).min().unwrap_or_default();
        let served = served.with_context_length(capacity_tokens.try_into().unwrap_or(u32::MAX));
        let (routers, sequences_max) = ([router.to_string()].into_iter().collect(), settings.model.max_concurrent_requests);
        parts.frontend((frontend, None), routers, settings.frontend, (served, sequences_max), &front);
        Ok(Self { model_id, frontend: address, workers, engine: settings.model.engine, router, front, back, parts })
    }

    async fn wait_until_ready(&mut self) -> Result<(), StartError> {
        let channel = self.to_router();
        let (router, frontend, workers) = (RouterClient::new(channel), self.frontend, self.workers.len());
        let ready = async {
            // A frontend is ready as soon as one decode worker has joined. Here all workers are awaited, so that the first request can use
            // each of them.
            while !(joined(router.clone()).await == workers && is_ready(frontend).await) {
                tokio::time::sleep(READY_POLL).await;
            }
        };
        tokio::select! {
            ready = tokio::time::timeout(READY_WAIT, ready) => ready.map_err(|_| StartError::NotReady),
            error = self.failed() => Err(error),
        }
    }
}

impl Served for Cluster {
    fn introduction(&self) -> String {
        let (url, model) = (format!("http://{}", reachable(self.frontend)), &self.model_id);
        let engine = match self.engine {
            EngineKind::Cpu => "on the CPU",
            EngineKind::Cuda => "on the GPU",
            EngineKind::Sim => "simulated",
            EngineKind::Vllm => "on vLLM",
            EngineKind::LlamaCpp => "on llama.cpp",
        };
        let mut places = vec![("frontend", url.clone()), ("router", self.router.to_string())];
        let place = |worker: &Worker| format!("{}, KV of {} tokens", worker.address, worker.kv_tokens);
        places.extend(self.workers.iter().map(|worker| (&*worker.id, place(worker))));
        let lines = places.iter().map(|(name, place)| format!("  {name:<12} {place}\n")).collect::<String>();
        let body = format!(
            r#"{{"model": "{model}", "stream": true, "stream_options": {{"include_usage": true}}, "max_tokens": 100, "messages": [{{"role": "user", "content": "What is a tandem bicycle?"}}]}}"#
        );
        format!(
            "{model} is ready ({engine}):\n\n{lines}\nTry:\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
        )
    }

    async fn failed(&mut self) -> StartError {
        self.parts.ended().await
    }

    async fn drain(&self, grace: Duration) {
        let until = Instant::now() + grace;
        self.front.run(grace).await;
        self.back.run(until.saturating_duration_since(Instant::now())).await;
        self.parts.flush().await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.front.stop();
        self.back.stop();
    }
}

/// Starts the workers with engines in this process, and loads their model.
async fn own_workers(
    parts: &Parts,
    settings: &UpSettings,
    config: &EngineConfig,
    shutdown: &Shutdown,
) -> Result<(Vec<Worker>, ServedModel), StartError> {
    let loaded = config.clone().load().await?;
    let mut workers = Vec::new();
    let engines = settings.prefill_workers + settings.decode_workers;
    let roles = [(Role::Prefill, settings.prefill_workers), (Role::Decode, settings.decode_workers)];
    for (role, index) in roles.into_iter().flat_map(|(role, count)| (0..count).map(move |index| (role, index))) {
        let (listener, id) = (loopback().await?, format!("{}-{index}", role.name()));
        let address = local_address(&listener)?;
        let engine = EngineHandle::start(loaded.engine(config, engines)?, config.machine(&parts.key));
        let plan = parts.plan((&id, role), None, config, (&loaded.served.id, &loaded.served.revision));
        parts.worker(plan, listener, engine.clone(), shutdown);
        workers.push(Worker { id, role, address, advertise: None, kv_tokens: kv_tokens(&engine), engine: Some(engine) });
    }
    Ok((workers, loaded.served))
}

/// Waits until all listed servers answer, starts a worker for each of them, and loads the tokenizer of their model.
async fn external_workers(
    parts: &Parts,
    settings: &UpSettings,
    config: &mut EngineConfig,
    shutdown: &Shutdown,
) -> Result<(Vec<Worker>, ServedModel), StartError> {
    let urls = [(Role::Prefill, &settings.prefill_engine_url), (Role::Decode, &settings.worker.external.engine_url)];
    if !settings.prefill_engine_url.is_empty() {
        config.worker.external.engine_kv_connector = KvConnector::Nixl;
    }
    let all = urls.into_iter().flat_map(|(role, urls)| urls.iter().map(move |url| (role, url)));
    let inspections = all.map(|(role, url)| (role, config.server(url, &parts.key)));
    let inspections =
        inspections.map(|(role, engine)| async move { Ok::<_, StartError>((role, external::inspect(engine?).await?)) });
    let servers = futures::future::try_join_all(inspections).await?;
    let name = settings.common.served_model_name.clone();
    let (_, (engines, first)) = servers.first().expect("the command line demands one");
    if let Some((_, (_, other))) = servers.iter().find(|(_, (_, server))| name.is_none() && server.model != first.model) {
        return Err(StartError::SeveralModels(first.model.clone(), other.model.clone()));
    }
    let source = match &settings.model.model {
        Some(source) => source.clone(),
        None => external::source(first).ok_or_else(|| StartError::UnknownModel { url: engines[0].0.url().to_owned() })?,
    };
    let id = name.unwrap_or_else(|| first.model.clone());
    let served = weights::load_tokenizer(settings.model.store.clone(), source, Some(id)).await?;
    let context_length = servers.iter().map(|(_, (_, server))| server.context_length).min().unwrap_or(u32::MAX);
    let served = served.with_context_length(context_length);
    let mut workers: Vec<Worker> = Vec::new();
    for (role, (engines, _)) in servers {
        for (engine, kv_tokens) in engines {
            let listener = loopback().await?;
            let index = workers.iter().filter(|worker| worker.role == role).count();
            let (id, address) = (format!("{}-{index}", role.name()), local_address(&listener)?);
            let plan = parts.plan((&id, role), None, config, (&served.id, &served.revision));
            parts.external_worker(plan, listener, engine, None, shutdown)?;
            workers.push(Worker { id, role, address, advertise: None, engine: None, kv_tokens });
        }
    }
    Ok((workers, served))
}

async fn loopback() -> Result<TcpListener, StartError> {
    listen(([127, 0, 0, 1], 0).into(), "--listen").await
}

/// The number of connections that the kernel queues until they are accepted: Linux's default maximum (`net.core.somaxconn`). When the queue
/// is full, the kernel drops new connections, and clients see resets.
const BACKLOG: u32 = 4_096;

async fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, StartError> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // With this option, a restarted process can listen while connections of the previous process are still closing.
        #[cfg(unix)]
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bound().map_err(|source| StartError::Listen { address, flag, source })
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(StartError::LocalAddress)
}

/// Returns the number of workers that have joined the router, or 0 if it does not answer.
async fn joined(mut router: RouterClient<Channel>) -> usize {
    router.workers(WorkersRequest {}).await.map_or(0, |reply| reply.get_ref().workers.len())
}

/// Returns whether `/ready` of the frontend replies with 200, which a load balancer would check.
async fn is_ready(frontend: SocketAddr) -> bool {
    let ready = tokio::task::spawn_blocking(move || http::get(&reachable(frontend).to_string(), "/ready"));
    ready.await.is_ok_and(|reply| reply.is_ok_and(|reply| reply.status == 200))
}

/// Returns the address at which this machine reaches a listener: loopback if it listens on all addresses.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}
