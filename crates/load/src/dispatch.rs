//! Decides when the requests of a run are sent.

use crate::{plan::Planned, runner::RequestRunner};
use std::{sync::Arc, time::Duration};
use tokio::{
    sync::{Mutex, Semaphore, mpsc},
    task::{JoinError, JoinSet},
    time::sleep_until,
};

/// The requests of a run, in order.
pub(crate) struct RequestSource {
    /// The first request, which is ready before the clock starts.
    pub(crate) first: Option<Planned>,
    pub(crate) rest: mpsc::Receiver<Planned>,
}

impl RequestSource {
    async fn next(&mut self) -> Option<Planned> {
        match self.first.take() {
            Some(first) => Some(first),
            None => self.rest.recv().await,
        }
    }
}

/// Sends each request when it is due, whether or not earlier ones have ended. While `in_flight_max` requests are in flight, due requests wait
/// and are sent late. After `duration` no request is sent. Returns when all requests have ended.
pub(crate) async fn open_loop(
    runner: Arc<RequestRunner>,
    mut source: RequestSource,
    in_flight_max: usize,
    duration: Option<Duration>,
) {
    let slots = Arc::new(Semaphore::new(in_flight_max));
    let mut running = JoinSet::new();
    loop {
        let planned = tokio::select! {
            biased;
            () = runner.stop.cancelled() => break,
            planned = source.next() => planned,
        };
        let Some(Planned { at: Some(at), work }) = planned else { break };
        if duration.is_some_and(|duration| at >= duration) {
            break;
        }
        let free = async {
            sleep_until(runner.start + at).await;
            Arc::clone(&slots).acquire_owned().await
        };
        let slot = tokio::select! {
            biased;
            () = runner.stop.cancelled() => break,
            slot = free => slot,
        };
        if duration.is_some_and(|duration| runner.start.elapsed() >= duration) {
            break;
        }
        while let Some(ended) = running.try_join_next() {
            passed_on(ended);
        }
        let runner = Arc::clone(&runner);
        running.spawn(async move {
            runner.run(work, Some(at)).await;
            drop(slot);
        });
    }
    drop(source);
    finish(running).await;
}

/// Keeps `concurrency` requests or conversations in flight. Returns when all of them have ended. After `duration` no further request or
/// conversation is begun.
pub(crate) async fn closed_loop(
    runner: Arc<RequestRunner>,
    source: RequestSource,
    concurrency: usize,
    duration: Option<Duration>,
) {
    let source = Arc::new(Mutex::new(source));
    let mut running = JoinSet::new();
    for _ in 0..concurrency {
        let (runner, source) = (Arc::clone(&runner), Arc::clone(&source));
        running.spawn(async move {
            loop {
                let next = async { source.lock().await.next().await };
                let planned = tokio::select! {
                    biased;
                    () = runner.stop.cancelled() => return,
                    planned = next => planned,
                };
                let Some(planned) = planned else { return };
                if duration.is_some_and(|duration| runner.start.elapsed() >= duration) {
                    return;
                }
                runner.run(planned.work, None).await;
            }
        });
    }
    drop(source);
    finish(running).await;
}

async fn finish(mut running: JoinSet<()>) {
    while let Some(ended) = running.join_next().await {
        passed_on(ended);
    }
}

/// Panics if a request's task has panicked: such a panic is a bug, and must not look like a request that was never sent.
fn passed_on(ended: Result<(), JoinError>) {
    if let Err(error) = ended
        && error.is_panic()
    {
        std::panic::resume_unwind(error.into_panic());
    }
}
