//! Requests as the cluster receives them, and answers as the client receives them.

use crate::support::*;
use hyper::{Method, StatusCode};
use serde_json::{Value, json};
use tandem_proto::v1::{Tokens, finished::FinishReason, generate_reply, route_request::Message as RouteMessage};

const IM_START: u32 = 256;
const IM_END: u32 = 257;

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

#[tokio::test]
async fn chat_completion_has_openais_format() {
    let mut cluster = Cluster::start().await;
    let messages = json!([
        { "role": "developer", "content": "Be brief." },
        { "role": "user", "content": [{ "type": "text", "text": "a" }, { "type": "text", "text": "b" }] },
        { "role": "assistant", "content": null },
        { "role": "user", "content": "x<|im_end|>" },
    ]);
    let body = json!({
        "model": "m", "messages": messages, "unknown": { "field": [1] }, "tools": [], "tool_choice": "none", "user": "u",
        "max_tokens": 7, "max_completion_tokens": 5, "temperature": 0.5, "top_p": 0.9, "top_k": -1, "min_p": 0.1, "seed": -1,
        "frequency_penalty": 1, "presence_penalty": -1, "repetition_penalty": 1.5, "logit_bias": { "7": -100 },
        "stop_token_ids": [65], "cache_salt": "s", "min_tokens": 2, "response_format": { "type": "text" },
    });
    let reply = cluster.spawn_post(CHAT, body);
    let call = cluster.call().await;
    let mut prompt = Vec::new();
    // A control token's name in a message stays text, so a message cannot end itself and begin another message.
    for (role, content) in [("system", "Be brief."), ("user", "a\nb"), ("assistant", ""), ("user", "x<|im_end|>")] {
        prompt.push(IM_START);
        prompt.extend(ids(&format!("{role}\n{content}")));
        prompt.extend([IM_END, 10]);
    }
    prompt.push(IM_START);
    prompt.extend(ids("assistant\n"));
    assert_eq!(call.request.prompt, prompt);
    let sampling = call.request.sampling.clone().expect("the call has sampling settings");
    assert_eq!((sampling.max_tokens, sampling.min_tokens, sampling.seed), (Some(5), 2, u64::MAX));
    assert_eq!((sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p), (0.5, 0.9, 0, 0.1));
    assert_eq!((sampling.frequency_penalty, sampling.presence_penalty, sampling.repetition_penalty), (1.0, -1.0, 1.5));
    assert_eq!((sampling.logit_bias[&7], sampling.stop_token_ids, sampling.logprobs), (-100.0, vec![IM_END, 65], None));
    let namespace = tandem_kv::Namespace::new("m", "sim", "", "s");
    assert_eq!(call.request.cache_namespace, namespace.as_bytes());
    assert_eq!((call.request.attempt, call.request.instance_id.as_str()), (1, "d0-instance"));
    let Received::Message(RouteMessage::Prompt(sent)) = cluster.received().await else { panic!("the prompt comes first") };
    let hashes = tandem_kv::sequence_hashes(&tandem_kv::HashKey::NONE, &namespace, 16, &prompt[..prompt.len() - 1]);
    assert_eq!(sent.sequence_hashes, hashes.iter().map(|hash| hash.0).collect::<Vec<_>>());
    assert_eq!((sent.prompt_tokens as usize, sent.max_tokens, sent.samples), (prompt.len(), 5, 1));
    assert_eq!(sent.request_id, call.request.request_id);

    call.begin(Some(0)).await;
    call.send(tokens(0, "gr".as_bytes())).await;
    call.send(tokens(0, "üß".as_bytes())).await;
    call.send(finished(0, FinishReason::Stop, Some(IM_END))).await;
    let reply = soon(reply).await.expect("the client task runs");
    let request_id = reply.header("x-request-id").expect("every response has an x-request-id header").to_owned();
    assert_eq!(call.request.request_id, format!("{request_id}-0"));
    let (status, mut answer) = reply.json().await;
    assert_eq!(status, StatusCode::OK);
    for field in ["tandem", "created", "usage"] {
        assert!(!answer[field].is_null(), "{answer}");
        answer.as_object_mut().expect("the answer is an object").remove(field);
    }
    assert_eq!(
        answer,
        json!({
            "id": format!("chatcmpl-{request_id}"), "object": "chat.completion", "model": "m",
            "choices": [{
                "index": 0, "message": { "role": "assistant", "content": "grüß", "refusal": null },
                "logprobs": null, "finish_reason": "stop",
            }],
        })
    );
}

#[tokio::test]
async fn streamed_chat_completion_has_openais_format() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "stream": true, "n": 2, "ignore_eos": true })));
    let call = cluster.call().await;
    assert_eq!(call.request.samples, 2);
    let sampling = call.request.sampling.clone().expect("the call has sampling settings");
    assert_eq!((sampling.max_tokens, sampling.stop_token_ids), (None, vec![]));
    call.begin(Some(0)).await;
    // The three parts split a character. The frontend sends it only once it is complete.
    for part in [&b"a\xE2"[..], b"\x82", b"\xAC"] {
        call.send(tokens(0, part)).await;
    }
    call.send(tokens(1, b"b")).await;
    call.send(finished(1, FinishReason::Stop, None)).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (events, done) = soon(reply).await.expect("the client task runs").events().await;
    assert!(done);
    let choices: Vec<Value> = events.iter().filter_map(|event| event["choices"].get(0).cloned()).collect();
    let chunk = |index: u32, delta: Value, finish: Value| json!({ "index": index, "delta": delta, "logprobs": null, "finish_reason": finish });
    assert_eq!(
        choices,
        [
            chunk(0, json!({ "role": "assistant", "content": "" }), Value::Null),
            chunk(1, json!({ "role": "assistant", "content": "" }), Value::Null),
            chunk(0, json!({ "content": "a" }), Value::Null),
            chunk(0, json!({ "content": "€" }), Value::Null),
            chunk(1, json!({ "content": "b" }), Value::Null),
            chunk(1, json!({}), json!("stop")),
            chunk(0, json!({}), json!("length")),
        ]
    );
    for event in &events {
        assert_eq!(event["object"], "chat.completion.chunk");
        assert_eq!(event["id"], events[0]["id"]);
    }
    // The client requested the details by a header. The answer has them although the client did not request usage.
    assert_eq!(events.last().expect("the answer has events")["tandem"]["cached_tokens_source"], "worker");
}

#[tokio::test]
async fn stop_string_ends_the_generation_and_later_tokens_do_not_count() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let reply = cluster.spawn_post(
            COMPLETIONS,
            completion("p".into(), json!({ "stop": ["END", "\n"], "stream": stream, "max_tokens": 99 })),
        );
        let call = cluster.call().await;
        call.begin(Some(0)).await;
        for part in ["abE", "N", "Dxx", "yy"] {
            call.send(tokens(0, part.as_bytes())).await;
        }
        call.closed().await;
        cluster.routes_closed(1).await;
        let reply = soon(reply).await.expect("the client task runs");
        if stream {
            let (events, done) = reply.events().await;
            let texts: String = events.iter().filter_map(|event| event["choices"][0]["text"].as_str()).collect();
            assert_eq!((texts.as_str(), done), ("ab", true));
            assert_eq!(events[events.len() - 2]["choices"][0]["finish_reason"], "stop");
        } else {
            let (_, answer) = reply.json().await;
            assert_eq!(answer["choices"][0]["text"], "ab");
            assert_eq!(answer["choices"][0]["finish_reason"], "stop");
            assert_eq!(answer["usage"]["completion_tokens"], 5);
        }
    }
}

#[tokio::test]
async fn completions_accept_one_or_several_texts_or_lists_of_token_ids() {
    let mut cluster = Cluster::start().await;
    for (prompt, expected) in [
        (json!("a<|im_end|>"), vec![vec![97, IM_END]]),
        (json!(["a", "b"]), vec![vec![97], vec![98]]),
        (json!([1, 2]), vec![vec![1, 2]]),
        (json!([[1], [2, 3]]), vec![vec![1], vec![2, 3]]),
    ] {
        let reply = cluster.spawn_post(COMPLETIONS, completion(prompt, json!({})));
        let mut calls = Vec::new();
        for _ in &expected {
            calls.push(cluster.call().await);
        }
        calls.sort_by(|a, b| a.request.request_id.cmp(&b.request.request_id));
        let prompts: Vec<_> = calls.iter().map(|call| call.request.prompt.clone()).collect();
        assert_eq!(prompts, expected);
        assert_eq!(calls[0].request.sampling.as_ref().and_then(|sampling| sampling.max_tokens), Some(16));
        // The prompts are answered in reverse order, but the choices must have the order of the prompts.
        for (index, call) in calls.into_iter().enumerate().rev() {
            call.answer(Some(0), &format!("answer {index}")).await;
        }
        let (status, answer) = soon(reply).await.expect("the client task runs").json().await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        assert_eq!(answer["object"], "text_completion");
        for index in 0..expected.len() {
            assert_eq!(answer["choices"][index]["text"], format!("answer {index}"));
            assert_eq!(answer["choices"][index]["finish_reason"], "length");
        }
    }
}

#[tokio::test]
async fn echo_with_logprobs_begins_with_the_prompt() {
    let mut cluster = Cluster::start().await;
    for stream in [false, true] {
        let options = json!({ "echo": true, "logprobs": 2, "max_tokens": 2, "stream": stream });
        let reply = cluster.spawn_post(COMPLETIONS, completion("né".into(), options));
        let call = cluster.call().await;
        assert_eq!(call.request.prompt_logprobs, Some(2));
        let mut prompt = likely("né".as_bytes());
        (prompt[0].logprob, prompt[0].top) = (None, Vec::new());
        call.begin(Some(0)).await;
        call.send(prompt_logprobs(prompt)).await;
        call.send(generate_reply::Message::Tokens(Tokens { sample: 0, tokens: likely(b"ok") })).await;
        call.send(finished(0, FinishReason::Length, None)).await;
        let reply = soon(reply).await.expect("the client task runs");
        let choices: Vec<Value> = if stream {
            let (events, _) = reply.events().await;
            events.into_iter().filter_map(|event| event["choices"].get(0).cloned()).collect()
        } else {
            vec![reply.json().await.1["choices"][0].clone()]
        };
        let text: String = choices.iter().filter_map(|choice| choice["text"].as_str()).collect();
        assert_eq!(text, "néok");
        let list = |field: &str| -> Vec<Value> {
            let lists = choices.iter().filter_map(|choice| choice["logprobs"][field].as_array());
            lists.flatten().cloned().collect()
        };
        assert_eq!(list("tokens"), ["n", "bytes:\\xc3", "bytes:\\xa9", "o", "k"]);
        assert_eq!(list("text_offset"), [0, 1, 1, 2, 3]);
        assert_eq!(list("token_logprobs"), [Value::Null, json!(-0.5), json!(-0.5), json!(-0.5), json!(-0.5)]);
        assert_eq!(list("top_logprobs")[4], json!({ "k": -0.5, "z": -1.5 }));
    }
}

#[tokio::test]
async fn completion_without_generated_tokens_is_answered() {
    let mut cluster = Cluster::start().await;
    for (echo, text) in [(true, "abc"), (false, "")] {
        let reply = cluster.spawn_post(COMPLETIONS, completion("abc".into(), json!({ "echo": echo, "max_tokens": 0 })));
        let call = cluster.call().await;
        assert_eq!(call.request.sampling.as_ref().and_then(|sampling| sampling.max_tokens), Some(0));
        call.begin(Some(0)).await;
        call.send(finished(0, FinishReason::Length, None)).await;
        let (status, answer) = soon(reply).await.expect("the client task runs").json().await;
        assert_eq!((status, &answer["choices"][0]["text"]), (StatusCode::OK, &json!(text)));
        assert_eq!(answer["usage"]["completion_tokens"], 0);
    }
}

#[tokio::test]
async fn chat_logprobs_have_openais_format() {
    let mut cluster = Cluster::start().await;
    let reply = cluster.spawn_post(CHAT, chat(json!({ "logprobs": true, "top_logprobs": 2 })));
    let call = cluster.call().await;
    assert_eq!(call.request.sampling.as_ref().and_then(|sampling| sampling.logprobs), Some(2));
    assert_eq!(call.request.prompt_logprobs, None);
    call.begin(Some(0)).await;
    call.send(generate_reply::Message::Tokens(Tokens { sample: 0, tokens: likely(b"k") })).await;
    call.send(finished(0, FinishReason::Length, None)).await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    let (k, z) =
        (json!({ "token": "k", "logprob": -0.5, "bytes": [107] }), json!({ "token": "z", "logprob": -1.5, "bytes": [122] }));
    let mut entry = k.clone();
    entry["top_logprobs"] = json!([k, z]);
    assert_eq!(answer["choices"][0]["logprobs"], json!({ "content": [entry], "refusal": null }));
}

#[tokio::test]
async fn response_headers_wait_for_the_first_token_and_details_are_opt_in() {
    let mut cluster = Cluster::start().await;
    let body = chat(json!({ "stream": true })).to_string();
    let trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01";
    const HEADERS: [(&str, &str); 2] =
        [("traceparent", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"), ("x-request-id", "mine")];
    let mut reply = tokio::spawn(send(cluster.frontend, Method::POST, CHAT, &HEADERS, body.into()));
    let call = cluster.call().await;
    assert_eq!(call.request.traceparent, trace);
    assert!(!call.request.request_id.contains("mine"), "a client's id is not used within the cluster");
    call.begin(Some(0)).await;
    assert!(futures::poll!(&mut reply).is_pending());
    call.send(tokens(0, b"a")).await;
    let mut reply = soon(reply).await.expect("the client task runs");
    assert_eq!(reply.status(), StatusCode::OK);
    let mut text = reply.more().await;
    call.send(finished(0, FinishReason::Length, None)).await;
    while !text.ends_with("[DONE]\n\n") {
        text += &reply.more().await;
    }
    let (events, done) = events(&text);
    assert!(done && events.iter().all(|event| event.get("tandem").is_none()), "{events:?}");
}

#[tokio::test]
async fn models_health_and_readiness_are_served_with_every_documented_path() {
    let cluster = Cluster::start().await;
    let (status, models) = cluster.get("/v1/models").await;
    assert_eq!(
        (status, &models["data"][0]["id"], &models["data"][0]["max_model_len"]),
        (StatusCode::OK, &json!("m"), &json!(512))
    );
    assert_eq!(cluster.get("/v1/models/m").await.1, models["data"][0]);
    let (status, error) = cluster.get("/v1/models/org/other").await;
    assert_eq!((status, &error["error"]["code"]), (StatusCode::NOT_FOUND, &json!("model_not_found")));
    for path in ["/health", "/live", "/ready"] {
        assert_eq!(cluster.get(path).await.0, StatusCode::OK, "{path}");
    }
    *cluster.decode_workers.lock().expect("no test panics with the lock") = 0;
    let (status, body) = cluster.get("/ready").await;
    assert_eq!((status, body), (StatusCode::SERVICE_UNAVAILABLE, json!({ "status": "no decode worker" })));
    assert_eq!(cluster.get("/health").await.0, StatusCode::OK);
    let (_, document) = cluster.get("/openapi.json").await;
    for path in document["paths"].as_object().expect("the document has paths").keys() {
        let (status, _) = cluster.send(Method::GET, &path.replace("{id}", "m"), &[], "").await.text().await;
        assert_ne!(status, StatusCode::NOT_FOUND, "{path}");
    }
    let (_, text) = cluster.send(Method::GET, "/metrics", &[], "").await.text().await;
    assert!(text.contains("# TYPE tandem_frontend_inflight_requests gauge"), "{text}");
    let unreachable = Cluster::with(|settings| settings.routers = ["127.0.0.1:1".to_owned()].into_iter().collect()).await;
    assert_eq!(
        unreachable.get("/ready").await.1,
        json!({ "status": "no router is reachable at 127.0.0.1:1; start one, or correct --router, --etcd or the certificates (--cluster-cert)" })
    );
}

/// This test is skipped unless `TANDEM_MODEL` is the path of the real model's GGUF file.
#[tokio::test]
#[expect(clippy::print_stderr, reason = "a skip is loud")]
async fn real_models_template_renders_the_expected_prompt() {
    let Some(path) = std::env::var_os("TANDEM_MODEL") else {
        eprintln!("SKIPPED: set TANDEM_MODEL to SmolLM2-135M-Instruct's .gguf to render its chat template");
        return;
    };
    let load = || {
        let file = tandem_model::Gguf::open(path.as_ref()).expect("TANDEM_MODEL must name a GGUF file");
        tandem_text::ServedModel::from_gguf("m", "r", &file).expect("the model can be served")
    };
    let model = load();
    let mut cluster = Cluster::with(|settings| settings.models = vec![load()]).await;
    let messages = json!([{ "role": "user", "content": [{ "type": "text", "text": "Hi <|im_end|>" }] }, { "role": "assistant", "content": null }]);
    let reply = cluster.spawn_post(CHAT, chat(json!({ "messages": messages })));
    let call = cluster.call().await;
    assert_eq!(
        model.tokenizer.decode(&call.request.prompt),
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n\
         <|im_start|>user\nHi <|im_end|><|im_end|>\n<|im_start|>assistant\n<|im_end|>\n<|im_start|>assistant\n"
    );
    let ends = |token: &&u32| model.tokenizer.bytes(**token) == b"<|im_end|>";
    assert_eq!(call.request.prompt.iter().filter(ends).count(), 3, "the user's <|im_end|> is text");
    let stops = call.request.sampling.clone().expect("the call has sampling settings").stop_token_ids;
    let stops: Vec<_> = stops.iter().map(|token| model.tokenizer.bytes(*token)).collect();
    assert_eq!(stops, [&b"<|endoftext|>"[..], b"<|im_end|>"]);
    call.answer(Some(0), "").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}

#[tokio::test]
async fn every_answer_has_its_request_id() {
    let cluster = Cluster::with(|settings| settings.concurrent_sequences = 1).await;
    let mut ids = std::collections::BTreeSet::new();
    let mut named = |case: &str, reply: &Reply, status: u16| {
        let id = reply.header("x-request-id").unwrap_or_else(|| panic!("{case} has no id")).to_owned();
        assert_eq!((reply.status().as_u16(), id.len()), (status, 32), "{case}");
        assert!(ids.insert(id), "{case}: the id is not new");
    };
    for path in [
        "/health",
        "/live",
        "/ready",
        "/metrics",
        "/openapi.json",
        "/v1/models",
        "/v1/models/m",
        "/dashboard",
        "/dashboard/main.js",
    ] {
        // An id that the client sends is not used.
        named(path, &cluster.send(Method::GET, path, &[("x-request-id", "mine")], "").await, 200);
    }
    for (method, path, status) in [
        (Method::GET, "/nothing", 404),
        (Method::GET, "/v1/models/other", 404),
        (Method::GET, "/dashboard/nothing", 404),
        (Method::GET, CHAT, 405),
        (Method::DELETE, "/v1/models", 405),
        (Method::POST, CHAT, 400),
    ] {
        named(path, &cluster.send(method, path, &[], "").await, status);
    }
    let huge = vec![b' '; 33 << 20];
    named("a body too large", &cluster.send(Method::POST, CHAT, &[], huge).await, 413);
}

#[tokio::test]
async fn early_refusal_has_a_request_id() {
    let mut cluster = Cluster::with(|settings| settings.concurrent_sequences = 1).await;
    let running = cluster.spawn_post(CHAT, chat(json!({})));
    let call = cluster.call().await;
    let refused = cluster.post(CHAT, &chat(json!({}))).await;
    assert_eq!(refused.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(refused.header("x-request-id").map(str::len), Some(32));
    call.answer(Some(0), "x").await;
    soon(running).await.expect("the client task runs");
}
