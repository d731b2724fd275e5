//! The sending end of a `Push` stream, which the host path and the IPC path share.

use crate::{Refused, TransferError};
use futures::{FutureExt, future::BoxFuture};
use tandem_kv::Ticket;
use tandem_proto::{
    channel::{Channel, MESSAGE_BYTES_MAX},
    v1::{PushRequest, transfer_client::TransferClient},
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

/// Messages handed over but not yet taken by the connection: one is written while the next is made.
const HANDED_OVER_MAX: usize = 1;

/// A stream under one ticket. Dropping it ends the transfer.
pub(crate) struct Push {
    ticket: Ticket,
    messages: mpsc::Sender<PushRequest>,
    /// Sends the messages; resolves to the number of blocks written when `messages` is closed.
    reply: BoxFuture<'static, Result<u32, TransferError>>,
    sent_blocks: u32,
}

impl Push {
    /// Opens a stream. Whether the receiver is reachable shows with the first message.
    pub(crate) fn open(channel: Channel, ticket: Ticket) -> Self {
        let (messages, receiver) = mpsc::channel(HANDED_OVER_MAX);
        let mut client = TransferClient::new(channel).max_encoding_message_size(MESSAGE_BYTES_MAX);
        let reply = async move {
            let reply = client.push(ReceiverStream::new(receiver)).await.map_err(transfer_error)?;
            Ok(reply.into_inner().written_blocks)
        };
        Self { ticket, messages, reply: reply.boxed(), sent_blocks: 0 }
    }

    /// Sends a message that names `blocks` blocks; its ticket is filled in. Waits while the receiver is busy. After an error the stream is closed.
    pub(crate) async fn send(&mut self, message: PushRequest, blocks: usize) -> Result<(), TransferError> {
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
            // The connection takes no more messages: the reply says why.
            Err(_) => Err(ended_early(self.reply.as_mut().await)),
        }
    }

    /// Drives the stream; returns only when it ends early. Cancel-safe.
    pub(crate) async fn interrupted(&mut self) -> TransferError {
        ended_early(self.reply.as_mut().await)
    }

    /// Returns when every block that was sent is written.
    pub(crate) async fn finish(self) -> Result<(), TransferError> {
        drop(self.messages);
        let written = self.reply.await?;
        if written == self.sent_blocks { Ok(()) } else { Err(TransferError::Closed(None)) }
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
