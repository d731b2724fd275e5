//! Bookings across routers: what this one tells of its own, and those it has heard of from others.
//!
//! A booking that was heard of counts as an own one does, until the worker reports the request or the router that made it
//! releases it, or is gone. It is never released here for any other reason.

use super::{
    State,
    bookings::{Booking, SAMPLES_MAX},
    members::Shares,
};
use crate::{
    booked::Share,
    exchange::{self, Change, HASHES_MAX, Heard, News, Told},
};
use std::{
    collections::{HashMap, HashSet, hash_map::Entry},
    sync::Arc,
};
use tokio::sync::watch;

/// A router whose bookings are heard of, as long as it is followed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct PeerId(u64);

/// Of one prompt: as many as a request can say that it has.
const TOKENS_MAX: u64 = u32::MAX as u64;

/// One router.
#[derive(Default)]
pub(super) struct Peer {
    address: String,
    /// By its numbers.
    pub(super) bookings: PeerBookings,
}

type PeerBookings = HashMap<u64, Booking>;

impl State {
    /// Tells of every change of this router's bookings.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.journal.subscribe()
    }

    /// What another router has to hear that knows all up to `after`, or nothing yet; and the number up to which it knows all then.
    pub(crate) fn news(&self, after: Option<u64>) -> (Vec<News>, u64) {
        let told = |booking: &Booking| {
            let Shares { decode, prefill } = self.members.unreported(booking);
            let hashes = match booking.computing {
                false => [].into(),
                true if booking.hashes.len() <= HASHES_MAX => booking.hashes.clone(),
                true => booking.hashes[..HASHES_MAX].into(),
            };
            Told {
                request_id: booking.key.0.clone(),
                decode: (booking.decode.clone(), decode),
                prefill: booking.prefill.clone().map(|instance_id| (instance_id, prefill)),
                computing: booking.computing,
                hashes,
            }
        };
        let last = self.journal.last();
        let news = match after.and_then(|after| Some((after, self.journal.since(after)?))) {
            Some((after, changed)) => exchange::changes(after, changed, |id| self.bookings.get(&id).map(told)),
            None => exchange::state(last, self.bookings.iter().map(|(id, booking)| (*id, told(booking)))),
        };
        (news, last)
    }

    /// Another router is followed from now on.
    pub(crate) fn peer_joined(&mut self, address: &str) -> PeerId {
        let id = PeerId(self.next_peer);
        self.next_peer += 1;
        self.peers.insert(id, Peer { address: address.to_owned(), bookings: PeerBookings::new() });
        self.count_peers();
        id
    }

    /// The router is not followed any more; what it has booked is not known any more.
    pub(crate) fn peer_left(&mut self, id: PeerId) {
        for booking in self.peers.remove(&id).unwrap_or_default().bookings.into_values() {
            self.members.release(booking);
        }
        self.count_peers();
    }

    /// What the router has told.
    pub(crate) fn peer_told(&mut self, id: PeerId, heard: Heard) {
        // A value of its own while it changes, so that the rest of the state can change with it.
        let Some(mut peer) = self.peers.remove(&id) else { return };
        let changed = match heard {
            Heard::Nothing => Vec::new(),
            Heard::Changed(changed) => changed,
            Heard::All(all) => {
                let kept: HashSet<u64> = all.iter().map(|(id, _)| *id).collect();
                for (_, over) in peer.bookings.extract_if(|id, _| !kept.contains(id)) {
                    self.members.release(over);
                }
                all
            }
        };
        for change in changed {
            self.peer_changed(&mut peer.bookings, change);
        }
        self.peers.insert(id, peer);
        self.count_peers();
    }

    fn peer_changed(&mut self, bookings: &mut PeerBookings, (number, told): Change) {
        let full = bookings.len() >= self.settings.bookings_max;
        match (bookings.entry(number), told) {
            (Entry::Occupied(known), None) => self.members.release(known.remove()),
            (Entry::Vacant(_), None) => {}
            (Entry::Occupied(mut known), Some(told)) => {
                if !told.computing {
                    self.members.prefilled(known.get_mut());
                }
            }
            // More than any router makes: it has other settings, and its later ones count only once workers report them.
            (Entry::Vacant(_), Some(_)) if full => {}
            (Entry::Vacant(new), Some(told)) => {
                let (booking, shares) = self.heard_of(told);
                self.members.book(&booking, shares);
                new.insert(booking);
            }
        }
    }

    fn heard_of(&mut self, told: Told) -> (Booking, Shares) {
        let Told { request_id, decode, prefill, computing, hashes } = told;
        // The worker's report may have come before the booking that it includes.
        let unreported = |(instance_id, share): &(Arc<str>, Share)| {
            let reported = self.members.of(instance_id).is_some_and(|member| member.booked.has_taken_in(&request_id));
            let Share { tokens, sequences } = if reported { Share::default() } else { *share };
            Share { tokens: tokens.min(TOKENS_MAX), sequences: sequences.min(SAMPLES_MAX) }
        };
        let shares = Shares { decode: unreported(&decode), prefill: prefill.as_ref().map(unreported).unwrap_or_default() };
        let key = self.new_key(request_id);
        let (decode, prefill) = (decode.0, prefill.map(|(instance_id, _)| instance_id));
        (Booking { key, decode, prefill, computing, answering: None, hashes, overlap_tokens: None }, shares)
    }

    /// Bookings of all other routers.
    pub(super) fn peer_bookings(&self) -> usize {
        self.peers.values().map(|peer| peer.bookings.len()).sum()
    }

    /// Whether the router at this address is followed now.
    pub(crate) fn has_peer_at(&self, address: &str) -> bool {
        self.peers.values().any(|peer| peer.address == address)
    }

    fn count_peers(&self) {
        self.metrics.peers.set(self.peers.len() as f64);
        self.metrics.peer_bookings.set(self.peer_bookings() as f64);
    }
}
