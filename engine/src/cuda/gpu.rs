//! NVIDIA's driver and cuBLASLt: all calls of foreign code, and nothing else.
//!
//! Libraries are looked for before anything of theirs is called: `cudarc` panics where one is missing.

mod products;

use super::{
    CudaError,
    device::{Device, Factors, Kernel, Launch, Product},
    shape::{Half, Shape},
};
use cudarc::{
    cublaslt,
    driver::{
        result::{self, DriverError, stream::StreamKind},
        sys,
    },
};
use products::Products;
use std::{ffi::CString, os::raw::c_void, sync::Arc, sync::Mutex};

/// The least that has asynchronous copies and bfloat16.
const CAPABILITY_MIN: i32 = 8;
/// Pinned memory of a queue, through which large copies go.
const STAGING_BYTES: usize = 8 << 20;

/// A driver, and a GPU that it has.
pub(super) struct Driver {
    device: sys::CUdevice,
    capability: (i32, i32),
    version: i32,
    shared_max: usize,
}

impl Driver {
    /// Finds driver and GPU.
    pub fn find(device: u32) -> Result<Self, CudaError> {
        // SAFETY: looking whether libraries can be opened; opening runs nothing but their own initialisers.
        #[expect(unsafe_code)]
        let (driver, blas) = unsafe { (sys::is_culib_present(), cublaslt::sys::is_culib_present()) };
        if !driver {
            return Err(CudaError::NoDriver);
        }
        result::init().map_err(failed("starting"))?;
        let count = result::device::get_count().map_err(failed("counting GPUs"))?;
        if i64::from(device) >= i64::from(count) {
            return Err(CudaError::NoDevice { device, count });
        }
        if !blas {
            return Err(CudaError::NoLibrary { library: "libcublasLt.so.13", package: "nvidia-cublas" });
        }
        let handle = result::device::get(device as i32).map_err(failed("opening the GPU"))?;
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        };
        let mut version = 0;
        // SAFETY: the device is one that the driver gave, and the version goes to a number of the size it has.
        #[expect(unsafe_code)]
        let (major, minor, shared) = unsafe {
            sys::cuDriverGetVersion(&mut version).result().map_err(failed("telling its version"))?;
            let attribute = |which| result::device::get_attribute(handle, which).map_err(failed("telling what the GPU is"));
            (attribute(MAJOR)?, attribute(MINOR)?, attribute(SHARED)?)
        };
        if major < CAPABILITY_MIN {
            return Err(CudaError::TooOld { device, major, minor });
        }
        Ok(Self { device: handle, capability: (major, minor), version, shared_max: shared.max(0) as usize })
    }

    /// As compilers name it, such as `sm_90`.
    pub fn architecture(&self) -> String {
        format!("sm_{}{}", self.capability.0, self.capability.1)
    }

    /// Bytes of shared memory that a block may have.
    pub fn shared_max(&self) -> usize {
        self.shared_max
    }

    /// Such as 13000 for 13.0.
    pub fn version(&self) -> i32 {
        self.version
    }
}

fn failed(doing: &'static str) -> impl Fn(DriverError) -> CudaError {
    move |source| CudaError::Driver { doing, source: Box::new(source) }
}

/// A device's context with the kernels in it. Weights and all queues of a process share it.
struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    functions: [sys::CUfunction; Kernel::ALL.len()],
    processors: usize,
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
            let processors = result::device::get_attribute(device, PROCESSORS).map_err(failed("telling what the GPU is"))?;
            Ok(Self { device, context, module, functions, processors: processors.max(1) as usize })
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
    products: Mutex<Products>,
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
        let stream = result::stream::create(StreamKind::NonBlocking).map_err(failed("making a queue"))?;
        // SAFETY: the size is not 0; the bytes are zeroed before anybody reads them, and given back once, in `drop`.
        #[expect(unsafe_code)]
        let staging = unsafe {
            let bytes: *mut c_void = result::malloc_host(STAGING_BYTES, 0).map_err(failed("taking memory of the host"))?;
            bytes.cast::<u8>().write_bytes(0, STAGING_BYTES);
            Staging(bytes.cast())
        };
        Ok(Self { products: Mutex::new(Products::new()?), staging: Mutex::new(staging), stream, context })
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
            // SAFETY: nothing runs on the stream any more, and both are given back once.
            #[expect(unsafe_code)]
            unsafe {
                let _ = result::free_host(staging.0.cast());
                let _ = result::stream::destroy(self.stream);
            }
        }
    }
}

impl Device for Gpu {
    fn beside(&self) -> Result<Self, CudaError> {
        // What the other queue has been asked for (weights to copy) is done before this one begins.
        self.context.enter()?;
        self.idle()?;
        Self::of(Arc::clone(&self.context))
    }

    fn processors(&self) -> usize {
        self.context.processors
    }

    fn free_bytes(&self) -> Result<usize, CudaError> {
        self.context.enter()?;
        Ok(result::mem_get_info().map_err(failed("telling how much memory is free"))?.0)
    }

    fn allocate(&self, bytes: usize) -> Result<u64, CudaError> {
        self.context.enter()?;
        // Not from the stream's pool: other processes may be given a handle to this memory.
        // SAFETY: the size is not 0, and nobody reads the memory as anything but bytes.
        #[expect(unsafe_code)]
        unsafe { result::malloc_sync(bytes) }.map_err(failed("taking memory"))
    }

    fn free(&self, address: u64) {
        if self.context.enter().is_ok() {
            // A device that has failed keeps nothing.
            let _ = self.idle();
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
        for (i, piece) in bytes.chunks(STAGING_BYTES).enumerate() {
            // The copy before has read its bytes.
            self.idle()?;
            let staged = &mut staging.bytes()[..piece.len()];
            staged.copy_from_slice(piece);
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
        for (i, piece) in into.chunks_mut(STAGING_BYTES).enumerate() {
            let staged = &mut staging.bytes()[..piece.len()];
            let from = from + (i * STAGING_BYTES) as u64;
            // SAFETY: the source is of the caller's memory; the destination is not touched before the copy is done.
            #[expect(unsafe_code)]
            unsafe { result::memcpy_dtoh_async(staged, from, self.stream) }.map_err(failed("copying from the GPU"))?;
            self.idle()?;
            piece.copy_from_slice(staged);
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), CudaError> {
        self.context.enter()?;
        self.idle()
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

    fn multiply(&self, half: Half, product: Product, factors: Factors) -> Result<(), CudaError> {
        self.context.enter()?;
        self.products.lock().expect("no product panics").run(half, product, factors, self.stream)
    }
}
