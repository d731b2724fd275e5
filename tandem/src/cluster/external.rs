//! Workers whose engine is a server in another process. The worker's process outlives the server: each connection to a server is a new
//! instance of the worker, at the same address.

use super::{
    EngineConfig, StartError,
    parts::{Parts, WorkerPlan, channel_to, description},
};
use crate::{
    model::Source,
    settings::{EngineKind, EngineLimits},
};
use std::{
    fs, io, net,
    path::{Path, PathBuf},
    time::Duration,
};
use tandem_adapter::{ConnectError, Connected, ServerDescription, ServerSettings};
use tandem_decode_worker::DecodeWorkerError;
use tandem_node::{
    Backoff, Metrics, Shutdown,
    discovery::{self, EtcdSettings, MemberRecord},
    retry::error_chain,
};
use tandem_proto::{
    ClusterKey,
    channel::{Channel, Listener},
};
use tandem_worker::WorkerError;
use tokio::{net::TcpListener, time::sleep};

/// The first and the longest pause between attempts to connect again to a server that could not be used.
const PAUSES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));

/// Why a worker with an external engine has ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum ExternalError {
    #[error("the engine cannot be used")]
    Connect(#[from] ConnectError),
    #[error("the socket cannot be used")]
    Socket(#[from] io::Error),
    #[error(transparent)]
    Worker(#[from] DecodeWorkerError),
}

/// A worker with an external engine.
pub(super) struct ExternalWorker {
    pub(super) plan: WorkerPlan,
    pub(super) engine: ServerSettings,
    /// The socket on which the instances of the worker listen, one instance after the other.
    pub(super) socket: net::TcpListener,
    pub(super) key: ClusterKey,
    pub(super) registration: Option<Registration>,
}

/// The settings with which the instances of a worker register.
pub(super) struct Registration {
    pub(super) etcd: EtcdSettings,
    /// `host:port` at which other processes reach the worker.
    pub(super) address: String,
    /// The shutdown that ends the registrations of all instances when it drains.
    pub(super) shutdown: Shutdown,
}

impl Parts {
    /// Starts a worker with an engine in another process.
    pub(super) fn external_worker(
        &self,
        plan: WorkerPlan,
        socket: TcpListener,
        engine: ServerSettings,
        registration: Option<Registration>,
        shutdown: &Shutdown,
    ) -> Result<(), StartError> {
        let socket = socket.into_std().map_err(StartError::LocalAddress)?;
        let (id, metrics, stop) = (plan.id(), self.metrics.clone(), shutdown.clone());
        let worker = ExternalWorker { plan, engine, socket, key: self.key.clone(), registration };
        self.spawn(&id, shutdown, worker.run(metrics, stop));
        Ok(())
    }
}

impl EngineConfig {
    /// Returns the settings with which a worker uses the server at `url`.
    pub(super) fn server(&self, url: &str, key: &ClusterKey) -> Result<ServerSettings, StartError> {
        let external = &self.worker.external;
        let read = |path: &PathBuf| fs::read(path).map_err(|source| StartError::EngineCa { path: path.clone(), source });
        let ca = external.engine_ca.as_ref().map(read).transpose()?;
        let limits = EngineLimits {
            block_size: self.block_size,
            running_max: self.worker.batch_max,
            waiting_max: self.model.max_concurrent_requests,
            prefix_caching: !self.worker.no_prefix_caching,
        };
        Ok(match self.model.engine {
            EngineKind::LlamaCpp => ServerSettings::LlamaCpp(external.llama_cpp(url, ca, key.hash_key(), &limits)),
            _ => ServerSettings::Vllm(external.vllm(url, ca, key.hash_key(), &limits)),
        })
    }
}

/// Waits until the server answers. Returns the settings of a worker for each of the server's data-parallel ranks, each with the number of
/// tokens that fit into the rank's KV memory, and the server's description.
pub(super) async fn inspect(engine: ServerSettings) -> Result<(Vec<(ServerSettings, u64)>, ServerDescription), StartError> {
    let described = engine.inspect().await;
    let server =
        described.map_err(|source| StartError::ExternalEngine { url: engine.url().to_owned(), source: source.into() })?;
    // Requests to a server with a single rank name no rank, unless the settings do.
    let only = server.ranks.len() == 1;
    let of_rank = |&(rank, tokens): &(u32, u64)| {
        let engine = if only { engine.clone() } else { engine.clone().with_rank(rank) };
        (engine, tokens)
    };
    Ok((server.ranks.iter().map(of_rank).collect(), server))
}

/// Returns where the tokenizer of the server's model can be loaded: from the directory or the repository from which the server loaded the
/// model.
pub(super) fn source(server: &ServerDescription) -> Option<Source> {
    let root = server.root.as_deref().unwrap_or(&server.model);
    if Path::new(root).exists() {
        return Some(Source::Path(root.into()));
    }
    format!("hf:{root}").parse().ok()
}

impl ExternalWorker {
    /// Runs an instance of the worker for each connection to its server, until the process drains.
    pub(super) async fn run(self, metrics: Metrics, shutdown: Shutdown) -> Result<(), ExternalError> {
        let (url, mut backoff) = (self.engine.url(), Backoff::new(PAUSES.0, PAUSES.1));
        let mut has_connected = false;
        loop {
            let connected = tokio::select! {
                biased;
                () = shutdown.draining() => return Ok(()),
                connected = self.engine.clone().connect() => connected,
            };
            let connected = match connected {
                Ok(connected) => connected,
                // An error at the first connection ends the worker, so that the operator sees it: the settings are wrong, or the server is
                // of another kind.
                Err(error) if !has_connected => return Err(error.into()),
                Err(error) => {
                    let error = error_chain(&error);
                    if backoff.is_new_error(&error) {
                        tracing::warn!(engine = %url, %error, "the restarted engine cannot be used; trying again");
                    }
                    sleep(backoff.next_delay()).await;
                    continue;
                }
            };
            has_connected = true;
            backoff.reset();
            match self.run_instance(connected, &metrics, &shutdown).await {
                Err(DecodeWorkerError::Worker(WorkerError::EngineEnded)) if !shutdown.is_draining() => {}
                ended => return Ok(ended?),
            }
        }
    }

    async fn run_instance(&self, connected: Connected, metrics: &Metrics, shutdown: &Shutdown) -> Result<(), DecodeWorkerError> {
        let mut plan = self.plan.clone();
        if plan.settings.model.is_empty() {
            plan.settings.model.clone_from(&connected.model);
        }
        let (adapter, follower) = connected.into_parts();
        let listener = TcpListener::from_std(self.socket.try_clone()?)?;
        let (instance, own) = (shutdown.child(), channel_to(listener.local_addr()?, &self.key));
        let registered = self.registration.as_ref().map(|registration| registration.register(own, metrics));
        let running = plan.run(Listener::tcp(listener, self.key.clone()), adapter, metrics.clone(), instance.clone());
        let following = async {
            let ended = follower.await;
            tracing::warn!(engine = self.engine.url(), reason = %ended, "the engine has ended; the worker waits for it");
            std::future::pending::<()>().await
        };
        let ended = tokio::select! {
            biased;
            () = following => unreachable!("it is pending for ever"),
            ended = running => ended,
        };
        if let Some(registered) = registered {
            registered.run(Duration::ZERO).await;
        }
        instance.run(Duration::ZERO).await;
        ended
    }
}

impl Registration {
    /// Registers the instance to which the channel `own` leads, until the process or the returned shutdown drains.
    fn register(&self, own: Channel, metrics: &Metrics) -> Shutdown {
        let (registered, etcd, address, metrics) =
            (self.shutdown.child(), self.etcd.clone(), self.address.clone(), metrics.clone());
        let until = registered.clone();
        self.shutdown.spawn(async move {
            tokio::select! {
                () = until.draining() => {}
                info = description(own) => discovery::register(etcd, MemberRecord::of_worker(&info, address), &metrics, &until).await,
            }
        });
        registered
    }
}
