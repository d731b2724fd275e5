//! Starts the parts of a cluster (the frontend, the router and the workers) as tasks, and reports the first part that ends.

use super::{EngineConfig, StartError, reachable};
use crate::settings::{
    ClusterTlsArgs, CommonArgs, EngineKind, FrontendArgs, KvTransfer, PickerArgs, RouterArgs, TelemetryArgs, WorkerArgs,
};
use futures::FutureExt;
use std::{convert::Infallible, fs, future::Future, net::SocketAddr, os::fd::AsFd, path::Path, sync::Arc, time::Duration};
use tandem_decode_worker::{DecodeWorkerError, DecodeWorkerSettings};
use tandem_engine::EngineHandle;
use tandem_frontend::{ApiKeys, FrontendError, FrontendSettings, Passthrough, ServerCertificate, StartingAnswers};
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_process::{
    Metrics, Shutdown,
    discovery::MemberSource,
    events::Broker,
    line_file::LineFile,
    listen::Hosts,
    new_instance_id,
    trace::{TraceSettings, Tracer},
};
use tandem_proto::{
    ClusterKey,
    channel::{self, Arrivals, Channel, Listener, Network, PeerRole},
    v1::{DescribeRequest, Identity, WorkerInfo, control_client::ControlClient, worker_info::Role},
};
use tandem_router::{RouterError, RouterSettings, ServiceLevels};
use tandem_transfer::TransferMode;
use tandem_worker::{Backend, Ledger, WorkerSettings};
use tokio::{
    net::TcpListener,
    sync::{Notify, mpsc},
    task::JoinSet,
    time::sleep,
};

/// Time limit of the wait for a first token. Clients and their proxies stop waiting within this time. A prefilled prompt waits equally long for a
/// slot on its decode worker, because another prefill would not free one.
const FIRST_TOKEN_WAIT: Duration = Duration::from_secs(60);

/// The pause between attempts to read the worker's own description, which is available once its engine runs.
const DESCRIBE_PAUSE: Duration = Duration::from_millis(50);

/// Time limit for sending the buffered traces. A collector that does not respond must not delay the end of a process.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

/// Starts the parts of this process, and reports when one of them ends. `up` starts all parts of a cluster, and a process of a role starts one.
pub(super) struct ClusterParts {
    cluster: String,
    pub(super) key: ClusterKey,
    /// The network on which the parts listen and connect.
    pub(super) network: Network,
    block_size: u32,
    ledger: Ledger,
    /// The opened files of the frontend, until the frontend takes them.
    access: AccessFiles,
    tracer: Tracer,
    /// The connection to NATS, over which workers publish KV events and the router receives them; `None` in `up`.
    pub(super) broker: Option<Broker>,
    /// Makes the process drain and end; `None`: a worker must not make it do so, because it has other parts, or callers are not checked.
    pub(super) drain: Option<Arc<Notify>>,
    pub(super) metrics: Metrics,
    ends: mpsc::Receiver<StartError>,
    reports: mpsc::Sender<StartError>,
    /// The background tasks that maintain metrics and traces.
    upkeep: JoinSet<()>,
}

/// The opened files of a frontend: TLS certificate, API keys and audit log; and the servers to which it passes requests through.
#[derive(Default)]
struct AccessFiles {
    tls: Option<ServerCertificate>,
    keys: Option<ApiKeys>,
    audit_log: Option<LineFile>,
    passthrough: Passthrough,
}

/// Reads the file with a CA certificate that `flag` names.
pub(super) fn read_ca(path: &Path, flag: &'static str) -> Result<Vec<u8>, StartError> {
    fs::read(path).map_err(|source| StartError::Ca { path: path.to_owned(), flag, source })
}

/// Reports on drop that a part has ended. The part's task owns this value, so it is dropped when the task returns, panics or is dropped.
struct PartReport {
    part: String,
    error: Option<Box<dyn std::error::Error + Send + Sync>>,
    reports: mpsc::Sender<StartError>,
}

impl ClusterParts {
    /// Prepares to start parts of the cluster with this name and key. `service` names the process in traces.
    pub(super) fn new(service: &'static str, cluster: &str, key: ClusterKey, settings: &CommonArgs) -> Result<Self, StartError> {
        let metrics = Metrics::default();
        // The first part that ends stops the process, so later reports are not needed.
        let (reports, ends) = mpsc::channel(1);
        let upkeep = metrics.clone().upkeep();
        let TelemetryArgs { otlp_endpoint, trace_sample_ratio: sample_ratio, .. } = settings.telemetry.clone();
        let (tracer, sending) = match otlp_endpoint {
            Some(endpoint) => {
                let instance = new_instance_id();
                let (tracer, sending) = Tracer::new(TraceSettings { endpoint, sample_ratio, service, instance }, &metrics)?;
                (tracer, Some(sending))
            }
            None => (Tracer::default(), None),
        };
        let mut parts = Self {
            cluster: cluster.to_owned(),
            network: Network::tcp(key.clone()),
            key,
            block_size: settings.block_size,
            ledger: Ledger::default(),
            access: AccessFiles::default(),
            tracer,
            broker: None,
            drain: None,
            metrics,
            ends,
            reports,
            upkeep: JoinSet::new(),
        };
        parts.keep("metrics upkeep", upkeep);
        if let Some(sending) = sending {
            parts.keep("trace export", sending);
        }
        Ok(parts)
    }

    /// Starts a task that runs as long as the process. If the task ends earlier, the process ends.
    fn keep(&mut self, name: &str, task: impl Future<Output = ()> + Send + 'static) {
        let reporting = self.reporting(name, task.map(Ok::<(), Infallible>));
        self.upkeep.spawn(reporting);
    }

    /// Returns whether calls need the cluster's key or a certificate.
    pub(super) fn checks_callers(&self) -> bool {
        self.network.checks_callers()
    }

    /// Opens the certificate of this process, for the parts that are started after this call. It is read again when its files change.
    pub(super) fn open_cluster_tls(&mut self, settings: &ClusterTlsArgs, role: PeerRole) -> Result<(), StartError> {
        if let Some((tls, files)) = settings.open(role, Some(&self.cluster))? {
            let follow = files.follow(tls.clone(), self.metrics.clone());
            self.keep("watch of the cluster certificate", async move { match follow.await {} });
            self.network = self.network.clone().with_tls(Some(tls));
        }
        Ok(())
    }

    /// Opens the ledger for the workers that are started after this call.
    pub(super) fn open_ledger(&mut self, settings: &WorkerArgs) -> Result<(), StartError> {
        if let Some(path) = &settings.ledger {
            self.ledger = Ledger::open(path).map_err(|source| StartError::Ledger { path: path.clone(), source })?;
        }
        Ok(())
    }

    /// Opens the TLS certificate, the file with the API keys, the audit log and the certificates of other servers for the frontend that is
    /// started after this call.
    pub(super) fn open_access_files(&mut self, settings: &FrontendArgs, picker: Option<PickerArgs>) -> Result<(), StartError> {
        let FrontendArgs { passthrough, tenants: settings, .. } = settings;
        let ca = passthrough.passthrough_ca.as_ref().map(|path| read_ca(path, "--passthrough-ca")).transpose()?;
        let key = passthrough.passthrough_key_file.clone();
        self.access.passthrough = Passthrough::new(passthrough.servers(), key, ca.as_deref(), &self.metrics)?;
        self.access.tls = match settings.tls_cert.clone().zip(settings.tls_key.clone()) {
            Some((certificate, key)) => Some(ServerCertificate::open(certificate, key)?),
            None => picker.is_some_and(|picker| picker.tls_self_signed).then(ServerCertificate::self_signed),
        };
        self.access.keys = settings.api_keys_file.clone().map(ApiKeys::open).transpose()?;
        if let Some(path) = &settings.audit_log {
            let opened = LineFile::open_rotated(path, "audit log", settings.audit_log_max_bytes);
            self.access.audit_log = Some(opened.map_err(|source| StartError::AuditLog { path: path.clone(), source })?);
        }
        Ok(())
    }

    /// Answers requests on the frontend's sockets while the frontend starts, until the returned values are ended. Must be called after the
    /// frontend's files are opened. `listener` is that of the API; `None` for a picker: gateways speak gRPC, and wait.
    pub(super) fn starting(
        &self,
        listener: Option<&TcpListener>,
        admin: Option<&TcpListener>,
        hosts: &Hosts,
        process: &Shutdown,
    ) -> Result<Vec<StartingAnswers>, StartError> {
        let tls = self.access.tls.as_ref().map(ServerCertificate::acceptor);
        let sockets = listener.map(|listener| (listener, tls)).into_iter().chain(admin.map(|admin| (admin, None)));
        let begin = |(socket, tls): (&TcpListener, _)| {
            let copy = socket.as_fd().try_clone_to_owned().and_then(|copy| TcpListener::from_std(copy.into()));
            let copy = copy.map_err(StartError::LocalAddress)?;
            Ok(StartingAnswers::begin(copy, tls, hosts.clone(), &self.metrics, process))
        };
        sockets.map(begin).collect()
    }

    pub(super) async fn flush(&self) {
        self.tracer.flush(FLUSH_WAIT).await;
    }

    /// Resolves when the first part ends, and returns the error that names it. This method is cancel-safe.
    pub(super) async fn ended(&mut self) -> StartError {
        self.ends.recv().await.expect("`self` keeps a sender")
    }

    /// Returns a connection to a part of this process, authenticated with the cluster key. Must be called within a tokio runtime.
    pub(super) fn channel(&self, listens: SocketAddr) -> Channel {
        channel_to(listens, &self.network)
    }

    fn listener(&self, socket: TcpListener) -> Listener {
        Listener::new(Arrivals::Tcp(socket), self.network.clone())
    }

    pub(super) fn worker(&self, plan: WorkerPlan, listener: TcpListener, engine: EngineHandle, shutdown: &Shutdown) {
        let (id, metrics, stop, listener) = (plan.id(), self.metrics.clone(), shutdown.child(), self.listener(listener));
        self.spawn(&id, shutdown, plan.run(listener, engine, metrics, stop));
    }

    /// Returns the resources and settings of a worker, except its engine and its socket. `advertise` is the host:port at which other workers reach
    /// it, if it differs from the socket's address.
    pub(super) fn plan(
        &self,
        (id, role): (&str, Role),
        advertise: Option<String>,
        config: &EngineConfig,
        (model, revision): (&str, &str),
    ) -> WorkerPlan {
        let settings = WorkerSettings {
            worker_id: id.to_owned(),
            cluster: self.cluster.clone(),
            model: model.to_owned(),
            revision: revision.to_owned(),
            ledger: self.ledger.clone(),
            broker: self.broker.clone(),
            tracer: self.tracer.clone(),
            drain: self.drain.clone(),
            withhold_cached_tokens: config.worker.withhold_cached_tokens,
        };
        let transfer_mode = match (config.worker.kv_transfer, config.model.engine) {
            (_, EngineKind::Sim) => TransferMode::Simulated { block: config.sim().block_transfer() },
            (KvTransfer::Auto, _) => TransferMode::Auto,
            (KvTransfer::Tcp, _) => TransferMode::Tcp,
        };
        // This limit equals the frontend's, because all requests that a frontend admits may be placed on one worker.
        let remote_waiting_max = config.model.max_concurrent_requests as usize;
        WorkerPlan { role, settings, advertise, remote_waiting_max, transfer_mode }
    }

    pub(super) fn router(
        &self,
        listener: TcpListener,
        (workers, peers): (MemberSource, MemberSource),
        model: Option<&str>,
        (args, levels): (&RouterArgs, ServiceLevels),
        shutdown: &Shutdown,
    ) {
        let settings = RouterSettings {
            workers: workers.with_key(self.key.clone()),
            broker: self.broker.clone(),
            tracer: self.tracer.clone(),
            peers: peers.with_key(self.key.clone()),
            identity: Identity {
                cluster: self.cluster.clone(),
                model: model.unwrap_or_default().to_owned(),
                block_size: self.block_size,
                ..RouterSettings::default().identity
            },
            policy: args.policy,
            prefill: args.prefill,
            levels,
            ..Default::default()
        };
        let listener = self.listener(listener);
        self.spawn("router", shutdown, tandem_router::run(listener, settings, self.metrics.clone(), shutdown.clone()));
    }

    /// Starts a frontend with these settings. The process adds its key, its files and its cluster.
    ///
    /// # Errors
    /// A served model is also passed through.
    pub(super) fn frontend(
        &mut self,
        listener: TcpListener,
        settings: FrontendSettings,
        shutdown: &Shutdown,
    ) -> Result<(), StartError> {
        let access = std::mem::take(&mut self.access);
        if let Some(id) = access.passthrough.ids().find(|id| settings.models.iter().any(|model| model.id == **id)) {
            return Err(StartError::PassthroughServed(id.clone()));
        }
        let settings = FrontendSettings {
            routers: settings.routers.with_key(self.key.clone()),
            tls: access.tls,
            api_keys: access.keys,
            audit_log: access.audit_log,
            passthrough: access.passthrough,
            block_size: self.block_size,
            cluster: self.cluster.clone(),
            tracer: self.tracer.clone(),
            first_token_timeout: FIRST_TOKEN_WAIT,
            ..settings
        };
        let (listener, metrics, stop) = (self.listener(listener), self.metrics.clone(), shutdown.clone());
        match settings.alternatives {
            None => self.spawn("frontend", shutdown, tandem_frontend::run(listener, settings, metrics, stop)),
            Some(_) => self.spawn("endpoint picker", shutdown, tandem_frontend::run_picker(listener, settings, metrics, stop)),
        }
        Ok(())
    }

    /// Starts a part that runs until the shutdown. If the part ends earlier, the process ends.
    pub(super) fn spawn<E>(&self, part: &str, shutdown: &Shutdown, run: impl Future<Output = Result<(), E>> + Send + 'static)
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        // After a shutdown has begun, a part ends by itself once its clients have been answered.
        shutdown.track(self.reporting(part, run));
    }

    /// Returns the task of a part. Its end ends the process, unless the process drains.
    pub(super) fn reporting<E, F>(&self, part: &str, run: F) -> impl Future<Output = ()> + Send + 'static + use<E, F>
    where
        E: std::error::Error + Send + Sync + 'static,
        F: Future<Output = Result<(), E>> + Send + 'static,
    {
        PartReport { part: part.to_owned(), error: None, reports: self.reports.clone() }.after(run)
    }
}

/// The resources and settings of a worker, except its engine and its socket.
#[derive(Clone)]
pub(super) struct WorkerPlan {
    role: Role,
    pub(super) settings: WorkerSettings,
    /// The address, `host:port`, at which other workers reach this one, if it differs from the socket's address.
    advertise: Option<String>,
    remote_waiting_max: usize,
    transfer_mode: TransferMode,
}

impl WorkerPlan {
    pub(super) fn id(&self) -> String {
        self.settings.worker_id.clone()
    }

    pub(super) async fn run(
        self,
        listener: Listener,
        engine: impl Backend,
        metrics: Metrics,
        shutdown: Shutdown,
    ) -> Result<(), DecodeWorkerError> {
        let Self { role, settings: worker, advertise, remote_waiting_max, transfer_mode } = self;
        match role {
            Role::Prefill | Role::Unspecified => {
                let settings = PrefillWorkerSettings { worker, ticket_wait: FIRST_TOKEN_WAIT, transfer_mode };
                Ok(tandem_prefill_worker::run(listener, engine, settings, metrics, shutdown).await?)
            }
            Role::Decode => {
                let receive_timeout = FIRST_TOKEN_WAIT;
                let settings = DecodeWorkerSettings { worker, advertise, remote_waiting_max, receive_timeout, transfer_mode };
                tandem_decode_worker::run(listener, engine, settings, metrics, shutdown).await
            }
        }
    }
}

/// Reads the description of this process's worker, and retries until it succeeds.
pub(super) async fn description(own: Channel) -> WorkerInfo {
    let mut control = ControlClient::new(own);
    loop {
        if let Ok(info) = control.describe(DescribeRequest::default()).await {
            return info.into_inner();
        }
        sleep(DESCRIBE_PAUSE).await;
    }
}

/// Returns a connection to the process that listens on `listens`, authenticated with the cluster key. Must be called within a tokio runtime.
pub(super) fn channel_to(listens: SocketAddr, network: &Network) -> Channel {
    let endpoint = channel::endpoint(&reachable(listens).to_string()).expect("an address and a port are an endpoint");
    network.expecting(&PeerRole::ALL).connect_lazy(&endpoint)
}

impl PartReport {
    async fn after<E>(mut self, run: impl Future<Output = Result<(), E>>)
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        self.error = run.await.err().map(Into::into);
    }
}

/// Whether the part could not use the list of its members, which is a mistake in its settings.
fn concerns_members(error: &(dyn std::error::Error + Send + Sync + 'static)) -> bool {
    matches!(error.downcast_ref(), Some(RouterError::Workers(_)))
        || matches!(error.downcast_ref(), Some(FrontendError::Routers(_)))
}

impl Drop for PartReport {
    fn drop(&mut self) {
        let part = std::mem::take(&mut self.part);
        let end = match self.error.take() {
            Some(source) if concerns_members(&*source) => StartError::Members { part, source },
            Some(source) => StartError::Part { part, source },
            None => StartError::PartEnded(part),
        };
        // Sending fails if the end of another part is already reported, or if the cluster was dropped, which ends all parts.
        let _ = self.reports.try_send(end);
    }
}
