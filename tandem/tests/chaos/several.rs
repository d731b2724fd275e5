//! Two routers and two frontends, three prefill and two decode workers, etcd and NATS: one fault after the other under load.

use crate::{
    cluster::{series, until},
    load::{self, Load, Seen},
    proxy::{Gate, Whose},
    requests::{AnswerText, largest_gap, recovery, undisturbed},
    rig::{Rig, Shape},
    services::{LEASE, Services},
    table::{Form, Row},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering,
    time::Duration,
};
use tandem_proto::channel::{PING_INTERVAL, PING_TIMEOUT};
use tokio::time::Instant;

/// A process may be stopped or cut off for this time without being given up by the others.
const SHORT_STOP: Duration = Duration::from_secs(5);
/// What the keep-alive of connections promises, and a little more.
const SILENCE: Duration = PING_INTERVAL.saturating_add(PING_TIMEOUT).saturating_add(Duration::from_secs(1));
/// For what follows a loss.
const RESUME: Duration = Duration::from_millis(500);
/// As long as this the end of an answer waits for a router that does not read.
const CLOSES: Duration = Duration::from_millis(500);
/// Between the death of a process and its return.
const GONE: Duration = Duration::from_secs(1);

/// What happens under load.
struct Story {
    fault: &'static str,
    /// Played in the short form, too.
    short: bool,
    /// Returns the end of the fault, after another process has noticed it.
    happens: fn(&mut Rig, Form) -> Instant,
    /// Frontends end, and their clients have to ask others.
    frontends_end: bool,
    gap_max: Duration,
}

impl Story {
    const fn new(fault: &'static str, short: bool, happens: fn(&mut Rig, Form) -> Instant) -> Self {
        Self { fault, short, happens, frontends_end: false, gap_max: RESUME }
    }
}

/// Faults that kill no process come first: the audit can compare every counter with the ledgers while no process was lost.
const STORIES: [Story; 13] = [
    Story { gap_max: CLOSES.saturating_add(RESUME), ..Story::new("SIGSTOP of a router", true, router_stopped) },
    Story { gap_max: SHORT_STOP.saturating_add(RESUME), ..Story::new("SIGSTOP of a frontend", true, frontend_stopped) },
    Story::new("SIGSTOP of etcd and of NATS", false, services_stopped),
    Story::new("one router partitioned from one decode worker", true, router_cut_off),
    Story::new("all workers partitioned from NATS", true, workers_without_nats),
    Story::new("routers, then all processes partitioned from etcd", true, all_without_etcd),
    Story::new("etcd and NATS killed, restarted without their data", true, services_lost),
    Story::new("kill -9 of a router", false, |rig, form| killed(rig, form, &["r0"])),
    Story::new("kill -9 of a prefill worker", false, |rig, form| killed(rig, form, &["p0"])),
    Story::new("kill -9 of a decode worker", false, |rig, form| killed(rig, form, &["d0"])),
    Story { frontends_end: true, ..Story::new("kill -9 of a frontend", false, |rig, form| killed(rig, form, &["f0"])) },
    Story {
        frontends_end: true,
        ..Story::new("kill -9 of one of each kind in turn", true, |rig, form| killed(rig, form, &["r0", "p0", "d0", "f0"]))
    },
    Story { frontends_end: true, ..Story::new("rolling restart, all processes in turn", true, rolling_restart) },
];

fn length(form: Form, long: Duration) -> Duration {
    if form == Form::Short { Duration::from_secs(1) } else { long }
}

fn router_stopped(rig: &mut Rig, form: Form) -> Instant {
    rig.up("r0").signal("-STOP");
    let frontend = rig.up("f0");
    until("it is left out", || series(frontend, "tandem_frontend_routers "), |well| *well == 1.0);
    std::thread::sleep(length(form, SHORT_STOP));
    rig.up("r0").signal("-CONT");
    Instant::now()
}

fn frontend_stopped(rig: &mut Rig, form: Form) -> Instant {
    rig.up("f0").signal("-STOP");
    std::thread::sleep(length(form, SHORT_STOP));
    rig.up("f0").signal("-CONT");
    Instant::now()
}

fn services_stopped(rig: &mut Rig, _: Form) -> Instant {
    let services = rig.services.as_ref().expect("there are some");
    services.etcd.signal("-STOP");
    services.nats.signal("-STOP");
    std::thread::sleep(SILENCE);
    rig.connected("d0", rig.up("d0"), REGISTERED, 0.0);
    rig.connected("d0", rig.up("d0"), NATS, 0.0);
    services.etcd.signal("-CONT");
    services.nats.signal("-CONT");
    Instant::now()
}

/// Nothing arrives any more, for as long as it takes to notice that; the short form breaks connections.
fn router_cut_off(rig: &mut Rig, form: Form) -> Instant {
    let (services, router) = (rig.services.as_ref().expect("there are some"), Whose::These(vec![rig.up("r0").id()]));
    services.of_worker("d0", if form == Form::Short { Gate::Broken(router) } else { Gate::Stalled(router) });
    let known = |number| {
        let view = rig.plan.view_of(number);
        view.workers.into_iter().filter_map(|worker| Some(worker.info?.worker_id)).collect::<BTreeSet<_>>()
    };
    until("it loses the worker", || known(0), |known| !known.contains("d0"));
    assert!(known(1).contains("d0"), "and the other does not");
    std::thread::sleep(length(form, SHORT_STOP));
    services.of_worker("d0", Gate::Open);
    Instant::now()
}

const REGISTERED: &str = "tandem_discovery_etcd_connected{for=\"registration\"}";
const NATS: &str = "tandem_events_nats_connected";

fn workers(rig: &Rig) -> impl Iterator<Item = (&str, &crate::up::Up)> {
    rig.running().filter(|(name, _)| name.starts_with(['p', 'd']))
}

/// The number of workers whose events the first router receives on this path.
fn workers_by(rig: &Rig, way: &str) -> f64 {
    let page = rig.up("r0").get("/metrics");
    let of_way = |line: &&str| line.starts_with("tandem_router_event_plane") && line.contains(way);
    page.lines().filter(of_way).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

fn without_nats(rig: &mut Rig, hurt: impl FnOnce(&mut Rig), heal: impl FnOnce(&mut Rig)) -> Instant {
    let count = workers(rig).count() as f64;
    until("all events come over NATS", || workers_by(rig, "\"nats\""), |workers| *workers == count);
    hurt(rig);
    workers(rig).for_each(|(name, worker)| rig.connected(name, worker, NATS, 0.0));
    until(
        "all events come directly",
        || (workers_by(rig, "\"direct\""), rig.plan.view_of(0).bookings),
        |workers| workers.0 == count,
    );
    heal(rig);
    let healed = Instant::now();
    until("all events come over NATS again", || workers_by(rig, "\"nats\""), |workers| *workers == count);
    healed
}

fn workers_without_nats(rig: &mut Rig, form: Form) -> Instant {
    without_nats(
        rig,
        |rig| {
            let services = rig.services.as_ref().expect("there are some");
            let ids = workers(rig).map(|(_, worker)| worker.id()).collect();
            services.of_nats(Gate::Broken(Whose::These(ids)));
            std::thread::sleep(length(form, SHORT_STOP));
        },
        |rig| rig.services.as_ref().expect("there are some").of_nats(Gate::Open),
    )
}

/// All processes lose their leases and none is deregistered: first those whose keys the others see vanish, then the others.
fn all_without_etcd(rig: &mut Rig, form: Form) -> Instant {
    let again = registered_again(rig);
    let services = rig.services.as_ref().expect("there are some");
    let routers = rig.running().filter(|(name, _)| name.starts_with('r')).map(|(_, router)| router.id()).collect();
    services.of_etcd(Gate::Stalled(Whose::These(routers)));
    std::thread::sleep(2 * LEASE);
    services.of_etcd(Gate::Stalled(Whose::Everybody));
    std::thread::sleep(if form == Form::Short { 2 * LEASE } else { SILENCE });
    services.of_etcd(Gate::Open);
    let healed = Instant::now();
    all_registered_again(rig, &again);
    healed
}

fn services_lost(rig: &mut Rig, form: Form) -> Instant {
    fn services(rig: &mut Rig) -> &mut Services {
        rig.services.as_mut().expect("there are some")
    }
    let again = registered_again(rig);
    let healed = without_nats(
        rig,
        |rig| {
            services(rig).etcd.kill();
            services(rig).etcd.lose_data();
            services(rig).nats.kill();
            std::thread::sleep(length(form, SHORT_STOP));
        },
        |rig| {
            services(rig).etcd.start();
            services(rig).nats.start();
        },
    );
    all_registered_again(rig, &again);
    healed
}

fn registered_again(rig: &Rig) -> BTreeMap<String, f64> {
    let again = |process| series(process, "tandem_discovery_reregistrations_total");
    rig.running().map(|(name, process)| (name.to_owned(), again(process))).collect()
}

fn all_registered_again(rig: &Rig, before: &BTreeMap<String, f64>) {
    let more = |again: &BTreeMap<String, f64>| again.iter().all(|(name, times)| *times > before[name]);
    until("all register again", || registered_again(rig), more);
}

fn killed(rig: &mut Rig, form: Form, victims: &[&str]) -> Instant {
    for victim in victims {
        rig.whole();
        rig.kill(victim);
        std::thread::sleep(length(form, GONE));
        rig.restart(victim);
    }
    Instant::now()
}

fn rolling_restart(rig: &mut Rig, _: Form) -> Instant {
    for name in ["f0", "f1", "r0", "r1", "p0", "p1", "p2", "d0", "d1"] {
        rig.whole();
        rig.end(name);
        rig.restart(name);
    }
    Instant::now()
}

/// Plays all stories of the form on one cluster, and in the long form kills without an end.
pub fn play(form: Form, mut row: impl FnMut(Row)) {
    let args = ["--sim-speedup", "1", "--kv-capacity-tokens", "32768"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape { frontends: 2, routers: 2, prefill_workers: 3, decode_workers: 2, services: true, args });
    let expected = undisturbed(&rig.outcomes(rig.ask(&load::distinct())));
    for story in STORIES.iter().filter(|story| form == Form::Long || story.short) {
        // Those of one of each kind are rows of their own.
        if form == Form::Long && story.fault.contains("each kind") {
            continue;
        }
        row(play_story(&mut rig, form, story, &expected));
    }
    if form == Form::Long {
        row(kills(&mut rig, &expected));
    }
}

fn play_story(rig: &mut Rig, form: Form, story: &Story, expected: &[AnswerText]) -> Row {
    let clients = if form == Form::Short { 12 } else { 50 };
    let before = Before::of(rig);
    let load = Load::start(rig, clients, usize::MAX, story.fault);
    until("they are at it", || load.ended.load(Ordering::Relaxed), |ended| *ended >= clients);
    let struck = Instant::now();
    let healed = (story.happens)(rig, form);
    rig.whole();
    let whole = healed.elapsed();
    let seen = load.finish(rig);
    let row = before.row(rig, story.fault.to_owned(), &seen, expected, &[struck], whole, story.gap_max);
    assert!(story.frontends_end || row.asked_again == 0, "{}: {} asked again", story.fault, row.asked_again);
    row
}

/// Any process may be next, etcd and NATS included.
fn kills(rig: &mut Rig, expected: &[AnswerText]) -> Row {
    const REQUESTS: usize = 5_000;
    const EVERY: Duration = Duration::from_secs(5);
    const VICTIMS: [&str; 11] = ["d0", "r0", "p0", "f0", "etcd", "d1", "p1", "r1", "nats", "f1", "p2"];
    let before = Before::of(rig);
    let load = Load::start(rig, 50, REQUESTS, "kills");
    let (mut strikes, mut due) = (Vec::new(), Instant::now() + EVERY);
    while load.ended.load(Ordering::Relaxed) < REQUESTS {
        std::thread::sleep(Duration::from_millis(10));
        if Instant::now() < due {
            continue;
        }
        let victim = VICTIMS[strikes.len() % VICTIMS.len()];
        strikes.push(Instant::now());
        match victim {
            "etcd" | "nats" => {
                let services = rig.services.as_mut().expect("there are some");
                let server = if victim == "etcd" { &mut services.etcd } else { &mut services.nats };
                server.kill();
                std::thread::sleep(GONE);
                server.start();
            }
            _ => {
                rig.kill(victim);
                std::thread::sleep(GONE);
                rig.restart(victim);
            }
        }
        due += EVERY;
    }
    let healed = Instant::now();
    rig.whole();
    let whole = healed.elapsed();
    let seen = load.rest(rig);
    assert!(strikes.len() >= VICTIMS.len(), "it ended after {} kills", strikes.len());
    let fault = format!("{} kills of any process, one every {EVERY:?}", strikes.len());
    before.row(rig, fault, &seen, expected, &strikes, whole, RESUME)
}

/// What was counted before a story.
struct Before {
    resumed: u64,
    retried: u64,
    unverified: u64,
}

impl Before {
    fn of(rig: &Rig) -> Self {
        Self { resumed: rig.resumed(), retried: rig.retried(), unverified: rig.close().unverified }
    }

    #[expect(clippy::too_many_arguments, reason = "the parts of a row")]
    fn row(
        &self,
        rig: &Rig,
        fault: String,
        seen: &[Seen],
        expected: &[AnswerText],
        strikes: &[Instant],
        whole: Duration,
        gap_max: Duration,
    ) -> Row {
        let books = rig.close();
        let recoveries =
            seen.iter().flat_map(|seen| strikes.iter().filter_map(|struck| recovery(seen.asked, &seen.arrivals, *struck)));
        for problem in seen.iter().filter_map(|seen| seen.problem.as_ref()) {
            crate::table::print_line(&format!("{fault}: {problem}"));
        }
        Row {
            fault,
            requests: seen.len(),
            failed: seen.iter().filter(|seen| seen.answer_text.is_none()).count(),
            asked_again: seen.iter().map(|seen| seen.asked_again).sum(),
            resumed: rig.resumed() - self.resumed,
            retried: rig.retried() - self.retried,
            wrong_texts: seen
                .iter()
                .filter(|seen| seen.answer_text.as_ref().is_some_and(|answer_text| *answer_text != expected[seen.which]))
                .count(),
            wrong_counts: books.wrong,
            unverified: books.unverified - self.unverified,
            leaked_blocks: books.leaked_blocks,
            largest_gap: seen.iter().map(|seen| largest_gap(&seen.arrivals)).max().unwrap_or_default(),
            gap_max,
            recovery: recoveries.max().unwrap_or_default(),
            whole,
            // The story has looked.
            felt: true,
        }
    }
}
