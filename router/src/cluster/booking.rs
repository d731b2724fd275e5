//! One booking: a placed request, from its placement until it is released.

use super::loads::ExpectedLoads;
use crate::{
    places::{BookedAnswer, Length},
    prefill_queue::QueueEntry,
    replication::{BookingRecord, HASHES_MAX},
    worker_bookings::{BookedLoad, BookingKey},
};
use std::sync::Arc;
use tandem_kv::{InstanceId, Priority, SequenceHash};
use tandem_proto::v1::PrefixFacts;
use tokio::time::Instant;

/// The most sequences that one request may add to a worker's load: OpenAI's limit on `n`. The frontend rejects requests with a larger `n`.
pub(super) const SAMPLES_MAX: u32 = 128;

/// The most prompt tokens, and the most answer tokens of one sample, that one request may add to a worker's load: the largest value of
/// `prompt_tokens` and of `max_tokens`.
const TOKENS_MAX: u64 = u32::MAX as u64;

/// A request that this router or a peer has placed. The booking's instances need not be members.
pub(super) struct BookingEntry {
    pub(super) key: BookingKey,
    pub(super) decode: InstanceId,
    /// The prefill instance, never the same as `decode`; `None`: the decode instance prefills the prompt.
    pub(super) prefill: Option<InstanceId>,
    /// The requested model; empty if a peer has placed the request.
    pub(super) model: Arc<str>,
    /// Whether the prompt's prefill has not ended yet.
    pub(super) prefilling: bool,
    /// Time at which this router learned that the prompt has been prefilled; `None` until then, and for a peer's booking.
    pub(super) answering_since: Option<Instant>,
    /// The prompt's blocks that a worker may reuse.
    pub(super) hashes: Arc<[SequenceHash]>,
    /// What the router predicted when it placed the request; `None` if another router placed the request, or once the prediction was
    /// compared with the cached tokens that the engine found.
    pub(super) prediction: Option<Prediction>,
    pub(super) answer: BookedAnswer,
    /// The request's entry, until its first token, in the queue of the worker that prefills it. A request that another router has placed is
    /// in no queue.
    pub(super) waiting: QueueEntry,
}

/// What the router expected of the cached blocks of a prompt when it placed the request.
#[derive(Clone, Debug)]
pub(super) struct Prediction {
    pub(super) prompt_tokens: u32,
    /// The number of tokens in a block.
    pub(super) block_size: u32,
    /// Blocks that the worker could reuse according to its reports, or must have had cached although it reports late.
    pub(super) reported: u32,
    /// The facts about the prompt's prefix, without the names of workers.
    pub(super) facts: PrefixFacts,
    /// What is learned from the time to the first token.
    pub(super) loads: ExpectedLoads,
}

/// The load that a request adds to the reported loads of its decode worker and its prefill worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct LoadByRole {
    pub(super) decode: BookedLoad,
    pub(super) prefill: BookedLoad,
}

impl BookingEntry {
    /// Returns the instance that prefills the prompt.
    pub(super) fn prefills_on(&self) -> &InstanceId {
        self.prefill.as_ref().unwrap_or(&self.decode)
    }

    /// Returns the instances on which the booking adds load now, and whether each is prefilling the prompt.
    pub(super) fn places(&self) -> impl Iterator<Item = (&InstanceId, bool)> {
        let prefill = self.prefill.as_ref().filter(|_| self.prefilling).map(|prefill| (prefill, true));
        std::iter::once((&self.decode, self.prefilling && self.prefill.is_none())).chain(prefill)
    }

    /// Returns the request's answer if this instance generates it, otherwise `None`.
    pub(super) fn answer_on(&self, instance_id: &str) -> Option<BookedAnswer> {
        (*self.decode == *instance_id).then(|| self.answer.clone())
    }

    /// Returns the booking record for peers. `unreported` is the load that the request's workers have not reported yet.
    pub(super) fn record(&self, unreported: LoadByRole) -> BookingRecord {
        let hashes = match self.prefilling {
            false => [].into(),
            true if self.hashes.len() <= HASHES_MAX => self.hashes.clone(),
            true => self.hashes[..HASHES_MAX].into(),
        };
        BookingRecord {
            request_id: self.key.0.clone(),
            decode: (self.decode.clone(), unreported.decode),
            prefill: self.prefill.clone().map(|instance_id| (instance_id, unreported.prefill)),
            prefilling: self.prefilling,
            hashes,
            answer_tokens: self.answer.tokens(),
            samples: self.answer.samples,
        }
    }

    /// Returns a peer's booking under a key of this router. The booking does not contain the load that the peer announced: see
    /// [`LoadByRole::recorded`].
    pub(super) fn of_peer(record: BookingRecord, key: BookingKey, now: Instant) -> Self {
        let BookingRecord { request_id: _, decode, prefill, prefilling, hashes, answer_tokens, samples } = record;
        let (decode, prefill) = (decode.0, prefill.map(|(instance_id, _)| instance_id));
        let samples = samples.clamp(1, SAMPLES_MAX);
        let expected = (answer_tokens / u64::from(samples)).min(TOKENS_MAX) as f64;
        let answer = BookedAnswer {
            account: "".into(),
            priority: Priority::default(),
            length: Length { expected, ..Length::default() },
            samples,
            since: (!prefilling).then_some(now),
        };
        let waiting = QueueEntry::default();
        let model = "".into();
        Self { key, decode, prefill, model, prefilling, answering_since: None, hashes, prediction: None, answer, waiting }
    }
}

impl LoadByRole {
    /// Returns the load of a peer's booking, limited to what one request can have. If a worker has already reported the request, the
    /// booking adds no load to that worker: the report may arrive before the booking.
    pub(super) fn recorded(record: &BookingRecord, has_reported: impl Fn(&str) -> bool) -> Self {
        let load = |(instance_id, load): &(InstanceId, BookedLoad)| match has_reported(instance_id) {
            true => BookedLoad::default(),
            false => BookedLoad { tokens: load.tokens.min(TOKENS_MAX), sequences: load.sequences.min(SAMPLES_MAX) },
        };
        Self { decode: load(&record.decode), prefill: record.prefill.as_ref().map(load).unwrap_or_default() }
    }
}
