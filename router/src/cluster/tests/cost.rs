//! Measures the cost of a whole `Route` call, without gRPC.

use super::*;
use std::io::Write;
use tokio::time::Instant;

/// The number of blocks of a prompt: 12,000 tokens in blocks of 16.
const PROMPT_BLOCKS: u64 = 750;
/// The number of requests in a round. A round is short, so that most rounds are not interrupted by other processes.
const ROUND: usize = 2;
/// The number of rounds in a turn. The first ones are not measured: they read the cluster into the processor's cache.
const ROUNDS: usize = 120;
const WARM_UP: usize = 20;
const TURNS: usize = 9;

/// Returns a cluster. A third of the workers have cached the first half of every request's prompt. Each worker has some other prompts in its
/// cache, and up to 500 of them have a request in their queue.
fn busy(workers: usize) -> Scenario {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, workers);
    let ids: Vec<MemberId> = scenario.state.members.iter().map(|(id, _)| *id).collect();
    for (worker, id) in ids.iter().enumerate() {
        for name in 0..10 {
            let (shared, len) = (PROMPT_BLOCKS / 2, PROMPT_BLOCKS);
            let name = (worker as u64 / 3) << 8 | name;
            let sequence_hashes = hashes(name, shared * u64::from(worker % 3 == 0), len).to_vec();
            let chain = StoredChain { parent: None, sequence_hashes };
            let events = vec![KvEvent { event_id: 1, change: Change::Stored(chain) }];
            let load = Load {
                running_sequences: name as u32 % 5,
                prefill_tokens_per_second: 9_000.0 + name as f64,
                prefill_fixed_ms: 3.0,
                prefill_measurements: 1,
                decode_step_ms: 20.0,
                ..Default::default()
            };
            scenario.state.apply(*id, KvBatch { events, load, ..Default::default() }, ReportedStats::default());
        }
    }
    for name in 0..workers.min(500) as u64 {
        let request = request(&mut scenario, name);
        scenario.place(&request);
    }
    scenario
}

fn request(scenario: &mut Scenario, name: u64) -> PlacementRequest {
    scenario.request(PROMPT_BLOCKS as u32 * BLOCK, hashes(1 << 20 | name, PROMPT_BLOCKS / 2, PROMPT_BLOCKS))
}

/// Places requests, reports their first tokens and ends them. Returns the microseconds for each.
fn round(scenario: &mut Scenario, number: usize) -> f64 {
    let name = |at: usize| 1_000 + (number * ROUND + at) as u64;
    let requests: Vec<_> = (0..ROUND).map(|at| request(scenario, name(at))).collect();
    let started = Instant::now();
    for request in &requests {
        let (booking, _) = scenario.place(request);
        scenario.state.on_first_token(booking);
        scenario.state.on_prefilled(booking, Some(0));
        scenario.state.release(booking);
    }
    started.elapsed().as_secs_f64() * 1e6 / ROUND as f64
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Prints the cost for several numbers of workers, and its ratio to that for the smallest number in the same turn. The sizes take turns.
#[test]
#[ignore = "it is a measurement: run it alone, with optimisation"]
fn measures_the_cost_of_a_route_call() {
    let sizes = [8, 64, 512, 2_048];
    let mut scenarios = sizes.map(busy);
    let mut turns = sizes.map(|_| Vec::new());
    for turn in 0..TURNS {
        for (scenario, turns) in scenarios.iter_mut().zip(&mut turns) {
            let rounds = (0..ROUNDS).map(|number| round(scenario, turn * ROUNDS + number));
            turns.push(median(rounds.skip(WARM_UP).collect()));
        }
    }
    let first = turns[0].clone();
    for (workers, turns) in sizes.into_iter().zip(turns) {
        let ratio = median(turns.iter().zip(&first).map(|(one, first)| one / first).collect());
        let us = median(turns);
        let line = format!("{workers} workers: {us:.1} us a request, {ratio:.1} times as long as with {}\n", sizes[0]);
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is writable");
    }
}
