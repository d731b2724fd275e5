//! The host path: the content of blocks travels in the messages of a gRPC stream, through the memory of both hosts. HTTP/2's windows bound
//! what is in flight. It needs no preparation, so it is the path to fall back to.

use crate::{Progress, SendPath, TransferError, push::Push};
use tandem_kv::{BlockAccess, ReadyBlock};
use tandem_proto::v1::PushRequest;

pub(crate) const LABEL: &str = "tcp";

pub(crate) struct HostPath(pub(crate) Push);

#[tonic::async_trait]
impl SendPath for HostPath {
    fn label(&self) -> &'static str {
        LABEL
    }

    fn access(&self) -> BlockAccess {
        BlockAccess::Copied
    }

    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
        for ReadyBlock { index, content, .. } in blocks {
            let message = PushRequest { block_index: index, payload: content.into(), ..PushRequest::default() };
            self.0.send(message, 1).await?;
        }
        Ok(Progress::Sent)
    }

    async fn interrupted(&mut self) -> TransferError {
        self.0.interrupted().await
    }

    async fn finish(self: Box<Self>) -> Result<(), TransferError> {
        self.0.finish().await
    }
}
