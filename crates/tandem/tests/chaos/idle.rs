//! Measures the CPU time of an idle cluster, and the CPU time and memory of a router with a thousand workers.

use crate::{
    cluster::{Plan, series, until},
    rig::{Rig, Shape},
    services::servers::Server,
    table,
    up::Up,
};
use std::{fs, net::Ipv4Addr, time::Duration};
use tandem_process::{
    Metrics, Shutdown,
    discovery::{EtcdSettings, MemberRecord, register},
};
use tandem_proto::{
    ClusterKey, channel,
    v1::{
        DescribeRequest, DrainReply, DrainRequest, KvEventBatch, Load, SnapshotChunk, SnapshotRequest, Stored, WatchReply,
        WatchRequest, WorkerInfo,
        control_server::{Control, ControlServer},
        watch_reply::Message,
        worker_info::Role,
    },
};
use tokio::{
    net::TcpListener,
    runtime::{Builder, Handle},
    time::Instant,
};
use tonic::{
    Request, Response, Status,
    codegen::{
        BoxStream,
        tokio_stream::{self, StreamExt},
    },
};

/// The duration of the measurement of CPU time.
const MEASURED: Duration = Duration::from_secs(30);
/// Limit on the CPU use of an idle process, as a fraction of a core.
const IDLE_MAX: f64 = 0.01;
const WORKERS: u32 = 1_000;
const BLOCKS: u32 = 4_096;
const RESIDENT_MAX_KIB: f64 = 1_048_576.0;
/// A worker's heartbeat interval.
const HEARTBEAT: Duration = Duration::from_secs(1);
/// The unit of Linux's process times is a hundredth of a second.
const TICKS: f64 = 100.0;

fn cpu_seconds(process: &Up) -> f64 {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.id())).expect("the process runs");
    // In the line, the process's name, which may contain any character, is followed by the state, ten other numbers, and the CPU times.
    let numbers =
        stat.rsplit_once(") ").map(|(_, rest)| rest.split(' ').skip(11).take(2)).expect("the stat line has the CPU times");
    numbers.map(|ticks| ticks.parse::<f64>().expect("the process time is a number")).sum::<f64>() / TICKS
}

/// Measures an idle cluster of ten workers, two routers, two frontends, etcd and NATS.
pub fn cluster() {
    let shape = Shape { frontends: 2, routers: 2, prefill_workers: 5, decode_workers: 5, services: true, ..Shape::default() };
    let rig = Rig::start(&shape);
    let now = || rig.running().map(|(name, process)| (name.to_owned(), cpu_seconds(process))).collect::<Vec<_>>();
    let (before, since) = (now(), Instant::now());
    std::thread::sleep(MEASURED);
    let (after, seconds) = (now(), since.elapsed().as_secs_f64());
    table::print_text("\n| idle process | of a core |\n|---|--:|");
    let shares = before.into_iter().zip(after).map(|((name, before), (_, after))| (name, (after - before) / seconds));
    let shares: Vec<(String, f64)> = shares.collect();
    shares.iter().for_each(|(name, share)| table::print_text(&format!("| {name} | {:.2} % |", share * 100.0)));
    for (name, share) in shares {
        assert!(share < IDLE_MAX, "the idle process {name} uses {:.2} % of a core", share * 100.0);
    }
}

/// The `Control` service of a fake worker. Its cache is full, and has no block in common with the cache of another worker.
struct Worker {
    info: WorkerInfo,
    number: u32,
}

impl Worker {
    fn new(number: u32, key: &ClusterKey) -> Self {
        let info = WorkerInfo {
            role: (if number.is_multiple_of(2) { Role::Prefill } else { Role::Decode }).into(),
            worker_id: format!("w{number}"),
            instance_id: format!("instance-{number}"),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: "sim".to_owned(),
            block_size: 16,
            capacity_blocks: BLOCKS,
            context_length: 131_072,
            block_bytes: 1 << 20,
            cluster: "tandem".to_owned(),
            key_fingerprint: key.fingerprint().to_owned(),
            ..Default::default()
        };
        Self { info, number }
    }

    fn cache(&self) -> SnapshotChunk {
        // Multiplication by an odd number is a bijection, so no two blocks have the same hash.
        let hash = |block: u32| (u64::from(self.number) << 32 | u64::from(block)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let blocks: Vec<u64> = (1..=BLOCKS).map(hash).collect();
        let stored = blocks.chunks(256).map(|blocks| Stored { parent: None, sequence_hashes: blocks.to_vec() }).collect();
        SnapshotChunk { instance_id: self.info.instance_id.clone(), at_event_id: 0, stored, last: true }
    }

    fn heartbeat(&self) -> WatchReply {
        let load = Load { cached_blocks: BLOCKS, ..Default::default() };
        let instance_id = self.info.instance_id.clone();
        WatchReply { message: Some(Message::Batch(KvEventBatch { instance_id, load: Some(load), ..Default::default() })) }
    }
}

#[tonic::async_trait]
impl Control for Worker {
    type WatchStream = BoxStream<WatchReply>;
    type SnapshotStream = BoxStream<SnapshotChunk>;

    async fn describe(&self, _: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        Ok(Response::new(self.info.clone()))
    }

    async fn drain(&self, _: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        Err(Status::unimplemented("no test drains this worker"))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let cache = WatchReply { message: Some(Message::Snapshot(self.cache())) };
        let heartbeats = tokio_stream::iter(std::iter::repeat(self.heartbeat())).throttle(HEARTBEAT);
        Ok(Response::new(Box::pin(tokio_stream::once(cache).chain(heartbeats).map(Ok))))
    }

    async fn snapshot(&self, _: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        Ok(Response::new(Box::pin(tokio_stream::once(Ok(self.cache())))))
    }
}

fn serve(etcd: &EtcdSettings, key: &ClusterKey, runtime: &Handle, metrics: &Metrics, shutdown: &Shutdown) {
    for number in 0..WORKERS {
        let worker = Worker::new(number, key);
        let listener = runtime.block_on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0))).expect("a port is free");
        let record = MemberRecord::of_worker(&worker.info, listener.local_addr().expect("the listener is bound").to_string());
        let (etcd, metrics, own_shutdown) = (etcd.clone(), metrics.clone(), shutdown.clone());
        let _entered = runtime.enter();
        let server = channel::server().add_service(ControlServer::new(worker));
        shutdown.spawn(async move {
            tokio::select! {
                served = server.serve_with_incoming(channel::incoming(listener)) => served.expect("the server runs"),
                () = own_shutdown.draining() => {}
            }
        });
        let registered = shutdown.clone();
        shutdown.spawn(async move { register(etcd, record, &metrics, &registered).await });
    }
}

/// Measures a router with a thousand workers, which have four million blocks in total.
pub fn router() {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("the runtime can be built");
    let (etcd, plan) = (Server::etcd(&[]), Plan::new());
    let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
    let settings = EtcdSettings {
        endpoints: vec![etcd.address()],
        user: None,
        tls: None,
        cluster: "tandem".to_owned(),
        key: plan.key.clone(),
        lease_ttl: Duration::from_secs(60),
    };
    serve(&settings, &plan.key, runtime.handle(), &metrics, &shutdown);
    let router = plan.start("router", "router", plan.routers[0], &["--admin-listen", "127.0.0.1:0", "--etcd", &etcd.address()]);
    let started = Instant::now();
    let joined = || series(&router, "tandem_router_workers{state=\"joined\"}");
    until("all workers join", joined, |joined| *joined == f64::from(WORKERS));
    let all_joined = started.elapsed();
    let (before, since) = (cpu_seconds(&router), Instant::now());
    std::thread::sleep(MEASURED);
    let share = (cpu_seconds(&router) - before) / since.elapsed().as_secs_f64();
    let resident = crate::rig::resident(&router);
    assert_eq!(joined(), f64::from(WORKERS));
    let blocks = series(&router, "tandem_router_index_blocks");
    table::print_text(&format!(
        "\nA router with {WORKERS} workers and {blocks} blocks: all joined after {:.1} s; {:.0} MiB resident; {:.1} % of a core.",
        all_joined.as_secs_f64(),
        resident / 1024.0,
        share * 100.0
    ));
    assert!(resident < RESIDENT_MAX_KIB, "{resident} KiB resident");
    runtime.block_on(shutdown.run(Duration::from_secs(10)));
}
