//! The router's families. Series of a worker carry its `worker_id`; they stay when it leaves, and go on when it returns.

use metrics::{Counter, Gauge, Histogram};
use tandem_kv::Change;
use tandem_node::Metrics;

/// Series of the router itself.
pub(crate) struct RouterMetrics {
    registry: Metrics,
    /// Requests placed and not yet closed.
    pub(crate) bookings: Gauge,
    /// One placement, the wait for the state included.
    pub(crate) route_duration: Histogram,
    /// Placements refused.
    pub(crate) refused: Counter,
    /// Workers that are routed to.
    pub(crate) joined: Gauge,
    /// Workers that must not join as they are.
    pub(crate) refused_workers: Gauge,
    /// Workers that are listed, but not there.
    pub(crate) unreachable: Gauge,
}

/// Series of one worker.
pub(crate) struct WorkerSeries {
    /// Placements in which it prefills for another.
    pub(crate) placed_prefill: Counter,
    /// Placements in which it decodes what another prefills.
    pub(crate) placed_decode: Counter,
    /// Placements in which it does both.
    pub(crate) placed_local: Counter,
    /// Confirmed overlap of a placement, where the prompt is computed.
    pub(crate) overlap_blocks: Histogram,
    /// Tokens foreseen as cached, but computed.
    pub(crate) overlap_over: Counter,
    /// Tokens found in the cache that were not foreseen.
    pub(crate) overlap_under: Counter,
    /// Blocks the index holds for it.
    pub(crate) index_blocks: Gauge,
    /// Times its events had a gap and its cache was asked for anew.
    pub(crate) gaps: Counter,
    /// Blocks it removed without having stored them.
    pub(crate) absent: Counter,
    /// Blocks it stored under a parent it does not hold.
    pub(crate) orphaned: Counter,
    /// Times it was left alone because it failed requests.
    pub(crate) breaker_opened: Counter,
    stored: Counter,
    removed: Counter,
    cleared: Counter,
}

impl RouterMetrics {
    pub(crate) fn new(registry: Metrics) -> Self {
        let workers =
            |state| registry.gauge("tandem_router_workers", "Listed workers by what became of them.", &[("state", state)]);
        Self {
            bookings: registry.gauge("tandem_router_bookings", "Requests placed and not yet closed.", &[]),
            route_duration: registry.histogram("tandem_router_route_duration_seconds", "Time to place a request.", &[]),
            refused: registry.counter("tandem_router_refused_total", "Requests that no worker could take.", &[]),
            joined: workers("joined"),
            refused_workers: workers("refused"),
            unreachable: workers("unreachable"),
            registry,
        }
    }

    pub(crate) fn worker(&self, worker_id: &str) -> WorkerSeries {
        let counter = |name, help| self.registry.counter(name, help, &[("worker", worker_id)]);
        let labelled = |name, help, label, value| self.registry.counter(name, help, &[("worker", worker_id), (label, value)]);
        let placed =
            |kind| labelled("tandem_router_placements_total", "Placements by what the worker does in them.", "kind", kind);
        let event = |kind| labelled("tandem_router_kv_events_total", "KV events applied.", "kind", kind);
        let skipped =
            |reason| labelled("tandem_router_kv_blocks_skipped_total", "Blocks of KV events not usable.", "reason", reason);
        WorkerSeries {
            placed_prefill: placed("prefill"),
            placed_decode: placed("decode"),
            placed_local: placed("local"),
            overlap_blocks: self.registry.histogram(
                "tandem_router_overlap_blocks",
                "Leading blocks of a placed prompt that the worker which computes it is known to hold.",
                &[("worker", worker_id)],
            ),
            overlap_over: counter(
                "tandem_router_overlap_over_tokens_total",
                "Tokens predicted as cached beyond those that were.",
            ),
            overlap_under: counter("tandem_router_overlap_under_tokens_total", "Cached tokens beyond those predicted."),
            index_blocks: self.registry.gauge(
                "tandem_router_index_blocks",
                "Blocks the index holds for the worker.",
                &[("worker", worker_id), ("tier", "device")],
            ),
            gaps: counter("tandem_router_kv_event_gaps_total", "Gaps in the worker's KV events; each led to a new snapshot."),
            breaker_opened: counter(
                "tandem_router_breaker_opened_total",
                "Times the worker was left alone for a while, as requests failed there.",
            ),
            absent: skipped("absent"),
            orphaned: skipped("orphaned"),
            stored: event("stored"),
            removed: event("removed"),
            cleared: event("cleared"),
        }
    }
}

impl WorkerSeries {
    pub(crate) fn event(&self, change: &Change) {
        match change {
            Change::Stored(_) => self.stored.increment(1),
            Change::Removed(_) => self.removed.increment(1),
            Change::Cleared => self.cleared.increment(1),
        }
    }
}
