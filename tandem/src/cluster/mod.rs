//! A whole cluster in one process: the parts of production, wired by the same gRPC, on loopback sockets.

mod error;
mod parts;
mod process;
mod weights;

pub use error::StartError;
pub use process::Process;

use crate::serve::Served;
use crate::{
    model::{Store, StoredModel},
    settings::{CLUSTER, EngineKind, KeyFlags, PrefillPlace, UpSettings},
};
use parts::Parts;
use std::{net::SocketAddr, time::Duration};
use tandem_engine::{EngineHandle, EngineSettings};
use tandem_frontend::ServedModel;
use tandem_node::{Metrics, Shutdown, discovery::Workers};
use tandem_proto::{
    ClusterKey,
    channel::{self, Channel, Network},
    v1::{WorkersRequest, router_client::RouterClient},
};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream},
    time::Instant,
};
use weights::Loaded;

/// Serving starts within this time once the model is loaded, or something is broken. Connecting takes milliseconds.
const READY_WAIT: Duration = Duration::from_secs(30);
/// How often the frontend is asked whether it is ready.
const READY_POLL: Duration = Duration::from_millis(10);
/// A second of tokens and more, so that a listener whose thread is merely late holds up nothing; a few hundred KiB with logprobs.
const UNHEARD_MAX: u32 = 1_024;

/// A running cluster. Dropping it stops everything at once; [`Cluster::drain`] lets running requests finish first.
pub struct Cluster {
    model_id: String,
    kind: EngineKind,
    frontend: SocketAddr,
    router: SocketAddr,
    workers: Vec<Worker>,
    metrics: Metrics,
    /// The frontend has a shutdown of its own: what it has accepted still needs router and workers while it drains.
    front: Shutdown,
    back: Shutdown,
    parts: Parts,
}

/// One worker of a cluster.
pub struct Worker {
    /// Its name, and the label of its metrics.
    pub id: String,
    /// What it does.
    pub role: Role,
    /// Of its gRPC.
    pub address: SocketAddr,
    /// Where other workers reach it, if that is somewhere else.
    pub advertise: Option<String>,
    /// The device it works on.
    pub engine: EngineHandle,
}

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// Computes prompts.
    Prefill,
    /// Generates.
    Decode,
}

impl Role {
    fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
        }
    }
}

impl Worker {
    fn kv_tokens(&self) -> u64 {
        let info = self.engine.info();
        u64::from(info.capacity_blocks) * u64::from(info.block_size)
    }
}

impl Cluster {
    /// Binds all sockets, loads the model (fetching it first if need be), starts every part, and waits until requests can be served.
    pub async fn start(settings: UpSettings) -> Result<Self, StartError> {
        check(&settings)?;
        let frontend = listen(settings.listen, "--listen").await?;
        let loaded = load(&settings).await?;
        let mut cluster = Self::run(settings, loaded, frontend).await?;
        cluster.wait_until_ready().await?;
        Ok(cluster)
    }

    /// Where the OpenAI API is.
    pub fn frontend(&self) -> SocketAddr {
        self.frontend
    }

    /// Where the router's gRPC is.
    pub fn router(&self) -> SocketAddr {
        self.router
    }

    /// A connection to the router, among the cluster's own processes. Must be called within a runtime.
    pub fn to_router(&self) -> Channel {
        let endpoint = channel::endpoint(&self.router.to_string()).expect("an address and a port are an endpoint");
        Network::tcp(self.parts.key.clone()).connect_lazy(&endpoint)
    }

    /// First those that prefill, then those that decode.
    pub fn workers(&self) -> &[Worker] {
        &self.workers
    }

    /// What clients write as `model`.
    pub fn model_id(&self) -> &str {
        &self.model_id
    }

    /// Of all parts.
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// Resolves when a part has ended though nobody asked it to: the cluster cannot go on then. Cancel-safe.
    pub async fn failed(&mut self) -> StartError {
        self.parts.ended().await
    }

    /// Refuses new requests, lets running ones finish for `grace`, then stops everything.
    pub async fn drain(&self, grace: Duration) {
        let until = Instant::now() + grace;
        self.front.run(grace).await;
        self.back.run(until.saturating_duration_since(Instant::now())).await;
        self.parts.flush().await;
    }

    /// Stops at once: running requests are cancelled.
    pub async fn stop(self) {
        self.drain(Duration::ZERO).await;
    }

    async fn run(settings: UpSettings, loaded: Loaded, frontend: TcpListener) -> Result<Self, StartError> {
        let (metrics, front, back) = (Metrics::default(), Shutdown::default(), Shutdown::default());
        // Every user of this machine can connect to its sockets, so it makes a key.
        let key = if settings.key == KeyFlags::default() { ClusterKey::random() } else { settings.key.read()? };
        let parts = Parts::new("tandem", CLUSTER, key, &settings, &metrics)?;
        let mut workers = Vec::new();
        let engines = settings.prefill_workers + settings.decode_workers;
        let roles = [(Role::Prefill, settings.prefill_workers), (Role::Decode, settings.decode_workers)];
        for (role, index) in roles.into_iter().flat_map(|(role, count)| (0..count).map(move |index| (role, index))) {
            let listener = loopback().await?;
            let worker = Worker {
                id: format!("{}-{index}", role.name()),
                role,
                address: local_address(&listener)?,
                advertise: None,
                engine: EngineHandle::start(loaded.engine(&settings, engines)?, engine_settings(&settings, &parts.key)),
            };
            parts.worker(&worker, listener, &settings, &loaded, &metrics, &back);
            workers.push(worker);
        }
        let router_listener = loopback().await?;
        let router = local_address(&router_listener)?;
        let (model_id, address) = (loaded.served.id().to_owned(), local_address(&frontend)?);
        let listed = workers.iter().map(|worker| worker.address.to_string()).collect();
        let peers = Workers::List(Vec::new());
        parts.router(router_listener, (listed, peers), Some(&model_id), &settings, &metrics, &back);
        // A prompt that no worker can hold is told so at the door.
        let capacity_tokens = workers.iter().map(Worker::kv_tokens).min().unwrap_or_default();
        let served = loaded.served.with_context_length(capacity_tokens.try_into().unwrap_or(u32::MAX));
        parts.frontend((frontend, None), [router.to_string()].into_iter().collect(), &settings, served, &metrics, &front);
        let kind = settings.engine;
        Ok(Self { model_id, kind, frontend: address, router, workers, metrics, front, back, parts })
    }

    async fn wait_until_ready(&mut self) -> Result<(), StartError> {
        let channel = self.to_router();
        let (router, frontend, workers) = (RouterClient::new(channel), self.frontend, self.workers.len());
        let ready = async {
            // Readiness asks for one decode worker; here all are about to join, and the first request is to find them.
            while !(joined(router.clone()).await == workers && is_ready(frontend).await.unwrap_or(false)) {
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
        let engine = match self.kind {
            EngineKind::Cpu => "on the CPU",
            EngineKind::Cuda => "on the GPU",
            EngineKind::Sim => "simulated",
        };
        let mut places = vec![("frontend", url.clone()), ("router", self.router.to_string())];
        let place = |worker: &Worker| format!("{}, KV of {} tokens", worker.address, worker.kv_tokens());
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
        Self::failed(self).await
    }

    async fn drain(&self, grace: Duration) {
        Self::drain(self, grace).await;
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.front.stop();
        self.back.stop();
    }
}

/// What no part could make sense of.
fn check(settings: &UpSettings) -> Result<(), StartError> {
    check_device(settings)?;
    settings.tenants.check()?;
    if settings.prefill == PrefillPlace::Remote && settings.prefill_workers == 0 {
        return Err(StartError::NoPrefillWorker);
    }
    Ok(())
}

/// Before a model is fetched for a device that is not there.
fn check_device(settings: &UpSettings) -> Result<(), StartError> {
    match settings.engine {
        EngineKind::Cuda => Ok(tandem_engine::cuda::check(settings.device, settings.tp)?),
        EngineKind::Sim | EngineKind::Cpu if settings.tp > 1 => Err(StartError::OneDevice),
        EngineKind::Sim | EngineKind::Cpu => Ok(()),
    }
}

/// The model with its weights.
async fn load(settings: &UpSettings) -> Result<Loaded, StartError> {
    let (name, how) = (settings.served_model_name.clone(), settings.clone());
    with_model(settings, move |model| match model {
        None => Ok(Loaded::sim(name)),
        Some((model, revision)) => Loaded::model(&model, &revision, name, &how),
    })
    .await
}

/// What a frontend needs of the model.
async fn load_served(settings: &UpSettings) -> Result<ServedModel, StartError> {
    let (name, engine) = (settings.served_model_name.clone(), settings.engine);
    with_model(settings, move |model| match model {
        None => Ok(Loaded::sim(name).served),
        Some((model, revision)) => Ok(weights::open(&model, &revision, name, engine)?.1),
    })
    .await
}

/// Runs on a blocking thread, because loading reads large files and may download them. `load` gets the model and its revision; there is none when the
/// simulator needs none.
async fn with_model<T: Send + 'static>(
    settings: &UpSettings,
    load: impl FnOnce(Option<(StoredModel, String)>) -> Result<T, StartError> + Send + 'static,
) -> Result<T, StartError> {
    let settings = settings.clone();
    let loading = tokio::task::spawn_blocking(move || match (settings.engine, settings.model) {
        (EngineKind::Sim, None) => load(None),
        (_, model) => {
            let store = Store::new(settings.store)?;
            let model = store.get(&model.unwrap_or_default())?;
            let revision = store.revision(&model)?;
            load(Some((model, revision)))
        }
    });
    loading.await.expect("loading returns its errors")
}

fn engine_settings(settings: &UpSettings, key: &ClusterKey) -> EngineSettings {
    EngineSettings {
        chunk_budget: settings.chunk_budget(),
        batch_max: settings.batch_max,
        // The frontend's limit is the cluster's: all that it lets in may meet at one worker.
        queue_max: settings.limits.max_concurrent_requests,
        prefix_caching: !settings.no_prefix_caching,
        hash_key: key.hash_key(),
        max_buffered_events: UNHEARD_MAX,
        step_max: Duration::from_secs(settings.step_timeout.into()),
    }
}

async fn loopback() -> Result<TcpListener, StartError> {
    listen(([127, 0, 0, 1], 0).into(), "--listen").await
}

/// Connections that may wait to be accepted. As many as Linux allows by default (`net.core.somaxconn`): when the queue is full, the
/// kernel drops new connections, and clients see resets.
const BACKLOG: u32 = 4_096;

async fn listen(address: SocketAddr, flag: &'static str) -> Result<TcpListener, StartError> {
    let bound = || {
        let socket = if address.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
        // A restarted process may listen again while connections of the last one are still closing.
        #[cfg(unix)]
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(BACKLOG)
    };
    bound().map_err(|cause| StartError::Listen { address, flag, cause })
}

fn local_address(listener: &TcpListener) -> Result<SocketAddr, StartError> {
    listener.local_addr().map_err(StartError::LocalAddress)
}

/// How many workers the router knows.
async fn joined(mut router: RouterClient<Channel>) -> usize {
    router.workers(WorkersRequest {}).await.map_or(0, |reply| reply.get_ref().workers.len())
}

/// Asks as a load balancer would.
async fn is_ready(frontend: SocketAddr) -> std::io::Result<bool> {
    let mut stream = TcpStream::connect(reachable(frontend)).await?;
    stream.write_all(format!("GET /ready HTTP/1.1\r\nhost: {frontend}\r\nconnection: close\r\n\r\n").as_bytes()).await?;
    let mut status = [0; 12];
    stream.read_exact(&mut status).await?;
    Ok(&status == b"HTTP/1.1 200")
}

/// From this machine: a socket on all addresses is reached on the loopback one.
fn reachable(mut address: SocketAddr) -> SocketAddr {
    if address.ip().is_unspecified() {
        address.set_ip(match address {
            SocketAddr::V4(_) => std::net::Ipv4Addr::LOCALHOST.into(),
            SocketAddr::V6(_) => std::net::Ipv6Addr::LOCALHOST.into(),
        });
    }
    address
}
