//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::App;
use crate::error::ApiError;
use axum::{
    Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde::Serialize;
use std::sync::Arc;

#[derive(Serialize)]
pub(super) struct Model {
    id: String,
    object: &'static str,
    created: u64,
    owned_by: &'static str,
    /// vLLM's name of the context length.
    max_model_len: u32,
}

#[derive(Serialize)]
pub(super) struct Models {
    object: &'static str,
    data: [Model; 1],
}

fn model(app: &App) -> Model {
    let (id, max_model_len) = (app.model.id.clone(), app.model.context_length);
    Model { id, object: "model", created: app.since, owned_by: "tandem", max_model_len }
}

pub(super) async fn list(State(app): State<Arc<App>>) -> Json<Models> {
    Json(Models { object: "list", data: [model(&app)] })
}

pub(super) async fn one(State(app): State<Arc<App>>, id: Result<Path<String>, PathRejection>) -> Result<Json<Model>, ApiError> {
    let Ok(Path(id)) = id else { return Err(ApiError::UnknownPath) };
    if id == app.model.id { Ok(Json(model(&app))) } else { Err(ApiError::ModelNotFound { model: id }) }
}
