//! The choice of transfer paths that an operator leaves to a worker.

use std::time::Duration;

/// Which transfer paths a worker may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransferMode {
    /// From device to device where both workers can, otherwise TCP.
    #[default]
    Auto,
    /// TCP only, through the memory of both hosts.
    Tcp,
    /// TCP, slowed down to the bandwidth of a simulated network.
    Simulated {
        /// How long each block takes.
        block: Duration,
    },
}
