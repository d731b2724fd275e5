//! The wall clock. It is used only for times that people or other processes read.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Returns the time since 1970; 0 if the clock shows an earlier date.
pub(crate) fn unix_time() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

pub(crate) fn unix_ms() -> u64 {
    u64::try_from(unix_time().as_millis()).unwrap_or(u64::MAX)
}

/// Returns the time in UTC, in the format of RFC 3339, with milliseconds.
pub(crate) fn timestamp() -> String {
    jiff::Timestamp::now().strftime("%FT%T.%3fZ").to_string()
}
