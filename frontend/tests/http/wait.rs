//! Requests that would wait too long, and attempts that wait in an engine's queue.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::json;
use std::time::Duration;
use tandem_proto::v1::{FailureReason, Waiting, generate_reply, route_reply, route_request::Message as RouteMessage};

/// Returns the limit on the wait that the next request has for the router, in milliseconds.
async fn limit(cluster: &mut Cluster) -> u32 {
    loop {
        if let Received::Message(RouteMessage::Prompt(prompt)) = cluster.received().await {
            return prompt.max_wait_ms;
        }
    }
}

#[tokio::test]
async fn request_that_would_wait_too_long_is_refused_with_the_time_after_which_it_would_not() {
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
async fn client_may_wait_for_less_than_the_limit_but_not_for_longer() {
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
    // A worker that reports nothing is given up after two seconds and this time.
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
