//! The gRPC service of a worker that receives blocks.

use crate::{Piece, Refused, Sink};
use futures::{Stream, StreamExt, future::BoxFuture, stream};
use std::{fmt, pin::Pin, sync::Arc, time::Duration};
use tandem_kv::Ticket;
use tandem_proto::{
    channel::MESSAGE_BYTES_MAX,
    v1::{
        NcclControlReply, NcclControlRequest, PushReply, PushRequest,
        transfer_server::{Transfer, TransferServer},
    },
};
use tokio::sync::Semaphore;
use tonic::{Request, Response, Status, Streaming};

/// For a link's first message.
const FIRST_WAIT: Duration = Duration::from_secs(5);
/// `NcclControl` streams at a time, each with a communicator or about to name one: more than a cluster has prefill workers.
const LINK_STREAMS_MAX: usize = 256;

/// The links over which blocks come to a worker beside its service.
pub trait Links: Send + Sync + 'static {
    /// The receiving end of one; `None`: there is no such link, or it is open already. Resolves when the link is made.
    fn open(&self, name: Vec<u8>) -> BoxFuture<'static, Option<Box<dyn Receiver>>>;
}

/// One link's end. Dropping it closes the link.
pub trait Receiver: Send + 'static {
    /// Receives what the sender now sends. Says whether it has landed: what the ticket does not allow is received all the same. `None`: the
    /// link has broken.
    fn receive(&mut self, ticket: Ticket, block_indices: Vec<u32>) -> BoxFuture<'_, Option<bool>>;

    /// Resolves when the worker leaves, and nothing more comes.
    fn ended(&self) -> BoxFuture<'static, ()>;
}

/// Of a worker that has no links.
pub struct NoLinks;

impl Links for NoLinks {
    fn open(&self, _: Vec<u8>) -> BoxFuture<'static, Option<Box<dyn Receiver>>> {
        Box::pin(std::future::ready(None))
    }
}

/// Writes what arrives through a [`Sink`]; what is not taken yet waits in the network. A write that is refused ends the push.
pub struct TransferService {
    sink: Sink,
    links: Arc<dyn Links>,
    /// [`LINK_STREAMS_MAX`] permits.
    streams: Arc<Semaphore>,
}

impl fmt::Debug for TransferService {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("TransferService")
    }
}

impl TransferService {
    /// For a gRPC server.
    pub fn server(sink: Sink, links: impl Links) -> TransferServer<Self> {
        let streams = Arc::new(Semaphore::new(LINK_STREAMS_MAX));
        TransferServer::new(Self { sink, links: Arc::new(links), streams }).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl Transfer for TransferService {
    type NcclControlStream = Pin<Box<dyn Stream<Item = Result<NcclControlReply, Status>> + Send>>;

    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let piece = |request: Result<PushRequest, Status>| {
            let PushRequest { ticket, block_index: index, payload, ready_blocks } = request?;
            Ok::<_, Status>((read(&ticket)?, ready_blocks.map_or(Piece::Block { index, payload }, Piece::Ready)))
        };
        let written_blocks = self.sink.write_all(request.into_inner().map(piece)).await?;
        Ok(Response::new(PushReply { written_blocks }))
    }

    async fn nccl_control(
        &self,
        request: Request<Streaming<NcclControlRequest>>,
    ) -> Result<Response<Self::NcclControlStream>, Status> {
        let permit = Arc::clone(&self.streams).try_acquire_owned();
        let permit = permit.map_err(|_| Status::resource_exhausted("too many links are open; send the blocks with Push"))?;
        let mut requests = request.into_inner();
        let first = tokio::time::timeout(FIRST_WAIT, requests.message()).await.unwrap_or(Ok(None))?;
        let Some(NcclControlRequest { communicator, .. }) = first else {
            return Err(Status::invalid_argument("the first message must name the communicator, and come at once"));
        };
        let receiver = self.links.open(communicator).await.ok_or_else(|| {
            Status::not_found("no ticket of a live reservation names this communicator, or it has a stream already")
        })?;
        let replies = stream::unfold((requests, receiver, permit), |(mut requests, mut receiver, permit)| async move {
            let request = tokio::select! {
                request = requests.message() => request.ok()??,
                () = receiver.ended() => return None,
            };
            let written = receiver.receive(read(&request.ticket).ok()?, request.block_indices).await?;
            Some((Ok(NcclControlReply { written }), (requests, receiver, permit)))
        });
        Ok(Response::new(replies.boxed()))
    }
}

fn read(ticket: &[u8]) -> Result<Ticket, Status> {
    Ticket::try_from(ticket).map_err(|invalid| Status::invalid_argument(invalid.to_string()))
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        Status::permission_denied(refused.to_string())
    }
}
