//! What breaks on the way: workers, routers, clients, time.

use crate::support::*;
use hyper::StatusCode;
use serde_json::json;
use std::time::Duration;
use tandem_proto::v1::{
    AttemptFailed, FailureReason, finished::FinishReason, generate_reply, route_reply, route_request::Message as RouteMessage,
};
use tonic::Status;

/// A chat whose first token has come, and its worker's side.
async fn streaming(cluster: &mut Cluster) -> (Call, Reply) {
    let reply = cluster.ask(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.say(tokens(0, b"a")).await;
    (call, soon(reply).await.expect("the client lives"))
}

fn told_failure(instance_id: &str, reason: FailureReason) -> Told {
    let instance_id = instance_id.to_owned();
    Told::Message(RouteMessage::Failed(AttemptFailed { instance_id, reason: reason.into(), generated_tokens: 0 }))
}

#[tokio::test]
async fn attempts_that_fail_before_the_first_token_are_placed_anew() {
    let mut cluster = Cluster::start().await;
    cluster.place(cluster.nowhere());
    cluster.place(cluster.remote(0, 16));
    let reply = cluster.ask(CHAT, chat(json!({ "stream": true })));
    // The second attempt: the decode worker blames the prefill worker.
    let call = cluster.call().await;
    assert_eq!((call.request.attempt, call.request.prefill.is_some()), (2, true));
    call.say(scheduled(Some(0))).await;
    call.say(generate_reply::Message::Failure(failure(FailureReason::PrefillLost, "p0-instance"))).await;
    let second = call.request.clone();
    call.closed().await;
    let call = cluster.call().await;
    assert_eq!((call.request.attempt, call.request.prefill.is_some()), (3, false));
    assert_eq!((&call.request.request_id, &call.request.prompt), (&second.request_id, &second.prompt));
    // Without a seed from the client one is drawn, once for all attempts.
    assert_eq!(call.request.sampling, second.sampling);
    call.answer(Some(0), "ok").await;
    let (_, done) = soon(reply).await.expect("the client lives").events().await;
    assert!(done);
    assert!(matches!(cluster.told().await, Told::Message(RouteMessage::Prompt(_))));
    assert_eq!(cluster.told().await, told_failure("gone-instance", FailureReason::Unspecified));
    assert_eq!(cluster.told().await, told_failure("p0-instance", FailureReason::PrefillLost));
    assert!(matches!(cluster.told().await, Told::Message(RouteMessage::PrefillFinished(_))));
    assert_eq!(cluster.told().await, Told::Closed);
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn attempts_are_bounded_and_then_the_client_is_told_to_come_again() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let reply = cluster.ask(CHAT, chat(json!({ "stream": stream })));
        let failures = [Status::resource_exhausted("x"), Status::failed_precondition("x"), Status::unavailable("x")];
        for status in failures {
            cluster.call().await.break_off(status).await;
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
async fn a_worker_that_closes_without_a_word_is_a_failed_attempt() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.ask(CHAT, chat(json!({})));
    drop(cluster.call().await);
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client lives").status(), StatusCode::OK);
}

#[tokio::test]
async fn messages_of_kinds_that_came_later_are_skipped() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.ask(CHAT, chat(json!({})));
    let call = cluster.call().await;
    call.say_something_new().await;
    call.begin(Some(0)).await;
    call.say_something_new().await;
    call.say(tokens(0, b"a")).await;
    call.say_something_new().await;
    call.say(finished(0, FinishReason::Length, None)).await;
    let (status, body) = soon(reply).await.expect("the client lives").json().await;
    assert_eq!((status, &body["choices"][0]["message"]["content"]), (StatusCode::OK, &json!("a")));
    assert!(cluster.no_call(), "one attempt");
}

#[tokio::test]
async fn what_can_never_run_is_refused_and_not_tried_again() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.ask(CHAT, chat(json!({})));
    let invalid = failure(FailureReason::InvalidRequest, "");
    cluster.call().await.say(generate_reply::Message::Failure(invalid.clone())).await;
    let (status, retry_after, code) = refused(reply).await;
    assert_eq!((status, retry_after, code), (StatusCode::BAD_REQUEST, None, json!("request_refused")));

    let reply = cluster.ask(CHAT, chat(json!({})));
    cluster.call().await.break_off(Status::invalid_argument("too long")).await;
    assert_eq!(refused(reply).await.0, StatusCode::BAD_REQUEST);

    cluster.place(route_reply::Message::Failure(invalid));
    let reply = soon(cluster.ask(CHAT, chat(json!({})))).await.expect("the client lives");
    let (status, body) = reply.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    assert!(
        body["error"]["message"].as_str().is_some_and(|message| message.contains("because of the test. Lower n or max_tokens")),
        "{body}"
    );
    assert!(cluster.no_call());
}

#[tokio::test]
async fn no_worker_and_no_router_are_503() {
    let mut cluster = Cluster::start().await;
    cluster.place(route_reply::Message::Failure(failure(FailureReason::AtCapacity, "")));
    let reply = cluster.ask(CHAT, chat(json!({})));
    let (status, retry_after, code) = refused(reply).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("no_worker")));
    cluster.routes_closed(1).await;
    let alone = Cluster::with(|settings| settings.routers = ["127.0.0.1:1".to_owned()].into_iter().collect()).await;
    let (status, retry_after, code) = refused(alone.ask(CHAT, chat(json!({})))).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("router_unreachable")));
}

#[tokio::test]
async fn a_first_token_that_does_not_come_is_504_and_everything_is_let_go() {
    let mut cluster = Cluster::with(|settings| settings.first_token_timeout = Duration::from_millis(100)).await;
    for stream in [false, true] {
        let reply = cluster.ask(CHAT, chat(json!({ "stream": stream })));
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        let (status, retry_after, code) = refused(reply).await;
        assert_eq!((status, retry_after.is_some(), code), (StatusCode::GATEWAY_TIMEOUT, true, json!("first_token_timeout")));
        call.closed().await;
        cluster.routes_closed(1).await;
    }
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    // Nobody went away, and nothing was finished.
    cluster.counted("tandem_frontend_cancelled_total 0").await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
}

#[tokio::test]
async fn stream_without_a_first_token_gets_comments_until_it_comes() {
    let mut cluster = Cluster::with(|settings| settings.keep_alive = Duration::from_millis(50)).await;
    let reply = cluster.ask(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    // The prompt is computed; nothing is said of it.
    let mut reply = soon(reply).await.expect("the client lives");
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
async fn error_after_the_first_comment_is_one_event_and_is_counted_with_its_own_status() {
    let mut cluster = Cluster::with(|settings| {
        settings.keep_alive = Duration::from_millis(20);
        settings.first_token_timeout = Duration::from_millis(400);
    })
    .await;
    let reply = cluster.ask(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    let reply = soon(reply).await.expect("the client lives");
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
async fn client_that_leaves_between_comments_gives_all_back() {
    let mut cluster = Cluster::with(|settings| settings.keep_alive = Duration::from_millis(20)).await;
    let reply = cluster.ask(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    let mut reply = soon(reply).await.expect("the client lives");
    reply.more().await;
    drop(reply);
    call.closed().await;
    cluster.routes_closed(1).await;
    cluster.counted("tandem_frontend_cancelled_total 1").await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn with_resuming_off_an_error_after_the_first_token_is_an_event_and_no_done() {
    let mut cluster = Cluster::with(|settings| settings.resumes = 0).await;
    for ending in [Some(Status::unavailable("x")), None] {
        let options = json!({ "stream": true, "stream_options": { "include_usage": true } });
        let reply = cluster.ask(CHAT, chat(options));
        let call = cluster.call().await;
        call.begin(Some(16)).await;
        call.say(tokens(0, b"ab")).await;
        match ending {
            Some(status) => call.break_off(status).await,
            None => call.say(generate_reply::Message::Failure(failure(FailureReason::EngineFailed, "d0-instance"))).await,
        }
        let (mut events, done) = soon(reply).await.expect("the client lives").events().await;
        let last = events.pop().expect("there is one");
        assert_eq!(
            (done, &last["error"]["code"], &last["error"]["type"]),
            (false, &json!("worker_lost"), &json!("server_error"))
        );
        assert_eq!(events.len(), 2, "the role and the text: {events:?}");
        cluster.routes_closed(1).await;
    }
    assert!(cluster.no_call(), "nothing is tried again after the first token");
    cluster.counted("tandem_frontend_migrations_total 0").await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="503"} 2"#).await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
    let reply = cluster.ask(CHAT, chat(json!({})));
    let call = cluster.call().await;
    call.begin(Some(16)).await;
    call.say(tokens(0, b"ab")).await;
    call.break_off(Status::unavailable("x")).await;
    let (status, _, code) = refused(reply).await;
    assert_eq!((status, code), (StatusCode::SERVICE_UNAVAILABLE, json!("worker_lost")));
}

#[tokio::test]
async fn one_prompt_of_a_batch_that_fails_ends_all() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.ask(COMPLETIONS, completion(json!(["a", "b"]), json!({})));
    let (first, second) = (cluster.call().await, cluster.call().await);
    first.begin(Some(0)).await;
    second.say(generate_reply::Message::Failure(failure(FailureReason::InvalidRequest, ""))).await;
    assert_eq!(refused(reply).await.0, StatusCode::BAD_REQUEST);
    first.closed().await;
    cluster.routes_closed(2).await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
}

/// In every phase: placed and queued, prefilling, streaming; whole and in chunks.
#[tokio::test]
async fn a_client_that_goes_away_closes_both_streams_and_gives_all_back() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 1).await;
    let mut gone = 0;
    for stream in [false, true] {
        for phase in 0..3 {
            let mut reply = cluster.ask(CHAT, chat(json!({ "stream": stream })));
            let call = cluster.call().await;
            if phase > 0 {
                call.begin(Some(0)).await;
            }
            if phase > 1 {
                call.say(tokens(0, b"ab")).await;
            }
            if phase > 1 && stream {
                // The client has read a part.
                soon(&mut reply).await.expect("the client lives").more().await;
            } else {
                reply.abort();
            }
            call.closed().await;
            cluster.routes_closed(1).await;
            gone += 1;
            cluster.counted(&format!("tandem_frontend_cancelled_total {gone}")).await;
            cluster.counted("tandem_frontend_inflight_requests 0").await;
        }
    }
    cluster.counted("tandem_frontend_request_cached_tokens_count 0").await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="chat_completions",model="m",code="499"} 6"#).await;
    // The one permit is free again.
    let reply = cluster.ask(CHAT, chat(json!({})));
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client lives").status(), StatusCode::OK);
}

#[tokio::test]
async fn more_than_may_run_is_refused_at_once() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 2).await;
    let reply = cluster.ask(COMPLETIONS, completion("a".into(), json!({})));
    let call = cluster.call().await;
    let (status, retry_after, code) = refused(cluster.ask(COMPLETIONS, completion(json!(["a", "b"]), json!({})))).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("overloaded")));
    let second = cluster.ask(COMPLETIONS, completion("b".into(), json!({})));
    let second_call = cluster.call().await;
    assert_eq!(refused(cluster.ask(CHAT, chat(json!({})))).await.0, StatusCode::SERVICE_UNAVAILABLE);
    call.answer(Some(0), "x").await;
    second_call.answer(Some(0), "x").await;
    for reply in [reply, second] {
        assert_eq!(soon(reply).await.expect("the client lives").status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn a_drain_finishes_what_runs_refuses_what_comes_and_ends() {
    let mut cluster = Cluster::start().await;
    let (call, reply) = streaming(&mut cluster).await;
    let shutdown = cluster.shutdown.clone();
    // A task of the process that is still at work keeps the grace period going.
    let (finish, finished_work) = tokio::sync::oneshot::channel::<()>();
    shutdown.spawn(async move {
        finished_work.await.ok();
    });
    let drain = tokio::spawn(async move { shutdown.run(Duration::from_secs(60)).await });
    soon(cluster.shutdown.draining()).await;
    let (status, retry_after, code) = refused(cluster.ask(CHAT, chat(json!({})))).await;
    assert_eq!((status, retry_after.as_deref(), code), (StatusCode::SERVICE_UNAVAILABLE, Some("1"), json!("draining")));
    assert_eq!(cluster.get("/ready").await.1, json!({ "status": "draining" }));
    call.say(finished(0, FinishReason::Length, None)).await;
    let (_, done) = reply.events().await;
    assert!(done);
    soon(&mut cluster.server).await.expect("it does not panic").expect("it ends well");
    finish.send(()).expect("the task waits");
    soon(drain).await.expect("it does not panic");
}

#[tokio::test]
async fn what_outlives_the_grace_period_is_told_so() {
    let mut cluster = Cluster::start().await;
    let (call, reply) = streaming(&mut cluster).await;
    cluster.shutdown.run(Duration::ZERO).await;
    let (events, done) = reply.events().await;
    assert_eq!((done, &events.last().expect("there is one")["error"]["code"]), (false, &json!("draining")));
    call.closed().await;
    soon(&mut cluster.server).await.expect("it does not panic").expect("it ends well");
}

#[tokio::test]
async fn small_events_do_not_wait_for_acknowledgements() {
    let mut cluster = Cluster::start().await;
    let (call, mut reply) = streaming(&mut cluster).await;
    reply.more().await;
    let started = std::time::Instant::now();
    const EVENTS: u32 = 25;
    for _ in 0..EVENTS {
        call.say(tokens(0, b"a")).await;
        reply.more().await;
    }
    // With Nagle's algorithm against delayed acknowledgements it would be 40 ms an event.
    assert!(started.elapsed() < Duration::from_millis(20) * EVENTS, "{:?}", started.elapsed());
}

#[tokio::test]
async fn a_client_that_never_reads_again_is_gone_after_a_while() {
    let mut cluster = Cluster::with(|settings| settings.unread_max = Duration::from_secs(1)).await;
    let (call, unread) = streaming(&mut cluster).await;
    let page = "more than sockets hold ".repeat(1 << 12);
    soon(async {
        while !call.is_closed() {
            call.say(tokens(0, page.as_bytes())).await;
        }
    })
    .await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    drop(unread);
}
