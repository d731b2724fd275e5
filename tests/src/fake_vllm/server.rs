//! The HTTP server of a fake vLLM engine, with the paths and bodies of vLLM 0.32.

mod generation;

use super::{
    engine::{Cache, Fabric, HeldKv, Prompt, next_token_of},
    events::{Publisher, PublisherSettings},
    images, openai,
};
use anyhow::Result;
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, State},
    http::{HeaderMap, StatusCode},
    response::{IntoResponse, Response},
    routing::{get, post},
    serve::ListenerExt,
};
use futures::stream;
use generation::Generation;
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    collections::HashMap,
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{net::TcpListener, sync::watch, task::JoinSet, time::Instant};

/// The settings of a fake engine.
#[derive(Clone, Debug)]
pub struct FakeSettings {
    /// The number of tokens in a block.
    pub block_size: usize,
    /// The number of data-parallel ranks (`--data-parallel-size`). Each has its own cache, and publishes its KV events at its own ports.
    pub ranks: usize,
    /// The number of blocks in the memory of each rank's device.
    pub blocks: usize,
    /// Whether the engine keeps a copy of each block in its host's memory.
    pub offloads: bool,
    /// Whether the engine publishes KV events.
    pub events: bool,
    /// Whether the engine reports cached tokens (`--enable-prompt-tokens-details`).
    pub reports_cached_tokens: bool,
    /// The duration of a step.
    pub step: Duration,
    /// The time for which the engine holds KV for another engine.
    pub lease: Duration,
    /// The network from which the engine pulls the KV of other engines.
    pub fabric: Fabric,
    /// The id of the engine's model.
    pub model: String,
    /// The maximum length of a sequence in tokens.
    pub context_length: u32,
    /// The names of the LoRAs that the engine serves besides its model (`--lora-modules`).
    pub loras: Vec<String>,
    /// The directory from which the engine reports to have loaded its model; `None` if it reports none.
    pub root: Option<PathBuf>,
    /// The port at which the server listens; 0 stands for any free port.
    pub port: u16,
    /// Whether the model reads images.
    pub images: bool,
}

impl Default for FakeSettings {
    fn default() -> Self {
        Self {
            block_size: 32,
            ranks: 1,
            blocks: 512,
            offloads: false,
            events: true,
            reports_cached_tokens: true,
            step: Duration::from_millis(1),
            lease: Duration::from_secs(30),
            fabric: Fabric::default(),
            model: "fake".to_owned(),
            context_length: 4_096,
            loras: Vec::new(),
            root: None,
            port: 0,
            images: false,
        }
    }
}

/// The time of the next start that a server reports. Each server has another one, as real servers have.
static STARTS: AtomicU64 = AtomicU64::new(1_000);

/// A fake vLLM server, which runs until this value is dropped.
pub struct FakeVllm {
    address: SocketAddr,
    /// The number of connections that the server has accepted.
    pub connections: Arc<AtomicUsize>,
    engine: Arc<Engine>,
    _serving: JoinSet<()>,
}

struct Engine {
    settings: FakeSettings,
    id: String,
    started: AtomicU64,
    ranks: Vec<Rank>,
    loras: Mutex<Vec<String>>,
    /// The running requests by their ids. A request is aborted when its value becomes true.
    running: Mutex<HashMap<String, watch::Sender<bool>>>,
    requests: AtomicUsize,
    next: AtomicU64,
    fails: AtomicBool,
    crashed: AtomicBool,
    unhealthy: AtomicBool,
    /// The rank and the body of each request to generate tokens. The rank is that of the header `X-data-parallel-rank`.
    seen: Mutex<Vec<(Option<usize>, Value)>>,
    /// The bodies of all requests to convert a chat to tokens.
    renders: Mutex<Vec<Value>>,
    /// What the answers to these requests have in place of some of their fields.
    render_changes: Mutex<Option<Value>>,
}

struct Rank {
    cache: Mutex<Cache>,
    publisher: Option<Publisher>,
    prompt_tokens: AtomicU64,
    cached_tokens: AtomicU64,
}

impl Rank {
    async fn new(number: u32, settings: &FakeSettings) -> Result<Self> {
        let publishing = PublisherSettings { data_parallel_rank: number, ..PublisherSettings::default() };
        Ok(Self {
            cache: Mutex::new(Cache::new(settings.block_size, settings.blocks - 1).offloading(settings.offloads)),
            publisher: if settings.events { Some(Publisher::bind_with(publishing).await?) } else { None },
            prompt_tokens: AtomicU64::new(0),
            cached_tokens: AtomicU64::new(0),
        })
    }

    fn counted(&self) -> (u64, u64) {
        (self.prompt_tokens.load(Ordering::SeqCst), self.cached_tokens.load(Ordering::SeqCst))
    }
}

impl FakeVllm {
    /// Starts a fake server.
    pub async fn start(settings: FakeSettings) -> Result<Self> {
        let mut ranks = Vec::new();
        for number in 0..settings.ranks {
            ranks.push(Rank::new(number as u32, &settings).await?);
        }
        let listener = TcpListener::bind(("127.0.0.1", settings.port)).await?;
        let address = listener.local_addr()?;
        let engine = Arc::new(Engine {
            id: format!("engine-{}", address.port()),
            loras: Mutex::new(settings.loras.clone()),
            settings,
            started: AtomicU64::new(STARTS.fetch_add(1_000, Ordering::SeqCst)),
            ranks,
            running: Mutex::default(),
            requests: AtomicUsize::new(0),
            next: AtomicU64::new(0),
            fails: AtomicBool::new(false),
            crashed: AtomicBool::new(false),
            unhealthy: AtomicBool::new(false),
            seen: Mutex::default(),
            renders: Mutex::default(),
            render_changes: Mutex::default(),
        });
        let routes = Router::new()
            .route("/health", get(health))
            .route("/version", get(async || Json(json!({ "version": "0.32.0" }))))
            .route("/v1/models", get(models))
            .route("/metrics", get(metrics))
            .route("/kv_event_sources", get(event_sources))
            .route("/v1/chat/completions/render", post(render))
            .route("/inference/v1/generate", post(generate).layer(DefaultBodyLimit::disable()))
            .route("/v1/completions", post(completions).layer(DefaultBodyLimit::disable()))
            .route("/v1/chat/completions", post(chat).layer(DefaultBodyLimit::disable()))
            .route("/inference/v1/abort_requests", post(abort))
            .with_state(Arc::clone(&engine));
        let connections = Arc::<AtomicUsize>::default();
        let counter = Arc::clone(&connections);
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            // As in vLLM's server, Nagle's algorithm is disabled. Otherwise an event would wait until the client has acknowledged the one
            // before.
            let listener = listener.tap_io(move |stream| {
                counter.fetch_add(1, Ordering::SeqCst);
                drop(stream.set_nodelay(true));
            });
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { address, connections, engine, _serving: serving })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the server's port.
    pub fn port(&self) -> u16 {
        self.address.port()
    }

    /// Returns the number of running requests.
    pub fn running(&self) -> usize {
        self.engine.requests.load(Ordering::SeqCst)
    }

    /// Returns the bodies of all requests to generate tokens so far.
    pub fn seen(&self) -> Vec<Value> {
        self.engine.seen.lock().iter().map(|(_, body)| body.clone()).collect()
    }

    /// Returns the bodies of all requests to convert a chat to tokens so far.
    pub fn renders(&self) -> Vec<Value> {
        self.engine.renders.lock().clone()
    }

    /// Sets fields of all later answers to requests to convert a chat to tokens; `None`: the answers are those of vLLM. The field `status`
    /// becomes the HTTP status, and `padding` a text of so many bytes.
    pub fn change_renders(&self, changes: Option<Value>) {
        *self.engine.render_changes.lock() = changes;
    }

    /// Returns the data-parallel ranks that the requests to generate tokens name.
    pub fn seen_ranks(&self) -> Vec<Option<usize>> {
        self.engine.seen.lock().iter().map(|(rank, _)| *rank).collect()
    }

    /// Returns the number of prompt tokens of all local prefills, and how many of them were cached, as vLLM's metrics count them.
    pub fn counted(&self) -> (u64, u64) {
        let ranks = self.engine.ranks.iter().map(Rank::counted);
        ranks.fold((0, 0), |(prompts, cached), (more, hits)| (prompts + more, cached + hits))
    }

    /// Returns the number of prompt tokens of a rank's local prefills, and how many of them were cached.
    pub fn counted_of(&self, rank: usize) -> (u64, u64) {
        self.engine.ranks[rank].counted()
    }

    /// Returns the number of cached blocks.
    pub fn cached_blocks(&self) -> usize {
        self.engine.ranks.iter().map(|rank| rank.cache.lock().len()).sum()
    }

    /// Returns the publisher of the first rank's KV events; `None` if the engine publishes no events.
    pub fn publisher(&self) -> Option<&Publisher> {
        self.engine.ranks[0].publisher.as_ref()
    }

    /// Loads a LoRA, as a call to `/v1/load_lora_adapter` does.
    pub fn load_lora(&self, name: &str) {
        self.engine.loras.lock().push(name.to_owned());
    }

    /// Unloads a LoRA, as a call to `/v1/unload_lora_adapter` does.
    pub fn unload_lora(&self, name: &str) {
        self.engine.loras.lock().retain(|lora| lora != name);
    }

    /// Sets whether every request to generate tokens fails with HTTP 500.
    pub fn fail(&self, fails: bool) {
        self.engine.fails.store(fails, Ordering::SeqCst);
    }

    /// Ends all streams in the middle, and lets every later request to generate tokens fail.
    pub fn crash(&self) {
        self.engine.crashed.store(true, Ordering::SeqCst);
        self.fail(true);
    }

    /// Crashes, and lets every health check fail, as a server does whose engine has ended.
    pub fn end(&self) {
        self.engine.unhealthy.store(true, Ordering::SeqCst);
        self.crash();
    }

    /// Changes the start time that the server reports, as a restart does.
    pub fn pretend_restart(&self) {
        self.engine.started.fetch_add(1, Ordering::SeqCst);
    }

    /// Drops the KV that the engine holds for other engines, as a crash does.
    pub fn lose_held_kv(&self) {
        self.engine.settings.fabric.lock().retain(|(engine, _), _| *engine != self.engine.id);
    }
}

async fn health(State(engine): State<Arc<Engine>>) -> StatusCode {
    if engine.unhealthy.load(Ordering::SeqCst) { StatusCode::SERVICE_UNAVAILABLE } else { StatusCode::OK }
}

async fn models(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let FakeSettings { model, root, .. } = &engine.settings;
    let base = json!({ "id": model, "root": root, "parent": null, "max_model_len": engine.settings.context_length });
    let loras = engine.loras.lock();
    let lora = |name: &String| json!({ "id": name, "root": format!("/loras/{name}"), "parent": model, "max_model_len": null });
    Json(json!({ "data": std::iter::once(base).chain(loras.iter().map(lora)).collect::<Vec<_>>() }))
}

async fn metrics(State(engine): State<Arc<Engine>>) -> String {
    let FakeSettings { block_size, blocks, ranks, .. } = &engine.settings;
    let constants = (0..*ranks).map(|rank| {
        format!(
            "vllm:cache_config_info{{block_size=\"{block_size}\",cache_dtype=\"auto\",enable_prefix_caching=\"True\",engine=\"{rank}\",num_gpu_blocks=\"{blocks}\"}} 1.0\n"
        )
    });
    let running = engine.requests.load(Ordering::SeqCst);
    format!(
        "process_start_time_seconds {}.0\nvllm:num_requests_running{{engine=\"0\"}} {running}.0\nvllm:num_requests_waiting{{engine=\"0\"}} 0.0\n{}",
        engine.started.load(Ordering::SeqCst),
        constants.collect::<String>()
    )
}

async fn event_sources(State(engine): State<Arc<Engine>>) -> Response {
    let source = |(rank, of): (usize, &Rank)| {
        let of = of.publisher.as_ref()?.endpoints();
        let source = json!({
            "enable_kv_cache_events": true, "publisher": "zmq", "endpoint": of.endpoint, "replay_endpoint": of.replay_endpoint,
            "buffer_steps": 10_000, "topic": of.topic,
        });
        Some((rank.to_string(), source))
    };
    let sources: serde_json::Map<_, _> = engine.ranks.iter().enumerate().filter_map(source).collect();
    if sources.is_empty() { StatusCode::NOT_FOUND.into_response() } else { Json(sources).into_response() }
}

async fn abort(State(engine): State<Arc<Engine>>, Json(body): Json<Value>) -> StatusCode {
    let running = engine.running.lock();
    for id in body["request_ids"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        if let Some(aborted) = running.get(id) {
            aborted.send_replace(true);
        }
    }
    StatusCode::OK
}

/// A running request. Dropping this value removes the request from the engine.
struct Run {
    engine: Arc<Engine>,
    id: String,
}

impl Drop for Run {
    fn drop(&mut self) {
        self.engine.running.lock().remove(&self.id);
        self.engine.requests.fetch_sub(1, Ordering::SeqCst);
    }
}

fn error(status: StatusCode, message: &str) -> Response {
    (status, Json(json!({ "error": { "message": message, "type": "Error", "param": null, "code": status.as_u16() } })))
        .into_response()
}

async fn render(State(engine): State<Arc<Engine>>, Json(chat): Json<Value>) -> Response {
    let rendered = images::render(&chat, engine.settings.images);
    engine.renders.lock().push(chat);
    let (status, mut answer) = match rendered {
        Ok(answer) => (StatusCode::OK, answer),
        Err(message) => return error(StatusCode::BAD_REQUEST, &message),
    };
    let changes = engine.render_changes.lock().clone().unwrap_or_default();
    for (name, value) in changes.as_object().into_iter().flatten() {
        answer[name] = if name == "padding" { "x".repeat(value.as_u64().unwrap_or(0) as usize).into() } else { value.clone() };
    }
    let status = changes["status"].as_u64().and_then(|status| StatusCode::from_u16(status as u16).ok()).unwrap_or(status);
    (status, Json(answer)).into_response()
}

async fn completions(state: State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    of_text(state, headers, openai::of_ids(&body, openai::completion)).await
}

async fn chat(state: State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    of_text(state, headers, openai::of_ids(&body, openai::chat)).await
}

async fn of_text(state: State<Arc<Engine>>, headers: HeaderMap, body: Result<Bytes, &str>) -> Response {
    match body {
        Ok(body) => generate(state, headers, body).await,
        Err(problem) => error(StatusCode::BAD_REQUEST, problem),
    }
}

async fn generate(State(engine): State<Arc<Engine>>, headers: HeaderMap, body: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else { return error(StatusCode::BAD_REQUEST, "not JSON") };
    let named = headers.get("x-data-parallel-rank").and_then(|rank| rank.to_str().ok()?.parse::<usize>().ok());
    engine.seen.lock().push((named, body.clone()));
    if engine.fails.load(Ordering::SeqCst) {
        return error(StatusCode::INTERNAL_SERVER_ERROR, "EngineCore encountered an issue.");
    }
    let tokens: Vec<u32> =
        body["token_ids"].as_array().into_iter().flatten().filter_map(|token| token.as_u64()?.try_into().ok()).collect();
    let images::Expanded { tokens, images, files } = match images::expand(&tokens, &body, engine.settings.images) {
        Ok(expanded) => expanded,
        Err(message) => return error(StatusCode::BAD_REQUEST, &message),
    };
    let params = &body["sampling_params"];
    let max_tokens = params["max_tokens"].as_u64().unwrap_or(16) as usize;
    if tokens.is_empty() || max_tokens == 0 || tokens.len() + max_tokens > 4096 {
        return error(StatusCode::BAD_REQUEST, "This model's maximum context length is 4096 tokens.");
    }
    let number = engine.next.fetch_add(1, Ordering::SeqCst);
    // If a request names no rank, vLLM's load balancer chooses one.
    let Some(rank) = engine.ranks.get(named.unwrap_or(number as usize % engine.ranks.len())) else {
        return error(StatusCode::BAD_REQUEST, "data_parallel_rank is out of range");
    };
    let lora = match body["model"].as_str().filter(|model| *model != engine.settings.model) {
        Some(model) if !engine.loras.lock().iter().any(|lora| lora == model) => {
            return error(StatusCode::NOT_FOUND, &format!("The model `{model}` does not exist."));
        }
        lora => lora.map(str::to_owned),
    };
    let id = headers.get("x-request-id").and_then(|id| id.to_str().ok()).map_or_else(|| number.to_string(), str::to_owned);
    let id = format!("generate-tokens-{id}");
    let (aborted, is_aborted) = watch::channel(false);
    engine.running.lock().insert(id.clone(), aborted);
    engine.requests.fetch_add(1, Ordering::SeqCst);
    let run = Run { engine: Arc::clone(&engine), id: id.clone() };

    let transfer = &body["kv_transfer_params"];
    let pulled = if transfer["do_remote_prefill"] == true {
        let key = (text(&transfer["remote_engine_id"]), text(&transfer["remote_request_id"]));
        // Like vLLM, the fake server checks neither that the KV belongs to this prompt nor that the lease is still valid.
        match engine.settings.fabric.lock().remove(&key) {
            Some(held) if held.tokens.len() == tokens.len() => Some(held.tokens),
            _ if body["stream"] == true => {
                return streamed(vec![json!({ "error": { "message": "Internal server error", "code": 500 } })]);
            }
            _ => return error(StatusCode::INTERNAL_SERVER_ERROR, "Internal server error"),
        }
    } else {
        None
    };
    let wants_prompt = !params["prompt_logprobs"].is_null();
    let report_hits = params["extra_args"]["kv_cache_report_mode"] == "full";
    let salt = text(&body["cache_salt"]);
    let context = pulled.clone().unwrap_or_else(|| tokens.clone());
    tokio::time::sleep(engine.settings.step).await;
    let prompt = Prompt { tokens: &context, salt: &salt, lora: lora.as_deref(), images: &images };
    let stored = rank.cache.lock().store(prompt, report_hits, !wants_prompt);
    if let Some(publisher) = rank.publisher.as_ref().filter(|_| !stored.events.is_empty()) {
        let _ = publisher.publish(stored.events).await;
    }
    let cached = if pulled.is_some() {
        transfer["remote_prefill_cached_tokens"].as_u64().unwrap_or(0)
    } else {
        stored.cached_tokens as u64
    };
    if pulled.is_none() {
        rank.prompt_tokens.fetch_add(tokens.len() as u64, Ordering::SeqCst);
        rank.cached_tokens.fetch_add(stored.cached_tokens as u64, Ordering::SeqCst);
    }
    let details = engine.settings.reports_cached_tokens.then(|| json!({ "cached_tokens": cached }));
    let usage = json!({ "prompt_tokens": tokens.len(), "prompt_tokens_details": details });
    let inputs = lora.unwrap_or_default() + &files;
    let generation = Generation { run, context, inputs, params: params.clone(), max_tokens, generated: 0, is_aborted, usage };
    if body["stream"] == true {
        return generation.streamed();
    }
    generation.whole(&tokens, transfer, &id).await
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn streamed(events: Vec<Value>) -> Response {
    let events = events.into_iter().map(|event| format!("data: {event}\n\n")).chain(["data: [DONE]\n\n".to_owned()]);
    Body::from_stream(stream::iter(events.map(Ok::<_, Infallible>).collect::<Vec<_>>())).into_response()
}
