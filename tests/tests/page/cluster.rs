//! A cluster of simulated workers whose names may be any text, which the command line would not allow.

use anyhow::Result;
use std::time::Duration;
use tandem_decode_worker::DecodeWorkerSettings;
use tandem_engine::{
    EngineHandle, EngineSettings,
    sim::{SimEngine, SimSettings},
};
use tandem_frontend::{FrontendSettings, ServedModel};
use tandem_node::{Metrics, Shutdown};
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_router::{PrefillPlace, RouterSettings};
use tandem_transfer::TransferMode;
use tandem_worker::WorkerSettings;
use tokio::net::TcpListener;

/// Limit on prompt tokens of a step.
pub const CHUNK_BUDGET: u32 = 64;
const TIMEOUT: Duration = Duration::from_secs(60);

/// The services of a cluster, as tasks. Dropping it stops them.
pub struct Parts {
    metrics: Metrics,
    shutdown: Shutdown,
    model: String,
}

fn sim() -> SimSettings {
    SimSettings { speedup: 20.0, ..Default::default() }
}

impl Parts {
    /// Starts a cluster that prefills remotely. Also returns the frontend's address.
    pub async fn start(model: &str, prefill: &[&str], decode: &[&str]) -> Result<(Self, std::net::SocketAddr)> {
        let parts = Self { metrics: Metrics::default(), shutdown: Shutdown::default(), model: model.to_owned() };
        let mut workers = Vec::new();
        for name in prefill {
            workers.push(parts.prefill_worker(name).await?);
        }
        for name in decode {
            workers.push(parts.decode_worker(name).await?);
        }
        let (listener, router) = listener().await?;
        let settings =
            RouterSettings { workers: workers.into_iter().collect(), prefill: PrefillPlace::Remote, ..Default::default() };
        parts.run(tandem_router::run(listener, settings, parts.metrics.clone(), parts.shutdown.clone()));
        let (listener, address) = listener_at_any_port().await?;
        let settings = FrontendSettings::new(router, ServedModel::sim(model));
        parts.run(tandem_frontend::run(listener, settings, parts.metrics.clone(), parts.shutdown.clone()));
        Ok((parts, address))
    }

    fn engine(&self) -> EngineHandle {
        let settings = EngineSettings {
            // Prompts are computed in several steps.
            chunk_budget: CHUNK_BUDGET,
            batch_max: 64,
            queue_max: 64,
            prefix_caching: true,
            hash_key: tandem_kv::HashKey::NONE,
            max_buffered_events: 1_024,
            step_max: TIMEOUT,
        };
        EngineHandle::start(Box::new(SimEngine::new(sim()).in_real_time()), settings)
    }

    fn run<E: std::error::Error + 'static>(&self, service: impl Future<Output = Result<(), E>> + Send + 'static) {
        self.shutdown.track(async move { service.await.expect("a service runs until it is stopped") });
    }

    async fn prefill_worker(&self, name: &str) -> Result<String> {
        let (listener, address) = listener().await?;
        let settings = PrefillWorkerSettings {
            worker: WorkerSettings {
                worker_id: name.to_owned(),
                cluster: "tandem".to_owned(),
                model: self.model.clone(),
                revision: "sim".to_owned(),
                ..Default::default()
            },
            ticket_wait: TIMEOUT,
            transfer_mode: TransferMode::Simulated { block: sim().block_transfer() },
        };
        self.run(tandem_prefill_worker::run(listener, self.engine(), settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    async fn decode_worker(&self, name: &str) -> Result<String> {
        let (listener, address) = listener().await?;
        let settings = DecodeWorkerSettings {
            worker: WorkerSettings {
                worker_id: name.to_owned(),
                cluster: "tandem".to_owned(),
                model: self.model.clone(),
                revision: "sim".to_owned(),
                ..Default::default()
            },
            advertise: None,
            remote_waiting_max: 64,
            receive_timeout: TIMEOUT,
            transfer_mode: TransferMode::Tcp,
        };
        self.run(tandem_decode_worker::run(listener, self.engine(), settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }
}

impl Drop for Parts {
    fn drop(&mut self) {
        self.shutdown.stop();
    }
}

async fn listener_at_any_port() -> Result<(TcpListener, std::net::SocketAddr)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

async fn listener() -> Result<(TcpListener, String)> {
    let (listener, address) = listener_at_any_port().await?;
    Ok((listener, address.to_string()))
}
