//! A worker's metrics: prefix cache hits, KV blocks, engine steps and KV transfers.

use crate::CacheWatch;
use ::metrics::{Counter, Gauge, Histogram};
use parking_lot::Mutex;
use std::{
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tandem_kv::{KvBatch, Load, StepStats};
use tandem_node::Metrics;
use tandem_proto::{channel::OnRefused, v1};
use tokio::sync::broadcast::error::RecvError;

/// Handles of one worker's metric families, with the label `worker`.
pub struct WorkerMetrics {
    registry: Metrics,
    worker_id: String,
    hits: Counter,
    misses: Counter,
    prompt_tokens: Counter,
    cached_tokens: Counter,
    free_blocks: Gauge,
    cached_blocks: Gauge,
    in_use_blocks: Gauge,
    batch_tokens: Histogram,
    queue_depth: Gauge,
    prefill_step: Histogram,
    decode_step: Histogram,
    mixed_step: Histogram,
    preemptions: Counter,
    invariant_violations: Counter,
    unauthenticated: Counter,
    unsigned_addresses: Counter,
    capacity_blocks: Gauge,
    totals: Mutex<CacheTotals>,
    prefilled_tokens: AtomicU64,
    generated_tokens: AtomicU64,
    transfer_bytes_per_second: Mutex<f64>,
}

/// Prefix cache lookups since the worker's start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct CacheTotals {
    /// Number of prompts.
    total_requests: u64,
    /// Number of prompts with at least one block in the cache.
    hit_requests: u64,
    /// Number of prompts with no block in the cache.
    miss_requests: u64,
    /// Tokens of all prompts.
    total_prompt_tokens: u64,
    /// Tokens of all prompts that were in the cache.
    total_cached_tokens: u64,
}

impl CacheTotals {
    fn observe(&mut self, prompt_tokens: u32, cached_tokens: u32) {
        self.total_requests += 1;
        if cached_tokens > 0 {
            self.hit_requests += 1;
        } else {
            self.miss_requests += 1;
        }
        self.total_prompt_tokens += u64::from(prompt_tokens);
        self.total_cached_tokens += u64::from(cached_tokens);
    }

    /// Share of prompts with a hit; 0 before the first prompt.
    fn hit_rate(&self) -> f64 {
        ratio(self.hit_requests, self.total_requests)
    }

    /// Share of prompt tokens found: a ratio of sums, so that each token has the same weight.
    fn token_hit_rate(&self) -> f64 {
        ratio(self.total_cached_tokens, self.total_prompt_tokens)
    }
}

fn ratio(part: u64, whole: u64) -> f64 {
    if whole == 0 { 0.0 } else { part as f64 / whole as f64 }
}

/// The direction of a KV transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// KV is sent from this worker to another one.
    Sent,
    /// KV is received from another worker.
    Received,
}

/// Metrics of one transfer path in one direction.
pub struct TransferMetrics {
    /// KV bytes written into the receiver's memory.
    pub bytes: Counter,
    /// Duration of whole transfers, in seconds.
    pub duration: Histogram,
}

impl WorkerMetrics {
    /// Returns the function to call for each gRPC call that is refused for lack of the cluster's key.
    pub fn count_unauthenticated(&self) -> OnRefused {
        let refused = self.unauthenticated.clone();
        Arc::new(move || refused.increment(1))
    }

    /// Counts an address that was not connected to because it is not signed with the cluster's key.
    pub fn count_unsigned_address(&self) {
        self.unsigned_addresses.increment(1);
    }

    /// Registers the worker's families.
    pub fn new(registry: &Metrics, worker_id: &str) -> Self {
        let worker = ("worker", worker_id);
        let requests = |result| {
            let help = "Prompts, by whether any of their KV was in the prefix cache.";
            registry.counter("tandem_worker_prefix_cache_requests_total", help, &[worker, ("result", result)])
        };
        let blocks = |state| registry.gauge("tandem_worker_kv_blocks", "KV blocks by state.", &[worker, ("state", state)]);
        let step = |phase| {
            let help = "Duration of engine steps, by what they computed.";
            registry.histogram("tandem_worker_step_duration_seconds", help, &[worker, ("phase", phase)])
        };
        Self {
            hits: requests("hit"),
            misses: requests("miss"),
            prompt_tokens: registry.counter("tandem_worker_prompt_tokens_total", "Tokens of prompts prefilled here.", &[worker]),
            cached_tokens: registry.counter(
                "tandem_worker_cached_tokens_total",
                "Prompt tokens found in the prefix cache, by tier.",
                &[worker, ("tier", "device")],
            ),
            free_blocks: blocks("free"),
            cached_blocks: blocks("cached"),
            in_use_blocks: blocks("in_use"),
            batch_tokens: registry.histogram("tandem_worker_batch_tokens", "Tokens computed in a step.", &[worker]),
            queue_depth: registry.gauge("tandem_worker_queue_depth", "Jobs that wait for KV blocks.", &[worker]),
            prefill_step: step("prefill"),
            decode_step: step("decode"),
            mixed_step: step("mixed"),
            unauthenticated: registry.counter(
                "tandem_worker_unauthenticated_total",
                "gRPC calls that were refused because they did not carry the cluster's key.",
                &[worker],
            ),
            unsigned_addresses: registry.counter(
                "tandem_worker_unsigned_addresses_total",
                "Addresses to which the worker refused to connect, because they were not signed with the cluster's key.",
                &[worker],
            ),
            preemptions: registry.counter(
                "tandem_worker_preemptions_total",
                "Sequences preempted: their KV blocks were needed for others.",
                &[worker],
            ),
            invariant_violations: registry.counter(
                "tandem_worker_invariant_violations_total",
                "Failed checks of an idle worker's own state. Each is a bug.",
                &[worker],
            ),
            capacity_blocks: registry.gauge("tandem_worker_kv_capacity_blocks", "All KV blocks of the worker.", &[worker]),
            totals: Mutex::default(),
            prefilled_tokens: AtomicU64::default(),
            generated_tokens: AtomicU64::default(),
            transfer_bytes_per_second: Mutex::default(),
            registry: registry.clone(),
            worker_id: worker_id.to_owned(),
        }
    }

    /// Sets the number of KV blocks.
    pub fn set_capacity(&self, blocks: u32) {
        self.capacity_blocks.set(blocks);
    }

    /// Counts a prompt whose prefill begins on this worker. To be called once per prompt.
    pub fn observe_scheduled(&self, prompt_tokens: u32, cached_tokens: u32) {
        if cached_tokens > 0 { &self.hits } else { &self.misses }.increment(1);
        self.prompt_tokens.increment(prompt_tokens.into());
        self.cached_tokens.increment(cached_tokens.into());
        let totals = {
            let mut totals = self.totals.lock();
            totals.observe(prompt_tokens, cached_tokens);
            *totals
        };
        tracing::debug!(
            worker = self.worker_id,
            total_requests = totals.total_requests,
            hit_requests = totals.hit_requests,
            miss_requests = totals.miss_requests,
            hit_rate = totals.hit_rate(),
            total_prompt_tokens = totals.total_prompt_tokens,
            total_cached_tokens = totals.total_cached_tokens,
            token_hit_rate = totals.token_hit_rate(),
            "prefix cache",
        );
    }

    fn totals(&self) -> CacheTotals {
        *self.totals.lock()
    }

    /// Prefix cache totals, as reported to routers.
    pub(crate) fn cache_totals(&self) -> v1::CacheTotals {
        let totals = self.totals();
        v1::CacheTotals {
            prompts: totals.total_requests,
            prompts_hit: totals.hit_requests,
            prompt_tokens: totals.total_prompt_tokens,
            cached_tokens: totals.total_cached_tokens,
        }
    }

    /// Totals of all steps, as reported to routers.
    pub(crate) fn step_totals(&self) -> v1::StepTotals {
        v1::StepTotals {
            prefilled_tokens: self.prefilled_tokens.load(Ordering::Relaxed),
            generated_tokens: self.generated_tokens.load(Ordering::Relaxed),
        }
    }

    /// Metrics of the transfer path that has the label `transport`.
    pub fn transfer(&self, transport: &'static str, direction: Direction) -> TransferMetrics {
        let direction = match direction {
            Direction::Sent => "sent",
            Direction::Received => "received",
        };
        let labels = [("worker", self.worker_id.as_str()), ("transport", transport), ("direction", direction)];
        TransferMetrics {
            bytes: self.registry.counter("tandem_worker_kv_transfer_bytes_total", "Bytes of KV moved between workers.", &labels),
            duration: self.registry.histogram(
                "tandem_worker_kv_transfer_duration_seconds",
                "Duration of a prompt's KV transfer.",
                &labels,
            ),
        }
    }

    /// Counter of refused writes, for a `reason` from a closed set.
    pub fn refused_writes(&self, reason: &'static str) -> Counter {
        let help = "Writes of KV blocks that were refused: their ticket did not allow them.";
        self.registry.counter("tandem_worker_refused_writes_total", help, &[("worker", &self.worker_id), ("reason", reason)])
    }

    /// Adds a measurement of the bandwidth to other workers: `bytes`, moved in a time in which the transfer was the only thing waited for.
    pub fn observe_bandwidth(&self, bytes: u64, busy: Duration) {
        /// Weight of the newest measurement: a few transfers suffice to follow a change, and one outlier does not count much.
        const NEWEST: f64 = 0.2;
        if bytes == 0 || busy.is_zero() {
            return;
        }
        let measured = bytes as f64 / busy.as_secs_f64();
        let mut average = self.transfer_bytes_per_second.lock();
        *average = if *average == 0.0 { measured } else { *average + NEWEST * (measured - *average) };
    }

    /// Average bandwidth in bytes per second; 0 before the first transfer.
    pub(crate) fn transfer_bytes_per_second(&self) -> f64 {
        *self.transfer_bytes_per_second.lock()
    }

    /// Keeps gauges and step histograms up to date until the back end ends.
    pub async fn follow(&self, mut watch: CacheWatch) {
        self.observe_load(&watch.load);
        loop {
            match watch.batches.recv().await {
                Ok(batch) => self.observe_batch(&batch),
                // The histograms lack the missed steps; gauges are correct again with the next batch.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn observe_batch(&self, batch: &KvBatch) {
        self.observe_load(&batch.load);
        let Some(StepStats { prefill_tokens, decode_tokens, duration }) = batch.step else { return };
        self.prefilled_tokens.fetch_add(prefill_tokens.into(), Ordering::Relaxed);
        self.generated_tokens.fetch_add(decode_tokens.into(), Ordering::Relaxed);
        self.batch_tokens.record(f64::from(prefill_tokens) + f64::from(decode_tokens));
        let step = match (prefill_tokens, decode_tokens) {
            (_, 0) => &self.prefill_step,
            (0, _) => &self.decode_step,
            _ => &self.mixed_step,
        };
        step.record(duration.as_secs_f64());
    }

    fn observe_load(&self, load: &Load) {
        self.free_blocks.set(load.free_blocks);
        self.cached_blocks.set(load.cached_blocks);
        self.in_use_blocks.set(load.in_use_blocks);
        self.queue_depth.set(load.waiting_requests);
        self.preemptions.absolute(load.preemptions);
        self.invariant_violations.absolute(load.invariant_violations.into());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tandem_kv::Snapshot;
    use tokio::sync::broadcast;

    #[test]
    fn token_hit_rate_is_a_ratio_of_sums() {
        let metrics = WorkerMetrics::new(&Metrics::default(), "prefill-0");
        assert_eq!((metrics.totals().hit_rate(), metrics.totals().token_hit_rate()), (0.0, 0.0));
        for (prompt, cached) in [(1000, 0), (100, 96), (100, 96), (20, 0)] {
            metrics.observe_scheduled(prompt, cached);
        }
        let totals = metrics.totals();
        let expected = CacheTotals {
            total_requests: 4,
            hit_requests: 2,
            miss_requests: 2,
            total_prompt_tokens: 1220,
            total_cached_tokens: 192,
        };
        assert_eq!(totals, expected);
        assert_eq!(totals.hit_rate(), 0.5);
        assert_eq!(totals.token_hit_rate(), 192.0 / 1220.0);
    }

    #[derive(Clone, Default)]
    struct Lines(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Lines {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().write(bytes)
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn totals_are_logged_at_debug_after_each_prompt() {
        let logged = |level| {
            let lines = Lines::default();
            let writer = {
                let lines = lines.clone();
                move || lines.clone()
            };
            let subscriber = tracing_subscriber::fmt().with_max_level(level).with_writer(writer).with_ansi(false).finish();
            tracing::subscriber::with_default(subscriber, || {
                let metrics = WorkerMetrics::new(&Metrics::default(), "prefill-0");
                metrics.observe_scheduled(100, 0);
                metrics.observe_scheduled(100, 96);
            });
            let bytes = lines.0.lock().clone();
            String::from_utf8(bytes).expect("text")
        };
        let debug = logged(tracing::Level::DEBUG);
        assert_eq!(debug.lines().count(), 2, "{debug}");
        for field in ["total_requests=2", "hit_requests=1", "miss_requests=1", "hit_rate=0.5", "token_hit_rate=0.48"] {
            assert!(debug.lines().last().is_some_and(|line| line.contains(field)), "{field} is not in {debug}");
        }
        assert_eq!(logged(tracing::Level::INFO), "");
    }

    #[tokio::test]
    async fn each_family_has_the_worker_label() {
        let registry = Metrics::default();
        let metrics = WorkerMetrics::new(&registry, "decode-0");
        metrics.observe_scheduled(33, 32);
        metrics.observe_scheduled(10, 0);
        let sent = metrics.transfer("tcp", Direction::Sent);
        sent.bytes.increment(4096);
        sent.duration.record(0.004);
        let (sender, batches) = broadcast::channel(8);
        let step = |prefill_tokens, decode_tokens| {
            let load = Load {
                free_blocks: 5,
                cached_blocks: 3,
                in_use_blocks: 2,
                waiting_requests: 7,
                preemptions: 4,
                invariant_violations: 1,
                ..Default::default()
            };
            let step = StepStats { prefill_tokens, decode_tokens, duration: Duration::from_millis(3) };
            Arc::new(KvBatch { load, step: Some(step), ..Default::default() })
        };
        for batch in [step(16, 0), step(0, 2), step(16, 2), step(0, 1)] {
            sender.send(batch).expect("there is a receiver");
        }
        drop(sender);
        let snapshot = Snapshot { at_event_id: 0, stored: Vec::new() };
        metrics.follow(CacheWatch { snapshot, load: Load::default(), batches }).await;
        assert_eq!(metrics.step_totals(), v1::StepTotals { prefilled_tokens: 32, generated_tokens: 5 });
        let text = registry.render();
        for line in [
            r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="hit"} 1"#,
            r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="miss"} 1"#,
            r#"tandem_worker_prompt_tokens_total{worker="decode-0"} 43"#,
            r#"tandem_worker_cached_tokens_total{worker="decode-0",tier="device"} 32"#,
            r#"tandem_worker_kv_blocks{worker="decode-0",state="free"} 5"#,
            r#"tandem_worker_kv_blocks{worker="decode-0",state="cached"} 3"#,
            r#"tandem_worker_kv_blocks{worker="decode-0",state="in_use"} 2"#,
            r#"tandem_worker_queue_depth{worker="decode-0"} 7"#,
            r#"tandem_worker_preemptions_total{worker="decode-0"} 4"#,
            r#"tandem_worker_invariant_violations_total{worker="decode-0"} 1"#,
            r#"tandem_worker_batch_tokens_count{worker="decode-0"} 4"#,
            r#"tandem_worker_batch_tokens_sum{worker="decode-0"} 37"#,
            r#"tandem_worker_step_duration_seconds_count{worker="decode-0",phase="prefill"} 1"#,
            r#"tandem_worker_step_duration_seconds_count{worker="decode-0",phase="decode"} 2"#,
            r#"tandem_worker_step_duration_seconds_count{worker="decode-0",phase="mixed"} 1"#,
            r#"tandem_worker_kv_transfer_bytes_total{worker="decode-0",transport="tcp",direction="sent"} 4096"#,
            r#"tandem_worker_kv_transfer_duration_seconds_count{worker="decode-0",transport="tcp",direction="sent"} 1"#,
        ] {
            assert!(text.lines().any(|found| found == line), "{line} is not in\n{text}");
        }
    }

    #[test]
    fn bandwidth_follows_changes_and_ignores_empty_transfers() {
        let metrics = WorkerMetrics::new(&Metrics::default(), "prefill-0");
        assert_eq!(metrics.transfer_bytes_per_second(), 0.0);
        metrics.observe_bandwidth(1_000, Duration::from_secs(1));
        assert_eq!(metrics.transfer_bytes_per_second(), 1_000.0);
        metrics.observe_bandwidth(2_000, Duration::from_secs(1));
        assert_eq!(metrics.transfer_bytes_per_second(), 1_200.0);
        metrics.observe_bandwidth(0, Duration::from_secs(1));
        metrics.observe_bandwidth(1, Duration::ZERO);
        assert_eq!(metrics.transfer_bytes_per_second(), 1_200.0);
    }
}
