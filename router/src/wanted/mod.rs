//! How many workers of each role a model needs to meet the service levels (docs/adr/059-wanted-workers.md). Autoscalers and operators use the
//! number; the router starts and stops no worker.

mod arrivals;
mod need;

pub(crate) use arrivals::ArrivalRates;
pub(crate) use need::{RoleState, StepTimes};

use crate::{answers::MovingMean, metrics::WantedSeries, route::WorkerRole};
use arrivals::RoleArrivals;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    time::Duration,
};
use tokio::time::Instant;

/// The time between two decisions. The wanted number of workers changes at most once in this time.
pub const WANTED_INTERVAL: Duration = Duration::from_secs(15);

/// The time that workers are assumed to take to join after more are wanted, before one has.
const START_DEFAULT: Duration = Duration::from_secs(180);
/// The limits of the learned time: a worker that joins later was not started because of the wanted number.
const START_LIMITS: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(900)];
/// The time that the KV of the lately used prompts of a worker is worth, at most: it is recomputed while other prompts wait.
const REFILL_MAX: Duration = Duration::from_secs(300);

/// The number of workers of a role that a model's load needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WantedWorkers {
    /// The model of the workers. Its LoRAs are included.
    pub model: Arc<str>,
    /// The role. Decode workers also prefill if there are no prefill workers.
    pub role: WorkerRole,
    /// The number of workers that are wanted, at least 1.
    pub wanted: usize,
    /// The number of workers that have joined.
    pub present: usize,
    /// The reason in words.
    pub reason: String,
    /// The id of the worker whose loss would cost least; `None` if it is the only one.
    pub cheapest_to_lose: Option<String>,
}

/// What arrives for each model's workers, and how many of them are wanted.
#[derive(Default)]
pub(crate) struct ClusterDemand(BTreeMap<(Arc<str>, WorkerRole), RoleDemand>);

/// What arrives for a model's workers of one role, and what is learned from them.
#[derive(Default)]
pub(crate) struct RoleDemand {
    pub(crate) arrivals: RoleArrivals,
    pub(crate) steps: StepTimes,
    /// The gauge of the wanted number.
    pub(crate) series: Option<WantedSeries>,
    /// The numbers of workers that the latest decisions have found necessary, each with its time, within the hold time.
    needs: VecDeque<(Instant, usize)>,
    /// The time of the first decision.
    began: Option<Instant>,
    /// The wanted number; 0 before the first decision.
    wanted: usize,
    present: usize,
    /// The latest time at which a worker was present.
    seen_at: Option<Instant>,
    /// The time of the latest rise after which no worker has joined yet.
    waits_since: Option<Instant>,
    /// The seconds between a rise of the wanted number and the next worker's joining.
    start: MovingMean,
}

impl ClusterDemand {
    /// Returns the demand for the model's workers of this role.
    pub(crate) fn of(&mut self, model: &Arc<str>, role: WorkerRole) -> &mut RoleDemand {
        self.0.entry((model.clone(), role)).or_default()
    }

    /// Forgets models and roles that have had no worker for a long time. Returns those that are left.
    pub(crate) fn known(&mut self, now: Instant) -> Vec<(Arc<str>, WorkerRole)> {
        self.0.retain(|_, role| role.seen_at.is_some_and(|at| now.duration_since(at) <= START_LIMITS[1]));
        self.0.keys().cloned().collect()
    }
}

impl RoleDemand {
    /// Returns the expected time from a rise of the wanted number to the next worker's joining.
    pub(crate) fn start_time(&self) -> Duration {
        self.start.get().map_or(START_DEFAULT, Duration::from_secs_f64)
    }

    /// Records how many workers have joined.
    pub(crate) fn on_present(&mut self, present: usize, now: Instant) {
        if let Some(since) = self.waits_since.filter(|_| present > self.present) {
            let took = now.duration_since(since);
            if took <= START_LIMITS[1] {
                self.start.record(took.max(START_LIMITS[0]).as_secs_f64());
            }
            self.waits_since = None;
        }
        self.present = present;
    }

    /// Records that a worker of the role is present.
    pub(crate) fn on_seen(&mut self, now: Instant) {
        self.seen_at = Some(now);
    }

    /// Decides how many workers are wanted if `needed` are necessary now. A higher number holds at once. A lower number holds once no higher
    /// one has been necessary for as long as a change costs: until another worker has started, and `refill`, until its cache is filled again.
    /// So a worker that is kept for too long costs at most as much as one that was given up too early (the rule for rented skis: A. Karlin
    /// et al., "Competitive snoopy caching", 1988). For this time after the first decision, the present numbers count as necessary, too: the
    /// workers of a router that has just started join one after the other, and what arrives is not known yet.
    pub(crate) fn decide(&mut self, needed: usize, refill: Duration, now: Instant) -> usize {
        let hold = self.start_time() + refill.min(REFILL_MAX);
        let began = *self.began.get_or_insert(now);
        if now.duration_since(began) <= hold {
            self.needs.push_back((now, self.present));
        }
        self.needs.push_back((now, needed));
        self.needs.retain(|(at, _)| now.duration_since(*at) <= hold);
        let before = self.wanted;
        self.wanted = self.needs.iter().map(|(_, needed)| *needed).max().unwrap_or(needed);
        if self.wanted > before.max(self.present) {
            self.waits_since.get_or_insert(now);
        }
        self.wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_number_holds_at_once_and_a_lower_one_after_the_time_of_a_start_and_a_refill() {
        let (mut role, mut now, refill) = (RoleDemand::default(), Instant::now(), Duration::from_secs(60));
        let mut decide = |needed: usize, seconds: u64| {
            now += Duration::from_secs(seconds);
            role.on_present(3, now);
            role.decide(needed, refill, now)
        };
        assert_eq!(decide(1, 0), 3, "a router that has just started keeps what it finds");
        assert_eq!(decide(5, 15), 5);
        assert_eq!((0..15).map(|_| decide(2, 15)).max(), Some(5));
        assert_eq!(decide(1, 30), 3, "three were present in the first minutes");
        assert_eq!((0..20).map(|_| decide(2, 15)).last(), Some(2));
        assert_eq!(decide(4, 15), 4);
    }

    #[test]
    fn start_time_is_learned_from_workers_that_join_after_a_rise() {
        let (mut role, now) = (RoleDemand::default(), Instant::now());
        let at = |seconds| now + Duration::from_secs(seconds);
        role.on_present(1, at(0));
        assert_eq!((role.decide(1, Duration::ZERO, at(0)), role.start_time()), (1, START_DEFAULT));
        role.decide(2, Duration::ZERO, at(100));
        role.decide(2, Duration::ZERO, at(115));
        role.on_present(2, at(160));
        assert_eq!(role.start_time(), Duration::from_secs(60));
        role.on_present(3, at(5_000));
        assert_eq!(role.start_time(), Duration::from_secs(60), "no worker was wanted");
    }
}
