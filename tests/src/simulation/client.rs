//! A client that sends each request over a new connection of the simulated network.

use super::{
    network::{Name, SimulatedNetwork},
    oracle::Expected,
    plan::{CLIENT, RequestSpec},
};
use crate::Answer;
use futures::future::join;
use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http1::handshake};
use hyper_util::rt::TokioIo;
use std::time::Duration;
use tandem::audit::ClientLine;
use tokio::time::{Instant, timeout};

/// The codes of errors that faults may cause.
const CAUSED_BY_FAULTS: [&str; 9] = [
    "no_worker",
    "no_router",
    "router_starting",
    "router_draining",
    "router_unreachable",
    "attempts_exhausted",
    "first_token_timeout",
    "worker_lost",
    "request_ends_workers",
];
/// The code of the error with which a frontend ends the requests that outlive its grace period.
const DRAINING: &str = "draining";

#[derive(Default)]
pub(super) struct Outcome {
    pub(super) status: Option<u16>,
    request_id: Option<String>,
    /// The response's header `retry-after`, in seconds.
    pub(super) retry_after: Option<u64>,
    /// Time from the request to the first event of a stream.
    pub(super) first_event: Option<Duration>,
    streamed: bool,
    body: Vec<u8>,
    pub(super) end: End,
}

/// How the request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    /// The client disconnected before the end of the response.
    #[default]
    ClientLeft,
    ConnectionBroke,
    Complete,
}

/// The kinds of failure that the simulated faults can explain. Only these are allowed.
#[derive(Clone, Copy)]
pub(super) struct Allowed {
    /// Whether errors in [`CAUSED_BY_FAULTS`] are allowed.
    pub(super) errors: bool,
    /// Whether broken connections are allowed.
    pub(super) broken: bool,
    /// Whether the frontend may have refused the connection because it drains, or ended the request with its grace period.
    pub(super) draining: bool,
}

/// Sends the request and reads its response, until the response ends or the client disconnects.
pub(super) async fn send(network: SimulatedNetwork, frontend: Name, spec: RequestSpec) -> Outcome {
    let mut outcome = Outcome::default();
    let exchange = async {
        let exchanged = exchange(&network, &frontend, &spec, &mut outcome).await;
        outcome.end = if exchanged.is_ok() { End::Complete } else { End::ConnectionBroke };
    };
    match spec.disconnect_after {
        Some(time) => drop(timeout(time, exchange).await),
        None => exchange.await,
    }
    outcome
}

async fn exchange(network: &SimulatedNetwork, frontend: &Name, spec: &RequestSpec, outcome: &mut Outcome) -> anyhow::Result<()> {
    let sent = Instant::now();
    let dial = network.dial_from(&CLIENT.into());
    let io = dial(&format!("{frontend}:80")).await?;
    let (mut sender, connection) = handshake(TokioIo::new(io)).await?;
    let exchange = async move {
        let request = Request::post("/v1/completions").header("host", &**frontend).header("content-type", "application/json");
        let request = request.header("x-tandem-details", "true");
        let response = sender.send_request(request.body(Full::new(Bytes::from(spec.body().to_string())))?).await?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        outcome.status = Some(response.status().as_u16());
        outcome.request_id = header("x-request-id");
        outcome.retry_after = header("retry-after").and_then(|seconds| seconds.parse().ok());
        outcome.streamed = header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            if let Some(data) = frame?.data_ref() {
                // A comment only keeps the connection open.
                if outcome.streamed && outcome.first_event.is_none() && data.starts_with(b"data: ") {
                    outcome.first_event = Some(sent.elapsed());
                }
                outcome.body.extend_from_slice(data);
            }
        }
        anyhow::Ok(())
    };
    // If the connection fails, the exchange of request and response fails, too, so the connection's result is not needed.
    join(exchange, connection).await.0
}

impl Outcome {
    /// Returns the status of the response, or of the refusal with which a stream ended, and the number of seconds after which the client
    /// may try again.
    pub(super) fn verdict(&self) -> (Option<u16>, Option<u64>) {
        let answer = self.answer().ok().filter(|_| self.streamed);
        let refused = answer.and_then(|answer| answer.frames.into_iter().find(|frame| frame["error"]["code"] == "overloaded"));
        refused.map_or((self.status, self.retry_after), |frame| (Some(503), frame["error"]["retry_after"].as_u64()))
    }

    /// Returns a line for the log: the end, the status and the size of the response.
    pub(super) fn summary(&self) -> String {
        format!("{:?}, status {:?}, {} bytes", self.end, self.status, self.body.len())
    }

    /// Returns the request and the usage that its client received, as input of the audit.
    pub(super) fn line(&self) -> ClientLine {
        let usage = self.answer().ok().filter(|_| self.end == End::Complete).and_then(|answer| answer.reported_usage(1));
        ClientLine { request_id: self.request_id.clone(), usage }
    }

    fn answer(&self) -> anyhow::Result<Answer> {
        let text = str::from_utf8(&self.body)?;
        // The last event of a broken stream may be incomplete.
        let whole = if self.streamed { text.rfind("\n\n").map_or("", |end| &text[..end + 2]) } else { text };
        Answer::read(self.status.unwrap_or(0), self.streamed, whole)
    }

    /// Checks the response against the expected answer and the allowed failures. The error describes the first violation.
    pub(super) fn check(&self, spec: &RequestSpec, expected: &Expected, allowed: Allowed) -> Result<(), String> {
        let retryable = |error: &serde_json::Value| {
            let code = error["code"].as_str().unwrap_or_default();
            let fits = (allowed.errors && CAUSED_BY_FAULTS.contains(&code)) || (allowed.draining && code == DRAINING);
            if fits && error["type"] == "server_error" { Ok(()) } else { Err(format!("no fault explains this error: {error}")) }
        };
        let status = match (self.end, self.status) {
            // A frontend that drains closes its socket.
            (End::ConnectionBroke, None) if allowed.draining => return Ok(()),
            (End::ConnectionBroke, _) if !allowed.broken => {
                return Err("the client's connection broke without a fault".to_owned());
            }
            (End::ClientLeft | End::ConnectionBroke, None) => return Ok(()),
            (_, None) => return Err("the response has no status".to_owned()),
            (_, Some(status)) => status,
        };
        if self.end != End::Complete && !self.streamed {
            return Ok(());
        }
        let answer = self.answer().map_err(|error| format!("{error:#}"))?;
        if status != 200 {
            // Only a request that must not be sent again has status 500.
            if !matches!((status, self.retry_after), (503 | 504, Some(_)) | (500, None)) {
                return Err(format!("status {status}, retry-after: {:?}: {:?}", self.retry_after, answer.frames));
            }
            return retryable(&answer.last()["error"]);
        }
        let error = answer.frames.iter().find_map(|frame| frame.get("error"));
        for (index, choice) in (0..).zip(&expected.choices) {
            let text = answer.text(index);
            let finish = answer.frames.iter().flat_map(|frame| frame["choices"].as_array().into_iter().flatten());
            let finish = finish.filter(|choice| choice["index"] == index).find_map(|choice| choice["finish_reason"].as_str());
            let whole = answer.done && error.is_none();
            let fits = match finish {
                Some(finish) => text == choice.text && finish == choice.finish,
                None => !whole && choice.text.starts_with(&text),
            };
            if !fits {
                return Err(format!("choice {index} is {text:?} ({finish:?}), expected {choice:?}"));
            }
        }
        if let Some(error) = error {
            return if answer.done { Err("[DONE] after an error".to_owned()) } else { retryable(error) };
        }
        if !answer.done {
            return if self.end == End::Complete { Err("the stream ended without [DONE]".to_owned()) } else { Ok(()) };
        }
        let usage = answer.reported_usage(1).ok_or("a complete answer has no usage")?;
        let completion: u64 = expected.choices.iter().map(|choice| choice.tokens).sum();
        let (prompt, cached) = (usage.prompt_tokens, usage.cached_tokens);
        if prompt != spec.prompt.len() as u64 || answer.usage("/completion_tokens") != completion {
            return Err(format!("usage {}, expected {} and {completion}", answer.last()["usage"], spec.prompt.len()));
        }
        if cached >= prompt || cached % u64::from(super::plan::BLOCK_SIZE) != 0 {
            return Err(format!("{cached} of {prompt} prompt tokens are reported as cached"));
        }
        Ok(())
    }
}
