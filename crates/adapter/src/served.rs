//! The models that a server lists at `/v1/models`, as vLLM and SGLang do: a base model and its LoRAs.

use crate::{api::EngineFailure, calls, http::EngineHttp};
use serde::Deserialize;

#[derive(Clone, Debug, Default)]
pub(crate) struct ServedModels {
    pub id: String,
    /// The name or path from which the server loaded the base model; `None` if the server does not report it.
    pub root: Option<String>,
    /// The maximum length of a sequence, in tokens.
    pub context_length: u32,
    pub loras: Vec<String>,
}

#[derive(Debug, Deserialize)]
struct ListedName {
    id: String,
    root: Option<String>,
    max_model_len: Option<u32>,
    /// The base model of a LoRA.
    parent: Option<String>,
}

/// Returns the models that the server serves now; `None` if there are none. If the base model has several names, the first one is used.
///
/// # Errors
/// Fails if the server does not answer, or answers with an error.
pub(crate) async fn models(http: &EngineHttp) -> Result<Option<ServedModels>, EngineFailure> {
    #[derive(Deserialize)]
    struct Models {
        data: Vec<ListedName>,
    }
    let (loras, bases): (Vec<_>, Vec<_>) =
        calls::get_json::<Models>(http, "/v1/models").await?.data.into_iter().partition(|model| model.parent.is_some());
    let loras = loras.into_iter().map(|lora| lora.id).collect();
    Ok(bases.into_iter().next().map(|ListedName { id, root, max_model_len, .. }| ServedModels {
        id,
        root,
        context_length: max_model_len.unwrap_or(u32::MAX),
        loras,
    }))
}
