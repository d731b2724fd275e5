//! Measures the load of an external engine from the requests that pass the adapter: the queued and submitted ones, and the rates of prefill and
//! decode. For an engine that is only observed, the load is the one that the engine reports.

use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tandem_kv::Load;
use tokio::{sync::Notify, time::Instant};

/// The prefill rate is measured only with prompts of which at least this many tokens were computed. With fewer, other costs dominate the time.
const MEASURED_TOKENS_MIN: usize = 256;

/// The weight of a new measurement in a moving average.
const WEIGHT: f64 = 0.1;

#[derive(Default)]
pub(crate) struct EngineLoad {
    state: Mutex<LoadTotals>,
    /// Notified when requests have come, begun or ended, and when the engine has reported its load.
    pub changed: Notify,
    /// Notified when the engine has generated tokens.
    pub progressed: Notify,
}

/// The load that an engine reports, and its rates since the previous report; `None` if nothing was measured since then.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct ObservedLoad {
    pub running: u32,
    pub waiting: u32,
    /// The number of tokens whose KV the running requests use.
    pub tokens: u64,
    pub prefill_tokens_per_second: Option<f64>,
    pub decode_step_ms: Option<f64>,
}

#[derive(Default)]
struct LoadTotals {
    running: u32,
    waiting: u32,
    pending_prefill_tokens: u64,
    tokens: u64,
    included: Vec<String>,
    prefill_tokens_per_second: f64,
    prefill_measurements: u64,
    decode_step_ms: f64,
    progress_at: Option<Instant>,
}

impl EngineLoad {
    /// Returns the load, in which all numbers of blocks are 0, and the number of tokens whose KV the running requests use.
    pub fn load(&self) -> (Load, u64) {
        let state = self.state.lock();
        let load = Load {
            running_sequences: state.running,
            waiting_requests: state.waiting,
            pending_prefill_tokens: state.pending_prefill_tokens,
            prefill_tokens_per_second: state.prefill_tokens_per_second,
            prefill_measurements: state.prefill_measurements,
            decode_step_ms: state.decode_step_ms,
            ..Load::default()
        };
        (load, state.tokens)
    }

    /// Returns the ids of the requests that were queued since the last call.
    pub fn take_included(&self) -> Vec<String> {
        std::mem::take(&mut self.state.lock().included)
    }

    /// Returns when the engine last computed something for a request; `None` if it has computed nothing yet.
    pub fn progress_at(&self) -> Option<Instant> {
        self.state.lock().progress_at
    }

    /// Replaces the load by the one that the engine reports.
    pub fn observed(&self, seen: &ObservedLoad) {
        self.update(|state| {
            (state.running, state.waiting, state.tokens) = (seen.running, seen.waiting, seen.tokens);
            if let Some(rate) = seen.prefill_tokens_per_second {
                average(&mut state.prefill_tokens_per_second, rate);
                state.prefill_measurements += 1;
            }
            seen.decode_step_ms.into_iter().for_each(|step| average(&mut state.decode_step_ms, step));
        });
    }

    fn update(&self, change: impl FnOnce(&mut LoadTotals)) {
        change(&mut self.state.lock());
        self.changed.notify_one();
    }
}

/// One request's share of the load. Dropping it removes the request from [`EngineLoad`].
pub(crate) struct LoadShare {
    engine_load: Arc<EngineLoad>,
    queued_at: Instant,
    prompt_tokens: usize,
    samples: u32,
    state: Mutex<WorkState>,
}

#[derive(Default)]
struct WorkState {
    submitted_after: Option<Duration>,
    pending: u64,
    generated: u64,
    /// The number of tokens since `last_chunk_at`.
    unmeasured: u64,
    /// When the last chunk arrived for which this is known.
    last_chunk_at: Option<Instant>,
}

impl LoadShare {
    /// Adds a queued request. The engine is expected to compute `new_tokens` tokens of its prompt.
    pub fn new(
        engine_load: &Arc<EngineLoad>,
        request_id: String,
        new_tokens: usize,
        (prompt_tokens, samples): (usize, usize),
    ) -> Self {
        engine_load.update(|state| {
            state.waiting += 1;
            state.pending_prefill_tokens += new_tokens as u64;
            state.included.push(request_id);
        });
        Self {
            engine_load: Arc::clone(engine_load),
            queued_at: Instant::now(),
            prompt_tokens,
            samples: samples as u32,
            state: Mutex::new(WorkState { pending: new_tokens as u64, ..WorkState::default() }),
        }
    }

    pub fn submitted(&self) {
        self.state.lock().submitted_after = Some(self.queued_at.elapsed());
        self.engine_load.update(|state| {
            state.waiting -= 1;
            state.running += self.samples;
            state.tokens += self.prompt_tokens as u64;
        });
    }

    pub fn queued(&self) -> Duration {
        self.state.lock().submitted_after.unwrap_or_default()
    }

    /// Records that the engine has computed the prompt: `computed` tokens in the time `took`.
    pub fn begun(&self, computed: usize, took: Duration) {
        let pending = std::mem::take(&mut self.state.lock().pending);
        self.engine_load.update(|state| {
            state.pending_prefill_tokens -= pending;
            state.progress_at = Some(Instant::now());
            if computed >= MEASURED_TOKENS_MIN && took > Duration::ZERO {
                average(&mut state.prefill_tokens_per_second, computed as f64 / took.as_secs_f64());
                state.prefill_measurements += 1;
            }
        });
    }

    /// Records that the engine has generated tokens. `arrived` is when they arrived; `None`: they were there before they were awaited.
    pub fn generated(&self, tokens: usize, arrived: Option<Instant>) {
        if tokens == 0 {
            return;
        }
        let now = Instant::now();
        let step = {
            let mut state = self.state.lock();
            state.generated += tokens as u64;
            state.unmeasured += tokens as u64;
            // The chunks of all samples are interleaved, so the time between two tokens of one sample is `samples` times the time since the last
            // chunk.
            arrived.and_then(|now| {
                let tokens = std::mem::take(&mut state.unmeasured);
                let before = state.last_chunk_at.replace(now)?;
                Some(now.duration_since(before).as_secs_f64() * 1e3 * f64::from(self.samples) / tokens as f64)
            })
        };
        {
            let mut state = self.engine_load.state.lock();
            state.tokens += tokens as u64;
            state.progress_at = Some(now);
            step.into_iter().for_each(|step| average(&mut state.decode_step_ms, step));
        }
        self.engine_load.progressed.notify_one();
    }
}

impl Drop for LoadShare {
    fn drop(&mut self) {
        let WorkState { submitted_after, pending, generated, .. } = std::mem::take(self.state.get_mut());
        self.engine_load.update(|state| {
            state.pending_prefill_tokens -= pending;
            match submitted_after {
                None => state.waiting -= 1,
                Some(_) => {
                    state.running -= self.samples;
                    state.tokens -= self.prompt_tokens as u64 + generated;
                }
            }
        });
    }
}

fn average(of: &mut f64, measured: f64) {
    *of = if *of == 0.0 { measured } else { *of + (measured - *of) * WEIGHT };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn load_includes_a_queued_or_running_request_until_it_ends() {
        let engine_load = Arc::new(EngineLoad::default());
        let counts = || {
            let (load, tokens) = engine_load.load();
            (load.waiting_requests, load.running_sequences, load.pending_prefill_tokens, tokens)
        };
        let work = LoadShare::new(&engine_load, "a".to_owned(), 600, (1000, 2));
        assert_eq!(counts(), (1, 0, 600, 0));
        tokio::time::advance(Duration::from_secs(1)).await;
        work.submitted();
        assert_eq!((counts(), work.queued()), ((0, 2, 600, 1000), Duration::from_secs(1)));
        work.begun(600, Duration::from_secs(2));
        work.generated(1, Some(Instant::now()));
        assert_eq!(counts(), (0, 2, 0, 1001));
        assert_eq!(engine_load.load().0.prefill_tokens_per_second, 300.0);
        tokio::time::advance(Duration::from_millis(20)).await;
        // These tokens have waited for a slow client, so only the next arrival says how long all four took.
        work.generated(3, None);
        assert_eq!(engine_load.load().0.decode_step_ms, 0.0);
        work.generated(1, Some(Instant::now()));
        assert_eq!(engine_load.load().0.decode_step_ms, 10.0);
        drop(work);
        assert_eq!(counts(), (0, 0, 0, 0));
        let waiting = LoadShare::new(&engine_load, "b".to_owned(), 10, (10, 1));
        assert_eq!(engine_load.take_included(), ["a", "b"]);
        drop(waiting);
        assert_eq!((counts(), engine_load.take_included()), ((0, 0, 0, 0), Vec::<String>::new()));
    }
}
