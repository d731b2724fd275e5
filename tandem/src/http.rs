//! A question to a process of a cluster over HTTP, from the command line: one request on a connection of its own.

use std::{
    io::{self, Read, Write},
    net::TcpStream,
    time::Duration,
};

/// Who answers at all answers within this time: nothing is computed.
const ANSWER_WAIT: Duration = Duration::from_secs(10);

/// The status and the body of what is at `host:port`; no status if it does not speak HTTP.
pub(crate) fn ask(address: &str, method: &str, path: &str, headers: &str, body: &str) -> io::Result<(Option<u16>, String)> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(ANSWER_WAIT))?;
    let head = format!("{method} {path} HTTP/1.0\r\nhost: {address}\r\n{headers}content-length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes())?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or_default();
    Ok((head.split(' ').nth(1).and_then(|status| status.parse().ok()), body.to_owned()))
}
