//! Workers whose engine is a server in another process. The worker's process keeps running when the server ends: each connection to a server is a new
//! instance of the worker, at the same address.

use super::{
    EngineConfig, StartError,
    parts::{ClusterParts, WorkerPlan, channel_to, description, read_ca},
};
use crate::settings::{EngineKind, EngineLimits};
use futures::FutureExt;
use parking_lot::Mutex;
use std::{convert::Infallible, io, net, panic::AssertUnwindSafe, path::Path, sync::Arc, time::Duration};
use tandem_adapter::{ConnectError, Connected, ModelDescription, ServerDescription, ServerSettings};
use tandem_decode_worker::DecodeWorkerError;
use tandem_model_store::ModelSource;
use tandem_process::{
    Backoff, Metrics, Shutdown,
    discovery::{self, EtcdSettings, MemberRecord},
    retry::error_chain,
};
use tandem_proto::{
    ClusterKey,
    channel::{self, Arrivals, Channel, Listener, Network},
    v1::{
        DescribeRequest, DrainReply, DrainRequest, SnapshotChunk, SnapshotRequest, WatchReply, WatchRequest, WorkerInfo,
        control_server::{Control, ControlServer},
    },
};
use tandem_worker::{Backend, Replies, WorkerError};
use tokio::{
    net::TcpListener,
    time::{Instant, sleep},
};
use tonic::{Request, Response, Status, service::Routes, transport::Uri};

/// The shortest and the longest pause between failed attempts to connect to a server.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// An instance that ends sooner than this after its start is followed by a pause. Otherwise an engine that keeps failing would make routers add and
/// remove its worker every few seconds.
const SETTLED: Duration = Duration::from_secs(60);

/// The reason why a worker with an external engine has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExternalError {
    #[error("the worker cannot connect to its engine")]
    Connect(#[from] ConnectError),
    #[error("--served-model-name {0} is the name of a LoRA of the engine; choose another name")]
    NameOfLora(String),
    #[error("the worker's listening socket cannot be set up")]
    Socket(#[from] io::Error),
    #[error("the worker's gRPC server failed")]
    Serve(#[from] tonic::transport::Error),
    #[error(transparent)]
    Worker(#[from] DecodeWorkerError),
}

pub(super) struct ExternalWorker {
    pub(super) plan: WorkerPlan,
    pub(super) engine: ServerSettings,
    /// The socket on which the instances of the worker listen, one after another.
    pub(super) socket: net::TcpListener,
    pub(super) network: Network,
    pub(super) registration: Option<Registration>,
    /// What the frontend of this process has announced of the server's model; `None` if the frontend is another process.
    pub(super) announced: Option<Announced>,
}

/// What the frontend has announced of a server's model. A restarted server with another model must not serve requests for the announced one.
pub(super) struct Announced {
    /// The server's model at the start.
    pub(super) model: ModelDescription,
    /// Whether --served-model-name sets the model's name. If so, the restarted server may serve another model under that name.
    pub(super) name_is_declared: bool,
    /// The context length that the frontend lists, in tokens.
    pub(super) context_length: u32,
}

pub(super) struct Registration {
    pub(super) etcd: EtcdSettings,
    /// The address, `host:port`, at which other processes reach the worker.
    pub(super) address: String,
    /// The shutdown that ends the registrations of all instances when it drains.
    pub(super) shutdown: Shutdown,
}

impl ClusterParts {
    /// Starts a worker with an engine in another process.
    pub(super) fn external_worker(
        &self,
        plan: WorkerPlan,
        socket: TcpListener,
        engine: ServerSettings,
        registration: Option<Registration>,
        announced: Option<Announced>,
        shutdown: &Shutdown,
    ) -> Result<(), StartError> {
        let socket = socket.into_std().map_err(StartError::LocalAddress)?;
        let (id, metrics, stop) = (plan.id(), self.metrics.clone(), shutdown.clone());
        let worker = ExternalWorker { plan, engine, socket, network: self.network.clone(), registration, announced };
        self.spawn(&id, shutdown, worker.run(metrics, stop));
        Ok(())
    }
}

impl EngineConfig {
    /// Returns this configuration for a worker that only observes the server at `url`, which a gateway reaches at the same address.
    ///
    /// # Errors
    /// The URL has a name in place of an IP address.
    pub(super) fn observing(&self, url: &str) -> Result<Self, StartError> {
        let named = || StartError::ObservedName { url: url.to_owned() };
        let uri: Uri = url.parse().map_err(|_| named())?;
        let port = uri.port_u16().unwrap_or(if uri.scheme_str() == Some("https") { 443 } else { 80 });
        let host = uri.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
        let address = net::SocketAddr::new(host.parse().map_err(|_| named())?, port);
        let mut config = self.clone();
        config.worker.external.observe = Some(address);
        Ok(config)
    }

    pub(super) fn server(&self, url: &str, key: &ClusterKey) -> Result<ServerSettings, StartError> {
        let external = &self.worker.external;
        let ca = external.engine_ca.as_ref().map(|path| read_ca(path, "--engine-ca")).transpose()?;
        let limits = EngineLimits {
            block_size: self.block_size,
            running_max: self.worker.batch_max,
            waiting_max: self.model.max_concurrent_requests,
            prefix_caching: !self.worker.no_prefix_caching,
            silence_max: Duration::from_secs(self.worker.step_timeout.into()),
        };
        Ok(match self.model.engine {
            EngineKind::Sglang => ServerSettings::Sglang(external.sglang(url, ca, key.hash_key(), &limits)),
            EngineKind::LlamaCpp => ServerSettings::LlamaCpp(external.llama_cpp(url, ca, key.hash_key(), &limits)),
            _ => ServerSettings::Vllm(external.vllm(url, ca, key.hash_key(), &limits)),
        })
    }
}

/// Waits until the server answers. Returns the server's description, and the settings of a worker for each of the server's data-parallel ranks, with
/// the number of tokens that fit into the rank's KV memory.
pub(super) async fn inspect(engine: ServerSettings) -> Result<(Vec<(ServerSettings, u64)>, ServerDescription), StartError> {
    let described = engine.inspect().await;
    let server =
        described.map_err(|source| StartError::ExternalEngine { url: engine.url().to_owned(), source: source.into() })?;
    // Requests to a server with a single rank do not name the rank, unless the settings name it.
    let only = server.ranks.len() == 1;
    let of_rank = |&(rank, tokens): &(u32, u64)| {
        let engine = if only { engine.clone() } else { engine.clone().with_rank(rank) };
        (engine, tokens)
    };
    Ok((server.ranks.iter().map(of_rank).collect(), server))
}

/// Returns the directory or repository from which the server at `url` loaded its model. The tokenizer can be loaded from there.
///
/// # Errors
/// The server names no source, or one that it may not choose: a server of another machine chooses a repository only if it is trusted, and never a
/// path of this machine.
pub(super) fn source(server: &ServerDescription, url: &str, is_trusted: bool) -> Result<ModelSource, StartError> {
    let root = server.model.root.as_deref().unwrap_or(&server.model.id);
    let is_local = is_loopback(url);
    if is_local && Path::new(root).exists() {
        return Ok(ModelSource::Path(root.into()));
    }
    let source: ModelSource = match format!("hf:{root}").parse() {
        Ok(source @ ModelSource::HuggingFace { .. }) => source,
        _ => return Err(StartError::UnknownModel { url: url.to_owned() }),
    };
    if is_local || is_trusted {
        return Ok(source);
    }
    Err(StartError::UntrustedModel { url: url.to_owned(), model: source.to_string() })
}

/// Whether the URL's host is this machine.
fn is_loopback(url: &str) -> bool {
    let Ok(url) = url.parse::<Uri>() else { return false };
    let host = url.host().unwrap_or_default().trim_start_matches('[').trim_end_matches(']');
    host.eq_ignore_ascii_case("localhost") || host.parse().is_ok_and(|address: net::IpAddr| address.is_loopback())
}

/// Returns the pause after an instance that has ended, before the next one starts.
fn pause_after(lived: Duration, backoff: &mut Backoff) -> Duration {
    if lived < SETTLED {
        return backoff.next_delay();
    }
    backoff.reset();
    Duration::ZERO
}

impl Announced {
    /// Returns why a restarted server with this model must not be used; `None` if it can serve what was announced.
    fn difference(&self, now: &ModelDescription) -> Option<String> {
        let named = |model: &ModelDescription| {
            format!("{} (loaded from {})", model.id, model.root.as_deref().unwrap_or("an unknown place"))
        };
        let what = if !self.name_is_declared && (&now.id, &now.root) != (&self.model.id, &self.model.root) {
            format!("serves the model {}, not {} as at the start of this cluster", named(now), named(&self.model))
        } else if now.context_length < self.context_length {
            format!("has a context of {} tokens, but {} are announced to clients", now.context_length, self.context_length)
        } else {
            return None;
        };
        Some(format!("the restarted engine {what}; restart `tandem up`, or start the engine as it was"))
    }
}

impl ExternalWorker {
    /// Runs an instance of the worker for each connection to its server, until the process drains.
    pub(super) async fn run(self, metrics: Metrics, shutdown: Shutdown) -> Result<(), ExternalError> {
        let (mut backoff, mut has_connected, mut pause) = (Backoff::new(PAUSES.0, PAUSES.1), false, Duration::ZERO);
        loop {
            let reason = format!("the worker waits until its engine at {} answers", self.engine.url());
            let waiting = UnavailableControl(Arc::new(Mutex::new(reason)));
            let connected = tokio::select! {
                biased;
                () = shutdown.draining() => return Ok(()),
                connected = self.connect(pause, &mut backoff, has_connected, &waiting) => connected?,
                refusing = self.refuse_calls(waiting.clone()) => match refusing? {},
            };
            let name = &self.plan.settings.model;
            if connected.adapter.loras().contains(name) {
                return Err(ExternalError::NameOfLora(name.clone()));
            }
            has_connected = true;
            let started = Instant::now();
            match self.run_instance(connected, &metrics, &shutdown).await {
                Err(DecodeWorkerError::Worker(WorkerError::EngineEnded)) if !shutdown.is_draining() => {
                    pause = pause_after(started.elapsed(), &mut backoff);
                }
                ended => return Ok(ended?),
            }
        }
    }

    /// Waits for the pause and until the server answers, and connects to it. An error at the first connection ends the worker, so that the operator
    /// sees that the settings are wrong or that the server is of another kind. Later connections are retried after errors, and while the server does
    /// not serve what was announced.
    async fn connect(
        &self,
        pause: Duration,
        backoff: &mut Backoff,
        has_connected: bool,
        waiting: &UnavailableControl,
    ) -> Result<Connected, ExternalError> {
        sleep(pause).await;
        loop {
            let error = match self.engine.clone().connect().await {
                Ok(connected) => match self.announced.as_ref().and_then(|announced| announced.difference(&connected.model)) {
                    None => return Ok(connected),
                    Some(difference) => difference,
                },
                Err(error) if !has_connected => return Err(error.into()),
                Err(error) => error_chain(&error),
            };
            if backoff.is_new_error(&error) {
                tracing::warn!(engine = self.engine.url(), %error, "the restarted engine cannot be used; trying again");
            }
            *waiting.0.lock() = error;
            sleep(backoff.next_delay()).await;
        }
    }

    /// Refuses calls to the worker while its server cannot be used, so that routers need not wait for a timeout.
    async fn refuse_calls(&self, waiting: UnavailableControl) -> Result<Infallible, ExternalError> {
        let listener = Listener::new(Arrivals::Tcp(TcpListener::from_std(self.socket.try_clone()?)?), self.network.clone());
        let routes = Routes::new(ControlServer::new(waiting));
        listener.serve(channel::server(), routes, Arc::new(|| {}), std::future::pending()).await?;
        Err(io::Error::other("the socket is closed").into())
    }

    async fn run_instance(&self, connected: Connected, metrics: &Metrics, shutdown: &Shutdown) -> Result<(), DecodeWorkerError> {
        let mut plan = self.plan.clone();
        if plan.settings.model.is_empty() {
            plan.settings.model.clone_from(&connected.model.id);
        }
        connected.adapter.serve_as(&plan.settings.model);
        let (adapter, follower) = connected.into_parts();
        let listener = TcpListener::from_std(self.socket.try_clone()?)?;
        let (instance, own) = (shutdown.child(), channel_to(listener.local_addr()?, &self.network));
        let registered = self.registration.as_ref().map(|registration| registration.register(own, metrics));
        let running =
            plan.run(Listener::new(Arrivals::Tcp(listener), self.network.clone()), adapter, metrics.clone(), instance.clone());
        let following = async {
            let ended = follower.await;
            tracing::warn!(engine = self.engine.url(), reason = %ended, "the engine has ended; the worker waits for it");
            std::future::pending::<()>().await
        };
        let ended = tokio::select! {
            biased;
            () = following => unreachable!("the future that reads the events never ends"),
            ended = running => ended,
        };
        if let Some(registered) = registered {
            registered.run(Duration::ZERO).await;
        }
        instance.run(Duration::ZERO).await;
        ended
    }
}

/// The `Control` service of a worker whose server cannot be used. It refuses all calls with the text as the reason.
#[derive(Clone)]
struct UnavailableControl(Arc<Mutex<String>>);

impl UnavailableControl {
    fn refuse<T>(&self) -> Result<Response<T>, Status> {
        Err(Status::unavailable(self.0.lock().clone()))
    }
}

#[tonic::async_trait]
impl Control for UnavailableControl {
    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        self.refuse()
    }

    type WatchStream = Replies<WatchReply>;

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        self.refuse()
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        self.refuse()
    }

    type SnapshotStream = Replies<SnapshotChunk>;

    async fn snapshot(&self, _: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        self.refuse()
    }
}

impl Registration {
    /// Registers the instance that is reached through the channel `own`, until the process or the returned shutdown drains.
    fn register(&self, own: Channel, metrics: &Metrics) -> Shutdown {
        let (registered, etcd, address, metrics) =
            (self.shutdown.child(), self.etcd.clone(), self.address.clone(), metrics.clone());
        let until = registered.clone();
        self.shutdown.spawn(async move {
            tokio::select! {
                () = until.draining() => {}
                info = description(own) => {
                    let register = || discovery::register(etcd.clone(), MemberRecord::of_worker(&info, address.clone()), &metrics, &until);
                    // Without its registration, a router that starts later would never find the worker.
                    while AssertUnwindSafe(register()).catch_unwind().await.is_err() {
                        tracing::error!("the registration in etcd failed, and begins again");
                        sleep(PAUSES.0).await;
                    }
                }
            }
        });
        registered
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(root: &str, url: &str, is_trusted: bool) -> Result<String, String> {
        let model = ModelDescription { id: "m".to_owned(), root: Some(root.to_owned()), context_length: 1 };
        let server = ServerDescription { model, loras: Vec::new(), ranks: Vec::new() };
        source(&server, url, is_trusted).map(|source| source.to_string()).map_err(|error| error.to_string())
    }

    #[test]
    fn engine_on_this_machine_chooses_the_tokenizer() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().to_str().expect("the path is text");
        for url in ["http://127.0.0.1:8001", "http://localhost:8001/v", "https://[::1]:1", "http://127.9.9.9"] {
            assert_eq!(chosen(path, url, false).as_deref(), Ok(path));
            assert_eq!(chosen("Qwen/Qwen3-8B", url, false).as_deref(), Ok("hf:Qwen/Qwen3-8B"));
        }
    }

    #[test]
    fn engine_on_another_machine_chooses_a_repository_only_if_trusted_and_never_a_path() {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let path = folder.path().to_str().expect("the path is text");
        for url in ["http://10.0.0.11:8001", "https://engine", "http://localhost.evil.example", "http://127.0.0.1@evil.example"] {
            let refused = chosen("evil/m", url, false).expect_err("the engine is not trusted");
            assert!(
                refused.contains("hf:evil/m")
                    && refused.contains("--model hf:evil/m")
                    && refused.contains("--trust-engine-model"),
                "{refused}"
            );
            assert_eq!(chosen("evil/m", url, true).as_deref(), Ok("hf:evil/m"));
            for is_trusted in [false, true] {
                let refused = chosen(path, url, is_trusted).expect_err("the engine names a path");
                assert!(refused.contains("set --model"), "{refused}");
            }
        }
    }

    #[test]
    fn restarted_server_must_have_the_announced_model_with_at_least_its_context() {
        let model = |id: &str, root: &str, context_length| ModelDescription {
            id: id.to_owned(),
            root: Some(root.to_owned()),
            context_length,
        };
        let announced = |name_is_declared| Announced { model: model("m", "/m", 4_096), name_is_declared, context_length: 2_048 };
        for (now, problem) in [
            (model("m", "/m", 4_096), None),
            (model("m", "/m", 2_048), None),
            (model("m", "/m", 256), Some("a context of 256 tokens, but 2048 are announced")),
            (model("o", "/m", 4_096), Some("the model o (loaded from /m), not m (loaded from /m)")),
            (model("m", "/o", 4_096), Some("the model m (loaded from /o), not m (loaded from /m)")),
        ] {
            let found = announced(false).difference(&now);
            assert_eq!(found.is_some(), problem.is_some(), "{found:?}");
            assert!(found.unwrap_or_default().contains(problem.unwrap_or_default()), "{problem:?}");
        }
        assert_eq!(announced(true).difference(&model("o", "/o", 4_096)), None, "the operator has declared the name");
        assert!(announced(true).difference(&model("o", "/o", 256)).is_some(), "a longer context is announced to clients");
    }

    #[test]
    fn instances_that_end_soon_are_followed_by_longer_pauses() {
        let mut backoff = Backoff::new(PAUSES.0, PAUSES.1);
        let soon = SETTLED - Duration::from_millis(1);
        for least in [1, 2, 4, 8] {
            assert!(pause_after(soon, &mut backoff) >= Duration::from_secs(least));
        }
        assert_eq!(pause_after(SETTLED, &mut backoff), Duration::ZERO);
        assert!(pause_after(soon, &mut backoff) <= 2 * PAUSES.0, "the pauses begin again");
    }
}
