//! The HTTP client of a SGLang server.

use super::{
    info::ServerInfo,
    request::{self, SglangBody, SglangOptions},
    response::{self, ChunkReader},
};
use crate::{
    api::{AnswerChunk, Api, EngineCall, EngineFailure, EngineUsage, Exported, Finish, WantedLogprobs},
    calls, failure,
    http::{self, EngineHttp, HttpError, PROMPT_LOGPROBS_MAX},
    server::{self, EngineServer, Instance},
};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use hyper::{Method, Response, body::Incoming};
use serde_json::json;
use std::borrow::Cow;
use tandem_engine::{Generate, KvHandle, Refusal, Sampling, TokenLogprobs};

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
}

#[tonic::async_trait]
impl Api for SglangClient {
    fn check(&self, generate: &Generate) -> Result<(), Refusal> {
        request::check(&generate.sampling, &self.settings).map_err(|why| Refusal::Unsupported(Cow::Borrowed(why)))
    }

    async fn export(&self, _: &EngineCall) -> Result<Exported, EngineFailure> {
        Err(EngineFailure::Invalid("this worker's SGLang server sends no KV to other servers".to_owned()))
    }

    async fn generate(
        &self,
        call: &EngineCall,
        sampling: &Sampling,
        _: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure> {
        let body = SglangBody::new(call, sampling, &self.settings);
        let answer = AnswerStream {
            events: http::events(send(&self.http, &body).await?).boxed(),
            http: self.http.clone(),
            body,
            reader: ChunkReader::new(WantedLogprobs::of(sampling), sampling.stop_token_ids.clone()),
            is_constrained: sampling.constraint.is_some(),
            is_resumed: false,
        };
        let chunks = stream::unfold(Some(answer), async |answer| {
            let mut answer = answer?;
            let chunk = answer.next().await;
            let continues = chunk.as_ref().is_ok_and(|chunk| chunk.usage.is_none());
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
        let request = json!({ "rid": self.settings.rid(request_id) });
        if let Err(error) = calls::post(&self.http, "/abort_request", &request).await {
            tracing::debug!(%error, "a call to abort a request did not reach the engine");
        }
    }
}

struct AnswerStream {
    http: EngineHttp,
    /// The request. The generated tokens are appended to its tokens.
    body: SglangBody,
    events: BoxStream<'static, Result<String, HttpError>>,
    reader: ChunkReader,
    is_constrained: bool,
    /// Whether the answer has been continued beyond an end-of-sequence token.
    is_resumed: bool,
}

impl AnswerStream {
    async fn next(&mut self) -> Result<AnswerChunk, EngineFailure> {
        let ended = || EngineFailure::Protocol("the answer ended without a finish_reason".to_owned());
        let event = self.events.next().await.ok_or_else(ended)??;
        let mut chunk = self.reader.chunk(event.as_bytes())?;
        self.body.input_ids.extend(chunk.tokens.iter().map(|(token, _)| *token));
        let stops = self.body.input_ids.last().is_some_and(|last| self.reader.is_stop(*last));
        let Some(stop_token) = self.reader.stop_token().filter(|_| chunk.finish == Some(Finish::Stop) && !stops) else {
            return Ok(chunk);
        };
        if self.is_constrained {
            // The text is complete, and the server has not generated the token that would end it.
            chunk.tokens.push((stop_token, None));
        } else if !self.is_resumed {
            // The server always ends an answer at the model's end-of-sequence tokens, if any token ends it. The request does not name this one.
            (self.is_resumed, chunk.finish, chunk.usage) = (true, None, None);
            match self.body.resume(self.reader.begin_again()) {
                true => self.events = http::events(send(&self.http, &self.body).await?).boxed(),
                false => (chunk.finish, chunk.usage) = (Some(Finish::Length), Some(EngineUsage { cached_tokens: None })),
            }
        }
        Ok(chunk)
    }
}
