//! Tests of simulations and of cluster searches that read trace files.

use std::{fmt::Write, ops::Deref, time::Duration};
use tandem_load::{
    report::{Report, Slo},
    trace::{Trace, TraceSettings},
};
use tandem_router::PrefillPlace;
use tandem_simulator::{
    ClusterPlan, IdleMisses, PlanSettings, Replay, RoutingRule, SimulateError, SimulatedCluster, SimulatedDevice, Size, plan,
    replay,
};

/// A trace together with its temporary file.
struct TraceFile(Trace, #[allow(dead_code, reason = "the file is removed when it is dropped")] tempfile::NamedTempFile);

impl Deref for TraceFile {
    type Target = Trace;

    fn deref(&self) -> &Trace {
        &self.0
    }
}

fn open(text: &str) -> TraceFile {
    let file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
    std::fs::write(file.path(), text).expect("the file is writable");
    TraceFile(Trace::open(file.path(), TraceSettings::default()).expect("the trace is valid"), file)
}

/// Returns a trace of `count` requests, one every `gap_ms` milliseconds, each with its own prompt of 1,024 tokens and an answer of 11 tokens.
fn steady(count: u64, gap_ms: u64) -> TraceFile {
    let mut text = String::new();
    for number in 0..count {
        let (at, ids) = (number * gap_ms, [number * 2, number * 2 + 1]);
        writeln!(text, "{{\"timestamp\": {at}, \"input_length\": 1024, \"output_length\": 11, \"hash_ids\": {ids:?}}}")
            .expect("a string is writable");
    }
    open(&text)
}

fn simulation(trace: &Trace, cluster: SimulatedCluster) -> Replay<'_> {
    Replay { trace, cluster, speed: 1.0, slo: Slo::default() }
}

fn mixed(workers: usize) -> SimulatedCluster {
    SimulatedCluster::new(RoutingRule::Tandem, Size::Mixed(workers))
}

fn run(replayed: &Replay<'_>) -> Result<Report, SimulateError> {
    replay(replayed, &mut |_| {})
}

#[test]
fn report_has_all_requests_workers_and_settings() {
    let trace = steady(20, 1_000);
    let mut seen = Vec::new();
    let cluster = SimulatedCluster::new(RoutingRule::Dynamo, Size::Split { prefill: 2, decode: 3 });
    let report = replay(&simulation(&trace, cluster), &mut |state| seen.push(state.ended)).expect("the trace can be simulated");
    assert_eq!(
        (report.requests.sent, report.requests.answered, report.tokens.prompt, report.tokens.output),
        (20, 20, 20 * 1_024, 220)
    );
    assert_eq!(seen, (1..=20).collect::<Vec<_>>());
    let names: Vec<&str> = report.workers.iter().map(|worker| &*worker.name).collect();
    assert_eq!(names, ["decode-0", "decode-1", "decode-2", "prefill-0", "prefill-1"]);
    let fact = |name: &str| report.facts.iter().find(|fact| fact.name == name).map(|fact| fact.value.as_str());
    assert_eq!((fact("simulated workers"), fact("policy")), (Some("2 prefill, 3 decode"), Some("dynamo")));
    assert!(report.seconds > 19.0 && report.seconds < 20.0, "{}", report.seconds);
}

#[test]
fn speed_and_concurrency_change_arrival_times() {
    let trace = steady(20, 1_000);
    let faster = run(&Replay { speed: 10.0, ..simulation(&trace, mixed(4)) }).expect("the trace can be simulated");
    assert!(faster.seconds > 1.9 && faster.seconds < 2.2, "{}", faster.seconds);
    let closed =
        run(&simulation(&trace, SimulatedCluster { concurrency: Some(1), ..mixed(4) })).expect("the trace can be simulated");
    let ttft = closed.ttft.expect("all are answered");
    // The prefill of 1,023 tokens takes 55.15 ms, and eleven steps of 6.1 ms follow.
    assert!((ttft.mean_ms - 61.25).abs() < 1e-6 && ttft.max_ms == 61.25, "{ttft:?}");
    assert!((closed.seconds - 20.0 * (0.05515 + 0.0671)).abs() < 1e-6, "{}", closed.seconds);
}

#[test]
fn unusable_traces_and_clusters_are_refused() {
    let (timed, untimed) = (steady(1, 0), open("{\"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}\n"));
    let chat = open("{\"messages\": [{\"role\": \"user\", \"content\": \"a\"}], \"timestamp\": 1}\n");
    let with = |device| SimulatedCluster { device, ..mixed(1) };
    let only_prefill = SimulatedCluster::new(RoutingRule::Tandem, Size::Split { prefill: 1, decode: 0 });
    let slow = SimulatedDevice { prefill_tokens_per_second: 1e-300, ..SimulatedDevice::default() };
    for (replayed, expected) in [
        (simulation(&chat, mixed(1)), "no `hash_ids`"),
        (simulation(&untimed, mixed(1)), "set --concurrency"),
        (
            simulation(&timed, with(SimulatedDevice { capacity_tokens: 511, ..SimulatedDevice::default() })),
            "smaller than a block of 512",
        ),
        (simulation(&timed, only_prefill), "no decode worker"),
        (simulation(&timed, with(slow)), "over 10000 days"),
        (Replay { speed: 1e-300, ..simulation(&steady(2, 1), mixed(1)) }, "over 10000 days"),
        (simulation(&timed, SimulatedCluster { prefill: PrefillPlace::Remote, ..mixed(1) }), "set --prefill-workers"),
    ] {
        let error = run(&replayed).expect_err("it is refused").to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn untimed_trace_can_be_simulated_in_a_closed_loop() {
    let trace = open("{\"input_length\": 5, \"output_length\": 1, \"hash_ids\": []}\n");
    let report =
        run(&simulation(&trace, SimulatedCluster { concurrency: Some(2), ..mixed(1) })).expect("the trace can be simulated");
    assert_eq!(report.requests.answered, 1);
}

fn search(trace: &Trace, slo: Slo, share: f64, workers_max: usize) -> ClusterPlan {
    let replayed = Replay { slo, ..simulation(trace, mixed(1)) };
    plan(&replayed, &PlanSettings { share, workers_max }, &mut |_, _| {}).expect("the trace can be simulated")
}

fn meets(trace: &Trace, slo: Slo, size: Size) -> f64 {
    let report = run(&Replay { slo, ..simulation(trace, mixed(1).with_size(size)) }).expect("the trace can be simulated");
    report.goodput.expect("levels are set").share
}

#[test]
fn plan_finds_the_smallest_cluster() {
    // A request arrives every 20 ms and needs 55.2 ms of prefill, so about three workers are needed.
    let trace = steady(400, 20);
    let slo = Slo { ttft: Some(Duration::from_millis(200)), itl: Some(Duration::from_millis(60)), e2e: None };
    let found = search(&trace, slo, 0.95, 64);
    let mixed = found.mixed.expect("64 workers suffice");
    let Size::Mixed(workers) = mixed.size else { panic!("{}", mixed.size) };
    assert!((3..=6).contains(&workers), "{workers}");
    assert!(meets(&trace, slo, mixed.size) >= 0.95 && meets(&trace, slo, Size::Mixed(workers - 1)) < 0.95);
    let split = found.split.expect("64 workers suffice");
    assert!(matches!(split.size, Size::Split { .. }) && meets(&trace, slo, split.size) >= 0.95, "{}", split.size);
    assert_eq!(mixed.report.goodput.map(|goodput| goodput.share), Some(meets(&trace, slo, mixed.size)));
}

#[test]
fn plan_finds_no_cluster_if_the_maximum_size_is_too_small() {
    // Two workers compute less than 36 prompts per second, and 50 arrive.
    let trace = steady(200, 20);
    let slo = Slo { ttft: Some(Duration::from_millis(1_500)), ..Slo::default() };
    let found = search(&trace, slo, 0.99, 2);
    assert!(found.smallest().is_none() && found.tried.len() == 3 && !found.tried.iter().any(|tried| tried.meets), "{found:?}");
    assert_eq!(found.nearest.first().map(|trial| trial.size), Some(Size::Mixed(2)), "one worker serves less than half in time");
    assert_eq!(found.tried[1].share, Some(meets(&trace, slo, Size::Mixed(2))));
    assert_eq!((found.tried[0].share, &*found.tried[0].name), (None, "1 mixed"));
}

/// Returns the numbers of requests in the trace `text` that miss the service levels on any cluster.
fn hopeless(text: &str, slo: Slo) -> IdleMisses {
    let trace = open(text);
    let found = search(&trace, slo, 1.0, 64);
    assert!(found.tried.is_empty() && found.smallest().is_none(), "{found:?}");
    found.idle
}

#[test]
fn plan_simulates_nothing_if_no_cluster_of_any_size_is_fast_enough() {
    let row = |at: u64, ids: &[u64], answer: u64| {
        let tokens = 512 * ids.len();
        format!("{{\"timestamp\": {at}, \"input_length\": {tokens}, \"output_length\": {answer}, \"hash_ids\": {ids:?}}}\n")
    };
    // The prompts need 61.25, 112.45 and 61.25 ms on an idle worker: the last one has half of its blocks in common with the second one.
    let text = row(0, &[1, 2], 11) + &row(1_000, &[3, 4, 5, 6], 1) + &row(2_000, &[3, 4, 7, 8], 100);
    let ms = |ms| Some(Duration::from_micros((ms * 1e3) as u64));
    let found = hopeless(&text, Slo { ttft: ms(61.25), ..Slo::default() });
    assert_eq!(found, IdleMisses { requests: 3, any: 1, ttft: 1, itl: 0, e2e: 0 });
    let found = hopeless(&text, Slo { ttft: ms(70.0), itl: ms(6.0), e2e: ms(600.0) });
    assert_eq!(found, IdleMisses { requests: 3, any: 3, ttft: 1, itl: 2, e2e: 1 });
}

#[test]
fn times_on_an_idle_worker_equal_the_simulated_times() {
    let trace =
        open("{\"timestamp\": 0, \"input_length\": 5000, \"output_length\": 40, \"hash_ids\": [1, 2, 3, 4, 5, 6, 7, 8, 9]}\n");
    let report = run(&simulation(&trace, mixed(1))).expect("the trace can be simulated");
    let (ttft, e2e) = (report.ttft.expect("it is answered").max_ms, report.e2e.expect("it is answered").max_ms);
    for (slack, misses) in [(0.001, 0), (-0.001, 1)] {
        let level = |ms: f64| Some(Duration::from_secs_f64((ms + slack) / 1e3));
        for slo in [Slo { ttft: level(ttft), ..Slo::default() }, Slo { e2e: level(e2e), ..Slo::default() }] {
            assert_eq!(search(&trace, slo, 1.0, 1).idle.any, misses, "{slo:?}");
        }
    }
}
