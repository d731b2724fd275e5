//! The frontend's metrics, all with the prefix `tandem_frontend_`.

use crate::usage::{Cached, CachedSource, PromptUsage};
use axum::http::StatusCode;
use metrics::{Counter, Gauge, Histogram};
use parking_lot::Mutex;
use std::{collections::HashSet, time::Duration};
use tandem_process::{Metrics, listen::ConnectionMetrics};
use tandem_proto::v1::FailureReason;
use tandem_text::EncodingMetrics;

/// The maximum number of workers in [`FrontendMetrics::reporting`].
const WORKERS_MAX: usize = 4096;
/// The status that is counted for a request whose client disconnected, as in nginx.
pub(crate) const CLIENT_CLOSED: u16 = 499;
/// The value of the label `tier` for cached tokens whose tier is not known.
const TIER_UNKNOWN: &str = "unknown";
/// The cache tiers that are counted separately.
const TIERS: [&str; 4] = ["device", "host", "disk", "store"];

/// An endpoint whose requests have a body: they generate text, count and convert tokens, or are passed through.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
    Generate,
    Messages,
    Responses,
    CountTokens,
    Tokenize,
    Detokenize,
    // Requests of these endpoints are passed through.
    Embeddings,
    Rerank,
    Score,
    Classify,
    Pooling,
    Transcriptions,
    Translations,
    /// Any request to an endpoint picker that it does not read.
    Forwarded,
}

pub(crate) struct FrontendMetrics {
    registry: Metrics,
    pub(crate) inflight_requests: Gauge,
    pub(crate) inflight_sequences: Gauge,
    pub(crate) reading_requests: Gauge,
    pub(crate) held_requests: Gauge,
    pub(crate) connections: ConnectionMetrics,
    pub(crate) ready: Gauge,
    pub(crate) keys_missing: Counter,
    pub(crate) keys_unknown: Counter,
    cancelled: Counter,
    pub(crate) migrations: Counter,
    pub(crate) ended_workers: Counter,
    pub(crate) left_out_tools: Counter,
    pub(crate) rebooked: Counter,
    pub(crate) healthy_routers: Gauge,
    request_duration: Histogram,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    request_prompt_tokens: Histogram,
    request_completion_tokens: Histogram,
    request_cached_tokens: Histogram,
    request_cached_ratio: Histogram,
    /// The ids of the workers that report cached tokens.
    reporting: Mutex<HashSet<String>>,
}

impl Endpoint {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
            Self::Generate => "generate",
            Self::Messages => "messages",
            Self::Responses => "responses",
            Self::CountTokens => "count_tokens",
            Self::Tokenize => "tokenize",
            Self::Detokenize => "detokenize",
            Self::Embeddings => "embeddings",
            Self::Rerank => "rerank",
            Self::Score => "score",
            Self::Classify => "classify",
            Self::Pooling => "pooling",
            Self::Transcriptions => "transcriptions",
            Self::Translations => "translations",
            Self::Forwarded => "forwarded",
        }
    }

    /// Returns the name of the operation in OpenTelemetry's conventions.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::Chat | Self::Messages | Self::Responses => "chat",
            Self::Completions | Self::Generate => "text_completion",
            other => other.label(),
        }
    }
}

/// The metrics of a server to which requests for one model are passed through.
pub(crate) struct PassthroughMetrics {
    pub(crate) healthy: Gauge,
    pub(crate) inflight: Gauge,
    pub(crate) failures: Counter,
    pub(crate) duration: Histogram,
}

impl PassthroughMetrics {
    pub(crate) fn new(registry: &Metrics, model: &str, server: &str) -> Self {
        let labels = [("model", model), ("server", server)];
        let gauge = |name, help| registry.gauge(name, help, &labels);
        let healthy = gauge("tandem_frontend_passthrough_healthy", "1 while the server answers its health checks.");
        healthy.set(1.0);
        let help = "Requests that the server did not answer, or not to the end.";
        let failures = registry.counter("tandem_frontend_passthrough_failures_total", help, &labels);
        failures.increment(0);
        let inflight = gauge("tandem_frontend_passthrough_inflight_requests", "Requests that the server is answering.");
        let help = "Time from sending a request to the server to the end of its answer.";
        let duration = registry.histogram("tandem_frontend_passthrough_duration_seconds", help, &labels);
        Self { healthy, inflight, failures, duration }
    }
}

impl FrontendMetrics {
    pub(crate) fn new(registry: &Metrics) -> Self {
        let gauge = |name, help| registry.gauge(name, help, &[]);
        let counter = |name, help| registry.counter(name, help, &[]);
        let histogram = |name, help| registry.histogram(name, help, &[]);
        // Counters of failures must exist from the start, so that an alert detects the increase from 0 to 1.
        for reason in (0..).map_while(|number| FailureReason::try_from(number).ok()) {
            attempts_failed(registry, reason).increment(0);
        }
        for source in [CachedSource::RouterEstimate, CachedSource::Unknown] {
            unreported_prompts(registry, source).increment(0);
        }
        Self {
            inflight_requests: gauge("tandem_frontend_inflight_requests", "Requests admitted and not yet answered."),
            inflight_sequences: gauge(
                "tandem_frontend_inflight_sequences",
                "Sequences (prompts × n) of the admitted requests; --max-concurrent-requests bounds them.",
            ),
            reading_requests: gauge("tandem_frontend_reading_requests", "Requests being read and parsed, before admission."),
            held_requests: gauge("tandem_frontend_held_requests", "Admitted requests that wait because no router answers."),
            connections: ConnectionMetrics {
                open: gauge("tandem_frontend_connections", "Open connections."),
                refused: counter("tandem_frontend_connections_refused_total", "Connections refused by a limit."),
            },
            ready: gauge("tandem_frontend_ready", "1 while a request could be served."),
            keys_missing: unauthorized(registry, "missing"),
            keys_unknown: unauthorized(registry, "unknown"),
            cancelled: counter("tandem_frontend_cancelled_total", "Requests whose client disconnected before the answer's end."),
            migrations: counter("tandem_frontend_migrations_total", "Generations resumed on another worker after a loss."),
            ended_workers: counter(
                "tandem_frontend_requests_ended_workers_total",
                "Requests refused because two workers ended or failed while they ran the request.",
            ),
            left_out_tools: counter(
                "tandem_frontend_left_out_tools_total",
                "Tools of requests that the model does not see, because only other servers can run them.",
            ),
            rebooked: counter("tandem_frontend_rebooked_total", "Running requests booked again with another router."),
            healthy_routers: gauge("tandem_frontend_routers", "Routers that could place a request."),
            request_duration: histogram("tandem_frontend_request_duration_seconds", "Time from request to end of answer."),
            time_to_first_token: histogram("tandem_frontend_time_to_first_token_seconds", "Time to first token of a prompt."),
            inter_token_latency: histogram("tandem_frontend_inter_token_latency_seconds", "Time between tokens of a sample."),
            prompt_tokens: counter("tandem_frontend_prompt_tokens_total", "Tokens of finished prompts."),
            completion_tokens: counter("tandem_frontend_completion_tokens_total", "Tokens generated for finished prompts."),
            request_prompt_tokens: histogram("tandem_frontend_request_prompt_tokens", "Tokens of each finished prompt."),
            request_completion_tokens: histogram(
                "tandem_frontend_request_completion_tokens",
                "Tokens generated for each finished prompt, all its samples together.",
            ),
            request_cached_tokens: histogram("tandem_frontend_request_cached_tokens", "Cached tokens of each finished prompt."),
            request_cached_ratio: histogram("tandem_frontend_request_cached_ratio", "Cached fraction of each finished prompt."),
            reporting: Mutex::default(),
            registry: registry.clone(),
        }
    }

    /// Counts an admitted request whose reply was sent, and records its duration.
    /// `model` is the id of a served model, or empty.
    pub(crate) fn finished(&self, endpoint: Endpoint, model: &str, status: StatusCode, duration: Duration) {
        self.requests(endpoint, model, status.as_str()).increment(1);
        self.request_duration.record(duration.as_secs_f64());
    }

    /// Counts a request whose client disconnected. `model` is as in [`Self::finished`].
    pub(crate) fn cancelled(&self, endpoint: Endpoint, model: &str) {
        self.requests(endpoint, model, &CLIENT_CLOSED.to_string()).increment(1);
        self.cancelled.increment(1);
    }

    pub(crate) fn attempt_failed(&self, reason: FailureReason) {
        attempts_failed(&self.registry, reason).increment(1);
    }

    /// Counts a prompt whose answer is complete. `worker` is the id of the worker that prefilled it; empty if that worker was lost before
    /// it could report. Nothing is counted of its cached tokens if a gateway's engine has not reported them.
    pub(crate) fn prompt_finished(&self, usage: &PromptUsage, worker: &str) {
        let (prompt, completion) = (usage.prompt_tokens, usage.completion_tokens);
        self.prompt_tokens.increment(prompt.into());
        self.completion_tokens.increment(completion.into());
        self.request_prompt_tokens.record(prompt);
        self.request_completion_tokens.record(completion);
        let Some(cached) = &usage.cached else { return };
        self.request_cached_tokens.record(cached.tokens);
        self.request_cached_ratio.record(f64::from(cached.tokens) / f64::from(prompt.max(1)));
        self.cached_tokens(cached);
        self.note_report(cached, worker);
    }

    fn cached_tokens(&self, cached: &Cached) {
        const NAME: &str = "tandem_frontend_cached_tokens_total";
        let counter = |tier| {
            let labels = [("source", cached.source.label()), ("tier", tier)];
            self.registry.counter(NAME, "Tokens of finished prompts that came from a prefix cache.", &labels)
        };
        let mut of_known_tiers = 0;
        for tier in TIERS {
            if let Some(tokens) = cached.by_tier.get(tier) {
                of_known_tiers += tokens;
                counter(tier).increment((*tokens).into());
            }
        }
        // If the worker reported no tier, the counter is incremented even by 0, so that the series of this source and the unknown tier
        // exists.
        let rest = cached.tokens.saturating_sub(of_known_tiers);
        if rest > 0 || cached.by_tier.is_empty() {
            counter(TIER_UNKNOWN).increment(rest.into());
        }
    }

    /// Counts a prompt whose cached tokens the worker did not report. Logs a warning if the worker reported them for earlier prompts.
    fn note_report(&self, cached: &Cached, worker: &str) {
        let mut reporting = self.reporting.lock();
        if cached.source == CachedSource::Worker {
            if !reporting.contains(worker) && reporting.len() < WORKERS_MAX {
                reporting.insert(worker.to_owned());
            }
            return;
        }
        let stopped = reporting.remove(worker);
        drop(reporting);
        unreported_prompts(&self.registry, cached.source).increment(1);
        if stopped {
            tracing::warn!(worker, "worker stopped reporting cached tokens; usage is estimated");
            const STOPPED: &str = "tandem_frontend_reports_stopped_total";
            let help = "Times that a worker stopped reporting cached tokens.";
            self.registry.counter(STOPPED, help, &[]).increment(1);
        }
    }

    fn requests(&self, endpoint: Endpoint, model: &str, code: &str) -> Counter {
        const NAME: &str = "tandem_frontend_requests_total";
        let labels = [("endpoint", endpoint.label()), ("model", model), ("code", code)];
        self.registry.counter(NAME, "Requests by the status of their reply.", &labels)
    }

    pub(crate) fn render(&self) -> String {
        self.registry.render()
    }
}

/// Returns the gauge that is 1 while the certificate's files cannot be used.
pub(crate) fn tls_outdated(registry: &Metrics) -> Gauge {
    const HELP: &str = "1 while the files of the certificate cannot be used, so that the last valid ones stay in use.";
    let gauge = registry.gauge("tandem_frontend_tls_outdated", HELP, &[]);
    gauge.set(0.0);
    gauge
}

/// Returns the metrics of the cache of texts with their tokens.
pub(crate) fn encodings(registry: &Metrics) -> EncodingMetrics {
    let counter = |result| {
        const NAME: &str = "tandem_frontend_encoding_cache_bytes_total";
        let counter =
            registry.counter(NAME, "Bytes of prompts' text by whether their tokens were remembered.", &[("result", result)]);
        counter.increment(0);
        counter
    };
    let help = "Memory of remembered texts and their tokens; --encoding-cache-bytes bounds it.";
    let bytes = registry.gauge("tandem_frontend_encoding_cache_bytes", help, &[]);
    EncodingMetrics { bytes, hits: counter("hit"), misses: counter("miss") }
}

fn unauthorized(registry: &Metrics, reason: &str) -> Counter {
    const NAME: &str = "tandem_frontend_unauthorized_total";
    let counter = registry.counter(NAME, "Requests refused with 401, because of their API key.", &[("reason", reason)]);
    counter.increment(0);
    counter
}

fn attempts_failed(registry: &Metrics, reason: FailureReason) -> Counter {
    const NAME: &str = "tandem_frontend_attempts_failed_total";
    registry.counter(NAME, "Attempts that ended before their first token.", &[("reason", reason.label())])
}

fn unreported_prompts(registry: &Metrics, source: CachedSource) -> Counter {
    const NAME: &str = "tandem_frontend_unreported_prompts_total";
    registry.counter(NAME, "Finished prompts whose worker reported no cached tokens.", &[("source", source.label())])
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    fn finished(tokens: u32, source: CachedSource, tiers: &[(&str, u32)]) -> PromptUsage {
        let by_tier: BTreeMap<_, _> = tiers.iter().map(|(tier, tokens)| ((*tier).to_owned(), *tokens)).collect();
        PromptUsage {
            prompt_tokens: 100,
            completion_tokens: 5,
            reasoning_tokens: 0,
            cached: Some(Cached { tokens, source, by_tier }),
        }
    }

    #[test]
    fn cached_tokens_are_counted_by_source_and_known_tier() {
        let registry = Metrics::default();
        let metrics = FrontendMetrics::new(&registry);
        metrics.prompt_finished(&finished(48, CachedSource::Worker, &[("device", 32), ("attic", 16)]), "p0");
        metrics.prompt_finished(&finished(0, CachedSource::Worker, &[("device", 0)]), "p0");
        metrics.prompt_finished(&finished(64, CachedSource::RouterEstimate, &[]), "p1");
        let text = registry.render();
        for line in [
            r#"tandem_frontend_cached_tokens_total{source="worker",tier="device"} 32"#,
            r#"tandem_frontend_cached_tokens_total{source="worker",tier="unknown"} 16"#,
            r#"tandem_frontend_cached_tokens_total{source="router_estimate",tier="unknown"} 64"#,
            r#"tandem_frontend_unreported_prompts_total{source="router_estimate"} 1"#,
            "tandem_frontend_request_cached_tokens_count 3",
            "tandem_frontend_request_cached_tokens_sum 112",
            "tandem_frontend_prompt_tokens_total 300",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
        assert!(!text.contains("attic"), "{text}");
        assert!(!text.contains("reports_stopped"), "p1 never sent a report: {text}");
    }

    #[test]
    fn failure_counters_exist_before_the_first_failure() {
        let registry = Metrics::default();
        let metrics = FrontendMetrics::new(&registry);
        metrics.attempt_failed(FailureReason::PrefillLost);
        let text = registry.render();
        for line in [
            r#"tandem_frontend_attempts_failed_total{reason="unreachable"} 0"#,
            r#"tandem_frontend_attempts_failed_total{reason="prefill_lost"} 1"#,
            r#"tandem_frontend_attempts_failed_total{reason="draining"} 0"#,
            r#"tandem_frontend_unreported_prompts_total{source="router_estimate"} 0"#,
            r#"tandem_frontend_unreported_prompts_total{source="unknown"} 0"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in {text}");
        }
    }

    #[test]
    fn worker_is_counted_each_time_it_stops_reporting_cached_tokens() {
        let registry = Metrics::default();
        let metrics = FrontendMetrics::new(&registry);
        use CachedSource::{RouterEstimate, Worker};
        for source in [Worker, RouterEstimate, RouterEstimate, Worker, RouterEstimate] {
            metrics.prompt_finished(&finished(16, source, &[]), "p0");
        }
        let text = registry.render();
        assert!(text.contains("tandem_frontend_reports_stopped_total 2"), "{text}");
    }
}
