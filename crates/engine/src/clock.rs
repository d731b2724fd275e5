//! The clock of simulated devices.

use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

/// The simulated duration of steps for which the engine's thread still has to sleep. Clones share it.
#[derive(Clone, Default)]
pub struct SimClock(Arc<AtomicU64>);

impl SimClock {
    /// Adds a duration to the simulated duration of the step that runs now.
    pub fn add(&self, duration: Duration) {
        self.0.fetch_add(duration.as_nanos() as u64, Relaxed);
    }

    /// Returns the duration that has been added since the last call; `None` if it is zero.
    pub fn take(&self) -> Option<Duration> {
        Some(Duration::from_nanos(self.0.swap(0, Relaxed))).filter(|duration| !duration.is_zero())
    }
}
