//! Within one process: blocks are handed to the receiver's [`Sink`] without a copy.

use crate::{Push, Sink, TransferError, Transport};
use futures::{FutureExt, StreamExt};
use parking_lot::{Mutex, MutexGuard};
use std::{collections::HashMap, sync::Arc};
use tandem_kv::Ticket;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::sync::CancellationToken;

/// To receivers that were added to the same value. Cheap to clone.
#[derive(Clone, Default)]
pub struct Loopback {
    receivers: Arc<Mutex<HashMap<String, Receiver>>>,
}

#[derive(Clone)]
struct Receiver {
    sink: Sink,
    gone: CancellationToken,
}

/// As long as it is held, its sink can be reached; running pushes break when it is dropped.
#[must_use = "the receiver can be reached as long as this is held"]
pub struct Reachable {
    receivers: Arc<Mutex<HashMap<String, Receiver>>>,
    address: String,
    gone: CancellationToken,
}

impl Loopback {
    /// Makes `sink` reachable under `address`, in place of the one that was there.
    pub fn add(&self, address: &str, sink: Sink) -> Reachable {
        let gone = CancellationToken::new();
        let receiver = Receiver { sink, gone: gone.clone() };
        let before = self.lock().insert(address.to_owned(), receiver);
        if let Some(before) = before {
            before.gone.cancel();
        }
        Reachable { receivers: self.receivers.clone(), address: address.to_owned(), gone }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Receiver>> {
        self.receivers.lock()
    }
}

impl Drop for Reachable {
    fn drop(&mut self) {
        if !self.gone.is_cancelled() {
            self.receivers.lock().remove(&self.address);
            self.gone.cancel();
        }
    }
}

impl Transport for Loopback {
    fn name(&self) -> &'static str {
        "loopback"
    }

    fn open(&self, address: &str, ticket: Ticket) -> Result<Push, TransferError> {
        let receiver = self.lock().get(address).cloned();
        Ok(Push::new(move |pieces| {
            async move {
                let Receiver { sink, gone } = receiver.ok_or(TransferError::Gone(None))?;
                let pieces = ReceiverStream::new(pieces).map(|piece| Ok((ticket, piece)));
                tokio::select! {
                    () = gone.cancelled() => Err(TransferError::Gone(None)),
                    landed = sink.write_all(pieces) => landed,
                }
            }
            .boxed()
        }))
    }
}
