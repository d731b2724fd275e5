//! Registration: a process's own key in etcd, under a lease that is kept alive. If the key is lost, it is put again. A process that drains
//! deregisters.

use super::{
    etcd::{self, EtcdConnector, EtcdError, EtcdSettings, in_time},
    record::MemberRecord,
    watch::connected_gauge,
};
use crate::{Backoff, Metrics, Shutdown, retry::error_chain};
use etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp};
use metrics::{Counter, Gauge};
use tokio::time::{sleep, timeout};

/// Keeps the process registered in etcd until it drains, then deregisters it. etcd may be unreachable at any time; the process is registered as soon
/// as etcd can be reached. If the future is dropped, the lease expires by itself.
pub async fn register(settings: EtcdSettings, record: MemberRecord, metrics: &Metrics, shutdown: &Shutdown) {
    let again = metrics.counter(
        "tandem_discovery_reregistrations_total",
        "Times the process was registered in etcd again, because its lease or connection was lost.",
        &[],
    );
    let connected = connected_gauge(metrics, "registration");
    let mut registrar = Registrar { connector: EtcdConnector::new(settings), record, connected, again, held: None };
    let mut backoff = Backoff::new(etcd::PAUSE_MIN, etcd::PAUSE_MAX);
    loop {
        let error = tokio::select! {
            () = shutdown.draining() => break,
            Err(error) = registrar.keep(&mut backoff) => error,
        };
        registrar.connected.set(0.0);
        let error = error_chain(&error);
        if backoff.is_new_error(&error) {
            tracing::warn!("registration in etcd failed, retrying: {error}");
        }
        tokio::select! {
            () = shutdown.draining() => break,
            () = sleep(backoff.next_delay()) => {}
        }
    }
    registrar.deregister().await;
}

struct Registrar {
    connector: EtcdConnector,
    record: MemberRecord,
    connected: Gauge,
    again: Counter,
    held: Option<(Client, i64)>,
}

impl Registrar {
    /// Registers under a new lease, and keeps the lease alive until it is lost; returns the reason. Registering attaches the key to the new
    /// lease, so the expiry of an older lease does not delete the key.
    async fn keep(&mut self, backoff: &mut Backoff) -> Result<std::convert::Infallible, EtcdError> {
        let mut client = self.connector.connect().await?;
        let EtcdSettings { cluster, lease_ttl, key: cluster_key, .. } = &self.connector.settings;
        let (key, value) = (self.record.key(cluster), self.record.clone().signed(cluster, cluster_key).to_json());
        let lease = in_time(client.lease_grant(lease_ttl.as_secs().max(1) as i64, None)).await?.id();
        let again = self.held.replace((client.clone(), lease)).is_some();
        let put = || TxnOp::put(&*key, &*value, Some(PutOptions::new().with_lease(lease)));
        in_time(client.txn(Txn::new().and_then([put()]))).await?;
        self.again.increment(u64::from(again));
        self.connected.set(1.0);
        tracing::info!(key, address = %self.record.address, again, "registered in etcd");
        let (mut keeper, mut replies) = in_time(client.lease_keep_alive(lease)).await?;
        loop {
            tokio::select! {
                () = sleep(*lease_ttl / 3) => {}
                // No keep-alive request is open, so the stream can only end or fail.
                end = replies.message() => {
                    end?;
                    return Err(EtcdError::Closed);
                }
            }
            in_time(keeper.keep_alive()).await?;
            let reply = in_time(replies.message()).await?.ok_or(EtcdError::Closed)?;
            // etcd reports a lost lease as a TTL of 0, not as an error.
            if reply.ttl() <= 0 {
                return Err(EtcdError::LeaseLost);
            }
            backoff.reset();
            // The key can be missing although the lease is not lost: it was deleted, or an older state of etcd was restored.
            let absent = Compare::version(&*key, CompareOp::Equal, 0);
            in_time(client.txn(Txn::new().when([absent]).and_then([put()]))).await?;
        }
    }

    async fn deregister(&mut self) {
        let Some((mut client, lease)) = self.held.take() else { return };
        match timeout(etcd::CALL_WAIT, client.lease_revoke(lease)).await {
            Ok(Ok(_)) => tracing::info!("deregistered from etcd"),
            _ => tracing::info!("cannot deregister from etcd; this process stays registered until its lease expires"),
        }
        self.connected.set(0.0);
    }
}
