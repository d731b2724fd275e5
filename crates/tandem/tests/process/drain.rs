//! Tests of `tandem plan --live` and `tandem drain`.

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::chat,
    up::{Up, tandem},
};
use std::{process::Stdio, time::Duration};
use tokio::time::Instant;

fn run(plan: &Plan, args: &[&str]) -> (Option<i32>, String) {
    let key = plan.file("key");
    let key = ["--cluster-key-file", key.to_str().expect("the path is UTF-8")];
    let output = tandem(&[args, &key].concat()).output().expect("the binary runs");
    (output.status.code(), String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8"))
}

#[test]
fn plan_names_the_wanted_workers_and_drain_ends_the_named_one_without_losing_requests() {
    let plan = Plan::new();
    let (one, other) = (address(), address());
    plan.list(&[one, other]);
    let router = plan.router(&["--prefill", "local", "--slo-ttft", "2000"]);
    let frontend = plan.frontend(&[]);
    let slow = ["--sim-decode-step-ms", "400"];
    let (first, second) = (plan.worker("decode", "d0", one, &slow), plan.worker("decode", "d1", other, &slow));
    plan.joined(&["d0", "d1"]);
    ready(&frontend);
    let server = plan.routers[0].to_string();
    let planned = || run(&plan, &["plan", "--live", &server]);
    let (_, table) = until("the router has decided", planned, |(code, table)| *code == Some(0) && table.contains("present"));
    assert!(table.contains("decode") && table.contains("nothing arrives"), "{table}");
    assert!(series(&router, "tandem_router_wanted_workers") >= 1.0);

    // A router that has just started wants what it finds, so no worker is spare.
    let (code, message) = run(&plan, &["drain", &server]);
    assert!(code == Some(1) && message.contains("no more workers are present than wanted"), "{message}");
    let (code, message) = run(&plan, &["drain", &server, "--worker", "d7"]);
    assert!(code == Some(1) && message.contains("the router has no worker d7; its workers are d0, d1"), "{message}");

    let answers = std::thread::scope(|scope| {
        let asked: Vec<_> = (0..8)
            .map(|number| {
                scope.spawn({
                    let frontend = &frontend;
                    move || chat(frontend, &format!("{number} and a question"))
                })
            })
            .collect();
        let booked = || plan.view().workers.iter().map(|worker| worker.bookings).min();
        until("both workers have requests", booked, |booked| booked.is_some_and(|booked| booked > 0));
        let (code, message) = run(&plan, &["drain", &server, "--worker", "d0"]);
        assert!(code == Some(0) && message.starts_with("d0 gets no further requests"), "{message}");
        asked.into_iter().map(|asked| asked.join().expect("the request is answered")).collect::<Vec<_>>()
    });
    assert_eq!(answers.len(), 8);
    let (status, _) = first.wait();
    assert!(status.success(), "{}", plan.log("d0"));
    plan.joined(&["d1"]);
    chat(&frontend, "one worker is left");

    // A worker that was not asked to drain ends at SIGTERM without waiting for that.
    let signalled = Instant::now();
    second.signal("-TERM");
    assert!(second.wait().0.success() && signalled.elapsed() < Duration::from_secs(15), "{}", plan.log("d1"));
}

#[test]
fn worker_of_a_process_with_other_parts_refuses_to_drain() {
    let up = Up::spawn(&["up", "--engine", "sim", "--listen", "127.0.0.1:0", "--slo-itl", "50"], Stdio::null());
    let output = tandem(&["drain", up.address(), "--worker", "decode-0"]).output().expect("the binary runs");
    let message = String::from_utf8_lossy(&output.stderr);
    let is_refused = message.contains("the workers of `tandem up` are parts of one process, and cannot be drained");
    assert!(output.status.code() == Some(1) && is_refused, "{message}");
    let output = tandem(&["plan", up.address()]).output().expect("the binary runs");
    assert_eq!(output.status.code(), Some(2), "without --live, the command line is wrong");
}
