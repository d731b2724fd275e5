//! The servers of etcd and NATS, and proxies that can interrupt the connections to these servers and to the workers.

#[path = "../../../process/tests/servers/mod.rs"]
pub mod servers;

use crate::{
    cluster::address,
    proxy::{Gate, Proxy},
};
use servers::Server;
use std::{collections::BTreeMap, net::SocketAddr, time::Duration};
use tokio::runtime::{Builder, Runtime};

/// The duration of the processes' leases. It is so short that leases expire during a short partition.
pub const LEASE: Duration = Duration::from_secs(2);

pub struct Services {
    pub etcd: Server,
    pub nats: Server,
    to_etcd: Proxy,
    to_nats: Proxy,
    to_workers: BTreeMap<String, Proxy>,
    /// The proxies' runtime. Clients use another runtime, so that the proxies do not delay the clients' measurements.
    _runtime: Runtime,
}

impl Services {
    pub fn start(workers: &BTreeMap<String, SocketAddr>) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("the runtime can be built");
        let proxy = |target| Proxy::start(address(), target, runtime.handle());
        let (etcd, nats) = (Server::etcd(&[]), Server::nats(&[]));
        let [to_etcd, to_nats] = [&etcd, &nats].map(|server| proxy(server.address().parse().expect("the address is valid")));
        let to_workers = workers.iter().map(|(name, at)| (name.clone(), proxy(*at))).collect();
        Self { etcd, nats, to_etcd, to_nats, to_workers, _runtime: runtime }
    }

    pub fn args_of(&self, name: &str, role: &str) -> Vec<String> {
        let mut args = vec![("--etcd", self.to_etcd.at)];
        if role != "frontend" {
            args.push(("--nats", self.to_nats.at));
        }
        args.extend(self.to_workers.get(name).map(|proxy| ("--advertise", proxy.at)));
        let flags = args.into_iter().flat_map(|(flag, at)| [flag.to_owned(), at.to_string()]);
        flags.chain(["--lease-ttl".to_owned(), LEASE.as_secs().to_string()]).collect()
    }

    pub fn set_etcd_gate(&self, gate: Gate) {
        self.to_etcd.set(gate);
    }

    pub fn set_nats_gate(&self, gate: Gate) {
        self.to_nats.set(gate);
    }

    pub fn set_worker_gate(&self, name: &str, gate: Gate) {
        self.to_workers[name].set(gate);
    }
}
