//! `POST /v1/chat/completions`.

use super::{
    app::App,
    context::{check_context, check_texts},
    incoming::{Incoming, Job},
    lifecycle::handle,
};
use crate::{error::ApiError, metrics::Endpoint, request::ChatRequest};
use axum::{
    extract::{Request, State},
    response::Response,
};
use bytes::Bytes;
use std::sync::Arc;

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Chat, request, prepare).await
}

async fn prepare(incoming: &mut Incoming, body: Bytes) -> Result<Job, ApiError> {
    let request: ChatRequest = incoming.parse(body).await?;
    let served = incoming.served(request.model.as_deref())?;
    let model = Arc::clone(&served.model);
    let chat = request.check(&model)?;
    check_texts(&model, std::iter::once(chat.text_bytes()), "messages")?;
    incoming.reserve(1, &chat.options)?;
    let encoder = Arc::clone(&model);
    let encoding_bytes = chat.encoding_bytes();
    let (chat, tokens) = incoming.encode(encoding_bytes, move || chat.encode(&encoder).map(|tokens| (chat, tokens))).await?;
    incoming.body.clear();
    let (new_tokens, limit_param) = match (chat.max_tokens, chat.options.sampling.min_tokens) {
        (Some(max_tokens), _) => (max_tokens, chat.limit_param),
        (None, 0) => (1, chat.limit_param),
        (None, min_tokens) => (min_tokens, "min_tokens"),
    };
    check_context(&model, tokens.len(), new_tokens, "messages", limit_param)?;
    let prompt = incoming.prompt(&served, 0, tokens, &chat.options, None);
    Ok(Job { served, prompts: vec![(prompt, None)], options: chat.options })
}
