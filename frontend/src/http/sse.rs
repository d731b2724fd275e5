//! A streamed answer as server-sent events. Nothing follows an error event. In pauses between events, comments keep the connection open.
//! Clients skip comments, and proxies see that the stream is active.

use super::answer::Run;
use crate::admission::Admitted;
use axum::{
    body::Body,
    http::{HeaderName, StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use std::convert::Infallible;
use tandem_api::answer::{AnswerFormat, AnswerPart};

/// More than the usual size of an event with one token.
const EVENT_BYTES: usize = 512;

/// A streamed answer that has begun.
pub(super) struct Begun {
    pub(super) run: Run,
    pub(super) format: Box<dyn AnswerFormat>,
    /// The first part, or, if none has occurred yet, the comment with which the stream begins.
    pub(super) first: Result<(usize, AnswerPart), Bytes>,
}

/// A running streamed answer. It owns everything that was reserved for the request. When the client disconnects, it is dropped and releases
/// everything.
struct EventStream {
    run: Run,
    format: Box<dyn AnswerFormat>,
    admitted: Admitted,
    /// The answer's first part, if it occurred before the response's headers were sent.
    first: Option<(usize, AnswerPart)>,
}

/// Returns the response that streams the answer as events.
pub(super) fn events(Begun { run, format, first }: Begun, admitted: Admitted) -> Response {
    let (first, comment) = first.map_or_else(|comment| (None, Some(Ok(comment))), |first| (Some(first), None));
    let events = Box::new(EventStream { run, format, admitted, first });
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

impl EventStream {
    /// Returns the bytes of at least one event or comment, and the rest of the stream; `None` in place of the rest if these bytes are the
    /// last ones.
    async fn next(mut self: Box<Self>) -> (Bytes, Option<Box<Self>>) {
        let mut out = Vec::with_capacity(EVENT_BYTES);
        loop {
            let next = match self.first.take() {
                Some(first) => Some(Ok(first)),
                None => match self.run.next_or_comment().await {
                    Ok(next) => next,
                    Err(comment) => {
                        let bytes = comment.unwrap_or_else(|| Bytes::from_static(self.format.keep_alive()));
                        return (bytes, Some(self));
                    }
                },
            };
            match next {
                Some(Ok((index, part))) => self.format.write(&self.run.context, &mut out, index, part),
                Some(Err(error)) => {
                    self.format.write_error(&self.run.context, &mut out, &error.failure());
                    self.admitted.finish(error.status());
                    return (out.into(), None);
                }
                None => {
                    self.run.finish();
                    self.format.write_end(&self.run.context, &mut out);
                    self.admitted.finish(StatusCode::OK);
                    return (out.into(), None);
                }
            }
            // Some parts write no bytes. They are skipped, because an empty HTTP chunk would end the body.
            if !out.is_empty() {
                return (out.into(), Some(self));
            }
        }
    }
}
