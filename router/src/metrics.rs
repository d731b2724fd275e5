//! The router's metrics. Series of a worker carry its `worker_id`; they are removed when it leaves and start at 0 when it returns.

use metrics::{Counter, Gauge, Histogram};
use tandem_kv::Change;
use tandem_node::Metrics;

/// Metrics of the router itself.
pub(crate) struct RouterMetrics {
    registry: Metrics,
    /// Bookings of this router.
    pub(crate) bookings: Gauge,
    /// Running requests that another router placed and that moved to this one.
    pub(crate) rebooked: Counter,
    /// Number of bookings of peer routers.
    pub(crate) peer_bookings: Gauge,
    /// Number of connected peer routers.
    pub(crate) peers: Gauge,
    /// The fraction of listed workers whose caches the index knows.
    pub(crate) index_complete: Gauge,
    /// Duration of one placement.
    pub(crate) route_duration: Histogram,
    /// Time between the sending of events by a worker and their arrival.
    pub(crate) event_lag: Histogram,
    /// Placements refused, for whatever reason.
    pub(crate) refused: Counter,
    /// Workers that are members.
    pub(crate) joined: Gauge,
    /// Listed workers that must not join as they are.
    pub(crate) incompatible: Gauge,
    /// Listed workers that cannot be reached.
    pub(crate) unreachable: Gauge,
    /// Calls without the cluster key.
    pub(crate) unauthenticated: Counter,
}

/// Metrics of one worker. They are exported while this value is kept.
pub(crate) struct WorkerSeries {
    _exported: Metrics,
    /// Placements in which it prefills for another.
    pub(crate) placed_prefill: Counter,
    /// Placements in which it decodes and another worker prefills.
    pub(crate) placed_decode: Counter,
    /// Placements in which it does both.
    pub(crate) placed_local: Counter,
    /// Confirmed overlap of a placement, where the prompt is computed.
    pub(crate) overlap_blocks: Histogram,
    /// Tokens predicted as cached, but computed.
    pub(crate) overlap_over: Counter,
    /// Tokens found in the cache that were not predicted.
    pub(crate) overlap_under: Counter,
    /// Number of the worker's blocks in the index.
    pub(crate) index_blocks: Gauge,
    /// 1 while its events come over NATS.
    pub(crate) over_nats: Gauge,
    /// 1 while its events come on its stream.
    pub(crate) direct: Gauge,
    /// Gaps in its events, after each of which a snapshot was requested.
    pub(crate) gaps: Counter,
    /// Blocks it removed without having stored them.
    pub(crate) absent: Counter,
    /// Blocks it stored under a parent it does not hold.
    pub(crate) orphaned: Counter,
    /// KV events that named more blocks than it can hold.
    pub(crate) beyond_capacity: Counter,
    /// Times its circuit breaker opened.
    pub(crate) breaker_opened: Counter,
    stored: Counter,
    removed: Counter,
    cleared: Counter,
}

impl RouterMetrics {
    pub(crate) fn new(registry: Metrics) -> Self {
        let workers = |state| registry.gauge("tandem_router_workers", "Listed workers by state.", &[("state", state)]);
        Self {
            bookings: registry.gauge(
                "tandem_router_bookings",
                "Requests that this router has placed and that have not ended.",
                &[],
            ),
            rebooked: registry.counter(
                "tandem_router_rebooked_total",
                "Running requests that another router had placed and that moved to this one.",
                &[],
            ),
            peer_bookings: registry.gauge(
                "tandem_router_peer_bookings",
                "Requests that peer routers have placed and that have not ended.",
                &[],
            ),
            peers: registry.gauge("tandem_router_peers", "Connected peer routers.", &[]),
            index_complete: registry.gauge(
                "tandem_router_index_complete_ratio",
                "Fraction of listed workers whose caches the index knows.",
                &[],
            ),
            route_duration: registry.histogram("tandem_router_route_duration_seconds", "Time to place a request.", &[]),
            event_lag: registry.histogram(
                "tandem_router_kv_event_lag_seconds",
                "Time from the worker's sending of KV events to their arrival, by the clocks of both hosts.",
                &[],
            ),
            refused: registry.counter("tandem_router_refused_total", "Placements that the router refused.", &[]),
            joined: workers("joined"),
            incompatible: workers("incompatible"),
            unreachable: workers("unreachable"),
            unauthenticated: registry.counter(
                "tandem_router_unauthenticated_total",
                "gRPC calls that were refused because they did not carry the cluster key.",
                &[],
            ),
            registry,
        }
    }

    pub(crate) fn worker(&self, worker_id: &str) -> WorkerSeries {
        let registry = self.registry.part(worker_id);
        let counter = |name, help| registry.counter(name, help, &[("worker", worker_id)]);
        let labelled = |name, help, label, value| registry.counter(name, help, &[("worker", worker_id), (label, value)]);
        let placed =
            |kind| labelled("tandem_router_placements_total", "Placements by the role of the worker in them.", "kind", kind);
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
                "Tokens predicted as cached beyond those that were.",
            ),
            overlap_under: counter("tandem_router_overlap_under_tokens_total", "Cached tokens beyond those predicted."),
            index_blocks: registry.gauge(
                "tandem_router_index_blocks",
                "Blocks of the worker in the index.",
                &[("worker", worker_id), ("tier", "device")],
            ),
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
            stored: event("stored"),
            removed: event("removed"),
            cleared: event("cleared"),
            _exported: registry.clone(),
        }
    }
}

impl WorkerSeries {
    /// Counts an event that is applied.
    pub(crate) fn count_event(&self, change: &Change) {
        match change {
            Change::Stored(_) => self.stored.increment(1),
            Change::Removed(_) => self.removed.increment(1),
            Change::Cleared => self.cleared.increment(1),
        }
    }
}
