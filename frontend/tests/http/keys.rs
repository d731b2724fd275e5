//! API keys: which requests need one, what a key may do, the limits of a key, changes of the file, and the audit log.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::{
    num::NonZeroU32,
    path::{Path, PathBuf},
    time::Duration,
};
use tandem_frontend::{ApiKey, ApiKeyFile, ApiKeys, CacheIsolation, FrontendSettings, KeyCache};
use tandem_process::line_file::LineFile;
use tandem_proto::v1::Priority;
use tandem_text::ServedModel;
use tempfile::TempDir;

pub struct KeyFile {
    folder: TempDir,
    file: ApiKeyFile,
}

impl KeyFile {
    /// Makes a file with one key, and returns its secret, too.
    pub fn with(name: &str, change: impl FnOnce(&mut ApiKey)) -> (Self, String) {
        let folder = tempfile::tempdir().expect("the system can create a temporary folder");
        let mut keys = Self { folder, file: ApiKeyFile::default() };
        let secret = keys.add(name, change);
        (keys, secret)
    }

    fn path(&self) -> PathBuf {
        self.folder.path().join("keys.toml")
    }

    pub fn log(&self) -> PathBuf {
        self.folder.path().join("audit.jsonl")
    }

    pub fn add(&mut self, name: &str, change: impl FnOnce(&mut ApiKey)) -> String {
        let make = |sha256| {
            let mut key = ApiKey {
                name: name.to_owned(),
                sha256,
                created: None,
                account: None,
                requests_per_minute: None,
                tokens_per_minute: None,
                max_sequences: None,
                priority: None,
                models: Vec::new(),
                cache: KeyCache::Account,
            };
            change(&mut key);
            key
        };
        let secret = self.file.add(make).expect("the name is free");
        self.write(&self.file.to_toml());
        secret.expose().to_owned()
    }

    fn write(&self, text: &str) {
        std::fs::write(self.path(), text).expect("the folder is writable");
    }

    async fn cluster(&self) -> Cluster {
        self.cluster_with(|_| {}).await
    }

    pub async fn cluster_with(&self, change: impl FnOnce(&mut FrontendSettings)) -> Cluster {
        let keys = ApiKeys::open(self.path()).expect("the file is valid");
        let log = LineFile::open(&self.log(), "audit log").expect("the folder is writable");
        Cluster::with(|settings| {
            settings.api_keys = Some(keys);
            settings.audit_log = Some(log);
            settings.cache_isolation = CacheIsolation::Account;
            change(settings);
        })
        .await
    }
}

fn limit(limit: u32) -> Option<NonZeroU32> {
    NonZeroU32::new(limit)
}

pub fn bearer(secret: &str) -> String {
    format!("Bearer {secret}")
}

/// Sends a chat with this key.
async fn ask(cluster: &Cluster, secret: &str, options: Value) -> Reply {
    let authorization = bearer(secret);
    cluster.send(Method::POST, CHAT, &[("authorization", &authorization)], chat(options).to_string()).await
}

/// Sends a chat with this key in the background.
fn spawn_ask(cluster: &Cluster, secret: &str, options: Value) -> tokio::task::JoinHandle<Reply> {
    let (frontend, authorization) = (cluster.frontend, bearer(secret));
    let body = chat(options).to_string();
    tokio::spawn(async move { send(frontend, Method::POST, CHAT, &[("authorization", &authorization)], body.into()).await })
}

/// Sends a chat with this key, and answers it with five tokens.
async fn answered(cluster: &mut Cluster, secret: &str, options: Value) -> Reply {
    let reply = spawn_ask(cluster, secret, options);
    cluster.call().await.answer(Some(16), "hello").await;
    soon(reply).await.expect("the client task runs")
}

async fn code(reply: Reply) -> (u16, Value) {
    let (status, body) = reply.json().await;
    (status.as_u16(), body["error"]["code"].clone())
}

/// Waits until a request with this key has this status.
async fn until(cluster: &Cluster, secret: &str, status: StatusCode) {
    let authorization = bearer(secret);
    for _ in 0..200 {
        let reply = cluster.send(Method::GET, "/v1/models", &[("authorization", &authorization)], "").await;
        if reply.status() == status {
            return;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    panic!("no request has the status {status}");
}

/// Waits until the log has this many lines, and returns them.
pub async fn lines(path: &Path, count: usize) -> Vec<Value> {
    for _ in 0..400 {
        let text = std::fs::read_to_string(path).expect("the log exists");
        if text.lines().count() >= count && text.ends_with('\n') {
            return text.lines().map(|line| serde_json::from_str(line).expect("the line is JSON")).collect();
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the log has fewer than {count} lines");
}

#[tokio::test]
async fn requests_without_a_valid_key_are_refused_in_the_shape_of_their_api() {
    let (keys, secret) = KeyFile::with("alice", |_| {});
    let cluster = keys.cluster().await;
    let wrong = format!("Bearer {secret}x");
    let paths = [CHAT, COMPLETIONS, "/v1/responses", "/inference/v1/generate", "/tokenize", "/v1/detokenize"];
    for path in paths {
        for (headers, expected) in [
            (&[][..], "missing_api_key"),
            (&[("authorization", wrong.as_str())], "invalid_api_key"),
            (&[("x-api-key", "sk-tandem-0")], "invalid_api_key"),
        ] {
            let reply = cluster.send(Method::POST, path, headers, chat(json!({})).to_string()).await;
            assert_eq!(reply.header("www-authenticate"), Some("Bearer"), "{path}");
            let (status, body) = reply.json().await;
            let error = &body["error"];
            assert_eq!((status.as_u16(), &error["code"]), (401, &json!(expected)), "{path} {headers:?}");
            assert_eq!((&error["type"], &error["param"]), (&json!("invalid_request_error"), &Value::Null), "{path}");
            assert!(!body.to_string().contains(&secret), "{body}");
        }
    }
    for path in ["/v1/messages", "/v1/messages/count_tokens"] {
        let reply = cluster.send(Method::POST, path, &[], chat(json!({})).to_string()).await;
        assert!(reply.header("www-authenticate").is_some() && reply.header("request-id").is_some(), "{path}");
        let (status, body) = reply.json().await;
        assert_eq!(
            (status.as_u16(), &body["type"], &body["error"]["type"]),
            (401, &json!("error"), &json!("authentication_error"))
        );
    }
    for path in ["/v1/models", "/v1/models/m", "/version", "/openapi.json"] {
        assert_eq!(cluster.send(Method::GET, path, &[], "").await.status(), StatusCode::UNAUTHORIZED, "{path}");
    }
    for path in ["/live", "/health", "/ping", "/ready"] {
        assert_eq!(cluster.send(Method::GET, path, &[], "").await.status(), StatusCode::OK, "{path}");
    }
    cluster.counted(&format!("tandem_frontend_unauthorized_total{{reason=\"missing\"}} {}", paths.len() + 2 + 4)).await;
    cluster.counted(&format!("tandem_frontend_unauthorized_total{{reason=\"unknown\"}} {}", 2 * paths.len())).await;
    let authorization = bearer(&secret);
    let (_, document) = cluster.send(Method::GET, "/openapi.json", &[("authorization", &authorization)], "").await.json().await;
    assert_eq!(document["components"]["securitySchemes"]["key"]["name"], "x-api-key");
    assert_eq!(
        (&document["paths"]["/live"]["get"]["security"], &document["paths"]["/version"]["get"]["security"]),
        (&json!([]), &Value::Null)
    );
    for (name, value) in [("authorization", authorization), ("x-api-key", secret)] {
        assert_eq!(cluster.send(Method::GET, "/v1/models", &[(name, &value)], "").await.status(), StatusCode::OK, "{name}");
    }
}

#[tokio::test]
async fn with_keys_the_operators_pages_are_shown_to_trusted_peers_only() {
    let untrusted = |settings: &mut FrontendSettings| {
        settings.trusted_proxies = vec!["10.0.0.0/8".parse().expect("the network is valid")];
    };
    for (change, status) in [(untrusted as fn(&mut FrontendSettings), StatusCode::FORBIDDEN), (|_| {}, StatusCode::OK)] {
        let (keys, secret) = KeyFile::with("alice", |_| {});
        let cluster = keys.cluster_with(change).await;
        let authorization = bearer(&secret);
        for path in ["/metrics", "/load", "/dashboard", "/dashboard/requests"] {
            assert_eq!(
                cluster.send(Method::GET, path, &[("authorization", &authorization)], "").await.status(),
                status,
                "{path}"
            );
        }
        // The chat's files have no data of any client, and the chat's requests need a key.
        assert_eq!(cluster.send(Method::GET, "/chat", &[], "").await.status(), StatusCode::OK);
    }
    // Without keys, the metrics are shown as before.
    let cluster = Cluster::with(untrusted).await;
    assert_eq!(cluster.send(Method::GET, "/metrics", &[], "").await.status(), StatusCode::OK);
}

#[tokio::test]
async fn key_decides_account_and_cache_of_its_requests() {
    let (mut keys, alice) = KeyFile::with("alice", |_| {});
    let bob = keys.add("bob", |key| key.account = Some("acme".to_owned()));
    let carol = keys.add("carol", |key| key.account = Some("acme".to_owned()));
    let alone = keys.add("dave", |key| (key.account, key.cache) = (Some("acme".to_owned()), KeyCache::Key));
    let mut cluster = keys.cluster().await;
    let mut seen = Vec::new();
    for secret in [&alice, &bob, &carol, &alone] {
        let reply = spawn_ask(&cluster, secret, json!({}));
        let call = cluster.call().await;
        seen.push((call.request.account.clone(), call.request.cache_namespace.clone()));
        call.answer(Some(0), "x").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    }
    let accounts: Vec<&str> = seen.iter().map(|(account, _)| account.as_str()).collect();
    assert_eq!(accounts, ["alice", "acme", "acme", "acme"]);
    assert_eq!(seen[1].1, seen[2].1, "keys of one account share cached KV");
    let mut namespaces: Vec<_> = [0, 1, 3].map(|index: usize| &seen[index].1).to_vec();
    namespaces.sort();
    namespaces.dedup();
    assert_eq!(namespaces.len(), 3, "accounts and keys with a cache of their own share no KV");
    // A client cannot choose its account: the header is ignored.
    let headers = [("authorization", bearer(&alice)), ("x-account", "acme".to_owned())];
    let frontend = cluster.frontend;
    let reply = tokio::spawn(async move {
        let headers = headers.each_ref().map(|(name, value)| (*name, value.as_str()));
        send(frontend, Method::POST, CHAT, &headers, chat(json!({})).to_string().into()).await
    });
    let call = cluster.call().await;
    assert_eq!(call.request.account, "alice");
    call.answer(Some(0), "x").await;
    soon(reply).await.expect("the client task runs");
}

#[tokio::test]
async fn priority_of_a_key_is_the_default_and_the_best_of_its_requests() {
    let (mut keys, urgent) = KeyFile::with("urgent", |key| key.priority = Some(-5));
    let plain = keys.add("plain", |_| {});
    let later = keys.add("later", |key| key.priority = Some(10));
    let mut cluster = keys.cluster().await;
    for (secret, options, rank) in [
        (&urgent, json!({}), -5),
        (&urgent, json!({ "priority": -5 }), -5),
        (&urgent, json!({ "priority": 3 }), 3),
        (&plain, json!({}), 0),
        (&plain, json!({ "priority": 7 }), 7),
        (&later, json!({}), 10),
        (&later, json!({ "priority": 11 }), 11),
    ] {
        let reply = spawn_ask(&cluster, secret, options);
        let call = cluster.call().await;
        // The operator has set the priority, so it counts among the requests of all accounts.
        assert_eq!(call.request.priority, Some(Priority { across: rank, within: rank }));
        call.answer(Some(0), "x").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    }
    for (secret, asked, best) in [(&urgent, -6, -5), (&plain, -1, 0), (&later, 0, 10)] {
        let (body, header) = (("priority", "0", json!({ "priority": asked })), asked.to_string());
        for (param, header, options) in [body, ("x-request-priority", &*header, json!({}))] {
            let headers = [("authorization", &*bearer(secret)), ("x-request-priority", header)];
            let reply = cluster.send(Method::POST, CHAT, &headers, chat(options).to_string()).await;
            let (status, body) = reply.json().await;
            assert_eq!((status.as_u16(), &body["error"]["param"]), (400, &json!(param)), "{body}");
            let message = body["error"]["message"].to_string();
            assert!(message.contains(&format!("below {best}, the priority of this API key")), "{body}");
        }
    }
    assert!(cluster.no_call(), "a refused request does not reach a worker");
}

#[tokio::test]
async fn key_may_use_only_its_models() {
    let (mut keys, one) = KeyFile::with("one", |key| key.models = vec!["m".to_owned()]);
    let all = keys.add("all", |_| {});
    let mut cluster =
        keys.cluster_with(|settings| settings.models.push(ServedModel::sim("other").with_context_length(512))).await;
    let listed = async |secret: &str| {
        let authorization = bearer(secret);
        let reply = cluster.send(Method::GET, "/v1/models", &[("authorization", &authorization)], "").await;
        let (_, body) = reply.json().await;
        body["data"]
            .as_array()
            .into_iter()
            .flatten()
            .map(|model| model["id"].as_str().unwrap_or_default().to_owned())
            .collect::<Vec<String>>()
    };
    let (of_one, of_all): (Vec<String>, Vec<String>) = (listed(&one).await, listed(&all).await);
    assert_eq!((of_one, of_all), (vec!["m".to_owned()], vec!["m".to_owned(), "other".to_owned()]));
    assert_eq!(code(ask(&cluster, &one, json!({ "model": "other" })).await).await, (403, json!("model_not_allowed")));
    let authorization = bearer(&one);
    let shown = cluster.send(Method::GET, "/v1/models/other", &[("authorization", &authorization)], "").await;
    assert_eq!(code(shown).await, (403, json!("model_not_allowed")));
    let body = json!({ "model": "other", "max_tokens": 3, "messages": [{ "role": "user", "content": "Hi" }] });
    let reply = cluster.send(Method::POST, "/v1/messages", &[("x-api-key", &one)], body.to_string()).await;
    let (status, error) = reply.json().await;
    assert_eq!((status.as_u16(), &error["error"]["type"]), (403, &json!("permission_error")));
    assert!(cluster.no_call(), "a refused request does not reach a worker");
    assert_eq!(answered(&mut cluster, &one, json!({})).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn requests_beyond_a_keys_limit_get_429_with_headers() {
    let (mut keys, secret) = KeyFile::with("alice", |key| key.requests_per_minute = limit(2));
    let free = keys.add("bob", |_| {});
    let mut cluster = keys.cluster().await;
    for left in ["1", "0"] {
        let reply = answered(&mut cluster, &secret, json!({})).await;
        assert_eq!(reply.header("x-ratelimit-limit-requests"), Some("2"));
        assert_eq!(reply.header("x-ratelimit-remaining-requests"), Some(left));
        let reset = reply.header("x-ratelimit-reset-requests").expect("the header is present");
        assert!(reset.ends_with('s') && reset != "0ms", "{reset}");
        assert_eq!(reply.header("x-ratelimit-limit-tokens"), None, "the key has no limit on tokens");
        assert_eq!(reply.status(), StatusCode::OK);
    }
    // Only requests with a body count, so this request is accepted.
    until(&cluster, &secret, StatusCode::OK).await;
    for stream in [false, true] {
        let reply = ask(&cluster, &secret, json!({ "stream": stream })).await;
        let seconds: u32 = reply.header("retry-after").and_then(|text| text.parse().ok()).expect("the header is a number");
        assert!((1..=30).contains(&seconds), "{seconds}");
        assert_eq!(reply.header("x-ratelimit-remaining-requests"), Some("0"));
        let (status, body) = reply.json().await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        assert_eq!((&body["error"]["type"], &body["error"]["code"]), (&json!("rate_limit_error"), &json!("rate_limit_exceeded")));
        let message = body["error"]["message"].as_str().expect("the message is a string");
        assert!(message.contains("2 requests a minute") && message.contains("try again in"), "{message}");
    }
    let body = json!({ "model": "m", "max_tokens": 3, "messages": [{ "role": "user", "content": "Hi" }] });
    let reply = cluster.send(Method::POST, "/v1/messages", &[("x-api-key", &secret)], body.to_string()).await;
    assert!(reply.header("retry-after").is_some() && reply.header("x-ratelimit-limit-requests").is_some());
    let (status, error) = reply.json().await;
    assert_eq!((status.as_u16(), &error["error"]["type"]), (429, &json!("rate_limit_error")));
    assert_eq!(answered(&mut cluster, &free, json!({})).await.status(), StatusCode::OK, "another key has its own limit");
}

#[tokio::test]
async fn requests_beyond_a_keys_token_limit_get_429_and_completion_tokens_count_towards_it() {
    let (keys, secret) = KeyFile::with("alice", |key| key.tokens_per_minute = limit(60));
    let mut cluster = keys.cluster().await;
    let reply = answered(&mut cluster, &secret, json!({})).await;
    let remaining = |reply: &Reply| -> u32 {
        reply.header("x-ratelimit-remaining-tokens").and_then(|text| text.parse().ok()).expect("the header is a number")
    };
    let left = remaining(&reply);
    let usage = reply.json().await.1["usage"].clone();
    let used = usage["total_tokens"].as_u64().expect("the usage has the sum") as u32;
    // An answer that is not streamed is charged before its headers are sent. A token is refilled each second.
    assert!((60 - used..=60 - used + 3).contains(&left), "{left} are left after {usage}");
    let template = usage["prompt_tokens"].as_u64().expect("the usage has the prompt") as usize - "Hi".len();
    let sized = |tokens: usize| json!({ "messages": [{ "role": "user", "content": "x".repeat(tokens - template) }] });
    let reply = ask(&cluster, &secret, sized(60)).await;
    assert!(reply.header("retry-after").is_some());
    let (status, body) = reply.json().await;
    let message = body["error"]["message"].as_str().expect("the message is a string");
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{body}");
    assert!(message.contains("60 tokens a minute"), "{message}");
    // A prompt that is longer than the limit can never be accepted, and clients must not send it again.
    let reply = ask(&cluster, &secret, sized(61)).await;
    assert_eq!((reply.header("retry-after"), reply.header("x-should-retry")), (None, Some("false")));
    assert_eq!(code(reply).await, (429, json!("rate_limit_exceeded")));
    assert!(cluster.no_call(), "a refused request does not reach a worker");
}

#[tokio::test]
async fn sequences_beyond_a_keys_limit_get_429_until_others_end() {
    let (mut keys, secret) = KeyFile::with("alice", |key| key.max_sequences = limit(2));
    let free = keys.add("bob", |_| {});
    let mut cluster = keys.cluster().await;
    let running = spawn_ask(&cluster, &secret, json!({ "n": 2, "max_tokens": 1 }));
    let call = cluster.call().await;
    let refused = ask(&cluster, &secret, json!({})).await;
    assert!(refused.header("retry-after").is_some());
    assert_eq!(code(refused).await, (429, json!("rate_limit_exceeded")));
    assert_eq!(code(ask(&cluster, &secret, json!({ "n": 3 })).await).await, (400, json!("too_many_sequences")));
    assert_eq!(answered(&mut cluster, &free, json!({})).await.status(), StatusCode::OK, "another key has its own limit");
    call.answer(Some(0), "x").await;
    assert_eq!(soon(running).await.expect("the client task runs").status(), StatusCode::OK);
    // A client that disconnects releases its sequences, too.
    let abandoned = spawn_ask(&cluster, &secret, json!({ "n": 2, "stream": true }));
    let call = cluster.call().await;
    abandoned.abort();
    call.closed().await;
    assert_eq!(answered(&mut cluster, &secret, json!({ "n": 2 })).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn changes_of_the_key_file_take_effect_and_a_broken_file_changes_nothing() {
    let (mut keys, alice) = KeyFile::with("alice", |key| key.requests_per_minute = limit(1));
    let mut cluster = keys.cluster().await;
    assert_eq!(answered(&mut cluster, &alice, json!({})).await.status(), StatusCode::OK);
    let bob = keys.add("bob", |_| {});
    until(&cluster, &bob, StatusCode::OK).await;
    assert_eq!(ask(&cluster, &alice, json!({})).await.status(), StatusCode::TOO_MANY_REQUESTS, "a change does not refill limits");

    keys.write("[[key]]\nname = \"x\"\n");
    cluster.counted("tandem_frontend_api_keys_outdated 1").await;
    assert!(cluster.metric("tandem_frontend_api_keys_reload_failures_total 1").await, "{}", cluster.metrics.render());
    until(&cluster, &bob, StatusCode::OK).await;

    // An answer that has begun continues when its key is revoked.
    let reply = spawn_ask(&cluster, &bob, json!({ "stream": true }));
    let call = cluster.call().await;
    keys.file.keys.retain(|key| key.name != "bob");
    keys.write(&keys.file.to_toml());
    until(&cluster, &bob, StatusCode::UNAUTHORIZED).await;
    call.answer(Some(0), "hello").await;
    let (_, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done, "the answer is complete");
    cluster.counted("tandem_frontend_api_keys_outdated 0").await;
    assert!(cluster.metric("tandem_frontend_api_keys 1").await, "{}", cluster.metrics.render());

    std::fs::remove_file(keys.path()).expect("the folder is writable");
    cluster.counted("tandem_frontend_api_keys_outdated 1").await;
    until(&cluster, &alice, StatusCode::OK).await;
    assert!(ApiKeys::open(keys.path()).is_err(), "at the start, a missing file is an error");
}

#[tokio::test]
async fn audit_log_has_a_line_for_each_call_with_the_clients_usage_and_no_text() {
    const SECRET_TEXT: &str = "blue heron";
    let (keys, secret) = KeyFile::with("alice", |key| key.account = Some("acme".to_owned()));
    let mut cluster = keys.cluster().await;
    let messages = json!({ "messages": [{ "role": "user", "content": SECRET_TEXT }] });
    let reply = answered(&mut cluster, &secret, messages.clone()).await;
    let id = reply.header("x-request-id").expect("every response has an id").to_owned();
    let usage = reply.json().await.1["usage"].clone();
    let streamed = answered(&mut cluster, &secret, merged(messages, json!({ "stream": true }))).await;
    assert!(streamed.events().await.1, "the answer is complete");
    let without_key = cluster.send(Method::POST, CHAT, &[("x-request-id", "mine")], chat(json!({})).to_string()).await;
    assert_eq!(without_key.status(), StatusCode::UNAUTHORIZED);
    until(&cluster, &secret, StatusCode::OK).await;
    assert_eq!(ask(&cluster, &secret, json!({ "n": 0 })).await.status(), StatusCode::BAD_REQUEST);
    let abandoned = spawn_ask(&cluster, &secret, json!({ "stream": true }));
    let call = cluster.call().await;
    abandoned.abort();
    call.closed().await;

    let found = lines(&keys.log(), 6).await;
    // The line of calls without a key is written within a second.
    let (refused, found): (Vec<_>, Vec<_>) = found.into_iter().partition(|line| line["status"] == 401);
    let first = &found[0];
    let at = first["at"].as_str().expect("the time is a string");
    assert!(at.len() == 24 && at.ends_with('Z'), "{first}");
    assert!(first["duration_ms"].as_f64().is_some_and(|ms| ms > 0.0), "{first}");
    for (field, expected) in [
        ("request_id", json!(id)),
        ("key", json!("alice")),
        ("account", json!("acme")),
        ("method", json!("POST")),
        ("path", json!(CHAT)),
        ("model", json!("m")),
        ("status", json!(200)),
        ("prompt_tokens", usage["prompt_tokens"].clone()),
        ("cached_tokens", usage["prompt_tokens_details"]["cached_tokens"].clone()),
        ("completion_tokens", usage["completion_tokens"].clone()),
    ] {
        assert_eq!(first[field], expected, "{field} of {first}");
    }
    let of = |index: usize| (&found[index]["key"], &found[index]["status"], &found[index]["completion_tokens"]);
    assert_eq!(of(1), (&json!("alice"), &json!(200), &json!(5)), "a streamed answer");
    for (field, expected) in
        [("key", Value::Null), ("client_request_id", json!("mine")), ("address", json!("127.0.0.1")), ("count", json!(1))]
    {
        assert_eq!(refused[0].get(field), Some(&expected), "{field} of a request without a key");
    }
    assert_eq!((&found[2]["method"], &found[2]["path"]), (&json!("GET"), &json!("/v1/models")));
    assert_eq!(of(3), (&json!("alice"), &json!(400), &Value::Null), "a request with a mistake");
    assert_eq!((&found[4]["key"], &found[4]["status"]), (&json!("alice"), &json!(499)), "a client that disconnected");
    let text = std::fs::read_to_string(keys.log()).expect("the log exists");
    assert!(!text.contains(SECRET_TEXT) && !text.contains("hello") && !text.contains(&secret), "{text}");
}
