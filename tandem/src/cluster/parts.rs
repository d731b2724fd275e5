//! The parts of a cluster as tasks, and the news that one has ended.

use super::{Loaded, Role, StartError, Worker, weights::sim_settings};
use crate::settings::{EngineKind, KvTransfer, PolicyName, PrefillPlace, TelemetryFlags, UpSettings};
use std::{future::Future, time::Duration};
use tandem_decode_worker::DecodeWorkerSettings;
use tandem_frontend::{FrontendSettings, ServedModel};
use tandem_node::{
    Metrics, Shutdown,
    discovery::Workers,
    events::Broker,
    new_instance_id,
    trace::{TraceSettings, Tracer},
};
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_proto::{ClusterKey, channel::Listener, v1::Identity};
use tandem_router::{PolicyKind, RouterSettings};
use tandem_transfer::TransferMode;
use tandem_worker::{Ledger, WorkerSettings};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};

/// A decode worker that has heard `Scheduled` answers at once; what it waits for is blocks that others give back.
const TICKET_WAIT: Duration = Duration::from_secs(10);
/// A client that has seen nothing for so long has given up, or its proxy has.
const FIRST_TOKEN_WAIT: Duration = Duration::from_secs(60);

/// A collector that takes nothing must not hold up the end of a process.
const FLUSH_WAIT: Duration = Duration::from_secs(1);

/// Starts parts and hears of their ends: all of them in `up`, one in a process of its own.
pub(super) struct Parts {
    cluster: String,
    /// Of the cluster.
    pub(super) key: ClusterKey,
    /// Of all workers.
    ledger: Ledger,
    tracer: Tracer,
    /// Where workers publish KV events and the router hears them; not in `up`.
    pub(super) broker: Option<Broker>,
    ends: mpsc::UnboundedReceiver<StartError>,
    reports: mpsc::UnboundedSender<StartError>,
    /// What metrics and traces need for as long as there are parts.
    _upkeep: JoinSet<()>,
}

/// Tells the end of a part however it comes: its task returns, panics or is dropped.
struct Report {
    part: String,
    cause: Option<Box<dyn std::error::Error + Send + Sync>>,
    reports: mpsc::UnboundedSender<StartError>,
}

impl Parts {
    /// Parts of the cluster of this name and key, whose workers share a ledger; they are to count in these metrics, and traces are to know
    /// the process as this `service`.
    pub(super) fn new(
        service: &'static str,
        cluster: &str,
        key: ClusterKey,
        settings: &UpSettings,
        metrics: &Metrics,
    ) -> Result<Self, StartError> {
        let ledger = match &settings.ledger {
            Some(path) => Ledger::open(path).map_err(|cause| StartError::Ledger { path: path.clone(), cause })?,
            None => Ledger::default(),
        };
        let (reports, ends) = mpsc::unbounded_channel();
        let mut upkeep = JoinSet::new();
        upkeep.spawn(metrics.clone().upkeep());
        let TelemetryFlags { otlp_endpoint, trace_sample_ratio: sample_ratio, .. } = settings.telemetry.clone();
        let tracer = match otlp_endpoint {
            Some(endpoint) => {
                let instance = new_instance_id();
                let (tracer, sending) = Tracer::new(TraceSettings { endpoint, sample_ratio, service, instance }, metrics)?;
                upkeep.spawn(sending);
                tracer
            }
            None => Tracer::default(),
        };
        Ok(Self { cluster: cluster.to_owned(), key, ledger, tracer, broker: None, ends, reports, _upkeep: upkeep })
    }

    /// Everything has ended: what it has told goes out.
    pub(super) async fn flush(&self) {
        self.tracer.flush(FLUSH_WAIT).await;
    }

    /// The end of the first part that has ended.
    pub(super) async fn ended(&mut self) -> StartError {
        self.ends.recv().await.expect("this value holds a sender")
    }

    /// Wraps the socket so that its calls are checked with the cluster key.
    fn listener(&self, socket: TcpListener) -> Listener {
        Listener::tcp(socket, self.key.clone())
    }

    pub(super) fn worker(
        &self,
        worker: &Worker,
        listener: TcpListener,
        settings: &UpSettings,
        loaded: &Loaded,
        metrics: &Metrics,
        shutdown: &Shutdown,
    ) {
        let shared = WorkerSettings {
            worker_id: worker.id.clone(),
            cluster: self.cluster.clone(),
            model: loaded.served.id().to_owned(),
            revision: loaded.revision.clone(),
            ledger: self.ledger.clone(),
            broker: self.broker.clone(),
            tracer: self.tracer.clone(),
            withhold_cached_tokens: !settings.report_cached_tokens,
        };
        let engine = worker.engine.clone();
        let transfer_mode = match (settings.kv_transfer, settings.engine) {
            (_, EngineKind::Sim) => TransferMode::Simulated { block: sim_settings(settings).block_transfer() },
            (KvTransfer::Auto, _) => TransferMode::Auto,
            (KvTransfer::Tcp, _) => TransferMode::Tcp,
        };
        let (metrics, stop, listener) = (metrics.clone(), shutdown.clone(), self.listener(listener));
        match worker.role {
            Role::Prefill => {
                let settings = PrefillWorkerSettings { worker: shared, ticket_wait: TICKET_WAIT, transfer_mode };
                self.spawn(&worker.id, shutdown, tandem_prefill_worker::run(listener, engine, settings, metrics, stop));
            }
            Role::Decode => {
                let settings = DecodeWorkerSettings {
                    worker: shared,
                    advertise: worker.advertise.clone(),
                    // The frontend's limit is the cluster's: all that it lets in may meet at one worker.
                    remote_waiting_max: settings.limits.max_concurrent_requests as usize,
                    receive_timeout: FIRST_TOKEN_WAIT,
                    transfer_mode,
                };
                self.spawn(&worker.id, shutdown, tandem_decode_worker::run(listener, engine, settings, metrics, stop));
            }
        }
    }

    pub(super) fn router(
        &self,
        listener: TcpListener,
        (workers, peers): (Workers, Workers),
        model: Option<&str>,
        settings: &UpSettings,
        metrics: &Metrics,
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
                block_size: settings.block_size,
                ..RouterSettings::default().identity
            },
            policy: match settings.policy {
                PolicyName::KvAware => PolicyKind::KvAware,
                PolicyName::LeastLoaded => PolicyKind::LeastLoaded,
                PolicyName::RoundRobin => PolicyKind::RoundRobin,
                PolicyName::Random => PolicyKind::Random,
            },
            prefill: match settings.prefill {
                PrefillPlace::Auto => tandem_router::PrefillPlace::Auto,
                PrefillPlace::Remote => tandem_router::PrefillPlace::Remote,
                PrefillPlace::Local => tandem_router::PrefillPlace::Local,
            },
            ..Default::default()
        };
        self.spawn("router", shutdown, tandem_router::run(self.listener(listener), settings, metrics.clone(), shutdown.clone()));
    }

    pub(super) fn frontend(
        &self,
        (listener, admin): (TcpListener, Option<TcpListener>),
        routers: Workers,
        settings: &UpSettings,
        model: ServedModel,
        metrics: &Metrics,
        shutdown: &Shutdown,
    ) {
        let limits = &settings.limits;
        let settings = FrontendSettings {
            block_size: settings.block_size,
            concurrent_sequences: limits.max_concurrent_requests as usize,
            sequences_per_client: limits.sequences_per_client(),
            body_max_bytes: limits.max_body_bytes,
            bodies_max_bytes: limits.max_bodies_bytes,
            connections_max: limits.max_connections as usize,
            connections_per_address_max: limits.max_connections_per_address as usize,
            allowed_hosts: limits.allowed_hosts.clone(),
            admin,
            first_token_timeout: FIRST_TOKEN_WAIT,
            cluster: self.cluster.clone(),
            resumes: settings.resumes,
            dashboard_requests: settings.dashboard_requests as usize,
            audit_result: settings.audit_result.clone(),
            routers: routers.with_key(self.key.clone()),
            tracer: self.tracer.clone(),
            account_header: settings.tenants.account_header.as_deref().map(|name| name.parse().expect("the flag is checked")),
            cache_isolation: settings.tenants.isolation(),
            trusted_proxies: settings.tenants.trusted_proxies.clone(),
            expose_details: settings.tenants.expose(),
            ..FrontendSettings::new("", model)
        };
        self.spawn(
            "frontend",
            shutdown,
            tandem_frontend::run(self.listener(listener), settings, metrics.clone(), shutdown.clone()),
        );
    }

    /// Starts what runs until the shutdown, and whose end before is the process's.
    pub(super) fn spawn<E>(&self, part: &str, shutdown: &Shutdown, run: impl Future<Output = Result<(), E>> + Send + 'static)
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        let report = Report { part: part.to_owned(), cause: None, reports: self.reports.clone() };
        // Parts end by themselves at the stop, when they have told their clients.
        shutdown.track(report.at_the_end_of(run));
    }
}

impl Report {
    async fn at_the_end_of<E>(mut self, run: impl Future<Output = Result<(), E>>)
    where
        E: std::error::Error + Send + Sync + 'static,
    {
        self.cause = run.await.err().map(Into::into);
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        let part = std::mem::take(&mut self.part);
        let end = match self.cause.take() {
            Some(cause) => StartError::Part { part, cause },
            None => StartError::PartEnded(part),
        };
        // Nobody listens when the cluster is gone: then all parts end.
        let _ = self.reports.send(end);
    }
}
