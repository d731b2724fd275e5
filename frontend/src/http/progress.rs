//! How far a request has come: what its prompts used and where they ran.

use crate::{
    dispatch::Facts,
    metrics::FrontendMetrics,
    recent::{Chunk, FailedAttempt, Finished, Recent, Steps},
    stream::{Delta, Piece},
    usage::{CachedSource, PromptUsage, Usage, cached, overlap_blocks, usage},
};
use axum::http::StatusCode;
use serde::Serialize;
use std::{collections::BTreeMap, sync::Arc};
use tandem_node::trace::Span;
use tandem_proto::v1::FailureReason;
use tokio::time::Instant;

/// The status of a request whose client went away, as in the metrics.
const CLIENT_CLOSED: u16 = 499;

/// Of one request. Dropped, it leaves a record of each prompt, if records are kept.
pub(super) struct Progress {
    since: Instant,
    samples: usize,
    prompts: Vec<PromptProgress>,
    metrics: Arc<FrontendMetrics>,
    span: Span,
    /// Of each sample that has ended; for the trace.
    finish_reasons: Vec<&'static str>,
    kept: Option<Kept>,
    /// What became of the request, as its HTTP status.
    status: u16,
}

/// Where a request's records go, and what they say of it.
pub(super) struct Kept {
    pub(super) recent: Arc<Recent>,
    pub(super) endpoint: &'static str,
    pub(super) streamed: bool,
}

struct PromptProgress {
    request_id: String,
    usage: PromptUsage,
    facts: Option<Box<Facts>>,
    migrations: u32,
    /// When each sample's last token came.
    last_token_at: Vec<Option<Instant>>,
    ended_at: Option<Instant>,
}

/// The extension object `tandem`: of the one prompt, or of each.
#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Details {
    One(PromptDetails),
    Many { prompts: Vec<PromptDetails> },
}

#[derive(Debug, Serialize)]
pub(crate) struct PromptDetails {
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
        span: Span,
        kept: Option<Kept>,
    ) -> Self {
        let prompts = prompts.map(|(request_id, prompt_tokens)| PromptProgress {
            request_id,
            usage: PromptUsage { prompt_tokens, ..PromptUsage::default() },
            facts: None,
            migrations: 0,
            last_token_at: vec![None; samples],
            ended_at: None,
        });
        let (finish_reasons, status) = (Vec::new(), CLIENT_CLOSED);
        Self { since, samples, prompts: prompts.collect(), metrics, span, finish_reasons, kept, status }
    }

    /// Continuations of each prompt.
    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// Takes note of a piece of prompt `index`.
    pub(super) fn note(&mut self, index: usize, piece: &Piece) {
        let prompt = &mut self.prompts[index];
        if let Piece::Delta(Delta { finish: Some(finish), .. }) = piece
            && self.span.is_sampled()
        {
            self.finish_reasons.push(finish.label());
        }
        match piece {
            Piece::Started(facts) => {
                let prompt_tokens = prompt.usage.prompt_tokens;
                prompt.usage.cached = Some(cached(facts.scheduled.as_ref(), Some(&facts.placement), prompt_tokens));
                let ttft = facts.first_token_at.duration_since(self.since);
                self.metrics.time_to_first_token.record(ttft.as_secs_f64());
                prompt.facts = Some(facts.clone());
                self.span.event("first token", &[]);
            }
            Piece::Delta(delta) if delta.tokens > 0 => prompt.note_tokens(delta, &self.metrics),
            Piece::Migrated => prompt.migrations += 1,
            // Whoever goes on for another prefills anew: the timeline is of the attempt that brought the first token.
            Piece::Prefilled(chunks) if prompt.migrations == 0 => {
                if let Some(facts) = &mut prompt.facts {
                    facts.chunks.clone_from(chunks);
                }
            }
            Piece::Finished => prompt.ended_at = Some(Instant::now()),
            Piece::Delta(_) | Piece::PromptLogprobs(_) | Piece::Prefilled(_) => {}
        }
    }

    /// As it stands.
    pub(super) fn usage(&self) -> Usage {
        usage(self.prompts.iter().map(|prompt| &prompt.usage))
    }

    /// The answer is whole: every prompt is counted, once.
    pub(super) fn finish(&mut self) {
        self.status = StatusCode::OK.as_u16();
        self.trace();
        for prompt in &self.prompts {
            let placement = prompt.facts.as_ref().map(|facts| &facts.placement);
            let prefilling = placement.and_then(|placement| placement.prefill.as_ref().or(placement.decode.as_ref()));
            let worker = prefilling.and_then(|candidate| candidate.worker.as_ref());
            self.metrics.prompt_finished(&prompt.usage, worker.map_or("", |worker| &worker.worker_id));
        }
    }

    /// The answer ends with an error.
    pub(super) fn fail(&mut self, status: StatusCode) {
        self.status = status.as_u16();
    }

    fn trace(&self) {
        if !self.span.is_sampled() {
            return;
        }
        let usage = self.usage();
        self.span.set("gen_ai.usage.input_tokens", usage.prompt_tokens());
        self.span.set("gen_ai.usage.output_tokens", usage.completion_tokens());
        self.span.set("gen_ai.usage.cache_read.input_tokens", usage.cached_tokens());
        self.span.set("gen_ai.response.finish_reasons", self.finish_reasons.clone());
        self.span.set("tandem.prompts", self.prompts.len() as u64);
        let sources = self.prompts.iter().filter_map(|prompt| Some(prompt.usage.cached.as_ref()?.source.label()));
        self.span.set("tandem.cached_tokens_source", sources.collect::<Vec<_>>());
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

impl Drop for Progress {
    fn drop(&mut self) {
        let Some(Kept { recent, endpoint, streamed }) = &self.kept else { return };
        for prompt in &self.prompts {
            recent.keep(Finished {
                endpoint,
                streamed: *streamed,
                status: self.status,
                samples: self.samples,
                prompt_tokens: prompt.usage.prompt_tokens,
                completion_tokens: prompt.usage.completion_tokens,
                cached_tokens: prompt.usage.cached.as_ref().map(|cached| cached.tokens),
                block_size: prompt.facts.as_ref().map(|facts| facts.placement.block_size),
                details: prompt.details(self.since),
                steps: prompt.steps(self.since),
            });
        }
    }
}

impl PromptProgress {
    /// The milliseconds from the request to each step on its way, as far as it came.
    fn steps(&self, since: Instant) -> Steps {
        let ms = |at: Instant| at.duration_since(since).as_secs_f64() * 1000.0;
        let facts = self.facts.as_deref();
        let scheduled_ms = facts.and_then(|facts| facts.times.scheduled_at).map(ms);
        // Counted from there, on the worker's clock.
        let chunks = scheduled_ms.zip(facts).map(|(from, facts)| {
            let chunk = |chunk: &tandem_proto::v1::PrefillChunk| Chunk {
                start_ms: from + f64::from(chunk.start_ms),
                duration_ms: chunk.duration_ms.into(),
                tokens: chunk.tokens,
            };
            facts.chunks.iter().map(chunk).collect()
        });
        let failed = |(at, reason): &(Instant, FailureReason)| FailedAttempt { at_ms: ms(*at), reason: reason.label() };
        Steps {
            asked_ms: facts.map(|facts| ms(facts.times.asked_at)),
            placed_ms: facts.map(|facts| ms(facts.times.placed_at)),
            scheduled_ms,
            chunks: chunks.unwrap_or_default(),
            started_ms: facts.and_then(|facts| facts.times.started_at).map(ms),
            first_token_ms: facts.map(|facts| ms(facts.first_token_at)),
            ended_ms: ms(self.ended_at.unwrap_or_else(Instant::now)),
            failed: facts.map(|facts| facts.failed.iter().map(failed).collect()).unwrap_or_default(),
        }
    }

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
