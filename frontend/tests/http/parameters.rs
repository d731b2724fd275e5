//! Parameters of vLLM that clients use: what reaches the engine, and what the answer has.

use crate::support::*;
use hyper::StatusCode;
use serde_json::{Value, json};
use tandem_proto::v1::{Token, TokenSequence, Tokens, finished::FinishReason, generate_reply::Message};

const IM_START: u32 = 256;
const IM_END: u32 = 257;

fn ids(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

fn of_ids(sample: u32, ids: &[u32]) -> Message {
    let token = |token: &u32| Token { token: *token, ..Token::default() };
    Message::Tokens(Tokens { sample, tokens: ids.iter().map(token).collect() })
}

/// Sends the request, answers it with these messages of the decode worker, and returns the answer.
async fn answered(cluster: &mut Cluster, path: &'static str, body: Value, messages: Vec<Message>) -> Reply {
    let reply = cluster.spawn_post(path, body);
    let call = cluster.call().await;
    call.begin(Some(0)).await;
    for message in messages {
        call.send(message).await;
    }
    let reply = soon(reply).await.expect("the client task runs");
    assert_eq!(reply.status(), StatusCode::OK);
    reply
}

/// Returns the texts of a streamed answer's choices.
fn texts(path: &str, events: &[Value], choices: usize) -> Vec<String> {
    let mut texts = vec![String::new(); choices];
    for choice in events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten()) {
        let text = if path == CHAT { &choice["delta"]["content"] } else { &choice["text"] };
        texts[choice["index"].as_u64().expect("a choice has an index") as usize].push_str(text.as_str().unwrap_or_default());
    }
    texts
}

fn request(path: &str, options: Value) -> Value {
    if path == CHAT { chat(options) } else { completion("Hi".into(), options) }
}

#[tokio::test]
async fn unknown_fields_are_accepted_and_named_in_a_header() {
    const HEADER: &str = "x-tandem-ignored-parameters";
    let mut cluster = Cluster::start().await;
    let end = || vec![tokens(0, b"x"), finished(0, FinishReason::Length, None)];
    for path in [CHAT, COMPLETIONS] {
        for stream in [false, true] {
            let unknown = json!({ "stream": stream, "max_token": 5, "zebra": { "a": [1] }, "user": "u" });
            let reply = answered(&mut cluster, path, request(path, unknown), end()).await;
            assert_eq!(reply.header(HEADER), Some("max_token, zebra"), "{path}");
            let known = json!({ "stream": stream, "user": "u", "service_tier": "auto", "tools": [] });
            let reply = answered(&mut cluster, path, request(path, known), end()).await;
            assert_eq!(reply.header(HEADER), None, "{path}");
        }
    }
    let refused = cluster.post(CHAT, &chat(json!({ "max_token": 5, "n": 0 }))).await;
    assert_eq!((refused.status(), refused.header(HEADER)), (StatusCode::BAD_REQUEST, Some("max_token")));
}

#[tokio::test]
async fn restrictions_of_tokens_reach_the_worker() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "allowed_token_ids": [9, 5, 9], "bad_words": ["ugly", " bad", "  "], "logprob_token_ids": [7, 5] });
    for (path, logprobs) in [(CHAT, json!(true)), (COMPLETIONS, json!(0))] {
        let mut body = request(path, options.clone());
        body["logprobs"] = logprobs;
        let reply = cluster.spawn_post(path, body);
        let call = cluster.call().await;
        let sampling = call.request.sampling.clone().expect("the call has sampling settings");
        assert_eq!((sampling.allowed_token_ids, sampling.logprob_token_ids), (vec![5, 9], vec![7, 5]));
        let words: Vec<(String, Vec<TokenSequence>)> =
            sampling.bad_words.into_iter().map(|word| (word.text, word.forms)).collect();
        // In the simulator's vocabulary, a word has more tokens after a space, so only its form without a space is barred.
        let form = |text: &str| vec![TokenSequence { tokens: ids(text) }];
        let expected = [("ugly", form("ugly")), (" bad", form("bad")), ("  ", form("  "))];
        assert_eq!(words, expected.map(|(text, forms)| (text.to_owned(), forms)));
        call.answer(Some(0), "").await;
        assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    }
}

#[tokio::test]
async fn requested_tokens_are_the_alternatives_of_logprobs() {
    let mut cluster = Cluster::start().await;
    let generated = || vec![Message::Tokens(Tokens { sample: 0, tokens: likely(b"a") }), finished(0, FinishReason::Length, None)];
    let options = json!({ "logprobs": true, "logprob_token_ids": [97, 122], "return_tokens_as_token_ids": true });
    let (_, answer) = answered(&mut cluster, CHAT, chat(options), generated()).await.json().await;
    let entry = &answer["choices"][0]["logprobs"]["content"][0];
    assert_eq!((&entry["token"], &entry["bytes"]), (&json!("token_id:97"), &json!([97])));
    let tokens: Vec<&Value> =
        entry["top_logprobs"].as_array().expect("there are alternatives").iter().map(|top| &top["token"]).collect();
    assert_eq!(tokens, ["token_id:97", "token_id:122"]);
    let options = json!({ "logprobs": 0, "logprob_token_ids": [97, 122], "return_tokens_as_token_ids": true, "stream": true });
    let (events, _) = answered(&mut cluster, COMPLETIONS, completion("Hi".into(), options), generated()).await.events().await;
    let logprobs = &events[0]["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"], json!(["token_id:97"]));
    assert_eq!(logprobs["top_logprobs"], json!([{ "token_id:97": -0.5, "token_id:122": -1.5 }]));
}

#[tokio::test]
async fn text_may_include_the_stop_string_and_the_stop_token() {
    let mut cluster = Cluster::start().await;
    let stops = json!({ "n": 2, "stop": ["END"], "include_stop_str_in_output": true, "skip_special_tokens": false });
    let generated = || {
        vec![
            tokens(0, b"abE"),
            of_ids(1, &[IM_START, 120]),
            tokens(0, b"NDx"),
            finished(1, FinishReason::Stop, Some(IM_END)),
            finished(0, FinishReason::Length, None),
        ]
    };
    let expected = ["abEND", "<|im_start|>x<|im_end|>"];
    for path in [CHAT, COMPLETIONS] {
        let (_, answer) = answered(&mut cluster, path, request(path, stops.clone()), generated()).await.json().await;
        for (choice, expected) in answer["choices"].as_array().expect("there are choices").iter().zip(expected) {
            let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
            assert_eq!((text, &choice["finish_reason"]), (&json!(expected), &json!("stop")), "{path}");
        }
        let mut streamed = request(path, stops.clone());
        streamed["stream"] = json!(true);
        let (events, done) = answered(&mut cluster, path, streamed, generated()).await.events().await;
        assert!(done);
        assert_eq!(texts(path, &events, 2), expected, "{path}");
    }
    // Without the parameters, neither the stop string nor the stop token has text.
    let plain = completion("Hi".into(), json!({ "n": 2, "stop": ["END"] }));
    let (_, answer) = answered(&mut cluster, COMPLETIONS, plain, generated()).await.json().await;
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][1]["text"]), (&json!("ab"), &json!("x")));
}

#[tokio::test]
async fn stop_string_ends_an_answer_without_text() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "detokenize": false, "stop": "ND", "return_token_ids": true });
    for path in [CHAT, COMPLETIONS] {
        let generated = vec![tokens(0, b"aE"), tokens(0, b"NDx")];
        let (_, answer) = answered(&mut cluster, path, request(path, options.clone()), generated).await.json().await;
        let choice = &answer["choices"][0];
        let text = if path == CHAT { &choice["message"]["content"] } else { &choice["text"] };
        assert_eq!((text, &choice["finish_reason"]), (&json!(""), &json!("stop")), "{path}");
        assert_eq!(choice["token_ids"], json!(ids("aEND")), "{path}");
    }
}

#[tokio::test]
async fn answer_has_token_ids_and_no_text_if_requested() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "n": 2, "return_token_ids": true, "detokenize": false });
    let generated = || {
        vec![
            tokens(0, b"ab"),
            tokens(1, b"c"),
            tokens(0, "€".as_bytes()),
            finished(0, FinishReason::Stop, Some(IM_END)),
            finished(1, FinishReason::Length, None),
        ]
    };
    let expected = [[ids("ab€"), vec![IM_END]].concat(), ids("c")];
    for path in [CHAT, COMPLETIONS] {
        let reply = cluster.spawn_post(path, request(path, options.clone()));
        let call = cluster.call().await;
        let prompt = json!(call.request.prompt);
        call.begin(Some(0)).await;
        for message in generated() {
            call.send(message).await;
        }
        let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
        for (choice, expected) in answer["choices"].as_array().expect("there are choices").iter().zip(&expected) {
            let (text, holder) = if path == CHAT { (&choice["message"]["content"], &answer) } else { (&choice["text"], choice) };
            assert_eq!((text, &choice["token_ids"]), (&json!(""), &json!(expected)), "{path}");
            assert_eq!(holder["prompt_token_ids"], prompt, "{path}");
        }
        assert_eq!(answer["usage"]["completion_tokens"], 7);

        let mut streamed = request(path, options.clone());
        streamed["stream"] = json!(true);
        let (events, done) = answered(&mut cluster, path, streamed, generated()).await.events().await;
        let choices = || events.iter().flat_map(|event| event["choices"].as_array().into_iter().flatten());
        for (index, expected) in expected.iter().enumerate() {
            let streamed = choices().filter(|choice| choice["index"] == index).flat_map(|choice| {
                choice["token_ids"].as_array().into_iter().flatten().map(|id| id.as_u64().expect("ids are numbers") as u32)
            });
            assert_eq!(streamed.collect::<Vec<_>>(), *expected, "{path}");
        }
        let with_prompt: Vec<&Value> = if path == CHAT {
            events.iter().map(|event| &event["prompt_token_ids"]).filter(|ids| !ids.is_null()).collect()
        } else {
            choices().map(|choice| &choice["prompt_token_ids"]).filter(|ids| !ids.is_null()).collect()
        };
        assert_eq!(with_prompt, vec![&prompt; if path == CHAT { 1 } else { 2 }], "{path}");
        assert!(done);
    }
    // An answer has no ids unless they are requested.
    let end = vec![finished(0, FinishReason::Length, None)];
    let (_, answer) = answered(&mut cluster, COMPLETIONS, completion("Hi".into(), json!({})), end).await.json().await;
    assert!(answer["choices"][0].get("token_ids").is_none() && answer["choices"][0].get("prompt_token_ids").is_none());
}

#[tokio::test]
async fn token_ids_of_a_resumed_answer_are_complete() {
    let mut cluster = Cluster::start().await;
    let options = json!({ "return_token_ids": true, "stop": ["END"], "include_stop_str_in_output": true });
    let reply = cluster.spawn_post(COMPLETIONS, completion("Hi".into(), options));
    let lost = cluster.call().await;
    lost.begin(Some(0)).await;
    lost.send(tokens(0, b"abE")).await;
    lost.fail(tonic::Status::unavailable("lost")).await;
    let call = cluster.call().await;
    assert_eq!(call.request.generated[0].tokens, ids("abE"));
    call.begin(Some(0)).await;
    call.send(tokens(0, b"NDx")).await;
    let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
    assert_eq!((&answer["choices"][0]["text"], &answer["choices"][0]["token_ids"]), (&json!("abEND"), &json!(ids("abEND"))));
}

#[tokio::test]
async fn prompt_logprobs_have_vllms_format_and_place() {
    let mut cluster = Cluster::start().await;
    for path in [CHAT, COMPLETIONS] {
        let reply = cluster.spawn_post(path, request(path, json!({ "prompt_logprobs": 1, "max_tokens": 1 })));
        let call = cluster.call().await;
        assert_eq!(call.request.prompt_logprobs, Some(1));
        call.begin(Some(0)).await;
        let mut logprobs = likely(b"Hi");
        logprobs[0] = Token { token: b'H'.into(), ..Token::default() };
        call.send(prompt_logprobs(logprobs)).await;
        call.send(finished(0, FinishReason::Length, None)).await;
        let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
        let place = if path == CHAT { &answer } else { &answer["choices"][0] };
        let token = json!({ "logprob": -0.5, "rank": 1, "decoded_token": "i" });
        assert_eq!(place["prompt_logprobs"], json!([null, { "105": token }]), "{path}");
        assert!(answer["choices"][0]["logprobs"].is_null());
    }
    // A worker that does not send them fails the request.
    let reply = cluster.spawn_post(COMPLETIONS, completion("Hi".into(), json!({ "prompt_logprobs": 1 })));
    let call = cluster.call().await;
    call.answer(Some(0), "x").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn long_prompts_are_truncated_on_either_side() {
    let mut cluster = Cluster::start().await;
    let long = format!("{}end", "x".repeat(20_000));
    for (options, expected) in [
        (json!({ "truncate_prompt_tokens": 4 }), "xend".to_owned()),
        (json!({ "truncate_prompt_tokens": 4, "truncation_side": "right" }), "xxxx".to_owned()),
        (json!({ "truncate_prompt_tokens": -1, "max_tokens": 500 }), "xxxxxxxxxend".to_owned()),
    ] {
        let mut body = completion(json!(long), options);
        body["echo"] = json!(true);
        let reply = cluster.spawn_post(COMPLETIONS, body);
        let call = cluster.call().await;
        assert_eq!(call.request.prompt, ids(&expected));
        call.answer(Some(0), "!").await;
        let (_, answer) = soon(reply).await.expect("the client task runs").json().await;
        assert_eq!(answer["choices"][0]["text"], format!("{expected}!"));
    }
    let reply = cluster.spawn_post(COMPLETIONS, completion("short".into(), json!({ "truncate_prompt_tokens": 100 })));
    let call = cluster.call().await;
    assert_eq!(call.request.prompt, ids("short"));
    call.answer(Some(0), "!").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
    let message = json!({ "messages": [{ "role": "user", "content": long }], "truncate_prompt_tokens": -1 });
    let reply = cluster.spawn_post(CHAT, chat(message));
    let call = cluster.call().await;
    assert_eq!(call.request.prompt.len(), 511, "one token of the context is left for the answer");
    call.answer(Some(0), "!").await;
    assert_eq!(soon(reply).await.expect("the client task runs").status(), StatusCode::OK);
}
