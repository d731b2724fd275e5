//! Simulates the requests of a trace.

use crate::{
    RoutingRule, SimulatedCluster, SimulatedRequest,
    simulation::{lacks_prefill_workers, simulate},
};
use std::{ops::ControlFlow, sync::mpsc, thread, time::Duration};
use tandem_load::{
    ReplayProgress,
    report::{Fact, PrefixTokens, Recorder, Report, Roles, Slo},
    trace::{Format, Load, Trace, TraceError},
};
use tandem_router::{Funnel, WorkerRole};

/// The maximum number of rows that are read from a trace ahead of the simulation.
const PREPARED: usize = 256;

/// The maximum duration, in days, of a step, of a transfer, and of the whole trace.
const DAYS_MAX: u64 = 10_000;

/// The names of the facts about faults in a report: the number of lost workers, the number of answers that were continued on another worker,
/// and the number of prompts that were placed again before their first token.
pub const FAULT_FACTS: [&str; 3] = ["lost workers", "resumed answers", "retried prompts"];

/// The settings with which a trace is simulated.
#[derive(Clone, Debug)]
pub struct Replay<'a> {
    /// The trace, whose rows must name the blocks of their prompts.
    pub trace: &'a Trace,
    /// The cluster. Its `block_tokens` is ignored: the trace's block size is used.
    pub cluster: SimulatedCluster,
    /// The factor by which requests arrive faster than they were recorded.
    pub speed: f64,
    /// The service levels that a request must meet to count towards the goodput.
    pub slo: Slo,
}

/// The reason why a trace cannot be simulated.
#[derive(Debug, thiserror::Error)]
pub enum SimulateError {
    /// The trace cannot be read.
    #[error(transparent)]
    Trace(#[from] TraceError),
    /// The rows of the trace have text instead of block ids.
    #[error(
        "the trace has no `hash_ids`, so the blocks that its prompts have in common are not known; simulate a Mooncake trace"
    )]
    NoBlocks,
    /// The rows of the trace have no times.
    #[error("the trace has no times (`timestamp`); set --concurrency")]
    Untimed,
    /// The KV memory of a worker is smaller than a block.
    #[error("the KV memory of {capacity_tokens} tokens is smaller than a block of {block_tokens}; give each worker more")]
    NoCapacity {
        /// The number of tokens that fit into a worker's KV memory.
        capacity_tokens: u64,
        /// The number of tokens in a block.
        block_tokens: u64,
    },
    /// The cluster has no decode worker.
    #[error("the cluster has no decode worker; add one")]
    NoDecodeWorker,
    /// A step, a transfer or the whole trace would take too long for the clock.
    #[error("with these rates and this speed, a step, a transfer or the trace takes over {DAYS_MAX} days; raise rates or speed")]
    TooSlow,
    /// Prompts may be prefilled only on prefill workers, and the cluster has none.
    #[error("--prefill remote needs prefill workers; set --prefill-workers")]
    NoPrefillWorker,
}

/// Simulates the trace on the cluster. `progress` is called after each request.
///
/// # Errors
/// Fails if the trace cannot be read, or if the cluster cannot run it.
pub fn replay(replay: &Replay<'_>, progress: &mut dyn FnMut(ReplayProgress)) -> Result<Report, SimulateError> {
    Ok(replay_until(replay, u64::MAX, progress)?.expect("any number of requests may miss the service levels"))
}

/// Simulates the trace as [`replay`] does, but aborts and returns `None` as soon as more than `misses_max` requests have missed the service
/// levels.
pub(crate) fn replay_until(
    replay: &Replay<'_>,
    misses_max: u64,
    progress: &mut dyn FnMut(ReplayProgress),
) -> Result<Option<Report>, SimulateError> {
    let Replay { trace, speed, slo, .. } = *replay;
    let block_tokens = trace.settings().block_tokens;
    let cluster = SimulatedCluster { block_tokens, ..replay.cluster.clone() };
    check(trace, &cluster, speed)?;
    let mut recorder = Recorder::new(slo);
    for (name, worker) in cluster.worker_names().zip(&cluster.workers) {
        let prefills = worker.role == WorkerRole::Prefill || !cluster.has_prefill_workers();
        recorder.add_worker(&name, Roles { prefills, decodes: worker.role == WorkerRole::Decode });
    }
    let (mut state, mut misses) = (ReplayProgress { requests: trace.requests, ..ReplayProgress::default() }, 0);
    let (sent, requests) = mpsc::sync_channel(PREPARED);
    let (read, totals) = thread::scope(|scope| {
        let reading = scope.spawn(move || {
            trace.read(&mut |row| {
                let Load::Blocks(blocks) = row.load else { unreachable!("the format was checked") };
                let at = row.at.unwrap_or(Duration::ZERO).div_f64(speed);
                match sent.send(SimulatedRequest::of(at, blocks, block_tokens)) {
                    Ok(()) => ControlFlow::Continue(()),
                    Err(_) => ControlFlow::Break(()),
                }
            })
        });
        let totals = simulate(&cluster, requests, &mut |outcome| {
            recorder.add(outcome);
            state.ended += 1;
            state.failed += u64::from(outcome.result.is_err());
            progress(state);
            misses += u64::from(!slo.is_met(outcome));
            if misses > misses_max { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        (reading.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), totals)
    });
    read?;
    if misses > misses_max {
        return Ok(None);
    }
    let mut facts = facts(replay, &cluster);
    if totals.preemptions > 0 {
        facts.push(Fact::new("preemptions", totals.preemptions));
    }
    if !cluster.faults.is_empty() {
        let counts = [totals.losses, totals.resumed, totals.retried];
        facts.extend(FAULT_FACTS.into_iter().zip(counts).map(|(name, count)| Fact::new(name, count)));
    }
    let prefix = (cluster.policy == RoutingRule::Tandem).then(|| prefix_tokens(&totals.prefix));
    Ok(Some(Report { prefix, ..recorder.report(cluster.policy.name(), facts) }))
}

fn prefix_tokens(funnel: &Funnel) -> PrefixTokens {
    let Funnel { prompt, possible, eligible, chosen, found, causes } = *funnel;
    PrefixTokens {
        prompt_tokens: prompt,
        possible_tokens: possible,
        eligible_tokens: eligible,
        chosen_tokens: chosen,
        found_tokens: found,
        uncached: causes.iter().map(|(cause, tokens)| (cause.label().to_owned(), tokens)).collect(),
    }
}

/// Returns the reason why the cluster cannot run the trace, if there is one.
pub(crate) fn check(trace: &Trace, cluster: &SimulatedCluster, speed: f64) -> Result<(), SimulateError> {
    let capacity_tokens = cluster.device.capacity_tokens;
    if trace.format() != Format::Mooncake {
        Err(SimulateError::NoBlocks)
    } else if !trace.timed && cluster.concurrency.is_none() {
        Err(SimulateError::Untimed)
    } else if cluster.capacity_blocks() == 0 {
        Err(SimulateError::NoCapacity { capacity_tokens, block_tokens: cluster.block_tokens })
    } else if !cluster.workers.iter().any(|worker| worker.role == WorkerRole::Decode) {
        Err(SimulateError::NoDecodeWorker)
    } else if takes_too_long(trace, cluster, speed) {
        Err(SimulateError::TooSlow)
    } else if lacks_prefill_workers(cluster) {
        Err(SimulateError::NoPrefillWorker)
    } else {
        Ok(())
    }
}

fn takes_too_long(trace: &Trace, cluster: &SimulatedCluster, speed: f64) -> bool {
    let device = &cluster.device;
    let prefill = device.prefill_step.as_secs_f64() + device.step_tokens as f64 / device.prefill_tokens_per_second;
    let decode = device.decode_step.as_secs_f64() + device.decode_sequence.as_secs_f64() * device.sequences_max as f64;
    let transfer = device.capacity_tokens as f64 * device.kv_bytes_per_token / device.transfer_bytes_per_second;
    let slowest = cluster.workers.iter().map(|worker| worker.slower).fold(1.0, f64::max);
    let longest = ((prefill + decode) * slowest).max(transfer).max(trace.length.as_secs_f64() / speed);
    longest.is_nan() || longest > DAYS_MAX as f64 * 86_400.0
}

fn facts(replay: &Replay<'_>, cluster: &SimulatedCluster) -> Vec<Fact> {
    let device = &cluster.device;
    let prefill_workers = cluster.workers.iter().filter(|worker| worker.role == WorkerRole::Prefill).count();
    let others = cluster.workers.len() - prefill_workers;
    let workers = match prefill_workers {
        0 => format!("{others} mixed"),
        count => format!("{count} prefill, {others} decode"),
    };
    let pace = match cluster.concurrency {
        Some(concurrency) => format!("closed loop, {concurrency} in flight"),
        None => format!("open loop at the times of the trace × {}", replay.speed),
    };
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let mut facts = vec![
        Fact::new("trace", replay.trace.path().display()),
        Fact::new("simulated workers", workers),
        Fact::new("policy", cluster.policy.name()),
        Fact::new("pace", pace),
        Fact::new("prefill", format!("{} tokens/s and {} ms a step", device.prefill_tokens_per_second, ms(device.prefill_step))),
        Fact::new("decode", format!("{} ms a step and {} ms a sequence", ms(device.decode_step), ms(device.decode_sequence))),
        Fact::new("KV memory", format!("{} tokens a worker", device.capacity_tokens)),
        Fact::new("seed", cluster.seed),
    ];
    facts.extend(faults(cluster));
    facts
}

/// Returns the faults of the cluster in words.
fn faults(cluster: &SimulatedCluster) -> impl Iterator<Item = Fact> {
    let names: Vec<String> = cluster.worker_names().collect();
    let for_seconds = |time: Duration| format!("for {} s", time.as_secs_f64());
    let slow = names.iter().zip(&cluster.workers).filter(|(_, worker)| worker.slower != 1.0);
    let slow = slow.map(|(name, worker)| format!("{name} {} times slower", worker.slower));
    let lost = cluster.faults.losses.iter().map(|loss| {
        let lasts = loss.lasts.map_or_else(|| "forever".to_owned(), for_seconds);
        format!("{} lost at {} s {lasts}", names[loss.worker], loss.at.as_secs_f64())
    });
    let random = cluster.faults.random.map(|random| {
        format!("a random worker lost every {} s on average {}", random.every.as_secs_f64(), for_seconds(random.lasts))
    });
    let faults: Vec<String> = slow.chain(lost).chain(random).collect();
    (!faults.is_empty()).then(|| Fact::new("faults", faults.join("; "))).into_iter()
}
