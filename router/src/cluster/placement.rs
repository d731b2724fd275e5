//! Decides placements from the router's state. The pure module [`crate::route`] makes the decision itself.

use super::{
    booking::SAMPLES_MAX,
    members::{ClusterMembers, Member},
    request::{Excluded, PlacementError, PlacementRequest},
};
use crate::{
    answers::{AnswerLengths, MovingMean},
    demand::Demands,
    places::{AnswerPace, BookedAnswer, Length},
    route::{self, Candidate, CostsByUse, NoEligibleWorker, PlacementQuery, PlacementSeed, RouteChoice, WorkerRole},
    settings::{Costs, PrefillPlace, RouterSettings},
};
use std::{
    cmp::Ordering,
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tandem_kv::{InstanceId, SequenceHash};
use tandem_proto::v1;
use tokio::time::Instant;

/// Decides placements. Also measures the duration and the length of answers, from which costs are estimated.
pub(super) struct Placer {
    settings: Arc<RouterSettings>,
    by_model: BTreeMap<Arc<str>, ModelHistory>,
}

/// The number of placements of one model so far, and statistics of the lengths and durations of its answers.
#[derive(Default)]
struct ModelHistory {
    /// The number of placements decided so far.
    placements: u64,
    /// The time in milliseconds from the end of a prompt's prefill to the end of its answer.
    answer_ms: MovingMean,
    lengths: AnswerLengths,
    demands: Demands,
}

/// A decision and the input on which it is based. Lists are in the order of `members`.
pub(super) struct PlacementDecision<'a> {
    pub(super) model: Arc<str>,
    /// The members that serve the model.
    pub(super) members: Vec<&'a Member>,
    pub(super) query: PlacementQuery,
    /// The hashes of the prompt's blocks that a worker may reuse.
    pub(super) hashes: &'a [SequenceHash],
    pub(super) candidates: Vec<Candidate>,
    pub(super) costs: Vec<CostsByUse>,
    pub(super) choice: Result<RouteChoice, NoEligibleWorker>,
    pub(super) seed: PlacementSeed,
    /// The speed of the model's answers; 0 before the first answer.
    pub(super) pace: AnswerPace,
}

impl ModelHistory {
    fn pace(&self) -> Option<AnswerPace> {
        let answer = Duration::from_secs_f64(self.answer_ms.get()? / 1e3);
        Some(AnswerPace { answer, token: answer.div_f64(self.lengths.mean()?.max(1.0)) })
    }
}

impl Placer {
    pub(super) fn new(settings: Arc<RouterSettings>) -> Self {
        Self { settings, by_model: BTreeMap::new() }
    }

    /// Decides on which workers to place the request. `attempt` is 1 for the request's first placement. Workers that have failed the
    /// request, and workers whose circuit breakers are open, are used only if no other worker is eligible.
    pub(super) fn decide<'a>(
        &mut self,
        members: &'a ClusterMembers,
        request: &'a PlacementRequest,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<PlacementDecision<'a>, PlacementError> {
        let mut decision = self.weigh(members, request, attempt, &excluded.failed, Some(members.now()))?;
        if decision.choice == Err(NoEligibleWorker::AllFailed) {
            decision = self.weigh(members, request, attempt, &excluded.suspect, None)?;
        }
        if !self.by_model.contains_key(&decision.model) {
            // The entries of models that no member serves any more are removed here, so that their number stays bounded.
            let served = members.models();
            self.by_model.retain(|model, _| served.contains(model));
        }
        self.by_model.entry(decision.model.clone()).or_default().placements += 1;
        Ok(decision)
    }

    /// Returns the decision for a request that would be placed now for the first time. If several workers have equal costs, the next real
    /// placement may choose another of them.
    pub(super) fn preview<'a>(
        &self,
        members: &'a ClusterMembers,
        request: &'a PlacementRequest,
    ) -> Result<PlacementDecision<'a>, PlacementError> {
        self.weigh(members, request, 1, &BTreeSet::new(), Some(members.now()))
    }

    /// Records that a worker of this role will compute `tokens` tokens of a prompt to the model.
    pub(super) fn on_placed(&mut self, model: &str, role: WorkerRole, tokens: u64, now: Instant) {
        if let Some(history) = self.by_model.get_mut(model) {
            history.demands.add(role, tokens, now);
        }
    }

    /// Records the time `took` from the end of a request's prefill to the end of the request.
    pub(super) fn on_released(&mut self, model: &str, took: Duration) {
        if let Some(history) = self.by_model.get_mut(model) {
            history.answer_ms.record(took.as_secs_f64() * 1e3);
        }
    }

    /// Records the length of a complete answer of the model, in tokens for each sample. `max_tokens` is the limit of its request.
    pub(super) fn on_answered(&mut self, model: &str, max_tokens: u32, tokens: f64) {
        if let Some(history) = self.by_model.get_mut(model) {
            history.lengths.record(max_tokens, tokens);
        }
    }

    /// Returns the expected answer to a request to the model. `since` is the time at which its generation has begun, if it has.
    pub(super) fn answer(&self, model: &str, request: &PlacementRequest, since: Option<Instant>) -> BookedAnswer {
        let &PlacementRequest { min_tokens: min, max_tokens: max, priority, .. } = request;
        let default = self.settings.costs.answer_tokens;
        let lengths = self.by_model.get(model).map(|history| &history.lengths);
        let expected = lengths.unwrap_or(&AnswerLengths::default()).expected(max, default).max(min.into());
        let samples = request.samples.clamp(1, SAMPLES_MAX);
        BookedAnswer { account: request.account.clone(), priority, length: Length { expected, min, max }, samples, since }
    }

    fn weigh<'a>(
        &self,
        members: &'a ClusterMembers,
        request: &'a PlacementRequest,
        attempt: u32,
        excluded: &BTreeSet<InstanceId>,
        breakers_at: Option<Instant>,
    ) -> Result<PlacementDecision<'a>, PlacementError> {
        let Self { settings, by_model } = self;
        let model = members.requested_model(&request.model)?;
        let history = by_model.get(&model);
        let placements = history.map_or(0, |history| history.placements);
        let answer_ms = history.and_then(|history| history.answer_ms.get());
        let all = members;
        let members: Vec<&Member> = all.of_model(&model).filter(|member| request.may_reach(&member.info)).collect();
        let first = members.first().ok_or(NoEligibleWorker::NoDecodeWorker)?;
        let (query, hashes) = query(settings, first.info.block_size, request, attempt);
        let costs = Costs { answer_ms: answer_ms.unwrap_or(settings.costs.answer_ms), ..settings.costs };
        let seed = PlacementSeed { seed: settings.seed, number: placements };
        let mut candidates = all.candidates(&members, hashes, excluded, breakers_at, &costs);
        for (candidate, member) in candidates.iter_mut().zip(&members) {
            candidate.excluded |= request.has_images && !member.info.accepts_images;
        }
        for (candidate, member) in candidates.iter_mut().zip(&members).filter(|(_, member)| !member.queue.is_empty()) {
            // Tandem's own engines compute the shortest prompt first, other engines the prompt that arrived first.
            let shortest_first = member.info.transfer_family.is_empty();
            let own_tokens = candidate.new_tokens(&query, candidate.overlap_blocks.into());
            let behind = member.queue.behind(&request.account, request.priority, own_tokens, shortest_first);
            candidate.behind_tokens = candidate.queued_tokens as f64 * behind.share;
            candidate.behind_prompts = behind.requests;
            // The request does not wait for prompts that it outranks, and their delay adds no cost.
            candidate.queued_tokens = (candidate.queued_tokens as f64 * (1.0 - behind.outranked)) as u64;
        }
        let demand = history.map(|history| history.demands.per_second(all.now())).unwrap_or_default();
        let costs = route::costs_by_use(settings.policy, &costs, demand, &query, &candidates);
        let equal = request.equal_prompt.as_ref().filter(|_| attempt == 1);
        let with_equal = equal.and_then(|equal| workers_of(equal, &members, &costs));
        let choice = with_equal.map_or_else(|| route::place(&costs, &query, &candidates, seed), Ok);
        let pace = history.and_then(ModelHistory::pace).unwrap_or_default();
        Ok(PlacementDecision { model, members, query, hashes, candidates, costs, choice, seed, pace })
    }
}

/// Returns the workers on which an equal prompt was placed; `None` if they are not eligible for this prompt.
fn workers_of(equal: &v1::EqualPrompt, members: &[&Member], costs: &[CostsByUse]) -> Option<RouteChoice> {
    let at = |instance_id: &str| members.iter().position(|member| *member.instance_id == *instance_id);
    let decode = at(&equal.decode_instance_id)?;
    let Some(prefill) = &equal.prefill_instance_id else {
        return costs[decode].local.map(|_| RouteChoice { decode, prefill: None });
    };
    let prefill = at(prefill)?;
    let is_eligible = costs[decode].decode.is_some() && costs[prefill].prefill.is_some();
    is_eligible.then_some(RouteChoice { decode, prefill: Some(prefill) })
}

/// Returns the query for a request, and the hashes of the blocks that a worker may reuse.
fn query<'a>(
    settings: &RouterSettings,
    block_size: u32,
    request: &'a PlacementRequest,
    attempt: u32,
) -> (PlacementQuery, &'a [SequenceHash]) {
    let &PlacementRequest { prompt_tokens, prompt_logits, .. } = request;
    // A worker always computes at least one token. Logits are not cached, so a prompt whose logits are requested reuses no block.
    let reusable = if prompt_logits { 0 } else { prompt_tokens.saturating_sub(1) / block_size };
    let hashes = &request.hashes[..request.hashes.len().min(reusable as usize)];
    let prefill = match settings.prefill {
        _ if request.has_images => PrefillPlace::Local,
        PrefillPlace::Auto if attempt > 1 && attempt == settings.attempts_max => PrefillPlace::Local,
        place => place,
    };
    (PlacementQuery { prompt_tokens, block_size, prefill, prompt_logits }, hashes)
}

impl PlacementDecision<'_> {
    /// Returns the estimated time to the first token without the time to load blocks.
    pub(super) fn first_token_ms(&self, choice: RouteChoice) -> f64 {
        let of = |cost: Option<route::Cost>| cost.map_or(0.0, |cost| cost.first_token_ms());
        match choice.prefill {
            None => of(self.costs[choice.decode].local),
            Some(prefill) => of(self.costs[prefill].prefill) + of(self.costs[choice.decode].decode),
        }
    }

    /// Returns the message to the frontend that names the chosen members, with the estimated wait in the queue, and with what is known of the prompt's
    /// prefix.
    pub(super) fn placement(&self, choice: RouteChoice, wait: Duration, facts: v1::PrefixFacts) -> v1::Placement {
        let describe = |at: usize| {
            let Candidate { overlap_blocks, predicted_blocks, .. } = self.candidates[at];
            v1::Candidate { worker: Some(self.members[at].reference()), overlap_blocks, predicted_blocks }
        };
        v1::Placement {
            decode: Some(describe(choice.decode)),
            prefill: choice.prefill.map(describe),
            block_size: self.query.block_size,
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
            prefix: Some(facts),
            endpoints: Vec::new(),
        }
    }

    /// Returns the engine of the chosen member, and at most `alternatives` others, the cheapest first.
    pub(super) fn endpoints(&self, choice: RouteChoice, alternatives: u32) -> Vec<v1::EngineEndpoint> {
        let cost = |at: usize| self.costs[at].local.map(|cost| cost.total());
        let mut others: Vec<usize> = (0..self.members.len()).filter(|at| *at != choice.decode && cost(*at).is_some()).collect();
        others.sort_by(|one, other| cost(*one).partial_cmp(&cost(*other)).unwrap_or(Ordering::Equal));
        let all = std::iter::once(choice.decode).chain(others.into_iter().take(alternatives as usize));
        let endpoint = |at: usize| v1::EngineEndpoint {
            address: self.members[at].info.engine_endpoint.clone(),
            instance_id: self.members[at].info.instance_id.clone(),
        };
        all.map(endpoint).collect()
    }
}
