//! The setting that selects the transfer paths of a worker.

use std::time::Duration;

/// The transfer paths that a worker may use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransferMode {
    /// Blocks move from device to device if both workers support this, otherwise over TCP.
    #[default]
    Auto,
    /// Blocks move over TCP only, through the memory of both hosts.
    Tcp,
    /// Blocks move over TCP, slowed down to the bandwidth of a simulated network.
    Simulated {
        /// The time that the simulated network needs for one block.
        block: Duration,
    },
}
