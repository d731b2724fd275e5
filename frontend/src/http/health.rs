//! The endpoints for liveness, readiness, load, metrics, the version and the API's description.

use super::{app::App, readiness::NotReady};
use axum::{
    Json,
    extract::State,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
};
use serde_json::{Value, json};
use std::sync::Arc;

fn status(code: StatusCode, status: &str) -> Response {
    (code, Json(json!({ "status": status }))).into_response()
}

pub(super) async fn live() -> Response {
    status(StatusCode::OK, "ok")
}

/// Replies with 200 while requests for at least one model can be served, else with 503 and the reason. With several models, `models` has
/// the status of each.
pub(super) async fn ready(State(app): State<Arc<App>>) -> Response {
    let text = |ready: &Result<(), NotReady>| ready.as_ref().map_or_else(ToString::to_string, |()| "ready".to_owned());
    let readiness = app.readiness().await;
    let any = readiness.of_any();
    let mut body = json!({ "status": text(&any) });
    if app.models.len() > 1 {
        let models = app.models.iter().zip(&readiness.0).map(|(served, ready)| (served.model.id.clone(), text(ready).into()));
        body["models"] = Value::Object(models.collect());
    }
    (if any.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE }, Json(body)).into_response()
}

pub(super) async fn metrics(State(app): State<Arc<App>>) -> Response {
    if let Some(audit) = &app.audit {
        // Reading the last audit updates its gauges. Failures are logged where they occur.
        let _ = audit.read().await;
    }
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], app.metrics.render()).into_response()
}

/// Returns the number of requests that were admitted and have not been answered, under vLLM's name.
pub(super) async fn load(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "server_load": app.admission.running() }))
}

pub(super) async fn version() -> Json<Value> {
    Json(json!({ "version": env!("CARGO_PKG_VERSION") }))
}
