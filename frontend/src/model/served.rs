//! The models of one frontend, by their ids.

use super::ServedModel;
use std::{collections::BTreeSet, sync::Arc};
use tandem_proto::v1::Identity;

/// A served model, with the identity on which all processes that serve or request it must agree. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Served {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) identity: Arc<Identity>,
}

/// The served models, at least one, in the order of the settings.
pub(crate) struct Models(Vec<Served>);

impl Models {
    /// Whether these models can be served together: there is one, and each id is used once.
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

    /// The model that is shown where only one is.
    pub(crate) fn first(&self) -> &Served {
        &self.0[0]
    }

    /// Returns the length of the longest context, by which requests are limited before their model is known.
    pub(crate) fn context_length_max(&self) -> u32 {
        self.iter().map(|served| served.model.context_length).max().unwrap_or_default()
    }
}
