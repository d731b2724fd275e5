//! `GET /v1/models` and `GET /v1/models/{id}`.

use super::app::App;
use crate::{calls::Call, error::ApiError};
use axum::{
    Extension, Json,
    extract::{Path, State, rejection::PathRejection},
};
use serde_json::{Value, json};
use std::sync::Arc;
use tandem_text::ServedModel;

/// Returns the model's description. `max_model_len` is vLLM's name for the context length.
fn describe(app: &App, model: &ServedModel) -> Value {
    let (id, max_model_len) = (&model.id, model.usable_context());
    json!({ "id": id, "object": "model", "created": app.since, "owned_by": "tandem", "max_model_len": max_model_len })
}

/// The request's [`Call`]; `None`: there are neither keys nor an audit log.
type OfCall = Option<Extension<Arc<Call>>>;

fn is_allowed(call: &OfCall, model: &str) -> bool {
    call.as_ref().and_then(|Extension(call)| call.key.as_ref()).is_none_or(|key| key.allows(model))
}

/// Returns the description of a model whose requests are passed through.
fn describe_passed(app: &App, id: &str) -> Value {
    json!({ "id": id, "object": "model", "created": app.since, "owned_by": "passthrough" })
}

/// Lists the models that the request's key may use.
pub(super) async fn list(State(app): State<Arc<App>>, call: OfCall) -> Json<Value> {
    let allowed = app.models.all().into_iter().filter(|served| is_allowed(&call, &served.model.id));
    let served = allowed.map(|served| describe(&app, &served.model));
    let passed = app.passed.ids().filter(|id| is_allowed(&call, id)).map(|id| describe_passed(&app, id));
    let data: Vec<Value> = served.chain(passed).collect();
    Json(json!({ "object": "list", "data": data }))
}

pub(super) async fn one(
    State(app): State<Arc<App>>,
    call: OfCall,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, ApiError> {
    let Ok(Path(id)) = id else { return Err(ApiError::UnknownPath) };
    let served = app.models.get(&id).map(|served| describe(&app, &served.model));
    let found = served.or_else(|| app.passed.get(&id).map(|_| describe_passed(&app, &id)));
    let found = found.ok_or_else(|| ApiError::ModelNotFound { model: id.clone() })?;
    if !is_allowed(&call, &id) {
        return Err(ApiError::ModelNotAllowed { model: id });
    }
    Ok(Json(found))
}
