//! JSON objects of requests, and the text of tokens.

use serde_json::Value;

pub fn merged(mut request: Value, options: Value) -> Value {
    if let (Value::Object(request), Value::Object(options)) = (&mut request, options) {
        request.extend(options);
    }
    request
}

/// Returns the text of the simulated model's tokens, with the names of control tokens.
pub fn text(tokens: &[u32]) -> String {
    let bytes = tokens.iter().flat_map(|token| match *token {
        256 => b"<|im_start|>".to_vec(),
        257 => b"<|im_end|>".to_vec(),
        byte => vec![byte as u8],
    });
    String::from_utf8(bytes.collect()).expect("the tokens are UTF-8")
}
