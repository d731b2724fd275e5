//! Requests in the forms that coding agents send: nothing in them is refused, and calls of the agents' own tools have the tools' own types.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use tandem_proto::v1::finished::FinishReason;
use tandem_text::ServedModel;

const IM_END: u32 = 257;
const IGNORED: &str = "x-tandem-ignored-parameters";

pub async fn cluster() -> Cluster {
    let model = ServedModel::sim("m").with_context_length(1 << 17);
    Cluster::with(|settings| settings.models = vec![model]).await
}

/// Sends the request, answers it with this text in chunks of as many bytes as `step`, and returns the prompt and the reply.
pub async fn answered(cluster: &mut Cluster, path: &'static str, body: Value, answer: &str, step: usize) -> (String, Reply) {
    let reply = cluster.spawn_post(path, body);
    let call = cluster.call().await;
    call.begin(Some(16)).await;
    for chunk in answer.as_bytes().chunks(step) {
        call.send(tokens(0, chunk)).await;
    }
    call.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
    (text(&call.request.prompt), soon(reply).await.expect("the client task runs"))
}

/// A request in the form of Codex: developer instructions, functions, a custom tool, a namespace, and tools that only OpenAI can run.
fn codex(input: Value, stream: bool) -> Value {
    let function = |name: &str| json!({ "type": "function", "name": name, "parameters": { "type": "object" }, "strict": false });
    let grammar = json!({ "type": "grammar", "syntax": "lark", "definition": "start: /.+/" });
    json!({
        "model": "m", "instructions": "You are an agent.", "input": input, "stream": stream, "store": false,
        "tools": [
            function("shell"),
            { "type": "custom", "name": "apply_patch", "description": "Edits files.", "format": grammar },
            { "type": "namespace", "name": "mcp__docs", "description": "Documents.", "tools": [function("find")] },
            { "type": "web_search", "external_web_access": false },
            { "type": "image_generation", "output_format": "png" },
        ],
        "tool_choice": "auto", "parallel_tool_calls": true, "reasoning": { "summary": "detailed" }, "text": { "verbosity": "low" },
        "include": ["reasoning.encrypted_content"], "prompt_cache_key": "k", "client_metadata": { "a": "b" },
    })
}

#[tokio::test]
async fn calls_of_custom_and_namespaced_tools_have_their_own_types() {
    let mut cluster = cluster().await;
    let question = json!([
        { "type": "message", "role": "developer", "content": [{ "type": "input_text", "text": "Rules." }] },
        { "type": "message", "role": "user", "content": [{ "type": "input_text", "text": "Fix it." }] },
    ]);
    let calls = "<tool_call>\n{\"name\": \"apply_patch\", \"arguments\": {\"input\": \"*** Begin\\n+\\\"é\\\"\"}}\n</tool_call>\n\
                 <tool_call>\n{\"name\": \"mcp__docs__find\", \"arguments\": {\"q\": 1}}\n</tool_call>";
    let (prompt, reply) = answered(&mut cluster, "/v1/responses", codex(question.clone(), false), calls, 1_000).await;
    for expected in ["You are an agent.", "Rules.", "\"apply_patch\"", "start: /.+/", "\"mcp__docs__find\""] {
        assert!(prompt.contains(expected), "{expected} in {prompt}");
    }
    assert!(!prompt.contains("web_search") && !prompt.contains("image_generation"), "{prompt}");
    let ignored = reply.header(IGNORED).map(str::to_owned);
    assert_eq!(ignored.as_deref(), Some("client_metadata, store, text.verbosity, tools.image_generation, tools.web_search"));
    assert!(cluster.metric("tandem_frontend_left_out_tools_total 2").await);
    let (status, whole) = reply.json().await;
    assert_eq!(status, StatusCode::OK, "{whole}");
    let without_ids = |item: &Value| {
        let mut item = item.clone();
        let fields = item.as_object_mut().expect("items are objects");
        assert!(fields.remove("id").is_some() && fields.remove("call_id").is_some());
        item
    };
    let output = whole["output"].as_array().expect("the output is a list");
    let expected = [
        json!({ "type": "custom_tool_call", "name": "apply_patch", "input": "*** Begin\n+\"é\"", "status": "completed" }),
        json!({
            "type": "function_call", "namespace": "mcp__docs", "name": "find", "arguments": "{\"q\": 1}", "status": "completed",
        }),
    ];
    assert_eq!(output.iter().map(without_ids).collect::<Vec<_>>(), expected);

    for step in [1, 5] {
        let (_, reply) = answered(&mut cluster, "/v1/responses", codex(question.clone(), true), calls, step).await;
        let events = reply.named_events().await;
        let of = |name: &str| events.iter().filter(|(kind, _)| kind == name).map(|(_, event)| event.clone()).collect::<Vec<_>>();
        let input: String = of("response.custom_tool_call_input.delta")
            .iter()
            .filter_map(|event| event["delta"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(input, "*** Begin\n+\"é\"", "in chunks of {step} bytes");
        assert_eq!(of("response.custom_tool_call_input.done")[0]["input"], input);
        let done: Vec<Value> = of("response.output_item.done").iter().map(|event| without_ids(&event["item"])).collect();
        assert_eq!(done, expected);
        assert_eq!(
            of("response.completed")[0]["response"]["output"],
            json!(of("response.output_item.done").iter().map(|event| &event["item"]).collect::<Vec<_>>())
        );
    }

    // The next turn repeats the calls and has their results.
    let mut history = question.as_array().expect("it is a list").clone();
    history.extend(output.iter().cloned());
    let id = |index: usize| output[index]["call_id"].clone();
    let image = json!([{ "type": "input_text", "text": "found" }, { "type": "input_image", "image_url": "data:" }]);
    history.extend([
        json!({ "type": "custom_tool_call_output", "call_id": id(0), "output": "Done." }),
        json!({ "type": "function_call_output", "call_id": id(1), "output": image }),
        json!({ "type": "web_search_call", "id": "ws", "status": "completed", "action": { "type": "search", "query": "q" } }),
        json!({ "type": "reasoning", "id": "rs", "summary": [], "encrypted_content": "x" }),
    ]);
    let (later, reply) = answered(&mut cluster, "/v1/responses", codex(json!(history), false), "ok", 10).await;
    assert_eq!(reply.json().await.0, StatusCode::OK);
    assert!(
        later.starts_with(prompt.trim_end_matches("<|im_start|>assistant\n")),
        "the prompt continues where it ended:\n{later}"
    );
    for expected in ["{\"name\":\"apply_patch\",\"arguments\":{\"input\":", "Done.", "found\n[input_image omitted"] {
        assert!(later.contains(expected), "{expected} in {later}");
    }
}

/// The request has the form of Claude Code: a billing line, system messages between the others, and settings that only other models have.
#[tokio::test]
async fn messages_of_a_coding_agent_are_served_in_every_turn() {
    let mut cluster = cluster().await;
    let turn = |number: u32, messages: Value| {
        json!({
            "model": "m", "max_tokens": 2_000, "messages": messages,
            "system": [
                { "type": "text", "text": format!("x-anthropic-billing-header: {number}\n\nYou are an agent.") },
                { "type": "text", "text": "Rules.", "cache_control": { "type": "ephemeral" } },
            ],
            "tools": [
                { "name": "Bash", "description": "Runs.", "input_schema": { "type": "object" }, "cache_control": { "type": "ephemeral" } },
                { "type": "web_search_20250305", "name": "web_search", "max_uses": 8 },
            ],
            "thinking": { "type": "adaptive" }, "output_config": { "effort": "high" }, "context_management": { "edits": [] },
            "metadata": { "user_id": "u" },
        })
    };
    let mut messages = vec![
        json!({ "role": "user", "content": [{ "type": "text", "text": "Hi" }] }),
        json!({ "role": "system", "content": "Skills." }),
    ];
    let call = "<tool_call>\n{\"name\": \"Bash\", \"arguments\": {\"command\": \"ls\"}}\n</tool_call>";
    let (prompt, reply) = answered(&mut cluster, "/v1/messages?beta=true", turn(1, json!(messages)), call, 1_000).await;
    assert!(!prompt.contains("billing") && !prompt.contains("web_search"), "{prompt}");
    assert!(prompt.contains("You are an agent.\nRules.") && prompt.contains("Skills."), "{prompt}");
    let ignored = reply.header(IGNORED).map(str::to_owned);
    assert_eq!(
        ignored.as_deref(),
        Some("context_management, output_config.effort, system[].cache_control, tools.web_search_20250305")
    );
    let (status, answer) = reply.json().await;
    assert_eq!((status, &answer["stop_reason"]), (StatusCode::OK, &json!("tool_use")), "{answer}");

    messages.push(json!({ "role": "assistant", "content": [
        { "type": "redacted_thinking", "data": "x" }, answer["content"][0].clone(),
    ] }));
    messages.push(json!({ "role": "user", "content": [{
        "type": "tool_result", "tool_use_id": answer["content"][0]["id"],
        "content": [
            { "type": "text", "text": "a.txt" },
            { "type": "tool_reference", "tool_name": "TaskStop" },
            { "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": "eA==" } },
            { "type": "search_result", "title": "T", "source": "https://a", "content": [{ "type": "text", "text": "hit" }] },
            { "type": "document", "title": "D", "source": { "type": "text", "media_type": "text/plain", "data": "page" } },
        ],
    }] }));
    messages.push(json!({ "role": "system", "content": "Reminder." }));
    let (later, reply) = answered(&mut cluster, "/v1/messages?beta=true", turn(2, json!(messages)), "ok", 10).await;
    assert_eq!(reply.json().await.0, StatusCode::OK);
    assert!(
        later.starts_with(prompt.trim_end_matches("<|im_start|>assistant\n")),
        "the prompt continues where it ended:\n{later}"
    );
    let result = "a.txt\n[tool: TaskStop]\n[image omitted: the model reads only text]\nT\nhit\nD\npage";
    assert!(later.contains(result) && later.contains("Reminder."), "{later}");
}
