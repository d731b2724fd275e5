//! What the frontend counts, with the prefix `tandem_frontend_`.

use crate::{
    audit::AuditResult,
    usage::{Cached, CachedSource, PromptUsage},
};
use axum::http::StatusCode;
use metrics::{Counter, Gauge, Histogram};
use parking_lot::Mutex;
use std::{collections::HashSet, time::Duration};
use tandem_node::Metrics;
use tandem_proto::v1::FailureReason;

/// Workers whose reports are remembered.
const WORKERS_MAX: usize = 4096;
/// The status of a request whose client went away, as nginx names it.
const CLIENT_CLOSED: &str = "499";
/// The tier of cached tokens whose tier is not known; never the name of a real one.
const TIER_UNKNOWN: &str = "unknown";
/// The tiers that exist.
const TIERS: [&str; 1] = ["device"];

/// A label's closed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Endpoint {
    Chat,
    Completions,
}

/// The handles.
pub(crate) struct FrontendMetrics {
    registry: Metrics,
    model: String,
    pub(crate) inflight_requests: Gauge,
    pub(crate) inflight_sequences: Gauge,
    pub(crate) reading_requests: Gauge,
    pub(crate) connections: Gauge,
    pub(crate) connections_refused: Counter,
    pub(crate) ready: Gauge,
    cancelled: Counter,
    pub(crate) migrations: Counter,
    pub(crate) rebooked: Counter,
    pub(crate) routers_well: Gauge,
    request_duration: Histogram,
    pub(crate) time_to_first_token: Histogram,
    pub(crate) inter_token_latency: Histogram,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    request_prompt_tokens: Histogram,
    request_completion_tokens: Histogram,
    request_cached_tokens: Histogram,
    request_cached_ratio: Histogram,
    /// Workers that have reported cached tokens.
    reporting: Mutex<HashSet<String>>,
}

impl Endpoint {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Chat => "chat_completions",
            Self::Completions => "completions",
        }
    }

    /// As OpenTelemetry calls it.
    pub(crate) fn operation(self) -> &'static str {
        match self {
            Self::Chat => "chat",
            Self::Completions => "text_completion",
        }
    }
}

impl FrontendMetrics {
    pub(crate) fn new(registry: &Metrics, model: &str) -> Self {
        let counter = |name, help| registry.counter(name, help, &[]);
        let histogram = |name, help| registry.histogram(name, help, &[]);
        // What should not happen stands at 0 until it does: an alert sees the step from 0 to 1, not one from nothing to 1.
        for reason in (0..).map_while(|number| FailureReason::try_from(number).ok()) {
            attempts_failed(registry, reason).increment(0);
        }
        for source in [CachedSource::RouterEstimate, CachedSource::Unknown] {
            unreported_prompts(registry, source).increment(0);
        }
        Self {
            inflight_requests: registry.gauge(
                "tandem_frontend_inflight_requests",
                "Requests admitted and not yet answered.",
                &[],
            ),
            inflight_sequences: registry.gauge(
                "tandem_frontend_inflight_sequences",
                "Sequences (prompts × n) of the admitted requests; --max-concurrent-requests bounds them.",
                &[],
            ),
            reading_requests: registry.gauge(
                "tandem_frontend_reading_requests",
                "Requests that are being read and parsed, before admission.",
                &[],
            ),
            connections: registry.gauge("tandem_frontend_connections", "Open connections.", &[]),
            connections_refused: counter(
                "tandem_frontend_connections_refused_total",
                "Connections that were refused because of the limit on all connections or on those of one address.",
            ),
            ready: registry.gauge("tandem_frontend_ready", "1 while a request could be served.", &[]),
            cancelled: counter("tandem_frontend_cancelled_total", "Requests whose client went away."),
            migrations: counter(
                "tandem_frontend_migrations_total",
                "Generations that went on elsewhere after their worker was lost.",
            ),
            rebooked: counter(
                "tandem_frontend_rebooked_total",
                "Running requests booked with another router after theirs was lost or left.",
            ),
            routers_well: registry.gauge("tandem_frontend_routers", "Routers that could place a request.", &[]),
            request_duration: histogram("tandem_frontend_request_duration_seconds", "From a request to the end of its answer."),
            time_to_first_token: histogram(
                "tandem_frontend_time_to_first_token_seconds",
                "From a request to the first token of each prompt.",
            ),
            inter_token_latency: histogram(
                "tandem_frontend_inter_token_latency_seconds",
                "From a token of a sample to the next.",
            ),
            prompt_tokens: counter("tandem_frontend_prompt_tokens_total", "Tokens of finished prompts."),
            completion_tokens: counter("tandem_frontend_completion_tokens_total", "Tokens generated for finished prompts."),
            request_prompt_tokens: histogram("tandem_frontend_request_prompt_tokens", "Tokens of each finished prompt."),
            request_completion_tokens: histogram(
                "tandem_frontend_request_completion_tokens",
                "Tokens generated for each finished prompt, all its samples together.",
            ),
            request_cached_tokens: histogram(
                "tandem_frontend_request_cached_tokens",
                "Tokens of each finished prompt that came from a prefix cache.",
            ),
            request_cached_ratio: histogram(
                "tandem_frontend_request_cached_ratio",
                "Cached tokens of each finished prompt by its tokens.",
            ),
            reporting: Mutex::default(),
            registry: registry.clone(),
            model: model.to_owned(),
        }
    }

    /// A request was not let in.
    pub(crate) fn refused(&self, endpoint: Endpoint, status: StatusCode) {
        self.requests(endpoint, false, status.as_str()).increment(1);
    }

    /// A request has its reply.
    pub(crate) fn finished(&self, endpoint: Endpoint, model_known: bool, status: StatusCode, duration: Duration) {
        self.requests(endpoint, model_known, status.as_str()).increment(1);
        self.request_duration.record(duration.as_secs_f64());
    }

    /// A request's client went away.
    pub(crate) fn cancelled(&self, endpoint: Endpoint, model_known: bool) {
        self.requests(endpoint, model_known, CLIENT_CLOSED).increment(1);
        self.cancelled.increment(1);
    }

    /// An attempt ended before its first token.
    pub(crate) fn attempt_failed(&self, reason: FailureReason) {
        attempts_failed(&self.registry, reason).increment(1);
    }

    /// A prompt's answer is whole: counted once, whatever the endpoint, streamed or not, usage asked for or not.
    /// `worker` prefilled it.
    pub(crate) fn prompt_finished(&self, usage: &PromptUsage, worker: &str) {
        let Some(cached) = &usage.cached else { return };
        let (prompt, completion) = (usage.prompt_tokens, usage.completion_tokens);
        self.prompt_tokens.increment(prompt.into());
        self.completion_tokens.increment(completion.into());
        self.request_prompt_tokens.record(prompt);
        self.request_completion_tokens.record(completion);
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
        // A tier nobody knows is not booked on the device. Nothing cached is still a statement of its source.
        let rest = cached.tokens.saturating_sub(of_known_tiers);
        if rest > 0 || cached.by_tier.is_empty() {
            counter(TIER_UNKNOWN).increment(rest.into());
        }
    }

    /// A worker that falls silent after it used to report is worth an alarm, and so is every prompt nobody reported on.
    fn note_report(&self, cached: &Cached, worker: &str) {
        let mut reporting = self.reporting.lock();
        if cached.source == CachedSource::Worker {
            if !reporting.contains(worker) && reporting.len() < WORKERS_MAX {
                reporting.insert(worker.to_owned());
            }
            return;
        }
        let fell_silent = reporting.remove(worker);
        drop(reporting);
        unreported_prompts(&self.registry, cached.source).increment(1);
        if fell_silent {
            tracing::warn!(worker, "the worker has stopped reporting cached tokens; their number is estimated");
            const SILENT: &str = "tandem_frontend_reports_stopped_total";
            let help = "Times a worker that used to report cached tokens stopped.";
            self.registry.counter(SILENT, help, &[]).increment(1);
        }
    }

    fn requests(&self, endpoint: Endpoint, model_known: bool, code: &str) -> Counter {
        const NAME: &str = "tandem_frontend_requests_total";
        let model = if model_known { self.model.as_str() } else { "" };
        let labels = [("endpoint", endpoint.label()), ("model", model), ("code", code)];
        self.registry.counter(NAME, "Requests by the status of their reply.", &labels)
    }

    /// An audit's result is to be read: its time is there from now on, what it found with the first one.
    pub(crate) fn audit_awaited(&self) {
        self.audited_at().set(0.0);
    }

    /// What the last audit says.
    pub(crate) fn audited(&self, found: &AuditResult) {
        self.audited_at().set(found.checked_unix_s as f64);
        let help = "Things that did not reconcile when `tandem audit check` last ended.";
        self.registry.gauge("tandem_frontend_audit_findings", help, &[]).set(found.findings as f64);
    }

    fn audited_at(&self) -> Gauge {
        let help = "When `tandem audit check` last ended, in seconds since 1970; 0: no result was ever read.";
        self.registry.gauge("tandem_frontend_audit_timestamp_seconds", help, &[])
    }

    /// Everything of the process, in Prometheus' text format.
    pub(crate) fn render(&self) -> String {
        self.registry.render()
    }
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
        PromptUsage { prompt_tokens: 100, completion_tokens: 5, cached: Some(Cached { tokens, source, by_tier }) }
    }

    #[test]
    fn cached_tokens_by_source_and_only_by_tiers_that_exist() {
        let registry = Metrics::default();
        let metrics = FrontendMetrics::new(&registry, "m");
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
        assert!(!text.contains("reports_stopped"), "p1 never reported: {text}");
    }

    #[test]
    fn what_should_not_happen_stands_at_0_until_it_does() {
        let registry = Metrics::default();
        let metrics = FrontendMetrics::new(&registry, "m");
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
    fn a_worker_that_stops_reporting_is_noticed_once_each_time() {
        let registry = Metrics::default();
        let metrics = FrontendMetrics::new(&registry, "m");
        use CachedSource::{RouterEstimate, Worker};
        for source in [Worker, RouterEstimate, RouterEstimate, Worker, RouterEstimate] {
            metrics.prompt_finished(&finished(16, source, &[]), "p0");
        }
        let text = registry.render();
        assert!(text.contains("tandem_frontend_reports_stopped_total 2"), "{text}");
    }
}
