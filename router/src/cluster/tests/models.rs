//! Tests of clusters whose members serve several models.

use super::*;
use crate::settings::PolicyKind;
use std::time::Duration;
use tokio::time::advance;

const DECODE: worker_info::Role = worker_info::Role::Decode;
const PREFILL: worker_info::Role = worker_info::Role::Prefill;

fn serving(model: &str, role: worker_info::Role, name: &str) -> WorkerInfo {
    let revision = format!("revision of {model}");
    WorkerInfo { model: model.to_owned(), revision, ..info(role, name) }
}

impl Scenario {
    fn asking(&mut self, model: &str) -> PlacementRequest {
        PlacementRequest { model: model.to_owned(), ..self.request(100, hashes(1, 0, 6)) }
    }

    fn place_for(&mut self, model: &str) -> Result<(BookingId, v1::Placement), PlacementError> {
        let request = self.asking(model);
        self.state.place(&request, &Excluded::default(), 1)
    }

    /// Places a request for the model, releases it, and returns the name of its decode worker.
    fn decode_worker_for(&mut self, model: &str) -> Result<String, PlacementError> {
        let (booking, placement) = self.place_for(model)?;
        self.state.release(booking);
        Ok(name(&placement.decode))
    }
}

#[test]
fn members_of_one_model_agree_and_models_may_differ() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    scenario.join(serving("a", DECODE, "a0")).expect("the first of its model decides");
    let block_size = 2 * BLOCK;
    scenario.join(WorkerInfo { block_size, ..serving("b", DECODE, "b0") }).expect("the first of its model decides");
    for (bad, field) in [
        (serving("b", DECODE, "b1"), "block size"),
        (WorkerInfo { revision: "revision of a".to_owned(), block_size, ..serving("b", DECODE, "b1") }, "revision"),
        (WorkerInfo { version: "99.0.0".to_owned(), ..serving("c", DECODE, "c0") }, "version"),
    ] {
        let refused = scenario.join(bad).expect_err("it does not agree").to_string();
        assert!(refused.contains(field), "{field}: {refused}");
    }
    scenario.join(WorkerInfo { block_size, ..serving("b", PREFILL, "b1") }).expect("it agrees with its model");
    let identity = |model: &str| {
        let Identity { model, revision, block_size, .. } = scenario.state.identity_of(model);
        (model, revision, block_size)
    };
    assert_eq!(identity("b"), ("b".to_owned(), "revision of b".to_owned(), block_size));
    assert_eq!(identity("c"), (String::new(), String::new(), 0), "no member serves it yet");
    assert_eq!(identity(""), (String::new(), String::new(), 0), "there are several");
}

#[test]
fn named_model_of_the_router_excludes_other_models() {
    let identity = Identity { model: "a".to_owned(), ..RouterSettings::default().identity };
    let mut scenario = Scenario::new(RouterSettings { identity, ..settings(PrefillPlace::Auto) });
    let refused = scenario.join(serving("b", DECODE, "b0")).expect_err("it serves another model").to_string();
    assert!(refused.contains("model is b, but the cluster's is a"), "{refused}");
    scenario.join(serving("a", DECODE, "a0")).expect("it serves the model");
    assert_eq!(scenario.decode_worker_for(""), Ok("a0".to_owned()));
}

#[test]
fn requests_are_placed_only_on_workers_of_their_model() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    assert_eq!(scenario.decode_worker_for("a"), Err(NoEligibleWorker::NoDecodeWorker.into()));
    for (model, role, name) in [("a", DECODE, "a0"), ("b", PREFILL, "b0"), ("b", DECODE, "b1")] {
        scenario.join(serving(model, role, name)).expect("models may differ");
    }
    // The worker of the other model has the prompt's blocks and no load.
    scenario.stored("b0", &hashes(1, 0, 6));
    scenario.reports("a0", vec![], Load { pending_prefill_tokens: 50_000, running_sequences: 50, ..Default::default() }, &[]);
    assert_eq!(scenario.decode_worker_for("a"), Ok("a0".to_owned()));
    assert_eq!(scenario.decode_worker_for("b"), Ok("b1".to_owned()));
    assert_eq!(scenario.decode_worker_for("c"), Err(PlacementError::NoWorkerOfModel));
    assert_eq!(scenario.decode_worker_for(""), Err(PlacementError::NoModelNamed));
    // A failed worker is not replaced by one of another model.
    let mut excluded = Excluded::default();
    excluded.failed.insert("a0-1".into());
    excluded.suspect.insert("a0-1".into());
    let request = scenario.asking("a");
    let placed = scenario.state.place(&request, &excluded, 2).map(drop);
    assert_eq!(placed, Err(NoEligibleWorker::AllFailed.into()));
    let explained = scenario.state.explain(&request);
    let names: Vec<String> = explained.workers.iter().map(|worker| worker.worker.clone().expect("it is set").worker_id).collect();
    assert_eq!((names, explained.model), (vec!["a0".to_owned()], "a".to_owned()));
    scenario.assert_idle();
    let metrics = scenario.recorder.render();
    assert!(metrics.contains(r#"tandem_router_worker_info{worker="b1",model="b"} 1"#), "{metrics}");
    scenario.state.leave(scenario.member("a0"));
    assert_eq!(scenario.decode_worker_for(""), Ok("b1".to_owned()), "one model is left");
}

#[test]
fn models_become_available_one_by_one() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Remote));
    let models = |scenario: &Scenario| {
        let view = scenario.state.view();
        let models = view.models.into_iter().map(|model| {
            let id = model.identity.expect("it is set").model;
            (id, model.workers, model.unavailable_reason.is_none())
        });
        (models.collect::<Vec<_>>(), view.unavailable_reason)
    };
    assert_eq!(models(&scenario), (vec![], Some(NoEligibleWorker::NoDecodeWorker.to_string())));
    scenario.join(serving("b", DECODE, "b0")).expect("the first of its model decides");
    scenario.join(serving("a", PREFILL, "a0")).expect("the first of its model decides");
    let (found, reason) = models(&scenario);
    assert_eq!(found, [("a".to_owned(), 1, false), ("b".to_owned(), 1, false)]);
    let reason = reason.expect("each model lacks a worker");
    assert!(reason.contains("a: no decode worker") && reason.contains("b: no prefill worker"), "{reason}");
    scenario.join(serving("a", DECODE, "a1")).expect("it agrees");
    assert_eq!(models(&scenario), (vec![("a".to_owned(), 2, true), ("b".to_owned(), 1, false)], None));
    assert_eq!(scenario.decode_worker_for("b"), Err(NoEligibleWorker::NoPrefillWorker.into()));
}

#[test]
fn round_robin_counts_the_placements_of_each_model() {
    let policy = PolicyKind::RoundRobin;
    let mut scenario = Scenario::new(RouterSettings { policy, ..settings(PrefillPlace::Local) });
    for (model, name) in [("a", "a0"), ("b", "b0"), ("a", "a1"), ("b", "b1")] {
        scenario.join(serving(model, DECODE, name)).expect("models may differ");
    }
    let placed: Vec<String> =
        (0..4).flat_map(|_| ["a", "b"]).map(|model| scenario.decode_worker_for(model).expect("it is served")).collect();
    assert_eq!(placed, ["a0", "b0", "a1", "b1", "a0", "b0", "a1", "b1"]);
}

#[tokio::test(start_paused = true)]
async fn answers_of_one_model_say_nothing_about_another() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Local));
    for model in ["a", "b"] {
        for number in 0..2 {
            scenario.join(serving(model, DECODE, &format!("{model}{number}"))).expect("models may differ");
        }
        // The first worker has no free blocks, and the second one has a queue of 1 s.
        let full = Load { in_use_blocks: 7, ..Default::default() };
        scenario.reports(&format!("{model}0"), vec![], full, &[]);
        let queue = Load { pending_prefill_tokens: 2_000, free_blocks: 1_000, ..Default::default() };
        scenario.reports(&format!("{model}1"), vec![], queue, &[]);
    }
    for model in ["a", "b"] {
        assert_eq!(scenario.decode_worker_for(model), Ok(format!("{model}1")), "an answer is assumed to take 5 s");
    }
    let (booking, _) = scenario.place_for("a").expect("it is served");
    scenario.state.on_prefilled(booking, None);
    advance(Duration::from_millis(10)).await;
    scenario.state.release(booking);
    assert_eq!(scenario.decode_worker_for("a"), Ok("a0".to_owned()), "its answers are short");
    assert_eq!(scenario.decode_worker_for("b"), Ok("b1".to_owned()));
}

#[test]
fn request_of_another_router_is_booked_whatever_its_model() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    scenario.join(serving("a", DECODE, "a0")).expect("the first of its model decides");
    for (model, instance) in [("a", "a0-1"), ("b", "b0-1")] {
        let existing =
            v1::ExistingPlacement { decode_instance_id: instance.to_owned(), prefill_instance_id: None, prefilling: true };
        let request = scenario.asking(model);
        let booking = scenario.state.rebook(&request, existing).expect("its workers need not be members yet");
        scenario.state.on_prefilled(booking, None);
        scenario.state.release(booking);
    }
    scenario.assert_idle();
}
