//! A fake vLLM 0.32 server for `bench/front.sh`, which answers with words at a fixed pace. Unlike the fake server of the tests, it spends
//! little time on a token and on a long prompt, and answers chats with text.
//!
//! `fake-vllm PORT STEP_MS BLOCKS WORDS`: WORDS is a JSON list of token ids and their texts.

#[path = "../../tests/src/fake_vllm/events.rs"]
#[allow(dead_code, reason = "only the tests use the rest")]
mod events;

use anyhow::{Context, Result};
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::{DefaultBodyLimit, State},
    http::StatusCode,
    response::{IntoResponse, Response},
    routing::{get, post},
    serve::ListenerExt,
};
use events::{Publisher, PublisherSettings};
use futures::stream;
use parking_lot::Mutex;
use serde::Deserialize;
use serde_json::json;
use std::{
    collections::{HashMap, VecDeque},
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{Duration, SystemTime},
};
use tandem_adapter::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys};
use tandem_kv::{Tier, mix};
use tokio::{
    net::TcpListener,
    sync::{mpsc, watch},
    time::{MissedTickBehavior, interval},
};

const BLOCK: usize = 16;

/// A prefix cache. `held` has the time of the last use of each block; `used` has the blocks by this time, and outdated entries.
struct Cache {
    capacity: usize,
    uses: u64,
    held: HashMap<u64, u64>,
    used: VecDeque<(u64, u64)>,
    events: mpsc::UnboundedSender<EngineEvent>,
}

impl Cache {
    /// Stores the complete blocks of a sequence, and reports it. Returns the number of tokens that were found.
    fn store(&mut self, tokens: &[u32], salt: &str, report_hits: bool) -> usize {
        let mut last = hash_of(salt);
        let hashes = tokens.chunks_exact(BLOCK).map(|block| {
            last = block.iter().fold(last, |hash, token| mix(hash ^ u64::from(*token)));
            last
        });
        let hashes: Vec<u64> = hashes.collect();
        let held = hashes.iter().take_while(|hash| self.held.contains_key(hash)).count();
        // The end of a sequence is used before its beginning, so that it is dropped first, as in vLLM.
        for hash in hashes.iter().rev() {
            self.uses += 1;
            self.held.insert(*hash, self.uses);
            self.used.push_back((*hash, self.uses));
        }
        let stored = |from: usize, to: usize| BlocksStored {
            hashes: hashes[from..to].iter().map(|hash| EngineHash::Number(*hash)).collect(),
            parent: from.checked_sub(1).map(|parent| EngineHash::Number(hashes[parent])),
            tokens: tokens[from * BLOCK..to * BLOCK].to_vec(),
            block_size: BLOCK as u32,
            lora: None,
            extra_keys: (from..to).map(|at| if at == 0 { ExtraKeys::Text(salt.to_owned()) } else { ExtraKeys::None }).collect(),
            tier: Ok(Tier::Device),
            group: Some(0),
            kind: Some("full_attention".to_owned()),
            window_tokens: None,
            session: None,
        };
        // Sending fails only while the server ends.
        let send = |event| drop(self.events.send(event));
        if report_hits && held > 0 {
            send(EngineEvent::Stored(stored(0, held)));
        }
        while self.held.len() > self.capacity {
            let Some((hash, at)) = self.used.pop_front() else { break };
            if self.held.get(&hash) == Some(&at) {
                self.held.remove(&hash);
                let hashes = vec![EngineHash::Number(hash)];
                send(EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(Tier::Device), group: Some(0) }));
            }
        }
        if held < hashes.len() {
            send(EngineEvent::Stored(stored(held, hashes.len())));
        }
        // The last token is always computed.
        held.min(tokens.len().saturating_sub(1) / BLOCK) * BLOCK
    }
}

fn hash_of(text: &str) -> u64 {
    text.bytes().fold(7, |hash, byte| mix(hash ^ u64::from(byte)))
}

struct Engine {
    started: u64,
    blocks: usize,
    words: Vec<(u32, String)>,
    cache: Mutex<Cache>,
    /// Where KV events are published.
    events: PublisherSettings,
    /// Changes with each step of the engine.
    steps: watch::Sender<()>,
    requests: AtomicU64,
}

/// A request to `/inference/v1/generate` or `/v1/chat/completions`, which must be streamed.
#[derive(Deserialize)]
struct Request {
    #[serde(default)]
    token_ids: Vec<u32>,
    #[serde(default)]
    messages: Vec<Message>,
    #[serde(default)]
    cache_salt: Option<String>,
    max_tokens: Option<usize>,
    #[serde(default)]
    sampling_params: SamplingParams,
}

#[derive(Deserialize)]
struct Message {
    role: String,
    content: String,
}

#[derive(Default, Deserialize)]
struct SamplingParams {
    max_tokens: Option<usize>,
    #[serde(default)]
    extra_args: HashMap<String, String>,
}

async fn answer(State(engine): State<Arc<Engine>>, body: Bytes) -> Response {
    let Ok(mut request) = serde_json::from_slice::<Request>(&body) else { return StatusCode::BAD_REQUEST.into_response() };
    let is_chat = request.token_ids.is_empty();
    // The fake server has no tokenizer: each word of a chat is a token.
    for message in &request.messages {
        let words = message.content.split_ascii_whitespace();
        request.token_ids.extend([message.role.as_str()].into_iter().chain(words).map(|word| hash_of(word) as u32));
    }
    if is_chat {
        request.token_ids.push(hash_of("assistant") as u32);
    }
    let Request {
        token_ids: mut tokens,
        cache_salt,
        max_tokens,
        sampling_params: SamplingParams { max_tokens: most, extra_args },
        ..
    } = request;
    let (prompt, max_tokens, salt) = (tokens.len(), max_tokens.or(most).unwrap_or(16), cache_salt.unwrap_or_default());
    let report_hits = extra_args.get("kv_cache_report_mode").is_some_and(|mode| mode == "full");
    let cached = engine.cache.lock().store(&tokens, &salt, report_hits);
    let number = engine.requests.fetch_add(1, Relaxed);
    let id = if is_chat { format!("chatcmpl-{number}") } else { format!("generate-tokens-{number}") };
    let details = format!("\"prompt_tokens_details\":{{\"cached_tokens\":{cached}}}");
    let mut steps = engine.steps.subscribe();
    // A chat begins with an event without a token.
    let events = async move |at: usize| {
        // The first token is sent at once, and each other one with a step, as are those of all other answers.
        if (2..=max_tokens).contains(&at) && steps.changed().await.is_err() || at > max_tokens + 1 {
            return None;
        }
        let head = if is_chat {
            format!(
                "data: {{\"id\":\"{id}\",\"object\":\"chat.completion.chunk\",\"created\":{},\"model\":\"M\",\"choices\":[",
                engine.started
            )
        } else {
            format!("data: {{\"request_id\":\"{id}\",\"output_mode\":\"tokens\",\"choices\":[")
        };
        let tail = if is_chat { "]}\n\n" } else { "],\"usage\":null}\n\n" };
        let (word, text) = &engine.words[mix(number << 32 | at as u64) as usize % engine.words.len()];
        let finish = if at == max_tokens { "\"length\"" } else { "null" };
        Some(match at {
            0 => format!(
                "{head}{{\"index\":0,\"delta\":{{\"role\":\"assistant\",\"content\":\"\"}},\"logprobs\":null,\"finish_reason\":null}}{tail}"
            ),
            _ if at > max_tokens => {
                let counts = format!(
                    "\"prompt_tokens\":{prompt},\"completion_tokens\":{max_tokens},\"total_tokens\":{}",
                    prompt + max_tokens
                );
                format!("{head}],\"usage\":{{{counts},{details}}}}}\n\ndata: [DONE]\n\n")
            }
            _ => {
                tokens.push(if is_chat { hash_of(text.trim()) as u32 } else { *word });
                if tokens.len() % BLOCK == 0 {
                    engine.cache.lock().store(&tokens, &salt, false);
                }
                let choice = if is_chat {
                    format!(
                        "{{\"index\":0,\"delta\":{{\"content\":\"{text}\"}},\"logprobs\":null,\"finish_reason\":{finish},\"token_ids\":null}}"
                    )
                } else {
                    format!(
                        "{{\"index\":0,\"finish_reason\":{finish},\"stop_reason\":null,\"token_ids\":[{word}],\"logprobs\":null}}"
                    )
                };
                format!("{head}{choice}{tail}")
            }
        })
    };
    let chunks = stream::unfold((events, usize::from(!is_chat)), async |(mut events, at)| {
        Some((Ok::<_, Infallible>(events(at).await?), (events, at + 1)))
    });
    ([("content-type", "text/event-stream; charset=utf-8")], Body::from_stream(chunks)).into_response()
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [port, step, blocks, words] = &arguments[..] else { anyhow::bail!("usage: fake-vllm PORT STEP_MS BLOCKS WORDS") };
    let publisher = Publisher::bind_with(PublisherSettings { buffer_batches: 1_000, ..PublisherSettings::default() }).await?;
    let (events, mut stored) = mpsc::unbounded_channel();
    let (blocks, started) = (blocks.parse()?, SystemTime::UNIX_EPOCH.elapsed()?.as_secs());
    let engine = Arc::new(Engine {
        started,
        blocks,
        words: serde_json::from_str(words).context("WORDS")?,
        // vLLM never uses the first block.
        cache: Mutex::new(Cache { capacity: blocks - 1, uses: 0, held: HashMap::new(), used: VecDeque::new(), events }),
        events: publisher.endpoints().clone(),
        steps: watch::Sender::new(()),
        requests: AtomicU64::new(0),
    });
    tokio::spawn(async move {
        let mut batch = Vec::new();
        while stored.recv_many(&mut batch, usize::MAX).await > 0 && publisher.publish(std::mem::take(&mut batch)).await.is_ok() {}
    });
    let (mut ticks, steps) = (interval(Duration::from_millis(step.parse()?)), engine.steps.clone());
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    tokio::spawn(async move {
        loop {
            ticks.tick().await;
            steps.send_replace(());
        }
    });
    let metrics = async |State(engine): State<Arc<Engine>>| {
        let Engine { started, blocks, .. } = &*engine;
        let labels = format!("block_size=\"{BLOCK}\",enable_prefix_caching=\"True\",engine=\"0\",num_gpu_blocks=\"{blocks}\"");
        format!("process_start_time_seconds {started}.0\nvllm:cache_config_info{{{labels}}} 1.0\n")
    };
    let sources = async |State(engine): State<Arc<Engine>>| {
        let PublisherSettings { endpoint, replay_endpoint, topic, .. } = &engine.events;
        let of = json!({ "endpoint": endpoint, "replay_endpoint": replay_endpoint, "topic": topic, "publisher": "zmq", "enable_kv_cache_events": true });
        Json(json!({ "0": of }))
    };
    let routes = Router::new()
        .route("/health", get(async || StatusCode::OK))
        .route("/version", get(async || Json(json!({ "version": "0.32.0" }))))
        .route(
            "/v1/models",
            get(async || Json(json!({ "object": "list", "data": [{ "id": "M", "object": "model", "max_model_len": 131_072 }] }))),
        )
        .route("/metrics", get(metrics))
        .route("/kv_event_sources", get(sources))
        .route("/inference/v1/generate", post(answer).layer(DefaultBodyLimit::disable()))
        .route("/v1/chat/completions", post(answer).layer(DefaultBodyLimit::disable()))
        .with_state(engine);
    // As in vLLM's server, Nagle's algorithm is disabled.
    let listener = TcpListener::bind(("127.0.0.1", port.parse()?)).await?.tap_io(|stream| drop(stream.set_nodelay(true)));
    Ok(axum::serve(listener, routes).await?)
}
