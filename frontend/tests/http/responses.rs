//! OpenAI's Responses API.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1::{Tokens, finished::FinishReason, generate_reply};
use tandem_text::ServedModel;

const RESPONSES: &str = "/v1/responses";
const IM_END: u32 = 257;

fn response(options: Value) -> Value {
    merged(json!({ "model": "m", "input": "Hi" }), options)
}

#[tokio::test]
async fn response_has_openais_format_and_repeats_the_request() {
    let mut cluster = Cluster::start().await;
    let options = json!({
        "instructions": "Be brief.", "max_output_tokens": 50, "temperature": 0.5, "top_p": 0.9, "metadata": { "a": "b" }, "store": true,
        "include": ["reasoning.encrypted_content"], "user": "u", "truncation": "disabled", "reasoning": { "summary": "auto" },
        "stream_options": null, "service_tier": "auto", "prompt_cache_key": "k", "background": false, "previous_response_id": null,
    });
    let reply = cluster.spawn_post(RESPONSES, response(options));
    let call = cluster.call().await;
    let prompt = text(&call.request.prompt);
    assert_eq!(prompt, "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n");
    let sampling = call.request.sampling.clone().expect("the call has sampling settings");
    assert_eq!((sampling.max_tokens, sampling.temperature, sampling.top_p), (Some(50), 0.5, 0.9));
    call.begin(Some(16)).await;
    call.send(tokens(0, "grüß".as_bytes())).await;
    call.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
    let reply = soon(reply).await.expect("the client task runs");
    let id = reply.header("x-request-id").expect("every response has an id").to_owned();
    let (status, mut answer) = reply.json().await;
    assert_eq!(status, StatusCode::OK, "{answer}");
    for field in ["tandem", "created_at", "completed_at"] {
        assert!(!answer[field].is_null(), "{field} in {answer}");
        answer.as_object_mut().expect("the answer is an object").remove(field);
    }
    let prompt_tokens = call.request.prompt.len();
    let own = json!({
        "id": format!("resp_{id}"), "object": "response", "status": "completed", "error": null, "incomplete_details": null, "model": "m",
        "output": [{
            "type": "message", "id": format!("msg_{id}_0"), "status": "completed", "role": "assistant",
            "content": [{ "type": "output_text", "text": "grüß", "annotations": [], "logprobs": [] }],
        }],
        "usage": {
            "input_tokens": prompt_tokens, "input_tokens_details": { "cached_tokens": 16, "cache_write_tokens": 0 },
            "output_tokens": 7, "output_tokens_details": { "reasoning_tokens": 0 }, "total_tokens": prompt_tokens + 7,
        },
    });
    let repeated = json!({
        "background": false, "conversation": null, "instructions": "Be brief.", "max_output_tokens": 50, "max_tool_calls": null,
        "metadata": { "a": "b" }, "parallel_tool_calls": true, "previous_response_id": null, "prompt": null, "prompt_cache_key": "k",
        "reasoning": { "effort": null, "summary": null }, "safety_identifier": null, "service_tier": "default", "store": false,
        "temperature": 0.5, "text": { "format": { "type": "text" }, "verbosity": "medium" }, "tool_choice": "auto", "tools": [],
        "top_logprobs": 0, "top_p": 0.9, "truncation": "disabled", "user": "u",
    });
    assert_eq!(answer, merged(own, repeated));
}

#[tokio::test]
async fn streamed_response_has_openais_events_in_order() {
    let mut cluster = Cluster::start().await;
    let include = json!({ "stream": true, "include": ["message.output_text.logprobs"], "top_logprobs": 2 });
    let reply = cluster.spawn_post(RESPONSES, response(include));
    let call = cluster.call().await;
    assert_eq!(call.request.sampling.as_ref().and_then(|sampling| sampling.logprobs), Some(2));
    call.begin(Some(16)).await;
    call.send(generate_reply::Message::Tokens(Tokens { sample: 0, tokens: likely(b"ab") })).await;
    call.send(generate_reply::Message::Tokens(Tokens { sample: 0, tokens: likely(b"c") })).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let events = soon(reply).await.expect("the client task runs").named_events().await;
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(
        names,
        [
            "response.created",
            "response.in_progress",
            "response.output_item.added",
            "response.content_part.added",
            "response.output_text.delta",
            "response.output_text.delta",
            "response.output_text.done",
            "response.content_part.done",
            "response.output_item.done",
            "response.incomplete"
        ]
    );
    for (index, (name, data)) in events.iter().enumerate() {
        assert_eq!((&data["type"], &data["sequence_number"]), (&json!(name), &json!(index)));
    }
    assert_eq!((&events[0].1["response"]["status"], &events[0].1["response"]["usage"]), (&json!("in_progress"), &Value::Null));
    let item = &events[2].1["item"];
    assert_eq!((&item["status"], &item["content"]), (&json!("in_progress"), &json!([])));
    for (_, data) in &events[3..8] {
        assert_eq!((&data["item_id"], &data["output_index"], &data["content_index"]), (&item["id"], &json!(0), &json!(0)));
    }
    assert_eq!((&events[4].1["delta"], &events[5].1["delta"], &events[6].1["text"]), (&json!("ab"), &json!("c"), &json!("abc")));
    let logprobs = events[4].1["logprobs"].as_array().expect("the delta has logprobs");
    assert_eq!((logprobs.len(), &logprobs[0]["top_logprobs"][1]["token"]), (2, &json!("z")));
    let object = &events[9].1["response"];
    assert_eq!(
        (&object["status"], &object["incomplete_details"]),
        (&json!("incomplete"), &json!({ "reason": "max_output_tokens" }))
    );
    assert_eq!(object["output"][0], events[8].1["item"]);
    let part = &object["output"][0]["content"][0];
    assert_eq!((&part["text"], part["logprobs"].as_array().map(Vec::len)), (&json!("abc"), Some(3)));
    assert_eq!(object["usage"]["input_tokens_details"]["cached_tokens"], 16);
}

#[tokio::test]
async fn input_items_become_the_conversation() {
    let model = ServedModel::sim("m").with_context_length(8192);
    let mut cluster = Cluster::with(|settings| settings.models = vec![model]).await;
    let input = json!([
        { "role": "developer", "content": "Be brief." },
        { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "weather?" }] },
        { "type": "reasoning", "id": "r", "summary": [], "content": [{ "type": "reasoning_text", "text": "hm" }] },
        { "type": "message", "id": "m", "status": "completed", "role": "assistant", "content": [{ "type": "output_text", "text": "I look.", "annotations": [] }] },
        { "type": "function_call", "id": "f", "call_id": "c1", "name": "weather", "arguments": "{\"city\":\"Bern\"}" },
        { "type": "function_call_output", "call_id": "c1", "output": [{ "type": "input_text", "text": "sunny" }] },
    ]);
    let tools = json!([{ "type": "function", "name": "weather", "parameters": { "type": "object", "properties": { "city": { "type": "string" } } }, "strict": false }]);
    let reply = cluster.spawn_post(RESPONSES, response(json!({ "input": input, "tools": tools, "tool_choice": "auto" })));
    let call = cluster.call().await;
    let prompt = text(&call.request.prompt);
    for expected in ["Be brief.", "weather?", "I look.", "Bern", "sunny"] {
        assert!(prompt.contains(expected), "{expected} in {prompt}");
    }
    assert_eq!(prompt.matches("<|im_start|>assistant").count(), 2, "the items of one answer are one message: {prompt}");
    call.answer(Some(0), "a").await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!(answer["tools"], tools);
}

#[tokio::test]
async fn format_of_the_text_is_a_constraint_of_the_answer() {
    let mut cluster = Cluster::start().await;
    let schema = json!({ "type": "object", "properties": { "a": { "type": "boolean" } } });
    let format = json!({ "type": "json_schema", "name": "a", "schema": schema, "strict": true });
    let message = json!({
        "model": "m", "max_tokens": 5, "messages": [{ "role": "user", "content": "Hi" }],
        "output_config": { "format": { "type": "json_schema", "schema": schema } },
    });
    for (path, body) in [(RESPONSES, response(json!({ "text": { "format": format } }))), ("/v1/messages", message)] {
        let reply = cluster.spawn_post(path, body);
        let call = cluster.call().await;
        assert!(call.request.sampling.as_ref().is_some_and(|sampling| sampling.constraint.is_some()), "{path}");
        call.answer(Some(0), "{}").await;
        let (status, answer) = soon(reply).await.expect("the client task runs").json().await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert!(path != RESPONSES || answer["text"]["format"] == format, "{answer}");
    }
}

#[tokio::test]
async fn input_tokens_are_counted_for_the_same_request() {
    let mut cluster = Cluster::start().await;
    let (_, counted) = cluster.post("/v1/responses/input_tokens", &response(json!({}))).await.json().await;
    let reply = cluster.spawn_post(RESPONSES, response(json!({})));
    let call = cluster.call().await;
    assert_eq!(counted, json!({ "object": "response.input_tokens", "input_tokens": call.request.prompt.len() }));
    call.answer(Some(0), "a").await;
    soon(reply).await.expect("the client task runs");
}

#[tokio::test]
async fn malformed_responses_are_refused_with_the_name_of_the_field() {
    let mut cluster = Cluster::start().await;
    let item = |item: Value| response(json!({ "input": [{ "role": "user", "content": "a" }, item] }));
    for (body, param) in [
        (json!({ "model": "m" }), "input"),
        (response(json!({ "input": [] })), "input"),
        (response(json!({ "input": 1 })), "input"),
        (response(json!({ "input": "x".repeat(600) })), "input"),
        (response(json!({ "max_output_tokens": 0 })), "max_output_tokens"),
        (response(json!({ "max_output_tokens": 600 })), "max_output_tokens"),
        (response(json!({ "max_tokens": 5 })), "max_tokens"),
        (item(json!({ "role": "robot", "content": "a" })), "input[1].role"),
        (item(json!({ "role": "user" })), "input[1].content"),
        (item(json!({ "role": "user", "content": [{ "type": "input_image", "image_url": "data:" }] })), "input[1].content[0]"),
        (item(json!({ "type": "message_from_elsewhere", "id": "a" })), "input[1].type"),
        (item(json!({ "type": "item_reference", "id": "a" })), "input[1]"),
        (item(json!({ "type": "function_call", "call_id": "a", "arguments": "{}" })), "input[1].name"),
        (item(json!({ "type": "function_call_output", "output": "a" })), "input[1].call_id"),
        (item(json!({ "type": "custom_tool_call", "call_id": "a", "name": "b" })), "input[1].input"),
        (response(json!({ "previous_response_id": "resp_1" })), "previous_response_id"),
        (response(json!({ "conversation": "conv_1" })), "conversation"),
        (response(json!({ "background": true })), "background"),
        (response(json!({ "prompt": { "id": "p" } })), "prompt"),
        (response(json!({ "truncation": "auto" })), "truncation"),
        (response(json!({ "include": ["everything"] })), "include[0]"),
        (response(json!({ "top_logprobs": 2 })), "top_logprobs"),
        (response(json!({ "tools": [{ "type": "custom" }] })), "tools[0].name"),
        (response(json!({ "tools": [{ "type": "web_search" }], "tool_choice": { "type": "web_search" } })), "tool_choice.type"),
        (response(json!({ "tools": [{ "type": "web_search" }], "tool_choice": "required" })), "tool_choice"),
        (response(json!({ "tools": [{ "type": "function" }] })), "tools[0].name"),
        (response(json!({ "tool_choice": "required" })), "tool_choice"),
        (response(json!({ "reasoning": { "summary": "long" } })), "reasoning.summary"),
        (response(json!({ "reasoning": { "effort": "much" } })), "reasoning.effort"),
        (response(json!({ "text": { "format": { "type": "xml" } } })), "text.format.type"),
        (response(json!({ "text": { "format": { "type": "json_schema", "name": "a" } } })), "text.format.schema"),
        (response(json!({ "text": { "verbosity": "chatty" } })), "text.verbosity"),
        (response(json!({ "metadata": { "a": 1 } })), "metadata.a"),
        (response(json!({ "metadata": { "a": "x".repeat(513) } })), "metadata.a"),
        (response(json!({ "temperature": 9 })), "temperature"),
        (response(json!({ "n": 2 })), "n"),
    ] {
        let (status, error) = cluster.post(RESPONSES, &body).await.json().await;
        assert_eq!((status, &error["error"]["param"]), (StatusCode::BAD_REQUEST, &json!(param)), "{error}");
    }
    assert!(cluster.no_call());
    let (status, error) = cluster.send(Method::GET, "/v1/responses/resp_1", &[], "").await.json().await;
    assert_eq!((status, &error["error"]["code"]), (StatusCode::NOT_FOUND, &json!("unknown_path")));
}

#[tokio::test]
async fn failure_within_a_stream_is_a_failed_response() {
    let mut cluster = Cluster::with(|settings| settings.resumes = 0).await;
    let reply = cluster.spawn_post(RESPONSES, response(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    call.fail(tonic::Status::internal("lost")).await;
    let events = soon(reply).await.expect("the client task runs").named_events().await;
    let (name, last) = events.last().expect("the stream has events");
    let object = &last["response"];
    assert_eq!(
        (name.as_str(), &object["status"], &object["error"]["code"]),
        ("response.failed", &json!("failed"), &json!("server_error"))
    );
}

#[tokio::test]
async fn placement_of_a_response_or_message_is_explained() {
    let mut cluster = Cluster::start().await;
    let message = json!({ "model": "m", "max_tokens": 5, "messages": [{ "role": "user", "content": "Hi" }] });
    for (path, body) in [(RESPONSES, response(json!({}))), ("/v1/messages", message)] {
        let reply = cluster.send(Method::POST, path, &[("x-tandem-explain", "true")], body.to_string()).await;
        let (status, explained) = reply.json().await;
        assert_eq!((status, &explained["object"]), (StatusCode::OK, &json!("tandem.explanation")), "{explained}");
    }
    assert!(cluster.no_call());
}

#[tokio::test]
async fn abandoned_response_ends_on_the_worker() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(RESPONSES, response(json!({ "stream": true })));
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    call.send(tokens(0, b"a")).await;
    let mut reply = soon(reply).await.expect("the client task runs");
    reply.more().await;
    drop(reply);
    call.closed().await;
    cluster.routes_closed(1).await;
    cluster.counted(r#"tandem_frontend_requests_total{endpoint="responses",model="m",code="499"} 1"#).await;
}
