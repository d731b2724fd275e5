//! The models that a server lists at `/v1/models`, as vLLM and SGLang do: a base model and its LoRAs.

use crate::{api::EngineFailure, calls, http::EngineHttp};
use parking_lot::Mutex;
use serde::Deserialize;
use std::sync::Arc;
use tandem_kv::Namespace;
use tokio::sync::watch;

/// The maximum number of LoRAs that a worker serves, and the maximum length of a LoRA's name in bytes. Others in the server's list are ignored.
const LORAS_MAX: usize = 1_000;
const NAME_BYTES_MAX: usize = 256;

#[derive(Clone, Debug, Default)]
pub(crate) struct ServedModels {
    pub id: String,
    /// The name or path from which the server loaded the base model; `None` if the server does not report it.
    pub root: Option<String>,
    /// The maximum length of a sequence, in tokens.
    pub context_length: u32,
    pub loras: Vec<String>,
}

/// The models of a worker: the base model, and the LoRAs that its server serves now.
#[derive(Debug, Default)]
pub(crate) struct Loras {
    names: watch::Sender<Arc<[String]>>,
    /// The name under which the worker serves the base model.
    base: Mutex<String>,
}

impl Loras {
    /// Returns these LoRAs of the server's model `base`.
    pub fn new(base: &str, names: Vec<String>) -> Self {
        let loras = Self { base: Mutex::new(base.to_owned()), ..Self::default() };
        loras.set(names);
        loras
    }

    /// Returns the names: the same list until they change.
    pub fn names(&self) -> Arc<[String]> {
        Arc::clone(&self.names.borrow())
    }

    /// Returns the name of the LoRA with which a request is computed; `None`: the base model computes it. A LoRA that was unloaded while the request
    /// waited is named, too, so that the server refuses the request.
    pub fn of<'a>(&self, namespace: &'a Namespace) -> Option<&'a str> {
        namespace.model().filter(|model| *model != *self.base.lock())
    }

    /// Resolves when [`Self::names`] returns another list than `known`. Cancel-safe.
    pub async fn changed(&self, known: &Arc<[String]>) {
        // The sender is not dropped meanwhile, so the wait cannot fail.
        drop(self.names.subscribe().wait_for(|now| !Arc::ptr_eq(now, known)).await);
    }

    /// Replaces the list, if it differs from the current one.
    pub fn set(&self, listed: Vec<String>) {
        let (base, count) = (self.base.lock().clone(), listed.len());
        let is_usable = |name: &String| name.len() <= NAME_BYTES_MAX && *name != base;
        let names: Arc<[String]> = listed.into_iter().filter(is_usable).take(LORAS_MAX).collect();
        let ignored = count - names.len();
        let differs = self.names.send_if_modified(|now| {
            **now != *names && {
                *now = Arc::clone(&names);
                true
            }
        });
        if differs && ignored > 0 {
            tracing::warn!(
                ignored,
                "LoRAs are not served: a name may have {NAME_BYTES_MAX} bytes and must not be that of the base model, and a server may have {LORAS_MAX}"
            );
        }
        if differs {
            tracing::info!(loras = ?names, "the engine has these LoRAs");
        }
    }

    /// Sets the name under which the worker serves the base model.
    pub fn serve_as(&self, base: &str) {
        base.clone_into(&mut self.base.lock());
        self.set(self.names().to_vec());
    }
}

#[derive(Debug, Deserialize)]
struct ListedName {
    id: String,
    root: Option<String>,
    max_model_len: Option<u32>,
    /// The base model of a LoRA.
    parent: Option<String>,
}

/// Returns the names of the LoRAs that the server serves now.
///
/// # Errors
/// Fails if the server does not answer, or answers with an error.
pub(crate) async fn loras(http: &EngineHttp) -> Result<Vec<String>, EngineFailure> {
    Ok(models(http).await?.map(|served| served.loras).unwrap_or_default())
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
