//! Tests of processes on the cluster's network that request access to a worker's GPU memory. They receive access only with a ticket under
//! which blocks were written.

use crate::{
    device_memory::DeviceAccess,
    failures::FakeDecodeWorker,
    harness::{Cluster, Setup, TIMEOUT, Worker, channel, prompt},
};
use tandem_process::{Metrics, Shutdown};
use tandem_proto::{
    ClusterKey,
    channel::{Channel, Listener, Network, endpoint},
    v1::{
        self, DescribeRequest, FailureReason, NcclControlReply, NcclControlRequest, PrefillDone, PushReply, PushRequest,
        TransferCapabilities,
        control_client::ControlClient,
        prefill_client::PrefillClient,
        prefill_reply::Message,
        prefill_request,
        transfer_client::TransferClient,
        transfer_server::{Transfer, TransferServer},
    },
};
use tokio::{net::TcpListener, sync::mpsc, task::JoinSet};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

/// A prefill worker joins at most this many communicators at the same time.
const JOINS_MAX: u64 = 4;
/// A worker serves at most this many `NcclControl` streams at the same time.
const CONTROL_STREAMS_MAX: usize = 256;

fn setup(access: &DeviceAccess) -> Setup {
    Setup { access: Some(access.clone()), ..Setup::default() }
}

fn all_paths() -> DeviceAccess {
    DeviceAccess { ipc: true, nccl: true, ..DeviceAccess::default() }
}

/// Returns a ticket for blocks that are sent to `address`. It requests the IPC handle of the GPU memory, and that the worker joins a
/// communicator.
fn ticket_requesting_access(address: &str, communicator: u32) -> v1::Ticket {
    v1::Ticket {
        ticket: vec![7; 16],
        address: address.to_owned(),
        missing_blocks: vec![0, 1, 2, 3],
        communicator: communicator.to_le_bytes().to_vec(),
        wants_ipc_handle: true,
        ..Default::default()
    }
}

async fn prefill_with_ticket(cluster: &Cluster, number: u32, ticket: v1::Ticket) -> Result<PrefillDone, FailureReason> {
    let mut decode_worker = FakeDecodeWorker::start(cluster, prompt(number, 50)).await;
    let Ok(Some(Message::TransferCapabilities(capabilities))) = decode_worker.next().await else {
        panic!("the worker has a device")
    };
    let expected = TransferCapabilities { cuda_ipc: true, nccl_ranks: 1 };
    assert_eq!(capabilities, expected, "the capabilities contain no handle");
    decode_worker.scheduled().await;
    decode_worker.send(prefill_request::Message::Ticket(ticket)).await;
    match decode_worker.next().await {
        Ok(Some(Message::Done(done))) => Ok(done),
        Ok(Some(Message::Failure(failure))) => Err(failure.reason()),
        other => panic!("expected Done or Failure, received {other:?}"),
    }
}

/// Waits until the joining of this many communicators has begun.
async fn wait_for_joins(access: &DeviceAccess, count: u64) {
    let mut joins = access.joins_started.subscribe();
    let reached = tokio::time::timeout(TIMEOUT, joins.wait_for(|joins| *joins >= count)).await;
    reached.expect("the joins begin in time").expect("the sender exists");
}

#[tokio::test]
async fn ticket_without_a_reservation_gives_no_access() {
    let access = all_paths();
    let cluster = Cluster::start(setup(&access), setup(&access)).await;
    for number in 0..3 {
        let ticket = ticket_requesting_access(&cluster.decode.address, number);
        assert_eq!(
            prefill_with_ticket(&cluster, number, ticket).await,
            Err(FailureReason::PrefillLost),
            "the decode worker refuses its blocks"
        );
        // A ticket without blocks does not prove that there is a reservation.
        let ticket = v1::Ticket { missing_blocks: Vec::new(), ..ticket_requesting_access(&cluster.decode.address, number) };
        assert_eq!(prefill_with_ticket(&cluster, number, ticket).await.expect("no block is sent").ipc_handle, b"");
    }
    cluster.idle().await;
    assert_eq!(*access.joins_started.borrow(), 0);
}

#[tokio::test]
async fn ticket_with_unsigned_address_gives_no_access() {
    let (access, key) = (all_paths(), ClusterKey::random());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("the listener is bound").to_string();
    let (engine, _gate) = setup(&access).start();
    let running = tandem_prefill_worker::run(
        Listener::tcp(listener, key.clone()),
        engine,
        setup(&access).prefill_settings(),
        Metrics::default(),
        Shutdown::default(),
    );
    let mut serving = JoinSet::new();
    serving.spawn(async move { running.await.expect("the worker serves until it is dropped") });
    let channel = Network::tcp(key.clone()).connect_lazy(&endpoint(&address).expect("the address has a host and a port"));
    let info =
        ControlClient::new(channel.clone()).describe(DescribeRequest::default()).await.expect("the worker answers").into_inner();
    let receiver = AcceptingReceiver::start().await;
    let unsigned = ticket_requesting_access(&receiver.address, 1);
    let signed = unsigned.clone().with_signed_address(&info.instance_id, &key);
    // These tickets have no signature, a signature for another prefill worker, and a signature of another address.
    let elsewhere =
        v1::Ticket { address: "127.0.0.1:1".to_owned(), ..unsigned.clone() }.with_signed_address(&info.instance_id, &key);
    let elsewhere = v1::Ticket { address: unsigned.address.clone(), ..elsewhere };
    for ticket in [unsigned.clone(), unsigned.with_signed_address("another", &key), elsewhere] {
        let last = last_prefill_message(&channel, &info.instance_id, ticket).await;
        assert_eq!(last.expect_err("the ticket is refused").code(), Code::InvalidArgument);
    }
    assert_eq!(*access.joins_started.borrow(), 0);
    let Ok(Some(Message::Done(done))) = last_prefill_message(&channel, &info.instance_id, signed).await else {
        panic!("the ticket is signed")
    };
    assert!(!done.ipc_handle.is_empty());
    wait_for_joins(&access, 1).await;
}

/// Prefills a prompt with this ticket on a cluster with a key. Returns the prefill worker's last message.
async fn last_prefill_message(channel: &Channel, instance_id: &str, ticket: v1::Ticket) -> Result<Option<Message>, Status> {
    let start = v1::PrefillStart { instance_id: instance_id.to_owned(), prompt: prompt(1, 50), ..Default::default() };
    let messages = [prefill_request::Message::Start(start), prefill_request::Message::Ticket(ticket)];
    let (requests, receiver) = mpsc::channel(2);
    for message in messages {
        requests.try_send(v1::PrefillRequest { message: Some(message) }).expect("the channel has capacity");
    }
    let mut replies = PrefillClient::new(channel.clone()).prefill(ReceiverStream::new(receiver)).await?.into_inner();
    let mut last = None;
    while let Some(reply) = replies.message().await? {
        last = reply.message;
    }
    Ok(last)
}

#[tokio::test]
async fn worker_joins_one_communicator_per_peer_at_a_time() {
    let access = all_paths();
    let cluster = Cluster::start(setup(&access), setup(&access)).await;
    let receiver = AcceptingReceiver::start().await;
    for number in 0..5 {
        let done = prefill_with_ticket(&cluster, number, ticket_requesting_access(&receiver.address, number))
            .await
            .expect("the blocks are accepted");
        assert!(!done.ipc_handle.is_empty());
    }
    wait_for_joins(&access, 1).await;
    receiver.control_stream_opened().await;
    assert_eq!(*access.joins_started.borrow(), 1);
    cluster.idle().await;
}

#[tokio::test]
async fn number_of_concurrent_communicator_joins_is_bounded() {
    let access = all_paths();
    let cluster = Cluster::start(setup(&access), setup(&access)).await;
    access.join_gate.close();
    let mut peers = Vec::new();
    for number in 0..JOINS_MAX as u32 + 2 {
        let receiver = AcceptingReceiver::start().await;
        prefill_with_ticket(&cluster, number, ticket_requesting_access(&receiver.address, number))
            .await
            .expect("the blocks are accepted");
        peers.push(receiver);
    }
    wait_for_joins(&access, JOINS_MAX).await;
    access.join_gate.open();
    for peer in &peers[..JOINS_MAX as usize] {
        peer.control_stream_opened().await;
    }
    assert_eq!(
        *access.joins_started.borrow(),
        JOINS_MAX,
        "the blocks for the other peers were sent over TCP, and no communicator is queued to be joined"
    );
    // The worker has joined this communicator or failed to join it, so it can join another one.
    let last = AcceptingReceiver::start().await;
    prefill_with_ticket(&cluster, 100, ticket_requesting_access(&last.address, 100)).await.expect("the blocks are accepted");
    wait_for_joins(&access, JOINS_MAX + 1).await;
    cluster.idle().await;
}

struct ControlStream {
    _requests: mpsc::Sender<NcclControlRequest>,
    _replies: Streaming<NcclControlReply>,
}

async fn open_control_stream(address: &str, communicator: &[u8]) -> Result<ControlStream, Status> {
    let (requests, receiver) = mpsc::channel(1);
    let first = NcclControlRequest { communicator: communicator.to_vec(), ..NcclControlRequest::default() };
    requests.try_send(first).expect("the channel has capacity");
    let replies = TransferClient::new(channel(address).await).nccl_control(ReceiverStream::new(receiver)).await?;
    Ok(ControlStream { _requests: requests, _replies: replies.into_inner() })
}

#[tokio::test]
async fn control_stream_of_unknown_communicator_is_refused() {
    let access = all_paths();
    let decode = Worker::decode(&setup(&access)).await;
    for communicator in [&b""[..], b"unknown"] {
        assert_eq!(
            open_control_stream(&decode.address, communicator).await.err().map(|status| status.code()),
            Some(Code::NotFound)
        );
    }
}

#[tokio::test]
async fn number_of_control_streams_is_bounded() {
    let decode = Worker::decode(&setup(&all_paths())).await;
    // A stream without a first message occupies a place until the worker's time limit for that message has passed.
    let silent = (0..CONTROL_STREAMS_MAX + 10).map(|_| async {
        let mut client = TransferClient::new(channel(&decode.address).await);
        client.nccl_control(futures::stream::pending::<NcclControlRequest>()).await.err().map(|status| status.code())
    });
    let ends = tokio::time::timeout(TIMEOUT, futures::future::join_all(silent)).await.expect("the streams end in time");
    let count = |code| ends.iter().filter(|end| **end == Some(code)).count();
    assert_eq!((count(Code::ResourceExhausted), count(Code::InvalidArgument)), (10, CONTROL_STREAMS_MAX));
    // Streams that have ended no longer count towards the limit.
    assert_eq!(open_control_stream(&decode.address, b"any").await.err().map(|status| status.code()), Some(Code::NotFound));
}

struct AcceptingReceiver {
    address: String,
    control_streams: tokio::sync::watch::Receiver<u32>,
    _serving: JoinSet<()>,
}

impl AcceptingReceiver {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let (opened, control_streams) = tokio::sync::watch::channel(0);
        let server = tandem_proto::channel::server().add_service(TransferServer::new(Accepting(opened)));
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            server
                .serve_with_incoming(tandem_proto::channel::incoming(listener))
                .await
                .expect("the server runs until it is dropped");
        });
        Self { address, control_streams, _serving: serving }
    }

    async fn control_stream_opened(&self) {
        let mut control_streams = self.control_streams.clone();
        tokio::time::timeout(TIMEOUT, control_streams.wait_for(|control_streams| *control_streams > 0))
            .await
            .expect("a stream is opened in time")
            .expect("the server runs");
    }
}

struct Accepting(tokio::sync::watch::Sender<u32>);

#[tonic::async_trait]
impl Transfer for Accepting {
    type NcclControlStream = futures::stream::Pending<Result<NcclControlReply, Status>>;

    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let (mut messages, mut written_blocks) = (request.into_inner(), 0);
        while messages.message().await?.is_some() {
            written_blocks += 1;
        }
        Ok(Response::new(PushReply { written_blocks }))
    }

    async fn nccl_control(&self, _: Request<Streaming<NcclControlRequest>>) -> Result<Response<Self::NcclControlStream>, Status> {
        self.0.send_modify(|control_streams| *control_streams += 1);
        Ok(Response::new(futures::stream::pending()))
    }
}
