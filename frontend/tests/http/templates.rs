//! Chat templates that take too many steps or write too much text, either always or only for certain messages.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use std::fs;
use tandem_model::HfDirectory;
use tandem_text::{ServedModel, ServedModelError};

/// Returns a model with this chat template and a context of 1,000 tokens. The model's longest token has 10 bytes.
fn model(template: &str) -> Result<ServedModel, ServedModelError> {
    let special = |id: u32, content: &str| {
        json!({
            "id": id, "content": content, "special": true, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
        })
    };
    let files = [
        (
            "config.json",
            json!({
                "model_type": "qwen3", "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4,
                "rms_norm_eps": 1e-6, "max_position_embeddings": 1000, "vocab_size": 4, "eos_token_id": 2,
            }),
        ),
        (
            "tokenizer.json",
            json!({
                "version": "1.0", "normalizer": null,
                "pre_tokenizer": { "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true },
                "added_tokens": [special(1, "<s>"), special(2, "</s>"), special(3, "<|im_end|>")],
                "model": { "type": "BPE", "vocab": { "a": 0 }, "merges": [] },
            }),
        ),
        ("tokenizer_config.json", json!({ "bos_token": "<s>", "eos_token": "</s>", "chat_template": template })),
    ];
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    for (name, content) in files {
        fs::write(folder.path().join(name), content.to_string()).expect("the folder is writable");
    }
    fs::write(folder.path().join("model.safetensors"), [&2_u64.to_le_bytes()[..], b"{}"].concat())
        .expect("the folder is writable");
    ServedModel::from_directory("m", "revision", &HfDirectory::open(folder.path()).expect("the model directory is valid"))
}

/// Returns the status and body of the error for a chat with these messages, if the model has this template.
async fn refusal(template: &str, messages: Vec<Value>) -> (StatusCode, Value) {
    let model = model(template).expect("the template ends for short conversations");
    let mut cluster = Cluster::with(|settings| settings.models = vec![model]).await;
    let (status, answer) = cluster.post(CHAT, &chat(json!({ "messages": messages }))).await.json().await;
    assert!(cluster.no_call(), "a refused request does not reach a worker");
    (status, answer["error"].clone())
}

#[test]
fn model_whose_chat_template_never_ends_is_refused() {
    let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{% set c = b %}{% endfor %}{% endfor %}";
    let Err(error) = model(endless) else { panic!("the model must be refused") };
    assert!(error.to_string().contains("chat template takes more than"), "{error}");
}

#[tokio::test]
async fn messages_too_many_for_a_quadratic_template_are_refused() {
    let template = "{% for m in messages %}{% for o in messages %}{% set x = o.content %}{% endfor %}{% endfor %}x";
    let (status, error) = refusal(template, vec![json!({ "role": "user", "content": "" }); 10_000]).await;
    assert_eq!((status, &error["code"], &error["param"]), (StatusCode::BAD_REQUEST, &json!("too_many"), &json!("messages")));
    assert!(error["message"].as_str().is_some_and(|message| message.contains("send fewer or shorter messages")), "{error}");
}

#[tokio::test]
async fn message_that_a_template_expands_beyond_the_context_is_refused() {
    let template = "{% for m in messages %}{% for n in range(1000) %}{{ m.content }}{% endfor %}{% endfor %}";
    let (status, error) = refusal(template, vec![json!({ "role": "user", "content": "a".repeat(100) })]).await;
    assert_eq!((status, &error["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
}

#[tokio::test]
async fn message_that_triggers_a_hostile_template_is_refused_with_400() {
    const NESTS: &str = "{% set ns = namespace(v=1) %}{% for i in range(90000) %}{% set ns.v = [ns.v] %}{% endfor %}";
    const DOUBLES: &str =
        "{% set ns = namespace(v='x' * 1000) %}{% for i in range(28) %}{% set ns.v = ns.v ~ ns.v %}{% endfor %}{{ ns.v|length }}";
    for (body, code) in [(NESTS, "invalid_value"), (DOUBLES, "too_many"), ("{{ '%1000000000d'|format(1) }}", "too_many")] {
        let source = format!("{{% if messages[0].content == 'go' %}}{body}{{% endif %}}a");
        let model = model(&source).expect("the template renders other conversations");
        let cluster = Cluster::with(|settings| settings.models = vec![model]).await;
        let go = chat(json!({ "messages": [{ "role": "user", "content": "go" }] }));
        let (status, answer) = cluster.post(CHAT, &go).await.json().await;
        let error = &answer["error"];
        assert_eq!(
            (status, &error["code"], &error["param"]),
            (StatusCode::BAD_REQUEST, &json!(code), &json!("messages")),
            "{body}"
        );
        assert_eq!(cluster.post("/tokenize", &chat(json!({}))).await.status(), StatusCode::OK, "{body}");
    }
}

#[tokio::test]
async fn costly_template_does_not_block_other_requests() {
    const LOOPS: &str = "{% for i in range(90000) %}{% for i in range(90000) %}{% endfor %}{% endfor %}";
    let model = model(&format!("{{% if messages[0].content == 'go' %}}{LOOPS}{{% endif %}}a")).expect("the template is valid");
    let cluster = Cluster::with(|settings| settings.models = vec![model]).await;
    let go = chat(json!({ "messages": [{ "role": "user", "content": "go" }] }));
    let (costly, other) = (cluster.post(CHAT, &go), cluster.get("/live"));
    // The test has one thread, so the other request is answered first only if the template is rendered on another thread.
    tokio::select! {
        biased;
        refused = costly => panic!("the costly request was answered first: {}", refused.status()),
        (live, _) = other => assert_eq!(live, StatusCode::OK),
    }
}

#[tokio::test]
async fn template_that_renders_nothing_for_these_messages_is_a_400() {
    let template = "{% if messages[0].content != 'nothing' %}a{% endif %}";
    let (status, error) = refusal(template, vec![json!({ "role": "user", "content": "nothing" })]).await;
    assert_eq!((status, &error["param"]), (StatusCode::BAD_REQUEST, &json!("messages")), "{error}");
}
