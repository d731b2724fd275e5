//! Tests of membership: which workers may join, and how their events and measurements are recorded.

use super::*;
use std::time::Duration;
use tandem_proto::v1::UnavailableWorker;

#[test]
fn worker_that_differs_from_the_first_member_of_its_model_cannot_join() {
    let good = info(worker_info::Role::Decode, "d0");
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    let first = scenario.join(good.clone()).expect("the first member may have any identity");
    let new = || WorkerInfo { instance_id: "new".to_owned(), ..good.clone() };
    for (bad, field) in [
        (WorkerInfo { revision: "s".to_owned(), ..new() }, "revision"),
        (WorkerInfo { block_size: 32, ..new() }, "block size"),
        (WorkerInfo { version: "99.0.0".to_owned(), ..new() }, "version"),
        (WorkerInfo { instance_id: "other".to_owned(), ..good.clone() }, "--worker-id"),
        (WorkerInfo { role: 9, ..new() }, "a role"),
        (WorkerInfo { worker_id: String::new(), ..new() }, "a worker_id"),
        (WorkerInfo { instance_id: String::new(), ..new() }, "an instance_id"),
        (WorkerInfo { block_size: 0, ..new() }, "a block_size"),
        (WorkerInfo { capacity_blocks: 0, ..new() }, "a capacity"),
    ] {
        let refused = scenario.join(bad).expect_err("the worker does not fit the first member");
        assert!(refused.to_string().contains(field), "{refused}");
    }
    assert_eq!(scenario.join(good.clone()), Err(JoinError::Duplicate));
    assert_eq!(scenario.state.members.len(), 1);
    // When all members have left, the next worker that joins determines the identity.
    scenario.state.leave(first);
    scenario.join(WorkerInfo { block_size: 32, ..new() }).expect("the first member may have any identity");
}

#[tokio::test]
async fn requests_are_placed_while_a_large_batch_of_events_is_applied() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 1);
    let (id, request) = (scenario.member("d0"), scenario.request(100, hashes(1, 0, 6)));
    let cluster = Cluster { state: Mutex::new(scenario.state), ..Cluster::new(RouterSettings::default(), Metrics::default()) };
    let long = |from: u64| (from..from + 2_000).map(SequenceHash).collect::<Vec<_>>();
    let chain = |sequence_hashes: Vec<SequenceHash>| Change::Stored(StoredChain { parent: None, sequence_hashes });
    let pairs: Vec<Change> = (0..1_000).flat_map(|_| [chain(long(0)[..1].to_vec()), Change::Cleared]).collect();
    let chains: Vec<Change> = (0..10).map(|at| chain(long(at * 2_000))).collect();
    for (changes, slices) in [(pairs, 1_000), (chains, 4), (vec![], 1)] {
        let events: Vec<KvEvent> = (1..).zip(changes).map(|(event_id, change)| KvEvent { event_id, change }).collect();
        let batch = KvBatch { events, load: Load { running_sequences: slices, ..Default::default() }, ..Default::default() };
        let placed = std::cell::Cell::new(0);
        let place = async {
            loop {
                let (booking, _) = cluster.lock().place(&request, &Excluded::default(), 1).expect("a worker is eligible");
                cluster.lock().release(booking);
                placed.set(placed.get() + 1);
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            biased;
            applied = cluster.apply(id, batch, ReportedStats::default()) => applied.expect("the worker can hold the batch's blocks"),
            () = place => {}
        }
        assert_eq!(placed.get() + 1, slices, "one placement between two slices");
        assert_eq!(cluster.lock().members.get(id).load.running_sequences, slices, "the load counts after all events");
    }
    assert_eq!(cluster.lock().view().workers[0].indexed_blocks, 20_000);
}

#[test]
fn worker_with_an_old_slow_rate_is_chosen_again_after_some_time() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("the runtime can be built");
    let _entered = runtime.enter();
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 2, 1);
    let report = |scenario: &mut Scenario, name: &str, rate: f64, prefill_measurements: u64| {
        let id = scenario.member(name);
        let load = Load { prefill_tokens_per_second: rate, prefill_measurements, ..Default::default() };
        scenario.state.apply(id, KvBatch { load, ..Default::default() }, ReportedStats::default());
    };
    let placed = |scenario: &mut Scenario, tokens: &mut u64| {
        let (booking, placement) = scenario.place_hashes(1_000, [].into());
        scenario.state.release(booking);
        *tokens += 1_000;
        name(&placement.prefill)
    };
    report(&mut scenario, "p0", 100.0, 2);
    let (mut tokens, mut first) = (0, None);
    for second in 0..300 {
        report(&mut scenario, "p1", 20_000.0, tokens);
        if placed(&mut scenario, &mut tokens) == "p0" {
            first.get_or_insert(second);
        }
        // The heartbeats of p0 repeat its old measurement.
        report(&mut scenario, "p0", 100.0, 2);
        runtime.block_on(tokio::time::advance(Duration::from_secs(1)));
    }
    let first = first.expect("the worker receives a prompt again");
    assert!((30..200).contains(&first), "the worker was tried again after {first} s");
}

#[test]
fn short_prefills_do_not_renew_the_weight_of_an_old_rate() {
    let runtime =
        tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build().expect("the runtime can be built");
    let _entered = runtime.enter();
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    let id = scenario.member("p0");
    let weight = |scenario: &Scenario| {
        let candidates = scenario.state.candidates(&[]);
        candidates[0].prefill_tokens_per_second.expect("the prefill rate is measured").weight
    };
    let report = |scenario: &mut Scenario, rate: f64, prefilled_tokens: u64, prefill_measurements: u64| {
        let load = Load { prefill_tokens_per_second: rate, prefill_measurements, ..Default::default() };
        let steps = Some(v1::StepTotals { prefilled_tokens, generated_tokens: 0 });
        scenario.state.apply(id, KvBatch { load, ..Default::default() }, ReportedStats { steps, ..Default::default() });
    };
    report(&mut scenario, 200.0, 1_536, 1);
    assert_eq!(weight(&scenario), 1.0);
    // The worker prefills 16 tokens every second. Each of these short steps changes the fitted rate a little.
    for second in 1..=300_u32 {
        runtime.block_on(tokio::time::advance(Duration::from_secs(1)));
        report(&mut scenario, 200.0 + f64::from(second) / 1e3, 1_536 + 16 * u64::from(second), 1);
    }
    assert!(weight(&scenario) < 0.01, "{}", weight(&scenario));
    report(&mut scenario, 20_000.0, 7_000, 2);
    assert_eq!(weight(&scenario), 1.0, "a long step refreshes the rate");
}

#[test]
fn starting_router_is_unavailable_until_each_listed_worker_was_tried_once() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    let list = |scenario: &mut Scenario| {
        ["host:1", "host:2", "host:3"]
            .iter()
            .for_each(|worker| scenario.state.update_unavailable(|workers| workers.expect(worker)))
    };
    list(&mut scenario);
    let reason = |scenario: &Scenario| scenario.state.unavailable_reason().unwrap_or_default();
    let unavailable = |address: &str, reason: &str, incompatible| UnavailableWorker {
        address: address.to_owned(),
        reason: reason.to_owned(),
        incompatible,
        ..Default::default()
    };
    assert!(reason(&scenario).contains("0 of 3"), "{}", reason(&scenario));
    scenario.join(info(worker_info::Role::Decode, "d0")).expect("the worker agrees with the other members");
    scenario.state.update_unavailable(|workers| workers.insert(unavailable("host:2", "cannot be reached", false)));
    assert!(scenario.state.unavailable.is_starting() && reason(&scenario).contains("1 of 3"), "{}", reason(&scenario));
    scenario.state.update_unavailable(|workers| workers.insert(unavailable("host:3", "another model", true)));
    assert_eq!((scenario.state.unavailable.is_starting(), scenario.state.unavailable_reason()), (false, None));
    assert!(
        scenario.recorder.render().contains("tandem_router_index_complete_ratio 0.3333333333333333"),
        "{}",
        scenario.recorder.render()
    );
    // A router does not wait for workers that are added to its list later.
    list(&mut scenario);
    assert_eq!(scenario.state.unavailable_reason(), None);
    let mut impatient = Scenario::with(settings(PrefillPlace::Auto), 0, 1);
    list(&mut impatient);
    assert!(impatient.state.unavailable.is_starting());
    impatient.state.update_unavailable(UnavailableWorkers::stop_expecting);
    assert_eq!(impatient.state.unavailable_reason(), None);
}

#[test]
fn approximate_index_is_marked_in_metrics_view_and_explanation() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Auto), 0, 1);
    let assumed = WorkerInfo { approximate_index: true, ..info(worker_info::Role::Decode, "d1") };
    scenario.join(assumed).expect("it agrees");
    let request = scenario.request(100, hashes(1, 0, 6));
    let view = scenario.state.view().workers.into_iter().map(|view| view.info.is_some_and(|info| info.approximate_index));
    let explained = scenario.state.explain(&request).workers.into_iter().map(|worker| worker.approximate_index);
    assert_eq!((view.collect::<Vec<_>>(), explained.collect::<Vec<_>>()), (vec![false, true], vec![false, true]));
    let metrics = scenario.recorder.render();
    for line in ["{worker=\"d0\"} 0", "{worker=\"d1\"} 1"] {
        assert!(metrics.contains(&format!("tandem_router_index_approximate{line}")), "{metrics}");
    }
}

#[test]
fn unavailable_worker_keeps_the_id_that_it_had_as_a_member_until_it_joins_again() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    let ids =
        |scenario: &Scenario| scenario.state.view().unavailable.into_iter().map(|worker| worker.worker_id).collect::<Vec<_>>();
    for (worker_id, reason) in [("d0", "the connection ended"), ("", "cannot be reached"), ("", "cannot be reached")] {
        let (address, reason, worker_id) = ("host:1".to_owned(), reason.to_owned(), worker_id.to_owned());
        let worker = UnavailableWorker { address, reason, worker_id, ..Default::default() };
        scenario.state.update_unavailable(|workers| workers.insert(worker));
        assert_eq!(ids(&scenario), ["d0"]);
    }
    scenario.state.update_unavailable(|workers| workers.remove("host:1"));
    let stranger = UnavailableWorker { address: "host:1".to_owned(), ..Default::default() };
    scenario.state.update_unavailable(|workers| workers.insert(stranger));
    assert_eq!(ids(&scenario), [""]);
}
