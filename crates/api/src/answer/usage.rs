//! OpenAI's object `usage`.

use schemars::JsonSchema;
use serde::Serialize;

/// OpenAI's object `usage`. All fields are present when an answer is complete.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize)]
#[expect(missing_docs, reason = "the OpenAPI document would show them")]
pub struct Usage {
    pub prompt_tokens: u32,
    pub completion_tokens: u32,
    pub total_tokens: u32,
    pub prompt_tokens_details: PromptTokensDetails,
    pub completion_tokens_details: CompletionTokensDetails,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct PromptTokensDetails {
    /// Absent while the cached tokens of a prompt are not known: a chunk must not claim a number that a later one corrects.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cached_tokens: Option<u32>,
    /// Always 0, because prompts are text.
    audio_tokens: u32,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, JsonSchema, Serialize)]
pub struct CompletionTokensDetails {
    /// The tokens between the tags of reasoning.
    pub reasoning_tokens: u32,
}

impl Usage {
    /// Returns the usage of this many tokens. `cached_tokens`: `None` while they are not known.
    pub fn new(prompt_tokens: u32, cached_tokens: Option<u32>, completion_tokens: u32, reasoning_tokens: u32) -> Self {
        Self {
            prompt_tokens,
            completion_tokens,
            total_tokens: prompt_tokens.saturating_add(completion_tokens),
            prompt_tokens_details: PromptTokensDetails { cached_tokens, audio_tokens: 0 },
            completion_tokens_details: CompletionTokensDetails { reasoning_tokens },
        }
    }
}
