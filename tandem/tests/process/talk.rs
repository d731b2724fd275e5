//! Requests over plain sockets, and the values of series.

use crate::up::Up;
use std::{
    io::{self, BufReader, Read, Write},
    net::TcpStream,
    process::Stdio,
};

impl Up {
    /// Returns when the last line of the introduction is there.
    pub fn start(args: &[&str], stderr: impl Into<Stdio>) -> Self {
        Self::spawn(&[&["up", "--listen", "127.0.0.1:0"], args].concat(), stderr)
    }

    /// Sends a request; the reader returns the answer as it comes.
    pub fn ask(&self, path: &str, body: &str) -> io::Result<BufReader<TcpStream>> {
        let mut stream = TcpStream::connect(self.address())?;
        let head = format!("POST {path} HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n", self.address());
        write!(stream, "{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())?;
        Ok(BufReader::new(stream))
    }

    /// The whole answer, its head included.
    pub fn answer(&self, path: &str, body: &str) -> String {
        let mut answer = String::new();
        self.ask(path, body).expect("the frontend listens").read_to_string(&mut answer).expect("text");
        answer
    }
}

/// The value of a series, such as `tandem_router_workers{state="joined"}`.
pub fn metric(process: &Up, series: &str) -> Option<f64> {
    let page = process.get("/metrics");
    page.lines().find_map(|line| line.strip_prefix(series)?.trim().parse().ok())
}

/// A request for so many tokens, none of them the last.
pub fn chat(text: &str, max_tokens: u32, stream: bool) -> String {
    format!(
        r#"{{"model":"sim","stream":{stream},"max_tokens":{max_tokens},"logit_bias":{{"257":-100}},"messages":[{{"role":"user","content":"{text}"}}]}}"#
    )
}

/// The answer to a chat that is not streamed, and what it says was cached.
pub fn ask(frontend: &Up, text: &str) -> (String, u64) {
    let answer = frontend.answer("/v1/chat/completions", &chat(text, 8, false));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let cached = answer.split("\"cached_tokens\":").nth(1).and_then(|rest| rest.split([',', '}']).next());
    let cached = cached.and_then(|number| number.parse().ok()).expect("the usage says what was cached");
    (answer, cached)
}

/// A streamed answer to its end; panics unless it is whole.
pub fn stream(frontend: &Up, text: &str, max_tokens: u32) {
    let mut answer = String::new();
    let mut reader = frontend.ask("/v1/chat/completions", &chat(text, max_tokens, true)).expect("the frontend listens");
    reader.read_to_string(&mut answer).expect("text");
    let whole = answer.contains("\"finish_reason\":\"length\"") && answer.contains("data: [DONE]");
    assert!(whole, "the answer is not whole: {}", &answer[answer.len().saturating_sub(500)..]);
}

/// Sends a chat with headers; returns the answer and the request's id.
pub fn post_chat(frontend: &Up, headers: &str, body: &serde_json::Value) -> (String, String) {
    let (mut stream, body) = (TcpStream::connect(frontend.address()).expect("it listens"), body.to_string());
    let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: {}\r\nconnection: close\r\n{headers}", frontend.address());
    write!(stream, "{head}content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len()).expect("it reads");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).expect("text");
    let id = answer.lines().find_map(|line| line.strip_prefix("x-request-id: ")).expect("every answer has its id").to_owned();
    (answer, id)
}
