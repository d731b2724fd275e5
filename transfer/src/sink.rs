//! The receiving end: who owns the destination decides what is written.

use bytes::Bytes;
use futures::{FutureExt, future::BoxFuture};
use std::{fmt, future::Future, sync::Arc};

/// The ticket does not allow this write: it is unknown, spent or revoked, or the block is not one it names, was written
/// before, or has another size.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ticket does not allow this write")]
pub struct Refused;

type Write = dyn Fn(u64, u32, Bytes) -> BoxFuture<'static, Result<(), Refused>> + Send + Sync;

/// Writes one block under a ticket, whole or not at all. Cheap to clone.
#[derive(Clone)]
pub struct Sink(Arc<Write>);

impl Sink {
    /// `write(ticket, block_index, payload)` returns when the block is in the owner's memory.
    pub fn new<F>(write: impl Fn(u64, u32, Bytes) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), Refused>> + Send + 'static,
    {
        Self(Arc::new(move |ticket, block_index, payload| write(ticket, block_index, payload).boxed()))
    }

    pub(crate) async fn write(&self, ticket: u64, block_index: u32, payload: Bytes) -> Result<(), Refused> {
        self.0(ticket, block_index, payload).await
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Sink")
    }
}
