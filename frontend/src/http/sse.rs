//! A streamed answer as server-sent events in OpenAI's order: first the role (chat only), the text and the finish reason of each choice,
//! then usage if requested, then `[DONE]`. Nothing follows an error event, not even `[DONE]`. In pauses between events, comments keep the
//! connection open. Clients skip comments, and proxies see that the stream is active.

use super::{
    answer::Run,
    format::{Choice, Envelope},
};
use crate::{
    admission::Admitted,
    error::ApiError,
    request::StreamUsage,
    stream::{AnswerEvent, Delta},
    usage::Usage,
};
use axum::{
    body::Body,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use futures::{StreamExt, stream};
use serde::Serialize;
use std::convert::Infallible;
use tokio::time::timeout;

/// A comment. The specification of server-sent events recommends comments so that proxies do not close idle connections.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// A running streamed answer. It owns everything that was reserved for the request. When the client disconnects, it is dropped and releases
/// everything.
struct Events {
    run: Run,
    usage: StreamUsage,
    admitted: Admitted,
    /// The answer's first event, if it occurred before the response's headers were sent.
    first: Option<(usize, AnswerEvent)>,
}

/// Returns the response that streams the answer as events. `first` is described at [`Reply::Stream`](super::answer::Reply).
pub(super) fn events(run: Run, usage: StreamUsage, admitted: Admitted, first: Option<(usize, AnswerEvent)>) -> Response {
    let late = first.is_none().then(|| Ok(Bytes::from_static(KEEP_ALIVE)));
    let events = Events { run, usage, admitted, first };
    let rest = stream::unfold(Some(events), |events| async move {
        let (bytes, rest) = events?.next().await;
        Some((Ok::<_, Infallible>(bytes), rest))
    });
    let body = stream::iter(late).chain(rest);
    let headers = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8"), (header::CACHE_CONTROL, "no-cache")];
    (headers, Body::from_stream(body)).into_response()
}

impl Events {
    /// Returns the bytes of at least one event or comment, and the rest of the stream; `None` in place of the rest if these bytes are the
    /// last ones.
    async fn next(mut self) -> (Bytes, Option<Self>) {
        let mut out = Vec::new();
        loop {
            let next = match self.first.take() {
                Some(first) => Some(Ok(first)),
                None => match timeout(self.run.keep_alive, self.run.next()).await {
                    Ok(next) => next,
                    Err(_) => return (Bytes::from_static(KEEP_ALIVE), Some(self)),
                },
            };
            let written = match next {
                Some(Ok((index, event))) => self.write(&mut out, index, event),
                Some(Err(error)) => Err(error),
                None => {
                    self.write_end(&mut out);
                    self.admitted.finish(StatusCode::OK);
                    return (out.into(), None);
                }
            };
            if let Err(error) = written {
                write_event(&mut out, &error.body());
                self.admitted.finish(error.status());
                return (out.into(), None);
            }
            // Some events write no bytes. They are skipped, because an empty HTTP chunk would end the body.
            if !out.is_empty() {
                return (out.into(), Some(self));
            }
        }
    }

    fn write(&mut self, out: &mut Vec<u8>, prompt: usize, event: AnswerEvent) -> Result<(), ApiError> {
        let samples = self.run.progress.samples;
        let choices = prompt * samples..(prompt + 1) * samples;
        if let AnswerEvent::Started(_) = event {
            for role in choices.clone().filter_map(|choice| self.run.endpoint.role(choice)) {
                self.write_chunk(out, role);
            }
        }
        if let Some((text, logprobs)) = self.run.echo(prompt, &event)? {
            for choice in choices.clone() {
                self.write_chunk(out, self.run.endpoint.chunk(choice, Some(&text), self.run.logprobs(&logprobs), None));
            }
        }
        if let AnswerEvent::Delta(delta) = event {
            self.write_delta(out, choices.start + delta.sample as usize, &delta);
        }
        Ok(())
    }

    fn write_delta(&self, out: &mut Vec<u8>, choice: usize, delta: &Delta) {
        if !delta.text.is_empty() || !delta.logprobs.is_empty() {
            let logprobs = self.run.logprobs(&delta.logprobs);
            self.write_chunk(out, self.run.endpoint.chunk(choice, Some(&delta.text), logprobs, None));
        }
        if delta.finish.is_some() {
            self.write_chunk(out, self.run.endpoint.chunk(choice, None, None, delta.finish));
        }
    }

    fn write_chunk(&self, out: &mut Vec<u8>, choice: Choice<'_>) {
        write_event(out, &self.chunk(vec![choice], self.usage.in_every_chunk.then(|| self.run.progress.usage())));
    }

    /// Returns a chunk of the streamed answer. If the client requested usage, every chunk has the field `usage`; otherwise no chunk has it.
    fn chunk<'a>(&'a self, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> Envelope<'a> {
        self.run.envelope(self.run.endpoint.chunk_object(), choices, self.usage.at_end.then_some(usage))
    }

    /// Writes the end of the stream: `[DONE]`, after a chunk without choices that has usage and details if the client requested them.
    fn write_end(&mut self, out: &mut Vec<u8>) {
        self.run.progress.finish();
        if self.usage.at_end || self.run.details {
            let mut chunk = self.chunk(Vec::new(), Some(self.run.progress.usage()));
            chunk.tandem = self.run.details.then(|| self.run.progress.details());
            write_event(out, &chunk);
        }
        out.extend_from_slice(b"data: [DONE]\n\n");
    }
}

fn write_event(out: &mut Vec<u8>, data: &impl Serialize) {
    out.extend_from_slice(b"data: ");
    serde_json::to_writer(&mut *out, data).expect("the keys of an answer are strings");
    out.extend_from_slice(b"\n\n");
}
