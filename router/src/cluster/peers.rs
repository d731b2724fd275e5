//! The peer routers and their bookings.
//!
//! A peer's booking adds load like a booking of this router until the worker reports the request, the peer releases the booking, or the
//! peer disconnects. This router never releases it for any other reason.

use super::{
    booking::{BookingEntry, LoadByRole},
    bookings::Bookings,
    members::ClusterMembers,
};
use crate::{
    prefill_queue::Departure,
    replication::{BookingRecord, PeerUpdate},
};
use std::collections::{BTreeMap, HashMap, HashSet, hash_map::Entry};

/// The id of a connection to a peer router.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerId(u64);

struct PeerRouter {
    address: String,
    /// The peer's bookings, by the numbers that the peer has given them.
    bookings: HashMap<u64, BookingEntry>,
}

#[derive(Default)]
pub(crate) struct Peers {
    by_id: BTreeMap<PeerId, PeerRouter>,
    next_id: u64,
}

impl Peers {
    pub(super) fn add(&mut self, address: &str) -> PeerId {
        let id = PeerId(self.next_id);
        self.next_id += 1;
        self.by_id.insert(id, PeerRouter { address: address.to_owned(), bookings: HashMap::new() });
        id
    }

    /// Removes a peer that has disconnected, with its bookings.
    pub(super) fn remove(&mut self, id: PeerId, members: &mut ClusterMembers) {
        let bookings = self.by_id.remove(&id).into_iter().flat_map(|peer| peer.bookings.into_values());
        bookings.for_each(|booking| members.release(booking));
    }

    /// Applies the peer's update. `own` supplies the keys of new bookings. New bookings beyond `bookings_max` for this peer are ignored.
    /// `placed` is called with each request that the peer has just placed, and with its load.
    pub(super) fn update(
        &mut self,
        id: PeerId,
        update: PeerUpdate,
        members: &mut ClusterMembers,
        own: &mut Bookings,
        bookings_max: usize,
        mut placed: impl FnMut(&ClusterMembers, &BookingEntry, LoadByRole),
    ) {
        let Some(PeerRouter { bookings, .. }) = self.by_id.get_mut(&id) else { return };
        let is_change = matches!(update, PeerUpdate::Changed(_));
        let changes = match update {
            PeerUpdate::Changed(changes) => changes,
            PeerUpdate::All(all) => {
                let kept: HashSet<u64> = all.iter().map(|(number, _)| *number).collect();
                for (_, ended) in bookings.extract_if(|number, _| !kept.contains(number)) {
                    members.release(ended);
                }
                all
            }
        };
        let mut ended = HashSet::new();
        for (number, record) in changes {
            let is_full = bookings.len() >= bookings_max;
            match (bookings.entry(number), record) {
                (Entry::Occupied(known), None) => {
                    let booking = known.remove();
                    ended.insert(booking.key.0.clone());
                    members.release(booking);
                }
                (Entry::Vacant(_), None) => {}
                (Entry::Occupied(mut known), Some(record)) => {
                    if !record.prefilling {
                        members.on_prefilled(known.get_mut(), Departure::Served);
                    }
                }
                // The peer has a higher limit on its bookings than this router. The request of an ignored booking is part of the load once
                // its workers report it.
                (Entry::Vacant(_), Some(_)) if is_full => {}
                (Entry::Vacant(new), Some(record)) => {
                    let (booking, load) = book(record, members, own);
                    // A request that was placed again is not a new one.
                    if is_change && booking.prefilling && !ended.contains(&booking.key.0) {
                        placed(members, &booking, load);
                    }
                    new.insert(booking);
                }
            }
        }
    }

    pub(super) fn bookings(&self) -> impl Iterator<Item = &BookingEntry> {
        self.by_id.values().flat_map(|peer| peer.bookings.values())
    }

    pub(super) fn count_bookings(&self) -> usize {
        self.by_id.values().map(|peer| peer.bookings.len()).sum()
    }

    pub(crate) fn len(&self) -> usize {
        self.by_id.len()
    }

    pub(crate) fn is_connected(&self, address: &str) -> bool {
        self.by_id.values().any(|peer| peer.address == address)
    }
}

fn book(record: BookingRecord, members: &mut ClusterMembers, own: &mut Bookings) -> (BookingEntry, LoadByRole) {
    let has_reported =
        |instance_id: &str| members.of(instance_id).is_some_and(|member| member.bookings.has_included(&record.request_id));
    let load = LoadByRole::recorded(&record, has_reported);
    let key = own.new_key(record.request_id.clone());
    let booking = BookingEntry::of_peer(record, key, members.now());
    members.book(&booking, load);
    (booking, load)
}
