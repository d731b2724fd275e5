//! What an operator may set, each with the reason for its default.

use clap::ValueEnum;
use serde::Serialize;
use std::{
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tandem_node::{discovery::Workers, events::Broker, trace::Tracer};
use tandem_proto::v1::Identity;

/// How a router is run.
#[derive(Clone, Debug)]
pub struct RouterSettings {
    /// The workers' gRPC addresses, of both roles. They need not be up yet; the router tries for ever.
    pub workers: Workers,
    /// Where workers publish their events, if they do: one message for all routers.
    pub broker: Option<Broker>,
    /// Goes on with the traces of requests.
    pub tracer: Tracer,
    /// The other routers' gRPC addresses: they tell each other of their bookings. A router that has peers places nothing before
    /// it knows its workers, as others can. Its own address among them does no harm.
    pub peers: Workers,
    /// What all processes must agree with. What is left empty here, the worker that joins first decides.
    pub identity: Identity,
    /// How a worker is chosen.
    pub policy: PolicyKind,
    /// Where prompts are prefilled.
    pub prefill: PrefillPlace,
    /// What the cost is made of.
    pub costs: Costs,
    /// Breaks ties, and seeds [`PolicyKind::Random`]. Two routers with one seed, told the same, place alike.
    pub seed: u64,
    /// Placements one request may get. The last one is on a decode worker alone when the place is [`PrefillPlace::Auto`].
    /// 3: one failure is bad luck and two are a bad day; more tries only keep the client waiting.
    pub attempts_max: u32,
    /// Sequence hashes one prompt may bring. 65,536: a million tokens in blocks of 16, half a megabyte.
    pub hashes_max: usize,
    /// Requests placed at one time; past it the router refuses. Of each peer, so many are known. 16,384: many frontends' worth, and each may hold `hashes_max`.
    pub bookings_max: usize,
    /// A worker that says nothing for so long is gone. 15 s: its heartbeat is due every second, and a laptop that computes on
    /// all cores may be late by several.
    pub silence_max: Duration,
    /// A `Route` stream brings its prompt within this time. 10 s: frontends send it at once.
    pub prompt_wait: Duration,
}

impl Default for RouterSettings {
    fn default() -> Self {
        Self {
            workers: Workers::List(Vec::new()),
            broker: None,
            tracer: Tracer::default(),
            peers: Workers::List(Vec::new()),
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

/// How a worker is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[value(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyKind {
    /// The shortest estimated time to the first token, given each worker's cached blocks
    #[default]
    KvAware,
    /// The shortest estimated time to the first token if nothing were cached
    LeastLoaded,
    /// One worker after the other
    RoundRobin,
    /// A random worker
    Random,
}

/// Where a prompt is prefilled. Prompts whose logits are wanted, and prompts of one token, are always prefilled on decode.
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

/// Numbers of the cost that nobody measures, and stand-ins for those that nobody has measured yet. `docs/adr/005-routing-cost.md`
/// tells how they are used.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Costs {
    /// A worker's prefill rate while no worker has measured one. 2,000 tokens/s lies between a CPU's hundreds and a GPU's tens of
    /// thousands. A worker measures one from three steps of 64 tokens or more, or from shorter ones of clearly different lengths: where
    /// all prompts are short and of one size, this value stays in use.
    pub prefill_tokens_per_second: f64,
    /// The fixed time of a prefill step while no worker has measured one. 0: the rate above stands for all.
    pub prefill_fixed_ms: f64,
    /// A decode step while no worker has measured one. 10 ms, of the same middle.
    pub decode_step_ms: f64,
    /// What a transfer brings while no worker has measured it. 1 GB/s: a 10 Gbit link.
    pub transfer_bytes_per_second: f64,
    /// What a remote prefill costs beside its tokens and bytes: two more calls, a reservation and a wait for an engine's
    /// next step. 5 ms; it keeps prompts with a few new tokens on the decode worker.
    pub handoff_ms: f64,
    /// The part of a prompt's own compute that is charged again, because others will wait behind it. 0.25: without it, waiting
    /// for a block that is being computed and computing it elsewhere cost the same, and bursts of one prompt scatter.
    pub work_weight: f64,
    /// The part of a prompt's own compute that is charged for what it pushes out of a full cache. 0.25: the least recently used
    /// is asked for again once in four times, say; in an empty cache nothing is pushed out, so prompts nobody holds spread over
    /// the caches before any of them overflows.
    pub displaced_weight: f64,
    /// How much a millisecond of prefill on a decode worker costs for each sequence that runs there. 0.1: a running answer that
    /// pauses is read on; at 1, workers with long answers got hardly any prompts, and the others' queues grew.
    pub interference: f64,
    /// How long an answer takes that holds blocks another prompt waits for, while the router has seen none end. 5 s: some
    /// hundred tokens of ten milliseconds each, and more.
    pub answer_ms: f64,
    /// The age at which a worker's measurement counts half, and the others' mean the other half. 30 s: a worker that seems a
    /// hundred times slower than it is gets a prompt again after two to five minutes, and one that is ten times slower slows
    /// one prompt down in two minutes.
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
