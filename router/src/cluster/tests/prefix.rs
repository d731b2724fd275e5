//! Each cause for which tokens of a prompt are not cached.

use super::*;
use std::time::Duration;
use tandem_proto::Cause;

/// Returns the removal of these blocks.
fn removed(hashes: &[SequenceHash]) -> Vec<KvEvent> {
    let blocks = hashes.iter().rev().copied().collect();
    vec![KvEvent { event_id: 2, change: Change::Removed(blocks) }]
}

impl Scenario {
    /// Places a prompt whose blocks have these hashes, with three more tokens. Returns the booking and the facts about the prefix.
    fn place_prompt(&mut self, hashes: &Arc<[SequenceHash]>) -> (BookingId, v1::PrefixFacts) {
        let (booking, placement) = self.place_hashes(hashes.len() as u32 * BLOCK + 3, hashes.clone());
        (booking, placement.prefix.expect("the router knows the prefix"))
    }

    /// Computes a prompt of which the engine finds this number of blocks. Returns the tokens that it did not find, by cause, and the facts
    /// about the prefix.
    fn compute(&mut self, hashes: &Arc<[SequenceHash]>, found_blocks: u32) -> (Vec<(Cause, u64)>, v1::PrefixFacts) {
        let (booking, facts) = self.place_prompt(hashes);
        let funnel = self.state.on_prefilled(booking, Some(found_blocks * BLOCK)).expect("the router has placed the request");
        self.state.release(booking);
        let causes: Vec<_> = funnel.causes.iter().collect();
        let missed: u64 = causes.iter().map(|(_, tokens)| tokens).sum();
        assert_eq!((missed + funnel.found, funnel.prompt), (funnel.prompt, hashes.len() as u64 * 16 + 3));
        (causes, facts)
    }

    /// Makes the worker busy, so that the next prompt is placed on another one.
    fn busy(&mut self, name: &str) {
        let load = Load { pending_prefill_tokens: 1_000_000, ..Default::default() };
        self.reports(name, Vec::new(), load, &[]);
    }
}

const TAIL: (Cause, u64) = (Cause::BelowBlock, 3);

fn one_worker() -> Scenario {
    Scenario::with(settings(PrefillPlace::Local), 0, 1)
}

#[test]
fn blocks_that_no_worker_has_had_have_the_cause_new_text() {
    let mut scenario = one_worker();
    scenario.stored("d0", &hashes(1, 2, 4));
    let (causes, facts) = scenario.compute(&hashes(2, 2, 6), 2);
    assert_eq!(causes, [(Cause::NewText, 64), TAIL]);
    assert_eq!((facts.known_prefix(), facts.anywhere.expect("d0 has blocks").worker_id), (2, "d0".to_owned()));
    let text = scenario.recorder.render();
    for series in [
        r#"tandem_router_prefix_tokens_total{worker="d0",model="m",cause="found"} 32"#,
        r#"tandem_router_prefix_tokens_total{worker="d0",model="m",cause="new_text"} 64"#,
        r#"tandem_router_funnel_tokens_total{worker="d0",model="m",stage="prompt"} 99"#,
        r#"tandem_router_funnel_tokens_total{worker="d0",model="m",stage="possible"} 32"#,
        r#"tandem_router_prediction_error_tokens_sum{model="m"} 0"#,
    ] {
        assert!(text.contains(series), "{series} in {text}");
    }
}

#[tokio::test(start_paused = true)]
async fn evicted_blocks_are_named_with_their_worker_and_age() {
    let mut scenario = one_worker();
    let prompt = hashes(1, 0, 9);
    scenario.stored("d0", &prompt);
    scenario.reports("d0", removed(&prompt[3..7]), Load::default(), &[]);
    tokio::time::advance(Duration::from_secs(40)).await;
    let (causes, facts) = scenario.compute(&hashes(1, 0, 12), 3);
    assert_eq!(
        causes,
        [(Cause::Evicted, 64), (Cause::NewText, 80), TAIL],
        "the blocks after the removed ones are cached but not reachable"
    );
    let removed = facts.removed.expect("removed blocks are remembered");
    assert_eq!((removed.worker_id.as_str(), removed.blocks, removed.removed_s, removed.lost), ("d0", 7, Some(40), false));
}

#[test]
fn blocks_of_a_cleared_cache_and_of_a_worker_that_left_are_lost() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 2);
    let (cleared, left) = (hashes(1, 0, 4), hashes(2, 0, 4));
    scenario.stored("d0", &cleared);
    scenario.stored("d1", &left);
    scenario.reports("d0", vec![KvEvent { event_id: 2, change: Change::Cleared }], Load::default(), &[]);
    let gone = scenario.member("d1");
    scenario.state.leave(gone);
    while scenario.state.members.index.sweep() {}
    for (prompt, worker) in [(cleared, "d0"), (left, "d1")] {
        let (causes, facts) = scenario.compute(&prompt, 0);
        assert_eq!(causes, [(Cause::Evicted, 64), TAIL]);
        let removed = facts.removed.expect("lost blocks are remembered");
        assert_eq!((removed.worker_id.as_str(), removed.lost), (worker, true));
    }
}

#[test]
fn blocks_on_another_worker_are_held_elsewhere_with_the_cost_of_choosing_that_worker() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 2);
    let prompt = hashes(1, 0, 4);
    scenario.stored("d0", &prompt);
    scenario.busy("d0");
    let (causes, facts) = scenario.compute(&prompt, 0);
    assert_eq!(causes, [(Cause::HeldElsewhere, 64), TAIL]);
    let held = facts.eligible.clone().expect("d0 could have computed the prompt");
    assert_eq!((held.worker_id.as_str(), held.blocks), ("d0", 4));
    assert!(held.more_ms.expect("d0 is eligible") > 0.0 && held.saved_ms > 0.0, "{held:?}");
    assert_eq!(facts.anywhere, facts.eligible);
    assert!(scenario.recorder.render().contains(r#"tandem_router_regret_tokens_sum{model="m"} 64"#));
}

#[test]
fn blocks_on_a_worker_that_cannot_compute_prompts_are_held_elsewhere_without_a_cost() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    let prompt = hashes(1, 0, 4);
    scenario.stored("d0", &prompt);
    let (causes, facts) = scenario.compute(&prompt, 0);
    assert_eq!(causes, [(Cause::HeldElsewhere, 64), TAIL]);
    assert_eq!((facts.eligible, facts.anywhere.expect("d0 has blocks").more_ms), (None, None));
}

#[tokio::test(start_paused = true)]
async fn blocks_that_are_being_computed_or_are_unreported_have_the_cause_not_yet_stored() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 2);
    let prompt = hashes(1, 0, 4);
    let (first, _) = scenario.place_prompt(&prompt);
    assert_eq!(scenario.compute(&prompt, 0).0, [(Cause::NotYetStored, 64), TAIL], "on the same worker");
    let busy = scenario.state.bookings.by_id[&first].decode.to_string();
    scenario.busy(busy.trim_end_matches("-1"));
    assert_eq!(scenario.compute(&prompt, 0).0, [(Cause::NotYetStored, 64), TAIL], "on another worker");
    scenario.state.on_prefilled(first, Some(0));
    scenario.state.release(first);
    assert_eq!(scenario.compute(&prompt, 0).0, [(Cause::NotYetStored, 64), TAIL], "the report is on its way");
    tokio::time::advance(Duration::from_secs(2)).await;
    assert_eq!(scenario.compute(&prompt, 0).0, [(Cause::NewText, 64), TAIL]);
}

#[test]
fn blocks_after_the_last_reuse_point_and_dropped_blocks_have_the_cause_group_rule() {
    let mut scenario = one_worker();
    let prompt = hashes(1, 0, 4);
    scenario.stored("d0", &prompt);
    for marker in [SequenceHash::REUSE_POINTS, prompt[1].reuse_point()] {
        scenario.stored("d0", &[marker]);
    }
    assert_eq!(scenario.compute(&prompt, 2).0, [(Cause::GroupRule, 32), TAIL]);

    let mut drops = one_worker();
    drops.stored("d0", &prompt);
    assert_eq!(drops.compute(&prompt, 3).0, [(Cause::Engine, 16), TAIL], "not known yet");
    (0..8).for_each(|_| {
        drops.compute(&prompt, 3);
    });
    assert_eq!(drops.compute(&prompt, 3).0, [(Cause::GroupRule, 16), TAIL]);
}

#[test]
fn engine_may_find_less_or_more_than_was_expected() {
    let mut scenario = one_worker();
    let prompt = hashes(1, 0, 4);
    scenario.stored("d0", &prompt[..2]);
    assert_eq!(scenario.compute(&prompt, 0).0, [(Cause::Engine, 32), (Cause::NewText, 32), TAIL]);
    let mut more = one_worker();
    assert_eq!(more.compute(&prompt, 4).0, [TAIL]);
}

#[test]
fn blocks_of_another_namespace_have_their_own_cause_and_prompts_with_logits_reuse_no_block() {
    let mut scenario = one_worker();
    let request = PlacementRequest { other_namespace_blocks: 3, ..scenario.request(67, hashes(1, 0, 4)) };
    let causes = |scenario: &mut Scenario, request: &PlacementRequest| {
        let (booking, _) = scenario.place(request);
        let funnel = scenario.state.on_prefilled(booking, Some(0)).expect("the router has placed the request");
        scenario.state.release(booking);
        funnel.causes.iter().collect::<Vec<_>>()
    };
    assert_eq!(causes(&mut scenario, &request), [(Cause::OtherNamespace, 48), (Cause::NewText, 16), TAIL]);
    let logits = PlacementRequest { prompt_logits: true, ..request };
    assert_eq!(causes(&mut scenario, &logits), [(Cause::BelowBlock, 67)]);
}
