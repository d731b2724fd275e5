//! The models of each member: its own, and its LoRAs, which may change.

use super::{ClusterMembers, JoinError, MemberId};
use std::collections::BTreeSet;
use tandem_proto::v1::WorkerInfo;

/// Returns the models that a worker serves: its own, then its LoRAs.
pub(super) fn models_of(info: &WorkerInfo) -> impl Iterator<Item = &str> {
    std::iter::once(&*info.model).chain(info.loras.iter().map(String::as_str))
}

/// Returns a text for operators: whether the worker serves the model as its base model or as a LoRA.
fn use_of(model: &str, info: &WorkerInfo) -> String {
    if model == info.model { "a base model".to_owned() } else { format!("a LoRA of {}", info.model) }
}

impl ClusterMembers {
    /// Checks that each model of the worker is the same model on all other members that serve it.
    ///
    /// # Errors
    /// A name belongs to two models.
    pub(in crate::cluster) fn check_models(&self, info: &WorkerInfo) -> Result<(), JoinError> {
        let own: BTreeSet<&str> = models_of(info).collect();
        for other in self.values().map(|member| &member.info).filter(|other| other.instance_id != info.instance_id) {
            let in_common = models_of(other).filter(|model| own.contains(model));
            let mut roles = in_common.map(|model| (model, use_of(model, info), use_of(model, other)));
            if let Some((model, one, other)) = roles.find(|(_, one, other)| one != other) {
                return Err(JoinError::Ambiguous { model: model.to_owned(), one, other });
            }
        }
        Ok(())
    }

    /// Replaces the LoRAs of the member by those in `info`.
    pub(in crate::cluster) fn set_loras(&mut self, id: MemberId, info: &WorkerInfo) {
        let models = models_of(info).map(|model| self.shared(model)).collect();
        let Some(member) = self.by_id.get_mut(&id) else { return };
        member.series.show_models(&member.info, 0.0);
        member.series.show_models(info, 1.0);
        (member.info.loras, member.models) = (info.loras.clone(), models);
    }
}
