//! The bookings of this router. Every change is recorded in a journal, from which peers receive the changes.

use super::{
    booking::{BookingEntry, LoadByRole},
    members::ClusterMembers,
};
use crate::{
    prefill_queue::Departure,
    replication::{self, Journal},
    worker_bookings::{BookingId, BookingKey},
};
use std::{collections::HashMap, sync::Arc};
use tandem_kv::RequestId;
use tandem_proto::v1::bookings_reply::Message;
use tokio::{sync::watch, time::Instant};

/// All bookings of this router.
#[derive(Default)]
pub(crate) struct Bookings {
    /// Only this module changes the map, because every change must be recorded in the journal.
    pub(super) by_id: HashMap<BookingId, BookingEntry>,
    journal: Journal,
    next_id: u64,
}

impl Bookings {
    /// Returns a booking key that is unique among the bookings of this router and those of its peers.
    pub(super) fn new_key(&mut self, request_id: RequestId) -> BookingKey {
        let id = BookingId(self.next_id);
        self.next_id += 1;
        (request_id, id)
    }

    /// Books the request on its workers.
    pub(super) fn add(&mut self, booking: BookingEntry, load: LoadByRole, members: &mut ClusterMembers) -> BookingId {
        let id = booking.key.1;
        members.book(&booking, load);
        self.by_id.insert(id, booking);
        self.journal.record(id);
        id
    }

    /// Records that the prompt has been prefilled, so its prefill is no longer part of the load. A second call for the prompt is ignored.
    /// Returns the booking; `None` if the booking has ended.
    pub(super) fn on_prefilled(&mut self, id: BookingId, members: &mut ClusterMembers) -> Option<&mut BookingEntry> {
        let booking = self.by_id.get_mut(&id)?;
        if members.on_prefilled(booking, Departure::Served) {
            booking.answering_since = Some(members.now());
            self.journal.record(id);
        }
        Some(booking)
    }

    /// Removes the booking. Returns the model and the time at which the prompt was prefilled; `None` if it was not prefilled.
    pub(super) fn release(&mut self, id: BookingId, members: &mut ClusterMembers) -> Option<(Arc<str>, Instant)> {
        let booking = self.by_id.remove(&id)?;
        let answering_since = booking.answering_since.map(|since| (booking.model.clone(), since));
        members.release(booking);
        self.journal.record(id);
        answering_since
    }

    /// Returns a receiver of the number of the latest change of a booking.
    pub(crate) fn subscribe(&self) -> watch::Receiver<u64> {
        self.journal.subscribe()
    }

    /// Returns the messages with all changes that a peer lacks, and the number of the last change in them. The peer has received the
    /// changes up to number `after`; `None`: it has received none.
    pub(crate) fn messages(&self, after: Option<u64>, members: &ClusterMembers) -> (Vec<Message>, u64) {
        let record = |booking: &BookingEntry| booking.record(members.unreported(booking));
        let last = self.journal.last();
        let messages = match after.and_then(|after| Some((after, self.journal.since(after)?))) {
            Some((after, changed)) => replication::changes(after, changed, |id| self.by_id.get(&id).map(record)),
            None => replication::state(last, self.by_id.iter().map(|(id, booking)| (*id, record(booking)))),
        };
        (messages, last)
    }
}
