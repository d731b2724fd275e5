//! The HTTP client of a llama.cpp server.

use super::{
    lost::Tokenized,
    request::{BodySettings, CompletionBody},
    response::{self, CompletionEvent},
};
use crate::{
    api::{AnswerChunk, Api, EngineCall, EngineFailure, EngineServer, EngineUsage, Finish, Instance},
    calls, failure,
    http::{self, EngineHttp},
    server,
};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use hyper::Method;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use std::{borrow::Cow, collections::HashMap, sync::Arc};
use tandem_engine::{Generate, KvHandle, Refusal, Sampling, TokenLogprobs};
use tandem_kv::TokenId;
use tokio_util::sync::CancellationToken;

pub(super) struct LlamaCppClient {
    http: EngineHttp,
    settings: BodySettings,
    running: Arc<RunningRequests>,
}

/// The running requests by their ids. Cancelling a token ends the stream of its request.
type RunningRequests = Mutex<HashMap<String, CancellationToken>>;

#[derive(Debug, Deserialize)]
pub(super) struct ListedModel {
    pub id: String,
    #[serde(default)]
    pub meta: Option<ModelMeta>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ModelMeta {
    pub n_vocab: Option<usize>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Props {
    /// The number of sequences that the server runs at the same time; absent if the server is a router in front of several servers.
    pub total_slots: Option<u32>,
    pub default_generation_settings: Option<SlotSettings>,
    pub eos_token: Option<String>,
    pub build_info: Option<String>,
    pub model_path: Option<String>,
    /// The text that stands for an image in a prompt. Each server chooses it at random when it starts.
    media_marker: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct SlotSettings {
    pub n_ctx: u32,
}

impl LlamaCppClient {
    pub fn new(http: EngineHttp, settings: BodySettings) -> Self {
        Self { http, settings, running: Arc::default() }
    }
}

pub(super) async fn models(http: &EngineHttp) -> Result<Vec<ListedModel>, EngineFailure> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<ListedModel>,
    }
    Ok(calls::get_json::<Models>(http, "/v1/models").await?.data)
}

pub(super) async fn props(http: &EngineHttp) -> Result<Props, EngineFailure> {
    calls::get_json(http, "/props").await
}

/// Returns the id of the token with this text, such as `<|im_end|>`; `None` if there is no such token.
///
/// # Errors
/// Fails if the server does not answer, or answers with an error.
pub(super) async fn special_token(http: &EngineHttp, text: &str) -> Result<Option<TokenId>, EngineFailure> {
    #[derive(Deserialize)]
    struct Tokens {
        tokens: Vec<TokenId>,
    }
    let request = json!({ "content": text, "add_special": false, "parse_special": true });
    let Tokens { tokens } = calls::json(&calls::post(http, "/tokenize", &request).await?)?;
    Ok(if let [token] = *tokens.as_slice() { Some(token) } else { None })
}

#[tonic::async_trait]
impl EngineServer for LlamaCppClient {
    async fn check_health(&self) -> Result<Instance, EngineFailure> {
        server::check_engine(&self.http).await?;
        Ok(props(&self.http).await?.instance())
    }
}

impl Props {
    /// Returns a value that differs between two runs of a server at one address. Older servers have no marker; their value changes only
    /// with the model or the context.
    pub fn instance(&self) -> Instance {
        let context = self.default_generation_settings.as_ref().map(|slot| slot.n_ctx);
        Some(format!("{:?}", (&self.media_marker, &self.model_path, context)))
    }
}

#[tonic::async_trait]
impl Api for LlamaCppClient {
    fn check(&self, generate: &Generate) -> Result<(), Refusal> {
        let why = match generate {
            Generate { namespace, .. } if self.settings.prefix_caching && !namespace.is_shared() => {
                "llama.cpp does not separate the caches of clients: this worker serves only requests without cache_salt from frontends without \
                 --cache-isolation account; with --no-prefix-caching it serves all requests"
            }
            Generate { prompt_logprobs: Some(_), .. } => "llama.cpp does not report the logprobs of prompts",
            Generate { sampling: Sampling { min_tokens: 1.., .. }, .. } => "llama.cpp has no min_tokens",
            Generate { sampling, .. } if !sampling.allowed_token_ids.is_empty() => "llama.cpp has no allowed_token_ids",
            Generate { sampling, .. } if !sampling.bad_words.is_empty() => "llama.cpp has no bad_words",
            Generate { sampling, .. } if !sampling.logprob_token_ids.is_empty() => "llama.cpp has no logprob_token_ids",
            Generate { sampling: Sampling { constraint: Some(constraint), .. }, .. } => match super::request::check(constraint) {
                Ok(()) => return Ok(()),
                Err(why) => why,
            },
            _ => return Ok(()),
        };
        Err(Refusal::Unsupported(Cow::Borrowed(why)))
    }

    async fn generate(
        &self,
        call: &EngineCall,
        sampling: &Sampling,
        _: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure> {
        let body = CompletionBody::new(&call.tokens, sampling, &self.settings);
        let body = serde_json::to_vec(&body).expect("a body is plain data");
        let aborted = CancellationToken::new();
        self.running.lock().insert(call.request_id.clone(), aborted.clone());
        let answer = CompletionStream {
            http: self.http.clone(),
            stop_token_ids: sampling.stop_token_ids.clone(),
            top: sampling.logprobs,
            end_token: self.settings.end_token,
            generated: 0,
            cached_tokens: None,
            _running: RunningGuard { running: Arc::clone(&self.running), request_id: call.request_id.clone() },
        };
        let http = self.http.clone();
        let events = stream::once(async move { events(&http, body).await }).flat_map(|events| match events {
            Ok(events) => events,
            Err(error) => stream::once(async { Err(error) }).boxed(),
        });
        // Dropping the connection is the only way to abort a request in the server.
        let events = events.take_until(aborted.clone().cancelled_owned()).boxed();
        let chunks = stream::unfold(Some((answer, events)), move |state| {
            let aborted = aborted.clone();
            async move {
                let (mut answer, mut events) = state?;
                let chunk = match events.next().await {
                    Some(event) => match event {
                        Ok(event) => answer.chunk(event).await,
                        Err(error) => Err(error),
                    },
                    None if aborted.is_cancelled() => Ok(answer.end(Finish::Aborted)),
                    None => Err(EngineFailure::Protocol("the answer ended without its last event".to_owned())),
                };
                // After the usage, the connection is closed: the server may still generate, and each open connection takes one of its few threads.
                let continues = chunk.as_ref().is_ok_and(|chunk| chunk.usage.is_none());
                Some((chunk, continues.then_some((answer, events))))
            }
        });
        Ok(chunks.boxed())
    }

    async fn prompt_logprobs(&self, _: &EngineCall, _: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        Err(EngineFailure::Invalid("llama.cpp does not report the logprobs of prompts".to_owned()))
    }

    async fn abort(&self, request_id: &str) {
        if let Some(aborted) = self.running.lock().get(request_id) {
            aborted.cancel();
        }
    }
}

/// Sends a request. Returns its answer when the server has begun to compute the prompt.
async fn events(http: &EngineHttp, body: Vec<u8>) -> Result<BoxStream<'static, Result<String, EngineFailure>>, EngineFailure> {
    let answer = http.send(Method::POST, "/completion", &[], Some(body)).await?;
    if !answer.status().is_success() {
        return Err(failure::read(answer).await);
    }
    Ok(http::events(answer).map(|event| Ok(event?)).boxed())
}

struct RunningGuard {
    running: Arc<RunningRequests>,
    request_id: String,
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.running.lock().remove(&self.request_id);
    }
}

struct CompletionStream {
    http: EngineHttp,
    stop_token_ids: Vec<TokenId>,
    top: Option<u32>,
    end_token: Option<TokenId>,
    /// The number of tokens that the server has generated, as its last event reported.
    generated: u32,
    cached_tokens: Option<u32>,
    _running: RunningGuard,
}

impl CompletionStream {
    async fn chunk(&mut self, event: String) -> Result<AnswerChunk, EngineFailure> {
        match response::event(event.as_bytes(), self.top)? {
            CompletionEvent::Prompt { cached_tokens } => {
                self.cached_tokens = Some(cached_tokens);
                Ok(AnswerChunk { counted: self.cached_tokens, ..AnswerChunk::default() })
            }
            CompletionEvent::Token { token, logprobs, text, generated } => {
                let lost = generated.saturating_sub(self.generated) > 1;
                self.generated = generated;
                let ids = if lost { self.tokens(&text).await? } else { vec![token] };
                let mut tokens: Vec<_> = ids.into_iter().map(|token| (token, None)).collect();
                tokens.last_mut().into_iter().for_each(|(_, of_last)| of_last.clone_from(&logprobs));
                if let Some(stop) = tokens.iter().position(|(token, _)| self.stop_token_ids.contains(token)) {
                    tokens.truncate(stop + 1);
                    return Ok(AnswerChunk { tokens, ..self.end(Finish::Stop) });
                }
                Ok(AnswerChunk { tokens, ..AnswerChunk::default() })
            }
            CompletionEvent::End { finish, generated, cached_tokens } => {
                self.cached_tokens = cached_tokens.or(self.cached_tokens);
                // The server sends no event for an end-of-sequence token that follows an incomplete UTF-8 character.
                let lost = finish == Finish::Stop && generated > self.generated;
                let tokens = self.end_token.filter(|_| lost).map(|token| (token, None));
                Ok(AnswerChunk { tokens: tokens.into_iter().collect(), ..self.end(finish) })
            }
        }
    }

    /// Returns the tokens of a text, of which the server has reported only some.
    async fn tokens(&self, text: &str) -> Result<Vec<TokenId>, EngineFailure> {
        let request = json!({ "content": text, "add_special": false, "parse_special": false, "with_pieces": true });
        calls::json::<Tokenized>(&calls::post(&self.http, "/tokenize", &request).await?)?.of(text)
    }

    fn end(&self, finish: Finish) -> AnswerChunk {
        AnswerChunk {
            finish: Some(finish),
            usage: Some(EngineUsage { cached_tokens: self.cached_tokens, prompt_tokens: None }),
            ..AnswerChunk::default()
        }
    }
}
