//! Worlds in which the load of a cluster changes.

use super::Lcg;
use std::{ops::ControlFlow, time::Duration};
use tandem_load::report::Slo;
use tandem_router::ServiceLevels;
use tandem_simulator::{
    RoutingRule, ScalingRule, SimulatedCluster, SimulatedDevice, SimulatedRequest, Size, WorkerScaling, simulate,
};

/// The levels that requests are to meet.
pub const TTFT: Duration = Duration::from_secs(2);
pub const ITL: Duration = Duration::from_millis(60);
/// The requests in a second that one worker serves within the levels, about.
const WORKER_PER_SECOND: f64 = 2.0;
const MINUTE: f64 = 60.0;
/// A schedule changes after this time.
const SEGMENT_S: f64 = 300.0;

pub struct World {
    pub name: &'static str,
    pub requests: Vec<SimulatedRequest>,
    /// The time from the decision to start a worker until it joins.
    pub start: Duration,
    /// The number of workers at the beginning.
    workers: usize,
    seconds: f64,
    rate: fn(f64) -> f64,
}

/// What a rule has led to.
#[derive(Clone, Copy, Debug)]
pub struct Outcome {
    /// The part of the requests that have met the levels.
    pub good: f64,
    pub worker_hours: f64,
    pub changes: u64,
    /// The part of the requests that were refused.
    pub refused: f64,
}

impl World {
    pub fn new(name: &'static str, minutes: f64, start_s: u64, workers: usize, rate: fn(f64) -> f64) -> Self {
        let (seconds, start) = (minutes * MINUTE, Duration::from_secs(start_s));
        Self { name, requests: conversations(seconds, rate), start, workers, seconds, rate }
    }

    /// Returns the workers for the mean load of each segment: a number in proportion to it, and `spare` times the square root of that.
    pub fn schedule(&self, factor: f64, spare: f64) -> Vec<(Duration, usize)> {
        let of = |segment: usize| {
            let from = segment as f64 * SEGMENT_S;
            let mean = (0..10).map(|part| (self.rate)(from + f64::from(part) * SEGMENT_S / 10.0)).sum::<f64>() / 10.0;
            let workers = mean / WORKER_PER_SECOND * factor;
            (Duration::from_secs_f64(from), (workers + spare * workers.sqrt()).round().max(1.0) as usize)
        };
        (0..(self.seconds / SEGMENT_S) as usize).map(of).collect()
    }

    pub fn run(&self, rule: ScalingRule) -> Outcome {
        let device = SimulatedDevice {
            prefill_tokens_per_second: 8_000.0,
            prefill_step: Duration::from_millis(8),
            decode_step: Duration::from_millis(20),
            decode_sequence: Duration::from_micros(150),
            ..SimulatedDevice::default()
        };
        let cluster = SimulatedCluster {
            device,
            block_tokens: 256,
            max_wait: Some(Duration::from_secs(10)),
            levels: ServiceLevels { ttft: Some(TTFT), itl: Some(ITL) },
            scaling: Some(WorkerScaling { rule, start: self.start, workers_max: 64 }),
            ..SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(self.workers))
        };
        let slo = Slo { ttft: Some(TTFT), itl: Some(ITL), ..Slo::default() };
        let (mut good, mut refused) = (0_u32, 0_u32);
        let totals = simulate(&cluster, self.requests.iter().cloned(), &mut |outcome| {
            good += u32::from(slo.is_met(outcome));
            refused += u32::from(outcome.result.is_err());
            ControlFlow::Continue(())
        });
        let count = self.requests.len() as f64;
        assert_eq!(totals.requests, self.requests.len() as u64, "every request ends");
        Outcome {
            good: f64::from(good) / count,
            worker_hours: totals.paid.as_secs_f64() / 3_600.0,
            changes: totals.changes,
            refused: f64::from(refused) / count,
        }
    }
}

/// Returns requests that arrive at random with the rate `per_second(t)` at t seconds. Three of five continue one of the latest conversations,
/// the others begin one with a system prompt that all have in common.
fn conversations(seconds: f64, per_second: fn(f64) -> f64) -> Vec<SimulatedRequest> {
    const BLOCK: usize = 256;
    let (mut random, mut at, mut next) = (Lcg(17), 0.0, 1_u64 << 32);
    let (mut open, mut requests): (Vec<Vec<u64>>, Vec<SimulatedRequest>) = (Vec::new(), Vec::new());
    loop {
        let part = ((random.below(1 << 20) + 1) as f64) / f64::from(1 << 20);
        at += -part.ln() / per_second(at);
        if at >= seconds {
            return requests;
        }
        let mut blocks = match random.below(5) < 3 && !open.is_empty() {
            true => open.swap_remove(random.below(open.len())),
            false => (0..6).collect(),
        };
        let added = 1 + random.below(9);
        blocks.extend(next..next + added as u64);
        next += added as u64;
        let answer_tokens = 60 + random.below(300) as u64;
        requests.push(SimulatedRequest {
            at: Duration::from_secs_f64(at),
            prompt_tokens: (blocks.len() * BLOCK + 1 + random.below(BLOCK - 1)) as u32,
            blocks: blocks.clone().into(),
            answer_tokens,
            max_tokens: 0,
        });
        if blocks.len() < 60 {
            open.push(blocks);
        }
        // A conversation that is not continued for long is given up.
        if open.len() > 300 {
            open.remove(0);
        }
    }
}

/// Returns five worlds: a step, a ramp, bursts, a day in six hours, and a cluster that begins with far too few workers, whose engines are as fast
/// as ever while requests wait in queues.
pub fn worlds() -> Vec<World> {
    vec![
        World::new("step", 120.0, 180, 2, |t| if t < 40.0 * MINUTE { 4.0 } else { 12.0 }),
        World::new("ramp", 120.0, 420, 2, |t| 4.0 + (t / (90.0 * MINUTE)).min(1.0) * 12.0),
        World::new(
            "bursts",
            180.0,
            120,
            4,
            |t| if t % (60.0 * MINUTE) < 10.0 * MINUTE && t > 20.0 * MINUTE { 11.0 } else { 7.0 },
        ),
        World::new("day", 360.0, 300, 2, |t| 8.0 - 6.0 * (t / (360.0 * MINUTE) * std::f64::consts::TAU).cos()),
        World::new("hidden queue", 120.0, 180, 2, |_| 10.0),
    ]
}
