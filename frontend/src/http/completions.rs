//! `POST /v1/completions`.

use super::{
    App,
    answer::{Job, respond},
    context::{check_context, check_text, encode},
    lifecycle::{Incoming, handle},
    shape::Shape,
};
use crate::{
    error::{ApiError, Problem},
    metrics::Endpoint,
    request::{self, PromptInput, completions::CompletionRequest},
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
    if let PromptInput::Texts(texts) = &completion.prompts {
        texts.iter().try_for_each(|text| check_text(&model, text.len(), "prompt"))?;
    }
    let text_bytes = completion.text_bytes();
    let encode_all = move || {
        let encode = |index| {
            let (tokens, echo) = completion.encode(index, &model)?;
            if tokens.is_empty() {
                return Err(ApiError::invalid("prompt", Problem::Empty));
            }
            check_context(&model, tokens.len(), completion.max_tokens, "prompt", "max_tokens")?;
            Ok((tokens, echo))
        };
        // The first that does not fit spares the rest.
        let encoded = (0..completion.prompts_len()).map(encode).collect::<Result<Vec<_>, _>>()?;
        Ok((completion, encoded))
    };
    let (completion, encoded) = encode(text_bytes, encode_all).await?;
    // Logits of the prompt's own tokens are only needed when both are asked for.
    let prompt_logprobs = completion.options.sampling.logprobs.filter(|_| completion.echo);
    let prompt = |(index, (tokens, echo))| (incoming.prompt(index, tokens, &completion.options, prompt_logprobs), echo);
    let prompts = encoded.into_iter().enumerate().map(prompt).collect();
    respond(incoming, Job { shape: Shape::Text, prompts, options: completion.options }).await
}
