//! Answers a request, either as one JSON object or as server-sent events. A format of `api` makes both from the same parts.

use super::{
    answer::Run,
    incoming::{Incoming, Job},
    passed::PassedAnswer,
    sse::{Begun, events},
};
use crate::{admission::Admitted, error::ApiError};
use axum::{
    http::header,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use tandem_api::answer::{AnswerFormat, KEEP_ALIVE};

/// The reply to a request whose answer has begun.
pub(super) enum Reply {
    Whole(Response),
    Stream(Box<Begun>),
    Passed(Box<PassedAnswer>),
}

impl Reply {
    /// Returns the response. If it is streamed, its body owns what was reserved for the request.
    pub(super) fn response(self, mut admitted: Admitted) -> Response {
        match self {
            Self::Stream(begun) => events(*begun, admitted),
            Self::Passed(answer) => answer.response(admitted),
            Self::Whole(response) => {
                admitted.finish(response.status());
                response
            }
        }
    }
}

/// Takes the job's tokens from the limit of its key, and runs the job to the end of its answer. If the answer is streamed, runs the job
/// only until its first part or until a comment has to be sent.
///
/// # Errors
/// Too few tokens are left, or the answer failed before it began. A later error is sent as an event of the stream.
pub(super) async fn respond(incoming: &Incoming, job: Job) -> Result<Reply, ApiError> {
    incoming.charge(&job)?;
    let is_streamed = job.options.stream.is_some();
    let (mut run, format) = Run::new(incoming, job);
    if !is_streamed {
        return whole(run, format).await.map(Reply::Whole);
    }
    let keep_alive = || Bytes::from_static(KEEP_ALIVE);
    let first = match run.next_or_comment().await {
        Ok(next) => next.transpose()?.ok_or_else(keep_alive),
        Err(comment) => Err(comment.unwrap_or_else(keep_alive)),
    };
    Ok(Reply::Stream(Box::new(Begun { run, format, first })))
}

async fn whole(mut run: Run, mut format: Box<dyn AnswerFormat>) -> Result<Response, ApiError> {
    let mut out = Vec::new();
    while let Some(next) = run.next().await {
        let (index, part) = next?;
        format.write(&run.context, &mut out, index, part);
    }
    run.finish();
    format.write_end(&run.context, &mut out);
    Ok(([(header::CONTENT_TYPE, "application/json")], out).into_response())
}
