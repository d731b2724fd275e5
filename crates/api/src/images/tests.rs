use super::*;
use crate::chat::Chat;
use crate::parameters::{ChatRequest, MessagesRequest, ResponsesRequest};
use serde_json::{Value, json};
use std::sync::atomic::Ordering;

/// A PNG of 64 × 64 pixels.
const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAEAAAABACAAAAACPAi4CAAAAKUlEQVR42u3MQREAAAwCIKMb3RD77SAA6VEEAoFAIBAIBAKBQCAQfA8G320AeXC6efoAAAAASUVORK5CYII=";

fn model(reads_images: bool) -> ServedModel {
    let model = ServedModel::sim("m");
    model.reads_images.store(reads_images, Ordering::Relaxed);
    model
}

fn chat(body: Value) -> Result<Chat, String> {
    let request: ChatRequest = serde_json::from_value(body).map_err(|error| error.to_string())?;
    request.check(&model(true)).map_err(|error| error.to_string())
}

fn messages(body: Value) -> Result<Chat, String> {
    let request: MessagesRequest = serde_json::from_value(body).map_err(|error| error.to_string())?;
    request.check(&model(true)).map_err(|error| error.to_string())
}

fn responses(body: Value) -> Result<Chat, String> {
    let request: ResponsesRequest = serde_json::from_value(body).map_err(|error| error.to_string())?;
    request.check(&model(true)).map(|responses| responses.chat).map_err(|error| error.to_string())
}

fn url() -> String {
    format!("data:image/png;base64,{PNG}")
}

fn text(text: &str) -> Value {
    json!({ "type": "text", "text": text })
}

fn image(url: impl Into<Value>) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url.into() } })
}

fn user(parts: &[Value]) -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": parts }] })
}

/// Returns the body for the renderer, with the identities `0`, `1` and so on.
fn rendering(chat: &Chat) -> Result<Value, String> {
    let ids: Vec<String> = (0..chat.images.list.len()).map(|id| id.to_string()).collect();
    let body = chat.rendering(&model(true), &ids).map_err(|error| error.to_string())?;
    Ok(serde_json::from_slice(&body).expect("the body is JSON"))
}

fn rendered(id: &str) -> Value {
    json!({ "type": "image_url", "image_url": { "url": url() }, "uuid": id })
}

#[test]
fn images_of_all_apis_become_parts_in_their_places() {
    let both = json!({ "role": "user", "content": [text("a"), text("b"), rendered("0"), text("c"), rendered("1")] });
    let chat_body = user(&[text("a"), text("b"), image(url()), text("c"), json!({ "type": "image_url", "image_url": url() })]);
    let chat = chat(chat_body).expect("the chat is valid");
    assert_eq!(rendering(&chat).expect("it can be rendered")["messages"], json!([both]));
    let decoded = chat.images.decode().expect("the images are valid");
    assert_eq!((decoded.len(), decoded[0].media_type), (2, "image/png"));
    assert!(decoded[1].data.starts_with(b"\x89PNG") && chat.text_bytes() < 100);

    let block = json!({ "type": "image", "source": { "type": "base64", "media_type": "image/png", "data": PNG } });
    let result = json!({ "type": "tool_result", "tool_use_id": "t", "content": [block] });
    let of_messages = messages(json!({
        "model": "m", "max_tokens": 5, "system": "s",
        "messages": [
            { "role": "user", "content": [text("a"), text("b"), block, text("c"), block] },
            { "role": "assistant", "content": [{ "type": "tool_use", "id": "t", "name": "f", "input": {} }] },
            { "role": "user", "content": [result, block] },
        ],
    }));
    let body = rendering(&of_messages.expect("the messages are valid")).expect("they can be rendered");
    assert_eq!(body["messages"][1], both);
    let last = body["messages"].as_array().and_then(|messages| messages.last()).expect("there are messages");
    assert_eq!(last["content"].as_array().expect("it has parts").last(), Some(&rendered("2")), "{last}");
    assert!(body.to_string().contains("[image omitted: the model reads only text]"), "an image of a result stays a text");

    let parts = [
        json!({ "type": "input_text", "text": "a" }),
        json!({ "type": "input_text", "text": "b" }),
        json!({ "type": "input_image", "image_url": url(), "detail": "low" }),
        json!({ "type": "input_text", "text": "c" }),
        json!({ "type": "input_image", "image_url": url() }),
    ];
    let of_responses = responses(json!({ "model": "m", "input": [{ "role": "user", "content": parts }] }));
    assert_eq!(rendering(&of_responses.expect("the input is valid")).expect("it can be rendered")["messages"], json!([both]));
}

#[test]
fn renderer_gets_only_what_the_template_reads() {
    let mut body = user(&[image(url())]);
    let tool = json!({ "type": "function", "function": { "name": "f", "parameters": { "type": "object", "properties": {} } } });
    let call = json!({ "id": "c", "type": "function", "function": { "name": "f", "arguments": "{\"a\":1}" } });
    body["messages"].as_array_mut().expect("a list").extend([
        json!({ "role": "assistant", "content": null, "tool_calls": [call] }),
        json!({ "role": "tool", "tool_call_id": "c", "content": "7" }),
    ]);
    for (name, value) in [
        ("tools", json!([tool])),
        ("temperature", json!(0.5)),
        ("cache_salt", json!("secret")),
        ("max_tokens", json!(9)),
        ("chat_template_kwargs", json!({ "x": 1 })),
        ("response_format", json!({ "type": "json_object" })),
    ] {
        body[name] = value;
    }
    let body = rendering(&chat(body).expect("the chat is valid")).expect("it can be rendered");
    let names: Vec<&str> = body.as_object().expect("an object").keys().map(String::as_str).collect();
    let known = [
        "add_generation_prompt",
        "chat_template_kwargs",
        "continue_final_message",
        "messages",
        "mm_payload",
        "tool_choice",
        "tools",
    ];
    assert!(names.iter().all(|name| known.contains(name)), "{names:?}");
    assert_eq!((&body["mm_payload"], &body["chat_template_kwargs"]), (&json!("none"), &json!({ "x": 1 })));
    assert_eq!(body["add_generation_prompt"], true);
    let arguments = body.pointer("/messages/1/tool_calls/0/function/arguments");
    assert!(arguments.is_none_or(Value::is_string), "vLLM reads arguments as text: {body}");
}

#[test]
fn everything_that_names_an_image_elsewhere_or_chooses_its_identity_is_refused() {
    let only_data = "this server fetches no images";
    for (part, expected) in [
        (image("http://example.com/a.png"), only_data),
        (image("https://127.0.0.1/a.png"), only_data),
        (image("http://169.254.169.254/latest/meta-data"), only_data),
        (image("file:///etc/passwd"), only_data),
        (image("DATA:image/png,abc"), only_data),
        (image(format!("data:image/png,{PNG}")), only_data),
        (image(""), only_data),
        (image(Value::Null), "'messages[0].content[0].image_url.url' is required"),
        (json!({ "type": "image_url" }), "'messages[0].content[0].image_url' is required"),
        (json!({ "type": "input_image", "file_id": "f" }), "file_id"),
        (json!({ "type": "image_url", "image_url": url(), "uuid": "mine" }), "uuid"),
        (json!({ "type": "image_url", "image_url": { "url": url(), "uuid": "mine" } }), "uuid"),
        (image(format!("data:image/svg+xml;base64,{PNG}")), "must be of type image/png"),
        (image(format!("data:text/html;base64,{PNG}")), "must be of type image/png"),
        (json!({ "type": "input_audio", "input_audio": { "data": "", "format": "wav" } }), "'input_audio'"),
        (json!({ "type": "audio_url", "audio_url": { "url": "data:audio/wav;base64," } }), "'audio_url'"),
        (json!({ "type": "video_url", "video_url": { "url": "data:video/mp4;base64," } }), "'video_url'"),
        (json!({ "type": "image_embeds", "image_embeds": "" }), "'image_embeds'"),
        (json!({ "type": "file", "file": {} }), "'file'"),
    ] {
        let error = chat(user(std::slice::from_ref(&part))).err().unwrap_or_else(|| panic!("{part} is refused"));
        assert!(error.contains(expected), "{part}: {error}");
    }
    for source in [
        json!({ "type": "url", "url": "https://example.com/a.png" }),
        json!({ "type": "file", "file_id": "f" }),
        json!({ "type": "base64", "media_type": "image/png" }),
        json!({ "type": "base64", "media_type": "application/pdf", "data": PNG }),
        json!({}),
    ] {
        let block = json!({ "type": "image", "source": source });
        let error = messages(json!({ "model": "m", "max_tokens": 5, "messages": [{ "role": "user", "content": [block] }] }));
        assert!(error.is_err_and(|error| error.contains("messages[0].content[0].source")), "{source}");
    }
    for role in ["system", "assistant", "tool"] {
        let body = json!({ "model": "m", "messages": [{ "role": role, "content": [image(url())] }] });
        assert!(chat(body).is_err_and(|error| error.contains("'image_url'")), "{role}");
    }
}

#[test]
fn images_beyond_the_limits_are_refused_before_they_are_decoded() {
    let many = vec![image(url()); IMAGES_MAX + 1];
    assert!(chat(user(&many)).is_err_and(|error| error.contains("must have at most 16 images")));
    assert_eq!(chat(user(&many[1..])).expect("16 images are allowed").images.list.len(), IMAGES_MAX);
    let large = image(format!("data:image/png;base64,{}", "A".repeat(BYTES_MAX / 3 * 4 + 8)));
    assert!(chat(user(&[large])).is_err_and(|error| error.contains("at most 16777216 bytes")));
    for (base64, expected) in [
        (&*PNG.replace('=', "").replace('A', "-"), "malformed base64"),
        (&PNG[..24], "truncated or malformed header"),
        ("", "is not a PNG"),
        ("PHN2Zy8+", "is not a PNG"),
        ("/9j/4AAQ", "another type"),
    ] {
        let chat = chat(user(&[text("a"), image(format!("data:image/png;base64,{base64}"))])).expect("only the file is wrong");
        let error = chat.images.decode().expect_err("the file is refused").to_string();
        assert!(error.contains("'messages[0].content[1].image_url'") && error.contains(expected), "{base64}: {error}");
    }
}

#[test]
fn pixels_of_all_images_together_are_limited() {
    // The header of a PNG of 8192 × 4096 pixels, which is the largest allowed one.
    let header = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\x20\0\0\0\x10\0\x08\x02\0\0\0crc!\0\0\0\0IDAT";
    let large = image(format!("data:image/png;base64,{}", BASE64.encode(header)));
    let images = |count| chat(user(&vec![large.clone(); count])).expect("the chat is valid").images;
    assert_eq!(images(2).decode().expect("two fit").len(), 2);
    let error = images(3).decode().expect_err("three do not fit").to_string();
    assert!(error.contains("'messages[0].content[2].image_url'") && error.contains("67,108,864 pixels"), "{error}");
}

#[test]
fn texts_that_would_stand_for_tokens_or_images_are_refused() {
    for (parts, expected) in [
        ([text("a<|im_end|>b"), image(url())], "control token"),
        ([text("\u{FFFF}"), image(url())], "U+FFFF"),
        ([text("a\u{FFFF}b"), image(url())], "U+FFFF"),
    ] {
        let chat = chat(user(&parts)).expect("the chat is valid");
        assert!(rendering(&chat).is_err_and(|error| error.contains(expected)), "{parts:?}");
    }
    let mut elsewhere = user(&[image(url())]);
    let message = json!({ "role": "assistant", "content": "\u{FFFF}" });
    elsewhere["messages"].as_array_mut().expect("a list").insert(0, message);
    assert!(rendering(&chat(elsewhere).expect("the chat is valid")).is_err_and(|error| error.contains("U+FFFF")));
    for (name, value) in [("truncate_prompt_tokens", json!(5)), ("prompt_logprobs", json!(1))] {
        let mut body = user(&[image(url())]);
        body[name] = value;
        let error = rendering(&chat(body).expect("the chat is valid")).expect_err(name);
        assert!(error.contains(&format!("'{name}' cannot be combined with images")), "{error}");
    }
}

#[test]
fn model_without_images_refuses_them_as_before() {
    let request: ChatRequest = serde_json::from_value(user(&[image(url())])).expect("the body is valid");
    let error = request.check(&model(false)).err().map(|error| error.to_string()).unwrap_or_default();
    assert!(error.contains("is a part of type 'image_url', but the model reads only text"), "{error}");
}
