//! Fuzzing: mutated model files, request bodies and KV events are accepted or refused, without a panic.
//!
//! Runs on stable Rust, for a few seconds per target. For longer: `TANDEM_FUZZ_SECONDS=600 cargo test --release -p tandem-tests --test fuzz`.
//! A failure names the seed of its input; `TANDEM_FUZZ_SEED` starts with that input. Coverage does not guide the mutations.

#[path = "../../model/tests/writer/mod.rs"]
mod writer;

use anyhow::Result;
use prost::Message;
use serde_json::json;
use std::{
    collections::hash_map::RandomState,
    fs,
    hash::BuildHasher,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};
use tandem_kv::{KvBatch, SequenceHash};
use tandem_model::{Gguf, HfDirectory, ModelConfig, ModelFile};
use tandem_proto::{SnapshotAssembly, v1};
use tandem_router::{PrefixIndex, WorkerSlot};
use tandem_tests::{Client, Endpoint, sim_settings, simulation::Random, start};
use tokio::time::Instant;
use writer::{Writer, kind};

/// Time per target unless `TANDEM_FUZZ_SECONDS` is set.
const SECONDS: u64 = 3;
/// The maximum number of mutations of one input.
const MUTATIONS_MAX: u64 = 6;
/// Bytes that are inserted: edge cases of JSON, UTF-8 and lengths.
const FRAGMENTS: [&[u8]; 14] = [
    b"null",
    b"-1",
    b"1e999",
    b"18446744073709551616",
    b"[]",
    b"{}",
    b"[[[[[[[[[[[[[[[[",
    b"\"\\ud800\"",
    b"\"\"",
    b",",
    b"\"",
    b"\xff\xfe",
    b"\0\0\0\0\0\0\0\0",
    b"\xff\xff\xff\xff\xff\xff\xff\x7f",
];

/// An iterator over mutations of valid inputs, which ends after a given time.
struct Inputs<'a> {
    valid: &'a [Vec<u8>],
    seed: u64,
    until: Instant,
}

fn variable(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

impl<'a> Inputs<'a> {
    fn new(valid: &'a [Vec<u8>]) -> Self {
        let seed = variable("TANDEM_FUZZ_SEED").unwrap_or_else(|| RandomState::new().hash_one(0));
        Self { valid, seed, until: Instant::now() + Duration::from_secs(variable("TANDEM_FUZZ_SECONDS").unwrap_or(SECONDS)) }
    }
}

impl Iterator for Inputs<'_> {
    /// An input and its seed.
    type Item = (Vec<u8>, u64);

    fn next(&mut self) -> Option<Self::Item> {
        let seed = self.seed;
        self.seed = seed.wrapping_add(1);
        let mut random = Random::new(seed);
        let mut input = self.valid[random.within(0..self.valid.len() as u64) as usize].clone();
        for _ in 0..=random.within(0..MUTATIONS_MAX) {
            mutate(&mut random, &mut input);
        }
        (Instant::now() < self.until).then_some((input, seed))
    }
}

fn mutate(random: &mut Random, input: &mut Vec<u8>) {
    let at = random.within(0..input.len() as u64 + 1) as usize;
    let end = (at + 1 + random.within(0..16) as usize).min(input.len());
    match random.within(0..6) {
        0 if at < end => input[at] ^= 1 << random.within(0..8),
        1 if at < end => input[at] = random.within(0..256) as u8,
        2 => drop(input.drain(at.min(end)..end)),
        3 => input.extend_from_within(at.min(end)..end),
        4 => input.truncate(at),
        _ => drop(input.splice(at..at, FRAGMENTS[random.within(0..FRAGMENTS.len() as u64) as usize].iter().copied())),
    }
}

/// Calls the target with mutated inputs until the time is over. A panic fails the test, which then prints the input's seed.
fn fuzz(valid: &[Vec<u8>], target: impl Fn(&[u8])) {
    for (input, seed) in Inputs::new(valid) {
        let outcome = catch_unwind(AssertUnwindSafe(|| target(&input)));
        assert!(outcome.is_ok(), "the target panicked (see above); to repeat it: TANDEM_FUZZ_SEED={seed}");
    }
}

fn gguf() -> Vec<u8> {
    Writer::default()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 2)
        .u32("llama.embedding_length", 8)
        .u32("llama.feed_forward_length", 16)
        .u32("llama.attention.head_count", 4)
        .u32("llama.attention.head_count_kv", 2)
        .u32("llama.context_length", 64)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .str("llama.rope.scaling.type", "yarn")
        .f32("llama.rope.scaling.factor", 4.0)
        .str("tokenizer.ggml.model", "gpt2")
        .strs("tokenizer.ggml.tokens", &["<s>", "a", "b", "ab", "é"])
        .i32s("tokenizer.ggml.token_type", &[3, 1, 1, 1, 1])
        .strs("tokenizer.ggml.merges", &["a b"])
        .u32("tokenizer.ggml.eos_token_id", 0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .tensor("token_embd.weight", &[8, 5], kind::F32, vec![1; 160])
        .tensor("q", &[32, 2], kind::Q4_0, vec![2; 36])
        .finish()
}

#[test]
fn mutated_gguf_files_do_not_panic() {
    fuzz(&[gguf()], |input| {
        let Ok(file) = Gguf::from_bytes(input.to_vec()) else { return };
        let _ = (file.tokenizer(), ModelConfig::read(&file), file.context_length());
        for (name, _) in file.tensor_types() {
            file.tensor(name).expect("a listed tensor is in the file");
        }
    });
}

/// Each input mutates one of a directory's files.
#[test]
fn mutated_model_directories_do_not_panic() {
    let header = br#"{"lm_head.weight":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}}"#;
    let weights = [&(header.len() as u64).to_le_bytes()[..], header, &[0; 16]].concat();
    let config = json!({
        "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "intermediate_size": 16, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "max_position_embeddings": 64, "vocab_size": 5, "hidden_act": "silu",
        "rope_scaling": { "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16 }, "eos_token_id": [1, 2],
    });
    let index = json!({ "weight_map": { "lm_head.weight": "model.safetensors" } });
    let tokenizer =
        json!({ "bos_token": { "content": "<s>" }, "chat_template": [{ "name": "default", "template": "{{ messages }}" }] });
    let files = [
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors", weights),
        ("model.safetensors.index.json", index.to_string().into_bytes()),
        ("tokenizer_config.json", tokenizer.to_string().into_bytes()),
    ];
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| fs::write(folder.path().join(name), bytes).unwrap();
    files.iter().for_each(|(name, bytes)| write(name, bytes));
    write("tokenizer.json", b"{}");
    let open = || {
        let directory = HfDirectory::open(folder.path())?;
        let _ = (directory.tensor("output.weight"), directory.config());
        directory.tokenizer()
    };
    open().expect("the directory is valid");
    for (name, bytes) in &files {
        fuzz(std::slice::from_ref(bytes), |input| {
            write(name, input);
            let _ = open();
        });
        write(name, bytes);
    }
}

#[test]
fn mutated_kv_events_do_not_panic() {
    let stored = |parent, hashes: &[u64]| v1::Stored { parent, sequence_hashes: hashes.to_vec() };
    let event = |event_id, change| v1::KvEvent { event_id, change: Some(change) };
    let batch = v1::KvEventBatch {
        instance_id: "worker".into(),
        last_event_id: 3,
        events: vec![
            event(1, v1::kv_event::Change::Stored(stored(None, &[1, 2, 3]))),
            event(2, v1::kv_event::Change::Removed(v1::Removed { sequence_hashes: vec![3] })),
            event(3, v1::kv_event::Change::Stored(stored(Some(2), &[4, u64::MAX]))),
        ],
        load: Some(v1::Load::default()),
        sent_unix_us: 0,
    };
    let chunk = v1::SnapshotChunk {
        instance_id: "worker".into(),
        at_event_id: 3,
        stored: vec![stored(None, &[1, 2]), stored(Some(1), &[5])],
        last: true,
    };
    fuzz(&[batch.encode_to_vec(), chunk.encode_to_vec()], |input| {
        let mut index = PrefixIndex::new(7);
        if let Ok(Ok(batch)) = v1::KvEventBatch::decode(input).map(KvBatch::try_from) {
            batch.events.iter().for_each(|event| {
                index.apply(WorkerSlot(0), &event.change);
            });
        }
        if let Ok(Ok(Some(snapshot))) = v1::SnapshotChunk::decode(input).map(|chunk| SnapshotAssembly::new(100).push(chunk)) {
            index.replace(WorkerSlot(1), &snapshot);
        }
        index.overlap(&[1, 2, 4].map(SequenceHash));
    });
}

/// Sends mutated requests to a whole simulated cluster: every request gets an answer that is not an internal error, and the cluster still
/// serves afterwards.
#[tokio::test(flavor = "multi_thread")]
async fn mutated_request_bodies_are_answered() -> Result<()> {
    let mut settings = sim_settings();
    settings.worker.sim.sim_speedup = f64::INFINITY;
    let cluster = start(settings).await?;
    let (model, client) = (cluster.model_id(), Client::new(cluster.frontend()));
    let options = json!({
        "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a", "b"], "logit_bias": { "5": -100 }, "stream": true,
        "stream_options": { "include_usage": true }, "user": "someone",
    });
    let tools = json!({ "tools": [{ "type": "function", "function": { "name": "f", "parameters": {} } }], "tool_choice": "auto", "logprobs": true });
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build()?;
    for endpoint in [Endpoint::Chat, Endpoint::Completions] {
        let valid = [&options, &tools].map(|options| endpoint.request(&model, "Hello", options.clone()).to_string().into_bytes());
        let url = format!("http://{}{}", cluster.frontend(), endpoint.path());
        for (body, seed) in Inputs::new(&valid) {
            match http.post(&url).header("content-type", "application/json").body(body).send().await {
                Ok(answer) => {
                    let status = answer.status().as_u16();
                    assert!(status < 500 || status == 503, "status {status}; to repeat it: TANDEM_FUZZ_SEED={seed}");
                }
                // A mutated request may ask for more tokens than can be generated before the timeout.
                Err(error) => assert!(error.is_timeout(), "{error}; to repeat it: TANDEM_FUZZ_SEED={seed}"),
            }
        }
    }
    client.answer(Endpoint::Chat.path(), &Endpoint::Chat.request(&model, "Hello", json!({ "max_tokens": 2 }))).await?;
    Ok(())
}
