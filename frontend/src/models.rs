//! The models of one frontend, by their ids.

use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, atomic::Ordering},
};
use tandem_proto::v1::{Identity, WorkerInfo, WorkersReply, worker_info::Role};
use tandem_text::ServedModel;

/// A served model, with the identity on which all processes that serve or request it must agree. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) identity: Arc<Identity>,
}

impl Served {
    /// Returns the model's LoRA of this name. It has the model's tokenizer and chat template.
    fn lora(&self, name: &str) -> Self {
        let identity = Identity { model: name.to_owned(), ..(*self.identity).clone() };
        Self { model: self.model.named(name).into(), identity: identity.into() }
    }

    /// Returns the decode workers of the model in the views of routers.
    fn decoding<'a>(&self, views: impl IntoIterator<Item = &'a WorkersReply>) -> Vec<&'a WorkerInfo> {
        let id = &self.model.id;
        let is_it = |info: &&WorkerInfo| info.role() == Role::Decode && (info.model == *id || info.loras.contains(id));
        described(views).filter(is_it).collect()
    }

    /// Whether requests from here reach no decode worker of the model, although there are some: those of an endpoint picker, which has
    /// `alternatives`, reach only workers that observe their engine, and those of a frontend only the others.
    pub(crate) fn is_out_of_reach(&self, view: &WorkersReply, alternatives: Option<u32>) -> bool {
        let observes = self.decoding([view]).into_iter().map(|info| !info.engine_endpoint.is_empty());
        observes.collect::<BTreeSet<_>>() == BTreeSet::from([alternatives.is_none()])
    }

    /// Stores how many tokens the largest decode worker of the model can hold, and whether one accepts images. Without a decode worker, what
    /// was last known stays.
    fn learn(&self, views: &[&WorkersReply]) {
        let of_model = self.decoding(views.iter().copied());
        if !of_model.is_empty() {
            self.model.reads_images.store(of_model.iter().any(|info| info.accepts_images), Ordering::Relaxed);
        }
        let held = of_model.iter().map(|info| {
            // 0 stands for a context without a limit.
            let context = if info.context_length == 0 { u32::MAX } else { info.context_length };
            info.capacity_blocks.saturating_mul(info.block_size).min(context)
        });
        if let Some(held) = held.max().filter(|held| *held > 0) {
            self.model.set_held_max(held);
        }
    }
}

/// The served models: those of the settings, at least one, and their LoRAs, which workers load and unload at any time.
pub(crate) struct Models {
    /// In the order of the settings.
    configured: Vec<Served>,
    /// The LoRAs that workers serve and that the settings do not name, by their names, each with its base model.
    loras: Mutex<BTreeMap<String, (Served, Arc<ServedModel>)>>,
}

/// Returns the descriptions of all workers in the views of routers.
fn described<'a>(views: impl IntoIterator<Item = &'a WorkersReply>) -> impl Iterator<Item = &'a WorkerInfo> {
    views.into_iter().flat_map(|view| &view.workers).filter_map(|worker| worker.info.as_ref())
}

impl Models {
    /// Whether these models can be served together: there is at least one, and no two have the same id.
    pub(crate) fn can_be_served(models: &[ServedModel]) -> bool {
        let ids: BTreeSet<&str> = models.iter().map(|model| &*model.id).collect();
        !models.is_empty() && ids.len() == models.len()
    }

    /// `cluster` is the part of the identity that all models have in common.
    pub(crate) fn new(models: Vec<ServedModel>, cluster: &Identity) -> Self {
        let served = |model: ServedModel| {
            let identity = Identity { model: model.id.clone(), revision: model.revision.clone(), ..cluster.clone() };
            Served { model: model.into(), identity: identity.into() }
        };
        Self { configured: models.into_iter().map(served).collect(), loras: Mutex::default() }
    }

    pub(crate) fn get(&self, id: &str) -> Option<Served> {
        let configured = self.iter().find(|served| served.model.id == id);
        configured.cloned().or_else(|| self.loras.lock().get(id).map(|(lora, _)| lora.clone()))
    }

    /// Returns the models of the settings.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Served> {
        self.configured.iter()
    }

    /// Returns the models of the settings, then the LoRAs.
    pub(crate) fn all(&self) -> Vec<Served> {
        let loras = self.loras.lock();
        self.iter().chain(loras.values().map(|(lora, _)| lora)).cloned().collect()
    }

    /// Adds the LoRAs that workers in a router's view serve.
    pub(crate) fn add_loras(&self, view: &WorkersReply) {
        let mut loras = self.loras.lock();
        for info in described([view]) {
            let Some(base) = self.iter().find(|served| served.model.id == info.model) else { continue };
            for name in &info.loras {
                if !loras.contains_key(name) && !self.iter().any(|served| served.model.id == *name) {
                    loras.insert(name.clone(), (base.lora(name), base.model.clone()));
                }
            }
        }
    }

    /// Removes the LoRAs that no worker in the views of all routers serves. While there is no decode worker of their base model, they stay: the worker
    /// that serves them may be restarting, and requests may be sent again.
    pub(crate) fn remove_loras(&self, views: &[&WorkersReply]) {
        let decoding = || described(views.iter().copied()).filter(|info| info.role() == Role::Decode);
        let served: BTreeSet<&String> = decoding().flat_map(|info| &info.loras).collect();
        let bases: BTreeSet<&String> = decoding().map(|info| &info.model).collect();
        self.loras.lock().retain(|name, (_, base)| served.contains(name) || !bases.contains(&base.id));
    }

    /// Stores how many tokens the workers of each model can hold, and whether they accept images.
    pub(crate) fn learn_from(&self, views: &[&WorkersReply]) {
        self.all().iter().for_each(|served| served.learn(views));
    }

    /// Returns the number of models of the settings.
    pub(crate) fn len(&self) -> usize {
        self.configured.len()
    }

    /// Returns the first model, for places that show only one.
    pub(crate) fn first(&self) -> &Served {
        &self.configured[0]
    }

    /// Returns the length of the longest context, by which requests are limited before their model is known.
    pub(crate) fn context_length_max(&self) -> u32 {
        self.iter().map(|served| served.model.context_length).max().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::WorkerView;

    /// Returns a view with workers of these roles and base models, with their LoRAs.
    fn view(workers: &[(Role, &str, &[&str])]) -> WorkersReply {
        let worker = |(role, model, loras): &(Role, &str, &[&str])| {
            let loras = loras.iter().map(|&lora| lora.to_owned()).collect();
            let info = WorkerInfo {
                role: (*role).into(),
                model: (*model).to_owned(),
                loras,
                capacity_blocks: 10,
                block_size: 16,
                ..Default::default()
            };
            WorkerView { info: Some(info), ..Default::default() }
        };
        WorkersReply { workers: workers.iter().map(worker).collect(), ..Default::default() }
    }

    fn ids(models: &Models) -> Vec<String> {
        models.all().iter().map(|served| served.model.id.clone()).collect()
    }

    #[test]
    fn loras_are_those_that_workers_serve_now() {
        let models = Models::new(vec![ServedModel::sim("a"), ServedModel::sim("b")], &Identity::default());
        let (decode, prefill) = (Role::Decode, Role::Prefill);
        let first = view(&[(decode, "a", &["x", "b"]), (decode, "other", &["y"]), (prefill, "b", &["z"])]);
        models.add_loras(&first);
        assert_eq!(ids(&models), ["a", "b", "x", "z"], "a LoRA needs a base model of the settings and a name of its own");
        let lora = models.get("x").expect("it is served");
        assert_eq!((lora.identity.model.as_str(), &lora.identity.revision), ("x", &models.first().identity.revision));
        models.learn_from(&[&first]);
        assert_eq!(lora.model.usable_context(), 160);

        models.remove_loras(&[]);
        models.remove_loras(&[&view(&[(decode, "b", &["z"])]), &view(&[])]);
        assert_eq!(ids(&models), ["a", "b", "x", "z"], "the worker of the other model may be restarting");
        let (with, without) =
            (view(&[(decode, "a", &["x"])]), view(&[(decode, "a", &[]), (decode, "b", &[]), (prefill, "b", &["z"])]));
        models.remove_loras(&[&without, &with]);
        assert_eq!(ids(&models), ["a", "b", "x"], "a prefill worker alone cannot serve a LoRA");
        models.remove_loras(&[&without]);
        assert_eq!(ids(&models), ["a", "b"]);
        assert!(models.get("x").is_none() && models.get("a").is_some());
    }

    #[test]
    fn picker_reaches_only_workers_that_observe_and_a_frontend_only_the_others() {
        let models = Models::new(vec![ServedModel::sim("a")], &Identity::default());
        let (decode, prefill) = (Role::Decode, Role::Prefill);
        for (kinds, of_picker, of_frontend) in [
            (&[(decode, "a", false)][..], false, true),
            (&[(decode, "a", true)], true, false),
            (&[(decode, "a", true), (decode, "a", false)], true, true),
            (&[(decode, "a", false), (decode, "b", true)], false, true),
            (&[(prefill, "a", false), (decode, "a", true)], true, false),
        ] {
            let workers: Vec<_> = kinds.iter().map(|(role, model, _)| (*role, *model, &[][..])).collect();
            let mut view = view(&workers);
            for (worker, (_, _, observes)) in view.workers.iter_mut().zip(kinds) {
                let info = worker.info.as_mut().expect("each worker is described");
                info.engine_endpoint = if *observes { "10.0.0.1:80".to_owned() } else { String::new() };
            }
            let reaches = |alternatives| !models.first().is_out_of_reach(&view, alternatives);
            assert_eq!((reaches(Some(0)), reaches(None)), (of_picker, of_frontend), "{kinds:?}");
        }
    }
}
