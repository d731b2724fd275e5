//! The receiving end: who owns the destination decides what is written.

use crate::Piece;
use futures::{FutureExt, Stream, TryStreamExt, future::BoxFuture};
use std::{fmt, future::Future, sync::Arc};
use tandem_kv::Ticket;

/// The ticket does not allow this write: it is unknown, spent or revoked, or the block is not one it names, was written
/// before, or has another size. The sender does not hear which: only the owner of the memory knows, counts and acts on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the ticket does not allow this write")]
pub struct Refused;

/// Pieces of one transfer that wait to be written at a time. The owner of the memory writes between two of its steps: one by
/// one, a prompt's blocks would take as many steps as there are.
const WRITES_MAX: usize = 16;

type Write = dyn Fn(Ticket, Piece) -> BoxFuture<'static, Result<(), Refused>> + Send + Sync;

/// Writes a piece's blocks under a ticket, whole or not at all. Cheap to clone.
#[derive(Clone)]
pub struct Sink(Arc<Write>);

impl Sink {
    /// `write(ticket, piece)` returns when the blocks are in the owner's memory.
    pub fn new<F>(write: impl Fn(Ticket, Piece) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = Result<(), Refused>> + Send + 'static,
    {
        Self(Arc::new(move |ticket, piece| write(ticket, piece).boxed()))
    }

    /// Writes pieces as they come, each with its ticket; gives how many blocks have landed when there are no more. No more are
    /// taken while [`WRITES_MAX`] wait to be written. The first refusal is the last write.
    pub(crate) async fn write_all<E: From<Refused>>(
        &self,
        pieces: impl Stream<Item = Result<(Ticket, Piece), E>>,
    ) -> Result<u32, E> {
        let writes = pieces.map_ok(|(ticket, piece)| {
            let blocks = piece.len();
            self.0(ticket, piece).map(move |written| Ok(written.map(|()| blocks)?))
        });
        let mut written = std::pin::pin!(writes.try_buffered(WRITES_MAX));
        let mut landed = 0;
        while let Some(blocks) = written.try_next().await? {
            landed += blocks;
        }
        Ok(landed)
    }
}

impl fmt::Debug for Sink {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Sink")
    }
}
