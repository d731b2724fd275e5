//! Limits the lines of one kind that a flood of events may write to the log.

use metrics::Counter;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tandem_proto::channel::OnRefused;
use tokio::time::Instant;

/// The limit of lines of one kind: by default 20 within 10 seconds.
#[derive(Debug)]
pub struct LogLimit {
    lines_max: u32,
    period: Duration,
    counts: Mutex<LineCounts>,
}

#[derive(Debug, Default)]
struct LineCounts {
    /// When the current period began; `None`: no line was ever written.
    since: Option<Instant>,
    lines: u32,
    left_out: u64,
}

impl Default for LogLimit {
    fn default() -> Self {
        Self::new(20, Duration::from_secs(10))
    }
}

impl LogLimit {
    /// Allows `lines_max` lines within each `period`.
    pub fn new(lines_max: u32, period: Duration) -> Self {
        Self { lines_max, period, counts: Mutex::default() }
    }

    /// Returns the number of lines that were left out since the last one, if another line may be written now; `None`: leave this one out, too.
    pub fn admit(&self) -> Option<u64> {
        let (mut counts, now) = (self.counts.lock(), Instant::now());
        if counts.since.is_none_or(|since| now - since >= self.period) {
            (counts.since, counts.lines) = (Some(now), 0);
        }
        if counts.lines == self.lines_max {
            counts.left_out += 1;
            return None;
        }
        counts.lines += 1;
        Some(std::mem::take(&mut counts.left_out))
    }
}

/// Returns a function that counts a gRPC call or connection which was refused because it lacks the key or a certificate of the cluster. Once a minute
/// it also writes a line to the log: the process that was refused may belong to this cluster.
pub fn on_refused(refused: Counter) -> OnRefused {
    let limit = LogLimit::new(1, Duration::from_secs(60));
    Arc::new(move || {
        refused.increment(1);
        if let Some(left_out) = limit.admit() {
            tracing::warn!(
                left_out,
                "a call was refused, because its process lacks the key or a certificate of this cluster; if it belongs to the cluster, give all \
                 processes the same --cluster-key-file, and certificates of one --cluster-ca"
            );
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn flood_of_lines_is_limited_and_counted() {
        let limit = LogLimit::new(3, Duration::from_secs(10));
        let written = || (0..1_000).filter_map(|_| limit.admit()).collect::<Vec<_>>();
        assert_eq!(written(), [0, 0, 0]);
        tokio::time::advance(Duration::from_secs(5)).await;
        assert!(written().is_empty());
        tokio::time::advance(Duration::from_secs(5)).await;
        assert_eq!(written(), [1_997, 0, 0], "each line that is left out is counted once");
    }
}
