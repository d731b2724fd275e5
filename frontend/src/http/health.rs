//! Whether the process lives, whether the cluster can serve, and what was counted.

use super::App;
use axum::{
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use std::sync::Arc;
use tandem_proto::v1::worker_info::Role;

fn status(code: StatusCode, status: &'static str) -> Response {
    (code, axum::Json(serde_json::json!({ "status": status }))).into_response()
}

/// The process answers; nothing else is said.
pub(super) async fn live() -> Response {
    status(StatusCode::OK, "ok")
}

/// 200 once a request can be served: the router is there and knows a decode worker.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    if app.admission.is_draining() {
        return status(StatusCode::SERVICE_UNAVAILABLE, "draining");
    }
    let Ok(reply) = app.dispatcher.workers().await else {
        return status(StatusCode::SERVICE_UNAVAILABLE, "router unreachable");
    };
    let decodes = |worker: &tandem_proto::v1::WorkerView| worker.info.as_ref().is_some_and(|info| info.role() == Role::Decode);
    if reply.workers.iter().any(decodes) {
        status(StatusCode::OK, "ready")
    } else {
        status(StatusCode::SERVICE_UNAVAILABLE, "no decode worker")
    }
}

/// Prometheus' text format.
pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}

/// What this server takes and gives.
pub(super) async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], include_str!("openapi.json")).into_response()
}
