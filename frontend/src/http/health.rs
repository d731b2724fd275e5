//! The endpoints for liveness, readiness, metrics and the API's description.

use super::app::App;
use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use std::sync::Arc;

fn status(code: StatusCode, status: &str) -> Response {
    (code, axum::Json(serde_json::json!({ "status": status }))).into_response()
}

pub(super) async fn live() -> Response {
    status(StatusCode::OK, "ok")
}

/// Replies with 200 while a request can be served, else with 503 and the reason.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.readiness().await {
        Ok(()) => status(StatusCode::OK, "ready"),
        Err(why) => status(StatusCode::SERVICE_UNAVAILABLE, &why.to_string()),
    }
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    if let Some(audit) = &app.audit {
        // Reading the last audit updates its gauges. Failures are logged where they occur.
        let _ = audit.read().await;
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}

pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}
