//! `/inference/v1/generate`: token ids in, token ids out.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use tandem_proto::v1::{Finished, Token, Tokens, finished::FinishReason, generate_reply::Message};

const GENERATE: &str = "/inference/v1/generate";
const IM_END: u32 = 257;

fn request(params: Value, rest: Value) -> Value {
    merged(json!({ "token_ids": [5, 6, 257], "sampling_params": params }), rest)
}

#[tokio::test]
async fn group_of_samples_has_token_ids_stop_tokens_and_the_prompts_cached_tokens() {
    let mut cluster = Cluster::start().await;
    let params = json!({
        "n": 2, "max_tokens": 9, "temperature": 0.5, "top_k": 7, "seed": 3, "stop_token_ids": [65], "detokenize": false,
        "skip_special_tokens": false, "include_stop_str_in_output": true,
    });
    let reply = cluster.spawn_post(GENERATE, request(params, json!({ "model": "m", "cache_salt": "s", "priority": 0 })));
    let call = cluster.call().await;
    assert_eq!((call.request.prompt.clone(), call.request.samples), (vec![5, 6, 257], 2));
    let sampling = call.request.sampling.clone().expect("the call has sampling settings");
    assert_eq!((sampling.max_tokens, sampling.top_k, sampling.seed), (Some(9), 7, 3));
    assert_eq!(sampling.stop_token_ids, [IM_END, 65]);
    assert_eq!(call.request.cache_namespace, tandem_kv::Namespace::new("m", "sim", "", "s").as_bytes());
    call.begin(Some(2)).await;
    call.send(tokens(1, b"\xE2")).await;
    call.send(tokens(0, b"ab")).await;
    call.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
    call.send(finished(1, FinishReason::Length, None)).await;
    let reply = soon(reply).await.expect("the client task runs");
    let id = reply.header("x-request-id").expect("every response has an id").to_owned();
    let (status, mut answer) = reply.json().await;
    assert_eq!(status, StatusCode::OK);
    assert!(answer["created"].is_u64() && answer["tandem"].is_object(), "{answer}");
    for field in ["created", "tandem"] {
        answer.as_object_mut().expect("the answer is an object").remove(field);
    }
    let usage = json!({
        "prompt_tokens": 3, "completion_tokens": 4, "total_tokens": 7,
        "prompt_tokens_details": { "cached_tokens": 2, "audio_tokens": 0 }, "completion_tokens_details": { "reasoning_tokens": 0 },
    });
    let choice = |index: u32, finish: &str, tokens: Value| json!({ "index": index, "logprobs": null, "finish_reason": finish, "token_ids": tokens });
    assert_eq!(
        answer,
        json!({
            "request_id": id, "model": "m", "usage": usage, "prompt_logprobs": null, "kv_transfer_params": null,
            "choices": [choice(0, "stop", json!([97, 98, 257])), choice(1, "length", json!([0xE2]))],
        })
    );
}

#[tokio::test]
async fn every_generated_token_including_the_stop_token_has_logprobs() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let reply = cluster.spawn_post(GENERATE, request(json!({ "logprobs": 1 }), json!({ "stream": stream })));
        let call = cluster.call().await;
        assert_eq!(call.request.sampling.as_ref().and_then(|sampling| sampling.logprobs), Some(1));
        assert_eq!(call.request.sampling.as_ref().and_then(|sampling| sampling.max_tokens), None);
        call.begin(Some(0)).await;
        // The first two tokens begin a character, which a chat would hold back with its logprobs.
        call.send(Message::Tokens(Tokens { sample: 0, tokens: likely(&[0xE2, 0x82]) })).await;
        let stop_logprobs = Some(Token { token: IM_END, logprob: Some(-0.25), top: Vec::new() });
        let reason = FinishReason::Stop.into();
        call.send(Message::Finished(Finished { sample: 0, reason, stop_token: Some(IM_END), stop_logprobs })).await;
        let reply = soon(reply).await.expect("the client task runs");
        let choices: Vec<Value> = if stream {
            let (events, done) = reply.events().await;
            assert!(done);
            events.iter().filter_map(|event| event["choices"].get(0).cloned()).collect()
        } else {
            vec![reply.json().await.1["choices"][0].clone()]
        };
        let list = |pointer: &str| -> Vec<Value> {
            choices.iter().filter_map(|choice| choice.pointer(pointer)?.as_array()).flatten().cloned().collect()
        };
        assert_eq!(list("/token_ids"), [0xE2, 0x82, IM_END]);
        let content = list("/logprobs/content");
        let found: Vec<_> = content.iter().map(|entry| (entry["token_id"].clone(), entry["logprob"].clone())).collect();
        assert_eq!(found, [(json!(0xE2), json!(-0.5)), (json!(0x82), json!(-0.5)), (json!(IM_END), json!(-0.25))]);
        let z = json!({ "token": "token_id:122", "token_id": 122, "logprob": -1.5, "rank": 2, "bytes": null });
        assert_eq!(content[0]["top_logprobs"][1], z);
        assert_eq!((&content[0]["rank"], &content[2]["rank"]), (&json!(1), &Value::Null));
        assert_eq!(choices.last().expect("there is a choice")["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn stream_of_token_ids_has_usage_if_requested() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "stream": true, "stream_options": { "include_usage": true }, "request_id": "mine" });
    let reply = cluster.spawn_post(GENERATE, request(json!({ "n": 2 }), options));
    let call = cluster.call().await;
    assert!(!call.request.request_id.contains("mine"), "a client's id is not used within the cluster");
    call.answer(Some(1), "ab").await;
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done);
    assert!(events.iter().all(|event| event["request_id"] == "mine"), "{events:?}");
    let (last, chunks) = events.split_last().expect("the stream has events");
    assert_eq!((&last["choices"], &last["usage"]["completion_tokens"]), (&json!([]), &json!(4)));
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 1);
    assert!(chunks.iter().all(|chunk| chunk["usage"].is_null()), "{chunks:?}");
    for sample in [0, 1] {
        let mut own = chunks.iter().map(|chunk| &chunk["choices"][0]).filter(|choice| choice["index"] == sample);
        let ids: Vec<_> = own.clone().flat_map(|choice| choice["token_ids"].as_array().cloned().unwrap_or_default()).collect();
        assert_eq!(ids, [97, 98]);
        assert_eq!(own.next_back().expect("the sample has chunks")["finish_reason"], "length");
    }
}

#[tokio::test]
async fn prompt_logprobs_are_listed_by_token_id() {
    let mut cluster = Cluster::start().await;
    let reply =
        cluster.spawn_post(GENERATE, request(json!({ "prompt_logprobs": 2, "max_tokens": 1 }), json!({ "token_ids": [97, 98] })));
    let call = cluster.call().await;
    assert_eq!(call.request.prompt_logprobs, Some(2));
    let mut prompt = likely(b"ab");
    (prompt[0].logprob, prompt[0].top) = (None, Vec::new());
    call.begin(Some(0)).await;
    call.send(prompt_logprobs(prompt)).await;
    call.send(tokens(0, b"c")).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    let b = json!({ "logprob": -0.5, "rank": 1, "decoded_token": "b" });
    let z = json!({ "logprob": -1.5, "rank": 2, "decoded_token": "z" });
    assert_eq!(answer["prompt_logprobs"], json!([null, { "98": b, "122": z }]));
}

#[tokio::test]
async fn malformed_generate_requests_are_refused_by_name() {
    let mut cluster = Cluster::start().await;
    let long = vec![1; 512];
    for (body, param) in [
        (json!({ "sampling_params": {} }), "token_ids"),
        (json!({ "token_ids": [1] }), "sampling_params"),
        (request(json!({}), json!({ "token_ids": [] })), "token_ids"),
        (request(json!({}), json!({ "token_ids": [258] })), "token_ids"),
        (request(json!({}), json!({ "token_ids": [-1] })), "token_ids[0]"),
        (request(json!({}), json!({ "token_ids": long })), "token_ids"),
        (request(json!({ "max_tokens": 510 }), json!({})), "sampling_params.max_tokens"),
        (request(json!({ "max_tokens": 0 }), json!({})), "sampling_params.max_tokens"),
        (request(json!({ "temperature": 3 }), json!({})), "sampling_params.temperature"),
        (request(json!({ "temperature": "a" }), json!({})), "sampling_params.temperature"),
        (request(json!({ "n": 0 }), json!({})), "sampling_params.n"),
        (request(json!({ "logprobs": -1 }), json!({})), "sampling_params.logprobs"),
        (request(json!({ "extra_args": { "a": 1 } }), json!({})), "sampling_params.extra_args"),
        (request(json!({ "logits_processors": ["x"] }), json!({})), "sampling_params.logits_processors"),
        (request(json!({ "stream": true }), json!({})), "sampling_params.stream"),
        (request(json!({ "cache_salt": "s" }), json!({})), "sampling_params.cache_salt"),
        (request(json!({ "prompt_logprobs": 1 }), json!({ "stream": true })), "sampling_params.prompt_logprobs"),
        (request(json!({}), json!({ "kv_transfer_params": { "do_remote_decode": true } })), "kv_transfer_params"),
        (request(json!({}), json!({ "features": { "mm_hashes": {} } })), "features"),
        (request(json!({}), json!({ "priority": 0.5 })), "priority"),
        (request(json!({}), json!({ "priority": 1_i64 << 31 })), "priority"),
        (request(json!({ "priority": 1 }), json!({})), "sampling_params.priority"),
        (request(json!({}), json!({ "cache_salt": "" })), "cache_salt"),
        (request(json!({}), json!({ "stream_options": {} })), "stream_options"),
        (request(json!({}), json!({ "request_id": "x".repeat(257) })), "request_id"),
    ] {
        let (status, error) = cluster.post(GENERATE, &body).await.json().await;
        assert_eq!((status, &error["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(param)), "{error}");
    }
    let chain: String = (0..1_500).map(|i| format!("r{i}: r{}\n", i + 1)).collect();
    let grammar = format!("start: r0\n{chain}r1500: \"a\"\n");
    let body = request(json!({ "structured_outputs": { "grammar": grammar } }), json!({}));
    let (status, error) = cluster.post(GENERATE, &body).await.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "no worker sees a constraint that cannot be enforced: {error}");
    assert!(error["error"]["message"].as_str().is_some_and(|message| message.contains("limit of 256 rules")), "{error}");
    assert!(cluster.no_call());
}

#[tokio::test]
async fn abandoned_generate_request_ends_on_the_worker() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(GENERATE, request(json!({ "n": 3 }), json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    let mut reply = soon(reply).await.expect("the client task runs");
    reply.more().await;
    drop(reply);
    call.closed().await;
    cluster.routes_closed(1).await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="generate",model="m",code="499"} 1"#).await;
    cluster.counted("tandem_frontend_inflight_sequences 0").await;
}
