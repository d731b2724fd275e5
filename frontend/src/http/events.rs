//! An answer as server-sent events, in OpenAI's order: a role (chat), text, an end with its reason for each choice, usage if
//! it was asked for, `[DONE]`. Nothing follows an error event, not even `[DONE]`. While there are no events for a while, comments
//! keep the connection open: clients skip them, and proxies see that the stream is active.

use super::{
    answer::Run,
    shape::{Choice, Envelope},
};
use crate::{
    admission::Admitted,
    error::ApiError,
    request::StreamUsage,
    stream::{Delta, Piece},
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

/// The state of the stream when the headers are sent.
pub(super) enum First {
    /// The first piece came in time; `None` if the answer has none.
    Piece(Option<(usize, Piece)>),
    /// No piece came before the first comment was due.
    Late,
}

/// A running streamed answer. It owns all that was taken for the request, so that a client that goes away gives it back.
struct Events {
    run: Run,
    usage: StreamUsage,
    admitted: Admitted,
    /// Already here when the headers were sent.
    first: Option<(usize, Piece)>,
}

/// The response whose body tells what comes.
pub(super) fn events(run: Run, usage: StreamUsage, admitted: Admitted, first: First) -> Response {
    let (first, late) = match first {
        First::Piece(first) => (first, None),
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
    /// Bytes to send, at least one event or comment; with the last nothing is left.
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
                Some(Ok((index, piece))) => self.write_piece(&mut out, index, piece),
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
            // A piece may say nothing, and an empty event must not be sent.
            if !out.is_empty() {
                return (out.into(), Some(self));
            }
        }
    }

    fn write_piece(&mut self, out: &mut Vec<u8>, prompt: usize, piece: Piece) -> Result<(), ApiError> {
        let samples = self.run.progress.samples();
        let choices = prompt * samples..(prompt + 1) * samples;
        if let Piece::Started(_) = piece {
            for choice in choices.clone() {
                self.write_chunk(out, self.run.shape.role(choice));
            }
        }
        if let Some((text, logprobs)) = self.run.echo(prompt, &piece)? {
            for choice in choices.clone() {
                let chunk = self.run.shape.delta(choice, &text, self.run.logprobs(&logprobs));
                self.write_chunk(out, Some(chunk));
            }
        }
        if let Piece::Delta(delta) = piece {
            self.write_delta(out, choices.start + delta.sample as usize, &delta);
        }
        Ok(())
    }

    fn write_delta(&self, out: &mut Vec<u8>, choice: usize, delta: &Delta) {
        if !delta.text.is_empty() || !delta.logprobs.is_empty() {
            let logprobs = self.run.logprobs(&delta.logprobs);
            self.write_chunk(out, Some(self.run.shape.delta(choice, &delta.text, logprobs)));
        }
        let end = delta.finish.map(|finish| self.run.shape.end(choice, finish));
        self.write_chunk(out, end);
    }

    fn write_chunk(&self, out: &mut Vec<u8>, choice: Option<Choice<'_>>) {
        if let Some(choice) = choice {
            write_event(out, &self.chunk(vec![choice], self.usage.in_every_chunk.then(|| self.run.progress.usage())));
        }
    }

    /// `usage` is a key of every chunk if the client asked for usage, and of none if not.
    fn chunk<'a>(&'a self, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> Envelope<'a> {
        self.run.envelope(self.run.shape.chunk_object(), choices, self.usage.at_end.then_some(usage))
    }

    /// All prompts have ended. Usage and details come in a chunk without choices, if somebody asked for either.
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
