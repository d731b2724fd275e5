//! Checks that the server behaves as the OpenAPI document states: every stated bound is tried on both sides.

use crate::support::{CHAT, COMPLETIONS, Cluster, chat, completion};
use hyper::Method;
use serde_json::{Map, Value, json};

/// Returns values at and just beyond the bounds of a parameter's schema. The bool says whether the schema allows the value.
fn at_bounds(schema: &Value) -> Vec<(Value, bool)> {
    let mut found: Vec<(Value, bool)> = schema["oneOf"].as_array().into_iter().flatten().flat_map(at_bounds).collect();
    let number = |key: &str| schema[key].as_f64();
    found.extend(number("minimum").into_iter().flat_map(|min| [(json!(min), true), (json!(min - 1.0), false)]));
    found.extend(number("maximum").into_iter().flat_map(|max| [(json!(max), true), (json!(max + 1.0), false)]));
    found.extend(number("exclusiveMinimum").map(|min| (json!(min), false)));
    let length = |key: &str| schema[key].as_u64().map(|length| length as usize);
    found.extend(length("minLength").map(|_| (json!(""), false)));
    found.extend(length("maxLength").into_iter().flat_map(|max| [max, max + 1].map(|len| (json!("x".repeat(len)), len == max))));
    found.extend(length("minItems").map(|_| (json!([]), false)));
    found.extend(length("maxItems").map(|max| (json!(vec![example(&schema["items"]); max + 1]), false)));
    let members = |count: usize| -> Map<String, Value> { (0..count).map(|key| (key.to_string(), json!(0))).collect() };
    found.extend(length("maxProperties").map(|max| (Value::Object(members(max + 1)), false)));
    found
}

/// Returns a value that the schema allows.
fn example(schema: &Value) -> Value {
    match schema["type"].as_str() {
        Some("string") => json!("a"),
        Some("integer") => json!(1),
        Some("array") => json!([example(&schema["items"])]),
        _ => json!({ "role": "user", "content": "a" }),
    }
}

#[tokio::test]
async fn server_enforces_the_bounds_and_required_fields_of_its_openapi_document() {
    let cluster = Cluster::start().await;
    let (_, document) = cluster.get("/openapi.json").await;
    let schemas = &document["components"]["schemas"];
    let object = |value: &Value| value.as_object().cloned().unwrap_or_default();
    let mut tried = 0;
    for (path, own, request) in
        [(CHAT, "ChatRequest", chat(json!({}))), (COMPLETIONS, "CompletionRequest", completion(json!("a"), json!({})))]
    {
        let parts = [&schemas["Sampling"], &schemas[own]["allOf"][1]];
        let reply = async |body: &Value| {
            let explained = [("x-tandem-explain", "true")];
            cluster.send(Method::POST, path, &explained, body.to_string()).await.json().await
        };
        for (name, schema) in parts.iter().flat_map(|part| object(&part["properties"])) {
            for (value, allowed) in at_bounds(&schema) {
                let mut body = request.clone();
                match name.as_str() {
                    "top_logprobs" => body["logprobs"] = json!(true),
                    "max_tokens" if path == COMPLETIONS => body["echo"] = json!(true),
                    _ => {}
                }
                body[&name] = value;
                let (status, answer) = reply(&body).await;
                let text = body[&name].to_string();
                let shown = format!("{path} {name} = {}: {answer}", &text[..text.len().min(80)]);
                assert_eq!(status.as_u16(), if allowed { 200 } else { 400 }, "{shown}");
                assert!(allowed || answer["error"]["param"] == name.as_str(), "{shown}");
                tried += 1;
            }
        }
        for name in parts.iter().flat_map(|part| part["required"].as_array().into_iter().flatten()) {
            let mut body = object(&request);
            body.remove(name.as_str().expect("names are strings"));
            let (status, answer) = reply(&Value::Object(body)).await;
            assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, name), "{answer}");
        }
    }
    assert!(tried > 60, "only {tried} values were tried");
}
