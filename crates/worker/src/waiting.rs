//! The wait for the first event of a job that is queued in a back end.

use crate::{Backend, Disconnected};
use std::{pin::pin, time::Duration};
use tokio::time::{Instant, timeout_at};

/// The longest time between two reports of a waiting request to its frontend while the back end makes progress. The frontend tries another
/// worker after a multiple of this time.
const REPORT_INTERVAL: Duration = Duration::from_secs(5);

/// Waits for `first`, the first event of a job of this back end. While the back end makes progress, calls `report` every few seconds, so that the
/// client continues to wait. Returns `None` if the back end makes no progress for `limit` (`None` sets no limit).
///
/// # Errors
/// Fails if `report` fails.
pub async fn first_event<T, R>(
    backend: &dyn Backend,
    limit: Option<Duration>,
    first: impl Future<Output = T>,
    report: impl Fn() -> R,
) -> Result<Option<T>, Disconnected>
where
    R: Future<Output = Result<(), Disconnected>>,
{
    event_in_time(|| backend.busy_since(), limit, first, report).await
}

async fn event_in_time<T, R>(
    busy_since: impl Fn() -> Option<Instant>,
    limit: Option<Duration>,
    first: impl Future<Output = T>,
    report: impl Fn() -> R,
) -> Result<Option<T>, Disconnected>
where
    R: Future<Output = Result<(), Disconnected>>,
{
    let mut first = pin!(first);
    let interval = limit.map_or(REPORT_INTERVAL, |limit| limit.min(REPORT_INTERVAL));
    let mut progressed = Instant::now();
    loop {
        let report_at = Instant::now() + interval;
        if let Ok(event) = timeout_at(report_at, &mut first).await {
            return Ok(Some(event));
        }
        let now = Instant::now();
        if busy_since().is_none_or(|since| now.duration_since(since) < interval) {
            progressed = now;
            report().await?;
        } else if limit.is_some_and(|limit| now.duration_since(progressed) >= limit) {
            return Ok(None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        future::{pending, ready},
        sync::atomic::{AtomicU32, Ordering::Relaxed},
    };
    use tokio::time::sleep;

    const LIMIT: Option<Duration> = Some(Duration::from_secs(30));

    /// Waits for `first` while the steps of the back end began at `busy_since`. Returns the result and the number of reports.
    async fn waited(first: impl Future<Output = u8>, busy_since: impl Fn() -> Option<Instant>) -> (Option<u8>, u32) {
        let reports = AtomicU32::new(0);
        let report = || {
            reports.fetch_add(1, Relaxed);
            ready(Ok(()))
        };
        let first = event_in_time(busy_since, LIMIT, first, report).await.expect("the client is connected");
        (first, reports.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn job_waits_without_a_limit_while_steps_end() {
        let first = async {
            sleep(Duration::from_secs(301)).await;
            7
        };
        // Each step takes four seconds.
        let start = Instant::now();
        let step_began = || Some(start + Duration::from_secs(start.elapsed().as_secs() / 4 * 4));
        assert_eq!(waited(first, step_began).await, (Some(7), 60));
    }

    #[tokio::test(start_paused = true)]
    async fn wait_for_a_job_ends_in_time_if_the_engine_hangs_in_a_step() {
        let hangs_since = Instant::now() + Duration::from_secs(10);
        let (first, reports) = waited(pending(), || (Instant::now() >= hangs_since).then_some(hangs_since)).await;
        assert_eq!((first, reports), (None, 2), "it is reported twice that the job waits");
        assert_eq!(hangs_since.elapsed(), LIMIT.expect("there is a limit"));
    }
}
