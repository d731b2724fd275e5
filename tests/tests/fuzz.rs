//! Fuzzing: mutated model files, request bodies and KV events are accepted or refused, without a panic.
//!
//! Runs on stable Rust, for a few seconds per target. `TANDEM_FUZZ_SECONDS=600` sets a longer time. With `-- --ignored --nocapture`, it
//! sends 10,000 request bodies, and checks that the memory in use does not grow:
//!
//!     TANDEM_FUZZ_SECONDS=600 cargo test --release -p tandem-tests --test fuzz
//!
//! A failure names the seed of its input; `TANDEM_FUZZ_SEED` starts with that input. Coverage does not guide the mutations.

#[path = "../../crates/model/tests/writer/mod.rs"]
mod writer;

use anyhow::{Context, Result, ensure};
use prost::Message;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, hash_map::RandomState},
    fs,
    hash::BuildHasher,
    panic::{AssertUnwindSafe, catch_unwind},
    time::Duration,
};
use tandem_kv::{KvBatch, SequenceHash};
use tandem_model::{Gguf, HfDirectory, ModelConfig, ModelFile};
use tandem_proto::{SnapshotAssembly, v1};
use tandem_router::PrefixIndex;
use tandem_tests::{Client, Endpoint, TestCluster, sim_settings, simulation::Random, start};
use tokio::time::Instant;
use writer::{Writer, kind};

/// Time per target unless `TANDEM_FUZZ_SECONDS` is set.
const SECONDS: u64 = 3;
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
        let index = PrefixIndex::new(7);
        let workers = [index.add_worker(), index.add_worker()];
        if let Ok(Ok(batch)) = v1::KvEventBatch::decode(input).map(KvBatch::try_from) {
            batch.events.iter().for_each(|event| {
                index.apply(workers[0], &event.change);
            });
        }
        if let Ok(Ok(Some(snapshot))) = v1::SnapshotChunk::decode(input).map(|chunk| SnapshotAssembly::new(100).push(chunk)) {
            index.replace(workers[1], &snapshot);
        }
        index.overlap(&[1, 2, 4].map(SequenceHash));
        workers.iter().for_each(|worker| index.remove_worker(*worker));
        while index.sweep() {}
    });
}

/// Returns valid requests, each with some of the parameters.
fn requests(endpoint: Endpoint, model: &str) -> Vec<Vec<u8>> {
    let logprobs = if endpoint == Endpoint::Chat { json!(true) } else { json!(2) };
    let call = json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": "{\"a\": [1]}" } });
    let options = [
        json!({
            "temperature": 0.5, "top_p": 0.9, "n": 2, "seed": 1, "stop": ["a", "b"], "logit_bias": { "5": -100 }, "stream": true,
            "stream_options": { "include_usage": true }, "user": "someone",
        }),
        json!({
            "tools": [{ "type": "function", "function": { "name": "f", "description": "d", "parameters": { "type": "object", "properties": {} } } }],
            "tool_choice": { "type": "allowed_tools", "allowed_tools": { "mode": "auto", "tools": [{ "type": "function", "function": { "name": "f" } }] } },
            "messages": [
                { "role": "user", "content": [{ "type": "text", "text": "Hi" }], "name": "n" },
                { "role": "assistant", "content": null, "reasoning_content": "r", "tool_calls": [call] },
                { "role": "tool", "tool_call_id": "c", "content": "result" },
                { "role": "assistant", "content": [{ "type": "refusal", "refusal": "no" }] },
            ],
            "parallel_tool_calls": false, "reasoning_effort": "none", "chat_template_kwargs": { "x": { "y": [null] } }, "documents": [{ "text": "t" }],
            "continue_final_message": true, "logprobs": logprobs,
        }),
        json!({
            "allowed_token_ids": [7, 8, 257], "bad_words": ["ugly", " bad"], "logprob_token_ids": [7, 9], "logprobs": logprobs,
            "return_tokens_as_token_ids": true, "return_token_ids": true, "include_stop_str_in_output": true, "stop": "x",
        }),
        json!({
            "response_format": { "type": "json_schema", "json_schema": { "name": "n", "strict": true, "schema": {
                "type": "object", "required": ["a"], "properties": { "a": { "type": "string", "pattern": "^x+$" }, "b": { "$ref": "#/$defs/c" } },
                "$defs": { "c": { "type": "array", "items": { "anyOf": [{ "type": "integer", "minimum": 3 }, { "$ref": "#/$defs/c" }] }, "maxItems": 2 } },
            } } },
        }),
        json!({ "guided_grammar": "root ::= \"a\" [b-d]+ | (x | \"é\")*\nx ::= \"y\"?" }),
        json!({ "structured_outputs": { "regex": "[a-z]{2,5}(\\d|é)+" }, "n": 2 }),
        json!({ "guided_choice": ["yes", "no"], "seed": 1 }),
        json!({
            "prompt_logprobs": 1, "truncate_prompt_tokens": 3, "truncation_side": "right", "skip_special_tokens": false, "detokenize": false,
            "min_tokens": 1, "repetition_penalty": 1.5, "kv_transfer_params": null, "priority": 0, "unknown": [{ "a": 1 }],
        }),
    ];
    let with_limit = |mut options: Value| {
        options["max_tokens"] = json!(2);
        endpoint.request(model, "Hello", options).to_string().into_bytes()
    };
    options.into_iter().map(with_limit).collect()
}

/// Returns valid requests to the other endpoints that read a body.
fn other_requests(model: &str) -> Vec<(&'static str, Vec<Vec<u8>>)> {
    let parameters = json!({ "type": "object", "properties": { "a": { "enum": [1, "b"] } } });
    let responses = json!({
        "model": model, "instructions": "i", "max_output_tokens": 2, "stream": true, "include": ["reasoning.encrypted_content"],
        "input": [
            { "role": "user", "content": [{ "type": "input_text", "text": "Hi" }] },
            { "type": "reasoning", "id": "r", "summary": [], "content": [{ "type": "reasoning_text", "text": "hm" }] },
            { "type": "function_call", "id": "f", "call_id": "c", "name": "f", "arguments": "{\"a\":1}" },
            { "type": "function_call_output", "call_id": "c", "output": "x" },
        ],
        "tools": [{ "type": "function", "name": "f", "parameters": parameters, "strict": true }], "tool_choice": "auto",
        "text": { "format": { "type": "json_schema", "name": "n", "schema": parameters } }, "metadata": { "a": "b" }, "store": false,
    });
    let messages = json!({
        "model": model, "max_tokens": 2, "system": [{ "type": "text", "text": "s" }], "stop_sequences": ["x"], "stream": true, "top_k": 5,
        "thinking": { "type": "enabled", "budget_tokens": 1024 }, "metadata": { "user_id": "u" },
        "messages": [
            { "role": "user", "content": "Hi" },
            { "role": "assistant", "content": [{ "type": "thinking", "thinking": "t", "signature": "s" }, { "type": "tool_use", "id": "c", "name": "f", "input": {} }] },
            { "role": "user", "content": [{ "type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": true }] },
        ],
        "tools": [{ "name": "f", "input_schema": parameters }], "tool_choice": { "type": "auto", "disable_parallel_tool_use": true },
    });
    let generate = json!({
        "model": model, "token_ids": [72, 105, 257], "stream": false, "cache_salt": "s", "request_id": "r",
        "sampling_params": { "n": 2, "max_tokens": 2, "logprobs": 1, "prompt_logprobs": 1, "seed": 7, "stop_token_ids": [5], "regex": "a+" },
    });
    let tokenize = json!({ "model": model, "prompt": "Hello", "add_special_tokens": false, "return_token_strs": true });
    let detokenize = json!({ "model": model, "tokens": [72, 105, 257] });
    let all = [
        ("/v1/responses", responses.clone()),
        ("/v1/responses/input_tokens", responses),
        ("/v1/messages", messages.clone()),
        ("/v1/messages/count_tokens", messages),
        ("/inference/v1/generate", generate),
        ("/tokenize", tokenize),
        ("/detokenize", detokenize),
    ];
    all.map(|(path, request)| (path, vec![request.to_string().into_bytes()])).into()
}

/// Sends mutated requests to all endpoints that read a body, until `bodies` are sent or the time is over. Every request gets an answer that
/// is no server error. Returns the number of answers with each status.
async fn send_mutations(cluster: &TestCluster, bodies: usize) -> Result<BTreeMap<u16, usize>> {
    let http = reqwest::Client::builder().no_proxy().timeout(Duration::from_secs(5)).build()?;
    let both = [Endpoint::Chat, Endpoint::Completions];
    let mut targets: Vec<_> = both.map(|endpoint| (endpoint.path(), requests(endpoint, &cluster.model_id()))).into();
    targets.extend(other_requests(&cluster.model_id()));
    let (each, mut statuses) = (bodies.div_ceil(targets.len()), BTreeMap::new());
    for (path, valid) in targets {
        let url = format!("http://{}{path}", cluster.frontend());
        for (body, seed) in Inputs::new(&valid).take(each) {
            match http.post(&url).header("content-type", "application/json").body(body).send().await {
                Ok(answer) => {
                    let status = answer.status().as_u16();
                    let answer = answer.text().await.unwrap_or_default();
                    assert!(status < 500, "{path}: status {status}; to repeat it: TANDEM_FUZZ_SEED={seed}: {answer}");
                    *statuses.entry(status).or_default() += 1;
                }
                // A mutated request may ask for more tokens than can be generated before the timeout.
                Err(error) => assert!(error.is_timeout(), "{path}: {error}; to repeat it: TANDEM_FUZZ_SEED={seed}"),
            }
        }
    }
    Ok(statuses)
}

/// Starts a cluster whose simulated engines take no time.
async fn fast_cluster() -> Result<TestCluster> {
    let mut settings = sim_settings();
    settings.worker.sim.sim_speedup = f64::INFINITY;
    start(settings).await
}

/// The cluster still serves after mutated requests.
#[tokio::test(flavor = "multi_thread")]
async fn mutated_request_bodies_are_answered() -> Result<()> {
    let cluster = fast_cluster().await?;
    let bodies = if variable("TANDEM_FUZZ_SECONDS").is_some() { usize::MAX } else { 3_000 };
    send_mutations(&cluster, bodies).await?;
    let request = Endpoint::Chat.request(&cluster.model_id(), "Hello", json!({ "max_tokens": 2 }));
    Client::new(cluster.frontend()).answer(Endpoint::Chat.path(), &request).await?;
    Ok(())
}

/// Returns the memory that the process uses, in bytes.
#[cfg(target_os = "linux")]
fn resident_bytes() -> Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("the system does not report the memory in use")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? << 10)
}

#[cfg(target_os = "linux")]
#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes minutes; run it with -- --ignored and TANDEM_FUZZ_SECONDS=600"]
#[expect(clippy::print_stdout, reason = "the test prints measurements")]
async fn ten_thousand_mutated_bodies_leave_the_memory_flat() -> Result<()> {
    use std::{
        panic::{set_hook, take_hook},
        sync::{
            Arc,
            atomic::{AtomicUsize, Ordering},
        },
    };
    const GROWTH_MAX: u64 = 32 << 20;
    let cluster = fast_cluster().await?;
    // The first requests fill caches and buffers.
    send_mutations(&cluster, 2_000).await?;
    let panics = Arc::new(AtomicUsize::new(0));
    let (counter, print) = (Arc::clone(&panics), take_hook());
    set_hook(Box::new(move |panic| {
        counter.fetch_add(1, Ordering::Relaxed);
        print(panic);
    }));
    let before = resident_bytes()?;
    let statuses = send_mutations(&cluster, 10_000).await?;
    let after = resident_bytes()?;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!("{} bodies, answers by status: {statuses:?}", statuses.values().sum::<usize>());
    println!("memory in use: {:.1} MiB before, {:.1} MiB after", mib(before), mib(after));
    ensure!(panics.load(Ordering::Relaxed) == 0, "a task panicked");
    ensure!(after < before + GROWTH_MAX, "10,000 bodies increased the memory in use from {before} to {after} bytes");
    Ok(())
}
