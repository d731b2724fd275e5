//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::App;
use crate::{error::ApiError, model::ServedModel};
use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde_json::{Value, json};
use std::sync::Arc;

/// Returns the model's description. `max_model_len` is vLLM's name for the context length.
fn describe(app: &App, model: &ServedModel) -> Value {
    let (id, max_model_len) = (&model.id, model.context_length);
    json!({ "id": id, "object": "model", "created": app.since, "owned_by": "tandem", "max_model_len": max_model_len })
}

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Value> {
    let data: Vec<Value> = app.models.iter().map(|served| describe(&app, &served.model)).collect();
    Json(json!({ "object": "list", "data": data }))
}

pub(super) async fn one(State(app): State<Arc<App>>, id: Result<Path<String>, PathRejection>) -> Result<Json<Value>, ApiError> {
    let Ok(Path(id)) = id else { return Err(ApiError::UnknownPath) };
    let served = app.models.get(&id).ok_or(ApiError::ModelNotFound { model: id })?;
    Ok(Json(describe(&app, &served.model)))
}
