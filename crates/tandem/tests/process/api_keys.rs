//! API keys in a cluster of processes: `tandem key` makes them, the frontend reads them, and ledgers and audit log agree with the usage that
//! clients received.

use crate::{
    cluster::{Plan, address, ready, until},
    talk::post_chat,
    up::{Up, tandem},
};
use serde_json::{Value, json};
use std::{collections::BTreeMap, path::Path};

fn key(file: &Path, args: &[&str]) -> String {
    let file = ["--api-keys-file", file.to_str().expect("the path is UTF-8")];
    let output = tandem(&[&["key"], args, &file].concat()).output().expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("the output is UTF-8").trim_end().to_owned()
}

/// Sends a chat with this key. Returns the head of the reply and its body.
fn ask(frontend: &Up, key: &str, text: &str) -> (String, Value) {
    let body = json!({ "model": "sim", "messages": [{ "role": "user", "content": text }], "max_tokens": 3 });
    let (answer, _) = post_chat(frontend, &format!("authorization: Bearer {key}\r\n"), &body);
    let (head, body) = answer.split_once("\r\n\r\n").expect("the answer has a head");
    (head.to_owned(), serde_json::from_str(body).expect("the body is JSON"))
}

#[test]
fn usage_of_each_key_in_ledgers_and_audit_log_is_what_clients_received() {
    let plan = Plan::new();
    let workers = [address(), address()];
    plan.list(&workers);
    let path = |name: &str| plan.file(name).to_str().expect("the path is UTF-8").to_owned();
    let (keys, log) = (plan.file("keys.toml"), path("audit.jsonl"));
    let secrets =
        BTreeMap::from([("alice", key(&keys, &["add", "alice"])), ("acme", key(&keys, &["add", "bob", "--account", "acme"]))]);
    let revoked = key(&keys, &["add", "carol"]);
    let ledgers = ["p.ledger", "d.ledger"].map(path);
    let keys_path = path("keys.toml");
    let router = plan.router(&["--prefill", "auto"]);
    let frontend = plan.frontend(&["--api-keys-file", &keys_path, "--audit-log", &log]);
    let processes = [
        plan.worker("prefill", "p", workers[0], &["--ledger", &ledgers[0]]),
        plan.worker("decode", "d", workers[1], &["--ledger", &ledgers[1]]),
    ];
    ready(&frontend);
    assert!(ask(&frontend, &revoked, "Hi").0.starts_with("HTTP/1.1 200"));
    key(&keys, &["revoke", "carol"]);
    until("the revoked key is refused", || ask(&frontend, &revoked, "Hi").0, |head| head.starts_with("HTTP/1.1 401"));
    let (refused, _) = ask(&frontend, "sk-tandem-none", "Hi");
    assert!(refused.starts_with("HTTP/1.1 401"), "{refused}");

    let text = "A text of more than one block, which a second client sends, too. ".repeat(3);
    let mut received: BTreeMap<&str, [u64; 4]> = BTreeMap::new();
    for (round, account) in ["alice", "acme", "alice", "acme", "alice", "acme"].into_iter().enumerate() {
        let (head, answer) = ask(&frontend, &secrets[account], &text);
        assert!(head.starts_with("HTTP/1.1 200"), "{head} {answer}");
        let usage = |pointer| answer["usage"].pointer(pointer).and_then(Value::as_u64).expect("the usage has the number");
        let cached = usage("/prompt_tokens_details/cached_tokens");
        // The first request of each key finds nothing in the cache, although another key has sent the same text.
        assert!(round >= 2 || cached == 0, "request {round} of {account}: {answer}");
        let counts = [1, usage("/prompt_tokens"), cached, usage("/completion_tokens")];
        for (sum, count) in received.entry(account).or_default().iter_mut().zip(counts) {
            *sum += count;
        }
    }

    for process in [frontend, router].into_iter().chain(processes) {
        process.signal("-TERM");
        assert_eq!(process.wait().0.code(), Some(0));
    }

    assert!(received.values().all(|[_, _, cached, _]| *cached > 0), "each key finds its own text in the cache: {received:?}");
    let mut logged: BTreeMap<String, [u64; 4]> = BTreeMap::new();
    for line in std::fs::read_to_string(&log).expect("the log exists").lines() {
        let line: Value = serde_json::from_str(line).expect("the line is JSON");
        assert!(line["status"] != 401 || (line["key"].is_null() && line["account"].is_null()), "{line}");
        let account = line["account"].as_str().unwrap_or_default();
        if received.contains_key(account) {
            let sums = logged.entry(account.to_owned()).or_default();
            let counts = ["prompt_tokens", "cached_tokens", "completion_tokens"].map(|field| line[field].as_u64().unwrap_or(0));
            for (sum, count) in sums.iter_mut().zip([1, counts[0], counts[1], counts[2]]) {
                *sum += count;
            }
        }
    }
    assert_eq!(logged.iter().map(|(account, sums)| (account.as_str(), *sums)).collect::<BTreeMap<_, _>>(), received);

    let output = tandem(&["audit", "report", "--json", "--ledger", &ledgers[0], "--ledger", &ledgers[1]]).output();
    let report: Value = serde_json::from_slice(&output.expect("the binary runs").stdout).expect("the report is JSON");
    for (account, [requests, prompt, cached, _]) in received {
        let lines: Vec<&Value> = report.as_array().into_iter().flatten().filter(|line| line["account"] == account).collect();
        let sum = |field: &str| lines.iter().filter_map(|line| line[field].as_u64()).sum::<u64>();
        let found = [sum("requests"), sum("prompt_tokens"), sum("cached_tokens")];
        assert_eq!(found, [requests, prompt, cached], "{account} in {report}");
    }
}

#[test]
fn frontend_with_an_unusable_key_file_does_not_start() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let path = folder.path().join("keys.toml");
    let path = path.to_str().expect("the path is UTF-8");
    let start = || {
        let output = tandem(&["up", "--engine", "sim", "--listen", "127.0.0.1:0", "--api-keys-file", path]).output();
        let output = output.expect("the binary runs");
        (output.status.code(), String::from_utf8(output.stderr).expect("the output is UTF-8"))
    };
    let (code, error) = start();
    assert!(code == Some(1) && error.contains("keys.toml") && error.contains("tandem key add"), "{error}");
    std::fs::write(path, "[[key]]\n").expect("the folder is writable");
    let (code, error) = start();
    assert!(code == Some(1) && error.contains("missing field `name`"), "{error}");
}
