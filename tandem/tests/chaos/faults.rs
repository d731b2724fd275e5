//! One fault in the middle of fifty streams.

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

/// A fault: the process it happens to, and its time.
struct Fault {
    name: &'static str,
    victim: &'static str,
    hurt: Hurt,
    speedup: &'static str,
    prompt_tokens: usize,
    max_tokens: usize,
    /// Resolves when the victim is in the middle of its work.
    midst: fn(&Rig),
    gap_max: Duration,
}

enum Hurt {
    Kill,
    Stop(Duration),
}

/// All streams have begun, and each has some tokens, on the average.
fn streaming(rig: &Rig) {
    let first = "tandem_frontend_time_to_first_token_seconds_count";
    let begun = series(rig.up("f0"), first);
    until("all streams begin", || series(rig.up("f0"), first), |count| *count >= begun.max(2.0 * STREAMS as f64));
    let tokens = "tandem_frontend_inter_token_latency_seconds_count";
    let before = series(rig.up("f0"), tokens);
    until("they go on", || series(rig.up("f0"), tokens), |count| *count >= before + 10.0 * STREAMS as f64);
}

/// The victim computes prompts.
fn prefilling(rig: &Rig) {
    let computed = || series(rig.up("p0"), "tandem_worker_step_duration_seconds_count");
    let before = computed();
    until("it computes", computed, |steps| *steps >= before + 4.0);
}

/// What the keep-alive of connections promises: a process that is silent for longer is given up.
const KEEP_ALIVE: Duration = PING_INTERVAL.saturating_add(PING_TIMEOUT);
const SHORT_STOP: Duration = Duration::from_secs(5);
const LONG_STOP: Duration = Duration::from_secs(25);
/// The time after the loss of a worker for another placement, for computing the prompt again, and for its transfer.
const RESUME: Duration = Duration::from_millis(500);

const DECODE_KILLED: Fault = Fault {
    name: "kill -9 of a decode worker, streams running",
    victim: "d0",
    hurt: Hurt::Kill,
    speedup: "10",
    prompt_tokens: 300,
    max_tokens: 400,
    midst: streaming,
    gap_max: RESUME,
};

const PREFILL_KILLED: Fault = Fault {
    name: "kill -9 of a prefill worker, 3,000-token prompts",
    victim: "p0",
    prompt_tokens: 3_000,
    max_tokens: 60,
    midst: prefilling,
    ..DECODE_KILLED
};

pub fn decode_killed() -> Row {
    strike(&DECODE_KILLED)
}

pub fn prefill_killed() -> Row {
    strike(&PREFILL_KILLED)
}

/// Nobody need notice.
pub fn decode_stopped() -> Row {
    let (hurt, gap_max) = (Hurt::Stop(SHORT_STOP), SHORT_STOP + RESUME);
    strike(&Fault { name: "SIGSTOP of a decode worker for 5 s", hurt, gap_max, ..DECODE_KILLED })
}

pub fn prefill_stopped() -> Row {
    let (hurt, gap_max) = (Hurt::Stop(SHORT_STOP), SHORT_STOP + RESUME);
    strike(&Fault { name: "SIGSTOP of a prefill worker for 5 s", hurt, gap_max, ..PREFILL_KILLED })
}

/// The time after which connected processes close their connections to it.
pub fn decode_stopped_for_long() -> Row {
    let (hurt, gap_max) = (Hurt::Stop(LONG_STOP), KEEP_ALIVE + RESUME);
    strike(&Fault { name: "SIGSTOP of a decode worker for 25 s", hurt, gap_max, ..DECODE_KILLED })
}

pub fn prefill_stopped_for_long() -> Row {
    let (hurt, gap_max) = (Hurt::Stop(LONG_STOP), KEEP_ALIVE + RESUME);
    strike(&Fault { name: "SIGSTOP of a prefill worker for 25 s", hurt, gap_max, ..PREFILL_KILLED })
}

fn strike(fault: &Fault) -> Row {
    let args = ["--sim-speedup", fault.speedup, "--kv-capacity-tokens", "262144"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape { args, ..Shape::default() });
    let requests = |salt: &str| -> Vec<_> {
        (0..STREAMS).map(|number| request(number, salt, fault.prompt_tokens, fault.max_tokens)).collect()
    };
    let expected = undisturbed(&rig.outcomes(rig.ask(&requests("undisturbed"))));
    assert_eq!((rig.resumed(), rig.retried()), (0, 0));

    let asked_at = Instant::now();
    let asked = rig.ask(&requests("disturbed"));
    (fault.midst)(&rig);
    let struck = Instant::now();
    match fault.hurt {
        Hurt::Kill => rig.kill(fault.victim),
        Hurt::Stop(time) => {
            rig.up(fault.victim).signal("-STOP");
            std::thread::sleep(time);
            rig.up(fault.victim).signal("-CONT");
        }
    }
    let disturbed = rig.outcomes(asked);
    if let Hurt::Kill = fault.hurt {
        rig.restart(fault.victim);
    }
    let healed = Instant::now();
    rig.whole();
    let whole = healed.elapsed();
    // Nothing fails afterwards, whatever is cached.
    let afterwards = rig.outcomes(rig.ask(&requests("disturbed")));

    let of_both = || disturbed.iter().chain(&afterwards).zip(expected.iter().cycle());
    let arrivals = || disturbed.iter().flatten().map(|answer| answer.arrivals.as_slice());
    let books = rig.close();
    let recovery = arrivals().filter_map(|arrivals| recovery(asked_at, arrivals, struck)).max().unwrap_or_default();
    let gap = arrivals().map(largest_gap).max().unwrap_or_default();
    let (resumed, retried) = (rig.resumed(), rig.retried());
    Row {
        fault: fault.name.to_owned(),
        requests: 2 * STREAMS,
        failed: of_both().filter(|(outcome, _)| answer_text(outcome).is_none()).count(),
        asked_again: 0,
        resumed,
        retried,
        wrong_texts: of_both()
            .filter(|(outcome, expected)| answer_text(outcome).is_some_and(|answer_text| answer_text != **expected))
            .count(),
        wrong_counts: books.wrong,
        unverified: books.unverified,
        leaked_blocks: books.leaked_blocks,
        largest_gap: gap,
        gap_max: fault.gap_max,
        recovery,
        whole,
        // On a busy machine the signal comes late, and every answer gets something after the stroke: then the gap shows it.
        felt: resumed + retried > 0 || recovery.max(gap) > Duration::from_secs(1),
    }
}
