//! Where requests are placed, and how they are counted.

use crate::rig::{Gateway, Picked, until};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use tandem::ServedProcess;
use tandem_frontend::CacheIsolation;
use tandem_proto::v1::{
    Failure, FailureReason, RoutePrompt, RouteRequest, route_reply, route_request::Message, router_client::RouterClient,
};
use tandem_tests::fake_vllm::FakeSettings;
use tokio_stream::wrappers::ReceiverStream;

/// Returns a text of full blocks of the engine, so that texts which begin with it differ in whole blocks only.
fn document(number: usize) -> String {
    format!("{:<256}", format!("document {number}: {}", format!("word{number} ").repeat(40)))
}

fn cached(usage: &Value) -> u64 {
    usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default()
}

fn metric(gateway: &Gateway, name: &str) -> f64 {
    let page = gateway.cluster.metrics().render();
    page.lines().filter_map(|line| line.strip_prefix(name)?.rsplit(' ').next()?.parse::<f64>().ok()).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn questions_about_a_document_reach_the_engine_that_has_it() -> Result<()> {
    let gateway = Gateway::start(3).await?;
    let mut engines = BTreeSet::new();
    for number in 0..8 {
        let document = document(number);
        let (engine, _) = gateway.complete(&format!("{document}first?"), &[]).await?;
        engines.insert(engine);
        gateway.indexed().await?;
        for question in 1..5 {
            let (asked, usage) = gateway.complete(&format!("{document}question {question}?"), &[]).await?;
            assert_eq!(asked, engine, "document {number}, question {question}");
            assert!(cached(&usage) >= document.len() as u64 / 32 * 32, "{usage}");
            gateway.indexed().await?;
        }
    }
    assert!(engines.len() > 1, "the documents are spread: {engines:?}");
    assert_eq!(metric(&gateway, "tandem_router_overlap_over_tokens_total"), 0.0, "the engines found what was promised");
    assert_eq!(metric(&gateway, "tandem_frontend_request_cached_tokens_count"), 40.0);
    assert!(metric(&gateway, "tandem_frontend_cached_tokens_total{source=\"worker\"") > 0.0);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn conversations_are_rendered_as_the_engine_renders_them() -> Result<()> {
    let gateway = Gateway::start(2).await?;
    let mut messages = vec![json!({ "role": "user", "content": document(1) })];
    let mut first = None;
    for turn in 0..3 {
        let body = json!({ "model": "fake", "messages": messages, "max_tokens": 4, "stream": true }).to_string();
        let path = "/v1/chat/completions";
        let (mut exchange, picked) = gateway.request(path, &[], body.as_bytes()).await?;
        let (endpoint, body) = picked.sent()?;
        assert_eq!(*first.get_or_insert_with(|| endpoint.clone()), endpoint, "turn {turn}");
        let answer = String::from_utf8(exchange.raw_answer(&endpoint, path, body).await?)?;
        assert!(answer.ends_with("data: [DONE]\n\n"), "{answer}");
        messages.push(json!({ "role": "assistant", "content": "yes" }));
        messages.push(json!({ "role": "user", "content": format!("turn {turn}") }));
        gateway.indexed().await?;
    }
    assert_eq!(metric(&gateway, "tandem_router_overlap_over_tokens_total"), 0.0);
    assert!(metric(&gateway, "tandem_frontend_cached_tokens_total{source=\"worker\"") > 400.0);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_that_restarts_finds_the_caches_again() -> Result<()> {
    let gateway = Gateway::start(3).await?;
    let mut places = Vec::new();
    for number in 0..4 {
        places.push(gateway.complete(&document(number), &[]).await?.0);
        gateway.indexed().await?;
    }
    let gateway = gateway.restart().await?;
    gateway.indexed().await?;
    for (number, place) in places.into_iter().enumerate() {
        let (engine, usage) = gateway.complete(&document(number), &[]).await?;
        assert_eq!(engine, place, "document {number}");
        assert!(cached(&usage) > 0, "{usage}");
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_whose_client_leaves_ends_the_booking_at_once() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let body = json!({ "model": "fake", "prompt": document(1), "max_tokens": 400, "stream": true }).to_string();
    let (before_answer, _) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
    let (mut in_answer, _) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
    in_answer.response_head("200", Default::default()).await?;
    in_answer.response_chunk(b"data: {}\n\n", false).await?;
    assert_eq!(gateway.bookings().await?, 2);
    drop(in_answer);
    until("one booking has ended", async || Ok(gateway.bookings().await? == 1)).await?;
    drop(before_answer);
    until("both bookings have ended", async || Ok(gateway.bookings().await? == 0)).await?;
    assert_eq!(metric(&gateway, "tandem_frontend_inflight_sequences"), 0.0);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_in_flight_are_spread_although_engines_report_late() -> Result<()> {
    let gateway = Gateway::start(2).await?;
    let (mut exchanges, mut places) = (Vec::new(), [0; 2]);
    for number in 0..8 {
        let body = json!({ "model": "fake", "prompt": document(number), "max_tokens": 400 }).to_string();
        let (exchange, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        places[gateway.index_of(&picked.sent()?.0)?] += 1;
        exchanges.push(exchange);
    }
    assert_eq!(places, [4, 4], "no request has reached an engine, so only the bookings count");
    assert_eq!(gateway.bookings().await?, 8);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn accounts_share_no_cached_prompts_and_a_client_cannot_choose_its_account() -> Result<()> {
    let fake = FakeSettings::default();
    let gateway = Gateway::with(1, fake, |settings| {
        let tenants = &mut settings.frontend.tenants;
        tenants.account_header = Some("x-account".to_owned());
        tenants.cache_isolation = Some(CacheIsolation::Account);
        tenants.trusted_proxies = vec!["127.0.0.0/8".parse().expect("the network is valid")];
    })
    .await?;
    for (account, found) in [("a", false), ("a", true), ("b", false), ("b", true)] {
        let (_, usage) = gateway.complete(&document(1), &[("x-account", account)]).await?;
        assert_eq!(cached(&usage) > 0, found, "{account}: {usage}");
        gateway.indexed().await?;
    }
    let salts: BTreeSet<String> = gateway.engines[0].seen().iter().map(|body| body["cache_salt"].to_string()).collect();
    assert_eq!(salts.len(), 2, "{salts:?}");
    // The server would answer this body from the cache that all accounts share.
    let (_, unread) = gateway.request("/v1/completions", &[("x-account", "a")], b"{\"prompt\": 1, \"model\": []}").await?;
    assert_eq!(unread.status(), 400, "{unread:?}");
    // So would it with this one, whatever the header says.
    let encoded = [("x-account", "a"), ("content-encoding", "gzip")];
    let (_, unread) = gateway.request("/v1/completions", &encoded, br#"{"model": "fake", "prompt": "a"}"#).await?;
    assert_eq!(unread.status(), 415, "{unread:?}");
    let explained = [("x-account", "a"), ("x-tandem-explain", "true")];
    let (_, explained) = gateway.request("/v1/completions", &explained, br#"{"model": "fake", "prompt": "a"}"#).await?;
    assert_eq!(explained.status(), 403, "the server would answer it: {explained:?}");
    let both = [("x-account", "a"), ("x-account", "b")];
    let (_, twice) = gateway.request("/v1/completions", &both, b"{}").await?;
    assert_eq!(twice.status(), 400, "one of the two may come from the client: {twice:?}");
    gateway.cluster.stop().await;

    let open = Gateway::with(1, FakeSettings::default(), |settings| {
        settings.frontend.tenants.account_header = Some("x-account".to_owned());
        settings.frontend.tenants.trusted_proxies = vec!["10.0.0.0/8".parse().expect("the network is valid")];
    })
    .await?;
    let (_, untrusted) = open.request("/v1/completions", &[("x-account", "a")], b"{}").await?;
    assert_eq!(untrusted.status(), 403, "{untrusted:?}");
    open.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn salt_of_a_client_separates_its_prompts_and_is_replaced() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    for (salt, found) in [(None, false), (Some("mine"), false), (Some("mine"), true), (None, true)] {
        let body = json!({ "model": "fake", "cache_salt": salt, "prompt": document(2), "max_tokens": 1 }).to_string();
        let (mut exchange, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        let (endpoint, body) = picked.sent()?;
        let sent: Value = serde_json::from_slice(&body)?;
        assert_eq!(sent["cache_salt"].as_str().map(str::len), Some(80), "{sent}");
        let answer = exchange.answer(&endpoint, "/v1/completions", body).await?;
        assert_eq!(cached(&answer["usage"]) > 0, found, "{salt:?}: {answer}");
        gateway.indexed().await?;
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn model_and_salt_that_are_too_long_are_refused() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    for (model, salt, expected) in
        [(1_024, 256, None), (1_025, 1, Some("'model'")), (1, 257, Some("'cache_salt'")), (1, 0, Some("'cache_salt'"))]
    {
        let body = json!({ "model": "m".repeat(model), "cache_salt": "s".repeat(salt), "prompt": "a" }).to_string();
        let (_, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        match (expected, picked) {
            (None, Picked::Sent { .. }) => {}
            (Some(field), Picked::Refused { status: 400, body, .. }) => assert!(body.contains(field), "{body}"),
            (_, other) => anyhow::bail!("{model} and {salt}: {other:?}"),
        }
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_is_counted_also_if_the_engine_does_not_report_cached_tokens() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    for (details, cached) in [("null", 0.0), (r#"{"cached_tokens":3}"#, 1.0)] {
        let body = json!({ "model": "fake", "prompt": document(1), "max_tokens": 4 }).to_string();
        let (mut exchange, _) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        exchange.response_head("200", Default::default()).await?;
        let usage = format!(r#"{{"usage":{{"prompt_tokens":50,"completion_tokens":4,"prompt_tokens_details":{details}}}}}"#);
        exchange.response_chunk(usage.as_bytes(), true).await?;
        until("the booking has ended", async || Ok(gateway.bookings().await? == 0)).await?;
        let answers = 1.0 + cached;
        assert_eq!(metric(&gateway, "tandem_frontend_prompt_tokens_total"), 50.0 * answers);
        assert_eq!(metric(&gateway, "tandem_frontend_completion_tokens_total"), 4.0 * answers);
        assert_eq!(metric(&gateway, "tandem_frontend_request_cached_tokens_count"), cached);
    }
    gateway.cluster.stop().await;
    Ok(())
}

/// A client that has the last bytes may close its connection at once. The gateway then resets the stream and sends no end.
#[tokio::test(flavor = "multi_thread")]
async fn usage_is_counted_although_the_client_leaves_after_the_last_bytes() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let usage = r#"{"usage":{"prompt_tokens":50,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":3}}}"#;
    let length = usage.len().to_string();
    let streamed = format!("data: {usage}\n\ndata: [DONE]\n\n");
    for (answers, (headers, answer)) in
        [(&[(":status", "200"), ("content-length", &*length)][..], usage), (&[(":status", "200")], &*streamed)]
            .into_iter()
            .enumerate()
    {
        let body = json!({ "model": "fake", "prompt": document(1), "max_tokens": 4 }).to_string();
        let (mut exchange, _) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        exchange.response_headers(headers, Default::default()).await?;
        let (first, last) = answer.as_bytes().split_at(9);
        exchange.response_chunk(first, false).await?;
        assert_eq!(gateway.bookings().await?, 1);
        exchange.response_chunk(last, false).await?;
        drop(exchange);
        until("the booking has ended", async || Ok(gateway.bookings().await? == 0)).await?;
        assert_eq!(metric(&gateway, "tandem_frontend_request_cached_tokens_count"), answers as f64 + 1.0);
    }
    gateway.cluster.stop().await;
    Ok(())
}

/// A server that is gone fails its requests at once, so by its load alone it would be the best one until the worker's check finds it gone.
#[tokio::test(flavor = "multi_thread")]
async fn server_that_the_gateway_cannot_reach_gets_no_further_requests() -> Result<()> {
    let gateway = Gateway::start(2).await?;
    // A gateway's time limit and its own overload are not the server's fault.
    for headers in [&[(":status", "504")][..], &[(":status", "503"), ("x-envoy-overloaded", "true")]] {
        for number in 0..8 {
            let body = json!({ "model": "fake", "prompt": document(number), "max_tokens": 4 }).to_string();
            let (mut exchange, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
            picked.sent()?;
            exchange.response_headers(headers, Default::default()).await?;
            exchange.response_chunk(b"{}", true).await?;
        }
    }
    assert_eq!(metric(&gateway, "tandem_router_breaker_opened_total"), 0.0);
    let mut failed = [0; 2];
    for number in 0..20 {
        let body = json!({ "model": "fake", "prompt": document(number), "max_tokens": 4 }).to_string();
        let (mut exchange, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        let engine = gateway.index_of(&picked.sent()?.0)?;
        exchange.response_head(if engine == 0 { "503" } else { "200" }, Default::default()).await?;
        exchange.response_chunk(b"{}", true).await?;
        failed[engine] += 1;
        until("the booking has ended", async || Ok(gateway.bookings().await? == 0)).await?;
    }
    assert!(failed[0] <= 4 && failed[1] >= 16, "{failed:?}: three faults open the circuit for a second or two");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn placement_on_observed_workers_is_explained_at_the_admin_port() -> Result<()> {
    let gateway = Gateway::with(2, FakeSettings::default(), |settings| {
        settings.picker.iter_mut().for_each(|picker| picker.admin_listen = Some(([127, 0, 0, 1], 0).into()));
    })
    .await?;
    let (engine, _) = gateway.complete(&document(1), &[]).await?;
    gateway.indexed().await?;
    let url = format!("http://{}/v1/completions", gateway.cluster.admin.context("there is an admin port")?);
    let body = json!({ "model": "fake", "prompt": document(1), "max_tokens": 1 });
    let request = reqwest::Client::new().post(url).header("x-tandem-explain", "true").json(&body);
    let explained: Value = serde_json::from_str(&request.send().await?.text().await?)?;
    let prompt = &explained["prompts"][0];
    assert_eq!(prompt["decode_worker"], format!("decode-{engine}"), "{explained}");
    assert_eq!(prompt["workers"].as_array().map(Vec::len), Some(2), "{explained}");
    assert_eq!(gateway.bookings().await?, 0);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn router_places_no_request_of_a_frontend_on_an_observed_worker() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let prompt =
        RoutePrompt { request_id: "r".to_owned(), model: "fake".to_owned(), prompt_tokens: 20, samples: 1, ..Default::default() };
    let (sender, receiver) = tokio::sync::mpsc::channel(1);
    sender.send(RouteRequest { message: Some(Message::Prompt(prompt)) }).await?;
    let mut router = RouterClient::new(gateway.cluster.to_router());
    let mut replies = router.route(ReceiverStream::new(receiver)).await?.into_inner();
    let reply = replies.message().await?.context("the router closed the stream")?.message;
    let Some(route_reply::Message::Failure(Failure { reason, .. })) = reply else { anyhow::bail!("placed: {reply:?}") };
    assert_eq!(reason, i32::from(FailureReason::NoWorker));
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn observed_worker_reports_requests_that_no_picker_has_placed() -> Result<()> {
    let fake = FakeSettings { step: std::time::Duration::from_millis(20), ..FakeSettings::default() };
    let gateway = Gateway::with(2, fake, |_| {}).await?;
    let body = json!({ "model": "fake", "prompt": "hello", "max_tokens": 3_000, "stream": true });
    let url = format!("{}/v1/completions", gateway.engines[0].url());
    let client = reqwest::Client::new();
    let mut running = Vec::new();
    for _ in 0..3 {
        running.push(client.post(&url).json(&body).send().await?);
    }
    until("the router knows the requests", async || {
        let loads = gateway.view().await?.workers.into_iter().filter_map(|worker| worker.load);
        Ok({ loads }.any(|load| load.running_sequences == 3))
    })
    .await?;
    let (engine, _) = gateway.complete("a request of the gateway", &[]).await?;
    assert_eq!(engine, 1, "the other engine is idle");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_without_a_prompt_that_the_picker_reads_go_to_any_engine_unchanged() -> Result<()> {
    let gateway = Gateway::start(2).await?;
    let long = json!({ "model": "fake", "prompt": "x".repeat(300 << 10) }).to_string();
    for (path, body) in [
        ("/v1/embeddings", r#"{"model":"fake","input":"a"}"#),
        ("/v1/completions", "this is no JSON"),
        ("/v1/completions", "[1, 2]"),
        ("/v1/completions", ""),
        ("/v1/completions", r#"{"model": 5}"#),
        ("/v1/other?a=b", ""),
    ] {
        let (_, picked) = gateway.request(path, &[], body.as_bytes()).await?;
        assert_eq!(picked.sent()?.1, body.as_bytes(), "{path}");
    }
    for body in [r#"{"model":"unknown","prompt":"a"}"#, r#"{"model":"fake","messages":[{"role":"user"}]}"#, &long] {
        let (_, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        let mut sent: Value = serde_json::from_slice(&picked.sent()?.1)?;
        assert!(sent.as_object_mut().is_some_and(|fields| fields.remove("cache_salt").is_some()));
        assert_eq!(sent, serde_json::from_str::<Value>(body)?);
    }
    until("no booking is left", async || Ok(gateway.bookings().await? == 0)).await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn request_for_a_lora_reaches_a_server_that_has_it_and_its_cache() -> Result<()> {
    let gateway = Gateway::with(2, FakeSettings { loras: vec!["sql".to_owned()], ..FakeSettings::default() }, |_| {}).await?;
    let body = json!({ "model": "sql", "prompt": document(1), "max_tokens": 4 }).to_string();
    let ask = async || {
        let (mut exchange, picked) = gateway.request("/v1/completions", &[], body.as_bytes()).await?;
        let (endpoint, body) = picked.sent()?;
        let answer = exchange.answer(&endpoint, "/v1/completions", body).await?;
        gateway.indexed().await?;
        anyhow::Ok((gateway.index_of(&endpoint)?, cached(&answer["usage"])))
    };
    let (first, found) = ask().await?;
    assert_eq!(found, 0);
    let (second, found) = ask().await?;
    assert_eq!(second, first);
    assert!(found > 0);
    let (_, usage) = gateway.complete(&document(1), &[]).await?;
    assert_eq!(cached(&usage), 0, "the base model computes other KV");
    gateway.engines[first].unload_lora("sql");
    until("the other engine gets the request", async || Ok(ask().await?.0 != first)).await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_with_an_image_is_placed_by_load_and_reaches_the_server_with_a_salt() -> Result<()> {
    let gateway = Gateway::with(1, FakeSettings { images: true, ..FakeSettings::default() }, |_| {}).await?;
    let rendered = gateway.engines[0].renders().len();
    let image = json!({ "type": "image_url", "image_url": { "url": "data:image/png;base64,iVBORw0KGgo=" } });
    let chat = json!({ "model": "fake", "messages": [{ "role": "user", "content": [image] }] });
    let (_, picked) = gateway.request("/v1/chat/completions", &[], chat.to_string().as_bytes()).await?;
    let mut sent: Value = serde_json::from_slice(&picked.sent()?.1)?;
    assert!(sent.as_object_mut().is_some_and(|fields| fields.remove("cache_salt").is_some()));
    assert_eq!(sent, chat);
    assert_eq!(gateway.engines[0].renders().len(), rendered, "the picker asks no server to render an image");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_says_what_an_engine_lacks() -> Result<()> {
    for (fake, problem) in [(FakeSettings { events: false, ..FakeSettings::default() }, "--kv-events-config")] {
        let refused = Gateway::with(1, fake, |_| {}).await.err().context("the engine was accepted")?;
        assert!(format!("{refused:#}").contains(problem), "{refused:#}");
    }
    let named = Gateway::with(1, FakeSettings::default(), |settings| {
        settings.worker.external.engine_url[0] = settings.worker.external.engine_url[0].replace("127.0.0.1", "localhost");
    });
    let refused = named.await.err().context("a name was accepted")?.to_string();
    assert!(refused.contains("ip:port"), "{refused}");
    let ranks = Gateway::with(1, FakeSettings { ranks: 2, ..FakeSettings::default() }, |_| {});
    let refused = ranks.await.err().context("an engine with ranks was accepted")?;
    assert!(format!("{refused:#}").contains("data-parallel ranks"), "{refused:#}");
    Ok(())
}
