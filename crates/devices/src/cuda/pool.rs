//! Direct access to an engine's KV memory: other workers of the host copy from it over CUDA IPC, and NCCL communicators send and receive
//! its blocks.

use super::{
    CudaError,
    device::{CommunicatorId, Device, Imported, IpcHandle, Memory, PeerCommunicator, Region},
};
use parking_lot::Mutex;
use std::{
    any::Any,
    collections::BTreeMap,
    sync::{Arc, OnceLock, Weak},
    time::Duration,
};
use tandem_kv::{BlockId, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory};

/// Time limit for the peer to join a communicator; the peer's process may still be loading NCCL.
const JOIN_MAX: Duration = Duration::from_secs(30);

/// Returns the time limit for sending blocks: ten seconds, because the peer may still be in a step, plus the time for these bytes on a slow
/// network. A peer that takes longer is considered lost.
fn transfer_max(blocks: usize, block_bytes: usize) -> Duration {
    const BYTES_PER_SECOND_MIN: f64 = 50e6;
    Duration::from_secs(10) + Duration::from_secs_f64((blocks * block_bytes) as f64 / BYTES_PER_SECOND_MIN)
}

/// One rank's shard of all blocks, in its device's memory.
pub(super) struct KvShard<D: Device> {
    /// A separate stream of the rank's device, so that copies do not wait for steps.
    pub device: Arc<D>,
    pub kv: Arc<Memory<D>>,
}

/// The KV memory of an engine. Transfers that use the memory keep it allocated, even after the engine has ended.
pub(super) struct Pool<D: Device>(Arc<Shards<D>>);

struct Shards<D: Device> {
    /// The pool's key in `POOLS`.
    number: u64,
    shards: Vec<KvShard<D>>,
    /// Bytes of one rank's shard of a block.
    block_bytes: usize,
    blocks: u32,
}

/// The fields of a pool's serialised handle, in this order; integers are little-endian.
struct Handle {
    host: [u8; 16],
    process: [u8; 16],
    block_bytes: u64,
    blocks: u32,
    /// The pool's key in `POOLS` of the process `process`.
    number: u64,
    shards: Vec<IpcHandle>,
}

/// The pools of this process, by number. Engines of one process find each other's memory here, because CUDA cannot open an IPC handle in
/// the process that exported it.
static POOLS: Mutex<BTreeMap<u64, Weak<dyn Any + Send + Sync>>> = Mutex::new(BTreeMap::new());

/// Returns the host's id, which is the same in all containers and changes when the host reboots; zeros if it is unknown.
fn host() -> [u8; 16] {
    static HOST: OnceLock<[u8; 16]> = OnceLock::new();
    *HOST.get_or_init(|| {
        let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        u128::from_str_radix(&id.trim().replace('-', ""), 16).unwrap_or_default().to_le_bytes()
    })
}

/// Returns a random id of this process, since process ids are not unique across containers.
fn process() -> [u8; 16] {
    static PROCESS: OnceLock<[u8; 16]> = OnceLock::new();
    // The standard library seeds every hasher from the system's randomness.
    let number = || std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), 0u8);
    *PROCESS.get_or_init(|| ((u128::from(number()) << 64) | u128::from(number())).to_le_bytes())
}

impl Handle {
    fn to_bytes(&self) -> Vec<u8> {
        let Self { host, process, block_bytes, blocks, number, shards } = self;
        let numbers = [&block_bytes.to_le_bytes()[..], &blocks.to_le_bytes(), &number.to_le_bytes()].concat();
        [&host[..], process, &numbers, shards.as_flattened()].concat()
    }

    fn from_bytes(mut bytes: &[u8]) -> Option<Self> {
        fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
            let (first, rest) = bytes.split_first_chunk()?;
            *bytes = rest;
            Some(*first)
        }
        let rest = &mut bytes;
        let (host, process) = (take(rest)?, take(rest)?);
        let (block_bytes, blocks) = (u64::from_le_bytes(take(rest)?), u32::from_le_bytes(take(rest)?));
        let number = u64::from_le_bytes(take(rest)?);
        let (shards, rest) = rest.as_chunks();
        rest.is_empty().then(|| Self { host, process, block_bytes, blocks, number, shards: shards.to_vec() })
    }
}

fn unreachable(why: &str) -> DeviceTransferError {
    DeviceTransferError::Unreachable(why.to_owned())
}

fn failed(error: CudaError) -> DeviceTransferError {
    DeviceTransferError::Failed(Box::new(error))
}

impl<D: Device> Pool<D> {
    pub fn new(shards: Vec<KvShard<D>>, block_bytes: usize, blocks: u32) -> Self {
        let mut pools = POOLS.lock();
        pools.retain(|_, pool| pool.strong_count() > 0);
        let number = pools.keys().next_back().map_or(0, |last| last + 1);
        let pool = Arc::new(Shards { number, shards, block_bytes, blocks });
        let known: Weak<Shards<D>> = Arc::downgrade(&pool);
        pools.insert(number, known);
        Self(pool)
    }
}

impl<D: Device> Shards<D> {
    fn address(&self, shard: &KvShard<D>, block: BlockId) -> u64 {
        assert!(block.0 < self.blocks, "the block is in the KV memory");
        shard.kv.address() + u64::from(block.0) * self.block_bytes as u64
    }
}

impl<D: Device> KvMemory for Pool<D> {
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError> {
        let Shards { number, block_bytes, blocks, .. } = *self.0;
        let shards = self.0.shards.iter().map(|shard| shard.device.export(shard.kv.address()));
        let shards = shards.collect::<Result<_, _>>().map_err(failed)?;
        // Memory must not be freed while other processes have it mapped. This process does not know when they unmap it, so the memory is
        // freed only when the process ends.
        self.0.shards.iter().for_each(|shard| std::mem::forget(Arc::clone(&shard.kv)));
        Ok(Handle { host: host(), process: process(), block_bytes: block_bytes as u64, blocks, number, shards }.to_bytes())
    }

    fn open_peer(&self, handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError> {
        let ours = &self.0;
        let handle =
            Handle::from_bytes(handle).ok_or_else(|| unreachable("the IPC handle is invalid or from another version"))?;
        if handle.host != host() || handle.host == [0; 16] {
            return Err(DeviceTransferError::OtherHost);
        }
        if (handle.block_bytes, handle.shards.len()) != (ours.block_bytes as u64, ours.shards.len()) {
            return Err(unreachable("the worker's KV layout or tensor-parallel degree differs"));
        }
        let mut peer = Peer { pool: Arc::clone(ours), addresses: Vec::new(), blocks: handle.blocks, owner: None };
        if handle.process == process() {
            let pools = POOLS.lock();
            let owner = pools.get(&handle.number).and_then(Weak::upgrade).and_then(|pool| pool.downcast::<Shards<D>>().ok());
            let owner = owner.ok_or_else(|| unreachable("the worker's engine has ended"))?;
            (peer.addresses, peer.blocks) = (owner.shards.iter().map(|shard| shard.kv.address()).collect(), owner.blocks);
            peer.owner = Some(owner);
            return Ok(Arc::new(peer));
        }
        let wanted = u64::from(handle.blocks).saturating_mul(handle.block_bytes);
        for (shard, exported) in ours.shards.iter().zip(&handle.shards) {
            let Imported { address, bytes } = shard.device.import(exported).map_err(failed)?;
            peer.addresses.push(address);
            if bytes.is_some_and(|bytes| (bytes as u64) < wanted) {
                return Err(unreachable("the worker's memory is smaller than the IPC handle says"));
            }
        }
        Ok(Arc::new(peer))
    }

    fn nccl_ranks(&self) -> u32 {
        if D::nccl_available() { self.0.shards.len() as u32 } else { 0 }
    }

    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError> {
        let ids = self.0.shards.iter().map(|_| D::new_communicator_id());
        Ok(ids.collect::<Result<Vec<CommunicatorId>, _>>().map_err(failed)?.concat())
    }

    fn join(&self, id: &[u8], end: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError> {
        let ours = &self.0;
        let (ids, rest) = id.as_chunks();
        if ids.len() != ours.shards.len() || !rest.is_empty() {
            return Err(unreachable("the communicator id is for another tensor-parallel degree"));
        }
        let (rank, discarded_bytes) = match end {
            CommunicatorEnd::Sender => (0, 0),
            CommunicatorEnd::Receiver => (1, ours.block_bytes),
        };
        let connect = |(shard, id): (&KvShard<D>, &CommunicatorId)| {
            Ok::<_, CudaError>((shard.device.connect_peer(id, rank, JOIN_MAX)?, Memory::new(&shard.device, discarded_bytes)?))
        };
        let peers = ours.shards.iter().zip(ids).map(connect).collect::<Result<_, _>>().map_err(failed)?;
        Ok(Arc::new(PoolCommunicator { peers, pool: Arc::clone(ours) }))
    }
}

/// Another engine's KV memory.
struct Peer<D: Device> {
    pool: Arc<Shards<D>>,
    /// Address of each rank's shard.
    addresses: Vec<u64>,
    blocks: u32,
    /// Keeps the other engine's memory allocated if that engine is in this process; `None` if the memory is mapped from another process.
    owner: Option<Arc<Shards<D>>>,
}

impl<D: Device> Drop for Peer<D> {
    fn drop(&mut self) {
        if self.owner.is_none() {
            self.pool.shards.iter().zip(&self.addresses).for_each(|(shard, address)| shard.device.close(*address));
        }
    }
}

impl<D: Device> PeerMemory for Peer<D> {
    fn copy(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError> {
        if blocks.iter().any(|(from, _)| from.0 >= self.blocks) {
            return Err(unreachable("the worker does not have one of the blocks"));
        }
        let (pool, block_bytes) = (&self.pool, self.pool.block_bytes);
        // Runs of consecutive blocks are copied together.
        let follows = |a: &(BlockId, BlockId), b: &(BlockId, BlockId)| (a.0.0 + 1, a.1.0 + 1) == (b.0.0, b.1.0);
        let mut copied = Ok(());
        for (shard, address) in pool.shards.iter().zip(&self.addresses) {
            for run in blocks.chunk_by(follows) {
                let (from, to) = run[0];
                let from = address + u64::from(from.0) * block_bytes as u64;
                copied = copied.and_then(|()| shard.device.copy(from, pool.address(shard, to), run.len() * block_bytes));
            }
        }
        // Wait for all ranks even if one has failed: no copy may write after this function has returned.
        let waited: Vec<_> = pool.shards.iter().map(|shard| shard.device.wait()).collect();
        waited.into_iter().fold(copied, Result::and).map_err(failed)
    }
}

/// Sends or receives the regions of one rank within a time limit.
type TransferOnRank<D> = fn(&<D as Device>::PeerCommunicator, &[Region], Duration) -> Result<(), CudaError>;

/// One end of a transfer over NCCL.
struct PoolCommunicator<D: Device> {
    /// For each rank, a communicator and the memory that receives discarded blocks.
    peers: Vec<(D::PeerCommunicator, Memory<D>)>,
    pool: Arc<Shards<D>>,
}

impl<D: Device> PoolCommunicator<D> {
    /// Transfers the blocks of all ranks concurrently, since the two ends may process the ranks in different orders. Blocks that are `None`
    /// are received and discarded.
    fn transfer(&self, blocks: &[Option<BlockId>], one: TransferOnRank<D>) -> Result<(), DeviceTransferError> {
        let block_bytes = self.pool.block_bytes;
        let on_rank = |shard: &KvShard<D>, (communicator, discarded): &(D::PeerCommunicator, Memory<D>)| {
            let address = |block: &Option<BlockId>| block.map_or(discarded.address(), |block| self.pool.address(shard, block));
            let regions: Vec<_> = blocks.iter().map(|block| (address(block), block_bytes)).collect();
            one(communicator, &regions, transfer_max(blocks.len(), block_bytes))
        };
        let done: Vec<_> = std::thread::scope(|scope| {
            let ranks = self.pool.shards.iter().zip(&self.peers);
            let running: Vec<_> = ranks.map(|(shard, peer)| scope.spawn(|| on_rank(shard, peer))).collect();
            running.into_iter().map(|transfer| transfer.join().expect("transfers do not panic")).collect()
        });
        done.into_iter().collect::<Result<(), _>>().map_err(failed)
    }
}

impl<D: Device> KvCommunicator for PoolCommunicator<D> {
    fn send(&self, blocks: &[BlockId]) -> Result<(), DeviceTransferError> {
        let blocks: Vec<_> = blocks.iter().copied().map(Some).collect();
        self.transfer(&blocks, PeerCommunicator::send)
    }

    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), DeviceTransferError> {
        self.transfer(blocks, PeerCommunicator::receive)
    }
}
