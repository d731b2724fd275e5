//! A cluster of simulated workers whose names may be any text. The command line would not allow some of these names.

use anyhow::Result;
use std::net::SocketAddr;
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::{EngineHandle, EngineSettings};
use tandem_frontend::FrontendSettings;
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_tests::services::{Services, engine_settings, worker_settings};
use tandem_text::ServedModel;

/// Maximum number of prompt tokens in a step. It is so small that prompts are computed in several steps.
pub const CHUNK_BUDGET: u32 = 64;

pub async fn start(model: &str, prefill: &[&str], decode: &[&str]) -> Result<(Services, SocketAddr)> {
    let (services, sim) = (Services::default(), SimSettings { speedup: 20.0, ..Default::default() });
    let start_engine = || {
        let settings = EngineSettings { chunk_budget: CHUNK_BUDGET, ..engine_settings() };
        EngineHandle::start(Box::new(SimEngine::new(sim).in_real_time()), settings)
    };
    let mut workers = Vec::new();
    for name in prefill {
        workers.push(services.prefill_worker(worker_settings(name, model), start_engine(), &sim).await?.to_string());
    }
    for name in decode {
        workers.push(services.decode_worker(worker_settings(name, model), start_engine()).await?.to_string());
    }
    let workers = workers.into_iter().collect();
    let router = services.router(RouterSettings { workers, prefill: PrefillPlace::Remote, ..Default::default() }).await?;
    let frontend = services.frontend(FrontendSettings::new(router.to_string(), ServedModel::sim(model))).await?;
    Ok((services, frontend))
}
