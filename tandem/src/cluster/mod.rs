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
    model::Source,
    settings::{CLUSTER, EngineKind, KeyArgs, KvConnector, PrefillPlace, UpSettings},
};
use parts::Parts;
use std::{collections::BTreeSet, net::SocketAddr, time::Duration};
use tandem_adapter::ServerDescription;
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
    /// The id that clients send as `model`; of several models the first.
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
    /// The id of the model that it serves.
    pub model: String,
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
        if settings.model.engine.server().is_none() && !settings.frontend.extra_models.is_empty() {
            return Err(StartError::OneModel);
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
            EngineKind::Cpu | EngineKind::Cuda | EngineKind::Sim => {
                let (workers, served) = own_workers(&parts, &settings, &config, &back).await?;
                (workers, vec![served])
            }
        };
        // The frontend refuses a prompt that does not fit on every worker of its model, so the smallest worker limits the context.
        let fitted = |served: ServedModel| {
            let of_model = workers.iter().filter(|worker| worker.model == served.id);
            let capacity_tokens = of_model.map(|worker| worker.kv_tokens).min().unwrap_or_default();
            served.with_context_length(capacity_tokens.try_into().unwrap_or(u32::MAX))
        };
        let mut served: Vec<ServedModel> = served.into_iter().map(fitted).collect();
        let extra = served.split_off(1);
        let served = served.pop().expect("there is a model");
        let router_listener = loopback().await?;
        let router = local_address(&router_listener)?;
        let (model_id, address) = (served.id.clone(), local_address(&frontend)?);
        let only_model = extra.is_empty().then_some(&*model_id);
        let listed = workers.iter().map(|worker| worker.address.to_string()).collect();
        let peers = MemberSource::List(Vec::new());
        parts.router(router_listener, (listed, peers), only_model, &settings.router, &back);
        let (routers, sequences_max) = ([router.to_string()].into_iter().collect(), settings.model.max_concurrent_requests);
        parts.frontend((frontend, None), routers, settings.frontend, (served, extra, sequences_max), &front);
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
        let models: BTreeSet<&str> = self.workers.iter().map(|worker| &*worker.model).collect();
        let models = models.into_iter().collect::<Vec<_>>().join(", ");
        let verb = if models == *model { "is" } else { "are" };
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
            "{models} {verb} ready ({engine}):\n\n{lines}\nTry:\n  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n"
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
        let (model, kv_tokens) = (loaded.served.id.clone(), kv_tokens(&engine));
        workers.push(Worker { id, role, address, advertise: None, model, kv_tokens, engine: Some(engine) });
    }
    Ok((workers, loaded.served))
}

/// Waits until all listed servers answer, starts a worker for each of them, and loads the tokenizers of their models. The model of the first
/// server comes first.
async fn external_workers(
    parts: &Parts,
    settings: &UpSettings,
    config: &mut EngineConfig,
    shutdown: &Shutdown,
) -> Result<(Vec<Worker>, Vec<ServedModel>), StartError> {
    let urls = [(Role::Decode, &settings.worker.external.engine_url), (Role::Prefill, &settings.prefill_engine_url)];
    if !settings.prefill_engine_url.is_empty() {
        config.worker.external.engine_kv_connector = KvConnector::Nixl;
    }
    let all = urls.into_iter().flat_map(|(role, urls)| urls.iter().map(move |url| (role, url)));
    let inspections = all.map(|(role, url)| (role, config.server(url, &parts.key)));
    let inspections =
        inspections.map(|(role, engine)| async move { Ok::<_, StartError>((role, external::inspect(engine?).await?)) });
    let servers = futures::future::try_join_all(inspections).await?;
    let model_of = |server: &ServerDescription| settings.common.served_model_name.clone().unwrap_or_else(|| server.model.clone());
    let mut models: Vec<ServedModel> = Vec::new();
    for (_, (engines, server)) in &servers {
        let id = model_of(server);
        let served = match models.iter().position(|served| served.id == id) {
            Some(at) => models.remove(at),
            None => {
                let source = tokenizer_of(settings, &id, models.is_empty()).or_else(|| external::source(server));
                let source = source.ok_or_else(|| StartError::UnknownModel { url: engines[0].0.url().to_owned() })?;
                weights::load_tokenizer(settings.model.store.clone(), source, Some(id)).await?
            }
        };
        models.push(served.with_context_length(server.context_length));
    }
    if let Some(extra) = settings.frontend.extra_models.iter().find(|extra| models.iter().all(|model| model.id != extra.id)) {
        return Err(StartError::NoEngineOfModel(extra.id.clone()));
    }
    let first = servers.first().map(|(_, (_, server))| model_of(server));
    models.sort_by_key(|served| Some(&served.id) != first.as_ref());
    let mut workers: Vec<Worker> = Vec::new();
    for (role, (engines, server)) in servers {
        let model = model_of(&server);
        let revision = models.iter().find(|served| served.id == model).map_or("", |served| &served.revision);
        for (engine, kv_tokens) in engines {
            let listener = loopback().await?;
            let index = workers.iter().filter(|worker| worker.role == role).count();
            let (id, address) = (format!("{}-{index}", role.name()), local_address(&listener)?);
            let plan = parts.plan((&id, role), None, config, (&model, revision));
            parts.external_worker(plan, listener, engine, None, shutdown)?;
            workers.push(Worker { id, role, address, advertise: None, model: model.clone(), engine: None, kv_tokens });
        }
    }
    // Prefill workers are listed first.
    workers.sort_by_key(|worker| worker.role != Role::Prefill);
    Ok((workers, models))
}

/// Returns where the settings say that the tokenizer of a model of external engines is.
fn tokenizer_of(settings: &UpSettings, model: &str, is_first: bool) -> Option<Source> {
    let extra = settings.frontend.extra_models.iter().find(|extra| extra.id == model).map(|extra| extra.source.clone());
    extra.or_else(|| settings.model.model.clone().filter(|_| is_first))
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
