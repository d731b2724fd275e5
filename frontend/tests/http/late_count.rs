//! A worker that reports the cached tokens after the first token, as external engines do.

use crate::support::*;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tandem_proto::v1::{
    FinishRequest, PrefillFinished, Scheduled, finished::FinishReason, generate_reply, route_request::Message as RouteMessage,
};
use tonic::Status;

/// A prompt of three blocks. The fake router places it on a worker that has one of the blocks cached.
const PROMPT: &str = "a prompt of exactly forty-eight bytes, as counted";
const ESTIMATE: u32 = 16;

fn cached(answer: &Value) -> (&Value, &str) {
    let source = answer["tandem"]["cached_tokens_source"].as_str().expect("it is a text");
    (&answer["usage"]["prompt_tokens_details"]["cached_tokens"], source)
}

fn streamed(mut options: Value) -> Value {
    options["stream"] = true.into();
    options["stream_options"] = json!({ "include_usage": true });
    options
}

/// Reads the rest of an answer. Returns the JSON object that has the usage: the whole answer, or the last event of a streamed one.
async fn last(reply: Reply) -> Value {
    if reply.header("content-type") == Some("application/json") {
        return reply.json().await.1;
    }
    let (mut events, done) = reply.events().await;
    assert!(done);
    events.pop().expect("there is one")
}

/// Returns the next two counts of cached tokens that the router receives.
async fn reported_to_router(cluster: &mut Cluster) -> [Option<u32>; 2] {
    let mut found = Vec::new();
    while found.len() < 2 {
        if let Received::Message(RouteMessage::PrefillFinished(PrefillFinished { cached_tokens })) = cluster.received().await {
            found.push(cached_tokens);
        }
    }
    [found[0], found[1]]
}

#[tokio::test]
async fn cached_tokens_reported_after_the_first_token_are_in_every_answer_and_metric() {
    let mut cluster = Cluster::start().await;
    for (path, stream) in [(CHAT, false), (CHAT, true), (COMPLETIONS, false), (COMPLETIONS, true)] {
        for count in [32, 0] {
            let options = if stream { streamed(json!({})) } else { json!({}) };
            let body = if path == CHAT { chat(options) } else { completion(PROMPT.into(), options) };
            let reply = cluster.spawn_post(path, body);
            let call = cluster.call().await;
            call.begin_uncounted().await;
            call.send(tokens(0, b"hello")).await;
            call.send(scheduled(Some(count))).await;
            call.send(finished(0, FinishReason::Length, None)).await;
            let answer = last(soon(reply).await.expect("the client task runs")).await;
            assert_eq!(cached(&answer), (&json!(count), "worker"), "{path}, stream: {stream}");
            assert_eq!(answer["tandem"]["cached_tokens_by_tier"], json!({ "device": count }));
            assert_eq!(reported_to_router(&mut cluster).await, [None, Some(count)], "{path}, stream: {stream}");
        }
    }
    assert!(cluster.no_finish(), "the worker had ended all answers");
    for line in [
        "tandem_frontend_request_cached_tokens_count 8",
        "tandem_frontend_request_cached_tokens_sum 128",
        r#"tandem_frontend_cached_tokens_total{source="worker",tier="device"} 128"#,
        r#"tandem_frontend_unreported_prompts_total{source="router_estimate"} 0"#,
    ] {
        assert!(cluster.metric(line).await, "{line}: {}", cluster.metrics.render());
    }
    let (_, records) = cluster.get("/dashboard/requests").await;
    assert_eq!((&records["requests"][0]["cached_tokens"], &records["requests"][1]["cached_tokens"]), (&json!(32), &json!(0)));
}

#[tokio::test]
async fn chunks_claim_no_cached_tokens_before_they_are_reported() {
    let mut cluster = Cluster::start().await;
    let mut options = streamed(json!({}));
    options["stream_options"]["continuous_usage_stats"] = true.into();
    let reply = cluster.spawn_post(CHAT, chat(options));
    let call = cluster.call().await;
    call.begin_uncounted().await;
    call.send(tokens(0, b"a")).await;
    call.send(scheduled(Some(16))).await;
    call.send(tokens(0, b"b")).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (events, _) = soon(reply).await.expect("the client task runs").events().await;
    let details: Vec<&Value> = events.iter().map(|event| &event["usage"]["prompt_tokens_details"]).collect();
    let (unknown, known) = (&json!({ "audio_tokens": 0 }), &json!({ "cached_tokens": 16, "audio_tokens": 0 }));
    assert_eq!(details, [unknown, unknown, known, known, known], "role, a, b, finish reason, usage");
}

#[tokio::test]
async fn late_cached_tokens_of_a_prompt_are_counted_once_for_all_samples() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({ "n": 3 })));
    let call = cluster.call().await;
    call.begin_uncounted().await;
    for sample in 0..3 {
        call.send(tokens(sample, b"ab")).await;
    }
    call.send(scheduled(Some(32))).await;
    for sample in 0..3 {
        call.send(finished(sample, FinishReason::Length, None)).await;
    }
    let answer = last(soon(reply).await.expect("the client task runs")).await;
    assert_eq!(cached(&answer), (&json!(32), "worker"));
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_sum 32").await);
}

#[tokio::test]
async fn generation_ends_when_every_sample_has_a_stop_string_and_only_the_usage_is_late() {
    let mut cluster = Cluster::start().await;
    let options = streamed(json!({ "n": 2, "stop": ["STOP"] }));
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), options));
    let call = cluster.call().await;
    call.begin_uncounted().await;
    call.send(tokens(0, b"aSTOP")).await;
    let mut reply = soon(reply).await.expect("the client task runs");
    let mut text = String::new();
    while !text.contains("stop") {
        text += &reply.more().await;
    }
    assert!(cluster.no_finish(), "the other sample is not complete");
    call.send(tokens(1, b"bSTOP")).await;
    let finish =
        FinishRequest { instance_id: call.request.instance_id.clone(), request_id: call.request.request_id.clone(), attempt: 1 };
    assert_eq!(cluster.finish().await, finish);
    while text.matches("stop").count() < 2 {
        text += &reply.more().await;
    }
    assert!(!text.contains("DONE") && !text.contains("cached_tokens"), "{text}");
    // The engine generates another token before it stops.
    call.send(tokens(1, b"more")).await;
    call.send(scheduled(Some(48))).await;
    call.send(scheduled(Some(0))).await;
    text += &reply.text().await.1;
    let (events, done) = events(&text);
    let last = events.last().expect("there is one");
    assert!(done);
    assert_eq!((cached(last), &last["usage"]["completion_tokens"]), ((&json!(48), "worker"), &json!(10)));
    assert_eq!(reported_to_router(&mut cluster).await, [None, Some(48)]);
    call.closed().await;
    assert!(cluster.no_finish());
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 1").await);
}

#[tokio::test]
async fn unstreamed_answer_waits_a_limited_time_for_its_cached_tokens() {
    let mut cluster = Cluster::start().await;
    let complete = |cluster: &Cluster| cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({ "stop": "STOP" })));
    // In the first case the worker never reports a count.
    let reply = complete(&cluster);
    let silent = cluster.call().await;
    silent.begin_uncounted().await;
    silent.send(tokens(0, b"aSTOP")).await;
    cluster.finish().await;
    let began = Instant::now();
    let answer = last(soon(reply).await.expect("the client task runs")).await;
    assert_eq!(cached(&answer), (&json!(ESTIMATE), "router_estimate"));
    assert!((Duration::from_secs(1)..Duration::from_secs(10)).contains(&began.elapsed()), "{:?}", began.elapsed());
    silent.closed().await;
    // In the second case the worker reports that it has no count. In the third case the worker's stream ends without a report.
    for reports in [true, false] {
        let reply = complete(&cluster);
        let call = cluster.call().await;
        call.begin_uncounted().await;
        call.send(tokens(0, b"aSTOP")).await;
        cluster.finish().await;
        if reports {
            call.send(scheduled(None)).await;
        }
        let began = Instant::now();
        if !reports {
            call.fail(Status::unavailable("killed")).await;
        }
        let answer = last(soon(reply).await.expect("the client task runs")).await;
        assert_eq!((cached(&answer), &answer["choices"][0]["text"]), ((&json!(ESTIMATE), "router_estimate"), &json!("a")));
        assert!(began.elapsed() < Duration::from_millis(1_800), "{:?}", began.elapsed());
    }
    assert!(cluster.no_call(), "a complete answer is not resumed");
    assert!(cluster.metric(r#"tandem_frontend_unreported_prompts_total{source="router_estimate"} 3"#).await);
}

#[tokio::test]
async fn worker_lost_before_its_late_count_does_not_count_as_one_that_stopped_reporting() {
    let mut cluster = Cluster::start().await;
    let complete = |cluster: &Cluster| cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({ "stop": "STOP" })));
    for (report, stopped) in [(Some(Some(0)), false), (None, false), (Some(None), true)] {
        let reply = complete(&cluster);
        let call = cluster.call().await;
        call.begin_uncounted().await;
        call.send(tokens(0, b"aSTOP")).await;
        cluster.finish().await;
        match report {
            Some(count) => call.send(scheduled(count)).await,
            None => call.fail(Status::unavailable("killed")).await,
        }
        last(soon(reply).await.expect("the client task runs")).await;
        let metrics = cluster.metrics.render();
        assert_eq!(metrics.contains("tandem_frontend_reports_stopped_total 1"), stopped, "{report:?}");
    }
}

#[tokio::test]
async fn count_of_a_lost_attempt_is_an_estimate_and_that_of_a_resume_is_ignored() {
    let mut cluster = Cluster::start().await;
    // The worker reports cached tokens for this request. So a missing report for a later request could be counted as a worker that has
    // stopped reporting.
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({})));
    cluster.call().await.answer(Some(0), "x").await;
    last(soon(reply).await.expect("the client task runs")).await;
    for (reported, expected) in [(None, (ESTIMATE, "router_estimate")), (Some(32), (32, "worker"))] {
        let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({ "stop": "STOP" })));
        let first = cluster.call().await;
        first.begin_uncounted().await;
        first.send(tokens(0, b"a")).await;
        if reported.is_some() {
            first.send(scheduled(reported)).await;
        }
        first.fail(Status::unavailable("killed")).await;
        let second = cluster.call().await;
        second.begin_uncounted().await;
        second.send(tokens(0, b"b")).await;
        second.send(scheduled(Some(48))).await;
        second.send(tokens(0, b"STOP")).await;
        let answer = last(soon(reply).await.expect("the client task runs")).await;
        assert_eq!((cached(&answer), &answer["choices"][0]["text"]), ((&json!(expected.0), expected.1), &json!("ab")));
    }
    assert!(cluster.no_finish(), "the count of a resumed attempt is of no use");
    cluster.counted("tandem_frontend_request_cached_tokens_count 3").await;
    cluster.counted("tandem_frontend_request_cached_tokens_sum 48").await;
    assert!(!cluster.metrics.render().contains("reports_stopped"), "a lost worker has not stopped to report");
}

#[tokio::test]
async fn only_the_first_announced_count_is_valid() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(PROMPT.into(), json!({ "max_tokens": 0, "echo": true })));
    let call = cluster.call().await;
    call.begin_uncounted().await;
    // Only the first of these counts was announced. It arrives before the first token. The last one wrongly announces another count.
    call.send(scheduled(Some(32))).await;
    call.send(scheduled(Some(16))).await;
    let again = Scheduled { cached_tokens: Some(48), reported_later: true, ..Scheduled::default() };
    call.send(generate_reply::Message::Scheduled(again)).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let answer = last(soon(reply).await.expect("the client task runs")).await;
    assert_eq!(cached(&answer), (&json!(32), "worker"));
    assert!(matches!(cluster.received().await, Received::Message(RouteMessage::Prompt(_))));
    let released = Received::Message(RouteMessage::PrefillFinished(PrefillFinished { cached_tokens: Some(32) }));
    assert_eq!((cluster.received().await, cluster.received().await), (released, Received::Closed));
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 1").await);
}

#[tokio::test]
async fn disconnect_ends_the_generation_without_waiting_for_a_late_count() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(streamed(json!({}))));
    let call = cluster.call().await;
    call.begin_uncounted().await;
    call.send(tokens(0, b"a")).await;
    drop(soon(reply).await.expect("the client task runs"));
    call.closed().await;
    cluster.counted("tandem_frontend_cancelled_total 1").await;
    assert!(cluster.no_finish());
    assert!(cluster.metric("tandem_frontend_request_cached_tokens_count 0").await, "{}", cluster.metrics.render());
    let (_, records) = cluster.get("/dashboard/requests").await;
    assert_eq!(records["requests"][0]["cached_tokens"], Value::Null);
}
