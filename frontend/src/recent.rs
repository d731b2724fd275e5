//! Records for the dashboard: the prompts that ended last (usage, workers and timeline, but no text and no token ids), their sums over the
//! last hour, and the requests that were refused last.

use crate::{
    clock::unix_ms,
    prefix::{PrefixDetails, Uncached},
    usage::CachedSource,
};
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tandem_proto::Funnel;

/// The length of a [`Period`], in milliseconds. The dashboard's lines use windows of the same length.
const PERIOD_MS: u64 = 10_000;
/// The maximum number of periods: one hour.
const PERIODS_MAX: usize = 360;
const REFUSALS_MAX: usize = 50;

/// The latest records, one for each prompt that ended.
pub(crate) struct Recent {
    pub(crate) max: usize,
    ring: Mutex<Ring>,
    history: Mutex<VecDeque<Period>>,
    refusals: Mutex<VecDeque<Refusal>>,
}

/// The sums over the prompts that ended in ten seconds, by the worker that computed them.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct Period {
    end_unix_ms: u64,
    workers: BTreeMap<String, Sums>,
}

/// Sums over prompts whose worker reported its cached tokens.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub(crate) struct Sums {
    prompts: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    overlap_blocks: u64,
    #[serde(flatten)]
    prefixes: PrefixSums,
}

/// Sums over the prompts whose placement had facts about the prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize)]
struct PrefixSums {
    known_prompts: u64,
    facts_prompt_tokens: u64,
    possible_tokens: u64,
    eligible_tokens: u64,
    chosen_tokens: u64,
    found_tokens: u64,
    uncached: Uncached,
}

impl PrefixSums {
    fn add(&mut self, Funnel { prompt, possible, eligible, chosen, found, causes }: Funnel) {
        self.known_prompts += 1;
        self.facts_prompt_tokens += prompt;
        self.possible_tokens += possible;
        self.eligible_tokens += eligible;
        self.chosen_tokens += chosen;
        self.found_tokens += found;
        self.uncached.0 += causes;
    }
}

/// A request that was answered with an error. No field has text from the client.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Refusal {
    pub(crate) at_unix_ms: u64,
    pub(crate) request_id: String,
    /// The path of the route, without the client's values.
    pub(crate) endpoint: String,
    pub(crate) status: u16,
    pub(crate) code: Option<&'static str>,
}

#[derive(Default)]
struct Ring {
    /// The number of records added since the start, which is also the number of the newest record.
    added: u64,
    records: VecDeque<Arc<PromptRecord>>,
}

/// The record of a prompt that ended.
#[derive(Debug, Serialize)]
pub(crate) struct PromptRecord {
    /// The record's number. Records are numbered from 1 without gaps.
    number: u64,
    ended_unix_ms: u64,
    #[serde(flatten)]
    finished: Finished,
}

/// The fields of a record that are known only when the answer to its prompt has ended.
#[derive(Debug, Serialize)]
pub(crate) struct Finished {
    pub(crate) endpoint: &'static str,
    pub(crate) streamed: bool,
    /// The HTTP status of the whole request; 499: the client disconnected.
    pub(crate) status: u16,
    pub(crate) samples: usize,
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Prompt tokens found in the prefix cache; `None`: the prompt ended before its first token, or before they were reported.
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) block_size: Option<u32>,
    /// What could have been cached, and what was; `None` if it is not known.
    #[serde(skip)]
    pub(crate) funnel: Option<Funnel>,
    #[serde(flatten)]
    pub(crate) details: PromptDetails,
    pub(crate) steps: Stages,
}

/// The extension object `tandem` of an answer, for one prompt.
#[derive(Debug, Serialize)]
pub(crate) struct PromptDetails {
    pub(crate) request_id: String,
    pub(crate) cached_tokens_source: CachedSource,
    pub(crate) cached_tokens_by_tier: BTreeMap<String, u32>,
    pub(crate) overlap_blocks: u32,
    /// The prefill worker's id; `None`: the decode worker computed the prompt itself.
    pub(crate) prefill_worker: Option<String>,
    /// The decode worker that generated the first token.
    pub(crate) decode_worker: Option<String>,
    pub(crate) ttft_ms: f64,
    pub(crate) queue_ms: f64,
    pub(crate) kv_transfer_ms: f64,
    pub(crate) kv_transfer_bytes: u64,
    pub(crate) migrations: usize,
    /// The workers on which the generation was resumed, in order; as many as `migrations`.
    pub(crate) resumed_on: Vec<ResumedOn>,
    /// `None`: the prompt was not placed, or the router does not know the prefix.
    pub(crate) prefix: Option<PrefixDetails>,
}

/// A decode worker on which a generation was resumed after its worker was lost.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct ResumedOn {
    pub(crate) worker: String,
    /// The tokens generated before, of all samples together.
    pub(crate) after_tokens: u32,
}

/// The time at which each stage ended, in milliseconds from the request's arrival; `None`: the prompt ended before that stage did.
#[derive(Debug, Serialize)]
pub(crate) struct Stages {
    /// The request was tokenized, and a placement was requested.
    pub(crate) requested_ms: Option<f64>,
    /// The attempt that generated the first token was placed.
    pub(crate) placed_ms: Option<f64>,
    /// The prefill of that attempt began.
    pub(crate) scheduled_ms: Option<f64>,
    /// The chunks of the prefill. Empty: all tokens were cached, or the worker did not report them.
    pub(crate) chunks: Vec<Chunk>,
    /// The decode worker had all of the prompt's KV.
    pub(crate) started_ms: Option<f64>,
    pub(crate) first_token_ms: Option<f64>,
    pub(crate) ended_ms: f64,
    /// The failed attempts before the attempt that generated the first token; empty if no attempt generated a token.
    pub(crate) failed: Vec<FailedAttempt>,
}

/// The tokens of a prompt that one engine step computed. The 64th chunk includes the tokens of all later steps.
#[derive(Debug, Serialize)]
pub(crate) struct Chunk {
    pub(crate) start_ms: f64,
    pub(crate) duration_ms: f64,
    pub(crate) tokens: u32,
}

/// An attempt that ended before its first token.
#[derive(Debug, Serialize)]
pub(crate) struct FailedAttempt {
    pub(crate) at_ms: f64,
    pub(crate) reason: &'static str,
}

impl Recent {
    pub(crate) fn new(max: usize) -> Self {
        Self { max, ring: Mutex::default(), history: Mutex::default(), refusals: Mutex::default() }
    }

    /// Adds the record of a prompt that ends now, and removes the oldest record if there are more than `max`.
    pub(crate) fn add(&self, finished: Finished) {
        let ended_unix_ms = unix_ms();
        self.sum(ended_unix_ms, &finished);
        let mut ring = self.ring.lock();
        ring.added += 1;
        let record = Arc::new(PromptRecord { number: ring.added, ended_unix_ms, finished });
        let oldest = if ring.records.len() >= self.max { ring.records.pop_front() } else { None };
        ring.records.push_back(record);
        drop(ring);
        drop(oldest);
    }

    /// Returns the records with numbers greater than `after`, the oldest first.
    pub(crate) fn after(&self, after: u64) -> Vec<Arc<PromptRecord>> {
        let ring = self.ring.lock();
        let new = usize::try_from(ring.added.saturating_sub(after)).unwrap_or(usize::MAX);
        ring.records.iter().skip(ring.records.len().saturating_sub(new)).cloned().collect()
    }

    /// Adds a prompt that ends now to the sums of its worker.
    fn sum(&self, now_unix_ms: u64, finished: &Finished) {
        let PromptDetails { prefill_worker, decode_worker, cached_tokens_source, overlap_blocks, .. } = &finished.details;
        let (Some(worker), Some(cached)) = (prefill_worker.as_ref().or(decode_worker.as_ref()), finished.cached_tokens) else {
            return;
        };
        if *cached_tokens_source != CachedSource::Worker {
            return;
        }
        let end_unix_ms = (now_unix_ms / PERIOD_MS + 1) * PERIOD_MS;
        let mut history = self.history.lock();
        if history.back().is_none_or(|period| period.end_unix_ms != end_unix_ms) {
            if history.len() >= PERIODS_MAX {
                history.pop_front();
            }
            history.push_back(Period { end_unix_ms, workers: BTreeMap::new() });
        }
        let Some(period) = history.back_mut() else { return };
        let sums = period.workers.entry(worker.clone()).or_default();
        sums.prompts += 1;
        sums.prompt_tokens += u64::from(finished.prompt_tokens);
        sums.cached_tokens += u64::from(cached);
        sums.overlap_blocks += u64::from(*overlap_blocks);
        finished.funnel.into_iter().for_each(|funnel| sums.prefixes.add(funnel));
    }

    /// Returns the sums of the periods in which prompts ended, of an hour at most, the oldest first.
    pub(crate) fn history(&self) -> Vec<Period> {
        let since = unix_ms().saturating_sub(PERIOD_MS * PERIODS_MAX as u64);
        self.history.lock().iter().filter(|period| period.end_unix_ms > since).cloned().collect()
    }

    /// Adds a request that was answered with an error.
    pub(crate) fn refuse(&self, refusal: Refusal) {
        let mut refusals = self.refusals.lock();
        if refusals.len() >= REFUSALS_MAX {
            refusals.pop_front();
        }
        refusals.push_back(refusal);
    }

    /// Returns the requests that were refused last, the oldest first.
    pub(crate) fn refusals(&self) -> Vec<Refusal> {
        self.refusals.lock().iter().cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::PrefixFacts;

    /// A prompt of 100 tokens that ended with these cached tokens.
    fn finished(worker: &str, cached_tokens: Option<u32>, cached_tokens_source: CachedSource) -> Finished {
        let details = PromptDetails {
            request_id: "r-0".to_owned(),
            cached_tokens_source,
            cached_tokens_by_tier: BTreeMap::new(),
            overlap_blocks: 2,
            prefill_worker: None,
            decode_worker: Some(worker.to_owned()),
            ttft_ms: 1.0,
            queue_ms: 0.0,
            kv_transfer_ms: 0.0,
            kv_transfer_bytes: 0,
            migrations: 0,
            resumed_on: Vec::new(),
            prefix: None,
        };
        let facts = PrefixFacts { reusable_blocks: 6, expected_blocks: 2, held_blocks: 2, ..Default::default() };
        let funnel = Funnel::of(&facts, 100, 16, cached_tokens.unwrap_or(0));
        let steps = Stages {
            requested_ms: None,
            placed_ms: None,
            scheduled_ms: None,
            chunks: Vec::new(),
            started_ms: None,
            first_token_ms: None,
            ended_ms: 1.0,
            failed: Vec::new(),
        };
        Finished {
            endpoint: "completions",
            streamed: false,
            status: 200,
            samples: 1,
            prompt_tokens: 100,
            completion_tokens: 1,
            cached_tokens,
            block_size: Some(16),
            funnel: Some(funnel),
            details,
            steps,
        }
    }

    #[test]
    fn history_has_the_sums_of_each_period_and_worker_for_an_hour() {
        let recent = Recent::new(10);
        let now = unix_ms() / PERIOD_MS * PERIOD_MS;
        recent.sum(now, &finished("a", Some(32), CachedSource::Worker));
        recent.sum(now + PERIOD_MS - 1, &finished("a", Some(0), CachedSource::Worker));
        recent.sum(now + PERIOD_MS - 1, &finished("b", Some(64), CachedSource::Worker));
        recent.sum(now, &finished("a", Some(64), CachedSource::RouterEstimate));
        recent.sum(now, &finished("a", None, CachedSource::Unknown));
        let sums = |prompts, cached_tokens| {
            let mut prefixes = PrefixSums::default();
            // 6 blocks can be reused, and 2 of them are expected.
            let facts = PrefixFacts { reusable_blocks: 6, expected_blocks: 2, held_blocks: 2, ..Default::default() };
            prefixes.add(Funnel::of(&facts, 100, 16, cached_tokens as u32));
            (1..prompts).for_each(|_| prefixes.add(Funnel::of(&facts, 100, 16, 0)));
            assert_eq!((prefixes.known_prompts, prefixes.facts_prompt_tokens), (prompts, 100 * prompts));
            Sums { prompts, prompt_tokens: 100 * prompts, cached_tokens, overlap_blocks: 2 * prompts, prefixes }
        };
        let workers = [("a", sums(2, 32)), ("b", sums(1, 64))].map(|(name, sums)| (name.to_owned(), sums)).into();
        assert_eq!(recent.history(), [Period { end_unix_ms: now + PERIOD_MS, workers }]);
        for number in 1..=PERIODS_MAX as u64 + 3 {
            recent.sum(now + number * PERIOD_MS, &finished("a", Some(0), CachedSource::Worker));
        }
        assert_eq!(recent.history().len(), PERIODS_MAX);
    }

    #[test]
    fn oldest_refusals_are_forgotten() {
        let recent = Recent::new(10);
        for status in 0..=REFUSALS_MAX as u16 {
            recent.refuse(Refusal { at_unix_ms: 1, request_id: String::new(), endpoint: String::new(), status, code: None });
        }
        let refusals = recent.refusals();
        assert_eq!((refusals.len(), refusals[0].status), (REFUSALS_MAX, 1));
    }
}
