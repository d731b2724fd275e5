//! The HTTP client of a vLLM server.

use super::{
    handle, metrics,
    metrics::EngineConstants,
    request::{GenerateBody, SamplingParams, VllmStreamOptions},
    response,
};
use crate::{
    api::{AnswerChunk, Api, EngineCall, EngineFailure, Exported},
    failure,
    http::{self, ANSWER_MAX, EngineHttp},
    salt::cache_salt,
    server::{self, EngineServer, Instance},
};
use bytes::Bytes;
use futures::{
    StreamExt,
    stream::{self, BoxStream},
};
use hyper::{Method, Response, body::Incoming};
use serde::{Deserialize, de::DeserializeOwned};
use serde_json::json;
use std::{collections::HashMap, time::Duration};
use tandem_engine::{KvHandle, Sampling, TokenLogprobs};
use tandem_kv::HashKey;

/// Time limit for the answer to a request for which the server need not run the model.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum size of an answer with the logprobs of a prompt, in bytes.
const PROMPT_LOGPROBS_MAX: usize = 64 << 20;

/// The prefix that vLLM adds to the id of a request to `/inference/v1/generate`.
const ID_PREFIX: &str = "generate-tokens-";

pub(super) struct VllmClient {
    http: EngineHttp,
    rank: Option<u32>,
    hash_key: HashKey,
    served: ServedModels,
    /// The time for which the engine is certain to hold a prompt's KV, so that another engine can pull it.
    handle_valid: Duration,
    hits_are_reported: bool,
}

#[derive(Clone, Debug, Default)]
pub(super) struct ServedModels {
    pub id: String,
    /// The name or path from which the server loaded the base model; `None` if the server does not report it.
    pub root: Option<String>,
    /// The maximum length of a sequence, in tokens.
    pub context_length: u32,
    pub loras: Vec<String>,
}

pub(super) struct ClientSettings {
    pub http: EngineHttp,
    pub rank: Option<u32>,
    pub hash_key: HashKey,
    pub handle_valid: Duration,
}

#[derive(Debug, Deserialize)]
struct VllmModel {
    id: String,
    root: Option<String>,
    max_model_len: Option<u32>,
    /// The base model of a LoRA.
    parent: Option<String>,
}

/// The ZMQ endpoints and the topic of a rank's KV events, as `/kv_event_sources` reports them.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct EventSource {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    publisher: String,
    pub endpoint: String,
    pub replay_endpoint: Option<String>,
    #[serde(default)]
    pub topic: String,
}

impl VllmClient {
    pub fn new(settings: ClientSettings) -> Self {
        let ClientSettings { http, rank, hash_key, handle_valid } = settings;
        Self { http, rank, hash_key, served: ServedModels::default(), handle_valid, hits_are_reported: true }
    }

    /// Sets the models to which requests are sent, and whether the engine's events are to report cached blocks that a request uses.
    pub fn serving(self, served: ServedModels, constants: &EngineConstants) -> Self {
        Self { served, hits_are_reported: !constants.has_groups(), ..self }
    }

    pub fn http(&self) -> &EngineHttp {
        &self.http
    }

    async fn get(&self, path: &str) -> Result<Bytes, EngineFailure> {
        failure::check(self.http.read(Method::GET, path, None, ANSWER_TIMEOUT).await?)
    }

    async fn get_json<T: DeserializeOwned>(&self, path: &str) -> Result<T, EngineFailure> {
        serde_json::from_slice(&self.get(path).await?).map_err(|error| EngineFailure::Protocol(error.to_string()))
    }

    /// Returns the models that the server serves now; `None` if there are none. If the base model has several names, the first one is used.
    ///
    /// # Errors
    /// Fails if the server does not answer, or answers with an error.
    pub async fn models(&self) -> Result<Option<ServedModels>, EngineFailure> {
        #[derive(Deserialize)]
        struct Models {
            data: Vec<VllmModel>,
        }
        let (loras, bases): (Vec<_>, Vec<_>) =
            self.get_json::<Models>("/v1/models").await?.data.into_iter().partition(|model| model.parent.is_some());
        let loras = loras.into_iter().map(|lora| lora.id).collect();
        Ok(bases.into_iter().next().map(|VllmModel { id, root, max_model_len, .. }| ServedModels {
            id,
            root,
            context_length: max_model_len.unwrap_or(u32::MAX),
            loras,
        }))
    }

    pub async fn version(&self) -> Result<String, EngineFailure> {
        #[derive(Deserialize)]
        struct Version {
            version: String,
        }
        Ok(self.get_json::<Version>("/version").await?.version)
    }

    pub async fn metrics(&self) -> Result<String, EngineFailure> {
        Ok(String::from_utf8_lossy(&self.get("/metrics").await?).into_owned())
    }

    /// Returns the source of a rank's KV events; `None` if the rank publishes none, or the server does not report it.
    pub async fn event_source(&self, rank: u32) -> Option<EventSource> {
        let sources = self.get_json::<HashMap<String, EventSource>>("/kv_event_sources").await;
        let sources =
            sources.inspect_err(|error| tracing::debug!(%error, "the engine does not report where it publishes KV events"));
        sources.ok()?.remove(&rank.to_string()).filter(|source| source.enable_kv_cache_events && source.publisher == "zmq")
    }

    /// Sends a generation request. Returns when the head of the answer has arrived; the caller reads the body.
    async fn send(&self, call: &EngineCall, body: &GenerateBody<'_>) -> Result<Response<Incoming>, EngineFailure> {
        let mut headers = vec![("x-request-id", call.request_id.clone())];
        headers.extend(self.rank.map(|rank| ("x-data-parallel-rank", rank.to_string())));
        let json = serde_json::to_vec(body).expect("a request body can be serialized");
        let answer = self.http.send(Method::POST, "/inference/v1/generate", &headers, Some(json)).await?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        match (failure::read(answer).await, body.model) {
            (EngineFailure::Denied { status: 404, .. }, Some(lora)) => Err(EngineFailure::Invalid(format!(
                "the server does not serve the LoRA {lora:?} any more; load the LoRA again, or restart the worker so that it forgets the LoRA"
            ))),
            (failure, _) => Err(failure),
        }
    }

    fn body<'a>(&self, call: &'a EngineCall, sampling_params: SamplingParams<'a>) -> GenerateBody<'a> {
        let cache_salt = cache_salt(&self.hash_key, &call.namespace);
        GenerateBody {
            model: call.namespace.model().filter(|model| self.served.loras.iter().any(|lora| lora == model)),
            token_ids: &call.tokens,
            sampling_params: if self.hits_are_reported { sampling_params } else { sampling_params.without_hits() },
            cache_salt,
            stream: false,
            stream_options: None,
            kv_transfer_params: None,
        }
    }
}

#[tonic::async_trait]
impl EngineServer for VllmClient {
    async fn check_health(&self) -> Result<Instance, EngineFailure> {
        server::check_engine(&self.http).await?;
        Ok(metrics::started(&self.metrics().await?).map(|started| started.to_string()))
    }
}

#[tonic::async_trait]
impl Api for VllmClient {
    async fn export(&self, call: &EngineCall) -> Result<Exported, EngineFailure> {
        let sampling = Sampling::default();
        let body = GenerateBody {
            kv_transfer_params: Some(json!({ "do_remote_decode": true, "do_remote_prefill": false })),
            ..self.body(call, SamplingParams::prompt_only(&sampling, None))
        };
        let answer = response::answer(&http::whole(self.send(call, &body).await?, ANSWER_MAX).await?)?;
        let cached_tokens = answer.usage.as_ref().and_then(response::AnswerUsage::cached_tokens);
        let bytes = handle::to_bytes(answer.kv_transfer_params);
        let handle = bytes.map(|bytes| KvHandle { bytes, valid_for: self.handle_valid, chunks: Vec::new() });
        Ok(Exported { handle, cached_tokens })
    }

    async fn generate(
        &self,
        call: &EngineCall,
        sampling: &Sampling,
        pull: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure> {
        let room = (self.served.context_length as usize).saturating_sub(call.tokens.len()).max(1);
        let max_tokens = sampling.max_tokens.unwrap_or(u32::MAX).min(room.try_into().unwrap_or(u32::MAX));
        let body = GenerateBody {
            stream: true,
            stream_options: Some(VllmStreamOptions { include_usage: true }),
            kv_transfer_params: pull.map(|handle| handle::from_bytes(&handle.bytes)).transpose()?,
            ..self.body(call, SamplingParams::new(sampling, max_tokens))
        };
        let events = http::events(self.send(call, &body).await?);
        let wanted = response::WantedLogprobs { top: sampling.logprobs, tokens: sampling.logprob_token_ids.clone() };
        let chunks = events.map(move |event| match event?.as_str() {
            "[DONE]" => Ok(None),
            data => response::chunk(data.as_bytes(), &wanted).map(Some),
        });
        Ok(chunks.map(Result::transpose).take_while(|chunk| std::future::ready(chunk.is_some())).flat_map(stream::iter).boxed())
    }

    async fn prompt_logprobs(&self, call: &EngineCall, top: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        let sampling = Sampling::default();
        let body = self.body(call, SamplingParams::prompt_only(&sampling, Some(top)));
        let answer = response::answer(&http::whole(self.send(call, &body).await?, PROMPT_LOGPROBS_MAX).await?)?;
        response::prompt_logprobs(answer, &call.tokens, top)
    }

    async fn abort(&self, request_id: &str) {
        let ids = json!({ "request_ids": [format!("{ID_PREFIX}{request_id}")] });
        let answer = self
            .http
            .read(Method::POST, "/inference/v1/abort_requests", Some(ids.to_string().into_bytes()), ANSWER_TIMEOUT)
            .await;
        if let Err(error) = answer {
            tracing::debug!(%error, "a call to abort a request did not reach the engine");
        }
    }
}
