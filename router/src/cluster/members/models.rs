//! The models of each member: its own, and its LoRAs, which may change.

use super::{ClusterMembers, JoinError, Member, MemberId};
use std::{collections::BTreeSet, sync::Arc};
use tandem_proto::v1::WorkerInfo;

/// Returns the models that a worker serves: its own, then its LoRAs.
pub(super) fn models_of(info: &WorkerInfo) -> impl Iterator<Item = &str> {
    std::iter::once(&*info.model).chain(info.loras.iter().map(String::as_str))
}

/// Returns a text for operators: whether the worker serves the model as its base model or as a LoRA.
fn use_of(model: &str, info: &WorkerInfo) -> String {
    if model == info.model { "a base model".to_owned() } else { format!("a LoRA of {}", info.model) }
}

/// Checks that each model that both workers serve is the same model on both.
///
/// # Errors
/// A name belongs to two models.
pub(super) fn check_models(info: &WorkerInfo, other: &WorkerInfo) -> Result<(), JoinError> {
    let own: BTreeSet<&str> = models_of(info).collect();
    let in_common = models_of(other).filter(|model| own.contains(model));
    let mut uses = in_common.map(|model| (model.to_owned(), use_of(model, info), use_of(model, other)));
    let differs = uses.find(|(_, one, other)| one != other);
    differs.map_or(Ok(()), |(model, one, other)| Err(JoinError::Ambiguous { model, one, other }))
}

impl ClusterMembers {
    /// Replaces the LoRAs of the member by those in `info`.
    ///
    /// # Errors
    /// A LoRA has the name of another model.
    pub(crate) fn set_loras(&mut self, id: MemberId, info: &WorkerInfo) -> Result<(), JoinError> {
        let is_other = |other: &&WorkerInfo| other.instance_id != info.instance_id;
        self.values().map(|member| &member.info).filter(is_other).try_for_each(|other| check_models(info, other))?;
        let models = models_of(info).map(|model| self.shared(model)).collect();
        let Some(member) = self.by_id.get_mut(&id) else { return Ok(()) };
        member.series.show_models(&member.info, 0.0);
        member.series.show_models(info, 1.0);
        (member.info.loras, member.models) = (info.loras.clone(), models);
        Ok(())
    }
}

impl Member {
    /// Returns what only some workers serve: the models and the transfer family.
    pub(in crate::cluster) fn served(&self) -> impl Iterator<Item = &Arc<str>> {
        self.models.iter().chain(&self.family)
    }

    /// Returns the model of which the worker's other models are LoRAs.
    pub(in crate::cluster) fn base_model(&self) -> &Arc<str> {
        &self.models[0]
    }
}
