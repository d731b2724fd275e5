//! Finds the fastest of cuBLASLt's algorithms for a GEMM by timing them. cuBLASLt's heuristic only estimates their times.

use super::driver_lock;
use crate::cuda::{CudaError, plan::padded_rows};
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUevent, CUevent_flags, CUresult, CUstream},
};
use std::time::Duration;
use tokio::time::Instant;

/// GEMMs of prompt steps are timed only if the number of tokens is a multiple of this number, as usual chunk budgets are.
const PROMPT_ROWS: usize = 256;
/// The number of runs of each algorithm. The fastest run counts, because the first run may include the time to load code.
const RUNS: usize = 4;
/// The time limit in milliseconds for all runs of one GEMM, not counting the first run of each algorithm. Algorithms that are not timed by
/// then are not chosen. Only GEMMs of long prompts on slow GPUs reach the limit.
const ALL_MAX_MS: f32 = 100.0;
/// The time limit for the work that was enqueued on the stream before. No step takes this long. Work that reaches the limit
/// waits for a lost GPU.
const LATE_MAX: Duration = Duration::from_secs(60);
/// The fraction by which an algorithm must be faster than one that cuBLASLt ranks higher. Smaller differences are noise.
const MARGIN: f32 = 0.02;
/// The number of bytes that are overwritten before each run, more than a GPU's L2 cache holds: in a step, too, weights come from memory. A
/// run also reads at least as many bytes of weights if the model has them.
const FLUSHED_BYTES: usize = 128 << 20;

/// Returns whether GEMMs with this many rows are timed when an engine is created. Timing takes as long as about thirty uses, so only frequent
/// shapes are timed: those of padded decode steps and of full prompt steps.
pub(super) fn is_timed(rows: usize) -> bool {
    let is_padded_decode = rows <= PROMPT_ROWS && padded_rows(rows) == rows;
    is_padded_decode || rows.is_multiple_of(PROMPT_ROWS)
}

/// Returns the number of layers whose GEMMs a run executes one after another, for matrices of this size. So the run takes tens of
/// microseconds, long enough for the clock, and its weights are evicted before the next run.
pub(super) fn layers_timed(weight_bytes: usize) -> usize {
    FLUSHED_BYTES.div_ceil(weight_bytes.max(1))
}

/// Returns the index of the algorithm to use. `times` has the time of each algorithm in milliseconds. The first algorithm with a known time
/// is chosen, unless another one is clearly faster.
pub(super) fn fastest(times: &[Option<f32>]) -> usize {
    let known = times.iter().enumerate().filter_map(|(index, time)| Some((index, (*time)?)));
    let better = |best: (usize, f32), other: (usize, f32)| if other.1 < best.1 * (1.0 - MARGIN) { other } else { best };
    known.reduce(better).map_or(0, |(index, _)| index)
}

fn failed(source: DriverError) -> CudaError {
    CudaError::Driver { doing: "timing a GEMM", source: Box::new(source) }
}

/// Times work on a stream with CUDA events, and provides scratch memory for the output of that work.
pub(super) struct Clock {
    stream: CUstream,
    /// The device address of the scratch memory.
    pub scratch: u64,
    bytes: usize,
    started: CUevent,
    ended: CUevent,
    spent_ms: f32,
    /// Whether earlier work on the stream has exceeded the time limit. This work may never end.
    late: bool,
}

impl Clock {
    /// Returns a clock with at least `bytes` bytes of scratch memory; `None` if the memory cannot be allocated.
    pub fn new(stream: CUstream, bytes: usize) -> Result<Option<Self>, CudaError> {
        let bytes = bytes.max(FLUSHED_BYTES);
        let _locked = driver_lock();
        // SAFETY: the size is not 0; the memory is freed once, in `drop`.
        let Ok(scratch) = (unsafe { result::malloc_sync(bytes) }) else {
            tracing::debug!(bytes, "a GEMM is not timed, because the GPU has no free memory for its output");
            return Ok(None);
        };
        let event = || result::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(failed);
        // If an event cannot be created, the device is lost. The memory is then not freed, because it is lost with the device.
        let (started, ended) = (event()?, event()?);
        Ok(Some(Self { stream, scratch, bytes, started, ended, spent_ms: 0.0, late: false }))
    }

    /// Returns the time of the fastest of several runs of `enqueue`'s work, in milliseconds; `None` if the time limit had been reached
    /// before the first run, or if `enqueue` returned false.
    pub fn best(&mut self, enqueue: impl Fn() -> bool) -> Result<Option<f32>, CudaError> {
        let mut best: Option<f32> = None;
        for run in 0..RUNS {
            if self.spent_ms > ALL_MAX_MS {
                break;
            }
            let Some(time) = self.time(&enqueue)? else { return Ok(None) };
            self.spent_ms += if run == 0 { 0.0 } else { time };
            best = Some(best.map_or(time, |best| best.min(time)));
        }
        Ok(best)
    }

    fn time(&mut self, enqueue: impl Fn() -> bool) -> Result<Option<f32>, CudaError> {
        // SAFETY: stream, events and memory are alive, and the memory has `bytes` bytes.
        unsafe {
            // The device fills the memory while the host enqueues the work, so the measured time does not include the host's time.
            result::memset_d8_async(self.scratch, 0, self.bytes, self.stream).map_err(failed)?;
            result::event::record(self.started, self.stream).map_err(failed)?;
            if !enqueue() {
                return Ok(None);
            }
            result::event::record(self.ended, self.stream).map_err(failed)?;
            let began = Instant::now();
            loop {
                match sys::cuEventQuery(self.ended) {
                    CUresult::CUDA_ERROR_NOT_READY => self.late = began.elapsed() > LATE_MAX,
                    other => break other.result().map_err(failed)?,
                }
                if self.late {
                    return Err(failed(DriverError(CUresult::CUDA_ERROR_TIMEOUT)));
                }
                std::thread::yield_now();
            }
            result::event::elapsed(self.started, self.ended).map(Some).map_err(failed)
        }
    }
}

impl Drop for Clock {
    fn drop(&mut self) {
        if self.late {
            // The memory is leaked, because freeing it would never return. The engine ends after this error.
            return;
        }
        // SAFETY: the stream is alive. Memory and events were created in `new` and are released once, after waiting for the work that uses
        // them.
        unsafe {
            let _ = result::stream::synchronize(self.stream);
            let _locked = driver_lock();
            let _ = result::free_sync(self.scratch);
            let _ = result::event::destroy(self.started);
            let _ = result::event::destroy(self.ended);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fastest_algorithm_must_win_by_a_margin() {
        for (times, expected) in [
            (&[][..], 0),
            (&[None, None], 0),
            (&[Some(1.0), Some(0.99), None], 0),
            (&[Some(1.0), Some(0.9), Some(0.5), Some(0.495)], 2),
            (&[None, Some(3.0), Some(2.0)], 2),
            (&[Some(1.0), Some(2.0)], 0),
        ] {
            assert_eq!(fastest(times), expected, "{times:?}");
        }
    }

    #[test]
    fn small_matrices_are_timed_in_several_layers() {
        assert_eq!([201, 34, 2].map(|megabytes| layers_timed(megabytes * 1_000_000)), [1, 4, 68]);
    }

    #[test]
    fn only_frequent_row_counts_are_timed() {
        let timed: Vec<usize> = (1..1_100).filter(|rows| is_timed(*rows)).collect();
        assert_eq!(timed, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 768, 1_024]);
    }
}
