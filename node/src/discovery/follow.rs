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
                    EventType::Put => self.put(entry.key(), entry.value()),
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
        all.iter().for_each(|entry| self.put(entry.key(), entry.value()));
        self.tell();
    }

    fn put(&mut self, key: &[u8], value: &[u8]) {
        let key = String::from_utf8_lossy(key);
        if !card::is_of(&key, &self.connector.settings.cluster, &self.roles) {
            return;
        }
        if !self.has_room(&key) {
            return;
        }
        let address = match Card::from_json(value, &key, &self.connector.settings.key) {
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

    /// Whether another key may be remembered. Broken ones make room; no more than [`KEYS_MAX`] are kept, however many are put.
    fn has_room(&mut self, key: &str) -> bool {
        if self.registered.contains_key(key) || self.registered.len() < KEYS_MAX as usize {
            return true;
        }
        let broken = self.registered.iter().find(|(_, address)| address.is_none()).map(|(key, _)| key.clone());
        broken.is_some_and(|broken| self.registered.remove(&broken).is_some())
    }

    fn tell(&mut self) {
        let mut now: BTreeSet<String> = self.registered.values().flatten().cloned().collect();
        self.missing.retain(|address| !now.contains(address));
        now.extend(self.missing.iter().cloned());
        let found = now.len();
        let now = bounded(now, &self.told.borrow());
        let news = self.told.send_if_modified(|told| std::mem::replace(told, now.clone()) != now);
        if news && found > ADDRESSES_MAX {
            tracing::warn!(
                found,
                "more processes are registered than can be followed; only {ADDRESSES_MAX} are, so remove registrations that are not in use"
            );
        }
    }
}

/// At most [`ADDRESSES_MAX`] of them. Those that are followed already stay, so that a flood of registrations removes none of them.
fn bounded(now: BTreeSet<String>, followed: &BTreeSet<String>) -> BTreeSet<String> {
    if now.len() <= ADDRESSES_MAX {
        return now;
    }
    let (mut kept, new): (BTreeSet<String>, BTreeSet<String>) = now.into_iter().partition(|address| followed.contains(address));
    let room = ADDRESSES_MAX.saturating_sub(kept.len());
    kept.extend(new.into_iter().take(room));
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn follower() -> Follower {
        let settings = EtcdSettings {
            endpoints: vec!["etcd:1".to_owned()],
            user: None,
            tls: None,
            cluster: "c".to_owned(),
            key: Default::default(),
            lease_ttl: std::time::Duration::from_secs(1),
        };
        Follower {
            connector: Connector::new(settings),
            roles: vec![Role::DecodeWorker],
            connected: connected(&Metrics::default(), "members"),
            registered: BTreeMap::new(),
            missing: BTreeSet::new(),
            told: watch::channel(BTreeSet::new()).0,
        }
    }

    fn put(follower: &mut Follower, instance: &str, value: &str) {
        follower.put(format!("/tandem/c/decode-worker/{instance}").as_bytes(), value.as_bytes());
    }

    fn card(address: &str) -> String {
        format!(r#"{{"role":"decode-worker","address":"{address}"}}"#)
    }

    #[test]
    fn a_flood_of_registrations_puts_no_worker_out_that_is_followed() {
        let mut follower = follower();
        put(&mut follower, "z", &card("real:1"));
        follower.tell();
        for number in 0..2 * ADDRESSES_MAX {
            put(&mut follower, &format!("0.{number}"), &card(&format!("0.{number}:1")));
        }
        follower.tell();
        let told = follower.told.borrow().clone();
        assert!(told.contains("real:1") && told.len() == ADDRESSES_MAX, "{} are followed", told.len());
    }

    #[test]
    fn a_flood_of_broken_registrations_takes_bounded_memory_and_leaves_room_for_good_ones() {
        let mut follower = follower();
        for number in 0..KEYS_MAX + 100 {
            put(&mut follower, &format!("0.{number}"), "nonsense");
        }
        put(&mut follower, "z", &card("real:1"));
        follower.tell();
        assert_eq!(follower.registered.len(), KEYS_MAX as usize);
        assert!(follower.told.borrow().contains("real:1"));
    }
}
