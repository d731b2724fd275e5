//! A router receives loads on the worker's stream, events over NATS, and a snapshot whenever events are missing.

use crate::{
    etcd::servers::Server,
    fake::{FakeWatch, FakeWorker, TestRouter, soon, stored},
};
use std::time::Duration;
use tandem_kv::{KvBatch, KvEvent, Load};
use tandem_process::{
    Metrics,
    events::{Broker, NatsAuth, NatsSettings},
};
use tandem_proto::{ClusterKey, event_batch, v1::worker_info::Role};
use tandem_router::{PrefillPlace, RouterSettings};
use tokio::time::sleep;

async fn broker(server: &Server, key: &ClusterKey, metrics: &Metrics) -> Broker {
    let settings = NatsSettings {
        servers: vec![server.address()],
        auth: NatsAuth::None,
        ca: None,
        identity: None,
        cluster: "c".to_owned(),
        pending_max: 64,
    };
    Broker::open(&settings, key.clone(), metrics).await.expect("the settings are valid")
}

/// Sends heartbeats with this event id, more often than a worker does, until `reaction` resolves.
async fn heartbeat_until<T>(watch: &FakeWatch, last_event_id: u64, reaction: impl Future<Output = T>) -> T {
    let heartbeats = async {
        loop {
            watch.heartbeat(last_event_id, Load::default(), &[]);
            sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::select! {
        biased;
        reacted = reaction => reacted,
        never = heartbeats => never,
    }
}

struct Scenario {
    server: Server,
    /// The worker's connection to NATS.
    broker: Broker,
    /// Metrics of the router's connection to NATS.
    router_nats: Metrics,
    worker: FakeWorker,
    router: TestRouter,
}

impl Scenario {
    async fn start() -> Self {
        Self::start_with(ClusterKey::default(), 100_000).await
    }

    async fn start_with(key: ClusterKey, blocks: u32) -> Self {
        let (server, router_nats) = (Server::nats(&[]), Metrics::default());
        let (own, routers) = (broker(&server, &key, &Metrics::default()).await, broker(&server, &key, &router_nats).await);
        soon(async { tokio::join!(own.until(true), routers.until(true)) }).await;
        let worker = FakeWorker::start(Role::Decode, "d").await;
        worker.describe_as(|info| info.capacity_blocks = blocks);
        let settings = RouterSettings { prefill: PrefillPlace::Local, broker: Some(routers), ..Default::default() };
        let router = TestRouter::start(&[&worker], settings).await;
        Self { server, broker: own, router_nats, worker, router }
    }

    /// Publishes the events with these ids. Each stores one block, numbered like the event, under the block of the previous event.
    async fn publish(&self, ids: std::ops::RangeInclusive<u64>) {
        let event = |id: u64| KvEvent { event_id: id, change: stored((id > 1).then(|| id - 1), &[id]) };
        let batch = KvBatch { last_event_id: *ids.end(), events: ids.map(event).collect(), ..Default::default() };
        self.broker.publish(event_batch("d-1", &batch, 0)).await;
    }

    /// Publishes these events again and again until they are indexed. NATS may receive the first events before it receives the router's
    /// subscription, so that the router misses them; in production the next heartbeat reveals that gap. Events that are received twice
    /// are ignored.
    async fn publish_until_indexed(&self, ids: std::ops::RangeInclusive<u64>) {
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

    /// Accepts the router's next stream, whose events must come over NATS, and answers its snapshot request.
    async fn join(&mut self, at_event_id: u64) -> FakeWatch {
        let watch = soon(self.worker.watched()).await;
        assert!(watch.events_over_nats);
        watch.heartbeat(at_event_id, Load::default(), &[]);
        self.worker.snapshot_requested().await.answer(at_event_id, &(1..=at_event_id).collect::<Vec<_>>());
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
async fn events_come_over_nats_and_gaps_are_repaired_by_snapshots() {
    let mut scenario = Scenario::start().await;
    // The snapshot has more blocks than fit into one message.
    let watch = scenario.join(20_000).await;
    scenario.publish_until_indexed(20_001..=20_003).await;
    assert_eq!((scenario.plane("nats"), scenario.plane("direct"), scenario.gaps()), (Some(1.0), Some(0.0), Some(0.0)));
    let load = Load { running_sequences: 3, ..Default::default() };
    watch.heartbeat(20_003, load, &[]);
    let loaded = |view: &tandem_proto::v1::WorkersReply| {
        view.workers.iter().flat_map(|worker| &worker.load).any(|load| load.running_sequences == 3)
    };
    scenario.router.until(loaded).await;
    assert!(scenario.router.metric("tandem_router_kv_event_lag_seconds_count").is_some());

    // An event is lost, and the next event reveals the gap. Events that arrive before the snapshot are buffered.
    scenario.publish(20_005..=20_005).await;
    let request = scenario.worker.snapshot_requested().await;
    scenario.publish(20_006..=20_007).await;
    request.answer(20_006, &(1..=20_006).collect::<Vec<_>>());
    scenario.router.until_indexed("d", 20_007).await;
    assert_eq!(scenario.gaps(), Some(1.0));

    // The event id in heartbeats reveals that the last message is lost, if the event has not arrived a second later.
    let request = heartbeat_until(&watch, 20_008, scenario.worker.snapshot_requested()).await;
    request.answer(20_008, &(1..=20_008).collect::<Vec<_>>());
    scenario.router.until_indexed("d", 20_008).await;
    assert_eq!(scenario.gaps(), Some(2.0));

    // A worker that cannot publish sends events on the stream.
    watch.events(20_009, vec![stored(Some(20_008), &[20_009])]);
    scenario.router.until_indexed("d", 20_009).await;
    assert_eq!((scenario.plane("nats"), scenario.plane("direct")), (Some(0.0), Some(1.0)));
    drop(watch);
    scenario.router.until_left("d").await;
}

/// Other programs may publish in the worker's name, so events over NATS do not prove that the worker is faulty.
#[tokio::test]
async fn nats_events_with_more_blocks_than_the_workers_capacity_cause_a_new_snapshot() {
    let mut scenario = Scenario::start_with(ClusterKey::default(), 10).await;
    let _watch = scenario.join(3).await;
    scenario.publish_until_indexed(4..=4).await;
    let change = stored(Some(4), &(100..110).collect::<Vec<_>>());
    let batch = KvBatch { last_event_id: 5, events: vec![KvEvent { event_id: 5, change }], ..Default::default() };
    scenario.broker.publish(event_batch("d-1", &batch, 0)).await;
    scenario.worker.snapshot_requested().await.answer(4, &[1, 2, 3, 4]);
    scenario.publish_until_indexed(5..=5).await;
    assert_eq!(scenario.gaps(), Some(1.0));
    assert_eq!(scenario.router.metric(r#"tandem_router_kv_events_refused_total{worker="d"}"#), Some(1.0));
}

#[tokio::test]
async fn forged_event_batches_are_ignored_and_signed_ones_are_applied() {
    let mut scenario = Scenario::start_with(ClusterKey::random(), 100_000).await;
    let _watch = scenario.join(3).await;
    scenario.publish_until_indexed(4..=4).await;
    let forger = broker(&scenario.server, &ClusterKey::default(), &Metrics::default()).await;
    soon(forger.until(true)).await;
    // The first forged event has the next id. If the router accepted it, it would ignore the real event with that id. The second forged
    // event would leave a gap.
    for event_id in [5, 50] {
        let events = vec![KvEvent { event_id, change: stored(None, &[666, 667]) }];
        let batch = KvBatch { last_event_id: event_id, events, ..Default::default() };
        forger.publish(event_batch("d-1", &batch, 0)).await;
    }
    let dropped = async {
        while !scenario.router_nats.render().contains("tandem_events_nats_forged_total 2") {
            sleep(Duration::from_millis(5)).await;
        }
    };
    soon(dropped).await;
    scenario.publish(5..=6).await;
    scenario.router.until_indexed("d", 6).await;
    assert_eq!(scenario.gaps(), Some(0.0), "no snapshot was requested");
}

#[tokio::test]
async fn stream_delivers_events_while_nats_is_disconnected() {
    let mut scenario = Scenario::start().await;
    let mut watch = scenario.join(3).await;
    for at in [4, 5] {
        scenario.server.kill();
        // The worker stays a member throughout.
        let direct = soon(scenario.worker.watched()).await;
        assert!(!direct.events_over_nats);
        watch.abandoned().await;
        direct.snapshot(at, &(1..=at).collect::<Vec<_>>());
        scenario.router.until_indexed("d", at).await;
        direct.events(at + 1, vec![stored(Some(at), &[at + 1])]);
        scenario.router.until_indexed("d", at + 1).await;
        assert_eq!((scenario.plane("nats"), scenario.plane("direct")), (Some(0.0), Some(1.0)));
        scenario.server.start();
        soon(scenario.broker.until(true)).await;
        watch = scenario.join(at + 1).await;
        direct.abandoned().await;
        scenario.publish_until_indexed(at + 2..=at + 2).await;
    }
    assert_eq!(scenario.gaps(), Some(0.0));
}

#[tokio::test]
async fn worker_is_watched_directly_if_nats_delivers_no_events() {
    let mut scenario = Scenario::start().await;
    let watch = scenario.join(1).await;
    heartbeat_until(&watch, 2, scenario.worker.snapshot_requested()).await.answer(2, &[1, 2]);
    scenario.router.until_indexed("d", 2).await;
    let direct = heartbeat_until(&watch, 3, scenario.worker.watched()).await;
    assert!(!direct.events_over_nats);
    direct.snapshot(3, &[1, 2, 3]);
    scenario.router.until_indexed("d", 3).await;
}
