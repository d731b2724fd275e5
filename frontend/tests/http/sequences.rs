//! The limits on running sequences, for all clients together and for one client.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

fn ask_for(cluster: &Cluster, account: &'static str, n: u32) -> JoinHandle<Reply> {
    let (frontend, body) = (cluster.frontend, chat(json!({ "n": n })).to_string());
    tokio::spawn(async move { send(frontend, Method::POST, CHAT, &[("x-account", account)], body.into()).await })
}

async fn status_and_code(reply: JoinHandle<Reply>) -> (u16, Value) {
    let (status, body) = soon(reply).await.expect("the client task runs").json().await;
    (status.as_u16(), body["error"]["code"].clone())
}

#[tokio::test]
async fn each_sample_of_each_prompt_counts_as_a_sequence() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 8).await;
    let reply = cluster.spawn_post(COMPLETIONS, completion(json!(["a", "b"]), json!({ "n": 3 })));
    let calls = [cluster.call().await, cluster.call().await];
    cluster.counted("tandem_frontend_inflight_sequences 6").await;
    cluster.counted("tandem_frontend_inflight_requests 1").await;
    let too_much = refused(cluster.spawn_post(CHAT, chat(json!({ "n": 3 })))).await;
    assert_eq!(too_much, (StatusCode::SERVICE_UNAVAILABLE, Some("1".to_owned()), json!("overloaded")));
    let fits = cluster.spawn_post(CHAT, chat(json!({ "n": 2 })));
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(fits).await.expect("the client task runs").status(), StatusCode::OK);
    for call in calls {
        call.answer(Some(0), "x").await;
    }
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    cluster.counted("tandem_frontend_inflight_sequences 0").await;
}

#[tokio::test]
async fn request_with_more_sequences_than_the_limit_is_a_client_error() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 8).await;
    let (status, answer) = cluster.post(CHAT, &chat(json!({ "n": 9 }))).await.json().await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("too_many_sequences")));
    assert!(answer["error"]["message"].as_str().is_some_and(|text| text.contains("9 sequences") && text.contains("at most 8")));
    assert!(cluster.no_call());
}

#[tokio::test]
async fn one_account_cannot_use_all_sequences() {
    let mut cluster = Cluster::with(|settings| {
        settings.concurrent_sequences = 8;
        settings.sequences_per_client = Some(4);
        settings.account_header = Some("x-account".parse().expect("the header name is valid"));
    })
    .await;
    let first = ask_for(&cluster, "a", 4);
    let call = cluster.call().await;
    let reply = soon(ask_for(&cluster, "a", 1)).await.expect("the client task runs");
    assert_eq!((reply.status().as_u16(), reply.header("retry-after")), (429, Some("1")));
    let error = reply.json().await.1["error"].take();
    assert_eq!((&error["code"], &error["type"]), (&json!("rate_limit_exceeded"), &json!("rate_limit_error")));
    assert_eq!(status_and_code(ask_for(&cluster, "a", 5)).await, (400, json!("too_many_sequences")));
    let other = ask_for(&cluster, "b", 4);
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(other).await.expect("the client task runs").status(), StatusCode::OK);
    call.answer(Some(0), "x").await;
    assert_eq!(soon(first).await.expect("the client task runs").status(), StatusCode::OK);
    let again = ask_for(&cluster, "a", 4);
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(
        soon(again).await.expect("the client task runs").status(),
        StatusCode::OK,
        "ended requests release their sequences"
    );
}

#[tokio::test]
async fn requests_without_an_account_are_limited_by_client_address() {
    let mut cluster = Cluster::with(|settings| settings.sequences_per_client = Some(1)).await;
    let first = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    assert_eq!(status_and_code(cluster.spawn_post(CHAT, chat(json!({})))).await, (429, json!("rate_limit_exceeded")));
    first.abort();
    call.closed().await;
    cluster.counted("tandem_frontend_inflight_sequences 0").await;
    let second = cluster.spawn_post(CHAT, chat(json!({})));
    cluster.call().await.answer(Some(0), "x").await;
    let reply = soon(second).await.expect("the client task runs");
    assert_eq!(reply.status(), StatusCode::OK, "a disconnected client releases its sequences");
}
