//! The router's settings. The comment of each setting gives its default and the reason for it.

use clap::ValueEnum;
use serde::Serialize;
use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tandem_process::{discovery::MemberSource, events::Broker, trace::Tracer};
use tandem_proto::v1::Identity;

/// The settings of one router.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    /// The gRPC addresses of prefill and decode workers. The workers need not run yet: the router retries forever.
    pub workers: MemberSource,
    /// The NATS server to which workers publish KV events, so that each event is published once for all routers; `None`: each worker sends
    /// its events to each router.
    pub broker: Option<Broker>,
    /// The tracer that continues the traces of requests.
    pub tracer: Tracer,
    /// The gRPC addresses of the other routers, with which this router exchanges bookings. A router with peers places no request before it
    /// has synchronised with its workers; until then its peers can place requests. Its own address in the list is ignored.
    pub peers: MemberSource,
    /// The identity on which all processes must agree, such as model and block size. Empty fields get the values of the first worker that
    /// joins.
    pub identity: Identity,
    /// The policy that chooses workers.
    pub policy: PolicyKind,
    /// Where prompts may be prefilled.
    pub prefill: PrefillPlace,
    /// The parameters of the cost estimate.
    pub costs: Costs,
    /// The service levels from which the router computes how many workers are wanted. Default: none, so nothing is computed.
    pub levels: ServiceLevels,
    /// The seed of the random numbers that break ties. Two routers with the same seed and input make
    /// the same placements.
    pub seed: u64,
    /// The most placements that one request may receive. With [`PrefillPlace::Auto`] the last placement uses a decode worker only. Default
    /// 3: two workers may fail at the same time; more retries would only keep the client waiting.
    pub attempts_max: u32,
    /// The most sequence hashes of one prompt. Default 65,536: with blocks of 16 tokens this is a prompt of a million tokens, and half a
    /// megabyte of hashes.
    pub hashes_max: usize,
    /// The most bookings at one time. The bound applies to this router's bookings and to those of each peer separately. If it is reached,
    /// this router refuses requests. Default 16,384: enough for the running requests of many frontends; each booking may have `hashes_max`
    /// hashes.
    pub bookings_max: usize,
    /// The time without a message after which a worker or peer is considered lost. Default 15 s: heartbeats are due every second, and a
    /// laptop that computes on all cores may delay them by several seconds.
    pub silence_max: Duration,
    /// The time within which the prompt must arrive on a new `Route` stream. Default 10 s: frontends send the prompt immediately.
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
            levels: ServiceLevels::default(),
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
    /// The lowest cost, given each worker's cached blocks: the estimated time to the first token, and by how much others are delayed
    #[default]
    KvAware,
    /// The lowest cost if nothing were cached
    LeastLoaded,
}

/// The service levels that a cluster is to meet for 95 % of its requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ServiceLevels {
    /// The level for the time to first token; `None`: prompts only have to be computed as fast as they arrive.
    pub ttft: Option<Duration>,
    /// The level for the mean time between the tokens of an answer; `None`: answers only have to be generated as fast as they arrive.
    pub itl: Option<Duration>,
}

impl ServiceLevels {
    /// Returns whether there is a level.
    pub fn is_set(&self) -> bool {
        self.ttft.is_some() || self.itl.is_some()
    }
}

/// Where a prompt is prefilled. Prompts whose logits are requested, and prompts of one token, are always prefilled on the decode worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillPlace {
    /// Where its cost is lowest: on a decode worker only if that delays the answers there less than it gains
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
    /// The assumed prefill rate while no worker has measured one. Default 2,000 tokens/s: between a CPU's hundreds and a GPU's tens of
    /// thousands. A worker measures its rate from three steps of 64 tokens or more, or from shorter steps of clearly different lengths. If
    /// all prompts are short and of one size, this value stays in use.
    pub prefill_tokens_per_second: f64,
    /// The assumed fixed time of a prefill step while no worker has measured one. Default 0: the default prefill rate includes the fixed
    /// time.
    pub prefill_fixed_ms: f64,
    /// The assumed time of a decode step while no worker has measured one. Default 10 ms: between a CPU's and a GPU's time.
    pub decode_step_ms: f64,
    /// The assumed bandwidth of a transfer, in bytes per second, while no worker has measured one. Default 1 GB/s: that of a 10 Gbit/s
    /// network.
    pub transfer_bytes_per_second: f64,
    /// The cost of a remote prefill in addition to its computation and transfer: two more calls, a reservation, and the wait for the next
    /// step of an engine. Default 5 ms: prompts with only a few new tokens stay on the decode worker.
    pub handoff_ms: f64,
    /// The fraction of a prompt's compute time that is charged a second time, for the delay of prompts that queue behind it. Default 0.25.
    /// With 0, waiting for a block that is being computed would cost as much as computing it elsewhere, and a burst of equal prompts would
    /// be scattered.
    pub work_weight: f64,
    /// The fraction of a prompt's compute time that is charged for the blocks that it evicts from a full cache. Default 1: all evicted
    /// blocks are assumed to be needed again. Storing blocks in an empty cache evicts nothing, so new prompts are spread over all caches
    /// before any of them overflows.
    pub displaced_weight: f64,
    /// The cost of a delay of an answer that has begun, relative to an equal delay of a first token. Default 0.7: readers mind a pause
    /// within an answer less than a late first token.
    pub answer_preference: f64,
    /// The assumed duration of an answer in milliseconds, until the router has measured one. It determines how long a prompt waits for
    /// blocks that running answers must release. Default 5 s: some hundred tokens of ten milliseconds each, and more.
    pub answer_ms: f64,
    /// The assumed number of tokens of an answer, until one has ended; at most the request's `max_tokens`. Default 256: a few paragraphs.
    pub answer_tokens: f64,
    /// The age at which a worker's measurement has the same weight as the mean of all workers. Default 30 s: a worker whose measurement is
    /// wrong by a factor of a hundred receives a prompt again after two to five minutes. A worker that really is ten times slower delays
    /// one prompt in two minutes.
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
            displaced_weight: 1.0,
            answer_preference: 0.7,
            answer_ms: 5_000.0,
            answer_tokens: 256.0,
            rate_half_life: Duration::from_secs(30),
        }
    }
}
