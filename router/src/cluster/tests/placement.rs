//! Tests of placements: which workers are chosen, with which overlap, and when a request is refused.

use super::*;
use std::collections::BTreeMap;

#[test]
fn overlap_includes_only_blocks_that_a_worker_may_reuse() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Local), 0, 1);
    scenario.stored("d0", &hashes(1, 0, 10));
    for (prompt_tokens, given, prompt_logits, expected) in [
        (161, 10, false, 10),
        (160, 10, false, 9),
        (200, 4, false, 4),
        (200, 0, false, 0),
        (17, 10, false, 1),
        (161, 10, true, 0),
    ] {
        let request = PlacementRequest { prompt_logits, ..scenario.request(prompt_tokens, hashes(1, 0, given)) };
        let (booking, placement) = scenario.place(&request);
        assert_eq!(placement.block_size, BLOCK);
        assert_eq!(placement.decode.map(|candidate| candidate.overlap_blocks), Some(expected), "{prompt_tokens} {given}");
        scenario.state.release(booking);
    }
    scenario.assert_idle();
}

#[test]
fn prompt_with_images_is_computed_by_a_decode_worker_that_accepts_images() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 1, 2);
    let reads_images = WorkerInfo { accepts_images: true, ..info(worker_info::Role::Decode, "d2") };
    scenario.join(reads_images).expect("it agrees with the other members");
    scenario.stored("d0", &hashes(1, 0, 10));
    let text = scenario.request(161, hashes(1, 0, 10));
    let images = PlacementRequest { has_images: true, ..text.clone() };
    for _ in 0..3 {
        let (booking, placement) = scenario.place(&images);
        let decode = placement.decode.and_then(|candidate| candidate.worker).expect("a worker is placed");
        assert_eq!((&*decode.worker_id, placement.prefill), ("d2", None));
        scenario.state.release(booking);
    }
    let (booking, placement) = scenario.place(&text);
    assert!(placement.prefill.is_some(), "a text is placed as before");
    scenario.state.release(booking);
    let failed: BTreeSet<_> = ["d2-1".into()].into();
    let refused = scenario.state.place(&images, &Excluded { suspect: failed.clone(), failed }, 2);
    assert!(refused.is_err(), "no other worker accepts images");
    scenario.assert_idle();
}

#[test]
fn request_reaches_observed_engines_only_if_it_comes_through_a_gateway() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Auto), 0, 1);
    let refused = |scenario: &mut Scenario, request: &PlacementRequest| {
        let placed = scenario.state.place(request, &Excluded::default(), 1);
        matches!(placed, Err(PlacementError::NoEligibleWorker(NoEligibleWorker::NoDecodeWorker)))
    };
    let wanted = |only_listed: bool, listed: &[&str]| {
        let listed = listed.iter().map(|&endpoint| endpoint.to_owned()).collect();
        Some(v1::WantedEndpoints { only_listed, listed, alternatives: 1 })
    };
    let any = PlacementRequest { endpoints: wanted(false, &[]), ..scenario.request(100, hashes(1, 0, 6)) };
    assert!(refused(&mut scenario, &any), "no worker observes an engine");
    for at in 0..3 {
        let endpoint = format!("10.0.0.{at}:80");
        scenario
            .join(WorkerInfo { engine_endpoint: endpoint, ..info(worker_info::Role::Decode, &format!("o{at}")) })
            .expect("the worker agrees with the other members");
    }
    scenario.stored("o1", &hashes(1, 0, 6));
    scenario.stored("d0", &hashes(2, 0, 6));
    for (prompt, endpoints, expected) in
        [(1, None, "d0"), (1, wanted(false, &[]), "o1"), (1, wanted(true, &["10.0.0.2:80", "10.0.0.9:80"]), "o2")]
    {
        let request = PlacementRequest { endpoints, ..scenario.request(100, hashes(prompt, 0, 6)) };
        let (booking, placement) = scenario.place(&request);
        assert_eq!(name(&placement.decode), expected);
        let addresses: Vec<&str> = placement.endpoints.iter().map(|endpoint| &*endpoint.address).collect();
        match expected {
            "d0" => assert_eq!(addresses, [] as [&str; 0]),
            "o1" => assert!(addresses.len() == 2 && addresses[0] == "10.0.0.1:80" && addresses[1] != "10.0.0.1:80"),
            _ => assert_eq!(addresses, ["10.0.0.2:80"], "the other engine of the list is unknown"),
        }
        scenario.state.release(booking);
    }
    for listed in [&[][..], &["10.0.0.9:80"]] {
        let request = PlacementRequest { endpoints: wanted(true, listed), ..scenario.request(100, hashes(1, 0, 6)) };
        assert!(refused(&mut scenario, &request), "{listed:?}");
    }
    scenario.assert_idle();
}

#[test]
fn sequences_of_an_observed_engine_are_counted_once() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Local));
    let observed = WorkerInfo { engine_endpoint: "10.0.0.1:80".to_owned(), ..info(worker_info::Role::Decode, "o0") };
    scenario.join(observed).expect("there is no other member");
    let request = PlacementRequest { endpoints: Some(Default::default()), ..scenario.request(100, hashes(1, 0, 6)) };
    let bookings: Vec<BookingId> = (0..3).map(|_| scenario.place(&request).0).collect();
    for (running, expected) in [(0, 3), (2, 3), (5, 5)] {
        scenario.reports("o0", vec![], Load { running_sequences: running, ..Default::default() }, &[]);
        let sequences = scenario.state.candidates(&[]).first().map(|candidate| candidate.sequences);
        assert_eq!(sequences, Some(expected), "{running} reported, 3 booked");
    }
    bookings.into_iter().for_each(|booking| scenario.state.release(booking));
    scenario.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn time_that_a_decode_worker_spends_on_local_prefills_is_estimated() {
    for (place, expected) in [(PrefillPlace::Local, 0.5), (PrefillPlace::Remote, 0.0)] {
        let mut scenario = Scenario::with(settings(place), 1, 1);
        // A prompt of a thousand tokens arrives every two seconds, and the worker computes a thousand tokens in a second.
        for at in 0..150 {
            let (booking, _) = scenario.place_hashes(1_000, hashes(at, 0, 62));
            let load = Load { prefill_tokens_per_second: 1_000.0, ..Default::default() };
            scenario.reports("d0", vec![], load, &[]);
            scenario.state.release(booking);
            tokio::time::advance(std::time::Duration::from_secs(2)).await;
        }
        let decode = scenario.state.candidates(&[]).into_iter().find(|candidate| candidate.role == WorkerRole::Decode);
        let share = decode.expect("it is a member").local_share;
        assert!((share - expected).abs() < 0.03, "{place:?}: {share}");
    }
}

#[test]
fn burst_of_equal_prompts_is_placed_on_one_worker_and_predicted_blocks_are_not_reported_as_overlap() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut scenario = Scenario::with(settings(place), 4, 4);
        let mut bookings = Vec::new();
        let mut seen = BTreeSet::new();
        for at in 0..6 {
            let (booking, placement) = scenario.place_hashes(1_001, hashes(1, 0, 62));
            bookings.push(booking);
            let computes = placement.prefill.or(placement.decode);
            let counts = computes.as_ref().map(|candidate| (candidate.overlap_blocks, candidate.predicted_blocks));
            assert_eq!(counts, Some((0, if at == 0 { 0 } else { 62 })));
            seen.insert(name(&computes));
        }
        assert_eq!(seen.len(), 1, "one worker computes the prompt");
        // Once the worker's events have arrived, the predicted blocks are overlap.
        let computes = seen.first().expect("a worker computes the prompt").clone();
        scenario.stored(&computes, &hashes(1, 0, 62));
        let (booking, placement) = scenario.place_hashes(1_001, hashes(1, 0, 62));
        let candidate = placement.prefill.or(placement.decode).expect("there is a decode worker");
        assert_eq!((candidate.overlap_blocks, candidate.predicted_blocks), (62, 0));
        for booking in bookings.into_iter().chain([booking]) {
            scenario.state.release(booking);
        }
        scenario.assert_idle();
    }
}

#[test]
fn equal_prompts_of_one_request_share_workers_while_these_are_eligible() {
    let instance = |candidate: &Option<v1::Candidate>| Some(candidate.as_ref()?.worker.as_ref()?.instance_id.clone());
    for place in [PrefillPlace::Remote, PrefillPlace::Local] {
        let mut scenario = Scenario::with(settings(place), 4, 4);
        let (first, placement) = scenario.place_hashes(40, hashes(1, 0, 2));
        let decode_instance_id = instance(&placement.decode).expect("there is a decode worker");
        let equal = v1::EqualPrompt { decode_instance_id, prefill_instance_id: instance(&placement.prefill) };
        let request = PlacementRequest { equal_prompt: Some(equal.clone()), ..scenario.request(40, hashes(1, 0, 2)) };
        let mut bookings = vec![first];
        for _ in 0..8 {
            let (booking, next) = scenario.place(&request);
            assert_eq!((name(&next.decode), name(&next.prefill)), (name(&placement.decode), name(&placement.prefill)));
            bookings.push(booking);
        }
        let failed = BTreeSet::from([equal.decode_instance_id.as_str().into()]);
        let (booking, elsewhere) =
            scenario.state.place(&request, &Excluded { failed, ..Excluded::default() }, 1).expect("a worker is eligible");
        assert_ne!(name(&elsewhere.decode), name(&placement.decode), "a worker that has failed the request");
        bookings.push(booking);
        let gone = v1::EqualPrompt { decode_instance_id: "gone".to_owned(), ..equal };
        bookings.push(scenario.place(&PlacementRequest { equal_prompt: Some(gone), ..request }).0);
        bookings.into_iter().for_each(|booking| scenario.state.release(booking));
        scenario.assert_idle();
    }
}

#[test]
fn load_is_balanced_although_all_prompts_share_their_first_block() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 8, 2);
    scenario.stored("p3", &hashes(0, 1, 1));
    let mut tokens = BTreeMap::<String, u64>::new();
    for at in 0..400 {
        let blocks = 20 + at * 7 % 100;
        let hashes = hashes(at, 1, blocks);
        let (_, placement) = scenario.place_hashes(blocks as u32 * BLOCK + 1, hashes);
        *tokens.entry(name(&placement.prefill)).or_default() += blocks * u64::from(BLOCK);
    }
    let (max, sum) = (tokens.values().max().expect("the map has a worker"), tokens.values().sum::<u64>());
    assert!(*max as f64 / (sum as f64 / 8.0) < 1.1, "{tokens:?}");
    assert_eq!(scenario.booked("d0").1 + scenario.booked("d1").1, 400);
    assert!(
        scenario.booked("d0").1.abs_diff(scenario.booked("d1").1) <= 1,
        "{:?} {:?}",
        scenario.booked("d0"),
        scenario.booked("d1")
    );
}

#[test]
fn overlap_decides_when_loads_are_equal() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 8, 1);
    for at in 0..8 {
        scenario.stored(&format!("p{at}"), &hashes(at, 1, 30));
    }
    for at in 0..8 {
        let (booking, placement) = scenario.place_hashes(481, hashes(at, 1, 30));
        assert_eq!(name(&placement.prefill), format!("p{at}"));
        assert_eq!(placement.prefill.map(|candidate| candidate.overlap_blocks), Some(30));
        scenario.state.release(booking);
    }
}

#[test]
fn failed_workers_are_excluded_and_the_last_attempt_uses_a_decode_worker_only() {
    let mut scenario = Scenario::with(RouterSettings { attempts_max: 3, ..settings(PrefillPlace::Auto) }, 2, 1);
    // The decode worker is busy, so the first attempts are prefilled on another worker.
    scenario.reports("d0", vec![], Load { running_sequences: 50, decode_step_ms: 1.0, ..Default::default() }, &[]);
    let request = scenario.request(2_001, hashes(1, 0, 125));
    let mut excluded = Excluded::default();
    let mut used = Vec::new();
    for attempt in 1..=2 {
        let (booking, placement) = scenario.state.place(&request, &excluded, attempt).expect("a prefill worker is eligible");
        let failed = name(&placement.prefill);
        used.push(failed.clone());
        excluded.failed.insert(format!("{failed}-1").into());
        scenario.state.release(booking);
    }
    used.sort();
    assert_eq!(used, ["p0", "p1"]);
    let (booking, placement) = scenario.state.place(&request, &Excluded::default(), 3).expect("the decode worker is eligible");
    assert_eq!((name(&placement.decode), placement.prefill), ("d0".to_owned(), None));
    scenario.state.release(booking);
    assert_eq!(scenario.state.place(&request, &Excluded::default(), 4), Err(PlacementError::TooManyAttempts));
    excluded.failed.insert("d0-1".into());
    let (booking, placement) =
        scenario.state.place(&request, &excluded, 3).expect("a worker that was only at capacity is tried again");
    assert_eq!(name(&placement.decode), "d0");
    scenario.state.release(booking);
    excluded.suspect.insert("d0-1".into());
    assert_eq!(scenario.state.place(&request, &excluded, 3), Err(PlacementError::NoEligibleWorker(NoEligibleWorker::AllFailed)));
    scenario.assert_idle();
    assert!(scenario.recorder.render().contains("tandem_router_refused_total 2"));
}

#[test]
fn request_is_refused_if_its_model_is_unserved_its_prompt_too_long_or_the_router_full() {
    let mut scenario = Scenario::with(RouterSettings { bookings_max: 1, ..settings(PrefillPlace::Auto) }, 1, 1);
    let refused = |scenario: &mut Scenario, request: &PlacementRequest| {
        scenario.state.place(request, &Excluded::default(), 1).map(|(id, _)| id)
    };
    let other = PlacementRequest { model: "other".to_owned(), ..scenario.request(10, hashes(1, 0, 0)) };
    assert_eq!(refused(&mut scenario, &other), Err(PlacementError::NoWorkerOfModel));
    let long = scenario.request(1_000_001, hashes(1, 0, 0));
    assert_eq!(refused(&mut scenario, &long), Err(PlacementError::NoEligibleWorker(NoEligibleWorker::PromptTooLong)));
    let unnamed = PlacementRequest { model: String::new(), ..scenario.request(10, hashes(1, 0, 0)) };
    let booking = refused(&mut scenario, &unnamed).expect("no model stands for the only one");
    let one_more = scenario.request(10, hashes(1, 0, 0));
    assert_eq!(refused(&mut scenario, &one_more), Err(PlacementError::TooManyBookings));
    scenario.state.release(booking);
    scenario.assert_idle();
    let without_workers = Scenario::new(settings(PrefillPlace::Auto)).state.place(&one_more, &Excluded::default(), 1);
    assert_eq!(without_workers, Err(PlacementError::NoEligibleWorker(NoEligibleWorker::NoDecodeWorker)));
}

#[test]
fn open_circuit_excludes_a_worker_unless_no_other_worker_is_left() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 2, 1);
    let request = scenario.request(100, hashes(1, 0, 6));
    let fail = |scenario: &mut Scenario, reason, instance: &str| {
        let (booking, _) = scenario.place(&request);
        scenario.state.on_failure(booking, instance, reason);
        scenario.state.release(booking);
    };
    for reason in [
        v1::FailureReason::AtCapacity,
        v1::FailureReason::InvalidRequest,
        v1::FailureReason::Draining,
        v1::FailureReason::WrongInstance,
    ] {
        (0..10).for_each(|_| fail(&mut scenario, reason, "d0-1"));
    }
    (0..10).for_each(|_| fail(&mut scenario, v1::FailureReason::EngineFailed, "unknown"));
    let open = |scenario: &Scenario| scenario.state.view().workers.iter().filter(|view| view.circuit_open).count();
    assert_eq!(open(&scenario), 0, "capacity, draining, invalid requests and other instances are no faults");
    (0..20).for_each(|_| fail(&mut scenario, v1::FailureReason::PrefillLost, "p0-1"));
    assert_eq!(open(&scenario), 1);
    (0..8).for_each(|_| {
        let (booking, placement) = scenario.place(&request);
        assert_eq!(name(&placement.prefill), "p1");
        scenario.state.release(booking);
    });
    (0..3).for_each(|_| fail(&mut scenario, v1::FailureReason::Timeout, "d0-1"));
    assert_eq!(open(&scenario), 2);
    let (booking, placement) = scenario.place(&request);
    assert_eq!(name(&placement.decode), "d0", "d0 is the only decode worker");
    scenario.state.on_first_token(booking);
    scenario.state.release(booking);
    assert!(open(&scenario) <= 1, "the first token closes the circuit");
    scenario.assert_idle();
}

#[test]
fn explanation_matches_the_placement_and_adds_no_booking() {
    for place in [PrefillPlace::Remote, PrefillPlace::Local, PrefillPlace::Auto] {
        let mut scenario = Scenario::with(settings(place), 3, 2);
        scenario.stored("p1", &hashes(1, 0, 40));
        scenario.stored("d1", &hashes(1, 0, 10));
        scenario.reports("p2", vec![], Load { pending_prefill_tokens: 5_000, ..Default::default() }, &[]);
        scenario.reports("d0", vec![], Load { running_sequences: 9, ..Default::default() }, &[]);
        let request = scenario.request(1_001, hashes(1, 0, 62));
        let reply = scenario.state.explain(&request);
        scenario.assert_idle();
        assert_eq!(reply.workers.len(), 5);
        for worker in &reply.workers {
            let costs = [&worker.as_prefill, &worker.as_decode, &worker.alone];
            let prefills = worker.role() == worker_info::Role::Prefill;
            let expected = [prefills, !prefills, !prefills];
            let allowed = [place != PrefillPlace::Local, place != PrefillPlace::Local, place != PrefillPlace::Remote];
            for ((cost, expected), allowed) in costs.into_iter().zip(expected).zip(allowed) {
                assert_eq!(cost.is_some(), expected && allowed, "{place:?} {worker:?}");
                let Some(cost) = cost else { continue };
                let parts = cost.queue_ms
                    + cost.compute_ms
                    + cost.interference_ms
                    + cost.transfer_ms
                    + cost.handoff_ms
                    + cost.decode_load_ms;
                assert!((cost.total_ms - parts).abs() < 1e-9 && cost.total_ms > 0.0, "{cost:?}");
            }
        }
        let (booking, placement) = scenario.place(&request);
        assert_eq!(reply.placement, Some(placement.clone()), "{}", reply.explanation);
        let chosen = placement.prefill.as_ref().map_or(format!("prefill and decode on {}:", name(&placement.decode)), |_| {
            format!("prefill on {},", name(&placement.prefill))
        });
        assert!(reply.explanation.contains(&chosen) && reply.explanation.contains("ms; "), "{}", reply.explanation);
        let assumed = "; prefill rate not measured yet: 2000 tokens/s assumed";
        assert!(reply.explanation.ends_with(assumed), "{}", reply.explanation);
        scenario.reports("d0", vec![], Load { prefill_tokens_per_second: 1_000.0, ..Default::default() }, &[]);
        let measured = scenario.state.explain(&request).explanation;
        assert!(!measured.contains("assumed"), "one rate is measured, and the others are assumed to be equal: {measured}");
        scenario.state.release(booking);
        scenario.assert_idle();
    }
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    let request = scenario.request(10, hashes(1, 0, 0));
    let reply = scenario.state.explain(&request);
    assert!(reply.placement.is_none() && reply.explanation.contains("no decode worker"), "{}", reply.explanation);
}

#[test]
fn prefill_worker_without_a_decode_worker_of_its_family_is_unpaired_with_a_reason() {
    let mut scenario = Scenario::with(settings(PrefillPlace::Remote), 0, 1);
    let join = |scenario: &mut Scenario, role, name: &str, family: &str| {
        let info = WorkerInfo { transfer_family: family.to_owned(), ..info(role, name) };
        scenario.join(info).expect("families need not agree");
    };
    let unpaired = |scenario: &Scenario| -> Vec<String> {
        let reasons = scenario.state.view().workers.into_iter().filter_map(|view| view.unpaired_reason);
        reasons.collect()
    };
    join(&mut scenario, worker_info::Role::Prefill, "p0", "nixl/2");
    join(&mut scenario, worker_info::Role::Prefill, "p1", WorkerInfo::NO_TRANSFER_FAMILY);
    join(&mut scenario, worker_info::Role::Decode, "d1", WorkerInfo::NO_TRANSFER_FAMILY);
    let request = scenario.request(100, hashes(1, 0, 6));
    let refused = scenario.state.place(&request, &Excluded::default(), 1).map(drop);
    assert_eq!(refused, Err(PlacementError::NoEligibleWorker(NoEligibleWorker::NoCommonFamily)));
    assert_eq!(scenario.state.unavailable_reason(), Some(NoEligibleWorker::NoCommonFamily.to_string()));
    let reasons = unpaired(&scenario);
    assert!(reasons[0].contains("family nixl/2,") && reasons[0].contains("Tandem's own transfers"), "{reasons:?}");
    assert!(reasons[1].contains("no transfer family,"), "{reasons:?}");

    join(&mut scenario, worker_info::Role::Decode, "d2", "nixl/2");
    assert_eq!((unpaired(&scenario).len(), scenario.state.unavailable_reason()), (1, None));
    let explained = scenario.state.explain(&request);
    let used: Vec<_> =
        explained.workers.iter().filter(|worker| worker.as_prefill.is_some() || worker.as_decode.is_some()).collect();
    assert!(used.iter().all(|worker| worker.transfer_family == "nixl/2" && worker.unpaired_reason.is_none()), "{used:?}");
    assert_eq!((used.len(), explained.workers[2].unpaired_reason.is_some()), (2, true));
    let (booking, placement) = scenario.place(&request);
    assert_eq!((name(&placement.prefill), name(&placement.decode)), ("p0".to_owned(), "d2".to_owned()));
    scenario.state.release(booking);
    scenario.assert_idle();
}
