//! The description of a cluster to simulate.

use crate::{Faults, RoutingRule, WorkerScaling};
use std::{fmt, time::Duration};
use tandem_router::{Costs, PrefillPlace, ServiceLevels, WorkerRole};

/// A cluster to simulate.
#[derive(Clone, Debug)]
pub struct SimulatedCluster {
    /// The rule that chooses workers.
    pub policy: RoutingRule,
    /// The workers, of which at least one is a decode worker.
    pub workers: Vec<SimulatedWorker>,
    /// The model of the device that each worker has.
    pub device: SimulatedDevice,
    /// The number of tokens in a block.
    pub block_tokens: u64,
    /// The workers on which [`RoutingRule::Tandem`] may prefill. The other rules use prefill workers if there are any.
    pub prefill: PrefillPlace,
    /// The parameters of [`RoutingRule::Tandem`].
    pub costs: Costs,
    /// The number of requests in flight: each further request is sent when another one has ended. If it is `None`, each request arrives at
    /// its own time.
    pub concurrency: Option<usize>,
    /// The longest estimated wait with which the router places a request. Others are refused. `None`: no request is refused.
    pub max_wait: Option<Duration>,
    /// The service levels from which the router computes how many workers are wanted.
    pub levels: ServiceLevels,
    /// How the number of workers follows the load; `None`: it stays the same.
    pub scaling: Option<WorkerScaling>,
    /// The losses of workers during the simulation.
    pub faults: Faults,
    /// The seed of the random numbers with which ties between workers are broken, and with which random workers are chosen.
    pub seed: u64,
}

/// A worker of a cluster.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedWorker {
    /// The worker's role. A decode worker also prefills the prompts for which no prefill worker is chosen.
    pub role: WorkerRole,
    /// The factor by which the worker's steps take longer than those of its [`SimulatedDevice`].
    pub slower: f64,
}

/// A model of a device and its engine. The defaults are those of `--engine sim`: one large GPU with an 8B model.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SimulatedDevice {
    /// The number of prompt tokens that are computed per second, not counting the fixed time of a step.
    pub prefill_tokens_per_second: f64,
    /// The fixed time of a step that computes prompt tokens.
    pub prefill_step: Duration,
    /// The fixed time of a step in which sequences generate.
    pub decode_step: Duration,
    /// The time that each generating sequence adds to a step.
    pub decode_sequence: Duration,
    /// The size of one token's KV in bytes.
    pub kv_bytes_per_token: f64,
    /// The bandwidth of transfers between workers, in bytes per second.
    pub transfer_bytes_per_second: f64,
    /// The size of the KV memory in tokens. The default is 524,288 tokens: 64 GiB with the default size of a token's KV.
    pub capacity_tokens: u64,
    /// The maximum number of prompt tokens in a step.
    pub step_tokens: u64,
    /// The maximum number of sequences in a step.
    pub sequences_max: usize,
}

impl Default for SimulatedDevice {
    fn default() -> Self {
        Self {
            prefill_tokens_per_second: 20_000.0,
            prefill_step: Duration::from_millis(4),
            decode_step: Duration::from_millis(6),
            decode_sequence: Duration::from_micros(100),
            kv_bytes_per_token: 131_072.0,
            transfer_bytes_per_second: 10e9,
            capacity_tokens: 524_288,
            step_tokens: 2_048,
            sequences_max: 256,
        }
    }
}

/// The numbers of workers in a cluster, by kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Size {
    /// This many mixed workers, which prefill and generate.
    Mixed(usize),
    /// Prefill workers, and decode workers that receive KV from them.
    Split {
        /// The number of prefill workers.
        prefill: usize,
        /// The number of decode workers.
        decode: usize,
    },
}

impl Size {
    /// Returns the number of all workers.
    pub fn workers(self) -> usize {
        match self {
            Self::Mixed(workers) => workers,
            Self::Split { prefill, decode } => prefill + decode,
        }
    }

    fn list(self) -> Vec<SimulatedWorker> {
        let (prefill, decode) = match self {
            Self::Mixed(workers) => (0, workers),
            Self::Split { prefill, decode } => (prefill, decode),
        };
        let all = |role, count| std::iter::repeat_n(SimulatedWorker { role, slower: 1.0 }, count);
        all(WorkerRole::Prefill, prefill).chain(all(WorkerRole::Decode, decode)).collect()
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Mixed(workers) => write!(f, "{workers} mixed"),
            Self::Split { prefill, decode } => write!(f, "{prefill} prefill, {decode} decode"),
        }
    }
}

impl SimulatedCluster {
    /// Returns a cluster of equal workers with default settings.
    pub fn new(policy: RoutingRule, size: Size) -> Self {
        Self {
            policy,
            workers: size.list(),
            device: SimulatedDevice::default(),
            block_tokens: 512,
            prefill: PrefillPlace::Auto,
            costs: Costs::default(),
            concurrency: None,
            max_wait: None,
            levels: ServiceLevels::default(),
            scaling: None,
            faults: Faults::default(),
            seed: 0,
        }
    }

    /// Returns this cluster with `size` equal workers. Losses of individual workers are removed.
    pub fn with_size(&self, size: Size) -> Self {
        let faults = Faults { losses: Vec::new(), ..self.faults.clone() };
        Self { workers: size.list(), faults, ..self.clone() }
    }

    pub(crate) fn capacity_blocks(&self) -> u32 {
        (self.device.capacity_tokens / self.block_tokens).try_into().unwrap_or(u32::MAX)
    }

    pub(crate) fn has_prefill_workers(&self) -> bool {
        self.workers.iter().any(|worker| worker.role == WorkerRole::Prefill)
    }

    /// Returns the names of the workers in reports, in the order of their numbers.
    pub fn worker_names(&self) -> impl Iterator<Item = String> {
        let (split, mut prefill, mut decode) = (self.has_prefill_workers(), 0, 0);
        self.workers.iter().map(move |worker| {
            let (name, count) = match worker.role {
                WorkerRole::Prefill => ("prefill", &mut prefill),
                WorkerRole::Decode if split => ("decode", &mut decode),
                WorkerRole::Decode => ("worker", &mut decode),
            };
            *count += 1;
            format!("{name}-{}", *count - 1)
        })
    }
}
