//! Implements `Debug` for messages that contain a ticket or a handle, so that these secrets are not printed.

use crate::v1::{KvHandle, NcclControlRequest, PushRequest, Ticket};
use std::fmt::{Debug, Formatter, Result};

impl Debug for Ticket {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        let Self { ticket: _, address, missing_blocks, path: _, communicator: _, address_signature: _, wants_ipc_handle: _ } =
            self;
        let mut output = formatter.debug_struct("Ticket");
        output.field("address", address).field("missing_blocks", &missing_blocks.len()).field("path", &self.path());
        output.finish_non_exhaustive()
    }
}

impl Debug for KvHandle {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        let Self { handle: _, prompt_digest: _, valid_ms } = self;
        formatter.debug_struct("KvHandle").field("valid_ms", valid_ms).finish_non_exhaustive()
    }
}

impl Debug for PushRequest {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        let Self { ticket: _, block_index, payload, ready_blocks } = self;
        let mut output = formatter.debug_struct("PushRequest");
        output.field("block_index", block_index).field("payload_bytes", &payload.len()).field("ready_blocks", ready_blocks);
        output.finish_non_exhaustive()
    }
}

impl Debug for NcclControlRequest {
    fn fmt(&self, formatter: &mut Formatter<'_>) -> Result {
        let Self { communicator: _, ticket: _, block_indices } = self;
        formatter.debug_struct("NcclControlRequest").field("block_indices", block_indices).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn debug_output_hides_the_secret_of_a_ticket() {
        let secret = vec![0xab; 16];
        let ticket = Ticket { ticket: secret.clone(), communicator: secret.clone(), ..Ticket::default() };
        let push = PushRequest { ticket: secret.clone(), payload: secret.clone().into(), ..PushRequest::default() };
        let control = NcclControlRequest { ticket: secret.clone(), communicator: secret, ..NcclControlRequest::default() };
        for printed in [format!("{ticket:?}"), format!("{push:?}"), format!("{control:?}")] {
            assert!(!printed.contains("171") && !printed.contains("ab, ab"), "{printed}");
        }
    }
}
