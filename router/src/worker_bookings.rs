//! The load that placed requests add to one worker before the worker's own reports include them.
//!
//! Invariants: a request's load counts from its placement until the worker reports that its load includes the request, or until the booking
//! is released. So it is never counted in addition to the worker's own report. Predicted blocks are those of prompts that are being
//! prefilled on the worker.

use crate::index::KeyedState;
use std::collections::{BTreeMap, HashMap, VecDeque};
use tandem_kv::{RequestId, SequenceHash};

/// Identifies a booking within this router. Request ids may collide; booking ids do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BookingId(pub(crate) u64);

/// The key of a booking. The request id comes first, so that bookings are found by the request ids that workers report.
pub(crate) type BookingKey = (RequestId, BookingId);

/// The load that one request adds to one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BookedLoad {
    /// The number of prompt tokens that the worker has to compute.
    pub(crate) tokens: u64,
    /// The number of sequences that the worker has to run.
    pub(crate) sequences: u32,
}

/// The number of request ids that are kept of a worker's latest reports. They are kept because another router may announce a booking after
/// the worker has reported its request. The announcement takes milliseconds, and a busy worker reports fewer than 1,024 requests in a
/// second.
const INCLUDED_MAX: usize = 1_024;

/// All bookings on one worker.
pub(crate) struct WorkerBookings {
    /// The number of requests placed on the worker, reported or not.
    pub(crate) count: u32,
    unreported: BTreeMap<BookingKey, BookedLoad>,
    /// The ids of the latest [`INCLUDED_MAX`] requests that a report of the worker included for the first time.
    included: VecDeque<RequestId>,
    /// The number of prompt tokens that the worker's report does not include yet.
    pub(crate) tokens: u64,
    /// The number of sequences that the worker's report does not include yet.
    pub(crate) sequences: u64,
    /// For each block, the number of prompts being prefilled that contain it. Each prompt adds all of its blocks, so the set of keys is
    /// prefix-closed.
    predicted: HashMap<SequenceHash, u32, KeyedState>,
}

impl WorkerBookings {
    /// Returns an empty set of bookings. `key` only seeds its hash table.
    pub(crate) fn new(key: u64) -> Self {
        Self {
            count: 0,
            unreported: BTreeMap::new(),
            included: VecDeque::new(),
            tokens: 0,
            sequences: 0,
            predicted: HashMap::with_hasher(KeyedState::with_seed(key)),
        }
    }

    /// Returns how many leading blocks of the prompt after the first `overlap_blocks` are being computed on the worker.
    pub(crate) fn predicted_blocks(&self, hashes: &[SequenceHash], overlap_blocks: u32) -> u32 {
        if self.predicted.is_empty() {
            return 0;
        }
        (hashes.partition_point(|hash| self.predicted.contains_key(hash)) as u32).saturating_sub(overlap_blocks)
    }

    /// Adds a booking. `prefilling` has the prompt's blocks if the worker will prefill the prompt; otherwise it is empty.
    pub(crate) fn add(&mut self, key: BookingKey, load: BookedLoad, prefilling: &[SequenceHash]) {
        self.count += 1;
        self.tokens += load.tokens;
        self.sequences += u64::from(load.sequences);
        for hash in prefilling {
            *self.predicted.entry(*hash).or_insert(0) += 1;
        }
        let before = self.unreported.insert(key, load);
        assert!(before.is_none(), "a booking is made once on a worker");
    }

    /// Records that the worker's report now includes the request, so the request's load does not count here any more.
    pub(crate) fn on_included(&mut self, request_id: &str) {
        let request_id = RequestId::from(request_id);
        if self.included.len() == INCLUDED_MAX {
            self.included.pop_front();
        }
        self.included.push_back(request_id.clone());
        let all = (request_id.clone(), BookingId(0))..=(request_id, BookingId(u64::MAX));
        let keys: Vec<BookingKey> = self.unreported.range(all).map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.stop_counting(&key);
        }
    }

    /// Returns whether the request is one of the latest [`INCLUDED_MAX`] requests that the worker's reports have included.
    pub(crate) fn has_included(&self, request_id: &str) -> bool {
        self.included.iter().any(|included| **included == *request_id)
    }

    /// Returns the part of a booking's load that the worker's report does not include.
    pub(crate) fn unreported(&self, key: &BookingKey) -> BookedLoad {
        self.unreported.get(key).copied().unwrap_or_default()
    }

    /// Treats all bookings as included in the worker's report, because the message that listed them may have been lost.
    pub(crate) fn on_all_included(&mut self) {
        self.unreported.clear();
        (self.tokens, self.sequences) = (0, 0);
    }

    /// Records that the booking's prompt has been prefilled: its tokens and predicted blocks do not count any more, but its sequences do.
    /// To be called once for a booking, with the same blocks as in [`Self::add`].
    pub(crate) fn on_prefilled(&mut self, key: &BookingKey, prefilling: &[SequenceHash]) {
        if let Some(load) = self.unreported.get_mut(key) {
            self.tokens -= std::mem::take(&mut load.tokens);
        }
        for hash in prefilling {
            let count = self.predicted.get_mut(hash).expect("a prediction is dropped once");
            *count -= 1;
            if *count == 0 {
                self.predicted.remove(hash);
            }
        }
    }

    /// Removes the booking. If it had `prefilling` blocks, [`Self::on_prefilled`] must have been called before.
    pub(crate) fn remove(&mut self, key: &BookingKey) {
        self.stop_counting(key);
        self.count -= 1;
    }

    fn stop_counting(&mut self, key: &BookingKey) {
        if let Some(load) = self.unreported.remove(key) {
            self.tokens -= load.tokens;
            self.sequences -= u64::from(load.sequences);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(request_id: &str, id: u64) -> BookingKey {
        (request_id.into(), BookingId(id))
    }

    fn hashes(numbers: &[u64]) -> Vec<SequenceHash> {
        numbers.iter().copied().map(SequenceHash).collect()
    }

    fn totals(bookings: &WorkerBookings) -> (u64, u64, u32) {
        (bookings.tokens, bookings.sequences, bookings.count)
    }

    #[test]
    fn booked_load_counts_until_the_worker_reports_it() {
        let mut bookings = WorkerBookings::new(0);
        bookings.add(key("a", 1), BookedLoad { tokens: 100, sequences: 2 }, &[]);
        bookings.add(key("ab", 2), BookedLoad { tokens: 10, sequences: 1 }, &[]);
        assert_eq!(totals(&bookings), (110, 3, 2));
        for _ in 0..2 {
            bookings.on_included("a");
            assert_eq!(totals(&bookings), (10, 1, 2));
        }
        bookings.on_included("another router's request");
        bookings.on_prefilled(&key("ab", 2), &[]);
        assert_eq!(totals(&bookings), (0, 1, 2));
        bookings.remove(&key("a", 1));
        bookings.remove(&key("ab", 2));
        assert_eq!(totals(&bookings), (0, 0, 0));
    }

    #[test]
    fn block_is_predicted_until_all_prompts_that_store_it_are_prefilled() {
        let mut bookings = WorkerBookings::new(0);
        bookings.add(key("a", 1), BookedLoad::default(), &hashes(&[1, 2, 3]));
        bookings.add(key("b", 2), BookedLoad::default(), &hashes(&[1, 2, 9]));
        assert_eq!(bookings.predicted_blocks(&hashes(&[1, 2, 3, 4]), 0), 3);
        assert_eq!(bookings.predicted_blocks(&hashes(&[1, 2, 3, 4]), 2), 1);
        assert_eq!(bookings.predicted_blocks(&hashes(&[1, 2, 3, 4]), 4), 0);
        bookings.on_prefilled(&key("a", 1), &hashes(&[1, 2, 3]));
        assert_eq!(bookings.predicted_blocks(&hashes(&[1, 2, 3, 4]), 0), 2);
        bookings.on_prefilled(&key("b", 2), &hashes(&[1, 2, 9]));
        assert_eq!(bookings.predicted_blocks(&hashes(&[1, 2, 3, 4]), 0), 0);
        assert!(bookings.predicted.is_empty());
    }
}
