//! GEMMs by cuBLASLt. Each shape is planned once; for frequent shapes the fastest algorithm is found by timing.

use super::{
    driver_lock,
    tuning::{Clock, fastest, is_timed, layers_timed},
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
    driver::{result as driver, sys::CUstream},
};
use std::{
    collections::{HashMap, hash_map::Entry},
    os::raw::c_void,
    sync::{Arc, Mutex},
};

/// Bytes of a stream's cuBLASLt workspace: the size that NVIDIA recommends for Hopper, less than a hundredth of such a GPU's memory.
const WORKSPACE_BYTES: usize = 32 << 20;
/// The maximum number of cached plans: enough for all batch sizes of decode, and for some numbers of prompt tokens. Creating a plan takes
/// tens of microseconds.
const PLANS_MAX: usize = 4_096;
/// The number of algorithms that are timed. They are the first ones in the list of cuBLASLt's heuristic, which is in the order of expected
/// speed.
const CANDIDATES: usize = 8;
/// `CUBLAS_OP_T`, which cudarc's bindings of cuBLASLt lack.
const TRANSPOSED: i32 = 1;

/// The algorithms chosen so far. All streams of a model's GPU share them, so that they compute the same results bit for bit.
pub(super) type ChosenAlgorithms = Arc<Mutex<HashMap<Gemm, sys::cublasLtMatmulAlgo_t>>>;

/// The GEMM plans of one stream, with a workspace that its GEMMs use one after the other.
pub(super) struct GemmPlans {
    handle: sys::cublasLtHandle_t,
    workspace: u64,
    plans: HashMap<Gemm, Plan>,
    /// The algorithms that timing has chosen; `None` if algorithms are not timed and cuBLASLt's first proposal is used.
    chosen: Option<ChosenAlgorithms>,
}

/// The layouts and candidate algorithms of a GEMM.
pub(super) struct Plan {
    operation: sys::cublasLtMatmulDesc_t,
    weights: sys::cublasLtMatrixLayout_t,
    inputs: sys::cublasLtMatrixLayout_t,
    outputs: sys::cublasLtMatrixLayout_t,
    /// The first algorithm is used. The others are candidates, which are removed when timing has chosen an algorithm.
    algorithms: Vec<sys::cublasLtMatmulAlgo_t>,
    accumulates: bool,
}

/// The cuBLASLt handle, workspace and stream with which a GEMM is executed.
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
    /// Creates a cuBLASLt handle and a workspace in the thread's current context.
    pub fn new(chosen: Option<ChosenAlgorithms>) -> Result<Self, CudaError> {
        let _locked = driver_lock();
        let handle = result::create_handle().map_err(failed)?;
        // SAFETY: the size is not 0; the workspace is freed once, in `drop`.
        let workspace = unsafe { driver::malloc_sync(WORKSPACE_BYTES) };
        match workspace {
            Ok(workspace) => Ok(Self { handle, workspace, plans: HashMap::new(), chosen }),
            Err(source) => {
                // SAFETY: the handle was created above and is not used.
                let _ = unsafe { result::destroy_handle(handle) };
                Err(CudaError::Driver { doing: "allocating device memory", source: Box::new(source) })
            }
        }
    }

    /// Enqueues a GEMM on the stream, with the algorithm that timing has chosen, or else with cuBLASLt's first proposal.
    pub fn run(&mut self, gemm: Gemm, operands: Operands, stream: CUstream) -> Result<(), CudaError> {
        let target = self.target(stream);
        let plan = self.plan(gemm)?;
        plan.run(target, &plan.algorithms[0], operands).map_err(failed)
    }

    /// Plans a GEMM, and times its algorithms if another stream has not done so. Does not write the outputs.
    pub fn prepare(&mut self, gemm: Gemm, operands: &[Operands], stream: CUstream) -> Result<(), CudaError> {
        let (target, chosen) = (self.target(stream), self.chosen.clone());
        let plan = self.plan(gemm)?;
        if let Some(chosen) = chosen.filter(|_| plan.algorithms.len() > 1) {
            // The lock is held during the timing. Two streams that time the same GEMM at the same time would disturb each other, and might
            // choose different algorithms.
            let mut chosen = chosen.lock().expect("timing does not panic");
            let algorithm = match chosen.get(&gemm) {
                Some(algorithm) => *algorithm,
                None => plan.algorithms[fastest(&plan.times(target, gemm, operands)?)],
            };
            chosen.insert(gemm, algorithm);
            plan.algorithms = vec![algorithm];
        }
        Ok(())
    }

    fn target(&self, stream: CUstream) -> Target {
        Target { handle: self.handle, workspace: self.workspace, stream }
    }

    /// Returns the GEMM's plan, which the first call creates.
    fn plan(&mut self, gemm: Gemm) -> Result<&mut Plan, CudaError> {
        if self.plans.len() >= PLANS_MAX {
            // GEMMs that are running do not need their plans any more, because cuBLASLt has read them.
            self.plans.clear();
        }
        Ok(match self.plans.entry(gemm) {
            Entry::Occupied(plan) => plan.into_mut(),
            Entry::Vacant(place) => {
                let mut plan = Plan::new(self.handle, gemm)?;
                let chosen = self.chosen.as_ref().map(|chosen| chosen.lock().expect("timing does not panic"));
                if let Some(algorithm) = chosen.and_then(|chosen| chosen.get(&gemm).copied()) {
                    plan.algorithms = vec![algorithm];
                }
                place.insert(plan)
            }
        })
    }
}

impl Drop for GemmPlans {
    /// The value must be dropped only while the stream is idle.
    fn drop(&mut self) {
        self.plans.clear();
        let _locked = driver_lock();
        // SAFETY: workspace and handle were created in `new` and are released once.
        unsafe {
            let _ = driver::free_sync(self.workspace);
            let _ = result::destroy_handle(self.handle);
        }
    }
}

impl Plan {
    /// Plans a GEMM. cuBLASLt's matrices are column-major: it computes outputsᵀ = weights × inputsᵀ, whose columns are our rows.
    fn new(handle: sys::cublasLtHandle_t, gemm: Gemm) -> Result<Self, CudaError> {
        use sys::cudaDataType_t::{CUDA_R_16BF, CUDA_R_16F, CUDA_R_32F};
        let Gemm { half, rows, inputs, outputs, epilogue } = gemm;
        let halves = match half {
            Half::Float16 => CUDA_R_16F,
            Half::BFloat16 => CUDA_R_16BF,
        };
        let out = if epilogue == Epilogue::StoreHalf { halves } else { CUDA_R_32F };
        let layout = |kind, len: usize, count: usize| {
            result::create_matrix_layout(kind, len as u64, count as u64, len as i64).map_err(failed)
        };
        // If planning fails midway, a few hundred bytes leak. This does not matter, because the engine ends then.
        let operation = result::create_matmul_desc(cublasComputeType_t::CUBLAS_COMPUTE_32F, CUDA_R_32F).map_err(failed)?;
        let (weights, inputs, outputs) =
            (layout(halves, inputs, outputs)?, layout(halves, inputs, rows)?, layout(out, outputs, rows)?);
        let preference = result::create_matmul_pref().map_err(failed)?;
        let wanted = if is_timed(rows) { CANDIDATES } else { 1 };
        // SAFETY: all handles were created above, and attributes are passed with their sizes. The vector has capacity for as many results
        // as are requested, and cuBLASLt reports how many of them it has written.
        let found = unsafe {
            let which = cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
            let transposed = std::ptr::from_ref(&TRANSPOSED).cast();
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
        Ok(Self { operation, weights, inputs, outputs, algorithms, accumulates: epilogue == Epilogue::AddSingle })
    }

    /// Enqueues the GEMM with this algorithm.
    fn run(&self, target: Target, algorithm: &sys::cublasLtMatmulAlgo_t, operands: Operands) -> Result<(), CublasError> {
        let (alpha, beta) = (1.0f32, if self.accumulates { 1.0f32 } else { 0.0 });
        // SAFETY: handle and plan are alive; the plan's layouts are those of the GEMM, and the caller's addresses refer to matrices of
        // these sizes; alpha and beta are read during the call. C and D are the same matrix with the same layout, which cuBLASLt allows.
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

    /// Returns the milliseconds that the GEMMs of some layers take with each of the algorithms; `None` for an algorithm whose time is not
    /// known. Does not write the caller's outputs.
    fn times(&self, target: Target, gemm: Gemm, operands: &[Operands]) -> Result<Vec<Option<f32>>, CudaError> {
        let bytes = gemm.rows * gemm.outputs * if gemm.epilogue == Epilogue::StoreHalf { 2 } else { 4 };
        let Some(mut clock) = Clock::new(target.stream, bytes)? else { return Ok(Vec::new()) };
        let count = layers_timed(gemm.inputs * gemm.outputs * 2).min(operands.len());
        let outputs = clock.scratch;
        let operands = operands[..count].iter().map(|layer| Operands { outputs, ..*layer });
        // An algorithm that fails has no time and so is not chosen.
        self.algorithms
            .iter()
            .map(|algorithm| clock.best(|| operands.clone().all(|layer| self.run(target, algorithm, layer).is_ok())))
            .collect()
    }
}

impl Drop for Plan {
    fn drop(&mut self) {
        // SAFETY: all handles were created in `new` and are destroyed once.
        unsafe {
            let _ = result::destroy_matmul_desc(self.operation);
            for layout in [self.weights, self.inputs, self.outputs] {
                let _ = result::destroy_matrix_layout(layout);
            }
        }
    }
}
