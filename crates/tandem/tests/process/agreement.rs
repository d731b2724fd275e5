//! Compares `tandem bench simulate` with the same requests on processes.

use crate::{
    cluster::{Plan, address, ready},
    up::{Up, tandem},
};
use serde_json::Value;
use std::{net::Ipv4Addr, path::Path};

/// Requests of the recorded trace. The hit rate of one run has a standard deviation of 3% with this number of requests, and of 7% with 500.
const REQUESTS: &str = "2000";
/// Requests arrive this many times as fast as recorded.
const PACE: f64 = 1.5;
/// The simulated devices of the processes, and the requests that are sent to them, are this many times as fast as those of the simulation. So a run takes
/// two minutes, and a machine with two cores serves it.
const SPEEDUP: f64 = 4.0;
/// The tokens that fit into a worker's KV memory, the tokens of a block, as in the trace, and the maximum number of prompt tokens in a step.
const KV_TOKENS: &str = "524288";
const BLOCK_TOKENS: &str = "512";
const STEP_TOKENS: &str = "512";
/// The number of runs of the processes, and of simulations, each with another seed of the tie-break. The means of the figures are compared,
/// because single runs differ.
const RUNS: usize = 4;
const SEEDS: usize = 16;

/// The maximum differences of the simulation's figures from those of the processes, as fractions of the latter.
const HIT_RATE_TOLERANCE: f64 = 0.05;
const TTFT_TOLERANCE: f64 = 0.15;

/// Runs `tandem bench` with these arguments, and returns its report.
fn report(args: &[&str], folder: &Path) -> Value {
    let path = folder.join("report.json");
    let path = path.to_str().expect("the path is UTF-8");
    let output = tandem(&[&["bench"], args, &["--json", path]].concat()).output().expect("the binary runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(path).expect("the report was written");
    let parsed: Value = serde_json::from_str(&text).expect("the report is JSON");
    parsed["reports"][0].clone()
}

/// The processes of a cluster, killed when this value is dropped.
struct Processes {
    frontend: Up,
    _others: Vec<Up>,
    _plan: Plan,
}

impl Processes {
    fn start(prefill_workers: usize, decode_workers: usize) -> Self {
        let plan = Plan::new();
        let speedup = SPEEDUP.to_string();
        let args = ["--sim-speedup", &speedup, "--kv-capacity-tokens", KV_TOKENS, "--block-size", BLOCK_TOKENS];
        let args = [&args[..], &["--prefill-chunk-budget", STEP_TOKENS]].concat();
        let workers: Vec<_> = (0..prefill_workers + decode_workers).map(|_| address()).collect();
        plan.list(&workers);
        let mut names = Vec::new();
        let mut others = vec![plan.router(&["--prefill", "auto", "--block-size", BLOCK_TOKENS])];
        for (at, worker) in workers.into_iter().enumerate() {
            let role = if at < prefill_workers { "prefill" } else { "decode" };
            let name = format!("{role}-{at}");
            others.push(plan.worker(role, &name, worker, &args));
            names.push(name);
        }
        let routers = plan.router_list();
        let own = ["--engine", "sim", "--router", &routers, "--block-size", BLOCK_TOKENS, "--max-wait", "off"];
        let frontend = plan.start("frontend", "frontend", (Ipv4Addr::LOCALHOST, 0).into(), &own);
        ready(&frontend);
        names.sort();
        plan.joined(&names.iter().map(String::as_str).collect::<Vec<_>>());
        Self { frontend, _others: others, _plan: plan }
    }
}

#[expect(clippy::print_stdout, reason = "the test prints measurements")]
fn print_row(line: &str) {
    println!("{line}");
}

/// The figures that are compared: the hit rate, the mean and two percentiles of the time to the first token, and the mean time to the last token. All
/// times are multiplied by `speedup`.
fn figures(report: &Value, speedup: f64) -> [f64; 5] {
    let number = |value: &Value| value.as_f64().unwrap_or_else(|| panic!("{value} is no number"));
    let hit_rate = number(&report["tokens"]["cached_counted"]) / number(&report["tokens"]["prompt"]);
    let [mean, p50, p99] = ["mean_ms", "p50_ms", "p99_ms"].map(|figure| number(&report["ttft"][figure]) * speedup);
    [hit_rate * 100.0, mean, p50, p99, number(&report["e2e"]["mean_ms"]) * speedup]
}

fn means(runs: &[[f64; 5]]) -> [f64; 5] {
    [0, 1, 2, 3, 4].map(|figure| runs.iter().map(|run| run[figure]).sum::<f64>() / runs.len() as f64)
}

/// Prints the table of docs/bench-simulate.md.
#[test]
#[ignore = "takes minutes, and needs a machine that does little else and a recorded trace"]
fn simulation_agrees_with_processes() {
    let trace = std::env::var("TANDEM_TRACE").expect("TANDEM_TRACE names Mooncake's conversation_trace.jsonl");
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    print_row("| workers | | hit rate, % | TTFT mean, ms | p50 | p99 | E2E mean |");
    print_row("|---|---|--:|--:|--:|--:|--:|");
    let mut wrong = Vec::new();
    for (name, prefill, decode) in [("8 mixed", 0, 8), ("4 prefill, 4 decode", 4, 4)] {
        let (pace, pace_of_processes) = (PACE.to_string(), (PACE * SPEEDUP).to_string());
        let run = |at| {
            let processes = Processes::start(prefill, decode);
            let url = format!("http://{}", processes.frontend.address());
            let requests = [&*trace, "--limit", REQUESTS, "--speed", &pace_of_processes];
            let real = report(&[&["replay"][..], &requests, &[&*url, "--ignore-eos"]].concat(), folder.path());
            assert_eq!(real["requests"]["failed"], 0, "{real}");
            let figures = figures(&real, SPEEDUP);
            print_row(&format!("run {at} of {name}: {figures:.1?}"));
            figures
        };
        let real = means(&(0..RUNS).map(run).collect::<Vec<_>>());
        let (prefill, decode) = (prefill.to_string(), decode.to_string());
        let workers = match &*prefill {
            "0" => vec!["--workers", &*decode],
            _ => vec!["--prefill-workers", &*prefill, "--decode-workers", &*decode],
        };
        let device = ["--kv-capacity-tokens", KV_TOKENS, "--prefill-chunk-budget", STEP_TOKENS];
        let simulate = |seed: usize| {
            let (requests, seed) = ([&*trace, "--limit", REQUESTS, "--speed", &pace], seed.to_string());
            let args = [&["simulate"][..], &requests, &workers, &device, &["--seed", &seed]].concat();
            figures(&report(&args, folder.path()), 1.0)
        };
        let simulated = means(&(0..SEEDS).map(simulate).collect::<Vec<_>>());
        let ratios = [0, 1, 2, 3, 4].map(|at| simulated[at] / real[at]);
        for (what, row, digits) in [("processes", real, 1), ("simulated", simulated, 1), ("ratio", ratios, 3)] {
            let cells: Vec<String> = row.iter().map(|figure| format!("{figure:.digits$}")).collect();
            print_row(&format!("| {name} | {what} | {} |", cells.join(" | ")));
        }
        if (ratios[0] - 1.0).abs() > HIT_RATE_TOLERANCE || (ratios[1] - 1.0).abs() > TTFT_TOLERANCE {
            wrong.push(name);
        }
    }
    assert_eq!(wrong, Vec::<&str>::new(), "the simulation differs from the processes by more than the tolerances");
}
