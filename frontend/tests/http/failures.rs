//! Failures of workers, routers and clients, and timeouts.

use crate::support::*;
use hyper::StatusCode;
use serde_json::json;
use std::time::Duration;
use tandem_proto::v1::{
    AttemptFailed, FailureReason, finished::FinishReason, generate_reply, route_reply, route_request::Message as RouteMessage,
};
use tonic::Status;

/// Starts a streamed chat, and waits for its first token. Returns the frontend's call to the decode worker, and the client's reply.
async fn streaming(cluster: &mut Cluster) -> (Call, Reply) {
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    (call, soon(reply).await.expect("the client task runs"))
}

fn received_failure(instance_id: &str, reason: FailureReason) -> Received {
    let instance_id = instance_id.to_owned();
    Received::Message(RouteMessage::Failed(AttemptFailed { instance_id, reason: reason.into(), generated_tokens: 0 }))
}

#[tokio::test]
async fn attempts_that_fail_before_the_first_token_are_rerouted() {
    let mut cluster = Cluster::start().await;
    cluster.place(cluster.unreachable());
    cluster.place(cluster.remote(0, 16));
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    // In the second attempt, the decode worker reports that the prefill worker was lost.
    let call = cluster.call().await;
    assert_eq!((call.request.attempt, call.request.prefill.is_some()), (2, true));
    call.send(scheduled(Some(0))).await;
    call.send(generate_reply::Message::Failure(failure(FailureReason::PrefillLost, "p0-instance"))).await;
    let second = call.request.clone();
    call.closed().await;
    let call = cluster.call().await;
    assert_eq!((call.request.attempt, call.request.prefill.is_some()), (3, false));
    assert_eq!((&call.request.request_id, &call.request.prompt), (&second.request_id, &second.prompt));
    // If the client sends no seed, a random seed is chosen once for all attempts.
    assert_eq!(call.request.sampling, second.sampling);
    call.answer(Some(0), "ok").await;
    let (_, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done);
    assert!(matches!(cluster.received().await, Received::Message(RouteMessage::Prompt(_))));
    assert_eq!(cluster.received().await, received_failure("lost-instance", FailureReason::Unspecified));
    assert_eq!(cluster.received().await, received_failure("p0-instance", FailureReason::PrefillLost));
    assert!(matches!(cluster.received().await, Received::Message(RouteMessage::PrefillFinished(_))));
    assert_eq!(cluster.received().await, Received::Closed);
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn request_fails_with_retry_after_when_all_attempts_have_failed() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": stream })));
        let failures = [Status::resource_exhausted("x"), Status::failed_precondition("x"), Status::unavailable("x")];
        for status in failures {
            cluster.call().await.fail(status).await;
        }
        let (status, retry_after, code) = refused(reply).await;
        assert_eq!(
            (status, retry_after.as_deref(), code),
            (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("attempts_exhausted"))
        );
        cluster.routes_closed(1).await;
    }
    assert!(cluster.no_call());
    cluster.counted(r#"tandem_frontend_attempts_failed_total{reason="at_capacity"} 2"#).await;
    cluster.counted(r#"tandem_frontend_attempts_failed_total{reason="wrong_instance"} 2"#).await;
}

#[tokio::test]
async fn request_that_ends_two_workers_is_refused_and_must_not_be_retried() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": stream })));
        for reason in [FailureReason::WorkerEnded, FailureReason::Timeout, FailureReason::EngineFailed] {
            cluster.call().await.send(generate_reply::Message::Failure(failure(reason, "d0-instance"))).await;
        }
        let reply = soon(reply).await.expect("the client task runs");
        assert_eq!((reply.status(), reply.header("x-should-retry")), (StatusCode::INTERNAL_SERVER_ERROR, Some("false")));
        assert_eq!(reply.header("retry-after"), None);
        assert_eq!(reply.json().await.1["error"]["code"], "request_ends_workers");
        cluster.routes_closed(1).await;
    }
    assert!(cluster.no_call());
    cluster.counted("tandem_frontend_requests_ended_workers_total 2").await;
}

#[tokio::test]
async fn stream_that_ends_without_a_failure_is_a_failed_attempt() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    drop(cluster.call().await);
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

#[tokio::test]
async fn unknown_messages_are_skipped() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    call.send_unknown().await;
    call.begin(Some(0)).await;
    call.send_unknown().await;
    call.send(tokens(0, b"a")).await;
    call.send_unknown().await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (status, body) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (StatusCode::OK, &json!("a")));
    assert!(cluster.no_call(), "the request has one attempt");
}

#[tokio::test]
async fn invalid_request_is_refused_without_a_retry() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let invalid = failure(FailureReason::InvalidRequest, "");
    cluster.call().await.send(generate_reply::Message::Failure(invalid.clone())).await;
    let (status, retry_after, code) = refused(reply).await;
    assert_eq!((status, retry_after, code), (StatusCode::BAD_REQUEST, None, json!("request_refused")));

    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    cluster.call().await.fail(Status::invalid_argument("too long")).await;
    assert_eq!(refused(reply).await.0, StatusCode::BAD_REQUEST);

    cluster.place(route_reply::Message::Failure(invalid));
    let reply = soon(cluster.spawn_post(CHAT, chat(json!({})))).await.expect("the client task runs");
    let (status, body) = reply.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(body["error"]["message"].as_str().is_some_and(|message| message.ends_with("because of the test.")), "{body}");
    assert!(cluster.no_call());
}

#[tokio::test]
async fn request_that_becomes_invalid_after_its_first_token_is_refused_without_a_resume() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": stream })));
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        call.send(tokens(0, b"a")).await;
        call.send(generate_reply::Message::Failure(failure(FailureReason::InvalidRequest, "d0-instance"))).await;
        let reply = soon(reply).await.expect("the client task runs");
        let (status, error) = if stream {
            let status = reply.status();
            let (events, done) = reply.events().await;
            assert!(!done);
            (status, events.last().expect("the stream has events")["error"].clone())
        } else {
            let (status, body) = reply.json().await;
            (status, body["error"].clone())
        };
        assert_eq!(status, if stream { StatusCode::OK } else { StatusCode::BAD_REQUEST });
        assert_eq!((&error["code"], &error["type"]), (&json!("request_refused"), &json!("invalid_request_error")));
        assert!(error["message"].as_str().is_some_and(|message| message.contains("because of the test")), "{error}");
        cluster.routes_closed(1).await;
    }
    assert!(cluster.no_call(), "the answer is not resumed");
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn request_without_worker_or_router_gets_503() {
    let mut cluster = Cluster::start().await;
    cluster.place(route_reply::Message::Failure(failure(FailureReason::AtCapacity, "")));
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let (status, retry_after, code) = refused(reply).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("no_worker")));
    cluster.routes_closed(1).await;
    cluster.place(route_reply::Message::Failure(failure(FailureReason::NoWorker, "")));
    let (_, answer) = cluster.post(CHAT, &chat(json!({}))).await.json().await;
    assert_eq!(
        answer["error"]["message"],
        json!("No worker can take the request: because of the test; try again later, or ask the operator of this server.")
    );
    let alone = Cluster::with(|settings| settings.routers = ["127.0.0.1:1".to_owned()].into_iter().collect()).await;
    let (status, retry_after, code) = refused(alone.spawn_post(CHAT, chat(json!({})))).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("router_unreachable")));
    let unknown = Cluster::with(|settings| settings.routers = [].into_iter().collect()).await;
    assert_eq!(refused(unknown.spawn_post(CHAT, chat(json!({})))).await.2, json!("no_router"));
}

#[tokio::test]
async fn request_without_first_token_in_time_gets_504_and_releases_all_resources() {
    let mut cluster = Cluster::with(|settings| settings.first_token_timeout = Duration::from_millis(100)).await;
    for stream in [false, true] {
        let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": stream })));
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        let (status, retry_after, code) = refused(reply).await;
        assert_eq!((status, retry_after.is_some(), code), (StatusCode::GATEWAY_TIMEOUT, true, json!("first_token_timeout")));
        call.closed().await;
        cluster.routes_closed(1).await;
    }
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    // The request does not count as cancelled, and its prompt does not count as finished.
    cluster.counted("tandem_frontend_cancelled_total 0").await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
}

#[tokio::test]
async fn stream_gets_comments_until_its_first_token() {
    let mut cluster = Cluster::with(|settings| settings.keep_alive = Duration::from_millis(50)).await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    // The worker has not sent any token yet.
    let mut reply = soon(reply).await.expect("the client task runs");
    assert_eq!((reply.status(), reply.header("content-type")), (StatusCode::OK, Some("text/event-stream; charset=utf-8")));
    for _ in 0..3 {
        assert_eq!(reply.more().await, ": keep-alive\n\n");
    }
    call.answer(Some(0), "ok").await;
    let (_, text) = reply.text().await;
    let (events, done) = events(&text.replace(": keep-alive\n\n", ""));
    assert!(done);
    assert_eq!(events[1]["choices"][0]["delta"]["content"], "ok", "{events:?}");
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="200"} 1"#).await;
}

#[tokio::test]
async fn error_after_the_first_comment_is_sent_as_an_event_and_counted_by_status() {
    let mut cluster = Cluster::with(|settings| {
        settings.keep_alive = Duration::from_millis(20);
        settings.first_token_timeout = Duration::from_millis(400);
    })
    .await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    let reply = soon(reply).await.expect("the client task runs");
    assert_eq!(reply.status(), StatusCode::OK);
    let (_, text) = reply.text().await;
    assert!(text.starts_with(": keep-alive\n\n"), "{text}");
    let (events, done) = events(&text.replace(": keep-alive\n\n", ""));
    assert_eq!((events.len(), &events[0]["error"]["code"], done), (1, &json!("first_token_timeout"), false));
    call.closed().await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="504"} 1"#).await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn disconnect_between_comments_releases_all_resources() {
    let mut cluster = Cluster::with(|settings| settings.keep_alive = Duration::from_millis(20)).await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    let mut reply = soon(reply).await.expect("the client task runs");
    reply.more().await;
    drop(reply);
    call.closed().await;
    cluster.routes_closed(1).await;
    cluster.counted("tandem_frontend_cancelled_total 1").await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn error_after_the_first_token_is_sent_as_an_event_if_resumes_are_off() {
    let mut cluster = Cluster::with(|settings| settings.resumes = 0).await;
    for ending in [Some(Status::unavailable("x")), None] {
        let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
        let reply = cluster.spawn_post(CHAT, chat(options));
        let call = cluster.call().await;
        call.begin(Some(16)).await;
        call.send(tokens(0, b"ab")).await;
        match ending {
            Some(status) => call.fail(status).await,
            None => call.send(generate_reply::Message::Failure(failure(FailureReason::EngineFailed, "d0-instance"))).await,
        }
        let (mut events, done) = soon(reply).await.expect("the client task runs").events().await;
        let last = events.pop().expect("the answer has events");
        assert_eq!(
            (done, &last["error"]["code"], &last["error"]["type"]),
            (false, &json!("worker_lost"), &json!("server_error"))
        );
        assert_eq!(events.len(), 2, "expected the role and the text: {events:?}");
        cluster.routes_closed(1).await;
    }
    assert!(cluster.no_call(), "no request is retried after the first token");
    cluster.counted("tandem_frontend_migrations_total 0").await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="503"} 2"#).await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    call.begin(Some(16)).await;
    call.send(tokens(0, b"ab")).await;
    call.fail(Status::unavailable("x")).await;
    let (status, _, code) = refused(reply).await;
    assert_eq!((status, code), (StatusCode::SERVICE_UNAVAILABLE, json!("worker_lost")));
}

#[tokio::test]
async fn invalid_prompt_of_a_batch_fails_the_whole_request() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(json!(["a", "b"]), json!({})));
    let (first, second) = (cluster.call().await, cluster.call().await);
    first.begin(Some(0)).await;
    second.send(generate_reply::Message::Failure(failure(FailureReason::InvalidRequest, ""))).await;
    assert_eq!(refused(reply).await.0, StatusCode::BAD_REQUEST);
    first.closed().await;
    cluster.routes_closed(2).await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
}

/// The client disconnects after the placement, during the prefill, or after the first tokens, from whole and from streamed answers.
#[tokio::test]
async fn client_disconnect_closes_route_and_generate_streams_and_releases_all_resources() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 1).await;
    let mut cancelled = 0;
    for stream in [false, true] {
        for phase in 0..3 {
            let mut reply = cluster.spawn_post(CHAT, chat(json!({ "stream": stream })));
            let call = cluster.call().await;
            if phase > 0 {
                call.begin(Some(0)).await;
            }
            if phase > 1 {
                call.send(tokens(0, b"ab")).await;
            }
            if phase > 1 && stream {
                // The client reads a part of the answer before it disconnects.
                soon(&mut reply).await.expect("the client task runs").more().await;
            } else {
                reply.abort();
            }
            call.closed().await;
            cluster.routes_closed(1).await;
            cancelled += 1;
            cluster.counted(&format!("tandem_frontend_cancelled_total {cancelled}")).await;
            cluster.counted("tandem_frontend_inflight_requests 0").await;
        }
    }
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="499"} 6"#).await;
    // The only sequence that the limit allows is free again.
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

#[tokio::test]
async fn requests_beyond_the_limit_are_refused_immediately() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 2).await;
    let reply = cluster.spawn_post(COMPLETIONS, completion("a".into(), json!({})));
    let call = cluster.call().await;
    let (status, retry_after, code) = refused(cluster.spawn_post(COMPLETIONS, completion(json!(["a", "b"]), json!({})))).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("overloaded")));
    let second = cluster.spawn_post(COMPLETIONS, completion("b".into(), json!({})));
    let second_call = cluster.call().await;
    assert_eq!(refused(cluster.spawn_post(CHAT, chat(json!({})))).await.0, StatusCode::SERVICE_UNAVAILABLE);
    call.answer(Some(0), "x").await;
    second_call.answer(Some(0), "x").await;
    for reply in [reply, second] {
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn drain_finishes_running_requests_and_frees_the_port() {
    let mut cluster = Cluster::start().await;
    let (call, reply) = streaming(&mut cluster).await;
    let shutdown = cluster.shutdown.clone();
    // This task stands for other work of the process, which keeps the drain from ending.
    let (finish, finished_work) = tokio::sync::oneshot::channel::<()>();
    shutdown.spawn(async move {
        finished_work.await.ok();
    });
    let drain = tokio::spawn(async move { shutdown.run(Duration::from_secs(60)).await });
    let listens_again = async {
        while tokio::net::TcpListener::bind(cluster.frontend).await.is_err() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    soon(listens_again).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (_, done) = reply.events().await;
    assert!(done);
    soon(&mut cluster.server).await.expect("the server does not panic").expect("the server ends without an error");
    finish.send(()).expect("the task keeps the receiver");
    soon(drain).await.expect("the drain task does not panic");
}

#[tokio::test]
async fn request_that_outlives_the_grace_period_ends_with_an_error_event() {
    let mut cluster = Cluster::start().await;
    let (call, reply) = streaming(&mut cluster).await;
    cluster.shutdown.run(Duration::ZERO).await;
    let (events, done) = reply.events().await;
    assert_eq!((done, &events.last().expect("the answer has events")["error"]["code"]), (false, &json!("draining")));
    call.closed().await;
    soon(&mut cluster.server).await.expect("the server does not panic").expect("the server ends without an error");
}

#[tokio::test]
async fn small_events_are_sent_without_nagles_delay() {
    let mut cluster = Cluster::start().await;
    let (call, mut reply) = streaming(&mut cluster).await;
    reply.more().await;
    let started = std::time::Instant::now();
    const EVENTS: u32 = 25;
    for _ in 0..EVENTS {
        call.send(tokens(0, b"a")).await;
        reply.more().await;
    }
    // With Nagle's algorithm and delayed acknowledgements, each event would take 40 ms.
    assert!(started.elapsed() < Duration::from_millis(20) * EVENTS, "{:?}", started.elapsed());
}

#[tokio::test]
async fn client_that_stops_reading_is_disconnected() {
    let mut cluster = Cluster::with(|settings| settings.unread_max = Duration::from_secs(1)).await;
    let (call, unread) = streaming(&mut cluster).await;
    let page = "more than sockets hold ".repeat(1 << 12);
    soon(async {
        while !call.is_closed() {
            call.send(tokens(0, page.as_bytes())).await;
        }
    })
    .await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    drop(unread);
}
