//! Answers a request, either as one JSON object or as server-sent events. An endpoint's [`Format`] makes both from the same events.

use super::{
    answer::Run,
    choices::{Chunks, Whole},
    generated::Generated,
    incoming::{Incoming, Job},
    messages::format::Message,
    responses::format::ResponseFormat,
    sse::{Format, KEEP_ALIVE},
    style::Style,
};
use crate::{error::ApiError, stream::AnswerEvent};
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use tandem_api::StreamUsage;

/// The reply to a request whose answer has begun. `first` is the first event of a stream, or, if no event has occurred yet, the comment with which
/// the stream begins.
pub(super) enum Reply {
    Whole(Response),
    Stream { format: Box<dyn Format>, first: Result<(usize, AnswerEvent), Bytes> },
}

/// Returns the format of this style. `stream`: the answer is streamed.
fn format(style: Style, run: Run, stream: Option<StreamUsage>) -> Box<dyn Format> {
    match (style, stream) {
        (Style::Choices(choices), Some(usage)) => Box::new(Chunks { run, choices, usage }),
        (Style::Choices(format), None) => Box::new(Whole::new(run, format)),
        (Style::Generated(_), stream) => Box::new(Generated::new(run, stream)),
        (Style::Response(request, origins), stream) => Box::new(ResponseFormat::new(run, stream.is_some(), request, origins)),
        (Style::Message, stream) => Box::new(Message::new(run, stream.is_some())),
    }
}

/// Runs the job to the end of its answer. If the answer is streamed, runs the job only until its first event or until a comment has to be
/// sent.
///
/// # Errors
/// The answer failed before it began. A later error is sent as an event of the stream.
pub(super) async fn respond(incoming: &Incoming, job: Job) -> Result<Reply, ApiError> {
    let (run, style, stream) = Run::new(incoming, job);
    let mut format = format(style, run, stream);
    if stream.is_none() {
        return whole(format).await.map(Reply::Whole);
    }
    let keep_alive = || Bytes::from_static(KEEP_ALIVE);
    let first = match format.run().next_or_comment().await {
        Ok(next) => next.transpose()?.ok_or_else(keep_alive),
        Err(comment) => Err(comment.unwrap_or_else(keep_alive)),
    };
    Ok(Reply::Stream { format, first })
}

async fn whole(mut format: Box<dyn Format>) -> Result<Response, ApiError> {
    let mut out = Vec::new();
    while let Some(next) = format.run().next().await {
        let (index, event) = next?;
        format.write(&mut out, index, event)?;
    }
    format.run().progress.finish();
    format.write_end(&mut out);
    Ok(([(header::CONTENT_TYPE, "application/json")], out).into_response())
}
