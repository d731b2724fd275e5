//! Several routers replicate bookings, take over running requests, and place nothing before they are synchronised with their workers.

use crate::{
    fake::{FakeWatch, FakeWorker, TestRouter, chosen, prompt, soon, worker},
    local, remote,
};
use std::time::Duration;
use tandem_process::discovery::MemberSource;
use tandem_proto::v1::{BookingsRequest, ExistingPlacement, Identity, RoutePrompt, WorkersReply, worker_info::Role};
use tandem_router::RouterSettings;
use tokio::net::TcpListener;
use tonic::Code;

/// Starts routers that have the same workers, and the same list of routers, which includes themselves.
async fn routers<const N: usize>(workers: &[&FakeWorker], settings: RouterSettings) -> [TestRouter; N] {
    let mut listeners = Vec::new();
    for _ in 0..N {
        listeners.push(TcpListener::bind("127.0.0.1:0").await.expect("a port is free"));
    }
    let address = |listener: &TcpListener| listener.local_addr().expect("the listener is bound").to_string();
    let peers: MemberSource = listeners.iter().map(address).collect();
    let mut routers = Vec::new();
    for listener in listeners {
        let settings = RouterSettings { peers: peers.clone(), ..settings.clone() };
        routers.push(TestRouter::start_at(listener, workers, settings).await);
    }
    routers.try_into().unwrap_or_else(|_| unreachable!("N routers were started"))
}

/// Lets the worker join each router, in the order in which the routers connect.
async fn join_all(worker: &mut FakeWorker, routers: usize) -> Vec<FakeWatch> {
    let mut watches = Vec::new();
    for _ in 0..routers {
        watches.push(worker.join().await);
    }
    watches
}

fn counts(own: u32, others: u32, on_decode: u32) -> impl Fn(&WorkersReply) -> bool {
    move |view| {
        let decode = worker(view, "d").map(|decode| decode.bookings);
        (view.bookings, view.peer_bookings, decode) == (own, others, Some(on_decode))
    }
}

#[tokio::test]
async fn load_on_each_router_includes_the_bookings_of_connected_peers() {
    let (mut prefills, mut decode) = (
        [FakeWorker::start(Role::Prefill, "p0").await, FakeWorker::start(Role::Prefill, "p1").await],
        FakeWorker::start(Role::Decode, "d").await,
    );
    let [one, other, third] = routers(&[&prefills[0], &prefills[1], &decode], remote()).await;
    let mut watches = join_all(&mut decode, 3).await;
    for prefill in &mut prefills {
        watches.extend(join_all(prefill, 3).await);
    }
    for router in [&one, &other, &third] {
        router.until(|view| view.peers == 2 && view.workers.len() == 3).await;
    }
    let long: Vec<u64> = (1..60).collect();
    let mut first = one.route(prompt("a", &long)).await;
    let (computes, ..) = chosen(first.placement().await.prefill).expect("the placement has a prefill worker");
    other.until(counts(0, 1, 1)).await;
    // The same prompt is placed on the worker that is prefilling it, and another prompt on the other worker.
    let mut same = other.route(prompt("b", &long)).await;
    assert_eq!(chosen(same.placement().await.prefill), Some((computes.clone(), 0, 59)));
    let mut another = other.route(prompt("c", &[1_000, 1_001])).await;
    assert_ne!(chosen(another.placement().await.prefill).map(|(instance, ..)| instance), Some(computes.clone()));
    one.until(counts(1, 2, 3)).await;
    third.until(counts(0, 3, 3)).await;
    assert_eq!(third.metric("tandem_router_peer_bookings"), Some(3.0));
    assert_eq!(third.metric("tandem_router_peers"), Some(2.0));
    first.prefill_finished(None);
    other.until(|view| worker(view, &computes[..2]).is_some_and(|prefill| prefill.bookings == 1)).await;
    drop(another);
    third.until(counts(0, 2, 2)).await;
    // One router stops abruptly.
    other.shutdown.stop();
    third.until(counts(0, 1, 1)).await;
    one.until(counts(1, 0, 1)).await;
    drop(first);
    third.until(counts(0, 0, 0)).await;
    assert_eq!(third.view().await.peers, 1);
    drop((same, watches));
}

#[tokio::test]
async fn request_of_a_draining_router_is_rebooked_at_a_peer() {
    let mut decodes = [FakeWorker::start(Role::Decode, "d0").await, FakeWorker::start(Role::Decode, "d1").await];
    let [one, other] = routers(&[&decodes[0], &decodes[1]], local()).await;
    let mut watches = Vec::new();
    for decode in &mut decodes {
        watches.extend(join_all(decode, 2).await);
    }
    for router in [&one, &other] {
        router.until(|view| view.peers == 1 && view.workers.len() == 2).await;
    }
    let mut route = one.route(prompt("r", &[1, 2])).await;
    let (instance, ..) = chosen(route.placement().await.decode).expect("the placement has a decode worker");
    let shutdown = one.shutdown.clone();
    let draining = tokio::spawn(async move { shutdown.run(Duration::from_secs(600)).await });
    route.draining().await;
    let existing = ExistingPlacement { decode_instance_id: instance.clone(), prefill_instance_id: None, prefilling: true };
    let mut moved = other.route(RoutePrompt { existing: Some(existing.clone()), ..prompt("r", &[1, 2]) }).await;
    drop(route);
    soon(draining).await.expect("the last stream has closed");
    soon(one.ended).await.expect("the router task does not panic").expect("the router ends without an error");
    let on = |instance: &str, bookings: u32| {
        let name = instance[..2].to_owned();
        move |view: &WorkersReply| {
            let of = worker(view, &name).map(|worker| worker.bookings);
            (of, view.bookings, view.peer_bookings) == (Some(bookings), bookings, 0)
        }
    };
    other.until(on(&instance, 1)).await;
    assert_eq!(other.metric("tandem_router_rebooked_total"), Some(1.0));
    // The router knows which worker failed, so the next attempt uses another worker.
    moved.failed(&instance);
    let (elsewhere, ..) = chosen(moved.placement().await.decode).expect("the placement has a decode worker");
    assert_ne!(elsewhere, instance);
    drop(moved);
    other.until(on(&instance, 0)).await;

    let nowhere = RoutePrompt { existing: Some(ExistingPlacement::default()), ..prompt("r", &[1]) };
    let Err(status) = other.open(vec![tandem_proto::v1::route_request::Message::Prompt(nowhere)]).await else {
        panic!("an existing placement without workers must be refused")
    };
    assert_eq!(status.code(), Code::InvalidArgument);
    drop(watches);
}

#[tokio::test]
async fn draining_router_with_a_peer_still_places_retried_requests_until_the_router_stops() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let [one, other] = routers(&[&decode], local()).await;
    let watches = join_all(&mut decode, 2).await;
    for router in [&one, &other] {
        router.until(|view| view.peers == 1 && view.workers.len() == 1).await;
    }
    let mut route = one.route(prompt("r", &[1])).await;
    route.placement().await;
    let shutdown = one.shutdown.clone();
    let draining = tokio::spawn(async move { shutdown.run(Duration::from_secs(600)).await });
    route.draining().await;
    route.failed("");
    route.placement().await;
    one.shutdown.stop();
    assert_eq!(route.reply().await.expect_err("the router has stopped").code(), Code::Unavailable);
    soon(draining).await.expect("the drain task does not panic");
    drop(watches);
}

#[tokio::test]
async fn starting_router_places_no_request_before_it_knows_its_workers() {
    let mut decode = FakeWorker::start(Role::Decode, "d").await;
    let mut late = FakeWorker::start(Role::Decode, "late").await;
    for alone in [true, false] {
        let peers = if alone { MemberSource::List(vec![]) } else { ["127.0.0.1:1".to_owned()].into_iter().collect() };
        let router = TestRouter::start(&[&decode, &late], RouterSettings { peers, ..local() }).await;
        let (_decode, slow) = (decode.join().await, late.watched().await);
        let view = router.until(|view| view.workers.len() == 1).await;
        assert_eq!((view.synced_workers, view.known_workers), (1, 2));
        assert!(view.unavailable_reason.is_some_and(|why| why.contains("1 of 2 workers")));
        assert_eq!(router.metric("tandem_router_index_complete_ratio"), Some(0.5));
        let messages = || vec![tandem_proto::v1::route_request::Message::Prompt(prompt("r", &[1]))];
        let Err(refused) = router.open(messages()).await else { panic!("a starting router places no request") };
        assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
        if alone {
            // No other router could place the request, so this one does not wait for all its workers.
            let opened = async {
                loop {
                    if let Ok(route) = router.open(messages()).await {
                        return route;
                    }
                }
            };
            assert!(chosen(soon(opened).await.placement().await.decode).is_some());
        }
        // Requests that are already running are booked although no request can be placed.
        let existing =
            ExistingPlacement { decode_instance_id: "late-1".to_owned(), prefill_instance_id: None, prefilling: false };
        let running = router.route(RoutePrompt { existing: Some(existing), ..prompt("s", &[1]) }).await;
        router.until(|view| view.bookings == 1).await;
        slow.snapshot(0, &[]);
        let view = router.until(|view| view.unavailable_reason.is_none()).await;
        assert_eq!(worker(&view, "late").map(|late| late.bookings), Some(1), "the booking counts on its worker");
        let mut route = router.route(prompt("t", &[1])).await;
        assert!(chosen(route.placement().await.decode).is_some());
        drop((running, route));
        router.until(|view| view.bookings == 0).await;
        router.shutdown.stop();
    }
}

#[tokio::test]
async fn routers_of_other_clusters_receive_no_bookings() {
    let decode = FakeWorker::start(Role::Decode, "d").await;
    let identity = Identity { cluster: "ours".to_owned(), block_size: 16, ..Identity::default() };
    let router = TestRouter::start(&[&decode], RouterSettings { identity: identity.clone(), ..local() }).await;
    let ask = |identity| {
        let mut client = router.client.clone();
        async move { client.bookings(BookingsRequest { identity: Some(identity) }).await }
    };
    for other in [Identity { cluster: "theirs".to_owned(), ..identity.clone() }, Identity { block_size: 32, ..identity.clone() }]
    {
        let status = ask(other).await.expect_err("the router refuses another identity");
        assert_eq!(status.code(), Code::FailedPrecondition, "{status:?}");
    }
    let mut replies = ask(identity).await.expect("the router accepts its own identity").into_inner();
    let first = soon(replies.message()).await.expect("the stream has no error").expect("the full state comes first");
    assert_eq!(first.router_instance_id, router.view().await.instance_id);
    let heartbeat = soon(replies.message()).await.expect("the stream has no error").expect("a heartbeat follows");
    assert_eq!(heartbeat.router_instance_id, first.router_instance_id);
    router.shutdown.stop();
}
