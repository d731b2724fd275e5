//! Shows the result of a search for the smallest cluster: the clusters that were found, and each cluster that was tried.

use super::{
    chart::{Axis, Chart, Series, chart},
    format::{percent, whole},
};
use serde::Serialize;
use std::collections::BTreeMap;

/// The result of a search for the smallest cluster that meets service levels.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PlanSummary {
    /// The result, in one sentence without a full stop.
    pub result: String,
    /// The fraction of the requests that must meet the service levels, from 0 to 1.
    pub required_share: f64,
    /// The clusters that were tried.
    pub tried: Vec<TriedCluster>,
    /// The commands that the operator may run next.
    pub commands: Vec<String>,
}

/// A cluster that a search has tried.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TriedCluster {
    /// The name, such as `4 prefill, 2 decode`.
    pub name: String,
    /// The number of its workers.
    pub workers: usize,
    /// Whether the cluster has prefill workers and decode workers, not mixed workers.
    pub is_split: bool,
    /// The fraction of the requests that met the service levels; `None` if it is below one half.
    pub share: Option<f64>,
    /// Whether the share reaches the required share.
    pub meets: bool,
}

/// Returns the rows of the table of clusters, the smallest cluster first.
pub(super) fn rows(plan: &PlanSummary) -> Vec<Vec<String>> {
    let mut tried: Vec<&TriedCluster> = plan.tried.iter().collect();
    tried.sort_by_key(|cluster| (cluster.workers, cluster.is_split));
    let row = |cluster: &TriedCluster| {
        let share = cluster.share.map_or_else(|| "below 50%".to_owned(), percent);
        vec![cluster.name.clone(), whole(cluster.workers as u64), share, if cluster.meets { "yes" } else { "no" }.to_owned()]
    };
    tried.into_iter().map(row).collect()
}

/// Returns a chart of the share over the number of workers. It has a line for each kind of cluster, with the best cluster of each size, and a
/// dashed line at the required share. `None` if no share is known.
pub(super) fn shares(plan: &PlanSummary) -> Option<Chart> {
    let mut best: [BTreeMap<usize, f64>; 2] = Default::default();
    for cluster in &plan.tried {
        let Some(share) = cluster.share else { continue };
        let known = best[usize::from(cluster.is_split)].entry(cluster.workers).or_insert(share);
        *known = known.max(share);
    }
    let sizes = || best.iter().flat_map(BTreeMap::keys).map(|workers| *workers as f64);
    let (from, to) = (sizes().reduce(f64::min)?, sizes().reduce(f64::max)?);
    let of_kind = |(at, name): (usize, &str)| {
        let points = best[at].iter().map(|(workers, share)| (*workers as f64, *share)).collect();
        Series { name: name.to_owned(), report: at, dashed: false, points }
    };
    let mut lines: Vec<Series> = ["mixed", "prefill and decode"].into_iter().enumerate().map(of_kind).collect();
    let required = vec![(from, plan.required_share), (to, plan.required_share)];
    lines.push(Series { name: "required".to_owned(), report: 7, dashed: true, points: required });
    let mut axis = vec![(from, whole(from as u64)), (to, format!("{} workers", whole(to as u64)))];
    if from == to {
        axis.remove(0);
    }
    chart("Requests within the service levels, by number of workers; dashed: required", &Axis(axis), Some(1.0), percent, &lines)
}
