//! Tests of failures of workers and transfers, and of the reasons that workers report.

use crate::{
    harness::{Cluster, Setup, TIMEOUT, prompt},
    relay::write,
};
use std::time::Duration;
use tandem_devices::sim::SimSettings;
use tandem_proto::v1::{
    Failure, FailureReason, PrefillReply, PrefillRequest, PrefillStart, Ticket, TransferPath, WorkerRef, generate_reply::Message,
    prefill_reply, prefill_request, prefill_server,
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming, transport::Server};

/// A fake decode worker, whose messages to the prefill worker the test sends.
pub struct FakeDecodeWorker {
    requests: mpsc::Sender<PrefillRequest>,
    replies: Streaming<PrefillReply>,
}

impl FakeDecodeWorker {
    async fn open(cluster: &Cluster, first: prefill_request::Message) -> Result<Self, Status> {
        let (requests, receiver) = mpsc::channel(4);
        requests.try_send(PrefillRequest { message: Some(first) }).expect("the channel has capacity");
        let replies = cluster.to_prefill.clone().prefill(ReceiverStream::new(receiver)).await?.into_inner();
        Ok(Self { requests, replies })
    }

    pub async fn start(cluster: &Cluster, prompt: Vec<u32>) -> Self {
        let first = prefill_request::Message::Start(start(cluster, prompt));
        Self::open(cluster, first).await.expect("the first message is a start")
    }

    pub async fn next(&mut self) -> Result<Option<prefill_reply::Message>, Status> {
        let reply = tokio::time::timeout(TIMEOUT, self.replies.message()).await.expect("a reply arrives")?;
        Ok(reply.and_then(|reply| reply.message))
    }

    pub async fn scheduled(&mut self) {
        assert!(matches!(self.next().await, Ok(Some(prefill_reply::Message::Scheduled(_)))));
    }

    async fn failure(&mut self) -> (FailureReason, String) {
        match self.next().await {
            Ok(Some(prefill_reply::Message::Failure(failure))) => {
                assert!(matches!(self.next().await, Ok(None)), "a failure is the last message");
                (failure.reason(), failure.instance_id)
            }
            other => panic!("expected a failure, received {other:?}"),
        }
    }

    pub async fn send(&self, message: prefill_request::Message) {
        self.requests.send(PrefillRequest { message: Some(message) }).await.expect("the stream is open");
    }
}

fn start(cluster: &Cluster, prompt: Vec<u32>) -> PrefillStart {
    PrefillStart {
        request_id: "request".to_owned(),
        attempt: 1,
        instance_id: cluster.prefill.info.instance_id.clone(),
        prompt,
        cache_namespace: b"sim".to_vec(),
        ..Default::default()
    }
}

fn ticket(address: &str, missing_blocks: Vec<u32>) -> prefill_request::Message {
    prefill_request::Message::Ticket(Ticket {
        ticket: vec![1; 16],
        address: address.to_owned(),
        missing_blocks,
        ..Ticket::default()
    })
}

#[tokio::test]
async fn unreachable_prefill_worker_is_reported_lost() {
    let mut cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let lost = (FailureReason::PrefillLost, cluster.prefill.info.instance_id.clone());
    // The first attempt opens a connection, which is closed when the second attempt needs it.
    cluster.answer(cluster.remote(prompt(1, 50), 1)).await;
    cluster.prefill.kill();
    assert_eq!(cluster.failure(cluster.remote(prompt(1, 50), 1)).await, lost);
    let unreachable = WorkerRef { instance_id: "unknown".to_owned(), address: "no address".to_owned(), ..Default::default() };
    let mut request = cluster.remote(prompt(1, 50), 1);
    request.prefill = Some(unreachable);
    assert_eq!(cluster.failure(request).await, (FailureReason::PrefillLost, "unknown".to_owned()));
    cluster.decode.idle().await;
}

/// A fake prefill worker of a newer version. It sends a message of an unknown kind, and then a failure because it drains.
struct NewerPrefillWorker;

#[tonic::async_trait]
impl prefill_server::Prefill for NewerPrefillWorker {
    type PrefillStream = tokio_stream::Iter<std::vec::IntoIter<Result<PrefillReply, Status>>>;

    async fn prefill(&self, _: Request<Streaming<PrefillRequest>>) -> Result<Response<Self::PrefillStream>, Status> {
        let draining = prefill_reply::Message::Failure(Failure { reason: FailureReason::Draining.into(), ..Failure::default() });
        let replies = [None, Some(draining)].map(|message| Ok(PrefillReply { message }));
        Ok(Response::new(tokio_stream::iter(replies.to_vec())))
    }
}

#[tokio::test]
async fn unknown_messages_of_a_newer_prefill_worker_are_skipped() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("the listener is bound").to_string();
    let newer = Server::builder().add_service(prefill_server::PrefillServer::new(NewerPrefillWorker));
    let mut serving = JoinSet::new();
    serving.spawn(newer.serve_with_incoming(tandem_proto::channel::incoming(listener)));
    let mut request = cluster.remote(prompt(1, 50), 1);
    request.prefill = Some(WorkerRef { instance_id: "newer".to_owned(), address, ..Default::default() });
    assert_eq!(cluster.failure(request).await, (FailureReason::Draining, "newer".to_owned()));
    cluster.decode.idle().await;
}

#[tokio::test]
async fn prefill_worker_that_crashes_before_starting_is_reported_lost() {
    let mut slow = Setup::slow();
    slow.engine.batch_max = 1;
    let mut cluster = Cluster::start(slow, Setup::default()).await;
    let _running = FakeDecodeWorker::start(&cluster, prompt(1, 10_000)).await;
    cluster.prefill.until(|load| load.running_sequences == 1).await;
    let mut waiting = cluster.open(cluster.remote(prompt(2, 100), 1)).await;
    cluster.prefill.until(|load| load.waiting_requests == 1).await;
    cluster.prefill.kill();
    let Some(Message::Failure(failure)) = waiting.next().await else { panic!("the request must fail") };
    assert_eq!((failure.reason(), failure.instance_id), (FailureReason::WorkerEnded, cluster.prefill.info.instance_id.clone()));
    cluster.decode.idle().await;
}

#[tokio::test]
async fn prefill_worker_that_crashes_during_prefill_is_reported_lost() {
    let mut cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let mut replies = cluster.open(cluster.remote(prompt(1, 10_000), 10)).await;
    replies.scheduled().await;
    cluster.decode.until(|load| load.in_use_blocks == 625).await;
    cluster.prefill.kill();
    let Some(Message::Failure(failure)) = replies.next().await else { panic!("the request must fail") };
    assert_eq!((failure.reason(), failure.instance_id), (FailureReason::WorkerEnded, cluster.prefill.info.instance_id.clone()));
    assert!(replies.next().await.is_none());
    cluster.decode.idle().await;
}

#[tokio::test]
async fn prefill_worker_releases_blocks_when_the_decode_worker_crashes() {
    let mut cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let mut replies = cluster.open(cluster.remote(prompt(1, 10_000), 10)).await;
    replies.scheduled().await;
    cluster.decode.until(|load| load.in_use_blocks == 625).await;
    cluster.decode.kill();
    cluster.prefill.idle().await;
}

#[tokio::test]
async fn prefill_whose_ticket_does_not_arrive_in_time_is_released_and_stays_cached() {
    let setup = Setup { ticket_wait: Duration::from_millis(200), ..Setup::default() };
    let cluster = Cluster::start(setup, Setup::default()).await;
    let mut decode_worker = FakeDecodeWorker::start(&cluster, prompt(1, 100)).await;
    decode_worker.scheduled().await;
    assert_eq!(decode_worker.failure().await, (FailureReason::Timeout, cluster.prefill.info.instance_id.clone()));
    cluster.prefill.idle().await;
    assert_eq!(cluster.answer(cluster.remote(prompt(1, 100), 1)).await.cached_tokens(), Some(96));
}

#[tokio::test]
async fn timeout_failure_names_the_decode_worker_that_has_no_free_blocks() {
    let quick = Setup { ticket_wait: Duration::from_millis(200), ..Setup::default() };
    let mut full = Setup::default();
    full.sim = SimSettings { capacity_blocks: 80, speedup: 1.0, ..full.sim };
    let cluster = Cluster::start(quick, full).await;
    let mut running = cluster.open(cluster.local(prompt(1, 1_000), 200)).await;
    running.scheduled().await;
    let failure = cluster.failure(cluster.remote(prompt(2, 1_000), 10)).await;
    assert_eq!(failure, (FailureReason::Timeout, cluster.decode.info.instance_id.clone()));
    drop(running);
    cluster.idle().await;
}

#[tokio::test]
async fn transfer_that_misses_its_deadline_fails() {
    let impatient = Setup { receive_timeout: Duration::from_millis(300), ..Setup::default() };
    let cluster = Cluster::start(Setup::slow(), impatient).await;
    let failure = cluster.failure(cluster.remote(prompt(1, 10_000), 10)).await;
    assert_eq!(failure, (FailureReason::Timeout, cluster.prefill.info.instance_id.clone()));
    cluster.idle().await;
}

#[tokio::test]
async fn failure_names_the_old_instance_of_a_restarted_worker() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let wrong = (FailureReason::WrongInstance, "before".to_owned());
    let mut request = cluster.remote(prompt(1, 50), 1);
    request.prefill.as_mut().expect("the field is set").instance_id = "before".to_owned();
    assert_eq!(cluster.failure(request).await, wrong);
    let mut request = cluster.local(prompt(1, 50), 1);
    request.instance_id = "before".to_owned();
    assert_eq!(cluster.failure(request).await, wrong);
}

#[tokio::test]
async fn full_queue_of_either_worker_refuses_requests() {
    let mut slow = Setup::slow();
    (slow.engine.batch_max, slow.engine.queue_max) = (1, 1);
    let decode = Setup { remote_waiting_max: 2, ..slow.clone() };
    let cluster = Cluster::start(slow, decode).await;
    let (prefill, decode) = (cluster.prefill.info.instance_id.clone(), cluster.decode.info.instance_id.clone());
    let running = FakeDecodeWorker::start(&cluster, prompt(1, 10_000)).await;
    cluster.prefill.until(|load| load.running_sequences == 1).await;
    let waiting = cluster.open(cluster.remote(prompt(2, 10_000), 1)).await;
    cluster.prefill.until(|load| load.waiting_requests == 1).await;
    assert_eq!(
        cluster.failure(cluster.remote(prompt(3, 100), 1)).await,
        (FailureReason::AtCapacity, prefill),
        "the prefill worker's queue is full"
    );
    drop(running);
    cluster.prefill.until(|load| load.waiting_requests == 0).await;
    let another = cluster.open(cluster.remote(prompt(4, 10_000), 1)).await;
    cluster.prefill.until(|load| load.waiting_requests == 1).await;
    let full = (FailureReason::AtCapacity, decode);
    assert_eq!(cluster.failure(cluster.remote(prompt(5, 100), 1)).await, full, "requests in remote prefill count");
    drop((waiting, another));
    cluster.idle().await;

    let local = [cluster.open(cluster.local(prompt(6, 10_000), 1)).await];
    cluster.decode.until(|load| load.running_sequences == 1).await;
    let queued = cluster.open(cluster.local(prompt(7, 10_000), 1)).await;
    cluster.decode.until(|load| load.waiting_requests == 1).await;
    assert_eq!(cluster.failure(cluster.local(prompt(8, 100), 1)).await, full, "the engine's queue is full");
    drop((local, queued));
    cluster.idle().await;
}

#[tokio::test]
async fn message_that_violates_the_protocol_is_refused_as_invalid() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let no_start =
        FakeDecodeWorker::open(&cluster, ticket("a:1", vec![])).await.err().expect("the first message must be a start");
    assert_eq!(no_start.code(), Code::InvalidArgument);
    let again = prefill_request::Message::Start(start(&cluster, prompt(1, 50)));
    let not_offered =
        Ticket { ticket: vec![1; 16], address: "a:1".to_owned(), path: TransferPath::CudaIpc.into(), ..Ticket::default() };
    let short = Ticket { ticket: vec![1; 8], path: TransferPath::Tcp.into(), ..not_offered.clone() };
    let [not_offered, short] = [not_offered, short].map(prefill_request::Message::Ticket);
    for second in [again, not_offered, short, ticket("a:1", vec![4]), ticket("a:1", vec![0, 0]), ticket("no address", vec![0])] {
        let mut decode_worker = FakeDecodeWorker::start(&cluster, prompt(1, 50)).await;
        decode_worker.scheduled().await;
        decode_worker.send(second).await;
        assert_eq!(decode_worker.next().await.expect_err("the message violates the protocol").code(), Code::InvalidArgument);
    }
    let mut decode_worker = FakeDecodeWorker::start(&cluster, vec![u32::MAX]).await;
    assert_eq!(decode_worker.failure().await, (FailureReason::InvalidRequest, cluster.prefill.info.instance_id.clone()));
    cluster.idle().await;
}

#[tokio::test]
async fn prefill_ends_when_the_decode_worker_refuses_or_is_lost() {
    let cluster = Cluster::start(Setup::default(), Setup::default()).await;
    let closed = std::net::TcpListener::bind("127.0.0.1:0")
        .expect("a port is free")
        .local_addr()
        .expect("the listener is bound")
        .to_string();
    for address in [cluster.decode.address.clone(), closed] {
        let mut decode_worker = FakeDecodeWorker::start(&cluster, prompt(1, 50)).await;
        decode_worker.scheduled().await;
        decode_worker.send(ticket(&address, vec![0, 1, 2, 3])).await;
        assert_eq!(decode_worker.failure().await, (FailureReason::PrefillLost, cluster.prefill.info.instance_id.clone()));
    }
    cluster.idle().await;
}

#[tokio::test]
async fn writes_without_a_ticket_are_refused() {
    let cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let mut replies = cluster.open(cluster.remote(prompt(1, 300), 4)).await;
    replies.scheduled().await;
    cluster.decode.until(|load| load.in_use_blocks > 0).await;
    for guess in [[0; 16], [1; 16], [255; 16]] {
        let refused = write(&cluster.decode.address, guess, &[0], vec![0; 128]).await.expect_err("the ticket is unknown");
        assert_eq!(refused.code(), Code::PermissionDenied);
    }
    let expected = Cluster::start(Setup::default(), Setup::default()).await;
    let expected = expected.answer(expected.local(prompt(1, 300), 4)).await;
    assert_eq!(replies.tokens().await, expected.tokens[&0]);
}

#[tokio::test]
async fn draining_worker_finishes_running_requests_and_refuses_new_requests() {
    // The prefill takes 3 chunks of 320 ms each, so the workers drain while it runs.
    let mut cluster = Cluster::start(Setup::slow(), Setup::default()).await;
    let mut running = cluster.open(cluster.remote(prompt(1, 200), 10)).await;
    running.scheduled().await;
    cluster.decode.until(|load| load.in_use_blocks > 0).await;
    let (prefill, decode) = (cluster.prefill.shutdown.clone(), cluster.decode.shutdown.clone());
    let ending = async { tokio::join!(prefill.run(TIMEOUT), decode.run(TIMEOUT)) };
    let serving = async {
        cluster.decode.shutdown.draining().await;
        let refused = cluster.failure(cluster.local(prompt(2, 50), 1)).await;
        assert_eq!(refused, (FailureReason::Draining, cluster.decode.info.instance_id.clone()));
        let mut decode_worker = FakeDecodeWorker::start(&cluster, prompt(3, 50)).await;
        assert_eq!(decode_worker.failure().await, (FailureReason::Draining, cluster.prefill.info.instance_id.clone()));
        running.tokens().await
    };
    let (_, tokens) = tokio::join!(ending, serving);
    assert_eq!(tokens.len(), 10, "the running request receives its blocks while the workers drain");
    for worker in [&mut cluster.prefill, &mut cluster.decode] {
        let ok = tokio::time::timeout(TIMEOUT, &mut worker.ended)
            .await
            .expect("the worker ends in time")
            .expect("the worker reports its result");
        assert!(ok);
    }
    assert!(
        tokio::time::timeout(TIMEOUT, cluster.to_prefill.prefill(tokio_stream::empty()))
            .await
            .expect("the call fails in time")
            .is_err()
    );
}

#[tokio::test]
async fn running_requests_fail_after_the_grace_period() {
    let cluster = Cluster::start(Setup::default(), Setup::slow()).await;
    let mut running = cluster.open(cluster.local(prompt(1, 10_000), 10)).await;
    running.scheduled().await;
    cluster.decode.shutdown.run(Duration::from_millis(50)).await;
    let error = tokio::time::timeout(TIMEOUT, running.0.message())
        .await
        .expect("the stream ends in time")
        .expect_err("the end is an error");
    assert_eq!(error.code(), Code::Unavailable);
    cluster.decode.idle().await;
}
