//! The cluster's workers and routers and their health, combined from the views of all routers.

use super::super::app::App;
use crate::{audit::LastAudit, clock::unix_ms, dispatch::DispatchError};
use futures::{StreamExt, future::OptionFuture};
use serde_json::{Value, json};
use std::{collections::BTreeMap, sync::Arc};
use tandem_proto::v1::{
    Identity, Load, PlacementTotals, TierView, UnavailableWorker, WantedWorkers, WorkerInfo, WorkerView, WorkersReply,
};

/// Each router's view of the cluster, by the router's address.
type Views = BTreeMap<Arc<str>, Result<WorkersReply, DispatchError>>;

impl App {
    /// Returns the current state of the cluster, from the views of its routers.
    pub(super) async fn cluster(&self) -> Value {
        let served = self.models.first();
        // All models have the rest of their identities in common.
        let identity = Identity { model: String::new(), revision: String::new(), ..(*served.identity).clone() };
        let views: Views = self.dispatcher.routers.views().collect().await;
        let replies = replies(&views, &identity);
        let ready = self.judge_all(views.values().map(|view| self.judge(view.as_ref())));
        let routers: Vec<Value> = views.iter().map(|(address, view)| self.router(address, view)).collect();
        let audit = OptionFuture::from(self.audit.as_ref().map(LastAudit::read)).await;
        json!({
            "now_unix_ms": unix_ms(),
            "since_unix_s": self.since,
            "version": env!("CARGO_PKG_VERSION"),
            "cluster": identity.cluster,
            "model": served.model.id,
            "models": self.models.all().iter().map(|served| &*served.model.id).collect::<Vec<_>>(),
            "block_size": self.block_size,
            "unavailable_reason": ready.of_any().err().map(|why| why.to_string()),
            "routers": routers,
            "workers": workers(&replies),
            "wanted": wanted(&replies),
            "unavailable": unavailable(&replies),
            "audit": audit.map(|found| match found {
                Ok(found) => json!(found),
                Err(error) => json!({ "problem": error.to_string() }),
            }),
        })
    }

    fn router(&self, address: &str, view: &Result<WorkersReply, DispatchError>) -> Value {
        let problem = self.judge(view.as_ref()).of_any().err().map(|why| why.to_string());
        let Ok(view) = view else { return json!({ "address": address, "problem": problem }) };
        json!({
            "address": address,
            "problem": problem,
            "instance_id": view.instance_id,
            "bookings": view.bookings,
            "peer_bookings": view.peer_bookings,
            "peers": view.peers,
            "synced_workers": view.synced_workers,
            "known_workers": view.known_workers,
        })
    }
}

/// Returns the views of the routers in this frontend's cluster, each with its router's address. Routers of other clusters are omitted.
fn replies<'a>(views: &'a Views, identity: &Identity) -> Vec<(&'a str, &'a WorkersReply)> {
    let replies = views.iter().filter_map(|(address, view)| Some((&**address, view.as_ref().ok()?)));
    replies.filter(|(_, reply)| identity.fits(reply.identity.as_ref().unwrap_or(&Identity::default())).is_ok()).collect()
}

/// Returns every worker instance that any router knows, in the order of names, with the sum of the routers' placements and the latest
/// load report.
fn workers(replies: &[(&str, &WorkersReply)]) -> Vec<Value> {
    let mut seen: BTreeMap<(String, String), Vec<&WorkerView>> = BTreeMap::new();
    for worker in replies.iter().flat_map(|(_, reply)| &reply.workers) {
        let WorkerInfo { worker_id, instance_id, .. } = worker.info.clone().unwrap_or_default();
        seen.entry((worker_id, instance_id)).or_default().push(worker);
    }
    seen.into_values().map(|views_of_it| worker(&views_of_it, replies.len())).collect()
}

/// Returns how many workers of each role every model's load needs: the highest number that a router wants.
fn wanted(replies: &[(&str, &WorkersReply)]) -> Vec<Value> {
    let mut highest: BTreeMap<(&str, &str), &WantedWorkers> = BTreeMap::new();
    for of in replies.iter().flat_map(|(_, reply)| &reply.wanted) {
        let known = highest.entry((&of.model, of.role().name())).or_insert(of);
        if of.wanted > known.wanted {
            *known = of;
        }
    }
    let value = |((model, role), of): (_, &WantedWorkers)| {
        let WantedWorkers { wanted, present, reason, cheapest_to_lose, .. } = of;
        json!({ "model": model, "role": role, "wanted": wanted, "present": present, "reason": reason, "cheapest_to_lose": cheapest_to_lose })
    };
    highest.into_iter().map(value).collect()
}

fn worker(views: &[&WorkerView], routers: usize) -> Value {
    let prompts = |view: &&&WorkerView| view.load.as_ref().and_then(|load| load.cache).map_or(0, |cache| cache.prompts);
    let latest = views.iter().max_by_key(prompts).copied().cloned().unwrap_or_default();
    let (info, load) = (latest.info.unwrap_or_default(), latest.load.unwrap_or_default());
    let placed = views.iter().filter_map(|view| view.placements).reduce(|one, other| PlacementTotals {
        prefill: one.prefill + other.prefill,
        decode: one.decode + other.decode,
        local: one.local + other.local,
        overlap_blocks: one.overlap_blocks + other.overlap_blocks,
        overlap_over_tokens: one.overlap_over_tokens + other.overlap_over_tokens,
        overlap_under_tokens: one.overlap_under_tokens + other.overlap_under_tokens,
    });
    let (health, problem) = if views.iter().any(|view| view.circuit_open) {
        ("circuit_open", Some("requests failed on this worker; it is tried again within 30 seconds".to_owned()))
    } else if views.len() < routers {
        ("partial", Some(format!("only {} of {routers} routers know this worker", views.len())))
    } else if let Some(reason) = views.iter().find_map(|view| view.unpaired_reason.as_ref()) {
        ("unpaired", Some(format!("receives no requests: {reason}")))
    } else {
        ("healthy", None)
    };
    json!({
        "worker": info.worker_id,
        "instance_id": info.instance_id,
        "role": info.role().name(),
        "model": info.model,
        "address": latest.address,
        "version": info.version,
        "capacity_blocks": info.capacity_blocks,
        "health": health,
        "problem": problem,
        "approximate_index": info.approximate_index,
        "index_note": views.iter().find_map(|view| view.index_note.as_ref()),
        "tiers": latest.tiers.iter().map(tier).collect::<Vec<_>>(),
        "indexed_blocks": views.iter().map(|view| view.indexed_blocks).max(),
        // This is no sum: each router's number includes the bookings of the other routers.
        "bookings": views.iter().map(|view| view.bookings).max(),
        "load": loads(&load),
        "cache": load.cache.map(|cache| json!({
            "prompts": cache.prompts,
            "prompts_hit": cache.prompts_hit,
            "prompt_tokens": cache.prompt_tokens,
            "cached_tokens": cache.cached_tokens,
        })),
        "placements": placed.map(|placed| json!({
            "prefill": placed.prefill,
            "decode": placed.decode,
            "local": placed.local,
            "overlap_blocks": placed.overlap_blocks,
            "overlap_over_tokens": placed.overlap_over_tokens,
            "overlap_under_tokens": placed.overlap_under_tokens,
        })),
    })
}

fn tier(tier: &TierView) -> Value {
    json!({ "tier": tier.tier, "blocks": tier.blocks, "load_ms_per_token": tier.load_ms_per_token })
}

fn loads(load: &Load) -> Value {
    json!({
        "running_sequences": load.running_sequences,
        "waiting_requests": load.waiting_requests,
        "pending_prefill_tokens": load.pending_prefill_tokens,
        "free_blocks": load.free_blocks,
        "cached_blocks": load.cached_blocks,
        "in_use_blocks": load.in_use_blocks,
        "prefill_tokens_per_second": load.prefill_tokens_per_second,
        "decode_step_ms": load.decode_step_ms,
        "transfer_bytes_per_second": load.transfer_bytes_per_second,
    })
}

/// Returns the workers to which a router does not route, with the router's reason, and with their ids if they were members. A worker to
/// which another router routes is also in the list of [`workers`].
fn unavailable(replies: &[(&str, &WorkersReply)]) -> Vec<Value> {
    let unavailable = replies.iter().flat_map(|(router, reply)| reply.unavailable.iter().map(move |worker| (router, worker)));
    unavailable
        .map(|(router, worker)| {
            let UnavailableWorker { address, reason, incompatible, worker_id } = worker;
            json!({ "address": address, "worker": worker_id, "reason": reason, "incompatible": incompatible, "router": router })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_proto::v1::CacheTotals;

    fn view(worker_id: &str, instance_id: &str, prompts: u64) -> WorkerView {
        let info = WorkerInfo { worker_id: worker_id.to_owned(), instance_id: instance_id.to_owned(), ..Default::default() };
        let cache = CacheTotals { prompts, prompts_hit: 1, prompt_tokens: 10 * prompts, cached_tokens: 5 * prompts };
        WorkerView {
            info: Some(info),
            indexed_blocks: prompts,
            bookings: 3,
            load: Some(Load { cache: Some(cache), ..Default::default() }),
            placements: Some(PlacementTotals { prefill: 2, overlap_blocks: 7, overlap_under_tokens: 16, ..Default::default() }),
            ..Default::default()
        }
    }

    fn views(of: Vec<Result<WorkersReply, DispatchError>>) -> Views {
        of.into_iter().enumerate().map(|(number, view)| (format!("r{number}:1").into(), view)).collect()
    }

    #[test]
    fn placements_are_summed_over_routers_and_worker_reports_count_once() {
        let one = WorkersReply { workers: vec![view("p0", "a", 4), view("p1", "b", 1)], ..Default::default() };
        let mut failing = view("p1", "b", 1);
        failing.circuit_open = true;
        let unavailable_at =
            |address: &str| UnavailableWorker { address: address.to_owned(), worker_id: "d1".to_owned(), ..Default::default() };
        let other = WorkersReply {
            workers: vec![view("p0", "a", 5), failing],
            unavailable: vec![unavailable_at("x:1")],
            ..Default::default()
        };
        let views = views(vec![Ok(one), Ok(other), Err(DispatchError::RouterClosed)]);
        let replies = replies(&views, &Identity::default());
        let found = workers(&replies);
        assert_eq!(found.len(), 2);
        let p0 = &found[0];
        assert_eq!((&p0["worker"], &p0["health"], &p0["problem"]), (&json!("p0"), &json!("healthy"), &Value::Null));
        assert_eq!(p0["cache"], json!({ "prompts": 5, "prompts_hit": 1, "prompt_tokens": 50, "cached_tokens": 25 }));
        assert_eq!((&p0["bookings"], &p0["indexed_blocks"]), (&json!(3), &json!(5)));
        assert_eq!((&p0["placements"]["prefill"], &p0["placements"]["overlap_blocks"]), (&json!(4), &json!(14)));
        assert_eq!(p0["placements"]["overlap_under_tokens"], 32);
        assert_eq!(found[1]["health"], "circuit_open");
        let expected = json!({ "address": "x:1", "worker": "d1", "reason": "", "incompatible": false, "router": "r1:1" });
        assert_eq!(unavailable(&replies), [expected]);
    }

    #[test]
    fn worker_known_to_some_routers_is_partial_and_missing_counts_are_null() {
        let mut silent = view("p0", "new", 0);
        (silent.load, silent.placements) = (Some(Load::default()), None);
        let one = WorkersReply { workers: vec![view("p0", "old", 9), silent], ..Default::default() };
        let views = views(vec![Ok(one), Ok(WorkersReply::default())]);
        let found = workers(&replies(&views, &Identity::default()));
        let health: Vec<_> = found.iter().map(|found| (found["instance_id"].as_str(), found["health"].as_str())).collect();
        assert_eq!(health, [(Some("new"), Some("partial")), (Some("old"), Some("partial"))]);
        assert_eq!(
            (&found[0]["cache"], &found[0]["placements"]),
            (&Value::Null, &Value::Null),
            "a missing report is not shown as 0"
        );
        assert_eq!(found[0]["problem"], "only 1 of 2 routers know this worker");
    }

    #[test]
    fn prefill_worker_of_another_family_is_unpaired() {
        let mut unpaired = view("p0", "a", 1);
        unpaired.unpaired_reason = Some("it has another family".to_owned());
        let reply = WorkersReply { workers: vec![unpaired], ..Default::default() };
        let found = workers(&replies(&views(vec![Ok(reply)]), &Identity::default()));
        assert_eq!(found[0]["health"], "unpaired");
        assert_eq!(found[0]["problem"], "receives no requests: it has another family");
    }

    #[test]
    fn router_of_another_cluster_is_not_shown() {
        let of = |cluster: &str| Identity { cluster: cluster.to_owned(), ..Identity::default() };
        let reply = |cluster: &str, worker_id: &str| WorkersReply {
            identity: Some(of(cluster)),
            workers: vec![view(worker_id, "a", 1)],
            unavailable: vec![UnavailableWorker { address: format!("{cluster}:1"), ..Default::default() }],
            ..Default::default()
        };
        let views = views(vec![Ok(reply("ours", "p0")), Ok(reply("theirs", "p9"))]);
        let replies = replies(&views, &of("ours"));
        let found = workers(&replies);
        assert_eq!((found.len(), &found[0]["worker"], &found[0]["health"]), (1, &json!("p0"), &json!("healthy")));
        assert_eq!(unavailable(&replies).len(), 1);
        assert_eq!(unavailable(&replies)[0]["address"], "ours:1");
    }
}
