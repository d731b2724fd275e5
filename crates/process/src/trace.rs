//! Traces: a request's spans form one tree through all processes, and are exported to a collector over OTLP.
//!
//! - A request's client or the frontend decides whether the request is sampled, for all processes. Requests that are not sampled have no spans.
//! - Spans hold names, counts and times; never text, token ids, or names chosen by clients.
//! - No request waits for the collector: spans that it does not accept in time are lost and counted.

mod export;

pub use export::TraceError;

use crate::Metrics;
use export::SpanQueue;
use opentelemetry::{
    Array, Context, KeyValue, Value,
    propagation::{Extractor, TextMapPropagator},
    trace::{SpanKind, Status, TraceContextExt, Tracer as _, TracerProvider as _},
};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};
use std::{borrow::Cow, future::Future, sync::Arc, time::Duration};

/// The length of a `traceparent`: `00-`, trace id, `-`, span id, `-`, flags.
const TRACEPARENT_LEN: usize = 55;

/// The value of a span's attribute.
#[derive(Clone, Debug)]
pub struct Attribute(Value);

macro_rules! attribute_from {
    ($($type:ty, $given:ident => $value:expr;)+) => {
        $(impl From<$type> for Attribute {
            fn from($given: $type) -> Self {
                Self($value)
            }
        })+
    };
}

attribute_from! {
    u32, count => i64::from(count).into();
    u64, count => i64::try_from(count).unwrap_or(i64::MAX).into();
    f64, number => number.into();
    bool, holds => holds.into();
    &'static str, name => name.into();
    String, name => name.into();
    Vec<&'static str>, names => Value::Array(Array::String(names.into_iter().map(Into::into).collect()));
}

/// The settings of tracing in one process.
#[derive(Clone, Debug)]
pub struct TraceSettings {
    /// The collector's gRPC endpoint: `http://host:4317`, or `https://`.
    pub endpoint: String,
    /// The share of requests that are sampled, from 0 to 1. If the client sends a trace context, its request is sampled if and only if that
    /// trace is sampled.
    pub sample_ratio: f64,
    /// The name of the service in traces, such as `tandem-frontend`.
    pub service: &'static str,
    /// The instance id of the process, which is the service's instance in traces.
    pub instance: String,
}

/// Starts spans. It is cheap to clone. The default tracer starts no spans.
#[derive(Clone, Debug, Default)]
pub struct Tracer(Option<Arc<SpanSource>>);

#[derive(Debug)]
struct SpanSource {
    tracer: SdkTracer,
    queue: SpanQueue,
}

/// A span, which ends when its last clone is dropped. It is empty if its request is not sampled.
#[derive(Clone, Debug, Default)]
pub struct Span(Option<(Context, Arc<SpanSource>)>);

impl Tracer {
    /// Returns a tracer and the task that sends its spans. The task connects when it sends the first span. Needs a tokio runtime.
    ///
    /// # Errors
    /// Fails if the endpoint is not a valid address.
    pub fn new(
        settings: TraceSettings,
        metrics: &Metrics,
    ) -> Result<(Self, impl Future<Output = ()> + Send + use<>), TraceError> {
        let ratio = Sampler::TraceIdRatioBased(settings.sample_ratio);
        let instance = KeyValue::new("service.instance.id", settings.instance);
        let version = KeyValue::new("service.version", env!("CARGO_PKG_VERSION"));
        let resource = Resource::builder().with_service_name(settings.service).with_attributes([instance, version]).build();
        let (queue, sending) = export::start(&settings.endpoint, &resource, metrics)?;
        let provider = SdkTracerProvider::builder()
            .with_sampler(Sampler::ParentBased(Box::new(ratio)))
            .with_resource(resource)
            .with_span_processor(queue.clone())
            .build();
        Ok((Self(Some(Arc::new(SpanSource { tracer: provider.tracer("tandem"), queue }))), sending))
    }

    /// Starts the span of a request from a client, as a child of the client's span if `traceparent` names one.
    pub fn request(&self, traceparent: &str, name: &'static str) -> Span {
        let Some(source) = &self.0 else { return Span::default() };
        source.begin(name.into(), SpanKind::Server, &remote(traceparent))
    }

    /// Starts the span of a call by another process, as a child of that process's span. The span is empty unless `traceparent` names a
    /// sampled span.
    pub fn follow(&self, traceparent: &str, name: &'static str) -> Span {
        match &self.0 {
            Some(source) if !traceparent.is_empty() => {
                let parent = remote(traceparent);
                if !parent.span().span_context().is_sampled() {
                    return Span::default();
                }
                source.begin(name.into(), SpanKind::Server, &parent)
            }
            _ => Span::default(),
        }
    }

    /// Waits until the spans that have ended are exported or lost, but no longer than `within`.
    pub async fn flush(&self, within: Duration) {
        if let Some(source) = &self.0 {
            tokio::time::timeout(within, source.queue.flush()).await.ok();
        }
    }
}

impl SpanSource {
    fn begin(self: &Arc<Self>, name: Cow<'static, str>, kind: SpanKind, parent: &Context) -> Span {
        let span = self.tracer.span_builder(name).with_kind(kind).start_with_context(&self.tracer, parent);
        let context = Context::new().with_span(span);
        if !context.span().is_recording() {
            return Span::default();
        }
        Span(Some((context, Arc::clone(self))))
    }
}

impl Span {
    /// Returns the W3C `traceparent` with which other processes continue the trace; `None` if the request is not sampled.
    pub fn traceparent(&self) -> Option<String> {
        let (trace_id, span_id) = self.ids()?;
        Some(format!("00-{trace_id}-{span_id}-01"))
    }

    fn ids(&self) -> Option<(String, String)> {
        let (context, _) = self.0.as_ref()?;
        let span = context.span();
        let context = span.span_context();
        Some((context.trace_id().to_string(), context.span_id().to_string()))
    }

    /// Returns whether the request is sampled, so that the span is exported. The methods of a span that is not exported cost nothing.
    pub fn is_sampled(&self) -> bool {
        self.0.is_some()
    }

    /// Starts a child of this span. The child of an empty span is empty.
    pub fn child(&self, name: &'static str) -> Self {
        match &self.0 {
            Some((context, source)) => source.begin(name.into(), SpanKind::Internal, context),
            None => Self::default(),
        }
    }

    /// Changes the span's name.
    pub fn rename(&self, name: impl FnOnce() -> String) {
        if let Some((context, _)) = &self.0 {
            context.span().update_name(name());
        }
    }

    /// Sets an attribute. Its value is a count, a time, or a name given by the operator.
    pub fn set(&self, key: &'static str, value: impl Into<Attribute>) {
        if let Some((context, _)) = &self.0 {
            context.span().set_attribute(KeyValue::new(key, value.into().0));
        }
    }

    /// Adds an event that happens now, with attributes as in [`Span::set`].
    pub fn event(&self, name: &'static str, attributes: &[(&'static str, Attribute)]) {
        if let Some((context, _)) = &self.0 {
            let attributes = attributes.iter().map(|(key, value)| KeyValue::new(*key, value.0.clone()));
            context.span().add_event(name, attributes.collect());
        }
    }

    /// Marks the span as failed. `reason` must be one of a fixed set.
    pub fn fail(&self, reason: &'static str) {
        if let Some((context, _)) = &self.0 {
            context.span().set_attribute(KeyValue::new("error.type", reason));
            context.span().set_status(Status::error(reason));
        }
    }

    /// Returns the `tracing` span for the request's log lines. It contains the trace id and the span id if the request is sampled. It is in no
    /// other span, although a direct call runs in its caller's.
    pub fn logged(&self, request_id: &str, attempt: u32) -> tracing::Span {
        match self.ids() {
            Some((trace_id, span_id)) => tracing::info_span!(parent: None, "request", request_id, attempt, trace_id, span_id),
            None => tracing::debug_span!(parent: None, "request", request_id, attempt),
        }
    }
}

fn remote(traceparent: &str) -> Context {
    struct Header<'a>(&'a str);
    impl Extractor for Header<'_> {
        fn get(&self, key: &str) -> Option<&str> {
            (key == "traceparent").then_some(self.0)
        }
        fn keys(&self) -> Vec<&str> {
            vec!["traceparent"]
        }
    }
    // Without this check the propagator would accept a `traceparent` with incomplete flags.
    if traceparent.len() != TRACEPARENT_LEN {
        return Context::new();
    }
    TraceContextPropagator::new().extract_with_context(&Context::new(), &Header(traceparent))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const UNSAMPLED: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00";

    fn tracer(sample_ratio: f64) -> Tracer {
        let endpoint = "http://127.0.0.1:9".to_owned();
        let settings = TraceSettings { endpoint, sample_ratio, service: "tandem-test", instance: "i".to_owned() };
        Tracer::new(settings, &Metrics::default()).expect("the export address is valid").0
    }

    #[tokio::test]
    async fn client_decides_whether_its_trace_is_sampled_and_otherwise_the_ratio_decides() {
        let (never, always) = (tracer(0.0), tracer(1.0));
        assert!(!never.request("", "r").is_sampled() && always.request("", "r").is_sampled());
        assert!(never.request(SAMPLED, "r").is_sampled() && !always.request(UNSAMPLED, "r").is_sampled());
        for nonsense in ["", "00-x-y-01", &SAMPLED[..54]] {
            assert!(always.request(nonsense, "r").is_sampled(), "{nonsense:?} starts a new trace");
            assert!(!always.follow(nonsense, "r").is_sampled(), "{nonsense:?} continues no trace");
        }
        assert!(!always.follow(UNSAMPLED, "r").is_sampled());
        assert!(!Tracer::default().request(SAMPLED, "r").is_sampled());
        assert_eq!(Tracer::default().request(SAMPLED, "r").traceparent(), None);
    }

    #[tokio::test]
    async fn traceparent_continues_the_trace() {
        let tracer = tracer(0.0);
        let root = tracer.request(SAMPLED, "r");
        let header = root.traceparent().expect("the trace is sampled");
        let child = tracer.follow(&header, "c").child("grandchild").traceparent().expect("the trace is sampled");
        for header in [&header, &child] {
            assert_eq!((&header[..35], &header[52..], header.len()), (&SAMPLED[..35], "-01", 55), "{header}");
        }
        assert!(header != SAMPLED && child != header);
    }

    #[tokio::test]
    async fn ratio_of_one_half_samples_half_of_the_requests() {
        let tracer = tracer(0.5);
        let sampled = (0..4_000).filter(|_| tracer.request("", "r").is_sampled()).count();
        assert!((1_700..2_300).contains(&sampled), "{sampled}");
    }
}
