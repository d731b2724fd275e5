//! Finds the CUDA driver, its libraries, and the GPUs.

use super::{failed, nccl::Nccl};
use crate::cuda::CudaError;
use cudarc::{
    cublaslt,
    driver::{result, sys},
    nvrtc,
};

/// The lowest major compute capability that has asynchronous copies and bfloat16 (Ampere).
const CAPABILITY_MIN: i32 = 8;

/// The lowest version of the driver and its libraries. Older drivers lack functions that cudarc calls for CUDA 13, and it panics then.
const VERSION_MIN: i32 = 13_000;
/// The lowest version of cuBLASLt, which counts in other units than the driver.
const BLAS_VERSION_MIN: usize = 130_000;

/// Returns a version that CUDA encodes as 1000 × major + 10 × minor, such as 13.0 for 13000.
fn version_text(version: i32) -> String {
    format!("{}.{}", version / 1_000, version % 1_000 / 10)
}

/// Returns the version of NVRTC; `None` if it is not installed. It is needed only if the cache has no kernels for the model and the GPU.
fn nvrtc_version() -> Option<String> {
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the first call only tries to open the library, the second one writes two integers.
    let found = unsafe { nvrtc::sys::is_culib_present() && nvrtc::sys::nvrtcVersion(&mut major, &mut minor).result().is_ok() };
    found.then(|| format!("{major}.{minor}"))
}

/// The CUDA driver, and one GPU.
pub(in crate::cuda) struct Driver {
    pub(super) device: sys::CUdevice,
    capability: (i32, i32),
    /// The highest CUDA version that the driver supports, such as 13000 for 13.0.
    pub version: i32,
    /// The maximum shared memory of a thread block, in bytes.
    pub shared_max: usize,
}

impl Driver {
    /// Finds the driver, cuBLASLt and the GPU with the ordinal `device`. Fails if one of them is missing, or if the GPU is too old.
    pub fn find(device: u32) -> Result<Self, CudaError> {
        // SAFETY: the calls only try to open the libraries, which runs nothing but the libraries' own initialisers.
        let (driver, blas) = unsafe { (sys::is_culib_present(), cublaslt::sys::is_culib_present()) };
        if !driver {
            return Err(CudaError::NoDriver);
        }
        result::init().map_err(failed("initialising"))?;
        let mut version = 0;
        // SAFETY: the driver writes its version as one integer.
        unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("querying its version"))?;
        if version < VERSION_MIN {
            return Err(CudaError::OldDriver { found: version_text(version) });
        }
        let count = result::device::get_count().map_err(failed("counting GPUs"))?;
        if i64::from(device) >= i64::from(count) {
            return Err(CudaError::NoDevice { device, count });
        }
        if !blas {
            return Err(CudaError::NoLibrary { library: "libcublasLt.so.13", package: "nvidia-cublas" });
        }
        // SAFETY: the library was opened above; the call takes nothing and returns a number.
        let blas = unsafe { cublaslt::sys::cublasLtGetVersion() };
        if blas < BLAS_VERSION_MIN {
            let found = format!("{}.{}", blas / 10_000, blas / 100 % 100);
            return Err(CudaError::OldLibrary { library: "libcublasLt.so", found, package: "nvidia-cublas" });
        }
        let handle = result::device::get(device as i32).map_err(failed("opening the GPU"))?;
        use sys::CUdevice_attribute::{
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED,
        };
        // SAFETY: the driver returned this device.
        let (major, minor, shared) = unsafe {
            let attribute = |which| result::device::get_attribute(handle, which).map_err(failed("querying the GPU's attributes"));
            (attribute(MAJOR)?, attribute(MINOR)?, attribute(SHARED)?)
        };
        if major < CAPABILITY_MIN {
            return Err(CudaError::TooOld { device, major, minor });
        }
        Ok(Self { device: handle, capability: (major, minor), version, shared_max: shared.max(0) as usize })
    }

    /// Finds `gpus` GPUs of one kind, beginning with the ordinal `device`, and NCCL if there are several. Fails if a GPU is missing or
    /// differs from the first one, or if NCCL is missing.
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

    /// Returns the versions of the driver and its libraries, and the name of the GPU.
    pub fn describe(&self) -> String {
        let name = result::device::get_name(self.device).unwrap_or_else(|_| "unknown GPU".to_owned());
        // SAFETY: `find` has opened the library; the call takes nothing and returns a number.
        let blas = unsafe { cublaslt::sys::cublasLtGetVersion() };
        let missing = || "missing".to_owned();
        format!(
            "{name}, {}, driver for CUDA {}, cuBLASLt {}.{}.{}, NVRTC {}, NCCL {}",
            self.architecture(),
            version_text(self.version),
            blas / 10_000,
            blas / 100 % 100,
            blas % 100,
            nvrtc_version().unwrap_or_else(missing),
            Nccl::load().ok().and_then(|nccl| nccl.version()).unwrap_or_else(missing),
        )
    }

    /// Returns the architecture as the compiler names it, such as `sm_80`. For Hopper it is `sm_90a`, whose additional instructions exist
    /// on no other architecture.
    pub fn architecture(&self) -> String {
        match self.capability {
            (9, 0) => "sm_90a".to_owned(),
            (major, minor) => format!("sm_{major}{minor}"),
        }
    }
}
