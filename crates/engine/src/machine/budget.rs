//! Decides how many prompt tokens a step computes, and splits them between the prompts of the batch.
//!
//! A step that also continues answers delays their next tokens, so it has fewer prompt tokens
//! ([`Rates::prompt_tokens`](super::rates::Rates)). [`RoundRobin`](super::fair::RoundRobin) splits them by rank and account. A step with more
//! tokens takes longer. So if a step computes the rest of a prompt, or its first token, prompts that it outranks are left out of the step,
//! even if the step's budget has tokens for them.

use super::{Machine, fair::Demand};
use std::{collections::BTreeMap, sync::Arc};
use tandem_kv::Priority;

/// The minimum of a step's budget of prompt tokens, however many sequences decode and however slow the device is.
pub(super) const PREFILL_TOKENS_MIN: usize = 16;
/// The exempt job gets at most 1 / `EXEMPT_SHARE` of a step's prompt tokens, so that its prompt, if long, hardly delays prompts that outrank it.
const EXEMPT_SHARE: usize = 8;
/// Maximum number of tokens in a chunk that returns logits for every token. The limit bounds memory: each row has a logit for every token of the
/// vocabulary.
const LOGIT_ROWS_MAX: usize = 64;
/// The number of short steps ([`ShortSteps`]) that are permitted in succession. One prompt causes at most two: the step that computes its rest, and
/// the step that samples its first token.
const SHORT_STEPS_MAX: u32 = 8;

/// Limits the number of *short steps*: steps from which outranked prompts were left out although the budget had tokens for them. Once the
/// number of short steps exceeds the number of other steps by [`SHORT_STEPS_MAX`], only every second step may be short. So urgent prompts
/// that arrive all the time keep the outranked prompts out of at most half of the steps that have tokens for them.
#[derive(Debug, Default)]
pub(super) struct ShortSteps(u32);

impl ShortSteps {
    /// Returns whether outranked prompts may be left out of the next step, and records the step as short or not.
    fn next(&mut self) -> bool {
        let is_short = self.0 < SHORT_STEPS_MAX;
        if is_short {
            self.0 += 1;
        } else {
            self.0 -= 1;
        }
        is_short
    }

    /// Records a step in which no prompt was outranked.
    fn other(&mut self) {
        self.0 = self.0.saturating_sub(1);
    }
}

impl Machine {
    /// Returns how many prompt tokens a step may compute that also continues `decodes` sequences.
    pub(super) fn prompt_budget(&self, decodes: usize) -> usize {
        let most = (self.settings.chunk_budget as usize).saturating_sub(decodes);
        let within_itl = if decodes > 0 { self.rates.prompt_tokens(decodes, self.settings.itl_max) } else { None };
        within_itl.map_or(most, |tokens| tokens.min(most)).max(PREFILL_TOKENS_MIN)
    }

    /// Splits the step's budget of prompt tokens between the sequences of the batch. Returns the number of tokens of each sequence, by its
    /// index in `running`. As in the fair order, the first sequence of every request precedes all further samples (which compute tokens
    /// again after a preemption) of its priority. The exempt prompt gets its part first. If the step is short, prompts get no tokens if a request
    /// without a first token outranks them.
    pub(super) fn allot(&mut self, batch: &[usize], budget: usize) -> BTreeMap<usize, usize> {
        let mut prefills: Vec<usize> = batch.iter().copied().filter(|index| !self.running[*index].is_decoding()).collect();
        if prefills.is_empty() && self.round_robin.is_empty() {
            return BTreeMap::new();
        }
        prefills.sort_by_key(|index| {
            let (within, due, order) = self.running[*index].due();
            (within, !self.is_first_of_job(*index), due, order)
        });
        let demand = |index: &usize| {
            let sequence = &self.running[*index];
            let most = if sequence.wants_prompt_logprobs() { LOGIT_ROWS_MAX } else { usize::MAX };
            let tokens = sequence.remaining().min(most);
            Demand { account: Arc::clone(&sequence.account), across: sequence.priority.across, tokens }
        };
        let mut demands: Vec<Demand> = prefills.iter().map(demand).collect();
        let exempt = prefills.iter().position(|index| Some(self.running[*index].job) == self.exempt);
        let first = exempt.map_or(0, |at| demands[at].tokens.min(budget / EXEMPT_SHARE));
        if let Some(at) = exempt {
            demands[at].tokens -= first;
        }
        let others = self.not_outranked(batch, &prefills, &demands);
        let mut allotted = if self.is_short(&demands, &others, budget - first) {
            others
        } else {
            self.round_robin.allot(&demands, budget - first)
        };
        if let Some(at) = exempt {
            allotted[at] += first;
        }
        prefills.into_iter().zip(allotted).collect()
    }

    /// Returns the tokens of each demand; 0 if its prompt is outranked by a request of the batch that has no first token yet.
    fn not_outranked(&self, batch: &[usize], prefills: &[usize], demands: &[Demand]) -> Vec<usize> {
        let mut best: BTreeMap<&str, Priority> = BTreeMap::new();
        for sequence in batch.iter().map(|index| &self.running[*index]).filter(|sequence| sequence.awaits_first_token()) {
            let of_account = best.entry(&sequence.account).or_insert(sequence.priority);
            *of_account = sequence.priority.min(*of_account);
        }
        let best_of_all = best.values().min().copied();
        let tokens = prefills.iter().zip(demands).map(|(index, demand)| {
            let priority = self.running[*index].priority;
            let of_account = best.get(&*demand.account);
            let is_outranked = best_of_all.is_some_and(|of_all| of_all.outranks(priority, false))
                || of_account.is_some_and(|of_account| of_account.outranks(priority, true));
            if is_outranked { 0 } else { demand.tokens }
        });
        tokens.collect()
    }

    /// Returns whether the step is short: it computes only the tokens `others` of prompts that are not outranked. If these fill the budget, the step
    /// is not short, because leaving out other prompts would save no time.
    fn is_short(&mut self, demands: &[Demand], others: &[usize], budget: usize) -> bool {
        let all: usize = demands.iter().map(|demand| demand.tokens).sum();
        let others: usize = others.iter().sum();
        if others == all {
            self.short_steps.other();
            return false;
        }
        others < budget && self.short_steps.next()
    }
}
