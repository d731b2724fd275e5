//! Generations that are resumed on another worker after the first token. The client does not notice the resume.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;
use tandem_proto::v1::{
    AttemptFailed, FailureReason, Placement, PrefillFinished, ResumedSample, Tokens, finished::FinishReason, generate_reply,
    route_reply, route_request::Message as RouteMessage,
};
use tonic::Status;

fn generated(sample: u32, text: &[u8]) -> ResumedSample {
    ResumedSample { sample, tokens: text.iter().map(|byte| (*byte).into()).collect() }
}

fn text(events: &[Value], pointer: &str, choice: u64) -> String {
    let choices = events.iter().flat_map(|event| event["choices"].as_array().expect("choices is a list"));
    choices.filter(|of| of["index"] == choice).filter_map(|of| of.pointer(pointer)?.as_str()).collect()
}

fn lost(instance_id: &str, reason: FailureReason, generated_tokens: u32) -> Received {
    Received::Message(RouteMessage::Failed(AttemptFailed {
        instance_id: instance_id.to_owned(),
        reason: reason.into(),
        generated_tokens,
    }))
}

#[tokio::test]
async fn resumed_generation_has_the_same_text_and_usage_counts_once() {
    let mut cluster = Cluster::start().await;
    cluster.place(cluster.remote(0, 16));
    let mut resumed = cluster.remote(9, 16);
    if let route_reply::Message::Placement(Placement { decode: Some(decode), .. }) = &mut resumed
        && let Some(worker) = &mut decode.worker
    {
        worker.worker_id = "d1".to_owned();
    }
    cluster.place(resumed);
    let options = json!({ "stream": true, "stream_options": { "include_usage": true }, "max_tokens": 9 });
    let reply = cluster.spawn_post(CHAT, chat(options));
    let first = cluster.call().await;
    assert!(first.request.generated.is_empty());
    first.begin(Some(16)).await;
    // The worker sends a complete character and the first half of the next character.
    first.send(tokens(0, "aé".as_bytes()[..2].as_ref())).await;
    let before = first.request.clone();
    first.fail(Status::unavailable("killed")).await;
    let second = cluster.call().await;
    assert_eq!((second.request.attempt, second.request.samples), (2, 1));
    assert_eq!(second.request.generated, [generated(0, &"aé".as_bytes()[..2])]);
    assert_eq!((&second.request.prompt, &second.request.sampling), (&before.prompt, &before.sampling));
    // The cached tokens that the second attempt reports do not count.
    second.begin(Some(32)).await;
    second.send(tokens(0, &"aé".as_bytes()[2..])).await;
    second.send(generate_reply::Message::Failure(failure(FailureReason::EngineFailed, "d0-instance"))).await;
    let third = cluster.call().await;
    assert_eq!((third.request.attempt, &third.request.generated), (3, &vec![generated(0, "aé".as_bytes())]));
    third.begin(None).await;
    third.send(tokens(0, b"!")).await;
    third.send(finished(0, FinishReason::Stop, Some(7))).await;
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done);
    assert_eq!(text(&events, "/delta/content", 0), "aé!");
    assert_eq!(events.iter().filter(|event| event["choices"][0]["delta"]["role"].is_string()).count(), 1);
    let last = events.last().expect("the answer has events");
    assert_eq!(last["usage"]["completion_tokens"], 5, "each token counts once, the stop token too");
    assert_eq!(last["usage"]["prompt_tokens_details"]["cached_tokens"], 16, "the count of the attempt that sent the first token");
    assert_eq!(last["tandem"]["migrations"], 2);
    let resumed_on = [("d1", 2), ("d0", 3)].map(|(worker, tokens)| json!({ "worker": worker, "after_tokens": tokens }));
    assert_eq!(last["tandem"]["resumed_on"], json!(resumed_on));
    assert_eq!(last["tandem"]["decode_worker"], "d0", "the worker that generated the first token");
    assert!(matches!(cluster.received().await, Received::Message(RouteMessage::Prompt(_))));
    let released = |cached_tokens| Received::Message(RouteMessage::PrefillFinished(PrefillFinished { cached_tokens }));
    assert_eq!(cluster.received().await, released(Some(16)));
    assert_eq!(cluster.received().await, lost("d0-instance", FailureReason::Unspecified, 2));
    assert_eq!(cluster.received().await, released(None), "a resumed prompt is not compared with the prediction");
    assert_eq!(cluster.received().await, lost("d0-instance", FailureReason::EngineFailed, 3));
    assert_eq!(cluster.received().await, released(None));
    assert_eq!(cluster.received().await, Received::Closed);
    cluster.counted("tandem_frontend_migrations_total 2").await;
    cluster.counted("tandem_frontend_request_cached_tokens_count 1").await;
    cluster.counted("tandem_frontend_request_cached_tokens_sum 16").await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

#[tokio::test]
async fn finished_samples_are_not_resumed_and_logprob_offsets_continue() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "n": 3, "logprobs": 1, "stop": ["STOP"], "max_tokens": 20 });
    let reply = cluster.spawn_post(COMPLETIONS, completion("p".into(), options));
    let first = cluster.call().await;
    first.begin(Some(0)).await;
    let likely_tokens = |sample, bytes| generate_reply::Message::Tokens(Tokens { sample, tokens: likely(bytes) });
    first.send(likely_tokens(0, b"xyz")).await;
    first.send(finished(0, FinishReason::Length, None)).await;
    first.send(likely_tokens(1, b"abSTO")).await;
    // The frontend ends this sample at its stop string. The worker has generated a further token.
    first.send(likely_tokens(2, b"cSTOPd")).await;
    first.fail(Status::unavailable("killed")).await;
    let second = cluster.call().await;
    assert_eq!((second.request.samples, &second.request.generated), (3, &vec![generated(1, b"abSTO")]));
    second.begin(Some(0)).await;
    second.send(likely_tokens(1, b"Nq")).await;
    second.send(finished(1, FinishReason::Length, None)).await;
    let (status, body) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(status, StatusCode::OK);
    let choice = |index: usize, key: &str| body["choices"][index][key].clone();
    assert_eq!([0, 1, 2].map(|index| choice(index, "text")), ["xyz", "abSTONq", "c"]);
    assert_eq!([0, 1, 2].map(|index| choice(index, "finish_reason")), ["length", "length", "stop"]);
    assert_eq!(body["choices"][1]["logprobs"]["text_offset"], json!([0, 1, 2, 3, 4, 5, 6]));
    assert_eq!(body["usage"]["completion_tokens"], 3 + 7 + 5);
}

#[tokio::test]
async fn prompt_logprobs_are_not_sent_again_after_a_resume() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "echo": true, "logprobs": 1, "max_tokens": 2, "stream": true });
    let reply = cluster.spawn_post(COMPLETIONS, completion("p".into(), options));
    let first = cluster.call().await;
    first.begin(Some(0)).await;
    let mut own = likely(b"p");
    (own[0].logprob, own[0].top) = (None, Vec::new());
    first.send(prompt_logprobs(own)).await;
    first.fail(Status::unavailable("killed before a token")).await;
    let second = cluster.call().await;
    assert_eq!((second.request.prompt_logprobs, &second.request.generated), (None, &vec![generated(0, b"")]));
    second.begin(Some(0)).await;
    second.send(generate_reply::Message::Tokens(Tokens { sample: 0, tokens: likely(b"ab") })).await;
    second.send(finished(0, FinishReason::Length, None)).await;
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done);
    assert_eq!(text(&events, "/text", 0), "pab");
}

#[tokio::test]
async fn stream_ends_with_an_error_event_when_no_resume_is_left() {
    let mut cluster = Cluster::with(|settings| settings.resumes = 2).await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    for _ in 0..3 {
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        call.send(tokens(0, b"a")).await;
        call.fail(Status::unavailable("killed")).await;
    }
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert_eq!((done, &events.last().expect("the answer has events")["error"]["code"]), (false, &json!("worker_lost")));
    cluster.routes_closed(1).await;
    assert!(cluster.no_call());

    // A resume may use as many attempts as the start of the request. If all of them fail, the client receives the error that the worker was
    // lost, not that the attempts failed.
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    call.fail(Status::unavailable("killed")).await;
    for _ in 0..3 {
        cluster.call().await.send(generate_reply::Message::Failure(failure(FailureReason::AtCapacity, ""))).await;
    }
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert_eq!((done, &events.last().expect("the answer has events")["error"]["code"]), (false, &json!("worker_lost")));
    cluster.routes_closed(1).await;
    assert!(cluster.no_call());
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    cluster.place(route_reply::Message::Failure(failure(FailureReason::AtCapacity, "")));
    call.fail(Status::unavailable("killed")).await;
    let (events, _) = soon(reply).await.expect("the client task runs").events().await;
    assert_eq!(events.last().expect("the answer has events")["error"]["code"], "worker_lost", "no worker is left");
    cluster.counted("tandem_frontend_inflight_requests 0").await;
}

/// Ledgers identify attempts by their numbers. So the frontend must not use a number again, even if an attempt fails and then the router is
/// lost.
#[tokio::test]
async fn attempt_numbers_stay_unique_when_the_router_is_lost() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let first = cluster.call().await;
    first.begin(Some(0)).await;
    first.send(tokens(0, b"a")).await;
    first.fail(Status::unavailable("killed")).await;
    let second = cluster.call().await;
    second.send(scheduled(Some(0))).await;
    cluster.close_next_route();
    second.send(generate_reply::Message::Failure(failure(FailureReason::AtCapacity, ""))).await;
    let third = cluster.call().await;
    assert_eq!((second.request.attempt, third.request.attempt), (2, 3));
    third.begin(Some(0)).await;
    third.send(tokens(0, b"b")).await;
    third.send(finished(0, FinishReason::Length, None)).await;
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert_eq!((done, text(&events, "/delta/content", 0).as_str()), (true, "ab"));
}

#[tokio::test]
async fn silent_worker_is_replaced_after_the_attempt_timeout() {
    let mut cluster = Cluster::with(|settings| settings.attempt_timeout = Duration::from_millis(50)).await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let hung = cluster.call().await;
    assert_eq!(
        hung.request.prefill_start_timeout_ms,
        Some(50),
        "the worker's timeout ends first, so its failure names the late process"
    );
    hung.closed().await;
    let second = cluster.call().await;
    // The attempt's timeout does not apply to a prefill that has begun.
    second.send(scheduled(Some(0))).await;
    tokio::time::sleep(Duration::from_millis(200)).await;
    second.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    assert!(matches!(cluster.received().await, Received::Message(RouteMessage::Prompt(_))));
    assert_eq!(cluster.received().await, lost("d0-instance", FailureReason::Timeout, 0));
    // The attempt timeout does not apply to the last attempt. Only the first token's timeout does.
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    for _ in 0..2 {
        cluster.call().await.send(generate_reply::Message::Failure(failure(FailureReason::Timeout, ""))).await;
    }
    let last = cluster.call().await;
    assert_eq!(last.request.prefill_start_timeout_ms, None);
    last.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}
