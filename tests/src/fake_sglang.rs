//! A fake SGLang server without a model, for tests. Its answers and KV events have the fields of SGLang 0.5.23.

mod answer;
mod rooms;

use crate::fake_vllm::{
    engine::{Cache, Prompt, next_token_of},
    events::Publisher,
};
use answer::Generation;
use anyhow::Result;
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
    serve::ListenerExt,
};
use futures::stream;
use parking_lot::Mutex;
use rmpv::Value as MsgPack;
use rooms::{Room, SentKv};
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    io,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tandem_adapter::{EngineEvent, EngineHash};
use tokio::{
    net::TcpListener,
    sync::{Notify, oneshot, watch},
    task::JoinSet,
};

/// The end-of-sequence token of the fake model. It ends an answer even if the request does not name it, unless the request ignores it.
pub const END_TOKEN: u32 = 2;

/// The number of tokens in the fake model's vocabulary.
pub const VOCABULARY: u32 = 512;

/// The number of tokens of a text that a constraint allows.
pub const CONSTRAINED_TOKENS: usize = 3;

/// The sampling parameters that SGLang knows. It refuses requests with others.
const PARAMETERS: [&str; 18] = [
    "max_new_tokens",
    "min_new_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "sampling_seed",
    "stop_token_ids",
    "ignore_eos",
    CONSTRAINTS[0],
    CONSTRAINTS[1],
    CONSTRAINTS[2],
    CONSTRAINTS[3],
    "n",
];
const CONSTRAINTS: [&str; 4] = ["json_schema", "regex", "ebnf", "structural_tag"];

/// The settings of a fake SGLang server.
#[derive(Clone, Debug)]
pub struct SglangFake {
    /// The number of tokens in a block (`--page-size`).
    pub page_size: usize,
    /// The number of blocks in the memory of each rank's device.
    pub blocks: usize,
    /// The number of data-parallel ranks. Only a server with one rank publishes KV events.
    pub ranks: usize,
    /// The number of requests that a rank runs at a time (`--max-running-requests`).
    pub running_max: usize,
    /// Whether the server publishes KV events (`--kv-events-config`).
    pub events: bool,
    /// Whether each event of a streamed answer has only new tokens (`--incremental-streaming-output`).
    pub incremental: bool,
    /// Whether equal seeds give equal answers (`--enable-deterministic-inference`).
    pub deterministic: bool,
    /// The half of requests that the server computes (`--disaggregation-mode`): `null` for both.
    pub disaggregation_mode: &'static str,
    /// The names of the LoRAs that the server has loaded.
    pub loras: Vec<String>,
    /// The duration of a step.
    pub step: Duration,
    /// The time from the transfer of KV to the answer of the prefill server, which confirms the transfer.
    pub confirmation: Duration,
    /// The time after which the server aborts the id of a streamed answer, which may have ended (2 s in SGLang).
    pub delayed_abort: Duration,
}

impl Default for SglangFake {
    fn default() -> Self {
        Self {
            page_size: 32,
            blocks: 512,
            ranks: 1,
            running_max: 48,
            events: true,
            incremental: true,
            deterministic: true,
            disaggregation_mode: "null",
            loras: Vec::new(),
            step: Duration::from_millis(1),
            confirmation: Duration::ZERO,
            delayed_abort: Duration::from_secs(2),
        }
    }
}

/// A fake SGLang server, which runs until this value is dropped.
pub struct FakeSglang {
    address: SocketAddr,
    /// The number of connections that the server has accepted.
    pub connections: Arc<AtomicUsize>,
    server: Arc<Server>,
    _serving: JoinSet<()>,
}

struct Server {
    settings: SglangFake,
    caches: Vec<Mutex<Cache>>,
    publisher: Option<Publisher>,
    /// The running requests by their ids. A request is aborted when its value becomes true.
    running: Mutex<HashMap<String, watch::Sender<bool>>>,
    requests: AtomicUsize,
    draws: AtomicU64,
    starts: AtomicU64,
    fails: AtomicBool,
    confirms: AtomicBool,
    crashes: Notify,
    ignored_aborts: AtomicUsize,
    tasks: Mutex<JoinSet<()>>,
    seen: Mutex<Vec<Value>>,
    aborts: Mutex<Vec<String>>,
}

impl FakeSglang {
    /// Starts a server at a free port.
    pub async fn start(settings: SglangFake) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let publishes = settings.events && settings.ranks == 1;
        let server = Arc::new(Server {
            caches: (0..settings.ranks).map(|_| Mutex::new(Cache::new(settings.page_size, settings.blocks))).collect(),
            publisher: if publishes { Some(Publisher::bind().await?) } else { None },
            settings,
            running: Mutex::default(),
            requests: AtomicUsize::new(0),
            draws: AtomicU64::new(0),
            starts: AtomicU64::new(1),
            fails: AtomicBool::new(false),
            confirms: AtomicBool::new(true),
            crashes: Notify::new(),
            ignored_aborts: AtomicUsize::new(0),
            tasks: Mutex::default(),
            seen: Mutex::default(),
            aborts: Mutex::default(),
        });
        let routes = Router::new()
            .route("/health", get(async || StatusCode::OK))
            .route("/v1/models", get(models))
            .route("/server_info", get(server_info))
            .route("/generate", post(generate))
            .route("/abort_request", post(abort))
            .with_state(Arc::clone(&server));
        let connections = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&connections);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let listener = listener.tap_io(move |_| {
                counter.fetch_add(1, Ordering::SeqCst);
            });
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { address, connections, server, _serving: serving })
    }

    /// Ends the connections of all halves of requests that wait for their other half, as a crash does.
    pub fn crash(&self) {
        self.server.crashes.notify_waiters();
    }

    /// Ignores the next call to abort a request, as if it had arrived before the request.
    pub fn ignore_abort(&self) {
        self.server.ignored_aborts.fetch_add(1, Ordering::SeqCst);
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of running requests.
    pub fn running(&self) -> usize {
        self.server.requests.load(Ordering::SeqCst)
    }

    /// Returns the bodies of all valid requests to generate tokens so far.
    pub fn seen(&self) -> Vec<Value> {
        self.server.seen.lock().clone()
    }

    /// Returns the ids in all calls to abort a request so far.
    pub fn aborts(&self) -> Vec<String> {
        self.server.aborts.lock().clone()
    }

    /// Sets whether every request to generate tokens fails with HTTP 500 from now on.
    pub fn fail(&self, fails: bool) {
        self.server.fails.store(fails, Ordering::SeqCst);
    }

    /// Sets whether the prefill server confirms its transfers from now on. Without the confirmation, its answer is HTTP 500.
    pub fn confirm(&self, confirms: bool) {
        self.server.confirms.store(confirms, Ordering::SeqCst);
    }

    /// Drops all cached blocks, as `/flush_cache` does.
    pub async fn flush(&self) -> Result<()> {
        self.server.caches.iter().for_each(|cache| drop(cache.lock().clear()));
        self.server.publish(&[EngineEvent::Cleared], "").await
    }

    /// Changes the start times that the server reports, as a restart does.
    pub fn pretend_restart(&self) {
        self.server.starts.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for FakeSglang {
    fn drop(&mut self) {
        self.server.tasks.lock().abort_all();
    }
}

impl Server {
    /// Returns the seed of a request's tokens; `None` if the request always takes the likeliest token.
    fn seed(&self, params: &Value) -> Option<u64> {
        let draw = params["sampling_seed"].as_u64().filter(|_| self.settings.deterministic);
        (params["temperature"] != 0.0).then(|| draw.unwrap_or_else(|| self.draws.fetch_add(1, Ordering::SeqCst)))
    }

    /// Publishes the events of a prompt in a namespace. SGLang repeats the salt in each event.
    async fn publish(&self, events: &[EngineEvent], salt: &str) -> Result<()> {
        let Some(publisher) = self.publisher.as_ref().filter(|_| !events.is_empty()) else { return Ok(()) };
        let events = events.iter().map(|event| encoded(event, salt)).collect();
        let batch = MsgPack::Array(vec![1.5.into(), MsgPack::Array(events), 0.into()]);
        let mut payload = Vec::new();
        rmpv::encode::write_value(&mut payload, &batch)?;
        publisher.publish_bytes(payload).await.map(drop)
    }
}

/// Returns an event as a map. Hashes are signed, and fields without a value are left out if SGLang's definition has a default value for them.
fn encoded(event: &EngineEvent, salt: &str) -> MsgPack {
    let hash = |hash: &EngineHash| match hash {
        EngineHash::Number(number) => number.cast_signed().into(),
        EngineHash::Bytes(bytes) => MsgPack::Binary(bytes.to_vec()),
    };
    let hashes = |of: &[EngineHash]| MsgPack::Array(of.iter().map(hash).collect());
    let fields = match event {
        EngineEvent::Stored(stored) => vec![
            ("type", "BlockStored".into()),
            ("block_hashes", hashes(&stored.hashes)),
            ("parent_block_hash", stored.parent.as_ref().map_or(MsgPack::Nil, hash)),
            ("token_ids", MsgPack::Array(stored.tokens.iter().map(|token| (*token).into()).collect())),
            ("block_size", stored.block_size.into()),
            ("lora_id", MsgPack::Nil),
            ("medium", "GPU".into()),
            ("cache_salt", salt.into()),
        ],
        EngineEvent::Removed(removed) => {
            vec![("type", "BlockRemoved".into()), ("block_hashes", hashes(&removed.hashes)), ("medium", "GPU".into())]
        }
        EngineEvent::Cleared => vec![("type", "AllBlocksCleared".into())],
    };
    MsgPack::Map(fields.into_iter().map(|(name, value)| (name.into(), value)).collect())
}

async fn models(State(server): State<Arc<Server>>) -> Json<Value> {
    let base = json!({ "id": "fake", "root": "fake", "parent": null, "max_model_len": 4_096 });
    let lora = |name: &String| json!({ "id": name, "root": format!("/loras/{name}"), "parent": "fake", "max_model_len": null });
    Json(json!({ "data": std::iter::once(base).chain(server.settings.loras.iter().map(lora)).collect::<Vec<_>>() }))
}

async fn server_info(State(server): State<Arc<Server>>) -> Json<Value> {
    let SglangFake { page_size, blocks, ranks, .. } = server.settings;
    let port = |endpoint: &str| endpoint.rsplit(':').next().and_then(|port| port.parse::<u16>().ok());
    let publisher = server.publisher.as_ref().map(|publisher| {
        let at = publisher.endpoints();
        json!({
            "publisher": "zmq", "endpoint_host": "*", "endpoint_port_base": port(&at.endpoint), "topic": at.topic,
            "block_size": page_size, "dp_size": ranks, "replay_endpoint_port_base": port(&at.replay_endpoint),
        })
    });
    let of_rank = json!({ "effective_max_running_requests_per_dp": server.settings.running_max });
    Json(json!({
        "model_path": "/models/fake", "tokenizer_path": "/models/fake", "page_size": page_size, "max_total_num_tokens": page_size * blocks,
        "max_req_input_len": 4_090, "disaggregation_mode": server.settings.disaggregation_mode, "dp_size": ranks, "attn_dp_size": 1,
        "disaggregation_transfer_backend": "mooncake", "disaggregation_bootstrap_port": 8_998, "dtype": "float32", "kv_cache_dtype": "auto",
        "tp_size": 1, "disable_radix_cache": server.settings.disaggregation_mode == "decode", "enable_deterministic_inference": server.settings.deterministic,
        "incremental_streaming_output": server.settings.incremental, "reasoning_parser": null, "kv_events": publisher,
        "internal_states": vec![of_rank; ranks], "startup_time": { "tokenizer_e2e": server.starts.load(Ordering::SeqCst) },
        "version": "0.5.23", "frontend": "python",
    }))
}

/// Aborts all requests whose ids begin with the given one, as SGLang does.
async fn abort(State(server): State<Arc<Server>>, Json(body): Json<Value>) -> StatusCode {
    let rid = body["rid"].as_str().unwrap_or_default();
    server.aborts.lock().push(rid.to_owned());
    if server.ignored_aborts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1)).is_ok() {
        return StatusCode::OK;
    }
    for (_, aborted) in server.running.lock().iter().filter(|(id, _)| id.starts_with(rid)) {
        aborted.send_replace(true);
    }
    StatusCode::OK
}

/// A running request. Dropping this value removes the request from the engine.
struct Run {
    server: Arc<Server>,
    rid: String,
}

impl Run {
    /// Aborts the request's id after a while, as SGLang does for each streamed answer, even if another request has this id by then.
    fn abort_later(&self) {
        let (server, rid) = (Arc::clone(&self.server), self.rid.clone());
        self.server.tasks.lock().spawn(async move {
            tokio::time::sleep(server.settings.delayed_abort).await;
            if let Some(aborted) = server.running.lock().get(&rid) {
                aborted.send_replace(true);
            }
        });
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.server.running.lock().remove(&self.rid);
        self.server.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns an error. For a request that streams, it is an event of an answer with status 200.
fn refused(body: &Value, status: StatusCode, message: &str) -> Response {
    if body["stream"] == true {
        let error = json!({ "message": message, "type": "invalid_request_error", "code": status.as_u16(), "retryable": false });
        return format!("data: {}\n\ndata: [DONE]\n\n", json!({ "error": error })).into_response();
    }
    (status, Json(json!({ "error": { "message": message } }))).into_response()
}

/// Serves a request. One half of a request continues when its client has disconnected: SGLang looks for closed connections only every few seconds.
async fn generate(State(server): State<Arc<Server>>, body: Bytes) -> Response {
    let is_half = server.settings.disaggregation_mode != "null";
    let serving = serve(Arc::clone(&server), body);
    if !is_half {
        return serving.await;
    }
    let (reply, answer) = oneshot::channel();
    server.tasks.lock().spawn(async move { drop(reply.send(serving.await)) });
    answer.await.unwrap_or_else(|_| StatusCode::INTERNAL_SERVER_ERROR.into_response())
}

async fn serve(server: Arc<Server>, body: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return StatusCode::BAD_REQUEST.into_response() };
    if server.fails.load(Ordering::SeqCst) {
        return (StatusCode::INTERNAL_SERVER_ERROR, "Internal Server Error").into_response();
    }
    let params = &body["sampling_params"];
    let unknown = params.as_object().and_then(|params| params.keys().find(|name| !PARAMETERS.contains(&name.as_str())));
    if let Some(unknown) = unknown {
        return (StatusCode::BAD_REQUEST, Json(json!({ "error": format!("unknown field {unknown}") }))).into_response();
    }
    if params["logit_bias"]
        .as_object()
        .is_some_and(|bias| bias.keys().any(|token| token.parse::<u32>().is_ok_and(|token| token >= VOCABULARY)))
    {
        return refused(
            &body,
            StatusCode::BAD_REQUEST,
            &format!("logit_bias must has keys in [0, {}], got another.", VOCABULARY - 1),
        );
    }
    server.seen.lock().push(body.clone());
    let tokens: Vec<u32> =
        body["input_ids"].as_array().into_iter().flatten().filter_map(|token| token.as_u64()?.try_into().ok()).collect();
    if tokens.is_empty() || tokens.len() >= 4_090 {
        return refused(&body, StatusCode::BAD_REQUEST, "The input is longer than the model's context length.");
    }
    let lora = body["lora_path"].as_str().unwrap_or_default().to_owned();
    if !lora.is_empty() && !server.settings.loras.contains(&lora) {
        return refused(&body, StatusCode::BAD_REQUEST, &format!("Got LoRA adapter that has never been loaded: {lora}"));
    }
    let mode = server.settings.disaggregation_mode;
    let room = match (mode, body["bootstrap_room"].as_u64()) {
        ("null", _) => None,
        (_, Some(number)) => Some(Room::enter(number)),
        (_, None) => return refused(&body, StatusCode::BAD_REQUEST, "Disaggregated request received without bootstrap room id."),
    };
    let rank = body["routed_dp_rank"].as_u64().unwrap_or(0) as usize;
    let Some(cache) = server.caches.get(rank) else {
        return refused(&body, StatusCode::BAD_REQUEST, "routed_dp_rank is out of range");
    };
    let rid = body["rid"].as_str().unwrap_or_default().to_owned();
    let (aborted, mut is_aborted) = watch::channel(false);
    server.running.lock().insert(rid.clone(), aborted);
    server.requests.fetch_add(1, Ordering::SeqCst);
    let run = Run { server: Arc::clone(&server), rid };
    tokio::time::sleep(server.settings.step).await;
    // Tokens whose logprobs are returned must be computed.
    let lookup = body["logprob_start_len"].as_u64().is_none_or(|start| start as usize >= tokens.len());
    let salt = body["cache_salt"].as_str().unwrap_or_default();
    let prompt = Prompt { tokens: &tokens, salt, lora: Some(&*lora).filter(|lora| !lora.is_empty()), images: &[] };
    if let Some(room) = room.as_ref().filter(|_| mode == "decode") {
        let received = tokio::select! {
            biased;
            _ = is_aborted.wait_for(|aborted| *aborted) => None,
            received = room.take() => received,
            () = server.crashes.notified() => {
                return Body::from_stream(stream::iter([Err::<Bytes, _>(io::Error::other("crashed"))])).into_response();
            }
        };
        let Some(SentKv { prompt, first, cached_tokens }) = received else {
            return refused(&body, StatusCode::INTERNAL_SERVER_ERROR, "Decode transfer failed for request: Aborted by AbortReq.");
        };
        let seed = server.seed(params);
        let prompt_len = prompt.len();
        let first = Some(first);
        return Generation { run, seed, lora, prompt_len, context: prompt, cached_tokens, is_aborted, first, sent: 0, body }
            .answer();
    }
    let stored = cache.lock().store(prompt, false, lookup);
    let _ = server.publish(&stored.events, salt).await;
    let mut generation = Generation {
        run,
        seed: server.seed(params),
        lora,
        prompt_len: tokens.len(),
        context: tokens,
        cached_tokens: stored.cached_tokens,
        is_aborted: is_aborted.clone(),
        first: None,
        sent: 0,
        body,
    };
    if let Some(room) = room {
        let first = next_token_of(&generation.lora, &generation.context, generation.seed);
        let kv = SentKv { prompt: generation.context.clone(), first, cached_tokens: generation.cached_tokens };
        let is_sent = tokio::select! {
            biased;
            _ = is_aborted.wait_for(|aborted| *aborted) => false,
            () = room.send(kv) => true,
        };
        let mut finish = json!({ "type": "abort", "message": "Abort in waiting queue" });
        if is_sent {
            tokio::time::sleep(server.settings.confirmation).await;
            if !server.confirms.load(Ordering::SeqCst) {
                return refused(&generation.body, StatusCode::INTERNAL_SERVER_ERROR, "Prefill transfer failed");
            }
            generation.context.push(first);
            finish = json!({ "type": "length", "length": 0 });
        }
        return Json(generation.event(Some(finish))).into_response();
    }
    generation.answer()
}
