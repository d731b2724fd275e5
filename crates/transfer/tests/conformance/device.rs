//! Devices in one process that take the place of GPUs. They copy from each other's memory, and channels between them take the place of NCCL
//! communicators.

use bytes::Bytes;
use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    time::Duration,
};
use tandem_kv::{BlockId, CommunicatorEnd, DeviceTransferError, KvCommunicator, KvMemory, PeerMemory};

#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    number: u64,
    shares_memory: bool,
    nccl_ranks: u32,
    blocks: Mutex<BTreeMap<BlockId, Bytes>>,
    sizes: Mutex<BTreeMap<BlockId, usize>>,
    next: AtomicU32,
    breaks: AtomicBool,
}

static DEVICES: Mutex<BTreeMap<u64, Weak<Inner>>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicU64 = AtomicU64::new(0);

fn broken() -> DeviceTransferError {
    DeviceTransferError::Failed("the communicator is broken".into())
}

impl Device {
    pub fn new(shares_memory: bool, nccl_ranks: u32) -> Self {
        let number = NEXT.fetch_add(1, Relaxed);
        let inner = Arc::new(Inner {
            number,
            shares_memory,
            nccl_ranks,
            blocks: Mutex::default(),
            sizes: Mutex::default(),
            next: AtomicU32::new(0),
            breaks: AtomicBool::new(false),
        });
        DEVICES.lock().expect("no test panics with the lock").insert(number, Arc::downgrade(&inner));
        Self(inner)
    }

    pub fn store(&self, content: Bytes) -> BlockId {
        let block = BlockId(self.0.next.fetch_add(1, Relaxed));
        self.0.blocks.lock().expect("no test panics with the lock").insert(block, content);
        block
    }

    pub fn reserve(&self, bytes: usize) -> BlockId {
        let block = self.store(Bytes::new());
        self.0.sizes.lock().expect("no test panics with the lock").insert(block, bytes);
        block
    }

    pub fn read(&self, block: BlockId) -> Bytes {
        self.0.blocks.lock().expect("no test panics with the lock")[&block].clone()
    }

    pub fn break_next(&self) {
        self.0.breaks.store(true, Relaxed);
    }

    fn write(&self, block: BlockId, content: Bytes) -> Result<(), DeviceTransferError> {
        if self.0.sizes.lock().expect("no test panics with the lock")[&block] != content.len() {
            return Err(DeviceTransferError::Unreachable("the blocks have another size".to_owned()));
        }
        self.0.blocks.lock().expect("no test panics with the lock").insert(block, content);
        Ok(())
    }
}

impl KvMemory for Device {
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError> {
        let unreachable = || DeviceTransferError::Unreachable("the device does not share its memory".to_owned());
        self.0.shares_memory.then(|| self.0.number.to_le_bytes().to_vec()).ok_or_else(unreachable)
    }

    fn open_peer(&self, ipc_handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError> {
        let number = u64::from_le_bytes(ipc_handle.try_into().expect("the handle belongs to these devices"));
        let source = DEVICES
            .lock()
            .expect("no test panics with the lock")
            .get(&number)
            .and_then(Weak::upgrade)
            .expect("the device exists");
        Ok(Arc::new(Opened { source: Device(source), destination: self.clone() }))
    }

    fn nccl_ranks(&self) -> u32 {
        self.0.nccl_ranks
    }

    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError> {
        Ok(NEXT.fetch_add(1, Relaxed).to_le_bytes().to_vec())
    }

    fn join(&self, id: &[u8], end: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError> {
        type Ends = (Option<mpsc::Sender<Vec<Bytes>>>, Option<mpsc::Receiver<Vec<Bytes>>>);
        static ENDS: Mutex<BTreeMap<Vec<u8>, Ends>> = Mutex::new(BTreeMap::new());
        let mut ends = ENDS.lock().expect("no test panics with the lock");
        let (sender, receiver) = ends.entry(id.to_vec()).or_insert_with(|| {
            // The channel is unbounded, so that the sender does not wait for the receiver. NCCL does not wait either while its buffers have
            // capacity.
            let (sender, receiver) = mpsc::channel();
            (Some(sender), Some(receiver))
        });
        let end = match end {
            CommunicatorEnd::Sender => End::Sender(Mutex::new(sender.take())),
            CommunicatorEnd::Receiver => End::Receiver(Mutex::new(receiver.take().ok_or_else(broken)?)),
        };
        Ok(Arc::new(Communicator { device: self.clone(), end }))
    }
}

struct Opened {
    source: Device,
    destination: Device,
}

impl PeerMemory for Opened {
    fn copy(&self, blocks: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError> {
        blocks.iter().try_for_each(|(from, to)| self.destination.write(*to, self.source.read(*from)))
    }
}

struct Communicator {
    device: Device,
    end: End,
}

enum End {
    Sender(Mutex<Option<mpsc::Sender<Vec<Bytes>>>>),
    Receiver(Mutex<mpsc::Receiver<Vec<Bytes>>>),
}

impl KvCommunicator for Communicator {
    fn send(&self, blocks: &[BlockId]) -> Result<(), DeviceTransferError> {
        let End::Sender(sender) = &self.end else { panic!("this end receives") };
        let mut sender = sender.lock().expect("no test panics with the lock");
        if self.device.0.breaks.swap(false, Relaxed) {
            *sender = None;
        }
        let contents = blocks.iter().map(|block| self.device.read(*block)).collect();
        sender.as_ref().ok_or_else(broken)?.send(contents).map_err(|_| broken())
    }

    fn receive(&self, blocks: &[Option<BlockId>]) -> Result<(), DeviceTransferError> {
        let End::Receiver(receiver) = &self.end else { panic!("this end sends") };
        let receiver = receiver.lock().expect("no test panics with the lock");
        let contents = receiver.recv_timeout(Duration::from_secs(30)).map_err(|_| broken())?;
        assert_eq!(contents.len(), blocks.len(), "both ends transfer the same number of blocks");
        blocks.iter().zip(contents).try_for_each(|(block, content)| match block {
            Some(block) => self.device.write(*block, content),
            None => Ok(()),
        })
    }
}
