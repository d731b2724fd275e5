//! Streamed answers of a server with OpenAI's API, and their summary.

use super::{WANTED, check};
use crate::{server::HttpServer, text_table::counted};
use anyhow::{Result, anyhow};
use serde_json::Value;
use std::{
    fmt,
    io::{BufRead, BufReader},
    sync::Arc,
    time::Duration,
};
use tokio::{sync::mpsc, time::Instant};

/// The number of deltas that are buffered. When the buffer is full, the reading thread waits for the terminal.
const PIECES_MAX: usize = 64;

/// A delta of an answer, or its usage.
#[derive(Debug, PartialEq)]
pub(super) enum ChatPiece {
    Reasoning(String),
    Content(String),
    Usage(AnswerCounts),
}

/// The token counts of an answer; `None` for each count that the server does not report.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct AnswerCounts {
    prompt: Option<u64>,
    cached: Option<u64>,
    completion: Option<u64>,
}

/// The deltas of an answer, as they arrive. Dropping this value closes the connection when the server's next event arrives.
pub(super) struct Answers(mpsc::Receiver<Result<ChatPiece>>);

impl Answers {
    /// Sends the request from a thread of its own. Must be called within a runtime.
    pub(super) fn request(server: Arc<HttpServer>, key_env: &str, body: &Value) -> Self {
        let (pieces, receiver) = mpsc::channel(PIECES_MAX);
        let (key_env, body) = (key_env.to_owned(), body.to_string());
        tokio::task::spawn_blocking(move || {
            let sent = read(&server, &key_env, &body, |piece| pieces.blocking_send(Ok(piece)).is_ok());
            if let Err(error) = sent {
                // The send fails if the user has ended the answer.
                let _ = pieces.blocking_send(Err(error));
            }
        });
        Self(receiver)
    }

    /// Returns the next delta; `None` at the end of the answer. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Result<ChatPiece>> {
        self.0.recv().await
    }
}

/// Sends a request, and passes the deltas of its answer to `take` until `take` returns false.
fn read(server: &HttpServer, key_env: &str, body: &str, mut take: impl FnMut(ChatPiece) -> bool) -> Result<()> {
    let mut reply = server.stream("/v1/chat/completions", body).map_err(|error| server.no_reply(error, WANTED))?;
    let status = reply.status().as_u16();
    if status != 200 {
        let body = reply.body_mut().read_to_string().unwrap_or_default();
        return check(status, &body, &server.address, key_env).map(drop);
    }
    let mut is_complete = false;
    for line in BufReader::new(reply.body_mut().as_reader()).lines() {
        let line = line.map_err(|error| anyhow!("the connection to the server was lost before the answer's end: {error}"))?;
        match event(&line)? {
            ChatEvent::Pieces(pieces) => {
                for piece in pieces {
                    is_complete |= matches!(piece, ChatPiece::Usage(_));
                    if !take(piece) {
                        return Ok(());
                    }
                }
            }
            ChatEvent::Finished => is_complete = true,
            ChatEvent::Done => return Ok(()),
        }
    }
    if is_complete { Ok(()) } else { Err(anyhow!("the server closed the connection before the answer's end")) }
}

/// The content of a line of the stream.
#[derive(Debug, PartialEq)]
enum ChatEvent {
    Pieces(Vec<ChatPiece>),
    /// The chunk has the reason for which the answer ended.
    Finished,
    /// The stream has ended.
    Done,
}

/// Parses a line of the stream. Comments, names of events and empty lines have no deltas.
fn event(line: &str) -> Result<ChatEvent> {
    let Some(data) = line.strip_prefix("data:").map(str::trim) else { return Ok(ChatEvent::Pieces(Vec::new())) };
    if data == "[DONE]" {
        return Ok(ChatEvent::Done);
    }
    let chunk: Value = serde_json::from_str(data).map_err(|error| anyhow!("the server sent an invalid event: {error}"))?;
    if let Some(error) = chunk.get("error").filter(|error| !error.is_null()) {
        let message = error["message"].as_str().or_else(|| error.as_str()).unwrap_or("no reason was given");
        return Err(anyhow!("the answer failed: {message}"));
    }
    let choice = &chunk["choices"][0];
    let delta = &choice["delta"];
    let text = |fields: &[&str]| {
        let text = fields.iter().find_map(|field| delta[*field].as_str());
        text.filter(|text| !text.is_empty()).map(str::to_owned)
    };
    let mut pieces = Vec::new();
    pieces.extend(text(&["reasoning_content", "reasoning"]).map(ChatPiece::Reasoning));
    pieces.extend(text(&["content"]).map(ChatPiece::Content));
    if let Some(usage) = chunk.get("usage").filter(|usage| usage.is_object()) {
        let count = |pointer: &str| usage.pointer(pointer).and_then(Value::as_u64);
        let cached = count("/prompt_tokens_details/cached_tokens");
        pieces.push(ChatPiece::Usage(AnswerCounts {
            prompt: count("/prompt_tokens"),
            cached,
            completion: count("/completion_tokens"),
        }));
    }
    if pieces.is_empty() && choice["finish_reason"].is_string() {
        return Ok(ChatEvent::Finished);
    }
    Ok(ChatEvent::Pieces(pieces))
}

/// The times and counts of an answer.
pub(super) struct AnswerSummary {
    since: Instant,
    pub(super) first: Option<Instant>,
    last: Option<Instant>,
    pub(super) usage: Option<AnswerCounts>,
}

impl AnswerSummary {
    pub(super) fn begin() -> Self {
        Self { since: Instant::now(), first: None, last: None, usage: None }
    }

    pub(super) fn text_arrived(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
    }
}

impl fmt::Display for AnswerSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let AnswerCounts { prompt, cached, completion } = self.usage.unwrap_or_default();
        let mut facts = Vec::new();
        match (cached, prompt) {
            (Some(cached), Some(prompt)) => facts.push(format!("{cached} of {prompt} prompt tokens cached")),
            (None, Some(prompt)) => facts.push(format!("{prompt} prompt tokens, cached tokens not reported")),
            _ => {}
        }
        if let Some(first) = self.first {
            facts.push(format!("first token after {}", seconds(first.duration_since(self.since))));
        }
        match (completion, self.first.zip(self.last)) {
            (Some(tokens), Some((first, last))) if tokens > 1 && last > first => {
                let rate = (tokens - 1) as f64 / last.duration_since(first).as_secs_f64();
                facts.push(format!("{tokens} tokens, {rate:.1} a second"));
            }
            (Some(tokens), _) => facts.push(counted(tokens, "token")),
            (None, _) => facts.push("ended early".to_owned()),
        }
        write!(f, "[{}]", facts.join(" · "))
    }
}

fn seconds(time: Duration) -> String {
    if time < Duration::from_secs(1) { format!("{} ms", time.as_millis()) } else { format!("{:.2} s", time.as_secs_f64()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_of_openais_and_similar_servers_are_read() {
        let pieces = |line: &str| match event(line).expect("the event is valid") {
            ChatEvent::Pieces(pieces) => pieces,
            other => panic!("{other:?}"),
        };
        assert_eq!(pieces(""), []);
        assert_eq!(pieces(": keep-alive"), []);
        assert_eq!(event("data: [DONE]").expect("the event is valid"), ChatEvent::Done);
        assert_eq!(
            pieces(r#"data: {"choices":[{"delta":{"content":"Hi"}}],"usage":null}"#),
            [ChatPiece::Content("Hi".to_owned())]
        );
        assert_eq!(pieces(r#"data:{"choices":[{"delta":{"role":"assistant","content":""}}]}"#), []);
        let reasoning = [ChatPiece::Reasoning("hm".to_owned())];
        assert_eq!(pieces(r#"data: {"choices":[{"delta":{"reasoning_content":"hm","content":null}}]}"#), reasoning);
        assert_eq!(pieces(r#"data: {"choices":[{"delta":{"reasoning":"hm"}}]}"#), reasoning);
        let finished = r#"data: {"choices":[{"delta":{},"finish_reason":"stop"}]}"#;
        assert_eq!(event(finished).expect("the event is valid"), ChatEvent::Finished);
        let usage = r#"data: {"choices":[],"usage":{"prompt_tokens":52,"completion_tokens":9,"prompt_tokens_details":{"cached_tokens":48}}}"#;
        assert_eq!(pieces(usage), [ChatPiece::Usage(AnswerCounts { prompt: Some(52), cached: Some(48), completion: Some(9) })]);
        for (line, expected) in [(r#"data: {"error":{"message":"worker lost"}}"#, "worker lost"), ("data: {", "invalid event")] {
            assert!(event(line).is_err_and(|error| error.to_string().contains(expected)), "{line}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn summary_has_cached_tokens_time_to_first_token_and_rate() {
        let mut summary = AnswerSummary::begin();
        assert_eq!(summary.to_string(), "[ended early]");
        tokio::time::advance(Duration::from_millis(120)).await;
        summary.text_arrived();
        tokio::time::advance(Duration::from_secs(2)).await;
        summary.text_arrived();
        summary.usage = Some(AnswerCounts { prompt: Some(52), cached: Some(48), completion: Some(101) });
        let expected = "[48 of 52 prompt tokens cached · first token after 120 ms · 101 tokens, 50.0 a second]";
        assert_eq!(summary.to_string(), expected);
        summary.usage = Some(AnswerCounts { prompt: Some(52), cached: None, completion: Some(1) });
        assert_eq!(summary.to_string(), "[52 prompt tokens, cached tokens not reported · first token after 120 ms · 1 token]");
    }
}
