//! Anthropic's Messages API: `POST /v1/messages` and `POST /v1/messages/count_tokens`.

use super::{
    app::App,
    conversation,
    incoming::{Incoming, Job},
    lifecycle::handle,
    request_id::HttpRequestId,
};
use crate::{error::ApiError, metrics::Endpoint};
use axum::{
    Json,
    extract::{Request, State},
    http::{HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde_json::json;
use std::sync::Arc;
use tandem_api::{MessagesRequest, answer::Style};

/// The header in which Anthropic's clients look for a request's id.
const REQUEST_ID: HeaderName = HeaderName::from_static("request-id");

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
    conversation::job(incoming, served, chat, Style::Message).await
}

async fn count(incoming: &mut Incoming, body: Bytes) -> Result<Response, ApiError> {
    let request: MessagesRequest = incoming.parse(body).await?;
    let model = incoming.served(request.model.as_deref())?.model;
    let chat = request.check_prompt(&model)?;
    let tokens = conversation::count(incoming, &model, chat).await?;
    Ok(Json(json!({ "input_tokens": tokens })).into_response())
}

/// The layer that writes the errors of `/v1/messages` and the paths below it in Anthropic's shape, and gives all their responses the header
/// `request-id`.
pub(super) async fn shaped(request: Request, next: Next) -> Response {
    let rest = request.uri().path().strip_prefix("/v1/messages");
    if !rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('/')) {
        return next.run(request).await;
    }
    let HttpRequestId(id) = request.extensions().get().cloned().expect("the outermost layer sets the id");
    let mut response = next.run(request).await;
    if let Some(error) = response.extensions().get::<Arc<ApiError>>() {
        let shaped = Json(error.failure().anthropic_body(&id)).into_response();
        let mut headers = std::mem::take(response.headers_mut());
        headers.remove(header::CONTENT_LENGTH);
        response = (response.status(), headers, shaped).into_response();
    }
    response.headers_mut().extend(HeaderValue::from_str(&id).ok().map(|id| (REQUEST_ID, id)));
    response
}
