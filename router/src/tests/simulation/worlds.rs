//! Simulations of conversations on eight workers with modelled engines: with long answers, small caches, a slow worker, mixed roles, and
//! answers whose limits are known. The rules of other routers get the same input; with this router's policy, requests must not wait longer
//! than with the best of them. Run with `--nocapture` to see the figures.

use super::{
    Lcg, Prompt,
    engines::{Outcome, World, simulate},
    rules::{OTHER_RULES, Rule},
    skipped, trace, traffic,
};
use crate::settings::{Costs, PrefillPlace};
use tandem_proto::v1::worker_info::Role;

/// A cluster and its traffic.
struct Case {
    name: &'static str,
    world: World,
    /// How many times as fast as recorded requests arrive, and how many times as long their answers are.
    faster: f64,
    answers: u64,
}

/// Returns eight equal workers that prefill and decode, with 512 k tokens of KV each.
fn world() -> World {
    World {
        rule: Rule::Tandem,
        prefill: PrefillPlace::Local,
        devices: vec![(Role::Decode, 1.0); 8],
        capacity_blocks: 1_024,
        costs: Costs::default(),
        seed: 1,
    }
}

fn with_capacity(capacity_blocks: u32) -> World {
    World { capacity_blocks, ..world() }
}

/// Returns the cluster with one worker that is four times slower than the others.
fn one_slow_worker() -> World {
    let mut devices = world().devices;
    devices[0].1 = 4.0;
    World { devices, ..world() }
}

/// Returns the cluster in which this number of the eight workers only prefill, for the others.
fn mixed_roles(prefill_only: usize) -> World {
    let mut devices = world().devices;
    devices[..prefill_only].fill((Role::Prefill, 1.0));
    World { devices, prefill: PrefillPlace::Auto, ..world() }
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

/// Returns the first recorded conversations, or `None` if the recording is missing.
fn recorded(faster: f64, answers: u64) -> Option<Vec<Prompt>> {
    let mut prompts = trace(1_500, faster)?;
    prompts.iter_mut().for_each(|prompt| prompt.answer_tokens = prompt.answer_tokens.max(1) * answers);
    Some(prompts)
}

fn print(what: &str, outcome: &Outcome) {
    let Outcome { hit_rate, ttft_mean_s, ttft_p99_s, end_mean_s, preemptions } = outcome;
    let line = format!(
        "{what}: found {hit_rate:.3}, first token {ttft_mean_s:.2} s, p99 {ttft_p99_s:.1} s, end {end_mean_s:.1} s, preempted {preemptions}\n"
    );
    std::io::Write::write_all(&mut std::io::stdout(), line.as_bytes()).expect("stdout is writable");
}

/// Returns the outcome with this router's policy and the lowest values of the other rules. Prints all of them.
fn compare(what: &str, world: &World, prompts: &[Prompt]) -> (Outcome, Outcome) {
    let ours = simulate(world.clone(), prompts);
    print(&format!("{what}, Tandem"), &ours);
    let has_prefill_workers = world.devices.iter().any(|(role, _)| *role == Role::Prefill);
    let prefill = if has_prefill_workers { PrefillPlace::Remote } else { world.prefill };
    let mut best = Outcome { ttft_mean_s: f64::INFINITY, ttft_p99_s: f64::INFINITY, end_mean_s: f64::INFINITY, ..ours };
    for rule in OTHER_RULES {
        let outcome = simulate(World { rule, prefill, ..world.clone() }, prompts);
        print(&format!("{what}, {rule:?}"), &outcome);
        best.ttft_mean_s = best.ttft_mean_s.min(outcome.ttft_mean_s);
        best.ttft_p99_s = best.ttft_p99_s.min(outcome.ttft_p99_s);
        best.end_mean_s = best.end_mean_s.min(outcome.end_mean_s);
    }
    (ours, best)
}

/// Asserts that requests wait no longer with this router's policy than with the best other rule, up to these factors.
fn assert_no_rule_is_better(Case { name, world, .. }: &Case, prompts: &[Prompt], mean_max: f64, p99_max: f64) {
    let (ours, best) = compare(name, world, prompts);
    assert!(ours.ttft_mean_s <= mean_max * best.ttft_mean_s, "{name}: {ours:?} {best:?}");
    assert!(ours.ttft_p99_s <= p99_max * best.ttft_p99_s, "{name}: {ours:?} {best:?}");
    // With prefill workers the other rules never prefill on a decode worker. So they delay no running answer, and first tokens wait longer.
    if world.prefill == PrefillPlace::Local {
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
        let Some(prompts) = recorded(case.faster, case.answers) else { return skipped() };
        assert_no_rule_is_better(&case, &prompts, 1.0, 1.02);
    }
}

/// If every new token were charged once for each running sequence, one worker after the other would receive no more prompts, while the
/// queues of the other workers grew.
#[test]
fn interference_charged_at_a_tenth_keeps_waits_short_near_the_limit() {
    let Some(prompts) = recorded(2.0, 8) else { return skipped() };
    let ours = simulate(world(), &prompts);
    for (interference, least) in [(1.0, 2.0), (0.3, 1.2), (0.03, 0.8), (0.0, 0.8)] {
        let other = simulate(World { costs: Costs { interference, ..Costs::default() }, ..world() }, &prompts);
        print(&format!("a running answer counts {interference}"), &other);
        assert!(other.ttft_p99_s >= least * ours.ttft_p99_s, "{interference}: {other:?} {ours:?}");
    }
}

/// Two of the eight workers only prefill, for the other six. A prompt is prefilled there when this is estimated to be faster.
#[test]
fn requests_wait_less_with_mixed_roles_if_interference_is_charged_at_a_tenth() {
    let Some(prompts) = recorded(1.5, 8) else { return skipped() };
    let ours = simulate(mixed_roles(2), &prompts);
    print("two of eight prefill only", &ours);
    let charged = simulate(World { costs: Costs { interference: 1.0, ..Costs::default() }, ..mixed_roles(2) }, &prompts);
    print("two of eight prefill only, a running answer counts 1", &charged);
    assert!(ours.ttft_p99_s < 0.7 * charged.ttft_p99_s && ours.ttft_mean_s < 0.7 * charged.ttft_mean_s, "{ours:?} {charged:?}");
}

/// Half of the requests want long answers, the others at most 32 tokens. If their limits are known, the router knows which workers will
/// lack blocks.
#[test]
fn requests_wait_less_if_limits_of_answers_are_known() {
    let mut prompts = traffic::conversations(800, 1.6, 1.0, 1);
    for (number, prompt) in prompts.iter_mut().enumerate() {
        let is_short = Lcg(number as u64).below(1 << 10) < 1 << 9;
        (prompt.answer_tokens, prompt.max_tokens) =
            if is_short { (prompt.answer_tokens.min(32), 32) } else { (prompt.answer_tokens * 16, 16_384) };
    }
    let known = simulate(with_capacity(512), &prompts);
    print("limits are known", &known);
    prompts.iter_mut().for_each(|prompt| prompt.max_tokens = 0);
    let unknown = simulate(with_capacity(512), &prompts);
    print("limits are not known", &unknown);
    assert!(known.ttft_mean_s <= unknown.ttft_mean_s, "{known:?} {unknown:?}");
}
