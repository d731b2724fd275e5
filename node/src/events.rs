//! KV events over NATS: a worker publishes what changes in its cache once, however many routers listen.
//!
//! Core NATS promises nothing: messages are lost when a connection breaks or a listener is slow. So nothing is built on it that
//! the events' numbers do not check: whoever misses one asks the worker for a snapshot. While NATS is away, workers tell routers
//! directly.
//!
//! In a cluster with a key each message is a batch and its signature. A message without a valid signature is dropped before it
//! is parsed, so that other programs with access to NATS can neither forge events nor make routers ask for snapshots.

use crate::{Metrics, Secret, retry::complaint};
use async_nats::{Client, ConnectOptions, Event, ServerAddr, Subscriber, connection::State};
use futures::StreamExt;
use parking_lot::Mutex;
use prost::Message;
use std::{
    fmt, fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};
use tandem_kv::KvBatch;
use tandem_proto::{ClusterKey, Purpose, SIGNATURE_BYTES, event_batch, split_batch, v1::KvEventBatch};
use tokio::sync::{
    broadcast::{self, error::RecvError},
    watch,
};

/// The largest message: below NATS' own bound (1 MiB unless its operator says otherwise), and soon enough sent that another
/// worker's do not wait.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// A silent connection is given up after three of them.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// Pauses between tries: NATS that is back is noticed within a second.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);

/// Between two looks at the connection, when nothing is heard of it.
const LOOK: Duration = Duration::from_secs(1);

/// How NATS is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsSettings {
    /// `host:port` or URLs of its servers; any of them will do.
    pub servers: Vec<String>,
    /// Who we are to it.
    pub auth: NatsAuth,
    /// Whom to believe that it is NATS (a PEM file); connections are encrypted then, whatever the servers want.
    pub ca: Option<PathBuf>,
    /// Our own certificate and its key, as PEM files.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The cluster's name: part of every subject.
    pub cluster: String,
    /// Messages of one worker that wait for a router. 1,024: about ten seconds of a busy worker; more are lost, which leads to a
    /// snapshot.
    pub pending_max: usize,
}

/// How we say who we are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NatsAuth {
    /// We do not.
    Nobody,
    /// By name and password.
    User(String, Secret),
    /// By a token.
    Token(Secret),
    /// By a file of credentials, as `nsc` writes it.
    Credentials(PathBuf),
    /// By an nkey, whose seed is in this file.
    Nkey(PathBuf),
}

/// Why NATS cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum NatsError {
    /// Not an address.
    #[error("the NATS server {server:?} cannot be used; write host:port, without user and password")]
    Server {
        /// As it was given.
        server: String,
    },
    /// A file that is not there, or not what it should be.
    #[error("{} cannot be used for NATS", .path.display())]
    File {
        /// As it was set.
        path: PathBuf,
        /// Why not.
        #[source]
        cause: io::Error,
    },
    /// No connection can even be tried.
    #[error("NATS cannot be used")]
    Connect(#[from] async_nats::ConnectError),
    /// The client has ended.
    #[error("NATS takes no subscription")]
    Subscribe(#[from] async_nats::SubscribeError),
}

/// The connection to NATS, shared by all who use it; it is made and made again by itself. Cheap to clone.
#[derive(Clone)]
pub struct Broker {
    client: Client,
    cluster: Arc<str>,
    key: ClusterKey,
    forged: metrics::Counter,
    connected: watch::Receiver<bool>,
}

impl fmt::Debug for Broker {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Broker").field("cluster", &self.cluster).finish_non_exhaustive()
    }
}

impl Broker {
    /// Begins to connect. What is wrong with the settings is told now; NATS itself may be away. Batches are signed with `key`, if the
    /// cluster has one.
    ///
    /// # Errors
    /// The settings cannot be used.
    pub async fn open(settings: &NatsSettings, key: ClusterKey, metrics: &Metrics) -> Result<Self, NatsError> {
        let addresses = settings.servers.iter().map(|server| server_address(server)).collect::<Result<Vec<_>, _>>()?;
        let (tell, connected) = watch::channel(false);
        let watching = Watching::new(tell, metrics);
        let client = options(settings)?.event_callback(move |event| {
            watching.take(&event);
            std::future::ready(())
        });
        let forged = metrics.counter(
            "tandem_events_nats_forged_total",
            "NATS messages that were dropped because they were not signed with the cluster's key.",
            &[],
        );
        let client = client.connect(addresses).await?;
        Ok(Self { client, cluster: (&*settings.cluster).into(), key, forged, connected })
    }

    /// Whether messages are sent and received now.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Resolves when it is connected, or when it is not. Cancel-safe.
    pub async fn until(&self, connected: bool) {
        let mut news = self.connected.clone();
        while self.is_connected() != connected {
            // The client drops events when there are many: they only say that it is worth a look.
            if let Ok(Err(_)) = tokio::time::timeout(LOOK, news.changed()).await {
                // It has ended: nothing changes any more.
                return std::future::pending().await;
            }
        }
    }

    /// Publishes a batch, cut into messages that NATS takes. Without a connection it is lost, as are messages on their way when
    /// it breaks.
    pub async fn publish(&self, batch: KvEventBatch) {
        if !self.is_connected() {
            return;
        }
        let subject = self.subject(&batch.instance_id);
        let bytes_max = match self.client.max_payload() {
            0 => MESSAGE_BYTES_MAX,
            allowed => MESSAGE_BYTES_MAX.min(allowed),
        };
        let instance_id = batch.instance_id.clone();
        for part in split_batch(batch, bytes_max.saturating_sub(SIGNATURE_BYTES)) {
            let message = self.signed(&instance_id, part.encode_to_vec());
            tokio::select! {
                published = self.client.publish(subject.clone(), message.into()) => if let Err(error) = published {
                    return tracing::debug!("a batch of KV events was not published: {}", complaint(&error));
                },
                () = self.until(false) => return,
            }
        }
    }

    /// Publishes every change of an instance's cache. Batches that come faster than they are sent are lost; their numbers tell.
    pub async fn publish_all(self, instance_id: String, mut batches: broadcast::Receiver<Arc<KvBatch>>) {
        loop {
            match batches.recv().await {
                Ok(batch) if batch.events.is_empty() => {}
                Ok(batch) => {
                    let batch = event_batch(&instance_id, &batch, 0);
                    self.publish(KvEventBatch { load: None, sent_unix_us: unix_us(), ..batch }).await;
                }
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
        }
    }

    /// What the instance publishes from about now on. Dropping it ends the subscription.
    pub async fn subscribe(&self, instance_id: &str) -> Result<Published, NatsError> {
        let messages = self.client.subscribe(self.subject(instance_id)).await?;
        let published = Published { messages, broker: self.clone(), instance_id: instance_id.to_owned() };
        // Once it is on its way, NATS knows it before a snapshot is made elsewhere; if not, an event is missed by its number.
        tokio::select! {
            _ = self.client.flush() => {}
            () = self.until(false) => {}
        }
        Ok(published)
    }

    /// The batch with its signature behind it; without a key the batch alone.
    fn signed(&self, instance_id: &str, mut batch: Vec<u8>) -> Vec<u8> {
        let signature = self.key.sign(Purpose::Events, &[self.cluster.as_bytes(), instance_id.as_bytes(), &batch]);
        batch.extend(signature);
        batch
    }

    /// The batch of a message, if a process with the key has signed it as this instance's.
    fn verified<'a>(&self, instance_id: &str, message: &'a [u8]) -> Option<&'a [u8]> {
        if !self.key.is_set() {
            return Some(message);
        }
        let (batch, signature) = message.split_at_checked(message.len().checked_sub(SIGNATURE_BYTES)?)?;
        let parts = [self.cluster.as_bytes(), instance_id.as_bytes(), batch];
        self.key.verifies(Purpose::Events, &parts, signature).then_some(batch)
    }

    fn subject(&self, instance_id: &str) -> String {
        format!("tandem.{}.kv.{instance_id}", self.cluster)
    }
}

/// What one instance publishes.
pub struct Published {
    messages: Subscriber,
    broker: Broker,
    instance_id: String,
}

impl Published {
    /// The next batch; `None` when the client has ended. Messages without the cluster's signature are dropped and counted; what cannot
    /// be read is left out, and is missed by its number. Cancel-safe.
    pub async fn next(&mut self) -> Option<KvEventBatch> {
        loop {
            let message = self.messages.next().await?.payload;
            let Some(batch) = self.broker.verified(&self.instance_id, &message) else {
                self.broker.forged.increment(1);
                continue;
            };
            match KvEventBatch::decode(batch) {
                Ok(batch) => return Some(batch),
                Err(error) => tracing::debug!(%error, "a message of NATS is no batch of KV events"),
            }
        }
    }
}

/// The clock of the wall: good enough to see how late events come where hosts agree on the time.
pub fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// What may be shown of a server's address: nothing before its host.
pub fn without_password(server: &str) -> &str {
    server.rsplit('@').next().unwrap_or_default()
}

fn server_address(server: &str) -> Result<ServerAddr, NatsError> {
    let wrong = || NatsError::Server { server: without_password(server).to_owned() };
    let address: ServerAddr = server.parse().map_err(|_| wrong())?;
    // A password there would be shown wherever settings are.
    if address.has_user_pass() || address.host().is_empty() { Err(wrong()) } else { Ok(address) }
}

fn options(settings: &NatsSettings) -> Result<ConnectOptions, NatsError> {
    let options = ConnectOptions::new()
        .name("tandem")
        .retry_on_initial_connect()
        .max_reconnects(None)
        .ping_interval(PING_INTERVAL)
        .subscription_capacity(settings.pending_max)
        .reconnect_delay_callback(|attempts| (PAUSE_MIN * (1 << attempts.min(10))).min(PAUSE_MAX));
    let mut options = match &settings.auth {
        NatsAuth::Nobody => options,
        NatsAuth::User(name, password) => options.user_and_password(name.clone(), password.expose().to_owned()),
        NatsAuth::Token(token) => options.token(token.expose().to_owned()),
        NatsAuth::Credentials(path) => {
            options.credentials(&read(path)?).map_err(|cause| NatsError::File { path: path.clone(), cause })?
        }
        NatsAuth::Nkey(path) => options.nkey(read(path)?.trim().to_owned()),
    };
    if let Some(ca) = &settings.ca {
        read(ca)?;
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    if let Some((certificate, key)) = &settings.identity {
        read(certificate)?;
        read(key)?;
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    Ok(options)
}

fn read(path: &Path) -> Result<String, NatsError> {
    fs::read_to_string(path).map_err(|cause| NatsError::File { path: path.to_owned(), cause })
}

/// Hears what becomes of the connection.
struct Watching {
    tell: watch::Sender<bool>,
    connected: metrics::Gauge,
    slow: metrics::Counter,
    /// The last complaint, so that it is logged once.
    told: Mutex<Option<String>>,
}

impl Watching {
    fn new(tell: watch::Sender<bool>, metrics: &Metrics) -> Self {
        let connected = metrics.gauge("tandem_events_nats_connected", "1 while NATS is connected.", &[]);
        connected.set(0.0);
        let slow = metrics.counter(
            "tandem_events_nats_lost_total",
            "Messages of NATS that came faster than they were taken, and were lost; each leads to a snapshot.",
            &[],
        );
        Self { tell, connected, slow, told: Mutex::default() }
    }

    fn take(&self, event: &Event) {
        match event {
            Event::Connected => {
                self.told.lock().take();
                self.connected.set(1.0);
                tracing::info!("NATS is connected");
                self.tell.send_replace(true);
            }
            Event::Disconnected | Event::Closed => {
                self.connected.set(0.0);
                tracing::warn!("NATS is away; until it is back, routers hear KV events from the workers themselves");
                self.tell.send_replace(false);
            }
            Event::SlowConsumer(_) => self.slow.increment(1),
            Event::ServerError(_) | Event::ClientError(_) => {
                let complaint = event.to_string();
                let mut told = self.told.lock();
                if told.as_ref() != Some(&complaint) {
                    tracing::warn!("NATS cannot be used, trying again: {complaint}");
                    *told = Some(complaint);
                }
            }
            Event::LameDuckMode | Event::Draining => tracing::info!("NATS says: {event}"),
        }
    }
}
