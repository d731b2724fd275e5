//! Whether prompts fit into the model's context, and where they are encoded.

use crate::{error::ApiError, model::ServedModel};

/// Texts longer than this are encoded on a thread of their own, so that others' tokens need not wait: about a millisecond.
const ENCODE_INLINE_BYTES: usize = 4 << 10;

/// Refuses a text that cannot fit before it is encoded, which takes minutes for the longest body that is read.
pub(super) fn check_text(model: &ServedModel, text_bytes: usize, param: &'static str) -> Result<(), ApiError> {
    let (context_length, tokens_min) = (model.context_length, model.tokenizer.tokens_min(text_bytes));
    if tokens_min <= context_length as usize {
        return Ok(());
    }
    Err(ApiError::PromptLength { context_length, tokens_min, param })
}

/// Whether prompt and new tokens (at least `new_tokens`) fit into the model's context.
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
    // The culprit: a prompt that leaves no room for a token, else the wish for too many.
    let culprit = if prompt_tokens >= context_length { param } else { limit_param };
    Err(ApiError::ContextLength { context_length, prompt_tokens, new_tokens, prompt: param, param: culprit })
}

/// Runs `encode` here when there is little text, else where it holds up nobody.
pub(super) async fn encode<T: Send + 'static>(
    text_bytes: usize,
    encode: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if text_bytes <= ENCODE_INLINE_BYTES {
        return encode();
    }
    tokio::task::spawn_blocking(encode).await.unwrap_or(Err(ApiError::Encode))
}
