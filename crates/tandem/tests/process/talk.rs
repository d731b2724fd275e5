//! Sends requests over plain sockets, and reads metrics.

use crate::up::Up;
use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
    process::Stdio,
};

impl Up {
    pub fn start(args: &[&str], stderr: impl Into<Stdio>) -> Self {
        Self::spawn(&[&["up", "--listen", "127.0.0.1:0"], args].concat(), stderr)
    }

    pub fn send(&self, path: &str, body: &str) -> io::Result<BufReader<TcpStream>> {
        let mut stream = TcpStream::connect(self.address())?;
        let head = format!("POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address());
        write!(stream, "{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
        Ok(BufReader::new(stream))
    }

    pub fn answer(&self, path: &str, body: &str) -> String {
        let mut answer = String::new();
        self.send(path, body).expect("the frontend listens").read_to_string(&mut answer).expect("the answer is UTF-8");
        answer
    }
}

/// Returns the value of a series, such as `tandem_router_workers{state="joined"}`; `None` if the process does not export it.
pub fn metric(process: &Up, series: &str) -> Option<f64> {
    let page = process.get("/metrics");
    page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// Returns the body of a chat that generates exactly `max_tokens` tokens, because a logit bias excludes the end token.
pub fn chat_body(text: &str, max_tokens: u32, stream: bool) -> String {
    format!(
        r#"{{"model":"sim","stream":{stream},"max_tokens":{max_tokens},"logit_bias":{{"257":-100}},"messages":[{{"role":"user","content":"{text}"}}]}}"#
    )
}

/// Sends a chat that is not streamed. Returns the answer and its number of cached tokens.
pub fn chat(frontend: &Up, text: &str) -> (String, u64) {
    let answer = frontend.answer("/v1/chat/completions", &chat_body(text, 8, false));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let cached = answer.split("\"cached_tokens\":").nth(1).and_then(|rest| rest.split([',', '}']).next());
    let cached = cached.and_then(|number| number.parse().ok()).expect("the usage has cached tokens");
    (answer, cached)
}

/// Sends a streamed chat. Panics unless its answer is complete.
pub fn streamed_chat(frontend: &Up, text: &str, max_tokens: u32) {
    let mut answer = String::new();
    let mut reader = frontend.send("/v1/chat/completions", &chat_body(text, max_tokens, true)).expect("the frontend listens");
    reader.read_to_string(&mut answer).expect("the answer is UTF-8");
    let complete = answer.contains("\"finish_reason\":\"length\"") && answer.contains("data: [DONE]");
    assert!(complete, "the answer is incomplete: {}", &answer[answer.len().saturating_sub(500)..]);
}

pub fn post_chat(frontend: &Up, headers: &str, body: &serde_json::Value) -> (String, String) {
    post_json(frontend, "/v1/chat/completions", headers, body)
}

/// Sends a request. Returns its answer and its id.
pub fn post_json(frontend: &Up, path: &str, headers: &str, body: &serde_json::Value) -> (String, String) {
    let (mut stream, body) = (TcpStream::connect(frontend.address()).expect("the server listens"), body.to_string());
    let head = format!("POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{headers}", frontend.address());
    write!(stream, "{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
        .expect("the process reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("the answer is UTF-8");
    let id = answer.lines().find_map(|line| line.strip_prefix("x-request-id: ")).expect("every answer has an id").to_owned();
    (answer, id)
}
