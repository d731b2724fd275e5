//! The requests of simulation tests, and the figures that the tests compare.

#![allow(dead_code, reason = "each test binary uses a part of it")]

pub mod scaling;
pub mod traffic;

use std::{io::Write, ops::ControlFlow, path::Path, time::Duration};
use tandem_load::{
    report::{Recorder, Slo},
    trace::{Load, Trace, TraceSettings},
};
use tandem_simulator::{SimulatedCluster, SimulatedRequest, simulate};

/// The figures of a simulation.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Figures {
    /// The fraction of prompt tokens found in caches.
    pub hit_rate: f64,
    /// The mean time to the first token, in seconds.
    pub ttft_mean_s: f64,
    pub ttft_p99_s: f64,
    /// The mean time between two tokens of an answer, in milliseconds.
    pub itl_mean_ms: f64,
    pub itl_p99_ms: f64,
    /// The mean time from the arrival of a request to its last token, in seconds.
    pub end_mean_s: f64,
    /// The number of preempted sequences.
    pub preemptions: u64,
    /// The highest number of computed prompt tokens of a worker, divided by the mean over all workers.
    pub computed_max: f64,
    /// The highest number of prompts of a worker, divided by the mean over all workers.
    pub prompts_max: f64,
}

/// A pseudo-random number generator (a linear congruential one).
pub struct Lcg(pub u64);

impl Lcg {
    pub fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }

    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Simulates the requests, all of which must be answered.
pub fn figures(cluster: &SimulatedCluster, requests: &[SimulatedRequest]) -> Figures {
    let mut recorder = Recorder::new(Slo::default());
    let totals = simulate(cluster, requests.iter().cloned(), &mut |outcome| {
        recorder.add(outcome);
        ControlFlow::Continue(())
    });
    let report = recorder.report("", Vec::new());
    assert_eq!((report.requests.answered, totals.requests), (requests.len() as u64, requests.len() as u64));
    let (ttft, e2e) = report.ttft.as_ref().zip(report.e2e.as_ref()).expect("requests were answered");
    let prompts: Vec<u64> = report.workers.iter().filter(|worker| worker.prefills).map(|worker| worker.prompts).collect();
    let most = prompts.iter().max().copied().unwrap_or(0);
    Figures {
        hit_rate: report.tokens.hit_rate().unwrap_or(0.0),
        ttft_mean_s: ttft.mean_ms / 1e3,
        ttft_p99_s: ttft.p99_ms / 1e3,
        itl_mean_ms: report.itl.as_ref().map_or(0.0, |itl| itl.mean_ms),
        itl_p99_ms: report.itl.as_ref().map_or(0.0, |itl| itl.p99_ms),
        end_mean_s: e2e.mean_ms / 1e3,
        preemptions: totals.preemptions,
        computed_max: report.balance.and_then(|balance| balance.computed_max_to_mean).unwrap_or(0.0),
        prompts_max: most as f64 * prompts.len() as f64 / prompts.iter().sum::<u64>() as f64,
    }
}

/// Returns the first `count` requests of the recording, which arrive `faster` times as fast as recorded and whose answers are `answers` times
/// as long. The environment variable `TANDEM_TRACE` names the file of the recording, which is not in the repository. Returns `None` if the
/// variable is not set.
pub fn recorded(count: u64, faster: f64, answers: u64) -> Option<Vec<SimulatedRequest>> {
    let Some(path) = std::env::var_os("TANDEM_TRACE") else {
        writeln!(std::io::stderr(), "SKIPPED: TANDEM_TRACE names no recorded trace").expect("stderr is writable");
        return None;
    };
    let settings = TraceSettings { limit: Some(count), ..TraceSettings::default() };
    let trace = Trace::open(Path::new(&path), settings).expect("TANDEM_TRACE names a trace");
    let mut requests = Vec::new();
    let read = trace.read(&mut |row| {
        let Load::Blocks(blocks) = row.load else { panic!("TANDEM_TRACE names a Mooncake trace") };
        let request = SimulatedRequest::of(row.at.expect("the trace has times").div_f64(faster), blocks, settings.block_tokens);
        requests.push(SimulatedRequest { answer_tokens: request.answer_tokens * answers, ..request });
        ControlFlow::Continue(())
    });
    read.expect("the trace was checked");
    Some(requests)
}

/// Returns requests in random order: `questions` questions about each of `count` documents of `blocks` blocks of 64 tokens.
pub fn documents(count: u64, blocks: u64, questions: u64, seed: u64) -> Vec<SimulatedRequest> {
    let of = |document: u64| SimulatedRequest {
        at: Duration::ZERO,
        prompt_tokens: (blocks as u32 + 1) * 64 - 1,
        blocks: (0..blocks).map(|block| document << 16 | block).collect(),
        answer_tokens: 1,
        max_tokens: 0,
    };
    let mut requests: Vec<SimulatedRequest> = (0..count * questions).map(|number| of(number / questions)).collect();
    Lcg(seed).shuffle(&mut requests);
    requests
}

/// Prints the figures, which `--nocapture` shows.
pub fn print(what: &str, figures: &Figures) {
    let Figures { hit_rate, ttft_mean_s, ttft_p99_s, end_mean_s, preemptions, .. } = figures;
    let line = format!(
        "{what}: found {hit_rate:.3}, first token {ttft_mean_s:.2} s, p99 {ttft_p99_s:.1} s, end {end_mean_s:.1} s, preempted {preemptions}\n"
    );
    std::io::stdout().write_all(line.as_bytes()).expect("stdout is writable");
}
