//! A relay between the workers. It reads their messages, as an attacker would do to obtain a ticket.

use std::sync::{Arc, Mutex};
use tandem_proto::v1::{
    self, DescribeRequest, DrainReply, DrainRequest, PrefillReply, PrefillRequest, SnapshotChunk, SnapshotRequest, WatchReply,
    WatchRequest, WorkerInfo,
    control_client::ControlClient,
    control_server::{Control, ControlServer},
    prefill_client::PrefillClient,
    prefill_request::Message,
    prefill_server::{Prefill, PrefillServer},
    transfer_client::TransferClient,
};
use tokio::{
    net::TcpListener,
    sync::{mpsc, oneshot},
    task::JoinSet,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming, transport::Channel};

#[derive(Clone)]
struct RelayService {
    to: Channel,
    held_tickets: mpsc::UnboundedSender<HeldTicket>,
    forwarding: Arc<Mutex<JoinSet<()>>>,
}

/// A ticket that the relay holds back. It is forwarded when this value is dropped.
pub struct HeldTicket {
    pub ticket: v1::Ticket,
    _hold: oneshot::Sender<()>,
}

pub struct TicketRelay {
    pub address: String,
    tickets: mpsc::UnboundedReceiver<HeldTicket>,
    _serving: JoinSet<()>,
}

impl TicketRelay {
    pub async fn start(to: Channel) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound").to_string();
        let (held_tickets, tickets) = mpsc::unbounded_channel();
        let relay = RelayService { to, held_tickets, forwarding: Arc::default() };
        let server = tandem_proto::channel::server()
            .add_service(PrefillServer::new(relay.clone()))
            .add_service(ControlServer::new(relay))
            .serve_with_incoming(tandem_proto::channel::incoming(listener));
        let mut serving = JoinSet::new();
        serving.spawn(async move { server.await.expect("the server runs until it is dropped") });
        Self { address, tickets, _serving: serving }
    }

    pub async fn ticket(&mut self) -> HeldTicket {
        tokio::time::timeout(crate::harness::TIMEOUT, self.tickets.recv())
            .await
            .expect("a ticket arrives in time")
            .expect("the relay runs")
    }
}

impl HeldTicket {
    pub fn secret(&self) -> [u8; 16] {
        self.ticket.ticket.as_slice().try_into().expect("a ticket has 16 bytes")
    }

    /// Writes these bytes as the block with this index. Returns when the bytes are in the decode worker's memory.
    pub async fn write(&self, index: u32, payload: Vec<u8>) -> Result<(), Status> {
        write(&self.ticket.address, self.secret(), &[index], payload).await
    }
}

/// Writes the same bytes to each of these blocks under a guessed or stolen ticket.
pub async fn write(address: &str, ticket: [u8; 16], indices: &[u32], payload: Vec<u8>) -> Result<(), Status> {
    let write = |index: &u32| v1::PushRequest {
        ticket: ticket.to_vec(),
        block_index: *index,
        payload: payload.clone().into(),
        ..Default::default()
    };
    let writes: Vec<_> = indices.iter().map(write).collect();
    let written = TransferClient::new(crate::harness::channel(address).await).push(tokio_stream::iter(writes)).await?;
    assert_eq!(written.into_inner().written_blocks as usize, indices.len());
    Ok(())
}

#[tonic::async_trait]
impl Prefill for RelayService {
    type PrefillStream = Streaming<PrefillReply>;

    async fn prefill(&self, request: Request<Streaming<PrefillRequest>>) -> Result<Response<Self::PrefillStream>, Status> {
        let (held_tickets, mut messages) = (self.held_tickets.clone(), request.into_inner());
        let (passed, requests) = mpsc::channel(1);
        self.forwarding.lock().expect("no test panics with the lock").spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                if let Some(Message::Ticket(ticket)) = &message.message {
                    let (hold, released) = oneshot::channel();
                    // Sending fails if the test has ended.
                    let _ = held_tickets.send(HeldTicket { ticket: ticket.clone(), _hold: hold });
                    let _ = released.await;
                    // A decode worker of a later version sends a kind of message that the prefill worker does not know, and skips.
                    let _ = passed.send(PrefillRequest { message: None }).await;
                }
                if passed.send(message).await.is_err() {
                    break;
                }
            }
        });
        PrefillClient::new(self.to.clone()).prefill(ReceiverStream::new(requests)).await
    }
}

#[tonic::async_trait]
impl Control for RelayService {
    type WatchStream = Streaming<WatchReply>;
    type SnapshotStream = Streaming<SnapshotChunk>;

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        ControlClient::new(self.to.clone()).describe(request.into_inner()).await
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        ControlClient::new(self.to.clone()).watch(request.into_inner()).await
    }

    async fn drain(&self, request: Request<DrainRequest>) -> Result<Response<DrainReply>, Status> {
        ControlClient::new(self.to.clone()).drain(request.into_inner()).await
    }

    async fn snapshot(&self, request: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        ControlClient::new(self.to.clone()).snapshot(request.into_inner()).await
    }
}
