//! What a request used: the one builder of usage, for every endpoint, streaming or not.

use serde::Serialize;
use std::collections::BTreeMap;
use tandem_proto::v1::{Placement, Scheduled};

/// Where the number of cached tokens comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum CachedSource {
    /// The worker that did the prefill counted it: a fact.
    Worker,
    /// No worker reported: what the router knew to be there.
    RouterEstimate,
    /// No worker reported and nothing was known: written as 0.
    Unknown,
}

impl CachedSource {
    /// As a metric's label and in the `tandem` object.
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Worker => "worker",
            Self::RouterEstimate => "router_estimate",
            Self::Unknown => "unknown",
        }
    }
}

/// Prompt tokens that were not computed anew. Frozen with the first token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Cached {
    pub(crate) tokens: u32,
    pub(crate) source: CachedSource,
    /// Of what a worker reported.
    pub(crate) by_tier: BTreeMap<String, u32>,
}

/// Of the attempt that led to the first token: what its worker reported, else what its placement lets one expect.
///
/// A reported number is taken as it is, 0 included. A placement with a block size of 0 is one nobody decided on.
pub(crate) fn cached(scheduled: Option<&Scheduled>, placement: Option<&Placement>, prompt_tokens: u32) -> Cached {
    if let Some(scheduled) = scheduled
        && let Some(tokens) = scheduled.cached_tokens
    {
        let by_tier = scheduled.cached_tokens_by_tier.iter().map(|(tier, tokens)| (tier.clone(), *tokens)).collect();
        return Cached { tokens, source: CachedSource::Worker, by_tier };
    }
    let by_tier = BTreeMap::new();
    match placement.filter(|placement| placement.block_size > 0) {
        Some(placement) => {
            let expected = u64::from(overlap_blocks(placement)) * u64::from(placement.block_size);
            let tokens = u32::try_from(expected).unwrap_or(u32::MAX).min(prompt_tokens);
            Cached { tokens, source: CachedSource::RouterEstimate, by_tier }
        }
        None => Cached { tokens: 0, source: CachedSource::Unknown, by_tier },
    }
}

/// Blocks of the prompt that the worker which prefills it was known to hold.
pub(crate) fn overlap_blocks(placement: &Placement) -> u32 {
    placement.prefill.as_ref().or(placement.decode.as_ref()).map_or(0, |worker| worker.overlap_blocks)
}

/// What one prompt used, however many samples share it.
#[derive(Clone, Debug, Default)]
pub(crate) struct PromptUsage {
    pub(crate) prompt_tokens: u32,
    /// Of all samples, summed as they came.
    pub(crate) completion_tokens: u32,
    /// Absent until the first token.
    pub(crate) cached: Option<Cached>,
}

/// OpenAI's usage object. It has the same fields on every path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Usage {
    prompt_tokens: u32,
    completion_tokens: u32,
    total_tokens: u32,
    prompt_tokens_details: PromptTokensDetails,
    completion_tokens_details: CompletionTokensDetails,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct PromptTokensDetails {
    cached_tokens: u32,
    /// Prompts are text.
    audio_tokens: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
struct CompletionTokensDetails {
    /// No model with a marked chain of thought is served yet.
    reasoning_tokens: u32,
}

impl Usage {
    pub(crate) fn prompt_tokens(&self) -> u32 {
        self.prompt_tokens
    }

    pub(crate) fn completion_tokens(&self) -> u32 {
        self.completion_tokens
    }

    pub(crate) fn cached_tokens(&self) -> u32 {
        self.prompt_tokens_details.cached_tokens
    }
}

/// The usage of a request: its prompts' together.
pub(crate) fn usage<'a>(prompts: impl IntoIterator<Item = &'a PromptUsage>) -> Usage {
    let (mut prompt_tokens, mut completion_tokens, mut cached_tokens) = (0_u32, 0_u32, 0_u32);
    for prompt in prompts {
        prompt_tokens = prompt_tokens.saturating_add(prompt.prompt_tokens);
        completion_tokens = completion_tokens.saturating_add(prompt.completion_tokens);
        cached_tokens = cached_tokens.saturating_add(prompt.cached.as_ref().map_or(0, |cached| cached.tokens));
    }
    Usage {
        prompt_tokens,
        completion_tokens,
        total_tokens: prompt_tokens.saturating_add(completion_tokens),
        prompt_tokens_details: PromptTokensDetails { cached_tokens, audio_tokens: 0 },
        completion_tokens_details: CompletionTokensDetails { reasoning_tokens: 0 },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::Candidate;

    fn placement(decode: u32, prefill: Option<u32>, block_size: u32) -> Placement {
        let candidate = |overlap_blocks| Candidate { overlap_blocks, predicted_blocks: 1000, ..Candidate::default() };
        Placement { decode: Some(candidate(decode)), prefill: prefill.map(candidate), block_size }
    }

    #[test]
    fn the_workers_number_wins_and_only_silence_is_estimated() {
        use CachedSource::{RouterEstimate, Unknown, Worker};
        let reported = |tokens| Some(Scheduled { cached_tokens: tokens, ..Scheduled::default() });
        let cases = [
            // A report wins, 0 included, also over a better prediction.
            (reported(Some(32)), Some(placement(9, Some(9), 16)), 100, 32, Worker),
            (reported(Some(0)), Some(placement(9, Some(9), 16)), 100, 0, Worker),
            (reported(Some(48)), None, 100, 48, Worker),
            // Silence: the overlap of the worker that prefills.
            (reported(None), Some(placement(9, Some(3), 16)), 100, 48, RouterEstimate),
            (reported(None), Some(placement(2, None, 16)), 100, 32, RouterEstimate),
            (None, Some(placement(2, None, 16)), 100, 32, RouterEstimate),
            (reported(None), Some(placement(9, Some(0), 16)), 100, 0, RouterEstimate),
            // Never more than the prompt, and no overflow on the way.
            (reported(None), Some(placement(0, Some(7), 16)), 100, 100, RouterEstimate),
            (reported(None), Some(placement(0, Some(u32::MAX), u32::MAX)), u32::MAX, u32::MAX, RouterEstimate),
            (reported(None), Some(placement(0, Some(1 << 28), 16)), 77, 77, RouterEstimate),
            // Nothing known.
            (reported(None), None, 100, 0, Unknown),
            (None, None, 100, 0, Unknown),
            (reported(None), Some(placement(9, Some(9), 0)), 100, 0, Unknown),
        ];
        for (index, (scheduled, placement, prompt_tokens, tokens, source)) in cases.into_iter().enumerate() {
            let cached = cached(scheduled.as_ref(), placement.as_ref(), prompt_tokens);
            assert_eq!((cached.tokens, cached.source), (tokens, source), "case {index}");
        }
    }

    #[test]
    fn tiers_are_those_reported() {
        let by_tier = [("device".to_owned(), 32)];
        let scheduled = Scheduled { cached_tokens: Some(32), cached_tokens_by_tier: by_tier.clone().into() };
        assert_eq!(cached(Some(&scheduled), None, 100).by_tier, BTreeMap::from(by_tier));
    }

    #[test]
    fn the_shape_is_whole_and_sums_saturate() {
        let prompt = |prompt_tokens, completion_tokens, cached_tokens| PromptUsage {
            prompt_tokens,
            completion_tokens,
            cached: Some(Cached { tokens: cached_tokens, source: CachedSource::Worker, by_tier: BTreeMap::new() }),
        };
        let json = |prompts: &[PromptUsage]| serde_json::to_value(usage(prompts)).expect("usage is plain data");
        assert_eq!(
            json(&[prompt(100, 5, 96), prompt(20, 7, 0), PromptUsage { prompt_tokens: 3, ..PromptUsage::default() }]),
            serde_json::json!({
                "prompt_tokens": 123, "completion_tokens": 12, "total_tokens": 135,
                "prompt_tokens_details": { "cached_tokens": 96, "audio_tokens": 0 },
                "completion_tokens_details": { "reasoning_tokens": 0 },
            })
        );
        assert_eq!(json(&[prompt(u32::MAX, 1, 0), prompt(1, u32::MAX, 0)])["total_tokens"], u32::MAX);
    }
}
