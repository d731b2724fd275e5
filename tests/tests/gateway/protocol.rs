//! The protocol between a gateway and an endpoint picker: a test for each MUST of the Gateway API Inference Extension's proposal 004, and what
//! the picker does with messages that no gateway sends.

use crate::rig::{Gateway, Picked, chunks, head, message, served, until};
use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::time::Duration;
use tandem::{ServedProcess, settings::UpSettings};
use tandem_proto::{
    ext_proc::{
        BodySendMode, HeaderMap, HeaderValue, HttpBody, HttpHeaders, HttpTrailers, ProcessingRequest, ProtocolConfiguration,
        processing_request::Request, processing_response::Response,
    },
    health::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient},
};
use tandem_tests::fake_vllm::FakeSettings;
use tonic::Code;

fn body(text: &str) -> Vec<u8> {
    json!({ "model": "fake", "prompt": text, "max_tokens": 4 }).to_string().into_bytes()
}

async fn with(engines: usize, change: fn(&mut UpSettings)) -> Result<Gateway> {
    Gateway::with(engines, FakeSettings::default(), change).await
}

#[tokio::test(flavor = "multi_thread")]
async fn endpoint_is_in_the_header_and_in_the_metadata_with_the_same_value() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    // The rig compares both, and checks that a header of the client is overwritten.
    let (_, picked) = gateway.request("/v1/completions", &[("x-gateway-destination-endpoint", "10.9.9.9:1")], &body("a")).await?;
    assert_eq!(picked.sent()?.0, gateway.endpoint(0));
    let mut get = gateway.open([head("GET", "/v1/models", &[], None)]).await?;
    assert_eq!(get.picked().await?.sent()?.0, gateway.endpoint(0));
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn further_endpoints_follow_the_chosen_one_if_the_operator_allows_them() -> Result<()> {
    let gateway = with(3, |settings| {
        settings.picker.iter_mut().for_each(|picker| picker.args.fallback_endpoints = 1);
    })
    .await?;
    let (_, picked) = gateway.request("/v1/completions", &[], &body("a")).await?;
    let endpoints = picked.sent()?.0;
    let list: Vec<usize> = endpoints.split(',').map(|endpoint| gateway.index_of(endpoint)).collect::<Result<_>>()?;
    assert!(list.len() == 2 && list[0] != list[1], "{endpoints}");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn only_endpoints_of_the_subset_are_chosen_and_without_one_the_answer_is_503() -> Result<()> {
    let gateway = with(3, |settings| {
        settings.picker.iter_mut().for_each(|picker| picker.args.fallback_endpoints = 8);
    })
    .await?;
    let all: Vec<String> = (0..3).map(|engine| gateway.endpoint(engine)).collect();
    for round in 0..6 {
        let listed = [&*all[round % 3], "10.9.9.9:80"];
        let text = format!("{round} {}", "the same prompt ".repeat(20));
        let (_, picked) = gateway.request_to(Some(&listed), "/v1/completions", &[], &body(&text)).await?;
        assert_eq!(picked.sent()?.0, all[round % 3], "also no fallback is outside of the subset");
    }
    for empty in [&[][..], &["10.9.9.9:80"], &["nonsense", ""]] {
        let (_, picked) = gateway.request_to(Some(empty), "/v1/completions", &[], &body("a")).await?;
        assert_eq!(picked.status(), 503, "{empty:?}: {picked:?}");
        let mut get = gateway.open([head("GET", "/v1/models", &[], Some(empty))]).await?;
        assert_eq!(get.picked().await?.status(), 503, "{empty:?}");
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn subset_that_is_too_long_is_refused_and_what_is_no_endpoint_is_left_out() -> Result<()> {
    let gateway = Gateway::start(2).await?;
    let (chosen, long) = (gateway.endpoint(1), "9".repeat(65));
    let mut listed = vec![&*long; 2_000];
    listed.push(&chosen);
    let (_, picked) = gateway.request_to(Some(&listed), "/v1/completions", &[], &body("a")).await?;
    assert_eq!(picked.sent()?.0, chosen);
    let (_, picked) = gateway.request_to(Some(&vec![&*chosen; 16_385]), "/v1/completions", &[], &body("a")).await?;
    let Picked::Refused { status: 400, body, .. } = picked else { anyhow::bail!("{picked:?}") };
    assert!(body.contains("at most 16384 endpoints"), "{body}");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn path_that_no_url_may_have_gets_400() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    for (method, path) in [("GET", "/v1/models?<"), ("POST", "/v1/completions?a b"), ("POST", "")] {
        let mut exchange = gateway.open([head(method, path, &[], None)]).await?;
        let Picked::Refused { status: 400, body, .. } = exchange.picked().await? else { anyhow::bail!("{path} was accepted") };
        assert!(body.contains("':path'"), "{body}");
        assert!(exchange.next().await?.is_none(), "nothing follows a refusal");
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_of_the_gateway_itself_ends_the_stream_quietly() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let first = || head("POST", "/v1/completions", &[], None);
    let part = || message(Request::RequestBody(HttpBody { body: body("a")[..9].to_vec().into(), end_of_stream: false }));
    let answer_head = || message(Request::ResponseHeaders(HttpHeaders::default()));
    let answer_body = || message(Request::ResponseBody(HttpBody::default()));
    for messages in [vec![first(), part(), answer_head()], vec![first(), answer_body()], vec![answer_head()]] {
        let mut exchange = gateway.open(messages).await?;
        assert!(exchange.next().await?.is_none(), "the gateway needs no answer");
    }
    let is_idle = || gateway.cluster.metrics().render().lines().any(|line| line == "tandem_frontend_reading_requests 0");
    until("no request is read", async || Ok(is_idle() && gateway.bookings().await? == 0)).await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_503_while_no_endpoint_is_ready() -> Result<()> {
    let mut gateway = Gateway::start(1).await?;
    gateway.engines.clear();
    until("the worker has left", async || Ok(gateway.view().await?.workers.is_empty())).await?;
    let (mut exchange, picked) = gateway.request("/v1/completions", &[], &body("a")).await?;
    let Picked::Refused { status: 503, body, headers } = picked else { anyhow::bail!("{picked:?}") };
    let error: Value = serde_json::from_str(&body)?;
    assert_eq!(error["error"]["code"], "no_worker", "{error}");
    assert!(headers.contains(&("content-type".to_owned(), "application/json".to_owned())), "{headers:?}");
    assert!(headers.iter().any(|(name, _)| name == "retry-after") && !headers.iter().any(|(name, _)| name == "content-length"));
    assert!(exchange.next().await?.is_none(), "nothing follows a refusal");
    let health = |service: &str| HealthCheckRequest { service: service.to_owned() };
    let mut client = HealthClient::new(gateway.channel.clone());
    for (service, status) in [("liveness", ServingStatus::Serving), ("readiness", ServingStatus::NotServing)] {
        assert_eq!(client.check(health(service)).await?.into_inner().status(), status, "{service}");
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn request_that_is_shed_gets_429() -> Result<()> {
    let gateway = with(1, |settings| settings.model.max_concurrent_requests = 2).await?;
    let first = gateway.request("/v1/completions", &[], &body("a")).await?;
    let mut second = gateway.open([head("GET", "/v1/models", &[], None)]).await?;
    second.picked().await?.sent()?;
    for path in ["/v1/completions", "/v1/embeddings"] {
        let (_, picked) = gateway.request(path, &[], &body("b")).await?;
        assert_eq!(picked.status(), 429, "{picked:?}");
    }
    drop((first, second));
    until("a place is free", async || Ok(gateway.bookings().await? == 0)).await?;
    until("requests are taken again", async || Ok(gateway.request("/v1/completions", &[], &body("c")).await?.1.status() == 200))
        .await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn request_is_booked_where_the_gateway_says_it_was_served() -> Result<()> {
    let gateway = with(2, |settings| {
        settings.picker.iter_mut().for_each(|picker| picker.args.fallback_endpoints = 1);
    })
    .await?;
    let (mut exchange, picked) = gateway.request("/v1/completions", &[], &body("a")).await?;
    let endpoints = picked.sent()?.0;
    let (chosen, other) = endpoints.split_once(',').context("two endpoints")?;
    let booked = async || anyhow::Ok((gateway.bookings_at(chosen).await?, gateway.bookings_at(other).await?));
    assert_eq!(booked().await?, (1, 0));
    exchange.response_head("200", served(other)).await?;
    until("the booking has moved", async || Ok(booked().await? == (0, 1))).await?;
    exchange.response_chunk(br#"{"usage":{"prompt_tokens":5}}"#, true).await?;
    until("the booking has ended", async || Ok(gateway.bookings().await? == 0)).await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn booking_moves_once_although_the_gateway_reports_the_endpoint_with_each_chunk() -> Result<()> {
    let gateway = with(2, |settings| {
        settings.picker.iter_mut().for_each(|picker| picker.args.fallback_endpoints = 1);
    })
    .await?;
    let (mut exchange, picked) = gateway.request("/v1/completions", &[], &body("a")).await?;
    let endpoints = picked.sent()?.0;
    let (chosen, other) = endpoints.split_once(',').context("two endpoints")?;
    let booked = async || anyhow::Ok((gateway.bookings_at(chosen).await?, gateway.bookings_at(other).await?));
    exchange.response_head("200", Default::default()).await?;
    exchange.response_chunk(b"data: 1\n\n", false).await?;
    assert_eq!(booked().await?, (1, 0));
    // An endpoint that was not offered changes nothing.
    for reported in [other, other, "10.9.9.9:80", other] {
        let chunk = HttpBody { body: "data: 2\n\n".into(), end_of_stream: false };
        exchange.send_with(Request::ResponseBody(chunk), served(reported)).await?;
        exchange.next().await?.context("the chunk is given back")?;
        until("the booking has moved", async || Ok(booked().await? == (0, 1))).await?;
    }
    assert_eq!(gateway.bookings().await?, 1);
    exchange.response_chunk(b"data: [DONE]\n\n", true).await?;
    until("the booking has ended", async || Ok(gateway.bookings().await? == 0)).await?;
    let page = gateway.cluster.metrics().render();
    assert!(page.lines().any(|line| line == "tandem_router_rebooked_total 1"), "it was booked again for a chunk: {page}");
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn health_is_known_for_its_three_names() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let mut client = HealthClient::new(gateway.channel.clone());
    for service in ["", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"] {
        let health = client.check(HealthCheckRequest { service: service.to_owned() }).await?.into_inner();
        assert_eq!(health.status(), ServingStatus::Serving, "{service}");
    }
    let unknown = client.check(HealthCheckRequest { service: "other".to_owned() }).await.err().context("it is unknown")?;
    assert_eq!(unknown.code(), Code::NotFound);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn every_byte_of_a_large_body_is_given_back_in_pieces_and_a_larger_one_is_refused() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let empty = json!({ "model": "fake", "prompt": "a", "user": "" }).to_string().len();
    let filled =
        |bytes: usize| json!({ "model": "fake", "prompt": "a", "user": "x".repeat(bytes - empty) }).to_string().into_bytes();
    for bytes in [300 << 10, 10 << 20] {
        let sent = filled(bytes);
        assert_eq!(sent.len(), bytes);
        let (_, picked) = gateway.request("/v1/completions", &[], &sent).await?;
        let back = picked.sent()?.1;
        let salt = back.len() - sent.len();
        // Only the salt was added, before the last brace.
        assert!(salt > 80 && salt < 120 && back[..sent.len() - 1] == sent[..sent.len() - 1], "{salt} more bytes");
        assert_eq!(serde_json::from_slice::<Value>(&back)?["user"].as_str().map(str::len), Some(bytes - empty));
    }
    let (_, picked) = gateway.request("/v1/completions", &[], &filled((10 << 20) + 1)).await?;
    assert_eq!(picked.status(), 413, "{picked:?}");
    // A body that the picker does not read has no limit here.
    let (_, picked) = gateway.request("/v1/audio", &[], &vec![7; 11 << 20]).await?;
    assert_eq!(picked.sent()?.1.len(), 11 << 20);
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn answer_is_given_back_chunk_by_chunk_with_its_trailers() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let mut messages = vec![head("POST", "/v1/completions", &[], None)];
    messages.push(message(Request::RequestBody(HttpBody { body: body("a").into(), end_of_stream: false })));
    messages.push(message(Request::RequestTrailers(HttpTrailers {})));
    let mut exchange = gateway.open(messages).await?;
    exchange.picked().await?.sent()?;
    let back: Value = serde_json::from_slice(&exchange.request_body().await?)?;
    assert_eq!(back["prompt"], "a", "the request has trailers");
    exchange.response_head("200", Default::default()).await?;
    // Each chunk comes back before the next one is sent.
    for chunk in ["data: 1\n\n".repeat(20_000), "data: 2\n\n".to_owned()] {
        assert_eq!(exchange.response_chunk(chunk.as_bytes(), false).await?, chunk.as_bytes());
    }
    assert_eq!(gateway.bookings().await?, 1);
    exchange.trailers().await?;
    until("the booking has ended", async || Ok(gateway.bookings().await? == 0)).await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn gateway_that_does_not_hand_over_bodies_gets_no_bytes() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    for mode in [BodySendMode::None, BodySendMode::Streamed, BodySendMode::Buffered] {
        let modes = ProtocolConfiguration { request_body_mode: mode.into(), response_body_mode: mode.into() };
        let first = ProcessingRequest { protocol_config: Some(modes), ..head("POST", "/v1/completions", &[], None) };
        let mut exchange = gateway.open([first]).await?;
        exchange.picked().await?.sent()?;
        if mode != BodySendMode::None {
            exchange.send(Request::RequestBody(HttpBody { body: body("a").into(), end_of_stream: true })).await?;
            let Some(Response::RequestBody(answer)) = exchange.next().await?.and_then(|answer| answer.response) else {
                anyhow::bail!("no answer in mode {mode:?}")
            };
            assert_eq!(answer.response, None, "{mode:?}");
        }
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_that_no_gateway_sends_end_their_stream_and_nothing_else() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let part = || message(Request::RequestBody(HttpBody { body: body("a").into(), end_of_stream: true }));
    let first = || head("POST", "/v1/completions", &[], None);
    let no_path =
        HeaderMap { headers: vec![HeaderValue { key: ":method".to_owned(), value: "POST".to_owned(), ..Default::default() }] };
    let without_path = message(Request::RequestHeaders(HttpHeaders { headers: Some(no_path), end_of_stream: false }));
    let answer = || message(Request::ResponseBody(HttpBody::default()));
    for messages in [
        vec![],
        vec![part()],
        vec![ProcessingRequest::default()],
        vec![message(Request::RequestHeaders(HttpHeaders::default()))],
        vec![without_path],
        vec![ProcessingRequest { observability_mode: true, ..first() }],
        vec![answer()],
        vec![first(), first()],
        vec![first(), part(), first()],
    ] {
        let count = messages.len();
        let mut exchange = gateway.open(messages).await?;
        let ended = loop {
            match exchange.next().await {
                Ok(Some(_)) => {}
                Ok(None) => anyhow::bail!("the stream of {count} messages ended without an error"),
                Err(status) => break status,
            }
        };
        assert!(matches!(ended.code(), Code::InvalidArgument | Code::FailedPrecondition | Code::DeadlineExceeded), "{ended}");
    }
    let odd = [("x\r\ny", "a"), ("x-account", "\u{1}"), ("content-length", "99999999999999999999")];
    let (_, picked) = gateway.request("/v1/completions", &odd, &body("a")).await?;
    picked.sent()?;
    let deep = "[".repeat(200_000) + &"]".repeat(200_000);
    for hostile in
        [deep.as_bytes(), br#"{"prompt":"a","prompt":"b"}"#, b"{\"model\":\"\xff\"}", br#"{"model":"fake","n":1e9,"prompt":"a"}"#]
    {
        let (_, picked) = gateway.request("/v1/completions", &[], hostile).await?;
        assert_eq!(picked.status(), 200, "the server answers: {picked:?}");
    }
    until("no booking is left", async || Ok(gateway.bookings().await? == 0)).await?;
    let (_, picked) = gateway.request("/v1/completions", &[], &body("a")).await?;
    picked.sent()?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn many_streams_that_are_reset_leave_nothing_behind() -> Result<()> {
    let gateway = Gateway::start(2).await?;
    for _ in 0..20 {
        let mut open = Vec::new();
        for _ in 0..20 {
            let mut messages = vec![head("POST", "/v1/completions", &[], None)];
            messages.extend(chunks(&body("a")));
            open.push(gateway.open(messages).await?);
        }
        drop(open);
    }
    until("no booking is left", async || Ok(gateway.bookings().await? == 0)).await?;
    let metrics = || gateway.cluster.metrics().render();
    until("no sequence is reserved", async || {
        Ok(metrics().lines().any(|line| line == "tandem_frontend_inflight_sequences 0")
            && metrics().lines().any(|line| line == "tandem_frontend_reading_requests 0"))
    })
    .await?;
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn picker_that_drains_lets_running_answers_end() -> Result<()> {
    let gateway = Gateway::start(1).await?;
    let (mut exchange, _) = gateway.request("/v1/completions", &[], &body("a")).await?;
    exchange.response_head("200", Default::default()).await?;
    let rest = async {
        exchange.response_chunk(b"data: 1\n\n", false).await?;
        exchange.response_chunk(b"data: 2\n\n", true).await?;
        drop(exchange);
        anyhow::Ok(())
    };
    let (rest, ()) = tokio::join!(rest, gateway.cluster.drain(Duration::from_secs(20)));
    rest
}
