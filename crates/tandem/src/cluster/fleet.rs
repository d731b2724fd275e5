//! The workers of `tandem up` for servers that are running already, and the models of these servers.

use super::{
    ClusterParts, EngineConfig, StartError, Worker,
    external::{self, Announced},
    local_address, loopback, weights,
};
use crate::settings::{KvConnector, UpSettings};
use tandem_adapter::{ServerDescription, ServerSettings, vllm::VllmSettings};
use tandem_frontend::Renderer;
use tandem_model_store::ModelSource;
use tandem_process::Shutdown;
use tandem_proto::v1::worker_info::Role;
use tandem_text::ServedModel;

/// The models of all servers, each with the id of its base model if it is a LoRA.
struct FleetModels(Vec<(ServedModel, Option<String>)>);

/// Waits until all listed servers answer, starts a worker for each of them, and loads the tokenizers of their models. The model of the first server
/// is the first in the list. Each vLLM server is also a renderer of its models.
pub(super) async fn workers(
    parts: &ClusterParts,
    settings: &UpSettings,
    config: &mut EngineConfig,
    shutdown: &Shutdown,
) -> Result<(Vec<Worker>, Vec<ServedModel>, Vec<Renderer>), StartError> {
    let urls = [(Role::Decode, &settings.worker.external.engine_url), (Role::Prefill, &settings.prefill_engine_url)];
    if !settings.prefill_engine_url.is_empty() {
        config.worker.external.engine_kv_connector = KvConnector::Nixl;
    }
    let all = urls.into_iter().flat_map(|(role, urls)| urls.iter().map(move |url| (role, url)));
    let observed = |url: &str| match settings.picker {
        Some(_) => config.observing(url)?.server(url, &parts.key),
        None => config.server(url, &parts.key),
    };
    let inspections = all.map(|(role, url)| (role, observed(url)));
    let inspections =
        inspections.map(|(role, engine)| async move { Ok::<_, StartError>((role, external::inspect(engine?).await?)) });
    let servers = futures::future::try_join_all(inspections).await?;
    let model_of =
        |server: &ServerDescription| settings.common.served_model_name.clone().unwrap_or_else(|| server.model.id.clone());
    let mut models = FleetModels(Vec::new());
    for (_, (engines, server)) in &servers {
        models.add(settings, engines[0].0.url(), &model_of(server), server).await?;
    }
    if let Some(extra) = settings.frontend.extra_models.iter().find(|extra| models.position(&extra.id).is_none()) {
        return Err(StartError::NoEngineOfModel(extra.id.clone()));
    }
    let (mut workers, mut renderers): (Vec<Worker>, Vec<Renderer>) = Default::default();
    for (role, (engines, server)) in servers {
        let (model, loras) = (model_of(&server), server.loras);
        if let ServerSettings::Vllm(VllmSettings { url, key, ca, .. }) = engines[0].0.clone() {
            let models = std::iter::once(&model).chain(&loras).cloned().collect();
            renderers.push(Renderer { models, url, key, ca });
        }
        let served = models.position(&model).map(|at| &models.0[at].0);
        let (revision, context_length) = served.map_or(("", 0), |served| (&served.revision, served.context_length));
        for (engine, kv_tokens) in engines {
            let listener = loopback().await?;
            let index = workers.iter().filter(|worker| worker.role == role).count();
            let (id, address) = (format!("{}-{index}", role.name()), local_address(&listener)?);
            let plan = parts.plan((&id, role), None, config, (&model, revision));
            let announced = Announced {
                model: server.model.clone(),
                name_is_declared: settings.common.served_model_name.is_some(),
                context_length,
            };
            parts.external_worker(plan, listener, engine, None, Some(announced), shutdown)?;
            let (model, loras) = (model.clone(), loras.clone());
            workers.push(Worker { id, role, address, advertise: None, model, loras, engine: None, kv_tokens });
        }
    }
    workers.sort_by_key(|worker| worker.role != Role::Prefill);
    // The frontend learns LoRAs from the router, except those with a tokenizer of their own.
    models.0.retain(|(served, base)| base.is_none() || tokenizer_of(settings, &served.id).is_some());
    Ok((workers, models.0.into_iter().map(|(served, _)| served).collect(), renderers))
}

impl FleetModels {
    fn position(&self, id: &str) -> Option<usize> {
        self.0.iter().position(|(served, _)| served.id == id)
    }

    /// Adds the model `id` of a server, and the model's LoRAs. Their tokenizers are those that the settings name, or the server's own.
    async fn add(&mut self, settings: &UpSettings, url: &str, id: &str, server: &ServerDescription) -> Result<(), StartError> {
        let base = match self.known(id, None, server.model.context_length)? {
            Some(base) => base,
            None => {
                let first = settings.model.model.clone().filter(|_| self.0.is_empty());
                let source = tokenizer_of(settings, id).or(first);
                let source = source.map_or_else(|| external::source(server, url, settings.trust_engine_model), Ok)?;
                let served = load(settings, source, id).await?.with_context_length(server.model.context_length);
                self.0.push((served.clone(), None));
                served
            }
        };
        for lora in &server.loras {
            if self.known(lora, Some(id), server.model.context_length)?.is_none() {
                let served = match tokenizer_of(settings, lora) {
                    Some(source) => load(settings, source, lora).await?.with_context_length(server.model.context_length),
                    None => base.named(lora),
                };
                self.0.push((served, Some(id.to_owned())));
            }
        }
        Ok(())
    }

    /// Returns a model that is known from an earlier server. Its context length is reduced to this server's, if that is shorter.
    fn known(&mut self, id: &str, base: Option<&str>, context_length: u32) -> Result<Option<ServedModel>, StartError> {
        let Some(at) = self.position(id) else { return Ok(None) };
        let (served, base_of_earlier) = &mut self.0[at];
        if base_of_earlier.as_deref() != base {
            return Err(StartError::AmbiguousModel(id.to_owned()));
        }
        *served = served.clone().with_context_length(context_length);
        Ok(Some(served.clone()))
    }
}

async fn load(settings: &UpSettings, source: ModelSource, id: &str) -> Result<ServedModel, StartError> {
    weights::load_tokenizer(settings.model.store.clone(), source, Some(id.to_owned())).await
}

/// Returns the source of a model's tokenizer that `--extra-model` names; `None` if it names none.
fn tokenizer_of(settings: &UpSettings, model: &str) -> Option<ModelSource> {
    settings.frontend.extra_models.iter().find(|extra| extra.id == model).map(|extra| extra.source.clone())
}
