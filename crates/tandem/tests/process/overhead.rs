//! Measures the CPU time that a frontend spends on telemetry.

use crate::{
    cluster::{Plan, address, ready},
    trace::Collector,
    up::Up,
};
use futures::{StreamExt, TryStreamExt};
use serde_json::json;
use std::{fs, net::Ipv4Addr, time::Duration};
use tandem_tests::{Client, Endpoint, prose};
use tokio::time::Instant;

/// The number of rounds. Many short rounds let other work on the machine affect all frontends of a round equally.
const ROUNDS: usize = 120;
/// Each frontend receives this many requests in each round.
const REQUESTS: usize = 50;
/// Prometheus' default scrape interval.
const SCRAPE_INTERVAL: Duration = Duration::from_secs(15);
const CONCURRENCY: usize = 8;
const PROMPT_TOKENS: usize = 600;
const MAX_TOKENS: usize = 64;
/// The CPU time with telemetry may be this many times the CPU time without telemetry.
const RATIO_MAX: f64 = 1.03;

/// Returns the user time of a process since its start, and the sum of its user and system time, both in milliseconds.
fn cpu_ms(process: &Up) -> [f64; 2] {
    const TICK_MS: f64 = 10.0;
    let proc = format!("/proc/{}", process.id());
    let stat = fs::read_to_string(format!("{proc}/stat")).expect("the process runs");
    let user: f64 = stat
        .rsplit(')')
        .next()
        .and_then(|rest| rest.split(' ').nth(12))
        .and_then(|ticks| ticks.parse().ok())
        .expect("the process time is a number");
    let tasks = fs::read_dir(format!("{proc}/task"))
        .expect("the process runs")
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("schedstat")).ok());
    let all: f64 = tasks.filter_map(|task| task.split(' ').next()?.parse::<f64>().ok()).sum();
    [user * TICK_MS, all / 1e6]
}

async fn run_requests(client: &Client, salt: usize) -> anyhow::Result<()> {
    let requests = (0..REQUESTS).map(|number| async move {
        let mut text = prose(&(salt * REQUESTS + number).to_string(), PROMPT_TOKENS);
        text.truncate(PROMPT_TOKENS);
        let options =
            json!({ "max_tokens": MAX_TOKENS, "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true } });
        let answer = client.answer(Endpoint::Chat.path(), &Endpoint::Chat.request("sim", &text, options)).await?;
        anyhow::ensure!(answer.status == 200 && answer.done, "{answer:?}");
        Ok(())
    });
    futures::stream::iter(requests).buffer_unordered(CONCURRENCY).try_collect().await
}

fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}

#[expect(clippy::print_stdout, reason = "the test prints measurements")]
fn print_row(line: &str) {
    println!("{line}");
}

/// Measures the CPU time, and prints the table of docs/bench/telemetry.md.
#[test]
#[ignore = "takes minutes and needs a machine that does nothing else"]
fn telemetry_costs_little_cpu_time() {
    let plan = Plan::new();
    let (collector, at) = Collector::start(&plan);
    let (endpoint, workers) = (format!("http://{at}"), [address(), address()]);
    plan.list(&workers);
    let on = ["--otlp-endpoint", &endpoint, "--log-format", "json"];
    let _router = plan.router(&on);
    let fast = ["--sim-speedup", "1000"];
    let _workers = [("prefill", "p", workers[0]), ("decode", "d", workers[1])]
        .map(|(role, name, at)| plan.worker(role, name, at, &[&on[..], &fast].concat()));
    let routers = plan.router_list();
    let frontend = |name: &str, args: &[&str]| {
        let own = ["--engine", "sim", "--router", &routers];
        let process = plan.start("frontend", name, (Ipv4Addr::LOCALHOST, 0).into(), &[&own, args].concat());
        ready(&process);
        let client = Client::new(process.address().parse().expect("the address has a host and a port"));
        (process, client)
    };
    let frontends =
        [frontend("off", &[]), frontend("on", &on), frontend("all", &[&on[..], &["--trace-sample-ratio", "1"]].concat())];
    // The CPU times of each frontend, with one entry per round.
    let mut cpu_times: [Vec<[f64; 2]>; 3] = Default::default();
    let mut scraped = [Instant::now(); 3];
    for round in 0..=ROUNDS {
        let mut order = [0, 1, 2];
        order.rotate_left(round % 3);
        if round % 2 == 1 {
            order.reverse();
        }
        for which in order {
            let (process, client) = &frontends[which];
            let before = cpu_ms(process);
            plan.runtime.block_on(run_requests(client, round * 3 + which)).expect("all requests are answered");
            if which > 0 && scraped[which].elapsed() >= SCRAPE_INTERVAL {
                process.get("/metrics");
                scraped[which] = Instant::now();
            }
            let after = cpu_ms(process);
            // The first round only warms up the processes, so it is not measured.
            if round > 0 {
                cpu_times[which].push([after[0] - before[0], after[1] - before[1]]);
            }
        }
    }
    let sum = |which: usize, kind: usize| cpu_times[which].iter().map(|round| round[kind]).sum::<f64>();
    let per_request = |which: usize, kind: usize| sum(which, kind) / (ROUNDS * REQUESTS) as f64;
    let user = |which: usize| sum(which, 0) / sum(0, 0);
    let all = |which: usize| quartiles(cpu_times[which].iter().zip(&cpu_times[0]).map(|(this, off)| this[1] / off[1]).collect());
    print_row("| frontend | user, ms a request | user and system | ratio, user | ratio, user and system |");
    print_row("|---|--:|--:|--:|--:|");
    for (which, name) in ["all off", "all on, 1 % traced", "all on, every request traced"].into_iter().enumerate() {
        let ([low, middle, high], user) = (all(which), user(which));
        let times = format!("{:.3} | {:.3}", per_request(which, 0), per_request(which, 1));
        print_row(&format!("| {name} | {times} | {user:.3} | **{middle:.3}** ({low:.3}..{high:.3}) |"));
    }
    let traced = collector.spans().iter().filter(|(service, _)| service == "tandem-frontend").count();
    print_row(&format!("{traced} of {} requests were traced.", 3 * (ROUNDS + 1) * REQUESTS));
    assert!(traced > (ROUNDS + 1) * REQUESTS, "the collector has all traces of one frontend and some of the other");
    assert!(user(1) <= RATIO_MAX && all(1)[1] <= RATIO_MAX, "tracing takes more than {RATIO_MAX} times the CPU time");
}
