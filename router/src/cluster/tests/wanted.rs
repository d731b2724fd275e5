//! How many workers are wanted.

use super::*;
use crate::{
    settings::ServiceLevels,
    wanted::{WANTED_INTERVAL, WantedWorkers},
};
use std::time::Duration;
use tokio::time::advance;

const LEVELS: ServiceLevels = ServiceLevels { ttft: Some(Duration::from_secs(1)), itl: None };

fn with_levels(prefill: usize, decode: usize) -> Scenario {
    let place = if prefill > 0 { PrefillPlace::Remote } else { PrefillPlace::Local };
    let mut scenario = Scenario::with(RouterSettings { levels: LEVELS, ..settings(place) }, prefill, decode);
    for number in 0..decode {
        scenario.reports(&format!("d{number}"), Vec::new(), load(), &[]);
    }
    scenario
}

/// A worker computes 10,000 prompt tokens a second.
fn load() -> Load {
    Load { prefill_tokens_per_second: 10_000.0, prefill_measurements: 1, ..Load::default() }
}

/// Prompts of 5,000 tokens arrive for `seconds`, `per_second` of them, and get their first tokens at once.
async fn arrive(scenario: &mut Scenario, per_second: u32, seconds: u32) -> Vec<WantedWorkers> {
    for second in 0..seconds {
        for _ in 0..per_second {
            let (booking, _) = scenario.place_hashes(5_000, [].into());
            scenario.state.on_prefilled(booking, Some(0));
            scenario.state.release(booking);
            advance(Duration::from_secs(1) / per_second).await;
        }
        if u64::from(second) % WANTED_INTERVAL.as_secs() == 0 {
            scenario.state.plan_workers();
        }
    }
    scenario.state.plan_workers();
    scenario.state.wanted.clone()
}

#[tokio::test(start_paused = true)]
async fn load_of_two_workers_wants_more_than_two_and_says_why() {
    let mut scenario = with_levels(0, 2);
    let wanted = arrive(&mut scenario, 4, 120).await;
    let [WantedWorkers { role, wanted, present, reason, cheapest_to_lose, .. }] = &wanted[..] else { panic!("{wanted:?}") };
    assert!(scenario.state.view().has_service_levels);
    assert_eq!((*role, *present), (WorkerRole::Decode, 2));
    // Two workers would be busy all the time.
    assert!((3..=5).contains(wanted), "{wanted}: {reason}");
    assert!(reason.contains("prompts/s with 5000 new tokens") && reason.contains("would"), "{reason}");
    assert!(cheapest_to_lose.is_some());
    let gauge = format!("tandem_router_wanted_workers{{model=\"m\",role=\"decode\"}} {wanted}");
    assert!(scenario.recorder.render().contains(&gauge), "{}", scenario.recorder.render());
    assert_eq!(scenario.state.view().wanted[0].wanted as usize, *wanted);
}

#[tokio::test(start_paused = true)]
async fn quiet_cluster_wants_fewer_only_after_a_while() {
    let mut scenario = with_levels(0, 3);
    let number = |wanted: Vec<WantedWorkers>| wanted[0].wanted;
    assert_eq!(number(arrive(&mut scenario, 1, 60).await), 3);
    assert_eq!(
        number(arrive(&mut scenario, 1, 420).await),
        2,
        "one worker would be busy half of the time, and prompts would wait"
    );
}

#[tokio::test(start_paused = true)]
async fn refused_requests_count() {
    let mut scenario = with_levels(0, 1);
    scenario.reports("d0", Vec::new(), Load { pending_prefill_tokens: 1_000_000, ..load() }, &[]);
    for _ in 0..240 {
        let request = PlacementRequest { max_wait: Some(Duration::from_secs(1)), ..scenario.request(5_000, [].into()) };
        let refused = scenario.state.place(&request, &Excluded::default(), 1);
        assert!(matches!(refused, Err(PlacementError::Overloaded { .. })), "{refused:?}");
        advance(Duration::from_millis(250)).await;
    }
    scenario.reports("d0", Vec::new(), load(), &[]);
    scenario.state.plan_workers();
    assert!(scenario.state.wanted[0].wanted >= 3, "{:?}", scenario.state.wanted);
}

#[tokio::test(start_paused = true)]
async fn each_role_has_a_number_until_its_workers_are_gone_for_long() {
    let mut scenario = with_levels(2, 1);
    let roles = |wanted: &[WantedWorkers]| wanted.iter().map(|of| (of.role, of.present)).collect::<Vec<_>>();
    let wanted = arrive(&mut scenario, 1, 30).await;
    assert_eq!(roles(&wanted), [(WorkerRole::Prefill, 2), (WorkerRole::Decode, 1)]);
    for name in ["p0", "p1", "d0"] {
        let id = scenario.member(name);
        scenario.state.leave(id);
    }
    scenario.state.plan_workers();
    assert_eq!(roles(&scenario.state.wanted), [(WorkerRole::Prefill, 0), (WorkerRole::Decode, 0)]);
    assert!(scenario.state.wanted.iter().all(|of| of.wanted >= 1));
    advance(Duration::from_secs(3_600)).await;
    scenario.state.plan_workers();
    assert!(scenario.state.wanted.is_empty() && !scenario.recorder.render().contains("tandem_router_wanted_workers"));
}

#[tokio::test(start_paused = true)]
async fn worker_whose_cache_serves_least_is_the_cheapest_to_lose() {
    let mut scenario = with_levels(0, 2);
    let prompt = hashes(1, 0, 100);
    scenario.stored("d1", &prompt);
    for _ in 0..5 {
        let (booking, placement) = scenario.place_hashes(1_601, prompt.clone());
        assert_eq!(name(&placement.decode), "d1");
        scenario.state.on_prefilled(booking, Some(1_600));
        scenario.state.release(booking);
    }
    scenario.state.plan_workers();
    assert_eq!(scenario.state.wanted[0].cheapest_to_lose.as_deref(), Some("d0"));
}

#[tokio::test(start_paused = true)]
async fn router_without_levels_plans_nothing() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 2);
    assert!(arrive(&mut scenario, 1, 30).await.is_empty());
}
