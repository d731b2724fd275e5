//! Who may come in: a bounded number of prompts runs at a time, and what is taken for a request is given back with it.

use crate::{
    error::ApiError,
    metrics::{Endpoint, FrontendMetrics},
};
use axum::http::StatusCode;
use std::sync::Arc;
use tandem_node::{Shutdown, trace::Span};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::Instant,
};
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

/// The door. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Admission {
    permits: Arc<Semaphore>,
    running: TaskTracker,
    shutdown: Shutdown,
    metrics: Arc<FrontendMetrics>,
}

/// A request that was let in. Dropping it gives back its permits and its place in `inflight`; if it was not finished before,
/// the client has gone, and it counts as cancelled.
pub(crate) struct Admitted {
    endpoint: Endpoint,
    /// Whether the request names a model that is served.
    model_known: bool,
    since: Instant,
    finished: bool,
    permits: OwnedSemaphorePermit,
    semaphore: Arc<Semaphore>,
    metrics: Arc<FrontendMetrics>,
    span: Span,
    _running: TaskTrackerToken,
}

impl Admission {
    pub(crate) fn new(prompts_max: usize, shutdown: Shutdown, metrics: Arc<FrontendMetrics>) -> Self {
        let permits = Arc::new(Semaphore::new(prompts_max.min(Semaphore::MAX_PERMITS)));
        Self { permits, running: TaskTracker::new(), shutdown, metrics }
    }

    /// Lets a request in, or refuses it at once: nothing waits here.
    pub(crate) fn enter(&self, endpoint: Endpoint) -> Result<Admitted, ApiError> {
        let refuse = |error: ApiError| {
            self.metrics.refused(endpoint, error.status());
            Err(error)
        };
        if self.shutdown.is_draining() {
            return refuse(ApiError::Draining);
        }
        let Ok(permits) = Arc::clone(&self.permits).try_acquire_owned() else { return refuse(ApiError::Overloaded) };
        self.metrics.inflight_requests.increment(1.0);
        Ok(Admitted {
            endpoint,
            model_known: false,
            since: Instant::now(),
            finished: false,
            permits,
            semaphore: Arc::clone(&self.permits),
            metrics: Arc::clone(&self.metrics),
            span: Span::default(),
            _running: self.running.token(),
        })
    }

    /// Resolves when the process drains and every request that was let in has ended.
    pub(crate) async fn drained(self) {
        self.shutdown.draining().await;
        self.running.close();
        self.running.wait().await;
    }

    /// Resolves when what still runs is to be given up.
    pub(crate) async fn stopped(&self) {
        self.shutdown.stopped().await;
    }

    /// Whether new requests are refused.
    pub(crate) fn is_draining(&self) -> bool {
        self.shutdown.is_draining()
    }
}

impl Admitted {
    /// When the request came.
    pub(crate) fn since(&self) -> Instant {
        self.since
    }

    /// What it asks.
    pub(crate) fn endpoint(&self) -> Endpoint {
        self.endpoint
    }

    /// The request's end is to be seen in its trace.
    pub(crate) fn trace(&mut self, span: &Span) {
        self.span = span.clone();
    }

    /// The request is for the served model.
    pub(crate) fn model_is_known(&mut self) {
        self.model_known = true;
    }

    /// The request turned out to hold this many prompts, and each counts.
    pub(crate) fn widen(&mut self, prompts: usize) -> Result<(), ApiError> {
        let more = u32::try_from(prompts.saturating_sub(1)).map_err(|_| ApiError::Overloaded)?;
        let more = Arc::clone(&self.semaphore).try_acquire_many_owned(more).map_err(|_| ApiError::Overloaded)?;
        self.permits.merge(more);
        Ok(())
    }

    /// The request has its reply, whole.
    pub(crate) fn finish(&mut self, status: StatusCode) {
        self.finished = true;
        self.span.set("http.response.status_code", u32::from(status.as_u16()));
        if status.is_server_error() {
            self.span.fail("server_error");
        }
        self.metrics.finished(self.endpoint, self.model_known, status, self.since.elapsed());
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        self.metrics.inflight_requests.decrement(1.0);
        if !self.finished {
            self.span.fail("cancelled");
            self.metrics.cancelled(self.endpoint, self.model_known);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_node::Metrics;

    fn admission(prompts_max: usize) -> (Admission, Metrics, Shutdown) {
        let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
        let frontend = Arc::new(FrontendMetrics::new(&metrics, "m"));
        (Admission::new(prompts_max, shutdown.clone(), frontend), metrics, shutdown)
    }

    #[tokio::test]
    async fn each_prompt_takes_a_place_and_gives_it_back() {
        let (admission, metrics, _shutdown) = admission(3);
        let mut batch = admission.enter(Endpoint::Completions).expect("there is room");
        batch.widen(3).expect("there is room for three");
        assert!(matches!(admission.enter(Endpoint::Chat), Err(ApiError::Overloaded)));
        drop(batch);
        let mut batch = admission.enter(Endpoint::Completions).expect("all places are back");
        assert!(matches!(batch.widen(4), Err(ApiError::Overloaded)));
        batch.finish(StatusCode::SERVICE_UNAVAILABLE);
        drop(batch);
        let text = metrics.render();
        assert!(text.contains("tandem_frontend_inflight_requests 0"), "{text}");
        assert!(text.contains("tandem_frontend_cancelled_total 1"), "{text}");
    }

    #[tokio::test(start_paused = true)]
    async fn draining_refuses_and_waits_for_what_runs() {
        let (admission, _metrics, shutdown) = admission(3);
        let running = admission.enter(Endpoint::Chat).expect("there is room");
        shutdown.run(std::time::Duration::ZERO).await;
        assert!(matches!(admission.enter(Endpoint::Chat), Err(ApiError::Draining)));
        let mut drained = Box::pin(admission.clone().drained());
        assert!(futures::poll!(&mut drained).is_pending());
        drop(running);
        drained.await;
    }
}
