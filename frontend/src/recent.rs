//! The prompts that ended last, for the dashboard: their usage, workers and timeline, but no text and no token ids.

use crate::{clock::unix_ms, usage::CachedSource};
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

/// The latest records, one for each prompt that ended.
pub(crate) struct Recent {
    pub(crate) max: usize,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// How many records were added since the start, which is also the number of the newest record.
    added: u64,
    records: VecDeque<Arc<Record>>,
}

/// The record of a prompt that ended.
#[derive(Debug, Serialize)]
pub(crate) struct Record {
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
    pub(crate) decode_worker: Option<String>,
    pub(crate) ttft_ms: f64,
    pub(crate) queue_ms: f64,
    pub(crate) kv_transfer_ms: f64,
    pub(crate) kv_transfer_bytes: u64,
    pub(crate) migrations: u32,
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
        Self { max, ring: Mutex::default() }
    }

    /// Adds the record of a prompt that ends now, and removes the oldest record if there are more than `max`.
    pub(crate) fn add(&self, finished: Finished) {
        let ended_unix_ms = unix_ms();
        let mut ring = self.ring.lock();
        ring.added += 1;
        let record = Arc::new(Record { number: ring.added, ended_unix_ms, finished });
        let oldest = if ring.records.len() >= self.max { ring.records.pop_front() } else { None };
        ring.records.push_back(record);
        drop(ring);
        drop(oldest);
    }

    /// Returns the records with numbers greater than `after`, the oldest first.
    pub(crate) fn after(&self, after: u64) -> Vec<Arc<Record>> {
        let ring = self.ring.lock();
        let new = usize::try_from(ring.added.saturating_sub(after)).unwrap_or(usize::MAX);
        ring.records.iter().skip(ring.records.len().saturating_sub(new)).cloned().collect()
    }
}
