//! The load that placed requests add to one worker before the worker's own reports include them.
//!
//! Invariants: a request's load is added from its placement until the worker reports that its load includes the request, or until the
//! booking is released. So a request is never counted twice. The expected length of its answer, which no worker knows, is added until the
//! booking is released.

use crate::places::BookedAnswer;
use std::collections::{BTreeMap, VecDeque};
use tandem_kv::RequestId;
use tokio::time::Instant;

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

/// The number of request ids that are kept of a worker's latest reports. Another router may announce a booking after the worker has
/// reported the booked request. The announcement takes milliseconds, and a busy worker reports fewer than 1,024 requests in a second.
const INCLUDED_MAX: usize = 1_024;

/// All bookings on one worker.
#[derive(Default)]
pub(crate) struct WorkerBookings {
    /// The number of requests placed on the worker, reported or not.
    pub(crate) count: u32,
    unreported: BTreeMap<BookingKey, BookedLoad>,
    /// The answers that are, or will be, generated on the worker.
    answers: BTreeMap<BookingKey, BookedAnswer>,
    /// The ids of the latest [`INCLUDED_MAX`] requests that a report of the worker included for the first time.
    included: VecDeque<RequestId>,
    /// The number of prompt tokens that the worker's report does not include yet.
    pub(crate) tokens: u64,
    /// The number of sequences that the worker's report does not include yet.
    pub(crate) sequences: u64,
    /// The expected number of tokens of the answers of all booked requests, whether the worker has reported these requests or not.
    pub(crate) answer_tokens: u64,
}

impl WorkerBookings {
    /// Adds a booking. `answer` is generated on the worker; `None`: the worker only prefills the prompt.
    pub(crate) fn add(&mut self, key: BookingKey, load: BookedLoad, answer: Option<BookedAnswer>) {
        self.count += 1;
        if let Some(answer) = answer {
            self.answer_tokens += answer.tokens();
            self.answers.insert(key.clone(), answer);
        }
        self.tokens += load.tokens;
        self.sequences += u64::from(load.sequences);
        let before = self.unreported.insert(key, load);
        assert!(before.is_none(), "a booking is made once on a worker");
    }

    /// Records that the worker's report now includes the request, so the request's load is not added any more.
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

    /// Records that the booking's prompt has been prefilled: its tokens are removed from the load, its sequences remain.
    pub(crate) fn on_prefilled(&mut self, key: &BookingKey) {
        if let Some(load) = self.unreported.get_mut(key) {
            self.tokens -= std::mem::take(&mut load.tokens);
        }
    }

    /// Records that the booking's answer runs from now on.
    pub(crate) fn on_answering(&mut self, key: &BookingKey, now: Instant) {
        if let Some(answer) = self.answers.get_mut(key) {
            answer.since.get_or_insert(now);
        }
    }

    /// Returns the answers that are, or will be, generated on the worker.
    pub(crate) fn answers(&self) -> impl Iterator<Item = &BookedAnswer> + Clone {
        self.answers.values()
    }

    pub(crate) fn remove(&mut self, key: &BookingKey) {
        self.stop_counting(key);
        self.count -= 1;
        if let Some(answer) = self.answers.remove(key) {
            self.answer_tokens -= answer.tokens();
        }
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
    use crate::places::Length;
    use tandem_kv::Priority;

    fn key(request_id: &str, id: u64) -> BookingKey {
        (request_id.into(), BookingId(id))
    }

    fn totals(bookings: &WorkerBookings) -> (u64, u64, u32, u64) {
        (bookings.tokens, bookings.sequences, bookings.count, bookings.answer_tokens)
    }

    #[test]
    fn booked_load_is_added_until_reported_and_the_expected_answer_until_released() {
        let mut bookings = WorkerBookings::default();
        let answer = |expected, samples| {
            let length = Length { expected, ..Length::default() };
            Some(BookedAnswer { account: "".into(), priority: Priority::default(), length, samples, since: None })
        };
        bookings.add(key("a", 1), BookedLoad { tokens: 100, sequences: 2 }, answer(30.0, 2));
        bookings.add(key("ab", 2), BookedLoad { tokens: 10, sequences: 1 }, answer(7.0, 1));
        assert_eq!(totals(&bookings), (110, 3, 2, 67));
        for _ in 0..2 {
            bookings.on_included("a");
            assert_eq!(totals(&bookings), (10, 1, 2, 67));
        }
        bookings.on_included("another router's request");
        bookings.on_prefilled(&key("ab", 2));
        assert_eq!(totals(&bookings), (0, 1, 2, 67));
        bookings.remove(&key("a", 1));
        assert_eq!(totals(&bookings), (0, 1, 1, 7));
        bookings.remove(&key("ab", 2));
        assert_eq!(totals(&bookings), (0, 0, 0, 0));
    }
}
