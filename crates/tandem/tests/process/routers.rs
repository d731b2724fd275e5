//! Tests with several routers and frontends. A router can be killed or restarted under load without the loss of an answer and without a
//! leaked booking.

use crate::{
    cluster::{Plan, address, ready, series, until},
    talk::{chat_body, metric, streamed_chat},
    up::Up,
};
use std::{
    io::Read,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

struct Cluster {
    plan: Plan,
    routers: Vec<Option<Up>>,
    frontends: Vec<Up>,
    /// All workers. The prefill workers p1, p2 and so on come first.
    workers: Vec<Up>,
}

impl Cluster {
    fn start(prefills: usize, worker_args: &[&str]) -> Self {
        let plan = Plan::with_routers(2);
        let names = (1..=prefills).map(|number| ("prefill", format!("p{number}")));
        let names: Vec<_> = names.chain([("decode", "d1".to_owned()), ("decode", "d2".to_owned())]).collect();
        let at: Vec<_> = names.iter().map(|_| address()).collect();
        plan.list(&at);
        let routers = (0..2).map(|number| Some(plan.router_at(number, &[]))).collect();
        let workers = names.iter().zip(at).map(|((role, name), at)| plan.worker(role, name, at, worker_args)).collect();
        let frontends: Vec<Up> = (0..2).map(|_| plan.frontend(&[])).collect();
        let cluster = Self { plan, routers, frontends, workers };
        (0..2).for_each(|number| cluster.wait_for_peers(number, 1));
        cluster.frontends.iter().for_each(ready);
        cluster.frontends.iter().for_each(wait_for_both_routers);
        cluster
    }

    fn wait_for_peers(&self, number: usize, peers: u32) {
        let known = |view: &tandem_proto::v1::WorkersReply| view.workers.len() == self.workers.len() && view.peers == peers;
        until("the router has all workers and peers", || self.plan.view_of(number), known);
    }

    fn router(&self, number: usize) -> &Up {
        self.routers[number].as_ref().expect("the process runs")
    }

    fn assert_no_bookings(&self) {
        for number in (0..2).filter(|number| self.routers[*number].is_some()) {
            let idle = |view: &tandem_proto::v1::WorkersReply| {
                view.bookings == 0 && view.peer_bookings == 0 && view.workers.iter().all(|worker| worker.bookings == 0)
            };
            until("the bookings end", || self.plan.view_of(number), idle);
        }
    }
}

fn wait_for_both_routers(frontend: &Up) {
    until("both routers are found", || metric(frontend, "tandem_frontend_routers"), |healthy| *healthy == Some(2.0));
}

fn prompt(salt: &str) -> String {
    format!("{salt}: {}", "a prompt that one router places is known to both ".repeat(10))
}

/// Sends requests from clients of both frontends until `during_load` has returned. Each client sends one request after another. Returns the number of
/// answers.
fn under_load(cluster: &mut Cluster, clients: usize, during_load: impl FnOnce(&mut Cluster)) -> u32 {
    let (over, answers) = (AtomicBool::new(false), AtomicU32::new(0));
    let frontends = std::mem::take(&mut cluster.frontends);
    std::thread::scope(|scope| {
        for client in 0..clients {
            let (over, answers, frontend) = (&over, &answers, &frontends[client % 2]);
            scope.spawn(move || {
                // The number of rounds is bounded, so that this thread ends and the panic is reported if the test's main thread panics.
                for round in 0..1_000 {
                    let last = over.load(Ordering::Relaxed);
                    streamed_chat(frontend, &prompt(&format!("{client} {round}")), 200);
                    answers.fetch_add(1, Ordering::Relaxed);
                    if last {
                        break;
                    }
                }
            });
        }
        until("all clients are busy", || answers.load(Ordering::Relaxed), |answers| *answers > clients as u32);
        during_load(cluster);
        over.store(true, Ordering::Relaxed);
    });
    cluster.frontends = frontends;
    answers.into_inner()
}

#[test]
fn killed_router_loses_no_answer() {
    // An answer takes more than half a second, so some answers that the router has booked still run when it has been killed.
    let mut cluster = Cluster::start(2, &["--sim-speedup", "2"]);
    under_load(&mut cluster, 12, |cluster| {
        let both = |cluster: &Cluster| [0, 1].map(|number| cluster.plan.view_of(number));
        let synced =
            |views: &[tandem_proto::v1::WorkersReply; 2]| views.iter().all(|view| view.bookings > 0 && view.peer_bookings > 0);
        until("both routers have their own bookings and those of the other router", || both(cluster), synced);
        let router = cluster.routers[0].take().expect("the process runs");
        router.signal("-KILL");
        router.wait();
        until(
            "all requests are booked with the remaining router",
            || cluster.plan.view_of(1),
            |view| view.bookings >= 6 && view.peers == 0,
        );
    });
    let rebooked: f64 = cluster.frontends.iter().map(|frontend| series(frontend, "tandem_frontend_rebooked_total")).sum();
    assert!(rebooked > 0.0, "running requests are booked with the other router");
    // The router's count may be higher: it includes bookings whose answers ended while the booking was made, which the frontend does not count.
    let counted_by_router = metric(cluster.router(1), "tandem_router_rebooked_total").expect("the router counts bookings");
    assert!(counted_by_router >= rebooked, "the router counted {counted_by_router} of {rebooked} bookings");
    cluster.assert_no_bookings();
}

#[test]
fn rolling_restart_of_routers_loses_no_answer() {
    let mut cluster = Cluster::start(2, &[]);
    under_load(&mut cluster, 12, |cluster| {
        for number in 0..2 {
            let router = cluster.routers[number].take().expect("the process runs");
            let started = tokio::time::Instant::now();
            router.signal("-TERM");
            assert_eq!(router.wait().0.code(), Some(0));
            // The grace period is 30 s. The router ended earlier: its bookings had moved to the other router, so it did not wait for the answers to
            // end.
            assert!(started.elapsed().as_secs() < 15, "{:?}", started.elapsed());
            cluster.routers[number] = Some(cluster.plan.router_at(number, &[]));
            cluster.wait_for_peers(number, 1);
            cluster.wait_for_peers(1 - number, 1);
        }
    });
    cluster.frontends.iter().for_each(wait_for_both_routers);
    cluster.assert_no_bookings();
    assert!(cluster.workers.iter().all(|worker| series(worker, "tandem_worker_step_duration_seconds_count") > 0.0));
}

#[test]
fn two_routers_place_equal_prompts_on_the_worker_that_computes_the_first() {
    const CLIENTS: usize = 16;
    // The simulated device needs two seconds for each prompt.
    let cluster = Cluster::start(4, &["--sim-speedup", "1", "--sim-prefill-tokens-per-second", "250"]);
    let send = |client: usize, text: &str| {
        let mut answer = String::new();
        let mut reader =
            cluster.frontends[client % 2].send("/v1/chat/completions", &chat_body(text, 2, false)).expect("the frontend listens");
        reader.read_to_string(&mut answer).expect("the answer is UTF-8");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    };
    let sum = |what: &str| -> f64 {
        cluster.frontends.iter().map(|frontend| series(frontend, &format!("tandem_frontend_request_{what}_tokens_sum"))).sum()
    };
    // Lets all clients send the same prompt at the same time. Returns how many times the prompt was computed. If `known_before` is true, both routers
    // know the booking of the first client before the other clients send.
    let computed = |text: &str, known_before: bool| {
        let before = (sum("prompt"), sum("cached"));
        std::thread::scope(|scope| {
            for client in 0..CLIENTS {
                let send = &send;
                scope.spawn(move || send(client, text));
                if client == 0 && known_before {
                    let bookings = |number| cluster.plan.view_of(number).bookings + cluster.plan.view_of(number).peer_bookings;
                    until("both routers have the booking", || [bookings(0), bookings(1)], |bookings| *bookings == [1, 1]);
                }
            }
        });
        let (prompts, cached) = (sum("prompt") - before.0, sum("cached") - before.1);
        (prompts - cached) / (prompts / CLIENTS as f64)
    };
    let placed = || [0, 1].map(|number| series(cluster.router(number), "tandem_router_placements_total"));
    let once = computed(&prompt("known"), true);
    let both = placed();
    assert!(both.iter().all(|placed| *placed >= 8.0), "both routers placed requests: {both:?}");
    assert!(once < 2.0, "the prompt was computed {once} times");
    let burst = computed(&prompt("at once"), false);
    assert!(burst < 4.0, "the prompt was computed {burst} times");
    cluster.assert_no_bookings();
}
