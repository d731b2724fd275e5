//! The cost of a frontend's telemetry with default settings.

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

/// Many short ones: what else the machine does falls on all of a round alike.
const ROUNDS: usize = 120;
/// Requests to each frontend in each round.
const REQUESTS: usize = 50;
/// Prometheus' default.
const SCRAPED_EVERY: Duration = Duration::from_secs(15);
const AT_ONCE: usize = 8;
const PROMPT_TOKENS: usize = 600;
const MAX_TOKENS: usize = 64;
const GOAL: f64 = 1.03;

/// CPU time since the process's start, in milliseconds: user time, and all of it.
fn cpu_ms(process: &Up) -> [f64; 2] {
    const TICK_MS: f64 = 10.0;
    let proc = format!("/proc/{}", process.id());
    let stat = fs::read_to_string(format!("{proc}/stat")).expect("it runs");
    let user: f64 =
        stat.rsplit(')').next().and_then(|rest| rest.split(' ').nth(12)).and_then(|ticks| ticks.parse().ok()).expect("ticks");
    let tasks = fs::read_dir(format!("{proc}/task"))
        .expect("it runs")
        .filter_map(|task| fs::read_to_string(task.ok()?.path().join("schedstat")).ok());
    let all: f64 = tasks.filter_map(|task| task.split(' ').next()?.parse::<f64>().ok()).sum();
    [user * TICK_MS, all / 1e6]
}

async fn turn(client: &Client, salt: usize) -> anyhow::Result<()> {
    let asked = (0..REQUESTS).map(|number| async move {
        let mut text = prose(&(salt * REQUESTS + number).to_string(), PROMPT_TOKENS);
        text.truncate(PROMPT_TOKENS);
        let options =
            json!({ "max_tokens": MAX_TOKENS, "ignore_eos": true, "stream": true, "stream_options": { "include_usage": true } });
        let answer = client.ask(Endpoint::Chat.path(), &Endpoint::Chat.request("sim", &text, options)).await?;
        anyhow::ensure!(answer.status == 200 && answer.done, "{answer:?}");
        Ok(())
    });
    futures::stream::iter(asked).buffer_unordered(AT_ONCE).try_collect().await
}

/// The quartiles.
fn quartiles(mut values: Vec<f64>) -> [f64; 3] {
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[values.len() * quarter / 4])
}

#[expect(clippy::print_stdout, reason = "what is asked for")]
fn print_line(line: &str) {
    println!("{line}");
}

/// Prints what docs/bench/telemetry.md shows.
#[test]
#[ignore = "minutes, and a quiet machine"]
fn figures_of_telemetry() {
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
        let client = Client::new(process.address().parse().expect("host:port"));
        (process, client)
    };
    let frontends =
        [frontend("off", &[]), frontend("on", &on), frontend("all", &[&on[..], &["--trace-sample-ratio", "1"]].concat())];
    // By frontend and round.
    let mut spent: [Vec<[f64; 2]>; 3] = Default::default();
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
            plan.runtime.block_on(turn(client, round * 3 + which)).expect("all is answered");
            if which > 0 && scraped[which].elapsed() >= SCRAPED_EVERY {
                process.get("/metrics");
                scraped[which] = Instant::now();
            }
            let after = cpu_ms(process);
            // The first round warms up.
            if round > 0 {
                spent[which].push([after[0] - before[0], after[1] - before[1]]);
            }
        }
    }
    let sum = |which: usize, kind: usize| spent[which].iter().map(|turn| turn[kind]).sum::<f64>();
    let per_request = |which: usize, kind: usize| sum(which, kind) / (ROUNDS * REQUESTS) as f64;
    let user = |which: usize| sum(which, 0) / sum(0, 0);
    let all = |which: usize| quartiles(spent[which].iter().zip(&spent[0]).map(|(this, off)| this[1] / off[1]).collect());
    print_line("| frontend | user, ms a request | user and system | ratio, user | ratio, user and system |");
    print_line("|---|--:|--:|--:|--:|");
    for (which, name) in ["all off", "all on, 1 % traced", "all on, every request traced"].into_iter().enumerate() {
        let ([low, middle, high], user) = (all(which), user(which));
        let times = format!("{:.3} | {:.3}", per_request(which, 0), per_request(which, 1));
        print_line(&format!("| {name} | {times} | {user:.3} | **{middle:.3}** ({low:.3}..{high:.3}) |"));
    }
    let traced = collector.spans().iter().filter(|(service, _)| service == "tandem-frontend").count();
    print_line(&format!("{traced} of {} requests were traced.", 3 * (ROUNDS + 1) * REQUESTS));
    assert!(traced > (ROUNDS + 1) * REQUESTS, "the collector has seen the traces of one frontend whole, and some of the other");
    assert!(user(1) <= GOAL && all(1)[1] <= GOAL, "more than {GOAL} times the CPU time");
}
