//! Tests of accounts: a header sets a request's account, the ledger records it, and `tandem audit report` sums its usage.

use crate::{
    cluster::{Plan, address, ready, until},
    talk::post_chat,
    up::{Up, tandem},
};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Sends a chat. Returns the number of cached tokens in the answer. If the answer is an explanation, also returns the largest number of the
/// prompt's blocks that any worker has cached.
fn cached(frontend: &Up, headers: &str, text: &str) -> (Option<u64>, Option<u64>) {
    let body = json!({ "model": "sim", "messages": [{ "role": "user", "content": text }], "max_tokens": 1 });
    let (answer, _) = post_chat(frontend, headers, &body);
    let answer: Value =
        serde_json::from_str(answer.split_once("\r\n\r\n").expect("the answer has a head").1).expect("the body is JSON");
    let workers = answer["prompts"][0]["workers"].as_array().into_iter().flatten();
    let overlap = workers.filter_map(|worker| worker["overlap_blocks"].as_u64()).max();
    (answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64(), overlap)
}

#[test]
fn prompt_of_another_account_is_not_found_in_the_cache() {
    const SECRET: &str = "The launch of the new product is a secret until spring. Its codename is BLUE HERON.";
    let plan = Plan::new();
    let workers = [address(), address()];
    plan.list(&workers);
    let (_router, frontend) =
        (plan.router(&[]), plan.frontend(&["--account-header", "X-Account", "--trusted-proxies", "127.0.0.1"]));
    let _processes = [plan.worker("prefill", "p", workers[0], &[]), plan.worker("decode", "d", workers[1], &[])];
    ready(&frontend);
    let acme = "x-account: acme\r\n";
    cached(&frontend, acme, SECRET);
    let explain = |account: &str| cached(&frontend, &format!("{account}x-tandem-explain: true\r\n"), SECRET).1;
    until("the router has the cached blocks in its index", || explain(acme), |blocks| blocks.is_some_and(|blocks| blocks > 0));
    for stranger in ["x-account: zoo\r\n", ""] {
        assert_eq!(explain(stranger), Some(0), "{stranger:?}");
        assert_eq!(cached(&frontend, stranger, SECRET).0, Some(0), "{stranger:?}");
    }
    assert!(cached(&frontend, acme, SECRET).0.is_some_and(|tokens| tokens > 0), "an account's own prompt is found in the cache");
}

fn report(ledgers: &[String], format: &str) -> (bool, String) {
    let mut command = tandem(&["audit", "report", format]);
    let output = ledgers.iter().fold(&mut command, |command, ledger| command.args(["--ledger", ledger])).output();
    let output = output.expect("the binary runs");
    (output.status.success(), String::from_utf8([output.stdout, output.stderr].concat()).expect("the output is UTF-8"))
}

#[test]
fn audit_report_sums_the_usage_of_each_account() {
    let plan = Plan::new();
    let workers = [address(), address()];
    plan.list(&workers);
    let ledgers = ["p", "d"].map(|name| plan.file(&format!("{name}.ledger")).to_str().expect("the path is UTF-8").to_owned());
    let (router, frontend) = (
        plan.router(&["--prefill", "auto"]),
        plan.frontend(&["--account-header", "X-Account", "--trusted-proxies", "127.0.0.1"]),
    );
    let processes = [
        plan.worker("prefill", "p", workers[0], &["--ledger", &ledgers[0]]),
        plan.worker("decode", "d", workers[1], &["--ledger", &ledgers[1]]),
    ];
    ready(&frontend);
    let mut reported: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for (round, account) in ["acme", "", "acme", "zoo:7", "acme", "zoo:7"].into_iter().enumerate() {
        let text = format!("{account}: {}", "a prompt that is sent again is partly cached ".repeat(4 + round));
        let body = json!({ "model": "sim", "messages": [{ "role": "user", "content": text }], "max_tokens": 3 });
        let headers = if account.is_empty() { String::new() } else { format!("x-account: {account}\r\n") };
        let (answer, _) = post_chat(&frontend, &headers, &body);
        let answer: Value =
            serde_json::from_str(answer.split_once("\r\n\r\n").expect("the answer has a head").1).expect("the body is JSON");
        let usage = |pointer| answer["usage"].pointer(pointer).and_then(Value::as_u64).expect("the usage has the number");
        let sums = reported.entry(if account.is_empty() { "-" } else { account }).or_default();
        for (sum, tokens) in sums.iter_mut().zip([1, usage("/prompt_tokens"), usage("/prompt_tokens_details/cached_tokens")]) {
            *sum += tokens;
        }
    }
    let strange = json!({ "model": "sim", "messages": [{ "role": "user", "content": "x" }] });
    // The second case sends the client's own account header together with the proxy's account header.
    for headers in ["x-account: a bill, please\r\n", "x-account: zoo:7\r\nx-account: acme\r\n", "x-account: -\r\n"] {
        let (refused, _) = post_chat(&frontend, headers, &strange);
        assert!(refused.starts_with("HTTP/1.1 400") && refused.contains("x-account"), "{refused}");
    }
    // A ledger is complete only when the process that writes it has ended.
    for process in [frontend, router].into_iter().chain(processes) {
        process.signal("-TERM");
        assert_eq!(process.wait().0.code(), Some(0));
    }

    let (ok, json) = report(&ledgers, "--json");
    let lines: Vec<Value> = serde_json::from_str(&json).expect("the report is a JSON list");
    let mut counted: BTreeMap<&str, [u64; 3]> = BTreeMap::new();
    for line in &lines {
        assert_eq!((line["model"].as_str(), line["day"].as_str().map(str::len)), (Some("sim"), Some(10)), "{line}");
        let sums = counted.entry(line["account"].as_str().expect("the account is a string")).or_default();
        for (sum, key) in sums.iter_mut().zip(["requests", "prompt_tokens", "cached_tokens"]) {
            *sum += line[key].as_u64().expect("the count is a number");
        }
    }
    assert_eq!((ok, &counted), (true, &reported));
    assert!(reported.values().any(|[_, _, cached]| *cached > 0), "{reported:?}");
    let (ok, csv) = report(&ledgers, "--csv");
    assert!(ok && csv.starts_with("day,account,model,") && csv.lines().count() == lines.len() + 1, "{csv}");
    let (ok, printed) = report(&[plan.file("none").to_str().expect("the path is UTF-8").to_owned()], "--csv");
    assert!(!ok && printed.contains("cannot be read"), "{printed}");
}
