//! What placed requests add to one worker's load before the worker reports it itself.
//!
//! Invariants: a request's share counts from its placement until the worker says that it has taken the request in, or until
//! the request lets go: never beside the worker's own report, never after the booking. Predicted blocks are those of prompts
//! that are being computed there.

use crate::index::Keyed;
use std::{
    collections::{BTreeMap, HashMap, VecDeque},
    sync::Arc,
};
use tandem_kv::SequenceHash;

/// One booking; requests' own names may collide, these do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BookingId(pub(crate) u64);

/// A booking, found by the request's name as workers report it.
pub(crate) type BookingKey = (Arc<str>, BookingId);

/// What one request adds to one worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Share {
    /// Prompt tokens to compute.
    pub(crate) tokens: u64,
    /// Sequences to run.
    pub(crate) sequences: u32,
}

/// Requests of a worker's latest reports that are remembered, for bookings which other routers tell of later than the worker does.
/// A second of a busy worker's; the news takes milliseconds.
const TAKEN_IN_MAX: usize = 1_024;

/// All that is booked on one worker.
pub(crate) struct Booked {
    bookings: u32,
    unreported: BTreeMap<BookingKey, Share>,
    /// The latest [`TAKEN_IN_MAX`].
    included_request_ids: VecDeque<Arc<str>>,
    tokens: u64,
    sequences: u64,
    /// Block → prompts in computation that have it. As prompts are whole, it is prefix-closed.
    predicted: HashMap<SequenceHash, u32, Keyed>,
}

impl Booked {
    pub(crate) fn new(key: u64) -> Self {
        Self {
            bookings: 0,
            unreported: BTreeMap::new(),
            included_request_ids: VecDeque::new(),
            tokens: 0,
            sequences: 0,
            predicted: HashMap::with_hasher(Keyed(key)),
        }
    }

    /// Requests placed here, reported or not.
    pub(crate) fn bookings(&self) -> u32 {
        self.bookings
    }

    /// Prompt tokens not yet in the worker's report.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Sequences not yet in the worker's report.
    pub(crate) fn sequences(&self) -> u64 {
        self.sequences
    }

    /// Leading blocks of the prompt that are being computed here, beyond the first `overlap_blocks`.
    pub(crate) fn predicted_blocks(&self, hashes: &[SequenceHash], overlap_blocks: u32) -> u32 {
        if self.predicted.is_empty() {
            return 0;
        }
        (hashes.partition_point(|hash| self.predicted.contains_key(hash)) as u32).saturating_sub(overlap_blocks)
    }

    /// A request was placed here. `computing`: the blocks it will compute here, and those before them.
    pub(crate) fn add(&mut self, key: BookingKey, share: Share, computing: &[SequenceHash]) {
        self.bookings += 1;
        self.tokens += share.tokens;
        self.sequences += u64::from(share.sequences);
        for hash in computing {
            *self.predicted.entry(*hash).or_insert(0) += 1;
        }
        let before = self.unreported.insert(key, share);
        assert!(before.is_none(), "a booking is made once on a worker");
    }

    /// The worker's report has come to include the request.
    pub(crate) fn included_request_ids(&mut self, request_id: &str) {
        let request_id: Arc<str> = request_id.into();
        if self.included_request_ids.len() == TAKEN_IN_MAX {
            self.included_request_ids.pop_front();
        }
        self.included_request_ids.push_back(request_id.clone());
        let all = (request_id.clone(), BookingId(0))..=(request_id, BookingId(u64::MAX));
        let keys: Vec<BookingKey> = self.unreported.range(all).map(|(key, _)| key.clone()).collect();
        for key in keys {
            self.report(&key);
        }
    }

    /// Whether one of the worker's latest reports has come to include the request.
    pub(crate) fn has_taken_in(&self, request_id: &str) -> bool {
        self.included_request_ids.iter().any(|included_request_ids| **included_request_ids == *request_id)
    }

    /// What of a booking is not in the worker's report.
    pub(crate) fn unreported(&self, key: &BookingKey) -> Share {
        self.unreported.get(key).copied().unwrap_or_default()
    }

    /// The worker's report includes all it has taken in, and which requests these are was lost.
    pub(crate) fn all_taken_in(&mut self) {
        self.unreported.clear();
        (self.tokens, self.sequences) = (0, 0);
    }

    /// The prompt is computed; the request's sequences stay.
    pub(crate) fn prefilled(&mut self, key: &BookingKey, computing: &[SequenceHash]) {
        if let Some(share) = self.unreported.get_mut(key) {
            self.tokens -= std::mem::take(&mut share.tokens);
        }
        for hash in computing {
            let count = self.predicted.get_mut(hash).expect("a prediction is dropped once");
            *count -= 1;
            if *count == 0 {
                self.predicted.remove(hash);
            }
        }
    }

    /// The request has nothing to do with this worker any more; its prompt's predictions were dropped before.
    pub(crate) fn remove(&mut self, key: &BookingKey) {
        self.report(key);
        self.bookings -= 1;
    }

    fn report(&mut self, key: &BookingKey) {
        if let Some(share) = self.unreported.remove(key) {
            self.tokens -= share.tokens;
            self.sequences -= u64::from(share.sequences);
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

    #[test]
    fn a_share_counts_until_it_is_reported_and_never_twice() {
        let mut booked = Booked::new(0);
        booked.add(key("a", 1), Share { tokens: 100, sequences: 2 }, &[]);
        booked.add(key("ab", 2), Share { tokens: 10, sequences: 1 }, &[]);
        assert_eq!((booked.tokens(), booked.sequences(), booked.bookings()), (110, 3, 2));
        for _ in 0..2 {
            booked.included_request_ids("a");
            assert_eq!((booked.tokens(), booked.sequences(), booked.bookings()), (10, 1, 2));
        }
        booked.included_request_ids("somebody else's");
        booked.prefilled(&key("ab", 2), &[]);
        assert_eq!((booked.tokens(), booked.sequences(), booked.bookings()), (0, 1, 2));
        booked.remove(&key("a", 1));
        booked.remove(&key("ab", 2));
        assert_eq!((booked.tokens(), booked.sequences(), booked.bookings()), (0, 0, 0));
    }

    #[test]
    fn predictions_end_with_the_last_prompt_that_makes_them() {
        let mut booked = Booked::new(0);
        booked.add(key("a", 1), Share::default(), &hashes(&[1, 2, 3]));
        booked.add(key("b", 2), Share::default(), &hashes(&[1, 2, 9]));
        assert_eq!(booked.predicted_blocks(&hashes(&[1, 2, 3, 4]), 0), 3);
        assert_eq!(booked.predicted_blocks(&hashes(&[1, 2, 3, 4]), 2), 1);
        assert_eq!(booked.predicted_blocks(&hashes(&[1, 2, 3, 4]), 4), 0);
        booked.prefilled(&key("a", 1), &hashes(&[1, 2, 3]));
        assert_eq!(booked.predicted_blocks(&hashes(&[1, 2, 3, 4]), 0), 2);
        booked.prefilled(&key("b", 2), &hashes(&[1, 2, 9]));
        assert_eq!(booked.predicted_blocks(&hashes(&[1, 2, 3, 4]), 0), 0);
        assert!(booked.predicted.is_empty());
    }
}
