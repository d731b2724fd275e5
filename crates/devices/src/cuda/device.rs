//! The interface between the host code and the device that executes its work: a GPU or, in tests, an emulation with the kernels compiled
//! for the host.

use super::{CudaError, shape::Half};
use std::{sync::Arc, time::Duration};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Embed,
    RmsNorm,
    Rope,
    StoreKv,
    Swiglu,
    AttendPrompt,
    AttendToken,
    Sample,
}

impl Kernel {
    pub const ALL: [Self; 8] = [
        Self::Embed,
        Self::RmsNorm,
        Self::Rope,
        Self::StoreKv,
        Self::Swiglu,
        Self::AttendPrompt,
        Self::AttendToken,
        Self::Sample,
    ];

    /// Returns the kernel's name and its number of threads per thread block, both as declared in the CUDA sources.
    fn declaration(self) -> (&'static str, u32) {
        match self {
            Self::Embed => ("embed", 256),
            Self::RmsNorm => ("rms_norm", 256),
            Self::Rope => ("rope", 64),
            Self::StoreKv => ("store_kv", 128),
            Self::Swiglu => ("swiglu", 256),
            Self::AttendPrompt => ("attend_prompt", 128),
            Self::AttendToken => ("attend_token", 128),
            Self::Sample => ("sample", 512),
        }
    }

    pub fn name(self) -> &'static str {
        self.declaration().0
    }

    pub fn threads(self) -> u32 {
        self.declaration().1
    }
}

/// The parameters of a kernel launch, except the kernel's arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub kernel: Kernel,
    /// Thread blocks in x, y and z; none of them is 0.
    pub grid: [usize; 3],
    /// Bytes of dynamic shared memory per thread block.
    pub shared_bytes: usize,
}

/// A GEMM `outputs = inputs × weightsᵀ`, accumulated in 32-bit floats. `inputs` is `rows × inputs` and `weights` is `outputs × inputs`,
/// both row-major matrices of 16-bit floats of the type `half`; the result is `rows × outputs`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Gemm {
    pub half: Half,
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub epilogue: Epilogue,
}

/// The way in which the result of a GEMM is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Epilogue {
    /// Rounds the result to 16-bit floats and stores it.
    StoreHalf,
    /// Stores the result as 32-bit floats.
    StoreSingle,
    /// Adds the result to the 32-bit floats in the output.
    AddSingle,
}

/// Device addresses of the three matrices of a GEMM.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operands {
    pub weights: u64,
    pub inputs: u64,
    pub outputs: u64,
}

/// The work that a stream executes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Executes the steps of an engine.
    Steps,
    /// Executes steps. Their thread blocks run before those that wait on other streams.
    UrgentSteps,
    /// Executes copies. A thread that waits for them sleeps, so that it takes no core from the engine's thread.
    Copies,
}

/// A CUDA stream and its device. Work is executed in the order of the calls. Most calls only enqueue work; `download` and `wait` return
/// when all enqueued work is done. Every method that returns a `Result` fails if the driver, or a library that the method calls, fails.
pub(super) trait Device: Send + Sync + Sized + 'static {
    /// The communicators of an engine's ranks, one per device. Dropping them ends all-reduces that wait for a lost rank.
    type Communicators: Send;

    /// Bytes of memory to reserve on each device for an engine's communicators.
    const COMMUNICATOR_BYTES: usize;

    /// Connects devices, each of which is one rank, for `all_reduce_sum`.
    fn connect_ranks(ranks: &[Arc<Self>]) -> Result<Self::Communicators, CudaError>;

    /// Replaces the `count` 32-bit floats at each rank's address with their sums over all ranks. On each rank's stream, the all-reduce is
    /// ordered with the stream's other work.
    fn all_reduce_sum(communicators: &Self::Communicators, ranks: &[(&Self, u64)], count: usize) -> Result<(), CudaError>;

    /// Recorded work (a CUDA graph).
    type Graph: Send + 'static;

    /// Creates another stream on the same device. Both streams use the same memory.
    fn new_stream(&self, purpose: Purpose) -> Result<Self, CudaError>;

    /// Returns the number of streaming multiprocessors.
    fn multiprocessors(&self) -> usize;

    /// Returns the bytes of free device memory.
    fn free_bytes(&self) -> Result<usize, CudaError>;

    /// Allocates uninitialised memory and returns its address, a multiple of 256. The caller must pass the address to `free` once.
    fn allocate(&self, bytes: usize) -> Result<u64, CudaError>;

    /// Frees memory when all work of this stream is done.
    fn free(&self, address: u64);

    /// Copies bytes from the host to a device address. The caller may change the bytes once this call has returned.
    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies bytes from a device address to the host, after all earlier work is done.
    fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError>;

    /// Returns when all enqueued work is done.
    fn wait(&self) -> Result<(), CudaError>;

    /// Returns when all work of all ranks is done, or as soon as one rank has failed: the work of the other ranks may then never end.
    fn wait_all(ranks: &[&Self]) -> Result<(), CudaError>;

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError>;

    /// Launches a kernel. Each argument is one 64-bit word; a 32-bit value is in its lower half.
    fn launch(&self, launch: Launch, arguments: &mut [u64]) -> Result<(), CudaError>;

    fn gemm(&self, gemm: (Gemm, Operands)) -> Result<(), CudaError>;

    /// Plans these GEMMs in advance and times their algorithms, until `limit` is reached. Each GEMM has the operands of one or several layers,
    /// which are used in turn, so that weights are read from memory as in a step. Does not access the output matrices.
    fn prepare(&self, gemms: &[(Gemm, Vec<Operands>)], limit: Duration) -> Result<(), CudaError>;

    /// Records the launches, GEMMs and device-to-device copies of `work` without executing them. `work` must contain nothing else, and must
    /// have been executed once before. If recording fails, the device can still be used.
    fn capture(&self, work: impl Fn() -> Result<(), CudaError>) -> Result<Self::Graph, CudaError>;

    /// Executes recorded work with the recorded arguments, on the current content of memory.
    fn replay(&self, graph: &Self::Graph) -> Result<(), CudaError>;

    /// Returns a handle by which other processes of this host can map the memory that was allocated at this address.
    fn export(&self, address: u64) -> Result<IpcHandle, CudaError>;

    /// Maps memory of another process, which may be on any GPU that this GPU can read. The caller must pass the address to `close` once.
    fn import(&self, exported: &IpcHandle) -> Result<Imported, CudaError>;

    /// Unmaps memory of another process after all work of this stream is done.
    fn close(&self, address: u64);

    /// A communicator with a device of another process.
    type PeerCommunicator: PeerCommunicator;

    /// Returns whether NCCL is installed. Without NCCL, no peer communicator can be created.
    fn nccl_available() -> bool;

    /// Returns an id for a new communicator, which its two ranks then join.
    fn new_communicator_id() -> Result<CommunicatorId, CudaError>;

    /// Joins the communicator with this id as rank 0 or 1. Returns when the other rank has joined; fails if this takes longer than `limit`.
    fn connect_peer(&self, id: &CommunicatorId, rank: u32, limit: Duration) -> Result<Self::PeerCommunicator, CudaError>;
}

/// Identifies a communicator to its ranks (`ncclUniqueId`).
pub(super) type CommunicatorId = [u8; 128];
/// Identifies device memory to other processes of the host (`CUipcMemHandle`).
pub(super) type IpcHandle = [u8; 64];
/// A region of device memory: address and bytes.
pub(super) type Region = (u64, usize);

/// Mapped memory of another process.
#[derive(Clone, Copy, Debug)]
pub(super) struct Imported {
    pub address: u64,
    /// The size of the memory; `None` if the driver does not report it.
    pub bytes: Option<usize>,
}

/// One end of a communicator of two ranks. Both ends must pass regions of the same lengths. After an error the communicator must not be used
/// again.
pub(super) trait PeerCommunicator: Send + Sync + 'static {
    /// Sends the regions. Returns when the peer has received them; fails if this takes longer than `limit`.
    fn send(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError>;

    /// Fills the regions with the data that the peer sends. Returns when all regions are received; fails if this takes longer than `limit`.
    /// The former contents of the regions are lost even after a failure.
    fn receive(&self, regions: &[Region], limit: Duration) -> Result<(), CudaError>;
}

/// Device memory, which is freed when this value is dropped.
pub(super) struct Memory<D: Device> {
    device: Arc<D>,
    address: u64,
    bytes: usize,
}

impl<D: Device> Memory<D> {
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, CudaError> {
        // A driver refuses allocations of 0 bytes.
        let address = device.allocate(bytes.max(1))?;
        Ok(Self { device: Arc::clone(device), address, bytes })
    }

    /// Allocates memory that holds a copy of `bytes`.
    pub fn of(device: &Arc<D>, bytes: &[u8]) -> Result<Self, CudaError> {
        let memory = Self::new(device, bytes.len())?;
        device.upload(memory.address, bytes)?;
        Ok(memory)
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl<D: Device> Drop for Memory<D> {
    fn drop(&mut self) {
        self.device.free(self.address);
    }
}

/// Returns a 32-bit float as a kernel argument.
pub(super) fn f32_argument(number: f32) -> u64 {
    number.to_bits().into()
}
