//! A router that finds its workers through etcd: what it says is a hint, and a worker's own stream is the truth.

#[path = "../../../node/tests/servers/mod.rs"]
pub mod servers;

use crate::fake::{FakeWorker, TestRouter, prompt, worker};
use servers::Server;
use std::time::Duration;
use tandem_node::discovery::{EtcdSettings, Role, Workers};
use tandem_proto::v1::worker_info;
use tandem_router::{PrefillPlace, RouterSettings};

struct Story {
    server: Server,
    client: etcd_client::Client,
}

impl Story {
    async fn start() -> (Self, RouterSettings) {
        let server = Server::etcd(&[]);
        let client = etcd_client::Client::connect([server.address()], None).await.expect("it listens");
        let etcd = EtcdSettings {
            endpoints: vec![server.address()],
            user: None,
            tls: None,
            cluster: "c".to_owned(),
            key: Default::default(),
            lease_ttl: Duration::from_secs(1),
        };
        let workers = Workers::Etcd(etcd, vec![Role::PrefillWorker, Role::DecodeWorker]);
        (Self { server, client }, RouterSettings { workers, prefill: PrefillPlace::Local, ..Default::default() })
    }

    fn key(of: &FakeWorker) -> String {
        format!("/tandem/c/decode-worker/{}", of.address)
    }

    async fn put(&mut self, of: &FakeWorker) {
        let card = format!(r#"{{"role":"decode-worker","address":"{}"}}"#, of.address);
        self.client.put(Self::key(of), card, None).await.expect("it answers");
    }

    async fn delete(&mut self, of: &FakeWorker) {
        self.client.delete(Self::key(of), None).await.expect("it answers");
    }
}

#[tokio::test]
async fn a_worker_whose_stream_lives_stays_whatever_etcd_says() {
    let (mut story, settings) = Story::start().await;
    let mut stays = FakeWorker::start(worker_info::Role::Decode, "stays").await;
    let mut other = FakeWorker::start(worker_info::Role::Decode, "other").await;
    let router = TestRouter::start_with(settings).await;
    story.put(&stays).await;
    let watch = stays.join().await;
    router.until_indexed("stays", 0).await;

    // Its lease has run out; who is put afterwards and joins shows that the router has heard of it.
    story.delete(&stays).await;
    story.put(&other).await;
    let others = other.join().await;
    router.until_indexed("other", 0).await;
    assert!(worker(&router.view().await, "stays").is_some());
    drop(others);
    router.until_gone("other").await;
    let placed = router.route(prompt("r", &[1])).await.placement().await;
    assert_eq!(placed.decode.and_then(|chosen| chosen.worker).map(|chosen| chosen.worker_id).as_deref(), Some("stays"));

    // Without its stream it is nobody: it is not even looked for.
    story.delete(&other).await;
    drop(watch);
    router.until(|view| view.workers.is_empty() && view.unavailable.is_empty()).await;
    story.put(&stays).await;
    let watch = stays.join().await;
    router.until_indexed("stays", 0).await;

    // Without etcd those who are known are followed as before, and looked for when they are away.
    story.server.kill();
    drop(watch);
    let _watch = stays.join().await;
    router.until_indexed("stays", 0).await;
}
