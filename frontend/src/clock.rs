//! The wall clock, for times that people and other processes read.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns the time since 1970; 0 if the clock shows an earlier date.
pub(crate) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

/// Returns the milliseconds since 1970.
pub(crate) fn unix_ms() -> u64 {
    u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX)
}
