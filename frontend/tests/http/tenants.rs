//! Multi-tenancy: whether accounts share cached KV, and which headers of untrusted peers are accepted.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_frontend::{CacheIsolation, ExposeDetails, FrontendSettings};
use tandem_process::{
    Metrics,
    trace::{TraceSettings, Tracer},
};
use tandem_proto::v1::GenerateRequest;

const TRACE_ID: &str = "0af7651916cd43dd8448eb211c80319c";
const TRACEPARENT: &str = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";

/// Changes the settings so that the test's own connections are not those of a trusted proxy.
fn untrusted(settings: &mut FrontendSettings) {
    settings.trusted_proxies = vec!["10.0.0.0/8".parse().expect("the network is valid")];
}

fn accounts(settings: &mut FrontendSettings) {
    settings.account_header = Some("x-account".parse().expect("the header name is valid"));
}

/// Sends a request with these headers, answers it, and returns the message that the worker has received for it.
async fn generate_request(cluster: &mut Cluster, headers: &[(&'static str, &'static str)], options: Value) -> GenerateRequest {
    let (frontend, headers) = (cluster.frontend, headers.to_vec());
    let long = json!({ "messages": [{ "role": "user", "content": "a prompt of more than one block" }] });
    let mut body = chat(long);
    body.as_object_mut()
        .expect("the body is an object")
        .extend(options.as_object().expect("the chat options are an object").clone());
    let body = body.to_string();
    let reply = tokio::spawn(async move { send(frontend, Method::POST, CHAT, &headers, body.into()).await });
    let call = cluster.call().await;
    let request = call.request.clone();
    call.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    request
}

async fn refusal(cluster: &Cluster, header: (&str, &str)) -> (StatusCode, Value) {
    cluster.send(Method::POST, CHAT, &[header], chat(json!({})).to_string()).await.json().await
}

#[tokio::test]
async fn isolated_accounts_have_different_cache_namespaces() {
    let mut cluster = Cluster::with(|settings| {
        accounts(settings);
        settings.cache_isolation = CacheIsolation::Account;
    })
    .await;
    let mut namespaces = Vec::new();
    for (headers, salt) in [
        (&[("x-account", "acme")][..], None),
        (&[("x-account", "zoo")], None),
        (&[], None),
        (&[("x-account", "acme")], Some("s")),
        (&[], Some("acme")),
    ] {
        let first = generate_request(&mut cluster, headers, json!({ "cache_salt": salt })).await;
        let again = generate_request(&mut cluster, headers, json!({ "cache_salt": salt })).await;
        assert_eq!(first.cache_namespace, again.cache_namespace, "requests of one account share their KV: {headers:?}");
        namespaces.push(first.cache_namespace);
    }
    let shared = tandem_kv::Namespace::new("m", "sim", "", "");
    namespaces.push(shared.as_bytes().to_vec());
    let len = namespaces.len();
    namespaces.sort();
    namespaces.dedup();
    assert_eq!(namespaces.len(), len, "accounts share KV neither with each other nor with a frontend without isolation");
}

#[tokio::test]
async fn accounts_that_share_the_cache_have_one_cache_namespace() {
    let mut cluster = Cluster::with(accounts).await;
    let shared = tandem_kv::Namespace::new("m", "sim", "", "");
    for headers in [&[("x-account", "acme")][..], &[]] {
        let request = generate_request(&mut cluster, headers, json!({})).await;
        assert_eq!(request.cache_namespace, shared.as_bytes());
    }
}

#[tokio::test]
async fn details_and_explanations_are_refused_to_untrusted_peers() {
    let mut cluster = Cluster::with(untrusted).await;
    for header in ["x-tandem-details", "x-tandem-explain"] {
        let (status, answer) = refusal(&cluster, (header, "true")).await;
        assert_eq!((status, &answer["error"]["code"]), (StatusCode::FORBIDDEN, &json!("untrusted_client")), "{header}");
        let message = answer["error"]["message"].as_str().expect("the error message is a string");
        assert!(message.contains(header) && message.contains("--trusted-proxies"), "{message}");
        let (status, answer) = refusal(&cluster, (header, "1")).await;
        let message = answer["error"]["message"].as_str().expect("the error message is a string");
        assert!(status == StatusCode::BAD_REQUEST && message.contains("true or false"), "{message}");
    }
    generate_request(&mut cluster, &[("x-tandem-details", "false"), ("x-tandem-explain", "false")], json!({})).await;
    assert!(cluster.no_call(), "a refused request does not reach a worker");
}

#[tokio::test]
async fn dashboard_is_refused_to_untrusted_peers() {
    let paths = ["/dashboard", "/dashboard/cluster", "/dashboard/requests", "/dashboard/metrics"];
    for (set, status) in [
        (untrusted as fn(&mut FrontendSettings), StatusCode::FORBIDDEN),
        (|settings| settings.expose_details = ExposeDetails::Never, StatusCode::FORBIDDEN),
        (|_| (), StatusCode::OK),
    ] {
        let cluster = Cluster::with(set).await;
        for path in paths {
            let (got, text) = cluster.send(Method::GET, path, &[], String::new()).await.text().await;
            assert_eq!(got, status, "{path}");
            assert_eq!(text.contains("--trusted-proxies ADDRESS"), status == StatusCode::FORBIDDEN, "{path}: {text}");
        }
    }
}

#[tokio::test]
async fn expose_details_setting_decides_which_peers_get_details() {
    let ask = async |change: fn(&mut FrontendSettings), headers: &[(&str, &str)]| {
        let cluster = Cluster::with(change).await;
        cluster.send(Method::POST, CHAT, headers, chat(json!({})).to_string()).await.status()
    };
    const EXPLAIN: (&str, &str) = ("x-tandem-explain", "true");
    const FORWARDED: (&str, &str) = ("x-forwarded-for", "1.2.3.4");
    assert_eq!(ask(|_| {}, &[EXPLAIN]).await, StatusCode::OK, "a program on this machine is trusted");
    assert_eq!(
        ask(|_| {}, &[EXPLAIN, FORWARDED]).await,
        StatusCode::FORBIDDEN,
        "a client behind an unlisted proxy is not trusted"
    );
    let listed =
        |settings: &mut FrontendSettings| settings.trusted_proxies = vec!["127.0.0.1/32".parse().expect("the network is valid")];
    assert_eq!(ask(listed, &[EXPLAIN, FORWARDED]).await, StatusCode::OK, "a listed proxy is trusted");
    let always = |settings: &mut FrontendSettings| {
        untrusted(settings);
        settings.expose_details = ExposeDetails::Always;
    };
    assert_eq!(ask(always, &[EXPLAIN]).await, StatusCode::OK);
    assert_eq!(ask(|settings| settings.expose_details = ExposeDetails::Never, &[EXPLAIN]).await, StatusCode::FORBIDDEN);
}

#[tokio::test]
async fn account_header_of_an_untrusted_peer_is_refused() {
    let mut cluster = Cluster::with(|settings| {
        accounts(settings);
        untrusted(settings);
    })
    .await;
    let (status, answer) = refusal(&cluster, ("x-account", "acme")).await;
    assert_eq!((status, &answer["error"]["code"]), (StatusCode::FORBIDDEN, &json!("untrusted_client")));
    assert!(cluster.no_call(), "a refused request does not reach a worker");
    assert_eq!(generate_request(&mut cluster, &[], json!({})).await.account, "", "a request without the header has no account");
}

#[tokio::test]
async fn traceparent_of_an_untrusted_peer_is_ignored() {
    let traced = |sample_ratio: f64, change: fn(&mut FrontendSettings)| {
        Cluster::with(move |settings| {
            let endpoint = "http://127.0.0.1:9".to_owned();
            let tracing = TraceSettings { endpoint, sample_ratio, service: "tandem-test", instance: "i".to_owned() };
            settings.tracer = Tracer::new(tracing, &Metrics::default()).expect("the export address is valid").0;
            change(settings);
        })
    };
    let headers = [("traceparent", TRACEPARENT)];
    let mut cluster = traced(0.0, |_| {}).await;
    let joined = generate_request(&mut cluster, &headers, json!({})).await.traceparent;
    assert!(joined.contains(TRACE_ID) && joined.ends_with("-01"), "a program on this machine is trusted: {joined}");
    let mut cluster = traced(0.0, untrusted).await;
    assert_eq!(generate_request(&mut cluster, &headers, json!({})).await.traceparent, "", "the request is not sampled");
    let mut cluster = traced(1.0, untrusted).await;
    let own = generate_request(&mut cluster, &headers, json!({})).await.traceparent;
    assert!(own.ends_with("-01") && !own.contains(TRACE_ID), "the request is sampled in a new trace: {own}");
}
