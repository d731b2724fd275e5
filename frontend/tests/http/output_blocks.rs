//! Reasoning, text and tool calls in the answers of `/v1/responses` and `/v1/messages`, whole and streamed.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use tandem_proto::v1::{constraint::Kind, finished::FinishReason};
use tandem_text::{ServedModel, chat::ReasoningParser};
use tonic::Status;

const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";
const IM_END: u32 = 257;
const CALL: &str = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Köln\"}}\n</tool_call>";

/// A cluster whose model has a context for tools, and reasons between `<think>` and `</think>`.
async fn cluster() -> Cluster {
    let model = ServedModel::sim("m").with_context_length(8_192).with_parsers(None, Some(ReasoningParser::Think));
    Cluster::with(|settings| settings.models = vec![model]).await
}

fn parameters() -> Value {
    json!({ "type": "object", "properties": { "city": { "type": "string" } }, "required": ["city"] })
}

/// Returns a request that shows the model's reasoning and has the tool `weather`.
fn request(path: &str, options: Value) -> Value {
    let own = if path == RESPONSES {
        json!({ "model": "m", "input": "Hi", "tools": [{ "type": "function", "name": "weather", "parameters": parameters() }] })
    } else {
        json!({
            "model": "m", "max_tokens": 500, "messages": [{ "role": "user", "content": "Hi" }],
            "thinking": { "type": "enabled", "budget_tokens": 1024 }, "tools": [{ "name": "weather", "input_schema": parameters() }],
        })
    };
    merged(own, options)
}

/// An answer with reasoning, text and two calls.
fn everything() -> String {
    format!("<think>\nbecause\n</think>\n\nSo.\n{CALL}\n{CALL}")
}

/// Sends the request, and answers it with this text, in chunks of as many bytes as `step`.
async fn answered(cluster: &mut Cluster, path: &'static str, body: Value, text: &str, step: usize, end: FinishReason) -> Reply {
    let reply = cluster.spawn_post(path, body);
    let call = cluster.call().await;
    call.begin(Some(16)).await;
    for chunk in text.as_bytes().chunks(step) {
        call.send(tokens(0, chunk)).await;
    }
    call.send(finished(0, end, (end == FinishReason::Stop).then_some(IM_END))).await;
    soon(reply).await.expect("the client task runs")
}

fn names(events: &[(String, Value)]) -> Vec<&str> {
    let mut names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    names.dedup();
    names
}

fn append(field: &mut Value, text: &Value) {
    let text = text.as_str().expect("deltas have texts");
    *field = json!(format!("{}{text}", field.as_str().unwrap_or_default()));
}

/// Builds the list of output items from the events of a streamed response, as OpenAI's clients do. Checks that each event continues the
/// item that was added last, and that the events at the end of an item repeat what its deltas have built.
fn items(events: &[(String, Value)]) -> Vec<Value> {
    let mut items: Vec<Value> = Vec::new();
    for (name, event) in events {
        match name.as_str() {
            "response.output_item.added" => {
                assert_eq!((&event["output_index"], &event["item"]["status"]), (&json!(items.len()), &json!("in_progress")));
                items.push(event["item"].clone());
                continue;
            }
            "response.created" | "response.in_progress" | "response.completed" | "response.incomplete" => continue,
            _ => {}
        }
        assert_eq!(event["output_index"], items.len() - 1, "{name}");
        let item = items.last_mut().expect("an item has begun");
        if name == "response.output_item.done" {
            item["status"] = event["item"]["status"].clone();
            assert_eq!(event["item"], *item);
            continue;
        }
        assert_eq!(event["item_id"], item["id"], "{name}");
        match name.as_str() {
            "response.content_part.added" => item["content"] = json!([event["part"]]),
            "response.reasoning_text.delta" | "response.output_text.delta" => {
                append(&mut item["content"][0]["text"], &event["delta"]);
            }
            "response.reasoning_text.done" | "response.output_text.done" => assert_eq!(event["text"], item["content"][0]["text"]),
            "response.content_part.done" => assert_eq!(event["part"], item["content"][0]),
            "response.function_call_arguments.delta" => append(&mut item["arguments"], &event["delta"]),
            "response.function_call_arguments.done" => {
                assert_eq!((&event["arguments"], &event["name"]), (&item["arguments"], &item["name"]));
            }
            other => panic!("unknown event {other}"),
        }
    }
    items
}

/// Builds the content blocks from the events of a streamed message, as Anthropic's clients do.
fn blocks(events: &[(String, Value)]) -> Vec<Value> {
    let (mut blocks, mut inputs): (Vec<Value>, Vec<String>) = Default::default();
    let mut open = false;
    for (name, event) in events {
        match name.as_str() {
            "content_block_start" => {
                assert_eq!((&event["index"], open), (&json!(blocks.len()), false));
                blocks.push(event["content_block"].clone());
                inputs.push(String::new());
                open = true;
            }
            "content_block_delta" => {
                assert_eq!((&event["index"], open), (&json!(blocks.len() - 1), true));
                let (block, delta) = (blocks.last_mut().expect("a block has begun"), &event["delta"]);
                match delta["type"].as_str() {
                    Some("text_delta") => append(&mut block["text"], &delta["text"]),
                    Some("thinking_delta") => append(&mut block["thinking"], &delta["thinking"]),
                    Some("input_json_delta") => {
                        assert_eq!(block["type"], "tool_use");
                        let part = delta["partial_json"].as_str().expect("the delta has a text");
                        inputs.last_mut().expect("a block has begun").push_str(part);
                    }
                    other => panic!("unknown delta {other:?}"),
                }
            }
            "content_block_stop" => {
                assert_eq!((&event["index"], open), (&json!(blocks.len() - 1), true));
                open = false;
            }
            _ => {}
        }
    }
    for (block, input) in blocks.iter_mut().zip(inputs).filter(|(_, input)| !input.is_empty()) {
        block["input"] = serde_json::from_str(&input).unwrap_or_else(|_| json!({ "partial": input }));
    }
    blocks
}

/// Removes ids after a check that they begin as clients expect and that no two are equal.
fn without_ids(list: &[Value]) -> Vec<Value> {
    let mut seen = Vec::new();
    let mut without = list.to_vec();
    for entry in &mut without {
        for (field, prefixes) in [("id", &["rs_", "msg_", "fc_", "call_", "toolu_"][..]), ("call_id", &["call_"])] {
            if let Some(id) = entry.as_object_mut().expect("entries are objects").remove(field) {
                let text = id.as_str().expect("ids are texts");
                assert!(prefixes.iter().any(|prefix| text.starts_with(prefix)) && !seen.contains(&id), "{id}");
                seen.push(id);
            }
        }
    }
    without
}

#[tokio::test]
async fn response_has_an_item_for_reasoning_text_and_each_call() {
    let mut cluster = cluster().await;
    let reply = answered(&mut cluster, RESPONSES, request(RESPONSES, json!({})), &everything(), 1_000, FinishReason::Stop).await;
    let (status, whole) = reply.json().await;
    assert_eq!((status, &whole["status"]), (StatusCode::OK, &json!("completed")), "{whole}");
    let call = json!({ "type": "function_call", "name": "weather", "arguments": "{\"city\": \"Köln\"}", "status": "completed" });
    let output = whole["output"].as_array().expect("the output is a list");
    assert_eq!(
        without_ids(output),
        [
            json!({
                "type": "reasoning", "summary": [], "content": [{ "type": "reasoning_text", "text": "because" }],
                "status": "completed",
            }),
            json!({
                "type": "message", "role": "assistant", "status": "completed",
                "content": [{ "type": "output_text", "text": "So.", "annotations": [], "logprobs": [] }],
            }),
            call.clone(),
            call,
        ]
    );
    let usage = &whole["usage"];
    assert_eq!(usage["input_tokens_details"]["cached_tokens"], 16);
    // Each byte is a token: the text between the tags, and the closing tag but its last token. The stop token counts as well.
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], "\nbecause\n</think>".len() - 1);
    assert_eq!(usage["output_tokens"], everything().len() + 1);

    for step in [1, 7] {
        let body = request(RESPONSES, json!({ "stream": true }));
        let reply = answered(&mut cluster, RESPONSES, body, &everything(), step, FinishReason::Stop).await;
        let events = reply.named_events().await;
        let built = items(&events);
        assert_eq!(without_ids(&built), without_ids(output), "in chunks of {step} bytes");
        let (last, object) = events.last().expect("the stream has events");
        assert_eq!((last.as_str(), &object["response"]["output"]), ("response.completed", &json!(built)));
        assert_eq!(object["response"]["usage"], *usage);
        let of_call = [
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
        ];
        let of_part = |kind: &str| {
            let text = ["delta", "done"].map(|step| format!("response.{kind}.{step}"));
            let [delta, done] = text;
            let around = |name: &str| format!("response.{name}");
            [
                around("output_item.added"),
                around("content_part.added"),
                delta,
                done,
                around("content_part.done"),
                around("output_item.done"),
            ]
        };
        let expected: Vec<String> = ["response.created", "response.in_progress"]
            .map(str::to_owned)
            .into_iter()
            .chain(of_part("reasoning_text"))
            .chain(of_part("output_text"))
            .chain(of_call.iter().chain(&of_call).map(|name| (*name).to_owned()))
            .chain(["response.completed".to_owned()])
            .collect();
        assert_eq!(names(&events), expected);
        let numbers: Vec<u64> = events.iter().filter_map(|(_, event)| event["sequence_number"].as_u64()).collect();
        assert!(numbers.into_iter().eq(0..events.len() as u64), "events are numbered without gaps");
    }
}

#[tokio::test]
async fn message_has_a_block_for_thinking_text_and_each_tool_use() {
    let mut cluster = cluster().await;
    let reply = answered(&mut cluster, MESSAGES, request(MESSAGES, json!({})), &everything(), 1_000, FinishReason::Stop).await;
    let (status, whole) = reply.json().await;
    assert_eq!((status, &whole["stop_reason"]), (StatusCode::OK, &json!("tool_use")), "{whole}");
    let call = json!({ "type": "tool_use", "name": "weather", "input": { "city": "Köln" } });
    let content = whole["content"].as_array().expect("the content is a list");
    let thinking = json!({ "type": "thinking", "thinking": "because", "signature": "" });
    assert_eq!(without_ids(content), [thinking, json!({ "type": "text", "text": "So." }), call.clone(), call]);
    assert_eq!(
        (&whole["usage"]["cache_read_input_tokens"], &whole["usage"]["output_tokens"]),
        (&json!(16), &json!(everything().len() + 1))
    );

    for step in [1, 7] {
        let body = request(MESSAGES, json!({ "stream": true }));
        let reply = answered(&mut cluster, MESSAGES, body, &everything(), step, FinishReason::Stop).await;
        let events = reply.named_events().await;
        assert_eq!(without_ids(&blocks(&events)), without_ids(content), "in chunks of {step} bytes");
        let started = events.iter().filter(|(name, _)| name == "content_block_start").map(|(_, event)| &event["content_block"]);
        let inputs: Vec<&Value> = started.filter_map(|block| block.get("input")).collect();
        assert_eq!(inputs, [&json!({}), &json!({})], "the input comes in deltas");
        let mut expected = vec!["message_start"];
        expected.extend(["content_block_start", "content_block_delta", "content_block_stop"].repeat(4));
        expected.extend(["message_delta", "message_stop"]);
        assert_eq!(names(&events), expected);
        let delta = &events[events.len() - 2].1;
        assert_eq!(delta["delta"], json!({ "stop_reason": "tool_use", "stop_sequence": null }));
        assert_eq!(delta["usage"], whole["usage"]);
    }
}

#[tokio::test]
async fn thinking_is_shown_only_if_the_message_requests_it() {
    let mut cluster = cluster().await;
    for (thinking, shown) in [
        (json!(null), false),
        (json!({ "type": "disabled" }), false),
        (json!({ "type": "enabled", "budget_tokens": 1024, "display": "omitted" }), false),
        (json!({ "type": "adaptive" }), true),
    ] {
        for stream in [false, true] {
            let body = request(MESSAGES, json!({ "thinking": thinking, "stream": stream }));
            let reply = answered(&mut cluster, MESSAGES, body, &everything(), 1_000, FinishReason::Stop).await;
            let content = if stream {
                blocks(&reply.named_events().await)
            } else {
                reply.json().await.1["content"].as_array().expect("the content is a list").clone()
            };
            let kinds: Vec<&str> = content.iter().filter_map(|block| block["type"].as_str()).collect();
            let others = ["text", "tool_use", "tool_use"];
            assert_eq!(kinds, [&["thinking"][..usize::from(shown)], &others].concat(), "{thinking}");
        }
    }
}

#[tokio::test]
async fn call_that_the_limit_of_tokens_cuts_is_incomplete() {
    let mut cluster = cluster().await;
    let cut = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Kö";
    let body = |path, stream: bool| request(path, json!({ "stream": stream }));
    let (_, whole) = answered(&mut cluster, RESPONSES, body(RESPONSES, false), cut, 5, FinishReason::Length).await.json().await;
    assert_eq!((&whole["status"], &whole["incomplete_details"]["reason"]), (&json!("incomplete"), &json!("max_output_tokens")));
    let item = &whole["output"][0];
    assert_eq!((&item["status"], &item["arguments"]), (&json!("incomplete"), &json!("{\"city\": \"Kö")));
    let events =
        answered(&mut cluster, RESPONSES, body(RESPONSES, true), cut, 5, FinishReason::Length).await.named_events().await;
    let built = items(&events);
    assert_eq!(without_ids(&built), without_ids(whole["output"].as_array().expect("the output is a list")));
    assert_eq!(events.last().map(|(name, _)| name.as_str()), Some("response.incomplete"));

    let (_, whole) = answered(&mut cluster, MESSAGES, body(MESSAGES, false), cut, 5, FinishReason::Length).await.json().await;
    // Arguments that are no object are not replaced by an empty one.
    let text = json!({ "type": "text", "text": "weather{\"city\": \"Kö" });
    assert_eq!((&whole["stop_reason"], &whole["content"][0]), (&json!("max_tokens"), &text));
    let events = answered(&mut cluster, MESSAGES, body(MESSAGES, true), cut, 5, FinishReason::Length).await.named_events().await;
    assert_eq!(blocks(&events)[0]["input"], json!({ "partial": "{\"city\": \"Kö" }), "a stream has the text as far as it goes");
}

#[tokio::test]
async fn required_calls_are_enforced_and_come_back_as_calls() {
    let mut cluster = cluster().await;
    let named = json!({ "type": "function", "name": "weather" });
    let tool = json!({ "type": "tool", "name": "weather", "disable_parallel_tool_use": true });
    let list = "[{\"name\": \"weather\", \"parameters\": {\"city\": \"Bonn\"}}]";
    for (path, choice, answer) in [
        (RESPONSES, json!("required"), list),
        (RESPONSES, named, "{\"city\": \"Bonn\"}"),
        (MESSAGES, json!({ "type": "any" }), list),
        (MESSAGES, tool, "{\"city\": \"Bonn\"}"),
    ] {
        let reply = cluster.spawn_post(path, request(path, json!({ "tool_choice": choice })));
        let call = cluster.call().await;
        let constraint = call.request.sampling.as_ref().and_then(|sampling| sampling.constraint.clone());
        let Some(Kind::JsonSchema(schema)) = constraint.and_then(|constraint| constraint.kind) else {
            panic!("the constraint is a schema: {choice}")
        };
        assert!(schema.contains(r#""city""#), "{schema}");
        call.begin(Some(0)).await;
        call.send(tokens(0, answer.as_bytes())).await;
        call.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
        let (status, whole) = soon(reply).await.expect("the client task runs").json().await;
        assert_eq!(status, StatusCode::OK, "{whole}");
        if path == RESPONSES {
            let expected =
                json!({ "type": "function_call", "name": "weather", "arguments": "{\"city\": \"Bonn\"}", "status": "completed" });
            assert_eq!(without_ids(whole["output"].as_array().expect("the output is a list")), [expected]);
        } else {
            let expected = json!({ "type": "tool_use", "name": "weather", "input": { "city": "Bonn" } });
            assert_eq!(without_ids(whole["content"].as_array().expect("the content is a list")), [expected]);
            assert_eq!(whole["stop_reason"], "tool_use");
        }
    }
}

#[tokio::test]
async fn answer_without_parallel_calls_ends_with_its_first_call() {
    let mut cluster = cluster().await;
    let single = json!({ "type": "auto", "disable_parallel_tool_use": true });
    for (path, options) in [(RESPONSES, json!({ "parallel_tool_calls": false })), (MESSAGES, json!({ "tool_choice": single }))] {
        let reply = cluster.spawn_post(path, request(path, options));
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        call.send(tokens(0, format!("{CALL}\n{CALL}").as_bytes())).await;
        call.closed().await;
        let (_, whole) = soon(reply).await.expect("the client task runs").json().await;
        let list = if path == RESPONSES { &whole["output"] } else { &whole["content"] };
        assert_eq!(list.as_array().map(Vec::len), Some(1), "{whole}");
    }
}

#[tokio::test]
async fn stream_resumed_within_a_call_has_the_whole_call_once() {
    let mut cluster = cluster().await;
    let (before, after) = CALL.as_bytes().split_at(CALL.find("ö").expect("the city has this letter") + 1);
    for path in [RESPONSES, MESSAGES] {
        let reply = cluster.spawn_post(path, request(path, json!({ "stream": true })));
        let first = cluster.call().await;
        first.begin(Some(0)).await;
        first.send(tokens(0, before)).await;
        first.fail(Status::unavailable("killed")).await;
        let second = cluster.call().await;
        second.begin(Some(0)).await;
        second.send(tokens(0, after)).await;
        second.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
        let events = soon(reply).await.expect("the client task runs").named_events().await;
        if path == RESPONSES {
            let items = items(&events);
            assert_eq!((items.len(), &items[0]["arguments"]), (1, &json!("{\"city\": \"Köln\"}")));
        } else {
            let blocks = blocks(&events);
            assert_eq!((blocks.len(), &blocks[0]["input"]), (1, &json!({ "city": "Köln" })));
        }
    }
}

#[tokio::test]
async fn output_of_one_answer_can_be_sent_back_with_the_results() {
    let mut cluster = cluster().await;
    let (_, whole) = answered(&mut cluster, RESPONSES, request(RESPONSES, json!({})), &everything(), 1_000, FinishReason::Stop)
        .await
        .json()
        .await;
    let mut input = vec![json!({ "role": "user", "content": "Hi" })];
    for item in whole["output"].as_array().expect("the output is a list") {
        input.push(item.clone());
    }
    let results: Vec<Value> = input
        .iter()
        .filter_map(|item| item.get("call_id"))
        .map(|id| json!({ "type": "function_call_output", "call_id": id, "output": "17 °C" }))
        .collect();
    assert_eq!(results.len(), 2);
    input.extend(results);
    let results = |content: &[Value]| -> Vec<Value> {
        let ids = content.iter().filter_map(|block| block.get("id"));
        ids.map(|id| json!({ "type": "tool_result", "tool_use_id": id, "content": "17 °C" })).collect()
    };
    let (_, message) = answered(&mut cluster, MESSAGES, request(MESSAGES, json!({})), &everything(), 1_000, FinishReason::Stop)
        .await
        .json()
        .await;
    let content = message["content"].as_array().expect("the content is a list");
    let messages = json!([
        { "role": "user", "content": "Hi" },
        { "role": "assistant", "content": content },
        { "role": "user", "content": results(content) },
    ]);
    let mut prompts = Vec::new();
    for (path, options) in [(RESPONSES, json!({ "input": input })), (MESSAGES, json!({ "messages": messages }))] {
        let reply = cluster.spawn_post(path, request(path, options));
        let call = cluster.call().await;
        prompts.push(call.request.prompt.clone());
        call.answer(Some(0), "Warm.").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    }
    // The system message describes the tools as the client sent them.
    let conversations = prompts.iter().map(|prompt| {
        let bytes: Vec<u8> = prompt.iter().map(|token| if *token < 256 { *token as u8 } else { b'|' }).collect();
        let text = String::from_utf8(bytes).expect("the prompt is UTF-8");
        text.split_once("|user").map(|(_, conversation)| conversation.to_owned()).expect("the user's message is in the prompt")
    });
    let conversations: Vec<String> = conversations.collect();
    let counted = ["<tool_call>", "17 °C"].map(|part| conversations[0].matches(part).count());
    assert_eq!(counted, [2, 2], "{}", conversations[0]);
    assert_eq!(conversations[0], conversations[1], "both APIs make the same conversation of it");
}
