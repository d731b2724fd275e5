//! Runs the services of a cluster as tasks of this process. So a test can use settings that the command line does not permit.

use crate::{Client, wait_until};
use anyhow::Result;
use std::{
    error::Error,
    net::SocketAddr,
    sync::{Arc, LazyLock},
    time::Duration,
};
use tandem_decode_worker::DecodeWorkerSettings;
use tandem_devices::sim::SimSettings;
use tandem_engine::EngineSettings;
use tandem_frontend::FrontendSettings;
use tandem_grammar::Vocabulary;
use tandem_kv::HashKey;
use tandem_model::sim::VOCAB_SIZE;
use tandem_prefill_worker::PrefillWorkerSettings;
use tandem_process::{Metrics, Shutdown};
use tandem_router::RouterSettings;
use tandem_text::ServedModel;
use tandem_transfer::TransferMode;
use tandem_worker::{Backend, WorkerSettings};
use tokio::net::TcpListener;

/// Time limit of each wait of a worker: for a ticket, for blocks, and for a step.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the vocabulary of the simulated device, which its engine needs for constraints.
pub fn sim_tokens() -> Arc<Vocabulary> {
    static TOKENS: LazyLock<Arc<Vocabulary>> =
        LazyLock::new(|| Arc::new(Vocabulary::new(ServedModel::sim("sim").tokenizer.tokens(), VOCAB_SIZE)));
    Arc::clone(&TOKENS)
}

/// Running services that share their metrics. Dropping this value stops them.
#[derive(Default)]
pub struct Services {
    /// The metrics of all services.
    pub metrics: Metrics,
    /// The shutdown of all services.
    pub shutdown: Shutdown,
}

impl Services {
    /// Starts a prefill worker whose transfers take the simulated time that `sim` determines. Returns the worker's address.
    pub async fn prefill_worker(&self, worker: WorkerSettings, engine: impl Backend, sim: &SimSettings) -> Result<SocketAddr> {
        let (listener, address) = listener().await?;
        let transfer_mode = TransferMode::Simulated { block: sim.block_transfer() };
        let settings = PrefillWorkerSettings { worker, ticket_wait: TIMEOUT, transfer_mode };
        self.run(tandem_prefill_worker::run(listener, engine, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    /// Starts a decode worker. Returns its address.
    pub async fn decode_worker(&self, worker: WorkerSettings, engine: impl Backend) -> Result<SocketAddr> {
        let (listener, address) = listener().await?;
        let settings = DecodeWorkerSettings {
            worker,
            advertise: None,
            remote_waiting_max: 64,
            receive_timeout: TIMEOUT,
            transfer_mode: TransferMode::Tcp,
        };
        self.run(tandem_decode_worker::run(listener, engine, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    /// Starts a router. Returns its address.
    pub async fn router(&self, settings: RouterSettings) -> Result<SocketAddr> {
        let (listener, address) = listener().await?;
        self.run(tandem_router::run(listener, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    /// Starts a frontend. Returns its address.
    pub async fn frontend(&self, settings: FrontendSettings) -> Result<SocketAddr> {
        let (listener, address) = listener().await?;
        self.run(tandem_frontend::run(listener, settings, self.metrics.clone(), self.shutdown.clone()));
        Ok(address)
    }

    /// Waits until this many workers have joined the router, and the frontend of `client` is ready.
    pub async fn ready(&self, workers: usize, client: &Client) -> Result<()> {
        wait_until("all workers have joined", async || {
            let metrics = self.metrics.render();
            Ok(metrics.lines().filter(|line| line.starts_with("tandem_router_index_blocks{")).count() >= workers)
        })
        .await?;
        wait_until("the frontend is ready", async || Ok(client.get("/ready").await?.0 == 200)).await
    }

    fn run<E: Error + 'static>(&self, service: impl Future<Output = Result<(), E>> + Send + 'static) {
        self.shutdown.track(async move { service.await.expect("a service runs until it is stopped") });
    }
}

impl Drop for Services {
    fn drop(&mut self) {
        self.shutdown.stop();
    }
}

async fn listener() -> Result<(TcpListener, SocketAddr)> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let address = listener.local_addr()?;
    Ok((listener, address))
}

/// Returns the settings of a worker of a cluster that serves this model with simulated engines.
pub fn worker_settings(worker_id: &str, model: &str) -> WorkerSettings {
    WorkerSettings {
        worker_id: worker_id.to_owned(),
        cluster: "tandem".to_owned(),
        model: model.to_owned(),
        revision: "sim".to_owned(),
        ..WorkerSettings::default()
    }
}

/// Returns an engine's settings, which tests change as needed.
pub fn engine_settings() -> EngineSettings {
    EngineSettings {
        chunk_budget: 512,
        itl_max: None,
        batch_max: 64,
        queue_max: 64,
        prefix_caching: true,
        hash_key: HashKey::NONE,
        max_buffered_events: 1_024,
        step_max: TIMEOUT,
    }
}
