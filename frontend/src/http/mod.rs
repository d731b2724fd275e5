//! The HTTP edge: routes, bodies, answers.

mod answer;
mod app;
mod body;
mod chat;
mod completions;
mod context;
mod dashboard;
mod events;
mod explain;
mod health;
mod lifecycle;
mod models;
mod progress;
mod readiness;
mod shape;
mod trust;

pub(crate) use app::App;
pub(crate) use progress::PromptDetails;
pub use trust::ExposeDetails;
pub(crate) use trust::Trust;

use crate::error::ApiError;
use axum::{
    Router,
    extract::Request,
    http::{HeaderName, HeaderValue},
    middleware::{self, Next},
    response::Response,
    routing::{get, post},
};
use std::sync::Arc;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// This server's name of a request, whatever the client calls it. Every answer carries it as `x-request-id`.
#[derive(Clone)]
struct RequestId(String);

/// Everything there is. Bodies are taken as JSON whatever their content type says.
pub(crate) fn routes(app: Arc<App>) -> Router {
    let dashboard = if app.recent.is_some() { dashboard::routes() } else { Router::new() };
    dashboard
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/health", get(health::live))
        .route("/live", get(health::live))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(health::openapi))
        .fallback(async || ApiError::UnknownPath)
        .method_not_allowed_fallback(async || ApiError::Method)
        .layer(middleware::from_fn(with_id))
        .with_state(app)
}

/// Names the request, and tells the name with every answer: whole ones, refusals, the dashboard's and those of unknown paths.
async fn with_id(mut request: Request, next: Next) -> Response {
    let id = uuid::Uuid::new_v4().simple().to_string();
    let value = HeaderValue::from_str(&id).expect("hexadecimal digits are a header's value");
    request.extensions_mut().insert(RequestId(id));
    let mut response = next.run(request).await;
    response.headers_mut().insert(REQUEST_ID, value);
    response
}

fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
