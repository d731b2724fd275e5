//! Limits on bodies and prompts, computed from the length of the model's context.

use crate::{
    error::{RequestError, at_most},
    names::ParamNames,
    options::Truncation,
};
use tandem_text::ServedModel;

/// The maximum number of text bytes per token of the context. Prose has 4 to 6 bytes per token, source code up to 12, runs of spaces more.
const BYTES_PER_TOKEN: usize = 32;
/// The minimum of [`prompt_bytes_max`], so that a request with many short prompts fits even if the model's context is short.
const PROMPT_BYTES_MIN: usize = 1 << 20;
/// The bytes of body allowed per byte of text. JSON may write one character in 6 bytes (`\u001f`), but mostly uses 1 or 2.
const BODY_BYTES_PER_PROMPT_BYTE: usize = 4;
/// The maximum of [`body_bytes_max`] for any context. For comparison: 128k tokens of prose have less than 1 MiB.
const BODY_BYTES_MAX: usize = 32 << 20;
/// The allowed number of JSON values other than tokens. It suffices for the maximum number of messages.
const OTHER_ELEMENTS: usize = 64 << 10;

/// Returns the maximum total size of a request's texts, in bytes. It bounds the time of tokenizing.
pub fn prompt_bytes_max(context_length: u32) -> usize {
    (context_length as usize).saturating_mul(BYTES_PER_TOKEN).max(PROMPT_BYTES_MIN)
}

/// Returns the default maximum size of a body, in bytes.
pub fn body_bytes_max(context_length: u32) -> usize {
    prompt_bytes_max(context_length).saturating_mul(BODY_BYTES_PER_PROMPT_BYTE).min(BODY_BYTES_MAX)
}

/// Returns the maximum number of JSON values in a body. It bounds the memory and the time of parsing.
pub fn elements_max(context_length: u32) -> usize {
    (context_length as usize).saturating_mul(2).saturating_add(OTHER_ELEMENTS)
}

/// Checks whether the texts can fit into the context, by their lengths alone, because encoding the longest accepted body would take
/// minutes. With `truncation`, a text is shortened after it is encoded, so it need not fit.
///
/// # Errors
/// A single text is too long, or all texts together are.
pub fn check_texts(
    model: &ServedModel,
    texts_bytes: impl Iterator<Item = usize>,
    truncation: Option<Truncation>,
    names: &ParamNames,
) -> Result<(), RequestError> {
    let (context_length, mut all) = (model.usable_context(), 0_usize);
    for bytes in texts_bytes {
        let tokens_min = model.tokenizer.tokens_min(bytes);
        if tokens_min > context_length as usize && truncation.is_none() {
            let (prompt, param) = (names.prompt_in_text, names.prompt);
            return Err(RequestError::PromptLength { context_length, tokens_min, prompt, param });
        }
        all = all.saturating_add(bytes);
    }
    at_most(names.prompt, all, prompt_bytes_max(context_length), "bytes of text")
}

/// Checks that the prompt and `new_tokens` further tokens fit into the model's context.
///
/// # Errors
/// The tokens do not fit.
pub fn check_context(
    model: &ServedModel,
    prompt_tokens: usize,
    new_tokens: u32,
    names: &ParamNames,
    limit_param: &'static str,
) -> Result<(), RequestError> {
    let context_length = model.usable_context();
    let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    if u64::from(prompt_tokens) + u64::from(new_tokens) <= u64::from(context_length) {
        return Ok(());
    }
    // The error names the prompt's parameter if the prompt alone fills the context, else the parameter that limits new tokens.
    let param = if prompt_tokens >= context_length { names.prompt } else { limit_param };
    Err(RequestError::ContextLength { context_length, prompt_tokens, new_tokens, prompt: names.prompt_in_text, param })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn body_limits_grow_with_the_context_length() {
        for (context, prompt_mib, body_mib, elements) in
            [(512, 1, 4, 66_560), (8_192, 1, 4, 81_920), (131_072, 4, 16, 327_680), (1 << 20, 32, 32, 2_162_688)]
        {
            let found = (prompt_bytes_max(context) >> 20, body_bytes_max(context) >> 20, elements_max(context));
            assert_eq!(found, (prompt_mib, body_mib, elements), "a context of {context}");
        }
    }
}
