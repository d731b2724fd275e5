//! Priorities of requests without API keys: the field of each path, and the header.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1::{Priority, route_request::Message as RouteMessage};

const HEADER: &str = "x-request-priority";

/// Sends the request and answers it. Returns the priority that the worker has received.
async fn served(cluster: &mut Cluster, path: &'static str, header: Option<&'static str>, body: Value) -> Priority {
    let (frontend, headers) = (cluster.frontend, Vec::from_iter(header.map(|value| (HEADER, value))));
    let reply = tokio::spawn(async move { send(frontend, Method::POST, path, &headers, body.to_string().into()).await });
    let call = cluster.call().await;
    let priority = call.request.priority.expect("a frontend always sends the priority");
    call.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    priority
}

/// Returns the paths that have the field, each with a request without it.
fn requests() -> [(&'static str, Value); 5] {
    let messages = json!([{ "role": "user", "content": "Hi" }]);
    [
        (CHAT, chat(json!({}))),
        (COMPLETIONS, json!({ "model": "m", "prompt": "Hi" })),
        ("/v1/responses", json!({ "model": "m", "input": "Hi" })),
        ("/v1/messages", json!({ "model": "m", "max_tokens": 5, "messages": messages })),
        ("/inference/v1/generate", json!({ "token_ids": [5, 6], "sampling_params": {} })),
    ]
}

#[tokio::test]
async fn priority_of_the_body_or_else_of_the_header_reaches_router_and_worker() {
    let mut cluster = Cluster::start().await;
    for (path, body) in requests() {
        for (in_body, header, within) in [
            (json!({}), None, 0),
            (json!({ "priority": null }), None, 0),
            (json!({ "priority": -7 }), None, -7),
            (json!({ "priority": 2_147_483_647 }), None, i32::MAX),
            (json!({}), Some("-2147483648"), i32::MIN),
            (json!({ "priority": 4.0 }), Some("9"), 4),
        ] {
            let found = served(&mut cluster, path, header, merged(body.clone(), in_body)).await;
            // A client can rank its request worse than those of other accounts, but not better.
            assert_eq!(found, Priority { across: within.max(0), within }, "{path}");
            loop {
                if let Received::Message(RouteMessage::Prompt(prompt)) = cluster.received().await {
                    assert_eq!(prompt.priority, Some(found), "{path}");
                    break;
                }
            }
        }
    }
}

#[tokio::test]
async fn malformed_priority_is_refused_by_name() {
    let mut cluster = Cluster::start().await;
    for (path, body) in requests() {
        for value in [json!(2_147_483_648_i64), json!(-2_147_483_649_i64), json!(0.5), json!("high"), json!(true)] {
            let (status, answer) = cluster.post(path, &merged(body.clone(), json!({ "priority": value }))).await.json().await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {value}");
            assert!(answer.to_string().contains("priority"), "{path} {value}: {answer}");
        }
        for value in ["", "high", "1.5", "2147483648", "1, 2"] {
            let reply = cluster.send(Method::POST, path, &[(HEADER, value)], body.to_string()).await;
            let (status, answer) = reply.json().await;
            assert_eq!(status, StatusCode::BAD_REQUEST, "{path} {value:?}");
            assert!(answer.to_string().contains("must occur once, and be a whole number"), "{path} {value:?}: {answer}");
        }
        let twice = [(HEADER, "1"), (HEADER, "1")];
        let reply = cluster.send(Method::POST, path, &twice, body.to_string()).await;
        assert_eq!(reply.status(), StatusCode::BAD_REQUEST, "{path}: the header occurs twice");
    }
    assert!(cluster.no_call());
}
