//! The seam between what is computed and what computes it: a GPU, or in tests the kernels on the host.

use super::{CudaError, pool::HANDLE_BYTES, shape::Half};
use std::{sync::Arc, time::Duration};

/// A kernel, under its name in the sources.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kernel {
    Embed,
    RmsNorm,
    Turns,
    StoreKv,
    Swiglu,
    AttendPrompt,
    AttendToken,
    Combine,
    Sample,
}

impl Kernel {
    pub const ALL: [Self; 9] = [
        Self::Embed,
        Self::RmsNorm,
        Self::Turns,
        Self::StoreKv,
        Self::Swiglu,
        Self::AttendPrompt,
        Self::AttendToken,
        Self::Combine,
        Self::Sample,
    ];

    pub fn name(self) -> &'static str {
        match self {
            Self::Embed => "embed",
            Self::RmsNorm => "rms_norm",
            Self::Turns => "turns",
            Self::StoreKv => "store_kv",
            Self::Swiglu => "swiglu",
            Self::AttendPrompt => "attend_prompt",
            Self::AttendToken => "attend_token",
            Self::Combine => "combine",
            Self::Sample => "sample",
        }
    }

    /// Threads of a block, as the sources have it.
    pub fn threads(self) -> u32 {
        match self {
            Self::Embed | Self::RmsNorm | Self::Swiglu => 256,
            Self::Turns => 64,
            Self::StoreKv | Self::AttendPrompt | Self::AttendToken | Self::Combine => 128,
            Self::Sample => 512,
        }
    }
}

/// One start of a kernel.
#[derive(Clone, Copy, Debug)]
pub(super) struct Launch {
    pub kernel: Kernel,
    /// Blocks in each direction; none of them 0.
    pub grid: [usize; 3],
    pub shared_bytes: usize,
}

/// `outputs = inputs × weightsᵀ`, in single precision: rows of `inputs` (two bytes a number) times the rows of `weights` (likewise).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Product {
    pub rows: usize,
    pub inputs: usize,
    pub outputs: usize,
    pub into: Into,
}

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Into {
    /// Numbers of two bytes.
    Halves,
    /// Numbers of four bytes.
    Singles,
    /// Added to numbers of four bytes.
    Sum,
}

/// Addresses of a product's three matrices.
#[derive(Clone, Copy, Debug)]
pub(super) struct Factors {
    pub weights: u64,
    pub inputs: u64,
    pub outputs: u64,
}

/// Does one thing after the other, in the order of the calls; `download` and `wait` wait for them to be done.
pub(super) trait Device: Send + Sync + Sized + 'static {
    /// A connection of several devices. Dropping it ends what waits for another of them.
    type Connection: Send;

    /// Of each device, that a connection takes: at most, as far as is known.
    const CONNECTION_BYTES: usize;

    /// Connects devices, a rank each, so that they can add up.
    fn connect(ranks: &[Arc<Self>]) -> Result<Self::Connection, CudaError>;

    /// So many numbers of four bytes at one address of every rank become their sum over all ranks, in the order of each.
    fn add_up(connection: &Self::Connection, ranks: &[(&Self, u64)], count: usize) -> Result<(), CudaError>;

    /// What was recorded.
    type Graph: Send + 'static;

    /// Another queue of the same device: it reads and writes the same memory, in an order of its own.
    fn beside(&self) -> Result<Self, CudaError>;

    /// Multiprocessors: blocks that run at a time, at least.
    fn processors(&self) -> usize;

    /// Bytes that are free now.
    fn free_bytes(&self) -> Result<usize, CudaError>;

    /// Memory that starts at a multiple of 256, of any content. It must be given to `free` once.
    fn allocate(&self, bytes: usize) -> Result<u64, CudaError>;

    /// Gives memory back, once all that was asked of this device is done.
    fn free(&self, address: u64);

    /// Copies from the host. The bytes may change when it returns.
    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError>;

    /// Copies to the host, once all before it is done.
    fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError>;

    /// Returns when all that was asked for is done.
    fn wait(&self) -> Result<(), CudaError>;

    /// Returns when all that was asked of each of these is done, or as soon as one has failed: others may wait for that one for ever.
    fn wait_all(ranks: &[&Self]) -> Result<(), CudaError>;

    /// Copies within the device.
    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError>;

    /// Starts a kernel: an argument each, numbers of four bytes in the lower half.
    fn launch(&self, launch: Launch, arguments: &mut [u64]) -> Result<(), CudaError>;

    /// Multiplies matrices.
    fn multiply(&self, half: Half, product: Product, factors: Factors) -> Result<(), CudaError>;

    /// Makes now what these products would make at their first use, which come often, as far as the time allows. Of their factors only `outputs` is
    /// not there yet.
    fn prepare(&self, half: Half, products: &[(Product, Factors)], limit: Duration) -> Result<(), CudaError>;

    /// Remembers what `work` starts, multiplies and copies within the device, and does none of it. It does nothing else, and all of it has been
    /// done before. A device that refuses is as it was before.
    fn record(&self, work: impl Fn() -> Result<(), CudaError>) -> Result<Self::Graph, CudaError>;

    /// Does what was recorded: with the same arguments, and with what is in the memory by then.
    fn replay(&self, graph: &Self::Graph) -> Result<(), CudaError>;

    /// Under which other processes of this host find the memory that was allocated at this address.
    fn export(&self, address: u64) -> Result<[u8; HANDLE_BYTES], CudaError>;

    /// Another process's memory, on any GPU that this one can read, and how many bytes it has. It must be given to `close` once.
    fn import(&self, exported: &[u8; HANDLE_BYTES]) -> Result<(u64, usize), CudaError>;

    /// Lets go of another process's memory, once all that was asked of this device is done.
    fn close(&self, address: u64);

    /// One end of a way to a device of another process.
    type Line: Line;

    /// Whether there are such ways.
    fn has_lines() -> bool;

    /// The name of a way that is still to be made.
    fn name_line() -> Result<LineName, CudaError>;

    /// One end (0 or 1) of the way of this name; returns when the other has been made, too, or when that takes too long.
    fn line(&self, name: &LineName, end: u32, limit: Duration) -> Result<Self::Line, CudaError>;
}

/// What the two ends of a way know each other by.
pub(super) type LineName = [u8; 128];

/// Moves pieces of memory (address and bytes), which must be of the same lengths at both ends. One that has failed is of no use any more.
pub(super) trait Line: Send + Sync + 'static {
    /// Returns when the other end has received them, or when that takes too long.
    fn send(&self, pieces: &[(u64, usize)], limit: Duration) -> Result<(), CudaError>;

    /// Returns when they are there, or when that takes too long. What the pieces held is lost even then.
    fn receive(&self, pieces: &[(u64, usize)], limit: Duration) -> Result<(), CudaError>;
}

/// Memory of a device, given back when it is dropped.
pub(super) struct Memory<D: Device> {
    device: Arc<D>,
    address: u64,
    bytes: usize,
}

impl<D: Device> Memory<D> {
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, CudaError> {
        // None is no amount that a driver gives.
        let address = device.allocate(bytes.max(1))?;
        Ok(Self { device: Arc::clone(device), address, bytes })
    }

    /// With this content.
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

/// An argument of a kernel.
pub(super) fn single(number: f32) -> u64 {
    number.to_bits().into()
}
