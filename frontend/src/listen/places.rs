//! Limits the number of open connections, in total and from one address.

use crate::metrics::FrontendMetrics;
use ipnet::IpNet;
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::HashMap,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
};

/// Where a request's connection comes from: an extension of every request that came over TCP.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

/// Where a connection comes from, as far as clients are told apart: an IPv4 address, or the /64 network of an IPv6 address, all of
/// whose addresses one host may use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Peer(pub(crate) IpAddr);

/// The connections that are open.
pub(crate) struct Places {
    all_max: usize,
    /// 0: no bound.
    per_peer_max: usize,
    /// Peers that the bound is not for: they pass on the requests of many clients.
    proxies: Vec<IpNet>,
    taken: Mutex<Taken>,
    metrics: Arc<FrontendMetrics>,
}

#[derive(Default)]
struct Taken {
    all: usize,
    /// Peers with connections; never more entries than connections.
    by_peer: HashMap<Peer, usize>,
}

/// A connection's place. Dropping it gives it back.
pub(super) struct Place {
    places: Arc<Places>,
    address: Option<PeerAddress>,
}

impl From<IpAddr> for Peer {
    fn from(address: IpAddr) -> Self {
        const NETWORK_BITS: u32 = 64;
        Self(match address.to_canonical() {
            IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & (u128::MAX << NETWORK_BITS)).into(),
            address @ IpAddr::V4(_) => address,
        })
    }
}

impl Places {
    pub(crate) fn new(all_max: usize, per_peer_max: usize, proxies: Vec<IpNet>, metrics: Arc<FrontendMetrics>) -> Self {
        Self { all_max, per_peer_max, proxies, taken: Mutex::default(), metrics }
    }

    /// A place for a connection from this address (a network in memory has none), if there is one.
    pub(super) fn take(self: &Arc<Self>, address: Option<IpAddr>) -> Option<Place> {
        let peer = address.map(Peer::from);
        let is_proxy = |address: IpAddr| self.proxies.iter().any(|network| network.contains(&address.to_canonical()));
        let bounded = self.per_peer_max > 0 && !address.is_some_and(is_proxy);
        let mut taken = self.taken();
        let of_peer = peer.and_then(|peer| taken.by_peer.get(&peer).copied()).unwrap_or(0);
        if taken.all >= self.all_max || (bounded && of_peer >= self.per_peer_max) {
            self.metrics.connections_refused.increment(1);
            return None;
        }
        taken.all += 1;
        if let Some(peer) = peer {
            taken.by_peer.insert(peer, of_peer + 1);
        }
        self.metrics.connections.increment(1.0);
        Some(Place { places: Arc::clone(self), address: address.map(PeerAddress) })
    }

    fn taken(&self) -> MutexGuard<'_, Taken> {
        self.taken.lock()
    }
}

impl Place {
    pub(super) fn address(&self) -> Option<PeerAddress> {
        self.address
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.places.metrics.connections.decrement(1.0);
        let mut taken = self.places.taken();
        taken.all -= 1;
        if let Some(peer) = self.address.map(|PeerAddress(address)| Peer::from(address))
            && let Some(left) = taken.by_peer.get_mut(&peer)
        {
            *left -= 1;
            if *left == 0 {
                taken.by_peer.remove(&peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_node::Metrics;

    fn places(all_max: usize, per_peer_max: usize) -> Arc<Places> {
        let proxies = vec!["10.9.0.0/16".parse().expect("a network")];
        Arc::new(Places::new(all_max, per_peer_max, proxies, Arc::new(FrontendMetrics::new(&Metrics::default(), "m"))))
    }

    fn from(places: &Arc<Places>, address: &str) -> Option<Place> {
        places.take(Some(address.parse().expect("an address")))
    }

    #[test]
    fn one_address_cannot_take_all_connections() {
        let places = places(3, 2);
        let of_one = [from(&places, "10.0.0.1"), from(&places, "::ffff:10.0.0.1")];
        assert!(of_one.iter().all(Option::is_some), "both are the same address");
        assert!(from(&places, "10.0.0.1").is_none());
        let other = from(&places, "10.0.0.2");
        assert!(other.is_some() && from(&places, "10.0.0.3").is_none() && places.take(None).is_none(), "all are taken");
        drop((of_one, other));
        let taken = places.taken();
        assert_eq!((taken.all, taken.by_peer.len()), (0, 0));
    }

    #[test]
    fn the_addresses_of_an_ipv6_host_count_together() {
        let places = places(9, 1);
        let _first = from(&places, "2001:db8::1").expect("it is the first");
        assert!(from(&places, "2001:db8::ffff:1").is_none(), "the same /64");
        assert!(from(&places, "2001:db8:0:1::1").is_some(), "another /64");
    }

    #[test]
    fn a_trusted_proxy_may_have_more_than_one_client() {
        let places = places(3, 1);
        let taken: Vec<_> = (0..4).map_while(|_| from(&places, "10.9.0.1")).collect();
        assert_eq!(taken.len(), 3, "only the bound on all is for it");
    }

    #[test]
    fn without_a_bound_one_address_may_take_all() {
        let places = places(3, 0);
        let taken: Vec<_> = (0..4).map_while(|_| from(&places, "10.0.0.1")).collect();
        assert_eq!(taken.len(), 3);
    }
}
