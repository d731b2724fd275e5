//! cuBLASLt: products of matrices, each kind planned once, and those that come often timed.

use super::{
    driver_lock,
    tuning::{Clock, fastest, timed_at},
};
use crate::cuda::{
    CudaError,
    device::{Epilogue, Gemm, Operands},
    shape::Half,
};
use cudarc::{
    cublaslt::{
        result::{self, CublasError},
        sys::{self, cublasComputeType_t, cublasLtMatmulDescAttributes_t, cublasLtMatmulPreferenceAttributes_t, cublasStatus_t},
    },
    driver::{
        result as driver,
        sys::{CUstream, CUstreamCaptureStatus},
    },
};
use std::{
    collections::{HashMap, hash_map::Entry},
    os::raw::c_void,
    sync::{Arc, Mutex},
};

/// What NVIDIA recommends for its latest; less than a hundredth of any card that has them.
const WORKSPACE_BYTES: usize = 32 << 20;

/// Plans that are kept: all numbers of sequences that decode together, and some of prompts' tokens. To make one takes tens of microseconds.
const PLANS_MAX: usize = 4_096;
/// Algorithms that are timed: cuBLASLt names those first that it expects to be the fastest.
const CANDIDATES: usize = 8;
/// cuBLAS's `CUBLAS_OP_T`, which the bindings of cuBLASLt lack.
const TRANSPOSED: i32 = 1;

/// Algorithms that were chosen. All queues of a GPU share them in a process: what is computed on one is, bit for bit, what another computes.
pub(super) type ChosenAlgorithms = Arc<Mutex<HashMap<(Half, Gemm), sys::cublasLtMatmulAlgo_t>>>;

/// One target's products: its workspace is used by one at a time.
pub(super) struct GemmPlans {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: HashMap<(Half, Gemm), Plan>,
    chosen: ChosenAlgorithms,
}

/// A product's layouts and algorithms.
pub(super) struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    inputs: sys::cublasLtMatrixLayout_t,
    outputs: sys::cublasLtMatrixLayout_t,
    /// The first one is used; others are there until one has been chosen.
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    uses: usize,
    accumulates: bool,
}

/// Where products are computed.
#[derive(Clone, Copy)]
struct Target {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    stream: CUstream,
}

fn failed(source: CublasError) -> CudaError {
    CudaError::Gemm { source: Box::new(source) }
}

impl GemmPlans {
    /// In the thread's current context.
    pub fn new(chosen: ChosenAlgorithms) -> Result<Self, CudaError> {
        let _locked = driver_lock();
        let handle = result::create_handle().map_err(failed)?;
        // SAFETY: the size is not 0; it is given back once, in `drop`.
        #[expect(unsafe_code)]
        let workspace = unsafe { driver::malloc_sync(WORKSPACE_BYTES) };
        match workspace {
            Ok(workspace) => Ok(Self { handle, workspace, plans: HashMap::new(), chosen }),
            Err(source) => {
                // SAFETY: the handle was made above and is used nowhere.
                #[expect(unsafe_code)]
                let _ = unsafe { result::destroy_handle(handle) };
                Err(CudaError::Driver { doing: "taking memory", source: Box::new(source) })
            }
        }
    }

    /// Puts a product on the stream.
    pub fn run(&mut self, half: Half, gemm: Gemm, operands: Operands, stream: CUstream) -> Result<(), CudaError> {
        let target = Target { handle: self.handle, workspace: self.workspace, stream };
        let plan = self.prepare(half, gemm, operands, stream)?;
        plan.run(target, &plan.algorithms[0], operands).map_err(failed)
    }

    /// The product's plan; made, and its algorithms timed, if it is time for that. Nothing is written to the outputs.
    pub fn prepare(&mut self, half: Half, gemm: Gemm, operands: Operands, stream: CUstream) -> Result<&Plan, CudaError> {
        if self.plans.len() >= PLANS_MAX {
            // No product that runs needs its plan: cuBLASLt has read it.
            self.plans.clear();
        }
        let target = Target { handle: self.handle, workspace: self.workspace, stream };
        let plan = match self.plans.entry((half, gemm)) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(place) => place.insert(Plan::new(self.handle, half, gemm)?),
        };
        plan.uses = plan.uses.saturating_add(1);
        if plan.algorithms.len() > 1 {
            // Held meanwhile: two queues that time the same would disturb each other, and might choose differently.
            let mut chosen = self.chosen.lock().expect("nothing panics while products are timed");
            if let Some(algorithm) = chosen.get(&(half, gemm)) {
                plan.algorithms = vec![*algorithm];
            } else if timed_at(gemm.rows).is_some_and(|uses| plan.uses >= uses) && !is_capturing(stream)? {
                let algorithm = plan.algorithms[fastest(&plan.times(target, gemm, operands)?)];
                chosen.insert((half, gemm), algorithm);
                plan.algorithms = vec![algorithm];
            }
        }
        Ok(plan)
    }
}

/// Whether the stream is told what to do later, when nothing can be timed.
fn is_capturing(stream: CUstream) -> Result<bool, CudaError> {
    // SAFETY: the caller's stream is alive.
    #[expect(unsafe_code)]
    let status = unsafe { driver::stream::is_capturing(stream) };
    let status =
        status.map_err(|source| CudaError::Driver { doing: "telling whether it is_capturing", source: Box::new(source) })?;
    Ok(status != CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE)
}

impl Drop for GemmPlans {
    /// The stream is idle by then.
    fn drop(&mut self) {
        self.plans.clear();
        let _locked = driver_lock();
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
    fn new(handle: sys::cublasLtHandle_t, half: Half, gemm: Gemm) -> Result<Self, CudaError> {
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let Gemm { rows, inputs, outputs, epilogue } = gemm;
        let halves = match half {
            Half::Float16 => CUDA_R_16F,
            Half::BFloat16 => CUDA_R_16BF,
        };
        let out = if epilogue == Epilogue::StoreHalf { halves } else { CUDA_R_32F };
        let layout = |kind, len: usize, count: usize| {
            result::create_matrix_layout(kind, len as u64, count as u64, len as i64).map_err(failed)
        };
        // A plan that fails half way loses a few hundred bytes, and the engine ends.
        let operation = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F).map_err(failed)?;
        let (weights, inputs, outputs) =
            (layout(halves, inputs, outputs)?, layout(halves, inputs, rows)?, layout(out, outputs, rows)?);
        let preference = result::create_matmul_pref().map_err(failed)?;
        let wanted = if timed_at(rows).is_some() { CANDIDATES } else { 1 };
        // SAFETY: all that is named was made above, and attributes are given with their sizes. There is room for as many results as are asked
        // for, and cuBLASLt says how many of them it has written.
        #[expect(unsafe_code)]
        let found = unsafe {
            let transposed = TRANSPOSED;
            let which = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            let transposed = std::ptr::from_ref(&transposed).cast();
            result::set_matmul_desc_attribute(operation, which, transposed, size_of_val(&TRANSPOSED)).map_err(failed)?;
            let workspace = std::ptr::from_ref(&WORKSPACE_BYTES).cast();
            let which = cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES;
            result::set_matmul_pref_attribute(preference, which, workspace, size_of::<usize>()).map_err(failed)?;
            let (mut found, mut count) = (Vec::with_capacity(CANDIDATES), 0);
            let asked = sys::cublasLtMatmulAlgoGetHeuristic(
                handle,
                operation,
                weights,
                inputs,
                outputs,
                outputs,
                preference,
                wanted as i32,
                found.as_mut_ptr(),
                &mut count,
            );
            let _ = result::destroy_matmul_pref(preference);
            asked.result().map_err(failed)?;
            found.set_len(usize::try_from(count).map_or(0, |count| count.min(wanted)));
            found
        };
        let can = |found: &sys::cublasLtMatmulHeuristicResult_t| found.state == cublasStatus_t::CUBLAS_STATUS_SUCCESS;
        let algorithms: Vec<_> = found.into_iter().filter(can).map(|found| found.algo).collect();
        if algorithms.is_empty() {
            return Err(failed(CublasError(cublasStatus_t::CUBLAS_STATUS_NOT_SUPPORTED)));
        }
        Ok(Self { operation, weights, inputs, outputs, algorithms, uses: 0, accumulates: epilogue == Epilogue::AddSingle })
    }

    /// Puts the product on the target's stream.
    fn run(&self, target: Target, algorithm: &sys::cublasLtMatmulAlgo_t, operands: Operands) -> Result<(), CublasError> {
        let (alpha, beta) = (1.0f32, if self.accumulates { 1.0f32 } else { 0.0 });
        // SAFETY: handle and plan are alive; the plan's layouts are those of the product; the caller's addresses are of matrices of its sizes; the
        // two operands are read during the call. C and D are one matrix of one layout, which cuBLASLt allows.
        #[expect(unsafe_code)]
        unsafe {
            result::matmul(
                target.handle,
                self.operation,
                std::ptr::from_ref(&alpha).cast(),
                std::ptr::from_ref(&beta).cast(),
                operands.weights as *const c_void,
                self.weights,
                operands.inputs as *const c_void,
                self.inputs,
                operands.outputs as *const c_void,
                self.outputs,
                operands.outputs as *mut c_void,
                self.outputs,
                algorithm,
                target.workspace as *mut c_void,
                WORKSPACE_BYTES,
                target.stream.cast(),
            )
        }
    }

    /// Milliseconds of the product with each of the algorithms; `None` where that is not known. The caller's outputs stay as they are.
    fn times(&self, target: Target, gemm: Gemm, operands: Operands) -> Result<Vec<Option<f32>>, CudaError> {
        let bytes = gemm.rows * gemm.outputs * if gemm.epilogue == Epilogue::StoreHalf { 2 } else { 4 };
        let Some(mut clock) = Clock::new(target.stream, bytes)? else { return Ok(Vec::new()) };
        let operands = Operands { outputs: clock.scratch(), ..operands };
        // An algorithm that refuses is none to choose.
        self.algorithms.iter().map(|algorithm| clock.best(|| self.run(target, algorithm, operands).is_ok())).collect()
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
