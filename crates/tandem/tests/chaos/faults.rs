//! Tests with a fault of one worker while fifty streams run.

use crate::{
    cluster::{series, until},
    requests::{answer_text, largest_gap, recovery, request, undisturbed},
    rig::{Rig, Shape},
    table::Row,
};
use std::time::Duration;
use tandem_proto::channel::{PING_INTERVAL, PING_TIMEOUT};
use tokio::time::Instant;

const STREAMS: usize = 50;

struct Fault {
    name: &'static str,
    victim: &'static str,
    signal: Signal,
    speedup: &'static str,
    prompt_tokens: usize,
    max_tokens: usize,
    /// Waits until the process is in the phase that the fault must interrupt.
    wait_for_phase: fn(&Rig),
    gap_max: Duration,
}

enum Signal {
    Kill,
    /// Stops the process with SIGSTOP, and continues it with SIGCONT after this time.
    Stop(Duration),
}

/// Waits until all streams have begun and have received ten tokens each on average.
fn streaming(rig: &Rig) {
    let first = "tandem_frontend_time_to_first_token_seconds_count";
    let begun = series(rig.process("f0"), first);
    until("all streams begin", || series(rig.process("f0"), first), |count| *count >= begun.max(2.0 * STREAMS as f64));
    let tokens = "tandem_frontend_inter_token_latency_seconds_count";
    let before = series(rig.process("f0"), tokens);
    until("the streams have tokens", || series(rig.process("f0"), tokens), |count| *count >= before + 10.0 * STREAMS as f64);
}

/// Waits until the prefill worker `p0` computes prompts.
fn prefilling(rig: &Rig) {
    let computed = || series(rig.process("p0"), "tandem_worker_step_duration_seconds_count");
    let before = computed();
    until("the prefill worker computes prompts", computed, |steps| *steps >= before + 4.0);
}

/// Keep-alive closes the connections to a process that does not respond for this time.
const KEEP_ALIVE: Duration = PING_INTERVAL.saturating_add(PING_TIMEOUT);
const SHORT_STOP: Duration = Duration::from_secs(5);
const STOP_BEYOND_KEEP_ALIVE: Duration = Duration::from_secs(25);
/// Time limit, after the loss of a worker, for placing the request again, and for computing and transferring its prompt again.
const RESUME: Duration = Duration::from_millis(500);

const DECODE_KILLED: Fault = Fault {
    name: "kill -9 of a decode worker, streams running",
    victim: "d0",
    signal: Signal::Kill,
    speedup: "10",
    prompt_tokens: 300,
    max_tokens: 400,
    wait_for_phase: streaming,
    gap_max: RESUME,
};

const PREFILL_KILLED: Fault = Fault {
    name: "kill -9 of a prefill worker, 3,000-token prompts",
    victim: "p0",
    prompt_tokens: 3_000,
    max_tokens: 60,
    wait_for_phase: prefilling,
    ..DECODE_KILLED
};

pub fn decode_killed() -> Row {
    run(&DECODE_KILLED)
}

pub fn prefill_killed() -> Row {
    run(&PREFILL_KILLED)
}

/// A decode worker is stopped (SIGSTOP) for less than the keep-alive timeout, so no connection is closed.
pub fn decode_stopped() -> Row {
    let (signal, gap_max) = (Signal::Stop(SHORT_STOP), SHORT_STOP + RESUME);
    run(&Fault { name: "SIGSTOP of a decode worker for 5 s", signal, gap_max, ..DECODE_KILLED })
}

pub fn prefill_stopped() -> Row {
    let (signal, gap_max) = (Signal::Stop(SHORT_STOP), SHORT_STOP + RESUME);
    run(&Fault { name: "SIGSTOP of a prefill worker for 5 s", signal, gap_max, ..PREFILL_KILLED })
}

/// A decode worker is stopped (SIGSTOP) for longer than the keep-alive timeout, so other processes close their connections to it.
pub fn decode_stopped_beyond_keep_alive() -> Row {
    let (signal, gap_max) = (Signal::Stop(STOP_BEYOND_KEEP_ALIVE), KEEP_ALIVE + RESUME);
    run(&Fault { name: "SIGSTOP of a decode worker for 25 s", signal, gap_max, ..DECODE_KILLED })
}

pub fn prefill_stopped_beyond_keep_alive() -> Row {
    let (signal, gap_max) = (Signal::Stop(STOP_BEYOND_KEEP_ALIVE), KEEP_ALIVE + RESUME);
    run(&Fault { name: "SIGSTOP of a prefill worker for 25 s", signal, gap_max, ..PREFILL_KILLED })
}

fn run(fault: &Fault) -> Row {
    let args = ["--sim-speedup", fault.speedup, "--kv-capacity-tokens", "262144"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape { args, ..Shape::default() });
    let requests = |salt: &str| -> Vec<_> {
        (0..STREAMS).map(|number| request(number, salt, fault.prompt_tokens, fault.max_tokens)).collect()
    };
    let expected = undisturbed(&rig.outcomes(rig.send_all(&requests("undisturbed"))));
    assert_eq!((rig.resumed(), rig.retried()), (0, 0));

    let sent_at = Instant::now();
    let pending = rig.send_all(&requests("disturbed"));
    (fault.wait_for_phase)(&rig);
    let fault_at = Instant::now();
    match fault.signal {
        Signal::Kill => rig.kill(fault.victim),
        Signal::Stop(time) => {
            rig.process(fault.victim).signal("-STOP");
            std::thread::sleep(time);
            rig.process(fault.victim).signal("-CONT");
        }
    }
    let disturbed = rig.outcomes(pending);
    if let Signal::Kill = fault.signal {
        rig.restart(fault.victim);
    }
    let fault_ended = Instant::now();
    rig.wait_until_connected();
    let reconnected = fault_ended.elapsed();
    // The prompts are cached now. The same requests must not fail either.
    let afterwards = rig.outcomes(rig.send_all(&requests("disturbed")));

    let of_both = || disturbed.iter().chain(&afterwards).zip(expected.iter().cycle());
    let arrivals = || disturbed.iter().flatten().map(|answer| answer.arrivals.as_slice());
    let audit = rig.reconcile();
    let recovery = arrivals().filter_map(|arrivals| recovery(sent_at, arrivals, fault_at)).max().unwrap_or_default();
    let gap = arrivals().map(largest_gap).max().unwrap_or_default();
    let (resumed, retried) = (rig.resumed(), rig.retried());
    Row {
        fault: fault.name.to_owned(),
        requests: 2 * STREAMS,
        failed: of_both().filter(|(outcome, _)| answer_text(outcome).is_none()).count(),
        repeated: 0,
        resumed,
        retried,
        wrong_texts: of_both()
            .filter(|(outcome, expected)| answer_text(outcome).is_some_and(|answer_text| answer_text != **expected))
            .count(),
        wrong_counts: audit.findings,
        unverified: audit.unverified,
        leaked_blocks: audit.leaked_blocks,
        largest_gap: gap,
        gap_max: fault.gap_max,
        recovery,
        reconnected,
        // On a busy machine, a chunk of every answer may arrive after the signal was sent. Then the measured recovery is too short to show the fault,
        // but the gap between chunks shows it.
        had_effect: resumed + retried > 0 || recovery.max(gap) > Duration::from_secs(1),
    }
}
