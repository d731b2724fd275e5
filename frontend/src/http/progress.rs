//! How far a request has come: what its prompts used and where they ran.

use crate::{
    dispatch::Facts,
    metrics::FrontendMetrics,
    stream::{Delta, Piece},
    usage::{CachedSource, PromptUsage, Usage, cached, overlap_blocks, usage},
};
use serde::Serialize;
use std::{collections::BTreeMap, sync::Arc};
use tokio::time::Instant;

/// Of one request.
pub(super) struct Progress {
    since: Instant,
    samples: usize,
    prompts: Vec<PromptProgress>,
    metrics: Arc<FrontendMetrics>,
}

struct PromptProgress {
    request_id: String,
    usage: PromptUsage,
    facts: Option<Box<Facts>>,
    migrations: u32,
    /// When each sample's last token came.
    last_token_at: Vec<Option<Instant>>,
}

/// The extension object `tandem`: of the one prompt, or of each.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Details {
    One(PromptDetails),
    Many { prompts: Vec<PromptDetails> },
}

#[derive(Serialize)]
pub(super) struct PromptDetails {
    request_id: String,
    cached_tokens_source: CachedSource,
    cached_tokens_by_tier: BTreeMap<String, u32>,
    overlap_blocks: u32,
    /// Null: the decode worker prefilled.
    prefill_worker: Option<String>,
    decode_worker: Option<String>,
    ttft_ms: f64,
    queue_ms: f64,
    kv_transfer_ms: f64,
    kv_transfer_bytes: u64,
    migrations: u32,
}

impl Progress {
    /// `prompts`: each one's request id and how many tokens it has.
    pub(super) fn new(
        since: Instant,
        samples: usize,
        prompts: impl Iterator<Item = (String, u32)>,
        metrics: Arc<FrontendMetrics>,
    ) -> Self {
        let prompts = prompts.map(|(request_id, prompt_tokens)| PromptProgress {
            request_id,
            usage: PromptUsage { prompt_tokens, ..PromptUsage::default() },
            facts: None,
            migrations: 0,
            last_token_at: vec![None; samples],
        });
        Self { since, samples, prompts: prompts.collect(), metrics }
    }

    /// Continuations of each prompt.
    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// Takes note of a piece of prompt `index`.
    pub(super) fn note(&mut self, index: usize, piece: &Piece) {
        let prompt = &mut self.prompts[index];
        match piece {
            Piece::Started(facts) => {
                let prompt_tokens = prompt.usage.prompt_tokens;
                prompt.usage.cached = Some(cached(facts.scheduled.as_ref(), Some(&facts.placement), prompt_tokens));
                let ttft = facts.first_token_at.duration_since(self.since);
                self.metrics.time_to_first_token.record(ttft.as_secs_f64());
                prompt.facts = Some(facts.clone());
            }
            Piece::Delta(delta) if delta.tokens > 0 => prompt.note_tokens(delta, &self.metrics),
            Piece::Migrated => prompt.migrations += 1,
            Piece::Delta(_) | Piece::PromptLogprobs(_) | Piece::Finished => {}
        }
    }

    /// As it stands.
    pub(super) fn usage(&self) -> Usage {
        usage(self.prompts.iter().map(|prompt| &prompt.usage))
    }

    /// The answer is whole: every prompt is counted, once.
    pub(super) fn finish(&self) {
        for prompt in &self.prompts {
            let placement = prompt.facts.as_ref().map(|facts| &facts.placement);
            let prefilling = placement.and_then(|placement| placement.prefill.as_ref().or(placement.decode.as_ref()));
            let worker = prefilling.and_then(|candidate| candidate.worker.as_ref());
            self.metrics.prompt_finished(&prompt.usage, worker.map_or("", |worker| &worker.worker_id));
        }
    }

    /// What is known beyond OpenAI's fields.
    pub(super) fn details(&self) -> Details {
        let mut prompts: Vec<PromptDetails> = self.prompts.iter().map(|prompt| prompt.details(self.since)).collect();
        match prompts.pop() {
            Some(only) if prompts.is_empty() => Details::One(only),
            last => Details::Many { prompts: prompts.into_iter().chain(last).collect() },
        }
    }
}

impl PromptProgress {
    fn note_tokens(&mut self, delta: &Delta, metrics: &FrontendMetrics) {
        self.usage.completion_tokens = self.usage.completion_tokens.saturating_add(delta.tokens);
        let now = Instant::now();
        if let Some(last) = self.last_token_at.get_mut(delta.sample as usize)
            && let Some(before) = last.replace(now)
        {
            // Tokens that come together share the gap before them.
            let gap = now.duration_since(before).as_secs_f64() / f64::from(delta.tokens);
            for _ in 0..delta.tokens {
                metrics.inter_token_latency.record(gap);
            }
        }
    }

    fn details(&self, since: Instant) -> PromptDetails {
        let facts = self.facts.as_deref();
        let placement = facts.map(|facts| &facts.placement);
        let worker = |candidate: Option<&tandem_proto::v1::Candidate>| {
            candidate.and_then(|candidate| candidate.worker.as_ref()).map(|worker| worker.worker_id.clone())
        };
        let started = facts.map(|facts| facts.started).unwrap_or_default();
        let cached = self.usage.cached.as_ref();
        PromptDetails {
            request_id: self.request_id.clone(),
            cached_tokens_source: cached.map_or(CachedSource::Unknown, |cached| cached.source),
            cached_tokens_by_tier: cached.map(|cached| cached.by_tier.clone()).unwrap_or_default(),
            overlap_blocks: placement.map_or(0, overlap_blocks),
            prefill_worker: worker(placement.and_then(|placement| placement.prefill.as_ref())),
            decode_worker: worker(placement.and_then(|placement| placement.decode.as_ref())),
            ttft_ms: facts.map_or(0.0, |facts| facts.first_token_at.duration_since(since).as_secs_f64() * 1000.0),
            queue_ms: started.queue_ms,
            kv_transfer_ms: started.kv_transfer_ms,
            kv_transfer_bytes: started.kv_transfer_bytes,
            migrations: self.migrations,
        }
    }
}
