//! Runs a whole cluster in one process: the router, the workers and the frontend, which can also run as separate processes. They listen on loopback
//! sockets, and call each other directly (docs/adr/058-direct-calls.md).

mod access;
mod error;
mod external;
mod fleet;
mod parts;
mod process;
mod weights;

pub use error::StartError;
pub use process::Process;

use crate::{
    http::{self, REPLY_TIMEOUT},
    running::RunningFile,
    settings::{CLUSTER, EngineKind, KeySource, PrefillPlace, RestartArgs, UpSettings},
};
use access::ApiAccess;
use parts::ClusterParts;
use std::{collections::BTreeSet, net::SocketAddr, path::PathBuf, time::Duration};
use tandem_engine::EngineHandle;
use tandem_frontend::{FrontendSettings, Renderer};
use tandem_model_store::chat_temperature;
use tandem_process::{Metrics, Shutdown, discovery::MemberSource};
use tandem_proto::{
    channel::Channel,
    v1::{WorkersRequest, router_client::RouterClient, worker_info::Role},
};
use tandem_text::ServedModel;
use tokio::{
    net::{TcpListener, TcpSocket},
    time::Instant,
};
use weights::{DeviceShare, EngineConfig, with_parsers};

/// Time limit between loading the model and the frontend's readiness. Connecting takes milliseconds, so a longer time shows that something is broken.
const READY_WAIT: Duration = Duration::from_secs(30);
const READY_POLL: Duration = Duration::from_millis(10);

/// A process that serves requests: a whole cluster, or one of its roles.
pub trait ServedProcess {
    /// Returns a text for the operator that lists the running parts and their addresses.
    fn introduction(&self) -> String;
    /// Returns the metrics of the process.
    fn metrics(&self) -> &Metrics;
    /// Resolves when a part has failed, so that the process can no longer serve. This method is cancel-safe.
    fn failed(&mut self) -> impl Future<Output = StartError>;
    /// Makes the readiness check fail, so that load balancers send new work elsewhere. Work that still arrives is accepted.
    fn announce_drain(&self);
    /// Refuses new work, lets running work finish for `grace`, then stops everything.
    fn drain(&self, grace: Duration) -> impl Future<Output = ()>;
}

/// A running cluster. Dropping it stops everything immediately; [`ServedProcess::drain`] lets running requests finish first.
pub struct Cluster {
    /// The id that clients send as `model`. If there are several models, it is the id of the first one.
    pub model_id: String,
    /// The address of the OpenAI API.
    pub frontend: SocketAddr,
    /// The workers: first all prefill workers, then all decode workers.
    pub workers: Vec<Worker>,
    /// The address of the router's gRPC listener.
    pub router: SocketAddr,
    /// The address of an endpoint picker's admin port; `None` if there is none.
    pub admin: Option<SocketAddr>,
    /// Whether an endpoint picker runs in place of the frontend.
    picks: bool,
    engine: EngineKind,
    prefill: PrefillPlace,
    access: ApiAccess,
    /// Where the cluster key is.
    key: KeySource,
    /// The file by which commands find this cluster; `None` if they have to name it.
    file: Option<RunningFile>,
    /// The shutdown of the frontend. It is separate, because accepted requests still need the router and the workers while the frontend drains.
    front: Shutdown,
    back: Shutdown,
    parts: ClusterParts,
}

/// One worker of a cluster.
pub struct Worker {
    /// The worker's name, and the label of its metrics.
    pub id: String,
    /// The role of the worker, prefill or decode.
    pub role: Role,
    /// The address of the worker's gRPC listener.
    pub address: SocketAddr,
    /// The address, `host:port`, at which other workers reach this worker; `None` if they reach it at `address`.
    pub advertise: Option<String>,
    /// The id of the model that the worker serves.
    pub model: String,
    /// The names of the model's LoRAs, which the worker serves as further models.
    pub loras: Vec<String>,
    /// The engine in this process; `None` if the worker's engine is another process.
    pub engine: Option<EngineHandle>,
    kv_tokens: u64,
}

impl Worker {
    fn models(&self) -> impl Iterator<Item = &String> {
        std::iter::once(&self.model).chain(&self.loras)
    }
}

/// Returns the number of tokens that fit into the engine's KV memory.
fn kv_tokens(engine: &EngineHandle) -> u64 {
    let info = engine.info();
    u64::from(info.capacity_blocks) * u64::from(info.block_size)
}

impl Cluster {
    /// Binds all sockets, loads the model (and downloads it first if necessary), starts every part, and waits until requests can be served.
    ///
    /// # Errors
    /// Fails if the settings do not work together, if a socket cannot be bound, if the model cannot be loaded, or if a part fails.
    pub async fn start(settings: UpSettings) -> Result<Self, StartError> {
        Self::start_found_in(settings, &[]).await
    }

    /// Starts as [`Cluster::start`] does. Writes the file by which commands find the cluster into the first of these folders that can be
    /// used.
    ///
    /// # Errors
    /// The errors are those of [`Cluster::start`]. Folders that cannot be used are no error.
    pub async fn start_found_in(settings: UpSettings, folders: &[PathBuf]) -> Result<Self, StartError> {
        EngineConfig::new(&settings.common, &settings.model, &settings.worker).check_device()?;
        let prefills = match settings.model.engine {
            EngineKind::Vllm | EngineKind::Sglang | EngineKind::LlamaCpp => !settings.prefill_engine_url.is_empty(),
            EngineKind::Cpu | EngineKind::Cuda | EngineKind::Sim => settings.prefill_workers > 0,
        };
        if settings.router.prefill == PrefillPlace::Remote && !prefills {
            return Err(StartError::NoPrefillWorker);
        }
        if settings.model.engine.server().is_none() && !settings.frontend.extra_models.is_empty() {
            return Err(StartError::OneModel);
        }
        let frontend = listen(settings.common.listen, "--listen").await?;
        let mut cluster = Self::run(settings, frontend, folders).await?;
        cluster.wait_until_ready().await?;
        Ok(cluster)
    }

    /// Returns a connection to the router. Must be called within a tokio runtime.
    pub fn to_router(&self) -> Channel {
        self.parts.channel(self.router)
    }

    /// Stops the cluster immediately: running requests are cancelled.
    pub async fn stop(self) {
        self.drain(Duration::ZERO).await;
    }

    async fn run(settings: UpSettings, frontend: TcpListener, folders: &[PathBuf]) -> Result<Self, StartError> {
        let mut config = EngineConfig::new(&settings.common, &settings.model, &settings.worker);
        let (front, back) = (Shutdown::default(), Shutdown::default());
        // All users of this machine can connect to the cluster's sockets. The key prevents them from calling its services.
        let (key, key_source) = match settings.model.engine.server() {
            Some(_) => settings.common.key.read_or_keep()?,
            None => settings.common.key.read_or_make()?,
        };
        let mut parts = ClusterParts::new("tandem", CLUSTER, key, &settings.common)?;
        parts.network = parts.network.with_direct_calls();
        parts.open_ledger(&settings.worker)?;
        parts.open_access_files(&settings.frontend, settings.picker.map(|picker| picker.args))?;
        let access = ApiAccess::new(local_address(&frontend)?, &settings.frontend);
        let picker = settings.picker;
        let admin = picker.and_then(|picker| picker.admin_listen).map(|address| bind(address, "--admin-listen", false));
        let admin = admin.transpose()?;
        if picker.is_none() {
            access.warn_if_open();
        }
        let router_listener = loopback().await?;
        let router = local_address(&router_listener)?;
        let file = RunningFile::write(folders, &access.running(router, &key_source));
        let hosts = settings.frontend.limits.hosts.hosts();
        let starting = parts.starting(picker.is_none().then_some(&frontend), admin.as_ref(), &hosts, &front)?;
        let (workers, mut served, renderers) = start_workers(&parts, &settings, &mut config, &back).await?;
        let extra = served.split_off(1);
        let served = served.pop().expect("a cluster has a model");
        let (served, extra) = with_parsers(&settings.frontend.parsers, served, extra)?;
        let (model_id, address) = (served.id.clone(), local_address(&frontend)?);
        // A server may load LoRAs at any time, and they are further models.
        let only_model = (extra.is_empty() && settings.model.engine.server().is_none()).then_some(&*model_id);
        let listed = workers.iter().map(|worker| worker.address.to_string()).collect();
        let peers = MemberSource::List(Vec::new());
        let levels = settings.router.levels(settings.worker.slo_itl);
        parts.router(router_listener, (listed, peers), only_model, (&settings.router, levels), &back);
        let mut own = settings.frontend.settings(served, &RestartArgs::of_one_process(), settings.model.max_concurrent_requests);
        own.models.extend(extra);
        own.renderers = Some(own.renderers).filter(|own| !own.is_empty()).unwrap_or(renderers);
        own.alternatives = picker.map(|picker| picker.args.fallback_endpoints);
        let admin_address = admin.as_ref().map(local_address).transpose()?;
        for answers in starting {
            answers.end().await;
        }
        parts.frontend(
            frontend,
            FrontendSettings { routers: [router.to_string()].into_iter().collect(), admin, ..own },
            &front,
        )?;
        Ok(Self {
            model_id,
            frontend: address,
            admin: admin_address,
            picks: picker.is_some(),
            access,
            key: key_source,
            file,
            workers,
            engine: settings.model.engine,
            prefill: settings.router.prefill,
            router,
            front,
            back,
            parts,
        })
    }

    async fn wait_until_ready(&mut self) -> Result<(), StartError> {
        let channel = self.to_router();
        let (router, frontend, workers) = (RouterClient::new(channel), self.frontend, self.workers.len());
        let metrics = (self.picks || self.access.is_encrypted()).then(|| self.parts.metrics.clone());
        let ready = async {
            // A frontend is ready as soon as one decode worker has joined. This start waits for all workers, so that the first request can use each
            // of them.
            while !(joined(router.clone()).await == workers && is_ready(frontend, metrics.as_ref()).await) {
                tokio::time::sleep(READY_POLL).await;
            }
        };
        tokio::select! {
            ready = tokio::time::timeout(READY_WAIT, ready) => ready.map_err(|_| StartError::NotReady),
            error = self.failed() => Err(error),
        }
    }
}

impl ServedProcess for Cluster {
    fn introduction(&self) -> String {
        let (url, model) = (self.access.url(), &self.model_id);
        let models: BTreeSet<&str> = self.workers.iter().flat_map(|worker| worker.models()).map(String::as_str).collect();
        let models = models.into_iter().collect::<Vec<_>>().join(", ");
        let verb = if models == *model { "is" } else { "are" };
        let engine = match self.engine {
            EngineKind::Cpu => "on the CPU",
            EngineKind::Cuda => "on the GPU",
            EngineKind::Sim => "simulated",
            EngineKind::Vllm => "on vLLM",
            EngineKind::Sglang => "on SGLang",
            EngineKind::LlamaCpp => "on llama.cpp",
        };
        let place = |worker: &Worker| format!("{}, KV of {} tokens", worker.address, worker.kv_tokens);
        let of_workers = self.workers.iter().map(|worker| (&*worker.id, place(worker)));
        let top = match (&self.file, &self.key) {
            (Some(_), _) => format!("  tandem top {url}\n"),
            (None, KeySource::File(file)) => format!("  tandem top {} --cluster-key-file {}\n", self.router, file.display()),
            (None, KeySource::Secret(_)) => String::new(),
        };
        if self.picks {
            let mut places = vec![("gateway gRPC", self.frontend.to_string())];
            places.extend(self.admin.map(|admin| ("admin", format!("http://{}", reachable(admin)))));
            places.push(("router", self.router.to_string()));
            places.extend(of_workers);
            let lines = places.iter().map(|(name, place)| format!("  {name:<12} {place}\n")).collect::<String>();
            let hint = if top.is_empty() { top } else { format!("\nTry:\n{top}") };
            return format!("The endpoint picker for {models} is ready:\n\n{lines}{hint}");
        }
        let mut places = vec![("frontend", url.clone())];
        places.extend(self.access.network_url().map(|url| ("from outside", url)));
        places.push(("router", self.router.to_string()));
        places.extend(of_workers);
        places.push(("chat", format!("{url}/chat")));
        places.extend(self.access.shows_dashboard.then(|| ("dashboard", format!("{url}/dashboard"))));
        let lines = places.iter().map(|(name, place)| format!("  {name:<12} {place}\n")).collect::<String>();
        let temperature = chat_temperature(model).map_or_else(String::new, |value| format!(r#""temperature": {value}, "#));
        let body = format!(
            r#"'{{"model": "{model}", "stream": true, "stream_options": {{"include_usage": true}}, "max_tokens": 100, {temperature}"messages": [{{"role": "user", "content": "What is a tandem bicycle?"}}]}}'"#
        );
        let decodes = self.workers.iter().filter(|worker| worker.role == Role::Decode).count();
        let prefilled = match self.prefill {
            _ if self.workers.len() == decodes => None,
            PrefillPlace::Local => None,
            PrefillPlace::Remote => Some(": prefill workers compute them"),
            // With several decode workers, prompts are spread over these, too.
            PrefillPlace::Auto => Some(if decodes == 1 { ": prefill workers compute two of them" } else { "" }),
        };
        let disaggregated =
            prefilled.map(|prefilled| format!("  # Three prompts at once{prefilled}.\n{}", self.access.disaggregated(model)));
        let (chat, curl) = (self.access.chat(), self.access.curl("/v1/chat/completions", "", &body));
        let disaggregated = disaggregated.unwrap_or_default();
        format!("{models} {verb} ready ({engine}):\n\n{lines}\nTry:\n{chat}{top}{curl}{disaggregated}")
    }

    fn metrics(&self) -> &Metrics {
        &self.parts.metrics
    }

    async fn failed(&mut self) -> StartError {
        self.parts.ended().await
    }

    fn announce_drain(&self) {
        if let Some(file) = &self.file {
            file.mark_draining();
        }
        self.front.announce();
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

/// Starts the workers. Returns them, the models that they serve, and the servers that render conversations with images.
async fn start_workers(
    parts: &ClusterParts,
    settings: &UpSettings,
    config: &mut EngineConfig,
    shutdown: &Shutdown,
) -> Result<(Vec<Worker>, Vec<ServedModel>, Vec<Renderer>), StartError> {
    let (workers, served, renderers) = match settings.model.engine {
        EngineKind::Vllm | EngineKind::Sglang | EngineKind::LlamaCpp => fleet::workers(parts, settings, config, shutdown).await?,
        EngineKind::Cpu | EngineKind::Cuda | EngineKind::Sim => {
            let (workers, served) = own_workers(parts, settings, config, shutdown).await?;
            (workers, vec![served], Vec::new())
        }
    };
    // The frontend refuses a prompt that does not fit on every worker of its model, so the smallest worker limits the context.
    let fitted = |served: ServedModel| {
        let of_model = workers.iter().filter(|worker| worker.models().any(|model| *model == served.id));
        let capacity_tokens = of_model.map(|worker| worker.kv_tokens).min().unwrap_or_default();
        served.with_context_length(capacity_tokens.try_into().unwrap_or(u32::MAX))
    };
    let served = served.into_iter().map(fitted).collect();
    Ok((workers, served, renderers))
}

async fn own_workers(
    parts: &ClusterParts,
    settings: &UpSettings,
    config: &EngineConfig,
    shutdown: &Shutdown,
) -> Result<(Vec<Worker>, ServedModel), StartError> {
    let loaded = config.clone().load().await?;
    let mut workers = Vec::new();
    let engines = settings.prefill_workers + settings.decode_workers;
    if config.worker.tp > 1 && engines > 1 && std::env::var_os("NCCL_LAUNCH_ORDER_IMPLICIT").is_none() {
        tracing::warn!(
            engines,
            "several engines of this process use the same GPUs with --tp, so their all-reduces may wait for each other without end; set NCCL_LAUNCH_ORDER_IMPLICIT=1 in the environment (NCCL 2.26 or later), or run one worker per process on GPUs of its own"
        );
    }
    let roles = [(Role::Prefill, settings.prefill_workers), (Role::Decode, settings.decode_workers)];
    for (role, index) in roles.into_iter().flat_map(|(role, count)| (0..count).map(move |index| (role, index))) {
        let (listener, id) = (loopback().await?, format!("{}-{index}", role.name()));
        let address = local_address(&listener)?;
        // A decode step has a short deadline. Its kernels must not wait for a prefill's.
        let share = DeviceShare { engines, urgent: role == Role::Decode };
        let engine = loaded.start(config, share, &parts.key)?;
        let plan = parts.plan((&id, role), None, config, (&loaded.served.id, &loaded.served.revision));
        parts.worker(plan, listener, engine.clone(), shutdown);
        let (model, kv_tokens) = (loaded.served.id.clone(), kv_tokens(&engine));
        workers.push(Worker { id, role, address, advertise: None, model, loras: Vec::new(), kv_tokens, engine: Some(engine) });
    }
    Ok((workers, loaded.served))
}

async fn loopback() -> Result<TcpListener, StartError> {
    listen(([127, 0, 0, 1], 0).into(), "--listen").await
}

/// The number of connections that the kernel queues until they are accepted: Linux's default maximum (`net.core.somaxconn`). When the queue
/// is full, the kernel drops new connections, and clients see resets.
const BACKLOG: u32 = 4_096;

async fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, StartError> {
    bind(address, flag, false)
}

/// Binds a socket. With `shared`, other processes that also set it may listen on the same port.
fn bind(address: SocketAddr, flag: &'static str, shared: bool) -> Result<TcpListener, StartError> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // With this option, a restarted process can listen while connections of the previous process are still closing.
        #[cfg(unix)]
        socket.set_reuseaddr(true)?;
        #[cfg(unix)]
        socket.set_reuseport(shared)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bound().map_err(|source| StartError::Listen { address, flag, source })
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(StartError::LocalAddress)
}

async fn joined(mut router: RouterClient<Channel>) -> usize {
    router.workers(WorkersRequest {}).await.map_or(0, |reply| reply.get_ref().workers.len())
}

/// Returns whether the frontend is ready, as a load balancer would check it at `/ready`. If the frontend serves only https or gRPC, its metrics
/// are read instead, because its certificate need not be valid for this address.
async fn is_ready(frontend: SocketAddr, encrypted: Option<&Metrics>) -> bool {
    if let Some(metrics) = encrypted {
        return metrics.render().lines().any(|line| line == "tandem_frontend_ready 1");
    }
    let ready = tokio::task::spawn_blocking(move || http::get(&reachable(frontend).to_string(), REPLY_TIMEOUT, "/ready"));
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
