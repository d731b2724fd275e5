//! Passes the answer of another server to the client as it arrives.

use crate::{
    admission::Admitted,
    passthrough::{PassedPlace, SILENCE_MAX},
};
use axum::{
    body::{Body, HttpBody},
    http::{HeaderMap, HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::stream;
use http_body_util::BodyExt;
use serde::Deserialize;
use tokio::time::timeout;

/// The headers of an answer that do not pass: those about the connection with the server, and those that only this server may set.
const KEPT_BACK: &str = "connection keep-alive proxy-authenticate proxy-authorization proxy-connection set-cookie te trailer transfer-encoding upgrade";
const KEPT_BACK_PREFIXES: [&str; 3] = ["access-control-", "x-ratelimit-", "x-tandem-"];

/// The largest answer whose usage is read, in bytes. It is collected while it passes.
const USAGE_BYTES_MAX: usize = 256 << 10;

/// The answer of another server, whose head has arrived.
pub(super) struct PassedAnswer {
    pub(super) response: Response,
    pub(super) place: PassedPlace,
}

/// The body of an answer that passes. It owns everything that was reserved for the request. When the client disconnects, it is dropped,
/// which also closes the connection with the server.
struct PassingBody {
    body: Body,
    status: StatusCode,
    admitted: Admitted,
    place: PassedPlace,
    /// What has passed of an answer whose usage is to be read; `None`: the usage of the answer is not read.
    collected: Option<Vec<u8>>,
}

impl PassedAnswer {
    /// Returns the response with which the answer passes to the client.
    pub(super) fn response(self, admitted: Admitted) -> Response {
        let (mut parts, body) = self.response.into_parts();
        keep_back(&mut parts.headers);
        let kind = parts.headers.get(header::CONTENT_TYPE).map_or(&b""[..], |kind| kind.as_bytes());
        let has_usage = parts.status.is_success() && kind.starts_with(b"application/json");
        let is_small = body.size_hint().lower() <= USAGE_BYTES_MAX as u64;
        let collected = (has_usage && is_small).then(Vec::new);
        let passing = PassingBody { body, status: parts.status, admitted, place: self.place, collected };
        let chunks = stream::unfold(passing.unless_ended(), |passing| async move { passing?.next().await });
        (parts.status, parts.headers, Body::from_stream(chunks)).into_response()
    }
}

impl PassingBody {
    /// Returns the next chunk, and the rest of the body; `None` in place of the rest after the last chunk or an error.
    async fn next(mut self) -> Option<(Result<Bytes, axum::Error>, Option<Self>)> {
        loop {
            let error = match timeout(SILENCE_MAX, self.body.frame()).await {
                Ok(Some(Ok(frame))) => {
                    // Trailers do not pass.
                    let Ok(chunk) = frame.into_data() else { continue };
                    self.collect(&chunk);
                    return Some((Ok(chunk), self.unless_ended()));
                }
                Ok(None) => {
                    self.end();
                    return None;
                }
                Ok(Some(Err(error))) => error,
                Err(silent) => axum::Error::new(silent),
            };
            self.place.failed("its answer ended early");
            self.admitted.finish(StatusCode::BAD_GATEWAY);
            // The client sees an incomplete body, because its connection is closed.
            return Some((Err(error), None));
        }
    }

    /// Returns the rest of the body; `None` if there is none. A body with a `Content-Length` is not polled after its last byte.
    fn unless_ended(self) -> Option<Self> {
        if self.body.is_end_stream() {
            self.end();
            return None;
        }
        Some(self)
    }

    fn collect(&mut self, chunk: &[u8]) {
        let fits = |collected: &Vec<u8>| collected.len() + chunk.len() <= USAGE_BYTES_MAX;
        self.collected = self.collected.take().filter(fits);
        self.collected.iter_mut().for_each(|collected| collected.extend_from_slice(chunk));
    }

    /// Records that the answer is complete, and its usage if it has one.
    fn end(mut self) {
        self.place.answered();
        let usage = self.collected.take().and_then(|answer| serde_json::from_slice::<PassedBody>(&answer).ok()?.usage);
        if let Some(PassedUsage { prompt_tokens, completion_tokens }) = usage {
            self.admitted.call.passed(prompt_tokens, completion_tokens);
            if let Some(key) = &self.admitted.call.key {
                key.charge_tokens(prompt_tokens.unwrap_or(0).saturating_add(completion_tokens.unwrap_or(0)));
            }
        }
        self.admitted.finish(self.status);
    }
}

/// The only fields of an answer that this server reads.
#[derive(Deserialize)]
struct PassedBody {
    usage: Option<PassedUsage>,
}

#[derive(Deserialize)]
struct PassedUsage {
    prompt_tokens: Option<u32>,
    completion_tokens: Option<u32>,
}

/// Removes the headers that do not pass.
fn keep_back(headers: &mut HeaderMap) {
    let named = headers.get_all(header::CONNECTION).iter().filter_map(|names| names.to_str().ok());
    let named = named.flat_map(|names| names.split(',')).map(|name| name.trim().to_ascii_lowercase());
    let mut removed: Vec<String> = named.chain(KEPT_BACK.split(' ').map(str::to_owned)).collect();
    let is_own = |name: &&str| KEPT_BACK_PREFIXES.iter().any(|prefix| name.starts_with(prefix));
    removed.extend(headers.keys().map(HeaderName::as_str).filter(is_own).map(str::to_owned));
    removed.iter().for_each(|name| drop(headers.remove(name)));
}
