//! The gRPC service of a worker that receives blocks.

use crate::{
    Destination,
    ipc::IpcReceiver,
    nccl::{NcclReceiver, PeerConnection},
};
use futures::{Stream, StreamExt, TryStreamExt, stream};
use std::{
    pin::{Pin, pin},
    sync::Arc,
    time::Duration,
};
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

/// The number of bytes of one transfer that may wait to be written, in at least [`WRITES_MIN`] and at most [`WRITES_MAX`] messages. The destination
/// writes only between two steps of its engine: with steps of 10 ms, this limit permits 6.7 GB/s.
const WRITES_BYTES: usize = 64 << 20;
const WRITES_MIN: usize = 16;
const WRITES_MAX: usize = 1_024;
/// The time limit for a control stream's first message, from the opening of the stream.
const FIRST_WAIT: Duration = Duration::from_secs(5);
/// At most this many control streams are open at a time: more than a cluster has prefill workers.
const CONTROL_STREAMS_MAX: usize = 256;

/// Writes the blocks that arrive. While the service is busy, further messages wait in the network. A refused write ends the stream.
pub struct TransferService {
    destination: Arc<dyn Destination>,
    ipc: Option<IpcReceiver>,
    nccl: Option<NcclReceiver>,
    control_streams: Arc<Semaphore>,
}

impl TransferService {
    pub(crate) fn server(
        destination: Arc<dyn Destination>,
        ipc: Option<IpcReceiver>,
        nccl: Option<NcclReceiver>,
    ) -> TransferServer<Self> {
        let control_streams = Arc::new(Semaphore::new(CONTROL_STREAMS_MAX));
        TransferServer::new(Self { destination, ipc, nccl, control_streams }).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }

    /// Writes the blocks of a message. A block of more than `bytes_max` bytes is refused.
    async fn write(&self, ticket: Ticket, message: PushRequest, bytes_max: usize) -> Result<u32, Status> {
        let PushRequest { block_index, payload, ready_blocks, .. } = message;
        match (ready_blocks, &self.ipc) {
            (None, _) if payload.len() > bytes_max => Err(self.destination.refuse(ticket).await.into()),
            (None, _) => {
                self.destination.write(ticket, block_index, payload).await?;
                Ok(1)
            }
            (Some(ready), Some(ipc)) => {
                let blocks = ready.block_indices.len() as u32;
                ipc.copy(ticket, ready).await?;
                Ok(blocks)
            }
            (Some(_), None) => Err(self.destination.refuse(ticket).await.into()),
        }
    }
}

#[tonic::async_trait]
impl Transfer for TransferService {
    type NcclControlStream = Pin<Box<dyn Stream<Item = Result<NcclControlReply, Status>> + Send>>;

    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let messages = request.into_inner().map(|message| {
            let message = message?;
            Ok((parse(&message.ticket)?, message))
        });
        let mut messages = pin!(messages.peekable());
        // All blocks of a transfer have the same size, that of the first message. Messages that only name blocks have no payload.
        let first =
            messages.as_mut().peek().await.and_then(|first: &Result<_, Status>| Some(first.as_ref().ok()?.1.payload.len()));
        let writes_max =
            WRITES_BYTES.checked_div(first.unwrap_or(0)).map_or(WRITES_MIN, |most| most.clamp(WRITES_MIN, WRITES_MAX));
        let writes = messages.map_ok(|(ticket, message)| self.write(ticket, message, first.unwrap_or(0)));
        let written_blocks = writes.try_buffered(writes_max).try_fold(0, |sum, blocks| async move { Ok(sum + blocks) }).await?;
        Ok(Response::new(PushReply { written_blocks }))
    }

    async fn nccl_control(
        &self,
        request: Request<Streaming<NcclControlRequest>>,
    ) -> Result<Response<Self::NcclControlStream>, Status> {
        let permit = Arc::clone(&self.control_streams).try_acquire_owned();
        let permit =
            permit.map_err(|_| Status::resource_exhausted("too many NCCL control streams; send the blocks with Push"))?;
        let mut requests = request.into_inner();
        let first = tokio::time::timeout(FIRST_WAIT, requests.message()).await.unwrap_or(Ok(None))?;
        let Some(NcclControlRequest { communicator, .. }) = first else {
            return Err(Status::invalid_argument(
                "the stream's first message must name the communicator, and must arrive within 5 seconds",
            ));
        };
        let unknown = || {
            Status::not_found(
                "no ticket of a live reservation names this communicator, or the communicator has a control stream already",
            )
        };
        let connection = self.nccl.as_ref().ok_or_else(unknown)?.claim(&communicator).await.ok_or_else(unknown)?;
        let replies =
            stream::unfold((requests, connection), move |(mut requests, connection): (Streaming<_>, PeerConnection)| {
                let _permit = &permit;
                async move {
                    let request: NcclControlRequest = tokio::select! {
                        request = requests.message() => request.ok()??,
                        () = connection.drained() => return None,
                    };
                    let written = connection.receive(parse(&request.ticket).ok()?, request.block_indices).await?;
                    Some((Ok(NcclControlReply { written }), (requests, connection)))
                }
            });
        Ok(Response::new(replies.boxed()))
    }
}

fn parse(ticket: &[u8]) -> Result<Ticket, Status> {
    Ticket::try_from(ticket).map_err(|invalid| Status::invalid_argument(invalid.to_string()))
}
