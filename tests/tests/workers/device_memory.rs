//! Simulated GPUs of one process. Each can access the KV memory of the others without copies through host memory.

use crate::harness::{Gate, TIMEOUT};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
};
use tandem_devices::sim::SimEngine;
use tandem_engine::{Chunk, Engine};
use tandem_kv::{BlockId, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory};
use tokio::sync::watch;

/// The transfer paths that a simulated device supports, and the means to block and break transfers.
#[derive(Clone, Default)]
pub struct DeviceAccess {
    /// Whether other devices may open the device's memory, as over CUDA IPC.
    pub ipc: bool,
    /// Whether the device supports NCCL.
    pub nccl: bool,
    /// While this gate is closed, no copy over IPC ends, and no blocks are received over NCCL.
    pub copy_gate: Gate,
    /// The number of peers whose memories the device has open.
    pub open_memories: watch::Sender<usize>,
    /// The value is 1 if the next call that sends blocks over NCCL must break its communicator, otherwise 0.
    pub break_next_batch: Arc<AtomicU64>,
    /// The number of communicators that sending workers have begun to join.
    pub joins_started: watch::Sender<u64>,
    /// While this gate is closed, no sending worker joins a communicator.
    pub join_gate: Gate,
}

/// The blocks of a device as its peers see them, and the peers' writes that the device's engine has not applied yet.
#[derive(Default)]
struct Blocks {
    visible: BTreeMap<u32, Vec<u8>>,
    peer_writes: BTreeMap<u32, Vec<u8>>,
}

#[derive(Clone)]
pub struct DeviceMemory {
    access: DeviceAccess,
    blocks: Arc<Mutex<Blocks>>,
    number: u64,
}

fn next_number() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Returns the memories of all devices in the process, by the number in their IPC handle.
fn all_memories() -> &'static Mutex<BTreeMap<u64, Weak<Mutex<Blocks>>>> {
    static ALL: OnceLock<Mutex<BTreeMap<u64, Weak<Mutex<Blocks>>>>> = OnceLock::new();
    ALL.get_or_init(Mutex::default)
}

impl DeviceMemory {
    pub fn new(access: DeviceAccess) -> Self {
        let (blocks, number) = (Arc::<Mutex<Blocks>>::default(), next_number());
        all_memories().lock().expect("no test panics with the lock").insert(number, Arc::downgrade(&blocks));
        Self { access, blocks, number }
    }

    /// Copies the peers' writes into the engine. Must be called before the engine reads its blocks.
    pub fn apply_peer_writes(&self, engine: &mut SimEngine) {
        let written = std::mem::take(&mut self.blocks.lock().expect("no test panics with the lock").peer_writes);
        for (block, bytes) in written {
            engine.write_block(BlockId(block), &bytes).expect("the simulator does not fail");
        }
    }

    pub fn publish(&self, engine: &SimEngine, blocks: &[BlockId]) {
        for block in blocks {
            let mut bytes = vec![0; engine.describe().block_bytes];
            engine.read_block(*block, &mut bytes).expect("the simulator does not fail");
            self.blocks.lock().expect("no test panics with the lock").visible.insert(block.0, bytes);
        }
    }

    pub fn publish_chunks(&self, engine: &SimEngine, chunks: &[Chunk<'_>]) {
        let size = engine.describe().block_size as usize;
        for chunk in chunks {
            let (start, end) = (chunk.start as usize, chunk.start as usize + chunk.tokens.len());
            self.publish(engine, &chunk.blocks[start / size..end.div_ceil(size)]);
        }
    }

    pub fn read_into(&self, block: BlockId, into: &mut [u8]) {
        into.copy_from_slice(&Self::read(&self.blocks, block));
    }

    fn read(blocks: &Mutex<Blocks>, block: BlockId) -> Vec<u8> {
        blocks.lock().expect("no test panics with the lock").visible[&block.0].clone()
    }

    fn write(&self, block: BlockId, bytes: Vec<u8>) {
        let mut blocks = self.blocks.lock().expect("no test panics with the lock");
        blocks.visible.insert(block.0, bytes.clone());
        blocks.peer_writes.insert(block.0, bytes);
    }
}

impl KvMemory for DeviceMemory {
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError> {
        if self.access.ipc {
            Ok(self.number.to_le_bytes().to_vec())
        } else {
            Err(DeviceTransferError::Unreachable("this device does not offer its memory".to_owned()))
        }
    }

    fn open_peer(&self, handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError> {
        let unreachable = || DeviceTransferError::OtherHost;
        if !self.access.ipc {
            return Err(unreachable());
        }
        let number = u64::from_le_bytes(handle.try_into().map_err(|_| unreachable())?);
        let source = all_memories()
            .lock()
            .expect("no test panics with the lock")
            .get(&number)
            .and_then(Weak::upgrade)
            .ok_or_else(unreachable)?;
        self.access.open_memories.send_modify(|open| *open += 1);
        Ok(Arc::new(OpenedPeer { source, to: self.clone() }))
    }

    fn nccl_ranks(&self) -> u32 {
        self.access.nccl.into()
    }

    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError> {
        Ok(next_number().to_le_bytes().to_vec())
    }

    fn join(&self, name: &[u8], end: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError> {
        if end == CommunicatorEnd::Sender {
            self.access.joins_started.send_modify(|joined| *joined += 1);
            self.access.join_gate.pass();
        }
        type Ends = (Option<mpsc::Sender<Vec<Vec<u8>>>>, Option<mpsc::Receiver<Vec<Vec<u8>>>>);
        static ENDS: Mutex<BTreeMap<Vec<u8>, Ends>> = Mutex::new(BTreeMap::new());
        let mut ends = ENDS.lock().expect("no test panics with the lock");
        let (sender, receiver) = ends.entry(name.to_vec()).or_insert_with(|| {
            // The channel is unbounded, so that the sender does not wait for the receiver. NCCL does not wait either while its buffers have
            // capacity.
            let (sender, receiver) = mpsc::channel();
            (Some(sender), Some(receiver))
        });
        let end = match end {
            CommunicatorEnd::Sender => End::Sends(Mutex::new(sender.take())),
            CommunicatorEnd::Receiver => End::Receives(Mutex::new(receiver.take())),
        };
        Ok(Arc::new(Communicator { of: self.clone(), end }))
    }
}

struct OpenedPeer {
    source: Arc<Mutex<Blocks>>,
    to: DeviceMemory,
}

impl PeerMemory for OpenedPeer {
    fn copy(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError> {
        self.to.access.copy_gate.pass();
        for (from, to) in blocks {
            self.to.write(*to, DeviceMemory::read(&self.source, *from));
        }
        Ok(())
    }
}

impl Drop for OpenedPeer {
    fn drop(&mut self) {
        self.to.access.open_memories.send_modify(|open| *open -= 1);
    }
}

enum End {
    Sends(Mutex<Option<mpsc::Sender<Vec<Vec<u8>>>>>),
    Receives(Mutex<Option<mpsc::Receiver<Vec<Vec<u8>>>>>),
}

struct Communicator {
    of: DeviceMemory,
    end: End,
}

fn broken() -> DeviceTransferError {
    DeviceTransferError::Failed("the test broke the communicator".into())
}

impl KvCommunicator for Communicator {
    fn send(&self, blocks: &[BlockId]) -> Result<(), DeviceTransferError> {
        let End::Sends(sender) = &self.end else { panic!("this end receives") };
        let mut sender = sender.lock().expect("no test panics with the lock");
        if self.of.access.break_next_batch.swap(0, Ordering::Relaxed) > 0 {
            *sender = None;
        }
        let bytes = blocks.iter().map(|block| DeviceMemory::read(&self.of.blocks, *block)).collect();
        sender.as_ref().ok_or_else(broken)?.send(bytes).map_err(|_| broken())
    }

    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), DeviceTransferError> {
        let End::Receives(receiver) = &self.end else { panic!("this end sends") };
        let receiver = receiver.lock().expect("no test panics with the lock");
        self.of.access.copy_gate.pass();
        let bytes = receiver.as_ref().ok_or_else(broken)?.recv_timeout(TIMEOUT).map_err(|_| broken())?;
        assert_eq!(bytes.len(), blocks.len(), "both ends transfer the same number of blocks");
        for (block, bytes) in blocks.iter().zip(bytes) {
            if let Some(block) = block {
                self.of.write(*block, bytes);
            }
        }
        Ok(())
    }
}
