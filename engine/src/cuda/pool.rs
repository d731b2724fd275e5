//! Direct access to an engine's KV memory: workers of the same host copy from it over CUDA IPC, and NCCL communicators send and receive its blocks.

use super::{
    CudaError,
    device::{CommunicatorId, Device, Memory, PeerCommunicator},
};
use parking_lot::Mutex;
use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};
use tandem_kv::{BlockId, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory};

/// Time limit for the other end to join a communicator; its process may still be loading NCCL.
const LINK_MAX: Duration = Duration::from_secs(30);
/// Time limit for sending blocks: ten seconds, as the other end may still be in a step, plus the time on a slow network. A peer that takes longer is
/// considered lost.
fn move_max(blocks: usize, block_bytes: usize) -> Duration {
    const BYTES_PER_SECOND_MIN: f64 = 50e6;
    Duration::from_secs(10) + Duration::from_secs_f64((blocks * block_bytes) as f64 / BYTES_PER_SECOND_MIN)
}

/// Bytes of one GPU's IPC handle (`CUipcMemHandle`).
pub(super) const HANDLE_BYTES: usize = 64;

/// One rank's shard of all blocks, in its device's memory.
pub(super) struct Part<D: Device> {
    /// A stream of its own, so that copies do not wait for steps.
    pub device: Arc<D>,
    pub kv: Arc<Memory<D>>,
}

/// The KV memory of an engine. It outlives the engine while transfers use it.
pub(super) struct Pool<D: Device>(Arc<Parts<D>>);

struct Parts<D: Device> {
    /// The pool's key in `POOLS`.
    number: u64,
    parts: Vec<Part<D>>,
    /// Bytes of one rank's shard of a block.
    block_bytes: usize,
    blocks: u32,
}

/// The fields of a serialised handle, in this order; integers are little-endian.
struct Handle {
    host: [u8; 16],
    process: [u8; 16],
    block_bytes: u64,
    blocks: u32,
    /// The pool's key in that process.
    number: u64,
    /// The driver's IPC handle of each rank's shard.
    parts: Vec<[u8; HANDLE_BYTES]>,
}

/// The pools of this process, by number. A registry of the process, because CUDA cannot open an IPC handle in the process that exported it: engines of one
/// process find each other's memory here.
static POOLS: Mutex<BTreeMap<u64, Weak<dyn Any + Send + Sync>>> = Mutex::new(BTreeMap::new());

/// Identifies the host, across containers, until it reboots; zeros if it cannot be determined. Constant for the process.
fn host() -> [u8; 16] {
    static HOST: OnceLock<[u8; 16]> = OnceLock::new();
    *HOST.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        u128::from_str_radix(&id.trim().replace('-', ""), 16).unwrap_or_default().to_le_bytes()
    })
}

/// Identifies the process by a random number, since process ids are not unique across containers. Constant for the process.
fn process() -> [u8; 16] {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    // The standard library seeds every hasher from the system's randomness.
    let number = || std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
    *PROCESS.get_or_init(|| ((u128::from(number()) << 64) | u128::from(number())).to_le_bytes())
}

impl Handle {
    fn to_bytes(&self) -> Vec<u8> {
        let Self { host, process, block_bytes, blocks, number, parts } = self;
        let one = [&host[..], process, &block_bytes.to_le_bytes(), &blocks.to_le_bytes(), &number.to_le_bytes()].concat();
        [&one, parts.as_flattened()].concat()
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
            let (first, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(*first)
        }
        let mut rest = bytes;
        let rest = &mut rest;
        let (host, process) = (take(rest)?, take(rest)?);
        let (block_bytes, blocks) = (u64::from_le_bytes(take(rest)?), u32::from_le_bytes(take(rest)?));
        let number = u64::from_le_bytes(take(rest)?);
        let (parts, rest) = rest.as_chunks();
        rest.is_empty().then(|| Self { host, process, block_bytes, blocks, number, parts: parts.to_vec() })
    }
}

fn unreachable(why: &str) -> DeviceTransferError {
    DeviceTransferError::Unreachable(why.to_owned())
}

fn broken(error: CudaError) -> DeviceTransferError {
    DeviceTransferError::Failed(Box::new(error))
}

impl<D: Device> Pool<D> {
    pub fn new(parts: Vec<Part<D>>, block_bytes: usize, blocks: u32) -> Self {
        let mut pools = POOLS.lock();
        pools.retain(|_, pool| pool.strong_count() > 0);
        let number = pools.keys().next_back().map_or(0, |last| last + 1);
        let parts = Arc::new(Parts { number, parts, block_bytes, blocks });
        let known: Weak<dyn Any + Send + Sync> = Arc::downgrade(&(Arc::clone(&parts) as Arc<dyn Any + Send + Sync>));
        pools.insert(number, known);
        Self(parts)
    }
}

impl<D: Device> Parts<D> {
    fn address(&self, part: &Part<D>, block: BlockId) -> u64 {
        assert!(block.0 < self.blocks, "the block is in the KV memory");
        part.kv.address() + u64::from(block.0) * self.block_bytes as u64
    }
}

impl<D: Device> KvMemory for Pool<D> {
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError> {
        let Parts { number, parts, block_bytes, blocks } = &*self.0;
        let parts = parts.iter().map(|part| part.device.export(part.kv.address()).map_err(broken)).collect::<Result<_, _>>()?;
        let (block_bytes, blocks, number) = (*block_bytes as u64, *blocks, *number);
        Ok(Handle { host: host(), process: process(), block_bytes, blocks, number, parts }.to_bytes())
    }

    fn open_peer(&self, handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError> {
        let ours = &self.0;
        let handle = Handle::from_bytes(handle).ok_or_else(|| unreachable("invalid handle (from another version?)"))?;
        if handle.host != host() || handle.host == [0; 16] {
            return Err(unreachable("on another host"));
        }
        if (handle.block_bytes, handle.parts.len()) != (ours.block_bytes as u64, ours.parts.len()) {
            return Err(unreachable("incompatible KV layout or tensor-parallel degree"));
        }
        let mut peer = Peer { pool: Arc::clone(ours), addresses: Vec::new(), blocks: handle.blocks, owner: None };
        if handle.process == process() {
            let pools = POOLS.lock();
            let owner = pools.get(&handle.number).and_then(Weak::upgrade).and_then(|pool| pool.downcast::<Parts<D>>().ok());
            let owner = owner.ok_or_else(|| unreachable("its engine has ended"))?;
            (peer.addresses, peer.blocks) = (owner.parts.iter().map(|part| part.kv.address()).collect(), owner.blocks);
            peer.owner = Some(owner);
            return Ok(Arc::new(peer));
        }
        let wanted = u64::from(handle.blocks).saturating_mul(handle.block_bytes);
        for (part, exported) in ours.parts.iter().zip(&handle.parts) {
            let (address, bytes) = part.device.import(exported).map_err(broken)?;
            peer.addresses.push(address);
            if (bytes as u64) < wanted {
                return Err(unreachable("its memory is smaller than its handle says"));
            }
        }
        Ok(Arc::new(peer))
    }

    fn nccl_ranks(&self) -> u32 {
        if D::nccl_available() { self.0.parts.len() as u32 } else { 0 }
    }

    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError> {
        let names = self.0.parts.iter().map(|_| D::new_communicator_id().map_err(broken));
        Ok(names.collect::<Result<Vec<CommunicatorId>, _>>()?.concat())
    }

    fn join(&self, name: &[u8], end: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError> {
        let ours = &self.0;
        let (names, rest) = name.as_chunks();
        if names.len() != ours.parts.len() || !rest.is_empty() {
            return Err(unreachable("the communicator id is for another tensor-parallel degree"));
        }
        let rank = match end {
            CommunicatorEnd::Sender => 0,
            CommunicatorEnd::Receiver => 1,
        };
        let nowhere_bytes = if end == CommunicatorEnd::Receiver { ours.block_bytes } else { 0 };
        let line = |(part, name): (&Part<D>, &CommunicatorId)| {
            let line = part.device.connect_peer(name, rank, LINK_MAX).map_err(broken)?;
            Ok((line, Memory::new(&part.device, nowhere_bytes).map_err(broken)?))
        };
        let lines = ours.parts.iter().zip(names).map(line).collect::<Result<_, _>>()?;
        Ok(Arc::new(Between { lines, pool: Arc::clone(ours) }))
    }
}

/// Another engine's KV memory.
struct Peer<D: Device> {
    pool: Arc<Parts<D>>,
    /// Address of each rank's shard.
    addresses: Vec<u64>,
    blocks: u32,
    /// The pool, if it is of this process, which keeps its memory allocated. The memory of other processes is mapped.
    owner: Option<Arc<Parts<D>>>,
}

impl<D: Device> Drop for Peer<D> {
    fn drop(&mut self) {
        if self.owner.is_none() {
            self.pool.parts.iter().zip(&self.addresses).for_each(|(part, address)| part.device.close(*address));
        }
    }
}

impl<D: Device> PeerMemory for Peer<D> {
    fn copy(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError> {
        if blocks.iter().any(|(from, _)| from.0 >= self.blocks) {
            return Err(unreachable("no such block"));
        }
        let (pool, block_bytes) = (&self.pool, self.pool.block_bytes);
        // Runs of consecutive blocks are copied together.
        let follows = |a: &(BlockId, BlockId), b: &(BlockId, BlockId)| (a.0.0 + 1, a.1.0 + 1) == (b.0.0, b.1.0);
        let mut copied = Ok(());
        for (part, address) in pool.parts.iter().zip(&self.addresses) {
            for run in blocks.chunk_by(follows) {
                let (from, to) = run[0];
                let from = address + u64::from(from.0) * block_bytes as u64;
                copied = copied.and_then(|()| part.device.copy(from, pool.address(part, to), run.len() * block_bytes));
            }
        }
        // Wait for all ranks even if one has failed: no copy may write after this function has returned.
        let waited: Vec<_> = pool.parts.iter().map(|part| part.device.wait()).collect();
        waited.into_iter().fold(copied, Result::and).map_err(broken)
    }
}

/// One end of a transfer over NCCL: a communicator per rank, and memory for received blocks that are discarded.
struct Between<D: Device> {
    lines: Vec<(D::PeerCommunicator, Memory<D>)>,
    pool: Arc<Parts<D>>,
}

impl<D: Device> Between<D> {
    /// Runs the transfers of all ranks concurrently, since the two ends may process them in different orders.
    fn on_all(
        &self,
        moves: impl Fn(&Part<D>, &(D::PeerCommunicator, Memory<D>)) -> Result<(), CudaError> + Sync,
    ) -> Result<(), DeviceTransferError> {
        let moved: Vec<_> = std::thread::scope(|scope| {
            let parts = self.pool.parts.iter().zip(&self.lines);
            let moving: Vec<_> = parts.map(|(part, line)| scope.spawn(|| moves(part, line))).collect();
            moving.into_iter().map(|moving| moving.join().expect("transfers do not panic")).collect()
        });
        moved.into_iter().collect::<Result<(), _>>().map_err(broken)
    }
}

impl<D: Device> KvCommunicator for Between<D> {
    fn send(&self, blocks: &[BlockId]) -> Result<(), DeviceTransferError> {
        let Parts { block_bytes, .. } = *self.pool;
        self.on_all(|part, (line, _)| {
            let regions: Vec<_> = blocks.iter().map(|block| (self.pool.address(part, *block), block_bytes)).collect();
            line.send(&regions, move_max(blocks.len(), block_bytes))
        })
    }

    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), DeviceTransferError> {
        let Parts { block_bytes, .. } = *self.pool;
        self.on_all(|part, (line, nowhere)| {
            let place = |block: &Option<BlockId>| block.map_or(nowhere.address(), |block| self.pool.address(part, block));
            let regions: Vec<_> = blocks.iter().map(|block| (place(block), block_bytes)).collect();
            line.receive(&regions, move_max(blocks.len(), block_bytes))
        })
    }
}
