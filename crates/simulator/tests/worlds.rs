//! Simulations of conversations on eight workers with modelled engines: with long answers, small caches, a slow worker, and
//! mixed roles. The rules of other routers get the same input; with this router's policy, requests must not wait longer
//! than with the best of them. Run with `--nocapture` to see the figures.

mod support;

use support::{Figures, figures, print, recorded, traffic};
use tandem_router::{Costs, PrefillPlace, WorkerRole};
use tandem_simulator::{RoutingRule, SimulatedCluster, SimulatedDevice, SimulatedRequest, Size};

/// The rules of other routers, with which this router's own rule is compared.
const OTHER_POLICIES: [RoutingRule; 5] =
    [RoutingRule::Dynamo, RoutingRule::Sglang, RoutingRule::LlmD, RoutingRule::FewestRequests, RoutingRule::RoundRobin];

/// A cluster and the conversations that it serves.
struct Case {
    name: &'static str,
    world: SimulatedCluster,
    /// Two factors: how many times faster than recorded the requests arrive, and how many times longer than recorded their answers are.
    faster: f64,
    answers: u64,
}

/// Returns a cluster of eight equal mixed workers with 512 k tokens of KV each.
fn world() -> SimulatedCluster {
    SimulatedCluster { seed: 1, ..SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(8)) }
}

fn with_capacity(capacity_blocks: u64) -> SimulatedCluster {
    let device = SimulatedDevice { capacity_tokens: capacity_blocks * 512, ..SimulatedDevice::default() };
    SimulatedCluster { device, ..world() }
}

/// Returns the cluster with one worker that is four times slower than the others.
fn one_slow_worker() -> SimulatedCluster {
    let mut cluster = world();
    cluster.workers[0].slower = 4.0;
    cluster
}

/// Returns the cluster of eight workers, `prefill` of which are prefill workers for the others.
fn mixed_roles(prefill: usize) -> SimulatedCluster {
    world().with_size(Size::Split { prefill, decode: 8 - prefill })
}

fn cases() -> Vec<Case> {
    let case = |name, world, faster, answers| Case { name, world, faster, answers };
    vec![
        case("answers as recorded, 1 M tokens of KV", with_capacity(2_048), 1.5, 1),
        case("answers x 8", world(), 1.5, 8),
        case("answers x 8, near the limit", world(), 2.0, 8),
        case("answers x 8, 256 k tokens of KV", with_capacity(512), 1.2, 8),
        case("answers x 4, 200 k tokens of KV", with_capacity(400), 1.5, 4),
        case("one worker four times slower", one_slow_worker(), 1.5, 8),
        case("four of eight prefill only, answers x 4", mixed_roles(4), 1.5, 4),
    ]
}

/// The seeds of the tie-break. When a cluster is almost overloaded, the figures of single runs differ by a fifth.
const SEEDS: std::ops::RangeInclusive<u64> = 1..=5;

/// Returns the median of each figure over several seeds of the tie-break.
fn medians(world: &SimulatedCluster, prompts: &[SimulatedRequest]) -> Figures {
    let all: Vec<Figures> = SEEDS.map(|seed| figures(&SimulatedCluster { seed, ..world.clone() }, prompts)).collect();
    let median = |of: fn(&Figures) -> f64| {
        let mut values: Vec<f64> = all.iter().map(of).collect();
        values.sort_by(f64::total_cmp);
        values[values.len() / 2]
    };
    Figures {
        hit_rate: median(|figures| figures.hit_rate),
        ttft_mean_s: median(|figures| figures.ttft_mean_s),
        ttft_p99_s: median(|figures| figures.ttft_p99_s),
        itl_mean_ms: median(|figures| figures.itl_mean_ms),
        itl_p99_ms: median(|figures| figures.itl_p99_ms),
        end_mean_s: median(|figures| figures.end_mean_s),
        preemptions: median(|figures| figures.preemptions as f64) as u64,
        computed_max: median(|figures| figures.computed_max),
        prompts_max: median(|figures| figures.prompts_max),
    }
}

/// Returns the figures with this router's rule, and the best value of each figure with any other rule. Prints the figures of all rules.
fn compare(what: &str, world: &SimulatedCluster, prompts: &[SimulatedRequest]) -> (Figures, Figures) {
    let ours = medians(world, prompts);
    print(&format!("{what}, Tandem"), &ours);
    let mut best = Figures { ttft_mean_s: f64::INFINITY, ttft_p99_s: f64::INFINITY, end_mean_s: f64::INFINITY, ..ours };
    for policy in OTHER_POLICIES {
        let outcome = medians(&SimulatedCluster { policy, ..world.clone() }, prompts);
        print(&format!("{what}, {}", policy.name()), &outcome);
        best.ttft_mean_s = best.ttft_mean_s.min(outcome.ttft_mean_s);
        best.ttft_p99_s = best.ttft_p99_s.min(outcome.ttft_p99_s);
        best.end_mean_s = best.end_mean_s.min(outcome.end_mean_s);
    }
    (ours, best)
}

/// Asserts that the waits with this router's rule are at most these multiples of the shortest waits with any other rule.
fn assert_no_rule_is_better(Case { name, world, .. }: &Case, prompts: &[SimulatedRequest], mean_max: f64, p99_max: f64) {
    let (ours, best) = compare(name, world, prompts);
    assert!(ours.ttft_mean_s <= mean_max * best.ttft_mean_s, "{name}: {ours:?} {best:?}");
    assert!(ours.ttft_p99_s <= p99_max * best.ttft_p99_s, "{name}: {ours:?} {best:?}");
    // If there are prefill workers, the other rules never prefill on a decode worker. So with these rules prefills delay no running answer,
    // and first tokens wait longer.
    if world.workers.iter().all(|worker| worker.role == WorkerRole::Decode) {
        assert!(ours.end_mean_s <= 1.05 * best.end_mean_s, "{name}: {ours:?} {best:?}");
    }
}

#[test]
fn cost_policy_has_the_shortest_waits_on_made_up_conversations() {
    for case in cases() {
        let prompts = traffic::conversations(500, case.faster, case.answers as f64, 1);
        // The 99th percentile of 500 requests is the fifth-longest wait, so it varies.
        assert_no_rule_is_better(&case, &prompts, 1.0, 1.25);
    }
}

#[test]
fn cost_policy_has_the_shortest_waits_on_recorded_conversations() {
    for case in cases() {
        let Some(prompts) = recorded(1_500, case.faster, case.answers) else { return };
        // The cluster is almost overloaded. The mean is 2% above the mean with llm-d's rule, whose p99 is 10% higher.
        assert_no_rule_is_better(&case, &prompts, 1.03, 1.02);
    }
}

/// Prefill workers keep prompts from delaying answers. A decode worker prefills only if this delays the answers that run on it less than it saves.
#[test]
fn prompts_are_prefilled_on_decode_workers_only_where_answers_are_delayed_little() {
    for (prefill, decode, faster) in [(6, 2, 1.0), (6, 3, 1.0), (4, 4, 1.0), (6, 2, 2.0)] {
        let prompts = traffic::conversations(1_000, faster, 1.0, 1);
        let auto = world().with_size(Size::Split { prefill, decode });
        let remote = SimulatedCluster { prefill: PrefillPlace::Remote, ..auto.clone() };
        let what = format!("{prefill} prefill, {decode} decode, {faster} times as fast");
        let (auto, remote) = (medians(&auto, &prompts), medians(&remote, &prompts));
        print(&format!("{what}, auto"), &auto);
        print(&format!("{what}, remote"), &remote);
        assert!(auto.end_mean_s <= 1.03 * remote.end_mean_s, "{what}: {auto:?} {remote:?}");
        assert!(auto.ttft_mean_s <= 1.03 * remote.ttft_mean_s, "{what}: {auto:?} {remote:?}");
        assert!(auto.itl_p99_ms <= 1.5 * remote.itl_p99_ms, "{what}: {auto:?} {remote:?}");
    }
}

/// If the prefill workers are overloaded, decode workers prefill as well, although this delays answers.
#[test]
fn decode_workers_help_saturated_prefill_workers() {
    let prompts = traffic::conversations(1_000, 3.0, 1.0, 1);
    let auto = world().with_size(Size::Split { prefill: 2, decode: 6 });
    let remote = SimulatedCluster { prefill: PrefillPlace::Remote, ..auto.clone() };
    let (auto, remote) = (figures(&auto, &prompts), figures(&remote, &prompts));
    assert!(auto.ttft_mean_s < 0.2 * remote.ttft_mean_s && auto.end_mean_s < 0.5 * remote.end_mean_s, "{auto:?} {remote:?}");
}

/// A higher preference for answers lengthens the waits for first tokens and shortens the times between tokens.
#[test]
fn answer_preference_delays_first_tokens_and_speeds_up_answers() {
    let prompts = traffic::conversations(1_000, 3.0, 1.0, 1);
    let with = |answer_preference| {
        let costs = Costs { answer_preference, ..Costs::default() };
        let found = medians(&SimulatedCluster { costs, ..mixed_roles(4) }, &prompts);
        print(&format!("a millisecond of an answer counts {answer_preference}"), &found);
        found
    };
    let (first, answers) = (with(0.0), with(2.0));
    assert!(
        first.ttft_mean_s < 0.9 * answers.ttft_mean_s && first.end_mean_s > 1.1 * answers.end_mean_s,
        "{first:?} {answers:?}"
    );
}
