//! How many workers of each role every model's load needs.

use super::{
    ClusterState,
    booking::{BookingEntry, LoadByRole},
    members::{ClusterMembers, Member},
    placement::PlacementDecision,
};
use crate::{
    places::BookedAnswer,
    rates::{MeanRate, Measurement},
    route::{RouteChoice, WorkerRole},
    wanted::{ArrivalRates, ClusterDemand, RoleDemand, RoleState, WantedWorkers},
};
use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tokio::time::Instant;

impl PlacementDecision<'_> {
    /// Adds the request to what arrives for the workers of this choice, whether it is placed there or refused.
    pub(super) fn add_to(&self, demand: &mut ClusterDemand, choice: RouteChoice, answer: &BookedAnswer, now: Instant) {
        let (model, new_tokens) = (self.members[choice.decode].base_model(), self.new_tokens(choice) as f64);
        let cached_tokens = (f64::from(self.query.prompt_tokens) - new_tokens).max(0.0);
        let prefills = if choice.prefill.is_some() { WorkerRole::Prefill } else { WorkerRole::Decode };
        add(demand, model, prefills, [new_tokens, cached_tokens, answer.tokens() as f64], now);
    }
}

/// Adds a request that a peer has placed to what arrives for its workers.
pub(super) fn add_of_peer(demand: &mut ClusterDemand, members: &ClusterMembers, booking: &BookingEntry, load: LoadByRole) {
    // A peer that continues another router's request announces no load.
    let Some(decode) = members.of(&booking.decode).filter(|_| load != LoadByRole::default()) else { return };
    let new_tokens = load.prefill.tokens.max(load.decode.tokens) as f64;
    let prompt_tokens = booking.hashes.len() as f64 * f64::from(decode.info.block_size);
    let tokens = [new_tokens, (prompt_tokens - new_tokens).max(0.0), booking.answer.tokens() as f64];
    let prefills = if booking.prefill.is_some() { WorkerRole::Prefill } else { WorkerRole::Decode };
    add(demand, decode.base_model(), prefills, tokens, members.now());
}

/// Adds a request whose prompt a worker of the role `prefills` computes: its new, its cached and its answer tokens.
fn add(demand: &mut ClusterDemand, model: &Arc<str>, prefills: WorkerRole, tokens: [f64; 3], now: Instant) {
    let [new_tokens, cached_tokens, answer_tokens] = tokens;
    let prompt = ArrivalRates { prompts: 1.0, new_tokens, cached_tokens, ..ArrivalRates::default() };
    let answer = ArrivalRates { answers: 1.0, answer_tokens, ..ArrivalRates::default() };
    demand.of(model, prefills).arrivals.add(prompt, now);
    demand.of(model, WorkerRole::Decode).arrivals.add(answer, now);
}

impl ClusterState {
    /// Decides how many workers of each role every model's load needs.
    pub(crate) fn plan_workers(&mut self) {
        if !self.settings.levels.is_set() {
            return;
        }
        let now = self.members.now();
        for member in self.members.values() {
            self.demand.of(member.base_model(), member.role).on_seen(now);
        }
        let known = self.demand.known(now);
        self.wanted = known.into_iter().map(|(model, role)| self.plan_role(model, role, now)).collect();
    }

    fn plan_role(&mut self, model: Arc<str>, role: WorkerRole, now: Instant) -> WantedWorkers {
        let members: Vec<&Member> =
            self.members.values().filter(|member| member.role == role && *member.base_model() == model).collect();
        let demand = self.demand.of(&model, role);
        demand.on_present(members.len(), now);
        let (state, growth) = role_state(demand, &members, self.settings.costs.prefill_tokens_per_second, now);
        // The only worker of a model, a LoRA or a transfer family serves requests that no other one could.
        let mut servers: BTreeMap<&str, usize> = BTreeMap::new();
        for served in members.iter().flat_map(|member| member.served()) {
            *servers.entry(served).or_default() += 1;
        }
        let spare = members.iter().filter(|member| member.served().all(|served| servers[&**served] > 1));
        let cheapest = spare.min_by(|one, other| {
            let reused = |member: &Member| member.reused.sum(now);
            reused(one).total_cmp(&reused(other)).then(one.bookings.count.cmp(&other.bookings.count))
        });
        let (needed, lacking) = match members.is_empty() {
            true => (1, None),
            false => state.needed(&self.settings.levels),
        };
        let refill = cheapest.map_or(0.0, |member| member.reused.sum(now) / state.prefill_tokens_per_second.max(1.0));
        let wanted = demand.decide(needed, Duration::try_from_secs_f64(refill).unwrap_or(Duration::MAX), now);
        let series = demand.series.get_or_insert_with(|| self.metrics.wanted(&model, role));
        series.wanted.set(wanted as f64);
        let mut reason = state.describe(growth);
        if let Some(lacking) = lacking.filter(|_| needed == wanted) {
            reason += &format!("; with {}, {lacking}", needed - 1);
        } else if needed < wanted {
            reason += &format!("; {needed} would do, and the wanted number falls once that has been so for a while");
        }
        let cheapest_to_lose = cheapest.map(|member| member.info.worker_id.clone());
        WantedWorkers { model, role, wanted, present: members.len(), reason, cheapest_to_lose }
    }
}

/// Returns the state of a role's workers, with what is expected to arrive when a worker that is started now has joined, and the factor by
/// which this exceeds what arrives now.
fn role_state(demand: &mut RoleDemand, members: &[&Member], default_rate: f64, now: Instant) -> (RoleState, f64) {
    let (rates, growth) = demand.arrivals.forecast(demand.start_time(), now);
    let mean = |of: &dyn Fn(&Member) -> f64| {
        let known: Vec<f64> = members.iter().map(|member| of(member)).filter(|value| *value > 0.0).collect();
        if known.is_empty() { 0.0 } else { known.iter().sum::<f64>() / known.len() as f64 }
    };
    let logs = members.iter().filter_map(|member| Measurement::log(member.load.prefill_tokens_per_second));
    demand.steps.next_round();
    let (mut used_tokens, mut sequences) = (0.0, 0.0);
    for Member { load, info, .. } in members {
        let running = f64::from(load.running_sequences);
        if running > 0.0 && load.decode_step_ms > 0.0 {
            demand.steps.add(running, load.decode_step_ms / 1e3);
            used_tokens += f64::from(load.in_use_blocks) * f64::from(info.block_size);
            sequences += running;
        }
    }
    let share = mean(&|member| member.load.prompt_share);
    let state = RoleState {
        workers: members.len(),
        rates: rates.scaled(growth),
        sizes: demand.arrivals.sizes().collect(),
        queued_tokens: members.iter().map(|member| member.load.pending_prefill_tokens as f64).sum(),
        prefill_tokens_per_second: MeanRate::of(logs.map(|log| Measurement::new(log, 1.0)), default_rate).value(),
        prefill_fixed_seconds: mean(&|member| member.load.prefill_fixed_ms) / 1e3,
        step_tokens: mean(&|member| f64::from(member.info.step_tokens)),
        prompt_share: if share > 0.0 { share } else { 1.0 },
        step: demand.steps.fit(),
        capacity_tokens: mean(&|member| f64::from(member.info.capacity_blocks) * f64::from(member.info.block_size)),
        sequence_tokens: if sequences > 0.0 { used_tokens / sequences } else { 0.0 },
        sequences_max: mean(&|member| f64::from(member.info.sequences_max)),
    };
    (state, growth)
}
