//! Whether the process lives, whether the cluster can serve, and what was counted.

use super::App;
use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use std::sync::Arc;

fn status(code: StatusCode, status: &str) -> Response {
    (code, axum::Json(serde_json::json!({ "status": status }))).into_response()
}

/// The process answers; nothing else is said.
pub(super) async fn live() -> Response {
    status(StatusCode::OK, "ok")
}

/// 200 once a request can be served.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    match app.readiness().await {
        Ok(()) => status(StatusCode::OK, "ready"),
        Err(why) => status(StatusCode::SERVICE_UNAVAILABLE, &why.to_string()),
    }
}

/// Prometheus' text format.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    if let Some(audit) = &app.audit {
        // It has kept its gauges, or has said why not.
        let _ = audit.look().await;
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}

/// What this server takes and gives.
pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}
