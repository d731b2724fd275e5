//! Generates tickets, and names the reasons for which a write under a ticket is refused.

use tandem_kv::{Ticket, mix};

pub(crate) type Draw = Box<dyn FnMut() -> Ticket + Send>;

/// Returns a function that takes each ticket from the operating system's randomness (a CSPRNG), so that no ticket can be computed from
/// others.
pub(crate) fn from_system() -> Draw {
    Box::new(|| {
        let mut bytes = [0; Ticket::BYTES];
        getrandom::fill(&mut bytes).expect("the operating system has randomness for every process that it has started");
        Ticket::from_bytes(bytes)
    })
}

/// Returns the number of a new room from the operating system's randomness. It has 62 bits, as many as SGLang's own router uses, because engines
/// read it as a signed number.
pub fn new_room() -> u64 {
    let mut bytes = [0; 8];
    getrandom::fill(&mut bytes).expect("the operating system has randomness for every process that it has started");
    u64::from_le_bytes(bytes) >> 2
}

/// Returns a function that generates the same tickets for the same seed, so that a simulation can be repeated. Each ticket can be computed from the
/// one before it.
pub(crate) fn from_seed(seed: u64) -> Draw {
    let mut state = seed;
    Box::new(move || {
        state = state.wrapping_add(1);
        let halves = [mix(state), mix(!state)];
        let bytes: Vec<u8> = halves.iter().flat_map(|half| half.to_le_bytes()).collect();
        Ticket::try_from(&bytes[..]).expect("two halves of eight bytes are a ticket")
    })
}

/// The reason for which a write is refused. If the reservation of the write's ticket still waits for blocks, the refusal ends the
/// reservation and drops the blocks written so far: either the sender is faulty, or an attacker has the ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WriteRefused {
    /// This worker does not know the ticket: it was guessed, or was issued before the worker restarted.
    #[error("no reservation has this ticket")]
    UnknownTicket,
    /// The reservation is complete or was cancelled, for example because its request was cancelled while blocks were in flight.
    #[error("the ticket's reservation has ended")]
    SpentTicket,
    /// The block was written before, or the ticket does not name it. This refusal ends the reservation.
    #[error("this block is not named by the ticket, or was written before")]
    NotMissing,
    /// The block does not have this worker's block size. This refusal ends the reservation.
    #[error("the block has another size than this worker's blocks")]
    WrongSize,
    /// The sender announced blocks in its memory, but the ticket does not name a path on which they can be copied. This refusal ends the
    /// reservation.
    #[error("the ticket names no transfer path on which the announced blocks can be copied")]
    WrongPath,
    /// The engine has ended.
    #[error("the engine has ended")]
    EngineEnded,
}

impl WriteRefused {
    /// The reasons that are caused by the write itself, each with its label in metrics.
    pub const REASONS: [(Self, &str); 5] = [
        (Self::UnknownTicket, "unknown_ticket"),
        (Self::SpentTicket, "spent_ticket"),
        (Self::NotMissing, "not_missing"),
        (Self::WrongSize, "wrong_size"),
        (Self::WrongPath, "wrong_path"),
    ];

    /// Returns the label of this refusal in [`WriteRefused::REASONS`]; `None` if the write itself did not cause the refusal.
    pub fn reason(self) -> Option<&'static str> {
        Self::REASONS.into_iter().find_map(|(refused, reason)| (refused == self).then_some(reason))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn system_tickets_are_unique_and_random_in_every_byte() {
        let mut draw = from_system();
        let tickets: BTreeSet<Ticket> = (0..1_000).map(|_| draw()).collect();
        assert_eq!(tickets.len(), 1_000);
        // The high bytes of a counter would never change, and a ticket of 64 random bits would have constant bytes.
        for place in 0..Ticket::BYTES {
            let values: BTreeSet<u8> = tickets.iter().map(|ticket| ticket.as_bytes()[place]).collect();
            assert!(values.len() > 200, "byte {place} has only {} values", values.len());
        }
    }

    #[test]
    fn equal_seeds_give_equal_tickets() {
        let (mut one, mut same, mut other) = (from_seed(1), from_seed(1), from_seed(9));
        let (first, second) = (one(), one());
        assert!(first != second && [first, second] == [same(), same()] && first != other());
    }
}
