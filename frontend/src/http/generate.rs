//! `POST /inference/v1/generate`.

use super::{
    app::App,
    incoming::{Incoming, Job},
    lifecycle::handle,
};
use crate::{error::ApiError, metrics::Endpoint};
use axum::{
    extract::{Request, State},
    response::Response,
};
use bytes::Bytes;
use std::sync::Arc;
use tandem_api::{Generate, GenerateRequest, ParamNames, answer::Style, check_context};

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Generate, request, prepare).await
}

async fn prepare(incoming: &mut Incoming, body: Bytes) -> Result<Job, ApiError> {
    let request: GenerateRequest = incoming.parse(body).await?;
    let served = incoming.served_or_only(request.model.as_deref())?;
    let Generate { mut tokens, options, max_tokens, request_id } = request.check(&served.model)?;
    let (new_tokens, limit_param) = match max_tokens {
        Some(max_tokens) => (max_tokens, "sampling_params.max_tokens"),
        None => (options.sampling.min_tokens.max(1), "sampling_params.min_tokens"),
    };
    if let Some(truncation) = options.truncation {
        truncation.apply(&mut tokens, served.model.usable_context().saturating_sub(new_tokens) as usize);
    }
    check_context(&served.model, tokens.len(), new_tokens, &ParamNames::GENERATE, limit_param)?;
    incoming.reserve(1, &options)?;
    incoming.check_constraint(&options).await?;
    incoming.body.clear();
    let prompt = incoming.prompt(&served, 0, tokens.into(), &options, options.prompt_logprobs);
    Ok(Job { served, prompts: vec![(prompt, None)], options, style: Style::Generated(request_id), pieces: None })
}
