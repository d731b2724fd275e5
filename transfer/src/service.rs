//! The gRPC service of a worker that receives blocks.

use crate::Sink;
use tandem_proto::{
    link::MESSAGE_BYTES_MAX,
    v1::{
        PushReply, PushRequest,
        transfer_server::{Transfer, TransferServer},
    },
};
use tonic::{Request, Response, Status, Streaming};

/// Writes what arrives through a [`Sink`], one block after another: the next is taken from the network when the one before is
/// in memory. A write that is refused ends the push.
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
        let mut blocks = request.into_inner();
        let mut landed_blocks = 0;
        while let Some(PushRequest { ticket, block_index, payload }) = blocks.message().await? {
            self.sink
                .write(ticket, block_index, payload)
                .await
                .map_err(|refused| Status::permission_denied(refused.to_string()))?;
            landed_blocks += 1;
        }
        Ok(Response::new(PushReply { landed_blocks }))
    }
}
