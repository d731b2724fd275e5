//! What there is: the driver, its libraries, and the GPUs it has.

use super::{failed, nccl::Nccl};
use crate::cuda::CudaError;
use cudarc::{
    cublaslt,
    driver::{result, sys},
};

/// The least that has asynchronous copies and bfloat16.
const CAPABILITY_MIN: i32 = 8;

/// A driver, and a GPU that it has.
pub(in crate::cuda) struct Driver {
    pub(super) device: sys::CUdevice,
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

    /// Finds GPUs of one kind, from this number on, and what connects them if there are several.
    pub fn find_alike(device: u32, gpus: u32) -> Result<Vec<Self>, CudaError> {
        let first = Self::find(device)?;
        let mut found = vec![first];
        for number in (1..gpus).map(|rank| device.saturating_add(rank)) {
            let (other, first) = (Self::find(number)?, &found[0]);
            if (other.capability, other.shared_max) != (first.capability, first.shared_max) {
                let (found, first) = (other.architecture(), first.architecture());
                return Err(CudaError::Unlike { device: number, found, first });
            }
            found.push(other);
        }
        if gpus > 1 {
            Nccl::load()?;
        }
        Ok(found)
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
