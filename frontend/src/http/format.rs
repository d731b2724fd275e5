//! The JSON of both endpoints' answers, whole or in chunks.

use super::progress::Details;
use crate::{
    metrics::Endpoint,
    model::ServedModel,
    stream::{FinishReason, TokenLogprobs},
    usage::Usage,
};
use serde::{Serialize, Serializer};
use tandem_kv::TokenId;

/// A whole answer, or a chunk of a streamed answer.
#[derive(Serialize)]
pub(super) struct Envelope<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<Choice<'a>>,
    /// `None`: the answer has no field `usage`; `Some(None)`: the field is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) tandem: Option<Details>,
}

#[derive(Serialize)]
#[serde(untagged)]
pub(super) enum Choice<'a> {
    ChatDelta { index: usize, delta: ChatDelta<'a>, logprobs: Option<ChatLogprobs>, finish_reason: Option<FinishReason> },
    ChatMessage { index: usize, message: ChatMessage<'a>, logprobs: Option<ChatLogprobs>, finish_reason: Option<FinishReason> },
    Text { index: usize, text: &'a str, logprobs: Option<TextLogprobs>, finish_reason: Option<FinishReason> },
}

#[derive(Default, Serialize)]
pub(super) struct ChatDelta<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    content: Option<&'a str>,
}

#[derive(Serialize)]
pub(super) struct ChatMessage<'a> {
    role: &'static str,
    content: &'a str,
    refusal: Option<&'static str>,
}

#[derive(Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<&'static str>,
}

#[derive(Serialize)]
struct ChatToken {
    #[serde(flatten)]
    token: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(Serialize)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    top_logprobs: Vec<Option<Alternatives>>,
    text_offset: Vec<usize>,
}

/// A token's alternatives, written as a JSON object whose fields are in the order of this list.
struct Alternatives(Vec<(String, f32)>);

impl Serialize for Alternatives {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(token, logprob)| (token, logprob)))
    }
}

impl Endpoint {
    pub(super) fn answer_id(self, request_id: &str) -> String {
        match self {
            Self::Chat => format!("chatcmpl-{request_id}"),
            Self::Completions => format!("cmpl-{request_id}"),
        }
    }

    /// Returns the field `object` of a whole answer.
    pub(super) fn object(self) -> &'static str {
        match self {
            Self::Chat => "chat.completion",
            Self::Completions => "text_completion",
        }
    }

    pub(super) fn chunk_object(self) -> &'static str {
        match self {
            Self::Chat => "chat.completion.chunk",
            Self::Completions => "text_completion",
        }
    }

    /// Returns the first chunk of a chat's choice, which has the role but no text; `None` for plain completions.
    pub(super) fn role(self, index: usize) -> Option<Choice<'static>> {
        let delta = ChatDelta { role: Some("assistant"), content: Some("") };
        (self == Self::Chat).then_some(Choice::ChatDelta { index, delta, logprobs: None, finish_reason: None })
    }

    /// Returns a chunk of a choice with further text, or with the finish reason.
    pub(super) fn chunk<'a>(
        self,
        index: usize,
        text: Option<&'a str>,
        logprobs: Option<Logprobs<'_>>,
        finish_reason: Option<FinishReason>,
    ) -> Choice<'a> {
        match self {
            Self::Chat => {
                let delta = ChatDelta { role: None, content: text };
                Choice::ChatDelta { index, delta, logprobs: logprobs.map(Logprobs::chat), finish_reason }
            }
            Self::Completions => self.whole(index, text.unwrap_or_default(), logprobs, finish_reason),
        }
    }

    pub(super) fn whole<'a>(
        self,
        index: usize,
        text: &'a str,
        logprobs: Option<Logprobs<'_>>,
        finish_reason: Option<FinishReason>,
    ) -> Choice<'a> {
        match self {
            Self::Chat => {
                let message = ChatMessage { role: "assistant", content: text, refusal: None };
                Choice::ChatMessage { index, message, logprobs: logprobs.map(Logprobs::chat), finish_reason }
            }
            Self::Completions => Choice::Text { index, text, logprobs: logprobs.map(Logprobs::text), finish_reason },
        }
    }
}

/// The logprobs of tokens, from which each endpoint's JSON is made.
#[derive(Clone, Copy)]
pub(super) struct Logprobs<'a> {
    pub(super) model: &'a ServedModel,
    pub(super) tokens: &'a [TokenLogprobs],
}

impl Logprobs<'_> {
    fn chat(self) -> ChatLogprobs {
        let alternative = |(token, logprob): (TokenId, f32)| ChatAlternative {
            token: token_text(self.model, token),
            logprob: finite(logprob),
            bytes: self.model.tokenizer.bytes(token).to_vec(),
        };
        let entry = |entry: &TokenLogprobs| ChatToken {
            token: alternative((entry.token, entry.logprob.unwrap_or_default())),
            top_logprobs: entry.top.iter().copied().map(alternative).collect(),
        };
        ChatLogprobs { content: self.tokens.iter().map(entry).collect(), refusal: None }
    }

    fn text(self) -> TextLogprobs {
        let text = |token| token_text(self.model, token);
        let alternatives = |entry: &TokenLogprobs| {
            let logprob = entry.logprob?;
            let mut list: Vec<_> = entry.top.iter().map(|(token, logprob)| (text(*token), finite(*logprob))).collect();
            // The list always includes the token itself.
            if !entry.top.iter().any(|(token, _)| *token == entry.token) {
                list.push((text(entry.token), finite(logprob)));
            }
            Some(Alternatives(list))
        };
        TextLogprobs {
            tokens: self.tokens.iter().map(|entry| text(entry.token)).collect(),
            token_logprobs: self.tokens.iter().map(|entry| entry.logprob.map(finite)).collect(),
            top_logprobs: self.tokens.iter().map(alternatives).collect(),
            text_offset: self.tokens.iter().map(|entry| entry.text_offset).collect(),
        }
    }
}

/// Replaces infinity, which JSON does not have, by the number that vLLM writes in its place.
fn finite(logprob: f32) -> f32 {
    const IMPOSSIBLE: f32 = -9999.0;
    if logprob.is_finite() { logprob } else { IMPOSSIBLE }
}

/// Returns a token's text. Invalid UTF-8 is written as in OpenAI's answers: `bytes:` and the bytes in hex, such as `bytes:\xe2\x80`.
fn token_text(model: &ServedModel, token: TokenId) -> String {
    let bytes = model.tokenizer.bytes(token);
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn logprobs_have_the_completions_and_the_chat_format() {
        let model = ServedModel::sim("m");
        let tokens = [
            TokenLogprobs { token: 104, logprob: None, top: Vec::new(), text_offset: 0 },
            TokenLogprobs { token: 0xE2, logprob: Some(f32::NEG_INFINITY), top: vec![(105, -0.5)], text_offset: 1 },
        ];
        let logprobs = Logprobs { model: &model, tokens: &tokens };
        assert_eq!(
            serde_json::to_value(logprobs.text()).expect("logprobs can be serialized"),
            json!({
                "tokens": ["h", "bytes:\\xe2"], "token_logprobs": [null, -9999.0],
                "top_logprobs": [null, {"i": -0.5, "bytes:\\xe2": -9999.0}], "text_offset": [0, 1],
            })
        );
        let chosen = Logprobs { model: &model, tokens: &tokens[1..] };
        assert_eq!(
            serde_json::to_value(chosen.chat()).expect("logprobs can be serialized"),
            json!({"content": [{
                "token": "bytes:\\xe2", "logprob": -9999.0, "bytes": [0xE2],
                "top_logprobs": [{"token": "i", "logprob": -0.5, "bytes": [105]}],
            }], "refusal": null})
        );
    }
}
