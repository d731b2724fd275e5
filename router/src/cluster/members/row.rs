//! What a placement reads of every member, in one compact list (docs/adr/058-placement-rows.md).

use super::{ClusterMembers, Leading, Member, MemberPrefix};
use crate::{
    cluster::{findings::Correction, request::PlacementRequest, wait::MeanSpeeds},
    index::WorkerSlot,
    prefill_queue::{Behind, QueueSummary, recent},
    route::{ByRole, OfPrompt, PlacementQuery, WorkerNumbers, WorkerRole},
};
use std::{
    collections::BTreeSet,
    ops::{Deref, DerefMut},
};
use tandem_kv::InstanceId;
use tokio::time::Instant;

/// The state of a member as placements see it. A change of the member replaces its row ([`ChangedMember`]).
#[derive(PartialEq)]
pub(in crate::cluster) struct Row {
    /// The weights of its measurements are stamps.
    pub(in crate::cluster) numbers: WorkerNumbers,
    slot: WorkerSlot,
    correction: Correction,
    queue: QueueSummary,
    has_open_breaker: bool,
    accepts_images: bool,
    computes_shortest_first: bool,
}

/// The measured speeds of a member, which few placements need.
#[derive(PartialEq)]
pub(in crate::cluster) struct Speeds {
    role: WorkerRole,
    /// The speed of the queue and the time of its measurement.
    queue: Option<(f64, Instant)>,
    /// The prefill rate of its latest report; 0: not measured.
    prefill_tokens_per_second: f64,
}

/// A member that is being changed.
pub(in crate::cluster) struct ChangedMember<'a> {
    pub(super) member: &'a mut Member,
    pub(super) row: &'a mut Row,
    pub(super) speeds: &'a mut Speeds,
}

impl Deref for ChangedMember<'_> {
    type Target = Member;

    fn deref(&self) -> &Member {
        self.member
    }
}

impl DerefMut for ChangedMember<'_> {
    fn deref_mut(&mut self) -> &mut Member {
        self.member
    }
}

impl Drop for ChangedMember<'_> {
    fn drop(&mut self) {
        *self.row = Row::of(self.member);
        *self.speeds = Speeds::of(self.member);
    }
}

impl Speeds {
    pub(super) fn of(member: &Member) -> Self {
        let prefill_tokens_per_second = member.load.prefill_tokens_per_second;
        Self { role: member.role, queue: member.queue.measured_speed(), prefill_tokens_per_second }
    }
}

impl Row {
    pub(super) fn of(member: &Member) -> Self {
        Self {
            numbers: (&member.candidate(MemberPrefix::default(), None)).into(),
            slot: member.slot,
            correction: member.findings.correction(),
            queue: member.queue.summary(),
            has_open_breaker: member.breaker.is_open(),
            accepts_images: member.info.accepts_images,
            computes_shortest_first: member.computes_shortest_first(),
        }
    }
}

/// The rows of the members that serve one model, for one request.
pub(in crate::cluster) struct Rows<'m, 'a> {
    members: &'m ClusterMembers,
    /// The positions of the members.
    at: &'m [u32],
    request: &'a PlacementRequest,
    query: PlacementQuery,
    leading: &'a Leading,
    /// The positions of the members on which the request must not be placed.
    excluded: Vec<usize>,
    now: Instant,
}

impl ClusterMembers {
    pub(in crate::cluster) fn rows<'m, 'a>(
        &'m self,
        model: &str,
        query: PlacementQuery,
        request: &'a PlacementRequest,
        leading: &'a Leading,
        excluded: &BTreeSet<InstanceId>,
    ) -> Rows<'m, 'a> {
        let excluded = excluded.iter().filter_map(|instance_id| self.position(instance_id)).collect();
        let at = self.by_model.get(model).map_or(&[][..], Vec::as_slice);
        Rows { members: self, at, request, query, leading, excluded, now: self.now() }
    }
}

impl ClusterMembers {
    /// Returns means over the members that serve the model.
    pub(in crate::cluster) fn mean_speeds(&self, model: &str, now: Instant) -> MeanSpeeds {
        let (mut queue, mut rate) = (ByRole::<Mean>::default(), Mean::default());
        for at in self.by_model.get(model).into_iter().flatten() {
            let Speeds { role, queue: speed, prefill_tokens_per_second } = self.speeds[*at as usize];
            recent(speed, now).into_iter().for_each(|speed| queue.of_mut(role).add(speed));
            if prefill_tokens_per_second > 0.0 {
                rate.add(prefill_tokens_per_second);
            }
        }
        MeanSpeeds { queue: queue.map(Mean::get), rate: rate.get() }
    }
}

#[derive(Clone, Copy, Default)]
struct Mean {
    sum: f64,
    count: f64,
}

impl Mean {
    fn add(&mut self, value: f64) {
        self.sum += value;
        self.count += 1.0;
    }

    fn get(self) -> Option<f64> {
        (self.count > 0.0).then(|| self.sum / self.count)
    }
}

impl<'m> Rows<'m, '_> {
    pub(in crate::cluster) fn len(&self) -> usize {
        self.at.len()
    }

    /// Returns the rows with their numbers, from 0.
    pub(in crate::cluster) fn iter(&self) -> impl Iterator<Item = (usize, &'m Row)> {
        self.at.iter().map(|at| &self.members.rows[*at as usize]).enumerate()
    }

    /// Returns the present scale of the weights of measurements.
    pub(in crate::cluster) fn scale(&self) -> f64 {
        self.members.ages.scale(self.now)
    }

    pub(in crate::cluster) fn member(&self, number: usize) -> &'m Member {
        &self.members.all[self.at[number] as usize]
    }

    /// Returns the prefix of the prompt on the member with this number and row, and whether the request may be placed on it.
    #[inline]
    pub(in crate::cluster) fn see(&self, number: usize, row: &Row) -> (MemberPrefix, bool) {
        let is_eligible = row.numbers.fits(&self.query)
            && (row.accepts_images || !self.request.has_images)
            && (!row.has_open_breaker || self.member(number).breaker.admits(self.now))
            && (self.excluded.is_empty() || !self.excluded.contains(&(self.at[number] as usize)));
        let prefix = self.leading.any(row.slot).then(|| self.members.prefix(self.leading, row.slot, row.correction, 0).0);
        (prefix.unwrap_or_default(), is_eligible)
    }

    /// Returns the numbers of the prompt on this member.
    #[inline(always)]
    pub(in crate::cluster) fn of_prompt(&self, number: usize, row: &Row, prefix: MemberPrefix) -> OfPrompt {
        let prompt = OfPrompt {
            overlap_blocks: prefix.overlap_blocks,
            load_blocks: 0,
            predicted_blocks: prefix.predicted_blocks(),
            queued_tokens: row.numbers.queued_tokens,
            behind_tokens: 0.0,
            behind_prompts: 0,
        };
        if row.queue.is_empty() {
            return prompt;
        }
        let own = self.query.new_tokens(row.numbers.role, prefix.overlap_blocks.into());
        let behind = row.queue.behind(self.request.priority, own, row.computes_shortest_first);
        prompt.with_behind(behind.unwrap_or_else(|| self.member(number).behind(self.request, own)))
    }
}

impl Member {
    /// Returns what would be computed after a request with this number of new tokens.
    pub(in crate::cluster) fn behind(&self, request: &PlacementRequest, new_tokens: u64) -> Behind {
        self.queue.behind(&request.account, request.priority, new_tokens, self.computes_shortest_first())
    }

    /// Tandem's own engines compute the shortest prompt first, other engines the prompt that arrived first.
    fn computes_shortest_first(&self) -> bool {
        self.info.transfer_family.is_empty()
    }
}

#[cfg(test)]
impl ClusterMembers {
    /// Asserts that every row is up to date.
    pub(in crate::cluster) fn assert_rows(&self) {
        assert_eq!(self.rows.len(), self.all.len());
        for ((member, row), speeds) in self.all.iter().zip(&self.rows).zip(&self.speeds) {
            assert!(*row == Row::of(member) && *speeds == Speeds::of(member), "the row of {} is old", member.info.worker_id);
        }
    }
}
