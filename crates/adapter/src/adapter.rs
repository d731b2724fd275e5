//! The back end of a worker whose engine is another process.

use crate::{api::Api, job, served::Loras, shared::AdapterState};
use std::sync::Arc;
use tandem_engine::{EngineInfo, Generate, KvSource, Prefill, Refusal};
use tandem_grammar::Kind;
use tandem_worker::{Backend, CacheWatch, Job, KvExchange};
use tokio::sync::watch;

/// How an engine exchanges KV with other engines, as in [`KvExchange`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum EngineExchange {
    /// It does not.
    None,
    /// Engines of this family pull KV from each other.
    Handles(Arc<str>),
    /// The engine computes one half of each request.
    Rooms {
        family: Arc<str>,
        /// Where engines meet this one, if it computes prompts.
        address: Option<Arc<str>>,
    },
}

/// The back end of a worker whose engine is another process, which it calls over the network. It is cheap to clone.
#[derive(Clone)]
pub struct Adapter {
    pub(crate) shared: Arc<AdapterState>,
    pub(crate) api: Arc<dyn Api>,
    pub(crate) exchange: EngineExchange,
    pub(crate) loras: Arc<Loras>,
    pub(crate) accepts_images: bool,
    pub(crate) hung: watch::Receiver<bool>,
}

impl Adapter {
    /// Sets the name under which the worker serves the base model, if it is not the server's name. A LoRA of this name is not served.
    pub fn serve_as(&self, name: &str) {
        self.loras.serve_as(name);
    }

    /// Refuses a request if this worker only observes its engine, or if the engine's server has failed.
    fn check_engine(&self) -> Result<(), Refusal> {
        if !self.shared.engine_endpoint.is_empty() {
            return Err(Refusal::Unsupported(
                "this worker only observes its engine (--observe); the engine's requests come through a gateway".into(),
            ));
        }
        if self.shared.server_failed.get() {
            return Err(Refusal::Unusable("the engine's server has failed".into()));
        }
        Ok(())
    }
}

#[tonic::async_trait]
impl Backend for Adapter {
    fn info(&self) -> &EngineInfo {
        &self.shared.info
    }

    async fn prefill(&self, prefill: Prefill) -> Result<Box<dyn Job>, Refusal> {
        self.check_engine()?;
        prefill.check(self.info())?;
        Ok(Box::new(job::prefill(&self.shared, &self.api, prefill)?))
    }

    async fn generate(&self, mut generate: Generate) -> Result<Box<dyn Job>, Refusal> {
        self.check_engine()?;
        generate.check(self.info())?;
        // Without this constraint, which no engine can enforce, the model can still call these tools.
        generate.sampling.constraint.take_if(|constraint| matches!(constraint.kind, Kind::CallInputs(_)));
        self.api.check(&generate)?;
        if generate.sampling.constraint.is_some() && generate.generated.iter().any(|sample| !sample.tokens.is_empty()) {
            // The engine would apply the constraint to the rest of the text only, as if the rest were the whole text.
            return Err(Refusal::Unsupported(
                "this worker's engine cannot continue a constrained text that another worker has begun".into(),
            ));
        }
        let supported = match generate.kv {
            KvSource::Local => !matches!(self.exchange, EngineExchange::Rooms { .. }),
            KvSource::Handle => matches!(self.exchange, EngineExchange::Handles(_) | EngineExchange::Rooms { address: None, .. }),
            KvSource::Remote => false,
        };
        if !supported {
            return Err(Refusal::Unsupported(
                match generate.kv {
                    KvSource::Local => "this worker's engine runs with --disaggregation-mode and computes only one half of a request; the request needs a prefill and a decode worker",
                    KvSource::Handle | KvSource::Remote => "this worker's engine cannot receive KV from the worker that prefills the prompt",
                }
                .into(),
            ));
        }
        Ok(Box::new(job::generate(&self.shared, &self.api, generate)?))
    }

    async fn watch(&self) -> Option<CacheWatch> {
        self.shared.watch()
    }

    async fn hung(&self) {
        let mut hung = self.hung.clone();
        if hung.wait_for(|hung| *hung).await.is_err() {
            // The health checks end when the engine has ended. Then this worker ends, too.
            std::future::pending().await
        }
    }

    fn kv_exchange(&self) -> KvExchange<'_> {
        match &self.exchange {
            EngineExchange::None => KvExchange::None,
            EngineExchange::Handles(family) => KvExchange::Handles { family },
            EngineExchange::Rooms { family, address } => KvExchange::Rooms { family, address: address.as_deref() },
        }
    }

    fn assumes_cache(&self) -> bool {
        self.shared.approximate
    }

    fn loras(&self) -> Arc<[String]> {
        self.loras.names()
    }

    async fn loras_changed(&self, known: &Arc<[String]>) {
        self.loras.changed(known).await;
    }

    fn accepts_images(&self) -> bool {
        self.accepts_images
    }

    fn sequences_max(&self) -> u32 {
        self.shared.slots.running_max()
    }

    fn shared_store(&self) -> &str {
        &self.shared.shared_store
    }

    fn engine_endpoint(&self) -> &str {
        &self.shared.engine_endpoint
    }

    fn cached_blocks_max(&self) -> u32 {
        self.shared.cached_blocks_max
    }
}
