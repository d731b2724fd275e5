//! The router over real sockets: workers that join, report, fall silent and leave; frontends that request placements, cancel and
//! disconnect.
#![expect(clippy::disallowed_methods, reason = "tasks end with the test's runtime")]

mod etcd;
mod fake;
mod logs;
mod nats;
mod peers;

use fake::{BLOCK, FakeWorker, TestRouter, chain, chosen, hashes, prompt, soon, stored, worker};
use std::time::Duration;
use tandem_kv::{Change, Load, Snapshot};
use tandem_process::{Metrics, Shutdown, discovery::MemberSource};
use tandem_proto::{
    snapshot_chunks,
    v1::{FailureReason, RoutePrompt, RouteReply, WorkerRef, route_reply, route_request, watch_reply, worker_info::Role},
};
use tandem_router::{PrefillPlace, RouterSettings};
use tonic::{Code, Status};

fn local() -> RouterSettings {
    RouterSettings { prefill: PrefillPlace::Local, ..Default::default() }
}

fn remote() -> RouterSettings {
    RouterSettings { prefill: PrefillPlace::Remote, ..Default::default() }
}

/// Returns the overlap of a prompt with the only decode worker.
async fn overlap(router: &TestRouter, numbers: &[u64]) -> u32 {
    let placement = router.route(prompt("overlap", numbers)).await.placement().await;
    chosen(placement.decode).expect("there is always a decode worker").1
}

#[tokio::test]
async fn worker_joins_with_a_complete_snapshot_and_later_events_are_applied() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&decode], local()).await;
    let watch = decode.watched().await;
    let stored_chains = vec![chain(None, &[1, 2]), chain(Some(2), &[3]), chain(Some(2), &[8, 9])];
    let mut chunks = snapshot_chunks("d-1", &Snapshot { at_event_id: 7, stored: stored_chains });
    let mut second = chunks.remove(0);
    let mut first = second.clone();
    (first.last, first.stored) = (false, second.stored.drain(..1).collect());
    watch.send(watch_reply::Message::Snapshot(first));
    assert!(router.view().await.workers.is_empty(), "an incomplete snapshot is not used");
    watch.send(watch_reply::Message::Snapshot(second));
    router.until_indexed("d", 5).await;
    assert_eq!(overlap(&router, &[1, 2, 3, 4]).await, 3);

    // The snapshot includes all events up to 7.
    watch.events(6, vec![Change::Cleared, Change::Cleared, stored(Some(3), &[4]), Change::Removed(hashes(&[9, 77, 8]))]);
    router.until_indexed("d", 4).await;
    assert_eq!((overlap(&router, &[1, 2, 3, 4]).await, overlap(&router, &[1, 2, 8]).await), (4, 2));
    assert_eq!(router.metric(r#"tandem_router_kv_blocks_skipped_total{worker="d",reason="absent"}"#), Some(1.0));
    assert_eq!(router.metric(r#"tandem_router_kv_events_total{worker="d",kind="cleared"}"#), Some(0.0));
    assert_eq!(router.metric(r#"tandem_router_index_blocks{worker="d",tier="device"}"#), Some(4.0));
    watch.events(10, vec![Change::Cleared]);
    router.until_indexed("d", 0).await;
    assert_eq!(router.metric(r#"tandem_router_kv_event_gaps_total{worker="d"}"#), Some(0.0));
}

#[tokio::test]
async fn lost_events_are_detected_counted_and_repaired_by_a_snapshot() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&decode], local()).await;
    let mut watch = decode.watched().await;
    watch.snapshot(0, &[1, 2, 3]);
    router.until_indexed("d", 3).await;
    // Events are lost between two batches, then in the last batch, then before the worker itself reports a loss.
    for (gaps, blocks) in [(1, 2), (2, 1), (3, 0)] {
        match gaps {
            1 => watch.events(2, vec![stored(Some(3), &[4])]),
            2 => watch.heartbeat(9, Load::default(), &[]),
            _ => watch.fail(Status::data_loss("too slow")),
        }
        watch = decode.watched().await;
        assert!(worker(&router.view().await, "d").is_some(), "the worker remains a member meanwhile");
        watch.snapshot(5, &[1, 2, 3][..blocks]);
        router.until_indexed("d", blocks as u64).await;
        let counted = router.metric(r#"tandem_router_kv_event_gaps_total{worker="d"}"#);
        assert_eq!(counted, Some(f64::from(gaps)));
    }
    watch.events(6, vec![stored(None, &[1])]);
    router.until_indexed("d", 1).await;
}

#[tokio::test]
async fn restarted_worker_joins_as_new_instance_with_empty_cache() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&decode], local()).await;
    let watch = decode.watched().await;
    watch.snapshot(3, &[1, 2, 3]);
    router.until_indexed("d", 3).await;
    let mut route = router.route(prompt("r", &[1, 2, 3])).await;
    assert_eq!(chosen(route.placement().await.decode), Some(("d-1".to_owned(), 3, 0)));

    decode.describe_as(|info| info.instance_id = "d-2".to_owned());
    drop(watch);
    router.until_left("d").await;
    let watch = decode.watched().await;
    watch.snapshot(1, &[1]);
    let view = router.until(|view| worker(view, "d").is_some()).await;
    let fresh = worker(&view, "d").expect("the worker is a member");
    assert_eq!((fresh.indexed_blocks, fresh.bookings), (1, 0));
    // The frontend reports that the old instance has failed, and its request is placed on the new instance.
    route.failed("d-1");
    assert_eq!(chosen(route.placement().await.decode), Some(("d-2".to_owned(), 1, 0)));
}

#[tokio::test]
async fn worker_is_removed_when_a_message_names_another_instance() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&decode], local()).await;
    let watch = decode.join().await;
    router.until_indexed("d", 0).await;
    let chunk = snapshot_chunks("d-0", &Snapshot { at_event_id: 0, stored: vec![chain(None, &[1])] }).remove(0);
    watch.send(watch_reply::Message::Snapshot(chunk));
    watch.abandoned().await;
    router.until_left("d").await;
    decode.join().await;
}

#[tokio::test]
async fn worker_that_reports_more_blocks_than_its_capacity_is_removed() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    decode.describe_as(|info| info.capacity_blocks = 10);
    let router = TestRouter::start(&[&decode], local()).await;
    let hashes: Vec<u64> = (1..=11).collect();
    for change in [stored(Some(3), &hashes[3..]), stored(None, &hashes), Change::Removed(fake::hashes(&hashes))] {
        let watch = decode.watched().await;
        watch.snapshot(0, &[1, 2, 3]);
        router.until_indexed("d", 3).await;
        // A cache that is exactly full is valid.
        watch.events(1, vec![stored(Some(3), &hashes[3..10]), Change::Removed(fake::hashes(&hashes[3..10]))]);
        watch.events(3, vec![stored(Some(3), &[30]), change]);
        watch.abandoned().await;
        router.until_left("d").await;
    }
    router
        .until(|view| {
            view.unavailable.iter().any(|worker| worker.reason.contains("more blocks than its reported capacity of 10"))
        })
        .await;
    // The same limit applies to snapshots.
    let watch = decode.watched().await;
    watch.snapshot(0, &hashes);
    watch.abandoned().await;
    let _watch = decode.join().await;
    router.until_indexed("d", 0).await;
}

#[tokio::test]
async fn worker_may_report_blocks_in_host_memory_in_addition_to_its_capacity() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    decode.describe_as(|info| (info.capacity_blocks, info.cached_blocks_max) = (10, 20));
    let router = TestRouter::start(&[&decode], local()).await;
    let hashes: Vec<u64> = (1..=21).collect();
    let watch = decode.watched().await;
    watch.snapshot(0, &hashes[..15]);
    router.until_indexed("d", 15).await;
    watch.events(1, vec![stored(Some(15), &hashes[15..20])]);
    router.until_indexed("d", 20).await;
    watch.events(2, vec![stored(Some(20), &hashes[20..])]);
    watch.abandoned().await;
    router.until_left("d").await;
}

#[tokio::test]
async fn worker_whose_stream_ends_or_is_silent_is_removed_and_may_rejoin() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let settings = RouterSettings { silence_max: Duration::from_secs(1), ..local() };
    let router = TestRouter::start(&[&decode], settings).await;
    let refusal = |reply: tandem_proto::v1::Failure| (reply.reason(), reply.message.contains("start one"));
    for end in ["ends", "silence"] {
        let watch = decode.watched().await;
        watch.snapshot(0, &[1, 2]);
        router.until_indexed("d", 2).await;
        match end {
            "ends" => drop(watch),
            _ => watch.abandoned().await,
        }
        router.until_left("d").await;
        let failure = router.route(prompt("r", &[1])).await.failure().await;
        assert_eq!(refusal(failure), (FailureReason::NoWorker, true));
    }
    let watch = decode.join().await;
    router.until_indexed("d", 0).await;
    drop(watch);
}

#[tokio::test]
async fn incompatible_worker_is_not_used_until_it_is_compatible() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let mut prefill = FakeWorker::start(Role::Prefill, "p").await;
    prefill.describe_as(|info| info.block_size = 2 * BLOCK);
    let router = TestRouter::start(&[&decode, &prefill], remote()).await;
    // No other worker has joined yet, so the prefill worker may still become the first member.
    let early = prefill.watched().await;
    let _decode = decode.join().await;
    router.until_indexed("d", 0).await;
    early.snapshot(0, &[]);
    early.abandoned().await;
    let failure = router.route(prompt("r", &[1])).await.failure().await;
    assert!(failure.message.contains("no prefill worker"), "{failure:?}");
    // The operator restarts the prefill worker with the cluster's block size.
    prefill.describe_as(|info| info.block_size = BLOCK);
    let _prefill = prefill.join().await;
    router.until(|view| worker(view, "p").is_some()).await;
    assert_eq!(router.route(prompt("r", &[1])).await.placement().await.block_size, BLOCK);
}

#[tokio::test]
async fn booking_lasts_until_its_stream_ends() {
    let mut prefill = FakeWorker::start(Role::Prefill, "p").await;
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&prefill, &decode], remote()).await;
    let (at_prefill, at_decode) = (prefill.watched().await, decode.join().await);
    at_prefill.snapshot(0, &[1, 2]);
    router.until(|view| view.workers.len() == 2).await;
    let bookings = |p: u32, d: u32, all: u32| {
        move |view: &tandem_proto::v1::WorkersReply| {
            let of = |name| worker(view, name).map(|worker| worker.bookings);
            (of("p"), of("d"), view.bookings) == (Some(p), Some(d), all)
        }
    };

    let mut routes = Vec::new();
    for id in ["a", "b", "c"] {
        let mut route = router.route(prompt(id, &[1, 2, 3])).await;
        let placement = route.placement().await;
        let predicted = u32::from(id != "a");
        assert_eq!(chosen(placement.prefill), Some(("p-1".to_owned(), 2, predicted)));
        assert_eq!(chosen(placement.decode), Some(("d-1".to_owned(), 0, 0)));
        routes.push(route);
    }
    router.until(bookings(3, 3, 3)).await;
    assert_eq!(router.metric("tandem_router_bookings"), Some(3.0));

    // The first request has its first token. The assumed overlap of two blocks is compared with the reported cached tokens once, even if
    // they are reported later.
    routes[0].prefill_finished(None);
    router.until(bookings(2, 3, 3)).await;
    routes[0].prefill_finished(Some(16));
    routes[0].prefill_finished(Some(0));
    let overestimated = |view: &tandem_proto::v1::WorkersReply| {
        worker(view, "p").and_then(|worker| worker.placements.as_ref()).map(|placements| placements.overlap_over_tokens)
    };
    router.until(move |view| overestimated(view) == Some(16)).await;
    // One client closes its side of the stream; another drops the stream.
    let closing = routes.remove(1);
    drop(closing.requests);
    router.until(bookings(1, 2, 2)).await;
    routes.pop();
    router.until(bookings(0, 1, 1)).await;
    routes.pop();
    router.until(bookings(0, 0, 0)).await;
    assert_eq!(router.metric("tandem_router_bookings"), Some(0.0));
    assert_eq!(router.metric(r#"tandem_router_overlap_over_tokens_total{worker="p"}"#), Some(16.0));
    assert_eq!(router.metric(r#"tandem_router_placements_total{worker="p",kind="prefill"}"#), Some(3.0));
    at_decode.heartbeat(0, Load::default(), &["a", "b", "c"]);
}

#[tokio::test]
async fn reported_requests_are_not_counted_twice() {
    let mut prefills = [FakeWorker::start(Role::Prefill, "p0").await, FakeWorker::start(Role::Prefill, "p1").await];
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&prefills[0], &prefills[1], &decode], remote()).await;
    let _decode = decode.join().await;
    let [zero, one] = &mut prefills;
    let watches = [zero.join().await, one.join().await];
    router.until(|view| view.workers.len() == 3).await;
    // 10 blocks are booked on the worker `mine`. The worker `other` reports 15 blocks, so `mine` has less load.
    let mut first = router.route(prompt("a", &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10])).await;
    let (taken, ..) = chosen(first.placement().await.prefill).expect("the placement has a prefill worker");
    let (mine, other) = if taken == "p0-1" { (0, 1) } else { (1, 0) };
    let load = |blocks: u32| Load { pending_prefill_tokens: u64::from(blocks * BLOCK), ..Default::default() };
    let seen = |at: usize, blocks: u32| {
        let name = format!("p{at}");
        router.until(move |view| {
            let load = worker(view, &name).and_then(|worker| worker.load.as_ref());
            load.is_some_and(|load| load.pending_prefill_tokens == u64::from(blocks * BLOCK))
        })
    };
    watches[other].heartbeat(0, load(15), &[]);
    seen(other, 15).await;
    // The worker `mine` reports the booked request. Its load is 10 blocks. If the booking were still added, the load would be 20 blocks,
    // more than that of `other`.
    watches[mine].heartbeat(0, load(10), &["a"]);
    seen(mine, 10).await;
    let mut second = router.route(prompt("b", &[99])).await;
    assert_eq!(chosen(second.placement().await.prefill).map(|(instance, ..)| instance), Some(taken));
}

#[tokio::test]
async fn failed_attempts_are_retried_on_other_workers_until_no_worker_is_left() {
    let mut decodes = [FakeWorker::start(Role::Decode, "d0").await, FakeWorker::start(Role::Decode, "d1").await];
    let router = TestRouter::start(&[&decodes[0], &decodes[1]], local()).await;
    let [zero, one] = &mut decodes;
    let _watches = [zero.join().await, one.join().await];
    router.until(|view| view.workers.len() == 2).await;
    let mut route = router.route(prompt("r", &[1])).await;
    let (first, ..) = chosen(route.placement().await.decode).expect("the placement has a decode worker");
    route.failed(&first);
    let (second, ..) = chosen(route.placement().await.decode).expect("the placement has a decode worker");
    assert_ne!(first, second);
    let moved = |view: &tandem_proto::v1::WorkersReply| {
        let of = |instance: &str| worker(view, &instance[..2]).map(|worker| worker.bookings);
        (of(&first), of(&second), view.bookings)
    };
    assert_eq!(moved(&router.view().await), (Some(0), Some(1), 1), "the load has moved to the other worker");
    route.failed(&second);
    let failure = route.failure().await;
    assert_eq!((failure.reason(), failure.message.contains("try again later")), (FailureReason::NoWorker, true));
    assert_eq!(router.view().await.bookings, 0, "a refused request has no booking");
    assert_eq!(router.metric("tandem_router_refused_total"), Some(1.0));
}

#[tokio::test]
async fn request_whose_worker_fails_is_placed_again_without_a_limit_on_its_wait() {
    let mut decodes = [FakeWorker::start(Role::Decode, "d0").await, FakeWorker::start(Role::Decode, "d1").await];
    decodes.iter().for_each(|decode| decode.describe_as(|info| info.sequences_max = 1));
    let router = TestRouter::start(&[&decodes[0], &decodes[1]], local()).await;
    let [zero, one] = &mut decodes;
    let _watches = [zero.join().await, one.join().await];
    router.until(|view| view.workers.len() == 2).await;
    let limited = |id: &str| RoutePrompt { max_wait_ms: 1, ..prompt(id, &[1]) };
    let mut answers = [router.route(limited("a")).await, router.route(limited("b")).await];
    let mut used = Vec::new();
    for answer in &mut answers {
        used.extend(chosen(answer.placement().await.decode).map(|(instance, ..)| instance));
        answer.prefill_finished(Some(0));
    }
    // Both workers have an answer, and no place for another one.
    let refused = async {
        let mut number = 0;
        while !matches!(router.route(limited(&number.to_string())).await.reply().await, Ok(Some(reply)) if is_overloaded(&reply))
        {
            number += 1;
        }
    };
    soon(refused).await;
    answers[0].failed(&used[0]);
    assert_eq!(chosen(answers[0].placement().await.decode).map(|(instance, ..)| instance), Some(used[1].clone()));
}

fn is_overloaded(reply: &RouteReply) -> bool {
    matches!(&reply.message, Some(route_reply::Message::Failure(failure)) if failure.reason() == FailureReason::Overloaded)
}

#[tokio::test]
async fn router_view_shows_members_and_their_reported_loads() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&decode], local()).await;
    let watch = decode.join().await;
    watch.heartbeat(0, Load { running_sequences: 5, free_blocks: 7, decode_step_ms: 2.5, ..Default::default() }, &[]);
    let view = router.until(|view| view.workers.iter().any(|worker| worker.load.as_ref().is_some_and(|l| l.free_blocks == 7)));
    let view = view.await;
    let shown = worker(&view, "d").expect("the worker is a member");
    let load = shown.load.as_ref().expect("every member has a load");
    assert_eq!((load.running_sequences, load.decode_step_ms), (5, 2.5));
    assert_eq!(shown.address, decode.address);
    let mut route = router.route(prompt("r", &[])).await;
    let reference = route.placement().await.decode.and_then(|candidate| candidate.worker);
    let expected = WorkerRef {
        worker_id: "d".to_owned(),
        instance_id: "d-1".to_owned(),
        address: decode.address.clone(),
        ..Default::default()
    };
    assert_eq!(reference, Some(expected));
}

#[tokio::test]
async fn invalid_route_stream_is_refused_and_leaves_no_booking() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let settings = RouterSettings { hashes_max: 2, prompt_wait: Duration::from_millis(50), ..local() };
    let router = TestRouter::start(&[&decode], settings).await;
    let _watch = decode.join().await;
    router.until_indexed("d", 0).await;
    let good = || route_request::Message::Prompt(prompt("r", &[1]));
    let released = || route_request::Message::PrefillFinished(Default::default());
    let bad = |bad: RoutePrompt| vec![route_request::Message::Prompt(bad)];
    for (messages, code) in [
        (vec![released(), good()], Code::InvalidArgument),
        (vec![route_request::Message::Failed(Default::default())], Code::InvalidArgument),
        (bad(prompt("", &[1])), Code::InvalidArgument),
        (bad(prompt("r", &[1, 2, 3])), Code::InvalidArgument),
        (bad(RoutePrompt { prompt_tokens: 0, ..prompt("r", &[]) }), Code::InvalidArgument),
        (vec![], Code::DeadlineExceeded),
    ] {
        let Err(status) = router.open(messages).await else { panic!("the stream must be refused") };
        assert_eq!(status.code(), code, "{status:?}");
    }
    let mut twice = router.open(vec![good(), good()]).await.expect("the first message is valid");
    twice.placement().await;
    assert_eq!(twice.reply().await.expect_err("the second start message is refused").code(), Code::InvalidArgument);
    router.until(|view| view.bookings == 0).await;
    // A failure without an instance id excludes no instance, and a repeated message that the prefill has ended is ignored.
    let mut odd = router.route(prompt("r", &[1])).await;
    odd.placement().await;
    odd.prefill_finished(None);
    odd.prefill_finished(Some(u32::MAX));
    odd.failed("");
    odd.placement().await;
    assert_eq!(router.view().await.bookings, 1);
}

#[tokio::test]
async fn draining_router_without_peers_ends_open_streams_and_exits() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let router = TestRouter::start(&[&decode], local()).await;
    let watch = decode.join().await;
    router.until_indexed("d", 0).await;
    let mut route = router.route(prompt("r", &[1])).await;
    route.placement().await;
    let shutdown = router.shutdown.clone();
    // The grace period is longer than the test takes.
    let stopping = tokio::spawn(async move { shutdown.run(Duration::from_secs(600)).await });
    route.draining().await;
    assert_eq!(route.reply().await.expect("the stream has no error"), None);
    soon(router.ended).await.expect("the router task does not panic").expect("the router ends without an error");
    watch.abandoned().await;
    soon(stopping).await.expect("the drain task does not panic");
    assert!(tokio::net::TcpStream::connect(router.address).await.is_err(), "the port is closed");
}

#[tokio::test]
async fn invalid_worker_address_fails_immediately() {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let settings = RouterSettings { workers: MemberSource::List(vec!["not an address".to_owned()]), ..Default::default() };
    let error = tandem_router::run(listener, settings, Metrics::default(), Shutdown::default())
        .await
        .expect_err("the worker address is invalid");
    assert!(error.to_string().contains("\"not an address\" cannot be used; write host:port"), "{error:?}");
}
