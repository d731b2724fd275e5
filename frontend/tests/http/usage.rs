//! Usage in answers and in the metrics.

use crate::support::*;
use hyper::Method;
use serde_json::{Value, json};
use tandem_proto::v1::{finished::FinishReason, route_request::Message as RouteMessage};

fn usage_of(prompt: u64, completion: u64, cached: u64) -> Value {
    json!({
        "prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion,
        "prompt_tokens_details": { "cached_tokens": cached, "audio_tokens": 0 },
        "completion_tokens_details": { "reasoning_tokens": 0 },
    })
}

const PROMPT: &str = "a prompt of exactly forty-eight bytes, as counted";

/// Covers every source of the cached tokens (worker, router's estimate, unknown) at every endpoint, for whole and for streamed answers.
#[tokio::test]
async fn every_answer_has_cached_tokens_and_their_source() {
    let mut cluster = Cluster::start().await;
    for (reported, block_size, cached, source) in [
        (Some(16), 16, 16, "worker"),
        (Some(0), 16, 0, "worker"),
        (None, 16, 32, "router_estimate"),
        (None, 4096, 8192, "router_estimate"),
        (None, 0, 0, "unknown"),
    ] {
        for path in [CHAT, COMPLETIONS] {
            for stream in [false, true] {
                // The prefill worker has two of the prompt's blocks cached, and the decode worker has one. The estimate must be two blocks,
                // those of the prefill worker.
                cluster.place(cluster.remote(2, block_size));
                let mut body = if path == CHAT { chat(json!({})) } else { completion(PROMPT.into(), json!({})) };
                if stream {
                    body["stream"] = true.into();
                    body["stream_options"] = json!({ "include_usage": true });
                }
                let reply = cluster.spawn_post(path, body);
                let call = cluster.call().await;
                let prompt_tokens = call.request.prompt.len() as u64;
                // The estimate is never greater than the number of the prompt's tokens.
                let cached = if source == "router_estimate" { cached.min(prompt_tokens) } else { cached };
                call.answer(reported, "hello").await;
                let reply = soon(reply).await.expect("the client task runs");
                let last =
                    if stream { reply.events().await.0.pop().expect("the answer has events") } else { reply.json().await.1 };
                let case = format!("{path}, stream: {stream}, {reported:?}: {last}");
                assert_eq!(last["usage"], usage_of(prompt_tokens, 5, cached), "{case}");
                assert_eq!(last["tandem"]["cached_tokens_source"], source, "{case}");
                assert_eq!(last["tandem"]["overlap_blocks"], 2, "{case}");
                assert_eq!(last["tandem"]["prefill_worker"], "p0", "{case}");
                assert_eq!(last["tandem"]["decode_worker"], "d0", "{case}");
                assert_eq!(last["tandem"]["kv_transfer_bytes"], 4096, "{case}");
                let tiers = if source == "worker" { json!({ "device": cached }) } else { json!({}) };
                assert_eq!(last["tandem"]["cached_tokens_by_tier"], tiers, "{case}");
            }
        }
    }
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 20").await, "{}", cluster.metrics.render());
    assert!(cluster.metric(r#"tandem_frontend_cached_tokens_total{source="worker",tier="device"} 64"#).await);
    assert!(cluster.metric(r#"tandem_frontend_unreported_prompts_total{source="unknown"} 4"#).await);
}

#[tokio::test]
async fn estimate_for_a_local_prefill_is_the_decode_workers_overlap() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({})));
    cluster.call().await.answer(None, "x").await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(answer["usage"], usage_of(PROMPT.len() as u64, 1, 16));
    assert_eq!(answer["tandem"]["prefill_worker"], Value::Null);
}

#[tokio::test]
async fn cached_tokens_are_those_of_the_attempt_with_the_first_token() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({})));
    let first = cluster.call().await;
    first.send(scheduled(Some(48))).await;
    let failure = failure(tandem_proto::v1::FailureReason::PrefillLost, "p0-instance");
    first.send(tandem_proto::v1::generate_reply::Message::Failure(failure)).await;
    let second = cluster.call().await;
    second.begin(Some(16)).await;
    second.send(tokens(0, b"x")).await;
    // The cached tokens do not change after the first token, so this report does not count.
    second.send(scheduled(Some(32))).await;
    second.send(finished(0, FinishReason::Length, None)).await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(answer["usage"], usage_of(PROMPT.len() as u64, 1, 16));
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 1").await);
    assert!(cluster.metric(r#"tandem_frontend_attempts_failed_total{reason="prefill_lost"} 1"#).await);
    // The router receives the reported cached tokens and compares its prediction with them.
    let mut released = None;
    while released.is_none() {
        if let Received::Message(RouteMessage::PrefillFinished(message)) = cluster.received().await {
            released = Some(message.cached_tokens);
        }
    }
    assert_eq!(released, Some(Some(16)));
}

#[tokio::test]
async fn prompt_tokens_count_once_for_all_samples_and_for_each_prompt() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({ "n": 3 })));
    cluster.call().await.answer(Some(16), "abcd").await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(answer["usage"], usage_of(PROMPT.len() as u64, 12, 16));
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 1").await);

    let reply = cluster.spawn_post(COMPLETIONS, completion(json!([[1, 2, 3], [4, 5]]), json!({ "n": 2 })));
    for _ in 0..2 {
        let call = cluster.call().await;
        let cached = call.request.prompt.len() as u32 - 1;
        call.answer(Some(cached), "ab").await;
    }
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(answer["usage"], usage_of(5, 8, 3));
    let indices: Vec<_> =
        answer["choices"].as_array().expect("choices is a list").iter().map(|choice| &choice["index"]).collect();
    assert_eq!(indices, [0, 1, 2, 3]);
    assert_eq!(answer["tandem"]["prompts"].as_array().map(Vec::len), Some(2));
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 3").await);
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_sum 19").await);
}

#[tokio::test]
async fn stream_has_usage_in_every_chunk_or_in_none() {
    let mut cluster = Cluster::start().await;
    for (options, in_chunks, at_end) in [
        (None, None, false),
        (Some(json!({ "include_usage": false })), None, false),
        (Some(json!({ "include_usage": true })), Some(false), true),
        (Some(json!({ "include_usage": true, "continuous_usage_stats": true })), Some(true), true),
    ] {
        let mut body = chat(json!({ "stream": true, "max_tokens": 9 }));
        if let Some(options) = &options {
            body["stream_options"] = options.clone();
        }
        let frontend = cluster.frontend;
        let reply = tokio::spawn(send(frontend, Method::POST, CHAT, &[], body.to_string().into()));
        let call = cluster.call().await;
        let prompt_tokens = call.request.prompt.len() as u64;
        call.begin(Some(16)).await;
        call.send(tokens(0, b"ab")).await;
        call.send(tokens(0, b"c")).await;
        call.send(finished(0, FinishReason::Stop, Some(257))).await;
        let (mut events, done) = soon(reply).await.expect("the client task runs").events().await;
        assert!(done);
        if at_end {
            let last = events.pop().expect("the answer has events");
            assert_eq!(last["choices"], json!([]));
            assert_eq!(last["usage"], usage_of(prompt_tokens, 4, 16));
        }
        assert_eq!(events.len(), 4, "expected a role, two texts and an end: {events:?}");
        let usages: Vec<Option<&Value>> = events.iter().map(|event| event.get("usage")).collect();
        match in_chunks {
            None => assert_eq!(usages, [None; 4], "{options:?}"),
            Some(false) => assert_eq!(usages, [Some(&Value::Null); 4], "{options:?}"),
            Some(true) => {
                let expected = [0, 2, 3, 4].map(|completion| usage_of(prompt_tokens, completion, 16));
                assert_eq!(usages, expected.iter().map(Some).collect::<Vec<_>>());
            }
        }
    }
    // The metrics count the prompts of all answers, with or without usage in the answer.
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 4").await);
    assert!(cluster.metric("tandem_frontend_inter_token_latency_seconds_count 8").await, "{}", cluster.metrics.render());
}

#[tokio::test]
async fn requests_are_counted_by_endpoint_model_and_status() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    cluster.call().await.answer(Some(0), "x").await;
    soon(reply).await.expect("the client task runs").json().await;
    cluster.post(CHAT, &chat(json!({ "n": 0 }))).await;
    cluster.post(COMPLETIONS, &completion("x".into(), json!({ "model": "other" }))).await;
    for line in [
        r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="200"} 1"#,
        r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="400"} 1"#,
        r#"tandem_frontend_requests_total{endpoint="completions",model="",code="404"} 1"#,
        "tandem_frontend_request_duration_seconds_count 3",
        "tandem_frontend_time_to_first_token_seconds_count 1",
        "tandem_frontend_request_prompt_tokens_count 1",
        "tandem_frontend_inflight_requests 0",
        "tandem_frontend_cancelled_total 0",
    ] {
        cluster.counted(line).await;
    }
}
