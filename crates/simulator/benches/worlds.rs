//! Simulates clusters under many loads, with the routing rules of this router and of other routers, and prints the figures of each: times in
//! milliseconds, and cache hits in percent. Each figure is the median over several seeds of the tie-break. docs/routing.md shows a run.
//!
//! ```sh
//! TANDEM_TRACE=conversation_trace.jsonl cargo bench -p tandem-simulator --bench worlds -- [PARTS OF NAMES]
//! ```
#![expect(clippy::print_stdout, reason = "the benchmark prints figures")]

#[path = "../tests/support/mod.rs"]
mod support;

use std::{
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};
use support::{Figures, Lcg, figures, recorded, traffic};
use tandem_router::PrefillPlace;
use tandem_simulator::{Faults, RandomLosses, RoutingRule, SimulatedCluster, SimulatedDevice, SimulatedRequest, Size};

/// The seeds of the tie-break. The printed figures are medians over them.
const SEEDS: [u64; 3] = [1, 2, 3];

struct World {
    name: String,
    cluster: SimulatedCluster,
    requests: Vec<SimulatedRequest>,
}

/// A routing rule and, for this router's own rule, the workers on which it may prefill.
type Rule = (&'static str, RoutingRule, PrefillPlace);

const RULES: [Rule; 6] = [
    ("auto", RoutingRule::Tandem, PrefillPlace::Auto),
    ("remote", RoutingRule::Tandem, PrefillPlace::Remote),
    ("dynamo", RoutingRule::Dynamo, PrefillPlace::Remote),
    ("llm-d", RoutingRule::LlmD, PrefillPlace::Remote),
    ("sglang", RoutingRule::Sglang, PrefillPlace::Remote),
    ("fewest", RoutingRule::FewestRequests, PrefillPlace::Remote),
];

fn mixed(workers: usize) -> Size {
    Size::Mixed(workers)
}

fn split(prefill: usize, decode: usize) -> Size {
    Size::Split { prefill, decode }
}

fn cluster(size: Size) -> SimulatedCluster {
    SimulatedCluster::new(RoutingRule::Tandem, size)
}

fn with_kv(size: Size, capacity_tokens: u64) -> SimulatedCluster {
    SimulatedCluster { device: SimulatedDevice { capacity_tokens, ..SimulatedDevice::default() }, ..cluster(size) }
}

fn slow(size: Size) -> SimulatedCluster {
    let mut cluster = cluster(size);
    cluster.workers[0].slower = 4.0;
    cluster
}

fn lossy(size: Size) -> SimulatedCluster {
    let random = Some(RandomLosses { every: Duration::from_secs(60), lasts: Duration::from_secs(20) });
    SimulatedCluster { faults: Faults { random, ..Faults::default() }, ..cluster(size) }
}

/// Returns sessions of agents with 40 requests each. Each prompt repeats the previous one with the answer to it and the result of a tool, for
/// which the agent waits some seconds. All sessions share a long system prompt.
fn agents(sessions: u64, per_second: f64) -> Vec<SimulatedRequest> {
    let mut random = Lcg(7);
    let (mut requests, mut began, mut next) = (Vec::new(), 0.0, 1_000_u64);
    for _ in 0..sessions {
        began += -(((random.below(1 << 20) + 1) as f64) / f64::from(1 << 20)).ln() / per_second;
        let (mut at, mut blocks) = (began, (0..24).collect::<Vec<u64>>());
        for _ in 0..40 {
            let added = 1 + random.below(4);
            blocks.extend(next..next + added as u64);
            next += added as u64;
            requests.push(SimulatedRequest {
                at: Duration::from_secs_f64(at),
                prompt_tokens: (blocks.len() * 512 + 100) as u32,
                blocks: blocks.clone().into(),
                answer_tokens: 40 + random.below(300) as u64,
                max_tokens: 0,
            });
            at += 3.0 + random.below(8_000) as f64 / 1e3;
        }
    }
    requests.sort_by_key(|request| request.at);
    requests
}

/// Returns questions about documents of 20,000 tokens, which all clients share.
fn documents(count: usize, questions: usize, per_second: f64) -> Vec<SimulatedRequest> {
    let mut random = Lcg(11);
    let one = |number: usize, random: &mut Lcg| {
        let document = random.below(count) as u64;
        SimulatedRequest {
            at: Duration::from_secs_f64(number as f64 / per_second),
            prompt_tokens: 40 * 512 + 200,
            blocks: (0..40).map(|block| document << 16 | block).collect(),
            answer_tokens: 100 + random.below(300) as u64,
            max_tokens: 0,
        }
    };
    (0..questions).map(|number| one(number, &mut random)).collect()
}

/// Returns prompts without common blocks: nine of ten have about 500 tokens, the others 60,000.
fn long_and_short(count: usize, per_second: f64) -> Vec<SimulatedRequest> {
    let mut random = Lcg(13);
    let one = |number: usize, random: &mut Lcg| {
        let blocks = if random.below(10) == 0 { 80 + random.below(80) } else { random.below(3) } as u64;
        let first = (number as u64 + 1) << 20;
        SimulatedRequest {
            at: Duration::from_secs_f64(number as f64 / per_second),
            prompt_tokens: (blocks * 512) as u32 + 1 + random.below(511) as u32,
            blocks: (first..first + blocks).collect(),
            answer_tokens: 50 + random.below(500) as u64,
            max_tokens: 0,
        }
    };
    (0..count).map(|number| one(number, &mut random)).collect()
}

/// Returns the first `count` recorded conversations; if there is no recording, made-up conversations.
fn conversations(count: usize, faster: f64, answers: u64) -> Vec<SimulatedRequest> {
    recorded(count as u64, faster, answers).unwrap_or_else(|| traffic::conversations(count, faster, answers as f64, 1))
}

fn worlds() -> Vec<World> {
    let mut worlds = Vec::new();
    let mut add = |name: &str, cluster: SimulatedCluster, requests: Vec<SimulatedRequest>| {
        worlds.push(World { name: name.to_owned(), cluster, requests });
    };
    for pace in [0.5, 1.0, 2.0, 3.0, 4.0] {
        add(&format!("8 mixed, pace {pace}"), cluster(mixed(8)), conversations(2_500, pace, 1));
    }
    add("4 mixed, pace 1", cluster(mixed(4)), conversations(2_000, 1.0, 1));
    add("16 mixed, pace 4", cluster(mixed(16)), conversations(4_000, 4.0, 1));
    add("64 mixed, pace 16", cluster(mixed(64)), conversations(12_000, 16.0, 1));
    for (prefill, decode) in [(4, 4), (6, 3), (6, 2), (5, 3)] {
        for pace in [1.0, 2.0] {
            add(&format!("{prefill} + {decode}, pace {pace}"), cluster(split(prefill, decode)), conversations(2_500, pace, 1));
        }
    }
    add("48 + 16, pace 12", cluster(split(48, 16)), conversations(8_000, 12.0, 1));
    add("4 + 4, pace 3", cluster(split(4, 4)), conversations(2_500, 3.0, 1));
    for (name, size) in [("8 mixed", mixed(8)), ("4 + 4", split(4, 4)), ("6 + 2", split(6, 2))] {
        add(&format!("{name}, small KV"), with_kv(size, 200_000), conversations(2_000, 1.0, 1));
        let pace = if name == "6 + 2" { 0.5 } else { 1.0 };
        add(&format!("{name}, answers x 8"), cluster(size), conversations(2_000, pace, 8));
        add(&format!("{name}, one slow worker"), slow(size), conversations(2_000, 1.5, 1));
        add(&format!("{name}, lost workers"), lossy(size), conversations(2_000, 1.0, 1));
        add(&format!("{name}, agents"), cluster(size), agents(80, 0.25));
        add(&format!("{name}, documents"), cluster(size), documents(120, 2_000, 6.0));
        add(&format!("{name}, long and short"), cluster(size), long_and_short(3_000, 12.0));
    }
    worlds
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Returns the columns of the table: the mean and 99th percentile of the TTFT, the mean and 99th percentile of the ITL, the mean time to the
/// last token, and the cache hits.
fn columns(figures: &Figures) -> [f64; 6] {
    let &Figures { ttft_mean_s, ttft_p99_s, itl_mean_ms, itl_p99_ms, end_mean_s, hit_rate, .. } = figures;
    [ttft_mean_s * 1e3, ttft_p99_s * 1e3, itl_mean_ms, itl_p99_ms, end_mean_s * 1e3, hit_rate * 1e2]
}

fn main() {
    let filter: Vec<String> = std::env::args().skip(1).filter(|argument| !argument.starts_with('-')).collect();
    let mut worlds = worlds();
    worlds.retain(|world| filter.is_empty() || filter.iter().any(|part| world.name.contains(part)));
    let is_split = |world: &World| world.cluster.workers.iter().any(|worker| worker.role == tandem_router::WorkerRole::Prefill);
    let mut jobs = Vec::new();
    for (at, world) in worlds.iter().enumerate() {
        for (rule, _) in RULES.iter().enumerate().filter(|(_, rule)| rule.0 != "remote" || is_split(world)) {
            jobs.extend(SEEDS.map(|seed| (at, rule, seed)));
        }
    }
    let (next, done) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    std::thread::scope(|scope| {
        for _ in 0..std::thread::available_parallelism().map_or(1, |threads| threads.get()) {
            scope.spawn(|| {
                while let Some(&(at, rule, seed)) = jobs.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let (_, policy, prefill) = RULES[rule];
                    let cluster = SimulatedCluster { policy, prefill, seed, ..worlds[at].cluster.clone() };
                    let found = figures(&cluster, &worlds[at].requests);
                    done.lock().expect("no thread panics with it").push(((at, rule), found));
                }
            });
        }
    });
    let done = done.into_inner().expect("no thread panics with it");
    println!(
        "{:<24} {:<7} {}",
        "world",
        "rule",
        ["TTFT", "p99", "ITL", "p99", "E2E", "hits"].map(|name| format!("{name:>9}")).join(" ")
    );
    for (at, world) in worlds.iter().enumerate() {
        for (rule, (name, ..)) in RULES.iter().enumerate() {
            let of = done.iter().filter(|(key, _)| *key == (at, rule));
            let of: Vec<[f64; 6]> = of.map(|(_, figures)| columns(figures)).collect();
            if !of.is_empty() {
                let values = (0..6).map(|column| format!("{:9.2}", median(of.iter().map(|values| values[column]).collect())));
                println!("{:<24} {name:<7} {}", world.name, values.collect::<Vec<_>>().join(" "));
            }
        }
    }
}
