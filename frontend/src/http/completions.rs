//! `POST /v1/completions`.

use super::{
    App, Incoming,
    answer::{Job, respond},
    check_context, encode, handle,
    shape::Shape,
};
use crate::{
    error::{ApiError, Problem},
    metrics::Endpoint,
    request::{self, completions::CompletionRequest},
};
use axum::{
    extract::{Request, State},
    response::Response,
};
use bytes::Bytes;
use std::sync::Arc;

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Completions, request, answer).await
}

async fn answer(incoming: &mut Incoming, body: Bytes) -> Result<Response, ApiError> {
    let request: CompletionRequest = request::parse(&body)?;
    drop(body);
    incoming.check_model(request.model.as_deref())?;
    let model = Arc::clone(&incoming.app.model);
    let completion = request.check(&model, incoming.app.prompts_max)?;
    if let Some(admitted) = &mut incoming.admitted {
        admitted.widen(completion.prompts_len())?;
    }
    let encoder = Arc::clone(&model);
    let (completion, encoded) =
        encode(completion.text_bytes(), move || completion.encode(&encoder).map(|encoded| (completion, encoded))).await?;
    // Logits of the prompt's own tokens are only needed when both are asked for.
    let prompt_logprobs = completion.options.sampling.logprobs.filter(|_| completion.echo);
    let mut prompts = Vec::with_capacity(encoded.len());
    for (index, (tokens, echo)) in encoded.into_iter().enumerate() {
        if tokens.is_empty() {
            return Err(ApiError::invalid("prompt", Problem::Empty));
        }
        check_context(&model, tokens.len(), completion.max_tokens, "prompt", "max_tokens")?;
        prompts.push((incoming.prompt(index, tokens, &completion.options, prompt_logprobs), echo));
    }
    respond(incoming, Job { shape: Shape::Text, prompts, options: completion.options }).await
}
