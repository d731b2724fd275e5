//! The sending side: the paths of a prefill worker, and the transfers on them.

use crate::{
    Lifetime, Progress, SendPath, TicketError, TransferError, TransferMode,
    nccl::NcclSender,
    push::PushPath,
    share::SharedClock,
    simulated::{SimulatedNetwork, SimulatedPath},
};
use std::{sync::Arc, time::Duration};
use tandem_kv::{BlockAccess, KvMemory, ReadyBlock, Ticket};
use tandem_process::retry::error_chain;
use tandem_proto::{
    channel::{Channels, Network, PeerRole},
    v1::{self, TransferCapabilities, TransferPath},
};
use tokio::time::Instant;

/// The settings of a worker's [`SendPaths`].
pub struct SendSettings {
    /// The worker's instance, for which the addresses in tickets are signed.
    pub instance_id: String,
    /// The paths that the worker may use.
    pub mode: TransferMode,
    /// The engine's KV memory; `None` if other devices cannot access it.
    pub memory: Option<Arc<dyn KvMemory>>,
    /// The size of one block in bytes.
    pub block_bytes: usize,
    /// The network on which decode workers are reached.
    pub network: Network,
    /// The worker's shutdown and the end of its last request.
    pub lifetime: Lifetime,
}

/// The paths on which a prefill worker sends. This value is cheap to clone.
#[derive(Clone)]
pub struct SendPaths(Arc<SendPathsState>);

struct SendPathsState {
    instance_id: String,
    block_bytes: usize,
    channels: Channels,
    capabilities: Option<TransferCapabilities>,
    ipc_handle: Vec<u8>,
    nccl: Option<NcclSender>,
    simulated: Option<Arc<SimulatedNetwork>>,
    clock: SharedClock,
}

impl SendPaths {
    /// Makes the paths that the worker supports and may use.
    pub fn new(settings: SendSettings) -> Self {
        let SendSettings { instance_id, mode, memory, block_bytes, network, lifetime } = settings;
        let memory = memory.filter(|_| mode == TransferMode::Auto);
        let handle = |memory: &dyn KvMemory| {
            let handle = memory.ipc_handle();
            let handle = handle.inspect_err(|error| {
                let error = error_chain(error);
                tracing::info!(error, "this worker does not offer CUDA IPC, because its KV memory cannot be exported");
            });
            handle.unwrap_or_default()
        };
        let ipc_handle = memory.as_deref().map(handle).unwrap_or_default();
        let nccl_ranks = memory.as_ref().map_or(0, |memory| memory.nccl_ranks());
        let capabilities = TransferCapabilities { cuda_ipc: !ipc_handle.is_empty(), nccl_ranks };
        let channels = Channels::on(network.expecting(&[PeerRole::DecodeWorker]));
        let simulated = match mode {
            TransferMode::Simulated { block } => Some(Arc::new(SimulatedNetwork::new(block))),
            TransferMode::Auto | TransferMode::Tcp => None,
        };
        Self(Arc::new(SendPathsState {
            instance_id,
            block_bytes,
            capabilities: Some(capabilities).filter(|capabilities| capabilities.cuda_ipc || nccl_ranks > 0),
            ipc_handle,
            nccl: memory.filter(|_| nccl_ranks > 0).map(|memory| NcclSender::new(memory, channels.clone(), lifetime)),
            channels,
            simulated,
            clock: SharedClock::default(),
        }))
    }

    /// Returns the transfer capabilities; `None` if the worker has no path besides TCP. Capabilities are not secret: a process that knows
    /// them has no access to the memory.
    pub fn capabilities(&self) -> Option<&TransferCapabilities> {
        self.0.capabilities.as_ref()
    }

    /// Opens a transfer on the path that the ticket names. If the decode worker is unreachable, the transfer fails when the first blocks
    /// are sent.
    ///
    /// # Errors
    /// Fails if the ticket cannot be used, or if its communicator is closed.
    pub fn open(&self, ticket: v1::Ticket) -> Result<Transfer, TransferError> {
        let SendPathsState { instance_id, block_bytes, channels, capabilities, nccl, simulated, clock, .. } = &*self.0;
        if !ticket.has_signed_address(instance_id, channels.network().key()) {
            return Err(TicketError::UnsignedAddress.into());
        }
        let secret = Ticket::try_from(&ticket.ticket[..]).map_err(TicketError::from)?;
        let push = |access| Ok::<_, TicketError>(Box::new(PushPath::open(channels.to(&ticket.address)?, secret, access)));
        let path: Box<dyn SendPath> = match (ticket.path(), nccl) {
            (TransferPath::Tcp, _) => match simulated {
                Some(network) => Box::new(SimulatedPath::new(push(BlockAccess::Copied)?, Arc::clone(network))),
                None => push(BlockAccess::Copied)?,
            },
            (TransferPath::CudaIpc, _) if capabilities.as_ref().is_some_and(|offered| offered.cuda_ipc) => {
                push(BlockAccess::InPlace)?
            }
            // Fails if the communicator has been closed since the decode worker issued the ticket.
            (TransferPath::Nccl, Some(nccl)) => {
                Box::new(nccl.open(&ticket.communicator, secret).ok_or(TransferError::Closed(None))?)
            }
            (TransferPath::CudaIpc | TransferPath::Nccl, _) => return Err(TicketError::NotOffered.into()),
        };
        Ok(Transfer { next: Some((self.clone(), ticket)), clock: clock.clone(), ..Transfer::new(path, *block_bytes) })
    }

    /// Prepares the paths that the ticket of a finished transfer requests. This is safe because the decode worker at the signed address has
    /// written blocks under the ticket, which shows that the ticket's reservation was live. Returns the IPC handle, if the ticket requests
    /// it.
    fn prepare(&self, ticket: v1::Ticket) -> Vec<u8> {
        let ipc_handle = if ticket.wants_ipc_handle { self.0.ipc_handle.clone() } else { Vec::new() };
        if ticket.path() == TransferPath::Tcp
            && !ticket.communicator.is_empty()
            && let Some(nccl) = &self.0.nccl
        {
            nccl.join(ticket.address, ticket.communicator);
        }
        ipc_handle
    }
}

/// The transfer of one prompt's blocks. Dropping it ends the transfer.
pub struct Transfer {
    path: Box<dyn SendPath>,
    block_bytes: u64,
    started: Option<Instant>,
    sent: Sent,
    clock: SharedClock,
    next: Option<(SendPaths, v1::Ticket)>,
}

/// The result of a finished transfer.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Sent {
    /// Bytes that were written; 0 if the ticket named no blocks.
    pub bytes: u64,
    /// The time from the first block to the reply that all blocks are written.
    pub duration: Duration,
    /// The number of bytes from which the bandwidth is measured: all bytes, or only those of the last blocks if the receiver copies earlier
    /// blocks while later ones are computed.
    pub measured_bytes: u64,
    /// The time for which the `measured_bytes` were in flight. Time in which several transfers have bytes in flight is divided equally between them.
    pub measured: Duration,
    /// The IPC handle of the whole KV memory if the ticket requests it, otherwise empty.
    pub ipc_handle: Vec<u8>,
}

impl Transfer {
    /// Makes a transfer that sends blocks of `block_bytes` bytes on `path`.
    pub fn new(path: Box<dyn SendPath>, block_bytes: usize) -> Self {
        Self {
            path,
            block_bytes: block_bytes as u64,
            started: None,
            sent: Sent::default(),
            clock: SharedClock::default(),
            next: None,
        }
    }

    /// Returns the path's label in metrics and traces.
    pub fn label(&self) -> &'static str {
        self.path.label()
    }

    /// Returns the form in which the path needs blocks.
    pub fn access(&self) -> BlockAccess {
        self.path.access()
    }

    /// Sends blocks, as [`SendPath::send`] does.
    ///
    /// # Errors
    /// Fails if the transfer has ended.
    pub async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<(), TransferError> {
        let bytes = blocks.len() as u64 * self.block_bytes;
        self.started.get_or_insert_with(Instant::now);
        let sending = self.clock.begin();
        if self.path.send(blocks).await? == Progress::Announced {
            // Earlier blocks are copied while later blocks are computed, so only the time of the last blocks measures the bandwidth.
            (self.sent.measured_bytes, self.sent.measured) = (0, Duration::ZERO);
        }
        self.sent.bytes += bytes;
        self.sent.measured_bytes += bytes;
        self.sent.measured += sending.charged();
        Ok(())
    }

    /// Continues to transfer the blocks that were sent; resolves only if the transfer ends early. See [`SendPath::interrupted`].
    pub async fn interrupted(&mut self) -> TransferError {
        self.path.interrupted().await
    }

    /// Returns when the receiver has written every block that was sent. The blocks must not change before that.
    ///
    /// # Errors
    /// Fails if a block was not written.
    pub async fn finish(mut self) -> Result<Sent, TransferError> {
        let Some(started) = self.started else { return Ok(Sent::default()) };
        let sending = self.clock.begin();
        self.path.finish().await?;
        self.sent.measured += sending.charged();
        self.sent.duration = started.elapsed();
        self.sent.ipc_handle = self.next.map(|(paths, ticket)| paths.prepare(ticket)).unwrap_or_default();
        Ok(self.sent)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_kv::BlockId;
    use tokio::time::{advance, sleep};

    const BLOCK_BYTES: usize = 1_000;
    /// The time of a block on the network: 5 MB/s.
    const BLOCK: Duration = Duration::from_micros(200);

    /// A path whose blocks arrive at once.
    struct Arrives;

    #[tonic::async_trait]
    impl SendPath for Arrives {
        fn label(&self) -> &'static str {
            "arrives"
        }

        fn access(&self) -> BlockAccess {
            BlockAccess::Copied
        }

        async fn send(&mut self, _: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
            Ok(Progress::Sent)
        }

        async fn interrupted(&mut self) -> TransferError {
            std::future::pending().await
        }

        async fn finish(self: Box<Self>) -> Result<(), TransferError> {
            Ok(())
        }
    }

    /// A path that announces blocks to its receiver, which copies them over the network later.
    struct Announces {
        network: SimulatedPath,
        announced: Vec<ReadyBlock>,
    }

    #[tonic::async_trait]
    impl SendPath for Announces {
        fn label(&self) -> &'static str {
            "announces"
        }

        fn access(&self) -> BlockAccess {
            BlockAccess::InPlace
        }

        async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
            // The receiver has copied the earlier blocks while the new ones were computed.
            self.announced = blocks;
            Ok(Progress::Announced)
        }

        async fn interrupted(&mut self) -> TransferError {
            std::future::pending().await
        }

        async fn finish(mut self: Box<Self>) -> Result<(), TransferError> {
            self.network.send(self.announced).await?;
            Box::new(self.network).finish().await
        }
    }

    fn blocks(count: u32) -> Vec<ReadyBlock> {
        let block = |index| ReadyBlock { index, block: BlockId(index), content: Vec::new() };
        (0..count).map(block).collect()
    }

    /// Returns the rate that `transfers` transfers of one worker measure, as a fraction of the network's. Each sends six bursts of 50 blocks, which
    /// take 10 ms of the network, and computes for `computes` before each.
    async fn measured(transfers: u64, computes: Duration, announces: bool) -> f64 {
        let (network, clock) = (Arc::new(SimulatedNetwork::new(BLOCK)), SharedClock::default());
        let one = |number: u64| {
            let path = SimulatedPath::new(Box::new(Arrives), Arc::clone(&network));
            let path: Box<dyn SendPath> =
                if announces { Box::new(Announces { network: path, announced: Vec::new() }) } else { Box::new(path) };
            let mut transfer = Transfer { clock: clock.clone(), ..Transfer::new(path, BLOCK_BYTES) };
            async move {
                sleep(Duration::from_millis(number * 7)).await;
                for _ in 0..6 {
                    sleep(computes).await;
                    transfer.send(blocks(50)).await.expect("the network does not fail");
                }
                transfer.finish().await.expect("the network does not fail")
            }
        };
        let sent = futures::future::join_all((0..transfers).map(one)).await;
        assert!(sent.iter().all(|sent| sent.bytes == 300 * BLOCK_BYTES as u64));
        let bytes: u64 = sent.iter().map(|sent| sent.measured_bytes).sum();
        let time: Duration = sent.iter().map(|sent| sent.measured).sum();
        bytes as f64 / time.as_secs_f64() / (BLOCK_BYTES as f64 / BLOCK.as_secs_f64())
    }

    #[tokio::test(start_paused = true)]
    async fn measured_bandwidth_equals_the_network_bandwidth_under_any_load() {
        advance(Duration::from_secs(1)).await;
        for announces in [false, true] {
            for transfers in [1, 2, 8, 40] {
                for computes in [0, 5, 20, 100] {
                    let rate = measured(transfers, Duration::from_millis(computes), announces).await;
                    let of = format!("{transfers} transfers, {computes} ms of computation, announces: {announces}");
                    assert!((0.8..1.2).contains(&rate), "{of}: {rate:.2} of the network's rate");
                }
            }
        }
    }
}
