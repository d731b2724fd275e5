//! Tests of clusters whose members serve several models.

use super::*;
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
fn members_agree_on_the_identity_of_each_model_but_models_may_differ() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    scenario.join(serving("a", DECODE, "a0")).expect("the first member of a model determines its identity");
    let block_size = 2 * BLOCK;
    scenario
        .join(WorkerInfo { block_size, ..serving("b", DECODE, "b0") })
        .expect("the first member of a model determines its identity");
    for (bad, field) in [
        (serving("b", DECODE, "b1"), "block size"),
        (WorkerInfo { revision: "revision of a".to_owned(), block_size, ..serving("b", DECODE, "b1") }, "revision"),
        (WorkerInfo { version: "99.0.0".to_owned(), ..serving("c", DECODE, "c0") }, "version"),
    ] {
        let refused = scenario.join(bad).expect_err("the worker differs from the other members of its model").to_string();
        assert!(refused.contains(field), "{field}: {refused}");
    }
    scenario
        .join(WorkerInfo { block_size, ..serving("b", PREFILL, "b1") })
        .expect("the worker agrees with the other members of its model");
    let identity = |model: &str| {
        let Identity { model, revision, block_size, .. } = scenario.state.identity_of(model);
        (model, revision, block_size)
    };
    assert_eq!(identity("b"), ("b".to_owned(), "revision of b".to_owned(), block_size));
    assert_eq!(identity("c"), (String::new(), String::new(), 0), "no member serves the model yet");
    assert_eq!(identity(""), (String::new(), String::new(), 0), "several models are served");
}

#[test]
fn router_with_a_served_model_name_excludes_workers_of_other_models() {
    let identity = Identity { model: "a".to_owned(), ..RouterSettings::default().identity };
    let mut scenario = Scenario::new(RouterSettings { identity, ..settings(PrefillPlace::Auto) });
    let refused = scenario.join(serving("b", DECODE, "b0")).expect_err("the worker serves another model").to_string();
    assert!(refused.contains("model is b, but the cluster's is a"), "{refused}");
    scenario.join(serving("a", DECODE, "a0")).expect("the worker serves the model");
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
    // A failed worker must not be replaced by a worker of another model.
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
    assert_eq!(scenario.decode_worker_for(""), Ok("b1".to_owned()), "only one model is served");
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
    let (none, reason) = models(&scenario);
    assert!(
        none.is_empty()
            && reason.is_some_and(|reason| reason.ends_with("list of workers is empty (--workers, --workers-file or --etcd)"))
    );
    scenario.join(serving("b", DECODE, "b0")).expect("the first member of a model determines its identity");
    scenario.join(serving("a", PREFILL, "a0")).expect("the first member of a model determines its identity");
    let (found, reason) = models(&scenario);
    assert_eq!(found, [("a".to_owned(), 1, false), ("b".to_owned(), 1, false)]);
    let reason = reason.expect("each model lacks a worker");
    assert!(reason.contains("a: no decode worker") && reason.contains("b: no prefill worker"), "{reason}");
    scenario.join(serving("a", DECODE, "a1")).expect("it agrees");
    assert_eq!(models(&scenario), (vec![("a".to_owned(), 2, true), ("b".to_owned(), 1, false)], None));
    assert_eq!(scenario.decode_worker_for("b"), Err(NoEligibleWorker::NoPrefillWorker.into()));
}

#[tokio::test(start_paused = true)]
async fn answer_times_of_models_are_measured_separately() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Local));
    for model in ["a", "b"] {
        for number in 0..2 {
            scenario.join(serving(model, DECODE, &format!("{model}{number}"))).expect("models may differ");
        }
        // The first worker has no free blocks, and the second one has a queue of one second.
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
    assert_eq!(scenario.decode_worker_for("a"), Ok("a0".to_owned()), "the answers of the model are short");
    assert_eq!(scenario.decode_worker_for("b"), Ok("b1".to_owned()));
}

#[test]
fn request_that_another_router_has_placed_is_booked_even_if_no_member_serves_its_model() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    scenario.join(serving("a", DECODE, "a0")).expect("the first member of a model determines its identity");
    for (model, instance) in [("a", "a0-1"), ("b", "b0-1")] {
        let existing =
            v1::ExistingPlacement { decode_instance_id: instance.to_owned(), prefill_instance_id: None, prefilling: true };
        let request = scenario.asking(model);
        let booking = scenario.state.rebook(&request, existing).expect("the workers of the request need not be members yet");
        scenario.state.on_prefilled(booking, None);
        scenario.state.release(booking);
    }
    scenario.assert_idle();
}

fn with_loras(loras: &[&str], info: WorkerInfo) -> WorkerInfo {
    WorkerInfo { loras: loras.iter().map(|&lora| lora.to_owned()).collect(), ..info }
}

#[test]
fn lora_is_a_model_of_the_workers_that_have_it() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    scenario.join(serving("a", DECODE, "a0")).expect("the first member of a model determines its identity");
    scenario
        .join(with_loras(&["x", "y"], serving("a", DECODE, "a1")))
        .expect("the worker agrees with the other members of its model");
    scenario.stored("a0", &hashes(1, 0, 6));
    assert_eq!(scenario.decode_worker_for("a"), Ok("a0".to_owned()), "the worker has the prompt's blocks");
    assert_eq!(scenario.decode_worker_for("x"), Ok("a1".to_owned()), "the other worker does not have the LoRA");
    assert_eq!(scenario.decode_worker_for("z"), Err(PlacementError::NoWorkerOfModel));
    assert_eq!(scenario.decode_worker_for(""), Err(PlacementError::NoModelNamed));
    let models: Vec<(String, String, u32)> = scenario
        .state
        .view()
        .models
        .into_iter()
        .map(|view| (view.identity.clone().expect("it is set"), view))
        .map(|(identity, view)| (identity.model, identity.revision, view.workers))
        .collect();
    let of_a = |model: &str, workers| (model.to_owned(), "revision of a".to_owned(), workers);
    assert_eq!(models, [of_a("a", 2), of_a("x", 1), of_a("y", 1)]);
    let metrics = scenario.recorder.render();
    assert!(metrics.contains(r#"tandem_router_worker_info{worker="a1",model="y"} 1"#), "{metrics}");
    scenario.assert_idle();
}

#[test]
fn member_serves_the_loras_that_it_reports_later() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    for name in ["a0", "a1"] {
        scenario.join(with_loras(&["x"], serving("a", DECODE, name))).expect("they agree");
    }
    scenario.stored("a1", &hashes(1, 0, 6));
    let (running, placed) = scenario.place_for("x").expect("both workers serve the LoRA");
    assert_eq!(name(&placed.decode), "a1", "the worker has the prompt's blocks");
    let reports = |scenario: &mut Scenario, name: &str, loras: &[&str]| {
        let id = scenario.member(name);
        scenario.state.members.set_loras(id, &with_loras(loras, serving("a", DECODE, name)))
    };
    reports(&mut scenario, "a1", &["y"]).expect("the name is new");
    assert_eq!(scenario.decode_worker_for("x"), Ok("a0".to_owned()), "the worker with the blocks has unloaded the LoRA");
    assert_eq!(scenario.decode_worker_for("y"), Ok("a1".to_owned()));
    reports(&mut scenario, "a0", &[]).expect("no name is in use");
    assert_eq!(scenario.decode_worker_for("x"), Err(PlacementError::NoWorkerOfModel));
    let metrics = scenario.recorder.render();
    for (worker, model, served) in [("a1", "x", 0), ("a1", "y", 1), ("a0", "x", 0), ("a1", "a", 1)] {
        let line = format!("tandem_router_worker_info{{worker=\"{worker}\",model=\"{model}\"}} {served}");
        assert!(metrics.contains(&line), "{line}: {metrics}");
    }
    scenario.join(serving("z", DECODE, "z0")).expect("the name is not that of a LoRA");
    let refused = reports(&mut scenario, "a0", &["z"]).expect_err("the name is that of a base model").to_string();
    assert!(refused.contains("a LoRA of a on this worker and a base model"), "{refused}");
    // The request that runs with the unloaded LoRA ends as any other.
    scenario.state.release(running);
    scenario.assert_idle();
}

#[test]
fn load_of_a_worker_includes_requests_for_all_its_models() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Local));
    for name in ["a0", "a1"] {
        scenario.join(with_loras(&["x"], serving("a", DECODE, name))).expect("they agree");
    }
    let (of_base, first) = scenario.place_for("a").expect("it is served");
    let (of_lora, second) = scenario.place_for("x").expect("it is served");
    assert_ne!(name(&first.decode), name(&second.decode), "the first worker is busy");
    scenario.state.release(of_base);
    scenario.state.release(of_lora);
}

#[test]
fn worker_that_uses_a_model_name_for_another_base_model_or_lora_cannot_join() {
    let mut scenario = Scenario::new(settings(PrefillPlace::Auto));
    scenario.join(with_loras(&["x"], serving("a", DECODE, "a0"))).expect("the first member of a model determines its identity");
    for (other, text) in [
        (with_loras(&["x"], serving("b", DECODE, "b0")), "a LoRA of b on this worker and a LoRA of a"),
        (WorkerInfo { revision: String::new(), ..serving("x", DECODE, "x0") }, "a base model on this worker and a LoRA of a"),
        (with_loras(&["a"], serving("c", DECODE, "c0")), "a LoRA of c on this worker and a base model"),
    ] {
        let refused = scenario.join(other).expect_err("the name is already in use").to_string();
        assert!(refused.contains(text), "{refused}");
    }
    scenario.join(with_loras(&["x"], serving("a", PREFILL, "a1"))).expect("the workers have the same LoRA");
}

#[test]
fn router_with_a_served_model_name_serves_no_loras() {
    let identity = Identity { model: "a".to_owned(), ..RouterSettings::default().identity };
    let mut scenario = Scenario::new(RouterSettings { identity, ..settings(PrefillPlace::Auto) });
    scenario.join(with_loras(&["x"], serving("a", DECODE, "a0"))).expect("the worker serves the model");
    assert_eq!(scenario.state.view().models.len(), 1);
    let requested = Identity { model: "x".to_owned(), ..RouterSettings::default().identity };
    assert!(requested.fits(&scenario.state.identity_of("x")).is_err());
}
