//! Watches the members that are registered in etcd.
//!
//! A connection first reads all keys, and then watches for changes after the revision of that read. So nothing depends on etcd's history:
//! after a compaction, a restart or a change of the etcd server, all keys are read again. While etcd is unreachable, the last known members
//! stay. After a reconnection, an address that is not registered any more stays for the duration of one lease: etcd may have lost its data
//! although the process still runs, and the process registers again within that time.

use super::{
    ADDRESSES_MAX,
    etcd::{self, EtcdConnector, EtcdError, EtcdSettings, in_time},
    record::{self, MemberRecord, Role},
};
use crate::{Backoff, Metrics, retry::error_chain, supervise};
use etcd_client::{EventType, GetOptions, KeyValue, WatchOptions};
use metrics::Gauge;
use std::{
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
};
use tokio::{
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until},
};

/// Maximum number of keys that are read. It exceeds the number of addresses that can be used, so that an excess of addresses is noticed and logged.
const KEYS_MAX: i64 = 8 * ADDRESSES_MAX as i64;

pub(super) fn watch(
    settings: EtcdSettings,
    roles: Vec<Role>,
    metrics: &Metrics,
) -> (watch::Receiver<BTreeSet<String>>, JoinSet<()>) {
    let (members, addresses) = watch::channel(BTreeSet::new());
    let connected = connected_gauge(metrics, "members");
    let start = move || {
        let watcher = MemberWatcher {
            connector: EtcdConnector::new(settings.clone()),
            roles: roles.clone(),
            connected: connected.clone(),
            registered: BTreeMap::new(),
            missing: BTreeSet::new(),
            members: members.clone(),
        };
        watcher.run()
    };
    let mut task = JoinSet::new();
    task.spawn(async move { match supervise("etcd watch", start).await {} });
    (addresses, task)
}

/// Returns the gauge that is 1 while etcd is connected. `purpose` becomes the gauge's label `for`.
pub(super) fn connected_gauge(metrics: &Metrics, purpose: &'static str) -> Gauge {
    let help = "1 while etcd is connected: to watch members, or to keep the process registered.";
    let connected = metrics.gauge("tandem_discovery_etcd_connected", help, &[("for", purpose)]);
    connected.set(0.0);
    connected
}

struct MemberWatcher {
    connector: EtcdConnector,
    roles: Vec<Role>,
    connected: Gauge,
    registered: BTreeMap<String, Option<String>>,
    missing: BTreeSet<String>,
    members: watch::Sender<BTreeSet<String>>,
}

impl MemberWatcher {
    async fn run(mut self) -> Infallible {
        let mut backoff = Backoff::new(etcd::PAUSE_MIN, etcd::PAUSE_MAX);
        loop {
            let Err(error) = self.connection(&mut backoff).await;
            self.connected.set(0.0);
            let error = error_chain(&error);
            if backoff.is_new_error(&error) {
                tracing::warn!("the etcd watch failed; the last known members stay in use: {error}");
            }
            sleep(backoff.next_delay()).await;
        }
    }

    async fn connection(&mut self, backoff: &mut Backoff) -> Result<Infallible, EtcdError> {
        let mut client = self.connector.connect().await?;
        let prefix = record::prefix(&self.connector.settings.cluster);
        let all = in_time(client.get(&*prefix, Some(GetOptions::new().with_prefix().with_limit(KEYS_MAX)))).await?;
        let revision = all.header().ok_or(EtcdError::Closed)?.revision();
        self.replace(all.kvs());
        let options = WatchOptions::new().with_prefix().with_start_revision(revision + 1);
        let mut events = in_time(client.watch(&*prefix, Some(options))).await?;
        self.connected.set(1.0);
        backoff.reset();
        tracing::info!(members = self.members.borrow().len(), "watching etcd");
        let forget_at = Instant::now() + self.connector.settings.lease_ttl;
        loop {
            let message = tokio::select! {
                message = events.message() => message?.ok_or(EtcdError::Closed)?,
                () = sleep_until(forget_at), if !self.missing.is_empty() => {
                    self.missing.clear();
                    self.publish();
                    continue;
                }
            };
            // If etcd has compacted the watch's revision, it cancels the watch with a message without a reason. No event follows, but the
            // stream stays open.
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
            self.publish();
        }
    }

    fn replace(&mut self, all: &[KeyValue]) {
        self.missing = self.members.borrow().clone();
        let present: BTreeSet<&[u8]> = all.iter().map(KeyValue::key).collect();
        // Entries of invalid records are kept, so that these records are not logged again.
        self.registered.retain(|key, address| address.is_none() && present.contains(key.as_bytes()));
        all.iter().for_each(|entry| self.put(entry.key(), entry.value()));
        self.publish();
    }

    fn put(&mut self, key: &[u8], value: &[u8]) {
        let key = String::from_utf8_lossy(key);
        if !record::is_of(&key, &self.connector.settings.cluster, &self.roles) {
            return;
        }
        if !self.has_capacity(&key) {
            return;
        }
        let address = match MemberRecord::from_json(value, &key, &self.connector.settings.key) {
            Ok(record) => Some(record.address),
            Err(error) => {
                if !matches!(self.registered.get(&*key), Some(None)) {
                    tracing::warn!(%key, "ignoring a registration in etcd: {}", error_chain(&error));
                }
                None
            }
        };
        self.registered.insert(key.into_owned(), address);
    }

    /// Returns whether the key can be kept. At most [`KEYS_MAX`] keys are kept. When there are that many, a key with an invalid record is
    /// dropped in favour of the new key.
    fn has_capacity(&mut self, key: &str) -> bool {
        if self.registered.contains_key(key) || self.registered.len() < KEYS_MAX as usize {
            return true;
        }
        let invalid = self.registered.iter().find(|(_, address)| address.is_none()).map(|(key, _)| key.clone());
        invalid.is_some_and(|invalid| self.registered.remove(&invalid).is_some())
    }

    fn publish(&mut self) {
        let mut now: BTreeSet<String> = self.registered.values().flatten().cloned().collect();
        self.missing.retain(|address| !now.contains(address));
        now.extend(self.missing.iter().cloned());
        let found = now.len();
        let now = bounded(now, &self.members.borrow());
        let changed = self.members.send_if_modified(|members| std::mem::replace(members, now.clone()) != now);
        if changed && found > ADDRESSES_MAX {
            tracing::warn!(
                found,
                "too many processes are registered; only {ADDRESSES_MAX} are used, so remove unused registrations"
            );
        }
    }
}

/// Returns at most [`ADDRESSES_MAX`] of the addresses `now`. Addresses that are already in use are kept first, so that a flood of
/// registrations does not remove them.
fn bounded(now: BTreeSet<String>, in_use: &BTreeSet<String>) -> BTreeSet<String> {
    if now.len() <= ADDRESSES_MAX {
        return now;
    }
    let (mut kept, new): (BTreeSet<String>, BTreeSet<String>) = now.into_iter().partition(|address| in_use.contains(address));
    let free = ADDRESSES_MAX.saturating_sub(kept.len());
    kept.extend(new.into_iter().take(free));
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    fn watcher() -> MemberWatcher {
        let settings = EtcdSettings {
            endpoints: vec!["etcd:1".to_owned()],
            user: None,
            tls: None,
            cluster: "c".to_owned(),
            key: Default::default(),
            lease_ttl: std::time::Duration::from_secs(1),
        };
        MemberWatcher {
            connector: EtcdConnector::new(settings),
            roles: vec![Role::DecodeWorker],
            connected: connected_gauge(&Metrics::default(), "members"),
            registered: BTreeMap::new(),
            missing: BTreeSet::new(),
            members: watch::channel(BTreeSet::new()).0,
        }
    }

    fn put(watcher: &mut MemberWatcher, instance: &str, value: &str) {
        watcher.put(format!("/tandem/c/decode-worker/{instance}").as_bytes(), value.as_bytes());
    }

    fn record(address: &str) -> String {
        format!(r#"{{"role":"decode-worker","address":"{address}"}}"#)
    }

    #[test]
    fn member_in_use_is_kept_when_too_many_processes_register() {
        let mut watcher = watcher();
        put(&mut watcher, "z", &record("real:1"));
        watcher.publish();
        for number in 0..2 * ADDRESSES_MAX {
            put(&mut watcher, &format!("0.{number}"), &record(&format!("0.{number}:1")));
        }
        watcher.publish();
        let members = watcher.members.borrow().clone();
        assert!(members.contains("real:1") && members.len() == ADDRESSES_MAX, "{} members are used", members.len());
    }

    #[test]
    fn valid_record_is_kept_among_too_many_invalid_records() {
        let mut watcher = watcher();
        for number in 0..KEYS_MAX + 100 {
            put(&mut watcher, &format!("0.{number}"), "nonsense");
        }
        put(&mut watcher, "z", &record("real:1"));
        watcher.publish();
        assert_eq!(watcher.registered.len(), KEYS_MAX as usize);
        assert!(watcher.members.borrow().contains("real:1"));
    }
}
