//! Tests with faults of all roles, one after another under load, in a cluster with several processes of each role, etcd and NATS.

use crate::{
    cluster::{series, until},
    load::{self, ClientRecord, Load},
    proxy::{Dialers, Gate},
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

/// The duration of a stop or partition that is too short for keep-alive to detect.
const SHORT_STOP: Duration = Duration::from_secs(5);
/// The duration of a stop or partition that keep-alive detects.
const BEYOND_KEEP_ALIVE: Duration = PING_INTERVAL.saturating_add(PING_TIMEOUT).saturating_add(Duration::from_secs(1));
/// Time limit for the continuation of an answer after the loss of a worker.
const RESUME: Duration = Duration::from_millis(500);
/// Time limit for the end of an answer while a router does not respond.
const CLOSE_MAX: Duration = Duration::from_millis(500);
/// The time from the end of a process to its restart.
const DOWNTIME: Duration = Duration::from_secs(1);

struct Scenario {
    fault: &'static str,
    short: bool,
    /// Injects the fault, waits until another process has detected it, and ends the fault. Returns the time at which the fault ended.
    inject: fn(&mut Rig, Form) -> Instant,
    /// Whether the fault ends frontends, so that their clients repeat requests at another frontend.
    frontends_end: bool,
    gap_max: Duration,
}

impl Scenario {
    const fn new(fault: &'static str, short: bool, inject: fn(&mut Rig, Form) -> Instant) -> Self {
        Self { fault, short, inject, frontends_end: false, gap_max: RESUME }
    }
}

/// Faults that kill no process come first, because the audit can compare all counters with the ledgers while no process has ended.
const SCENARIOS: [Scenario; 13] = [
    Scenario { gap_max: CLOSE_MAX.saturating_add(RESUME), ..Scenario::new("SIGSTOP of a router", true, router_stopped) },
    Scenario { gap_max: SHORT_STOP.saturating_add(RESUME), ..Scenario::new("SIGSTOP of a frontend", true, frontend_stopped) },
    Scenario::new("SIGSTOP of etcd and of NATS", false, services_stopped),
    Scenario::new("one router partitioned from one decode worker", true, router_partitioned),
    Scenario::new("all workers partitioned from NATS", true, workers_without_nats),
    Scenario::new("routers, then all processes partitioned from etcd", true, all_without_etcd),
    Scenario::new("etcd and NATS killed, restarted without their data", true, services_lost),
    Scenario::new("kill -9 of a router", false, |rig, form| killed(rig, form, &["r0"])),
    Scenario::new("kill -9 of a prefill worker", false, |rig, form| killed(rig, form, &["p0"])),
    Scenario::new("kill -9 of a decode worker", false, |rig, form| killed(rig, form, &["d0"])),
    Scenario { frontends_end: true, ..Scenario::new("kill -9 of a frontend", false, |rig, form| killed(rig, form, &["f0"])) },
    Scenario {
        frontends_end: true,
        ..Scenario::new("kill -9 of one process of each kind in turn", true, |rig, form| {
            killed(rig, form, &["r0", "p0", "d0", "f0"])
        })
    },
    Scenario { frontends_end: true, ..Scenario::new("rolling restart, all processes in turn", true, rolling_restart) },
];

fn length(form: Form, long: Duration) -> Duration {
    if form == Form::Short { Duration::from_secs(1) } else { long }
}

fn router_stopped(rig: &mut Rig, form: Form) -> Instant {
    rig.process("r0").signal("-STOP");
    let frontend = rig.process("f0");
    until("the frontend uses only the other router", || series(frontend, "tandem_frontend_routers "), |healthy| *healthy == 1.0);
    std::thread::sleep(length(form, SHORT_STOP));
    rig.process("r0").signal("-CONT");
    Instant::now()
}

fn frontend_stopped(rig: &mut Rig, form: Form) -> Instant {
    rig.process("f0").signal("-STOP");
    std::thread::sleep(length(form, SHORT_STOP));
    rig.process("f0").signal("-CONT");
    Instant::now()
}

fn services_stopped(rig: &mut Rig, _: Form) -> Instant {
    let services = rig.services.as_ref().expect("this cluster uses etcd and NATS");
    services.etcd.signal("-STOP");
    services.nats.signal("-STOP");
    std::thread::sleep(BEYOND_KEEP_ALIVE);
    rig.wait_for_value("d0", rig.process("d0"), REGISTERED, 0.0);
    rig.wait_for_value("d0", rig.process("d0"), NATS, 0.0);
    services.etcd.signal("-CONT");
    services.nats.signal("-CONT");
    Instant::now()
}

/// No bytes are delivered between one router and one worker until the router detects the partition. In the short form, the connections are
/// closed instead, which the router detects at once.
fn router_partitioned(rig: &mut Rig, form: Form) -> Instant {
    let (services, router) =
        (rig.services.as_ref().expect("this cluster uses etcd and NATS"), Dialers::Processes(vec![rig.process("r0").id()]));
    services.set_worker_gate("d0", if form == Form::Short { Gate::Broken(router) } else { Gate::Stalled(router) });
    let known = |number| {
        let view = rig.plan.view_of(number);
        view.workers.into_iter().filter_map(|worker| Some(worker.info?.worker_id)).collect::<BTreeSet<_>>()
    };
    until("the router loses the worker", || known(0), |known| !known.contains("d0"));
    assert!(known(1).contains("d0"), "the other router keeps the worker");
    std::thread::sleep(length(form, SHORT_STOP));
    services.set_worker_gate("d0", Gate::Open);
    Instant::now()
}

const REGISTERED: &str = "tandem_discovery_etcd_connected{for=\"registration\"}";
const NATS: &str = "tandem_events_nats_connected";

fn workers(rig: &Rig) -> impl Iterator<Item = (&str, &crate::up::Up)> {
    rig.running().filter(|(name, _)| name.starts_with(['p', 'd']))
}

/// Returns the number of workers whose KV events router `r0` receives over NATS or directly, as `path` says.
fn workers_on_path(rig: &Rig, path: &str) -> f64 {
    let page = rig.process("r0").get("/metrics");
    let on_path = |line: &&str| line.starts_with("tandem_router_event_plane") && line.contains(path);
    page.lines().filter(on_path).filter_map(|line| line.rsplit_once(' ')?.1.parse::<f64>().ok()).sum()
}

fn without_nats(rig: &mut Rig, inject: impl FnOnce(&mut Rig), repair: impl FnOnce(&mut Rig)) -> Instant {
    let count = workers(rig).count() as f64;
    until("all events are received over NATS", || workers_on_path(rig, "\"nats\""), |workers| *workers == count);
    inject(rig);
    workers(rig).for_each(|(name, worker)| rig.wait_for_value(name, worker, NATS, 0.0));
    until(
        "all events are received over streams",
        || (workers_on_path(rig, "\"direct\""), rig.plan.view_of(0).bookings),
        |workers| workers.0 == count,
    );
    repair(rig);
    let fault_ended = Instant::now();
    until("all events are received over NATS again", || workers_on_path(rig, "\"nats\""), |workers| *workers == count);
    fault_ended
}

fn workers_without_nats(rig: &mut Rig, form: Form) -> Instant {
    without_nats(
        rig,
        |rig| {
            let services = rig.services.as_ref().expect("this cluster uses etcd and NATS");
            let ids = workers(rig).map(|(_, worker)| worker.id()).collect();
            services.set_nats_gate(Gate::Broken(Dialers::Processes(ids)));
            std::thread::sleep(length(form, SHORT_STOP));
        },
        |rig| rig.services.as_ref().expect("this cluster uses etcd and NATS").set_nats_gate(Gate::Open),
    )
}

/// The routers first, and then all processes, lose their connections to etcd for so long that all leases expire. No running process may be removed.
fn all_without_etcd(rig: &mut Rig, form: Form) -> Instant {
    let again = reregistrations(rig);
    let services = rig.services.as_ref().expect("this cluster uses etcd and NATS");
    let routers = rig.running().filter(|(name, _)| name.starts_with('r')).map(|(_, router)| router.id()).collect();
    services.set_etcd_gate(Gate::Stalled(Dialers::Processes(routers)));
    std::thread::sleep(2 * LEASE);
    services.set_etcd_gate(Gate::Stalled(Dialers::All));
    std::thread::sleep(if form == Form::Short { 2 * LEASE } else { BEYOND_KEEP_ALIVE });
    services.set_etcd_gate(Gate::Open);
    let fault_ended = Instant::now();
    wait_for_reregistration(rig, &again);
    fault_ended
}

fn services_lost(rig: &mut Rig, form: Form) -> Instant {
    fn services(rig: &mut Rig) -> &mut Services {
        rig.services.as_mut().expect("this cluster uses etcd and NATS")
    }
    let again = reregistrations(rig);
    let fault_ended = without_nats(
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
    wait_for_reregistration(rig, &again);
    fault_ended
}

fn reregistrations(rig: &Rig) -> BTreeMap<String, f64> {
    let again = |process| series(process, "tandem_discovery_reregistrations_total");
    rig.running().map(|(name, process)| (name.to_owned(), again(process))).collect()
}

fn wait_for_reregistration(rig: &Rig, before: &BTreeMap<String, f64>) {
    let more = |again: &BTreeMap<String, f64>| again.iter().all(|(name, times)| *times > before[name]);
    until("all processes register again", || reregistrations(rig), more);
}

fn killed(rig: &mut Rig, form: Form, victims: &[&str]) -> Instant {
    for victim in victims {
        rig.wait_until_connected();
        rig.kill(victim);
        std::thread::sleep(length(form, DOWNTIME));
        rig.restart(victim);
    }
    Instant::now()
}

fn rolling_restart(rig: &mut Rig, _: Form) -> Instant {
    for name in ["f0", "f1", "r0", "r1", "p0", "p1", "p2", "d0", "d1"] {
        rig.wait_until_connected();
        rig.terminate(name);
        rig.restart(name);
    }
    Instant::now()
}

/// Runs all scenarios of the form on one cluster. The long form ends with a scenario that kills processes repeatedly.
pub fn run(form: Form, certificates: bool, mut row: impl FnMut(Row)) {
    let args = ["--sim-speedup", "1", "--kv-capacity-tokens", "32768"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape {
        frontends: 2,
        routers: 2,
        prefill_workers: 3,
        decode_workers: 2,
        services: true,
        certificates,
        args,
    });
    let expected = undisturbed(&rig.outcomes(rig.send_all(&load::distinct())));
    for scenario in SCENARIOS.iter().filter(|scenario| form == Form::Long || scenario.short) {
        // In the long form, the kill of each kind of process is a scenario of its own.
        if form == Form::Long && scenario.fault.contains("each kind") {
            continue;
        }
        row(run_scenario(&mut rig, form, scenario, &expected));
    }
    if form == Form::Long {
        row(kills(&mut rig, &expected));
    }
}

fn run_scenario(rig: &mut Rig, form: Form, scenario: &Scenario, expected: &[AnswerText]) -> Row {
    let clients = if form == Form::Short { 12 } else { 50 };
    let baseline = Baseline::of(rig);
    let load = Load::start(rig, clients, usize::MAX, scenario.fault);
    until("all clients are busy", || load.ended.load(Ordering::Relaxed), |ended| *ended >= clients);
    let fault_at = Instant::now();
    let fault_ended = (scenario.inject)(rig, form);
    rig.wait_until_connected();
    let reconnected = fault_ended.elapsed();
    let records = load.finish(rig);
    let row = baseline.row(rig, scenario.fault.to_owned(), &records, expected, &[fault_at], reconnected, scenario.gap_max);
    assert!(scenario.frontends_end || row.repeated == 0, "{}: {} repeated requests", scenario.fault, row.repeated);
    row
}

/// Kills and restarts all processes in rotation, including etcd and NATS.
fn kills(rig: &mut Rig, expected: &[AnswerText]) -> Row {
    const REQUESTS: usize = 5_000;
    const EVERY: Duration = Duration::from_secs(5);
    const VICTIMS: [&str; 11] = ["d0", "r0", "p0", "f0", "etcd", "d1", "p1", "r1", "nats", "f1", "p2"];
    let baseline = Baseline::of(rig);
    let load = Load::start(rig, 50, REQUESTS, "kills");
    let (mut faults_at, mut due) = (Vec::new(), Instant::now() + EVERY);
    while load.ended.load(Ordering::Relaxed) < REQUESTS {
        std::thread::sleep(Duration::from_millis(10));
        if Instant::now() < due {
            continue;
        }
        let victim = VICTIMS[faults_at.len() % VICTIMS.len()];
        faults_at.push(Instant::now());
        match victim {
            "etcd" | "nats" => {
                let services = rig.services.as_mut().expect("this cluster uses etcd and NATS");
                let server = if victim == "etcd" { &mut services.etcd } else { &mut services.nats };
                server.kill();
                std::thread::sleep(DOWNTIME);
                server.start();
            }
            _ => {
                rig.kill(victim);
                std::thread::sleep(DOWNTIME);
                rig.restart(victim);
            }
        }
        due += EVERY;
    }
    let fault_ended = Instant::now();
    rig.wait_until_connected();
    let reconnected = fault_ended.elapsed();
    let records = load.wait(rig);
    assert!(faults_at.len() >= VICTIMS.len(), "the run ended after {} kills", faults_at.len());
    let fault = format!("{} kills of any process, one every {EVERY:?}", faults_at.len());
    baseline.row(rig, fault, &records, expected, &faults_at, reconnected, RESUME)
}

struct Baseline {
    resumed: u64,
    retried: u64,
    unverified: u64,
}

impl Baseline {
    fn of(rig: &Rig) -> Self {
        Self { resumed: rig.resumed(), retried: rig.retried(), unverified: rig.reconcile().unverified }
    }

    #[expect(clippy::too_many_arguments, reason = "each argument is a part of the row")]
    fn row(
        &self,
        rig: &Rig,
        fault: String,
        records: &[ClientRecord],
        expected: &[AnswerText],
        faults_at: &[Instant],
        reconnected: Duration,
        gap_max: Duration,
    ) -> Row {
        let audit = rig.reconcile();
        let recoveries = records
            .iter()
            .flat_map(|record| faults_at.iter().filter_map(|fault_at| recovery(record.sent, &record.arrivals, *fault_at)));
        for problem in records.iter().filter_map(|record| record.problem.as_ref()) {
            crate::table::print_text(&format!("{fault}: {problem}"));
        }
        Row {
            fault,
            requests: records.len(),
            failed: records.iter().filter(|record| record.answer_text.is_none()).count(),
            repeated: records.iter().map(|record| record.repeated).sum(),
            resumed: rig.resumed() - self.resumed,
            retried: rig.retried() - self.retried,
            wrong_texts: records
                .iter()
                .filter(|record| record.answer_text.as_ref().is_some_and(|answer_text| *answer_text != expected[record.which]))
                .count(),
            wrong_counts: audit.findings,
            unverified: audit.unverified - self.unverified,
            leaked_blocks: audit.leaked_blocks,
            largest_gap: records.iter().map(|records| largest_gap(&records.arrivals)).max().unwrap_or_default(),
            gap_max,
            recovery: recoveries.max().unwrap_or_default(),
            reconnected,
            // Each scenario waits until a process has detected its fault.
            had_effect: true,
        }
    }
}
