//! The HTTP client of a SGLang server.

use super::{
    info::ServerInfo,
    request::{self, SglangBody, SglangOptions},
    response::{self, ChunkReader},
};
use crate::{
    api::{
        AnswerChunk, Api, EngineCall, EngineFailure, EngineServer, EngineUsage, Exported, Finish, Instance, RoomCall,
        WantedLogprobs,
    },
    calls, failure,
    http::{self, ANSWER_MAX, EngineHttp, HttpError, PROMPT_LOGPROBS_MAX},
    served, server,
};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use hyper::{Method, Response, body::Incoming};
use serde_json::json;
use std::{borrow::Cow, time::Duration};
use tandem_engine::{Generate, KvHandle, Refusal, Sampling, TokenLogprobs};
use tokio::{runtime::Handle, time::sleep};

/// The time after which an abandoned request is aborted again.
const ABORT_AGAIN: Duration = Duration::from_secs(1);

pub(super) struct SglangClient {
    http: EngineHttp,
    settings: SglangOptions,
}

impl SglangClient {
    pub fn new(http: EngineHttp, settings: SglangOptions) -> Self {
        Self { http, settings }
    }
}

/// Sends a request. Returns when the head of the answer has arrived; the caller reads the body.
async fn send(http: &EngineHttp, body: &SglangBody) -> Result<Response<Incoming>, EngineFailure> {
    let json = serde_json::to_vec(body).expect("a request body can be serialized");
    let answer = http.send(Method::POST, "/generate", &[], Some(json)).await?;
    if answer.status().is_success() { Ok(answer) } else { Err(failure::read(answer).await) }
}

#[tonic::async_trait]
impl EngineServer for SglangClient {
    async fn check_health(&self) -> Result<Instance, EngineFailure> {
        server::check_engine(&self.http).await?;
        Ok(ServerInfo::read(&self.http).await?.instance())
    }

    async fn loras(&self) -> Result<Vec<String>, EngineFailure> {
        served::loras(&self.http).await
    }
}

#[tonic::async_trait]
impl Api for SglangClient {
    fn check(&self, generate: &Generate) -> Result<(), Refusal> {
        request::check(&generate.sampling, &self.settings).map_err(|why| Refusal::Unsupported(Cow::Borrowed(why)))
    }

    async fn export(&self, call: &EngineCall, room: Option<RoomCall>) -> Result<Exported, EngineFailure> {
        let RoomCall { room, sampling } = room.ok_or_else(|| EngineFailure::Protocol("no room was named".to_owned()))?;
        let mut body = SglangBody::new(call, &sampling, &self.settings).in_room(&room)?;
        body.stream = false;
        let mut running = RunningRequest::new(&self.http, &body);
        let answer = response::answer(&http::whole(send(&self.http, &body).await?, ANSWER_MAX).await?);
        running.has_ended = true;
        response::exported(&answer?)
    }

    async fn generate(
        &self,
        call: &EngineCall,
        sampling: &Sampling,
        pull: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure> {
        let body = SglangBody::new(call, sampling, &self.settings);
        let body = match &pull {
            Some(room) => body.in_room(room)?,
            None => body,
        };
        let running = RunningRequest::new(&self.http, &body);
        let answer = AnswerStream {
            running,
            events: http::events(send(&self.http, &body).await?).boxed(),
            http: self.http.clone(),
            body,
            reader: ChunkReader::new(WantedLogprobs::of(sampling), sampling.stop_token_ids.clone()),
            is_constrained: sampling.constraint.is_some(),
            is_continued: false,
            is_complete: false,
        };
        let chunks = stream::unfold(Some(answer), async |answer| {
            let mut answer = answer?;
            if answer.is_complete {
                while answer.events.next().await.is_some() {}
                return None;
            }
            let chunk = answer.next().await;
            answer.is_complete = chunk.as_ref().is_ok_and(|chunk| chunk.usage.is_some());
            let continues = chunk.is_ok();
            Some((chunk, continues.then_some(answer)))
        });
        Ok(chunks.boxed())
    }

    async fn prompt_logprobs(&self, call: &EngineCall, top: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        let body = SglangBody::prompt_logprobs(call, top, &self.settings);
        let answer = response::answer(&http::whole(send(&self.http, &body).await?, PROMPT_LOGPROBS_MAX).await?)?;
        response::prompt_logprobs(&answer, &call.tokens, top)
    }

    async fn abort(&self, request_id: &str) {
        let rid = self.settings.rid(request_id);
        // The server ignores the id of a request that it does not run.
        abort(&self.http, &request::continued(&rid)).await;
        abort(&self.http, &rid).await;
    }
}

async fn abort(http: &EngineHttp, rid: &str) {
    if let Err(error) = calls::post(http, "/abort_request", &json!({ "rid": rid })).await {
        tracing::debug!(%error, "a call to abort a request did not reach the engine");
    }
}

/// A request on the server. If this value is dropped before the request has ended, the request is aborted: the server looks for closed connections
/// only every few seconds, and one half of a request waits for the other for minutes.
struct RunningRequest {
    http: EngineHttp,
    rid: String,
    has_ended: bool,
}

impl RunningRequest {
    fn new(http: &EngineHttp, body: &SglangBody) -> Self {
        Self { http: http.clone(), rid: body.rid.clone(), has_ended: false }
    }
}

impl Drop for RunningRequest {
    fn drop(&mut self) {
        if let Some(runtime) = Handle::try_current().ok().filter(|_| !self.has_ended) {
            let (http, rid) = (self.http.clone(), std::mem::take(&mut self.rid));
            runtime.spawn(async move {
                abort(&http, &rid).await;
                // The first call is ignored if it arrives before the request.
                sleep(ABORT_AGAIN).await;
                abort(&http, &rid).await;
            });
        }
    }
}

struct AnswerStream {
    http: EngineHttp,
    running: RunningRequest,
    /// The request. The generated tokens are appended to its tokens.
    body: SglangBody,
    events: BoxStream<'static, Result<String, HttpError>>,
    reader: ChunkReader,
    is_constrained: bool,
    /// Whether the answer has been continued beyond an end-of-sequence token.
    is_continued: bool,
    /// Whether the chunk with the usage has been read.
    is_complete: bool,
}

impl AnswerStream {
    async fn next(&mut self) -> Result<AnswerChunk, EngineFailure> {
        let ended = || EngineFailure::Protocol("the answer ended without a finish_reason".to_owned());
        let event = self.events.next().await.ok_or_else(ended)??;
        let chunk = self.reader.chunk(event.as_bytes());
        self.running.has_ended = self.reader.has_ended;
        let mut chunk = chunk?;
        self.body.input_ids.extend(chunk.tokens.iter().map(|(token, _)| *token));
        let stops = self.body.input_ids.last().is_some_and(|last| self.reader.is_stop(*last));
        let Some(stop_token) = self.reader.stop_token().filter(|_| chunk.finish == Some(Finish::Stop) && !stops) else {
            return Ok(chunk);
        };
        if self.is_constrained {
            // The text is complete, and the server has not generated the token that would end it.
            chunk.tokens.push((stop_token, None));
        } else if self.body.is_in_room() {
            let message = "the decode server ended the answer at an end-of-sequence token that the request does not name as a stop token; \
                           send such requests to SGLang servers without --disaggregation-mode";
            return Err(EngineFailure::Invalid(message.to_owned()));
        } else if !self.is_continued {
            // The server always ends an answer at the model's end-of-sequence tokens, if any token ends it. The request does not name this one.
            (self.is_continued, chunk.finish, chunk.usage) = (true, None, None);
            match self.body.continue_answer(self.reader.begin_again()) {
                true => {
                    self.running = RunningRequest::new(&self.http, &self.body);
                    self.events = http::events(send(&self.http, &self.body).await?).boxed();
                }
                false => (chunk.finish, chunk.usage) = (Some(Finish::Length), Some(EngineUsage::default())),
            }
        }
        Ok(chunk)
    }
}
