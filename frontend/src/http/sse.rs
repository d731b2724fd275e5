//! A streamed answer as server-sent events, in OpenAI's order: a role (chat), text, a finish reason for each choice, usage if
//! it was asked for, `[DONE]`. Nothing follows an error event, not even `[DONE]`. In pauses between events, comments keep the
//! connection open: clients skip them, and proxies see that the stream is active.

use super::{
    answer::{First, Run},
    format::{Choice, Envelope, UsageField},
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

/// A comment line, which the specification of server-sent events recommends against proxies' timeouts.
const KEEP_ALIVE: &[u8] = b": keep-alive\n\n";

/// A running streamed answer. It owns all that was reserved for the request, so that it is released when the client disconnects.
struct Events {
    run: Run,
    usage: StreamUsage,
    admitted: Admitted,
    /// The event that came before the headers were sent.
    first: Option<(usize, AnswerEvent)>,
}

/// The response whose body is the stream.
pub(super) fn events(run: Run, usage: StreamUsage, admitted: Admitted, first: First) -> Response {
    let (first, late) = match first {
        First::Event(first) => (first, None),
        First::Late => (None, Some(Ok(Bytes::from_static(KEEP_ALIVE)))),
    };
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
    /// Returns bytes to send, at least one event or comment, and the rest of the stream, `None` after the last bytes.
    async fn next(mut self) -> (Bytes, Option<Self>) {
        let mut out = Vec::new();
        loop {
            let next = match self.first.take() {
                Some(first) => Some(Ok(first)),
                None => match timeout(self.run.keep_alive(), self.run.next()).await {
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
            // Not every event of the answer is one of the stream, and an empty chunk would end the body.
            if !out.is_empty() {
                return (out.into(), Some(self));
            }
        }
    }

    fn write(&mut self, out: &mut Vec<u8>, prompt: usize, event: AnswerEvent) -> Result<(), ApiError> {
        let samples = self.run.progress.samples();
        let choices = prompt * samples..(prompt + 1) * samples;
        if let AnswerEvent::Started(_) = event {
            for choice in choices.clone() {
                self.write_chunk(out, self.run.format.role(choice));
            }
        }
        if let Some((text, logprobs)) = self.run.echo(prompt, &event)? {
            for choice in choices.clone() {
                let chunk = self.run.format.delta(choice, &text, self.run.logprobs(&logprobs));
                self.write_chunk(out, Some(chunk));
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
            self.write_chunk(out, Some(self.run.format.delta(choice, &delta.text, logprobs)));
        }
        let end = delta.finish.map(|finish| self.run.format.end(choice, finish));
        self.write_chunk(out, end);
    }

    fn write_chunk(&self, out: &mut Vec<u8>, choice: Option<Choice<'_>>) {
        if let Some(choice) = choice {
            write_event(out, &self.chunk(vec![choice], self.usage.in_every_chunk.then(|| self.run.progress.usage())));
        }
    }

    /// A chunk. All chunks have the field `usage` if the client asked for it, else none has.
    fn chunk<'a>(&'a self, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> Envelope<'a> {
        let usage = match usage {
            _ if !self.usage.at_end => UsageField::Absent,
            None => UsageField::Null,
            Some(usage) => UsageField::Value(usage),
        };
        self.run.envelope(self.run.format.chunk_object(), choices, usage)
    }

    /// Writes the end of the stream. Usage and details are in a chunk without choices, if the client asked for them.
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
    serde_json::to_writer(&mut *out, data).expect("answers are plain data with texts as keys");
    out.extend_from_slice(b"\n\n");
}
