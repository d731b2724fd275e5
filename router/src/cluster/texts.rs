//! Texts for operators in the router's replies. Programs show them unchanged and never parse them.

use crate::route::{Choice, Cost, CostsByUse};

/// Why a draining router is unavailable.
pub(crate) const DRAINING: &str = "the router is draining";

/// Returns why a router that has just started is unavailable: it is synchronised with only `synced` of the `known` workers.
pub(super) fn starting(synced: usize, known: usize) -> String {
    format!("the router is starting: its index has {synced} of {known} workers")
}

/// Returns why the choice was made: its cost and the costs of the best alternatives. `costs` and `name` are indexed by candidate.
pub(super) fn explanation<'a>(choice: Choice, costs: &[CostsByUse], name: impl Fn(usize) -> &'a str) -> String {
    let total = |cost: &Option<Cost>| cost.as_ref().map(Cost::total);
    let cheapest = |cost: fn(&CostsByUse) -> &Option<Cost>, except: Option<usize>| {
        let others = costs.iter().enumerate().filter(|(at, _)| Some(*at) != except);
        others.filter_map(|(at, costs)| Some((at, total(cost(costs))?))).min_by(|a, b| a.1.total_cmp(&b.1))
    };
    let on_one = |at: usize| format!("prefill and decode on {}", name(at));
    let prefill_on = |at: usize| format!("prefill on {}", name(at));
    let Choice { decode, prefill } = choice;
    let (chosen, ms, alternatives) = match prefill {
        None => {
            let local = cheapest(|costs| &costs.local, Some(decode)).map(|(at, ms)| (on_one(at), ms));
            let remote = cheapest(|costs| &costs.prefill, None)
                .zip(cheapest(|costs| &costs.decode, None))
                .map(|((at, prefill_ms), (_, decode_ms))| (prefill_on(at), prefill_ms + decode_ms));
            (on_one(decode), total(&costs[decode].local), [local, remote])
        }
        Some(prefill) => {
            let decode_ms = total(&costs[decode].decode).unwrap_or_default();
            let remote = cheapest(|costs| &costs.prefill, Some(prefill)).map(|(at, ms)| (prefill_on(at), ms + decode_ms));
            let local = cheapest(|costs| &costs.local, None).map(|(at, ms)| (on_one(at), ms));
            let chosen = format!("{}, decode on {}", prefill_on(prefill), name(decode));
            (chosen, total(&costs[prefill].prefill).map(|ms| ms + decode_ms), [remote, local])
        }
    };
    let alternatives: Vec<String> = alternatives.into_iter().flatten().map(|(what, ms)| format!("{what}: {ms:.1} ms")).collect();
    let alternatives = if alternatives.is_empty() { "no alternative".to_owned() } else { alternatives.join(", ") };
    format!("cheapest is {chosen}: {:.1} ms; {alternatives}", ms.unwrap_or_default())
}
