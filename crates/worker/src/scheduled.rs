//! Counts cached tokens: once for each prompt that a back end has scheduled, even if the prompt's client disconnects.

use crate::{Job, ScheduledPrompt, Worker, WorkerLedger, WorkerMetrics};
use std::{
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};
use tandem_engine::{CachedTokens, Event, KvHandle};
use tandem_kv::BlockAccess;
use tandem_process::Shutdown;
use tokio::time::timeout;

/// Time limit within which an external engine must report the cached tokens of a cancelled request.
const LATE_REPORT_MAX: Duration = Duration::from_secs(30);

/// A job whose prompt this worker prefills. It counts the prompt in the metrics and the ledger when the back end reports `Scheduled`.
///
/// An external engine reports `Scheduled` late. If the job is dropped earlier, it is cancelled, and its events are read in the background
/// until the report, so that the engine's count is not lost. If the engine reports no count, the ledger records the prompt without one.
pub struct CountedJob {
    job: Option<Box<dyn Job>>,
    count: Option<CountReport>,
    submitted: bool,
    /// Whether the engine gets the prompt only with [`Job::pull`].
    waits_for_pull: bool,
    shutdown: Shutdown,
}

struct CountReport {
    metrics: Arc<WorkerMetrics>,
    ledger: WorkerLedger,
    request_id: String,
    attempt: u32,
    model: String,
    account: String,
    prompt: u32,
}

impl CountedJob {
    /// Wraps a job so that its prompt is added to the metrics and the ledger of `worker`. The field `cached` of `prompt` is ignored.
    pub fn new(job: Box<dyn Job>, worker: &Worker, prompt: ScheduledPrompt<'_>) -> Self {
        let ScheduledPrompt { request_id, attempt, model, account, prompt, cached: _ } = prompt;
        let (metrics, ledger) = (Arc::clone(&worker.metrics), worker.ledger.clone());
        let (request_id, model, account) = (request_id.to_owned(), model.to_owned(), account.to_owned());
        let count = CountReport { metrics, ledger, request_id, attempt, model, account, prompt };
        let mut counted = Self::uncounted(job, worker);
        counted.count = Some(count);
        counted
    }

    /// Returns the next event; `None` after the last one. This method is cancel-safe.
    pub async fn next(&mut self) -> Option<Event> {
        (self as &mut dyn Job).next().await
    }

    /// Wraps a job whose prompt is added neither to the metrics nor to the ledger, because another job has counted it.
    pub fn uncounted(job: Box<dyn Job>, worker: &Worker) -> Self {
        Self { job: Some(job), count: None, submitted: false, waits_for_pull: false, shutdown: worker.shutdown.clone() }
    }

    /// Returns this job, whose engine gets the prompt only with [`Job::pull`]. Before that, no prompt is counted.
    #[must_use]
    pub fn counted_from_pull(mut self) -> Self {
        self.waits_for_pull = true;
        self
    }

    fn job(&mut self) -> &mut dyn Job {
        &mut **self.job.as_mut().expect("only Drop takes the job")
    }
}

impl CountReport {
    fn record(self, cached: Option<CachedTokens>) {
        let Self { metrics, ledger, request_id, attempt, model, account, prompt } = self;
        if let Some(cached) = cached {
            metrics.observe_scheduled(prompt, cached);
        }
        ledger.scheduled(ScheduledPrompt { request_id: &request_id, attempt, model: &model, account: &account, prompt, cached });
    }
}

#[tonic::async_trait]
impl Job for CountedJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        let event = ready!(self.job().poll_next(context));
        match &event {
            Some(Event::Submitted) => self.submitted = !self.waits_for_pull,
            Some(Event::Scheduled { cached }) => {
                if let Some(count) = self.count.take() {
                    count.record(*cached);
                }
            }
            _ => {}
        }
        Poll::Ready(event)
    }

    async fn send_blocks(&mut self, block_indices: Vec<u32>, access: BlockAccess) {
        self.job().send_blocks(block_indices, access).await;
    }

    async fn pull(&mut self, handle: KvHandle) {
        self.submitted = true;
        self.job().pull(handle).await;
    }

    fn cancel(&mut self) {
        self.job().cancel();
    }
}

impl Drop for CountedJob {
    fn drop(&mut self) {
        let (Some(mut job), Some(count)) = (self.job.take(), self.count.take().filter(|_| self.submitted)) else { return };
        let shutdown = self.shutdown.clone();
        job.cancel();
        let reading = async move {
            let reported = async {
                loop {
                    match job.next().await {
                        Some(Event::Scheduled { cached }) => return cached,
                        Some(_) => {}
                        None => return None,
                    }
                }
            };
            count.record(timeout(LATE_REPORT_MAX, reported).await.ok().flatten());
        };
        shutdown.spawn(reading);
    }
}
