//! Tests of how long a peer's memory stays open.

use super::*;
use crate::path::ReceivePath;
use bytes::Bytes;
use std::sync::atomic::{AtomicUsize, Ordering};
use tandem_kv::{BlockWrite, CommunicatorEnd, KvCommunicator};
use tandem_process::Shutdown;
use tandem_proto::v1::{self, TransferCapabilities};
use tonic::Code;

/// Counts how often a peer's memory was opened and how many memories are open. Permits writes to these tickets only.
#[derive(Clone, Default)]
struct Device {
    opened: Arc<AtomicUsize>,
    open: Arc<AtomicUsize>,
    refused: Arc<Mutex<Vec<(&'static str, &'static str)>>>,
    writable: Arc<Mutex<Vec<Ticket>>>,
}

struct Open(Arc<AtomicUsize>);

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Places(Vec<BlockId>);

impl BlockWrite for Places {
    fn blocks(&self) -> &[BlockId] {
        &self.0
    }

    fn complete(self: Box<Self>) {
        unreachable!("no copy ends");
    }
}

impl PeerMemory for Open {
    fn copy(&self, _: &[(BlockId, BlockId)]) -> Result<(), DeviceTransferError> {
        unreachable!("a bug of the driver")
    }
}

impl KvMemory for Device {
    fn ipc_handle(&self) -> Result<Vec<u8>, DeviceTransferError> {
        Err(DeviceTransferError::OtherHost)
    }

    fn open_peer(&self, handle: &[u8]) -> Result<Arc<dyn PeerMemory>, DeviceTransferError> {
        match handle {
            b"host" => Err(DeviceTransferError::OtherHost),
            b"hidden" => Err(DeviceTransferError::Failed("the GPU is not visible".into())),
            _ => {
                self.opened.fetch_add(1, Ordering::SeqCst);
                self.open.fetch_add(1, Ordering::SeqCst);
                Ok(Arc::new(Open(Arc::clone(&self.open))))
            }
        }
    }

    fn nccl_ranks(&self) -> u32 {
        0
    }

    fn new_communicator_id(&self) -> Result<Vec<u8>, DeviceTransferError> {
        Err(DeviceTransferError::OtherHost)
    }

    fn join(&self, _: &[u8], _: CommunicatorEnd) -> Result<Arc<dyn KvCommunicator>, DeviceTransferError> {
        Err(DeviceTransferError::OtherHost)
    }
}

#[tonic::async_trait]
impl Destination for Device {
    async fn write(&self, _: Ticket, _: u32, _: Bytes) -> Result<(), Refused> {
        Err(Refused)
    }

    async fn begin_write(&self, ticket: Ticket, indices: Vec<u32>) -> Result<Box<dyn BlockWrite>, Refused> {
        let places = indices.into_iter().map(BlockId).collect();
        if self.writable.lock().contains(&ticket) { Ok(Box::new(Places(places))) } else { Err(Refused) }
    }

    async fn confirm(&self, _: Ticket) {}

    async fn refuse(&self, _: Ticket) -> Refused {
        Refused
    }

    fn path_refused(&self, path: &'static str, reason: &'static str) {
        self.refused.lock().push((path, reason));
    }
}

fn receiver(device: &Device, shutdown: &Shutdown) -> IpcReceiver {
    let lifetime = Lifetime::new(shutdown.clone(), std::future::pending());
    IpcReceiver::new(Arc::new(device.clone()), Arc::new(device.clone()), lifetime)
}

/// Sends a prompt from a peer with this handle. Returns the grant that the prompt holds until its blocks are written; `None` if the prompt
/// takes another path.
async fn prompt(receiver: &IpcReceiver, peer: &str, handle: &[u8], number: u8) -> Option<Box<dyn Grant>> {
    let capabilities = TransferCapabilities { cuda_ipc: true, ..TransferCapabilities::default() };
    let (secret, mut ticket) = (Ticket::from_bytes([number; Ticket::BYTES]), v1::Ticket::default());
    match receiver.offer(Offer { peer, capabilities: &capabilities, secret, ticket: &mut ticket }).await {
        Decision::Accepted { grant, .. } => grant,
        Decision::Prepares(grant) => {
            grant.confirmed(&PrefillDone { ipc_handle: handle.to_vec(), ..PrefillDone::default() });
            None
        }
        Decision::Unavailable => None,
    }
}

/// Lets tasks and threads that close memories run. Paused time advances only while no thread works, so a few milliseconds of it are enough to
/// close a memory.
async fn settle() {
    for _ in 0..10 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(start_paused = true)]
async fn mapped_memory_of_a_peer_is_closed_a_minute_after_the_last_prompt() {
    let (device, shutdown) = (Device::default(), Shutdown::default());
    let receiver = receiver(&device, &shutdown);
    assert!(prompt(&receiver, "p", b"memory", 1).await.is_none(), "the first prompt requests the handle");
    for secret in 2..12 {
        drop(prompt(&receiver, "p", b"memory", secret).await.expect("the memory can be opened"));
        tokio::time::sleep(IDLE_MAX / 2).await;
    }
    assert_eq!([&device.opened, &device.open].map(|count| count.load(Ordering::SeqCst)), [1, 1], "it was opened once");
    let held = prompt(&receiver, "p", b"memory", 12).await.expect("the memory is open");
    tokio::time::sleep(IDLE_MAX * 10).await;
    assert_eq!(device.open.load(Ordering::SeqCst), 1, "a prompt uses it");
    drop(held);
    tokio::time::sleep(IDLE_MAX * 2).await;
    settle().await;
    assert_eq!(device.open.load(Ordering::SeqCst), 0, "it is closed");
    drop(prompt(&receiver, "p", b"memory", 13).await.expect("it can be opened again"));
    assert_eq!(device.opened.load(Ordering::SeqCst), 2);
    shutdown.run(Duration::from_secs(5)).await;
    assert_eq!(device.open.load(Ordering::SeqCst), 0, "a draining worker closes it, and waits for that");
}

#[tokio::test(start_paused = true)]
async fn failure_to_open_a_peers_memory_is_counted_by_its_reason() {
    let (device, shutdown) = (Device::default(), Shutdown::default());
    let receiver = receiver(&device, &shutdown);
    for (peer, handle) in [("far", &b"host"[..]), ("hidden", b"hidden")] {
        for secret in 0..5 {
            assert!(prompt(&receiver, peer, handle, secret).await.is_none());
        }
    }
    let expected = [(IPC_LABEL, "other_host"), (IPC_LABEL, "failed")];
    assert_eq!(*device.refused.lock(), expected, "the backoff keeps later prompts from trying again");
}

#[tokio::test(start_paused = true)]
async fn interrupted_copy_is_not_reported_as_a_refused_ticket() {
    let (device, shutdown) = (Device::default(), Shutdown::default());
    let receiver = receiver(&device, &shutdown);
    assert!(prompt(&receiver, "p", b"memory", 1).await.is_none(), "the first prompt requests the handle");
    let copy = async |number| {
        let _granted = prompt(&receiver, "p", b"memory", number).await.expect("the memory can be opened");
        let ready = ReadyBlocks { block_indices: vec![0], source_blocks: vec![7] };
        receiver.copy(Ticket::from_bytes([number; Ticket::BYTES]), ready).await.expect_err("no copy ends").code()
    };
    device.writable.lock().push(Ticket::from_bytes([2; Ticket::BYTES]));
    assert_eq!(copy(2).await, Code::Aborted);
    assert_eq!(copy(3).await, Code::PermissionDenied);
}
