//! A client with one connection per request, over the simulated network.

use super::{
    network::{Name, Wires},
    oracle::Expected,
    plan::{CLIENT, Wanted},
};
use crate::Answer;
use futures::future::join;
use http_body_util::{BodyExt, Full};
use hyper::{Request, body::Bytes, client::conn::http1::handshake};
use hyper_util::rt::TokioIo;
use tandem::audit::ClientLine;
use tokio::time::timeout;

/// Errors that faults may cause and that allow a retry.
const RETRYABLE: [&str; 5] = ["no_worker", "router_unreachable", "attempts_exhausted", "first_token_timeout", "worker_lost"];
/// The error of a draining frontend.
const DRAINING: &str = "draining";

/// The outcome of a request as its client sees it.
#[derive(Default)]
pub(super) struct Seen {
    status: Option<u16>,
    request_id: Option<String>,
    retry_after: bool,
    streamed: bool,
    body: Vec<u8>,
    pub(super) end: End,
}

/// How the request ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum End {
    /// The client cancelled it.
    #[default]
    Left,
    /// The connection broke or failed.
    Broken,
    /// The response is complete.
    Whole,
}

/// Which outcomes are allowed.
#[derive(Clone, Copy)]
pub(super) struct Allowed {
    /// Errors that allow a retry.
    pub(super) errors: bool,
    /// Broken connections.
    pub(super) broken: bool,
    /// Refusals by a draining frontend.
    pub(super) draining: bool,
}

/// Sends the request and reads until its end or the client's timeout.
pub(super) async fn ask(wires: Wires, frontend: Name, wanted: Wanted) -> Seen {
    let mut seen = Seen::default();
    let asking =
        async { seen.end = if exchange(&wires, &frontend, &wanted, &mut seen).await.is_ok() { End::Whole } else { End::Broken } };
    match wanted.patience {
        Some(patience) => drop(timeout(patience, asking).await),
        None => asking.await,
    }
    seen
}

async fn exchange(wires: &Wires, frontend: &Name, wanted: &Wanted, seen: &mut Seen) -> anyhow::Result<()> {
    let dial = wires.dial_from(&CLIENT.into());
    let io = dial(&format!("{frontend}:80")).await?;
    let (mut sender, connection) = handshake(TokioIo::new(io)).await?;
    let talk = async move {
        let request = Request::post("/v1/completions").header("host", &**frontend).header("content-type", "application/json");
        let request = request.header("x-tandem-details", "true");
        let response = sender.send_request(request.body(Full::new(Bytes::from(wanted.body().to_string())))?).await?;
        let header = |name: &str| response.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
        seen.status = Some(response.status().as_u16());
        seen.request_id = header("x-request-id");
        seen.retry_after = header("retry-after").is_some();
        seen.streamed = header("content-type").is_some_and(|kind| kind.starts_with("text/event-stream"));
        let mut body = response.into_body();
        while let Some(frame) = body.frame().await {
            if let Some(data) = frame?.data_ref() {
                seen.body.extend_from_slice(data);
            }
        }
        anyhow::Ok(())
    };
    // An error of the connection is reported by the exchange, too.
    join(talk, connection).await.0
}

impl Seen {
    /// Returns a line for the log.
    pub(super) fn summary(&self) -> String {
        format!("{:?}, status {:?}, {} bytes", self.end, self.status, self.body.len())
    }

    /// Returns it in the form of the audit.
    pub(super) fn line(&self) -> ClientLine {
        let usage = self.answer().ok().filter(|_| self.end == End::Whole).and_then(|answer| answer.reported_usage(1));
        ClientLine { request_id: self.request_id.clone(), usage }
    }

    fn answer(&self) -> anyhow::Result<Answer> {
        let text = str::from_utf8(&self.body)?;
        // The last event of a broken stream may be incomplete.
        let whole = if self.streamed { text.rfind("\n\n").map_or("", |end| &text[..end + 2]) } else { text };
        Answer::read(self.status.unwrap_or(0), self.streamed, whole)
    }

    /// Returns what is wrong with it, if anything is.
    pub(super) fn check(&self, wanted: &Wanted, expected: &Expected, allowed: Allowed) -> Result<(), String> {
        let retryable = |error: &serde_json::Value| {
            let code = error["code"].as_str().unwrap_or_default();
            let fits = (allowed.errors && RETRYABLE.contains(&code)) || (allowed.draining && code == DRAINING);
            if fits && error["type"] == "server_error" { Ok(()) } else { Err(format!("an error that nothing explains: {error}")) }
        };
        let status = match (self.end, self.status) {
            (End::Broken, _) if !allowed.broken => return Err("its connection broke, and nothing broke it".to_owned()),
            (End::Left | End::Broken, None) => return Ok(()),
            (_, None) => return Err("a response has a status".to_owned()),
            (_, Some(status)) => status,
        };
        if self.end != End::Whole && !self.streamed {
            return Ok(());
        }
        let answer = self.answer().map_err(|error| format!("{error:#}"))?;
        if status != 200 {
            if !(matches!(status, 503 | 504) && self.retry_after) {
                return Err(format!("status {status}, retry-after: {}: {:?}", self.retry_after, answer.frames));
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
            return if self.end == End::Whole { Err("the stream ended without [DONE]".to_owned()) } else { Ok(()) };
        }
        let told = answer.reported_usage(1).ok_or("a whole answer has its usage")?;
        let completion: u64 = expected.choices.iter().map(|choice| choice.tokens).sum();
        let (prompt, cached) = (told.prompt_tokens, told.cached_tokens);
        if prompt != wanted.prompt.len() as u64 || answer.usage("/completion_tokens") != completion {
            return Err(format!("usage {}, expected {} and {completion}", answer.last()["usage"], wanted.prompt.len()));
        }
        if cached >= prompt || cached % u64::from(super::plan::BLOCK_SIZE) != 0 {
            return Err(format!("{cached} of {prompt} tokens are said to be cached"));
        }
        Ok(())
    }
}
