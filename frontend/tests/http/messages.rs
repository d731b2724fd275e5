//! Anthropic's Messages API.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1::finished::FinishReason;
use tandem_text::ServedModel;

const MESSAGES: &str = "/v1/messages";
const COUNT: &str = "/v1/messages/count_tokens";
const IM_END: u32 = 257;

fn message(options: Value) -> Value {
    merged(json!({ "model": "m", "max_tokens": 50, "messages": [{ "role": "user", "content": "Hi" }] }), options)
}

#[tokio::test]
async fn message_has_anthropics_format_and_its_input_counts_add_up() {
    let mut cluster = Cluster::start().await;
    let options = json!({
        "system": [{ "type": "text", "text": "x-anthropic-billing-header: cc_version=1" }, { "type": "text", "text": "Be brief.", "cache_control": { "type": "ephemeral" } }],
        "temperature": 0.5, "top_p": 0.9, "top_k": 7, "metadata": { "user_id": "u" }, "stop_sequences": ["END"],
    });
    let headers = [("anthropic-version", "2023-06-01"), ("x-api-key", "k"), ("x-tandem-details", "true")];
    let body = message(options).to_string();
    let frontend = cluster.frontend;
    let reply = tokio::spawn(async move { send(frontend, Method::POST, "/v1/messages?beta=true", &headers, body.into()).await });
    let call = cluster.call().await;
    let prompt = text(&call.request.prompt);
    assert_eq!(prompt, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let sampling = call.request.sampling.clone().expect("the call has sampling settings");
    assert_eq!((sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.top_k), (Some(50), 0.5, 0.9, 7));
    call.begin(Some(16)).await;
    call.send(tokens(0, "grüß".as_bytes())).await;
    call.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
    let reply = soon(reply).await.expect("the client task runs");
    let id = reply.header("request-id").expect("Anthropic's clients read the request-id").to_owned();
    let (status, mut answer) = reply.json().await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    assert_eq!(answer["tandem"]["cached_tokens_source"], "worker");
    answer.as_object_mut().expect("the answer is an object").remove("tandem");
    let input_tokens = call.request.prompt.len() - 16;
    assert_eq!(
        answer,
        json!({
            "id": format!("msg_{id}"), "type": "message", "role": "assistant", "model": "m",
            "content": [{ "type": "text", "text": "grüß" }], "stop_reason": "end_turn", "stop_sequence": null,
            "usage": {
                "input_tokens": input_tokens, "cache_creation_input_tokens": 0, "cache_read_input_tokens": 16, "output_tokens": 7,
            },
        })
    );
    assert!(cluster.metric(r#"tandem_frontend_requests_total{endpoint="messages",model="m",code="200"} 1"#).await);
}

#[tokio::test]
async fn streamed_message_has_anthropics_events_in_order() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(MESSAGES, message(json!({ "stream": true, "stop_sequences": ["END"] })));
    let call = cluster.call().await;
    let prompt_tokens = call.request.prompt.len();
    call.begin(Some(16)).await;
    call.send(tokens(0, b"ab")).await;
    call.send(tokens(0, b"cEND")).await;
    let reply = soon(reply).await.expect("the client task runs");
    let events = reply.named_events().await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "message_start",
            "content_block_start",
            "content_block_delta",
            "content_block_delta",
            "content_block_stop",
            "message_delta",
            "message_stop"
        ]
    );
    assert!(events.iter().all(|(name, data)| data["type"] == name.as_str()), "{events:?}");
    let start = &events[0].1["message"];
    assert_eq!((&start["content"], &start["stop_reason"], &start["role"]), (&json!([]), &Value::Null, &json!("assistant")));
    assert_eq!(start["usage"]["cache_read_input_tokens"], 16);
    assert_eq!(events[1].1["content_block"], json!({ "type": "text", "text": "" }));
    let texts: String = events.iter().filter_map(|(_, data)| data["delta"]["text"].as_str()).collect();
    assert_eq!(texts, "abc");
    let end = &events[5].1;
    assert_eq!(end["delta"], json!({ "stop_reason": "stop_sequence", "stop_sequence": "END" }));
    let usage = &end["usage"];
    let parts =
        ["input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"].map(|part| usage[part].as_u64().unwrap_or(0));
    assert_eq!((parts.iter().sum::<u64>(), usage["output_tokens"].as_u64()), (prompt_tokens as u64, Some(6)));
}

#[tokio::test]
async fn answer_at_its_limit_of_tokens_stops_with_max_tokens() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(MESSAGES, message(json!({})));
    cluster.call().await.answer(Some(0), "a").await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!((&answer["stop_reason"], &answer["stop_sequence"]), (&json!("max_tokens"), &Value::Null));
}

#[tokio::test]
async fn answer_begins_with_the_routers_estimate_if_the_cached_tokens_are_reported_late() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(MESSAGES, message(json!({ "stream": true })));
    let call = cluster.call().await;
    let prompt_tokens = call.request.prompt.len();
    call.begin_uncounted().await;
    call.send(tokens(0, b"ab")).await;
    call.send(scheduled(Some(0))).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let events = soon(reply).await.expect("the client task runs").named_events().await;
    let start = &events[0].1["message"];
    let first = &start["usage"];
    // The fake router places each prompt on a worker that has a block of it.
    assert_eq!((&first["cache_read_input_tokens"], &first["input_tokens"]), (&json!(16), &json!(prompt_tokens - 16)));
    assert_eq!(start["tandem"], json!({ "cached_tokens_source": "router_estimate" }));
    let last = &events.iter().find(|(name, _)| name == "message_delta").expect("the stream has counts").1["usage"];
    assert_eq!((&last["cache_read_input_tokens"], &last["input_tokens"]), (&json!(0), &json!(prompt_tokens)));
}

#[tokio::test]
async fn tool_use_and_results_of_earlier_turns_are_in_the_prompt() {
    let model = ServedModel::sim("m").with_context_length(8192);
    let mut cluster = Cluster::with(|settings| settings.models = vec![model]).await;
    let messages = json!([
        { "role": "user", "content": [{ "type": "text", "text": "weather?" }] },
        { "role": "assistant", "content": [
            { "type": "thinking", "thinking": "hm", "signature": "s" },
            { "type": "text", "text": "I look." },
            { "type": "tool_use", "id": "t1", "name": "weather", "input": { "city": "Bern" } },
        ] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t1", "content": [{ "type": "text", "text": "no such city" }], "is_error": true },
            { "type": "text", "text": "try again" },
        ] },
    ]);
    let tools = json!([{ "name": "weather", "description": "d", "input_schema": { "type": "object", "properties": { "city": { "type": "string" } } } }]);
    let reply = cluster.spawn_post(MESSAGES, message(json!({ "messages": messages, "tools": tools })));
    let call = cluster.call().await;
    let prompt = text(&call.request.prompt);
    for expected in ["weather?", "I look.", r#""city""#, "Bern", "Error: no such city", "try again"] {
        assert!(prompt.contains(expected), "{expected} in {prompt}");
    }
    call.answer(Some(0), "a").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

#[tokio::test]
async fn last_message_of_the_assistant_is_continued() {
    let mut cluster = Cluster::start().await;
    let messages = json!([{ "role": "user", "content": "Hi" }, { "role": "assistant", "content": "{\"a\":" }]);
    let reply = cluster.spawn_post(MESSAGES, message(json!({ "messages": messages })));
    let call = cluster.call().await;
    assert!(text(&call.request.prompt).ends_with("<|im_start|>assistant\n{\"a\":"), "{}", text(&call.request.prompt));
    call.answer(Some(0), "1}").await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(answer["content"][0]["text"], "1}");
}

#[tokio::test]
async fn count_tokens_counts_the_prompt_of_the_same_request() {
    let mut cluster = Cluster::start().await;
    let (status, counted) =
        cluster.post(COUNT, &json!({ "model": "m", "messages": [{ "role": "user", "content": "Hi" }] })).await.json().await;
    assert_eq!(status, StatusCode::OK, "{counted}");
    let reply = cluster.spawn_post(MESSAGES, message(json!({})));
    let call = cluster.call().await;
    assert_eq!(counted, json!({ "input_tokens": call.request.prompt.len() }));
    call.answer(Some(0), "a").await;
    soon(reply).await.expect("the client task runs");
}

#[tokio::test]
async fn malformed_messages_are_refused_in_anthropics_shape() {
    let mut cluster = Cluster::start().await;
    let block =
        |block: Value| message(json!({ "messages": [{ "role": "user", "content": [{ "type": "text", "text": "a" }, block] }] }));
    for (body, named) in [
        (json!({ "model": "m", "messages": [{ "role": "user", "content": "a" }] }), "max_tokens"),
        (message(json!({ "max_tokens": 0 })), "max_tokens"),
        (message(json!({ "max_tokens": 600 })), "input length and `max_tokens` exceed context limit: "),
        (message(json!({ "messages": [{ "role": "user", "content": "x".repeat(600) }] })), "prompt is too long: "),
        (message(json!({ "messages": [] })), "messages"),
        (message(json!({ "messages": [{ "role": "tool", "content": "a" }] })), "messages[0].role"),
        (message(json!({ "messages": [{ "role": "user" }] })), "messages[0].content"),
        (
            block(json!({ "type": "image", "source": { "type": "base64" } })),
            "'messages[0].content[1]' is a block of type 'image'",
        ),
        (block(json!({ "type": "document" })), "'document'"),
        (block(json!({ "type": "tool_use", "id": "a", "name": "b", "input": {} })), "'tool_use'"),
        (block(json!({ "type": "tool_result", "content": "a" })), "messages[0].content[1].tool_use_id"),
        (
            block(json!({ "type": "tool_result", "tool_use_id": "t", "content": [{ "text": "x" }] })),
            "messages[0].content[1].content[0]",
        ),
        (message(json!({ "system": [{ "type": "image" }] })), "system[0]"),
        (
            message(
                json!({ "tools": [{ "type": "web_search_20250305", "name": "web_search" }], "tool_choice": { "type": "any" } }),
            ),
            "tool_choice",
        ),
        (message(json!({ "tools": [{ "input_schema": {} }] })), "tools[0].name"),
        (message(json!({ "tools": [{ "name": "a", "input_schema": 1 }] })), "tools[0].input_schema"),
        (message(json!({ "tool_choice": { "type": "some" } })), "tool_choice.type"),
        (message(json!({ "tool_choice": { "type": "any" } })), "tool_choice"),
        (message(json!({ "thinking": { "type": "maybe" } })), "thinking.type"),
        (message(json!({ "stop_sequences": [""] })), "stop_sequences"),
        (message(json!({ "n": 2 })), "'n'"),
        (message(json!({ "mcp_servers": [{ "url": "x" }] })), "mcp_servers"),
        (message(json!({ "temperature": 9 })), "temperature"),
    ] {
        let reply = cluster.post(MESSAGES, &body).await;
        let id = reply.header("x-request-id").map(str::to_owned);
        let (status, error) = reply.json().await;
        let message = error["error"]["message"].as_str().unwrap_or_default();
        assert_eq!((status, &error["error"]["type"]), (StatusCode::BAD_REQUEST, &json!("invalid_request_error")), "{error}");
        assert!(message.contains(named), "{named}: {error}");
        assert_eq!((&error["type"], error["request_id"].as_str()), (&json!("error"), id.as_deref()));
    }
    assert!(cluster.no_call());
}

#[tokio::test]
async fn stored_conversation_is_refused_with_the_code_that_makes_the_sdk_send_all_messages() {
    let mut cluster = Cluster::start().await;
    for thread in [json!({ "type": "create" }), json!({ "type": "continue", "previous_message_id": "msg_1" })] {
        let (status, error) = cluster.post(MESSAGES, &message(json!({ "thread": thread }))).await.json().await;
        assert_eq!((status, &error["error"]["type"]), (StatusCode::BAD_REQUEST, &json!("invalid_request_error")), "{error}");
        assert_eq!(error["error"]["details"]["error_code"], "thread_unsupported_request");
    }
    assert!(cluster.no_call());
}

#[tokio::test]
async fn all_errors_below_v1_messages_have_anthropics_shape() {
    let cluster = Cluster::with(|settings| settings.concurrent_sequences = 0).await;
    let huge = vec![b' '; 33 << 20];
    let valid = message(json!({})).to_string();
    let unknown = message(json!({ "model": "x" })).to_string();
    for (method, path, headers, body, status, kind) in [
        (Method::POST, MESSAGES, &[][..], huge, 413, "request_too_large"),
        (Method::POST, MESSAGES, &[("content-type", "text/plain")], b"a".to_vec(), 415, "invalid_request_error"),
        (Method::POST, MESSAGES, &[], b"{".to_vec(), 400, "invalid_request_error"),
        (Method::POST, MESSAGES, &[], unknown.clone().into(), 404, "not_found_error"),
        (Method::POST, COUNT, &[], unknown.into(), 404, "not_found_error"),
        (Method::POST, MESSAGES, &[], valid.clone().into(), 400, "invalid_request_error"),
        (Method::POST, MESSAGES, &[("origin", "https://evil.example")], valid.into(), 403, "permission_error"),
        (Method::GET, MESSAGES, &[], Vec::new(), 405, "invalid_request_error"),
        (Method::GET, "/v1/messages/batches", &[], Vec::new(), 404, "not_found_error"),
        (Method::GET, "/v1/messages/other", &[], Vec::new(), 404, "not_found_error"),
    ] {
        let (found, error) = cluster.send(method, path, headers, body).await.json().await;
        assert_eq!((found.as_u16(), &error["type"], &error["error"]["type"]), (status, &json!("error"), &json!(kind)), "{error}");
    }
}

#[tokio::test]
async fn overload_is_an_overloaded_error_with_retry_after() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 1).await;
    let running = cluster.spawn_post(MESSAGES, message(json!({})));
    let call = cluster.call().await;
    let refused = cluster.post(MESSAGES, &message(json!({}))).await;
    assert_eq!((refused.status().as_u16(), refused.header("retry-after")), (503, Some("1")));
    assert_eq!(refused.json().await.1["error"]["type"], "overloaded_error");
    call.answer(Some(0), "x").await;
    soon(running).await.expect("the client task runs");
}

#[tokio::test]
async fn failure_within_a_stream_is_an_error_event() {
    let mut cluster = Cluster::with(|settings| settings.resumes = 0).await;
    let reply = cluster.spawn_post(MESSAGES, message(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    call.fail(tonic::Status::internal("lost")).await;
    let events = soon(reply).await.expect("the client task runs").named_events().await;
    let (name, error) = events.last().expect("the stream has events");
    assert_eq!((name.as_str(), &error["type"], &error["error"]["type"]), ("error", &json!("error"), &json!("overloaded_error")));
}

#[tokio::test]
async fn abandoned_message_ends_on_the_worker() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(MESSAGES, message(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    let mut reply = soon(reply).await.expect("the client task runs");
    reply.more().await;
    drop(reply);
    call.closed().await;
    cluster.routes_closed(1).await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="messages",model="m",code="499"} 1"#).await;
}
