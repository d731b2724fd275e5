//! Tests of traces: every process of a cluster sends its spans of a request to a collector, and the spans of one request form one tree.

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::{chat, post_chat},
};
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use serde_json::json;
use std::{
    collections::{BTreeMap, BTreeSet},
    net::{SocketAddr, TcpListener},
    sync::{Arc, Mutex},
};
use tonic::{Request, Response, Status};

#[derive(Clone, Default)]
pub struct Collector(Arc<Mutex<Vec<(String, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(&self, request: Request<ExportTraceServiceRequest>) -> Result<Response<ExportTraceServiceResponse>, Status> {
        let mut received = self.0.lock().expect("no test panics with the lock");
        for service_spans in request.into_inner().resource_spans {
            let resource = service_spans.resource.expect("the spans have a resource").attributes;
            let service = text(&resource, "service.name");
            let spans = service_spans.scope_spans.into_iter().flat_map(|scope| scope.spans);
            received.extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    pub fn start(plan: &Plan) -> (Self, SocketAddr) {
        let (collector, at) = (Self::default(), address());
        let service = TraceServiceServer::new(collector.clone());
        plan.runtime.spawn(tonic::transport::Server::builder().add_service(service).serve(at));
        (collector, at)
    }

    pub fn spans(&self) -> Vec<(String, Span)> {
        self.0.lock().expect("no test panics with the lock").clone()
    }
}

fn value<'a>(attributes: &'a [KeyValue], key: &str) -> Option<&'a Value> {
    attributes.iter().find(|attribute| attribute.key == key)?.value.as_ref()?.value.as_ref()
}

fn text(attributes: &[KeyValue], key: &str) -> String {
    match value(attributes, key) {
        Some(Value::StringValue(text)) => text.clone(),
        other => panic!("{key} is {other:?}"),
    }
}

fn number(span: &Span, key: &str) -> i64 {
    match value(&span.attributes, key) {
        Some(Value::IntValue(number)) => *number,
        other => panic!("{key} of {} is {other:?}", span.name),
    }
}

/// The only attributes that spans may have.
const ATTRIBUTES: &[&str] = &[
    "error.type",
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.choice.count",
    "gen_ai.request.max_tokens",
    "gen_ai.request.model",
    "gen_ai.request.temperature",
    "gen_ai.request.top_p",
    "gen_ai.response.finish_reasons",
    "gen_ai.response.id",
    "gen_ai.response.model",
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "http.response.status_code",
    "tandem.attempt",
    "tandem.block_size",
    "tandem.cached_tokens",
    "tandem.cached_tokens_source",
    "tandem.decode_worker",
    "tandem.kv_transfer_blocks",
    "tandem.kv_transfer_bytes",
    "tandem.overlap_blocks",
    "tandem.predicted_blocks",
    "tandem.prefill_chunks",
    "tandem.prefill_worker",
    "tandem.prompt_tokens",
    "tandem.prompts",
    "tandem.resumed",
    "tandem.stream",
    "tandem.transport",
    "tandem.worker",
];

/// Returns, for each span, the service that sent it, the name of its parent (empty for the root), and its own name.
fn tree(spans: &[&(String, Span)]) -> BTreeSet<(String, String, String)> {
    let names: BTreeMap<_, _> = spans.iter().map(|(_, span)| (span.span_id.clone(), span.name.clone())).collect();
    let parent = |span: &Span| names.get(&span.parent_span_id).cloned().unwrap_or_default();
    spans.iter().map(|(service, span)| (service.clone(), parent(span), span.name.clone())).collect()
}

/// A text that is in every prompt and must not be in any span or log line.
const SECRET: &str = "tourmaline";
/// The id of the caller's trace, which the request continues.
const CALLERS_TRACE: &str = "0af7651916cd43dd8448eb211c80319c";

#[test]
fn trace_is_one_tree_across_processes_and_contains_no_prompt_text() {
    let plan = Plan::new();
    let (collector, at) = Collector::start(&plan);
    let (endpoint, workers) = (format!("http://{at}"), [address(), address()]);
    plan.list(&workers);
    let args = ["--otlp-endpoint", &endpoint, "--trace-sample-ratio", "1", "--log-format", "json"];
    let processes = [
        plan.frontend(&args),
        plan.router(&args),
        plan.worker("decode", "d", workers[1], &args),
        plan.worker("prefill", "p", workers[0], &args),
    ];
    let frontend = &processes[0];
    ready(frontend);

    let mut answers = BTreeMap::new();
    for number in 0..6 {
        let prompt = format!("{SECRET} {number}: {}", "a prompt of some blocks ".repeat(8));
        let body = json!({
            "model": "sim", "stream": number % 2 == 0, "stream_options": { "include_usage": true }, "max_tokens": 10 + number,
            "ignore_eos": true, "messages": [{ "role": "user", "content": prompt }],
        });
        let mut body = body;
        if number % 2 == 1 {
            body.as_object_mut().expect("the body is an object").remove("stream_options");
        }
        let headers =
            if number == 0 { format!("traceparent: 00-{CALLERS_TRACE}-b7ad6b7169203331-01\r\n") } else { String::new() };
        let (answer, id) = post_chat(frontend, &headers, &body);
        answers.insert(format!("chatcmpl-{id}"), (answer, 10 + number));
    }
    let unsampled = "traceparent: 00-1af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00\r\n";
    post_chat(frontend, unsampled, &json!({ "model": "sim", "messages": [{ "role": "user", "content": "x" }], "max_tokens": 2 }));
    until("all spans have arrived", || collector.spans().len(), |spans| *spans >= 5 * answers.len());
    for process in processes {
        process.signal("-TERM");
        assert_eq!(process.wait().0.code(), Some(0), "the process sends its remaining spans before it ends");
    }

    let spans = collector.spans();
    let mut traces: BTreeMap<Vec<u8>, Vec<&(String, Span)>> = BTreeMap::new();
    for span in &spans {
        traces.entry(span.1.trace_id.clone()).or_default().push(span);
    }
    assert_eq!(traces.len(), answers.len(), "there is one trace for each request: {spans:#?}");
    let edges = [
        ("tandem-frontend", "", "chat sim"),
        ("tandem-router", "chat sim", "route"),
        ("tandem-decode-worker", "chat sim", "generate"),
        ("tandem-prefill-worker", "generate", "prefill"),
        ("tandem-prefill-worker", "prefill", "transfer"),
    ];
    let edges: BTreeSet<_> = edges.map(|(service, parent, name)| (service.to_owned(), parent.to_owned(), name.to_owned())).into();
    for trace in traces.values() {
        assert_eq!((tree(trace), trace.len()), (edges.clone(), edges.len()));
        let of = |name: &str| &trace.iter().find(|(_, span)| span.name == name).expect("the trace has the span").1;
        let (root, prefill) = (of("chat sim"), of("prefill"));
        let (answer, completion) = &answers[&text(&root.attributes, "gen_ai.response.id")];
        let usage = |key: &str| {
            let number = answer.rsplit(&format!("\"{key}\":")).next().and_then(|rest| rest.split([',', '}']).next());
            number.and_then(|number| number.parse::<i64>().ok()).expect("the usage has the number")
        };
        assert_eq!(number(root, "gen_ai.usage.output_tokens"), *completion);
        assert_eq!(number(root, "gen_ai.usage.input_tokens"), usage("prompt_tokens"));
        assert_eq!(number(root, "gen_ai.usage.cache_read.input_tokens"), usage("cached_tokens"));
        assert_eq!(number(prefill, "tandem.cached_tokens"), usage("cached_tokens"));
        assert_eq!(number(root, "http.response.status_code"), 200);
        assert_eq!(text(&of("route").attributes, "tandem.prefill_worker"), "p");
        assert!(number(of("transfer"), "tandem.kv_transfer_bytes") > 0);
        for child in trace.iter().filter(|(_, span)| span.name != root.name) {
            assert!(child.1.start_time_unix_nano >= root.start_time_unix_nano, "{child:?}");
        }
    }
    let callers_trace: Vec<u8> = (0..16)
        .map(|at| u8::from_str_radix(&CALLERS_TRACE[2 * at..2 * at + 2], 16).expect("the trace id is hexadecimal"))
        .collect();
    assert!(traces.contains_key(&callers_trace), "the caller's trace is continued");

    // No span and no log line may contain text of a prompt or an answer.
    for attribute in
        spans.iter().flat_map(|(_, span)| span.attributes.iter().chain(span.events.iter().flat_map(|event| &event.attributes)))
    {
        assert!(ATTRIBUTES.contains(&attribute.key.as_str()), "{attribute:?}");
    }
    let ids: BTreeSet<String> = traces.keys().map(|id| id.iter().map(|byte| format!("{byte:02x}")).collect()).collect();
    for name in ["frontend", "router", "d", "p"] {
        let log = plan.log(name);
        let lines: Vec<serde_json::Value> =
            log.lines().map(|line| serde_json::from_str(line).expect("a log line is JSON")).collect();
        let sampled = lines.iter().filter(|line| line["target"] == "tandem_trace").map(|line| line["trace_id"].as_str());
        let sampled: Vec<&str> = sampled.map(|id| id.expect("the line has a trace id")).collect();
        assert_eq!(sampled.iter().map(|id| (*id).to_owned()).collect::<BTreeSet<_>>(), ids, "{name}: {log}");
        assert_eq!(sampled.len(), ids.len(), "{name}: there is one line for each request");
        assert!(!log.contains(SECRET), "{log}");
    }
    assert!(!format!("{spans:?}").contains(SECRET));
}

#[test]
fn unresponsive_collector_delays_no_request() {
    // One collector accepts connections and never answers; the other one does not exist.
    let silent = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let closed = address();
    for collector in [silent.local_addr().expect("the listener is bound"), closed] {
        let plan = Plan::new();
        let (endpoint, workers) = (format!("http://{collector}"), [address(), address()]);
        plan.list(&workers);
        let args = ["--otlp-endpoint", &endpoint, "--trace-sample-ratio", "1"];
        let (router, frontend) = (plan.router(&args), plan.frontend(&args));
        let workers = [plan.worker("prefill", "p", workers[0], &args), plan.worker("decode", "d", workers[1], &args)];
        ready(&frontend);
        for number in 0..10 {
            chat(&frontend, &format!("{number} {}", "some words of a prompt ".repeat(20)));
        }
        if collector == closed {
            let lost = || series(&frontend, "tandem_trace_spans_total{result=\"lost\"}");
            until("lost spans are counted", lost, |lost| *lost >= 10.0);
            assert!(plan.log("frontend").contains("OTLP export failed"), "the failed export is logged");
        }
        for process in [frontend, router].into_iter().chain(workers) {
            process.signal("-TERM");
            assert_eq!(process.wait().0.code(), Some(0));
        }
    }
}
