//! The tools of coding agents: many and long ones, deferred ones, and free texts that have to match a grammar.

use crate::{
    agents::{answered, cluster},
    support::*,
};
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1::{self, constraint::Kind, finished::FinishReason};

/// The grammar of a patch, in the form in which agents send it.
const PATCH: &str = r#"start: begin hunk+ end
begin: "*** Begin Patch" LF
end: "*** End Patch" LF?
hunk: add | delete | update
add: "*** Add File: " name LF added+
delete: "*** Delete File: " name LF
update: "*** Update File: " name LF move? change?
name: /(.+)/
added: "+" /(.*)/ LF -> line
move: "*** Move to: " name LF
change: (context | line)+ last?
context: ("@@" | "@@ " /(.+)/) LF
line: ("+" | "-" | " ") /(.*)/ LF
last: "*** End of File" LF
%import common.LF
"#;

fn long_tool(number: usize) -> Value {
    let parameter =
        |index: usize| (format!("parameter_{index}"), json!({ "type": "string", "description": "What it does. ".repeat(8) }));
    let properties: Value = (0..8).map(parameter).collect::<serde_json::Map<_, _>>().into();
    let schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema", "type": "object", "properties": properties,
        "required": ["parameter_0"], "additionalProperties": false,
    });
    json!({ "name": format!("Tool{number}"), "description": "Runs a step.\n\n- It is careful.\n".repeat(20), "input_schema": schema })
}

#[tokio::test]
async fn counted_tokens_equal_those_of_the_answer_with_many_long_tools() {
    let mut cluster = cluster().await;
    let tools: Vec<Value> = (0..24).map(long_tool).collect();
    let count = json!({
        "model": "m", "system": "You are an agent.", "tools": tools, "thinking": { "type": "adaptive" },
        "messages": [{ "role": "user", "content": "Hi" }, { "role": "system", "content": "Skills." }],
    });
    let mut body = count.clone();
    let more = json!({
        "max_tokens": 32_000, "stream": true, "thinking": { "type": "adaptive", "display": "omitted" },
        "context_management": { "edits": [{ "type": "clear_thinking_20251015", "keep": "all" }] }, "output_config": { "effort": "high" },
        "metadata": { "user_id": "{\"device_id\":\"d\",\"session_id\":\"s\"}" },
    });
    body.as_object_mut().expect("it is an object").extend(more.as_object().expect("it is an object").clone());
    let headers = [
        ("content-type", "application/json"),
        ("anthropic-version", "2023-06-01"),
        (
            "anthropic-beta",
            "claude-code-20250219,interleaved-thinking-2025-05-14,context-management-2025-06-27,effort-2025-11-24",
        ),
        ("anthropic-dangerous-direct-browser-access", "true"),
        ("x-app", "cli"),
    ];
    let counted = cluster.send(Method::POST, "/v1/messages/count_tokens?beta=true", &headers, count.to_string()).await;
    let (status, counted) = counted.json().await;
    assert_eq!(status, StatusCode::OK, "{counted}");
    let (prompt, reply) = answered(&mut cluster, "/v1/messages?beta=true", body, "Hello.", 3).await;
    assert_eq!(reply.status(), StatusCode::OK);
    // Each control token is one token, and so is each other byte.
    let prompt_tokens = prompt.replace("<|im_start|>", "s").replace("<|im_end|>", "e").len();
    assert_eq!(counted["input_tokens"], prompt_tokens);
    for number in 0..24 {
        assert!(prompt.contains(&format!("\"Tool{number}\"")), "tool {number}");
    }
    let events = reply.named_events().await;
    let usage = &events[0].1["message"]["usage"];
    let sum: u64 = ["input_tokens", "cache_read_input_tokens"].iter().filter_map(|field| usage[field].as_u64()).sum();
    assert_eq!(sum, prompt_tokens as u64);
}

/// A deferred tool is in the list of tools once a result refers to it. It must not change the prompt before that result.
#[tokio::test]
async fn deferred_tool_is_described_where_a_result_refers_to_it() {
    let mut cluster = cluster().await;
    let tool =
        |name: &str| json!({ "name": name, "description": format!("{name} does it."), "input_schema": { "type": "object" } });
    let deferred = |name: &str| {
        let mut tool = tool(name);
        tool["defer_loading"] = true.into();
        tool
    };
    let body =
        |tools: Value, messages: &[Value]| json!({ "model": "m", "max_tokens": 100, "tools": tools, "messages": messages });
    let mut messages = vec![json!({ "role": "user", "content": "Hi" })];
    let search = "<tool_call>\n{\"name\": \"ToolSearch\", \"arguments\": {}}\n</tool_call>";
    let tools = json!([tool("ToolSearch"), deferred("Placeholder")]);
    let (first, reply) = answered(&mut cluster, "/v1/messages", body(tools, &messages), search, 100).await;
    assert!(!first.contains("Placeholder"), "{first}");
    let (_, answer) = reply.json().await;

    messages.push(json!({ "role": "assistant", "content": answer["content"] }));
    let reference = json!({ "type": "tool_reference", "tool_name": "TaskStop" });
    let id = answer["content"][0]["id"].clone();
    messages.push(json!({ "role": "user", "content": [
        { "type": "tool_result", "tool_use_id": id, "content": [reference.clone(), reference] },
    ] }));
    let tools = json!([deferred("TaskStop"), tool("ToolSearch"), deferred("Placeholder")]);
    let call = "<tool_call>\n{\"name\": \"TaskStop\", \"arguments\": {\"id\": 1}}\n</tool_call>";
    let (second, reply) = answered(&mut cluster, "/v1/messages", body(tools.clone(), &messages), call, 100).await;
    let beginning = first.trim_end_matches("<|im_start|>assistant\n");
    assert!(second.starts_with(beginning), "the prompt continues where it ended:\n{second}");
    let rest = &second[beginning.len()..];
    assert_eq!(rest.matches("TaskStop does it.").count(), 1, "{rest}");
    assert!(rest.contains("<function>{") && rest.contains("[tool: TaskStop]") && !rest.contains("Placeholder"), "{rest}");
    let (_, answer) = reply.json().await;
    assert_eq!((&answer["stop_reason"], &answer["content"][0]["name"]), (&json!("tool_use"), &json!("TaskStop")), "{answer}");

    // The model does not know the other tool, so its call stays a text.
    let unknown = call.replace("TaskStop", "Placeholder");
    let (_, reply) = answered(&mut cluster, "/v1/messages", body(tools, &messages), &unknown, 100).await;
    let (_, answer) = reply.json().await;
    assert_eq!(answer["content"][0]["type"], "text", "{answer}");
}

/// A client may defer all its tools. The model still has to know how to call them, and no turn may change the beginning of the prompt.
#[tokio::test]
async fn conversation_whose_tools_are_all_deferred_explains_calls_from_its_first_turn() {
    let mut cluster = cluster().await;
    let tool =
        json!({ "name": "TaskStop", "description": "Stops it.", "input_schema": { "type": "object" }, "defer_loading": true });
    let body = |messages: &Value| json!({ "model": "m", "max_tokens": 100, "tools": [tool], "messages": messages });
    let question = json!({ "role": "user", "content": "Stop it." });
    let (first, reply) = answered(&mut cluster, "/v1/messages", body(&json!([question])), "Hm.", 100).await;
    assert_eq!(reply.status(), StatusCode::OK);
    assert!(first.contains("<tool_call>") && first.contains("<function>") && !first.contains("TaskStop"), "{first}");
    let messages = json!([
        question,
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "t", "name": "ToolSearch", "input": {} }] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "t", "content": [{ "type": "tool_reference", "tool_name": "TaskStop" }] },
        ] },
    ]);
    let call = |name: &str| format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {{}}}}\n</tool_call>");
    let (second, reply) = answered(&mut cluster, "/v1/messages", body(&messages), &call("TaskStop"), 100).await;
    let beginning = first.trim_end_matches("<|im_start|>assistant\n");
    assert!(second.starts_with(beginning) && second[beginning.len()..].contains("Stops it."), "{second}");
    let (_, answer) = reply.json().await;
    assert_eq!((&answer["stop_reason"], &answer["content"][0]["name"]), (&json!("tool_use"), &json!("TaskStop")), "{answer}");
    // The tool in the head is none.
    let (_, reply) = answered(&mut cluster, "/v1/messages", body(&messages), &call("described_later"), 100).await;
    assert_eq!(reply.json().await.1["content"][0]["type"], "text");
    // A client that allows no calls gets no explanation.
    let mut without = body(&messages);
    without["tool_choice"] = json!({ "type": "none" });
    let (prompt, _) = answered(&mut cluster, "/v1/messages", without, "Hm.", 100).await;
    assert!(!prompt.contains("described_later"), "{prompt}");
}

/// Stop strings are for the text that users read. Within a call they would cut it, and the call would be lost.
#[tokio::test]
async fn stop_strings_do_not_end_a_call_that_a_constraint_enforces() {
    let mut cluster = cluster().await;
    let patch = "*** Begin Patch\n*** Delete File: STOP\n*** End Patch\n";
    let lark = json!({ "type": "grammar", "syntax": "lark", "definition": PATCH });
    for named in [true, false] {
        for step in [1, 100] {
            let mut body = patching(lark.clone(), false);
            body["stop"] = json!(["STOP"]);
            if !named {
                body["tool_choice"] = "auto".into();
            }
            let quoted = Value::from(patch).to_string();
            let in_tags =
                format!("<tool_call>\n{{\"name\": \"apply_patch\", \"arguments\": {{\"input\": {quoted}}}}}\n</tool_call>");
            let answer = if named { patch.to_owned() } else { in_tags };
            let (_, reply) = answered(&mut cluster, "/v1/responses", body.clone(), &answer, step).await;
            let (status, whole) = reply.json().await;
            assert_eq!(status, StatusCode::OK, "{whole}");
            let item = &whole["output"][0];
            assert_eq!((&item["input"], &item["status"]), (&json!(patch), &json!("completed")), "{whole}");
            if !named {
                let (_, reply) = answered(&mut cluster, "/v1/responses", body, "One STOP two", step).await;
                assert_eq!(reply.json().await.1["output"][0]["content"][0]["text"], "One ");
            }
        }
    }
}

/// A model that chooses the tool itself writes the text within its own format of calls.
#[tokio::test]
async fn grammar_of_a_free_text_constrains_the_calls_that_the_model_chooses() {
    let mut cluster = cluster().await;
    let lark = json!({ "type": "grammar", "syntax": "lark", "definition": PATCH });
    let mut body = patching(lark, false);
    body["tool_choice"] = "auto".into();
    let reply = cluster.spawn_post("/v1/responses", body.clone());
    let call = cluster.call().await;
    let sampling = call.request.sampling.clone().expect("a request has sampling parameters");
    assert_eq!(sampling.constraint, None, "the text is free");
    let [input] = &sampling.call_inputs[..] else { panic!("one tool has a grammar") };
    assert_eq!(input.grammar, PATCH);
    assert_eq!(input.places[0].begin.last().map(String::as_str), Some("\"apply_patch\""));
    call.answer(Some(0), "ok").await;
    let reply = soon(reply).await.expect("the client task runs");
    assert_eq!(reply.header("x-tandem-ignored-parameters"), None);

    // Without tools that have a grammar, nothing is constrained.
    body["tools"][0]["format"] = json!({ "type": "text" });
    let reply = cluster.spawn_post("/v1/responses", body.clone());
    let call = cluster.call().await;
    let is_free = |sampling: &v1::Sampling| sampling.constraint.is_none() && sampling.call_inputs.is_empty();
    assert!(call.request.sampling.as_ref().is_some_and(is_free));
    call.answer(Some(0), "ok").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    // A grammar that cannot be enforced is refused, as it is where the choice names the tool.
    body["tools"][0]["format"] = json!({ "type": "grammar", "syntax": "lark", "definition": "start: missing" });
    let (status, error) = cluster.post("/v1/responses", &body).await.json().await;
    assert_eq!(status, StatusCode::BAD_REQUEST, "{error}");
    // More of them than a constraint may have are not enforced.
    let tools: Vec<Value> = (0..40)
        .map(|number| json!({ "type": "custom", "name": format!("t{number}"), "format": { "type": "grammar", "syntax": "regex", "definition": "a" } }))
        .collect();
    body["tools"] = json!(tools);
    let (_, reply) = answered(&mut cluster, "/v1/responses", body, "ok", 10).await;
    assert_eq!(reply.header("x-tandem-ignored-parameters"), Some("custom.format"));
}

fn patching(grammar: Value, stream: bool) -> Value {
    json!({
        "model": "m", "input": "Fix it.", "stream": stream, "tool_choice": { "type": "custom", "name": "apply_patch" },
        "tools": [{ "type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar }],
    })
}

#[tokio::test]
async fn required_free_text_is_constrained_to_its_grammar_and_returned_unchanged() {
    let mut cluster = cluster().await;
    let patch = "*** Begin Patch\n*** Add File: a \"b\".txt\n+\tone\\\n*** End Patch\n";
    for stream in [false, true] {
        let lark = json!({ "type": "grammar", "syntax": "lark", "definition": PATCH });
        let reply = cluster.spawn_post("/v1/responses", patching(lark, stream));
        let call = cluster.call().await;
        let constraint = call.request.sampling.as_ref().and_then(|sampling| sampling.constraint.clone());
        assert_eq!(constraint.and_then(|constraint| constraint.kind), Some(Kind::Grammar(PATCH.to_owned())));
        call.begin(Some(0)).await;
        for byte in patch.as_bytes() {
            call.send(tokens(0, &[*byte])).await;
        }
        call.send(finished(0, FinishReason::Stop, None)).await;
        let reply = soon(reply).await.expect("the client task runs");
        let item = if stream {
            let events = reply.named_events().await;
            let of = |kind: &'static str| events.iter().filter(move |(name, _)| name == kind).map(|(_, event)| event);
            let input: String = of("response.custom_tool_call_input.delta")
                .filter_map(|event| event["delta"].as_str().map(str::to_owned))
                .collect();
            assert_eq!(input, patch);
            assert!(of("response.custom_tool_call_input.delta").count() > 10, "it is streamed");
            of("response.completed").next().expect("it is complete")["response"]["output"][0].clone()
        } else {
            reply.json().await.1["output"][0].clone()
        };
        let found = (&item["type"], &item["name"], &item["input"], &item["status"]);
        assert_eq!(found, (&json!("custom_tool_call"), &json!("apply_patch"), &json!(patch), &json!("completed")));
    }
    let regex = json!({ "type": "grammar", "syntax": "regex", "definition": "[0-9]+" });
    let reply = cluster.spawn_post("/v1/responses", patching(regex, false));
    let call = cluster.call().await;
    let constraint = call.request.sampling.as_ref().and_then(|sampling| sampling.constraint.clone());
    assert_eq!(constraint.and_then(|constraint| constraint.kind), Some(Kind::Regex("[0-9]+".to_owned())));
    call.begin(Some(0)).await;
    call.send(tokens(0, b"12")).await;
    // The limit on tokens ends the text.
    call.send(finished(0, FinishReason::Length, None)).await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!((&answer["status"], &answer["output"][0]["input"]), (&json!("incomplete"), &json!("12")), "{answer}");
    assert_eq!(answer["output"][0]["status"], "incomplete");
}

#[tokio::test]
async fn grammar_that_cannot_be_enforced_is_refused_if_the_tool_is_required() {
    let cluster = cluster().await;
    let broken = json!({ "type": "grammar", "syntax": "lark", "definition": "start: missing" });
    let reply = cluster.post("/v1/responses", &patching(broken, false)).await;
    let (status, error) = reply.json().await;
    assert_eq!((status, &error["error"]["param"]), (StatusCode::BAD_REQUEST, &json!("tools")), "{error}");
    assert!(error["error"]["message"].as_str().is_some_and(|text| text.contains("cannot be enforced")), "{error}");
}
