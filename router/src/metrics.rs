//! The router's metrics. A worker's series have its `worker_id` as a label. They are removed when the worker leaves, and start at 0 when it
//! joins again.

use crate::{applied::Applied, index::Skipped, route::WorkerRole};
use metrics::{Counter, Gauge, Histogram};
use tandem_process::Metrics;
use tandem_proto::{
    Cause, Funnel,
    v1::{PrefixFacts, WorkerInfo, worker_info::Role},
};

/// Metrics of the router itself; [`RouterMetrics::new`] has their help texts.
pub(crate) struct RouterMetrics {
    registry: Metrics,
    pub(crate) bookings: Gauge,
    pub(crate) rebooked: Counter,
    pub(crate) peer_bookings: Gauge,
    pub(crate) peers: Gauge,
    pub(crate) index_complete: Gauge,
    pub(crate) route_duration: Histogram,
    pub(crate) event_lag: Histogram,
    pub(crate) refused: Counter,
    pub(crate) overloaded: Counter,
    pub(crate) estimated_wait: Histogram,
    pub(crate) joined: Gauge,
    pub(crate) incompatible: Gauge,
    pub(crate) unreachable: Gauge,
    pub(crate) unauthenticated: Counter,
}

/// Metrics of one worker; [`RouterMetrics::worker`] has their help texts. The series are exported until this value is dropped.
pub(crate) struct WorkerSeries {
    exported: Metrics,
    /// Placements in which the worker prefills for another worker.
    pub(crate) placed_prefill: Counter,
    /// Placements in which the worker decodes and another worker prefills.
    pub(crate) placed_decode: Counter,
    /// Placements in which the worker prefills and decodes.
    pub(crate) placed_local: Counter,
    pub(crate) overlap_blocks: Histogram,
    pub(crate) overlap_over: Counter,
    pub(crate) overlap_under: Counter,
    pub(crate) index_blocks: Gauge,
    pub(crate) findings: FindingSeries,
    /// 1 while the worker's events come over NATS, else 0.
    pub(crate) over_nats: Gauge,
    /// 1 while the worker's events come on its `Watch` stream, else 0.
    pub(crate) direct: Gauge,
    pub(crate) gaps: Counter,
    /// Blocks that the worker removed although the index did not have them.
    absent: Counter,
    /// Blocks that the worker stored under a parent that it has not cached.
    orphaned: Counter,
    /// Blocks for which the index has no space.
    beyond_index: Counter,
    beyond_capacity: Counter,
    pub(crate) breaker_opened: Counter,
    stored: Counter,
    removed: Counter,
    cleared: Counter,
}

/// The gauge of the number of workers that a model's load needs. It is exported until this value is dropped.
pub(crate) struct WantedSeries {
    _exported: Metrics,
    pub(crate) wanted: Gauge,
}

/// Series about the difference between the blocks that a worker reports and those that its engine finds.
pub(crate) struct FindingSeries {
    /// The number of leading blocks that the worker reports but its engine does not find.
    pub(crate) index_excess: Gauge,
    /// 1 while the worker reports no blocks although it computes prompts, else 0.
    pub(crate) reports_nothing: Gauge,
}

impl RouterMetrics {
    pub(crate) fn new(registry: Metrics) -> Self {
        let counter = |name, help| registry.counter(name, help, &[]);
        let gauge = |name, help| registry.gauge(name, help, &[]);
        let histogram = |name, help| registry.histogram(name, help, &[]);
        let workers = |state| registry.gauge("tandem_router_workers", "Listed workers by state.", &[("state", state)]);
        Self {
            bookings: gauge("tandem_router_bookings", "Requests that this router has placed and that have not ended."),
            rebooked: counter(
                "tandem_router_rebooked_total",
                "Running requests that another router had placed and that moved to this one.",
            ),
            peer_bookings: gauge(
                "tandem_router_peer_bookings",
                "Requests that peer routers have placed and that have not ended.",
            ),
            peers: gauge("tandem_router_peers", "Connected peer routers."),
            index_complete: gauge(
                "tandem_router_index_complete_ratio",
                "Fraction of listed workers whose caches the index knows.",
            ),
            route_duration: histogram("tandem_router_route_duration_seconds", "Time to place a request."),
            event_lag: histogram(
                "tandem_router_kv_event_lag_seconds",
                "Time from the worker's sending of KV events to their arrival, by the clocks of both hosts.",
            ),
            refused: counter("tandem_router_refused_total", "Placements that the router refused."),
            overloaded: counter(
                "tandem_router_overloaded_total",
                "Placements that the router refused because the request would wait in the queue for longer than --max-wait.",
            ),
            estimated_wait: histogram(
                "tandem_router_estimated_wait_seconds",
                "Estimated time in the queue of each placed request, before its prefill begins.",
            ),
            joined: workers("joined"),
            incompatible: workers("incompatible"),
            unreachable: workers("unreachable"),
            unauthenticated: counter(
                "tandem_router_unauthenticated_total",
                "Calls and connections refused because of the key, the certificate or the certificate's role.",
            ),
            registry,
        }
    }

    /// Returns the gauge of the wanted workers of this role.
    pub(crate) fn wanted(&self, model: &str, role: WorkerRole) -> WantedSeries {
        let role = Role::from(role).name();
        let exported = self.registry.part(&format!("wanted {role} {model}"));
        let help = "Number of workers that the load needs to meet --slo-ttft and --slo-itl.";
        let labels = [("model", model), ("role", role)];
        WantedSeries { wanted: exported.gauge("tandem_router_wanted_workers", help, &labels), _exported: exported }
    }

    /// Returns the series of a worker's prompts to the model. They are exported as long as those of the worker.
    pub(crate) fn prefix_series(&self, worker_id: &str, model: &str) -> PrefixSeries {
        let of_worker = self.registry.part(worker_id);
        let counter =
            |name, help, label, value| of_worker.counter(name, help, &[("worker", worker_id), ("model", model), (label, value)]);
        let help = "Prompt tokens by the cause why they were not found, or `found`. The sum is all prompt tokens.";
        let by_cause = |cause| counter("tandem_router_prefix_tokens_total", help, "cause", cause);
        let help = "Prompt tokens that any worker had cached (possible), that an eligible worker had (eligible), that were predicted for the chosen worker (chosen), and that its engine found (found).";
        let stage = |stage| counter("tandem_router_funnel_tokens_total", help, "stage", stage);
        let histogram = |name, help| self.registry.histogram(name, help, &[("model", model)]);
        PrefixSeries {
            found: by_cause("found"),
            causes: Cause::ALL.map(|cause| by_cause(cause.label())),
            stages: ["prompt", "possible", "eligible", "chosen", "found"].map(stage),
            regret_tokens: histogram(
                "tandem_router_regret_tokens",
                "Tokens of a prompt that an eligible worker had cached beyond those of the chosen worker.",
            ),
            regret_seconds: histogram(
                "tandem_router_regret_seconds",
                "Estimated time that the eligible worker with the most cached blocks of a prompt would have saved.",
            ),
            error_tokens: histogram(
                "tandem_router_prediction_error_tokens",
                "Difference between the tokens that were predicted to be cached and those that were found.",
            ),
        }
    }

    pub(crate) fn worker(&self, worker_id: &str) -> WorkerSeries {
        let registry = self.registry.part(worker_id);
        let counter = |name, help| registry.counter(name, help, &[("worker", worker_id)]);
        let labelled = |name, help, label, value| registry.counter(name, help, &[("worker", worker_id), (label, value)]);
        let placed = |kind| labelled("tandem_router_placements_total", "Placements by the worker's role in them.", "kind", kind);
        let source = |plane| {
            let help = "1 for the event plane that delivers the worker's KV events: nats, or direct on its stream.";
            registry.gauge("tandem_router_event_plane", help, &[("worker", worker_id), ("plane", plane)])
        };
        let event = |kind| labelled("tandem_router_kv_events_total", "KV events applied.", "kind", kind);
        let skipped = |reason| {
            labelled("tandem_router_kv_blocks_skipped_total", "Blocks of KV events that could not be applied.", "reason", reason)
        };
        WorkerSeries {
            placed_prefill: placed("prefill"),
            placed_decode: placed("decode"),
            placed_local: placed("local"),
            overlap_blocks: registry.histogram(
                "tandem_router_overlap_blocks",
                "Leading blocks of a placed prompt that its prefilling worker is known to have cached.",
                &[("worker", worker_id)],
            ),
            overlap_over: counter(
                "tandem_router_overlap_over_tokens_total",
                "Tokens that were predicted as cached, but were not.",
            ),
            overlap_under: counter("tandem_router_overlap_under_tokens_total", "Cached tokens beyond those predicted."),
            index_blocks: registry.gauge(
                "tandem_router_index_blocks",
                "Blocks of the worker in the index.",
                &[("worker", worker_id), ("tier", "device")],
            ),
            findings: FindingSeries::new(&registry, worker_id),
            over_nats: source("nats"),
            direct: source("direct"),
            gaps: counter(
                "tandem_router_kv_event_gaps_total",
                "Gaps in the worker's KV events, after each of which a snapshot was requested.",
            ),
            breaker_opened: counter(
                "tandem_router_breaker_opened_total",
                "Times the worker's circuit breaker opened because requests failed on it.",
            ),
            beyond_capacity: counter(
                "tandem_router_kv_events_refused_total",
                "KV events that name more blocks than the worker's reported capacity. Over NATS each leads to a new snapshot; on the worker's own stream it ends the worker's membership.",
            ),
            absent: skipped("absent"),
            orphaned: skipped("orphaned"),
            beyond_index: skipped("index_full"),
            stored: event("stored"),
            removed: event("removed"),
            cleared: event("cleared"),
            exported: registry.clone(),
        }
    }
}

impl FindingSeries {
    fn new(registry: &Metrics, worker_id: &str) -> Self {
        let gauge = |name, help| registry.gauge(name, help, &[("worker", worker_id)]);
        Self {
            index_excess: gauge(
                "tandem_router_index_excess_blocks",
                "Leading blocks of each prompt that the worker reports but its engine does not find, learned from the latest prompts and subtracted from predictions; +Inf: all.",
            ),
            reports_nothing: gauge(
                "tandem_router_worker_reports_nothing",
                "1 if the worker reports no cached blocks although it computes prompts.",
            ),
        }
    }
}

/// Series about the prompts that a worker has computed for one model: what they could have reused, and why they did not.
pub(crate) struct PrefixSeries {
    found: Counter,
    causes: [Counter; Cause::ALL.len()],
    stages: [Counter; 5],
    regret_tokens: Histogram,
    regret_seconds: Histogram,
    error_tokens: Histogram,
}

impl PrefixSeries {
    pub(crate) fn count(&self, funnel: &Funnel, facts: &PrefixFacts) {
        let Funnel { prompt, possible, eligible, chosen, found, causes } = *funnel;
        self.found.increment(found);
        causes.iter().for_each(|(cause, tokens)| self.causes[cause as usize].increment(tokens));
        self.stages.iter().zip([prompt, possible, eligible, chosen, found]).for_each(|(stage, tokens)| stage.increment(tokens));
        self.regret_tokens.record(eligible.saturating_sub(chosen.max(found)) as f64);
        self.regret_seconds.record(facts.eligible.as_ref().map_or(0.0, |eligible| eligible.saved_ms) / 1e3);
        self.error_tokens.record(chosen.abs_diff(found) as f64);
    }
}

impl WorkerSeries {
    /// Exports the constants of the worker that joins.
    pub(crate) fn describe(&self, info: &WorkerInfo) {
        self.show_models(info, 1.0);
        let help =
            "1 if the index of the worker is assumed from the prompts routed to it, because its engine publishes no KV events.";
        let of = [("worker", &*info.worker_id)];
        self.exported.gauge("tandem_router_index_approximate", help, &of).set(f64::from(u8::from(info.approximate_index)));
    }

    /// Exports whether the worker serves these models: 1, or 0 for a LoRA that it does not serve any more.
    pub(crate) fn show_models(&self, info: &WorkerInfo, served: f64) {
        let help = "1 for each worker and each model that it serves.";
        for model in std::iter::once(&info.model).chain(&info.loras) {
            let labels = [("worker", &*info.worker_id), ("model", model)];
            self.exported.gauge("tandem_router_worker_info", help, &labels).set(served);
        }
    }

    /// Exports the time that loading a token from a tier takes.
    pub(crate) fn show_load_ms(&self, worker_id: &str, tier: &str, ms: f64) {
        let help =
            "Milliseconds that the worker takes to load a cached token from the tier, learned from the times to first tokens.";
        self.exported.gauge("tandem_router_load_ms_per_token", help, &[("worker", worker_id), ("tier", tier)]).set(ms);
    }

    /// Counts events that were applied to the index.
    pub(crate) fn count_applied(&self, applied: &Applied) {
        self.stored.increment(applied.stored);
        self.removed.increment(applied.removed);
        self.cleared.increment(applied.cleared);
        self.count_skipped(applied.skipped);
        self.beyond_capacity.increment(u64::from(applied.beyond_capacity.is_some()));
    }

    /// Counts blocks that could not be applied to the index.
    pub(crate) fn count_skipped(&self, skipped: Skipped) {
        self.absent.increment(skipped.absent_blocks);
        self.orphaned.increment(skipped.orphaned_blocks);
        self.beyond_index.increment(skipped.beyond_index_blocks);
    }
}
