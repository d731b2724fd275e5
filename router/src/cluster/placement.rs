//! Decides placements from the router's state. The pure module [`crate::route`] makes the decision itself.

use super::{
    booking::SAMPLES_MAX,
    members::{ClusterMembers, Leading, Member},
    request::{Excluded, PlacementError, PlacementRequest},
};
use crate::{
    answers::{AnswerLengths, MovingMean},
    demand::Demands,
    places::{AnswerPace, BookedAnswer, Length},
    route::{
        self, ByRole, Candidate, CostsByUse, NoEligibleWorker, PlacementQuery, PlacementSeed, RouteChoice, WorkerDemand,
        WorkerRole,
    },
    settings::{Costs, PrefillPlace, RouterSettings},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tandem_kv::{InstanceId, SequenceHash};
use tandem_proto::v1;
use tokio::time::Instant;

/// Decides placements. Also measures the duration and the length of answers, from which costs are estimated.
pub(super) struct Placer {
    pub(super) settings: Arc<RouterSettings>,
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

/// A request to place, with what is known of its model.
#[derive(Clone)]
pub(super) struct Question<'a> {
    pub(super) model: Arc<str>,
    pub(super) query: PlacementQuery,
    /// The hashes of the prompt's blocks that a worker may reuse.
    pub(super) hashes: &'a [SequenceHash],
    /// The workers on which an equal prompt was placed, if the request should be placed there.
    pub(super) equal: Option<&'a v1::EqualPrompt>,
    pub(super) costs: Costs,
    pub(super) demand: ByRole<WorkerDemand>,
    pub(super) seed: PlacementSeed,
    /// The speed of the model's answers; 0 before the first answer.
    pub(super) pace: AnswerPace,
}

/// A decision and the input on which it is based. Lists are in the order of `members`.
pub(super) struct PlacementDecision<'a> {
    pub(super) question: Question<'a>,
    pub(super) all: &'a ClusterMembers,
    /// The members that serve the model, or those of them that matter.
    pub(super) members: Vec<&'a Member>,
    pub(super) candidates: Vec<Candidate>,
    pub(super) costs: Vec<CostsByUse>,
    pub(super) choice: Result<RouteChoice, NoEligibleWorker>,
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

    /// Decides on which workers to place the request, and how long it will wait there. `attempt` is 1 for the request's first placement.
    /// Workers that have failed the request, and workers whose circuit breakers are open, are used only if no other worker is eligible.
    ///
    /// # Errors
    /// No worker is eligible, or the request would wait for too long on every worker.
    pub(super) fn decide<'a>(
        &mut self,
        members: &'a ClusterMembers,
        request: &'a PlacementRequest,
        excluded: &Excluded,
        attempt: u32,
    ) -> Result<(PlacementDecision<'a>, RouteChoice, Duration), PlacementError> {
        let question = self.question(members, request, attempt)?;
        let model = question.model.clone();
        let now = members.now();
        let decided = || {
            let quick = self.quick(members, &question, request, excluded);
            if let Some((decision, choice, wait)) = quick.and_then(|decision| decision.at_once(request, now)) {
                return Ok((decision, choice, wait));
            }
            let mut decision = self.weigh(members, question.clone(), request, &excluded.failed, Some(now));
            if decision.choice == Err(NoEligibleWorker::AllFailed) {
                decision = self.weigh(members, question.clone(), request, &excluded.suspect, None);
            }
            let (choice, wait) = decision.within(request, decision.choice?, now)?;
            Ok((decision, choice, wait))
        };
        let decided = decided();
        if !self.by_model.contains_key(&model) {
            // The entries of models that no member serves any more are removed here, so that their number stays bounded.
            self.by_model.retain(|model, _| members.of_model(model).next().is_some());
        }
        self.by_model.entry(model).or_default().placements += 1;
        decided
    }

    /// Returns the decision for a request that would be placed now for the first time. If several workers have equal costs, the next real
    /// placement may choose another of them.
    pub(super) fn preview<'a>(
        &self,
        members: &'a ClusterMembers,
        request: &'a PlacementRequest,
    ) -> Result<PlacementDecision<'a>, PlacementError> {
        let question = self.question(members, request, 1)?;
        Ok(self.weigh(members, question, request, &BTreeSet::new(), Some(members.now())))
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

    pub(super) fn question<'a>(
        &self,
        members: &ClusterMembers,
        request: &'a PlacementRequest,
        attempt: u32,
    ) -> Result<Question<'a>, PlacementError> {
        let Self { settings, by_model } = self;
        let model = members.requested_model(&request.model)?;
        let history = by_model.get(&model);
        let first = members.of_model(&model).next().expect("a member serves it");
        let (query, hashes) = query(settings, first.info.block_size, request, attempt);
        let answer_ms = history.and_then(|history| history.answer_ms.get());
        Ok(Question {
            model,
            query,
            hashes,
            equal: request.equal_prompt.as_ref().filter(|_| attempt == 1),
            costs: Costs { answer_ms: answer_ms.unwrap_or(settings.costs.answer_ms), ..settings.costs },
            demand: history.map(|history| history.demands.per_second(members.now())).unwrap_or_default(),
            seed: PlacementSeed { seed: settings.seed, number: history.map_or(0, |history| history.placements) },
            pace: history.and_then(ModelHistory::pace).unwrap_or_default(),
        })
    }

    /// Computes all costs of all members. This is the reference of [`Self::quick`], and what operators are shown.
    pub(super) fn weigh<'a>(
        &self,
        all: &'a ClusterMembers,
        question: Question<'a>,
        request: &'a PlacementRequest,
        excluded: &BTreeSet<InstanceId>,
        breakers_at: Option<Instant>,
    ) -> PlacementDecision<'a> {
        let Question { query, costs, demand, seed, .. } = question;
        let members: Vec<&Member> = all.of_model(&question.model).collect();
        let leading = all.leading(question.hashes);
        let candidates = question.candidates(all, &members, &leading, request, (excluded, breakers_at));
        let costs = route::costs_by_use(self.settings.policy, &costs, demand, &query, &candidates);
        let with_equal = question.equal.and_then(|equal| workers_of(equal, &members, &costs));
        let choice = with_equal.map_or_else(|| route::place(&costs, &query, &candidates, seed), Ok);
        PlacementDecision { question, all, members, candidates, costs, choice }
    }
}

impl Question<'_> {
    /// Returns these members as candidates, in their order. `excluded` are the instances on which the request must not be placed, and the time
    /// for circuit breakers; without it they are ignored.
    pub(super) fn candidates(
        &self,
        all: &ClusterMembers,
        members: &[&Member],
        leading: &Leading,
        request: &PlacementRequest,
        (excluded, breakers_at): (&BTreeSet<InstanceId>, Option<Instant>),
    ) -> Vec<Candidate> {
        let mut candidates = all.candidates(members, leading, excluded, breakers_at, &self.costs);
        for (candidate, member) in candidates.iter_mut().zip(members) {
            candidate.excluded |= request.has_images && !member.info.accepts_images;
            if !member.queue.is_empty() {
                let own = candidate.new_tokens(&self.query, candidate.overlap_blocks.into());
                candidate.set_behind(member.behind(request, own));
            }
        }
        candidates
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
            block_size: self.question.query.block_size,
            wait_ms: u32::try_from(wait.as_millis()).unwrap_or(u32::MAX),
            prefix: Some(facts),
        }
    }
}
