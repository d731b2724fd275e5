//! Prepares a conversation of any API: limits its text, renders and encodes it, and checks that the answer fits into the context.

use super::incoming::{Incoming, Job, PromptTokens};
use crate::{
    error::ApiError,
    models::Served,
    render::{ImagePlace, Rendered, image_id},
};
use std::sync::Arc;
use tandem_api::{
    Problem, RequestError,
    answer::Style,
    chat::{Chat, Encoded},
    check_context, check_texts,
    images::CheckedImage,
};
use tandem_kv::ImageId;
use tandem_proto::v1::Image;
use tandem_text::{ServedModel, chat::OutputFormat};

/// Returns the job that answers the conversation.
///
/// # Errors
/// The conversation is too long, or the model's template refuses it.
pub(super) async fn job(incoming: &mut Incoming, served: Served, chat: Chat, style: Style) -> Result<Job, ApiError> {
    leave_out(incoming, &chat);
    check(&served.model, &chat)?;
    incoming.reserve(1, &chat.options)?;
    incoming.check_constraint(&chat.options).await?;
    let EncodedChat { mut chat, mut prompt, format } = encode(incoming, &served.model, chat).await?;
    incoming.body.clear();
    if prompt.tokens.is_empty() {
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
        truncation.apply(&mut prompt.tokens, served.model.usable_context().saturating_sub(new_tokens) as usize);
    }
    check_context(&served.model, prompt.tokens.len(), new_tokens, chat.names, limit_param)?;
    let prompt = incoming.prompt(&served, 0, prompt, &chat.options, chat.options.prompt_logprobs);
    Ok(Job { served, prompts: vec![(prompt, None)], options: chat.options, style, pieces: Some(Arc::new(format)) })
}

/// Returns the number of tokens of the conversation's prompt.
///
/// # Errors
/// The conversation is too long, or the model's template refuses it.
pub(super) async fn count(incoming: &mut Incoming, model: &Arc<ServedModel>, chat: Chat) -> Result<usize, ApiError> {
    leave_out(incoming, &chat);
    check(model, &chat)?;
    Ok(encode(incoming, model, chat).await?.prompt.tokens.len())
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

/// A conversation as tokens.
pub(super) struct EncodedChat {
    pub(super) chat: Chat,
    pub(super) prompt: PromptTokens,
    /// How the answer is split into reasoning, text and tool calls.
    pub(super) format: OutputFormat,
}

/// Converts the conversation to tokens: this process does, or a renderer if there are images.
///
/// # Errors
/// The model's template or the renderer refuses the conversation, no renderer answers, or an image is beyond the limits.
pub(super) async fn encode(incoming: &mut Incoming, model: &Arc<ServedModel>, chat: Chat) -> Result<EncodedChat, ApiError> {
    let encoder = Arc::clone(model);
    if chat.images.is_empty() {
        let encodings = incoming.encodings(model, &chat.options.cache_salt);
        let encode = move || chat.encode(&encoder, &encodings).map(|encoded| (chat, encoded));
        let (chat, Encoded { tokens, format }) = incoming.encode_conversation(encode).await?;
        return Ok(EncodedChat { chat, prompt: tokens.into(), format });
    }
    let renderers = &incoming.app.renderers;
    if !renderers.has(&model.id) {
        let rule = "has images, but this server has no renderer for the model; its operator sets one with --renderer";
        return Err(ApiError::invalid(chat.names.prompt, Problem::Rule { rule }));
    }
    let namespace = incoming.namespace(model, &chat.options.cache_salt);
    let prepare = move || {
        let images = chat.images.decode()?;
        let ids: Vec<ImageId> = images.iter().map(|image| image_id(&namespace, &image.data)).collect();
        let texts: Vec<String> = ids.iter().map(ImageId::to_string).collect();
        let body = chat.rendering(&encoder, &texts)?;
        Ok((chat, images.into_iter().zip(ids), texts, body))
    };
    let (chat, images, ids, body) = incoming.encode_conversation(prepare).await?;
    let rendered = renderers.render(&model.id, model.context_length, body.into(), &ids).await?;
    let Rendered { tokens, places } = rendered.ok_or(ApiError::Renderers)?;
    let image = |((CheckedImage { media_type, data }, ImageId(id)), ImagePlace { offset, length }): (_, ImagePlace)| Image {
        id: id.to_vec(),
        offset,
        length,
        media_type: media_type.to_owned(),
        data: data.into(),
    };
    let images = images.zip(places).map(image).collect();
    let Encoded { tokens, format } = chat.rendered(model, tokens);
    // The images are kept until the answer ends, because another worker may have to continue it.
    let held = std::mem::take(&mut incoming.body);
    Ok(EncodedChat { chat, prompt: PromptTokens { tokens, images, held }, format })
}
