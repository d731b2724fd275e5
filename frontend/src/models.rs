//! The models of one frontend, by their ids.

use std::{
    collections::BTreeSet,
    sync::{Arc, atomic::Ordering},
};
use tandem_proto::v1::{Identity, WorkerInfo, worker_info::Role};
use tandem_text::ServedModel;

/// A served model, with the identity on which all processes that serve or request it must agree. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) identity: Arc<Identity>,
}

impl Served {
    /// Stores how many tokens the largest decode worker of the model can hold, and whether one accepts images. Without a decode worker, what
    /// was last known stays.
    pub(crate) fn learn<'a>(&self, workers: impl Iterator<Item = &'a WorkerInfo>) {
        let id = &self.model.id;
        let of_model = workers.filter(|info| info.role() == Role::Decode && (info.model == *id || info.loras.contains(id)));
        let of_model: Vec<_> = of_model.collect();
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

/// The served models, at least one, in the order of the settings.
pub(crate) struct Models(Vec<Served>);

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
        Self(models.into_iter().map(served).collect())
    }

    pub(crate) fn get(&self, id: &str) -> Option<&Served> {
        self.iter().find(|served| served.model.id == id)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Served> {
        self.0.iter()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns the first model, for places that show only one.
    pub(crate) fn first(&self) -> &Served {
        &self.0[0]
    }

    /// Returns the length of the longest context, by which requests are limited before their model is known.
    pub(crate) fn context_length_max(&self) -> u32 {
        self.iter().map(|served| served.model.context_length).max().unwrap_or_default()
    }
}
