//! Why tokens of a prompt were not cached, and what other placements could have reused, as JSON (docs/adr/051-why-not-cached.md).

use crate::dispatch::placement::Placement;
use serde::{Serialize, Serializer};
use std::{borrow::Cow, cmp::Reverse};
use tandem_proto::{
    Cause, Causes, Funnel,
    v1::{KnownPrefix, PrefixFacts},
};

/// The recipient of the details, which decides what they show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DetailsReader {
    /// A client, which must not learn what other accounts have sent.
    Client,
    Operator,
}

/// The facts about a prompt's prefix when it was placed, and why its tokens were not cached.
#[derive(Debug, Serialize)]
pub(crate) struct PrefixDetails {
    /// The number of cached tokens and the causes of the others in plain words; `None`: the worker has reported no number of cached tokens.
    summary: Option<String>,
    /// The most leading tokens that any worker had cached; at least the tokens that were found.
    possible_tokens: u64,
    /// As `possible_tokens`, but only for workers that could have computed the prompt.
    eligible_tokens: u64,
    /// Tokens that the chosen worker was expected to find.
    chosen_tokens: u64,
    /// The time to load and compute the prompt that the eligible worker with the most cached tokens would have saved over the chosen
    /// worker, as the router estimates.
    regret_ms: f64,
    /// The tokens that were not cached, by cause; `None`: the worker has reported no number of cached tokens.
    uncached: Option<Uncached>,
    /// The length of the longest prefix that a worker has or had, or is about to have. The text after it is new.
    known_tokens: u32,
    /// The longest prefix that a worker has or had cached.
    nearest: Option<NearestPrefix>,
    /// The worker with the most cached tokens, if it had more than was expected of the chosen worker.
    elsewhere: Option<PrefixElsewhere>,
}

/// Tokens by cause. Causes without tokens are left out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Uncached(pub(crate) Causes);

#[derive(Debug, Serialize)]
struct NearestPrefix {
    worker: String,
    tokens: u32,
    /// The time from the removal of the last token to the placement; `None`: the tokens were still cached.
    removed_s: Option<u32>,
    /// Whether the worker had left, or its cache was cleared.
    lost: bool,
    /// The worker, the age and the reason of the removal in plain words.
    state: String,
}

#[derive(Debug, Serialize)]
struct PrefixElsewhere {
    worker: String,
    tokens: u32,
    /// The additional cost of a placement on this worker; `None`: the worker could not have computed the prompt.
    more_ms: Option<f64>,
    saved_ms: f64,
}

impl Serialize for Uncached {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(cause, tokens)| (cause.label(), tokens)))
    }
}

/// Returns the funnel of a prompt with `found` cached tokens; `None` if the placement has no facts about the prefix.
pub(crate) fn funnel(placement: &Placement, prompt_tokens: u32, found: u32) -> Option<Funnel> {
    Some(Funnel::of(placement.prefix.as_ref()?, prompt_tokens, placement.block_size, found))
}

impl PrefixDetails {
    /// Returns the details of a prompt. `found` is the number of cached tokens that its worker has reported.
    pub(crate) fn new(placement: &Placement, prompt_tokens: u32, found: Option<u32>, reader: DetailsReader) -> Option<Self> {
        let facts = placement.prefix.as_ref()?;
        let funnel = funnel(placement, prompt_tokens, found.unwrap_or(0))?;
        let tokens = |blocks: u32| blocks.saturating_mul(placement.block_size).min(prompt_tokens);
        let causes = if reader == DetailsReader::Client { funnel.causes.within_namespace() } else { funnel.causes };
        let nearest = nearest(facts, &placement.prefilling().worker.worker_id)
            .map(|nearest| NearestPrefix { tokens: tokens(nearest.tokens), ..nearest });
        let elsewhere = facts.anywhere.as_ref().filter(|held| held.blocks > facts.expected_blocks);
        let elsewhere = elsewhere.map(|held| PrefixElsewhere {
            worker: held.worker_id.clone(),
            tokens: tokens(held.blocks),
            more_ms: held.more_ms,
            saved_ms: held.saved_ms,
        });
        let mut details = Self {
            summary: None,
            possible_tokens: funnel.possible,
            eligible_tokens: funnel.eligible,
            chosen_tokens: funnel.chosen,
            regret_ms: facts.eligible.as_ref().map_or(0.0, |eligible| eligible.saved_ms),
            uncached: found.map(|_| Uncached(causes)),
            known_tokens: tokens(facts.known_prefix()),
            nearest,
            elsewhere,
        };
        details.summary = found.map(|_| details.summarize(funnel.found, prompt_tokens, causes));
        Some(details)
    }

    fn summarize(&self, found: u64, prompt_tokens: u32, causes: Causes) -> String {
        let mut causes: Vec<(Cause, u64)> = causes.iter().collect();
        causes.sort_by_key(|(_, tokens)| Reverse(*tokens));
        let reasons: Vec<String> = causes.iter().map(|(cause, tokens)| format!("{tokens} {}", self.in_words(*cause))).collect();
        let colon = if reasons.is_empty() { "" } else { ": " };
        format!("{found} of {prompt_tokens} cached{colon}{}", reasons.join("; "))
    }

    /// Says in plain words what happened to tokens with this cause.
    fn in_words(&self, cause: Cause) -> Cow<'static, str> {
        let removed = self.nearest.as_ref().filter(|nearest| nearest.removed_s.is_some());
        match cause {
            Cause::Engine => "expected, but not found by the engine".into(),
            Cause::GroupRule => "cached, but not reusable here (window, checkpoint or dropped block)".into(),
            Cause::NotYetStored => "being computed for another prompt".into(),
            Cause::HeldElsewhere => match &self.elsewhere {
                Some(held) => format!("cached on {}, not chosen", held.worker).into(),
                None => "cached on another worker".into(),
            },
            Cause::Evicted => removed.map_or("evicted".into(), |nearest| nearest.state.clone().into()),
            Cause::OtherNamespace => "cached for another account, salt or LoRA only".into(),
            Cause::NewText if self.known_tokens > 0 => format!("new text from token {} on", self.known_tokens).into(),
            Cause::NewText => "new text".into(),
            Cause::BelowBlock => "after the last reusable block".into(),
        }
    }
}

/// Returns the longest prefix that a worker has or had cached. Its `tokens` counts blocks, which the caller converts.
fn nearest(facts: &PrefixFacts, chosen: &str) -> Option<NearestPrefix> {
    let own = KnownPrefix { worker_id: chosen.to_owned(), blocks: facts.held_blocks, ..Default::default() };
    let known = [Some(&own), facts.anywhere.as_ref(), facts.removed.as_ref()];
    let longest = known.into_iter().flatten().filter(|known| known.blocks > 0).max_by_key(|known| known.blocks)?;
    let KnownPrefix { worker_id: worker, blocks, removed_s, lost, .. } = longest.clone();
    let state = match removed_s {
        None => format!("cached on {worker}"),
        Some(age) if lost => format!("lost {} ago with {worker} or its cache", age_in_words(age)),
        Some(age) => format!("evicted {} ago from {worker}", age_in_words(age)),
    };
    Some(NearestPrefix { worker, tokens: blocks, removed_s, lost, state })
}

fn age_in_words(seconds: u32) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", (seconds + 30) / 60),
        _ => format!("{} h", seconds.saturating_add(1800) / 3600),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use tandem_proto::v1;

    fn placement(facts: Option<PrefixFacts>) -> Placement {
        let worker = v1::WorkerRef { worker_id: "d0".to_owned(), ..Default::default() };
        let decode = Some(v1::Candidate { worker: Some(worker), overlap_blocks: 2, predicted_blocks: 0 });
        let placement = v1::Placement { decode, block_size: 16, prefix: facts, ..Default::default() };
        Placement::from_wire(placement).expect("the placement names a decode worker")
    }

    #[test]
    fn ages_are_written_in_seconds_minutes_or_hours() {
        let ages = [0, 119, 120, 4_000, 7_199, 7_200, u32::MAX].map(age_in_words);
        assert_eq!(ages, ["0 s", "119 s", "2 min", "67 min", "120 min", "2 h", "1193046 h"]);
    }

    #[test]
    fn details_name_the_causes_the_nearest_prefix_and_a_better_worker() {
        let known = |worker: &str, blocks| KnownPrefix { worker_id: worker.to_owned(), blocks, ..Default::default() };
        let facts = PrefixFacts {
            reusable_blocks: 8,
            expected_blocks: 2,
            held_blocks: 2,
            known_blocks: 2,
            eligible: Some(KnownPrefix { more_ms: Some(4.0), saved_ms: 3.0, ..known("d1", 3) }),
            anywhere: Some(KnownPrefix { more_ms: None, ..known("d2", 4) }),
            in_flight_blocks: 2,
            removed: Some(KnownPrefix { removed_s: Some(40), lost: true, ..known("d3", 6) }),
            other_namespace_blocks: 7,
        };
        let details = |found, reader| json!(PrefixDetails::new(&placement(Some(facts.clone())), 135, found, reader));
        assert_eq!(
            details(Some(32), DetailsReader::Operator),
            json!({
                "summary": "32 of 135 cached: 32 cached on d2, not chosen; 32 lost 40 s ago with d3 or its cache; 16 cached for another \
                            account, salt or LoRA only; 16 new text from token 96 on; 7 after the last reusable block",
                "possible_tokens": 64, "eligible_tokens": 48, "chosen_tokens": 32, "regret_ms": 3.0,
                "uncached": { "held_elsewhere": 32, "evicted": 32, "other_namespace": 16, "new_text": 16, "below_block": 7 },
                "known_tokens": 96,
                "nearest": { "worker": "d3", "tokens": 96, "removed_s": 40, "lost": true, "state": "lost 40 s ago with d3 or its cache" },
                "elsewhere": { "worker": "d2", "tokens": 64, "more_ms": null, "saved_ms": 0.0 },
            })
        );
        let of_client = details(Some(32), DetailsReader::Client);
        assert_eq!(of_client["uncached"], json!({ "held_elsewhere": 32, "evicted": 32, "new_text": 32, "below_block": 7 }));
        let summary = of_client["summary"].as_str().unwrap_or_default();
        assert!(!summary.contains("account") && summary.contains("32 new text"), "{summary}");
        let unreported = details(None, DetailsReader::Operator);
        assert_eq!((&unreported["uncached"], &unreported["summary"]), (&json!(null), &json!(null)));
        assert_eq!(json!(PrefixDetails::new(&placement(None), 135, Some(0), DetailsReader::Operator)), json!(null));
    }
}
