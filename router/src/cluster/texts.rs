//! Texts for operators in the router's replies. Programs show them unchanged and never parse them.

use crate::route::{self, Candidate, Cost, CostsByUse, PlacementSeed, RouteChoice, WorkerPair};
use std::collections::BTreeSet;
use tandem_proto::v1::{ModelView, UnavailableWorker};

/// The reason why a draining router is unavailable.
pub(crate) const DRAINING: &str = "the router is draining";

/// Returns the reason why a router that has just started is unavailable: it is synchronised with only `synced` of the `known` workers.
pub(super) fn starting(synced: usize, known: usize) -> String {
    if known == 0 {
        return "the router is starting: it has not read the list of workers yet".to_owned();
    }
    format!("the router is starting: its index has {synced} of {known} workers")
}

/// Adds to the reason that the router has the address of no worker.
pub(super) fn no_worker_known(reason: &str) -> String {
    format!("{reason}; the router's list of workers is empty (--workers, --workers-file or --etcd)")
}

/// The maximum number of workers of which a text says why they have not joined.
const NAMED_MAX: usize = 3;

/// Adds to the reason why some of the `unavailable` workers have not joined, and how many others have not joined. Incompatible workers are
/// named first, because they cannot join before they are changed.
pub(super) fn not_joined<'a>(reason: &str, unavailable: impl Iterator<Item = &'a UnavailableWorker>) -> String {
    let mut unavailable: Vec<&UnavailableWorker> = unavailable.collect();
    unavailable.sort_by_key(|worker| !worker.incompatible);
    let (named, others) = unavailable.split_at(unavailable.len().min(NAMED_MAX));
    let named: String = named.iter().map(|worker| format!("; {}: {}", worker.address, worker.reason)).collect();
    let others = if others.is_empty() { String::new() } else { format!(" ({} more have not joined)", others.len()) };
    format!("{reason}{named}{others}")
}

/// Returns the reasons why no request for any of these models can be placed; `None` if requests for at least one of them can be placed.
pub(super) fn all_unavailable(models: &[ModelView]) -> Option<String> {
    let reason = |view: &ModelView| Some(format!("{}: {}", view.identity.as_ref()?.model, view.unavailable_reason.as_ref()?));
    let reasons: Option<Vec<String>> = models.iter().map(reason).collect();
    Some(reasons?.join("; "))
}

/// Returns why these workers were chosen: their cost, and the costs of the cheapest alternatives. `costs`, `workers` and `name` are indexed
/// by candidate.
pub(super) fn explanation<'a>(
    choice: RouteChoice,
    costs: &[CostsByUse],
    workers: &[Candidate],
    name: impl Fn(usize) -> &'a str,
) -> String {
    let total = |cost: &Option<Cost>| cost.as_ref().map(Cost::total);
    let on_one = |at: usize| format!("prefill and decode on {}", name(at));
    let on_two = |WorkerPair { prefill, decode }| format!("prefill on {}, decode on {}", name(prefill), name(decode));
    // The chosen workers are removed from the costs, so that only alternatives to them remain.
    let mut others = costs.to_vec();
    let (chosen, ms) = match choice {
        RouteChoice { decode, prefill: None } => {
            others[decode].local = None;
            (on_one(decode), total(&costs[decode].local))
        }
        RouteChoice { decode, prefill: Some(prefill) } => {
            others[prefill].prefill = None;
            let ms = total(&costs[prefill].prefill).zip(total(&costs[decode].decode));
            (on_two(WorkerPair { prefill, decode }), ms.map(|(prefill_ms, decode_ms)| prefill_ms + decode_ms))
        }
    };
    let remote = route::cheapest_pair(&others, workers, PlacementSeed::default()).map(|pair| (on_two(pair.workers), pair.cost));
    let local = others.iter().enumerate().filter_map(|(at, costs)| Some((at, total(&costs.local)?)));
    let local = local.min_by(|one, other| one.1.total_cmp(&other.1)).map(|(at, ms)| (on_one(at), ms));
    let alternatives: Vec<String> = remote.into_iter().chain(local).map(|(what, ms)| format!("{what}: {ms:.1} ms")).collect();
    let alternatives = if alternatives.is_empty() { "no alternative".to_owned() } else { alternatives.join(", ") };
    format!("cheapest is {chosen}: {:.1} ms; {alternatives}", ms.unwrap_or_default())
}

/// Returns the addition to an explanation that the costs assume this prefill rate; empty if a worker has measured one.
pub(super) fn assumed(workers: &[Candidate], tokens_per_second: f64) -> String {
    let is_measured = workers.iter().any(|worker| worker.prefill_tokens_per_second.is_some());
    if is_measured { String::new() } else { format!("; prefill rate not measured yet: {tokens_per_second:.0} tokens/s assumed") }
}

/// Returns the name of a transfer family in a message to operators.
fn family(family: Option<&str>) -> String {
    match family {
        None => "no transfer family".to_owned(),
        Some("") => "Tandem's own transfers".to_owned(),
        Some(family) => format!("the transfer family {family}"),
    }
}

/// Returns the reason why a prefill worker of this family receives no requests, given the families of the decode workers that serve its
/// model.
pub(super) fn unpaired<'a>(own: Option<&'a str>, decode_families: impl Iterator<Item = Option<&'a str>>) -> String {
    let own = family(own);
    let decode_families: BTreeSet<String> = decode_families.map(family).collect();
    if decode_families.is_empty() {
        return format!("it has {own}, and no decode worker has joined");
    }
    let theirs = decode_families.into_iter().collect::<Vec<_>>().join(" or ");
    format!(
        "it has {own}, and the decode workers have {theirs}; KV moves only within one family, so compare the engines' versions and settings (docs/engines.md, \"transfer family\")"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_workers_are_named_with_the_reason_why_they_have_not_joined() {
        let worker = |number: u32| UnavailableWorker {
            address: format!("w{number}:1"),
            reason: "it does not answer".to_owned(),
            incompatible: number == 4,
            ..UnavailableWorker::default()
        };
        let text = |count| not_joined("none", (0..count).map(worker).collect::<Vec<_>>().iter());
        assert_eq!(text(0), "none");
        assert_eq!(text(2), "none; w0:1: it does not answer; w1:1: it does not answer");
        let all = text(5);
        assert!(all.starts_with("none; w4:1: ") && all.ends_with("; w1:1: it does not answer (2 more have not joined)"), "{all}");
    }
}
