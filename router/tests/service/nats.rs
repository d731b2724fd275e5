//! A router that hears KV events over NATS: loads on the stream, events from the broker, snapshots when something is missing.

use crate::{
    etcd::servers::Server,
    fake::{FakeWatch, FakeWorker, TestRouter, soon, stored},
};
use std::time::Duration;
use tandem_kv::{KvBatch, KvEvent, Load};
use tandem_node::{
    Metrics,
    events::{Broker, NatsAuth, NatsSettings},
};
use tandem_proto::{ClusterKey, event_batch, v1::worker_info::Role};
use tandem_router::{PrefillPlace, RouterSettings};
use tokio::time::sleep;

async fn broker(server: &Server, key: &ClusterKey, metrics: &Metrics) -> Broker {
    let settings = NatsSettings {
        servers: vec![server.address()],
        auth: NatsAuth::Nobody,
        ca: None,
        identity: None,
        cluster: "c".to_owned(),
        pending_max: 64,
    };
    Broker::open(&settings, key.clone(), metrics).await.expect("the settings are good")
}

struct Story {
    server: Server,
    /// The worker's side of NATS.
    broker: Broker,
    /// Of the router's side.
    heard: Metrics,
    worker: FakeWorker,
    router: TestRouter,
}

impl Story {
    async fn start() -> Self {
        Self::start_with(ClusterKey::default(), 100_000).await
    }

    async fn start_with(key: ClusterKey, blocks: u32) -> Self {
        let (server, heard) = (Server::nats(&[]), Metrics::default());
        let (own, routers) = (broker(&server, &key, &Metrics::default()).await, broker(&server, &key, &heard).await);
        soon(async { tokio::join!(own.until(true), routers.until(true)) }).await;
        let worker = FakeWorker::start(Role::Decode, "d").await;
        worker.describe_as(|info| info.capacity_blocks = blocks);
        let settings = RouterSettings { prefill: PrefillPlace::Local, broker: Some(routers), ..Default::default() };
        let router = TestRouter::start(&[&worker], settings).await;
        Self { server, broker: own, heard, worker, router }
    }

    /// Events from `first` on, each of one block of that number under the one before.
    async fn publish(&self, ids: std::ops::RangeInclusive<u64>) {
        let event = |id: u64| KvEvent { event_id: id, change: stored((id > 1).then(|| id - 1), &[id]) };
        let batch = KvBatch { last_event_id: *ids.end(), events: ids.map(event).collect(), ..Default::default() };
        self.broker.publish(event_batch("d-1", &batch, 0)).await;
    }

    /// The first after a subscription, of which NATS may hear later than of the publisher: a worker's next heartbeat would tell. What is
    /// heard twice changes nothing.
    async fn publish_heard(&self, ids: std::ops::RangeInclusive<u64>) {
        let again = async {
            loop {
                self.publish(ids.clone()).await;
                sleep(Duration::from_millis(20)).await;
            }
        };
        tokio::select! {
            () = self.router.until_indexed("d", *ids.end()) => {}
            () = again => {}
        }
    }

    /// The next stream, which is to be accompanied by NATS, and its snapshot.
    async fn joins(&mut self, at_event_id: u64) -> FakeWatch {
        let watch = soon(self.worker.watched()).await;
        assert!(watch.events_over_nats);
        watch.heartbeat(at_event_id, Load::default(), &[]);
        self.worker.asked().await.answer(at_event_id, &(1..=at_event_id).collect::<Vec<_>>());
        self.router.until_indexed("d", at_event_id).await;
        watch
    }

    fn gaps(&self) -> Option<f64> {
        self.router.metric(r#"tandem_router_kv_event_gaps_total{worker="d"}"#)
    }

    fn plane(&self, plane: &str) -> Option<f64> {
        self.router.metric(&format!("tandem_router_event_plane{{worker=\"d\",plane=\"{plane}\"}}"))
    }
}

#[tokio::test]
async fn events_come_over_nats_and_what_is_missing_from_a_snapshot() {
    let mut story = Story::start().await;
    // More than one message of a snapshot holds.
    let watch = story.joins(20_000).await;
    story.publish_heard(20_001..=20_003).await;
    assert_eq!((story.plane("nats"), story.plane("direct"), story.gaps()), (Some(1.0), Some(0.0), Some(0.0)));
    let load = Load { running_sequences: 3, ..Default::default() };
    watch.heartbeat(20_003, load, &[]);
    let loaded = |view: &tandem_proto::v1::WorkersReply| {
        view.workers.iter().flat_map(|worker| &worker.load).any(|load| load.running_sequences == 3)
    };
    story.router.until(loaded).await;
    assert!(story.router.metric("tandem_router_kv_event_lag_seconds_count").is_some());

    // A message that is lost is missed by the next one. Until the snapshot is there, what comes waits.
    story.publish(20_005..=20_005).await;
    let asked = story.worker.asked().await;
    story.publish(20_006..=20_007).await;
    sleep(Duration::from_millis(50)).await;
    asked.answer(20_006, &(1..=20_006).collect::<Vec<_>>());
    story.router.until_indexed("d", 20_007).await;
    assert_eq!(story.gaps(), Some(1.0));

    // A lost last message is missed by the number that the stream tells, if it is not there a second later.
    watch.heartbeat(20_008, Load::default(), &[]);
    sleep(Duration::from_millis(1_100)).await;
    watch.heartbeat(20_008, Load::default(), &[]);
    story.worker.asked().await.answer(20_008, &(1..=20_008).collect::<Vec<_>>());
    story.router.until_indexed("d", 20_008).await;
    assert_eq!(story.gaps(), Some(2.0));

    // A worker that cannot publish tells events on the stream.
    watch.events(20_009, vec![stored(Some(20_008), &[20_009])]);
    story.router.until_indexed("d", 20_009).await;
    assert_eq!((story.plane("nats"), story.plane("direct")), (Some(0.0), Some(1.0)));
    drop(watch);
    story.router.until_gone("d").await;
}

/// Others may publish in its name.
#[tokio::test]
async fn more_blocks_than_a_worker_has_are_put_right_by_a_snapshot_if_they_come_over_nats() {
    let mut story = Story::start_with(ClusterKey::default(), 10).await;
    let _watch = story.joins(3).await;
    story.publish_heard(4..=4).await;
    let change = stored(Some(4), &(100..110).collect::<Vec<_>>());
    let batch = KvBatch { last_event_id: 5, events: vec![KvEvent { event_id: 5, change }], ..Default::default() };
    story.broker.publish(event_batch("d-1", &batch, 0)).await;
    story.worker.asked().await.answer(4, &[1, 2, 3, 4]);
    story.publish_heard(5..=5).await;
    assert_eq!(story.gaps(), Some(1.0));
    assert_eq!(story.router.metric(r#"tandem_router_kv_events_refused_total{worker="d"}"#), Some(1.0));
}

#[tokio::test]
async fn forged_batches_are_ignored_and_the_real_ones_are_applied() {
    let mut story = Story::start_with(ClusterKey::random(), 100_000).await;
    let _watch = story.joins(3).await;
    story.publish_heard(4..=4).await;
    let forger = broker(&story.server, &ClusterKey::default(), &Metrics::default()).await;
    soon(forger.until(true)).await;
    // The next number, so that the real event of that number would count as known; and one that would leave a gap.
    for event_id in [5, 50] {
        let events = vec![KvEvent { event_id, change: stored(None, &[666, 667]) }];
        let batch = KvBatch { last_event_id: event_id, events, ..Default::default() };
        forger.publish(event_batch("d-1", &batch, 0)).await;
    }
    let dropped = async {
        while !story.heard.render().contains("tandem_events_nats_forged_total 2") {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(dropped).await;
    story.publish(5..=6).await;
    story.router.until_indexed("d", 6).await;
    assert_eq!(story.gaps(), Some(0.0), "no snapshot was asked for");
}

#[tokio::test]
async fn without_nats_the_stream_brings_everything_and_nats_that_is_back_is_used_again() {
    let mut story = Story::start().await;
    let mut watch = story.joins(3).await;
    for at in [4, 5] {
        story.server.kill();
        // The worker stays a member all the time.
        let direct = soon(story.worker.watched()).await;
        assert!(!direct.events_over_nats);
        watch.abandoned().await;
        direct.snapshot(at, &(1..=at).collect::<Vec<_>>());
        story.router.until_indexed("d", at).await;
        direct.events(at + 1, vec![stored(Some(at), &[at + 1])]);
        story.router.until_indexed("d", at + 1).await;
        assert_eq!((story.plane("nats"), story.plane("direct")), (Some(0.0), Some(1.0)));
        story.server.start();
        soon(story.broker.until(true)).await;
        watch = story.joins(at + 1).await;
        direct.abandoned().await;
        story.publish_heard(at + 2..=at + 2).await;
    }
    assert_eq!(story.gaps(), Some(0.0));
}

#[tokio::test]
async fn nats_that_brings_nothing_is_left_alone() {
    let mut story = Story::start().await;
    let watch = story.joins(1).await;
    for told in [2, 3] {
        watch.heartbeat(told, Load::default(), &[]);
        sleep(Duration::from_millis(1_100)).await;
        watch.heartbeat(told, Load::default(), &[]);
        if told == 2 {
            story.worker.asked().await.answer(2, &[1, 2]);
            story.router.until_indexed("d", 2).await;
        }
    }
    let direct = soon(story.worker.watched()).await;
    assert!(!direct.events_over_nats);
    direct.snapshot(3, &[1, 2, 3]);
    story.router.until_indexed("d", 3).await;
}
