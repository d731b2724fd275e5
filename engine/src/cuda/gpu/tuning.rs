//! Which of cuBLASLt's algorithms is the fastest: it guesses, the GPU's clock knows.

use super::driver_lock;
use crate::cuda::{CudaError, plan::padded_rows};
use cudarc::driver::{
    result::{self, DriverError},
    sys::{self, CUevent, CUevent_flags, CUresult, CUstream},
};
use std::time::Duration;
use tokio::time::Instant;

/// Prompts in steps of this many tokens, or a multiple, come often: a full step has as many tokens as the worker's budget.
const PROMPT_ROWS: usize = 256;
/// Uses after which a prompt's product is timed: its second or third step, since every layer has one.
const PROMPT_USES: usize = 64;
/// Runs of an algorithm. The first may have to load its code; the fastest counts.
const RUNS: usize = 4;
/// What all runs of one product may take, but for first ones; how fast the algorithms that are left are stays unknown. Only long prompts' products
/// on slow cards come so far.
const ALL_MAX_MS: f32 = 100.0;
/// For what was enqueue on the stream before, longer than any step takes. Later than that, it waits for another GPU that is lost, and so would we.
const LATE_MAX: Duration = Duration::from_secs(60);
/// An algorithm must be faster by this share than one that cuBLASLt prefers: differences below it are chance.
const MARGIN: f32 = 0.02;
/// Overwritten before each run: more than a GPU's cache, because in a step all weights come from memory.
const FLUSHED_BYTES: usize = 128 << 20;

/// At which of its uses a product of so many rows is timed; `None`: never. To time it takes as long as some thirty uses, so it must come
/// often: every number of rows that decoding sequences are padded to does, and is timed at once, before a graph is recorded with it.
pub(super) fn timed_at(rows: usize) -> Option<usize> {
    if rows <= PROMPT_ROWS && padded_rows(rows) == rows {
        Some(1)
    } else {
        rows.is_multiple_of(PROMPT_ROWS).then_some(PROMPT_USES)
    }
}

/// The algorithm to use, of those whose milliseconds are known: the first one unless another is clearly faster.
pub(super) fn fastest(times: &[Option<f32>]) -> usize {
    let known = times.iter().enumerate().filter_map(|(index, time)| Some((index, (*time)?)));
    let better = |best: (usize, f32), other: (usize, f32)| if other.1 < best.1 * (1.0 - MARGIN) { other } else { best };
    known.reduce(better).map_or(0, |(index, _)| index)
}

fn failed(source: DriverError) -> CudaError {
    CudaError::Driver { doing: "timing a product", source: Box::new(source) }
}

/// Times what is enqueue on a stream, with memory to write to meanwhile.
pub(super) struct Clock {
    stream: CUstream,
    scratch: u64,
    bytes: usize,
    started: CUevent,
    ended: CUevent,
    spent_ms: f32,
    /// What is on the stream may never end.
    late: bool,
}

impl Clock {
    /// `None` where there is no memory left to write to.
    pub fn new(stream: CUstream, bytes: usize) -> Result<Option<Self>, CudaError> {
        let bytes = bytes.max(FLUSHED_BYTES);
        let _locked = driver_lock();
        // SAFETY: the size is not 0; memory is given back once, in `drop`.
        #[expect(unsafe_code)]
        let Ok(scratch) = (unsafe { result::malloc_sync(bytes) }) else {
            tracing::debug!(bytes, "a product is not timed: there is no memory for it");
            return Ok(None);
        };
        let event = || result::event::create(CUevent_flags::CU_EVENT_DEFAULT).map_err(failed);
        // A driver that refuses an event is lost, with all its memory.
        let (started, ended) = (event()?, event()?);
        Ok(Some(Self { stream, scratch, bytes, started, ended, spent_ms: 0.0, late: false }))
    }

    /// Its address.
    pub fn scratch(&self) -> u64 {
        self.scratch
    }

    /// Milliseconds of the fastest of some runs; `None` when no time is left for it, or it cannot be enqueue on the stream.
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
        // SAFETY: stream, events and memory are alive, and the memory has so many bytes.
        #[expect(unsafe_code)]
        unsafe {
            // While this goes on, the host puts the rest on the stream: no event waits for it.
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
            // The engine ends, and what is lost with it is little.
            return;
        }
        // SAFETY: the stream is alive. All others were made in `new` and are given back once, when nothing uses them any more.
        #[expect(unsafe_code)]
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
    fn the_fastest_wins_by_more_than_chance() {
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
    fn what_comes_often_is_timed_and_nothing_else() {
        let timed = |uses| (1..1_100).filter(|rows| timed_at(*rows) == Some(uses)).collect::<Vec<_>>();
        assert_eq!(timed(1), [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]);
        assert_eq!(timed(PROMPT_USES), [512, 768, 1_024]);
    }
}
