//! Replication of bookings between routers: first the full state, then every change, in messages numbered without gaps.
//!
//! This module has no I/O. A change carries the booking's current record, or says that the booking has ended. So it does no harm if a
//! receiver applies a change twice, or receives only the later of two changes. Each message states which range of the sender's journal it
//! covers. A receiver that has missed a message detects the gap at the next message and requests the full state again.

use crate::worker_bookings::{BookedLoad, BookingId};
use std::{
    collections::{HashSet, VecDeque},
    mem::take,
    sync::Arc,
};
use tandem_kv::{InstanceId, RequestId, SequenceHash};
use tandem_proto::{
    WireError, unknown_message,
    v1::{self, BookedRequest, BookingChange, BookingChanges, BookingState, BookingsReply, bookings_reply::Message},
};
use tokio::sync::watch;

/// The number of latest changes that the journal keeps: half a megabyte, a minute at 300 requests per second. A receiver that has missed
/// older changes gets the full state.
const RECENT_MAX: usize = 65_536;
const MESSAGE_BOOKINGS_MAX: usize = 1_024;
/// The most hashes in one message, about half a megabyte. A message exceeds the limit by at most its last booking.
const MESSAGE_HASHES_MAX: usize = 65_536;
/// The most hashes that are sent for one booking: those of 65,536 tokens in blocks of 16. For a longer prompt, peers predict only the first
/// blocks.
pub(crate) const HASHES_MAX: usize = 4_096;

/// Numbers the changes of this router's bookings, and keeps the latest changes.
#[derive(Default)]
pub(crate) struct Journal {
    last: watch::Sender<u64>,
    recent: VecDeque<BookingId>,
}

impl Journal {
    /// Records that a booking was made, changed or ended.
    pub(crate) fn record(&mut self, booking: BookingId) {
        if self.recent.len() == RECENT_MAX {
            self.recent.pop_front();
        }
        self.recent.push_back(booking);
        self.last.send_modify(|last| *last += 1);
    }

    pub(crate) fn last(&self) -> u64 {
        *self.last.borrow()
    }

    /// Returns a receiver of the number of the last change.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.last.subscribe()
    }

    /// Returns the bookings that have changed after the change with this number; `None` if the journal no longer keeps all of these
    /// changes.
    pub(crate) fn since(&self, after: u64) -> Option<impl Iterator<Item = BookingId>> {
        let missed = usize::try_from(self.last().checked_sub(after)?).ok()?;
        let first = self.recent.len().checked_sub(missed)?;
        Some(self.recent.range(first..).copied())
    }
}

/// A booking as routers announce it to each other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct BookingRecord {
    pub(crate) request_id: RequestId,
    /// The decode instance, and the request's load that this instance has not reported yet.
    pub(crate) decode: (InstanceId, BookedLoad),
    /// The prefill instance, which is never the decode instance, and the request's load that it has not reported yet; `None`: the decode
    /// instance prefills the prompt.
    pub(crate) prefill: Option<(InstanceId, BookedLoad)>,
    pub(crate) prefilling: bool,
    /// The prompt's blocks, at most [`HASHES_MAX`]; empty once the prompt has been prefilled.
    pub(crate) hashes: Arc<[SequenceHash]>,
    /// The expected number of tokens of the answer, all samples together.
    pub(crate) answer_tokens: u64,
    /// The number of sequences that the request generates.
    pub(crate) samples: u32,
}

/// A change of one booking: the booking's id at the sender, and its current record; `None`: the booking has ended.
pub(crate) type BookingUpdate = (u64, Option<BookingRecord>);

/// Returns the full state in messages of bounded size.
pub(crate) fn state(at_change_id: u64, bookings: impl Iterator<Item = (BookingId, BookingRecord)>) -> Vec<Message> {
    let message = |bookings, last| Message::State(BookingState { at_change_id, bookings, last });
    let (mut messages, mut chunk) = (Vec::new(), StateChunk::default());
    for (id, record) in bookings {
        if chunk.is_full() {
            messages.push(message(take(&mut chunk).changes, false));
        }
        chunk.push(id, Some(record));
    }
    messages.push(message(chunk.changes, true));
    messages
}

/// Returns the messages, of bounded size, that announce the changes after the change with the number `after`. `changed` has the booking of
/// each of these changes, in order, and `current` returns the record of a booking. If there are no changes, returns one empty message.
pub(crate) fn changes(
    mut after: u64,
    changed: impl Iterator<Item = BookingId>,
    current: impl Fn(BookingId) -> Option<BookingRecord>,
) -> Vec<Message> {
    let message = |after, last_change_id, bookings| Message::Changes(BookingChanges { after, last_change_id, bookings });
    let (mut messages, mut chunk, mut last) = (Vec::new(), StateChunk::default(), after);
    for id in changed {
        if chunk.is_full() {
            messages.push(message(after, last, take(&mut chunk).changes));
            after = last;
        }
        last += 1;
        if chunk.seen.insert(id) {
            chunk.push(id, current(id));
        }
    }
    messages.push(message(after, last, chunk.changes));
    messages
}

#[derive(Default)]
struct StateChunk {
    changes: Vec<BookingChange>,
    seen: HashSet<BookingId>,
    hashes: usize,
}

impl StateChunk {
    fn is_full(&self) -> bool {
        self.changes.len() >= MESSAGE_BOOKINGS_MAX || self.hashes >= MESSAGE_HASHES_MAX
    }

    fn push(&mut self, BookingId(booking_id): BookingId, record: Option<BookingRecord>) {
        self.hashes += record.as_ref().map_or(0, |record| record.hashes.len());
        self.changes.push(BookingChange { booking_id, request: record.map(Into::into) });
    }
}

impl From<BookingRecord> for BookedRequest {
    fn from(record: BookingRecord) -> Self {
        let load = |(instance_id, BookedLoad { tokens, sequences }): (InstanceId, BookedLoad)| v1::BookedLoad {
            instance_id: instance_id.to_string(),
            tokens,
            sequences,
        };
        Self {
            request_id: record.request_id.to_string(),
            decode: Some(load(record.decode)),
            prefill: record.prefill.map(load),
            prefilling: record.prefilling,
            sequence_hashes: record.hashes.iter().map(|hash| hash.0).collect(),
            answer_tokens: record.answer_tokens,
            samples: record.samples,
        }
    }
}

impl TryFrom<BookedRequest> for BookingRecord {
    type Error = WireError;

    fn try_from(booked: BookedRequest) -> Result<Self, WireError> {
        let load = |v1::BookedLoad { instance_id, tokens, sequences }| (instance_id.into(), BookedLoad { tokens, sequences });
        let decode: (InstanceId, BookedLoad) = load(booked.decode.ok_or(WireError::Missing { field: "decode" })?);
        let hashes = if booked.prefilling { booked.sequence_hashes } else { Vec::new() };
        Ok(Self {
            request_id: booked.request_id.into(),
            prefill: booked.prefill.map(load).filter(|(instance_id, _)| *instance_id != decode.0),
            decode,
            prefilling: booked.prefilling,
            hashes: hashes.into_iter().take(HASHES_MAX).map(SequenceHash).collect(),
            answer_tokens: booked.answer_tokens,
            samples: booked.samples,
        })
    }
}

/// The changes that a peer's message makes to the known bookings of that peer.
#[derive(Debug, PartialEq)]
pub(crate) enum PeerUpdate {
    /// These bookings replace all known bookings of the peer.
    All(Vec<BookingUpdate>),
    /// These changes must be applied to the known bookings of the peer.
    Changed(Vec<BookingUpdate>),
}

/// Why replication from a peer ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ReplicationError {
    #[error("booking changes after number {applied} are missing")]
    Gap { applied: u64 },
    #[error("the message is from another router instance than the messages before it")]
    OtherInstance,
    #[error("the peer router has more than {max} bookings")]
    TooManyBookings { max: usize },
    #[error(transparent)]
    Wire(#[from] WireError),
}

/// Assembles the full state from the messages of one peer, and detects missing changes.
pub(crate) struct PeerReceiver {
    bookings_max: usize,
    /// `None` before the peer's first message.
    pub(crate) instance_id: Option<String>,
    /// The bookings received so far of a state that is not complete yet.
    partial_state: Vec<BookingUpdate>,
    /// The number of the last change that was applied; `None` before the first state.
    applied: Option<u64>,
}

impl PeerReceiver {
    /// Returns a receiver that waits for the full state, which may have at most this many bookings.
    pub(crate) fn new(bookings_max: usize) -> Self {
        Self { bookings_max, instance_id: None, partial_state: Vec::new(), applied: None }
    }

    /// Checks the next message and returns the update that results from it.
    pub(crate) fn take(&mut self, reply: BookingsReply) -> Result<PeerUpdate, ReplicationError> {
        let BookingsReply { router_instance_id, message } = reply;
        if *self.instance_id.get_or_insert_with(|| router_instance_id.clone()) != router_instance_id {
            return Err(ReplicationError::OtherInstance);
        }
        match message {
            Some(Message::State(BookingState { at_change_id, bookings, last })) => {
                self.partial_state.append(&mut decoded(bookings)?);
                if self.partial_state.len() > self.bookings_max {
                    return Err(ReplicationError::TooManyBookings { max: self.bookings_max });
                }
                if !last {
                    return Ok(PeerUpdate::Changed(Vec::new()));
                }
                self.applied = Some(at_change_id);
                Ok(PeerUpdate::All(take(&mut self.partial_state)))
            }
            Some(Message::Changes(BookingChanges { after, last_change_id, bookings })) => {
                // The peer is still sending its state, which includes these changes. If the state does not include them, the next changes
                // show a gap.
                let Some(applied) = self.applied else { return Ok(PeerUpdate::Changed(Vec::new())) };
                if after > applied {
                    return Err(ReplicationError::Gap { applied });
                }
                if last_change_id <= applied {
                    return Ok(PeerUpdate::Changed(Vec::new()));
                }
                self.applied = Some(last_change_id);
                Ok(PeerUpdate::Changed(decoded(bookings)?))
            }
            None => {
                unknown_message("Bookings");
                Ok(PeerUpdate::Changed(Vec::new()))
            }
        }
    }
}

fn decoded(bookings: Vec<BookingChange>) -> Result<Vec<BookingUpdate>, WireError> {
    let change = |BookingChange { booking_id, request }| Ok((booking_id, request.map(BookingRecord::try_from).transpose()?));
    bookings.into_iter().map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOTHING: PeerUpdate = PeerUpdate::Changed(Vec::new());

    fn record(hashes: usize) -> BookingRecord {
        let load = |name: &str| (name.into(), BookedLoad { tokens: 3, sequences: 2 });
        let hashes = (0..hashes as u64).map(SequenceHash).collect();
        let (decode, prefill) = (load("d"), Some(load("p")));
        BookingRecord { request_id: "r".into(), decode, prefill, prefilling: true, hashes, answer_tokens: 9, samples: 2 }
    }

    /// Returns the message that ends a full state of this router instance.
    fn full(router: &str, at_change_id: u64, bookings: Vec<BookingChange>) -> BookingsReply {
        reply(router, Message::State(BookingState { at_change_id, bookings, last: true }))
    }

    fn reply(router: &str, message: Message) -> BookingsReply {
        BookingsReply { router_instance_id: router.to_owned(), message: Some(message) }
    }

    fn change(booking_id: u64, record: Option<BookingRecord>) -> BookingChange {
        BookingChange { booking_id, request: record.map(Into::into) }
    }

    /// Returns the updates that a receiver derives from these messages after an empty state.
    fn received(messages: Vec<Message>) -> Vec<PeerUpdate> {
        let mut receiver = PeerReceiver::new(10_000);
        assert_eq!(receiver.take(full("i", 0, vec![])), Ok(PeerUpdate::All(vec![])));
        messages.into_iter().map(|message| receiver.take(reply("i", message)).expect("no message is missing")).collect()
    }

    #[test]
    fn change_journal_is_bounded_and_detects_that_a_peer_has_missed_changes() {
        let mut journal = Journal::default();
        let since = |journal: &Journal, after| journal.since(after).map(|ids| ids.map(|id| id.0).collect::<Vec<_>>());
        assert_eq!(since(&journal, 0), Some(vec![]));
        (1..=RECENT_MAX as u64).for_each(|id| journal.record(BookingId(id)));
        assert_eq!(since(&journal, 0).map(|ids| ids.len()), Some(RECENT_MAX));
        journal.record(BookingId(7));
        assert_eq!(since(&journal, 0), None);
        assert_eq!(since(&journal, journal.last() - 2), Some(vec![RECENT_MAX as u64, 7]));
        assert_eq!(since(&journal, journal.last() + 1), None, "the change id is of another journal");
    }

    #[test]
    fn long_peer_update_is_split_without_a_gap_and_has_each_booking_once() {
        let ids: Vec<BookingId> = (0..3_000).map(|at| BookingId(at / 2)).collect();
        let messages = changes(0, ids.iter().copied(), |id| id.0.is_multiple_of(2).then(|| record(1)));
        assert_eq!(messages.len(), 2);
        let updates = received(messages);
        let changed = updates.iter().map(|update| match update {
            PeerUpdate::Changed(changes) => changes.len(),
            other => panic!("{other:?}"),
        });
        assert_eq!(changed.sum::<usize>(), 1_500 + 1, "each booking is sent once, except the one on both sides of the split");
        // With `HASHES_MAX` hashes each, 16 bookings fill a message.
        let messages = changes(0, ids[..100].iter().copied(), |_| Some(record(HASHES_MAX)));
        assert_eq!(messages.len(), 50_usize.div_ceil(MESSAGE_HASHES_MAX / HASHES_MAX));
        let whole = state(9, ids.iter().map(|id| (*id, record(0))));
        assert_eq!(whole.len(), 3);
        let updates = received(whole);
        assert_eq!(updates[..2], [NOTHING, NOTHING]);
        assert!(matches!(&updates[2], PeerUpdate::All(all) if all.len() == 3_000));
    }

    #[test]
    fn booking_records_round_trip_and_a_gap_or_a_restarted_peer_is_detected() {
        let mut receiver = PeerReceiver::new(10);
        let changes = |router, after, last_change_id| {
            let bookings = vec![change(5, Some(record(4))), change(6, None)];
            reply(router, Message::Changes(BookingChanges { after, last_change_id, bookings }))
        };
        assert_eq!(receiver.take(changes("i", 0, 2)), Ok(NOTHING), "changes before the first state are ignored");
        let first = full("i", 2, vec![change(5, Some(record(2)))]);
        assert_eq!(receiver.take(first), Ok(PeerUpdate::All(vec![(5, Some(record(2)))])));
        assert_eq!(receiver.take(changes("i", 0, 2)), Ok(NOTHING), "the full state includes the changes");
        assert_eq!(receiver.take(changes("i", 1, 4)), Ok(PeerUpdate::Changed(vec![(5, Some(record(4))), (6, None)])));
        assert_eq!(receiver.take(changes("i", 5, 6)), Err(ReplicationError::Gap { applied: 4 }));
        assert_eq!(receiver.take(changes("j", 4, 5)), Err(ReplicationError::OtherInstance));
        let empty = BookingsReply { router_instance_id: "i".to_owned(), message: None };
        assert_eq!(receiver.take(empty), Ok(NOTHING), "an unknown kind of message is skipped");
        let mut booked = BookedRequest::from(record(HASHES_MAX + 1));
        booked.prefill = booked.decode.clone();
        let decoded = BookingRecord::try_from(booked.clone()).expect("the booking record is complete");
        assert_eq!((decoded.prefill, decoded.hashes.len()), (None, HASHES_MAX));
        let lacking = BookedRequest { decode: None, ..booked };
        assert_eq!(BookingRecord::try_from(lacking), Err(WireError::Missing { field: "decode" }));
    }
}
