//! The endpoints whose requests are passed through to other servers: embeddings, rerank, score, classify, pooling and audio.
//!
//! A body passes unchanged. Of a request's headers, only those pass that describe its body and the wanted answer.

use super::{
    app::App,
    body::BodyForm,
    form,
    incoming::{Incoming, Work},
    lifecycle::{TRACEPARENT, handle},
    passed::PassedAnswer,
    request_id,
};
use crate::{error::ApiError, metrics::Endpoint};
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, header},
    response::Response,
    routing::post,
};
use bytes::Bytes;
use serde::Deserialize;
use std::sync::Arc;
use tandem_api::Problem;

/// The paths of vLLM, and of SGLang's OpenAI-compatible API, whose requests name a model and do not generate text.
const PATHS: [(Endpoint, &[&str]); 7] = [
    (Endpoint::Embeddings, &["/v1/embeddings", "/v2/embed"]),
    (Endpoint::Rerank, &["/v1/rerank", "/v2/rerank", "/rerank"]),
    (Endpoint::Score, &["/v1/score", "/score"]),
    (Endpoint::Classify, &["/v1/classify", "/classify"]),
    (Endpoint::Pooling, &["/pooling"]),
    (Endpoint::Transcriptions, &["/v1/audio/transcriptions"]),
    (Endpoint::Translations, &["/v1/audio/translations"]),
];

/// Returns each path with its endpoint.
pub(super) fn paths() -> impl Iterator<Item = (&'static str, Endpoint)> {
    PATHS.into_iter().flat_map(|(endpoint, paths)| paths.iter().map(move |path| (*path, endpoint)))
}

/// Returns the routes of all paths.
pub(super) fn routes() -> Router<Arc<App>> {
    paths().fold(Router::new(), |routes, (path, endpoint)| {
        routes.route(path, post(move |State(app): State<Arc<App>>, request: Request| create(app, endpoint, request)))
    })
}

async fn create(app: Arc<App>, endpoint: Endpoint, request: Request) -> Response {
    let path = request.uri().path_and_query().map_or("/", |path| path.as_str()).to_owned();
    let passed = [header::CONTENT_TYPE, header::ACCEPT].into_iter();
    let headers: HeaderMap = passed.filter_map(|name| Some((name.clone(), request.headers().get(name)?.clone()))).collect();
    let pass = async move |incoming: &mut Incoming, body: Bytes| pass(incoming, &path, headers, body).await;
    handle(app, endpoint, request, pass).await
}

/// The only field of a JSON body that this server reads.
#[derive(Deserialize)]
struct ModelField {
    model: Option<String>,
}

async fn pass(incoming: &mut Incoming, path: &str, mut headers: HeaderMap, body: Bytes) -> Result<Work, ApiError> {
    let endpoint = incoming.admitted.endpoint;
    let (kind, read) = (headers.get(header::CONTENT_TYPE).cloned(), body.clone());
    let read = move || match BodyForm::of(endpoint) {
        BodyForm::Json => Ok(tandem_api::parse::<ModelField>(&read, usize::MAX)?.0.model),
        BodyForm::Multipart => form::model(kind.as_ref().and_then(|kind| kind.to_str().ok()).unwrap_or_default(), &read),
    };
    let model = incoming.read(body.len(), read).await?;
    let servers = incoming.passed_through(model.as_deref())?;
    if incoming.header_options.explain {
        let rule = "has no effect here: requests of this path are not placed by a router; leave it out";
        return Err(ApiError::invalid("x-tandem-explain", Problem::Rule { rule }));
    }
    if let Some(key) = &incoming.admitted.call.key {
        // The tokens are known at the end. Until then, the request only needs a key whose earlier requests have left no debt.
        key.take_prompt_tokens(0)?;
    }
    incoming.admitted.reserve(incoming.client.clone(), 1)?;
    let (span, model) = (&incoming.admitted.span, &incoming.admitted.model);
    span.rename(|| format!("{} {model}", endpoint.operation()));
    span.set("gen_ai.operation.name", endpoint.operation());
    span.set("gen_ai.request.model", model.clone());
    let own = [(request_id::HEADER, &incoming.id), (TRACEPARENT, &incoming.traceparent)].into_iter();
    let own = own.filter(|(_, value)| !value.is_empty());
    headers.extend(own.filter_map(|(name, value)| Some((name, value.parse().ok()?))));
    let answer = servers.send(path, headers, body).await;
    let (response, place) = answer.ok_or_else(|| ApiError::NoServer { model: incoming.admitted.model.clone() })?;
    Ok(Work::Passed(Box::new(PassedAnswer { response, place })))
}
