//! Measures the cost of a whole `Route` call, without gRPC.

use super::*;
use std::io::Write;
use tokio::time::Instant;

/// The number of blocks of a prompt: 12,000 tokens in blocks of 16.
const PROMPT_BLOCKS: u64 = 750;

/// Each round places a request, reports its first token and ends it. A third of the workers have cached the first half of the request's
/// prompt. Each worker has some other prompts in its cache and some requests in its queue.
#[test]
#[ignore = "it is a measurement: run it alone, with optimisation"]
fn measures_the_cost_of_a_route_call() {
    for workers in [8, 64, 512, 2_048] {
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
        let mut new_request = |name: u64| {
            let prompt = hashes(1 << 20 | name, PROMPT_BLOCKS / 2, PROMPT_BLOCKS);
            scenario.request(PROMPT_BLOCKS as u32 * BLOCK, prompt)
        };
        let requests: Vec<PlacementRequest> = (0..2_000).map(&mut new_request).collect();
        let (prefilling, timed) = requests.split_at(workers.min(500));
        for request in prefilling {
            scenario.place(request);
        }
        let mut times: Vec<f64> = Vec::new();
        for requests in timed.chunks(100) {
            let started = Instant::now();
            for request in requests {
                let (booking, _) = scenario.place(request);
                scenario.state.on_first_token(booking);
                scenario.state.on_prefilled(booking, Some(0));
                scenario.state.release(booking);
            }
            times.push(started.elapsed().as_secs_f64() * 1e6 / requests.len() as f64);
        }
        times.sort_by(f64::total_cmp);
        // The time to determine why tokens are not cached. Half of each of these prompts is cached on some workers.
        let mut facts: Vec<f64> = timed
            .chunks(20)
            .map(|requests| {
                let preview =
                    |request| scenario.state.placer.preview(&scenario.state.members, request).expect("a worker is eligible");
                let decisions: Vec<_> = requests.iter().map(preview).collect();
                let (now, started) = (scenario.state.members.now(), Instant::now());
                for decision in &decisions {
                    let choice = decision.choice.expect("a worker is eligible");
                    std::hint::black_box(crate::cluster::prefix::anonymous(&decision.facts(
                        &scenario.state.members,
                        choice,
                        0,
                        now,
                    )));
                }
                started.elapsed().as_secs_f64() * 1e6 / requests.len() as f64
            })
            .collect();
        facts.sort_by(f64::total_cmp);
        let explained = facts[facts.len() / 2];
        let line = format!(
            "{workers} workers: {:.1} us a request (best {:.1}), of which {explained:.2} us explain it\n",
            times[times.len() / 2],
            times[0]
        );
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is writable");
    }
}
