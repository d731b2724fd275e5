//! The router's settings, each with the reason for its default.

use clap::ValueEnum;
use serde::Serialize;
use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tandem_node::{discovery::MemberSource, events::Broker, trace::Tracer};
use tandem_proto::v1::Identity;

/// The settings of one router.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    /// The gRPC addresses of prefill and decode workers. They need not be up yet; the router retries for ever.
    pub workers: MemberSource,
    /// The NATS server to which workers publish KV events, so that each event is published once for all routers; `None`: each worker sends
    /// its events to each router.
    pub broker: Option<Broker>,
    /// The tracer that continues the traces of requests.
    pub tracer: Tracer,
    /// The gRPC addresses of the other routers, with which this router exchanges bookings. A router that has peers places no requests
    /// before it has synchronised with its workers, because its peers can place them meanwhile. Its own address in the list is ignored.
    pub peers: MemberSource,
    /// The identity on which all processes must agree, such as model and block size. Empty fields are taken from the first worker that
    /// joins.
    pub identity: Identity,
    /// The policy that chooses workers.
    pub policy: PolicyKind,
    /// Where prompts may be prefilled.
    pub prefill: PrefillPlace,
    /// The parameters of the cost estimate.
    pub costs: Costs,
    /// The seed that breaks ties and determines [`PolicyKind::Random`]. Two routers with the same seed and input make the same placements.
    pub seed: u64,
    /// The most placements that one request may receive. With [`PrefillPlace::Auto`] the last placement uses a decode worker only. 3: two
    /// workers may fail at the same time; more retries only keep the client waiting.
    pub attempts_max: u32,
    /// The most sequence hashes of one prompt. 65,536: a million tokens in blocks of 16, half a megabyte.
    pub hashes_max: usize,
    /// The most bookings at one time, of this router and of each peer separately. Beyond this number this router refuses requests. 16,384:
    /// enough for the running requests of many frontends; each booking may have `hashes_max` hashes.
    pub bookings_max: usize,
    /// A worker or peer that sends nothing for this long is considered lost. 15 s: heartbeats are due every second, and a laptop that
    /// computes on all cores may delay them by several seconds.
    pub silence_max: Duration,
    /// How long a `Route` stream may take to send its prompt. 10 s: frontends send it immediately.
    pub prompt_wait: Duration,
}

impl Default for RouterSettings {
    fn default() -> Self {
        Self {
            workers: MemberSource::List(Vec::new()),
            broker: None,
            tracer: Tracer::default(),
            peers: MemberSource::List(Vec::new()),
            identity: Identity { version: env!("CARGO_PKG_VERSION").to_owned(), ..Identity::default() },
            policy: PolicyKind::default(),
            prefill: PrefillPlace::default(),
            costs: Costs::default(),
            seed: RandomState::new().hash_one(0),
            attempts_max: 3,
            hashes_max: 65_536,
            bookings_max: 16_384,
            silence_max: Duration::from_secs(15),
            prompt_wait: Duration::from_secs(10),
        }
    }
}

/// The policy that chooses workers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// The shortest estimated time to the first token, given each worker's cached blocks
    #[default]
    KvAware,
    /// The shortest estimated time to the first token if nothing were cached
    LeastLoaded,
    /// One worker after the other: a baseline to compare with, not meant for production
    RoundRobin,
    /// A random worker: a baseline to compare with, not meant for production
    Random,
}

/// Where a prompt is prefilled. Prompts whose logits are requested, and prompts of one token, are always prefilled on the decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillPlace {
    /// On the worker with the shortest estimated time to the first token
    #[default]
    Auto,
    /// On a prefill worker; without one the request fails
    Remote,
    /// On the decode worker
    Local,
}

/// Parameters of the cost estimate: those that are not measured, and defaults for rates that no worker has measured yet.
/// `docs/adr/005-routing-cost.md` describes how they are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// The assumed prefill rate while no worker has measured one. 2,000 tokens/s lies between a CPU's hundreds and a GPU's tens of
    /// thousands. A worker measures its rate from three steps of 64 tokens or more, or from shorter steps of clearly different lengths. If
    /// all prompts are short and of one size, this value stays in use.
    pub prefill_tokens_per_second: f64,
    /// The assumed fixed time of a prefill step while no worker has measured one. 0: the prefill rate above includes it.
    pub prefill_fixed_ms: f64,
    /// The assumed time of a decode step while no worker has measured one. 10 ms: between a CPU's and a GPU's.
    pub decode_step_ms: f64,
    /// The assumed bandwidth of a transfer, in bytes per second, while no worker has measured one. 1 GB/s: a 10 Gbit/s network.
    pub transfer_bytes_per_second: f64,
    /// The cost of a remote prefill in addition to its computation and transfer: two more calls, a reservation and the wait for an engine's
    /// next step. 5 ms: it keeps prompts with only a few new tokens on the decode worker.
    pub handoff_ms: f64,
    /// The fraction of a prompt's compute time that is charged a second time, because other prompts will queue behind it. 0.25: without it,
    /// waiting for a block that is being computed would cost as much as computing it elsewhere, and a burst of equal prompts would be
    /// scattered.
    pub work_weight: f64,
    /// The fraction of a prompt's compute time that is charged for the blocks that it evicts from a full cache. 0.25: assume that one in
    /// four evicted blocks is needed again. An empty cache evicts nothing, so prompts that no worker has cached spread over the caches
    /// before any of them overflows.
    pub displaced_weight: f64,
    /// The cost of a millisecond of prefill on a decode worker for each sequence that runs there. 0.1: a pause within an answer delays its
    /// reader less than a late first token; at 1, workers with long answers received hardly any prompts, and the queues of the others grew.
    pub interference: f64,
    /// The assumed time of an answer in milliseconds, until the router has seen an answer end. A prompt that lacks blocks waits for running
    /// answers to release theirs. 5 s: some hundred tokens of ten milliseconds each, and more.
    pub answer_ms: f64,
    /// The age at which a worker's measurement and the mean of all workers count half each. 30 s: a worker that seems a hundred times
    /// slower than it is receives a prompt again after two to five minutes, and a worker that really is ten times slower delays one prompt
    /// in two minutes.
    pub rate_half_life: Duration,
}

impl Default for Costs {
    fn default() -> Self {
        Self {
            prefill_tokens_per_second: 2_000.0,
            prefill_fixed_ms: 0.0,
            decode_step_ms: 10.0,
            transfer_bytes_per_second: 1e9,
            handoff_ms: 5.0,
            work_weight: 0.25,
            displaced_weight: 0.25,
            interference: 0.1,
            answer_ms: 5_000.0,
            rate_half_life: Duration::from_secs(30),
        }
    }
}
