//! A fake llama.cpp server without a model, for tests. Its answers have the JSON of a stock server, as recorded with builds 10434 and
//! 11549.

use crate::fake_vllm::engine::next_token;
use anyhow::Result;
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
};
use futures::{StreamExt, stream};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::{
    convert::Infallible,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};
use tokio::{
    net::TcpListener,
    sync::{OwnedSemaphorePermit, Semaphore},
    task::JoinSet,
};

/// The id and the text of the fake model's end-of-sequence token.
pub const END_TOKEN: (u32, &str) = (2, "<eos>");

/// The text of token `t` is the character whose code is this number plus `t`.
const TEXT_BASE: u32 = 0x1000;

/// The settings of a fake llama.cpp server.
#[derive(Clone, Debug)]
pub struct LlamaCppFake {
    /// The number of sequences that the server runs at the same time.
    pub slots: usize,
    /// The context length of each slot.
    pub context_length: usize,
    /// The duration of a step of the fake model.
    pub step: Duration,
    /// Whether every third token of an answer ends within a UTF-8 character. Such a token has no event; its text comes with that of the
    /// next token.
    pub divides_characters: bool,
}

impl Default for LlamaCppFake {
    fn default() -> Self {
        Self { slots: 2, context_length: 2_048, step: Duration::from_millis(1), divides_characters: false }
    }
}

/// A fake llama.cpp server, which runs until this value is dropped.
pub struct FakeLlamaCpp {
    address: SocketAddr,
    server: Arc<Server>,
    _serving: JoinSet<()>,
}

struct Server {
    settings: LlamaCppFake,
    /// The tokens of each slot; `None` while the slot processes a request.
    slots: Mutex<Vec<Option<Vec<u32>>>>,
    free_slots: Arc<Semaphore>,
    running: AtomicUsize,
    starts: AtomicU64,
    fails: AtomicBool,
    loads: AtomicBool,
    seen: Mutex<Vec<Value>>,
    /// The number of prompt tokens that were computed, and the number of those that were found in a slot.
    counted: Mutex<(u64, u64)>,
}

impl FakeLlamaCpp {
    /// Starts a server at a free port.
    pub async fn start(settings: LlamaCppFake) -> Result<Self> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let server = Arc::new(Server {
            slots: Mutex::new(vec![Some(Vec::new()); settings.slots]),
            free_slots: Arc::new(Semaphore::new(settings.slots)),
            settings,
            running: AtomicUsize::new(0),
            starts: AtomicU64::new(1),
            fails: AtomicBool::new(false),
            loads: AtomicBool::new(false),
            seen: Mutex::default(),
            counted: Mutex::default(),
        });
        let routes = Router::new()
            .route("/health", get(health))
            .route("/props", get(props))
            .route(
                "/v1/models",
                get(async || Json(json!({ "data": [{ "id": "fake", "meta": { "n_vocab": 256, "n_ctx_train": 8192 } }] }))),
            )
            .route("/tokenize", post(tokenize))
            .route("/completion", post(completion))
            .with_state(Arc::clone(&server));
        let mut serving = JoinSet::new();
        serving.spawn(async move {
            let _ = axum::serve(listener, routes).await;
        });
        Ok(Self { address, server, _serving: serving })
    }

    /// Returns the URL of the server.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Returns the number of running requests.
    pub fn running(&self) -> usize {
        self.server.running.load(Ordering::SeqCst)
    }

    /// Returns the bodies of all requests to generate tokens so far.
    pub fn seen(&self) -> Vec<Value> {
        self.server.seen.lock().clone()
    }

    /// Returns the numbers of prompt tokens that the server has computed and has found in a slot, as llama.cpp's metrics count them.
    pub fn counted(&self) -> (u64, u64) {
        *self.server.counted.lock()
    }

    /// Sets whether every request to generate tokens fails with HTTP 500 from now on.
    pub fn fail(&self, fails: bool) {
        self.server.fails.store(fails, Ordering::SeqCst);
    }

    /// Sets whether the server reports from now on that it is loading its model.
    pub fn load(&self, loads: bool) {
        self.server.loads.store(loads, Ordering::SeqCst);
    }

    /// Changes the start time that the server reports, as a restart does.
    pub fn pretend_restart(&self) {
        self.server.starts.fetch_add(1, Ordering::SeqCst);
    }
}

fn error(status: StatusCode, kind: &str, message: &str) -> Response {
    (status, Json(json!({ "error": { "code": status.as_u16(), "message": message, "type": kind } }))).into_response()
}

async fn health(State(server): State<Arc<Server>>) -> Response {
    if server.loads.load(Ordering::SeqCst) {
        return error(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", "Loading model");
    }
    Json(json!({ "status": "ok" })).into_response()
}

async fn props(State(server): State<Arc<Server>>) -> Response {
    if server.loads.load(Ordering::SeqCst) {
        return error(StatusCode::SERVICE_UNAVAILABLE, "unavailable_error", "Loading model");
    }
    Json(json!({
        "default_generation_settings": { "n_ctx": server.settings.context_length }, "total_slots": server.settings.slots,
        "model_path": "/models/fake.gguf", "eos_token": END_TOKEN.1, "build_info": "b11549-fake",
        "media_marker": format!("<__media_{}__>", server.starts.load(Ordering::SeqCst)),
    }))
    .into_response()
}

/// Each character of the text is a token. As the tokenizers of some models do, this one puts a space before the text.
async fn tokenize(Json(body): Json<Value>) -> Json<Value> {
    let content = body["content"].as_str().unwrap_or_default();
    if content == END_TOKEN.1 && body["parse_special"] == true {
        return Json(json!({ "tokens": [END_TOKEN.0] }));
    }
    let of_text =
        content.chars().map(|char| json!({ "id": u32::from(char).saturating_sub(TEXT_BASE), "piece": char.to_string() }));
    let tokens = std::iter::once(json!({ "id": 255, "piece": " " })).chain(of_text);
    Json(json!({ "tokens": tokens.collect::<Vec<_>>() }))
}

fn text(token: u32) -> String {
    char::from_u32(TEXT_BASE + token).map_or_else(String::new, String::from)
}

async fn completion(State(server): State<Arc<Server>>, body: Bytes) -> Response {
    let Ok(body) = serde_json::from_slice::<Value>(&body) else {
        return error(StatusCode::BAD_REQUEST, "invalid_request_error", "not JSON");
    };
    server.seen.lock().push(body.clone());
    if server.fails.load(Ordering::SeqCst) {
        return error(StatusCode::INTERNAL_SERVER_ERROR, "server_error", "Compute error.");
    }
    let prompt: Vec<u32> =
        body["prompt"].as_array().into_iter().flatten().filter_map(|token| token.as_u64()?.try_into().ok()).collect();
    if prompt.is_empty() || prompt.len() >= server.settings.context_length {
        return error(StatusCode::BAD_REQUEST, "exceed_context_size_error", "the request exceeds the available context size");
    }
    let slot = Slot::take(&server, &prompt, body["cache_prompt"] == true).await;
    let generation = Generation { slot, prompt_len: prompt.len(), params: body, generated: 0, held_back: String::new() };
    generation.streamed()
}

/// A slot that processes a request. Dropping this value ends the request; the slot keeps its tokens.
struct Slot {
    server: Arc<Server>,
    index: usize,
    tokens: Vec<u32>,
    cached_tokens: usize,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Slot {
    /// Waits for an idle slot, chooses the one whose tokens have the longest common prefix with the prompt, and computes the prompt in it.
    async fn take(server: &Arc<Server>, prompt: &[u32], cache_prompt: bool) -> Self {
        let permit = Arc::clone(&server.free_slots).acquire_owned().await.ok();
        server.running.fetch_add(1, Ordering::SeqCst);
        let common = |tokens: &[u32]| tokens.iter().zip(prompt).take_while(|(held, token)| held == token).count();
        let mut slots = server.slots.lock();
        let idle = slots.iter().enumerate().filter_map(|(index, slot)| Some((common(slot.as_ref()?), index)));
        let (found, index) = idle.max().unwrap_or_default();
        slots[index] = None;
        // The last token of a prompt is always computed.
        let cached_tokens = if cache_prompt { found.min(prompt.len() - 1) } else { 0 };
        let mut counted = server.counted.lock();
        *counted = (counted.0 + (prompt.len() - cached_tokens) as u64, counted.1 + cached_tokens as u64);
        Self { server: Arc::clone(server), index, tokens: prompt.to_vec(), cached_tokens, _permit: permit }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.server.slots.lock()[self.index] = Some(std::mem::take(&mut self.tokens));
        self.server.running.fetch_sub(1, Ordering::SeqCst);
    }
}

struct Generation {
    slot: Slot,
    prompt_len: usize,
    params: Value,
    generated: u64,
    /// The text of a token that ended within a UTF-8 character.
    held_back: String,
}

impl Generation {
    fn streamed(self) -> Response {
        let progress = [self.slot.cached_tokens, self.prompt_len].map(|processed| {
            json!({
                "index": 0, "content": "", "tokens": [0], "stop": false, "id_slot": -1, "tokens_predicted": 0,
                "tokens_evaluated": self.prompt_len,
                "prompt_progress": { "total": self.prompt_len, "cache": self.slot.cached_tokens, "processed": processed, "time_ms": 0 },
            })
        });
        let tokens = stream::unfold(Some(self), async |generation| {
            let mut generation = generation?;
            let (events, ended) = generation.step().await;
            Some((stream::iter(events), (!ended).then_some(generation)))
        });
        let events =
            stream::iter(progress).chain(tokens.flatten()).map(|event| Ok::<_, Infallible>(format!("data: {event}\n\n")));
        ([("content-type", "text/event-stream")], Body::from_stream(events)).into_response()
    }

    /// Generates one token. Returns the events of the token, and whether it is the last one.
    async fn step(&mut self) -> (Vec<Value>, bool) {
        tokio::time::sleep(self.slot.server.settings.step).await;
        let seed = (self.params["temperature"] != 0.0).then(|| self.params["seed"].as_u64().unwrap_or(0));
        let mut token = next_token(&self.slot.tokens, seed);
        if self.params["ignore_eos"] == true && token == END_TOKEN.0 {
            token += 1;
        }
        self.slot.tokens.push(token);
        self.generated += 1;
        let ended = token == END_TOKEN.0;
        if !ended {
            self.held_back.push_str(&text(token));
        }
        let mut events = Vec::new();
        if !(self.slot.server.settings.divides_characters && self.generated.is_multiple_of(3)) {
            events.push(self.token(token));
        }
        let stop_type = match self.params["n_predict"].as_u64() {
            _ if ended => "eos",
            Some(limit) if self.generated >= limit => "limit",
            _ if self.slot.tokens.len() >= self.slot.server.settings.context_length => "limit",
            _ => return (events, false),
        };
        let timings = json!({ "cache_n": self.slot.cached_tokens, "prompt_n": self.prompt_len - self.slot.cached_tokens });
        events.push(json!({ "stop": true, "stop_type": stop_type, "tokens_predicted": self.generated, "timings": timings }));
        (events, true)
    }

    fn token(&mut self, token: u32) -> Value {
        let mut event = json!({
            "index": 0, "content": std::mem::take(&mut self.held_back), "tokens": [token], "stop": false, "id_slot": -1,
            "tokens_predicted": self.generated, "tokens_evaluated": self.prompt_len,
        });
        let top = self.params["n_probs"].as_u64().unwrap_or(0);
        if top > 0 {
            let of =
                |rank: u64| json!({ "id": u64::from(token) + rank, "token": "", "bytes": [], "logprob": -0.5 - rank as f64 });
            let mut sampled = of(0);
            sampled["top_logprobs"] = (0..top).map(of).collect();
            event["completion_probabilities"] = json!([sampled]);
        }
        event
    }
}
