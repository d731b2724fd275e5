//! The HTTP client of a llama.cpp server.

use super::{
    lost::Tokenized,
    request::{BodySettings, CompletionBody},
    response::{self, AnswerEvent},
};
use crate::{
    api::{Api, Call, Chunk, EngineFailure, Exported, Finish, Usage},
    failure,
    http::{self, HttpClient},
    server::{Instance, Server},
};
use bytes::Bytes;
use eventsource_stream::{EventStreamError, Eventsource};
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use hyper::Method;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use std::{borrow::Cow, collections::HashMap, sync::Arc, time::Duration};
use tandem_engine::{Generate, KvHandle, Refusal, Sampling, TokenLogprobs};
use tandem_kv::TokenId;
use tokio_util::sync::CancellationToken;

/// The time within which the server must answer a request that needs no step of the model.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// A llama.cpp server.
pub(super) struct Client {
    http: HttpClient,
    settings: BodySettings,
    running: Arc<Running>,
}

/// The requests that run, by their ids. Cancelling one ends its stream.
type Running = Mutex<HashMap<String, CancellationToken>>;

/// A model that the server serves.
#[derive(Debug, Deserialize)]
pub(super) struct Model {
    pub id: String,
    #[serde(default)]
    pub meta: Option<ModelMeta>,
}

#[derive(Debug, Deserialize)]
pub(super) struct ModelMeta {
    pub n_vocab: Option<usize>,
}

/// The server's properties.
#[derive(Debug, Deserialize)]
pub(super) struct Props {
    /// Sequences that it runs at a time. Absent in a router of several servers.
    pub total_slots: Option<u32>,
    pub default_generation_settings: Option<SlotSettings>,
    pub eos_token: Option<String>,
    pub build_info: Option<String>,
    /// The path from which it loaded the model.
    pub model_path: Option<String>,
    /// Text that stands for images in prompts. Each server chooses one at its start.
    media_marker: Option<String>,
}

#[derive(Debug, Deserialize)]
pub(super) struct SlotSettings {
    /// The context length of each slot.
    pub n_ctx: u32,
}

impl Client {
    pub fn new(http: HttpClient, settings: BodySettings) -> Self {
        Self { http, settings, running: Arc::default() }
    }
}

/// Returns the body of a GET.
async fn get(http: &HttpClient, path: &str) -> Result<Bytes, EngineFailure> {
    failure::check(http.read(Method::GET, path, None, ANSWER_TIMEOUT).await?)
}

/// Returns the models that the server serves.
///
/// # Errors
/// The server does not answer, or answers with an error.
pub(super) async fn models(http: &HttpClient) -> Result<Vec<Model>, EngineFailure> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<Model>,
    }
    Ok(response::json::<Models>(&get(http, "/v1/models").await?)?.data)
}

/// Returns the server's properties.
///
/// # Errors
/// The server does not answer, or answers with an error.
pub(super) async fn props(http: &HttpClient) -> Result<Props, EngineFailure> {
    response::json(&get(http, "/props").await?)
}

/// Returns the token with this text, such as `<|im_end|>`; `None` if there is no such token.
///
/// # Errors
/// The server does not answer, or answers with an error.
pub(super) async fn special_token(http: &HttpClient, text: &str) -> Result<Option<TokenId>, EngineFailure> {
    #[derive(Deserialize)]
    struct Tokens {
        tokens: Vec<TokenId>,
    }
    let request = json!({ "content": text, "add_special": false, "parse_special": true });
    let Tokens { tokens } = response::json(&tokenize(http, &request).await?)?;
    Ok(if let [token] = *tokens.as_slice() { Some(token) } else { None })
}

async fn tokenize(http: &HttpClient, request: &serde_json::Value) -> Result<Bytes, EngineFailure> {
    let body = Some(request.to_string().into_bytes());
    failure::check(http.read(Method::POST, "/tokenize", body, ANSWER_TIMEOUT).await?)
}

#[tonic::async_trait]
impl Server for Client {
    async fn check_health(&self) -> Result<Instance, EngineFailure> {
        get(&self.http, "/health").await?;
        Ok(props(&self.http).await?.instance())
    }
}

impl Props {
    /// Returns what distinguishes the server from one that is started after it.
    pub fn instance(self) -> Instance {
        self.media_marker
    }
}

#[tonic::async_trait]
impl Api for Client {
    fn check(&self, generate: &Generate) -> Result<(), Refusal> {
        let why = match generate {
            Generate { namespace, .. } if self.settings.prefix_caching && !namespace.is_shared() => {
                "llama.cpp does not separate the caches of clients: this worker serves requests without cache_salt, of frontends without \
                 --cache-isolation account; with --no-prefix-caching it serves all"
            }
            Generate { prompt_logprobs: Some(_), .. } => "llama.cpp does not report the logprobs of prompts",
            Generate { sampling: Sampling { min_tokens: 1.., .. }, .. } => "llama.cpp has no min_tokens",
            _ => return Ok(()),
        };
        Err(Refusal::Unsupported(Cow::Borrowed(why)))
    }

    async fn export(&self, _: &Call) -> Result<Exported, EngineFailure> {
        Err(EngineFailure::Invalid("llama.cpp does not export KV".to_owned()))
    }

    async fn generate(
        &self,
        call: &Call,
        sampling: &Sampling,
        _: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<Chunk, EngineFailure>>, EngineFailure> {
        let body = CompletionBody::new(&call.tokens, sampling, &self.settings);
        let body = serde_json::to_vec(&body).expect("a body is plain data");
        let aborted = CancellationToken::new();
        self.running.lock().insert(call.request_id.clone(), aborted.clone());
        let answer = Answer {
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
        // An abort ends the request by dropping its connection.
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
                    None => Err(EngineFailure::Protocol("the answer has no last event".to_owned())),
                };
                let continues = chunk.as_ref().is_ok_and(|chunk| chunk.usage.is_none());
                Some((chunk, continues.then_some((answer, events))))
            }
        });
        Ok(chunks.boxed())
    }

    async fn prompt_logprobs(&self, _: &Call, _: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        Err(EngineFailure::Invalid("llama.cpp does not report the logprobs of prompts".to_owned()))
    }

    async fn abort(&self, request_id: &str) {
        if let Some(aborted) = self.running.lock().get(request_id) {
            aborted.cancel();
        }
    }
}

/// Sends a request, and returns its answer once it has begun: when the server begins with the prompt.
async fn events(http: &HttpClient, body: Vec<u8>) -> Result<BoxStream<'static, Result<String, EngineFailure>>, EngineFailure> {
    let answer = http.send(Method::POST, "/completion", &[], Some(body)).await?;
    let status = answer.status();
    if !status.is_success() {
        return Err(failure::of(status.as_u16(), &http::whole(answer).await.unwrap_or_default()));
    }
    let events = Box::pin(http::pieces(answer)).eventsource().map(|event| match event {
        Ok(event) => Ok(event.data),
        Err(EventStreamError::Transport(error)) => Err(error.into()),
        Err(error) => Err(EngineFailure::Protocol(error.to_string())),
    });
    Ok(events.boxed())
}

/// Takes a request out of the running ones when it is dropped.
struct RunningGuard {
    running: Arc<Running>,
    request_id: String,
}

impl Drop for RunningGuard {
    fn drop(&mut self) {
        self.running.lock().remove(&self.request_id);
    }
}

/// The state of a streamed answer.
struct Answer {
    http: HttpClient,
    stop_token_ids: Vec<TokenId>,
    top: Option<u32>,
    end_token: Option<TokenId>,
    /// Tokens that the server has generated, as of the last event.
    generated: u32,
    cached_tokens: Option<u32>,
    _running: RunningGuard,
}

impl Answer {
    /// Returns the part of the answer that an event has.
    async fn chunk(&mut self, event: String) -> Result<Chunk, EngineFailure> {
        match response::event(event.as_bytes(), self.top)? {
            AnswerEvent::Prompt { cached_tokens } => {
                self.cached_tokens = Some(cached_tokens);
                Ok(Chunk { counted: self.cached_tokens, ..Chunk::default() })
            }
            AnswerEvent::Token { token, logprobs, text, generated } => {
                let lost = generated.saturating_sub(self.generated) > 1;
                self.generated = generated;
                let ids = if lost { self.tokens(&text).await? } else { vec![token] };
                let mut tokens: Vec<_> = ids.into_iter().map(|token| (token, None)).collect();
                tokens.last_mut().into_iter().for_each(|(_, of_last)| of_last.clone_from(&logprobs));
                if let Some(stop) = tokens.iter().position(|(token, _)| self.stop_token_ids.contains(token)) {
                    tokens.truncate(stop + 1);
                    return Ok(Chunk { tokens, ..self.end(Finish::Stop) });
                }
                Ok(Chunk { tokens, ..Chunk::default() })
            }
            AnswerEvent::End { finish, generated, cached_tokens } => {
                self.cached_tokens = cached_tokens.or(self.cached_tokens);
                // An end-of-sequence token within a character has no event of its own.
                let lost = finish == Finish::Stop && generated > self.generated;
                let tokens = self.end_token.filter(|_| lost).map(|token| (token, None));
                Ok(Chunk { tokens: tokens.into_iter().collect(), ..self.end(finish) })
            }
        }
    }

    /// Returns the tokens of a text whose tokens the server did not all report.
    async fn tokens(&self, text: &str) -> Result<Vec<TokenId>, EngineFailure> {
        let request = json!({ "content": text, "add_special": false, "parse_special": false, "with_pieces": true });
        response::json::<Tokenized>(&tokenize(&self.http, &request).await?)?.of(text)
    }

    fn end(&self, finish: Finish) -> Chunk {
        Chunk { finish: Some(finish), usage: Some(Usage { cached_tokens: self.cached_tokens }), ..Chunk::default() }
    }
}
