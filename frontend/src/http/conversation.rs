//! Prepares a conversation of any API: limits its text, renders and encodes it, and checks that the answer fits into the context.

use super::incoming::{Incoming, Job};
use crate::{error::ApiError, models::Served};
use std::sync::Arc;
use tandem_api::{
    Problem, RequestError,
    answer::Style,
    chat::{Chat, Encoded},
    check_context, check_texts,
};
use tandem_text::ServedModel;

/// Returns the job that answers the conversation.
///
/// # Errors
/// The conversation is too long, or the model's template refuses it.
pub(super) async fn job(incoming: &mut Incoming, served: Served, chat: Chat, style: Style) -> Result<Job, ApiError> {
    leave_out(incoming, &chat);
    check(&served.model, &chat)?;
    incoming.reserve(1, &chat.options)?;
    incoming.check_constraint(&chat.options).await?;
    let (mut chat, Encoded { mut tokens, format }) = encode(incoming, &served.model, chat).await?;
    incoming.body.clear();
    if tokens.is_empty() {
        let rule = "must produce a prompt, but the chat template renders no text for these messages";
        return Err(ApiError::invalid(chat.names.prompt, Problem::Rule { rule }));
    }
    if let Some(marker) = format.reasoning_end() {
        chat.options.begin_constraint_after(marker);
    }
    let (new_tokens, limit_param) = match (chat.max_tokens, chat.options.sampling.min_tokens) {
        (Some(max_tokens), _) => (max_tokens, chat.limit_param),
        (None, 0) => (1, chat.limit_param),
        (None, min_tokens) => (min_tokens, "min_tokens"),
    };
    if let Some(truncation) = chat.options.truncation {
        truncation.apply(&mut tokens, served.model.usable_context().saturating_sub(new_tokens) as usize);
    }
    check_context(&served.model, tokens.len(), new_tokens, chat.names, limit_param)?;
    let prompt = incoming.prompt(&served, 0, tokens, &chat.options, chat.options.prompt_logprobs);
    Ok(Job { served, prompts: vec![(prompt, None)], options: chat.options, style, pieces: Some(Arc::new(format)) })
}

/// Returns the number of tokens of the conversation's prompt.
///
/// # Errors
/// The conversation is too long, or the model's template refuses it.
pub(super) async fn count(incoming: &mut Incoming, model: &Arc<ServedModel>, chat: Chat) -> Result<usize, ApiError> {
    leave_out(incoming, &chat);
    check(model, &chat)?;
    Ok(encode(incoming, model, chat).await?.1.tokens.len())
}

/// Records the parameters that the answer ignores. A response header names them.
fn leave_out(incoming: &mut Incoming, chat: &Chat) {
    for name in &chat.left_out {
        incoming.ignored.get_or_insert_default().add_name(name);
    }
    let tools = chat.left_out.iter().filter(|name| name.starts_with("tools.")).count();
    incoming.app.metrics.left_out_tools.increment(tools as u64);
}

fn check(model: &ServedModel, chat: &Chat) -> Result<(), RequestError> {
    check_texts(model, std::iter::once(chat.text_bytes()), chat.options.truncation, chat.names)
}

async fn encode(incoming: &Incoming, model: &Arc<ServedModel>, chat: Chat) -> Result<(Chat, Encoded), RequestError> {
    let encoder = Arc::clone(model);
    let encodings = incoming.encodings(model, &chat.options.cache_salt);
    incoming.encode_conversation(move || chat.encode(&encoder, &encodings).map(|encoded| (chat, encoded))).await
}
