//! Tests of bookings: which load they add to which worker, and that nothing remains of a released booking.

use super::*;

#[test]
fn remote_prompt_adds_load_to_both_workers_until_each_reports_it() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    scenario.stored("p0", &hashes(1, 0, 2));
    let request = PlacementRequest { samples: 3, ..scenario.request(101, hashes(1, 0, 6)) };
    let (booking, placement) = scenario.place(&request);
    assert_eq!((name(&placement.decode), name(&placement.prefill)), ("d0".to_owned(), "p0".to_owned()));
    let overlaps = |candidate: Option<v1::Candidate>| candidate.map(|c| (c.overlap_blocks, c.predicted_blocks));
    assert_eq!((overlaps(placement.prefill), overlaps(placement.decode)), (Some((2, 0)), Some((0, 0))));
    // The load of p0 is 100 tokens (the prompt without its last token) less the 32 tokens of two cached blocks.
    assert_eq!((scenario.booked("p0"), scenario.booked("d0")), ((100 - 32, 1, 1), (0, 3, 1)));

    scenario.reports("p0", vec![], Load { pending_prefill_tokens: 68, ..Default::default() }, &["r1"]);
    assert_eq!((scenario.booked("p0"), scenario.booked("d0")), ((0, 0, 1), (0, 3, 1)));
    scenario.reports("d0", vec![], Load { running_sequences: 3, ..Default::default() }, &["other", "r1"]);
    assert_eq!(scenario.booked("d0"), (0, 0, 1));

    scenario.state.on_prefilled(booking, Some(48));
    assert_eq!((scenario.booked("p0"), scenario.booked("d0")), ((0, 0, 0), (0, 0, 1)));
    scenario.state.on_prefilled(booking, Some(0));
    scenario.state.release(booking);
    scenario.state.release(booking);
    scenario.assert_idle();
    let text = scenario.recorder.render();
    assert!(text.contains(r#"tandem_router_overlap_under_tokens_total{worker="p0"} 16"#), "{text}");
    assert!(text.contains(r#"tandem_router_overlap_over_tokens_total{worker="p0"} 0"#), "{text}");
    assert!(text.contains(r#"tandem_router_placements_total{worker="p0",kind="prefill"} 1"#), "{text}");
    assert!(text.contains(r#"tandem_router_placements_total{worker="d0",kind="decode"} 1"#), "{text}");

    // The view shows the same numbers as the metrics, and the cache counters that the worker reported.
    let cache = Some(v1::CacheTotals { prompts: 1, prompts_hit: 1, prompt_tokens: 101, cached_tokens: 48 });
    let steps = Some(v1::StepTotals { prefilled_tokens: 53, generated_tokens: 9 });
    let stats = ReportedStats { transfer_bytes_per_second: 7.0, cache, steps };
    scenario.state.apply(scenario.member("p0"), KvBatch::default(), stats);
    let view = scenario.state.view();
    let of = |name: &str| view.workers.iter().find(|view| view.info.as_ref().is_some_and(|info| info.worker_id == name)).cloned();
    let (prefill, decode) = (of("p0").expect("the worker is a member"), of("d0").expect("the worker is a member"));
    let totals = v1::PlacementTotals { prefill: 1, overlap_blocks: 2, overlap_under_tokens: 16, ..Default::default() };
    assert_eq!(prefill.placements, Some(totals));
    let reported = prefill.load.map(|load| (load.transfer_bytes_per_second, load.cache, load.steps));
    assert_eq!(reported, Some((7.0, cache, steps)));
    assert_eq!(decode.placements, Some(v1::PlacementTotals { decode: 1, ..Default::default() }));
    assert_eq!(decode.load.map(|load| load.cache), Some(None), "the decode worker has reported no cache totals");
    assert!(!prefill.circuit_open && !decode.circuit_open);
}

#[test]
fn bookings_add_no_load_after_a_new_snapshot() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 1);
    let (booking, _) = scenario.place_hashes(100, hashes(1, 0, 6));
    // A snapshot follows lost messages. One of these may have announced that the worker's load includes the request, so the booking no
    // longer adds load.
    let id = scenario.member("d0");
    scenario.state.empty(id);
    assert_eq!(scenario.booked("d0"), (0, 0, 1));
    scenario.state.on_prefilled(booking, None);
    scenario.state.release(booking);
    scenario.assert_idle();
}

#[test]
fn local_prompt_adds_a_sequence_to_the_decode_worker_and_its_tokens_until_prefilled() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 1, 1);
    let (booking, placement) = scenario.place_hashes(100, hashes(1, 0, 6));
    assert!(placement.prefill.is_none());
    assert_eq!((scenario.booked("p0"), scenario.booked("d0")), ((0, 0, 0), (100, 1, 1)));
    scenario.state.on_prefilled(booking, None);
    assert_eq!(scenario.booked("d0"), (0, 1, 1));
    scenario.state.release(booking);
    scenario.assert_idle();
}

#[test]
fn booking_released_before_any_report_leaves_no_load() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut scenario = Scenario::with(settings(place), 2, 2);
        let bookings: Vec<BookingId> = (0..20).map(|at| scenario.place_hashes(100 + at, hashes(0, 1, 6)).0).collect();
        assert!(scenario.recorder.render().contains("tandem_router_bookings 20"));
        for booking in bookings {
            scenario.state.release(booking);
        }
        scenario.assert_idle();
    }
}

#[test]
fn worker_that_leaves_loses_its_index_entries_and_bookings() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    scenario.stored("p0", &hashes(1, 0, 6));
    let (first, _) = scenario.place_hashes(100, hashes(1, 0, 6));
    let left = scenario.member("p0");
    scenario.state.leave(left);
    assert!(!scenario.recorder.render().contains(r#"worker="p0""#), "the worker's metric series are removed");
    let request = scenario.request(100, hashes(1, 0, 6));
    let refused = scenario.state.place(&request, &Excluded::default(), 1).expect_err("there is no prefill worker");
    assert_eq!(refused, PlacementError::NoEligibleWorker(NoEligibleWorker::NoPrefillWorker));

    // The worker joins as a new instance and reuses the slot, which is empty.
    scenario
        .join(WorkerInfo { instance_id: "p0-2".to_owned(), ..info(worker_info::Role::Prefill, "p0") })
        .expect("the worker may join");
    let (second, placement) = scenario.place_hashes(100, hashes(1, 0, 6));
    assert_eq!(placement.prefill.map(|candidate| candidate.overlap_blocks), Some(0));
    assert_eq!(scenario.booked("p0"), (99, 1, 1));
    scenario.state.release(first);
    assert_eq!(scenario.booked("p0"), (99, 1, 1), "releasing the old instance's booking does not affect the new one");
    // Late messages of the instance that left are ignored.
    scenario.state.apply(
        left,
        KvBatch { included_request_ids: vec!["r3".to_owned()], ..Default::default() },
        ReportedStats::default(),
    );
    scenario.state.empty(left);
    assert_eq!(scenario.booked("p0"), (99, 1, 1));
    scenario.state.release(second);
    scenario.assert_idle();
}

#[test]
fn answer_is_expected_to_be_as_long_as_those_of_similar_requests() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 1);
    let place = |scenario: &mut Scenario, max_tokens, samples| {
        let request = PlacementRequest { max_tokens, samples, ..scenario.request(101, hashes(1, 0, 6)) };
        scenario.place(&request).0
    };
    let expected =
        |scenario: &Scenario| ["d0", "p0"].map(|name| scenario.state.members.get(scenario.member(name)).bookings.answer_tokens);
    // Before the first answer has ended, the default is assumed for each sample.
    let first = place(&mut scenario, 1_000, 2);
    let default = Costs::default().answer_tokens as u64;
    assert_eq!(expected(&scenario), [2 * default, 0], "only the decode worker holds the answer");
    scenario.state.on_prefilled(first, Some(0));
    scenario.reports("d0", vec![], Load::default(), &["r1"]);
    assert_eq!(expected(&scenario), [2 * default, 0], "the answer counts until it ends");
    scenario.state.on_answered(first, 80);
    scenario.state.release(first);
    assert_eq!(expected(&scenario), [0, 0]);
    let second = place(&mut scenario, 1_000, 3);
    assert_eq!(expected(&scenario), [3 * 40, 0]);
    let third = place(&mut scenario, 5, 1);
    assert_eq!(expected(&scenario), [3 * 40 + 5, 0]);
    [second, third].into_iter().for_each(|booking| scenario.state.release(booking));
    scenario.assert_idle();
}
