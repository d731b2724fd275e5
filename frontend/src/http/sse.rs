//! A streamed answer as server-sent events. Nothing follows an error event. In pauses between events, comments keep the connection open.
//! Clients skip comments, and proxies see that the stream is active.

use super::answer::Run;
use crate::{admission::Admitted, error::ApiError, stream::AnswerEvent};
use axum::{
    body::Body,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use serde::Serialize;
use std::convert::Infallible;

/// A comment. The specification of server-sent events recommends comments so that proxies do not close idle connections.
pub(super) const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// Writes an answer in an endpoint's format.
pub(super) trait Format: Send {
    /// Returns the request that is being answered.
    fn run(&mut self) -> &mut Run;

    /// Appends what follows from an event of the prompt with this index.
    ///
    /// # Errors
    /// The event is not possible. The answer fails.
    fn write(&mut self, out: &mut Vec<u8>, prompt: usize, event: AnswerEvent) -> Result<(), ApiError>;

    /// Appends the end of the answer. An answer that is not streamed consists of only this.
    fn write_end(&mut self, out: &mut Vec<u8>);

    /// Appends the end of a streamed answer that failed.
    fn write_error(&mut self, out: &mut Vec<u8>, error: &ApiError) {
        write_event(out, &error.event());
    }

    /// Returns what a pause between two events is filled with.
    fn keep_alive(&self) -> &'static [u8] {
        KEEP_ALIVE
    }
}

/// A running streamed answer. It owns everything that was reserved for the request. When the client disconnects, it is dropped and releases
/// everything.
struct Events {
    format: Box<dyn Format>,
    admitted: Admitted,
    /// The answer's first event, if it occurred before the response's headers were sent.
    first: Option<(usize, AnswerEvent)>,
}

/// Returns the response that streams the answer as events. `first` is described at [`Reply::Stream`](super::respond::Reply).
pub(super) fn events(format: Box<dyn Format>, admitted: Admitted, first: Result<(usize, AnswerEvent), Bytes>) -> Response {
    let (first, comment) = first.map_or_else(|comment| (None, Some(Ok(comment))), |first| (Some(first), None));
    let events = Events { format, admitted, first };
    let rest = stream::unfold(Some(events), |events| async move {
        let (bytes, rest) = events?.next().await;
        Some((Ok::<_, Infallible>(bytes), rest))
    });
    let body = stream::iter(comment).chain(rest);
    // Without the last header, nginx keeps events back if it compresses them.
    let headers = [
        (header::CONTENT_TYPE, "text/event-stream; charset=utf-8"),
        (header::CACHE_CONTROL, "no-cache"),
        (HeaderName::from_static("x-accel-buffering"), "no"),
    ];
    (headers, Body::from_stream(body)).into_response()
}

impl Events {
    /// Returns the bytes of at least one event or comment, and the rest of the stream; `None` in place of the rest if these bytes are the
    /// last ones.
    async fn next(mut self) -> (Bytes, Option<Self>) {
        let mut out = Vec::new();
        loop {
            let run = self.format.run();
            let next = match self.first.take() {
                Some(first) => Some(Ok(first)),
                None => match run.next_or_comment().await {
                    Ok(next) => next,
                    Err(comment) => {
                        let bytes = comment.unwrap_or_else(|| Bytes::from_static(self.format.keep_alive()));
                        return (bytes, Some(self));
                    }
                },
            };
            let written = match next {
                Some(Ok((index, event))) => self.format.write(&mut out, index, event),
                Some(Err(error)) => Err(error),
                None => {
                    run.progress.finish();
                    self.format.write_end(&mut out);
                    self.admitted.finish(StatusCode::OK);
                    return (out.into(), None);
                }
            };
            if let Err(error) = written {
                self.format.write_error(&mut out, &error);
                self.admitted.finish(error.status());
                return (out.into(), None);
            }
            // Some events write no bytes. They are skipped, because an empty HTTP chunk would end the body.
            if !out.is_empty() {
                return (out.into(), Some(self));
            }
        }
    }
}

/// The event that ends a stream in OpenAI's order.
pub(super) const DONE: &[u8] = b"data: [DONE]\n\n";

/// Writes an event with a name.
pub(super) fn write_named(out: &mut Vec<u8>, name: &str, data: &impl Serialize) {
    out.extend_from_slice(b"event: ");
    out.extend_from_slice(name.as_bytes());
    out.push(b'\n');
    write_event(out, data);
}

/// Writes an event without a name.
pub(super) fn write_event(out: &mut Vec<u8>, data: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, data).expect("the keys of an answer are strings");
    out.extend_from_slice(b"\n\n");
}
