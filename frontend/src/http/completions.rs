//! `POST /v1/completions`.

use super::{
    app::App,
    incoming::{Incoming, Job},
    lifecycle::handle,
};
use crate::{dispatch::Prompt, error::ApiError, metrics::Endpoint};
use axum::{
    extract::{Request, State},
    response::Response,
};
use bytes::Bytes;
use std::sync::Arc;
use tandem_api::{
    CompletionRequest, ParamNames, Problem,
    answer::{ChoiceFormat, Style},
    check_context, check_texts,
    completions::{Completion, Input},
};

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Completions, request, prepare).await
}

pub(super) async fn prepare(incoming: &mut Incoming, body: Bytes) -> Result<Job, ApiError> {
    let request: CompletionRequest = incoming.parse(body).await?;
    let served = incoming.served(request.model.as_deref())?;
    let model = Arc::clone(&served.model);
    let Completion { options, max_tokens, echo, prompts, bos } = request.check(&model)?;
    check_texts(&model, prompts.iter().map(Input::text_bytes), options.truncation, &ParamNames::COMPLETION)?;
    incoming.reserve(prompts.len(), &options)?;
    incoming.check_constraint(&options).await?;
    let all_bytes = prompts.iter().map(Input::text_bytes).sum();
    // A prompt's own logprobs are reported if they are requested, or if the prompt is echoed with logprobs.
    let prompt_logprobs = options.sampling.logprobs.filter(|_| echo).max(options.prompt_logprobs);
    let mut ready = Vec::with_capacity(prompts.len());
    // The prompts are encoded one after the other, so that other requests' prompts can be encoded in between.
    for (index, input) in prompts.into_iter().enumerate() {
        let (encoder, encodings) = (Arc::clone(&model), incoming.encodings(&model, &options.cache_salt));
        let encode = move || input.encode(bos, &encoder, &encodings);
        let (mut tokens, text) = incoming.encode(all_bytes, encode).await?;
        let fitting = model.usable_context().saturating_sub(max_tokens) as usize;
        let shortened = options.truncation.is_some_and(|truncation| truncation.apply(&mut tokens, fitting));
        let text = echo.then(|| text.filter(|_| !shortened).unwrap_or_else(|| model.tokenizer.decode(&tokens)));
        if tokens.is_empty() {
            return Err(ApiError::invalid("prompt", Problem::Empty));
        }
        check_context(&model, tokens.len(), max_tokens, &ParamNames::COMPLETION, "max_tokens")?;
        let mut prompt = incoming.prompt(&served, index, tokens.into(), &options, prompt_logprobs);
        prompt.join_equal(ready.iter_mut().map(|(earlier, _): &mut (Prompt, _)| earlier));
        ready.push((prompt, text));
    }
    incoming.body.clear();
    Ok(Job { served, prompts: ready, options, style: Style::Choices(ChoiceFormat::Completions), pieces: None })
}
