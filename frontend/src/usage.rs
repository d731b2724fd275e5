//! Computes the usage of all answers, whole or streamed.

use crate::dispatch::placement::Placement;
use serde::Serialize;
use std::collections::BTreeMap;
use tandem_api::answer::Usage;
use tandem_proto::v1::Scheduled;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CachedSource {
    /// The worker that computed the prompt has reported the number.
    Worker,
    /// The worker reported no number. The number is the overlap that the router knew.
    RouterEstimate,
    /// The worker reported no number and the router knew no overlap, so the number is 0.
    Unknown,
}

impl CachedSource {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::RouterEstimate => "router_estimate",
            Self::Unknown => "unknown",
        }
    }
}

/// The prompt tokens whose KV came from a prefix cache. Once known, they do not change.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    pub(crate) tokens: u32,
    pub(crate) source: CachedSource,
    /// The cached tokens of each cache tier, as the worker reported them; empty if the worker reported no tiers.
    pub(crate) by_tier: BTreeMap<String, u32>,
}

/// Returns the cached tokens of the attempt that generated the first token: the number that the worker reported, even if it is 0; without a
/// report, the placement's overlap. A placement with a block size of 0 has no information about caches.
pub(crate) fn cached(scheduled: Option<&Scheduled>, placement: &Placement, prompt_tokens: u32) -> Cached {
    if let Some(scheduled) = scheduled
        && let Some(tokens) = scheduled.cached_tokens
    {
        let by_tier = scheduled.cached_tokens_by_tier.iter().map(|(tier, tokens)| (tier.clone(), *tokens)).collect();
        return Cached { tokens, source: CachedSource::Worker, by_tier };
    }
    let by_tier = BTreeMap::new();
    if placement.block_size == 0 {
        return Cached { tokens: 0, source: CachedSource::Unknown, by_tier };
    }
    let tokens = placement.prefilling().overlap_blocks.saturating_mul(placement.block_size).min(prompt_tokens);
    Cached { tokens, source: CachedSource::RouterEstimate, by_tier }
}

/// The usage of one prompt and all its samples.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptUsage {
    pub(crate) prompt_tokens: u32,
    /// The number of generated tokens of all samples.
    pub(crate) completion_tokens: u32,
    /// How many of the generated tokens are reasoning.
    pub(crate) reasoning_tokens: u32,
    /// The cached tokens; `None` until the first token, or until they are reported if the worker reports them late.
    pub(crate) cached: Option<Cached>,
}

/// Returns the usage of a request, which is the sum of its prompts' usage.
pub(crate) fn usage<'a>(prompts: impl IntoIterator<Item = &'a PromptUsage>) -> Usage {
    let (mut prompt_tokens, mut completion_tokens, mut reasoning_tokens, mut cached_tokens) = (0_u32, 0_u32, 0_u32, Some(0_u32));
    for prompt in prompts {
        prompt_tokens = prompt_tokens.saturating_add(prompt.prompt_tokens);
        completion_tokens = completion_tokens.saturating_add(prompt.completion_tokens);
        reasoning_tokens = reasoning_tokens.saturating_add(prompt.reasoning_tokens);
        cached_tokens = cached_tokens.zip(prompt.cached.as_ref()).map(|(sum, cached)| sum.saturating_add(cached.tokens));
    }
    Usage::new(prompt_tokens, cached_tokens, completion_tokens, reasoning_tokens)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::{self, Candidate};

    fn placement(decode: u32, prefill: Option<u32>, block_size: u32) -> Placement {
        let candidate =
            |overlap_blocks| Candidate { worker: Some(v1::WorkerRef::default()), overlap_blocks, predicted_blocks: 1000 };
        let placement =
            v1::Placement { decode: Some(candidate(decode)), prefill: prefill.map(candidate), block_size, ..Default::default() };
        Placement::from_wire(placement).expect("the placement names a decode worker")
    }

    #[test]
    fn reported_cached_tokens_are_used_and_only_a_missing_report_is_estimated() {
        use CachedSource::{RouterEstimate, Unknown, Worker};
        let reported = |tokens| Some(Scheduled { cached_tokens: tokens, ..Scheduled::default() });
        let cases = [
            // The worker's report is used, even if it is 0 or the router's estimate is higher.
            (reported(Some(32)), placement(9, Some(9), 16), 100, 32, Worker),
            (reported(Some(0)), placement(9, Some(9), 16), 100, 0, Worker),
            (reported(Some(48)), placement(9, Some(9), 0), 100, 48, Worker),
            // Without a report, the number is the overlap of the worker that computes the prompt.
            (reported(None), placement(9, Some(3), 16), 100, 48, RouterEstimate),
            (reported(None), placement(2, None, 16), 100, 32, RouterEstimate),
            (None, placement(2, None, 16), 100, 32, RouterEstimate),
            (reported(None), placement(9, Some(0), 16), 100, 0, RouterEstimate),
            // The number is never greater than the number of the prompt's tokens, and its computation does not overflow.
            (reported(None), placement(0, Some(7), 16), 100, 100, RouterEstimate),
            (reported(None), placement(0, Some(u32::MAX), u32::MAX), u32::MAX, u32::MAX, RouterEstimate),
            (reported(None), placement(0, Some(1 << 28), 16), 77, 77, RouterEstimate),
            // Neither the worker nor the router knows the number.
            (reported(None), placement(9, None, 0), 100, 0, Unknown),
            (None, placement(9, None, 0), 100, 0, Unknown),
            (reported(None), placement(9, Some(9), 0), 100, 0, Unknown),
        ];
        for (index, (scheduled, placement, prompt_tokens, tokens, source)) in cases.into_iter().enumerate() {
            let cached = cached(scheduled.as_ref(), &placement, prompt_tokens);
            assert_eq!((cached.tokens, cached.source), (tokens, source), "case {index}");
        }
    }

    #[test]
    fn cached_tokens_by_tier_are_as_reported() {
        let by_tier = [("device".to_owned(), 32)];
        let scheduled =
            Scheduled { cached_tokens: Some(32), cached_tokens_by_tier: by_tier.clone().into(), reported_later: false };
        assert_eq!(cached(Some(&scheduled), &placement(0, None, 16), 100).by_tier, BTreeMap::from(by_tier));
    }

    #[test]
    fn usage_has_all_fields_and_sums_saturate() {
        let prompt = |prompt_tokens, completion_tokens, cached_tokens| PromptUsage {
            prompt_tokens,
            completion_tokens,
            reasoning_tokens: 2,
            cached: Some(Cached { tokens: cached_tokens, source: CachedSource::Worker, by_tier: BTreeMap::new() }),
        };
        let json = |prompts: &[PromptUsage]| serde_json::to_value(usage(prompts)).expect("usage can be serialized");
        assert_eq!(
            json(&[prompt(100, 5, 96), prompt(20, 7, 0), prompt(3, 0, 0)]),
            serde_json::json!({
                "prompt_tokens": 123, "completion_tokens": 12, "total_tokens": 135,
                "prompt_tokens_details": { "cached_tokens": 96, "audio_tokens": 0 },
                "completion_tokens_details": { "reasoning_tokens": 6 },
            })
        );
        assert_eq!(json(&[prompt(u32::MAX, 1, 0), prompt(1, u32::MAX, 0)])["total_tokens"], u32::MAX);
        let unknown = PromptUsage { prompt_tokens: 3, ..PromptUsage::default() };
        assert_eq!(json(&[prompt(100, 5, 96), unknown])["prompt_tokens_details"], serde_json::json!({ "audio_tokens": 0 }));
    }
}
