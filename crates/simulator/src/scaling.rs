//! Simulates a cluster whose number of workers follows a rule: the router's wanted number, a Kubernetes HorizontalPodAutoscaler on the number
//! of waiting requests, or a schedule that is known in advance.

use crate::worker::{SimulatedEngine, micros};
use std::{collections::VecDeque, time::Duration};
use tandem_router::WorkerRole;

/// How the number of workers follows the load.
#[derive(Clone, Debug, PartialEq)]
pub struct WorkerScaling {
    /// The rule that chooses the number.
    pub rule: ScalingRule,
    /// The time from the decision to start a worker until it joins. It is paid for from the decision on.
    pub start: Duration,
    /// The maximum number of workers of each role.
    pub workers_max: usize,
}

/// A rule that chooses the number of workers of each role.
#[derive(Clone, Debug, PartialEq)]
pub enum ScalingRule {
    /// The router's `tandem_router_wanted_workers`, and its worker that is cheapest to lose.
    Wanted,
    /// A HorizontalPodAutoscaler with its defaults (tolerance 10 %, doubling or four pods in 15 s, 300 s of stabilization before it removes
    /// pods), on the mean of a worker's number of requests over the last minute.
    Autoscaler {
        /// Which requests are counted.
        counted: CountedRequests,
        /// The mean that the autoscaler keeps.
        target: f64,
    },
    /// From each of these times on, this many decode workers have joined. Workers are started in time.
    Schedule(Vec<(Duration, usize)>),
}

/// The requests that an autoscaler counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CountedRequests {
    /// Those that wait in a worker's queue: `tandem_worker_queue_depth`, vLLM's `num_requests_waiting`.
    Waiting,
    /// Those that wait or run.
    All,
}

/// The number of decisions over which an autoscaler's metric is averaged: one minute.
const AVERAGED: usize = 4;

/// What an autoscaler remembers of one role.
#[derive(Clone, Default)]
struct Autoscaled {
    /// The numbers that it found desirable in the last 300 s.
    desired: VecDeque<(u64, usize)>,
    /// The numbers of requests in the last minute.
    requests: VecDeque<f64>,
}

/// The state of a cluster whose number of workers changes.
pub(crate) struct Scaler {
    pub(crate) settings: WorkerScaling,
    /// The roles of the cluster at the beginning.
    pub(crate) roles: Vec<WorkerRole>,
    /// The workers that have been started and have not joined: the role, and the time of joining. The latest one is last.
    pub(crate) starting: VecDeque<(WorkerRole, u64)>,
    /// The memory of an autoscaler for each role.
    autoscaled: Vec<Autoscaled>,
}

impl Scaler {
    pub(crate) fn new(settings: WorkerScaling, roles: impl Iterator<Item = WorkerRole>) -> Self {
        let mut roles: Vec<WorkerRole> = roles.collect();
        roles.sort();
        roles.dedup();
        let autoscaled = vec![Autoscaled::default(); roles.len()];
        Self { settings, roles, starting: VecDeque::new(), autoscaled }
    }

    /// Returns how many workers of the role are to be there, and the worker to remove first. `wanted` is what the router wants for each role;
    /// `workers` are those that are there.
    pub(crate) fn decide(
        &mut self,
        at: usize,
        now: u64,
        wanted: &[(WorkerRole, usize, Option<usize>)],
        workers: &[&SimulatedEngine],
    ) -> (usize, Option<usize>) {
        let present = workers.len();
        let (role, starting) = (self.roles[at], self.starting.iter().filter(|(role, _)| *role == self.roles[at]).count());
        let (number, cheapest) = match &self.settings.rule {
            ScalingRule::Wanted => match wanted.iter().find(|wanted| wanted.0 == role) {
                Some(&(_, wanted, cheapest)) => (wanted, cheapest),
                None => (present + starting, None),
            },
            ScalingRule::Schedule(numbers) => {
                let joined = now + micros(self.settings.start);
                // A worker is removed when it is not scheduled any more, and started in time for its schedule.
                let at =
                    |time: u64| numbers.iter().rev().find(|(from, _)| micros(*from) <= time).map_or(1, |(_, number)| *number);
                let from_now = numbers.iter().filter(|(from, _)| (now..=joined).contains(&micros(*from)));
                (from_now.map(|(_, number)| *number).max().unwrap_or(0).max(at(now)), None)
            }
            &ScalingRule::Autoscaler { counted, target } => {
                let (current, memory) = (present + starting, &mut self.autoscaled[at]);
                let Autoscaled { desired: recent, requests: metrics } = memory;
                let load = workers.iter().map(|worker| match counted {
                    CountedRequests::Waiting => worker.load().waiting_requests,
                    CountedRequests::All => worker.load().waiting_requests + worker.load().running_sequences,
                });
                metrics.push_back(f64::from(load.sum::<u32>()));
                if metrics.len() > AVERAGED {
                    metrics.pop_front();
                }
                let pods = metrics.iter().sum::<f64>() / metrics.len() as f64 / target;
                // Pods that are not ready count as idle when pods are added, and as if they met the target when pods are removed.
                let ratio = pods / present.max(1) as f64;
                let wanted = match ratio {
                    0.9..=1.1 => current,
                    1.1.. => current.max(pods.ceil() as usize),
                    _ => (pods.ceil() as usize + starting).max(1),
                };
                let wanted = wanted.min((current * 2).max(current + 4));
                recent.push_back((now, wanted));
                recent.retain(|(at, _)| now - at <= 300_000_000);
                let stable = recent.iter().map(|(_, wanted)| *wanted).max().unwrap_or(wanted);
                (if wanted < current { stable.min(current) } else { wanted }, None)
            }
        };
        (number.clamp(1, self.settings.workers_max), cheapest)
    }
}
