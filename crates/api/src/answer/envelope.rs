//! The JSON of answers to chats and completions: complete ones and chunks.

use super::{
    FinishReason, TokenLogprobs, Usage,
    chat::{ChatDelta, ChatMessage},
    prompt_logprobs::PromptLogprobs,
    token::{finite, token_text},
};
use schemars::JsonSchema;
use serde::{Serialize, Serializer};
use serde_json::Value;
use tandem_kv::TokenId;
use tandem_text::ServedModel;

/// A complete answer, or a chunk of a streamed one.
#[derive(JsonSchema, Serialize)]
pub struct Envelope<'a> {
    pub(super) id: &'a str,
    pub(super) object: &'static str,
    pub(super) created: u64,
    pub(super) model: &'a str,
    pub(super) choices: Vec<Choice<'a>>,
    /// `None`: the answer has no field `usage`; `Some(None)`: the field is null.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    pub(super) tandem: Option<&'a Value>,
    /// A chat's answer has the tokens of its prompt here.
    #[serde(flatten)]
    pub(super) tokens: TokenFields<'a>,
}

/// The tokens of a prompt or a choice, if the client requested them.
#[derive(Clone, Copy, Default, JsonSchema, Serialize)]
pub(super) struct TokenFields<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) token_ids: Option<&'a [TokenId]>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) prompt_logprobs: Option<PromptLogprobs<'a>>,
}

#[derive(JsonSchema, Serialize)]
#[serde(untagged)]
pub(super) enum Choice<'a> {
    ChatDelta {
        index: usize,
        delta: ChatDelta<'a>,
        logprobs: Option<ChatLogprobs>,
        finish_reason: Option<FinishReason>,
        #[serde(flatten)]
        tokens: TokenFields<'a>,
    },
    ChatMessage {
        index: usize,
        message: ChatMessage<'a>,
        logprobs: Option<ChatLogprobs>,
        finish_reason: Option<FinishReason>,
        #[serde(flatten)]
        tokens: TokenFields<'a>,
    },
    Text {
        index: usize,
        text: &'a str,
        logprobs: Option<TextLogprobs>,
        finish_reason: Option<FinishReason>,
        #[serde(flatten)]
        tokens: TokenFields<'a>,
    },
}

#[derive(JsonSchema, Serialize)]
pub(super) struct ChatLogprobs {
    content: Vec<ChatToken>,
    refusal: Option<&'static str>,
}

#[derive(JsonSchema, Serialize)]
pub(super) struct ChatToken {
    #[serde(flatten)]
    token: ChatAlternative,
    top_logprobs: Vec<ChatAlternative>,
}

#[derive(JsonSchema, Serialize)]
struct ChatAlternative {
    token: String,
    logprob: f32,
    bytes: Vec<u8>,
}

#[derive(JsonSchema, Serialize)]
pub(super) struct TextLogprobs {
    tokens: Vec<String>,
    token_logprobs: Vec<Option<f32>>,
    #[schemars(with = "Vec<Option<std::collections::BTreeMap<String, f32>>>")]
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

/// The format of an answer's choices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChoiceFormat {
    /// Each choice is a message.
    Chat,
    /// Each choice is a plain text.
    Completions,
}

impl ChoiceFormat {
    /// Returns the field `object` of a complete answer.
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
}

impl<'a> Choice<'a> {
    /// Returns a chunk of a chat. The last chunk of a choice has a finish reason and an empty `delta`.
    pub(super) fn chat_chunk(
        index: usize,
        delta: ChatDelta<'a>,
        logprobs: Option<Logprobs<'_>>,
        finish_reason: Option<FinishReason>,
        tokens: TokenFields<'a>,
    ) -> Self {
        // An empty list is left out, because clients read its first entry.
        let logprobs = logprobs.filter(|logprobs| !logprobs.tokens.is_empty()).map(Logprobs::chat);
        Self::ChatDelta { index, delta, logprobs, finish_reason, tokens }
    }

    pub(super) fn chat(
        index: usize,
        message: ChatMessage<'a>,
        logprobs: Option<Logprobs<'_>>,
        finish_reason: Option<FinishReason>,
        tokens: TokenFields<'a>,
    ) -> Self {
        Self::ChatMessage { index, message, logprobs: logprobs.map(Logprobs::chat), finish_reason, tokens }
    }

    /// Returns a plain completion or a chunk of it.
    pub(super) fn text(
        index: usize,
        text: &'a str,
        logprobs: Option<Logprobs<'_>>,
        finish_reason: Option<FinishReason>,
        tokens: TokenFields<'a>,
    ) -> Self {
        Self::Text { index, text, logprobs: logprobs.map(Logprobs::text), finish_reason, tokens }
    }
}

/// The logprobs of tokens, from which each endpoint's JSON is made.
#[derive(Clone, Copy)]
pub(super) struct Logprobs<'a> {
    pub(super) model: &'a ServedModel,
    pub(super) tokens: &'a [TokenLogprobs],
    /// Whether tokens are named by their ids, as `token_id:7`.
    pub(super) as_ids: bool,
}

impl Logprobs<'_> {
    fn name(self, token: TokenId) -> String {
        if self.as_ids { format!("token_id:{token}") } else { token_text(self.model, token) }
    }

    fn chat(self) -> ChatLogprobs {
        ChatLogprobs { content: self.tokens(), refusal: None }
    }

    /// Returns a chat's entry for each token.
    pub(super) fn tokens(self) -> Vec<ChatToken> {
        let alternative = |(token, logprob): (TokenId, f32)| ChatAlternative {
            token: self.name(token),
            logprob: finite(logprob),
            bytes: self.model.tokenizer.bytes(token).to_vec(),
        };
        let entry = |entry: &TokenLogprobs| ChatToken {
            token: alternative((entry.token, entry.logprob.unwrap_or_default())),
            top_logprobs: entry.top.iter().copied().map(alternative).collect(),
        };
        self.tokens.iter().map(entry).collect()
    }

    fn text(self) -> TextLogprobs {
        let text = |token| self.name(token);
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

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn logprobs_have_the_format_of_their_endpoint() {
        let model = ServedModel::sim("m");
        let tokens = [
            TokenLogprobs { token: 104, logprob: None, top: Vec::new(), text_offset: 0 },
            TokenLogprobs { token: 0xE2, logprob: Some(f32::NEG_INFINITY), top: vec![(105, -0.5)], text_offset: 1 },
        ];
        let logprobs = Logprobs { model: &model, tokens: &tokens, as_ids: false };
        assert_eq!(
            serde_json::to_value(logprobs.text()).expect("logprobs can be serialized"),
            json!({
                "tokens": ["h", "bytes:\\xe2"], "token_logprobs": [null, -9999.0],
                "top_logprobs": [null, {"i": -0.5, "bytes:\\xe2": -9999.0}], "text_offset": [0, 1],
            })
        );
        let chosen = Logprobs { model: &model, tokens: &tokens[1..], as_ids: false };
        assert_eq!(
            serde_json::to_value(chosen.chat()).expect("logprobs can be serialized"),
            json!({"content": [{
                "token": "bytes:\\xe2", "logprob": -9999.0, "bytes": [0xE2],
                "top_logprobs": [{"token": "i", "logprob": -0.5, "bytes": [105]}],
            }], "refusal": null})
        );
        let named = Logprobs { as_ids: true, ..chosen };
        let chat = serde_json::to_value(named.chat()).expect("logprobs can be serialized");
        assert_eq!((&chat["content"][0]["token"], &chat["content"][0]["bytes"]), (&json!("token_id:226"), &json!([0xE2])));
        assert_eq!(chat["content"][0]["top_logprobs"][0]["token"], "token_id:105");
        let text = serde_json::to_value(named.text()).expect("logprobs can be serialized");
        assert_eq!(text["tokens"], json!(["token_id:226"]));
        assert_eq!(text["top_logprobs"], json!([{ "token_id:105": -0.5, "token_id:226": -9999.0 }]));
    }
}
