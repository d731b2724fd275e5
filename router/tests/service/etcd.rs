//! A router discovers its workers through etcd. The list in etcd is only a hint: a worker whose stream is open stays a member, even if etcd
//! does not list it.

#[path = "../../../crates/process/tests/servers/mod.rs"]
pub mod servers;

use crate::fake::{FakeWorker, TestRouter, prompt, worker};
use servers::Server;
use std::time::Duration;
use tandem_process::discovery::{EtcdSettings, MemberSource, Role};
use tandem_proto::v1::worker_info;
use tandem_router::{PrefillPlace, RouterSettings};

struct Scenario {
    server: Server,
    client: etcd_client::Client,
}

impl Scenario {
    async fn start() -> (Self, RouterSettings) {
        let server = Server::etcd(&[]);
        let client = etcd_client::Client::connect([server.address()], None).await.expect("etcd accepts connections");
        let etcd = EtcdSettings {
            endpoints: vec![server.address()],
            user: None,
            tls: None,
            cluster: "c".to_owned(),
            key: Default::default(),
            lease_ttl: Duration::from_secs(1),
        };
        let workers = MemberSource::Etcd(etcd, vec![Role::PrefillWorker, Role::DecodeWorker]);
        (Self { server, client }, RouterSettings { workers, prefill: PrefillPlace::Local, ..Default::default() })
    }

    fn key(of: &FakeWorker) -> String {
        format!("/tandem/c/decode-worker/{}", of.address)
    }

    async fn put(&mut self, of: &FakeWorker) {
        let record = format!(r#"{{"role":"decode-worker","address":"{}"}}"#, of.address);
        self.client.put(Self::key(of), record, None).await.expect("etcd answers");
    }

    async fn delete(&mut self, of: &FakeWorker) {
        self.client.delete(Self::key(of), None).await.expect("etcd answers");
    }
}

#[tokio::test]
async fn connected_worker_stays_a_member_after_etcd_deregisters_it() {
    let (mut scenario, settings) = Scenario::start().await;
    let mut stays = FakeWorker::start(worker_info::Role::Decode, "stays").await;
    let mut other = FakeWorker::start(worker_info::Role::Decode, "other").await;
    let router = TestRouter::start_with(settings).await;
    scenario.put(&stays).await;
    let watch = stays.join().await;
    router.until_indexed("stays", 0).await;

    // The key of `stays` is deleted, as if its lease had expired. `other` registers afterwards, so when it has joined, the router has
    // received the deletion.
    scenario.delete(&stays).await;
    scenario.put(&other).await;
    let others = other.join().await;
    router.until_indexed("other", 0).await;
    assert!(worker(&router.view().await, "stays").is_some());
    drop(others);
    router.until_left("other").await;
    let placed = router.route(prompt("r", &[1])).await.placement().await;
    assert_eq!(placed.decode.and_then(|chosen| chosen.worker).map(|chosen| chosen.worker_id).as_deref(), Some("stays"));

    // Once the stream of a deregistered worker has closed, the worker is not a member, and the router does not try to reconnect.
    scenario.delete(&other).await;
    drop(watch);
    router.until(|view| view.workers.is_empty() && view.unavailable.is_empty()).await;
    scenario.put(&stays).await;
    let watch = stays.join().await;
    router.until_indexed("stays", 0).await;

    // While etcd is down, the router continues to watch the known workers and reconnects to them.
    scenario.server.kill();
    drop(watch);
    let _watch = stays.join().await;
    router.until_indexed("stays", 0).await;
}
