//! Tests of the cluster's state. This file has the fixture, the modules have the tests.

mod bookings;
mod corrections;
mod cost;
mod membership;
mod models;
mod peers;
mod placement;
mod prefix;
mod tiers;
mod wait;
mod wanted;

use super::*;
use crate::{Costs, PrefillPlace, route::NoEligibleWorker};
use std::collections::BTreeSet;
use tandem_kv::{Change, KvEvent, Load, Priority, SequenceHash, StoredChain};
use tandem_proto::v1::{Identity, worker_info};

const BLOCK: u32 = 16;

impl ClusterMembers {
    fn get(&self, id: MemberId) -> &Member {
        self.iter().find(|(other, _)| **other == id).expect("the worker is a member").1
    }
}

impl ClusterState {
    /// Replaces the member's cache by an empty one.
    fn empty(&mut self, id: MemberId) {
        let index = self.members.index.clone();
        self.members.replace(id, index.replacement());
    }
}

struct Scenario {
    state: ClusterState,
    recorder: Metrics,
    requests: u64,
}

fn info(role: worker_info::Role, name: &str) -> WorkerInfo {
    WorkerInfo {
        role: role.into(),
        worker_id: name.to_owned(),
        instance_id: format!("{name}-1"),
        model: "m".to_owned(),
        revision: "r".to_owned(),
        block_size: BLOCK,
        capacity_blocks: 100_000,
        context_length: 1_000_000,
        block_bytes: 1_000,
        ..Default::default()
    }
}

fn settings(prefill: PrefillPlace) -> RouterSettings {
    RouterSettings { prefill, seed: 11, ..Default::default() }
}

/// Returns the hashes of the prompt `name`, which has its first `shared` blocks in common with all other prompts.
fn hashes(name: u64, shared: u64, blocks: u64) -> Arc<[SequenceHash]> {
    (0..blocks).map(|at| SequenceHash(if at < shared { at + 1 } else { (name + 1) << 32 | at })).collect()
}

impl Scenario {
    fn new(settings: RouterSettings) -> Self {
        let recorder = Metrics::default();
        let state = Cluster::new(settings, recorder.clone()).state.into_inner();
        Self { state, recorder, requests: 0 }
    }

    /// Returns a cluster of `prefill` prefill workers p0, p1, … and `decode` decode workers d0, d1, …
    fn with(settings: RouterSettings, prefill: usize, decode: usize) -> Self {
        let mut scenario = Self::new(settings);
        for (role, letter, count) in [(worker_info::Role::Prefill, 'p', prefill), (worker_info::Role::Decode, 'd', decode)] {
            for number in 0..count {
                scenario.join(info(role, &format!("{letter}{number}"))).expect("the worker agrees with the other members");
            }
        }
        scenario
    }

    fn join(&mut self, info: WorkerInfo) -> Result<MemberId, JoinError> {
        self.state.join_empty(info)
    }

    fn member(&self, name: &str) -> MemberId {
        *self.state.members.iter().find(|(_, member)| member.info.worker_id == name).expect("the worker is a member").0
    }

    fn request(&mut self, prompt_tokens: u32, hashes: Arc<[SequenceHash]>) -> PlacementRequest {
        self.requests += 1;
        PlacementRequest {
            request_id: format!("r{}", self.requests).into(),
            model: "m".to_owned(),
            hashes,
            prompt_tokens,
            samples: 1,
            min_tokens: 0,
            max_tokens: 0,
            prompt_logits: false,
            has_images: false,
            account: "".into(),
            priority: Priority::default(),
            max_wait: None,
            equal_prompt: None,
            other_namespace_blocks: 0,
            endpoints: None,
        }
    }

    fn place(&mut self, request: &PlacementRequest) -> (BookingId, v1::Placement) {
        self.state.place(request, &Excluded::default(), 1).expect("a worker is eligible")
    }

    fn place_hashes(&mut self, prompt_tokens: u32, hashes: Arc<[SequenceHash]>) -> (BookingId, v1::Placement) {
        let request = self.request(prompt_tokens, hashes);
        self.place(&request)
    }

    fn reports(&mut self, name: &str, events: Vec<KvEvent>, load: Load, included_request_ids: &[&str]) {
        let included_request_ids = included_request_ids.iter().map(|id| (*id).to_owned()).collect();
        let id = self.member(name);
        self.state.apply(id, KvBatch { events, load, included_request_ids, ..Default::default() }, ReportedStats::default());
    }

    fn stored(&mut self, name: &str, hashes: &[SequenceHash]) {
        let chain = StoredChain { parent: None, sequence_hashes: hashes.to_vec() };
        self.reports(name, vec![KvEvent { event_id: 1, change: Change::Stored(chain) }], Load::default(), &[]);
    }

    /// Returns the tokens and sequences that bookings add to the worker's own report, and the number of bookings on the worker.
    fn booked(&self, name: &str) -> (u64, u64, u32) {
        let booked = &self.state.members.get(self.member(name)).bookings;
        (booked.tokens, booked.sequences, booked.count)
    }

    /// Returns how many leading blocks of the prompt are about to be computed on the worker.
    fn predicted(&self, name: &str, hashes: &[SequenceHash]) -> u32 {
        let slot = self.state.members.get(self.member(name)).slot;
        self.state.members.predictions.leading_blocks(hashes).get(slot.0 as usize).copied().unwrap_or(0)
    }

    fn assert_idle(&self) {
        assert!(self.state.bookings.by_id.is_empty());
        for member in self.state.members.values() {
            let booked = &member.bookings;
            assert_eq!((booked.tokens, booked.sequences, booked.count, booked.answer_tokens), (0, 0, 0, 0));
            assert!(member.queue.is_empty());
        }
        assert!(self.state.members.predictions.is_empty());
        assert!(self.recorder.render().contains("tandem_router_bookings 0"), "{}", self.recorder.render());
    }
}

fn name(candidate: &Option<v1::Candidate>) -> String {
    let worker = candidate.as_ref().and_then(|candidate| candidate.worker.as_ref());
    worker.map_or_else(String::new, |worker| worker.worker_id.clone())
}
