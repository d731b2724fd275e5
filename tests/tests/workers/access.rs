//! Processes on the cluster's network that request access to a worker's GPU memory. Only a ticket under which blocks were written
//! gives access.

use crate::{
    failures::Played,
    harness::{Cluster, SOON, Setup, Worker, channel, prompt},
    reach::Reach,
};
use tandem_node::{Metrics, Shutdown};
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

/// Communicators that a prefill worker joins at a time.
const JOINS_MAX: u64 = 4;
/// As many `NcclControl` streams as a worker serves.
const CONTROL_STREAMS_MAX: usize = 256;

fn setup(reach: &Reach) -> Setup {
    Setup { reach: Some(reach.clone()), ..Setup::default() }
}

fn everything() -> Reach {
    Reach { shares: true, links: true, ..Reach::default() }
}

/// A ticket that asks for the handle and for a join, for blocks that are to go to `address`.
fn asking_for_all(address: &str, communicator: u32) -> v1::Ticket {
    v1::Ticket {
        ticket: vec![7; 16],
        address: address.to_owned(),
        missing_blocks: vec![0, 1, 2, 3],
        communicator: communicator.to_le_bytes().to_vec(),
        wants_ipc_handle: true,
        ..Default::default()
    }
}

/// Prefills a prompt and gives this ticket.
async fn give(cluster: &Cluster, number: u32, ticket: v1::Ticket) -> Result<PrefillDone, FailureReason> {
    let mut played = Played::start(cluster, prompt(number, 50)).await;
    let Ok(Some(Message::TransferCapabilities(ways))) = played.next().await else { panic!("it has devices to offer") };
    assert_eq!(ways, TransferCapabilities { cuda_ipc: true, nccl_ranks: 1 }, "what it can do, and nothing that helps to do it");
    played.scheduled().await;
    played.say(prefill_request::Message::Ticket(ticket)).await;
    match played.next().await {
        Ok(Some(Message::Done(done))) => Ok(done),
        Ok(Some(Message::Failure(failure))) => Err(failure.reason()),
        other => panic!("{other:?} ends no prefill"),
    }
}

/// Returns when this many links were begun.
async fn joined(reach: &Reach, links: u64) {
    let mut joined = reach.joined.subscribe();
    tokio::time::timeout(SOON, joined.wait_for(|joined| *joined >= links)).await.expect("soon").expect("it is there");
}

#[tokio::test]
async fn ticket_of_no_reservation_yields_no_handle_and_no_join() {
    let reach = everything();
    let cluster = Cluster::start(setup(&reach), setup(&reach)).await;
    for number in 0..3 {
        let ticket = asking_for_all(&cluster.decode.address, number);
        assert_eq!(give(&cluster, number, ticket).await, Err(FailureReason::PrefillLost), "the decode worker refuses its blocks");
        // Without blocks there is no proof of a reservation.
        let ticket = v1::Ticket { missing_blocks: Vec::new(), ..asking_for_all(&cluster.decode.address, number) };
        assert_eq!(give(&cluster, number, ticket).await.expect("nothing is to be sent").ipc_handle, b"");
    }
    cluster.idle().await;
    assert_eq!(*reach.joined.borrow(), 0);
}

#[tokio::test]
async fn ticket_with_unsigned_address_yields_no_handle_and_no_join() {
    let (reach, key) = (everything(), ClusterKey::random());
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("it is bound").to_string();
    let (engine, _gate) = setup(&reach).start();
    let running = tandem_prefill_worker::run(
        Listener::tcp(listener, key.clone()),
        engine,
        setup(&reach).prefill_settings(),
        Metrics::default(),
        Shutdown::default(),
    );
    let mut serving = JoinSet::new();
    serving.spawn(async move { running.await.expect("it serves until it is dropped") });
    let channel = Network::tcp(key.clone()).connect_lazy(&endpoint(&address).expect("host:port"));
    let info = ControlClient::new(channel.clone()).describe(DescribeRequest {}).await.expect("it serves").into_inner();
    let taking = Taking::start().await;
    let asking = asking_for_all(&taking.address, 1);
    let signed = asking.clone().with_signed_address(&info.instance_id, &key);
    // No signature, one for another prefill worker, and one that was made for another address.
    let elsewhere =
        v1::Ticket { address: "127.0.0.1:1".to_owned(), ..asking.clone() }.with_signed_address(&info.instance_id, &key);
    let elsewhere = v1::Ticket { address: asking.address.clone(), ..elsewhere };
    for ticket in [asking.clone(), asking.with_signed_address("another", &key), elsewhere] {
        let last = prefilled(&channel, &info.instance_id, ticket).await;
        assert_eq!(last.expect_err("it is refused").code(), Code::InvalidArgument);
    }
    assert_eq!(*reach.joined.borrow(), 0);
    let Ok(Some(Message::Done(done))) = prefilled(&channel, &info.instance_id, signed).await else {
        panic!("its address is signed")
    };
    assert!(!done.ipc_handle.is_empty());
    joined(&reach, 1).await;
}

/// The last thing that a prefill worker of a cluster with a key says of a prompt with this ticket.
async fn prefilled(channel: &Channel, instance_id: &str, ticket: v1::Ticket) -> Result<Option<Message>, Status> {
    let start = v1::PrefillStart { instance_id: instance_id.to_owned(), prompt: prompt(1, 50), ..Default::default() };
    let messages = [prefill_request::Message::Start(start), prefill_request::Message::Ticket(ticket)];
    let (requests, receiver) = mpsc::channel(2);
    for message in messages {
        requests.try_send(v1::PrefillRequest { message: Some(message) }).expect("there is room");
    }
    let mut replies = PrefillClient::new(channel.clone()).prefill(ReceiverStream::new(receiver)).await?.into_inner();
    let mut last = None;
    while let Some(reply) = replies.message().await? {
        last = reply.message;
    }
    Ok(last)
}

#[tokio::test]
async fn peer_has_one_join_at_a_time() {
    let reach = everything();
    let cluster = Cluster::start(setup(&reach), setup(&reach)).await;
    let taking = Taking::start().await;
    for number in 0..5 {
        let done = give(&cluster, number, asking_for_all(&taking.address, number)).await.expect("its blocks are taken");
        assert!(!done.ipc_handle.is_empty());
    }
    joined(&reach, 1).await;
    taking.linked().await;
    assert_eq!(*reach.joined.borrow(), 1);
    cluster.idle().await;
}

#[tokio::test]
async fn joins_of_many_peers_are_bounded() {
    let reach = everything();
    let cluster = Cluster::start(setup(&reach), setup(&reach)).await;
    reach.join_gate.close();
    let mut peers = Vec::new();
    for number in 0..JOINS_MAX as u32 + 2 {
        let taking = Taking::start().await;
        give(&cluster, number, asking_for_all(&taking.address, number)).await.expect("its blocks are taken");
        peers.push(taking);
    }
    joined(&reach, JOINS_MAX).await;
    reach.join_gate.open();
    for peer in &peers[..JOINS_MAX as usize] {
        peer.linked().await;
    }
    assert_eq!(*reach.joined.borrow(), JOINS_MAX, "the others' blocks went over TCP, and no join waits in line");
    // There is capacity again.
    let last = Taking::start().await;
    give(&cluster, 100, asking_for_all(&last.address, 100)).await.expect("its blocks are taken");
    joined(&reach, JOINS_MAX + 1).await;
    cluster.idle().await;
}

/// A `NcclControl` stream, open as long as it is held.
struct Linking {
    _requests: mpsc::Sender<NcclControlRequest>,
    _replies: Streaming<NcclControlReply>,
}

async fn link(address: &str, communicator: &[u8]) -> Result<Linking, Status> {
    let (requests, receiver) = mpsc::channel(1);
    let first = NcclControlRequest { communicator: communicator.to_vec(), ..NcclControlRequest::default() };
    requests.try_send(first).expect("there is room");
    let replies = TransferClient::new(channel(address).await).nccl_control(ReceiverStream::new(receiver)).await?;
    Ok(Linking { _requests: requests, _replies: replies.into_inner() })
}

#[tokio::test]
async fn link_of_unknown_communicator_is_refused() {
    let reach = everything();
    let decode = Worker::decode(&setup(&reach)).await;
    for communicator in [&b""[..], b"unknown"] {
        assert_eq!(link(&decode.address, communicator).await.err().map(|status| status.code()), Some(Code::NotFound));
    }
}

#[tokio::test]
async fn control_streams_are_bounded() {
    let decode = Worker::decode(&setup(&everything())).await;
    // Each holds its place without a first message, until the worker stops waiting for one.
    let silent = (0..CONTROL_STREAMS_MAX + 10).map(|_| async {
        let mut client = TransferClient::new(channel(&decode.address).await);
        client.nccl_control(futures::stream::pending::<NcclControlRequest>()).await.err().map(|status| status.code())
    });
    let ends = tokio::time::timeout(SOON, futures::future::join_all(silent)).await.expect("soon");
    let count = |code| ends.iter().filter(|end| **end == Some(code)).count();
    assert_eq!((count(Code::ResourceExhausted), count(Code::InvalidArgument)), (10, CONTROL_STREAMS_MAX));
    // Streams that have ended make room.
    assert_eq!(link(&decode.address, b"any").await.err().map(|status| status.code()), Some(Code::NotFound));
}

/// A receiver that accepts all blocks, and all control streams.
struct Taking {
    address: String,
    links: tokio::sync::watch::Receiver<u32>,
    _serving: JoinSet<()>,
}

impl Taking {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (opened, links) = tokio::sync::watch::channel(0);
        let server = tandem_proto::channel::server().add_service(TransferServer::new(Accepting(opened)));
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            server.serve_with_incoming(tandem_proto::channel::incoming(listener)).await.expect("it serves until it is dropped");
        });
        Self { address, links, _serving: serving }
    }

    /// Returns when the prefill worker has opened a stream.
    async fn linked(&self) {
        let mut links = self.links.clone();
        tokio::time::timeout(SOON, links.wait_for(|links| *links > 0)).await.expect("soon").expect("it serves");
    }
}

struct Accepting(tokio::sync::watch::Sender<u32>);

#[tonic::async_trait]
impl Transfer for Accepting {
    /// Stays open and replies nothing.
    type NcclControlStream = futures::stream::Pending<Result<NcclControlReply, Status>>;

    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let (mut messages, mut written_blocks) = (request.into_inner(), 0);
        while messages.message().await?.is_some() {
            written_blocks += 1;
        }
        Ok(Response::new(PushReply { written_blocks }))
    }

    async fn nccl_control(&self, _: Request<Streaming<NcclControlRequest>>) -> Result<Response<Self::NcclControlStream>, Status> {
        self.0.send_modify(|links| *links += 1);
        Ok(Response::new(futures::stream::pending()))
    }
}
