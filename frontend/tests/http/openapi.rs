//! Checks that the server behaves as the OpenAPI document states: every stated bound is tried on both sides.

use crate::support::{CHAT, COMPLETIONS, Cluster, chat, completion};
use hyper::Method;
use serde_json::{Map, Value, json};
use std::collections::BTreeSet;

/// Returns values at and just beyond the bounds of a parameter's schema. The bool says whether the schema allows the value.
fn at_bounds(schema: &Value) -> Vec<(Value, bool)> {
    /// Greater bounds are those of the number's type, and longer lists have more values than a body may have.
    const BOUND_MAX: f64 = 1e10;
    const ITEMS_MAX: usize = 20_000;
    let forms = schema["anyOf"].as_array().into_iter().flatten();
    let mut found: Vec<(Value, bool)> = forms.flat_map(at_bounds).collect();
    let number = |key: &str| schema[key].as_f64().filter(|bound| bound.abs() < BOUND_MAX);
    found.extend(number("minimum").into_iter().flat_map(|min| [(json!(min), true), (json!(min - 1.0), false)]));
    found.extend(number("maximum").into_iter().flat_map(|max| [(json!(max), true), (json!(max + 1.0), false)]));
    let length = |key: &str| schema[key].as_u64().map(|length| length as usize).filter(|length| *length < ITEMS_MAX);
    found.extend(length("minLength").map(|_| (json!(""), false)));
    found.extend(length("maxLength").into_iter().flat_map(|max| [max, max + 1].map(|len| (json!("é".repeat(len)), len == max))));
    found.extend(length("minItems").map(|_| (json!([]), false)));
    found.extend(length("maxItems").map(|max| (json!(vec![example(&schema["items"]); max + 1]), false)));
    let members = |count: usize| -> Map<String, Value> { (0..count).map(|key| (key.to_string(), json!(0))).collect() };
    found.extend(length("maxProperties").map(|max| (Value::Object(members(max + 1)), false)));
    found.extend(schema["enum"].as_array().into_iter().flatten().map(|value| (value.clone(), true)));
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
    let unsupported = |schema: &Value| schema.get("$ref").is_some() || schema.to_string().contains("maxProperties\":0");
    let mut tried = 0;
    for (path, own, request) in
        [(CHAT, "ChatRequest", chat(json!({}))), (COMPLETIONS, "CompletionRequest", completion(json!("a"), json!({})))]
    {
        let schema = &schemas[own];
        let reply = async |body: &Value| {
            let explained = [("x-tandem-explain", "true")];
            cluster.send(Method::POST, path, &explained, body.to_string()).await.json().await
        };
        // A choice of tools is only possible with tools.
        let tested = |(name, schema): &(String, Value)| !unsupported(schema) && name != "tool_choice";
        for (name, schema) in object(&schema["properties"]).into_iter().filter(tested) {
            // The prompt and the other limit of tokens decide whether these values are possible.
            let depends = ["max_tokens", "max_completion_tokens", "min_tokens"].contains(&name.as_str());
            let maximum = schema["maximum"].as_f64().filter(|_| depends);
            for (value, allowed) in at_bounds(&schema) {
                if maximum.is_some() && value.as_f64() == maximum {
                    continue;
                }
                let mut body = request.clone();
                match name.as_str() {
                    "top_logprobs" => body["logprobs"] = json!(true),
                    "best_of" => body["n"] = value.clone(),
                    _ => {}
                }
                body[&name] = value;
                let (status, answer) = reply(&body).await;
                let text = body[&name].to_string();
                let shown = format!("{path} {name} = {}: {answer}", text.chars().take(80).collect::<String>());
                assert_eq!(status.as_u16(), if allowed { 200 } else { 400 }, "{shown}");
                let param = if name == "best_of" { "n" } else { name.as_str() };
                assert!(allowed || answer["error"]["param"] == param, "{shown}");
                tried += 1;
            }
        }
        for name in schema["required"].as_array().into_iter().flatten() {
            let mut body = object(&request);
            body.remove(name.as_str().expect("names are strings"));
            let (status, answer) = reply(&Value::Object(body)).await;
            assert_eq!((status.as_u16(), &answer["error"]["param"]), (400, name), "{answer}");
        }
    }
    assert!(tried > 60, "only {tried} values were tried");
}

#[tokio::test]
async fn document_describes_every_path_of_the_server() {
    let cluster = Cluster::start().await;
    let (_, document) = cluster.get("/openapi.json").await;
    let described: BTreeSet<&str> = document["paths"].as_object().into_iter().flatten().map(|(path, _)| path.as_str()).collect();
    let code = include_str!("../../src/http/mod.rs");
    let routes = code.split(".route(\"").skip(1).filter_map(|rest| rest.split('"').next());
    let served: BTreeSet<String> = routes.map(|path| path.replace("{*", "{")).collect();
    let missing: Vec<_> = served.iter().filter(|path| !described.contains(path.as_str())).collect();
    assert!(missing.is_empty(), "http/openapi.rs must describe {missing:?}");
    let gone: Vec<_> =
        described.iter().filter(|path| !["/chat", "/dashboard"].contains(path) && !served.contains(**path)).collect();
    assert!(gone.is_empty(), "http/openapi.rs describes {gone:?}, which the server does not have");
    let references = document.to_string();
    for reference in references.split("\"$ref\":\"#").skip(1).filter_map(|rest| rest.split('"').next()) {
        assert!(document.pointer(reference).is_some(), "the document has no {reference}");
    }
}
