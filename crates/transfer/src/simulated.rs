//! The simulated path: the host path at the bandwidth of a simulated network.

use crate::{Progress, SendPath, TransferError};
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tandem_kv::{BlockAccess, ReadyBlock};
use tokio::time::Instant;

/// The resolution of the runtime's timers.
const TICK: Duration = Duration::from_millis(1);

/// The network interface of one worker: the blocks of all its transfers pass through it one after another.
#[derive(Debug)]
pub struct SimulatedNetwork {
    /// The time that each block takes on the network; may be zero.
    block: Duration,
    idle_from: Mutex<Option<Instant>>,
}

impl SimulatedNetwork {
    /// Makes a network on which each block takes the time `block`.
    pub fn new(block: Duration) -> Self {
        Self { block, idle_from: Mutex::default() }
    }

    /// Waits until one more block has passed, or until up to one [`TICK`] before that; [`SimulatedNetwork::settle`] waits for the remaining
    /// time.
    async fn pass(&self) {
        if self.block.is_zero() {
            return;
        }
        let now = Instant::now();
        let passed = {
            let mut idle_from = self.idle_from.lock();
            let passed = idle_from.map_or(now, |idle_from| idle_from.max(now)) + self.block;
            *idle_from = Some(passed);
            passed
        };
        // A timer may be late by a tick. Because it is set a tick early, the network is never idle between two blocks.
        if passed - now > TICK {
            tokio::time::sleep_until(passed - TICK).await;
        }
    }

    /// Returns when all blocks sent so far have passed.
    async fn settle(&self) {
        let idle_from = *self.idle_from.lock();
        if let Some(idle_from) = idle_from {
            tokio::time::sleep_until(idle_from).await;
        }
    }
}

/// A path that is slowed down to the bandwidth of a simulated network.
pub struct SimulatedPath {
    inner: Box<dyn SendPath>,
    network: Arc<SimulatedNetwork>,
}

impl SimulatedPath {
    /// Makes a path that sends blocks over `inner` after they have passed the network.
    pub fn new(inner: Box<dyn SendPath>, network: Arc<SimulatedNetwork>) -> Self {
        Self { inner, network }
    }
}

#[tonic::async_trait]
impl SendPath for SimulatedPath {
    fn label(&self) -> &'static str {
        self.inner.label()
    }

    fn access(&self) -> BlockAccess {
        self.inner.access()
    }

    async fn send(&mut self, blocks: Vec<ReadyBlock>) -> Result<Progress, TransferError> {
        for block in blocks {
            self.network.pass().await;
            self.inner.send(vec![block]).await?;
        }
        Ok(Progress::Sent)
    }

    async fn interrupted(&mut self) -> TransferError {
        self.inner.interrupted().await
    }

    async fn finish(self: Box<Self>) -> Result<(), TransferError> {
        self.network.settle().await;
        self.inner.finish().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn concurrent_transfers_share_the_bandwidth() {
        let network = SimulatedNetwork::new(Duration::from_micros(210));
        let started = Instant::now();
        let transfer = || async {
            for _ in 0..500 {
                network.pass().await;
            }
            network.settle().await;
        };
        tokio::join!(transfer(), transfer());
        let elapsed = started.elapsed();
        assert!((Duration::from_millis(210)..Duration::from_millis(215)).contains(&elapsed), "{elapsed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn block_takes_its_full_time_after_an_idle_network_and_no_time_at_infinite_bandwidth() {
        let network = SimulatedNetwork::new(Duration::from_millis(5));
        network.pass().await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        let started = Instant::now();
        network.pass().await;
        network.settle().await;
        assert_eq!(started.elapsed(), Duration::from_millis(5));
        let started = Instant::now();
        let infinite = SimulatedNetwork::new(Duration::ZERO);
        infinite.pass().await;
        infinite.settle().await;
        assert_eq!(started.elapsed(), Duration::ZERO);
    }
}
