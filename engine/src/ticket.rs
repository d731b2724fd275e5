//! How tickets are drawn, and why a write under one is refused.

use crate::mix;
use tandem_kv::Ticket;

/// Draws the next ticket.
pub(crate) type Draw = Box<dyn FnMut() -> Ticket + Send>;

/// Draws each ticket from the operating system's randomness, so that no ticket can be computed from others.
pub(crate) fn from_system() -> Draw {
    Box::new(|| {
        let mut bytes = [0; Ticket::BYTES];
        getrandom::fill(&mut bytes).expect("the operating system has randomness for every process that it has started");
        Ticket::from_bytes(bytes)
    })
}

/// Draws the same tickets for the same seed, so that a simulation can be repeated. The next ticket can be computed from the last one.
pub(crate) fn from_seed(seed: u64) -> Draw {
    let mut state = seed;
    Box::new(move || {
        state = state.wrapping_add(1);
        let halves = [mix(state), mix(!state)];
        let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        Ticket::try_from(&bytes[..]).expect("two halves of eight bytes are a ticket")
    })
}

/// Why blocks were not written. A refusal under the ticket of a reservation that still waits for blocks ends that reservation, and
/// drops the blocks that have landed for it: either the sender is faulty, or an attacker has the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// This worker does not remember the ticket: it was guessed, or was given out before the worker restarted.
    #[error("no reservation has this ticket")]
    UnknownTicket,
    /// All blocks are there, or the reservation was given up: its request was cancelled while blocks were on their way, for example.
    #[error("the ticket's reservation has ended")]
    SpentTicket,
    /// Ends the reservation: the block was written before, or is not one that the ticket names.
    #[error("the ticket does not name this block, or it was written before")]
    NotMissing,
    /// Ends the reservation.
    #[error("the block has another size than this worker's")]
    WrongSize,
    /// Ends the reservation: there is nothing that blocks could be copied from.
    #[error("the blocks do not come the way that the ticket names")]
    WrongPath,
    /// The engine has failed or is shut down.
    #[error("the engine is gone")]
    EngineGone,
}

impl WriteRefused {
    /// Each reason that is a fault of the write, by the name that metrics give it.
    pub const REASONS: [(Self, &str); 5] = [
        (Self::UnknownTicket, "unknown_ticket"),
        (Self::SpentTicket, "spent_ticket"),
        (Self::NotMissing, "not_missing"),
        (Self::WrongSize, "wrong_size"),
        (Self::WrongPath, "wrong_path"),
    ];

    /// Its name among [`WriteRefused::REASONS`]; `None` when the write was not at fault.
    pub fn reason(self) -> Option<&'static str> {
        Self::REASONS.into_iter().find_map(|(refused, reason)| (refused == self).then_some(reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn tickets_of_the_system_are_all_different() {
        let mut draw = from_system();
        let tickets: BTreeSet<Ticket> = (0..1_000).map(|_| draw()).collect();
        assert_eq!(tickets.len(), 1_000);
        // A counter's high bytes stay as they are, and a ticket of 64 bits would leave half of these.
        for place in 0..Ticket::BYTES {
            let values: BTreeSet<u8> = tickets.iter().map(|ticket| ticket.as_bytes()[place]).collect();
            assert!(values.len() > 200, "byte {place} has only {} values", values.len());
        }
    }

    #[test]
    fn tickets_of_a_seed_are_repeated() {
        let (mut one, mut same, mut other) = (from_seed(1), from_seed(1), from_seed(9));
        let (first, second) = (one(), one());
        assert!(first != second && [first, second] == [same(), same()] && first != other());
    }
}
