//! Metrics: one recorder per cluster, passed to its components. Each component registers its metric families once and keeps the handles.
//!
//! Two clusters in one process, as in tests, have separate recorders, so that their metrics do not mix.

use crate::telemetry;
use ::metrics::{Counter, Gauge, Histogram, Key, KeyName, Label, Level, Metadata, Recorder};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusRecorder};
use parking_lot::Mutex;
use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
    time::Duration,
};

/// Registers metrics, and renders them all in Prometheus' text format. It is cheap to clone.
#[derive(Clone)]
pub struct Metrics(Arc<Registry>);

struct Registry {
    recorder: PrometheusRecorder,
    parts: Mutex<BTreeMap<String, Weak<Registry>>>,
}

/// A label's name and value. Values come from fixed sets, so that the number of series stays bounded; they are never request ids or paths.
pub type LabelPair<'a> = (&'static str, &'a str);

const METADATA: Metadata<'static> = Metadata::new("tandem", Level::INFO, None);

/// The time between two calls of upkeep. In this time the histograms of a busy frontend record some ten thousand values, which take about a
/// hundred kilobytes.
const UPKEEP_INTERVAL: Duration = Duration::from_secs(1);

/// Histogram buckets, by the unit at the end of the metric's name.
const BUCKETS: [(&str, &[f64]); 4] = [
    ("_seconds", &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0]),
    ("_tokens", &[0.0, 16.0, 64.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0, 65536.0, 131072.0]),
    ("_blocks", &[0.0, 1.0, 4.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0]),
    ("_ratio", &[0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0]),
];

impl Default for Metrics {
    fn default() -> Self {
        let mut builder = PrometheusBuilder::new();
        for (suffix, buckets) in BUCKETS {
            let suffix = Matcher::Suffix(suffix.to_owned());
            builder = builder.set_buckets_for_metric(suffix, buckets).expect("the buckets are not empty");
        }
        Self(Arc::new(Registry { recorder: builder.build_recorder(), parts: Mutex::default() }))
    }
}

impl Metrics {
    /// Registers a counter; its name ends in `_total`.
    pub fn counter(&self, name: &'static str, help: &'static str, labels: &[LabelPair<'_>]) -> Counter {
        self.0.recorder.describe_counter(KeyName::from_const_str(name), None, help.into());
        self.0.recorder.register_counter(&key(name, labels), &METADATA)
    }

    /// Registers a gauge.
    pub fn gauge(&self, name: &'static str, help: &'static str, labels: &[LabelPair<'_>]) -> Gauge {
        self.0.recorder.describe_gauge(KeyName::from_const_str(name), None, help.into());
        self.0.recorder.register_gauge(&key(name, labels), &METADATA)
    }

    /// Registers a histogram; its name ends in its unit, which determines the buckets.
    pub fn histogram(&self, name: &'static str, help: &'static str, labels: &[LabelPair<'_>]) -> Histogram {
        self.0.recorder.describe_histogram(KeyName::from_const_str(name), None, help.into());
        self.0.recorder.register_histogram(&key(name, labels), &METADATA)
    }

    /// Returns a registry for one owner, such as a worker. The owner's series are rendered with those of this registry until the last clone
    /// of the owner's registry is dropped. Until then, calls with the same owner return the same registry.
    pub fn part(&self, owner: &str) -> Self {
        let mut parts = self.0.parts.lock();
        if let Some(part) = parts.get(owner).and_then(Weak::upgrade) {
            return Self(part);
        }
        parts.retain(|_, part| part.strong_count() > 0);
        let part = Self::default();
        parts.insert(owner.to_owned(), Arc::downgrade(&part.0));
        part
    }

    fn all(&self) -> Vec<Arc<Registry>> {
        [Arc::clone(&self.0)].into_iter().chain(self.0.parts.lock().values().filter_map(Weak::upgrade)).collect()
    }

    /// Renders all series in Prometheus' text format.
    pub fn render(&self) -> String {
        let pages: Vec<String> = self.all().iter().map(|registry| registry.recorder.handle().render()).collect();
        join(&pages)
    }

    /// Periodically sorts the recorded values of histograms into their buckets, until the future is dropped. Until a value is sorted, it
    /// takes memory of its own, so without upkeep the memory would grow until the next scrape.
    ///
    /// Also counts the process's [lost log lines](crate::telemetry::lost).
    pub async fn upkeep(self) {
        let help = "Log lines that could not be written, because the disk is full or no process reads them.";
        let lost = self.counter("tandem_log_lines_lost_total", help, &[]);
        loop {
            lost.absolute(telemetry::lost());
            tokio::time::sleep(UPKEEP_INTERVAL).await;
            self.all().iter().for_each(|registry| registry.recorder.handle().run_upkeep());
        }
    }
}

fn join(pages: &[String]) -> String {
    let mut families: BTreeMap<&str, String> = BTreeMap::new();
    for family in pages.iter().flat_map(|page| page.split_terminator("\n\n")) {
        let head: usize = family.split_inclusive('\n').take_while(|line| line.starts_with('#')).map(str::len).sum();
        let (head, series) = family.split_at(head);
        let all = families.entry(head).or_default();
        all.push_str(series);
        all.push('\n');
    }
    families.into_iter().map(|(head, series)| format!("{head}{series}\n")).collect()
}

fn key(name: &'static str, labels: &[LabelPair<'_>]) -> Key {
    let labels: Vec<Label> = labels.iter().map(|(name, value)| Label::new(*name, (*value).to_owned())).collect();
    Key::from_parts(name, labels)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn registries_are_separate_and_series_of_one_family_share_a_header() {
        let (one, other) = (Metrics::default(), Metrics::default());
        for worker in ["prefill-0", "prefill-1"] {
            one.counter("tandem_worker_prompt_tokens_total", "Prompt tokens.", &[("worker", worker)]).increment(3);
        }
        one.histogram("tandem_router_overlap_blocks", "Overlap.", &[]).record(5.0);
        let text = one.render();
        assert_eq!(text.matches("# TYPE tandem_worker_prompt_tokens_total counter").count(), 1, "{text}");
        assert!(text.contains("tandem_worker_prompt_tokens_total{worker=\"prefill-1\"} 3"), "{text}");
        assert!(text.contains("tandem_router_overlap_blocks_bucket{le=\"16\"} 1"), "{text}");
        assert_eq!(other.render(), "");
    }

    #[test]
    fn metrics_of_an_owner_are_removed_when_its_registry_is_dropped() {
        let metrics = Metrics::default();
        let placed = |metrics: &Metrics, worker| {
            metrics.counter("tandem_router_placements_total", "Placements.", &[("worker", worker)]).increment(1);
            metrics.histogram("tandem_router_overlap_blocks", "Overlap.", &[("worker", worker)]).record(5.0);
        };
        let (here, away) = (metrics.part("p0"), metrics.part("p1"));
        placed(&here, "p0");
        placed(&away, "p1");
        placed(&metrics.part("p1"), "p1");
        placed(&metrics, "own");
        let text = metrics.render();
        for once in ["# TYPE tandem_router_placements_total counter\n", "# HELP tandem_router_overlap_blocks Overlap.\n"] {
            assert_eq!(text.matches(once).count(), 1, "{text}");
        }
        for line in
            ["placements_total{worker=\"p1\"} 2", "placements_total{worker=\"own\"} 1", "overlap_blocks_count{worker=\"p0\"} 1"]
        {
            assert_eq!(text.lines().filter(|found| *found == format!("tandem_router_{line}")).count(), 1, "{line} in {text}");
        }
        drop(away);
        assert!(!metrics.render().contains("p1"), "{}", metrics.render());
        placed(&metrics.part("p1"), "p1");
        assert!(!metrics.render().contains("p1"), "p1's metrics were dropped: {}", metrics.render());
        assert!(metrics.render().contains("tandem_router_placements_total{worker=\"p0\"} 1\n"));
    }
}
