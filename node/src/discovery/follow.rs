//! Who is registered in etcd, followed for as long as somebody wants to know.
//!
//! Every connection begins by reading all keys; the watch goes on from there. So nothing is built on history: a compaction, a
//! restart or another member of etcd makes us read again, and no more. While etcd is away the last list stays. An address that was
//! there before a new connection and is not there after it stays for one lease longer: an etcd that has lost its data forgets
//! processes that live, and they register anew within that time.

use super::{
    ADDRESSES_MAX,
    card::{self, Card, Role},
    etcd::{self, Connector, EtcdError, EtcdSettings, in_time},
};
use crate::{Metrics, Tries, retry::complaint};
use etcd_client::{EventType, GetOptions, KeyValue, WatchOptions};
use metrics::Gauge;
use std::collections::{BTreeMap, BTreeSet};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

/// Keys that are read; more than can be followed, so that whoever exceeds it is told.
const KEYS_MAX: i64 = 8 * ADDRESSES_MAX as i64;

/// The addresses of all that are registered with these roles. The task ends when its set is dropped.
pub(super) fn follow(
    settings: EtcdSettings,
    roles: Vec<Role>,
    metrics: &Metrics,
) -> (watch::Receiver<BTreeSet<String>>, JoinSet<()>) {
    let (told, addresses) = watch::channel(BTreeSet::new());
    let follower = Follower {
        connector: Connector::new(settings),
        roles,
        connected: connected(metrics, "members"),
        registered: BTreeMap::new(),
        missing: BTreeSet::new(),
        told,
    };
    let mut task = JoinSet::new();
    task.spawn(follower.run());
    (addresses, task)
}

pub(super) fn connected(metrics: &Metrics, purpose: &'static str) -> Gauge {
    let help = "1 while etcd is connected: to follow members, or to keep the process's own registration.";
    let connected = metrics.gauge("tandem_discovery_etcd_connected", help, &[("for", purpose)]);
    connected.set(0.0);
    connected
}

struct Follower {
    connector: Connector,
    roles: Vec<Role>,
    connected: Gauge,
    /// Addresses by key; none where the card is broken, which was told.
    registered: BTreeMap<String, Option<String>>,
    /// Not registered any more since the last connection.
    missing: BTreeSet<String>,
    told: watch::Sender<BTreeSet<String>>,
}

impl Follower {
    async fn run(mut self) {
        let mut tries = Tries::new(etcd::PAUSE_MIN, etcd::PAUSE_MAX);
        loop {
            let error = match self.connection(&mut tries).await {
                Ok(never) => match never {},
                Err(error) => error,
            };
            self.connected.set(0.0);
            let complaint = complaint(&error);
            if tries.is_news(&complaint) {
                tracing::warn!("members stay as they are, as etcd cannot be followed: {complaint}");
            }
            sleep(tries.pause()).await;
        }
    }

    /// One connection's life.
    async fn connection(&mut self, tries: &mut Tries) -> Result<std::convert::Infallible, EtcdError> {
        let mut client = self.connector.connect().await?;
        let prefix = card::prefix(&self.connector.settings.cluster);
        let all = in_time(client.get(&*prefix, Some(GetOptions::new().with_prefix().with_limit(KEYS_MAX)))).await?;
        let revision = all.header().ok_or(EtcdError::Closed)?.revision();
        self.replace(all.kvs());
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut events = in_time(client.watch(&*prefix, Some(options))).await?;
        self.connected.set(1.0);
        tries.reset();
        tracing::info!(members = self.told.borrow().len(), "etcd is followed");
        let forget_at = Instant::now() + self.connector.settings.lease_ttl;
        loop {
            let message = tokio::select! {
                message = events.message() => message?.ok_or(EtcdError::Closed)?,
                () = sleep_until(forget_at), if !self.missing.is_empty() => {
                    self.missing.clear();
                    self.tell();
                    continue;
                }
            };
            // Without a reason when the revision was compacted; nothing more comes then, and the stream does not end.
            if message.canceled() {
                return Err(EtcdError::Cancelled);
            }
            for event in message.events() {
                let Some(entry) = event.kv() else { continue };
                match event.event_type() {
                    EventType::Put => self.put(entry),
                    EventType::Delete => drop(self.registered.remove(&*String::from_utf8_lossy(entry.key()))),
                }
            }
            self.tell();
        }
    }

    fn replace(&mut self, all: &[KeyValue]) {
        self.missing = self.told.borrow().clone();
        let present: BTreeSet<&[u8]> = all.iter().map(KeyValue::key).collect();
        // Broken ones were told, and are not told again.
        self.registered.retain(|key, address| address.is_none() && present.contains(key.as_bytes()));
        all.iter().for_each(|entry| self.put(entry));
        self.tell();
    }

    fn put(&mut self, entry: &KeyValue) {
        let key = String::from_utf8_lossy(entry.key());
        if !card::is_of(&key, &self.connector.settings.cluster, &self.roles) {
            return;
        }
        let address = match Card::from_json(entry.value()) {
            Ok(card) => Some(card.address),
            Err(error) => {
                if !matches!(self.registered.get(&*key), Some(None)) {
                    tracing::warn!(%key, "a key of etcd is skipped: {}", complaint(&error));
                }
                None
            }
        };
        self.registered.insert(key.into_owned(), address);
    }

    fn tell(&mut self) {
        let mut now: BTreeSet<String> = self.registered.values().flatten().cloned().collect();
        self.missing.retain(|address| !now.contains(address));
        now.extend(self.missing.iter().cloned());
        if now.len() > ADDRESSES_MAX {
            tracing::warn!(found = now.len(), "more processes are registered than can be followed; {ADDRESSES_MAX} are");
            now = now.into_iter().take(ADDRESSES_MAX).collect();
        }
        self.told.send_if_modified(|told| std::mem::replace(told, now.clone()) != now);
    }
}
