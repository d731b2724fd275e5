//! The router's families. Series of a worker carry its `worker_id`; they go when it leaves, and begin anew when it returns.

use metrics::{Counter, Gauge, Histogram};
use tandem_kv::Change;
use tandem_node::Metrics;

/// Series of the router itself.
pub(crate) struct RouterMetrics {
    registry: Metrics,
    /// Requests placed and not yet closed.
    pub(crate) bookings: Gauge,
    /// Placed elsewhere, and booked here since.
    pub(crate) rebooked: Counter,
    /// Bookings that other routers tell of.
    pub(crate) peer_bookings: Gauge,
    /// Routers that tell of theirs.
    pub(crate) peers: Gauge,
    /// The part of the listed workers whose caches the index knows.
    pub(crate) index_complete: Gauge,
    /// One placement, the wait for the state included.
    pub(crate) route_duration: Histogram,
    /// How late events come.
    pub(crate) event_lag: Histogram,
    /// Placements refused.
    pub(crate) refused: Counter,
    /// Workers that are routed to.
    pub(crate) joined: Gauge,
    /// Workers that must not join as they are.
    pub(crate) refused_workers: Gauge,
    /// Workers that are listed, but not there.
    pub(crate) unreachable: Gauge,
    /// Calls without the cluster's key.
    pub(crate) unauthenticated: Counter,
}

/// Series of one worker. They are shown for as long as this value is kept.
pub(crate) struct WorkerSeries {
    _shown: Metrics,
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
    /// Its events come over NATS.
    pub(crate) by_nats: Gauge,
    /// Its events come on its stream.
    pub(crate) by_stream: Gauge,
    /// Times its events had a gap and its cache was asked for anew.
    pub(crate) gaps: Counter,
    /// Blocks it removed without having stored them.
    pub(crate) absent: Counter,
    /// Blocks it stored under a parent it does not hold.
    pub(crate) orphaned: Counter,
    /// KV events that named more blocks than it can hold.
    pub(crate) beyond_capacity: Counter,
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
            rebooked: registry.counter(
                "tandem_router_rebooked_total",
                "Running requests that were placed by another router and are booked here since.",
                &[],
            ),
            peer_bookings: registry.gauge("tandem_router_peer_bookings", "Requests that other routers have placed.", &[]),
            peers: registry.gauge("tandem_router_peers", "Routers whose bookings are known here.", &[]),
            index_complete: registry.gauge(
                "tandem_router_index_complete_ratio",
                "Workers whose caches the index knows, by those that are listed.",
                &[],
            ),
            route_duration: registry.histogram("tandem_router_route_duration_seconds", "Time to place a request.", &[]),
            event_lag: registry.histogram(
                "tandem_router_kv_event_lag_seconds",
                "From the worker's sending of KV events to their taking, by the clocks of both hosts.",
                &[],
            ),
            refused: registry.counter("tandem_router_refused_total", "Requests that no worker could take.", &[]),
            joined: workers("joined"),
            refused_workers: workers("incompatible"),
            unreachable: workers("unreachable"),
            unauthenticated: registry.counter(
                "tandem_router_unauthenticated_total",
                "gRPC calls that were refused because they did not carry the cluster's key.",
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
            |kind| labelled("tandem_router_placements_total", "Placements by what the worker does in them.", "kind", kind);
        let way = |way| {
            let help = "1 for the way by which the worker's KV events come: over NATS, or direct on its stream.";
            registry.gauge("tandem_router_event_plane", help, &[("worker", worker_id), ("plane", way)])
        };
        let event = |kind| labelled("tandem_router_kv_events_total", "KV events applied.", "kind", kind);
        let skipped =
            |reason| labelled("tandem_router_kv_blocks_skipped_total", "Blocks of KV events not usable.", "reason", reason);
        WorkerSeries {
            placed_prefill: placed("prefill"),
            placed_decode: placed("decode"),
            placed_local: placed("local"),
            overlap_blocks: registry.histogram(
                "tandem_router_overlap_blocks",
                "Leading blocks of a placed prompt that the worker which computes it is known to hold.",
                &[("worker", worker_id)],
            ),
            overlap_over: counter(
                "tandem_router_overlap_over_tokens_total",
                "Tokens predicted as cached beyond those that were.",
            ),
            overlap_under: counter("tandem_router_overlap_under_tokens_total", "Cached tokens beyond those predicted."),
            index_blocks: registry.gauge(
                "tandem_router_index_blocks",
                "Blocks the index holds for the worker.",
                &[("worker", worker_id), ("tier", "device")],
            ),
            by_nats: way("nats"),
            by_stream: way("direct"),
            gaps: counter("tandem_router_kv_event_gaps_total", "Gaps in the worker's KV events; each led to a new snapshot."),
            breaker_opened: counter(
                "tandem_router_breaker_opened_total",
                "Times the worker was left alone for a while, as requests failed there.",
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
            _shown: registry.clone(),
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
