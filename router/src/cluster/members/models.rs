//! The models of each member: its own, and its LoRAs, which may change.

use super::{ClusterMembers, JoinError, MemberId};
use std::collections::BTreeSet;
use tandem_proto::v1::WorkerInfo;

/// Returns the models that a worker serves: its own, then its LoRAs.
fn models_of(info: &WorkerInfo) -> impl Iterator<Item = &str> {
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
        let Some(at) = self.at(id) else { return Ok(()) };
        let member = &mut self.all[at];
        member.series.show_models(&member.info, 0.0);
        member.series.show_models(info, 1.0);
        member.info.loras.clone_from(&info.loras);
        self.remove_models(at);
        self.add_models(at, info);
        Ok(())
    }

    /// Adds the member at this position to the lists of the models that it serves.
    pub(super) fn add_models(&mut self, at: usize, info: &WorkerInfo) {
        for model in models_of(info) {
            if !self.by_model.contains_key(model) {
                self.by_model.insert(model.into(), Vec::new());
            }
            let list = self.by_model.get_mut(model).expect("it was inserted");
            if let Err(place) = list.binary_search(&(at as u32)) {
                list.insert(place, at as u32);
            }
        }
    }

    /// Removes the member at this position from the lists of all models.
    pub(super) fn remove_models(&mut self, at: usize) {
        self.by_model.retain(|_, list| {
            list.retain(|other| *other as usize != at);
            !list.is_empty()
        });
    }
}
