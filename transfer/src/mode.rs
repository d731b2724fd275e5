//! The transfer paths that a worker may use.

use std::time::Duration;

/// The transfer paths that a worker may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransferMode {
    /// From device to device if both workers support it, otherwise TCP.
    #[default]
    Auto,
    /// TCP only, through the memory of both hosts.
    Tcp,
    /// TCP, slowed down to the bandwidth of a simulated network.
    Simulated {
        /// The time that each block takes.
        block: Duration,
    },
}
