//! The gRPC service of a worker that receives blocks.

use crate::{Refused, Sink};
use futures::TryStreamExt;
use tandem_proto::{
    link::MESSAGE_BYTES_MAX,
    v1::{
        PushReply, PushRequest,
        transfer_server::{Transfer, TransferServer},
    },
};
use tonic::{Request, Response, Status, Streaming};

/// Writes what arrives through a [`Sink`]; what is not taken yet waits in the network. A write that is refused ends the push.
#[derive(Debug)]
pub struct TransferService {
    sink: Sink,
}

impl TransferService {
    /// For a gRPC server.
    pub fn server(sink: Sink) -> TransferServer<Self> {
        TransferServer::new(Self { sink }).max_decoding_message_size(MESSAGE_BYTES_MAX)
    }
}

#[tonic::async_trait]
impl Transfer for TransferService {
    async fn push(&self, request: Request<Streaming<PushRequest>>) -> Result<Response<PushReply>, Status> {
        let block = |PushRequest { ticket, block_index, payload }| (ticket, block_index, payload);
        let landed_blocks = self.sink.write_all(request.into_inner().map_ok(block)).await?;
        Ok(Response::new(PushReply { landed_blocks }))
    }
}

impl From<Refused> for Status {
    fn from(refused: Refused) -> Self {
        Status::permission_denied(refused.to_string())
    }
}
