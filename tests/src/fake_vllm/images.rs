//! Images in chats and prompts of a fake vLLM server. Like Qwen2-VL, the fake model has a placeholder for each 28 × 28 pixels.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};

/// The token of images. No text has it.
pub const PLACEHOLDER: u32 = 260;

/// An image in the tokens of a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placed {
    /// The identity, which the client has chosen.
    pub uuid: String,
    /// The position of the first placeholder.
    pub offset: usize,
    /// The number of placeholders.
    pub length: usize,
}

/// A prompt in which each image has all of its placeholders.
#[derive(Clone, Debug, Default)]
pub struct Expanded {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// The images in order.
    pub images: Vec<Placed>,
    /// A text that differs for different files.
    pub files: String,
}

/// Returns the file and the number of placeholders of the PNG in a URL.
fn decoded(url: &str) -> Result<(Vec<u8>, usize), String> {
    let base64 = url.strip_prefix("data:image/png;base64,").ok_or("the fake server reads only data: URLs of PNG files")?;
    let file = BASE64_STANDARD.decode(base64).map_err(|error| error.to_string())?;
    let size = |at: usize| file.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_be_bytes);
    let (width, height) = size(16).zip(size(20)).ok_or("cannot identify image file")?;
    Ok((file, (width.div_ceil(28) * height.div_ceil(28)) as usize))
}

/// Returns a PNG file of this size. Its pixels are not valid, so only fake servers read it. Files with different contents are different
/// pictures.
pub fn png(width: u32, height: u32, content: &[u8]) -> Vec<u8> {
    let mut file = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".to_vec();
    file.extend([width.to_be_bytes(), height.to_be_bytes()].concat());
    file.extend(b"\x08\x02\0\0\0\0\0\0\0");
    file.extend((content.len() as u32).to_be_bytes());
    file.extend([b"IDAT", content, b"\0\0\0\0"].concat());
    file
}

/// Returns a file as a URL.
pub fn url(media_type: &str, file: &[u8]) -> String {
    format!("data:{media_type};base64,{}", BASE64_STANDARD.encode(file))
}

/// Converts a chat to tokens, as vLLM's `/v1/chat/completions/render` does.
///
/// # Errors
/// Returns the message of the error, if the chat has a part that the model does not read.
pub fn render(chat: &Value, reads_images: bool) -> Result<Value, String> {
    let (mut tokens, mut hashes, mut places): (Vec<u32>, Vec<Value>, Vec<Value>) = Default::default();
    let add = |tokens: &mut Vec<u32>, text: &str| tokens.extend(text.bytes().map(u32::from));
    for message in chat["messages"].as_array().into_iter().flatten() {
        add(&mut tokens, message["role"].as_str().unwrap_or_default());
        add(&mut tokens, ": ");
        add(&mut tokens, message["content"].as_str().unwrap_or_default());
        for part in message["content"].as_array().into_iter().flatten() {
            match part["type"].as_str() {
                Some("text") => add(&mut tokens, part["text"].as_str().unwrap_or_default()),
                Some("image_url") if reads_images => {
                    let (file, length) = decoded(part["image_url"]["url"].as_str().unwrap_or_default())?;
                    hashes.push(part["uuid"].as_str().map_or_else(|| format!("{} bytes", file.len()), str::to_owned).into());
                    places.push(json!({ "offset": tokens.len(), "length": length }));
                    tokens.extend(std::iter::repeat_n(PLACEHOLDER, length));
                }
                Some("image_url") => return Err("At most 0 image(s) may be provided in one prompt.".to_owned()),
                other => return Err(format!("Unsupported chat content part type: {other:?}.")),
            }
        }
        add(&mut tokens, "\n");
    }
    if chat["add_generation_prompt"] != false {
        add(&mut tokens, "assistant: ");
    }
    let pixels = (chat["mm_payload"] != "none").then(|| json!({ "image": vec!["x".repeat(800_000); hashes.len()] }));
    let features = json!({ "mm_hashes": { "image": hashes }, "mm_placeholders": { "image": places }, "kwargs_data": pixels });
    let features = if hashes.is_empty() { Value::Null } else { features };
    Ok(json!({ "request_id": "chatcmpl-1", "token_ids": tokens, "features": features, "sampling_params": { "max_tokens": 1 } }))
}

/// Replaces the placeholder of each image in a request's `content_parts` by as many as the image needs, as vLLM does.
///
/// # Errors
/// Returns the message of the error, if the prompt does not have one placeholder for each image.
pub fn expand(tokens: &[u32], request: &Value, reads_images: bool) -> Result<Expanded, String> {
    let parts = request["content_parts"].as_array().map(Vec::as_slice).unwrap_or_default();
    let mut expanded = Expanded::default();
    let mut left = parts.iter();
    for token in tokens {
        if *token != PLACEHOLDER {
            expanded.tokens.push(*token);
            continue;
        }
        let part = left.next().ok_or("the prompt has more placeholders than images")?;
        let (file, length) = decoded(part["url"].as_str().unwrap_or_default())?;
        let uuid = part["uuid"].as_str().map_or_else(|| BASE64_STANDARD.encode(&file), str::to_owned);
        expanded.images.push(Placed { uuid, offset: expanded.tokens.len(), length });
        expanded.files += &BASE64_STANDARD.encode(&file);
        expanded.tokens.extend(std::iter::repeat_n(PLACEHOLDER, length));
    }
    match left.next() {
        None if reads_images || parts.is_empty() => Ok(expanded),
        None => Err("At most 0 image(s) may be provided in one prompt.".to_owned()),
        Some(_) => Err("Failed to apply prompt replacement for mm_items['image'][0].".to_owned()),
    }
}
