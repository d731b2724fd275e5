//! Requests that would wait too long, and attempts that wait in an engine's queue.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::json;
use std::time::Duration;
use tandem_proto::v1::{FailureReason, Placement, Waiting, generate_reply, route_reply, route_request::Message as RouteMessage};

/// Returns the limit on the wait that the router receives for the next request, in milliseconds.
async fn limit(cluster: &mut Cluster) -> u32 {
    loop {
        if let Received::Message(RouteMessage::Prompt(prompt)) = cluster.received().await {
            return prompt.max_wait_ms;
        }
    }
}

#[tokio::test]
async fn request_that_would_wait_too_long_is_refused_with_retry_after() {
    let mut cluster = Cluster::start().await;
    for (retry_after_ms, retry_after) in [(2_300, "3"), (3, "1")] {
        let overloaded = failure(FailureReason::Overloaded, "");
        cluster.place(route_reply::Message::Failure(tandem_proto::v1::Failure { retry_after_ms, ..overloaded }));
        let reply = soon(cluster.spawn_post(CHAT, chat(json!({ "stream": true })))).await.expect("the client task runs");
        assert_eq!((reply.status(), reply.header("retry-after")), (StatusCode::SERVICE_UNAVAILABLE, Some(retry_after)));
        let (_, body) = reply.json().await;
        assert_eq!((&body["error"]["type"], &body["error"]["code"]), (&json!("server_error"), &json!("overloaded")));
        assert_eq!(limit(&mut cluster).await, 10_000);
    }
    assert!(cluster.no_call());
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn client_can_lower_the_limit_on_its_wait_but_not_raise_it() {
    let ask = async |cluster: &mut Cluster, max_wait: &str| {
        cluster.place(route_reply::Message::Failure(failure(FailureReason::Overloaded, "")));
        let headers = [("x-max-wait", max_wait)];
        cluster.send(Method::POST, CHAT, &headers, chat(json!({})).to_string()).await.status()
    };
    let mut cluster = Cluster::start().await;
    for (max_wait, max_wait_ms) in [("2.5", 2_500), ("60", 10_000), ("1e-9", 1)] {
        assert_eq!(ask(&mut cluster, max_wait).await, StatusCode::SERVICE_UNAVAILABLE);
        assert_eq!(limit(&mut cluster).await, max_wait_ms, "{max_wait}");
    }
    for malformed in ["", "soon", "0", "-1", "NaN", "inf"] {
        assert_eq!(ask(&mut cluster, malformed).await, StatusCode::BAD_REQUEST, "{malformed}");
    }
    let mut unlimited = Cluster::with(|settings| settings.max_wait = None).await;
    assert_eq!(ask(&mut unlimited, "60").await, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(limit(&mut unlimited).await, 60_000);
}

#[tokio::test]
async fn attempt_keeps_its_place_while_its_worker_reports_progress() {
    // An attempt at a worker that reports nothing ends two seconds after this time.
    let mut cluster = Cluster::with(|settings| settings.attempt_timeout = Duration::from_millis(1)).await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    for _ in 0..4 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        call.send(generate_reply::Message::Waiting(Waiting {})).await;
    }
    assert!(!call.is_closed() && cluster.no_call());
    call.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

/// Makes the router estimate that the next prompt waits in the queue for this time.
fn place_with_wait(cluster: &Cluster, wait: Duration) {
    let route_reply::Message::Placement(placement) = cluster.remote(0, 16) else { panic!("it is a placement") };
    let wait_ms = wait.as_millis().try_into().expect("the wait is short");
    cluster.place(route_reply::Message::Placement(Placement { prefill: None, wait_ms, ..placement }));
}

/// Returns the message that a prompt waits in the worker's queue.
fn waiting() -> generate_reply::Message {
    generate_reply::Message::Waiting(Waiting {})
}

#[tokio::test]
async fn stream_that_waits_in_a_queue_has_comments_with_the_estimated_wait() {
    for (path, body) in [
        (CHAT, chat(json!({ "stream": true }))),
        (COMPLETIONS, completion("abc".into(), json!({ "stream": true }))),
        (
            "/v1/messages",
            json!({ "model": "m", "max_tokens": 9, "stream": true, "messages": [{ "role": "user", "content": "a" }] }),
        ),
    ] {
        let mut cluster = Cluster::start().await;
        place_with_wait(&cluster, Duration::from_millis(60_500));
        let reply = cluster.spawn_post(path, body);
        let call = cluster.call().await;
        call.send(waiting()).await;
        let mut reply = soon(reply).await.expect("the client task runs");
        assert_eq!(reply.status(), StatusCode::OK, "the response begins with the first comment");
        let comment = reply.more().await;
        let seconds = comment.strip_prefix(": queued, about ").and_then(|rest| rest.strip_suffix(" s\n\n"));
        let seconds: u64 = seconds.and_then(|seconds| seconds.parse().ok()).unwrap_or_else(|| panic!("{path}: {comment:?}"));
        assert!((50..=61).contains(&seconds), "{path}: {comment:?}");
        call.send(waiting()).await;
        assert!(reply.more().await.starts_with(": queued, about "), "{path}: each report leads to a comment");
        call.answer(Some(0), "x").await;
        let (_, text) = reply.text().await;
        let frames: Vec<&str> = text.split_terminator("\n\n").collect();
        assert!(
            !frames.is_empty() && frames.iter().all(|frame| frame.contains("data: {") || *frame == "data: [DONE]"),
            "{path}: {text}"
        );
    }
}

#[tokio::test]
async fn stream_that_waits_without_an_estimate_has_comments_without_one() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.send(waiting()).await;
    let mut reply = soon(reply).await.expect("the client task runs");
    assert_eq!(reply.more().await, ": queued\n\n");
    // The attempt fails after the status was sent, so the error is an event.
    call.send(generate_reply::Message::Failure(failure(FailureReason::InvalidRequest, "no"))).await;
    let (_, text) = reply.text().await;
    assert!(text.starts_with("data: {\"error\":"), "{text}");
}

#[tokio::test]
async fn answer_that_is_not_streamed_has_no_comments() {
    let mut cluster = Cluster::start().await;
    place_with_wait(&cluster, Duration::from_secs(60));
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    call.send(waiting()).await;
    call.answer(Some(0), "x").await;
    let (status, body) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!((status, &body["object"]), (StatusCode::OK, &json!("chat.completion")));
}
