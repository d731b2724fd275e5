//! Limits the number of open connections, in total and from each address.

use crate::counts::Counts;
use ipnet::IpNet;
use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use std::{
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

/// The address of a connection's peer. Each request that arrives over TCP carries it as an extension.
#[derive(Clone, Copy, Debug)]
pub struct PeerAddress(
    /// The address.
    pub IpAddr,
);

/// The unit whose connections are counted together: an IPv4 address, or the /64 network of an IPv6 address, because one host may use
/// all addresses of such a network.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ClientNetwork(
    /// The address, or the first address of the /64 network.
    pub IpAddr,
);

/// Counts open connections, and refuses connections beyond the limits.
pub struct ConnectionLimits {
    all_max: usize,
    /// The maximum number of connections from one address; 0: no limit.
    per_peer_max: usize,
    /// Peers to which `per_peer_max` does not apply, because they forward the requests of many clients.
    proxies: Vec<IpNet>,
    open: Mutex<Counts<ClientNetwork>>,
    /// The JSON body of the 503 response on a refused connection.
    pub(super) refusal: String,
    metrics: ConnectionMetrics,
}

/// The metrics of connections.
#[derive(Clone)]
pub struct ConnectionMetrics {
    /// The number of open connections.
    pub open: Gauge,
    /// The number of connections that were refused because of a limit.
    pub refused: Counter,
}

/// The permit for one open connection. Dropping it subtracts the connection from the numbers of open connections.
pub(super) struct ConnectionPermit {
    limits: Arc<ConnectionLimits>,
    pub(super) address: Option<PeerAddress>,
}

impl From<IpAddr> for ClientNetwork {
    fn from(address: IpAddr) -> Self {
        const NETWORK_BITS: u32 = 64;
        Self(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << NETWORK_BITS)).into(),
            address @ IpAddr::V4(_) => address,
        })
    }
}

/// Returns whether one of the networks contains the address.
pub fn contains(networks: &[IpNet], address: IpAddr) -> bool {
    networks.iter().any(|network| network.contains(&address.to_canonical()))
}

impl ConnectionLimits {
    /// Limits connections to `all_max` in total, and to `per_peer_max` from each address that is not in `proxies` (0 sets no limit per
    /// address). `refusal` is the JSON body of the 503 response on a refused connection.
    pub fn new(all_max: usize, per_peer_max: usize, proxies: Vec<IpNet>, refusal: String, metrics: ConnectionMetrics) -> Self {
        Self { all_max, per_peer_max, proxies, open: Mutex::default(), refusal, metrics }
    }

    /// Returns a permit for a connection from this address, or `None` if a limit is reached. `address` is `None` for a connection in
    /// memory, which has no address.
    pub(super) fn acquire(self: &Arc<Self>, address: Option<IpAddr>) -> Option<ConnectionPermit> {
        let peer = address.map(ClientNetwork::from);
        let bounded = self.per_peer_max > 0 && !address.is_some_and(|address| contains(&self.proxies, address));
        let mut open = self.open.lock();
        let of_peer = peer.map_or(0, |peer| open.of(&peer));
        if open.all >= self.all_max || (bounded && of_peer >= self.per_peer_max) {
            self.metrics.refused.increment(1);
            return None;
        }
        open.add(peer.as_ref(), 1);
        self.metrics.open.increment(1.0);
        Some(ConnectionPermit { limits: Arc::clone(self), address: address.map(PeerAddress) })
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.limits.metrics.open.decrement(1.0);
        let peer = self.address.map(|PeerAddress(address)| ClientNetwork::from(address));
        self.limits.open.lock().remove(peer.as_ref(), 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn limits(all_max: usize, per_peer_max: usize) -> Arc<ConnectionLimits> {
        let proxies = vec!["10.9.0.0/16".parse().expect("the network is valid")];
        let metrics = ConnectionMetrics { open: Gauge::noop(), refused: Counter::noop() };
        Arc::new(ConnectionLimits::new(all_max, per_peer_max, proxies, String::new(), metrics))
    }

    fn from(limits: &Arc<ConnectionLimits>, address: &str) -> Option<ConnectionPermit> {
        limits.acquire(Some(address.parse().expect("the address is valid")))
    }

    #[test]
    fn one_address_cannot_use_all_connections() {
        let limits = limits(3, 2);
        let of_one = [from(&limits, "10.0.0.1"), from(&limits, "::ffff:10.0.0.1")];
        assert!(of_one.iter().all(Option::is_some), "both are the same address");
        assert!(from(&limits, "10.0.0.1").is_none());
        let other = from(&limits, "10.0.0.2");
        assert!(
            other.is_some() && from(&limits, "10.0.0.3").is_none() && limits.acquire(None).is_none(),
            "no connection is left"
        );
        drop((of_one, other));
        let open = limits.open.lock();
        assert_eq!((open.all, open.by_key.len()), (0, 0));
    }

    #[test]
    fn addresses_of_one_ipv6_network_share_one_connection_limit() {
        let limits = limits(9, 1);
        let _first = from(&limits, "2001:db8::1").expect("the network has no open connection");
        assert!(from(&limits, "2001:db8::ffff:1").is_none(), "both addresses are in the same /64");
        assert!(from(&limits, "2001:db8:0:1::1").is_some(), "the address is in another /64");
    }

    #[test]
    fn trusted_proxy_has_no_connection_limit_per_address() {
        let limits = limits(3, 1);
        let taken: Vec<_> = (0..4).map_while(|_| from(&limits, "10.9.0.1")).collect();
        assert_eq!(taken.len(), 3, "only the limit on all connections applies");
    }

    #[test]
    fn one_address_may_use_all_connections_without_a_limit_per_address() {
        let limits = limits(3, 0);
        let taken: Vec<_> = (0..4).map_while(|_| from(&limits, "10.0.0.1")).collect();
        assert_eq!(taken.len(), 3);
    }
}
