//! Simulations of the recorded conversations on eight workers with modelled engines: with long answers, small caches, a slow worker, and
//! mixed roles. The rules of other routers get the same input; with this router's policy, requests must not wait longer than with the best
//! of them. Run with `--nocapture` to see the figures.

use super::{
    Prompt,
    engines::{Outcome, World, simulate},
    rules::{OTHER_RULES, Rule},
    skipped, trace,
};
use crate::settings::{Costs, PrefillPlace};
use tandem_proto::v1::worker_info::Role;

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

/// Returns the first recorded conversations. They arrive `faster` times as fast as recorded, and their answers are `answers` times as long.
/// `None` if the recording is missing.
fn conversations(faster: f64, answers: u64) -> Option<Vec<Prompt>> {
    let mut prompts = trace(1_500, faster)?;
    prompts.iter_mut().for_each(|prompt| prompt.answer_tokens = prompt.answer_tokens.max(1) * answers);
    Some(prompts)
}

fn print(what: &str, outcome: &Outcome) -> Result<(), std::io::Error> {
    let Outcome { hit_rate, ttft_mean_s, ttft_p99_s, end_mean_s, preemptions } = outcome;
    std::io::Write::write_all(
        &mut std::io::stdout(),
        format!("{what}: found {hit_rate:.3}, first token {ttft_mean_s:.2} s, p99 {ttft_p99_s:.1} s, end {end_mean_s:.1} s, preempted {preemptions}\n").as_bytes(),
    )
}

/// Asserts that requests wait no longer with this router's rule than with the best other rule at the 99th percentile, and at most 5% longer
/// on average.
fn assert_no_rule_is_better(what: &str, world: World, prompts: &[Prompt]) -> Outcome {
    let ours = simulate(world.clone(), prompts);
    print(&format!("{what}, Tandem"), &ours).expect("stdout is writable");
    let others = OTHER_RULES.map(|rule| {
        let outcome = simulate(World { rule, ..world.clone() }, prompts);
        print(&format!("{what}, {rule:?}"), &outcome).expect("stdout is writable");
        outcome
    });
    let best = |of: fn(&Outcome) -> f64| others.iter().map(of).fold(f64::INFINITY, f64::min);
    assert!(ours.ttft_p99_s <= best(|outcome| outcome.ttft_p99_s), "{what}: {ours:?} {others:?}");
    assert!(ours.ttft_mean_s <= 1.05 * best(|outcome| outcome.ttft_mean_s), "{what}: {ours:?} {others:?}");
    ours
}

/// If every new token were charged once for each running sequence, and blocks in use were not charged, one worker after the other would
/// receive no more prompts, while the queues of the other workers grew.
#[test]
fn cost_policy_has_the_shortest_waits_with_long_answers() {
    let Some(prompts) = conversations(1.5, 8) else { return skipped() };
    assert_no_rule_is_better("answers x 8", world(), &prompts);
    let Some(prompts) = conversations(2.0, 8) else { return skipped() };
    let ours = assert_no_rule_is_better("answers x 8, near the limit", world(), &prompts);
    for (interference, least) in [(1.0, 2.0), (0.3, 1.2), (0.03, 0.8), (0.0, 0.8)] {
        let other = simulate(World { costs: Costs { interference, ..Costs::default() }, ..world() }, &prompts);
        print(&format!("a running answer counts {interference}"), &other).expect("stdout is writable");
        assert!(other.ttft_p99_s >= least * ours.ttft_p99_s, "{interference}: {other:?} {ours:?}");
    }
}

#[test]
fn cost_policy_has_the_shortest_waits_with_small_caches_or_recorded_answer_lengths() {
    let Some(prompts) = conversations(1.5, 4) else { return skipped() };
    assert_no_rule_is_better("answers x 4, 200 k tokens of KV", World { capacity_blocks: 400, ..world() }, &prompts);
    let Some(prompts) = conversations(1.5, 1) else { return skipped() };
    assert_no_rule_is_better("answers as recorded", World { capacity_blocks: 2_048, ..world() }, &prompts);
}

#[test]
fn cost_policy_has_the_shortest_waits_with_one_slow_worker() {
    let Some(prompts) = conversations(1.5, 8) else { return skipped() };
    let mut devices = world().devices;
    devices[0].1 = 4.0;
    assert_no_rule_is_better("one worker four times slower", World { devices, ..world() }, &prompts);
}

/// Two of the eight workers only prefill, for the other six. A prompt is prefilled there when this is estimated to be faster.
#[test]
fn requests_wait_less_with_mixed_roles_if_interference_is_charged_at_a_tenth() {
    let Some(prompts) = conversations(1.5, 8) else { return skipped() };
    let mut devices = world().devices;
    devices[..2].fill((Role::Prefill, 1.0));
    let mixed = World { devices, prefill: PrefillPlace::Auto, ..world() };
    let ours = simulate(mixed.clone(), &prompts);
    print("two of eight prefill only", &ours).expect("stdout is writable");
    let charged = simulate(World { costs: Costs { interference: 1.0, ..Costs::default() }, ..mixed }, &prompts);
    print("two of eight prefill only, a running answer counts 1", &charged).expect("stdout is writable");
    assert!(ours.ttft_p99_s < 0.7 * charged.ttft_p99_s && ours.ttft_mean_s < 0.7 * charged.ttft_mean_s, "{ours:?} {charged:?}");
}
