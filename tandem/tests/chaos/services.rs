//! etcd, NATS, and a network between everybody and them, and between everybody and the workers.

#[path = "../../../node/tests/servers/mod.rs"]
pub mod servers;

use crate::{
    cluster::address,
    proxy::{Gate, Proxy},
};
use servers::Server;
use std::{collections::BTreeMap, net::SocketAddr, time::Duration};
use tokio::runtime::{Builder, Runtime};

/// Short, so that a partition need not last long to cost everybody their keys.
pub const LEASE: Duration = Duration::from_secs(2);

pub struct Services {
    pub etcd: Server,
    pub nats: Server,
    to_etcd: Proxy,
    to_nats: Proxy,
    /// By name.
    to_workers: BTreeMap<String, Proxy>,
    /// The proxies' runtime; clients have another one, so that times of arrival are exact.
    _runtime: Runtime,
}

impl Services {
    pub fn start(workers: &BTreeMap<String, SocketAddr>) -> Self {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
        let proxy = |target| Proxy::start(address(), target, runtime.handle());
        let (etcd, nats) = (Server::etcd(&[]), Server::nats(&[]));
        let [to_etcd, to_nats] = [&etcd, &nats].map(|server| proxy(server.address().parse().expect("an address")));
        let to_workers = workers.iter().map(|(name, at)| (name.clone(), proxy(*at))).collect();
        Self { etcd, nats, to_etcd, to_nats, to_workers, _runtime: runtime }
    }

    /// The arguments with which a process finds the others and is found.
    pub fn args_of(&self, name: &str, role: &str) -> Vec<String> {
        let mut args = vec![("--etcd", self.to_etcd.at)];
        if role != "frontend" {
            args.push(("--nats", self.to_nats.at));
        }
        args.extend(self.to_workers.get(name).map(|proxy| ("--advertise", proxy.at)));
        let flags = args.into_iter().flat_map(|(flag, at)| [flag.to_owned(), at.to_string()]);
        flags.chain(["--lease-ttl".to_owned(), LEASE.as_secs().to_string()]).collect()
    }

    /// Between everybody and etcd.
    pub fn of_etcd(&self, gate: Gate) {
        self.to_etcd.set(gate);
    }

    /// Between everybody and NATS, or one of them.
    pub fn of_nats(&self, gate: Gate) {
        self.to_nats.set(gate);
    }

    /// Between everybody and a worker, or one of them and it.
    pub fn of_worker(&self, name: &str, gate: Gate) {
        self.to_workers[name].set(gate);
    }
}
