//! Tests of the roles as processes: they may start in any order, and workers and the router may be added, removed and restarted without loss.

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::{chat, chat_body, metric, streamed_chat},
    up::Up,
};
use std::{
    io::{BufRead, Read},
    sync::atomic::{AtomicBool, Ordering},
};

/// Returns a prompt of a few dozen blocks. Prompts with different salts share no block.
fn prompt(salt: &str) -> String {
    format!("{salt}: {}", "a long text with some words of a prompt ".repeat(12))
}

#[test]
fn roles_start_in_any_order() {
    for order in ["frpd", "dprf", "pfdr"] {
        let plan = Plan::new();
        let (prefill, decode) = (address(), address());
        plan.list(&[prefill, decode]);
        let mut parts: Vec<(char, Up)> = Vec::new();
        for part in order.chars() {
            if let Some((_, frontend)) = parts.iter().find(|(part, _)| *part == 'f') {
                let unready = frontend.get("/ready");
                assert!(unready.starts_with("HTTP/1.1 503"), "{order}, before {part}: {unready}");
            }
            let process = match part {
                'f' => plan.frontend(&[]),
                'r' => plan.router(&[]),
                'p' => plan.worker("prefill", "p", prefill, &[]),
                _ => plan.worker("decode", "d", decode, &[]),
            };
            parts.push((part, process));
        }
        for (_, process) in &parts {
            ready(process);
        }
        let frontend = &parts.iter().find(|(part, _)| *part == 'f').expect("the process was started").1;
        let long = prompt(order);
        assert_eq!(chat(frontend, &long).1, 0);
        until("the prompt is found in the cache", || chat(frontend, &long).1, |cached| *cached > 400);
        for (part, process) in parts {
            process.signal("-TERM");
            assert_eq!(process.wait().0.code(), Some(0), "{order}: {part}");
        }
    }
}

#[test]
fn workers_are_added_and_removed_by_the_list() {
    let plan = Plan::new();
    let (prefill, one, other) = (address(), address(), address());
    plan.list(&[prefill, one]);
    let (router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let _workers = (plan.worker("prefill", "p", prefill, &[]), plan.worker("decode", "d1", one, &[]));
    ready(&frontend);
    let _late = plan.worker("decode", "d2", other, &[]);
    plan.list(&[prefill, one, other]);
    plan.joined(&["d1", "d2", "p"]);
    plan.list(&[prefill, other]);
    plan.joined(&["d2", "p"]);
    let placed = |name: &str| metric(&router, &format!("tandem_router_placements_total{{worker=\"{name}\",kind=\"decode\"}}"));
    chat(&frontend, &prompt("late"));
    assert_eq!((placed("d1"), placed("d2")), (None, Some(1.0)));
    plan.list(&[]);
    let kept = "the list of members has become empty";
    until("the router warns of the empty list", || plan.log("router"), |log| log.contains(kept));
    plan.joined(&["d2", "p"]);
    plan.list(&[address()]);
    plan.joined(&[]);
    assert!(frontend.get("/ready").contains("no decode worker has joined"));
}

#[test]
fn listed_context_is_what_the_largest_decode_worker_can_hold() {
    let plan = Plan::new();
    let at = [address(), address(), address()];
    plan.list(&at);
    let (_router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let _workers = [
        plan.worker("prefill", "p", at[0], &["--kv-capacity-tokens", "8192"]),
        plan.worker("decode", "small", at[1], &["--kv-capacity-tokens", "512"]),
        plan.worker("decode", "large", at[2], &["--kv-capacity-tokens", "1024"]),
    ];
    plan.joined(&["large", "p", "small"]);
    let listed = |models: &String| models.contains(r#""max_model_len":1024"#);
    until("the frontend knows what the workers hold", || frontend.get("/v1/models"), listed);
    let answer = frontend.answer("/v1/chat/completions", &chat_body(&"x".repeat(2_000), 8, false));
    assert!(answer.starts_with("HTTP/1.1 400") && answer.contains("context_length_exceeded"), "{answer}");
}

#[test]
fn restarted_worker_joins_as_a_new_instance() {
    let plan = Plan::new();
    let (at, decode) = (address(), address());
    plan.list(&[at, decode]);
    let (router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let _decode = plan.worker("decode", "d", decode, &[]);
    let prefill = plan.worker("prefill", "p", at, &[]);
    let first = plan.joined_after("p", "");
    ready(&frontend);
    let long = prompt("in place");
    chat(&frontend, &long);
    let indexed = || metric(&router, r#"tandem_router_index_blocks{worker="p",tier="device"}"#);
    until("the index has the prompt's blocks", indexed, |blocks| blocks.is_some_and(|blocks| blocks > 20.0));
    prefill.signal("-KILL");
    prefill.wait();
    let _again = plan.worker("prefill", "p", at, &[]);
    plan.joined_after("p", &first);
    assert_eq!(indexed(), Some(0.0), "the blocks of the old instance are removed from the index");
    let over = |process: &Up| metric(process, r#"tandem_router_overlap_over_tokens_total{worker="p"}"#);
    let before = over(&router);
    let answer = frontend.answer("/v1/chat/completions", &chat_body(&long, 8, false));
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(over(&router), before, "the router predicted no block that the new instance lacks");
}

#[test]
fn draining_workers_lose_no_answer() {
    let plan = Plan::new();
    let at = [address(), address(), address(), address()];
    plan.list(&at);
    let (_router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let mut workers: Vec<Up> = [("prefill", "p1"), ("prefill", "p2"), ("decode", "d1"), ("decode", "d2")]
        .iter()
        .zip(at)
        .map(|((role, name), at)| plan.worker(role, name, at, &[]))
        .collect();
    plan.joined(&["d1", "d2", "p1", "p2"]);
    ready(&frontend);
    let both_left = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (frontend, both_left) = (&frontend, &both_left);
        for client in 0..12 {
            scope.spawn(move || {
                // The loop is bounded, so that a failure of the test's other thread ends the test.
                for round in 0..1_000 {
                    let last = both_left.load(Ordering::Relaxed);
                    streamed_chat(frontend, &prompt(&format!("{client} {round}")), 400);
                    if last {
                        break;
                    }
                }
            });
        }
        // One worker of each role drains while all workers are busy.
        for leaving in [2, 0] {
            let worker = workers.remove(leaving);
            until("the worker is busy", || series(&worker, "tandem_worker_step_duration_seconds_count"), |steps| *steps > 10.0);
            worker.signal("-TERM");
            assert_eq!(worker.wait().0.code(), Some(0));
        }
        both_left.store(true, Ordering::Relaxed);
    });
    until("the router releases all bookings", || plan.joined(&["d2", "p2"]).bookings, |bookings| *bookings == 0);
    chat(&frontend, &prompt("afterwards"));
}

#[test]
fn restarted_router_serves_again() {
    let plan = Plan::new();
    let at = [address(), address()];
    plan.list(&at);
    let (router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let _workers = (plan.worker("prefill", "p", at[0], &[]), plan.worker("decode", "d", at[1], &["--sim-speedup", "2"]));
    ready(&frontend);
    let mut running = frontend.send("/v1/chat/completions", &chat_body("a long story", 600, true)).expect("the frontend listens");
    let mut answer = String::new();
    while !answer.contains("data:") {
        assert_ne!(
            running.read_line(&mut answer).expect("the answer is UTF-8"),
            0,
            "the answer ended without an event: {answer}"
        );
    }
    router.signal("-KILL");
    router.wait();
    let refused = frontend.answer("/v1/chat/completions", &chat_body("refused", 8, false));
    assert!(refused.starts_with("HTTP/1.1 503") && refused.to_lowercase().contains("retry-after"), "{refused}");
    running.read_to_string(&mut answer).expect("the answer is UTF-8");
    assert!(
        answer.contains("\"finish_reason\":\"length\"") && answer.contains("data: [DONE]"),
        "a running request needs no router"
    );
    let _router = plan.router(&[]);
    plan.joined(&["d", "p"]);
    ready(&frontend);
    chat(&frontend, "after the restart");
}
