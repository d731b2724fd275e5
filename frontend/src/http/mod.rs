//! The HTTP API: routes, request bodies and answers.

mod access;
mod answer;
mod app;
mod body;
mod chat;
mod completions;
mod conversation;
mod cors;
mod dashboard;
mod explain;
mod form;
mod generate;
mod guard;
mod health;
mod incoming;
mod lifecycle;
mod messages;
mod models;
mod openapi;
mod passed;
mod passthrough;
pub(crate) mod picker;
mod progress;
mod readiness;
mod request_id;
mod respond;
mod responses;
mod sse;
pub(crate) mod starting;
mod tokenize;
mod trailing_slash;
mod trust;

pub(crate) use app::App;
pub(crate) use cors::Origins;
pub(crate) use guard::guarded;
pub(crate) use trust::Trust;

use crate::error::ApiError;
use axum::{
    Router,
    extract::{Request, State},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use dashboard::Neighbour;
use std::sync::Arc;

/// Returns the routes of the API, of the chat at `/chat` and, if `with_pages`, of the operator's pages (`/metrics` and `/dashboard`). With
/// API keys, the operator's pages need no key, but a trusted peer. Every peer receives the chat's files.
pub(crate) fn api(app: Arc<App>, with_pages: bool) -> Router {
    let exposed = |pages: Router<Arc<App>>| pages.route_layer(from_fn_with_state(Arc::clone(&app), only_exposed));
    let dashboard = dashboard::routes(Neighbour::Served);
    let pages = match (with_pages, &app.keys) {
        (false, _) => Router::new().route("/dashboard", get(async || ApiError::OnAdminPort)),
        (true, None) => pages(&app, exposed(dashboard)),
        (true, Some(_)) => exposed(pages(&app, dashboard)),
    };
    // With keys, most users of the chat cannot open the dashboard.
    let has_dashboard = with_pages && app.recent.is_some() && app.keys.is_none();
    let chat = dashboard::chat(if has_dashboard { Neighbour::Served } else { Neighbour::Absent });
    let mut routes = described()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/inference/v1/generate", post(generate::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/messages/count_tokens", post(messages::count_tokens))
        .route("/v1/responses", post(responses::create))
        .route("/v1/responses/input_tokens", post(responses::count_tokens))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/v1/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .merge(passthrough::routes());
    if app.keys.is_some() || app.call_log.is_some() {
        routes = routes.route_layer(from_fn_with_state(Arc::clone(&app), access::checked));
    }
    if app.recent.is_some() {
        // The outermost layer, so that requests without a key are recorded as well.
        routes = routes.route_layer(from_fn_with_state(Arc::clone(&app), dashboard::refusals));
    }
    finished(pages.merge(chat).merge(dashboard::start("chat")).merge(routes), app)
}

/// Returns the routes of the admin listener: the operator's pages, and the explanations of placements that the dashboard requests.
pub(crate) fn admin(app: Arc<App>) -> Router {
    let explained = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/inference/v1/generate", post(generate::create))
        .route("/v1/messages", post(messages::create))
        .route("/v1/responses", post(responses::create))
        .route_layer(from_fn(only_explanations));
    let dashboard = dashboard::routes(Neighbour::Absent).merge(dashboard::start("dashboard"));
    finished(pages(&app, dashboard).merge(described()).merge(explained), app)
}

async fn only_explanations(mut request: Request, next: Next) -> Response {
    if !trust::wants(request.headers(), &app::EXPLAIN).unwrap_or(false) {
        body::discard(request.into_body()).await;
        return ApiError::AdminExplains.into_response();
    }
    request.extensions_mut().insert(trust::OnAdminListener);
    next.run(request).await
}

fn pages(app: &App, dashboard: Router<Arc<App>>) -> Router<Arc<App>> {
    let dashboard = if app.recent.is_some() { dashboard } else { Router::new() };
    dashboard.route("/metrics", get(health::metrics)).route("/load", get(health::load))
}

/// Refuses pages to peers that may not request details, because they show details of all clients' requests. The admin port has no such
/// check.
async fn only_exposed(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    if !app.trust.exposes(&parts) {
        return ApiError::UntrustedPage.into_response();
    }
    next.run(Request::from_parts(parts, body)).await
}

fn described() -> Router<Arc<App>> {
    Router::new().route("/version", get(health::version)).route("/openapi.json", get(openapi::show))
}

/// Adds the routes and layers that all listeners have. None of these routes needs a key.
fn finished(routes: Router<Arc<App>>, app: Arc<App>) -> Router {
    routes
        .route("/health", get(health::live))
        .route("/live", get(health::live))
        .route("/ping", get(health::live).post(health::live))
        .route("/ready", get(health::ready))
        .fallback(unknown_path)
        .method_not_allowed_fallback(async || ApiError::Method)
        .with_state(app)
}

/// Refuses a request for a path that this server does not have, after reading its body: a client reads the reply only after it has sent
/// its request.
async fn unknown_path(request: Request) -> ApiError {
    body::discard(request.into_body()).await;
    ApiError::UnknownPath
}
