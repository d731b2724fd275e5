//! The progress of a request: the usage, the workers and the timeline of each of its prompts.

use crate::{
    calls::Call,
    dispatch::Facts,
    metrics::{CLIENT_CLOSED, FrontendMetrics},
    prefix::{self, DetailsReader, PrefixDetails, Uncached},
    recent::{Chunk, FailedAttempt, Finished, PromptDetails, Recent, ResumedOn, Stages},
    stream::AnswerEvent,
    usage::{CachedSource, PromptUsage, cached, usage},
};
use axum::http::StatusCode;
use serde_json::{Value, json};
use std::sync::Arc;
use tandem_api::answer::{Delta, Usage};
use tandem_kv::RequestId;
use tandem_process::trace::Span;
use tandem_proto::{
    Funnel,
    v1::{FailureReason, PrefillChunk, Scheduled},
};
use tokio::time::Instant;

/// The progress of one request. Dropping this value records the usage in the audit log and each prompt for the dashboard, if these exist.
pub(super) struct Progress {
    since: Instant,
    samples: usize,
    prompts: Vec<PromptProgress>,
    metrics: Arc<FrontendMetrics>,
    span: Span,
    call: Arc<Call>,
    /// The finish reasons of the samples that have ended, for the trace.
    finish_reasons: Vec<&'static str>,
    recording: Option<Recording>,
    /// The outcome of the request as an HTTP status.
    status: u16,
}

/// The list in which the prompts of a request are recorded for the dashboard, and the fields that these records have in common.
pub(super) struct Recording {
    pub(super) recent: Arc<Recent>,
    pub(super) endpoint: &'static str,
    pub(super) streamed: bool,
}

struct PromptProgress {
    request_id: RequestId,
    usage: PromptUsage,
    /// The facts about the attempt that generated the first token; `None` before that token.
    facts: Option<Box<Facts>>,
    /// The chunks of the prefill, for the attempt that generated the first token; empty if the worker has not reported them.
    chunks: Vec<PrefillChunk>,
    resumed_on: Vec<ResumedOn>,
    /// Whether the worker that generated the first token was lost before it had reported the cached tokens.
    report_lost: bool,
    /// The time at which each sample's latest token arrived; `None` before the sample's first token.
    last_token_at: Vec<Option<Instant>>,
    ended_at: Option<Instant>,
}

impl Progress {
    /// Creates the progress of a request that arrived at `since`. `prompts` yields each prompt's request id and number of tokens.
    pub(super) fn new(
        since: Instant,
        samples: usize,
        prompts: impl Iterator<Item = (RequestId, u32)>,
        metrics: Arc<FrontendMetrics>,
        (span, call): (Span, Arc<Call>),
        recording: Option<Recording>,
    ) -> Self {
        let prompts = prompts.map(|(request_id, prompt_tokens)| PromptProgress {
            request_id,
            usage: PromptUsage { prompt_tokens, ..PromptUsage::default() },
            facts: None,
            chunks: Vec::new(),
            resumed_on: Vec::new(),
            report_lost: false,
            last_token_at: vec![None; samples],
            ended_at: None,
        });
        let (finish_reasons, status) = (Vec::new(), CLIENT_CLOSED);
        Self { since, samples, prompts: prompts.collect(), metrics, span, call, finish_reasons, recording, status }
    }

    /// Records an event of the prompt with this index.
    pub(super) fn record(&mut self, index: usize, event: &AnswerEvent) {
        let prompt = &mut self.prompts[index];
        if let AnswerEvent::Delta(Delta { finish: Some(finish), .. }) = event
            && self.span.is_sampled()
        {
            self.finish_reasons.push(finish.label());
        }
        match event {
            AnswerEvent::Started(facts) => {
                let ttft = facts.first_token_at.duration_since(self.since);
                self.metrics.time_to_first_token.record(ttft.as_secs_f64());
                prompt.facts = Some(facts.clone());
                if !facts.awaits_cached_tokens() {
                    prompt.count_cached(facts.scheduled.as_ref());
                }
                self.span.event("first token", &[]);
            }
            AnswerEvent::Scheduled(scheduled) => prompt.count_cached(Some(scheduled)),
            AnswerEvent::Delta(delta) if !delta.token_ids.is_empty() => {
                prompt.record_tokens(delta, &self.metrics);
                if let Some(key) = &self.call.key {
                    key.charge_tokens(delta.tokens());
                }
            }
            // A lost worker cannot report the cached tokens. This must not be counted as a worker that has stopped reporting them.
            AnswerEvent::ReportLost => prompt.report_lost = true,
            AnswerEvent::Resumed(worker) => {
                let after_tokens = prompt.usage.completion_tokens;
                prompt.resumed_on.push(ResumedOn { worker: worker.clone(), after_tokens });
                prompt.report_lost |= prompt.usage.cached.is_none();
                prompt.count_cached(None);
            }
            // Only the chunks of the attempt that generated the first token are recorded. A resumed generation prefills again and reports
            // further chunks, which are ignored.
            AnswerEvent::Prefilled(chunks) if prompt.resumed_on.is_empty() => prompt.chunks.clone_from(chunks),
            AnswerEvent::Finished => {
                prompt.count_cached(None);
                prompt.ended_at = Some(Instant::now());
            }
            AnswerEvent::Delta(_) | AnswerEvent::PromptLogprobs(_) | AnswerEvent::Prefilled(_) => {}
        }
    }

    pub(super) fn usage(&self) -> Usage {
        usage(self.prompts.iter().map(|prompt| &prompt.usage))
    }

    /// Returns the sum of the prompts' cached tokens: the known number of each prompt, else the number that the router expects.
    pub(super) fn cached_estimate(&self) -> u32 {
        let tokens = |prompt: &PromptProgress| match (&prompt.usage.cached, &prompt.facts) {
            (Some(cached), _) => cached.tokens,
            (None, Some(facts)) => cached(None, &facts.placement, prompt.usage.prompt_tokens).tokens,
            (None, None) => 0,
        };
        self.prompts.iter().map(tokens).fold(0, u32::saturating_add)
    }

    /// Records that the answer is complete, and counts every prompt in the metrics.
    pub(super) fn finish(&mut self) {
        self.status = StatusCode::OK.as_u16();
        self.trace();
        for prompt in &self.prompts {
            let facts = prompt.facts.as_ref().filter(|_| !prompt.report_lost);
            let worker = facts.map_or("", |facts| &*facts.placement.prefilling().worker.worker_id);
            self.metrics.prompt_finished(&prompt.usage, worker);
        }
    }

    /// Records the status of an answer that ends with an error.
    pub(super) fn fail(&mut self, status: StatusCode) {
        self.status = status.as_u16();
    }

    /// Returns the name of the decode worker that generated the first token of the prompt with this index.
    pub(super) fn decode_worker(&self, index: usize) -> String {
        self.prompts[index].facts.as_ref().map_or_else(String::new, |facts| facts.placement.decode.worker.worker_id.clone())
    }

    fn trace(&self) {
        if !self.span.is_sampled() {
            return;
        }
        let usage = self.usage();
        self.span.set("gen_ai.usage.input_tokens", usage.prompt_tokens);
        self.span.set("gen_ai.usage.output_tokens", usage.completion_tokens);
        self.span.set("gen_ai.usage.cache_read.input_tokens", usage.prompt_tokens_details.cached_tokens.unwrap_or_default());
        self.span.set("gen_ai.response.finish_reasons", self.finish_reasons.clone());
        self.span.set("tandem.prompts", self.prompts.len() as u64);
        let sources = self.prompts.iter().filter_map(|prompt| Some(prompt.usage.cached.as_ref()?.source.label()));
        self.span.set("tandem.cached_tokens_source", sources.collect::<Vec<_>>());
    }

    /// Returns the answer's extension object `tandem`: one object if the request has one prompt, else a list with an object for each
    /// prompt.
    pub(super) fn details(&self) -> Value {
        let prompts: Vec<PromptDetails> =
            self.prompts.iter().map(|prompt| prompt.details(self.since, DetailsReader::Client)).collect();
        if let [only] = prompts.as_slice() { json!(only) } else { json!({ "prompts": prompts }) }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let funnels = self.prompts.iter().map(PromptProgress::funnel);
        let sum = funnels.reduce(|one, other| {
            one.zip(other).map(|(mut sum, other)| {
                sum += other;
                sum
            })
        });
        self.call.used(&self.usage(), sum.flatten().map(|funnel| Uncached(funnel.causes)));
        let Some(Recording { recent, endpoint, streamed }) = &self.recording else { return };
        for prompt in &self.prompts {
            recent.add(Finished {
                endpoint,
                streamed: *streamed,
                status: self.status,
                samples: self.samples,
                prompt_tokens: prompt.usage.prompt_tokens,
                completion_tokens: prompt.usage.completion_tokens,
                cached_tokens: prompt.usage.cached.as_ref().map(|cached| cached.tokens),
                block_size: prompt.facts.as_ref().map(|facts| facts.placement.block_size),
                funnel: prompt.funnel(),
                details: prompt.details(self.since, DetailsReader::Operator),
                steps: prompt.stages(self.since),
            });
        }
    }
}

impl PromptProgress {
    /// Sets the number of cached tokens, unless it is known already: to the number that the worker reported, or to an estimate if the
    /// worker reported none.
    fn count_cached(&mut self, scheduled: Option<&Scheduled>) {
        if let (Some(facts), None) = (&self.facts, &self.usage.cached) {
            self.usage.cached = Some(cached(scheduled, &facts.placement, self.usage.prompt_tokens));
        }
    }

    /// Returns the milliseconds from the request's arrival to the end of each stage.
    fn stages(&self, since: Instant) -> Stages {
        let ms = |at: Instant| at.duration_since(since).as_secs_f64() * 1000.0;
        let facts = self.facts.as_deref();
        let scheduled_ms = facts.and_then(|facts| facts.scheduled_at).map(ms);
        // The worker reports each chunk's time relative to the beginning of the prefill.
        let chunks = scheduled_ms.map(|from| {
            let chunk = |chunk: &PrefillChunk| Chunk {
                start_ms: from + f64::from(chunk.start_ms),
                duration_ms: chunk.duration_ms.into(),
                tokens: chunk.tokens,
            };
            self.chunks.iter().map(chunk).collect()
        });
        let failed = |(at, reason): &(Instant, FailureReason)| FailedAttempt { at_ms: ms(*at), reason: reason.label() };
        Stages {
            requested_ms: facts.map(|facts| ms(facts.requested_at)),
            placed_ms: facts.map(|facts| ms(facts.placed_at)),
            scheduled_ms,
            chunks: chunks.unwrap_or_default(),
            started_ms: facts.and_then(|facts| facts.started_at).map(ms),
            first_token_ms: facts.map(|facts| ms(facts.first_token_at)),
            ended_ms: ms(self.ended_at.unwrap_or_else(Instant::now)),
            failed: facts.map(|facts| facts.failed.iter().map(failed).collect()).unwrap_or_default(),
        }
    }

    fn record_tokens(&mut self, delta: &Delta, metrics: &FrontendMetrics) {
        self.usage.completion_tokens = self.usage.completion_tokens.saturating_add(delta.tokens());
        self.usage.reasoning_tokens = self.usage.reasoning_tokens.saturating_add(delta.reasoning_tokens);
        let now = Instant::now();
        if let Some(last) = self.last_token_at.get_mut(delta.sample as usize)
            && let Some(before) = last.replace(now)
        {
            // The time since the previous delta is divided equally between the tokens of this delta.
            let gap = now.duration_since(before).as_secs_f64() / f64::from(delta.tokens());
            for _ in 0..delta.tokens() {
                metrics.inter_token_latency.record(gap);
            }
        }
    }

    /// Returns the number of cached tokens that the worker has reported.
    fn found(&self) -> Option<u32> {
        self.usage.cached.as_ref().filter(|cached| cached.source == CachedSource::Worker).map(|cached| cached.tokens)
    }

    fn funnel(&self) -> Option<Funnel> {
        prefix::funnel(&self.facts.as_ref()?.placement, self.usage.prompt_tokens, self.found()?)
    }

    fn details(&self, since: Instant, reader: DetailsReader) -> PromptDetails {
        let facts = self.facts.as_deref();
        let placement = facts.map(|facts| &facts.placement);
        let started = facts.map(|facts| facts.started).unwrap_or_default();
        let cached = self.usage.cached.as_ref();
        PromptDetails {
            request_id: self.request_id.to_string(),
            cached_tokens_source: cached.map_or(CachedSource::Unknown, |cached| cached.source),
            cached_tokens_by_tier: cached.map(|cached| cached.by_tier.clone()).unwrap_or_default(),
            overlap_blocks: placement.map_or(0, |placement| placement.prefilling().overlap_blocks),
            prefill_worker: placement.and_then(|placement| Some(placement.prefill.as_ref()?.worker.worker_id.clone())),
            decode_worker: placement.map(|placement| placement.decode.worker.worker_id.clone()),
            ttft_ms: facts.map_or(0.0, |facts| facts.first_token_at.duration_since(since).as_secs_f64() * 1000.0),
            queue_ms: started.queue_ms,
            kv_transfer_ms: started.kv_transfer_ms,
            kv_transfer_bytes: started.kv_transfer_bytes,
            migrations: self.resumed_on.len(),
            resumed_on: self.resumed_on.clone(),
            prefix: placement.and_then(|placement| PrefixDetails::new(placement, self.usage.prompt_tokens, self.found(), reader)),
        }
    }
}
