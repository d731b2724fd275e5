//! Invalid requests, each with the status, `param` and `code` that the error must have, and words that its message must contain.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};

/// A request, and the expected status, `param` (`None`: null), `code` and words of the error.
type Row = (Value, u16, Option<&'static str>, &'static str, &'static [&'static str]);

async fn check(cluster: &mut Cluster, path: &str, rows: Vec<Row>) {
    for (body, status, param, code, words) in rows {
        let sent = body.to_string();
        expect(cluster, path, sent.into_bytes(), (status, param, code, words)).await;
    }
    assert!(cluster.no_call(), "a refused request does not reach a worker");
}

async fn expect(cluster: &Cluster, path: &str, body: Vec<u8>, expected: (u16, Option<&str>, &str, &[&str])) {
    let shown = String::from_utf8_lossy(&body[..body.len().min(200)]).into_owned();
    let (status, answer) = cluster.send(Method::POST, path, &[], body).await.json().await;
    let error = &answer["error"];
    let case = format!("{path} {shown} → {answer}");
    let (expected_status, param, code, words) = expected;
    assert_eq!(status.as_u16(), expected_status, "{case}");
    assert_eq!(error["type"], "invalid_request_error", "{case}");
    assert_eq!(error["param"].as_str(), param, "{case}");
    assert!(error.get("param").is_some(), "{case}");
    assert_eq!(error["code"], code, "{case}");
    let message = error["message"].as_str().unwrap_or_else(|| panic!("{case}"));
    for word in words {
        assert!(message.contains(word), "{word:?} in {case}");
    }
}

/// Returns the rows that both endpoints refuse.
fn both(request: impl Fn(Value) -> Value) -> Vec<Row> {
    let row = |options: Value, param: &'static str, code: &'static str, words: &'static [&'static str]| -> Row {
        (request(options), 400, Some(param), code, words)
    };
    vec![
        (
            request(json!({ "model": "gpt-4" })),
            404,
            Some("model"),
            "model_not_found",
            &["'gpt-4'", "does not exist", "/v1/models"],
        ),
        row(json!({ "model": null }), "model", "missing_required_parameter", &["'model'", "required"]),
        row(json!({ "model": 7 }), "model", "invalid_type", &["'model'", "integer `7`", "expected a string"]),
        row(
            json!({ "temperature": "hot" }),
            "temperature",
            "invalid_type",
            &["'temperature'", "string \"hot\"", "expected a number"],
        ),
        row(json!({ "temperature": 2.1 }), "temperature", "invalid_value", &["between 0 and 2", "2.1"]),
        row(json!({ "temperature": -0.1 }), "temperature", "invalid_value", &["between 0 and 2"]),
        row(json!({ "top_p": -0.1 }), "top_p", "invalid_value", &["between 0 and 1", "is -0.1"]),
        row(json!({ "top_p": 1.5 }), "top_p", "invalid_value", &["between 0 and 1"]),
        row(json!({ "top_k": -2 }), "top_k", "invalid_value", &["-1 or 0"]),
        row(json!({ "min_p": 1.1 }), "min_p", "invalid_value", &["between 0 and 1"]),
        row(json!({ "repetition_penalty": 0 }), "repetition_penalty", "invalid_value", &["above 0"]),
        row(json!({ "repetition_penalty": 1e300 }), "repetition_penalty", "invalid_value", &["at most 100"]),
        row(json!({ "frequency_penalty": 3 }), "frequency_penalty", "invalid_value", &["between -2 and 2"]),
        row(json!({ "presence_penalty": -3 }), "presence_penalty", "invalid_value", &["between -2 and 2"]),
        row(json!({ "n": 0 }), "n", "invalid_value", &["between 1 and 128", "is 0"]),
        row(json!({ "n": 129 }), "n", "invalid_value", &["between 1 and 128"]),
        row(json!({ "n": 1.5 }), "n", "invalid_type", &["'n'", "1.5", "expected a whole number"]),
        row(json!({ "max_tokens": -1 }), "max_tokens", "invalid_value", &["whole number", "-1"]),
        row(json!({ "max_tokens": 600 }), "max_tokens", "context_length_exceeded", &["512", "600"]),
        row(json!({ "max_tokens": 1_u64 << 40 }), "max_tokens", "invalid_value", &["at most 4294967295", "is 1099511627776"]),
        row(json!({ "min_tokens": -1 }), "min_tokens", "invalid_value", &["from 0 on"]),
        row(json!({ "min_tokens": 9, "max_tokens": 8 }), "min_tokens", "invalid_value", &["'max_tokens'"]),
        row(json!({ "max_tokens": 1e30 }), "max_tokens", "invalid_type", &["'max_tokens'", "expected a whole number"]),
        row(json!({ "stream": true, "stream_options": [true] }), "stream_options", "invalid_type", &["an object"]),
        row(json!({ "seed": "x" }), "seed", "invalid_type", &["'seed'"]),
        row(json!({ "stop": 7 }), "stop", "invalid_type", &["a string or a list of strings"]),
        row(json!({ "stop": ["a", 7] }), "stop[1]", "invalid_type", &["'stop[1]'"]),
        row(json!({ "stop": ["a", ""] }), "stop", "invalid_value", &["empty string"]),
        row(json!({ "stop": vec!["a"; 17] }), "stop", "too_many", &["at most 16"]),
        row(json!({ "stop": "x".repeat(1025) }), "stop", "too_many", &["1024 characters"]),
        row(json!({ "stop_token_ids": [258] }), "stop_token_ids", "invalid_value", &["below 258"]),
        row(json!({ "stop_token_ids": [-1] }), "stop_token_ids", "invalid_value", &["below 258"]),
        row(json!({ "logit_bias": { "7": 101 } }), "logit_bias.7", "invalid_value", &["between -100 and 100"]),
        row(json!({ "logit_bias": { "258": 1 } }), "logit_bias", "invalid_value", &["below 258"]),
        row(json!({ "logit_bias": { "seven": 1 } }), "logit_bias", "invalid_value", &["token ids"]),
        row(json!({ "logit_bias": [1] }), "logit_bias", "invalid_type", &["'logit_bias'", "expected an object"]),
        row(json!({ "logit_bias": { "+7": 1 } }), "logit_bias", "invalid_value", &["token ids"]),
        row(json!({ "logit_bias": { "7": null } }), "logit_bias.7", "invalid_type", &["expected a number"]),
        row(json!({ "stream": "yes" }), "stream", "invalid_type", &["expected a boolean"]),
        row(json!({ "stream_options": { "include_usage": true } }), "stream_options", "invalid_value", &["'stream' is true"]),
        row(
            json!({ "stream": true, "stream_options": { "include_usage": 1 } }),
            "stream_options.include_usage",
            "invalid_type",
            &["expected a boolean"],
        ),
        row(json!({ "cache_salt": "" }), "cache_salt", "empty_value", &["'cache_salt'", "empty"]),
        row(json!({ "cache_salt": "x".repeat(257) }), "cache_salt", "too_many", &["256 characters"]),
        row(json!({ "allowed_token_ids": [] }), "allowed_token_ids", "empty_value", &["must not be empty"]),
        row(json!({ "allowed_token_ids": [1, 258] }), "allowed_token_ids", "invalid_value", &["below 258"]),
        row(json!({ "allowed_token_ids": [-1] }), "allowed_token_ids", "invalid_value", &["below 258"]),
        row(json!({ "allowed_token_ids": "a" }), "allowed_token_ids", "invalid_type", &["expected a list"]),
        row(json!({ "bad_words": ["ok", ""] }), "bad_words", "invalid_value", &["without tokens"]),
        row(json!({ "bad_words": vec!["x"; 129] }), "bad_words", "too_many", &["at most 128 strings"]),
        row(json!({ "bad_words": ["é".repeat(129)] }), "bad_words", "too_many", &["128 characters"]),
        row(json!({ "bad_words": "ugly" }), "bad_words", "invalid_type", &["expected a list"]),
        row(json!({ "logprob_token_ids": [1] }), "logprob_token_ids", "invalid_value", &["with 'logprobs'"]),
        row(json!({ "logprob_token_ids": vec![1; 21] }), "logprob_token_ids", "too_many", &["at most 20"]),
        row(json!({ "logprob_token_ids": [258] }), "logprob_token_ids", "invalid_value", &["below 258"]),
        row(json!({ "prompt_logprobs": -1 }), "prompt_logprobs", "invalid_value", &["between 0 and 20"]),
        row(json!({ "prompt_logprobs": 21 }), "prompt_logprobs", "invalid_value", &["between 0 and 20"]),
        row(json!({ "prompt_logprobs": 0, "stream": true }), "prompt_logprobs", "invalid_value", &["'stream' is false"]),
        row(json!({ "truncate_prompt_tokens": 0 }), "truncate_prompt_tokens", "invalid_value", &["-1 (as many tokens as fit)"]),
        row(json!({ "truncate_prompt_tokens": -2 }), "truncate_prompt_tokens", "invalid_value", &["is -2"]),
        row(json!({ "truncation_side": "both" }), "truncation_side", "invalid_value", &["'left', 'right'"]),
        row(json!({ "skip_special_tokens": "no" }), "skip_special_tokens", "invalid_type", &["expected a boolean"]),
        row(json!({ "return_token_ids": 1 }), "return_token_ids", "invalid_type", &["expected a boolean"]),
        row(json!({ "cache_salt": 7 }), "cache_salt", "invalid_type", &["'cache_salt'"]),
        row(json!({ "functions": [{}] }), "functions", "unsupported_parameter", &["'functions'"]),
        row(json!({ "suffix": "x" }), "suffix", "unsupported_parameter", &[]),
    ]
}

/// Returns unsupported parameters, each with a value that would change the answer.
fn unsupported() -> Vec<(&'static str, Value)> {
    let any = json!("x");
    let mut rows: Vec<_> = [
        "custom_params",
        "format",
        "guided_decoding_backend",
        "kv_transfer_params",
        "logits_processors",
        "lora_path",
        "nvext",
        "options",
        "stop_regex",
        "suffix",
        "think",
        "vllm_xargs",
    ]
    .into_iter()
    .map(|name| (name, any.clone()))
    .collect();
    for name in ["return_prompt_text", "return_meta_info", "use_beam_search", "think", "watermarking", "store"] {
        rows.push((name, json!(true)));
    }
    rows.extend([
        ("kv_transfer_params", json!({ "do_remote_decode": true })),
        ("extra_key", json!("k")),
        ("moderation", json!({ "policy": {} })),
        ("routed_dp_rank", json!(0)),
        ("options", json!({ "num_ctx": 7 })),
        ("length_penalty", json!(0.5)),
        ("mirostat", json!(2)),
        ("best_of", json!(2)),
        ("nvext", json!({ "ignore_eos": true })),
    ]);
    rows
}

/// Returns parameters with values that do not change the answer.
fn harmless() -> Value {
    json!({
        "allowed_token_ids": null, "bad_words": [], "truncation_side": "right", "logprob_token_ids": [], "stream_interval": 5, "keep_alive": "5m", "best_of": 1, "detokenize": true, "echo": false, "n": 1.0,
        "include_stop_str_in_output": false, "kv_transfer_params": null, "length_penalty": 1.0, "logits_processors": [],
        "max_tokens": 5.0, "min_tokens": 0.0, "mirostat": 0, "nvext": {}, "options": {}, "priority": 0, "prompt_logprobs": null,
        "return_token_ids": false, "skip_special_tokens": true, "store": false, "structured_outputs": null,
        "suffix": null, "think": false, "tools": [], "tool_choice": "none", "top_k": 0.0, "use_beam_search": false, "user": "u",
        "metadata": { "a": "b" }, "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "request_id": "r",
    })
}

#[tokio::test]
async fn unsupported_parameters_are_refused_by_name() {
    let mut cluster = Cluster::start().await;
    let rows = |request: &dyn Fn(Value) -> Value, own: &[(&'static str, Value)]| -> Vec<Row> {
        let row = |(name, value): (&'static str, Value)| -> Row {
            let code = if name == "best_of" && own.is_empty() { "invalid_value" } else { "unsupported_parameter" };
            (request(json!({ name: value })), 400, Some(name), code, &["is not supported"])
        };
        unsupported().into_iter().chain(own.iter().cloned()).map(row).collect()
    };
    let of_chat = [
        ("mm_processor_kwargs", json!({ "x": 1 })),
        ("web_search_options", json!({ "search_context_size": "low" })),
        ("verbosity", json!("low")),
        ("thinking", json!({ "type": "enabled" })),
        ("echo", json!(true)),
    ];
    check(&mut cluster, CHAT, rows(&chat, &of_chat)).await;
    check(&mut cluster, COMPLETIONS, rows(&|options| completion("x".into(), options), &[])).await;
    let of_completions =
        [("tools", json!([{ "type": "function", "function": { "name": "f" } }])), ("tool_choice", json!("auto"))];
    let row = |(name, value): (&'static str, Value)| -> Row {
        (completion("x".into(), json!({ name: value })), 400, Some(name), "unsupported_parameter", &["leave it out"])
    };
    check(&mut cluster, COMPLETIONS, of_completions.map(row).into()).await;
}

#[tokio::test]
async fn parameters_without_effect_are_accepted() {
    let mut cluster = Cluster::start().await;
    let of_chat = json!({
        "add_generation_prompt": true, "add_special_tokens": false, "chat_template": null, "chat_template_kwargs": {}, "verbosity": "medium",
        "continue_final_message": false, "modalities": ["text"], "reasoning_effort": "none", "thinking": { "type": "disabled" },
        "include_reasoning": true, "parallel_tool_calls": true, "response_format": { "type": "text" }, "web_search_options": null,
    });
    for (path, mut body) in [(CHAT, chat(of_chat)), (COMPLETIONS, completion("x".into(), json!({ "add_special_tokens": true })))]
    {
        if let (Value::Object(body), Value::Object(harmless)) = (&mut body, harmless()) {
            body.extend(harmless);
        }
        let reply = cluster.spawn_post(path, body);
        let call = cluster.call().await;
        assert_eq!(call.request.sampling.as_ref().and_then(|sampling| sampling.max_tokens), Some(5));
        call.answer(Some(0), "x").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK, "{path}");
    }
}

#[tokio::test]
async fn context_length_error_has_openais_text() {
    let cluster = Cluster::start().await;
    let message = |path, body: Value| {
        let cluster = &cluster;
        async move {
            let (status, answer) = cluster.post(path, &body).await.json().await;
            assert_eq!((status, &answer["error"]["code"]), (StatusCode::BAD_REQUEST, &json!("context_length_exceeded")));
            answer["error"]["message"].as_str().expect("the error message is a string").to_owned()
        }
    };
    assert_eq!(
        message(COMPLETIONS, completion("x".repeat(500).into(), json!({ "max_tokens": 13 }))).await,
        "This model's maximum context length is 512 tokens. However, you requested 513 tokens (500 in the prompt, 13 in the \
         completion). Please reduce the length of the prompt or completion."
    );
    let long = json!({ "messages": [{ "role": "user", "content": "x".repeat(600) }] });
    assert_eq!(
        message(CHAT, chat(long)).await,
        "This model's maximum context length is 512 tokens. However, you requested 620 tokens (619 in the messages, 1 in the \
         completion). Please reduce the length of the messages or completion."
    );
    let longer = json!({ "messages": [{ "role": "user", "content": "x".repeat(12 * 512 + 1) }] });
    assert_eq!(
        message(CHAT, chat(longer)).await,
        "This model's maximum context length is 512 tokens. However, your messages resulted in at least 513 tokens. Please reduce the \
         length of the messages."
    );
}

#[tokio::test]
async fn invalid_conversations_are_refused() {
    let mut cluster = Cluster::start().await;
    let mut rows = both(chat);
    let row = |options: Value, param: &'static str, code: &'static str, words: &'static [&'static str]| -> Row {
        (chat(options), 400, Some(param), code, words)
    };
    let message = |message: Value| json!({ "messages": [message] });
    rows.extend([
        row(json!({ "messages": null }), "messages", "missing_required_parameter", &["'messages'", "required"]),
        row(json!({ "messages": [] }), "messages", "empty_value", &["'messages'", "must not be empty"]),
        row(json!({ "messages": "hi" }), "messages", "invalid_type", &["expected a list"]),
        row(json!({ "messages": ["hi"] }), "messages[0]", "invalid_type", &["'messages[0]'", "expected an object"]),
        row(message(json!({ "content": "x" })), "messages[0].role", "missing_required_parameter", &["required"]),
        row(message(json!({ "role": "king", "content": "x" })), "messages[0].role", "invalid_value", &["'user'"]),
        row(message(json!({ "role": "user", "content": 7 })), "messages[0].content", "invalid_type", &["a string"]),
        row(
            message(json!({ "role": "user", "content": [{ "type": "text", "text": "x" }, { "type": "image_url" }] })),
            "messages[0].content[1]",
            "unsupported_value",
            &["'image_url'", "type 'text'"],
        ),
        row(
            message(json!({ "role": "assistant", "tool_calls": [{ "id": "x" }] })),
            "messages[0].tool_calls[0].function",
            "missing_required_parameter",
            &[],
        ),
        row(message(json!({ "role": "user", "content": "x".repeat(600) })), "messages", "context_length_exceeded", &["512", "6"]),
        row(json!({ "max_tokens": null, "min_tokens": 513 }), "min_tokens", "context_length_exceeded", &["512", "513 in"]),
        // The text is one byte longer than 512 tokens of the maximum length (12 bytes), so it is refused before it is encoded.
        row(
            message(json!({ "role": "user", "content": "x".repeat(12 * 512 + 1) })),
            "messages",
            "context_length_exceeded",
            &["512", "at least 513"],
        ),
        row(json!({ "max_tokens": 0 }), "max_tokens", "invalid_value", &["from 1 on"]),
        row(json!({ "max_completion_tokens": 0 }), "max_completion_tokens", "invalid_value", &["from 1 on"]),
        row(json!({ "max_completion_tokens": 5, "max_tokens": 0 }), "max_tokens", "invalid_value", &["from 1 on"]),
        row(json!({ "max_completion_tokens": 511 }), "max_completion_tokens", "context_length_exceeded", &["512", "511"]),
        row(json!({ "logprobs": 3 }), "logprobs", "invalid_type", &["expected a boolean"]),
        row(json!({ "logprobs": true, "top_logprobs": 21 }), "top_logprobs", "invalid_value", &["between 0 and 20"]),
        row(json!({ "top_logprobs": 2 }), "top_logprobs", "invalid_value", &["'logprobs' is true"]),
        row(json!({ "modalities": ["text", "audio"] }), "modalities", "unsupported_parameter", &[]),
        row(json!({ "audio": { "voice": "x" } }), "audio", "unsupported_parameter", &[]),
        row(json!({ "function_call": "auto" }), "function_call", "unsupported_parameter", &[]),
        row(json!({ "tools": [{ "type": "function" }] }), "tools[0].function", "missing_required_parameter", &[]),
        row(json!({ "tools": [{ "type": "web_search" }] }), "tools[0].type", "unsupported_value", &["'web_search'"]),
        row(json!({ "tools": 7 }), "tools", "invalid_type", &["expected a list"]),
        row(json!({ "tool_choice": "required" }), "tool_choice", "invalid_value", &["no 'tools'"]),
        row(json!({ "tool_choice": "any" }), "tool_choice", "invalid_value", &["'auto'"]),
        row(json!({ "tool_choice": 7 }), "tool_choice", "invalid_type", &["'none'"]),
        row(json!({ "parallel_tool_calls": 1 }), "parallel_tool_calls", "invalid_type", &["a boolean"]),
        row(json!({ "reasoning_effort": "high" }), "reasoning_effort", "invalid_value", &["is not supported by the model"]),
        row(json!({ "reasoning_effort": "much" }), "reasoning_effort", "invalid_value", &["'minimal'"]),
        row(
            json!({ "chat_template_kwargs": { "messages": [] } }),
            "chat_template_kwargs.messages",
            "invalid_value",
            &["another field of the request determines it"],
        ),
        row(
            json!({ "chat_template": "x" }),
            "chat_template",
            "unsupported_parameter",
            &["the model's own chat template", "leave it out"],
        ),
        row(
            json!({ "continue_final_message": true, "add_generation_prompt": true }),
            "continue_final_message",
            "invalid_value",
            &["'add_generation_prompt'"],
        ),
    ]);
    check(&mut cluster, CHAT, rows).await;
}

#[tokio::test]
async fn invalid_completions_are_refused() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 3).await;
    let mut rows = both(|options| completion("x".into(), options));
    let row = |options: Value, param: &'static str, code: &'static str, words: &'static [&'static str]| -> Row {
        (completion("x".into(), options), 400, Some(param), code, words)
    };
    rows.extend([
        row(json!({ "prompt": null }), "prompt", "missing_required_parameter", &["'prompt'", "required"]),
        row(json!({ "prompt": "" }), "prompt", "empty_value", &["'prompt'"]),
        row(json!({ "prompt": [] }), "prompt", "empty_value", &["'prompt'"]),
        row(json!({ "prompt": ["x", ""] }), "prompt", "empty_value", &["'prompt'"]),
        row(json!({ "prompt": [[1], []] }), "prompt", "empty_value", &["'prompt'"]),
        row(json!({ "prompt": 7 }), "prompt", "invalid_type", &["a list of token ids"]),
        row(json!({ "prompt": ["x", 7] }), "prompt[1]", "invalid_type", &["'prompt[1]'"]),
        row(json!({ "prompt": [258] }), "prompt", "invalid_value", &["below 258"]),
        row(json!({ "prompt": [-1] }), "prompt[0]", "invalid_type", &["token id"]),
        row(json!({ "prompt": vec!["x"; 129] }), "prompt", "too_many", &["at most 128 prompts"]),
        row(json!({ "prompt": ["x", "x"], "n": 2 }), "n", "too_many_sequences", &["4 sequences", "at most 3"]),
        row(json!({ "prompt": "x".repeat(512) }), "prompt", "context_length_exceeded", &["512", "528"]),
        row(json!({ "prompt": ["x", "x".repeat(12 * 512 + 1)] }), "prompt", "context_length_exceeded", &["512", "at least 513"]),
        row(json!({ "prompt": "x".repeat(500), "max_tokens": 13 }), "max_tokens", "context_length_exceeded", &["513", "500"]),
        row(json!({ "logprobs": 21 }), "logprobs", "invalid_value", &["between 0 and 20"]),
        row(json!({ "logprobs": true }), "logprobs", "invalid_type", &["'logprobs'", "expected a whole number"]),
        row(json!({ "best_of": 2 }), "best_of", "invalid_value", &["'n'"]),
        row(json!({ "echo": "x" }), "echo", "invalid_type", &["expected a boolean"]),
    ]);
    check(&mut cluster, COMPLETIONS, rows).await;
}

#[tokio::test]
async fn invalid_bodies_are_refused() {
    const MAX: usize = 100_000;
    let cluster = Cluster::with(|settings| settings.body_max_bytes = Some(MAX)).await;
    for path in [CHAT, COMPLETIONS] {
        fn json_error(words: &'static [&'static str]) -> (u16, Option<&'static str>, &'static str, &'static [&'static str]) {
            (400, None, "invalid_json", words)
        }
        expect(&cluster, path, Vec::new(), json_error(&["JSON", "EOF"])).await;
        expect(&cluster, path, b"{\"model\": \"m\",}".to_vec(), json_error(&["JSON", "line 1"])).await;
        expect(&cluster, path, b"{} {}".to_vec(), json_error(&["trailing"])).await;
        for body in ["[1]", "null", "7", "\"x\""] {
            expect(&cluster, path, body.into(), (400, None, "invalid_type", &["must be a JSON object"])).await;
        }
        // An error quotes the client's field name as sent, but shortens a long name.
        for (body, param, words) in [
            (r#"{"n": 1, "n": 2}"#, "n", "duplicate"),
            (
                r#"{"stream_options": {"include_usage": true, "include_usage": true}}"#,
                "stream_options.include_usage",
                "duplicate",
            ),
            (r#"{"temperature": 1e400}"#, "temperature", "number out of range"),
        ] {
            expect(&cluster, path, body.into(), (400, Some(param), "invalid_type", &[&format!("'{param}'"), words])).await;
        }
        let (_, answer) = cluster.post(path, &json!({ "model": "x".repeat(9000) })).await.json().await;
        let message = answer["error"]["message"].as_str().expect("the error message is a string");
        assert!(message.len() < 2000 && message.starts_with("The model 'xx"), "{message}");
        let (_, answer) = cluster.post(path, &json!({ "logit_bias": { "é".repeat(9000): "x" } })).await.json().await;
        assert!(answer.to_string().len() < 4000, "{answer}");
        expect(&cluster, path, b"{\"model\": \"\xFF\"}".to_vec(), (400, None, "invalid_utf8", &["UTF-8", "byte 11"])).await;
        let deep = |levels: usize| format!("{{\"x\": {}{}}}", "[".repeat(levels), "]".repeat(levels)).into_bytes();
        for levels in [120, 20_000] {
            expect(&cluster, path, deep(levels), (400, None, "nesting_too_deep", &["100 levels"])).await;
        }
        let huge = format!("{{\"x\": \"{}\"}}", "x".repeat(2 * MAX)).into_bytes();
        expect(&cluster, path, huge, (413, None, "body_too_large", &["100000 bytes"])).await;
    }
    for (method, path, status, code) in [
        (Method::GET, "/v1/other", 404, "unknown_path"),
        (Method::POST, "/", 405, "method_not_allowed"),
        (Method::GET, CHAT, 405, "method_not_allowed"),
        (Method::DELETE, "/v1/models", 405, "method_not_allowed"),
        (Method::GET, "/v1/models/%ff", 404, "unknown_path"),
    ] {
        let (found, answer) = cluster.send(method, path, &[], "").await.json().await;
        assert_eq!((found.as_u16(), &answer["error"]["code"]), (status, &json!(code)), "{path}");
    }
}
