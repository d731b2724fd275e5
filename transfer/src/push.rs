//! The sending end of one transfer, the same for every transport.

use crate::Refused;
use bytes::Bytes;
use futures::future::BoxFuture;
use std::error::Error;
use tandem_proto::{channel::InvalidAddress, v1::ReadyBlocks};
use tokio::sync::mpsc;

/// Pieces handed over but not yet taken by the transport. One is written while the next is read from the device.
const HANDED_OVER_MAX: usize = 1;

/// Why a transfer ended early. In every case some of its blocks may have landed.
#[derive(Debug, thiserror::Error)]
pub enum TransferError {
    /// The receiver does not want these blocks (any more).
    #[error(transparent)]
    Refused(#[from] Refused),
    /// There is no such address.
    #[error(transparent)]
    Address(#[from] InvalidAddress),
    /// The receiver is not there, or went away before all blocks had landed.
    #[error("the receiver is gone")]
    Gone(#[source] Option<Box<dyn Error + Send + Sync>>),
}

/// What a sender says of blocks, counted from the prompt's start.
#[derive(Clone, Debug, PartialEq)]
pub enum Piece {
    /// One, with its content.
    Block {
        /// Which.
        index: u32,
        /// All of it.
        payload: Bytes,
    },
    /// Several that may be taken from where they are.
    Ready(ReadyBlocks),
}

impl Piece {
    /// Blocks in it.
    pub(crate) fn len(&self) -> u32 {
        match self {
            Self::Block { .. } => 1,
            Self::Ready(ready) => ready.block_indices.len() as u32,
        }
    }
}

/// A transfer under one ticket. Dropping it ends the transfer.
pub struct Push {
    blocks: mpsc::Sender<Piece>,
    /// Moves the blocks; gives how many have landed when all were sent and `blocks` is closed.
    moving: BoxFuture<'static, Result<u32, TransferError>>,
    sent: u32,
}

impl Push {
    /// `moving` takes blocks from the receiver it is given until there are no more.
    pub(crate) fn new(moving: impl FnOnce(mpsc::Receiver<Piece>) -> BoxFuture<'static, Result<u32, TransferError>>) -> Self {
        let (blocks, receiver) = mpsc::channel(HANDED_OVER_MAX);
        Self { blocks, moving: moving(receiver), sent: 0 }
    }

    /// Sends one block, counted from the prompt's start, in any order. Waits while the receiver is busy. After an error the
    /// push is over.
    pub async fn send(&mut self, index: u32, payload: Bytes) -> Result<(), TransferError> {
        self.tell(Piece::Block { index, payload }).await
    }

    /// Says that blocks may be taken from where they are, likewise. They must not change before [`Push::finish`] has returned.
    pub async fn ready(&mut self, ready: ReadyBlocks) -> Result<(), TransferError> {
        self.tell(Piece::Ready(ready)).await
    }

    async fn tell(&mut self, piece: Piece) -> Result<(), TransferError> {
        let permit = tokio::select! {
            biased;
            ended = &mut self.moving => return Err(ended_early(ended)),
            permit = self.blocks.reserve() => permit,
        };
        match permit {
            Ok(permit) => {
                self.sent += piece.len();
                permit.send(piece);
                Ok(())
            }
            // The transport takes no more: it is about to say why.
            Err(_) => Err(ended_early(self.moving.as_mut().await)),
        }
    }

    /// Keeps blocks moving that were sent; returns only when the push ends early. For who waits before sending the next: without
    /// it the last ones may stay until then. Cancel-safe.
    pub async fn broken(&mut self) -> TransferError {
        ended_early(self.moving.as_mut().await)
    }

    /// Returns when every block that was sent has landed.
    pub async fn finish(self) -> Result<(), TransferError> {
        drop(self.blocks);
        let landed = self.moving.await?;
        if landed == self.sent { Ok(()) } else { Err(TransferError::Gone(None)) }
    }
}

fn ended_early(ended: Result<u32, TransferError>) -> TransferError {
    ended.err().unwrap_or(TransferError::Gone(None))
}
