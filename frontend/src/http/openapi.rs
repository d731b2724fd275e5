//! The OpenAPI document of this server, made from the types of requests and answers and from the limits of the checks.

use super::{app::App, body::BodyForm, passthrough};
use crate::models::Models;
use axum::{Json, extract::State};
use schemars::{JsonSchema, SchemaGenerator, generate::SchemaSettings, transform::RecursiveTransform};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tandem_api::{
    ChatRequest, CompletionRequest, DetokenizeRequest, GenerateRequest, OfModels, TokenizeRequest,
    answer::{Envelope, GeneratedAnswer, GeneratedChunk},
    efforts,
};

const DESCRIPTION: &str = "The APIs of OpenAI, Anthropic and vLLM, as far as Tandem serves them. Fields of requests that this document does not \
     have are ignored, and the response's header `x-tandem-ignored-parameters` names them. Parameters with the schema `Unsupported` are refused \
     with 400, unless their value has no effect. Integers may be written as `5.0`. Every response has the header `x-request-id`. Responses with the \
     status 429, 503 and 504 have the header `Retry-After`. The header `x-request-priority` has the priority of a request without the field \
     `priority`. With the header `x-tandem-details: true`, answers have the object `tandem`; with `x-tandem-explain: true` nothing runs, and the \
     reply explains where each prompt would be placed. Only trusted peers may send these last two headers; other peers get 403.";
/// The paths and schemas of the Responses API and of Anthropic's API, which are described by hand and do not state every rule.
const OTHER_APIS: &str = include_str!("openapi/other_apis.json");
const DEFINITIONS: &str = "/components/schemas";

pub(super) async fn show(State(app): State<Arc<App>>) -> Json<Value> {
    let mut document = document(&app.models);
    if app.passed.ids().next().is_some() {
        add_passed(&mut document);
    }
    if app.keys.is_some() {
        require_key(&mut document);
    }
    Json(document)
}

/// Makes schemas of the types that this server reads, and of those that it writes.
struct Schemas {
    read: SchemaGenerator,
    written: SchemaGenerator,
}

impl Schemas {
    fn new(models: &Models) -> Self {
        let of_models = OfModels {
            ids: models.iter().map(|served| served.model.id.clone()).collect(),
            vocab_size: models.iter().map(|served| served.model.tokenizer.vocab_size()).min().unwrap_or(1),
            context_length: models.context_length_max(),
            efforts: models
                .iter()
                .map(|served| efforts(served.model.template.as_deref()))
                .min_by_key(|efforts| efforts.len())
                .unwrap_or_default(),
            images: models.iter().any(|served| served.model.reads_images()),
        };
        let settings = SchemaSettings::draft2020_12().with(|settings| {
            settings.definitions_path = DEFINITIONS.into();
            settings.meta_schema = None;
        });
        let settings = settings.with_transform(RecursiveTransform(of_models));
        Self { read: settings.clone().into_generator(), written: settings.for_serialize().into_generator() }
    }

    fn request<T: JsonSchema>(&mut self) -> Value {
        let schema = self.read.subschema_for::<T>();
        json!({ "required": true, "content": { "application/json": { "schema": schema } } })
    }

    fn answer<T: JsonSchema>(&mut self) -> Value {
        json!({ "application/json": { "schema": self.written.subschema_for::<T>() } })
    }

    /// Returns the content of an endpoint whose answer may be streamed.
    fn streamed<T: JsonSchema, E: JsonSchema>(&mut self) -> Value {
        let mut content = self.answer::<T>();
        let object = json!({ "anyOf": [self.written.subschema_for::<E>(), { "$ref": "#/components/schemas/Error" }] });
        let data = json!({ "anyOf": [
            { "const": "[DONE]" },
            { "type": "string", "contentMediaType": "application/json", "contentSchema": object },
        ] });
        content["text/event-stream"] = json!({ "schema": {
            "type": "object", "properties": { "data": data }, "required": ["data"],
            "description": "Each of the server-sent events. The stream ends with `[DONE]` or with an error, after which no event follows. A stream whose \
                            first token takes longer than 10 seconds begins with comments (`: keep-alive`).",
        } });
        content
    }

    fn finish(mut self) -> Map<String, Value> {
        let mut all = self.read.take_definitions(true);
        all.extend(self.written.take_definitions(true));
        all
    }
}

fn responses(ok: &str, content: Value) -> Value {
    json!({ "200": { "description": ok, "content": content }, "default": { "$ref": "#/components/responses/Error" } })
}

fn text(kind: &str) -> Value {
    json!({ kind: { "schema": { "type": "string" } } })
}

fn object(properties: Value) -> Value {
    let required: Vec<&String> = properties.as_object().into_iter().flat_map(Map::keys).collect();
    json!({ "application/json": { "schema": { "type": "object", "properties": properties, "required": required } } })
}

fn document(models: &Models) -> Value {
    let (mut schemas, mut paths) = (Schemas::new(models), Map::new());
    add_answers(&mut paths, &mut schemas);
    add_tokens(&mut paths, &mut schemas);
    add_models(&mut paths, models);
    add_pages(&mut paths);
    let other: Value = serde_json::from_str(OTHER_APIS).expect("the file is JSON");
    let part = |pointer: &str| other.pointer(pointer).and_then(Value::as_object).cloned().unwrap_or_default();
    paths.extend(part("/paths"));
    let mut definitions = schemas.finish();
    definitions.extend(part("/components/schemas"));
    definitions.insert("Model".to_owned(), model());
    definitions.insert("Error".to_owned(), error());
    let mut responses = part("/components/responses");
    responses.insert(
        "Error".to_owned(),
        json!({
            "description": "The reason, and what to do.",
            "content": { "application/json": { "schema": { "$ref": "#/components/schemas/Error" } } },
        }),
    );
    json!({
        "openapi": "3.1.0",
        "info": { "title": "Tandem", "version": env!("CARGO_PKG_VERSION"), "description": DESCRIPTION },
        "paths": paths,
        "components": {
            "responses": responses,
            "schemas": definitions,
        },
    })
}

/// Adds the rule that requests need a key, except requests to the paths that are listed here.
fn require_key(document: &mut Value) {
    document["security"] = json!([{ "bearer": [] }, { "key": [] }]);
    document["components"]["securitySchemes"] = json!({
        "bearer": { "type": "http", "scheme": "bearer" },
        "key": { "type": "apiKey", "in": "header", "name": "x-api-key" },
    });
    for path in ["/health", "/live", "/ping", "/ready", "/metrics", "/load", "/chat", "/dashboard"] {
        for (_, operation) in document["paths"][path].as_object_mut().into_iter().flatten() {
            operation["security"] = json!([]);
        }
    }
}

fn add_post(paths: &mut Map<String, Value>, path: &str, summary: &str, request: Value, responses: Value) {
    let post = json!({ "summary": summary, "responses": responses, "requestBody": request });
    paths.insert(path.to_owned(), json!({ "post": post }));
}

fn add_get(paths: &mut Map<String, Value>, path: &str, summary: &str, responses: Value) {
    paths.insert(path.to_owned(), json!({ "get": { "summary": summary, "responses": responses } }));
}

/// Adds the paths that answer prompts.
fn add_answers(paths: &mut Map<String, Value>, schemas: &mut Schemas) {
    let chat = (schemas.request::<ChatRequest>(), schemas.streamed::<Envelope<'_>, Envelope<'_>>());
    add_post(paths, "/v1/chat/completions", "Answers a conversation.", chat.0, responses("The answer.", chat.1));
    let text = (schemas.request::<CompletionRequest>(), schemas.streamed::<Envelope<'_>, Envelope<'_>>());
    add_post(paths, "/v1/completions", "Continues texts or token ids.", text.0, responses("The answer.", text.1));
    let tokens = (schemas.request::<GenerateRequest>(), schemas.streamed::<GeneratedAnswer<'_>, GeneratedChunk<'_>>());
    let summary = "Continues token ids with token ids.";
    add_post(paths, "/inference/v1/generate", summary, tokens.0, responses("The answer.", tokens.1));
}

/// Adds the paths that convert texts to tokens and back.
fn add_tokens(paths: &mut Map<String, Value>, schemas: &mut Schemas) {
    for path in ["/tokenize", "/v1/tokenize"] {
        let tokens = json!({ "type": "array", "items": { "type": "integer" } });
        let strings = json!({ "type": ["array", "null"], "items": { "type": "string" } });
        let answer = responses(
            "The tokens.",
            object(json!({
                "count": { "type": "integer" }, "max_model_len": { "type": "integer" }, "tokens": tokens, "token_strs": strings,
            })),
        );
        add_post(paths, path, "Tokenizes a text or a conversation.", schemas.request::<TokenizeRequest>(), answer);
    }
    for path in ["/detokenize", "/v1/detokenize"] {
        let answer = responses("The text.", object(json!({ "prompt": { "type": "string" } })));
        add_post(paths, path, "Returns the text of tokens.", schemas.request::<DetokenizeRequest>(), answer);
    }
}

/// Adds the paths whose requests are passed through.
fn add_passed(document: &mut Value) {
    let Some(paths) = document["paths"].as_object_mut() else { return };
    for (path, endpoint) in passthrough::paths() {
        let kind = if BodyForm::of(endpoint) == BodyForm::Json { "application/json" } else { "multipart/form-data" };
        let schema = json!({ "type": "object", "properties": { "model": { "type": "string" } }, "required": ["model"] });
        let request = json!({ "required": true, "content": { kind: { "schema": schema } } });
        let ok = "The answer of the model's server, unchanged. `model` is the only field that this server reads.";
        add_post(paths, path, "Is passed through to a server of the model.", request, responses(ok, json!({ "*/*": {} })));
    }
}

fn add_models(paths: &mut Map<String, Value>, models: &Models) {
    let of_model = json!({ "$ref": "#/components/schemas/Model" });
    let list = object(json!({ "object": { "const": "list" }, "data": { "type": "array", "items": of_model } }));
    add_get(paths, "/v1/models", "Lists the served models.", responses("The models.", list));
    let one = json!({ "application/json": { "schema": of_model } });
    add_get(paths, "/v1/models/{id}", "Describes a served model.", responses("The model.", one));
    let ids: Vec<&String> = models.iter().map(|served| &served.model.id).collect();
    paths["/v1/models/{id}"]["get"]["parameters"] =
        json!([{ "name": "id", "in": "path", "required": true, "schema": { "type": "string", "examples": ids } }]);
}

/// Adds the paths for operators.
fn add_pages(paths: &mut Map<String, Value>) {
    let status = object(json!({ "status": { "type": "string" } }));
    let mut add = |path: &str, summary: &str, ok: &str, content: Value| add_get(paths, path, summary, responses(ok, content));
    for path in ["/health", "/live", "/ping"] {
        add(path, "Liveness.", "The process answers.", status.clone());
    }
    add(
        "/ready",
        "Readiness.",
        "Requests for at least one model can be served. With several models, `models` has the status of each.",
        status.clone(),
    );
    add("/version", "The server's version.", "The version.", object(json!({ "version": { "type": "string" } })));
    add("/load", "The number of requests that run.", "The number.", object(json!({ "server_load": { "type": "integer" } })));
    add("/metrics", "Prometheus metrics.", "Prometheus' text format.", text("text/plain"));
    add("/chat", "A conversation with the model, in a browser.", "A page.", text("text/html"));
    add("/dashboard", "The operator's dashboard. The data below this path is not an API.", "A page.", text("text/html"));
    add(
        "/openapi.json",
        "This document.",
        "An OpenAPI document.",
        json!({ "application/json": { "schema": { "type": "object" } } }),
    );
    paths["/ping"]["post"] = json!({ "summary": "Liveness.", "responses": responses("The process answers.", status.clone()) });
    paths["/ready"]["get"]["responses"]["503"] =
        json!({ "description": "No model can be served; `status` has the reason.", "content": status });
}

fn model() -> Value {
    json!({
        "type": "object",
        "properties": {
            "id": { "type": "string" }, "object": { "const": "model" }, "created": { "type": "integer" }, "owned_by": { "type": "string" },
            "max_model_len": { "type": "integer", "description": "Absent if the model's requests are passed through; `owned_by` is `passthrough`." },
        },
        "required": ["id", "object", "created", "owned_by"],
    })
}

fn error() -> Value {
    let properties = json!({
        "message": { "type": "string" },
        "type": { "enum": ["invalid_request_error", "rate_limit_error", "server_error"] },
        "param": { "type": ["string", "null"] },
        "code": { "type": ["string", "null"] },
        "retry_after": { "type": "integer", "description": "In events of streams: the seconds of `Retry-After`, a header that can no longer be sent." },
    });
    let inner = json!({ "type": "object", "properties": properties, "required": ["message", "type", "param", "code"] });
    json!({ "type": "object", "properties": { "error": inner }, "required": ["error"] })
}
