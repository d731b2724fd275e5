//! The latest prompts that ended: what they used, where they ran and how long each step took. Never what they say: no text and no
//! token id gets here.

use crate::http::PromptDetails;
use parking_lot::Mutex;
use serde::Serialize;
use std::{
    collections::VecDeque,
    sync::Arc,
    time::{SystemTime, UNIX_EPOCH},
};

/// A ring of records. Whoever ends a prompt adds to it; nothing happens in it otherwise.
pub(crate) struct Recent {
    max: usize,
    ring: Mutex<Ring>,
}

#[derive(Default)]
struct Ring {
    /// Records that were ever kept: the number of the newest.
    kept: u64,
    records: VecDeque<Arc<Record>>,
}

/// One prompt's.
#[derive(Debug, Serialize)]
pub(crate) struct Record {
    /// From 1, without gaps.
    number: u64,
    ended_unix_ms: u64,
    #[serde(flatten)]
    finished: Finished,
}

/// What became of a prompt.
#[derive(Debug, Serialize)]
pub(crate) struct Finished {
    pub(crate) endpoint: &'static str,
    pub(crate) streamed: bool,
    /// Of the whole request; 499: the client went away.
    pub(crate) status: u16,
    /// Continuations.
    pub(crate) samples: usize,
    pub(crate) prompt_tokens: u32,
    pub(crate) completion_tokens: u32,
    /// Null: it had no first token.
    pub(crate) cached_tokens: Option<u32>,
    pub(crate) block_size: Option<u32>,
    #[serde(flatten)]
    pub(crate) details: PromptDetails,
    pub(crate) steps: Steps,
}

/// Milliseconds from the request's arrival; null: it did not come so far.
#[derive(Debug, Serialize)]
pub(crate) struct Steps {
    /// It is read and tokenised; a router is asked.
    pub(crate) asked_ms: Option<f64>,
    /// The attempt that brought the first token was placed.
    pub(crate) placed_ms: Option<f64>,
    /// Its prefill had begun.
    pub(crate) scheduled_ms: Option<f64>,
    /// What was computed of it then, and when. Empty: all was cached, or it was not told.
    pub(crate) chunks: Vec<Chunk>,
    /// Its KV was all on the decode worker.
    pub(crate) started_ms: Option<f64>,
    pub(crate) first_token_ms: Option<f64>,
    pub(crate) ended_ms: f64,
    /// Attempts before the one that brought the first token. Without a first token they are not known, and none is here.
    pub(crate) failed: Vec<FailedAttempt>,
}

/// One step's part of a prompt; the 64th is of all steps from there on.
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
    /// Remembers so many.
    pub(crate) fn new(max: usize) -> Self {
        Self { max, ring: Mutex::default() }
    }

    /// A prompt has ended now.
    pub(crate) fn keep(&self, finished: Finished) {
        let ended_unix_ms = unix_ms();
        let mut ring = self.ring.lock();
        ring.kept += 1;
        let record = Arc::new(Record { number: ring.kept, ended_unix_ms, finished });
        let oldest = if ring.records.len() >= self.max { ring.records.pop_front() } else { None };
        ring.records.push_back(record);
        drop(ring);
        drop(oldest);
    }

    /// Those that are remembered and newer than number `after`, the oldest first.
    pub(crate) fn after(&self, after: u64) -> Vec<Arc<Record>> {
        let ring = self.ring.lock();
        let new = usize::try_from(ring.kept.saturating_sub(after)).unwrap_or(usize::MAX);
        ring.records.iter().skip(ring.records.len().saturating_sub(new)).cloned().collect()
    }

    /// How many are remembered at most.
    pub(crate) fn max(&self) -> usize {
        self.max
    }
}

pub(crate) fn unix_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
}
