//! OpenAI's Responses API: `POST /v1/responses` and `POST /v1/responses/input_tokens`. No answer is stored.

use super::{
    app::App,
    conversation,
    incoming::{Incoming, Job},
    lifecycle::handle,
};
use crate::{error::ApiError, metrics::Endpoint};
use axum::{
    Json,
    extract::{Request, State},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde_json::json;
use std::sync::Arc;
use tandem_api::{ResponsesRequest, answer::Style, responses::Responses};

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Responses, request, prepare).await
}

pub(super) async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::CountTokens, request, count).await
}

async fn prepare(incoming: &mut Incoming, body: Bytes) -> Result<Job, ApiError> {
    let request: ResponsesRequest = incoming.parse(body).await?;
    let served = incoming.served(request.model.as_deref())?;
    let Responses { chat, repeated, origins } = request.check(&served.model)?;
    conversation::job(incoming, served, chat, Style::Response(repeated, origins)).await
}

async fn count(incoming: &mut Incoming, body: Bytes) -> Result<Response, ApiError> {
    let request: ResponsesRequest = incoming.parse(body).await?;
    let model = incoming.served(request.model.as_deref())?.model;
    let Responses { chat, .. } = request.check(&model)?;
    let tokens = conversation::count(incoming, &model, chat).await?;
    Ok(Json(json!({ "object": "response.input_tokens", "input_tokens": tokens })).into_response())
}
