//! How a token and its logprob are written.

use tandem_kv::TokenId;
use tandem_text::ServedModel;

/// Replaces infinity, which JSON does not have, by the number that vLLM writes in its place.
pub(super) fn finite(logprob: f32) -> f32 {
    const IMPOSSIBLE: f32 = -9999.0;
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

/// Returns a token's text. Invalid UTF-8 is written as in OpenAI's answers: `bytes:` and the bytes in hex, such as `bytes:\xe2\x80`.
pub fn token_text(model: &ServedModel, token: TokenId) -> String {
    let bytes = model.tokenizer.bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}
