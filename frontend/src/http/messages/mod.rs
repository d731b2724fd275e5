//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

pub(super) mod errors;
pub(super) mod format;

use super::{
    app::App,
    conversation,
    incoming::{Incoming, Job},
    lifecycle::handle,
    style::Style,
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
use tandem_api::{MessagesRequest, anthropic};

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Messages, request, prepare).await
}

pub(super) async fn count_tokens(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::CountTokens, request, count).await
}

async fn prepare(incoming: &mut Incoming, body: Bytes) -> Result<Job, ApiError> {
    let request: MessagesRequest = incoming.parse(body).await?;
    let served = incoming.served(request.model.as_deref())?;
    let chat = request.check(&served.model)?;
    conversation::job(incoming, served, chat, Style::Message).await.map_err(|error| error.renamed(anthropic::name))
}

async fn count(incoming: &mut Incoming, body: Bytes) -> Result<Response, ApiError> {
    let request: MessagesRequest = incoming.parse(body).await?;
    let model = incoming.served(request.model.as_deref())?.model;
    let chat = request.check_prompt(&model)?;
    let tokens = conversation::count(incoming, &model, chat).await.map_err(|error| error.renamed(anthropic::name))?;
    Ok(Json(json!({ "input_tokens": tokens })).into_response())
}
