//! The HTTP client of a vLLM server.

use super::{
    handle, metrics,
    metrics::EngineConstants,
    request::{ContentPart, GenerateBody, SamplingParams, VllmStreamOptions, collapsed},
    response,
};
use crate::{
    api::{AnswerChunk, Api, EngineCall, EngineFailure, EngineServer, Exported, Instance, RoomCall, WantedLogprobs},
    calls, failure,
    http::{self, ANSWER_MAX, EngineHttp, PROMPT_LOGPROBS_MAX},
    kv_events::EventSource,
    served::{self, Loras},
    server,
};
use futures::{StreamExt, stream::BoxStream};
use hyper::{Method, Response, body::Incoming};
use serde::Deserialize;
use serde_json::json;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tandem_engine::{KvHandle, Sampling, TokenLogprobs};
use tandem_kv::{HashKey, cache_salt};

/// The prefix that vLLM adds to the id of a request to `/inference/v1/generate`.
const ID_PREFIX: &str = "generate-tokens-";

/// The path at which vLLM converts a chat to tokens.
const RENDER: &str = "/v1/chat/completions/render";

/// A gray PNG of 64 × 64 pixels, in base64.
const TEST_IMAGE: &str = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77SAA6VEEAoFAIBAIBAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII=";

pub(super) struct VllmClient {
    http: EngineHttp,
    rank: Option<u32>,
    hash_key: HashKey,
    context_length: u32,
    loras: Arc<Loras>,
    /// The time for which the engine is certain to hold a prompt's KV, so that another engine can pull it.
    handle_valid: Duration,
    hits_are_reported: bool,
}

pub(super) struct ClientSettings {
    pub http: EngineHttp,
    pub rank: Option<u32>,
    pub hash_key: HashKey,
    pub handle_valid: Duration,
}

impl VllmClient {
    pub fn new(settings: ClientSettings) -> Self {
        let ClientSettings { http, rank, hash_key, handle_valid } = settings;
        Self { http, rank, hash_key, context_length: 0, loras: Arc::default(), handle_valid, hits_are_reported: true }
    }

    /// Sets the models to which requests are sent, and whether the engine's events are to report cached blocks that a request uses.
    pub fn serving(self, context_length: u32, loras: Arc<Loras>, constants: &EngineConstants) -> Self {
        Self { context_length, loras, hits_are_reported: !constants.has_groups(), ..self }
    }

    pub fn http(&self) -> &EngineHttp {
        &self.http
    }

    pub async fn version(&self) -> Result<String, EngineFailure> {
        #[derive(Deserialize)]
        struct Version {
            version: String,
        }
        Ok(calls::get_json::<Version>(&self.http, "/version").await?.version)
    }

    pub async fn metrics(&self) -> Result<String, EngineFailure> {
        Ok(String::from_utf8_lossy(&calls::get(&self.http, "/metrics").await?).into_owned())
    }

    /// Returns the source of a rank's KV events; `None` if the rank publishes none, or the server does not report it.
    pub async fn event_source(&self, rank: u32) -> Option<EventSource> {
        /// The publisher of a rank's KV events, as `/kv_event_sources` reports it.
        #[derive(Deserialize)]
        struct RankPublisher {
            #[serde(default)]
            enable_kv_cache_events: bool,
            #[serde(default)]
            publisher: String,
            endpoint: String,
            replay_endpoint: Option<String>,
            #[serde(default)]
            topic: String,
        }
        let publishers = calls::get_json::<HashMap<String, RankPublisher>>(&self.http, "/kv_event_sources").await;
        let publishers =
            publishers.inspect_err(|error| tracing::debug!(%error, "the engine does not report where it publishes KV events"));
        let of_rank = publishers.ok()?.remove(&rank.to_string())?;
        let RankPublisher { enable_kv_cache_events, publisher, endpoint, replay_endpoint, topic } = of_rank;
        (enable_kv_cache_events && publisher == "zmq").then_some(EventSource { endpoint, replay_endpoint, topic })
    }

    /// Returns whether the engine reads images: whether it renders a small one. A server without images, or of an old version, refuses it.
    ///
    /// # Errors
    /// Fails if the server does not answer, or is at capacity.
    pub async fn reads_images(&self) -> Result<bool, EngineFailure> {
        let url = format!("data:image/png;base64,{TEST_IMAGE}");
        let content = json!([{ "type": "image_url", "image_url": { "url": url } }]);
        let chat = json!({ "messages": [{ "role": "user", "content": content }], "mm_payload": "none" });
        match calls::post(&self.http, RENDER, &chat).await {
            Ok(_) => Ok(true),
            Err(error @ (EngineFailure::Connection(_) | EngineFailure::Full(_))) => Err(error),
            Err(error) => {
                tracing::debug!(%error, "the engine reads no images");
                Ok(false)
            }
        }
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
            (EngineFailure::Denied { status: 404, .. }, Some(lora)) => Err(EngineFailure::Unloaded(lora.to_owned())),
            (failure, _) => Err(failure),
        }
    }

    fn body<'a>(&self, call: &'a EngineCall, sampling_params: SamplingParams<'a>) -> GenerateBody<'a> {
        let cache_salt = cache_salt(&self.hash_key, &call.namespace);
        GenerateBody {
            model: self.loras.of(&call.namespace),
            token_ids: collapsed(&call.tokens, &call.images),
            content_parts: call.images.iter().map(ContentPart::new).collect(),
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

    async fn loras(&self) -> Result<Vec<String>, EngineFailure> {
        served::loras(&self.http).await
    }
}

#[tonic::async_trait]
impl Api for VllmClient {
    async fn export(&self, call: &EngineCall, _: Option<RoomCall>) -> Result<Exported, EngineFailure> {
        let sampling = Sampling::default();
        let body = GenerateBody {
            kv_transfer_params: Some(json!({ "do_remote_decode": true, "do_remote_prefill": false })),
            ..self.body(call, SamplingParams::prompt_only(&sampling, None))
        };
        let answer = response::answer(&http::whole(self.send(call, &body).await?, ANSWER_MAX).await?)?;
        let cached_tokens = answer.usage.as_ref().and_then(response::AnswerUsage::cached_tokens);
        let bytes = handle::to_bytes(answer.kv_transfer_params);
        let handle = bytes.map(|bytes| Some(KvHandle { bytes, valid_for: self.handle_valid, chunks: Vec::new() }));
        Ok(Exported { handle, cached_tokens })
    }

    async fn generate(
        &self,
        call: &EngineCall,
        sampling: &Sampling,
        pull: Option<KvHandle>,
    ) -> Result<BoxStream<'static, Result<AnswerChunk, EngineFailure>>, EngineFailure> {
        let room = (self.context_length as usize).saturating_sub(call.tokens.len()).max(1);
        let max_tokens = sampling.max_tokens.unwrap_or(u32::MAX).min(room.try_into().unwrap_or(u32::MAX));
        let body = GenerateBody {
            stream: true,
            stream_options: Some(VllmStreamOptions { include_usage: true }),
            kv_transfer_params: pull.map(|handle| handle::from_bytes(&handle.bytes)).transpose()?,
            ..self.body(call, SamplingParams::new(sampling, max_tokens))
        };
        let events = http::events(self.send(call, &body).await?);
        let wanted = WantedLogprobs::of(sampling);
        let chunks = events.map(move |event| match event?.as_str() {
            "[DONE]" => Err(EngineFailure::Protocol("the engine's answer ended without its usage".to_owned())),
            data => response::chunk(data.as_bytes(), &wanted),
        });
        Ok(chunks.boxed())
    }

    async fn prompt_logprobs(&self, call: &EngineCall, top: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        let sampling = Sampling::default();
        let body = self.body(call, SamplingParams::prompt_only(&sampling, Some(top)));
        let answer = response::answer(&http::whole(self.send(call, &body).await?, PROMPT_LOGPROBS_MAX).await?)?;
        response::prompt_logprobs(answer, &call.tokens, top)
    }

    async fn abort(&self, request_id: &str) {
        let ids = json!({ "request_ids": [format!("{ID_PREFIX}{request_id}")] });
        if let Err(error) = calls::post(&self.http, "/inference/v1/abort_requests", &ids).await {
            tracing::debug!(%error, "a call to abort a request did not reach the engine");
        }
    }
}
