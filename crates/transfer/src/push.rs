//! The sending half of the paths that use a `Push` stream.
//!
//! On the host path, the messages carry the content of blocks through the memory of both hosts; HTTP/2's windows bound the bytes in flight.
//! This path needs no preparation, so it is the fallback. On the CUDA IPC path, the messages name blocks, which the receiver copies from
//! the sender's GPU.

use crate::{Progress, Refused, SendPath, TransferError};
use futures::{FutureExt, future::BoxFuture};
use tandem_kv::{BlockAccess, ReadyBlock, Ticket};
use tandem_proto::{
    channel::{Channel, MESSAGE_BYTES_MAX},
    v1::{PushRequest, ReadyBlocks, transfer_client::TransferClient},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

pub(crate) const HOST_LABEL: &str = "tcp";
pub(crate) const IPC_LABEL: &str = "cuda_ipc";

/// Maximum number of messages that are queued for the connection: while one message is sent, the next one is made.
const QUEUED_MAX: usize = 1;

pub(crate) struct PushPath {
    ticket: Ticket,
    access: BlockAccess,
    messages: mpsc::Sender<PushRequest>,
    /// The call that sends the messages. Once `messages` is closed, it resolves to the number of blocks written.
    reply: BoxFuture<'static, Result<u32, TransferError>>,
    sent_blocks: u32,
}

impl PushPath {
    /// Opens a stream for the host path ([`BlockAccess::Copied`]) or the IPC path ([`BlockAccess::InPlace`]). If the receiver is
    /// unreachable, sending the first message fails.
    pub(crate) fn open(channel: Channel, ticket: Ticket, access: BlockAccess) -> Self {
        let (messages, receiver) = mpsc::channel(QUEUED_MAX);
        let mut client = TransferClient::new(channel).max_encoding_message_size(MESSAGE_BYTES_MAX);
        let reply = async move {
            let reply = client.push(ReceiverStream::new(receiver)).await.map_err(transfer_error)?;
            Ok(reply.into_inner().written_blocks)
        };
        Self { ticket, access, messages, reply: reply.boxed(), sent_blocks: 0 }
    }

    async fn send_message(&mut self, message: PushRequest, blocks: usize) -> Result<(), TransferError> {
        let permit = tokio::select! {
            biased;
            ended = &mut self.reply => return Err(ended_early(ended)),
            permit = self.messages.reserve() => permit,
        };
        match permit {
            Ok(permit) => {
                self.sent_blocks += blocks as u32;
                permit.send(PushRequest { ticket: self.ticket.as_bytes().to_vec(), ..message });
                Ok(())
            }
            // The connection accepts no more messages; the reply has the reason.
            Err(_) => Err(ended_early(self.reply.as_mut().await)),
        }
    }
}

#[tonic::async_trait]
impl SendPath for PushPath {
    fn label(&self) -> &'static str {
        match self.access {
            BlockAccess::Copied => HOST_LABEL,
            BlockAccess::InPlace => IPC_LABEL,
        }
    }

    fn access(&self) -> BlockAccess {
        self.access
    }

    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
        if self.access == BlockAccess::InPlace {
            let count = blocks.len();
            let (block_indices, source_blocks) = blocks.into_iter().map(|ready| (ready.index, ready.block.0)).unzip();
            let ready_blocks = Some(ReadyBlocks { block_indices, source_blocks });
            self.send_message(PushRequest { ready_blocks, ..PushRequest::default() }, count).await?;
            return Ok(Progress::Announced);
        }
        for ReadyBlock { index, content, .. } in blocks {
            let message = PushRequest { block_index: index, payload: content.into(), ..PushRequest::default() };
            self.send_message(message, 1).await?;
        }
        Ok(Progress::Sent)
    }

    async fn interrupted(&mut self) -> TransferError {
        ended_early(self.reply.as_mut().await)
    }

    async fn finish(self: Box<Self>) -> Result<(), TransferError> {
        let Self { messages, reply, sent_blocks, .. } = *self;
        drop(messages);
        if reply.await? == sent_blocks { Ok(()) } else { Err(TransferError::Closed(None)) }
    }
}

fn ended_early(ended: Result<u32, TransferError>) -> TransferError {
    ended.err().unwrap_or(TransferError::Closed(None))
}

fn transfer_error(status: Status) -> TransferError {
    match status.code() {
        Code::PermissionDenied => Refused.into(),
        _ => TransferError::Closed(Some(status.into())),
    }
}
