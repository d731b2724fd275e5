//! NVIDIA's driver and cuBLASLt: all calls of foreign code, and nothing else.
//!
//! Libraries are looked for before anything of theirs is called: `cudarc` panics where one is missing.

mod driver;
mod gemm;
mod nccl;
mod tuning;

use super::{
    CudaError,
    device::{CommunicatorId, Device, Gemm, Kernel, Launch, Memory, Operands, PeerCommunicator},
    pool::HANDLE_BYTES,
    shape::{Half, Shape},
};
use cudarc::driver::{
    result::{self, DriverError, stream::StreamKind},
    sys,
};
pub(super) use driver::Driver;
use gemm::{ChosenAlgorithms, GemmPlans};
use nccl::{Communicator, Nccl, Rank};
use std::{
    ffi::CString,
    os::raw::{c_char, c_void},
    sync::{Arc, Mutex, MutexGuard},
    time::Duration,
};
use tokio::time::Instant;

/// Pinned memory of a queue, through which large copies go.
const STAGING_BYTES: usize = 8 << 20;

/// Held while a sum is started on all its GPUs, and while anything is taken or given back for which the driver may wait for all of a GPU, and let other
/// threads' calls wait as well: else it could wait for a sum that has begun on one GPU, and whose start on the next one waits for this call.
/// Nobody asks for another lock meanwhile but for a communicator's own. A link that waits for its other end may be waited for, until its limit.
static DRIVER_LOCK: Mutex<()> = Mutex::new(());

fn driver_lock() -> MutexGuard<'static, ()> {
    DRIVER_LOCK.lock().expect("no call panics")
}

fn failed(doing: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |source| CudaError::Driver { doing, source: Box::new(source) }
}

/// A device's context with the kernels in it. Weights and all queues of a process share it.
pub(super) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    functions: [sys::CUfunction; Kernel::ALL.len()],
    multiprocessors: usize,
    chosen: ChosenAlgorithms,
}

// SAFETY: the driver's handles may be used from any thread.
#[expect(unsafe_code)]
unsafe impl Send for Context {}
// SAFETY: likewise, from several at a time.
#[expect(unsafe_code)]
unsafe impl Sync for Context {}

impl Context {
    fn open(driver: &Driver, cubin: &[u8], shape: &Shape) -> Result<Self, CudaError> {
        use sys::{
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as PROCESSORS,
            CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED_MAX,
        };
        let device = driver.device;
        let _locked = driver_lock();
        // SAFETY: the device is one that the driver gave. The image outlives the call, and is what NVRTC made for this device (or a file that
        // had its hash). Functions are of the module, which lives as long as they do.
        #[expect(unsafe_code)]
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(failed("opening a context"))?;
            result::ctx::set_current(context).map_err(failed("opening a context"))?;
            let module = result::module::load_data(cubin.as_ptr().cast()).map_err(failed("loading the kernels"))?;
            let mut functions = [std::ptr::null_mut(); Kernel::ALL.len()];
            for (function, kernel) in functions.iter_mut().zip(Kernel::ALL) {
                let name = CString::new(kernel.name()).expect("kernels' names are plain");
                *function = result::module::get_function(module, name).map_err(failed("finding a kernel"))?;
            }
            for (kernel, bytes) in [(Kernel::AttendPrompt, shape.prompt_bytes()), (Kernel::AttendToken, shape.token_bytes())] {
                let set = result::function::set_function_attribute(functions[kernel as usize], SHARED_MAX, bytes as i32);
                set.map_err(failed("reserving shared memory"))?;
            }
            let multiprocessors = result::device::get_attribute(device, PROCESSORS).map_err(failed("telling what the GPU is"))?;
            Ok(Self {
                device,
                context,
                module,
                functions,
                multiprocessors: multiprocessors.max(1) as usize,
                chosen: ChosenAlgorithms::default(),
            })
        }
    }

    /// Every call needs it: the driver keeps a context for each thread.
    fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as this value.
        #[expect(unsafe_code)]
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("entering its context"))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            let _locked = driver_lock();
            // SAFETY: nobody has the functions any more, and each is given back once. What the driver says to that changes nothing.
            #[expect(unsafe_code)]
            unsafe {
                let _ = result::module::unload(self.module);
                let _ = result::primary_ctx::release(self.device);
            }
        }
    }
}

/// A queue of a GPU.
pub(super) struct Gpu {
    // Dropped in this order: what cuBLASLt holds is of the context.
    gemms: Mutex<GemmPlans>,
    staging: Mutex<Staging>,
    stream: sys::CUstream,
    context: Arc<Context>,
}

// SAFETY: the driver's handles may be used from any thread; what changes is behind locks.
#[expect(unsafe_code)]
unsafe impl Send for Gpu {}
// SAFETY: likewise, from several at a time.
#[expect(unsafe_code)]
unsafe impl Sync for Gpu {}

/// Memory of the host that the device copies from and to by itself.
struct Staging(*mut u8);

impl Staging {
    /// SAFETY of all uses: the pointer is to `STAGING_BYTES` bytes, and whoever has the lock is alone with them.
    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: see above; the memory was zeroed when it was taken.
        #[expect(unsafe_code)]
        unsafe {
            std::slice::from_raw_parts_mut(self.0, STAGING_BYTES)
        }
    }
}

impl Gpu {
    /// The first queue of a GPU, with these kernels.
    pub fn open(driver: &Driver, cubin: &[u8], shape: &Shape) -> Result<Self, CudaError> {
        Self::of(Arc::new(Context::open(driver, cubin, shape)?))
    }

    fn of(context: Arc<Context>) -> Result<Self, CudaError> {
        context.enter()?;
        let locked = driver_lock();
        let stream = result::stream::create(StreamKind::NonBlocking).map_err(failed("making a queue"))?;
        // SAFETY: the size is not 0; the bytes are zeroed before anybody reads them, and given back once, in `drop`.
        #[expect(unsafe_code)]
        let staging = unsafe {
            let bytes: *mut c_void = result::malloc_host(STAGING_BYTES, 0).map_err(failed("taking memory of the host"))?;
            bytes.cast::<u8>().write_bytes(0, STAGING_BYTES);
            Staging(bytes.cast())
        };
        drop(locked);
        Ok(Self {
            gemms: Mutex::new(GemmPlans::new(Arc::clone(&context.chosen))?),
            staging: Mutex::new(staging),
            stream,
            context,
        })
    }

    fn idle(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives as long as this value.
        #[expect(unsafe_code)]
        unsafe { result::stream::synchronize(self.stream) }.map_err(failed("computing"))
    }
}

impl Drop for Gpu {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // A device that has failed has nothing left to wait for.
            let _ = self.idle();
            let staging = self.staging.get_mut().expect("no copy panics");
            let _locked = driver_lock();
            // SAFETY: nothing runs on the stream any more, and both are given back once.
            #[expect(unsafe_code)]
            unsafe {
                let _ = result::free_host(staging.0.cast());
                let _ = result::stream::destroy(self.stream);
            }
        }
    }
}

impl Gpu {
    /// Sends so many bytes over NCCL to another place of this GPU's memory, and says how long that took and whether they came.
    pub fn nccl_self_test(self: &Arc<Self>, bytes: usize) -> Result<(Duration, bool), CudaError> {
        const LIMIT: Duration = Duration::from_secs(30);
        let sent: Vec<u8> = (0..bytes).map(|byte| ((byte * 31) >> 3) as u8).collect();
        let (from, to) = (Memory::of(self, &sent)?, Memory::of(self, &vec![0; bytes])?);
        self.wait()?;
        let ranks = Communicator::all(&Nccl::load()?, &[Arc::clone(&self.context)])?;
        let began = Instant::now();
        // In regions, as blocks are.
        let regions =
            |memory: &Memory<Self>| [(memory.address(), bytes / 2), (memory.address() + bytes as u64 / 2, bytes - bytes / 2)];
        ranks[0].nccl_self_test(&regions(&from), &regions(&to), LIMIT)?;
        let took = began.elapsed();
        let mut received = vec![0; bytes];
        self.download(to.address(), &mut received)?;
        Ok((took, received == sent))
    }
}

/// A recording that can be launched.
pub(super) struct Graph {
    graph: sys::CUgraphExec,
    context: Arc<Context>,
}

// SAFETY: the driver's handles may be used from any thread.
#[expect(unsafe_code)]
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.enter().is_ok() {
            // SAFETY: it is given back once; the driver keeps it until it has run.
            #[expect(unsafe_code)]
            let _ = unsafe { result::graph::exec_destroy(self.graph) };
        }
    }
}

impl Device for Gpu {
    type Communicators = Vec<Communicator>;

    /// NCCL's buffers by channel, and what its kernels take of the stack: up to 1.6 GB were reported with eight GPUs.
    const COMMUNICATOR_BYTES: usize = 2 << 30;

    fn connect_ranks(ranks: &[Arc<Self>]) -> Result<Self::Communicators, CudaError> {
        let contexts: Vec<Arc<Context>> = ranks.iter().map(|rank| Arc::clone(&rank.context)).collect();
        Communicator::all(&Nccl::load()?, &contexts)
    }

    fn all_reduce_sum(communicators: &Self::Communicators, ranks: &[(&Self, u64)], count: usize) -> Result<(), CudaError> {
        let buffer = |(communicator, (gpu, address)): (_, &(&Self, u64))| nccl::RankBuffer {
            communicator,
            stream: gpu.stream,
            address: *address,
        };
        let buffers: Vec<nccl::RankBuffer<'_>> = communicators.iter().zip(ranks).map(buffer).collect();
        nccl::all_reduce_sum(&buffers, count).map_err(|source| CudaError::AllReduce { source: Box::new(source) })
    }

    type Graph = Graph;

    fn new_stream(&self) -> Result<Self, CudaError> {
        // What the other queue has been asked for (weights to copy) is done before this one begins.
        self.context.enter()?;
        self.idle()?;
        Self::of(Arc::clone(&self.context))
    }

    fn multiprocessors(&self) -> usize {
        self.context.multiprocessors
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        self.context.enter()?;
        Ok(result::mem_get_info().map_err(failed("telling how much memory is free"))?.0)
    }

    fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.context.enter()?;
        let _locked = driver_lock();
        // Not from the stream's pool: other processes may be given a handle to this memory.
        // SAFETY: the size is not 0, and nobody reads the memory as anything but bytes.
        #[expect(unsafe_code)]
        unsafe { result::malloc_sync(bytes) }.map_err(failed("taking memory"))
    }

    fn free(&self, address: u64) {
        if self.context.enter().is_ok() {
            // A device that has failed keeps nothing.
            let _ = self.idle();
            let _locked = driver_lock();
            // SAFETY: the caller gives back what it was given, once, and nothing that runs uses it.
            #[expect(unsafe_code)]
            unsafe {
                let _ = result::free_sync(address);
            }
        }
    }

    fn upload(&self, to: u64, bytes: &[u8]) -> Result<(), CudaError> {
        self.context.enter()?;
        let mut staging = self.staging.lock().expect("no copy panics");
        for (i, chunk) in bytes.chunks(STAGING_BYTES).enumerate() {
            // The copy before has read its bytes.
            self.idle()?;
            let staged = &mut staging.bytes()[..chunk.len()];
            staged.copy_from_slice(chunk);
            let to = to + (i * STAGING_BYTES) as u64;
            // SAFETY: the destination is of the caller's memory; the source is not changed before the wait above, or that of the next call.
            #[expect(unsafe_code)]
            unsafe { result::memcpy_htod_async(to, staged, self.stream) }.map_err(failed("copying to the GPU"))?;
        }
        Ok(())
    }

    fn download(&self, from: u64, into: &mut [u8]) -> Result<(), CudaError> {
        self.context.enter()?;
        let mut staging = self.staging.lock().expect("no copy panics");
        for (i, chunk) in into.chunks_mut(STAGING_BYTES).enumerate() {
            let staged = &mut staging.bytes()[..chunk.len()];
            let from = from + (i * STAGING_BYTES) as u64;
            // SAFETY: the source is of the caller's memory; the destination is not touched before the copy is done.
            #[expect(unsafe_code)]
            unsafe { result::memcpy_dtoh_async(staged, from, self.stream) }.map_err(failed("copying from the GPU"))?;
            self.idle()?;
            chunk.copy_from_slice(staged);
        }
        Ok(())
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
                // SAFETY: the stream lives as long as the rank.
                #[expect(unsafe_code)]
                match unsafe { sys::cuStreamQuery(rank.stream) } {
                    sys::CUresult::CUDA_ERROR_NOT_READY => busy = true,
                    other => other.result().map_err(failed("computing"))?,
                }
            }
            if !busy {
                return Ok(());
            }
            // As the driver waits: a pause would be felt in every step.
            std::thread::yield_now();
        }
    }

    fn copy(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both are of the caller's memory.
        #[expect(unsafe_code)]
        unsafe { result::memcpy_dtod_async(to, from, bytes, self.stream) }.map_err(failed("copying on the GPU"))
    }

    fn launch(&self, launch: Launch, arguments: &mut [u64]) -> Result<(), CudaError> {
        self.context.enter()?;
        let [x, y, z] = launch.grid.map(|blocks| blocks as u32);
        let mut pointers: Vec<*mut c_void> = arguments.iter_mut().map(|argument| std::ptr::from_mut(argument).cast()).collect();
        // SAFETY: the function is of a loaded module. Arguments are read during the call, each as many bytes of the eight as the kernel's
        // parameter has. That they are the kernel's, and name memory of its sizes, is what the tests on the host show of every caller.
        #[expect(unsafe_code)]
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
        launched.map_err(failed("starting a kernel"))
    }

    fn gemm(&self, half: Half, gemm: Gemm, operands: Operands) -> Result<(), CudaError> {
        self.context.enter()?;
        self.gemms.lock().expect("no gemm panics").run(half, gemm, operands, self.stream)
    }

    fn prepare(&self, half: Half, gemms: &[(Gemm, Operands)], limit: Duration) -> Result<(), CudaError> {
        self.context.enter()?;
        let (began, mut prepared) = (Instant::now(), self.gemms.lock().expect("no gemm panics"));
        for (i, (gemm, operands)) in gemms.iter().enumerate() {
            if began.elapsed() > limit {
                tracing::info!(left = gemms.len() - i, "gemms are left to be timed at their first use");
                break;
            }
            prepared.prepare(half, *gemm, *operands, self.stream)?;
        }
        Ok(())
    }

    fn capture(&self, work: impl Fn() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        self.context.enter()?;
        // What other queues do meanwhile (take memory, wait) is none of this one's business.
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
        // SAFETY: the stream lives as long as this value.
        #[expect(unsafe_code)]
        unsafe { result::stream::begin_capture(self.stream, mode) }.map_err(failed("beginning to record"))?;
        let worked = work();
        // SAFETY: likewise. A recording is ended even when something failed: from then on the stream does what it is told again.
        #[expect(unsafe_code)]
        let recorded = unsafe { result::stream::end_capture(self.stream) }.map_err(failed("recording"));
        // SAFETY: what was recorded is given back once, and is not needed to launch what is made of it.
        #[expect(unsafe_code)]
        let graph = recorded.and_then(|recorded| unsafe {
            let graph = result::graph::instantiate(recorded, sys::CUgraphInstantiate_flags(0));
            let _ = result::graph::destroy(recorded);
            graph.map_err(failed("preparing a recording"))
        });
        worked?;
        let graph = graph?;
        Ok(Graph { graph, context: Arc::clone(&self.context) })
    }

    fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        self.context.enter()?;
        // SAFETY: both are alive. The memory that it names is of the caller, who replays nothing that names what was given back.
        #[expect(unsafe_code)]
        unsafe { result::graph::launch(graph.graph, self.stream) }.map_err(failed("replaying"))
    }

    fn export(&self, address: u64) -> Result<[u8; HANDLE_BYTES], CudaError> {
        self.context.enter()?;
        let mut handle = sys::CUipcMemHandle { reserved: [0; HANDLE_BYTES] };
        // SAFETY: the memory is of `allocate`, and the handle goes to as many bytes as it has.
        #[expect(unsafe_code)]
        unsafe { sys::cuIpcGetMemHandle(&mut handle, address) }.result().map_err(failed("naming memory for other processes"))?;
        Ok(handle.reserved.map(|byte| byte as u8))
    }

    fn import(&self, exported: &[u8; HANDLE_BYTES]) -> Result<(u64, usize), CudaError> {
        self.context.enter()?;
        let handle = sys::CUipcMemHandle { reserved: exported.map(|byte| byte as c_char) };
        let flags = sys::CUipcMem_flags::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut address = 0;
        let locked = driver_lock();
        // SAFETY: the driver checks the handle, and gives the address of memory that lives until it is closed or its own process ends.
        #[expect(unsafe_code)]
        let opened = unsafe { sys::cuIpcOpenMemHandle_v2(&mut address, handle, flags) }.result();
        drop(locked);
        opened.map_err(failed("opening another process's memory"))?;
        let (mut start, mut bytes) = (0, 0);
        // SAFETY: the address was mapped above; both numbers go to places of their sizes.
        #[expect(unsafe_code)]
        let measured = unsafe { sys::cuMemGetAddressRange_v2(&mut start, &mut bytes, address) }.result();
        if let Err(error) = measured {
            self.close(address);
            return Err(failed("measuring another process's memory")(error));
        }
        Ok((address, bytes))
    }

    fn close(&self, address: u64) {
        if self.context.enter().is_ok() {
            let _ = self.idle();
            let _locked = driver_lock();
            // SAFETY: the address is of `import`, is closed once, and nothing that runs uses it.
            #[expect(unsafe_code)]
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

impl PeerCommunicator for Communicator {
    fn send(&self, regions: &[(u64, usize)], limit: Duration) -> Result<(), CudaError> {
        self.send(regions, limit)
    }

    fn receive(&self, regions: &[(u64, usize)], limit: Duration) -> Result<(), CudaError> {
        self.receive(regions, limit)
    }
}
