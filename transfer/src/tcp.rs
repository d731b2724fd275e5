//! Over gRPC: one `Push` stream a transfer, on one connection a receiver. HTTP/2's windows bound what is on its way.

use crate::{Piece, Push, Refused, TransferError, Transport};
use futures::{FutureExt, StreamExt};
use tandem_kv::Ticket;
use tandem_proto::{
    channel::{Channels, MESSAGE_BYTES_MAX, Network},
    v1::{PushRequest, transfer_client::TransferClient},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};

/// To receivers that serve a [`crate::TransferService`].
#[derive(Clone, Default)]
pub struct Tcp {
    channels: Channels,
}

impl Tcp {
    /// On this network.
    pub fn on(network: Network) -> Self {
        Self { channels: Channels::on(network) }
    }
}

impl Transport for Tcp {
    fn name(&self) -> &'static str {
        "tcp"
    }

    fn open(&self, address: &str, ticket: Ticket) -> Result<Push, TransferError> {
        let channel = self.channels.to(address)?;
        let mut client = TransferClient::new(channel).max_encoding_message_size(MESSAGE_BYTES_MAX);
        Ok(Push::new(move |pieces| {
            let requests = ReceiverStream::new(pieces).map(move |piece| {
                let ticket = ticket.as_bytes().to_vec();
                match piece {
                    Piece::Block { index, payload } => PushRequest { ticket, block_index: index, payload, ready_blocks: None },
                    Piece::Ready(ready) => PushRequest { ticket, ready_blocks: Some(ready), ..PushRequest::default() },
                }
            });
            async move {
                let reply = client.push(requests).await.map_err(transfer_error)?;
                Ok(reply.into_inner().written_blocks)
            }
            .boxed()
        }))
    }
}

fn transfer_error(status: Status) -> TransferError {
    match status.code() {
        Code::PermissionDenied => Refused.into(),
        _ => TransferError::Gone(Some(status.into())),
    }
}
