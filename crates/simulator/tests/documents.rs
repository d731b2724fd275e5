//! Simulates questions about documents, asked in random order, on clusters with prefill workers.

mod support;

use std::time::Duration;
use support::{Figures, documents, figures};
use tandem_router::PrefillPlace;
use tandem_simulator::{RoutingRule, SimulatedCluster, SimulatedDevice, Size};

/// Returns the cluster of the documents benchmark. It has four prefill workers, each of which can cache 15 documents and computes 20,000
/// tokens/s.
fn cluster(capacity_blocks: u64, concurrency: usize, seed: u64) -> SimulatedCluster {
    let device = SimulatedDevice {
        capacity_tokens: capacity_blocks * 64,
        decode_step: Duration::from_millis(50),
        ..SimulatedDevice::default()
    };
    let size = Size::Split { prefill: 4, decode: 4 };
    let prefill = PrefillPlace::Remote;
    SimulatedCluster {
        device,
        block_tokens: 64,
        prefill,
        concurrency: Some(concurrency),
        seed,
        ..SimulatedCluster::new(RoutingRule::Tandem, size)
    }
}

fn blind(cluster: &SimulatedCluster) -> SimulatedCluster {
    SimulatedCluster { policy: RoutingRule::FewestRequests, ..cluster.clone() }
}

#[test]
fn documents_are_found_in_caches_and_load_is_balanced_at_any_concurrency() {
    // A prompt has 24 blocks. 23 of them belong to its document, and nine of ten requests can find the document cached.
    let possible = 0.9 * 23.0 / 24.0;
    for (concurrency, capacity_blocks) in [(1, 360), (8, 360), (16, 360), (32, 360), (8, 240)] {
        for seed in 1..=3 {
            let found = figures(&cluster(capacity_blocks, concurrency, seed), &documents(40, 23, 10, seed));
            let case = format!("{concurrency} at a time, {capacity_blocks} blocks, seed {seed}: {found:?}");
            assert!(found.hit_rate > 0.98 * possible, "{case}");
            // A worker computes about ten documents, so three more documents increase its computed tokens by a third.
            assert!(found.prompts_max <= 1.15 && found.computed_max <= 1.35, "{case}");
        }
    }
}

#[test]
fn router_gets_more_cache_hits_than_fewest_requests_if_documents_exceed_all_caches() {
    let (cluster, prompts) = (cluster(160, 8, 1), documents(40, 23, 10, 1));
    let (aware, blind) = (figures(&cluster, &prompts), figures(&blind(&cluster), &prompts));
    assert!(aware.hit_rate > 3.0 * blind.hit_rate && aware.ttft_mean_s < 0.8 * blind.ttft_mean_s, "{aware:?} {blind:?}");
    assert!(aware.prompts_max < 1.2 && aware.computed_max < 1.2, "{aware:?}");
}

#[test]
fn prompts_without_common_prefix_wait_no_longer_than_with_fewest_requests() {
    let (cluster, prompts) = (cluster(360, 16, 1), documents(400, 23, 1, 7));
    let (aware, blind) = (figures(&cluster, &prompts), figures(&blind(&cluster), &prompts));
    assert!(aware.hit_rate == 0.0 && aware.computed_max < 1.02, "{aware:?}");
    assert!(aware.ttft_mean_s < 1.02 * blind.ttft_mean_s, "{aware:?} {blind:?}");
}

/// All requests have the first block in common, and most have no other common block. So overlap must not outweigh load.
#[test]
fn recorded_conversations_wait_less_than_with_other_rules_and_load_is_balanced() {
    let Some(prompts) = support::recorded(1_500, 1.5, 1) else { return };
    let device =
        SimulatedDevice { capacity_tokens: 2_048 * 512, prefill_tokens_per_second: 20_000.0, ..SimulatedDevice::default() };
    let size = Size::Split { prefill: 8, decode: 8 };
    let cluster =
        |policy| SimulatedCluster { device, prefill: PrefillPlace::Remote, seed: 1, ..SimulatedCluster::new(policy, size) };
    let [aware, fewest, round_robin]: [Figures; 3] = [RoutingRule::Tandem, RoutingRule::FewestRequests, RoutingRule::RoundRobin]
        .map(|policy| figures(&cluster(policy), &prompts));
    let all = format!("{aware:?} {fewest:?} {round_robin:?}");
    assert!(aware.hit_rate > 2.0 * fewest.hit_rate.max(round_robin.hit_rate), "{all}");
    assert!(aware.ttft_mean_s < fewest.ttft_mean_s && aware.ttft_mean_s < round_robin.ttft_mean_s, "{all}");
    assert!(aware.ttft_p99_s < fewest.ttft_p99_s && aware.ttft_p99_s < round_robin.ttft_p99_s, "{all}");
    assert!(aware.prompts_max < 1.2 && aware.computed_max < 1.1, "{all}");
}
