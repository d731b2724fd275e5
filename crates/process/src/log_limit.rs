//! Limits the lines of one kind that a flood of events may write to the log.

use metrics::Counter;
use parking_lot::Mutex;
use std::{sync::Arc, time::Duration};
use tandem_proto::channel::OnRefused;
use tokio::time::Instant;

/// A limit on the log lines of one kind: by default, 20 lines within 10 seconds.
#[derive(Debug)]
pub struct LogLimit {
    lines_max: u32,
    period: Duration,
    counts: Mutex<LineCounts>,
}

#[derive(Debug, Default)]
struct LineCounts {
    /// The beginning of the current period; `None` if no line was written yet.
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

    /// If another line may be written now, returns the number of lines that were omitted since the last written line. Otherwise returns
    /// `None`: the caller must omit this line, too.
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

/// Returns a function that counts a refused gRPC call or connection: without the cluster's key or a valid certificate, or with a certificate
/// whose role does not allow the call. At most once a minute it also logs a line, because the refused process may be one of this cluster with
/// wrong settings.
pub fn on_refused(refused: Counter) -> OnRefused {
    let limit = LogLimit::new(1, Duration::from_secs(60));
    Arc::new(move || {
        refused.increment(1);
        if let Some(left_out) = limit.admit() {
            tracing::warn!(
                left_out,
                "a call or connection was refused: the other process lacks this cluster's key or a certificate of its CA, or its certificate's \
                 role does not allow the call; if it belongs to the cluster, check its --cluster-key-file, --cluster-ca and --cluster-cert"
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
