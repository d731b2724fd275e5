//! A GPU's context, with the kernels of a model.

use super::{Driver, driver_lock, failed, gemm::ChosenAlgorithms};
use crate::cuda::{CudaError, CudaSettings, device::Kernel, shape::Shape};
use cudarc::driver::{result, sys};
use std::ffi::CString;

/// A GPU's primary context with the kernels loaded, shared by the weights and all streams of a model.
pub(in crate::cuda) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    module: sys::CUmodule,
    pub(super) functions: [sys::CUfunction; Kernel::ALL.len()],
    pub(super) multiprocessors: usize,
    /// The algorithms that timing has chosen; `None` if GEMM algorithms are not timed.
    pub(super) chosen: Option<ChosenAlgorithms>,
}

// SAFETY: the driver allows its handles to be used from any thread.
unsafe impl Send for Context {}
// SAFETY: the driver allows its handles to be used by several threads at a time; `chosen` has a lock.
unsafe impl Sync for Context {}

impl Context {
    pub(super) fn open(driver: &Driver, cubin: &[u8], shape: &Shape, settings: &CudaSettings) -> Result<Self, CudaError> {
        use sys::{
            CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as PROCESSORS,
            CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as SHARED_MAX,
        };
        let device = driver.device;
        let _locked = driver_lock();
        // SAFETY: the driver returned this device. `cubin` outlives the call and was compiled by NVRTC for this device (or read from a file
        // with a matching hash). The functions belong to the module, which is unloaded only in `drop`.
        unsafe {
            let context = result::primary_ctx::retain(device).map_err(failed("opening a context"))?;
            result::ctx::set_current(context).map_err(failed("opening a context"))?;
            let module = result::module::load_data(cubin.as_ptr().cast()).map_err(failed("loading the kernels"))?;
            let mut functions = [std::ptr::null_mut(); Kernel::ALL.len()];
            for (function, kernel) in functions.iter_mut().zip(Kernel::ALL) {
                let name = CString::new(kernel.name()).expect("kernel names contain no NUL");
                *function = result::module::get_function(module, name).map_err(failed("finding a kernel"))?;
            }
            for (kernel, bytes) in [(Kernel::AttendPrompt, shape.prompt_bytes()), (Kernel::AttendToken, shape.token_bytes())] {
                let set = result::function::set_function_attribute(functions[kernel as usize], SHARED_MAX, bytes as i32);
                set.map_err(failed("reserving shared memory"))?;
            }
            let multiprocessors = result::device::get_attribute(device, PROCESSORS);
            let multiprocessors = multiprocessors.map_err(failed("querying the GPU's attributes"))?.max(1) as usize;
            let chosen = settings.tuning.then(ChosenAlgorithms::default);
            Ok(Self { device, context, module, functions, multiprocessors, chosen })
        }
    }

    /// Makes the context current for this thread. Every driver call needs this first.
    pub(super) fn enter(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as this value.
        unsafe { result::ctx::set_current(self.context) }.map_err(failed("setting the current context"))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if self.enter().is_ok() {
            let _locked = driver_lock();
            // SAFETY: no reference to the functions remains, and module and context are released once. Errors cannot be handled here.
            unsafe {
                let _ = result::module::unload(self.module);
                let _ = result::primary_ctx::release(self.device);
            }
        }
    }
}
