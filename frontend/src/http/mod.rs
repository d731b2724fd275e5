//! The HTTP API: routes, request bodies and answers.

mod answer;
mod app;
mod body;
mod chat;
mod completions;
mod context;
mod dashboard;
mod explain;
mod format;
mod guard;
mod health;
mod incoming;
mod lifecycle;
mod models;
mod progress;
mod readiness;
mod request_id;
mod sse;
mod trust;

pub(crate) use app::App;
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
use std::sync::Arc;

/// Returns the routes of the OpenAI API and, if `with_pages`, of the operator's pages (`/metrics` and `/dashboard`).
pub(crate) fn api(app: Arc<App>, with_pages: bool) -> Router {
    let exposed = dashboard::routes().route_layer(from_fn_with_state(Arc::clone(&app), only_exposed));
    let pages = if with_pages { pages(&app, exposed) } else { Router::new() };
    let routes = pages
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one));
    finished(routes, app)
}

/// Returns the routes of the admin listener: the operator's pages, and the explanations of placements that the dashboard requests.
pub(crate) fn admin(app: Arc<App>) -> Router {
    let explained = Router::new()
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route_layer(from_fn(only_explanations));
    finished(pages(&app, dashboard::routes()).merge(explained), app)
}

async fn only_explanations(mut request: Request, next: Next) -> Response {
    if !trust::wants(request.headers(), &app::EXPLAIN) {
        body::discard(request.into_body()).await;
        return ApiError::AdminExplains.into_response();
    }
    request.extensions_mut().insert(trust::OnAdminListener);
    next.run(request).await
}

fn pages(app: &App, dashboard: Router<Arc<App>>) -> Router<Arc<App>> {
    let dashboard = if app.recent.is_some() { dashboard } else { Router::new() };
    dashboard.route("/metrics", get(health::metrics))
}

/// Refuses the dashboard to peers that may not request details, because it shows the details of all clients' requests. This applies
/// only to the API's listener.
async fn only_exposed(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    if !app.trust.exposes(app.trust.trusts(&parts)) {
        return ApiError::UntrustedPage.into_response();
    }
    next.run(Request::from_parts(parts, body)).await
}

/// Adds the routes and layers that all listeners have.
fn finished(routes: Router<Arc<App>>, app: Arc<App>) -> Router {
    routes
        .route("/health", get(health::live))
        .route("/live", get(health::live))
        .route("/ready", get(health::ready))
        .route("/openapi.json", get(health::openapi))
        .fallback(async || ApiError::UnknownPath)
        .method_not_allowed_fallback(async || ApiError::Method)
        .with_state(app)
}
