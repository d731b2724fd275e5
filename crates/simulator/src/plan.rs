//! Searches for the smallest cluster that meets service levels.

use crate::{IdleMisses, Replay, SimulateError, Size, simulation::lacks_prefill_workers, trace::replay_until};
use tandem_load::{
    ReplayProgress,
    report::{Report, TriedCluster},
};

/// The maximum number of splits into prefill and decode workers that are tried for one number of workers.
const SPLITS: usize = 7;

/// The settings of a search.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlanSettings {
    /// The fraction of the requests that must meet the service levels, from 0 to 1.
    pub share: f64,
    /// The maximum number of workers in a cluster.
    pub workers_max: usize,
}

/// A cluster that was simulated.
#[derive(Clone, Debug)]
pub struct Trial {
    /// The numbers of workers in the cluster.
    pub size: Size,
    /// The report of the simulation.
    pub report: Report,
}

/// The result of a search.
#[derive(Clone, Debug, Default)]
pub struct ClusterPlan {
    /// The numbers of requests that miss the service levels on any cluster.
    pub idle: IdleMisses,
    /// The smallest cluster of mixed workers that meets the levels; `None` if no cluster of at most `workers_max` workers does.
    pub mixed: Option<Trial>,
    /// The smallest cluster of prefill and decode workers that meets the levels; `None` if no cluster of at most `workers_max` workers does.
    pub split: Option<Trial>,
    /// All clusters that were simulated, in the order of their simulation. The list is empty if too many requests miss the service levels on
    /// any cluster.
    pub tried: Vec<TriedCluster>,
    /// The clusters that come nearest to the service levels without meeting them: at most one of mixed workers and one of prefill and decode
    /// workers. At least half of the requests meet the levels on each.
    pub nearest: Vec<Trial>,
}

impl ClusterPlan {
    /// Returns the cluster with fewer workers; if both have equally many, the cluster of mixed workers.
    pub fn smallest(&self) -> Option<&Trial> {
        self.mixed.iter().chain(&self.split).min_by_key(|trial| trial.size.workers())
    }
}

struct Search<'a> {
    replay: &'a Replay<'a>,
    misses_max: u64,
    tried: Vec<TriedCluster>,
    nearest: Vec<Trial>,
    progress: &'a mut dyn FnMut(Size, ReplayProgress),
}

/// Searches for the smallest cluster of mixed workers, and the smallest cluster of prefill and decode workers, that meet the service levels
/// of `replay` on its trace. If a cluster meets them, every larger one is assumed to meet them as well, so the size is found by doubling and
/// then by bisection. For each size, at most seven splits into prefill and decode workers are tried. The workers of `replay` are ignored.
/// `progress` is called after each request. Nothing is simulated if too many requests miss the levels even on an idle worker.
///
/// # Errors
/// Fails if the trace cannot be read or simulated.
pub fn plan(
    replay: &Replay<'_>,
    settings: &PlanSettings,
    progress: &mut dyn FnMut(Size, ReplayProgress),
) -> Result<ClusterPlan, SimulateError> {
    let misses_max = (replay.trace.requests as f64 * (1.0 - settings.share) + 1e-9).floor() as u64;
    let idle = IdleMisses::of(replay)?;
    if idle.any > misses_max {
        return Ok(ClusterPlan { idle, ..ClusterPlan::default() });
    }
    let mut search = Search { replay, misses_max, tried: Vec::new(), nearest: Vec::new(), progress };
    let only_mixed = replay.cluster.with_size(Size::Mixed(1));
    let mixed = if lacks_prefill_workers(&only_mixed) {
        None
    } else {
        smallest::<_, SimulateError>(1, settings.workers_max, &mut |workers| search.first_good(&[Size::Mixed(workers)]))?
    };
    let mut share = 0.5;
    let split = smallest::<_, SimulateError>(2, settings.workers_max, &mut |workers| {
        let found = search.first_good(&splits(workers, share))?;
        if let Some(Size::Split { prefill, .. }) = found.as_ref().map(|trial| trial.size) {
            share = prefill as f64 / workers as f64;
        }
        Ok(found)
    })?;
    Ok(ClusterPlan { idle, mixed, split, tried: search.tried, nearest: search.nearest })
}

impl Search<'_> {
    /// Returns the first of these clusters that meets the service levels.
    fn first_good(&mut self, sizes: &[Size]) -> Result<Option<Trial>, SimulateError> {
        for &size in sizes {
            let replay = Replay { cluster: self.replay.cluster.with_size(size), ..self.replay.clone() };
            // If more than half of the requests miss the levels, the simulation of the cluster is aborted.
            let misses_max = self.misses_max.max(replay.trace.requests / 2);
            let report = replay_until(&replay, misses_max, &mut |state| (self.progress)(size, state))?;
            let share = report.as_ref().map(share_of_good);
            let misses = share.map(|share| ((1.0 - share) * replay.trace.requests as f64).round() as u64);
            let meets = misses.is_some_and(|misses| misses <= self.misses_max);
            let is_split = matches!(size, Size::Split { .. });
            self.tried.push(TriedCluster { name: size.to_string(), workers: size.workers(), is_split, share, meets });
            let Some(report) = report else { continue };
            let trial = Trial { size, report: Report { name: size.to_string(), ..report } };
            if meets {
                return Ok(Some(trial));
            }
            self.remember(trial);
        }
        Ok(None)
    }

    /// Keeps the cluster if it is nearer to the service levels than the kept cluster of its kind.
    fn remember(&mut self, trial: Trial) {
        let kind = |trial: &Trial| matches!(trial.size, Size::Split { .. });
        match self.nearest.iter_mut().find(|other| kind(other) == kind(&trial)) {
            Some(other) if share_of_good(&other.report) >= share_of_good(&trial.report) => {}
            Some(other) => *other = trial,
            None => self.nearest.push(trial),
        }
    }
}

/// Returns the fraction of the requests that met the service levels.
fn share_of_good(report: &Report) -> f64 {
    report.goodput.as_ref().map_or(1.0, |goodput| goodput.share)
}

/// Returns the splits of this number of workers into prefill and decode workers that are to be tried. Splits whose fraction of prefill
/// workers is nearest to `share` come first.
fn splits(workers: usize, share: f64) -> Vec<Size> {
    let count = (workers - 1).min(SPLITS);
    let mut prefill: Vec<usize> = (1..=count).map(|part| (part * workers).div_ceil(count + 1).min(workers - 1)).collect();
    prefill.dedup();
    prefill.sort_by(|one, other| {
        let distance = |prefill: &usize| (*prefill as f64 / workers as f64 - share).abs();
        distance(one).total_cmp(&distance(other))
    });
    prefill.into_iter().map(|prefill| Size::Split { prefill, decode: workers - prefill }).collect()
}

/// Returns the result of `good` for the smallest number from `least` to `most` for which `good` returns a value. If it returns a value for a
/// number, it is assumed to return one for all larger numbers.
fn smallest<T, E>(least: usize, most: usize, good: &mut dyn FnMut(usize) -> Result<Option<T>, E>) -> Result<Option<T>, E> {
    let (mut bad, mut next) = (least - 1, least);
    let (mut best, mut found) = loop {
        if next > most {
            return Ok(None);
        }
        if let Some(found) = good(next)? {
            break (next, found);
        }
        bad = next;
        next = if next < most { (next * 2).min(most) } else { most + 1 };
    };
    while best - bad > 1 {
        let middle = bad + (best - bad) / 2;
        match good(middle)? {
            Some(smaller) => (best, found) = (middle, smaller),
            None => bad = middle,
        }
    }
    Ok(Some(found))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn smallest_number_is_found_with_few_trials() {
        for (least, most) in [(1, 1), (1, 7), (2, 100), (1, 512)] {
            for limit in least..=most + 1 {
                let mut tried = Vec::new();
                let found = smallest(least, most, &mut |number| {
                    tried.push(number);
                    Ok::<_, ()>((number >= limit).then_some(number))
                });
                assert_eq!(found, Ok((limit <= most).then_some(limit)), "{least} to {most}");
                assert!(tried.len() <= 20 && tried.iter().all(|number| (least..=most).contains(number)), "{tried:?}");
            }
        }
    }

    #[test]
    fn splits_are_distinct_and_use_all_workers() {
        for workers in 2..60 {
            let splits = splits(workers, 0.25);
            let parts: BTreeSet<_> = splits
                .iter()
                .map(|size| match size {
                    Size::Split { prefill, decode } if *prefill > 0 && *decode > 0 => (*prefill, *decode),
                    other => panic!("{other:?}"),
                })
                .collect();
            assert!(splits.iter().all(|size| size.workers() == workers));
            assert_eq!(parts.len(), splits.len(), "{splits:?}");
            assert_eq!(splits.len(), (workers - 1).min(SPLITS));
        }
    }

    #[test]
    fn splits_similar_to_the_last_good_one_are_tried_first() {
        assert_eq!(splits(16, 0.2)[0], Size::Split { prefill: 4, decode: 12 });
        assert_eq!(splits(2, 0.9), [Size::Split { prefill: 1, decode: 1 }]);
    }
}
