//! Limits of bodies and prompts that follow from the length of the model's context.

use crate::{
    error::{ApiError, at_most},
    model::ServedModel,
};

/// The maximum of bytes per token of the context. Prose has 4 to 6 bytes a token, source code up to 12; runs of spaces have more.
const BYTES_PER_TOKEN: usize = 32;
/// The limit for models with a short context, so that a batch of short prompts fits.
const PROMPT_BYTES_MIN: usize = 1 << 20;
/// JSON may write a character of text in up to 6 bytes (`\u001f`), mostly in 1 or 2.
const BODY_BYTES_PER_PROMPT_BYTE: usize = 4;
/// The limit for any context: 128k tokens of prose have less than 1 MiB.
const BODY_BYTES_MAX: usize = 32 << 20;
/// JSON values other than tokens: enough for the maximum number of messages.
const OTHER_ELEMENTS: usize = 64 << 10;

/// The maximum of all texts of a request together, in bytes: it bounds the time of tokenizing.
pub(super) fn prompt_bytes_max(context_length: u32) -> usize {
    (context_length as usize).saturating_mul(BYTES_PER_TOKEN).max(PROMPT_BYTES_MIN)
}

/// The default maximum of a body, in bytes.
pub(super) fn body_bytes_max(context_length: u32) -> usize {
    prompt_bytes_max(context_length).saturating_mul(BODY_BYTES_PER_PROMPT_BYTE).min(BODY_BYTES_MAX)
}

/// The maximum of JSON values in a body: it bounds the memory and the time of parsing.
pub(super) fn elements_max(context_length: u32) -> usize {
    (context_length as usize).saturating_mul(2).saturating_add(OTHER_ELEMENTS)
}

/// Checks that texts can fit, before they are encoded, which would take minutes for the longest accepted body.
///
/// # Errors
/// A text, or all together, are too long.
pub(super) fn check_texts(
    model: &ServedModel,
    texts_bytes: impl Iterator<Item = usize>,
    param: &'static str,
) -> Result<(), ApiError> {
    let (context_length, mut all) = (model.context_length, 0_usize);
    for bytes in texts_bytes {
        let tokens_min = model.tokenizer.tokens_min(bytes);
        if tokens_min > context_length as usize {
            return Err(ApiError::PromptLength { context_length, tokens_min, param });
        }
        all = all.saturating_add(bytes);
    }
    at_most(param, all, prompt_bytes_max(context_length), "bytes of text")
}

/// Checks that prompt and new tokens (at least `new_tokens`) fit into the model's context.
///
/// # Errors
/// They do not fit.
pub(super) fn check_context(
    model: &ServedModel,
    prompt_tokens: usize,
    new_tokens: u32,
    param: &'static str,
    limit_param: &'static str,
) -> Result<(), ApiError> {
    let context_length = model.context_length;
    let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    if u64::from(prompt_tokens) + u64::from(new_tokens) <= u64::from(context_length) {
        return Ok(());
    }
    // The error names the prompt if no new token fits after it, else the limit of new tokens.
    let param_at_fault = if prompt_tokens >= context_length { param } else { limit_param };
    Err(ApiError::ContextLength { context_length, prompt_tokens, new_tokens, prompt: param, param: param_at_fault })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_follow_from_the_context() {
        for (context, prompt_mib, body_mib, elements) in
            [(512, 1, 4, 66_560), (8_192, 1, 4, 81_920), (131_072, 4, 16, 327_680), (1 << 20, 32, 32, 2_162_688)]
        {
            let found = (prompt_bytes_max(context) >> 20, body_bytes_max(context) >> 20, elements_max(context));
            assert_eq!(found, (prompt_mib, body_mib, elements), "a context of {context}");
        }
    }
}
