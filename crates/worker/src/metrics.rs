//! A worker's metrics: prefix cache hits, KV blocks, engine steps and KV transfers.

use crate::CacheWatch;
use ::metrics::{Counter, Gauge, Histogram};
use parking_lot::Mutex;
use std::time::Duration;
use tandem_engine::CachedTokens;
use tandem_kv::{KvBatch, Load, StepStats, Tier};
use tandem_process::Metrics;
use tandem_proto::{channel::OnRefused, v1};
use tokio::sync::broadcast::error::RecvError;

const CACHED_TOKENS: &str = "tandem_worker_cached_tokens_total";
const CACHED_TOKENS_HELP: &str = "Prompt tokens found in the prefix cache, by tier.";

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
    refused_graphs: Counter,
    unauthenticated: Counter,
    unsigned_addresses: Counter,
    reported: Mutex<Reported>,
}

#[derive(Default)]
struct Reported {
    cache: v1::CacheTotals,
    steps: v1::StepTotals,
    /// The average bandwidth of transfers to other workers; 0 before the first transfer.
    transfer_bytes_per_second: f64,
}

/// The direction of a KV transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// KV moves from this worker to another one.
    Sent,
    /// KV moves from another worker to this one.
    Received,
}

impl WorkerMetrics {
    /// Returns a function that counts a refused call or connection: without the cluster's key or a valid certificate, or with a certificate
    /// whose role does not allow the call. It also logs at most one line a minute.
    pub fn count_unauthenticated(&self) -> OnRefused {
        tandem_process::on_refused(self.unauthenticated.clone())
    }

    /// Counts an address to which the worker does not connect, because it is not signed with the cluster's key.
    pub fn count_unsigned_address(&self) {
        self.unsigned_addresses.increment(1);
    }

    /// Registers the metrics of a worker that has `capacity_blocks` KV blocks.
    pub fn new(registry: &Metrics, worker_id: &str, capacity_blocks: u32) -> Self {
        let worker = ("worker", worker_id);
        registry.gauge("tandem_worker_kv_capacity_blocks", "All KV blocks of the worker.", &[worker]).set(capacity_blocks);
        let counter = |name, help| registry.counter(name, help, &[worker]);
        let requests = |result| {
            let help = "Prompts, by whether any of their KV was in the prefix cache.";
            registry.counter("tandem_worker_prefix_cache_requests_total", help, &[worker, ("result", result)])
        };
        let blocks = |state| registry.gauge("tandem_worker_kv_blocks", "KV blocks by state.", &[worker, ("state", state)]);
        let step = |phase| {
            let help = "Duration of engine steps, by the kind of their computation.";
            registry.histogram("tandem_worker_step_duration_seconds", help, &[worker, ("phase", phase)])
        };
        let unauthenticated = "Calls and connections refused because of the key, the certificate or the certificate's role.";
        let unsigned = "Addresses to which the worker refused to connect, because they were not signed with the cluster's key.";
        let preempted = "Sequences that were preempted because other sequences needed their KV blocks.";
        let graphs = "CUDA graphs that the GPU's driver has refused. Decode steps without a graph are slower.";
        let violations = "Failed checks of the engine's invariants, made while the engine is idle. Each failure shows a bug.";
        Self {
            hits: requests("hit"),
            misses: requests("miss"),
            prompt_tokens: counter("tandem_worker_prompt_tokens_total", "Tokens of prompts that this worker has prefilled."),
            cached_tokens: registry.counter(CACHED_TOKENS, CACHED_TOKENS_HELP, &[worker, ("tier", "device")]),
            free_blocks: blocks("free"),
            cached_blocks: blocks("cached"),
            in_use_blocks: blocks("in_use"),
            batch_tokens: registry.histogram("tandem_worker_batch_tokens", "Tokens computed in a step.", &[worker]),
            queue_depth: registry.gauge("tandem_worker_queue_depth", "Jobs that wait for KV blocks.", &[worker]),
            prefill_step: step("prefill"),
            decode_step: step("decode"),
            mixed_step: step("mixed"),
            unauthenticated: counter("tandem_worker_unauthenticated_total", unauthenticated),
            unsigned_addresses: counter("tandem_worker_unsigned_addresses_total", unsigned),
            preemptions: counter("tandem_worker_preemptions_total", preempted),
            invariant_violations: counter("tandem_worker_invariant_violations_total", violations),
            refused_graphs: counter("tandem_worker_refused_graphs_total", graphs),
            reported: Mutex::default(),
            registry: registry.clone(),
            worker_id: worker_id.to_owned(),
        }
    }

    /// Counts the outcome of a handle for a prompt's KV in an external engine: `pulled`, `abandoned` or `expired`.
    pub fn count_handle(&self, outcome: &'static str) {
        let help = "Handles that let another engine pull a prompt's KV, by outcome. KV that is not pulled stays in the engine's memory until its lease ends.";
        let labels = [("worker", self.worker_id.as_str()), ("outcome", outcome)];
        self.registry.counter("tandem_worker_kv_handles_total", help, &labels).increment(1);
    }

    /// Counts a prompt whose prefill begins on this worker.
    pub(crate) fn observe_scheduled(&self, prompt_tokens: u32, cached: CachedTokens) {
        let cached_tokens = cached.total();
        if cached_tokens > 0 { &self.hits } else { &self.misses }.increment(1);
        self.prompt_tokens.increment(prompt_tokens.into());
        self.cached_tokens.increment(cached.0[Tier::Device.index()].into());
        for (tier, tokens) in Tier::ALL.into_iter().zip(cached.0).skip(1).filter(|(_, tokens)| *tokens > 0) {
            let labels = [("worker", self.worker_id.as_str()), ("tier", tier.name())];
            self.registry.counter(CACHED_TOKENS, CACHED_TOKENS_HELP, &labels).increment(tokens.into());
        }
        let totals = {
            let totals = &mut self.reported.lock().cache;
            totals.prompts += 1;
            totals.prompts_hit += u64::from(cached_tokens > 0);
            totals.prompt_tokens += u64::from(prompt_tokens);
            totals.cached_tokens += u64::from(cached_tokens);
            *totals
        };
        tracing::debug!(
            worker = self.worker_id,
            total_requests = totals.prompts,
            hit_requests = totals.prompts_hit,
            miss_requests = totals.prompts - totals.prompts_hit,
            hit_rate = totals.prompts_hit as f64 / totals.prompts as f64,
            total_prompt_tokens = totals.prompt_tokens,
            total_cached_tokens = totals.cached_tokens,
            // The rate is a ratio of sums, so that each token has the same weight.
            token_hit_rate = totals.cached_tokens as f64 / totals.prompt_tokens as f64,
            "prefix cache",
        );
    }

    /// Adds the totals and the bandwidth to a load report.
    pub(crate) fn add_to(&self, load: &mut v1::Load) {
        let reported = self.reported.lock();
        (load.cache, load.steps) = (Some(reported.cache), Some(reported.steps));
        load.transfer_bytes_per_second = reported.transfer_bytes_per_second;
    }

    /// Registers the metrics of the transfer path with the label `transport`: a counter of bytes, and a histogram of the durations of complete
    /// transfers in seconds.
    pub fn transfer(&self, transport: &'static str, direction: Direction) -> (Counter, Histogram) {
        let direction = match direction {
            Direction::Sent => "sent",
            Direction::Received => "received",
        };
        let labels = [("worker", self.worker_id.as_str()), ("transport", transport), ("direction", direction)];
        let bytes = ("tandem_worker_kv_transfer_bytes_total", "Bytes of KV moved between workers.");
        let duration = ("tandem_worker_kv_transfer_duration_seconds", "Duration of a prompt's KV transfer.");
        (self.registry.counter(bytes.0, bytes.1, &labels), self.registry.histogram(duration.0, duration.1, &labels))
    }

    /// Registers the counter of refused writes for a `reason` from a closed set.
    pub fn refused_writes(&self, reason: &'static str) -> Counter {
        let help = "Writes of KV blocks that were refused: their ticket did not allow them.";
        self.registry.counter("tandem_worker_refused_writes_total", help, &[("worker", &self.worker_id), ("reason", reason)])
    }

    /// Registers the counter of attempts to prepare the transfer path with the label `transport` that failed for a `reason` from a closed
    /// set.
    pub fn refused_paths(&self, transport: &'static str, reason: &'static str) -> Counter {
        let help = "Attempts to reach another worker's memory on a transfer path that failed, so that its KV took a slower path.";
        let labels = [("worker", self.worker_id.as_str()), ("transport", transport), ("reason", reason)];
        self.registry.counter("tandem_worker_kv_transfer_refused_total", help, &labels)
    }

    /// Adds a measurement of the bandwidth to other workers: `bytes` were moved in the time `busy`, without the time in which the sender had nothing
    /// to send.
    pub fn observe_bandwidth(&self, bytes: u64, busy: Duration) {
        /// The weight of the newest measurement: the average follows a change after a few transfers, and one outlier has little effect.
        const NEWEST: f64 = 0.2;
        if bytes == 0 || busy.is_zero() {
            return;
        }
        let measured = bytes as f64 / busy.as_secs_f64();
        let average = &mut self.reported.lock().transfer_bytes_per_second;
        *average = if *average == 0.0 { measured } else { *average + NEWEST * (measured - *average) };
    }

    /// Keeps gauges and step histograms up to date until the back end ends.
    pub async fn follow(&self, mut watch: CacheWatch) {
        self.observe_load(&watch.load);
        loop {
            match watch.batches.recv().await {
                Ok(batch) => self.observe_batch(&batch),
                // Some batches were missed. Their steps are absent from the histograms, but the next batch makes the gauges correct again.
                Err(RecvError::Lagged(_)) => {}
                Err(RecvError::Closed) => return,
            }
        }
    }

    fn observe_batch(&self, batch: &KvBatch) {
        self.observe_load(&batch.load);
        let Some(StepStats { prefill_tokens, decode_tokens, duration }) = batch.step else { return };
        {
            let steps = &mut self.reported.lock().steps;
            steps.prefilled_tokens += u64::from(prefill_tokens);
            steps.generated_tokens += u64::from(decode_tokens);
        }
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
        for (tier, blocks) in Tier::ALL.into_iter().zip(load.tier_blocks).filter(|_| load.tier_blocks != [0; 4]) {
            let labels = [("worker", self.worker_id.as_str()), ("tier", tier.name())];
            let help = "KV blocks that an external engine reports in each tier; absent while it reports only its device's.";
            self.registry.gauge("tandem_worker_tier_blocks", help, &labels).set(blocks);
        }
        self.queue_depth.set(load.waiting_requests);
        self.preemptions.absolute(load.preemptions);
        self.invariant_violations.absolute(load.invariant_violations.into());
        self.refused_graphs.absolute(load.refused_graphs);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use tandem_kv::Snapshot;
    use tokio::sync::broadcast;

    fn reported(metrics: &WorkerMetrics) -> v1::Load {
        let mut load = v1::Load::default();
        metrics.add_to(&mut load);
        load
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
    fn cache_totals_are_logged_at_debug_level_after_each_prompt() {
        let logged = |level| {
            let (lines, metrics) = (Lines::default(), WorkerMetrics::new(&Metrics::default(), "prefill-0", 8));
            let writer = lines.clone();
            let subscriber =
                tracing_subscriber::fmt().with_max_level(level).with_writer(move || writer.clone()).with_ansi(false).finish();
            tracing::subscriber::with_default(subscriber, || {
                for (prompt, cached) in [(1000, 0), (100, 96), (100, 96), (20, 0)] {
                    metrics.observe_scheduled(prompt, CachedTokens::on_device(cached));
                }
            });
            let totals = v1::CacheTotals { prompts: 4, prompts_hit: 2, prompt_tokens: 1220, cached_tokens: 192 };
            assert_eq!(reported(&metrics).cache, Some(totals));
            String::from_utf8(lines.0.lock().clone()).expect("the lines are UTF-8")
        };
        let debug = logged(tracing::Level::DEBUG);
        assert_eq!(debug.lines().count(), 4, "{debug}");
        let last = debug.lines().last().unwrap_or_default();
        for field in
            ["total_requests=4", "hit_requests=2", "miss_requests=2", "total_prompt_tokens=1220", "total_cached_tokens=192"]
        {
            assert!(last.contains(field), "{field} is not in {last}");
        }
        let rates = [format!(" hit_rate={}", 2.0 / 4.0), format!(" token_hit_rate={}", 192.0 / 1220.0)];
        assert!(rates.iter().all(|rate| last.contains(rate)), "{rates:?} are not in {last}");
        assert_eq!(logged(tracing::Level::INFO), "");
    }

    #[tokio::test]
    async fn each_metric_family_has_the_worker_label() {
        let registry = Metrics::default();
        let metrics = WorkerMetrics::new(&registry, "decode-0", 10);
        metrics.observe_scheduled(33, CachedTokens::on_device(32));
        metrics.observe_scheduled(10, CachedTokens::on_device(0));
        let (bytes, duration) = metrics.transfer("tcp", Direction::Sent);
        bytes.increment(4096);
        duration.record(0.004);
        let (sender, batches) = broadcast::channel(8);
        let step = |prefill_tokens, decode_tokens| {
            let load = Load {
                free_blocks: 5,
                cached_blocks: 3,
                in_use_blocks: 2,
                waiting_requests: 7,
                preemptions: 4,
                invariant_violations: 1,
                refused_graphs: 2,
                ..Default::default()
            };
            let step = StepStats { prefill_tokens, decode_tokens, duration: Duration::from_millis(3) };
            Arc::new(KvBatch { load, step: Some(step), ..Default::default() })
        };
        for batch in [step(16, 0), step(0, 2), step(16, 2), step(0, 1)] {
            sender.send(batch).expect("the test keeps the receiver");
        }
        drop(sender);
        let snapshot = Snapshot { at_event_id: 0, stored: Vec::new() };
        metrics.follow(CacheWatch { snapshot, load: Load::default(), batches }).await;
        assert_eq!(reported(&metrics).steps, Some(v1::StepTotals { prefilled_tokens: 32, generated_tokens: 5 }));
        let text = registry.render();
        for line in [
            r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="hit"} 1"#,
            r#"tandem_worker_prefix_cache_requests_total{worker="decode-0",result="miss"} 1"#,
            r#"tandem_worker_prompt_tokens_total{worker="decode-0"} 43"#,
            r#"tandem_worker_cached_tokens_total{worker="decode-0",tier="device"} 32"#,
            r#"tandem_worker_kv_capacity_blocks{worker="decode-0"} 10"#,
            r#"tandem_worker_kv_blocks{worker="decode-0",state="free"} 5"#,
            r#"tandem_worker_kv_blocks{worker="decode-0",state="cached"} 3"#,
            r#"tandem_worker_kv_blocks{worker="decode-0",state="in_use"} 2"#,
            r#"tandem_worker_queue_depth{worker="decode-0"} 7"#,
            r#"tandem_worker_preemptions_total{worker="decode-0"} 4"#,
            r#"tandem_worker_invariant_violations_total{worker="decode-0"} 1"#,
            r#"tandem_worker_refused_graphs_total{worker="decode-0"} 2"#,
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
    fn measured_bandwidth_follows_changes_and_ignores_empty_transfers() {
        let metrics = WorkerMetrics::new(&Metrics::default(), "prefill-0", 8);
        assert_eq!(reported(&metrics).transfer_bytes_per_second, 0.0);
        metrics.observe_bandwidth(1_000, Duration::from_secs(1));
        assert_eq!(reported(&metrics).transfer_bytes_per_second, 1_000.0);
        metrics.observe_bandwidth(2_000, Duration::from_secs(1));
        assert_eq!(reported(&metrics).transfer_bytes_per_second, 1_200.0);
        metrics.observe_bandwidth(0, Duration::from_secs(1));
        metrics.observe_bandwidth(1, Duration::ZERO);
        assert_eq!(reported(&metrics).transfer_bytes_per_second, 1_200.0);
    }
}
