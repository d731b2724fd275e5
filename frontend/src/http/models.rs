//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::App;
use crate::error::ApiError;
use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns the model's description. `max_model_len` is vLLM's name for the context length.
fn model(app: &App) -> Value {
    let (id, max_model_len) = (&app.model.id, app.model.context_length);
    json!({ "id": id, "object": "model", "created": app.since, "owned_by": "tandem", "max_model_len": max_model_len })
}

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({ "object": "list", "data": [model(&app)] }))
}

pub(super) async fn one(State(app): State<Arc<App>>, id: Result<Path<String>, PathRejection>) -> Result<Json<Value>, ApiError> {
    let Ok(Path(id)) = id else { return Err(ApiError::UnknownPath) };
    if id == app.model.id { Ok(Json(model(&app))) } else { Err(ApiError::ModelNotFound { model: id }) }
}
