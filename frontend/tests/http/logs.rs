//! Log lines about answers that fail or are resumed.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use std::{fs::File, sync::Arc};
use tandem_proto::v1::{FailureReason, generate_reply};
use tonic::Status;
use tracing::{Level, subscriber::DefaultGuard};

/// The log of this thread, on which a test and all its tasks run.
struct Log {
    file: tempfile::NamedTempFile,
    _guard: DefaultGuard,
}

impl Log {
    fn start() -> Self {
        let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
        let writer = Arc::new(File::create(file.path()).expect("the file is writable"));
        let lines = tracing_subscriber::fmt().json().flatten_event(true).with_max_level(Level::INFO).with_writer(writer);
        Self { file, _guard: tracing::subscriber::set_default(lines.finish()) }
    }

    /// Returns the lines about answers.
    fn lines(&self) -> Vec<Value> {
        let text = std::fs::read_to_string(self.file.path()).expect("the file exists");
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).expect("a line is JSON"));
        lines.filter(|line| line["message"].as_str().is_some_and(|text| text.starts_with("answer "))).collect()
    }
}

#[tokio::test]
async fn failed_answer_has_one_warning_with_its_worker_and_both_ids() {
    for stream in [false, true] {
        let log = Log::start();
        let mut cluster = Cluster::with(|settings| settings.resumes = 0).await;
        let body = chat(json!({ "stream": stream })).to_string();
        let at = cluster.frontend;
        let reply = tokio::spawn(send(at, Method::POST, CHAT, &[("x-request-id", "client-7")], body.into()));
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        call.send(tokens(0, b"a")).await;
        call.send(generate_reply::Message::Failure(failure(FailureReason::EngineFailed, "d0-instance"))).await;
        let reply = soon(reply).await.expect("the client task runs");
        let id = reply.header("x-request-id").expect("every response has an id").to_owned();
        drop(reply.text().await);
        let lines = log.lines();
        let [line] = &lines[..] else { panic!("one line is expected: {lines:?}") };
        for (field, expected) in [
            ("level", "WARN"),
            ("request_id", &id),
            ("client_request_id", "client-7"),
            ("worker", "d0"),
            ("code", "worker_lost"),
            ("model", "m"),
        ] {
            assert_eq!(line[field], expected, "{field} of {line}");
        }
    }
}

#[tokio::test]
async fn resumed_answer_has_one_line_of_information() {
    let (log, mut cluster) = (Log::start(), Cluster::start().await);
    let reply = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"ab")).await;
    call.fail(Status::unavailable("killed")).await;
    cluster.call().await.answer(Some(0), "c").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    let lines = log.lines();
    let [line] = &lines[..] else { panic!("one line is expected: {lines:?}") };
    let expected =
        json!({ "level": "INFO", "lost_worker": "d0", "worker": "d0", "generated_tokens": 2, "reason": "unreachable" });
    for (field, expected) in expected.as_object().expect("it is an object") {
        assert_eq!(line[field], *expected, "{field} of {line}");
    }
    assert_eq!(line.get("client_request_id"), None, "the client has sent no id");
}

#[tokio::test]
async fn refused_and_abandoned_requests_write_no_warning() {
    let (log, mut cluster) = (Log::start(), Cluster::start().await);
    assert_eq!(cluster.post(CHAT, &chat(json!({ "n": 0 }))).await.status(), StatusCode::BAD_REQUEST);
    let refused = cluster.spawn_post(CHAT, chat(json!({})));
    cluster.call().await.fail(Status::invalid_argument("the prompt is too long")).await;
    assert_eq!(soon(refused).await.expect("the client task runs").status(), StatusCode::BAD_REQUEST);
    let abandoned = cluster.spawn_post(CHAT, chat(json!({ "stream": true })));
    let call = cluster.call().await;
    abandoned.abort();
    call.closed().await;
    cluster.counted("tandem_frontend_inflight_requests 0").await;
    assert_eq!(log.lines(), Vec::<Value>::new());
}

#[tokio::test]
async fn log_lines_of_many_failed_answers_are_limited() {
    let (log, mut cluster) = (Log::start(), Cluster::with(|settings| settings.attempts = 1).await);
    for _ in 0..30 {
        let reply = cluster.spawn_post(CHAT, chat(json!({})));
        cluster.call().await.fail(Status::unavailable("killed")).await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::SERVICE_UNAVAILABLE);
    }
    assert_eq!(log.lines().len(), 20);
    assert!(log.lines().iter().all(|line| line["code"] == "attempts_exhausted" && line["worker"] == "d0"), "{:?}", log.lines());
}
