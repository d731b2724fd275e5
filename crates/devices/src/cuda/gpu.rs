//! Implements the device interface for a GPU. This module and its submodules contain all calls of the driver, of cuBLASLt and of NCCL.
//!
//! A library is opened before any of its functions is called, because `cudarc` panics if it is missing.
#![expect(unsafe_code, reason = "the CUDA driver is a C library")]

mod context;
mod driver;
mod gemm;
mod nccl;
mod tuning;

use super::{
    CudaError, CudaSettings,
    device::{CommunicatorId, Device, Gemm, Imported, IpcHandle, Launch, Memory, Operands, Purpose},
    shape::Shape,
};
use context::Context;
use cudarc::driver::{
    result::{self, DriverError, stream::StreamKind},
    sys,
};
pub(super) use driver::Driver;
use gemm::GemmPlans;
use nccl::{Communicator, Nccl, Rank, RankBuffer};
use std::{
    os::raw::{c_char, c_void},
    ptr::null_mut,
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use tokio::time::Instant;

/// Bytes of pinned host memory per stream, through which copies between host and device are staged.
const STAGING_BYTES: usize = 8 << 20;

/// Held while an all-reduce is launched on all its GPUs, and during driver calls that allocate or free memory or load kernels. Such a
/// driver call may wait for all work of a GPU, and blocks the calls of other threads meanwhile. Without the lock there could be a deadlock:
/// the driver call waits for an all-reduce that has started on one GPU, and blocks the launch of that all-reduce on the next GPU. A thread
/// that holds this lock may take no other lock than a communicator's, which is held for a bounded time.
///
/// The lock is process-wide because a process has one primary context per GPU, which all engines share.
static DRIVER_LOCK: Mutex<()> = Mutex::new(());

fn driver_lock() -> MutexGuard<'static, ()> {
    DRIVER_LOCK.lock().expect("no call panics")
}

fn failed(doing: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |source| CudaError::Driver { doing, source: Box::new(source) }
}

/// A CUDA stream of a GPU, with its own staging memory and cuBLASLt plans, which are created at their first use.
pub(super) struct Gpu {
    // Fields are dropped in this order. cuBLASLt's resources belong to the context, so they are dropped before it.
    gemms: Mutex<Option<GemmPlans>>,
    staging: Mutex<Option<Staging>>,
    stream: sys::CUstream,
    /// The event by which a thread that waits for this stream sleeps. Null if threads that wait for this stream poll. A polling thread
    /// notices the end of a step some microseconds earlier, but occupies a core.
    sleeper: sys::CUevent,
    context: Arc<Context>,
}

// SAFETY: the driver allows its handles to be used from any thread.
unsafe impl Send for Gpu {}
// SAFETY: the driver allows its handles to be used by several threads at a time; all mutable state has a lock.
unsafe impl Sync for Gpu {}

/// Pinned host memory, which the device reads and writes by DMA.
struct Staging(*mut u8);

impl Staging {
    /// Allocates the memory in the thread's current context.
    fn new() -> Result<Self, CudaError> {
        let _locked = driver_lock();
        // SAFETY: the size is not 0; the bytes are zeroed before they are read, and freed once, when the stream is dropped.
        unsafe {
            let bytes: *mut c_void = result::malloc_host(STAGING_BYTES, 0).map_err(failed("allocating pinned host memory"))?;
            bytes.cast::<u8>().write_bytes(0, STAGING_BYTES);
            Ok(Self(bytes.cast()))
        }
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the pointer refers to `STAGING_BYTES` bytes, zeroed when allocated and freed in `drop` only; `&mut self` excludes other
        // references.
        unsafe { std::slice::from_raw_parts_mut(self.0, STAGING_BYTES) }
    }
}

impl Gpu {
    /// Opens a GPU, loads the kernels in `cubin`, and creates a first stream.
    pub fn open(driver: &Driver, cubin: &[u8], shape: &Shape, settings: &CudaSettings) -> Result<Self, CudaError> {
        Self::of(Arc::new(Context::open(driver, cubin, shape, settings)?), Purpose::Steps)
    }

    fn of(context: Arc<Context>, purpose: Purpose) -> Result<Self, CudaError> {
        context.enter()?;
        let locked = driver_lock();
        let created = match purpose {
            Purpose::UrgentSteps => result::stream::get_priority_range()
                .and_then(|(_, greatest)| result::stream::create_with_priority(StreamKind::NonBlocking, greatest)),
            Purpose::Steps | Purpose::Copies => result::stream::create(StreamKind::NonBlocking),
        };
        let stream = created.map_err(failed("creating a stream"))?;
        // The lock is released here, because dropping `own` takes it.
        drop(locked);
        let mut own = Self { gemms: Mutex::default(), staging: Mutex::default(), stream, sleeper: null_mut(), context };
        if purpose == Purpose::Copies {
            let flags = sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 | sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
            let locked = driver_lock();
            // SAFETY: the driver writes one handle, which is destroyed once, in `drop`.
            let created = unsafe { sys::cuEventCreate(&mut own.sleeper, flags) }.result();
            drop(locked);
            created.map_err(failed("creating an event"))?;
        }
        Ok(own)
    }

    /// Returns when the stream has no work left.
    fn idle(&self) -> Result<(), CudaError> {
        // SAFETY: stream and event are destroyed in `drop` only. If several threads record the event, each of them waits for the last
        // record, which includes its own work.
        let waited = unsafe {
            if self.sleeper.is_null() {
                result::stream::synchronize(self.stream)
            } else {
                let recorded = result::event::record(self.sleeper, self.stream);
                recorded.and_then(|()| sys::cuEventSynchronize(self.sleeper).result())
            }
        };
        waited.map_err(failed("executing work"))
    }

    /// Makes a call with the stream's cuBLASLt plans.
    fn with_gemms<T>(&self, call: impl FnOnce(&mut GemmPlans) -> Result<T, CudaError>) -> Result<T, CudaError> {
        self.context.enter()?;
        let mut gemms = self.gemms.lock().expect("no GEMM call panics");
        match &mut *gemms {
            Some(gemms) => call(gemms),
            none => call(none.insert(GemmPlans::new(self.context.chosen.clone())?)),
        }
    }

    /// Makes a call with the stream's staging memory.
    fn with_staging<T>(&self, call: impl FnOnce(&mut [u8]) -> Result<T, CudaError>) -> Result<T, CudaError> {
        self.context.enter()?;
        let mut staging = self.staging.lock().expect("no copy panics");
        match &mut *staging {
            Some(staging) => call(staging.bytes()),
            none => call(none.insert(Staging::new()?).bytes()),
        }
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // The call fails only if the device has failed, and then no work is left to wait for.
            let _ = self.idle();
            let staging = self.staging.get_mut().expect("no copy panics");
            let _locked = driver_lock();
            // SAFETY: the stream is idle, and memory, event and stream are released once.
            unsafe {
                if let Some(staging) = staging {
                    let _ = result::free_host(staging.0.cast());
                }
                if !self.sleeper.is_null() {
                    let _ = result::event::destroy(self.sleeper);
                }
                let _ = result::stream::destroy(self.stream);
            }
        }
    }
}

impl Gpu {
    /// Implements `CudaModel::nccl_self_test`.
    pub fn nccl_self_test(self: &Arc<Self>, bytes: usize) -> Result<(Duration, bool), CudaError> {
        const LIMIT: Duration = Duration::from_secs(30);
        let sent: Vec<u8> = (0..bytes).map(|byte| ((byte * 31) >> 3) as u8).collect();
        let (from, to) = (Memory::of(self, &sent)?, Memory::of(self, &vec![0; bytes])?);
        self.wait()?;
        let ranks = Communicator::all(&Nccl::load()?, &[Arc::clone(&self.context)])?;
        let began = Instant::now();
        // The test sends the memory as two regions, because KV blocks are also sent as several regions.
        let regions =
            |memory: &Memory<Self>| [(memory.address(), bytes / 2), (memory.address() + bytes as u64 / 2, bytes - bytes / 2)];
        ranks[0].nccl_self_test(&regions(&from), &regions(&to), LIMIT)?;
        let took = began.elapsed();
        let mut received = vec![0; bytes];
        self.download(to.address(), &mut received)?;
        Ok((took, received == sent))
    }
}

/// An executable CUDA graph.
pub(super) struct Graph {
    graph: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: the driver allows its handles to be used from any thread.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: the graph is destroyed once; the driver keeps its resources until a running launch has ended.
            let _ = unsafe { result::graph::exec_destroy(self.graph) };
        }
    }
}

impl Device for Gpu {
    type Communicators = Vec<Communicator>;

    /// The memory that NCCL needs on each GPU for a communicator: its channel buffers and the stacks of its kernels. NCCL has been reported
    /// to need up to 1.6 GB with eight GPUs.
    const COMMUNICATOR_BYTES: usize = 2 << 30;

    fn connect_ranks(ranks: &[Arc<Self>]) -> Result<Self::Communicators, CudaError> {
        let contexts: Vec<Arc<Context>> = ranks.iter().map(|rank| Arc::clone(&rank.context)).collect();
        Communicator::all(&Nccl::load()?, &contexts)
    }

    fn all_reduce_sum(communicators: &Self::Communicators, ranks: &[(&Self, u64)], count: usize) -> Result<(), CudaError> {
        let buffers = communicators.iter().zip(ranks);
        let buffers =
            buffers.map(|(communicator, (gpu, address))| RankBuffer { communicator, stream: gpu.stream, address: *address });
        let buffers: Vec<RankBuffer<'_>> = buffers.collect();
        nccl::all_reduce_sum(&buffers, count).map_err(|source| CudaError::AllReduce { source: Box::new(source) })
    }

    type Graph = Graph;

    fn new_stream(&self, purpose: Purpose) -> Result<Self, CudaError> {
        // Work in flight on this stream, such as copies of weights, must end before the new stream reads the memory that it writes.
        self.context.enter()?;
        self.idle()?;
        Self::of(Arc::clone(&self.context), purpose)
    }

    fn multiprocessors(&self) -> usize {
        self.context.multiprocessors
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        self.context.enter()?;
        Ok(result::mem_get_info().map_err(failed("querying free memory"))?.0)
    }

    fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.context.enter()?;
        let _locked = driver_lock();
        // This allocation is not stream-ordered, because IPC handles exist only for memory of `cuMemAlloc`.
        // SAFETY: the size is not 0, and the memory is used as bytes only.
        unsafe { result::malloc_sync(bytes) }.map_err(failed("allocating device memory"))
    }

    fn free(&self, address: u64) {
        if self.context.enter().is_ok() {
            // The call fails only if the device has failed, and then its memory is lost anyway.
            let _ = self.idle();
            let _locked = driver_lock();
            // SAFETY: the caller frees each allocation once, and no running work uses it.
            unsafe {
                let _ = result::free_sync(address);
            }
        }
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.with_staging(|staging| {
            for (i, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
                // Wait until the previous copy has read the staging memory.
                self.idle()?;
                let staged = &mut staging[..chunk.len()];
                staged.copy_from_slice(chunk);
                let to = to + (i * STAGING_BYTES) as u64;
                // SAFETY: the caller allocated the destination. The staging memory is not modified before the copy is done: the next
                // iteration, or the next call, first waits for the stream.
                unsafe { result::memcpy_htod_async(to, staged, self.stream) }.map_err(failed("copying to the GPU"))?;
            }
            Ok(())
        })
    }

    fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.with_staging(|staging| {
            for (i, chunk) in into.chunks_mut(STAGING_BYTES).enumerate() {
                let staged = &mut staging[..chunk.len()];
                let from = from + (i * STAGING_BYTES) as u64;
                // SAFETY: the caller allocated the source; the destination is not accessed before the copy is done.
                unsafe { result::memcpy_dtoh_async(staged, from, self.stream) }.map_err(failed("copying from the GPU"))?;
                self.idle()?;
                chunk.copy_from_slice(staged);
            }
            Ok(())
        })
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        self.idle()
    }

    fn wait_all(ranks: &[&Self]) -> Result<(), CudaError> {
        loop {
            let mut busy = false;
            for rank in ranks {
                rank.context.enter()?;
                // SAFETY: the stream is destroyed when the rank is dropped.
                match unsafe { sys::cuStreamQuery(rank.stream) } {
                    sys::CUresult::CUDA_ERROR_NOT_READY => busy = true,
                    other => other.result().map_err(failed("executing work"))?,
                }
            }
            if !busy {
                return Ok(());
            }
            // The thread yields instead of sleeping, because a sleep would lengthen every step.
            std::thread::yield_now();
        }
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: the caller allocated source and destination.
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(failed("copying on the GPU"))
    }

    fn launch(&self, launch: Launch, arguments: &mut [u64]) -> Result<(), CudaError> {
        self.context.enter()?;
        let [x, y, z] = launch.grid.map(|blocks| blocks as u32);
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
        // SAFETY: the function belongs to a loaded module. The driver reads the arguments during the call. Of each word it reads as many
        // bytes as the kernel's parameter has. The tests on the host check that every caller's arguments match the kernel and refer to
        // sufficient memory.
        let launched = unsafe {
            result::launch_kernel(
                self.context.functions[launch.kernel as usize],
                (x, y, z),
                (launch.kernel.threads(), 1, 1),
                launch.shared_bytes as u32,
                self.stream,
                &mut pointers,
            )
        };
        launched.map_err(failed("launching a kernel"))
    }

    fn gemm(&self, (gemm, operands): (Gemm, Operands)) -> Result<(), CudaError> {
        self.with_gemms(|gemms| gemms.run(gemm, operands, self.stream))
    }

    fn prepare(&self, gemms: &[(Gemm, Vec<Operands>)], limit: Duration) -> Result<(), CudaError> {
        let began = Instant::now();
        self.with_gemms(|prepared| {
            for (i, (gemm, operands)) in gemms.iter().enumerate() {
                if began.elapsed() > limit {
                    let left = gemms.len() - i;
                    tracing::info!(
                        left,
                        "the time limit for timing GEMMs is reached; cuBLASLt's own choices are used for the remaining ones"
                    );
                    break;
                }
                prepared.prepare(*gemm, operands, self.stream)?;
            }
            Ok(())
        })
    }

    fn capture(&self, work: impl Fn() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        self.context.enter()?;
        // Only relaxed mode allows other threads to allocate memory or to wait during the capture.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream is destroyed in `drop` only.
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("beginning a stream capture"))?;
        let worked = work();
        // SAFETY: the stream is destroyed in `drop` only. The capture is ended even if `work` failed, so that the stream executes work
        // again.
        let recorded = unsafe { result::stream::end_capture(self.stream) }.map_err(failed("capturing a stream"));
        // SAFETY: the captured graph is destroyed once; the executable graph does not refer to it.
        let graph = recorded.and_then(|recorded| unsafe {
            let graph = worked.and_then(|()| {
                let graph = result::graph::instantiate(recorded, sys::CUgraphInstantiate_flags(0));
                graph.map_err(failed("instantiating a graph"))
            });
            let _ = result::graph::destroy(recorded);
            graph
        })?;
        Ok(Graph { graph, context: Arc::clone(&self.context) })
    }

    fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: graph and stream are alive. The caller replays no graph whose memory has been freed.
        unsafe { result::graph::launch(graph.graph, self.stream) }.map_err(failed("launching a graph"))
    }

    fn export(&self, address: u64) -> Result<IpcHandle, CudaError> {
        self.context.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the memory comes from `allocate`, and the driver writes one handle.
        let exported = unsafe { sys::cuIpcGetMemHandle(&mut handle, address) };
        exported.result().map_err(failed("exporting memory to other processes"))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn import(&self, exported: &IpcHandle) -> Result<Imported, CudaError> {
        self.context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: exported.map(|byte| byte as c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        let locked = driver_lock();
        // SAFETY: the driver validates the handle and writes the address of a mapping that lives until it is closed.
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }.result();
        drop(locked);
        opened.map_err(failed("mapping another process's memory"))?;
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: the address was mapped above; the driver writes two values of these types.
        let measured = unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, address) }.result();
        Ok(Imported { address, bytes: measured.is_ok().then_some(bytes) })
    }

    fn close(&self, address: u64) {
        if self.context.enter().is_ok() {
            let _ = self.idle();
            let _locked = driver_lock();
            // SAFETY: the address comes from `import`, is closed once, and no running work uses it.
            unsafe {
                let _ = sys::cuIpcCloseMemHandle(address);
            }
        }
    }

    type PeerCommunicator = Communicator;

    fn nccl_available() -> bool {
        Nccl::load().is_ok()
    }

    fn new_communicator_id() -> Result<CommunicatorId, CudaError> {
        Nccl::load()?.unique_id()
    }

    fn connect_peer(&self, id: &CommunicatorId, rank: u32, limit: Duration) -> Result<Communicator, CudaError> {
        Communicator::new(&Nccl::load()?, &self.context, *id, Rank { rank, ranks: 2 }, limit)
    }
}
