//! A process's own key in etcd, under a lease: kept alive, put again when it is lost, taken away when the process drains.

use super::{
    card::Card,
    etcd::{self, Connector, EtcdError, EtcdSettings, in_time},
    follow::connected,
};
use crate::{Metrics, Shutdown, Tries, retry::complaint};
use etcd_client::{Client, Compare, CompareOp, PutOptions, Txn, TxnOp};
use metrics::{Counter, Gauge};
use tokio::time::{sleep, timeout};

/// Keeps the process on the list until the shutdown drains, and takes it off then. etcd may be away, at the start or later: the
/// process is put on the list whenever it is there, and nobody waits for that. Dropped, the lease runs out by itself.
pub async fn register(settings: EtcdSettings, card: Card, metrics: &Metrics, shutdown: &Shutdown) {
    let again = metrics.counter(
        "tandem_discovery_reregistrations_total",
        "Times the process was put on etcd's list again, as its lease or the connection was lost.",
        &[],
    );
    let connected = connected(metrics, "registration");
    let mut registrar = Registrar { connector: Connector::new(settings), card, connected, again, held: None };
    let mut tries = Tries::new(etcd::PAUSE_MIN, etcd::PAUSE_MAX);
    loop {
        let error = tokio::select! {
            () = shutdown.draining() => break,
            kept = registrar.keep(&mut tries) => match kept {
                Ok(never) => match never {},
                Err(error) => error,
            },
        };
        registrar.connected.set(0.0);
        let complaint = complaint(&error);
        if tries.is_news(&complaint) {
            tracing::warn!("not on etcd's list, trying again: {complaint}");
        }
        tokio::select! {
            () = shutdown.draining() => break,
            () = sleep(tries.pause()) => {}
        }
    }
    registrar.leave().await;
}

struct Registrar {
    connector: Connector,
    card: Card,
    connected: Gauge,
    again: Counter,
    /// The newest lease and where it was granted.
    held: Option<(Client, i64)>,
}

impl Registrar {
    /// One lease's life. A lease that is left behind has no key any more and runs out.
    async fn keep(&mut self, tries: &mut Tries) -> Result<std::convert::Infallible, EtcdError> {
        let mut client = self.connector.connect().await?;
        let EtcdSettings { cluster, lease_ttl, key: cluster_key, .. } = &self.connector.settings;
        let (key, value) = (self.card.key(cluster), self.card.clone().signed(cluster, cluster_key).to_json());
        let lease = in_time(client.lease_grant(lease_ttl.as_secs().max(1) as i64, None)).await?.id();
        let again = self.held.replace((client.clone(), lease)).is_some();
        let put = || TxnOp::put(&*key, &*value, Some(PutOptions::new().with_lease(lease)));
        in_time(client.txn(Txn::new().and_then([put()]))).await?;
        self.again.increment(u64::from(again));
        self.connected.set(1.0);
        tracing::info!(key, address = %self.card.address, again, "on etcd's list");
        let (mut keeper, mut replies) = in_time(client.lease_keep_alive(lease)).await?;
        loop {
            tokio::select! {
                () = sleep(*lease_ttl / 3) => {}
                // Nothing was asked: it is the stream's end.
                end = replies.message() => {
                    end?;
                    return Err(EtcdError::Closed);
                }
            }
            in_time(keeper.keep_alive()).await?;
            let reply = in_time(replies.message()).await?.ok_or(EtcdError::Closed)?;
            // etcd says so instead of an error.
            if reply.ttl() <= 0 {
                return Err(EtcdError::LeaseLost);
            }
            tries.reset();
            // Somebody may have deleted the key, or restored an older state, with the lease in it.
            let absent = Compare::version(&*key, CompareOp::Equal, 0);
            in_time(client.txn(Txn::new().when([absent]).and_then([put()]))).await?;
        }
    }

    async fn leave(&mut self) {
        let Some((mut client, lease)) = self.held.take() else { return };
        match timeout(etcd::CALL_WAIT, client.lease_revoke(lease)).await {
            Ok(Ok(_)) => tracing::info!("off etcd's list"),
            _ => tracing::info!("etcd cannot be told that the process leaves; its lease runs out by itself"),
        }
        self.connected.set(0.0);
    }
}
