//! The router's reports about itself and the cluster.

use super::{ClusterState, texts};
use crate::{route::NoEligibleWorker, wanted::WantedWorkers};
use std::sync::Arc;
use tandem_proto::{
    channel::OnRefused,
    v1::{self, Identity, WorkerInfo, worker_info},
};

impl ClusterState {
    /// Returns the identity on which all processes must agree: the operator's settings, with the cluster's name and version taken from the
    /// members if they are empty.
    pub(crate) fn identity(&self) -> Identity {
        let configured = self.settings.identity.clone();
        let Some(first) = self.members.values().next() else { return configured };
        let WorkerInfo { cluster, version, .. } = first.info.clone();
        configured.or(&Identity { cluster, version, ..Identity::default() })
    }

    /// Returns the identity on which all processes that serve or request the model must agree: [`Self::identity`], with empty fields taken
    /// from the model's members. An empty id stands for the only model.
    pub(crate) fn identity_of(&self, model: &str) -> Identity {
        let Ok(model) = self.members.requested_model(model) else { return self.identity() };
        let first = self.members.of_model(&model).next().expect("a member serves it");
        self.identity().or(&Identity { model: (*model).to_owned(), ..(&first.info).into() })
    }

    /// Returns a function that counts one call refused because it lacks the cluster key.
    pub(crate) fn count_unauthenticated(&self) -> OnRefused {
        tandem_process::on_refused(self.metrics.unauthenticated.clone())
    }

    /// Returns the reason why the router is still starting; `None` if it does not wait for workers that were listed at its start.
    pub(crate) fn starting_reason(&self) -> Option<String> {
        let (synced, known) = self.synced_of_known();
        self.unavailable.is_starting().then(|| texts::starting(synced, known))
    }

    /// Returns why no request can be placed at present; `None` if requests for at least one model can be placed.
    pub(crate) fn unavailable_reason(&self) -> Option<String> {
        let models = self.models();
        self.starting_reason().or_else(|| match &models[..] {
            [] => Some(self.explained(NoEligibleWorker::NoDecodeWorker)),
            [only] => only.unavailable_reason.clone(),
            several => texts::all_unavailable(several),
        })
    }

    /// Returns the text of the reason. If a role lacks workers, the text also says why listed workers have not joined.
    fn explained(&self, reason: NoEligibleWorker) -> String {
        match reason {
            NoEligibleWorker::NoDecodeWorker if self.synced_of_known().1 == 0 => texts::no_worker_known(&reason.to_string()),
            NoEligibleWorker::NoDecodeWorker | NoEligibleWorker::NoPrefillWorker => {
                texts::not_joined(&reason.to_string(), self.unavailable.values())
            }
            reason => reason.to_string(),
        }
    }

    /// Returns the models that members serve; if the settings name the only model, at most that one.
    fn models(&self) -> Vec<v1::ModelView> {
        let only = &*self.settings.identity.model;
        let view = |model: &Arc<str>| v1::ModelView {
            identity: Some(self.identity_of(model)),
            workers: self.members.of_model(model).count() as u32,
            unavailable_reason: self
                .members
                .unavailable_reason(model, self.settings.prefill)
                .map(|reason| self.explained(reason)),
        };
        self.members.models().into_iter().filter(|model| only.is_empty() || ***model == *only).map(view).collect()
    }

    /// Returns the router's view of the cluster: its members, bookings and unavailable workers.
    pub(crate) fn view(&self) -> v1::WorkersReply {
        let now = self.members.now();
        let workers = self.members.values().map(|member| v1::WorkerView {
            info: Some(WorkerInfo { approximate_index: self.members.has_approximate_index(member), ..member.info.clone() }),
            address: member.address.clone(),
            indexed_blocks: self.members.indexed_blocks(member),
            bookings: member.bookings.count,
            load: Some(member.stats.fill((&member.load).into())),
            placements: Some(member.placements),
            circuit_open: !member.breaker.admits(now),
            unpaired_reason: self.members.unpaired_reason(member),
            index_note: member.findings.note(),
            tiers: member.tiers(),
        });
        let (synced, known) = self.synced_of_known();
        v1::WorkersReply {
            workers: workers.collect(),
            bookings: self.bookings.by_id.len() as u32,
            identity: Some(self.identity()),
            unavailable_reason: self.unavailable_reason(),
            unavailable: self.unavailable.values().cloned().collect(),
            instance_id: self.instance_id.to_string(),
            peer_bookings: self.peers.count_bookings() as u32,
            peers: self.peers.len() as u32,
            synced_workers: synced as u32,
            known_workers: known as u32,
            models: self.models(),
            wanted: self.wanted.iter().map(wanted).collect(),
            has_service_levels: self.settings.levels.is_set(),
        }
    }
}

fn wanted(of: &WantedWorkers) -> v1::WantedWorkers {
    let WantedWorkers { model, role, wanted, present, reason, cheapest_to_lose } = of;
    v1::WantedWorkers {
        model: model.to_string(),
        role: worker_info::Role::from(*role).into(),
        wanted: *wanted as u32,
        present: *present as u32,
        reason: reason.clone(),
        cheapest_to_lose: cheapest_to_lose.clone(),
    }
}
