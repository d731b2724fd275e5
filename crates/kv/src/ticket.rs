//! The one-time right to write a prompt's blocks into another worker's memory.

use std::fmt;

/// The right to write the blocks of one reservation, for any process that presents the ticket. So a ticket is made from the system's randomness, is
/// known only to the worker that made it and the worker that received it, and is never logged: `Debug` hides it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket([u8; Ticket::BYTES]);

/// The bytes are not a ticket, because there are not [`Ticket::BYTES`] of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a ticket must have {} bytes; the sender must pass on the received ticket unchanged", Ticket::BYTES)]
pub struct InvalidTicket;

impl Ticket {
    /// The length of a ticket in bytes. Its 128 bits cannot be guessed.
    pub const BYTES: usize = 16;

    /// Creates a ticket from these bytes, which must be random except in tests.
    pub const fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Returns the bytes of the ticket, as they are sent on the wire.
    pub const fn as_bytes(&self) -> &[u8; Self::BYTES] {
        &self.0
    }
}

impl TryFrom<&[u8]> for Ticket {
    type Error = InvalidTicket;

    fn try_from(bytes: &[u8]) -> Result<Self, InvalidTicket> {
        bytes.try_into().map(Self).map_err(|_| InvalidTicket)
    }
}

impl fmt::Debug for Ticket {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str("Ticket(hidden)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_of_wrong_length_is_refused() {
        for bytes in [&[][..], &[7; 8], &[7; 15], &[7; 17]] {
            assert_eq!(Ticket::try_from(bytes), Err(InvalidTicket));
        }
        let ticket = Ticket::from_bytes([7; 16]);
        assert_eq!(Ticket::try_from(&ticket.as_bytes()[..]), Ok(ticket));
    }

    #[test]
    fn debug_output_hides_the_ticket() {
        assert_eq!(format!("{:?}", Ticket::from_bytes([0x5a; 16])), "Ticket(hidden)");
    }
}
