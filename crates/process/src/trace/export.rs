//! Export of ended spans: a bounded queue, and a task that sends batches to the collector.

use super::Metrics;
use metrics::Counter;
use opentelemetry::{Context, trace::SpanId};
use opentelemetry_otlp::{
    ExporterBuildError, SpanExporter, WithExportConfig, WithTonicConfig, tonic_types::transport::ClientTlsConfig,
};
use opentelemetry_sdk::{
    Resource,
    error::OTelSdkResult,
    trace::{Span, SpanData, SpanExporter as _, SpanProcessor},
};
use std::{future::Future, time::Duration};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep_until, timeout},
};

/// Maximum number of spans that wait for the collector. A busy process creates this many spans in a few seconds; they take a few megabytes.
const QUEUE_MAX: usize = 4_096;
/// Maximum number of spans in one message.
const BATCH_MAX: usize = 512;
/// Maximum time that a span waits until its batch is full.
const BATCH_WAIT: Duration = Duration::from_secs(1);
/// Time limit for sending one batch.
const SEND_WAIT: Duration = Duration::from_secs(10);

/// The error of a collector address that is invalid.
#[derive(Debug, thiserror::Error)]
#[error("invalid --otlp-endpoint {endpoint}; write http://host:4317, the gRPC address of a collector")]
pub struct TraceError {
    endpoint: String,
    #[source]
    cause: Option<ExporterBuildError>,
}

enum ExportItem {
    Span(Box<SpanData>),
    Flush(oneshot::Sender<()>),
}

/// A queue of ended spans, which never blocks; spans beyond its capacity are lost.
#[derive(Clone, Debug)]
pub(super) struct SpanQueue {
    items: mpsc::Sender<ExportItem>,
    lost: Counter,
}

struct Exporter {
    items: mpsc::Receiver<ExportItem>,
    exporter: SpanExporter,
    sent: Counter,
    lost: Counter,
    is_healthy: bool,
}

pub(super) fn start(
    endpoint: &str,
    resource: &Resource,
    metrics: &Metrics,
) -> Result<(SpanQueue, impl Future<Output = ()> + Send + use<>), TraceError> {
    let unusable = |cause| TraceError { endpoint: endpoint.to_owned(), cause };
    let is_secure = endpoint.starts_with("https://");
    if !is_secure && !endpoint.starts_with("http://") {
        return Err(unusable(None));
    }
    let mut builder = SpanExporter::builder().with_tonic().with_endpoint(endpoint).with_timeout(SEND_WAIT);
    if is_secure {
        builder = builder.with_tls_config(ClientTlsConfig::new().with_enabled_roots());
    }
    let mut exporter = builder.build().map_err(|cause| unusable(Some(cause)))?;
    exporter.set_resource(resource);
    let spans = |result| metrics.counter("tandem_trace_spans_total", "Ended spans, by result.", &[("result", result)]);
    let (sender, items) = mpsc::channel(QUEUE_MAX);
    let (sent, lost) = (spans("sent"), spans("lost"));
    let queue = SpanQueue { items: sender, lost: lost.clone() };
    Ok((queue, Exporter { items, exporter, sent, lost, is_healthy: true }.run()))
}

impl SpanQueue {
    /// Resolves when all spans that have ended are sent or lost.
    pub(super) async fn flush(&self) {
        let (done, is_done) = oneshot::channel();
        if self.items.send(ExportItem::Flush(done)).await.is_ok() {
            is_done.await.ok();
        }
    }
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        log(&span);
        if self.items.try_send(ExportItem::Span(Box::new(span))).is_err() {
            self.lost.increment(1);
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

/// Logs one line for a sampled request. Each process that serves the request logs one.
fn log(span: &SpanData) {
    if span.parent_span_id != SpanId::INVALID && !span.parent_span_is_remote {
        return;
    }
    let duration = span.end_time.duration_since(span.start_time).unwrap_or_default();
    let attributes = span.attributes.iter().map(|attribute| format!("{}={}", attribute.key, attribute.value));
    tracing::info!(
        target: "tandem_trace",
        trace_id = %span.span_context.trace_id(),
        span_id = %span.span_context.span_id(),
        parent_span_id = %span.parent_span_id,
        duration_ms = duration.as_secs_f64() * 1e3,
        attributes = attributes.collect::<Vec<_>>().join(" "),
        "{}", span.name,
    );
}

impl Exporter {
    async fn run(mut self) {
        let (mut batch, mut due) = (Vec::new(), Instant::now());
        loop {
            let (mut flushed, mut ended) = (None, false);
            tokio::select! {
                item = self.items.recv() => match item {
                    Some(ExportItem::Span(span)) => {
                        if batch.is_empty() {
                            due = Instant::now() + BATCH_WAIT;
                        }
                        batch.push(*span);
                        if batch.len() < BATCH_MAX {
                            continue;
                        }
                    }
                    Some(ExportItem::Flush(done)) => flushed = Some(done),
                    None => ended = true,
                },
                () = sleep_until(due), if !batch.is_empty() => {}
            }
            if !batch.is_empty() {
                self.send(std::mem::take(&mut batch)).await;
            }
            if let Some(done) = flushed {
                // Sending fails only if the caller of `flush` no longer waits.
                let _ = done.send(());
            }
            if ended {
                return;
            }
        }
    }

    async fn send(&mut self, batch: Vec<SpanData>) {
        let spans = batch.len() as u64;
        let error = match timeout(SEND_WAIT, self.exporter.export(batch)).await {
            Ok(Ok(())) => None,
            Ok(Err(error)) => Some(error.to_string()),
            Err(_) => Some("timeout".to_owned()),
        };
        match (&error, self.is_healthy) {
            (Some(error), true) => tracing::warn!(error, "OTLP export failed; spans are lost until it succeeds"),
            (None, false) => tracing::info!("OTLP export succeeded again"),
            _ => {}
        }
        self.is_healthy = error.is_none();
        if self.is_healthy { &self.sent } else { &self.lost }.increment(spans);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::trace::{TraceSettings, Tracer};

    #[tokio::test]
    async fn spans_that_no_collector_receives_are_counted_as_lost() {
        let metrics = Metrics::default();
        let closed =
            std::net::TcpListener::bind("127.0.0.1:0").expect("a port is free").local_addr().expect("the listener is bound");
        let endpoint = format!("http://{closed}");
        let settings = TraceSettings { endpoint, sample_ratio: 1.0, service: "tandem-test", instance: "i".to_owned() };
        let (tracer, sending) = Tracer::new(settings, &metrics).expect("the export address is valid");
        let mut tasks = tokio::task::JoinSet::new();
        tasks.spawn(sending);
        for _ in 0..3 {
            drop(tracer.request("", "request"));
        }
        tracer.flush(Duration::from_secs(60)).await;
        let page = metrics.render();
        assert!(page.contains("tandem_trace_spans_total{result=\"lost\"} 3"), "{page}");
        let settings = TraceSettings {
            endpoint: format!("http://{closed}"),
            sample_ratio: 1.0,
            service: "tandem-test",
            instance: "i".to_owned(),
        };
        let (tracer, _sending) = Tracer::new(settings, &metrics).expect("the export address is valid");
        (0..2 * QUEUE_MAX).for_each(|_| drop(tracer.request("", "request")));
        let page = metrics.render();
        assert!(page.contains(&format!("tandem_trace_spans_total{{result=\"lost\"}} {}", 3 + QUEUE_MAX)), "{page}");
        assert!(page.contains("tandem_trace_spans_total{result=\"sent\"} 0"), "{page}");
    }

    #[tokio::test]
    async fn invalid_endpoint_is_refused() {
        for endpoint in ["collector:4317", "http://two words:4317", ""] {
            let endpoint = endpoint.to_owned();
            let settings = TraceSettings { endpoint, sample_ratio: 1.0, service: "tandem-test", instance: "i".to_owned() };
            let error =
                Tracer::new(settings, &Metrics::default()).err().expect("a tracer without an address is refused").to_string();
            assert!(error.contains("write http://host:4317"), "{error}");
        }
    }
}
