//! Runs one role in a process of its own. The functions that start it are those of `up`; in addition, the process has an admin endpoint.

use super::{
    ClusterParts, EngineConfig, ServedProcess, StartError,
    access::ApiAccess,
    bind,
    external::Registration,
    kv_tokens, listen, local_address,
    parts::description,
    reachable,
    weights::{DeviceShare, load_extra, load_served, with_parsers},
};
use crate::settings::{CommonArgs, DiscoveryArgs, FrontendProcess, ProcessArgs, RouterProcess, WorkerProcess};
use rustix::process::{Signal, getpid, kill_process};
use std::{convert::Infallible, net::SocketAddr, sync::Arc, time::Duration};
use tandem_frontend::FrontendSettings;
use tandem_process::{
    Metrics, Shutdown, admin,
    discovery::{self, DiscoveryError, EtcdSettings, MemberRecord, MemberSource},
    new_instance_id,
};
use tandem_proto::{
    channel::{Channel, PeerRole},
    v1::{
        DescribeRequest, WorkerInfo, WorkersRequest, control_client::ControlClient, router_client::RouterClient,
        worker_info::Role,
    },
};
use tokio::{net::TcpListener, sync::Notify, time::timeout};

/// A process that does not answer its own readiness probe within this time is not ready.
const PROBE_WAIT: Duration = Duration::from_secs(1);

/// Time limit for deregistering from etcd, so that an unreachable etcd does not delay a shutdown.
const LEAVE_WAIT: Duration = Duration::from_secs(1);

/// A running role. Dropping it stops the role at once.
pub struct Process {
    name: String,
    /// The addresses and sizes that the process prints when it has started, each with its name.
    places: Vec<(&'static str, String)>,
    parts: ClusterParts,
    /// The shutdown of the registration in etcd. It precedes the shutdown of `service`, so that no new client connects to a service that drains.
    registration: Shutdown,
    service: Shutdown,
    /// The shutdown of the admin endpoint. It comes last, because a process that drains is still monitored.
    admin: Shutdown,
}

impl Process {
    /// Starts a frontend. Its routers may start later.
    ///
    /// # Errors
    /// Fails if a socket cannot be bound, if the model cannot be loaded, or if a file of the settings cannot be used.
    pub async fn frontend(settings: FrontendProcess) -> Result<Self, StartError> {
        let is_picker = settings.picker.is_some();
        let service = if is_picker { "tandem-epp" } else { "tandem-frontend" };
        let mut process = Self::new(service, &settings.discovery.cluster, &settings.common)?;
        process.parts.open_cluster_tls(&settings.cluster_tls, PeerRole::Frontend)?;
        process.parts.open_access_files(&settings.frontend, settings.picker)?;
        let shared = settings.restart.reuse_port;
        let bind = || -> Result<_, StartError> {
            let admin = settings.admin_listen.map(|address| bind(address, "--admin-listen", shared)).transpose()?;
            Ok((bind(settings.common.listen, "--listen", shared)?, admin))
        };
        // The port is bound before a model is downloaded, so that a port in use is reported at once. A shared port gets connections as soon
        // as it is bound, so it is bound after the model is loaded.
        let bound = if shared { None } else { Some(bind()?) };
        let hosts = settings.frontend.limits.hosts.hosts();
        let begin = |(listener, admin): &(_, Option<_>)| {
            process.parts.starting((!is_picker).then_some(listener), admin.as_ref(), &hosts, &process.service)
        };
        let starting = bound.as_ref().map(begin).transpose()?;
        let served = load_served(settings.model.clone(), settings.common.served_model_name.clone()).await?;
        let extra = load_extra(&settings.model, &settings.frontend.extra_models).await?;
        let (served, extra) = with_parsers(&settings.frontend.parsers, served, extra)?;
        let ids: Vec<&str> = std::iter::once(&served).chain(&extra).map(|served| served.id.as_str()).collect();
        process.name = format!("{} for {}", if is_picker { "endpoint picker" } else { "frontend" }, ids.join(", "));
        let (listener, admin) = bound.map_or_else(bind, Ok)?;
        let address = local_address(&listener)?;
        let (routers, access) = (settings.routers(), ApiAccess::new(address, &settings.frontend));
        let api = if is_picker {
            ("gateway gRPC", address.to_string())
        } else {
            access.warn_if_open();
            ("OpenAI API", access.url())
        };
        let listed = match &routers {
            MemberSource::List(list) => list.join(", "),
            _ => format!("registered in etcd at {}", settings.discovery.etcd.join(", ")),
        };
        process.places = vec![api, ("routers", listed)];
        if let Some(admin) = &admin {
            process.places.push(("admin", format!("http://{}", reachable(local_address(admin)?))));
        }
        process.register_as(discovery::Role::Frontend, &settings.discovery, address, &served.id, &settings.common)?;
        let mut frontend = settings.frontend.settings(served, &settings.restart, settings.model.max_concurrent_requests);
        frontend.models.extend(extra);
        frontend.alternatives = settings.picker.map(|picker| picker.fallback_endpoints);
        for answers in starting.into_iter().flatten() {
            answers.end().await;
        }
        process.parts.frontend(listener, FrontendSettings { routers, admin, ..frontend }, &process.service)?;
        Ok(process)
    }

    /// Starts a router. Its workers may start later.
    ///
    /// # Errors
    /// Fails if a socket cannot be bound, or if a file of the settings cannot be used.
    pub async fn router(settings: RouterProcess) -> Result<Self, StartError> {
        let (common, discovery) = (&settings.common, &settings.process.discovery);
        let members = (settings.workers(), settings.peers());
        for source in [&members.0, &members.1] {
            let unusable = |source: DiscoveryError| StartError::Members { part: "router".to_owned(), source: source.into() };
            source.check().map_err(unusable)?;
        }
        let mut process = Self::new("tandem-router", &discovery.cluster, common)?;
        process.parts.open_cluster_tls(&settings.process.cluster_tls, PeerRole::Router)?;
        let (listener, address) = process.open(common.listen, &settings.process, can_place).await?;
        process.name = "router".to_owned();
        let model = common.served_model_name.as_deref();
        process.register_as(discovery::Role::Router, discovery, address, model.unwrap_or_default(), common)?;
        let levels = settings.router.levels(settings.itl.slo_itl);
        process.parts.router(listener, members, model, (&settings.router, levels), &process.service);
        Ok(process)
    }

    /// Starts a prefill worker. Routers connect to it.
    ///
    /// # Errors
    /// Fails if the device cannot be used, if a socket cannot be bound, if the model cannot be loaded, or if a file of the settings cannot be used.
    pub async fn prefill_worker(settings: WorkerProcess) -> Result<Self, StartError> {
        Self::worker(Role::Prefill, "tandem-prefill-worker", settings).await
    }

    /// Starts a decode worker. Routers connect to it.
    ///
    /// # Errors
    /// Fails for the same reasons as [`Process::prefill_worker`].
    pub async fn decode_worker(settings: WorkerProcess) -> Result<Self, StartError> {
        Self::worker(Role::Decode, "tandem-decode-worker", settings).await
    }

    async fn worker(role: Role, service: &'static str, settings: WorkerProcess) -> Result<Self, StartError> {
        let config = EngineConfig::new(&settings.common, &settings.model, &settings.worker);
        config.check_device()?;
        let discovery = &settings.process.discovery;
        let mut process = Self::new(service, &discovery.cluster, &settings.common)?;
        let peer = if role == Role::Decode { PeerRole::DecodeWorker } else { PeerRole::PrefillWorker };
        process.parts.open_cluster_tls(&settings.process.cluster_tls, peer)?;
        process.parts.open_ledger(&settings.worker)?;
        // Without a key and certificates, any process that reaches the port could end the worker.
        let is_guarded = process.parts.checks_callers() || settings.common.listen.ip().is_loopback();
        process.parts.drain = is_guarded.then(|| drain_like_sigterm(&process.service));
        let (listener, address) = process.open(settings.common.listen, &settings.process, answers).await?;
        let registration = discovery.registration(address)?;
        let id = settings.worker_id.unwrap_or_else(|| format!("{}-{}-{}", role.name(), host_name(), address.port()));
        let registered = registration.as_ref().map(|(_, address)| address.clone());
        let advertise = registered.or_else(|| discovery.advertise.clone());
        if let Some(server) = settings.model.engine.server() {
            let url = settings.worker.external.engine_url.first().expect("the command line requires --engine-url");
            process.name = format!("{} worker {id}", role.name());
            process.places.push(("engine", format!("{server} at {url}")));
            let registration = registration.map(|(etcd, address)| Registration {
                etcd: EtcdSettings { key: process.parts.key.clone(), ..etcd },
                address,
                shutdown: process.registration.clone(),
            });
            let plan = process.parts.plan(
                (&id, role),
                advertise,
                &config,
                (settings.common.served_model_name.as_deref().unwrap_or_default(), ""),
            );
            let engine = config.server(url, &process.parts.key)?;
            process.parts.external_worker(plan, listener, engine, registration, None, &process.service)?;
            return Ok(process);
        }
        let loaded = config.clone().load().await?;
        let engine = loaded.start(&config, DeviceShare { engines: 1, urgent: false }, &process.parts.key)?;
        process.name = format!("{} worker {id} of {}", role.name(), loaded.served.id);
        process.places.push(("KV", format!("{} tokens", kv_tokens(&engine))));
        let plan = process.parts.plan((&id, role), advertise, &config, (&loaded.served.id, &loaded.served.revision));
        process.parts.worker(plan, listener, engine, &process.service);
        if let Some((etcd, advertised)) = registration {
            let own = process.parts.channel(address);
            process.register(etcd, async move { MemberRecord::of_worker(&description(own).await, advertised) });
        }
        Ok(process)
    }

    fn register_as(
        &self,
        role: discovery::Role,
        discovery: &DiscoveryArgs,
        listens: SocketAddr,
        model: &str,
        common: &CommonArgs,
    ) -> Result<(), StartError> {
        if let Some((etcd, address)) = discovery.registration(listens)? {
            let (version, model) = (env!("CARGO_PKG_VERSION").to_owned(), model.to_owned());
            let (instance_id, block_size) = (new_instance_id(), common.block_size);
            let info = WorkerInfo { instance_id, version, model, block_size, ..Default::default() };
            let record = MemberRecord { role, ..MemberRecord::of_worker(&info, address) };
            self.register(etcd, std::future::ready(record));
        }
        Ok(())
    }

    fn register(&self, etcd: EtcdSettings, record: impl Future<Output = MemberRecord> + Send + 'static) {
        let etcd = EtcdSettings { key: self.parts.key.clone(), ..etcd };
        let (metrics, shutdown) = (self.parts.metrics.clone(), self.registration.clone());
        let registered = async move {
            tokio::select! {
                () = shutdown.draining() => {}
                record = record => discovery::register(etcd, record, &metrics, &shutdown).await,
            }
            Ok::<(), Infallible>(())
        };
        self.registration.spawn(self.parts.reporting("registration in etcd", registered));
    }

    fn new(service: &'static str, cluster: &str, settings: &CommonArgs) -> Result<Self, StartError> {
        let key = settings.key.read()?;
        if !key.is_set() && !settings.listen.ip().is_loopback() {
            tracing::warn!(
                listen = %settings.listen,
                "this cluster has no key: every host that reaches its processes can call them and send them false data; start all of them with the same --cluster-key-file"
            );
        }
        Ok(Self {
            name: String::new(),
            places: Vec::new(),
            parts: ClusterParts::new(service, cluster, key, settings)?,
            registration: Shutdown::default(),
            service: Shutdown::default(),
            admin: Shutdown::default(),
        })
    }

    /// Connects to NATS, binds the socket for gRPC and starts the admin endpoint, which calls `probe` over that socket to check whether the
    /// process is ready.
    async fn open<R>(
        &mut self,
        address: SocketAddr,
        settings: &ProcessArgs,
        probe: impl Fn(Channel) -> R + Send + Sync + 'static,
    ) -> Result<(TcpListener, SocketAddr), StartError>
    where
        R: Future<Output = Result<(), String>> + Send + 'static,
    {
        let (cluster, key) = (&settings.discovery.cluster, self.parts.key.clone());
        self.parts.broker = settings.events.broker(cluster, key, &self.parts.metrics).await?;
        let listener = listen(address, "--listen").await?;
        let admin = listen(settings.admin_listen, "--admin-listen").await?;
        let address = local_address(&listener)?;
        let url = format!("http://{}", reachable(local_address(&admin)?));
        self.places = vec![("gRPC", address.to_string()), ("admin", url)];
        let (channel, service) = (self.parts.channel(address), self.service.clone());
        let ready = move || {
            let (draining, answer) = (service.is_draining(), probe(channel.clone()));
            async move {
                if draining {
                    return Err("draining".to_owned());
                }
                let unanswered = |_| Err("this process's gRPC port does not answer the readiness check".to_owned());
                timeout(PROBE_WAIT, answer).await.unwrap_or_else(unanswered)
            }
        };
        let run = admin::run(admin, settings.hosts.hosts(), self.parts.metrics.clone(), ready, self.admin.clone());
        self.parts.spawn("admin endpoint", &self.admin, run);
        Ok((listener, address))
    }
}

impl ServedProcess for Process {
    fn introduction(&self) -> String {
        let lines = self.places.iter().map(|(name, place)| format!("  {name:<12} {place}\n"));
        format!("The {} runs:\n\n{}", self.name, lines.collect::<String>())
    }

    fn metrics(&self) -> &Metrics {
        &self.parts.metrics
    }

    async fn failed(&mut self) -> StartError {
        self.parts.ended().await
    }

    fn announce_drain(&self) {
        self.service.announce();
    }

    async fn drain(&self, grace: Duration) {
        self.registration.run(LEAVE_WAIT).await;
        self.service.run(grace).await;
        self.parts.flush().await;
        self.admin.run(Duration::ZERO).await;
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.registration.stop();
        self.service.stop();
        self.admin.stop();
    }
}

/// Returns a notification that makes this process drain and end, as SIGTERM does.
fn drain_like_sigterm(shutdown: &Shutdown) -> Arc<Notify> {
    let drain = Arc::new(Notify::new());
    let (notified, draining) = (drain.clone(), shutdown.clone());
    shutdown.spawn(async move {
        tokio::select! {
            () = draining.draining() => return,
            () = notified.notified() => {}
        }
        if let Err(error) = kill_process(getpid(), Signal::TERM) {
            tracing::error!(%error, "the process cannot drain because it cannot send itself SIGTERM");
        }
    });
    drain
}

/// The readiness check of a router: it succeeds if the router could place a request now.
async fn can_place(channel: Channel) -> Result<(), String> {
    let view = RouterClient::new(channel).workers(WorkersRequest {}).await.map_err(|status| status.message().to_owned())?;
    view.into_inner().unavailable_reason.map_or(Ok(()), Err)
}

/// The readiness check of a worker: it succeeds if the worker answers. The router decides whether requests are placed on the worker.
async fn answers(channel: Channel) -> Result<(), String> {
    ControlClient::new(channel).describe(DescribeRequest::default()).await.map(drop).map_err(|status| status.message().to_owned())
}

/// Returns the first 32 characters of the host's name, with `-` in place of characters that are no ASCII letters or digits.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().take(32).map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect()
}
