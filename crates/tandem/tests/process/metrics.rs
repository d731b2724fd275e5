//! Tests of the metric families that each role exports.

use crate::{
    cluster::{Plan, address, ready, until},
    talk::{chat, streamed_chat},
    up::Up,
};
use std::{
    collections::BTreeSet,
    io::Write,
    process::{Command, Stdio},
};

/// The name of a metric family without its role's prefix, its type, and the names of its labels.
type Family = (&'static str, &'static str, &'static [&'static str]);

const FRONTEND: &[Family] = &[
    ("requests_total", "counter", &["endpoint", "model", "code"]),
    ("request_duration_seconds", "histogram", &[]),
    ("time_to_first_token_seconds", "histogram", &[]),
    ("inter_token_latency_seconds", "histogram", &[]),
    ("prompt_tokens_total", "counter", &[]),
    ("completion_tokens_total", "counter", &[]),
    ("cached_tokens_total", "counter", &["source", "tier"]),
    ("request_prompt_tokens", "histogram", &[]),
    ("request_completion_tokens", "histogram", &[]),
    ("request_cached_tokens", "histogram", &[]),
    ("request_cached_ratio", "histogram", &[]),
    ("inflight_requests", "gauge", &[]),
    ("migrations_total", "counter", &[]),
    ("cancelled_total", "counter", &[]),
];
const ROUTER: &[Family] = &[
    ("placements_total", "counter", &["worker", "kind"]),
    ("overlap_blocks", "histogram", &["worker"]),
    ("overlap_over_tokens_total", "counter", &["worker"]),
    ("overlap_under_tokens_total", "counter", &["worker"]),
    ("index_blocks", "gauge", &["worker", "tier"]),
    ("kv_events_total", "counter", &["worker", "kind"]),
    ("kv_event_gaps_total", "counter", &["worker"]),
    ("kv_event_lag_seconds", "histogram", &[]),
    ("route_duration_seconds", "histogram", &[]),
    ("bookings", "gauge", &[]),
];
const WORKER: &[Family] = &[
    ("prefix_cache_requests_total", "counter", &["worker", "result"]),
    ("prompt_tokens_total", "counter", &["worker"]),
    ("cached_tokens_total", "counter", &["worker", "tier"]),
    ("kv_blocks", "gauge", &["worker", "state"]),
    ("batch_tokens", "histogram", &["worker"]),
    ("queue_depth", "gauge", &["worker"]),
    ("step_duration_seconds", "histogram", &["worker", "phase"]),
    ("kv_transfer_bytes_total", "counter", &["worker", "transport", "direction"]),
    ("kv_transfer_duration_seconds", "histogram", &["worker", "transport", "direction"]),
    ("preemptions_total", "counter", &["worker"]),
];

fn page(process: &Up) -> String {
    process.get("/metrics").split_once("\r\n\r\n").expect("the answer has a head").1.to_owned()
}

/// Returns the differences between a metrics page and the families that it must have.
fn problems(page: &str, prefix: &str, families: &[Family]) -> Vec<String> {
    let mut problems = Vec::new();
    let typed = |line: &'_ str| {
        line.strip_prefix("# TYPE ").and_then(|rest| rest.split_once(' ')).map(|(name, kind)| (name.to_owned(), kind.to_owned()))
    };
    for (name, kind) in page.lines().filter_map(typed) {
        let help = page.lines().filter(|line| line.starts_with(&format!("# HELP {name} "))).count();
        let total = name.ends_with("_total");
        if help != 1 || total != (kind == "counter") || !name.starts_with("tandem_") {
            problems.push(format!("{name}: {kind}, {help} lines of help"));
        }
    }
    for (name, kind, labels) in families {
        let name = format!("{prefix}{name}");
        if !page.lines().any(|line| line == format!("# TYPE {name} {kind}")) {
            problems.push(format!("{name} is missing or not a {kind}"));
            continue;
        }
        let sample = if *kind == "histogram" { format!("{name}_count") } else { name.clone() };
        let series = page.lines().filter_map(|line| line.strip_prefix(&sample)).filter(|rest| rest.starts_with(['{', ' ']));
        let of_series = |rest: &str| -> BTreeSet<String> {
            let labels = rest.split_once('}').map_or("", |(labels, _)| labels.trim_start_matches('{'));
            labels.split("\",").filter_map(|label| Some(label.split_once('=')?.0.to_owned())).collect()
        };
        let found: BTreeSet<_> = series.map(of_series).collect();
        if found != BTreeSet::from([labels.iter().map(|label| (*label).to_owned()).collect()]) {
            problems.push(format!("{name} has the labels {found:?}, not {labels:?}"));
        }
    }
    problems
}

fn promtool(page: &str) -> String {
    let mut command = Command::new("promtool");
    command.args(["check", "metrics"]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process =
        command.spawn().expect("promtool is missing: apt-get install prometheus, or leave this test out: -- --skip promtool_");
    process.stdin.take().expect("stdin is piped").write_all(page.as_bytes()).expect("the process reads");
    let output = process.wait_with_output().expect("the process ends");
    let printed = [output.stdout, output.stderr].concat();
    if output.status.success() { String::new() } else { String::from_utf8_lossy(&printed).into_owned() }
}

#[test]
fn promtool_accepts_metrics_and_finds_every_family() {
    let plan = Plan::new();
    let at = [address(), address()];
    plan.list(&at);
    let (router, frontend) = (plan.router(&[]), plan.frontend(&[]));
    let workers = [plan.worker("prefill", "p", at[0], &[]), plan.worker("decode", "d", at[1], &[])];
    ready(&frontend);
    let text = "a prompt that is sent twice is cached the second time ".repeat(8);
    chat(&frontend, &text);
    streamed_chat(&frontend, &text, 20);
    until("a transfer is counted", || page(&workers[1]), |page| page.contains("kv_transfer_duration_seconds_count"));
    let (before, roles) = ("tandem_", [(&frontend, "frontend_", FRONTEND), (&router, "router_", ROUTER)]);
    let of_workers = workers.iter().map(|worker| (worker, "worker_", WORKER));
    for (process, role, families) in roles.into_iter().chain(of_workers) {
        let page = page(process);
        assert_eq!(problems(&page, &format!("{before}{role}"), families), [""; 0], "{role}\n{page}");
        assert_eq!(promtool(&page), "", "{role}\n{page}");
    }
}
