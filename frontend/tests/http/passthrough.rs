//! Requests that are passed through to other servers: bytes, headers, placement, failures and limits.

use crate::{
    keys::{KeyFile, bearer, lines},
    support::*,
    upstream::*,
};
use http_body_util::BodyExt;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::{num::NonZeroU32, sync::atomic::Ordering, time::Duration};
use tandem_frontend::{FrontendError, FrontendSettings, Passthrough, PassthroughError};
use tandem_process::{Metrics, Secret, Shutdown};
use tandem_text::ServedModel;
use tokio::{io::AsyncWriteExt, net::TcpListener};

const FORM: &str = "multipart/form-data; boundary=xYz";

/// Returns a form for the model `e` with this audio.
fn form(audio: &[u8]) -> Vec<u8> {
    let file = b"--xYz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n";
    let model = b"\r\n--xYz\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\ne\r\n--xYz--\r\n";
    [&file[..], audio, model].concat()
}

async fn bytes(mut reply: Reply) -> Vec<u8> {
    soon(reply.response.body_mut().collect()).await.expect("the body is complete").to_bytes().to_vec()
}

async fn code(reply: Reply) -> (u16, Value, String) {
    let (status, body) = reply.json().await;
    let message = body["error"]["message"].as_str().unwrap_or_default().to_owned();
    (status.as_u16(), body["error"]["code"].clone(), message)
}

#[tokio::test]
async fn bodies_and_answers_pass_unchanged() {
    let mut upstream = Upstream::start().await;
    let cluster = cluster(&[&upstream]).await;
    let json =
        " {\"input\" : [\"a\",\"\u{e9}\"],\r\n \"mode\\u006c\":\"e\", \"x\":1.0 , \"input\":[[1, 2]]}\n".as_bytes().to_vec();
    let audio: Vec<u8> = (0..200_000).map(|at| (at % 256) as u8).collect();
    for (path, kind, body) in [
        ("/v1/embeddings?a=b%20c", "application/json; charset=utf-8", json.clone()),
        ("/v2/embed", JSON, json.clone()),
        ("/v1/rerank", JSON, json.clone()),
        ("/v2/rerank", JSON, json.clone()),
        ("/rerank", JSON, json.clone()),
        ("/v1/score", JSON, json.clone()),
        ("/score", JSON, json.clone()),
        ("/v1/classify", JSON, json.clone()),
        ("/classify", JSON, json.clone()),
        ("/pooling", JSON, json),
        ("/v1/audio/transcriptions", FORM, form(&audio)),
        ("/v1/audio/translations", FORM, form(b"")),
    ] {
        let reply = spawn(&cluster, path, kind, body.clone());
        let call = upstream.request().await;
        assert!(call.head.starts_with(&format!("POST {path} HTTP/1.1\r\n")), "{}", call.head);
        assert_eq!((call.header("content-type"), call.body == body), (Some(kind), true), "{path}");
        let answer = [0xFF, 0, b'\r', b'\n', b'x'].repeat(1000);
        call.answer(418, "content-type: application/x-odd\r\nmetadata: {\"a\": 1}\r\n", &answer).await;
        let reply = arrived(reply).await;
        assert_eq!(reply.status().as_u16(), 418, "{path}");
        let headers = ["content-type", "metadata", "content-length"].map(|name| reply.header(name).map(str::to_owned));
        assert_eq!(headers, ["application/x-odd", "{\"a\": 1}", "5000"].map(|value| Some(value.to_owned())), "{path}");
        assert!(reply.header("x-tandem-ignored-parameters").is_none(), "{path}");
        assert!(bytes(reply).await == answer, "{path}");
    }
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="rerank",model="e",code="418"} 3"#).await;
    cluster.counted(&upstream.metric("duration_seconds_count", 12)).await;
    cluster.counted(&upstream.metric("inflight_requests", 0)).await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    assert!(cluster.metric(&upstream.metric("failures_total", 0)).await);
}

#[tokio::test]
async fn only_headers_of_the_body_and_the_servers_key_reach_the_server() {
    let mut upstream = Upstream::start().await;
    let cluster = cluster(&[&upstream]).await;
    let frontend = cluster.frontend;
    let reply = tokio::spawn(async move {
        let headers = [
            ("accept", "application/octet-stream"),
            ("authorization", "Bearer key-of-the-client"),
            ("x-api-key", "key-of-the-client"),
            ("cookie", "session=key-of-the-client"),
            ("connection", "x-hop"),
            ("x-hop", "1"),
            ("x-request-id", "of-the-client"),
            ("x-tandem-details", "true"),
            ("x-data-parallel-rank", "3"),
            ("accept-encoding", "gzip"),
            ("user-agent", "client/1"),
        ];
        send(frontend, Method::POST, "/pooling", &headers, r#"{"model":"e"}"#.into()).await
    });
    let call = upstream.request().await;
    let mut names: Vec<&str> = call.head.lines().skip(1).filter_map(|line| Some(line.split_once(':')?.0)).collect();
    names.sort_unstable();
    assert_eq!(names, ["accept", "authorization", "content-length", "content-type", "host", "x-request-id"]);
    assert!(!call.head.contains("client"), "{}", call.head);
    assert_eq!(call.header("authorization"), Some("Bearer key-of-the-servers"));
    let id = call.header("x-request-id").map(str::to_owned);
    let headers = "connection: x-private\r\nx-private: 1\r\nkeep-alive: timeout=5\r\nset-cookie: a=b\r\nx-request-id: other\r\n\
                   access-control-allow-origin: *\r\nx-tandem-y: 1\r\nx-ratelimit-limit-tokens: 1\r\nupgrade: h2c\r\n";
    call.answer(200, headers, "{}").await;
    let reply = arrived(reply).await;
    assert_eq!(reply.header("x-request-id").map(str::to_owned), id);
    for name in [
        "x-private",
        "keep-alive",
        "set-cookie",
        "access-control-allow-origin",
        "x-tandem-y",
        "x-ratelimit-limit-tokens",
        "upgrade",
    ] {
        assert_eq!(reply.header(name), None, "{name}");
    }
    assert_eq!(reply.text().await.1, "{}");
}

#[tokio::test]
async fn stream_passes_as_it_arrives_and_is_not_sent_again_when_its_server_dies() {
    let (mut one, mut other) = (Upstream::start().await, Upstream::start().await);
    let cluster = cluster(&[&one, &other]).await;
    for server_dies in [false, true] {
        let reply = spawn(&cluster, "/v1/audio/transcriptions", FORM, form(b"x"));
        // The two servers get the requests in rotation.
        let mut call = if server_dies { other.request().await } else { one.request().await };
        call.write("HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n").await;
        let mut reply = arrived(reply).await;
        assert_eq!(reply.header("content-type"), Some("text/event-stream"));
        for event in ["data: a\n\n", "data: b\n\n"] {
            call.write(format!("9\r\n{event}\r\n")).await;
            assert_eq!(reply.more().await, event);
        }
        if server_dies {
            drop(call);
            assert!(soon(reply.response.body_mut().frame()).await.expect("the stream does not just end").is_err());
        } else {
            call.write("0\r\n\r\n").await;
            assert!(soon(reply.response.body_mut().frame()).await.is_none());
        }
    }
    assert!(one.no_request() && other.no_request());
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="transcriptions",model="e",code="200"} 1"#).await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="transcriptions",model="e",code="502"} 1"#).await;
    assert!(cluster.metric(&other.metric("failures_total", 1)).await);
    // A body that is shorter than its length is not complete either.
    let reply = embed(&cluster);
    let mut call = one.request().await;
    call.write("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nshort").await;
    let mut reply = arrived(reply).await;
    assert_eq!(reply.more().await, "short");
    drop(call);
    assert!(soon(reply.response.body_mut().frame()).await.expect("95 bytes are missing").is_err());
}

#[tokio::test]
async fn request_is_sent_to_another_server_until_one_begins_an_answer() {
    let mut servers = [Upstream::start().await, Upstream::start().await, Upstream::start().await];
    let cluster = cluster(&servers.each_ref()).await;
    let reply = embed(&cluster);
    drop(servers[0].request().await);
    servers[1].request().await.answer(503, "", "busy").await;
    servers[2].request().await.answer(200, "", "from the third").await;
    assert_eq!(arrived(reply).await.text().await.1, "from the third");
    // Servers that have failed are unhealthy until their next check.
    for server in &servers {
        cluster.counted(&server.metric("healthy", 1)).await;
    }
    let reply = embed(&cluster);
    servers[0].request().await.answer(401, "www-authenticate: Bearer\r\n", "").await;
    servers[1].request().await.answer(500, "", "an answer").await;
    let reply = arrived(reply).await;
    assert_eq!((reply.status(), reply.text().await.1.as_str()), (StatusCode::INTERNAL_SERVER_ERROR, "an answer"));
    cluster.counted(&servers[0].metric("healthy", 1)).await;
    let reply = embed(&cluster);
    for at in [2, 0, 1] {
        servers[at].request().await.answer(503, "", "").await;
    }
    let reply = arrived(reply).await;
    assert_eq!(reply.header("retry-after"), Some("1"));
    let (status, code, message) = code(reply).await;
    assert_eq!((status, code), (503, json!("no_server")));
    assert!(message.contains("'e'"), "{message}");
    assert!(servers.iter_mut().all(Upstream::no_request));
}

/// A request that kills its servers must not kill all of them.
#[tokio::test]
async fn request_is_not_sent_again_after_two_servers_were_lost_during_it() {
    let mut servers = [Upstream::start().await, Upstream::start().await, Upstream::start().await];
    let cluster = cluster(&servers.each_ref()).await;
    let reply = embed(&cluster);
    drop(servers[0].request().await);
    drop(servers[1].request().await);
    assert_eq!(code(arrived(reply).await).await.1, "no_server");
    assert!(servers[2].no_request());
}

#[tokio::test]
async fn server_with_the_fewest_requests_in_flight_gets_the_next_and_equal_ones_rotate() {
    let mut servers = [Upstream::start().await, Upstream::start().await];
    let cluster = cluster(&servers.each_ref()).await;
    let mut replies = vec![embed(&cluster)];
    let held = servers[0].request().await;
    for _ in 0..3 {
        let reply = embed(&cluster);
        servers[1].request().await.answer(200, "", "").await;
        arrived(reply).await;
        cluster.counted(&servers[1].metric("inflight_requests", 0)).await;
    }
    assert!(cluster.metric(&servers[0].metric("inflight_requests", 1)).await);
    held.answer(200, "", "").await;
    arrived(replies.remove(0)).await;
    cluster.counted(&servers[0].metric("inflight_requests", 0)).await;
    for at in [0, 1, 0, 1] {
        let reply = embed(&cluster);
        servers[at].request().await.answer(200, "", "").await;
        arrived(reply).await;
        cluster.counted(&servers[at].metric("inflight_requests", 0)).await;
    }
}

#[tokio::test]
async fn unhealthy_server_gets_requests_only_if_no_other_is_left() {
    let mut servers = [Upstream::start().await, Upstream::start().await];
    servers[0].health.store(500, Ordering::Relaxed);
    // A server without /health is healthy.
    servers[1].health.store(404, Ordering::Relaxed);
    let cluster = cluster(&servers.each_ref()).await;
    cluster.counted(&servers[0].metric("healthy", 0)).await;
    for _ in 0..3 {
        let reply = embed(&cluster);
        servers[1].request().await.answer(200, "", "").await;
        arrived(reply).await;
    }
    let reply = embed(&cluster);
    drop(servers[1].request().await);
    servers[0].request().await.answer(200, "", "").await;
    assert_eq!(arrived(reply).await.status(), StatusCode::OK);
    servers[0].health.store(200, Ordering::Relaxed);
    cluster.counted(&servers[0].metric("healthy", 1)).await;
}

#[tokio::test]
async fn connection_is_used_again_only_after_a_complete_answer() {
    let mut upstream = Upstream::start().await;
    let cluster = cluster(&[&upstream]).await;
    let reply = embed(&cluster);
    let mut call = upstream.request().await;
    call.write("HTTP/1.1 200 OK\r\ncontent-length: 1\r\n\r\na").await;
    assert_eq!(arrived(reply).await.text().await.1, "a");
    let next = loop {
        let reply = embed(&cluster);
        tokio::select! {
            again = read(&mut call.stream) => {
                assert!(again.expect("the connection is open").0.starts_with("POST /v1/embeddings "));
                break reply;
            }
            // The frontend may have another connection, that of a health check, or the answered one is not free yet.
            other = upstream.request() => other.answer(200, "", "").await,
        }
        arrived(reply).await;
    };
    // The client leaves in the middle of this answer, so its connection cannot serve another request.
    call.write("HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\na").await;
    drop(arrived(next).await);
    call.closed().await;
    let reply = embed(&cluster);
    upstream.request().await.answer(200, "", "b").await;
    assert_eq!(arrived(reply).await.text().await.1, "b");
}

#[tokio::test]
async fn client_that_leaves_ends_its_request_on_the_server() {
    let mut upstream = Upstream::start().await;
    let cluster = cluster(&[&upstream]).await;
    let reply = embed(&cluster);
    let call = upstream.request().await;
    reply.abort();
    call.closed().await;
    let reply = embed(&cluster);
    let mut call = upstream.request().await;
    call.write("HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n").await;
    let mut reply = arrived(reply).await;
    assert_eq!(reply.more().await, "a");
    drop(reply);
    call.closed().await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="embeddings",model="e",code="499"} 2"#).await;
    cluster.counted(&upstream.metric("inflight_requests", 0)).await;
    cluster.counted("tandem_frontend_inflight_sequences 0").await;
}

#[tokio::test]
async fn hostile_answer_is_an_error_or_passes_without_being_collected() {
    let mut upstream = Upstream::start().await;
    let cluster = cluster(&[&upstream]).await;
    let huge = format!("HTTP/1.1 200 OK\r\nx-long: {}", "x".repeat(1 << 20));
    let many = format!("HTTP/1.1 200 OK\r\n{}", "a: b\r\n".repeat(10_000));
    let two_lengths = "HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab".to_owned();
    for head in [huge, many, two_lengths, "SSH-2.0-server\r\n\r\n".to_owned(), "HTTP/1.1 20 OK\r\n\r\n".to_owned()] {
        let reply = embed(&cluster);
        let mut call = upstream.request().await;
        // The frontend may close the connection before it has read all of it.
        call.stream.write_all(head.as_bytes()).await.ok();
        assert_eq!(code(arrived(reply).await).await.1, "no_server", "{}", &head[..20.min(head.len())]);
    }
    let reply = embed(&cluster);
    let mut call = upstream.request().await;
    call.write("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nconnection: close\r\n\r\n").await;
    let mut reply = arrived(reply).await;
    const PAUSE: Duration = Duration::from_millis(500);
    let mut written = 0;
    // The client reads nothing, so soon nothing more can be written.
    while tokio::time::timeout(PAUSE, call.stream.write_all(&[b' '; 64 << 10])).await.is_ok() {
        written += 64 << 10;
        assert!(written < 64 << 20, "the answer is collected");
    }
    assert!(reply.more().await.starts_with(' '));
    drop(reply);
    call.closed().await;
}

#[tokio::test]
async fn request_with_a_wrong_model_or_body_is_refused_and_not_sent() {
    let mut upstream = Upstream::start().await;
    let mut cluster = cluster(&[&upstream]).await;
    for (path, kind, body, status, expected, advice) in [
        ("/v1/embeddings", JSON, r#"{"model":"m"}"#, 400, "model_not_passed_through", "--passthrough"),
        ("/v1/embeddings", JSON, r#"{"model":"x"}"#, 404, "model_not_found", "/v1/models"),
        ("/v1/embeddings", JSON, "{}", 400, "missing_required_parameter", "'model'"),
        ("/v1/embeddings", JSON, r#"{"model":"e","model":"m"}"#, 400, "invalid_type", "'model'"),
        ("/v1/embeddings", JSON, r#"{"model":1}"#, 400, "invalid_type", "'model'"),
        ("/v1/embeddings", JSON, r#"["e"]"#, 400, "invalid_type", "object"),
        ("/v1/embeddings", JSON, r#"{"model":"e""#, 400, "invalid_json", "JSON"),
        ("/v1/embeddings", "text/plain", r#"{"model":"e"}"#, 415, "unsupported_media_type", "application/json"),
        ("/v1/embeddings", FORM, "--xYz--", 415, "unsupported_media_type", "application/json"),
        ("/v1/audio/translations", JSON, r#"{"model":"e"}"#, 415, "unsupported_media_type", "multipart/form-data"),
        ("/v1/audio/translations", FORM, "--xYz--", 400, "missing_required_parameter", "'model'"),
        ("/v1/audio/translations", FORM, "--other--", 400, "invalid_value", "separated by its boundary"),
        (CHAT, JSON, r#"{"model":"e","messages":[]}"#, 400, "model_passed_through", "embeddings"),
        ("/tokenize", JSON, r#"{"model":"e","prompt":"a"}"#, 400, "model_passed_through", "embeddings"),
    ] {
        let (found, code, message) = code(arrived(spawn(&cluster, path, kind, body)).await).await;
        assert_eq!((found, &code), (status, &json!(expected)), "{path} {body}: {message}");
        assert!(message.contains(advice), "{message}");
    }
    let explain = [("x-tandem-explain", "true")];
    let explained = cluster.send(Method::POST, "/pooling", &explain, r#"{"model":"e"}"#).await;
    assert_eq!(code(explained).await.0, 400);
    assert_eq!(cluster.get("/v1/embeddings").await.0, StatusCode::METHOD_NOT_ALLOWED);
    assert!(upstream.no_request() && cluster.no_call());
    let models = cluster.get("/v1/models").await.1["data"].clone();
    assert_eq!((&models[0]["id"], &models[0]["owned_by"]), (&json!("m"), &json!("tandem")));
    let passed = cluster.get("/v1/models/e").await.1;
    assert_eq!((&passed["owned_by"], passed.get("max_model_len"), &models[1]), (&json!("passthrough"), None, &passed));
    let paths = cluster.get("/openapi.json").await.1["paths"].clone();
    assert!(paths["/pooling"]["post"]["requestBody"]["content"]["application/json"].is_object());
    assert!(paths["/v1/audio/translations"]["post"]["requestBody"]["content"]["multipart/form-data"].is_object());
}

#[tokio::test]
async fn body_is_bounded_and_audio_may_be_larger_than_other_bodies() {
    let mut upstream = Upstream::start().await;
    let cluster = cluster(&[&upstream]).await;
    let large = vec![b'x'; 25 << 20];
    let reply = spawn(&cluster, "/v1/audio/transcriptions", FORM, form(&large));
    let call = upstream.request().await;
    assert!(call.body == form(&large));
    call.answer(200, "", "").await;
    assert_eq!(arrived(reply).await.status(), StatusCode::OK);
    let too_large = spawn(&cluster, "/v1/audio/transcriptions", FORM, form(&vec![b'x'; 26 << 20]));
    assert_eq!(code(arrived(too_large).await).await.1, "body_too_large");
    let long = format!(r#"{{"model":"e","input":"{}"}}"#, "x".repeat(5 << 20));
    assert_eq!(code(arrived(spawn(&cluster, "/v1/embeddings", JSON, long)).await).await.1, "body_too_large");
    assert!(upstream.no_request());
}

#[tokio::test]
async fn keys_limits_and_the_audit_log_apply() {
    let mut upstream = Upstream::start().await;
    let one = NonZeroU32::new(1);
    let (mut keys, secret) = KeyFile::with("alice", |key| {
        key.max_sequences = one;
        key.tokens_per_minute = NonZeroU32::new(100);
        key.models = vec!["e".to_owned()];
    });
    let other = keys.add("bob", |key| key.models = vec!["m".to_owned()]);
    let cluster = keys.cluster_with(passing(&[&upstream], &Metrics::default())).await;
    let spawn = |secret: &str| {
        let (frontend, authorization) = (cluster.frontend, bearer(secret));
        tokio::spawn(async move {
            let headers = [("authorization", authorization.as_str())];
            send(frontend, Method::POST, "/v1/rerank", &headers, r#"{"model":"e","query":"hidden"}"#.into()).await
        })
    };
    assert_eq!(code(arrived(embed(&cluster)).await).await.1, "missing_api_key");
    assert_eq!(code(arrived(spawn(&other)).await).await.1, "model_not_allowed");
    let reply = spawn(&secret);
    let call = upstream.request().await;
    assert_eq!(
        code(arrived(spawn(&secret)).await).await,
        (
            429,
            json!("rate_limit_exceeded"),
            "This client's limit of 1 running sequences (prompts × n) is reached; try again when some of them have ended."
                .to_owned()
        )
    );
    let usage =
        r#"{"results":["hidden"],"usage":{"prompt_tokens":150,"total_tokens":150,"prompt_tokens_details":{"cached_tokens":7}}}"#;
    call.answer(200, "content-type: application/json\r\n", usage).await;
    let answered = arrived(reply).await;
    assert_eq!(answered.header("x-ratelimit-limit-tokens"), Some("100"));
    assert_eq!(answered.text().await.1, usage);
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    // The answer took more tokens than the key had left.
    assert_eq!(code(arrived(spawn(&secret)).await).await.1, "rate_limit_exceeded");
    assert!(upstream.no_request());
    let authorization = bearer(&secret);
    let listed = cluster.send(Method::GET, "/v1/models", &[("authorization", &authorization)], "").await.json().await.1;
    assert_eq!(listed["data"].as_array().map(Vec::len), Some(1), "{listed}");
    let found = lines(&keys.log(), 5).await;
    let line = found.iter().find(|line| line["status"] == 200 && line["path"] == "/v1/rerank").expect("the call is recorded");
    assert_eq!((&line["key"], &line["model"], &line["prompt_tokens"]), (&json!("alice"), &json!("e"), &json!(150)));
    assert_eq!((&line["cached_tokens"], &line["completion_tokens"]), (&Value::Null, &Value::Null));
    assert!(!json!(found).to_string().contains("hidden"));
}

#[tokio::test]
async fn pages_of_allowed_origins_may_use_the_paths_below_v1() {
    let mut upstream = Upstream::start().await;
    let pass = passing(&[&upstream], &Metrics::default());
    let cluster = Cluster::with(|settings| {
        pass(settings);
        settings.cors_origins = vec!["https://chat.example".to_owned()];
    })
    .await;
    let frontend = cluster.frontend;
    let from = |origin: &'static str| {
        let body = r#"{"model":"e"}"#.into();
        tokio::spawn(async move { send(frontend, Method::POST, "/v1/embeddings", &[("origin", origin)], body).await })
    };
    let reply = from("https://chat.example");
    upstream.request().await.answer(200, "access-control-allow-origin: *\r\n", "{}").await;
    assert_eq!(arrived(reply).await.header("access-control-allow-origin"), Some("https://chat.example"));
    assert_eq!(arrived(from("https://evil.example")).await.status(), StatusCode::FORBIDDEN);
    assert!(upstream.no_request());
}

#[tokio::test]
async fn settings_that_cannot_be_used_are_refused() {
    let new = |urls: &[&str], key: Option<&str>, ca: Option<&[u8]>| {
        let servers = urls.iter().map(|url| ("e".to_owned(), (*url).to_owned()));
        Passthrough::new(servers, key.map(|key| Secret::from(key.to_owned())), ca, &Metrics::default())
    };
    assert!(matches!(new(&["tcp://a"], None, None), Err(PassthroughError::Url(_))));
    assert!(matches!(new(&["http://a"], Some("a\nb"), None), Err(PassthroughError::Key)));
    let broken = b"-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n";
    assert!(matches!(new(&["http://a"], None, Some(broken)), Err(PassthroughError::Certificate(_))));
    let mut settings = FrontendSettings::new("127.0.0.1:1", ServedModel::sim("e"));
    settings.passthrough = new(&["http://a"], None, None).expect("the URL is valid");
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let refused = tandem_frontend::run(listener, settings, Metrics::default(), Shutdown::default()).await;
    assert!(matches!(refused, Err(FrontendError::Models)), "{refused:?}");
}
