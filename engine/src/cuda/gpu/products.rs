//! cuBLASLt: products of matrices, each kind planned once.

use crate::cuda::{
    CudaError,
    device::{Factors, Into, Product},
    shape::Half,
};
use cudarc::{
    cublaslt::{
        result::{self, CublasError},
        sys::{self, cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t},
    },
    driver::{result as driver, sys::CUstream},
};
use std::{collections::HashMap, os::raw::c_void};

/// What NVIDIA recommends for its latest; less than a hundredth of any card that has them.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Plans that are kept: all numbers of sequences that decode together, and some of prompts' tokens. To make one takes tens of microseconds.
const PLANS_MAX: usize = 4_096;
/// cuBLAS's `CUBLAS_OP_T`, which the bindings of cuBLASLt lack.
const TRANSPOSED: i32 = 1;

/// One queue's products: its workspace is used by one at a time.
pub(super) struct Products {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: HashMap<(Half, Product), Plan>,
}

/// A product's layouts and algorithm.
struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    inputs: sys::cublasLtMatrixLayout_t,
    outputs: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

fn failed(source: CublasError) -> CudaError {
    CudaError::Product { source: Box::new(source) }
}

impl Products {
    /// In the thread's current context.
    pub fn new() -> Result<Self, CudaError> {
        let handle = result::create_handle().map_err(failed)?;
        // SAFETY: the size is not 0; it is given back once, in `drop`.
        #[expect(unsafe_code)]
        let workspace = unsafe { driver::malloc_sync(WORKSPACE_BYTES) };
        match workspace {
            Ok(workspace) => Ok(Self { handle, workspace, plans: HashMap::new() }),
            Err(source) => {
                // SAFETY: the handle was made above and is used nowhere.
                #[expect(unsafe_code)]
                let _ = unsafe { result::destroy_handle(handle) };
                Err(CudaError::Driver { doing: "taking memory", source: Box::new(source) })
            }
        }
    }

    /// Puts a product on the stream.
    pub fn run(&mut self, half: Half, product: Product, factors: Factors, stream: CUstream) -> Result<(), CudaError> {
        if self.plans.len() >= PLANS_MAX {
            // No product that runs needs its plan: cuBLASLt has read it.
            self.plans.clear();
        }
        let plan = match self.plans.entry((half, product)) {
            std::collections::hash_map::Entry::Occupied(plan) => plan.into_mut(),
            std::collections::hash_map::Entry::Vacant(place) => place.insert(Plan::new(self.handle, half, product)?),
        };
        let (alpha, beta) = (1.0f32, if product.into == Into::Sum { 1.0f32 } else { 0.0 });
        // SAFETY: handle and plan are alive; the plan's layouts are those of the product; the caller's addresses are of matrices of its sizes; the
        // two factors are read during the call. C and D are one matrix of one layout, which cuBLASLt allows.
        #[expect(unsafe_code)]
        let put = unsafe {
            result::matmul(
                self.handle,
                plan.operation,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                factors.weights as *const c_void,
                plan.weights,
                factors.inputs as *const c_void,
                plan.inputs,
                factors.outputs as *const c_void,
                plan.outputs,
                factors.outputs as *mut c_void,
                plan.outputs,
                &plan.algorithm,
                self.workspace as *mut c_void,
                WORKSPACE_BYTES,
                stream.cast(),
            )
        };
        put.map_err(failed)
    }
}

impl Drop for Products {
    /// The stream is idle by then.
    fn drop(&mut self) {
        self.plans.clear();
        // SAFETY: both were made in `new` and are given back once.
        #[expect(unsafe_code)]
        unsafe {
            let _ = driver::free_sync(self.workspace);
            let _ = result::destroy_handle(self.handle);
        }
    }
}

impl Plan {
    /// cuBLASLt's matrices are column by column: it computes outputsᵀ = weights × inputsᵀ, of which our rows are the columns.
    fn new(handle: sys::cublasLtHandle_t, half: Half, product: Product) -> Result<Self, CudaError> {
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let Product { rows, inputs, outputs, into } = product;
        let halves = match half {
            Half::Float16 => CUDA_R_16F,
            Half::BFloat16 => CUDA_R_16BF,
        };
        let out = if into == Into::Halves { halves } else { CUDA_R_32F };
        let layout = |kind, len: usize, count: usize| {
            result::create_matrix_layout(kind, len as u64, count as u64, len as i64).map_err(failed)
        };
        // A plan that fails half way loses a few hundred bytes, and the engine ends.
        let operation = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F).map_err(failed)?;
        let (weights, inputs, outputs) =
            (layout(halves, inputs, outputs)?, layout(halves, inputs, rows)?, layout(out, outputs, rows)?);
        let preference = result::create_matmul_pref().map_err(failed)?;
        // SAFETY: all that is named was made above, and attributes are given with their sizes.
        #[expect(unsafe_code)]
        let found = unsafe {
            let transposed = TRANSPOSED;
            let which = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            let transposed = std::ptr::from_ref(&transposed).cast();
            result::set_matmul_desc_attribute(operation, which, transposed, size_of_val(&TRANSPOSED)).map_err(failed)?;
            let workspace = std::ptr::from_ref(&WORKSPACE_BYTES).cast();
            let which = cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, which, workspace, size_of::<usize>()).map_err(failed)?;
            let found = result::get_matmul_algo_heuristic(handle, operation, weights, inputs, outputs, outputs, preference);
            let _ = result::destroy_matmul_pref(preference);
            found.map_err(failed)?
        };
        Ok(Self { operation, weights, inputs, outputs, algorithm: found.algo })
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: all were made in `new` and are given back once.
        #[expect(unsafe_code)]
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in [self.weights, self.inputs, self.outputs] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}
