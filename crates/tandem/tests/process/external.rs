//! Tests of workers whose engine is a server in another process.

use crate::{
    cluster::{Plan, address, until},
    up::Up,
};

#[test]
fn worker_without_an_answering_engine_reports_the_reason_immediately() {
    let plan = Plan::new();
    let worker = address();
    plan.list(&[worker]);
    let _router = plan.router(&[]);
    // No engine listens at this address.
    let engine = "http://127.0.0.1:1";
    let args = ["--engine", "vllm", "--engine-url", engine, "--admin-listen", "127.0.0.1:0", "--worker-id", "w"];
    let process: Up = plan.start("decode-worker", "w", worker, &args);
    let expected = format!("the worker waits until its engine at {engine} answers");
    let refused = process.get("/ready");
    assert!(refused.starts_with("HTTP/1.1 503") && refused.contains(&expected), "{refused}");
    until(
        "the router knows why the worker is not a member",
        || plan.view(),
        |view| view.unavailable.iter().any(|unavailable| unavailable.reason.contains(&expected)),
    );
}
