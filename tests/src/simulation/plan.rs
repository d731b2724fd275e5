//! The plan that a seed determines: the cluster, the requests of its clients, and the faults.

use super::{network::Link, random::Random};
use serde_json::{Value, json};
use std::time::Duration;
use tandem_devices::sim::SimSettings;
use tandem_engine::EngineSettings;
use tandem_router::PrefillPlace;

/// The first period of the simulation, in milliseconds. All faults start in it, and all requests are sent in it except
/// [`Plan::afterwards`].
const ACTIVE_MS: u64 = 12_000;
pub(super) const BLOCK_SIZE: u32 = 16;
/// The maximum number of faults in one plan.
const FAULTS_MAX: u64 = 10;

/// The role of a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    Prefill,
    Decode,
    Router,
    Frontend,
}

pub(super) const HOSTS: [(Role, usize); 4] = [(Role::Prefill, 2), (Role::Decode, 2), (Role::Router, 1), (Role::Frontend, 1)];
pub(super) const CLIENT: &str = "client";

pub(super) struct Plan {
    pub(super) engine: EngineSettings,
    pub(super) sim: SimSettings,
    pub(super) prefill: PrefillPlace,
    pub(super) requests: Vec<RequestSpec>,
    pub(super) faults: Vec<PlannedFault>,
    /// Requests that are sent together after all faults.
    pub(super) afterwards: Vec<RequestSpec>,
}

#[derive(Clone, Debug)]
pub(super) struct RequestSpec {
    pub(super) at: Duration,
    pub(super) prompt: String,
    pub(super) samples: u32,
    pub(super) max_tokens: u32,
    pub(super) temperature: f32,
    pub(super) seed: u64,
    pub(super) stop: Option<String>,
    pub(super) ignore_end: bool,
    pub(super) stream: bool,
    /// The time after which the client disconnects; `None` if the client waits for the end of the answer.
    pub(super) disconnect_after: Option<Duration>,
    pub(super) priority: i32,
}

impl RequestSpec {
    pub(super) fn body(&self) -> Value {
        let mut body = json!({
            "model": "sim", "prompt": self.prompt, "n": self.samples, "max_tokens": self.max_tokens, "seed": self.seed,
            "temperature": self.temperature, "ignore_eos": self.ignore_end, "stream": self.stream,
        });
        if self.priority != 0 {
            body["priority"] = self.priority.into();
        }
        if let Some(stop) = &self.stop {
            body["stop"] = stop.as_str().into();
        }
        if self.stream {
            body["stream_options"] = json!({ "include_usage": true });
        }
        body
    }
}

/// A fault with its start and duration.
#[derive(Clone, Debug)]
pub(super) struct PlannedFault {
    pub(super) at: Duration,
    pub(super) lasts: Duration,
    pub(super) fault: Fault,
}

/// A kind of fault. `host`, `between`, `from` and `to` are numbers of hosts.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Fault {
    /// Delays all bytes between two hosts, in both directions.
    Slow { between: (usize, usize), delay: Duration },
    /// Delivers one chunk of bytes at a time between two hosts, with a pause between the chunks, in both directions.
    Throttle { between: (usize, usize), pause: Duration },
    /// Delivers no bytes from `from` to `to`. If `both_ways` is true, no bytes are delivered from `to` to `from` either.
    Partition { from: usize, to: usize, both_ways: bool },
    /// Delivers no bytes to or from the host.
    Isolation { host: usize },
    /// Breaks all connections between two hosts; new connections can be opened.
    Cut { between: (usize, usize) },
    /// Kills the process, which restarts later.
    Crash { host: usize },
    /// Stops the host without closing its connections. Its peers detect this only when the process restarts.
    PowerLoss { host: usize },
    /// Shuts the process down gracefully. The process restarts later.
    Restart { host: usize },
    /// Adds this time to every step of an engine.
    Busy { host: usize, step: Duration },
}

impl Plan {
    pub(super) fn of(random: &mut Random) -> Self {
        let speedup = *random.of(&[0.1, 0.3, 1.0, 4.0]);
        // The smallest cache has little more capacity than the largest request needs. So it causes preemptions.
        let capacity_blocks = *random.of(&[80, 80, 80, 120, 640]);
        let texts: Vec<String> = (0..random.within(2..5)).map(|_| text(random, 40..480)).collect();
        let count = random.within(10..26);
        let mut requests: Vec<RequestSpec> = (0..count).map(|_| request(random, &texts)).collect();
        if random.chance(40) {
            // In this variant all requests arrive almost together.
            let at = requests[0].at;
            requests.iter_mut().for_each(|request| request.at = at + random.millis(0..300));
        }
        if random.chance(30) {
            // In this variant several requests have the same prompt and arrive together.
            let RequestSpec { at, prompt, .. } = requests[0].clone();
            requests.iter_mut().take(6).for_each(|request| (request.at, request.prompt) = (at, prompt.clone()));
        }
        let faults = faults(random);
        for request in &mut requests {
            if random.chance(50) && !faults.is_empty() {
                // In this variant many requests arrive at about the time at which a fault starts.
                request.at = random.of(&faults).at.saturating_sub(random.millis(0..1_500)) + random.millis(0..500);
            }
        }
        let afterwards =
            (0..4).map(|_| RequestSpec { at: Duration::ZERO, disconnect_after: None, ..request(random, &texts) }).collect();
        Self {
            engine: EngineSettings {
                chunk_budget: *random.of(&[32, 128, 512]),
                itl_max: *random.of(&[None, Some(Duration::from_millis(20))]),
                batch_max: *random.of(&[4, 32]),
                queue_max: *random.of(&[4, 64]),
                prefix_caching: !random.chance(5),
                hash_key: tandem_kv::HashKey::NONE,
                max_buffered_events: *random.of(&[2, 64]),
                step_max: Duration::from_secs(60),
            },
            sim: SimSettings { block_size: BLOCK_SIZE, capacity_blocks, speedup, ..SimSettings::default() },
            prefill: *random.of(&[PrefillPlace::Auto, PrefillPlace::Remote, PrefillPlace::Local]),
            requests,
            faults,
            afterwards,
        }
    }

    /// Returns whether every request must be answered: there are no faults, and the queue has enough capacity.
    pub(super) fn must_answer_all(&self) -> bool {
        self.faults.is_empty() && self.engine.queue_max > 26
    }
}

fn text(random: &mut Random, bytes: std::ops::Range<u64>) -> String {
    (0..random.within(bytes)).map(|_| char::from(*random.of(b"abcdefghijklmnopqrstuvwxyz    "))).collect()
}

fn request(random: &mut Random, texts: &[String]) -> RequestSpec {
    let base = random.of(texts);
    let shared = if random.chance(50) { base.len() } else { random.within(1..base.len() as u64) as usize };
    let prompt = format!("{}{}", &base[..shared], text(random, 1..80));
    let ignore_end = random.chance(50);
    RequestSpec {
        at: random.millis(0..ACTIVE_MS),
        prompt,
        samples: *random.of(&[1, 1, 1, 2, 3]),
        max_tokens: if random.chance(20) { random.within(64..160) } else { random.within(1..64) } as u32,
        temperature: *random.of(&[0.0, 1.0, 1.5]),
        seed: random.within(0..1 << 40),
        stop: random.chance(30).then(|| (*random.of(&["eta", "oi", "n s", "zz"])).to_owned()),
        ignore_end,
        stream: random.chance(70),
        disconnect_after: random.chance(25).then(|| random.millis(1..6_000)),
        priority: *random.of(&[0, 0, 0, -1, 1]),
    }
}

/// Chooses the faults of a plan. A plan has only a few kinds of faults, because faults of all kinds together hide some bugs.
fn faults(random: &mut Random) -> Vec<PlannedFault> {
    let kinds: Vec<u64> = (0..9).filter(|_| random.chance(35)).collect();
    if kinds.is_empty() {
        return Vec::new();
    }
    let count = random.within(1..FAULTS_MAX + 1);
    let mut planned: Vec<PlannedFault> = (0..count)
        .map(|_| {
            let kind = *random.of(&kinds);
            PlannedFault { at: random.millis(0..ACTIVE_MS), lasts: random.millis(1..25_000), fault: fault(random, kind) }
        })
        .collect();
    planned.sort_by_key(|planned| planned.at);
    planned
}

fn hosts() -> Vec<Role> {
    HOSTS.iter().flat_map(|(role, count)| std::iter::repeat_n(*role, *count)).collect()
}

/// Returns the pairs of hosts that communicate, in both orders. Hosts are numbered in the order of `hosts`; the number after the last one
/// is the clients' host.
fn pairs(hosts: &[Role]) -> Vec<(usize, usize)> {
    let communicate = |one: usize, other: usize| {
        matches!(
            (hosts[one], hosts.get(other)),
            (Role::Frontend, None | Some(Role::Router | Role::Decode))
                | (Role::Router, Some(Role::Prefill | Role::Decode))
                | (Role::Decode, Some(Role::Prefill))
        )
    };
    let all = (0..hosts.len()).flat_map(|one| (0..=hosts.len()).map(move |other| (one, other)));
    all.filter(|(one, other)| communicate(*one, *other)).flat_map(|(one, other)| [(one, other), (other, one)]).collect()
}

fn fault(random: &mut Random, kind: u64) -> Fault {
    let hosts = hosts();
    let host = random.within(0..hosts.len() as u64) as usize;
    let (from, to) = *random.of(&pairs(&hosts));
    let between = (from, to);
    match kind {
        0 => Fault::Slow { between, delay: random.millis(5..800) },
        1 => Fault::Throttle { between, pause: random.millis(5..400) },
        2 => Fault::Partition { from, to, both_ways: false },
        3 => Fault::Partition { from, to, both_ways: true },
        4 => Fault::Isolation { host },
        5 => Fault::Cut { between },
        6 => Fault::Crash { host },
        7 => Fault::PowerLoss { host },
        8 if random.chance(50) => Fault::Restart { host },
        _ => {
            let has_engine = |host: &usize| hosts[*host] <= Role::Decode;
            let workers: Vec<usize> = (0..hosts.len()).filter(has_engine).collect();
            Fault::Busy { host: *random.of(&workers), step: random.millis(10..4_000) }
        }
    }
}

impl Fault {
    /// Returns the properties of the direction from `from` to `to` while the fault lasts. `link` has the properties without the fault.
    pub(super) fn on(&self, link: Link, from: usize, to: usize) -> Link {
        let is = |(one, other)| (from, to) == (one, other) || (to, from) == (one, other);
        match *self {
            Self::Slow { between, delay } if is(between) => Link { delay: link.delay + delay, ..link },
            Self::Throttle { between, pause } if is(between) => Link { pause: link.pause.max(pause), ..link },
            Self::Partition { from: one, to: other, both_ways }
                if (from, to) == (one, other) || both_ways && is((one, other)) =>
            {
                Link { open: false, ..link }
            }
            Self::Isolation { host } | Self::PowerLoss { host } if from == host || to == host => Link { open: false, ..link },
            _ => link,
        }
    }

    /// Returns whether the fault may break connections between clients and the frontend.
    pub(super) fn breaks_clients_connections(&self, frontend: usize, client: usize) -> bool {
        match *self {
            Self::Cut { between: (one, other) } => (one, other) == (frontend, client) || (other, one) == (frontend, client),
            Self::Crash { host } | Self::PowerLoss { host } | Self::Restart { host } => host == frontend,
            Self::Slow { .. } | Self::Throttle { .. } | Self::Partition { .. } | Self::Isolation { .. } | Self::Busy { .. } => {
                false
            }
        }
    }

    /// Returns whether the fault blocks at least one direction between clients and the frontend.
    pub(super) fn blocks_clients(&self, frontend: usize, client: usize) -> bool {
        match *self {
            Self::Partition { from, to, .. } => (from, to) == (frontend, client) || (to, from) == (frontend, client),
            Self::Isolation { host } => host == frontend || host == client,
            Self::Slow { .. }
            | Self::Throttle { .. }
            | Self::Cut { .. }
            | Self::Crash { .. }
            | Self::PowerLoss { .. }
            | Self::Restart { .. }
            | Self::Busy { .. } => false,
        }
    }
}
