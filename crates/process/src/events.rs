//! KV events over NATS: a worker publishes each change of its cache once, for any number of routers.
//!
//! Core NATS does not guarantee delivery: messages are lost when a connection fails or a subscriber is slow. So a router checks the numbers
//! of the events. If an event is missing, the router reads a snapshot from the worker. While NATS is disconnected, workers send events over
//! their `Watch` streams.
//!
//! If the cluster has a key, each message consists of a batch of events and its signature. A message without a valid signature is dropped
//! before it is parsed, so that other programs with access to NATS can neither forge events nor make routers read snapshots.

use crate::{
    Metrics, Secret,
    retry::{self, error_chain},
};
use async_nats::{Auth, AuthError, Client, ConnectOptions, Event, ServerAddr, Subscriber, connection::State};
use futures::StreamExt;
use nkeys::KeyPair;
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

/// Maximum size of a message: below the limit of NATS (1 MiB by default), and small enough not to delay other workers' messages.
const MESSAGE_BYTES_MAX: usize = 256 << 10;
/// The time between two pings. A connection is closed after three pings without an answer.
const PING_INTERVAL: Duration = Duration::from_secs(5);
/// The shortest delay between attempts to connect; `PAUSE_MAX` is the longest. With these delays, a process connects to a restarted NATS
/// server within two seconds.
const PAUSE_MIN: Duration = Duration::from_millis(100);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// The number of failed attempts to connect after which the delay is `PAUSE_MAX`.
const ATTEMPTS_MAX: usize = 10;

/// The time after which the state of the connection is checked again, because notifications of changes may be lost.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Settings of the connection to NATS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NatsSettings {
    /// `host:port` or URLs of the NATS servers. It is sufficient if one of them can be reached.
    pub servers: Vec<String>,
    /// The means by which the process authenticates itself.
    pub auth: NatsAuth,
    /// The CA certificate for verifying NATS (a PEM file). If it is set, connections are always encrypted.
    pub ca: Option<PathBuf>,
    /// The client certificate and its key, as PEM files; `None` if the process presents no certificate.
    pub identity: Option<(PathBuf, PathBuf)>,
    /// The cluster's name, which is part of every subject.
    pub cluster: String,
    /// Maximum number of one worker's messages that are buffered at a router. A busy worker sends 1,024 messages in about ten seconds. Further
    /// messages are lost, which makes the router read a snapshot.
    pub pending_max: usize,
}

/// The means by which a process authenticates itself to NATS. Files of secrets are read for each connection.
#[derive(Clone, Debug, PartialEq, Eq)]
#[expect(missing_docs, reason = "the names say what is used")]
pub enum NatsAuth {
    None,
    /// The process has a user name and a password.
    User(String, Secret),
    Token(Secret),
    /// The process has the content of a credentials file that `nsc` has written.
    Credentials(Secret),
    /// The process has the seed of an nkey.
    Nkey(Secret),
}

impl NatsAuth {
    /// Returns the process's answer to the nonce of a NATS server. It is made with the current secrets, which are read from their files if
    /// they are in files.
    fn answer(&self, nonce: &[u8]) -> Result<Auth, NatsError> {
        let mut answer = Auth::new();
        let mut sign = |seed: &str| -> Result<String, NatsError> {
            let pair = KeyPair::from_seed(seed.trim())?;
            answer.signature = Some(pair.sign(nonce)?);
            Ok(pair.public_key())
        };
        match self {
            Self::None => {}
            Self::User(name, password) => (answer.username, answer.password) = (Some(name.clone()), Some(password.expose())),
            Self::Token(token) => answer.token = Some(token.expose()),
            Self::Credentials(file) => {
                let text = file.expose();
                // Each of the two parts is one line, after a line such as `-----BEGIN NATS USER JWT-----`.
                let marked = text.lines().zip(text.lines().skip(1)).filter(|(mark, _)| mark.starts_with("-----BEGIN "));
                let (_, jwt) = marked.clone().next().ok_or(NatsError::Credentials)?;
                let (_, seed) = marked.clone().nth(1).ok_or(NatsError::Credentials)?;
                sign(seed)?;
                answer.jwt = Some(jwt.trim().to_owned());
            }
            Self::Nkey(seed) => answer.nkey = Some(sign(&seed.expose())?),
        }
        Ok(answer)
    }
}

/// The reason why NATS cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum NatsError {
    #[error("the NATS server {server:?} cannot be used; write host:port, without user and password")]
    Server { server: String },
    #[error("{} cannot be used for NATS; check --nats-ca, --nats-cert and --nats-key", .path.display())]
    File { path: PathBuf, source: io::Error },
    #[error("the credentials cannot be used for NATS; check that --nats-creds has a JWT and its seed, as `nsc` writes them")]
    Credentials,
    #[error("the seed of the nkey cannot be used for NATS; check --nats-creds and --nats-nkey")]
    Seed(#[from] nkeys::error::Error),
    #[error("the connection to NATS cannot be set up; check the --nats settings")]
    Connect(#[from] async_nats::ConnectError),
    /// The NATS client has ended.
    #[error("the subscription to KV events over NATS failed")]
    Subscribe(#[from] async_nats::SubscribeError),
}

/// The connection to NATS, which reconnects by itself. It is cheap to clone.
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
    /// Starts to connect and returns at once, even if NATS is unreachable. Published events are signed with `key` if the cluster has one.
    ///
    /// # Errors
    /// Fails if the settings are invalid.
    pub async fn open(settings: &NatsSettings, key: ClusterKey, metrics: &Metrics) -> Result<Self, NatsError> {
        let addresses = settings.servers.iter().map(|server| server_address(server)).collect::<Result<Vec<_>, _>>()?;
        let (state, connected) = watch::channel(false);
        let monitor = Monitor::new(state, metrics);
        let client = options(settings)?.event_callback(move |event| {
            monitor.handle(&event);
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

    /// Returns whether NATS is connected now.
    pub fn is_connected(&self) -> bool {
        self.client.connection_state() == State::Connected
    }

    /// Resolves when NATS is connected, or, if `connected` is false, when NATS is not connected. This method is cancel-safe.
    pub async fn until(&self, connected: bool) {
        let mut changes = self.connected.clone();
        while self.is_connected() != connected {
            // The NATS client drops notifications when there are many, so its state is also checked at intervals.
            if let Ok(Err(_)) = tokio::time::timeout(CHECK_INTERVAL, changes.changed()).await {
                // The NATS client has ended, so its state will not change any more.
                return std::future::pending().await;
            }
        }
    }

    /// Publishes a batch of KV events, split into messages that are small enough for NATS. The batch is lost if NATS is not connected, and
    /// so are messages in flight when the connection is lost.
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
        for chunk in split_batch(batch, bytes_max.saturating_sub(SIGNATURE_BYTES)) {
            let message = self.signed(&instance_id, chunk.encode_to_vec());
            tokio::select! {
                published = self.client.publish(subject.clone(), message.into()) => if let Err(error) = published {
                    return tracing::debug!("a batch of KV events was not published: {}", error_chain(&error));
                },
                () = self.until(false) => return,
            }
        }
    }

    /// Publishes every change of an instance's cache. If changes occur faster than they can be sent, some are lost; routers detect the loss
    /// by the numbers of the events.
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

    /// Subscribes to the instance's KV events. Dropping the returned value ends the subscription.
    ///
    /// # Errors
    /// Fails if the NATS client has ended.
    pub async fn subscribe(&self, instance_id: &str) -> Result<Published, NatsError> {
        let messages = self.client.subscribe(self.subject(instance_id)).await?;
        let published = Published { messages, broker: self.clone(), instance_id: instance_id.to_owned() };
        // After the flush, NATS knows the subscription, so no event is lost between a snapshot that is requested afterwards and the first
        // event received. Without the flush, a lost event is still detected by the numbers of the events.
        tokio::select! {
            _ = self.client.flush() => {}
            () = self.until(false) => {}
        }
        Ok(published)
    }

    fn signed(&self, instance_id: &str, mut batch: Vec<u8>) -> Vec<u8> {
        let signature = self.key.sign(Purpose::Events, &[self.cluster.as_bytes(), instance_id.as_bytes(), &batch]);
        batch.extend(signature);
        batch
    }

    /// Returns a message without its signature; `None` if the message is not signed with the cluster key for this instance. If the cluster
    /// has no key, messages have no signatures, and every message is accepted.
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

/// The subscription to one instance's KV events.
pub struct Published {
    messages: Subscriber,
    broker: Broker,
    instance_id: String,
}

impl Published {
    /// Returns the next batch; `None` when the NATS client has ended. Messages without a valid signature are dropped and counted. Messages
    /// that cannot be parsed are dropped; the number of the next event shows that events are missing. This method is cancel-safe.
    pub async fn next(&mut self) -> Option<KvEventBatch> {
        loop {
            let message = self.messages.next().await?.payload;
            let Some(batch) = self.broker.verified(&self.instance_id, &message) else {
                self.broker.forged.increment(1);
                continue;
            };
            match KvEventBatch::decode(batch) {
                Ok(batch) => return Some(batch),
                Err(error) => tracing::debug!(%error, "ignoring a NATS message that is not a batch of KV events"),
            }
        }
    }
}

/// Returns the wall-clock time in microseconds since 1970. It is used to measure the delay of events between hosts, whose clocks must be
/// synchronised.
pub fn unix_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64)
}

/// Returns a server's address without user name and password, for logs.
pub fn without_password(server: &str) -> &str {
    server.rsplit('@').next().unwrap_or_default()
}

fn server_address(server: &str) -> Result<ServerAddr, NatsError> {
    let wrong = || NatsError::Server { server: without_password(server).to_owned() };
    let address: ServerAddr = server.parse().map_err(|_| wrong())?;
    // Addresses are logged with the settings, so they must not contain passwords.
    if address.has_user_pass() || address.host().is_empty() { Err(wrong()) } else { Ok(address) }
}

fn options(settings: &NatsSettings) -> Result<ConnectOptions, NatsError> {
    let options = match settings.auth.clone() {
        NatsAuth::None => ConnectOptions::new(),
        auth => {
            auth.answer(&[])?;
            ConnectOptions::with_auth_callback(move |nonce| {
                std::future::ready(auth.answer(&nonce).map_err(|error| AuthError::new(error_chain(&error))))
            })
        }
    };
    let mut options = options
        .name("tandem")
        .retry_on_initial_connect()
        .max_reconnects(None)
        .ping_interval(PING_INTERVAL)
        .subscription_capacity(settings.pending_max)
        .reconnect_delay_callback(|attempts| retry::delay(PAUSE_MIN, PAUSE_MAX, attempts.min(ATTEMPTS_MAX)));
    if let Some(ca) = &settings.ca {
        check(ca)?;
        options = options.add_root_certificates(ca.clone()).require_tls(true);
    }
    if let Some((certificate, key)) = &settings.identity {
        check(certificate)?;
        check(key)?;
        options = options.add_client_certificate(certificate.clone(), key.clone());
    }
    Ok(options)
}

fn check(path: &Path) -> Result<(), NatsError> {
    fs::read_to_string(path).map(drop).map_err(|source| NatsError::File { path: path.to_owned(), source })
}

struct Monitor {
    state: watch::Sender<bool>,
    connected: metrics::Gauge,
    slow: metrics::Counter,
    reported: Mutex<Option<String>>,
}

impl Monitor {
    fn new(state: watch::Sender<bool>, metrics: &Metrics) -> Self {
        let connected = metrics.gauge("tandem_events_nats_connected", "1 while NATS is connected.", &[]);
        connected.set(0.0);
        let slow = metrics.counter(
            "tandem_events_nats_lost_total",
            "NATS messages that were lost because the subscriber was slow; each leads to a snapshot.",
            &[],
        );
        Self { state, connected, slow, reported: Mutex::default() }
    }

    fn handle(&self, event: &Event) {
        match event {
            Event::Connected => {
                self.reported.lock().take();
                self.connected.set(1.0);
                tracing::info!("NATS connected");
                self.state.send_replace(true);
            }
            Event::Disconnected | Event::Closed => {
                self.connected.set(0.0);
                tracing::warn!("NATS is disconnected; until it is connected again, KV events are sent on the Watch streams");
                self.state.send_replace(false);
            }
            Event::SlowConsumer(_) => self.slow.increment(1),
            Event::ServerError(_) | Event::ClientError(_) => {
                let error = event.to_string();
                let mut reported = self.reported.lock();
                if reported.as_ref() != Some(&error) {
                    tracing::warn!("NATS connection failed, retrying: {error}");
                    *reported = Some(error);
                }
            }
            Event::LameDuckMode | Event::Draining => tracing::info!("NATS: {event}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A batch of the instance `i` of the cluster `c`, and its signature, computed with Python's `hmac` as in `tandem_proto::key`. Processes of
    /// earlier versions publish and expect the same bytes.
    #[tokio::test]
    async fn published_message_equals_the_reference_bytes() {
        let settings = NatsSettings {
            servers: vec!["127.0.0.1:1".to_owned()],
            auth: NatsAuth::None,
            ca: None,
            identity: None,
            cluster: "c".to_owned(),
            pending_max: 1,
        };
        let key = ClusterKey::new(b"0123456789abcdef0123456789abcdef").expect("the secret is long enough");
        let broker = Broker::open(&settings, key, &Metrics::default()).await.expect("the settings are valid");
        let batch = KvEventBatch { instance_id: "i".to_owned(), last_event_id: 7, ..Default::default() }.encode_to_vec();
        let message = broker.signed("i", batch.clone());
        let hex: String = message.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, "0a0169100737f1b1cb06828e1aa5f8b9f6d424c258bca9c1d835c66f75c4fb844b5ecdbba2");
        assert_eq!(broker.verified("i", &message), Some(&*batch));
        assert_eq!(broker.subject("i"), "tandem.c.kv.i");
    }

    #[test]
    fn credentials_file_gives_its_jwt_and_signs_with_its_seed() {
        let pair = KeyPair::new_user();
        let seed = pair.seed().expect("the pair has a seed");
        let text = format!(
            "-----BEGIN NATS USER JWT-----\nejwt.x-y_z\n------END NATS USER JWT------\n\nKeep it secret.\n\n\
             -----BEGIN USER NKEY SEED-----\r\n{seed}\r\n------END USER NKEY SEED------\n"
        );
        let answer = NatsAuth::Credentials(text.into()).answer(b"nonce").expect("the file is valid");
        assert_eq!(answer.jwt.as_deref(), Some("ejwt.x-y_z"));
        pair.verify(b"nonce", &answer.signature.expect("the nonce is signed")).expect("the signature is valid");
    }
}
