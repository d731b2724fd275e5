use super::*;
use crate::chat::{Role, Tool, ToolCall, ToolChoice};
use serde_json::json;

fn call(name: &str, arguments: Value) -> ToolCall {
    ToolCall { id: Some("c1".to_owned()), name: name.to_owned(), arguments: arguments.as_object().cloned().unwrap_or_default() }
}

fn conversation() -> Conversation {
    let tool = Tool::function("f".to_owned(), Some("d".to_owned()), json!({ "type": "object" }));
    let calls = vec![call("f", json!({ "b": 1, "a": "x" })), call("f", json!({}))];
    let result = |content: &str| Message { tool_call_id: Some("c1".to_owned()), ..Message::new(Role::Tool, content) };
    let messages = vec![
        Message::new(Role::User, "Hi"),
        Message { content: None, tool_calls: calls, reasoning: Some("r".to_owned()), ..Message::new(Role::Assistant, "") },
        result("one"),
        result("two"),
    ];
    let tools = Tools { list: vec![tool], choice: ToolChoice::Auto, parallel: true };
    Conversation { messages, tools, template: TemplateOptions::default() }
}

#[test]
fn template_that_renders_tools_gets_messages_as_transformers_passes_them() {
    let variables = |form| conversation().variables(Abilities { tools: Some(form), ..Abilities::default() });
    let function =
        |arguments: Value| json!({ "type": "function", "function": { "name": "f", "arguments": arguments }, "id": "c1" });
    let object = variables(MessageForm::default());
    assert_eq!(
        Value::Object(object),
        json!({
            "messages": [
                { "role": "user", "content": "Hi" },
                {
                    "role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r",
                    "tool_calls": [function(json!({ "b": 1, "a": "x" })), function(json!({}))],
                },
                { "role": "tool", "content": "one", "tool_call_id": "c1" },
                { "role": "tool", "content": "two", "tool_call_id": "c1" },
            ],
            "tools": [{ "type": "function", "function": { "name": "f", "description": "d", "parameters": { "type": "object" } } }],
            "documents": null, "add_generation_prompt": true,
        })
    );
    let text = variables(MessageForm { null_content: true, text_arguments: true, ..MessageForm::default() });
    assert_eq!(text["messages"][1]["content"], Value::Null);
    assert_eq!(
        text["messages"][1]["tool_calls"][0]["function"]["arguments"], r#"{"b":1,"a":"x"}"#,
        "the members keep their order"
    );
}

#[test]
fn template_without_tools_receives_tools_as_texts() {
    let definition = r#"{"type":"function","function":{"name":"f","description":"d","parameters":{"type":"object"}}}"#;
    let contents = |conversation: &Conversation, system| -> Vec<(String, String)> {
        let system = if system { SystemPlaces::First } else { SystemPlaces::Never };
        let variables = conversation.variables(Abilities { system, ..Abilities::default() });
        assert_eq!(variables["tools"], Value::Null);
        let text = |message: &Value, field: &str| message[field].as_str().expect("the field is a text").to_owned();
        let messages = variables["messages"].as_array().expect("the messages are a list");
        messages.iter().map(|message| (text(message, "role"), text(message, "content"))).collect()
    };
    let mut given = conversation();
    let found = contents(&given, true);
    let roles: Vec<&str> = found.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(roles, ["system", "user", "assistant", "user"]);
    assert!(found[0].1.contains(&format!("<tools>\n{definition}\n</tools>")), "{}", found[0].1);
    let calls = "<tool_call>\n{\"name\":\"f\",\"arguments\":{\"b\":1,\"a\":\"x\"}}\n</tool_call>\n<tool_call>\n{\"name\":\"f\",\"arguments\":{}}\n</tool_call>";
    assert_eq!(found[2].1, calls);
    assert_eq!(found[3].1, "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>");

    let first = contents(&given, false);
    assert_eq!(first.len(), 3, "the first user message describes the tools");
    assert!(first[0].1.starts_with("# Tools") && first[0].1.ends_with("\n\nHi"), "{}", first[0].1);

    given.messages.insert(0, Message::new(Role::System, "Be brief."));
    assert!(contents(&given, true)[0].1.starts_with("Be brief.\n\n# Tools"));
    given.tools.list.clear();
    assert_eq!(contents(&given, true)[0].1, "Be brief.");
}

#[test]
fn for_each_text_visits_every_text_of_the_client() {
    let mut conversation = conversation();
    conversation.messages[1].name = Some("n".to_owned());
    conversation.template.documents = vec![json!({ "k": ["v", 1] })];
    conversation.template.variables.insert("enable_thinking".to_owned(), json!({ "x": "y" }));
    let mut texts = Vec::new();
    conversation.for_each_text(&mut |text| {
        texts.push(text.clone());
        text.push('!');
    });
    texts.sort_unstable();
    let definition = ["type", "function", "function", "name", "f", "description", "d", "parameters", "type", "object"];
    let messages = ["Hi", "r", "n", "c1", "f", "b", "a", "x", "c1", "f", "one", "c1", "two", "c1"];
    let mut expected: Vec<&str> = definition.into_iter().chain(messages).chain(["k", "v", "x", "y"]).collect();
    expected.sort_unstable();
    assert_eq!(texts, expected);
    assert_eq!(
        conversation.messages[1].tool_calls[0].arguments,
        *json!({ "b!": 1, "a!": "x!" }).as_object().expect("it is an object")
    );
    assert!(conversation.text_bytes() > texts.iter().map(String::len).sum::<usize>());
}

#[test]
fn required_calls_have_a_schema_with_references_that_still_resolve() {
    let parameters =
        json!({ "$defs": { "d": { "type": "string" } }, "properties": { "a": { "$ref": "#/$defs/d" }, "b": { "$ref": "#" } } });
    let tool = |name: &str, parameters: &Value| Tool::function(name.to_owned(), None, parameters.clone());
    let list = vec![tool("f", &Value::Null), tool("g", &parameters)];
    let schema = |choice, parallel| Tools { list: list.clone(), choice, parallel }.required_schema();
    assert_eq!(schema(ToolChoice::Auto, true), None);
    let named = schema(ToolChoice::Named("g".to_owned()), true).expect("a call is required");
    assert_eq!((&named["properties"], &named["type"]), (&parameters["properties"], &json!("object")));
    let required = schema(ToolChoice::Required, false).expect("a call is required");
    assert_eq!((&required["type"], &required["minItems"], &required["maxItems"]), (&json!("array"), &json!(1), &json!(1)));
    for (index, name) in ["f", "g"].into_iter().enumerate() {
        assert_eq!(required["items"]["anyOf"][index]["properties"]["name"]["const"], name);
    }
    let pointer = "/items/anyOf/1/properties/parameters";
    let moved = &required.pointer(pointer).expect("the second tool has parameters")["properties"];
    let target = moved["a"]["$ref"].as_str().and_then(|reference| reference.strip_prefix('#')).expect("the reference is local");
    assert_eq!(required.pointer(target), Some(&json!({ "type": "string" })));
    assert_eq!(moved["b"]["$ref"], format!("#{pointer}"));
    assert_eq!(schema(ToolChoice::Required, true).expect("a call is required").get("maxItems"), None);
}
