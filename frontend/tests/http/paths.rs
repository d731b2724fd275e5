//! The small endpoints, trailing slashes, methods, and paths of other servers.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

#[tokio::test]
async fn version_ping_and_load_have_vllms_fields() {
    let mut cluster = Cluster::start().await;
    let (_, version) = cluster.get("/version").await;
    assert_eq!(version, json!({ "version": env!("CARGO_PKG_VERSION") }));
    for method in [Method::GET, Method::POST, Method::HEAD] {
        assert_eq!(cluster.send(method, "/ping", &[], "").await.status(), StatusCode::OK);
    }
    assert_eq!(cluster.get("/load").await.1, json!({ "server_load": 0 }));
    let running = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    assert_eq!(cluster.get("/load").await.1, json!({ "server_load": 1 }));
    call.answer(Some(0), "a").await;
    soon(running).await.expect("the client task runs").text().await;
    assert_eq!(cluster.get("/load").await.1, json!({ "server_load": 0 }));
}

#[tokio::test]
async fn root_redirects_to_the_chat() {
    for dashboard_requests in [0, 512] {
        let cluster = Cluster::with(|settings| settings.dashboard_requests = dashboard_requests).await;
        let root = cluster.send(Method::GET, "/", &[], "").await;
        assert_eq!((root.status(), root.header("location")), (StatusCode::TEMPORARY_REDIRECT, Some("chat")));
    }
}

#[tokio::test]
async fn trailing_slash_is_ignored_on_every_path() {
    let mut cluster = Cluster::start().await;
    for path in ["/v1/models", "/v1/models/m", "/health", "/live", "/ready", "/ping", "/version", "/openapi.json"] {
        let slashed = cluster.get(&format!("{path}/")).await;
        assert_eq!(slashed.0, StatusCode::OK, "{path}/");
    }
    let reply = cluster.spawn_post("/v1/chat/completions/", chat(json!({})));
    cluster.call().await.answer(Some(0), "a").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    // The page's files are named relative to its path, so the path with a slash is redirected.
    for (path, target) in [("/dashboard/", "../dashboard"), ("/chat/", "../chat")] {
        assert_eq!(cluster.send(Method::GET, path, &[], "").await.header("location"), Some(target));
    }
}

#[tokio::test]
async fn unknown_paths_are_refused_after_their_body_with_advice() {
    let cluster = Cluster::start().await;
    for path in ["/v1/images/generations", "/api/chat", "/chat/completions", "/v1/v1/chat/completions"] {
        for method in [Method::GET, Method::POST, Method::DELETE] {
            let (status, error) = cluster.send(method, path, &[], vec![b' '; 100_000]).await.json().await;
            let message = error["error"]["message"].as_str().expect("the error has a message");
            assert_eq!((status, &error["error"]["code"]), (StatusCode::NOT_FOUND, &json!("unknown_path")), "{path}");
            assert!(message.contains("/openapi.json") && message.contains("followed by /v1"), "{message}");
        }
    }
}

#[tokio::test]
async fn other_methods_get_405() {
    let cluster = Cluster::start().await;
    for (method, path) in [
        (Method::GET, "/tokenize"),
        (Method::GET, "/v1/detokenize"),
        (Method::POST, "/version"),
        (Method::POST, "/load"),
        (Method::DELETE, "/ping"),
        (Method::POST, "/v1/models"),
    ] {
        let (status, error) = cluster.send(method.clone(), path, &[], "").await.json().await;
        assert_eq!((status, &error["error"]["code"]), (StatusCode::METHOD_NOT_ALLOWED, &json!("method_not_allowed")), "{path}");
    }
    for path in ["/version", "/load", "/v1/models"] {
        let head = cluster.send(Method::HEAD, path, &[], "").await;
        assert_eq!((head.status(), head.text().await.1.as_str()), (StatusCode::OK, ""), "{path}");
    }
}

#[tokio::test]
async fn tokenize_returns_the_tokens_of_a_text_or_conversation() {
    let mut cluster = Cluster::start().await;
    let text = json!({ "prompt": "hé<|im_end|>", "return_token_strs": true });
    for path in ["/tokenize", "/v1/tokenize"] {
        let (status, answer) = cluster.post(path, &text).await.json().await;
        let expected = json!({
            "count": 4, "max_model_len": 512, "tokens": [104, 0xC3, 0xA9, 257],
            "token_strs": ["h", "bytes:\\xc3", "bytes:\\xa9", "<|im_end|>"],
        });
        assert_eq!((status, answer), (StatusCode::OK, expected));
    }
    let (_, conversation) = cluster.post("/tokenize", &chat(json!({}))).await.json().await;
    assert_eq!(conversation["token_strs"], Value::Null);
    // A request for an answer has the same prompt tokens.
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    assert_eq!(conversation["tokens"], json!(call.request.prompt));
    assert_eq!(conversation["count"], call.request.prompt.len());
    call.answer(Some(0), "a").await;
    soon(reply).await.expect("the client task runs");
    let (_, long) = cluster.post("/tokenize", &json!({ "prompt": "x".repeat(600) })).await.json().await;
    assert_eq!(long["count"], 600, "a text may be longer than the context");
    assert!(cluster.metric(r#"tandem_frontend_requests_total{endpoint="tokenize",model="m",code="200"} 4"#).await);
}

#[tokio::test]
async fn detokenize_returns_the_text_of_tokens() {
    let cluster = Cluster::start().await;
    for path in ["/detokenize", "/v1/detokenize"] {
        let (status, answer) = cluster.post(path, &json!({ "model": "m", "tokens": [104, 0xC3, 0xA9, 257] })).await.json().await;
        assert_eq!((status, answer), (StatusCode::OK, json!({ "prompt": "hé<|im_end|>" })));
    }
}

#[tokio::test]
async fn malformed_tokenize_requests_are_refused() {
    let cluster = Cluster::start().await;
    for (path, body, param) in [
        ("/tokenize", json!({}), json!("prompt")),
        ("/tokenize", json!({ "prompt": "a", "messages": [] }), json!("prompt")),
        ("/tokenize", json!({ "prompt": [1] }), json!("prompt")),
        ("/tokenize", json!({ "messages": [] }), json!("messages")),
        ("/tokenize", json!({ "messages": [{ "role": "x" }] }), json!("messages[0].role")),
        ("/tokenize", json!({ "prompt": "a", "model": "x" }), json!("model")),
        ("/tokenize", json!({ "prompt": "x".repeat((1 << 20) + 1) }), json!("prompt")),
        ("/detokenize", json!({}), json!("tokens")),
        ("/detokenize", json!({ "tokens": [258] }), json!("tokens")),
        ("/detokenize", json!({ "tokens": [-1] }), json!("tokens[0]")),
        ("/detokenize", json!({ "tokens": "a" }), json!("tokens")),
    ] {
        let (status, error) = cluster.post(path, &body).await.json().await;
        assert!(status.is_client_error(), "{path} {error}");
        assert_eq!(error["error"]["param"], param, "{path} {error}");
    }
    let huge = cluster.send(Method::POST, "/tokenize", &[], vec![b' '; 33 << 20]).await;
    assert_eq!(huge.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let text = cluster.send(Method::POST, "/tokenize", &[("content-type", "text/plain")], "{}").await;
    assert_eq!(text.status(), StatusCode::UNSUPPORTED_MEDIA_TYPE);
}
