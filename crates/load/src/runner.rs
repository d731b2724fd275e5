//! Sends requests and reads their answers.

use crate::{
    http::Http,
    plan::{PlannedStep, PlannedWork},
    report::{Expected, Failure, FailureClass, RequestOutcome},
    request::{BodyFields, PreparedRequest},
    stream::{self, WantedParts},
};
use serde_json::{Value, json};
use std::{
    error::Error,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tandem_client::HttpError;
use tokio::{sync::mpsc, time::Instant};
use tokio_util::sync::CancellationToken;

/// The settings and state that all requests of a run share.
#[derive(Debug)]
pub(crate) struct RequestRunner {
    pub(crate) http: Http,
    pub(crate) bodies: BodyFields,
    /// The parts of an answer that are read in addition to its times.
    pub(crate) wanted: WantedParts,
    /// The time limit for a complete answer.
    pub(crate) timeout: Duration,
    pub(crate) start: Instant,
    /// When this token is cancelled, the run ends and requests in flight are aborted.
    pub(crate) stop: CancellationToken,
    pub(crate) outcomes: mpsc::Sender<RequestOutcome>,
    /// The number of requests that were not sent because an earlier request of their conversation failed.
    pub(crate) skipped: AtomicU64,
}

impl RequestRunner {
    /// Sends a request or all requests of a conversation, and reports each outcome. `due` is the time at which it should be sent, from the
    /// beginning of the run; `None`: now.
    pub(crate) async fn run(&self, work: PlannedWork, due: Option<Duration>) {
        match work {
            PlannedWork::Request { request, expected } => drop(self.send(request, due, expected, &self.wanted).await),
            PlannedWork::Conversation { steps, tools } => self.converse(steps, tools.as_ref(), due).await,
        }
    }

    /// Sends the requests of a conversation, each with all answers received so far. A request is due when the answer before it is complete.
    async fn converse(&self, steps: Vec<PlannedStep>, tools: Option<&Value>, mut due: Option<Duration>) {
        let (mut messages, mut rest) = (Vec::new(), steps.len() as u64);
        let with_text = WantedParts { text: true, ..self.wanted.clone() };
        for step in steps {
            messages.extend(step.messages);
            let request = self.bodies.next(&messages, tools, step.answer_tokens);
            rest -= 1;
            let Some(text) = self.send(request, due.take(), Expected::default(), &with_text).await else {
                self.skipped.fetch_add(rest, Ordering::Relaxed);
                return;
            };
            messages.push(json!({ "role": "assistant", "content": text }));
        }
    }

    /// Sends one request. Returns the text of a complete answer, which is empty unless it is wanted.
    async fn send(
        &self,
        request: PreparedRequest,
        due: Option<Duration>,
        expected: Expected,
        wanted: &WantedParts,
    ) -> Option<String> {
        let sent = self.start.elapsed();
        let answering = async {
            let response = self.http.post(request.path, request.body).await.map_err(|error| Failure::of(&error))?;
            stream::read(response, self.start, wanted).await
        };
        let received = tokio::select! {
            received = tokio::time::timeout(self.timeout, answering) => received.unwrap_or_else(|_| {
                let message = format!("the answer was not complete within {} s", self.timeout.as_secs_f64());
                Err(Failure { class: FailureClass::Timeout, message })
            }),
            () = self.stop.cancelled() => Err(Failure { class: FailureClass::Stopped, message: "the run was stopped".to_owned() }),
        };
        let ended = self.start.elapsed();
        let (result, text) = match received {
            Ok(received) => (Ok(received.answer), Some(received.text)),
            Err(failure) => (Err(failure), None),
        };
        let outcome = RequestOutcome { due: due.unwrap_or(sent), sent, ended, expected, result };
        // Sending fails only after the run has ended, when no task receives outcomes.
        let _ = self.outcomes.send(outcome).await;
        text
    }
}

impl Failure {
    /// Returns the failure of a request that received no response. The message contains the whole chain of causes.
    pub(crate) fn of(error: &HttpError) -> Self {
        let (mut message, mut reason) = (error.to_string(), error.source());
        while let Some(error) = reason {
            message += &format!(": {error}");
            reason = error.source();
        }
        Self { class: FailureClass::Connection, message }
    }
}
