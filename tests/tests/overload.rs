//! A cluster under four times the load that it can serve, in simulated time. `-- --nocapture` prints the table of docs/reliability.md.

use std::time::Duration;
use tandem_router::PrefillPlace;
use tandem_tests::simulation::overload::{Full, Overload, Overloaded, Sent, run};

const LASTS: Duration = Duration::from_secs(60);
const OVERLOAD: Overload = Overload {
    max_wait: Some(Duration::from_secs(10)),
    load: 4.0,
    lasts: LASTS,
    leaving_percent: 20,
    prefill: PrefillPlace::Auto,
    urgent_percent: 0,
};

fn percentile(times: impl Iterator<Item = Duration>, percent: usize) -> f64 {
    let mut times: Vec<Duration> = times.collect();
    times.sort_unstable();
    times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).map_or(0.0, Duration::as_secs_f64)
}

fn refusals(overloaded: &Overloaded) -> impl Iterator<Item = &Sent> {
    overloaded.requests.iter().filter(|sent| sent.status == Some(503))
}

fn first_tokens(overloaded: &Overloaded) -> impl Iterator<Item = Duration> {
    overloaded.requests.iter().filter_map(|sent| sent.first_token)
}

/// Returns the first tokens a second during the overload, as a fraction of the capacity.
fn goodput(overloaded: &Overloaded) -> f64 {
    let during = overloaded.requests.iter().filter(|sent| sent.first_token.is_some_and(|took| sent.at + took <= LASTS));
    during.count() as f64 / LASTS.as_secs_f64() / overloaded.capacity
}

#[expect(clippy::print_stdout, reason = "the table is in docs/reliability.md")]
fn print(name: &str, overloaded: &Overloaded) {
    let refused = refusals(overloaded).count();
    let errors = overloaded.requests.iter().filter(|sent| sent.status.is_some_and(|status| status != 200)).count() - refused;
    println!(
        "| {name} | {:.1}/s | {} | {refused} | {errors} | {:.0} | {:.1} s | {:.1} s | {:.3} s | {:.2} | {:.1} s |",
        overloaded.capacity,
        overloaded.requests.len(),
        overloaded.failed_attempts,
        percentile(first_tokens(overloaded), 50),
        percentile(first_tokens(overloaded), 99),
        percentile(refusals(overloaded).map(|sent| sent.ended), 99),
        goodput(overloaded),
        overloaded.quiet_after.as_secs_f64(),
    );
}

#[test]
fn overloaded_cluster_serves_at_capacity_and_refuses_the_rest_at_once() {
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local, PrefillPlace::Auto] {
        let overloaded = run(Overload { prefill, ..OVERLOAD }).expect("the cluster becomes idle");
        print(&format!("{prefill:?}"), &overloaded);
        let late = percentile(first_tokens(&overloaded), 99);
        assert!(late <= 12.0, "{prefill:?}: an admitted request waits {late} s for its first token");
        let goodput = goodput(&overloaded);
        assert!(goodput >= 0.9, "{prefill:?}: {goodput} of the capacity is used");
        let refused = percentile(refusals(&overloaded).map(|sent| sent.ended), 99);
        assert!(refused <= 0.1, "{prefill:?}: a refusal takes {refused} s");
        assert!(overloaded.quiet_after <= Duration::from_secs(12), "{prefill:?}: {:?}", overloaded.quiet_after);
        assert_eq!(overloaded.findings, Vec::<String>::new(), "{prefill:?}");
        for sent in &overloaded.requests {
            let answered = sent.status.is_none_or(|status| status == 200 || status == 503);
            assert!(answered, "{prefill:?}: {sent:?}");
        }
        check_retry_after(&overloaded);
    }
}

/// The time after which the speed of every queue is measured. Until then, estimates use prefill rates, which leave out the time that
/// decoding takes.
const MEASURED_AFTER: Duration = Duration::from_secs(10);

/// Checks the `Retry-After` of each refusal that was estimated from measured speeds: the next request is admitted within twice this time
/// and, if this time exceeds a second, not before half of it.
fn check_retry_after(overloaded: &Overloaded) {
    for (at, refused) in
        overloaded.requests.iter().enumerate().filter(|(_, sent)| sent.status == Some(503) && sent.at >= MEASURED_AFTER)
    {
        let seconds = refused.retry_after.expect("a refusal says when to try again");
        let admitted = overloaded.requests[at..].iter().find(|sent| sent.status != Some(503));
        let Some(after) = admitted.map(|sent| (sent.at - refused.at).as_secs_f64()) else { continue };
        assert!(after <= 2.0 * seconds as f64, "{refused:?}: a request was admitted only after {after} s");
        assert!(seconds == 1 || after >= seconds as f64 / 2.0, "{refused:?}: a request was admitted already after {after} s");
    }
}

#[test]
#[ignore = "a comparison for docs/reliability.md"]
fn overloaded_cluster_without_max_wait_is_measured() {
    for prefill in [PrefillPlace::Auto, PrefillPlace::Remote, PrefillPlace::Local] {
        let overloaded = run(Overload { max_wait: None, prefill, ..OVERLOAD }).expect("the cluster becomes idle");
        print(&format!("{prefill:?}, no limit"), &overloaded);
    }
}

/// Long answers hold all places, or all memory, of the workers that decode. In some cases the router knows the lengths of the answers, in
/// others it does not.
#[test]
fn requests_to_a_full_cluster_wait_no_longer_than_their_limit() {
    let places = |prefill| Full {
        prefill,
        batch_max: 8,
        capacity_blocks: 65_536,
        long: 16,
        known_length: false,
        max_wait: Duration::from_secs(10),
    };
    let memory = |prefill| Full { batch_max: 64, capacity_blocks: 900, ..places(prefill) };
    for prefill in [PrefillPlace::Remote, PrefillPlace::Local, PrefillPlace::Auto] {
        for full in [
            places(prefill),
            Full { known_length: true, ..places(prefill) },
            Full { max_wait: Duration::from_secs(1), ..places(prefill) },
            memory(prefill),
        ] {
            let outcome = full.run().expect("the cluster becomes idle");
            let limit = full.max_wait.as_secs_f64() + 2.0;
            let (mut answered, mut at_once) = (0, 0);
            for sent in &outcome.requests {
                match sent.status {
                    Some(200) => {
                        answered += 1;
                        let waited = sent.first_token.expect("an answer has a first token").as_secs_f64();
                        assert!(sent.complete && waited <= limit, "{full:?}: {sent:?}");
                    }
                    Some(503) => {
                        at_once += usize::from(sent.ended < Duration::from_millis(100));
                        assert!(sent.retry_after.is_some() && sent.ended.as_secs_f64() <= limit, "{full:?}: {sent:?}");
                    }
                    _ => panic!("{full:?}: {sent:?}"),
                }
            }
            let refused = outcome.requests.len() - answered;
            print_full(&full, answered, at_once, refused - at_once);
            assert!(outcome.long_complete, "{full:?}");
            // A router knows only the mean number of blocks per sequence, so it predicts exhausted KV memory less well than full batches.
            let foreseen = full.capacity_blocks < 65_536 || 2 * at_once >= refused;
            assert!(foreseen, "{full:?}: only {at_once} of {refused} refusals came at once");
            assert_eq!(outcome.failed_attempts, 0.0, "{full:?}: a prompt was prefilled twice");
            assert_eq!(outcome.findings, Vec::<String>::new(), "{full:?}");
        }
    }
}

#[expect(clippy::print_stdout, reason = "the table is in docs/reliability.md")]
fn print_full(full: &Full, answered: usize, at_once: usize, later: usize) {
    let Full { prefill, batch_max, capacity_blocks, known_length, max_wait, .. } = full;
    println!(
        "| {prefill:?} | {batch_max} | {capacity_blocks} | {known_length} | {max_wait:?} | {answered} | {at_once} | {later} |"
    );
}
