//! Bodies that are too large, too slow, incomplete, or constructed to be costly.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_text::ServedModel;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

const JSON: &str = "host: localhost\r\ncontent-type: application/json";

/// Sends a request's headers, with `claimed` as its Content-Length, and `body` as the beginning of its body.
async fn begin(cluster: &Cluster, body: &[u8], claimed: usize) -> TcpStream {
    let mut stream = TcpStream::connect(cluster.frontend).await.expect("the frontend listens");
    let head = format!("POST {CHAT} HTTP/1.1\r\n{JSON}\r\ncontent-length: {claimed}\r\nconnection: close\r\n\r\n");
    stream.write_all(&[head.as_bytes(), body].concat()).await.expect("the frontend reads");
    stream
}

/// Returns the answer's status and error code.
async fn answered(mut stream: TcpStream) -> (u16, Value) {
    let mut text = String::new();
    soon(stream.read_to_string(&mut text)).await.expect("the frontend answers and closes");
    let status = text.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or_else(|| panic!("no status: {text:?}"));
    let body: Value = text.split_once("\r\n\r\n").map_or(Value::Null, |(_, body)| serde_json::from_str(body).unwrap_or_default());
    (status, body["error"]["code"].clone())
}

fn repeated(open: &str, element: &str, bytes: usize) -> Vec<u8> {
    format!("{{\"model\":\"m\",{open}{}{element}]}}", format!("{element},").repeat(bytes / (element.len() + 1))).into_bytes()
}

/// Without a limit on the number of values, the frontend parsed such bodies completely and used 13 to 40 times their size in memory.
#[tokio::test]
async fn bodies_with_too_many_values_are_refused() {
    let mut cluster = Cluster::start().await;
    for path in [CHAT, COMPLETIONS] {
        for (open, element) in [
            ("\"messages\":[", "{}"),
            ("\"prompt\":[", "[0]"),
            ("\"prompt\":[", "0"),
            ("\"stop\":[", "\"\""),
            ("\"stop_token_ids\":[", "0"),
            ("\"tools\":[", "0"),
            ("\"unknown_field\":[", "0"),
        ] {
            let body = repeated(open, element, 1 << 20);
            let (status, answer) = cluster.send(Method::POST, path, &[], body).await.json().await;
            assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("too_many_values")), "{path} {open}{element}");
            // A body with fewer values is parsed, and then the error names the parameter's own limit.
            let body = repeated(open, element, 1 << 17);
            let (status, answer) = cluster.send(Method::POST, path, &[], body).await.json().await;
            assert_eq!(status.as_u16(), 400, "{path} {open}{element}: {answer}");
        }
        let members: String = (0..100_000).map(|id| format!("\"{id}\":1,")).collect();
        let body = format!("{{\"model\":\"m\",\"logit_bias\":{{{members}\"0\":1}}}}");
        let (_, answer) = cluster.send(Method::POST, path, &[], body).await.json().await;
        assert_eq!(answer["error"]["code"], "too_many_values");
    }
    assert!(cluster.no_call(), "a refused request does not reach a worker");
}

#[tokio::test]
async fn large_body_of_text_is_answered() {
    let mut cluster = Cluster::start().await;
    // This body is so large that it is parsed on a blocking thread.
    let reply = cluster.spawn_post(CHAT, chat(json!({ "unknown_field": "x".repeat(1 << 20) })));
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

#[tokio::test]
async fn prompts_of_one_request_have_a_common_byte_limit() {
    let mut cluster = Cluster::with(|settings| settings.models = vec![ServedModel::sim("m")]).await;
    // In this vocabulary a token stands for up to 12 bytes, so each text alone could fit into the context of 131,072 tokens.
    let texts = completion(json!(vec![" ".repeat(1_000_000); 5]), json!({}));
    let (status, answer) = cluster.post(COMPLETIONS, &texts).await.json().await;
    assert_eq!((status.as_u16(), &answer["error"]["code"]), (400, &json!("too_many")), "{answer}");
    assert!(answer["error"]["message"].as_str().is_some_and(|text| text.contains("4194304 bytes of text")), "{answer}");
    assert!(cluster.no_call());
}

#[tokio::test]
async fn incomplete_body_is_a_client_error() {
    let cluster = Cluster::start().await;
    let mut cut_short = begin(&cluster, b"{\"model\":", 100).await;
    cut_short.shutdown().await.expect("the connection is open");
    assert_eq!(answered(cut_short).await, (400, json!("body_incomplete")));
    for chunks in ["zz\r\n{}\r\n0\r\n\r\n", "2\r\n{}XX0\r\n\r\n"] {
        let mut stream = TcpStream::connect(cluster.frontend).await.expect("the frontend listens");
        let head = format!("POST {CHAT} HTTP/1.1\r\n{JSON}\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n");
        stream.write_all((head + chunks).as_bytes()).await.expect("the frontend reads");
        assert_eq!(answered(stream).await, (400, json!("body_incomplete")), "{chunks:?}");
    }
    cluster.counted("tandem_frontend_reading_requests 0").await;
}

#[tokio::test]
async fn bodies_that_are_not_plain_json_are_refused() {
    let cluster = Cluster::start().await;
    for headers in [
        &[("content-type", "text/plain")][..],
        &[("content-type", "application/x-www-form-urlencoded")],
        &[("content-type", "application/json"), ("content-encoding", "gzip")],
    ] {
        let (status, answer) = cluster.send(Method::POST, CHAT, headers, chat(json!({})).to_string()).await.json().await;
        assert_eq!((status.as_u16(), &answer["error"]["code"]), (415, &json!("unsupported_media_type")), "{headers:?}");
        let message = answer["error"]["message"].as_str().expect("the error message is a string");
        assert!(message.contains("application/json") || message.contains("Content-Encoding"), "{message}");
    }
}

/// If sequences were reserved before the body was read, one client's unfinished requests would block all other clients for a minute.
#[tokio::test]
async fn unfinished_bodies_do_not_block_other_requests() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 1).await;
    let mut unfinished = Vec::new();
    for _ in 0..40 {
        unfinished.push(begin(&cluster, b"{", 1000).await);
    }
    cluster.counted("tandem_frontend_reading_requests 40").await;
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    cluster.call().await.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    assert!(cluster.metric("tandem_frontend_inflight_requests 0").await, "unfinished requests are not in flight");
    drop(unfinished);
    cluster.counted("tandem_frontend_reading_requests 0").await;
}

#[tokio::test]
async fn large_body_is_refused_while_the_body_budget_is_used() {
    let mut cluster = Cluster::with(|settings| settings.bodies_max_bytes = 600_000).await;
    let large = |filler: usize| chat(json!({ "unknown_field": "x".repeat(filler) }));
    // One client may use half of the budget, so two bodies of this size do not fit.
    let unfinished = begin(&cluster, &vec![b' '; 200_000], 250_000).await;
    let refusal = soon(async {
        loop {
            // The request is repeated until it is refused. It succeeds while the frontend has not read the unfinished body's bytes yet.
            let mut reply = cluster.spawn_post(CHAT, large(200_000));
            tokio::select! {
                reply = &mut reply => break reply.expect("the client task runs"),
                call = cluster.call() => call.answer(Some(0), "x").await,
            }
        }
    })
    .await;
    assert_eq!((refusal.status(), refusal.header("retry-after")), (StatusCode::SERVICE_UNAVAILABLE, Some("1")));
    assert_eq!(refusal.json().await.1["error"]["code"], "body_budget");
    let never_fits = cluster.post(CHAT, &large(300_000)).await;
    assert_eq!(never_fits.status(), StatusCode::PAYLOAD_TOO_LARGE, "a retry could not succeed");
    for (filler, disconnected) in [(0, None), (200_000, Some(unfinished))] {
        let waits_for_budget = disconnected.is_some();
        drop(disconnected);
        if waits_for_budget {
            cluster.counted("tandem_frontend_reading_requests 0").await;
        }
        let reply = cluster.spawn_post(CHAT, large(filler));
        cluster.call().await.answer(Some(0), "x").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK, "{filler} bytes");
    }
}
