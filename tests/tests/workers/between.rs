//! A relay between the workers that sees their messages: how an attacker obtains a ticket.

use std::sync::{Arc, Mutex};
use tandem_proto::v1::{
    self, DescribeRequest, PrefillReply, PrefillRequest, SnapshotChunk, SnapshotRequest, WatchReply, WatchRequest, WorkerInfo,
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

/// Relays the requests and replies of the real prefill worker, and reports each ticket.
#[derive(Clone)]
struct Relay {
    to: Channel,
    seen: mpsc::UnboundedSender<Seen>,
    passing: Arc<Mutex<JoinSet<()>>>,
}

/// A ticket that the relay holds back until this value is dropped.
pub struct Seen {
    pub ticket: v1::Ticket,
    _held: oneshot::Sender<()>,
}

/// The relay, which runs until it is dropped.
pub struct Between {
    pub address: String,
    tickets: mpsc::UnboundedReceiver<Seen>,
    _serving: JoinSet<()>,
}

impl Between {
    pub async fn start(to: Channel) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (seen, tickets) = mpsc::unbounded_channel();
        let relay = Relay { to, seen, passing: Arc::default() };
        let server = tandem_proto::channel::server()
            .add_service(PrefillServer::new(relay.clone()))
            .add_service(ControlServer::new(relay))
            .serve_with_incoming(tandem_proto::channel::incoming(listener));
        let mut serving = JoinSet::new();
        serving.spawn(async move { server.await.expect("it serves until it is dropped") });
        Self { address, tickets, _serving: serving }
    }

    /// Returns the next ticket, which is held back until the returned value is dropped.
    pub async fn ticket(&mut self) -> Seen {
        tokio::time::timeout(crate::harness::SOON, self.tickets.recv()).await.expect("soon").expect("the relay runs")
    }
}

impl Seen {
    pub fn secret(&self) -> [u8; 16] {
        self.ticket.ticket.as_slice().try_into().expect("a ticket has 16 bytes")
    }

    /// Writes these bytes as the block; returns when they are in the decode worker's memory.
    pub async fn write(&self, index: u32, payload: Vec<u8>) -> Result<(), Status> {
        write(&self.ticket.address, self.secret(), &[index], payload).await
    }
}

/// Writes the same bytes as each of these blocks, under a guessed or stolen ticket.
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
impl Prefill for Relay {
    type PrefillStream = Streaming<PrefillReply>;

    async fn prefill(&self, request: Request<Streaming<PrefillRequest>>) -> Result<Response<Self::PrefillStream>, Status> {
        let (seen, mut messages) = (self.seen.clone(), request.into_inner());
        let (passed, requests) = mpsc::channel(1);
        self.passing.lock().expect("not poisoned").spawn(async move {
            while let Ok(Some(message)) = messages.message().await {
                if let Some(Message::Ticket(ticket)) = &message.message {
                    let (held, released) = oneshot::channel();
                    // The test has ended.
                    let _ = seen.send(Seen { ticket: ticket.clone(), _held: held });
                    let _ = released.await;
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
impl Control for Relay {
    type WatchStream = Streaming<WatchReply>;
    type SnapshotStream = Streaming<SnapshotChunk>;

    async fn describe(&self, request: Request<DescribeRequest>) -> Result<Response<WorkerInfo>, Status> {
        ControlClient::new(self.to.clone()).describe(request.into_inner()).await
    }

    async fn watch(&self, request: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        ControlClient::new(self.to.clone()).watch(request.into_inner()).await
    }

    async fn snapshot(&self, request: Request<SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        ControlClient::new(self.to.clone()).snapshot(request.into_inner()).await
    }
}
