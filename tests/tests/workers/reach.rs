//! Devices of one process that stand in for GPUs: their KV memory can be reached without the host.

use crate::harness::{Gate, SOON};
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, OnceLock, Weak,
        atomic::{AtomicU64, Ordering},
        mpsc,
    },
};
use tandem_engine::{Chunk, Engine, sim::SimEngine};
use tandem_kv::{BlockId, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory};
use tokio::sync::watch;

/// What a device's memory can be used for.
#[derive(Clone, Default)]
pub struct Reach {
    /// Others may open it.
    pub shares: bool,
    /// It has NCCL.
    pub links: bool,
    /// Closed, nothing arrives.
    pub gate: Gate,
    /// Memories that are open.
    pub open: watch::Sender<usize>,
    /// The next batch that is sent breaks its communicator.
    pub breaks: Arc<AtomicU64>,
    /// Sending ends that have begun to join a communicator.
    pub joined: watch::Sender<u64>,
    /// Closed, no sending end joins.
    pub join_gate: Gate,
}

impl Reach {
    /// Returns when no memory is open.
    pub async fn closed(&self) {
        let mut open = self.open.subscribe();
        tokio::time::timeout(SOON, open.wait_for(|open| *open == 0)).await.expect("soon").expect("it is there");
    }
}

/// What others see of a device: the blocks, and what they have written that it has not taken in yet.
#[derive(Default)]
struct Blocks {
    seen: BTreeMap<u32, Vec<u8>>,
    written: BTreeMap<u32, Vec<u8>>,
}

/// A device's memory, beside its engine.
#[derive(Clone)]
pub struct Beside {
    reach: Reach,
    blocks: Arc<Mutex<Blocks>>,
    number: u64,
}

fn numbered() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// All memories, by their handle's number.
fn known() -> &'static Mutex<BTreeMap<u64, Weak<Mutex<Blocks>>>> {
    static KNOWN: OnceLock<Mutex<BTreeMap<u64, Weak<Mutex<Blocks>>>>> = OnceLock::new();
    KNOWN.get_or_init(Mutex::default)
}

impl Beside {
    pub fn new(reach: Reach) -> Self {
        let (blocks, number) = (Arc::<Mutex<Blocks>>::default(), numbered());
        known().lock().expect("not poisoned").insert(number, Arc::downgrade(&blocks));
        Self { reach, blocks, number }
    }

    /// Before the engine reads: what others have written is in it.
    pub fn take_in(&self, engine: &mut SimEngine) {
        let written = std::mem::take(&mut self.blocks.lock().expect("not poisoned").written);
        for (block, bytes) in written {
            engine.write_block(BlockId(block), &bytes).expect("the simulator does not fail");
        }
    }

    /// After the engine has written: others see it.
    pub fn show(&self, engine: &SimEngine, blocks: &[BlockId]) {
        for block in blocks {
            let mut bytes = vec![0; engine.describe().block_bytes];
            engine.read_block(*block, &mut bytes).expect("the simulator does not fail");
            self.blocks.lock().expect("not poisoned").seen.insert(block.0, bytes);
        }
    }

    pub fn show_chunks(&self, engine: &SimEngine, chunks: &[Chunk<'_>]) {
        let size = engine.describe().block_size as usize;
        for chunk in chunks {
            let (start, end) = (chunk.start as usize, chunk.start as usize + chunk.tokens.len());
            self.show(engine, &chunk.blocks[start / size..end.div_ceil(size)]);
        }
    }

    /// As the engine would read it, with what others have written.
    pub fn read_into(&self, block: BlockId, into: &mut [u8]) {
        into.copy_from_slice(&Self::read(&self.blocks, block));
    }

    fn read(blocks: &Mutex<Blocks>, block: BlockId) -> Vec<u8> {
        blocks.lock().expect("not poisoned").seen[&block.0].clone()
    }

    fn write(&self, block: BlockId, bytes: Vec<u8>) {
        let mut blocks = self.blocks.lock().expect("not poisoned");
        blocks.seen.insert(block.0, bytes.clone());
        blocks.written.insert(block.0, bytes);
    }
}

impl KvMemory for Beside {
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError> {
        if self.reach.shares {
            Ok(self.number.to_le_bytes().to_vec())
        } else {
            Err(DeviceTransferError::Unreachable("it stays".to_owned()))
        }
    }

    fn open_peer(&self, handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError> {
        let unreachable = || DeviceTransferError::Unreachable("another host".to_owned());
        if !self.reach.shares {
            return Err(unreachable());
        }
        let number = u64::from_le_bytes(handle.try_into().map_err(|_| unreachable())?);
        let source = known().lock().expect("not poisoned").get(&number).and_then(Weak::upgrade).ok_or_else(unreachable)?;
        self.reach.open.send_modify(|open| *open += 1);
        Ok(Arc::new(Opened { source, to: self.clone() }))
    }

    fn nccl_ranks(&self) -> u32 {
        self.reach.links.into()
    }

    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError> {
        Ok(numbered().to_le_bytes().to_vec())
    }

    fn join(&self, name: &[u8], end: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError> {
        if end == CommunicatorEnd::Sender {
            self.reach.joined.send_modify(|joined| *joined += 1);
            self.reach.join_gate.pass();
        }
        type Ends = (Option<mpsc::Sender<Vec<Vec<u8>>>>, Option<mpsc::Receiver<Vec<Vec<u8>>>>);
        static ENDS: Mutex<BTreeMap<Vec<u8>, Ends>> = Mutex::new(BTreeMap::new());
        let mut ends = ENDS.lock().expect("not poisoned");
        let (sender, receiver) = ends.entry(name.to_vec()).or_insert_with(|| {
            // The sender does not wait for the receiver: nor does NCCL while its buffers have capacity.
            let (sender, receiver) = mpsc::channel();
            (Some(sender), Some(receiver))
        });
        let end = match end {
            CommunicatorEnd::Sender => End::Sends(Mutex::new(sender.take())),
            CommunicatorEnd::Receiver => End::Receives(Mutex::new(receiver.take())),
        };
        Ok(Arc::new(Linked { of: self.clone(), end }))
    }
}

struct Opened {
    source: Arc<Mutex<Blocks>>,
    to: Beside,
}

impl PeerMemory for Opened {
    fn copy(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError> {
        self.to.reach.gate.pass();
        for (from, to) in blocks {
            self.to.write(*to, Beside::read(&self.source, *from));
        }
        Ok(())
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        self.to.reach.open.send_modify(|open| *open -= 1);
    }
}

enum End {
    Sends(Mutex<Option<mpsc::Sender<Vec<Vec<u8>>>>>),
    Receives(Mutex<Option<mpsc::Receiver<Vec<Vec<u8>>>>>),
}

struct Linked {
    of: Beside,
    end: End,
}

fn broken() -> DeviceTransferError {
    DeviceTransferError::Failed("the test breaks it".into())
}

impl KvCommunicator for Linked {
    fn send(&self, blocks: &[BlockId]) -> Result<(), DeviceTransferError> {
        let End::Sends(sender) = &self.end else { panic!("this end receives") };
        let mut sender = sender.lock().expect("not poisoned");
        if self.of.reach.breaks.swap(0, Ordering::Relaxed) > 0 {
            *sender = None;
        }
        let bytes = blocks.iter().map(|block| Beside::read(&self.of.blocks, *block)).collect();
        sender.as_ref().ok_or_else(broken)?.send(bytes).map_err(|_| broken())
    }

    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), DeviceTransferError> {
        let End::Receives(receiver) = &self.end else { panic!("this end sends") };
        let receiver = receiver.lock().expect("not poisoned");
        self.of.reach.gate.pass();
        let bytes = receiver.as_ref().ok_or_else(broken)?.recv_timeout(SOON).map_err(|_| broken())?;
        assert_eq!(bytes.len(), blocks.len(), "both ends move as many");
        for (block, bytes) in blocks.iter().zip(bytes) {
            if let Some(block) = block {
                self.of.write(*block, bytes);
            }
        }
        Ok(())
    }
}
