//! One role as a process of its own: the same part as in `up`, started the same way, and an admin endpoint beside it.

use super::{
    Parts, Role, StartError, Worker, check_device, engine_settings, listen, load, load_served, local_address, reachable,
};
use crate::{
    serve::Served,
    settings::{DecodeFlags, FrontendFlags, PrefillFlags, ProcessFlags, RouterFlags, Serve, UpSettings},
};
use std::{net::SocketAddr, time::Duration};
use tandem_engine::EngineHandle;
use tandem_node::{
    Metrics, Shutdown, admin,
    discovery::{self, EtcdSettings, MemberRecord},
    new_instance_id,
};
use tandem_proto::{
    ClusterKey,
    channel::{self, Channel, Network},
    v1::{DescribeRequest, WorkerInfo, WorkersRequest, control_client::ControlClient, router_client::RouterClient},
};
use tokio::{
    net::TcpListener,
    time::{sleep, timeout},
};

/// A process that does not answer itself within this time answers nobody.
const PROBE_WAIT: Duration = Duration::from_secs(1);

/// How long etcd may take to hear that the process leaves; if it is away, nobody waits for it.
const LEAVE_WAIT: Duration = Duration::from_secs(1);
/// Pauses between a worker's questions to itself: it answers once its engine does.
const DESCRIBE_PAUSE: Duration = Duration::from_millis(50);

/// A running role. Dropping it stops it at once.
pub struct Process {
    name: String,
    /// What is where, for people.
    places: Vec<(&'static str, String)>,
    parts: Parts,
    metrics: Metrics,
    /// Ends before the service does: nobody new is to come then.
    registration: Shutdown,
    service: Shutdown,
    /// The admin endpoint has a shutdown of its own: who drains is still watched.
    admin: Shutdown,
}

impl Process {
    /// A frontend. Its router need not be there yet.
    pub async fn frontend(command: Serve<FrontendFlags>) -> Result<Self, StartError> {
        let Serve { settings, own, .. } = command;
        settings.tenants.check()?;
        let mut process = Self::new("tandem-frontend", &own.cluster, &settings)?;
        let listener = listen(settings.listen, "--listen").await?;
        let admin = match own.admin_listen {
            Some(address) => Some(listen(address, "--admin-listen").await?),
            None => None,
        };
        let served = load_served(&settings).await?;
        process.name = format!("frontend for {}", served.id());
        let address = local_address(&listener)?;
        let (routers, url) = (own.routers(), format!("http://{}", reachable(address)));
        let of_etcd = || format!("as etcd at {} says", own.discovery.etcd.join(", "));
        let listed = if own.discovery.etcd.is_empty() { own.router.join(", ") } else { of_etcd() };
        process.places = vec![("OpenAI API", url), ("routers", listed)];
        if let Some(admin) = &admin {
            process.places.push(("admin", format!("http://{}", reachable(local_address(admin)?))));
        }
        if let Some((etcd, address)) = own.discovery.registration(&own.cluster, address)? {
            let card = card(discovery::Role::Frontend, address, served.id(), &settings);
            process.register(etcd, std::future::ready(card));
        }
        process.parts.frontend((listener, admin), routers, &settings, served, &process.metrics, &process.service);
        Ok(process)
    }

    /// A router. Its workers need not be there yet.
    pub async fn router(command: Serve<RouterFlags>) -> Result<Self, StartError> {
        let Serve { settings, own, .. } = command;
        let mut process = Self::new("tandem-router", &own.process.cluster, &settings)?;
        let (listener, address) = process.open(settings.listen, &own.process, can_place).await?;
        process.name = "router".to_owned();
        let model = settings.served_model_name.as_deref();
        if let Some((etcd, address)) = own.process.discovery.registration(&own.process.cluster, address)? {
            let card = card(discovery::Role::Router, address, model.unwrap_or_default(), &settings);
            process.register(etcd, std::future::ready(card));
        }
        process.parts.router(listener, (own.workers(), own.peers()), model, &settings, &process.metrics, &process.service);
        Ok(process)
    }

    /// A worker that computes prompts. Its router finds it.
    pub async fn prefill_worker(command: Serve<PrefillFlags>) -> Result<Self, StartError> {
        Self::worker(Role::Prefill, command.settings, command.own).await
    }

    /// A worker that generates. Its router finds it.
    pub async fn decode_worker(command: Serve<DecodeFlags>) -> Result<Self, StartError> {
        Self::worker(Role::Decode, command.settings, command.own.worker).await
    }

    async fn worker(role: Role, settings: UpSettings, own: PrefillFlags) -> Result<Self, StartError> {
        check_device(&settings)?;
        let service = match role {
            Role::Prefill => "tandem-prefill-worker",
            Role::Decode => "tandem-decode-worker",
        };
        let mut process = Self::new(service, &own.process.cluster, &settings)?;
        let (listener, address) = process.open(settings.listen, &own.process, answers).await?;
        let registration = own.process.discovery.registration(&own.process.cluster, address)?;
        let loaded = load(&settings).await?;
        let id = own.worker_id.unwrap_or_else(|| format!("{}-{}-{}", role.name(), host_name(), address.port()));
        let engine = EngineHandle::start(loaded.engine(&settings, 1)?, engine_settings(&settings, &process.parts.key));
        let listed = registration.as_ref().map(|(_, address)| address.clone());
        let worker = Worker { id, role, address, advertise: listed.or(own.process.discovery.advertise), engine };
        process.name = format!("{} worker {} of {}", role.name(), worker.id, loaded.served.id());
        process.places.push(("KV", format!("{} tokens", worker.kv_tokens())));
        process.parts.worker(&worker, listener, &settings, &loaded, &process.metrics, &process.service);
        if let Some((etcd, advertised)) = registration {
            let own = own_channel(address, &process.parts.key);
            process.register(etcd, async move { MemberRecord::of_worker(&description(own).await, advertised) });
        }
        Ok(process)
    }

    /// Puts the process on etcd's list until it drains.
    fn register(&self, etcd: EtcdSettings, card: impl Future<Output = MemberRecord> + Send + 'static) {
        let etcd = EtcdSettings { key: self.parts.key.clone(), ..etcd };
        let (metrics, shutdown) = (self.metrics.clone(), self.registration.clone());
        self.registration.spawn(async move {
            tokio::select! {
                () = shutdown.draining() => {}
                card = card => discovery::register(etcd, card, &metrics, &shutdown).await,
            }
        });
    }

    fn new(service: &'static str, cluster: &str, settings: &UpSettings) -> Result<Self, StartError> {
        let (metrics, key) = (Metrics::default(), settings.key.read()?);
        if !key.is_set() && !settings.listen.ip().is_loopback() {
            tracing::warn!(
                listen = %settings.listen,
                "this cluster has no key: every host that reaches its processes can call them and send them false data; give all of them the same --cluster-key-file"
            );
        }
        Ok(Self {
            name: String::new(),
            places: Vec::new(),
            parts: Parts::new(service, cluster, key, settings, &metrics)?,
            metrics,
            registration: Shutdown::default(),
            service: Shutdown::default(),
            admin: Shutdown::default(),
        })
    }

    /// Opens the event plane, takes the socket for gRPC and starts the admin endpoint, which asks `probe` over that socket whether
    /// the process is ready.
    async fn open<R>(
        &mut self,
        address: SocketAddr,
        flags: &ProcessFlags,
        probe: impl Fn(Channel) -> R + Send + Sync + 'static,
    ) -> Result<(TcpListener, SocketAddr), StartError>
    where
        R: Future<Output = Result<(), String>> + Send + 'static,
    {
        self.parts.broker = flags.events.broker(&flags.cluster, self.parts.key.clone(), &self.metrics).await?;
        let listener = listen(address, "--listen").await?;
        let admin = listen(flags.admin_listen, "--admin-listen").await?;
        let address = local_address(&listener)?;
        let url = format!("http://{}", reachable(local_address(&admin)?));
        self.places = vec![("gRPC", address.to_string()), ("admin", url)];
        let (channel, service) = (own_channel(address, &self.parts.key), self.service.clone());
        let ready = move || {
            let (draining, answer) = (service.is_draining(), probe(channel.clone()));
            async move {
                if draining {
                    return Err("draining".to_owned());
                }
                timeout(PROBE_WAIT, answer).await.unwrap_or_else(|_| Err("it does not answer yet".to_owned()))
            }
        };
        self.parts.spawn("admin endpoint", &self.admin, admin::run(admin, self.metrics.clone(), ready, self.admin.clone()));
        Ok((listener, address))
    }
}

impl Served for Process {
    fn introduction(&self) -> String {
        let lines = self.places.iter().map(|(name, place)| format!("  {name:<12} {place}\n"));
        format!("The {} runs:\n\n{}", self.name, lines.collect::<String>())
    }

    async fn failed(&mut self) -> StartError {
        self.parts.ended().await
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

/// To the process itself.
fn own_channel(address: SocketAddr, key: &ClusterKey) -> Channel {
    let endpoint = channel::endpoint(&reachable(address).to_string()).expect("an address and a port are an endpoint");
    Network::tcp(key.clone()).connect_lazy(&endpoint)
}

/// The card of a process that is no worker.
fn card(role: discovery::Role, address: String, model: &str, settings: &UpSettings) -> MemberRecord {
    let info = WorkerInfo {
        instance_id: new_instance_id(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        model: model.to_owned(),
        block_size: settings.block_size,
        ..Default::default()
    };
    MemberRecord { role, ..MemberRecord::of_worker(&info, address) }
}

/// What the process's own worker says about itself, once it does.
async fn description(own: Channel) -> WorkerInfo {
    let mut control = ControlClient::new(own);
    loop {
        if let Ok(info) = control.describe(DescribeRequest {}).await {
            return info.into_inner();
        }
        sleep(DESCRIBE_PAUSE).await;
    }
}

/// A router is ready when a request could be placed.
async fn can_place(channel: Channel) -> Result<(), String> {
    let view = RouterClient::new(channel).workers(WorkersRequest {}).await.map_err(|status| status.message().to_owned())?;
    view.into_inner().unavailable_reason.map_or(Ok(()), Err)
}

/// A worker is ready when it answers: whether it is routed to is the router's to say.
async fn answers(channel: Channel) -> Result<(), String> {
    ControlClient::new(channel).describe(DescribeRequest {}).await.map(drop).map_err(|status| status.message().to_owned())
}

/// As other systems allow it in names.
fn host_name() -> String {
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    name.chars().take(32).map(|letter| if letter.is_ascii_alphanumeric() { letter } else { '-' }).collect()
}
