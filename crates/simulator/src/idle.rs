//! Computes the times of requests on an idle worker. In no cluster is a request faster.

use crate::{Replay, SimulateError, SimulatedDevice, SimulatedRequest, Size, request::Arrived, trace::check};
use std::{collections::HashSet, ops::ControlFlow, sync::Arc, time::Duration};
use tandem_kv::SequenceHash;
use tandem_load::{
    report::{CachedCount, Expected, Gap, MeasuredAnswer, RequestOutcome, Slo},
    trace::Load,
};

/// The maximum number of blocks that are remembered. Once there are this many, every further block counts as cached.
const BLOCKS_MAX: usize = 1 << 23;

/// The numbers of requests that miss service levels even if each runs alone on a worker whose cache holds all earlier prompts. So these
/// requests miss the levels on a cluster of any size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IdleMisses {
    /// The number of all requests.
    pub requests: u64,
    /// The number of requests that miss at least one level.
    pub any: u64,
    /// The number of requests that miss the level for the time to first token.
    pub ttft: u64,
    /// The number of requests that miss the level for the mean time between tokens.
    pub itl: u64,
    /// The number of requests that miss the level for the time to the end of the answer.
    pub e2e: u64,
}

impl IdleMisses {
    /// Counts the requests of the trace that miss the service levels on an idle worker.
    ///
    /// # Errors
    /// Fails if the trace cannot be read or simulated.
    pub(crate) fn of(replay: &Replay<'_>) -> Result<Self, SimulateError> {
        let Replay { trace, slo, .. } = *replay;
        let (block_tokens, device) = (trace.settings().block_tokens, &replay.cluster.device);
        check(trace, &replay.cluster.with_size(Size::Split { prefill: 1, decode: 1 }), replay.speed)?;
        let (mut known, mut misses) = (HashSet::new(), Self::default());
        trace.read(&mut |row| {
            let Load::Blocks(blocks) = row.load else { unreachable!("the format was checked") };
            let request = Arrived::new(row.index, 0, &SimulatedRequest::of(Duration::ZERO, blocks, block_tokens));
            let outcome = alone(&request, cached_blocks(&request, &mut known, block_tokens) * block_tokens, device);
            let count = |slo: Slo| u64::from(!slo.is_met(&outcome));
            misses.requests += 1;
            misses.any += count(slo);
            misses.ttft += count(Slo { ttft: slo.ttft, ..Slo::default() });
            misses.itl += count(Slo { itl: slo.itl, ..Slo::default() });
            misses.e2e += count(Slo { e2e: slo.e2e, ..Slo::default() });
            ControlFlow::Continue(())
        })?;
        Ok(misses)
    }
}

/// Returns how many leading blocks of the prompt occurred in earlier prompts. Adds the prompt's blocks to `known`.
fn cached_blocks(request: &Arrived, known: &mut HashSet<SequenceHash>, block_tokens: u64) -> u64 {
    let reusable = request.reusable_blocks(block_tokens);
    if known.len() >= BLOCKS_MAX {
        return reusable.into();
    }
    let cached = request.hashes.iter().take(reusable as usize).take_while(|hash| known.contains(hash)).count();
    known.extend(request.hashes.iter().copied());
    cached as u64
}

/// Returns the outcome that the simulation gives to a request that is alone on a worker with this many cached tokens.
fn alone(request: &Arrived, cached_tokens: u64, device: &SimulatedDevice) -> RequestOutcome {
    let step = |time: Duration| Duration::from_micros((time.as_micros() as u64).max(1));
    // The prompt's last token is computed in the first step of the answer.
    let computed = (request.prompt_tokens - 1).saturating_sub(cached_tokens);
    let chunk =
        |tokens: u64| step(device.prefill_step + Duration::from_secs_f64(tokens as f64 / device.prefill_tokens_per_second));
    let token = step(device.decode_step + device.decode_sequence);
    let (full, rest) = (computed / device.step_tokens, computed % device.step_tokens);
    let last = match rest {
        0 => Duration::ZERO,
        1 => token,
        rest => chunk(rest),
    };
    let first_token =
        chunk(device.step_tokens).saturating_mul(u32::try_from(full).unwrap_or(u32::MAX)).saturating_add(last + token);
    let gaps = u32::try_from(request.answer_tokens - 1).unwrap_or(u32::MAX);
    let answer = MeasuredAnswer {
        first_token: Some(first_token),
        gaps: vec![Gap { length: token, count: gaps }],
        prompt_tokens: Some(request.prompt_tokens),
        output_tokens: request.answer_tokens,
        cached: CachedCount::Counted(cached_tokens),
        prefix: None,
        prefill_worker: None::<Arc<str>>,
        decode_worker: None,
    };
    let ended = first_token.saturating_add(token.saturating_mul(gaps));
    RequestOutcome { due: Duration::ZERO, sent: Duration::ZERO, ended, expected: Expected::default(), result: Ok(answer) }
}
