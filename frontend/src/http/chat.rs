//! `POST /v1/chat/completions`.

use super::{
    app::App,
    conversation,
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
use tandem_api::{
    ChatRequest,
    answer::{ChoiceFormat, Style},
};

pub(super) async fn create(State(app): State<Arc<App>>, request: Request) -> Response {
    handle(app, Endpoint::Chat, request, prepare).await
}

pub(super) async fn prepare(incoming: &mut Incoming, body: Bytes) -> Result<Job, ApiError> {
    let request: ChatRequest = incoming.parse(body).await?;
    let served = incoming.served(request.model.as_deref())?;
    let chat = request.check(&served.model)?;
    conversation::job(incoming, served, chat, Style::Choices(ChoiceFormat::Chat)).await
}
