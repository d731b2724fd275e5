//! A cluster under twice the load that it can serve, in simulated time. A part of the requests has a better priority. `-- --nocapture`
//! prints the table of docs/reliability.md.

use std::time::Duration;
use tandem_router::PrefillPlace;
use tandem_tests::simulation::overload::{Overload, Overloaded, Sent, URGENT, run};

const LASTS: Duration = Duration::from_secs(60);

fn percentile(mut times: Vec<Duration>, percent: usize) -> f64 {
    times.sort_unstable();
    times.get((times.len() * percent / 100).min(times.len().saturating_sub(1))).map_or(0.0, Duration::as_secs_f64)
}

/// Returns the requests of this priority.
fn of(overloaded: &Overloaded, priority: i32) -> Vec<&Sent> {
    overloaded.requests.iter().filter(|sent| sent.priority == priority).collect()
}

fn first_tokens(sent: &[&Sent]) -> Vec<Duration> {
    sent.iter().filter_map(|sent| sent.first_token).collect()
}

fn refused(sent: &[&Sent]) -> usize {
    sent.iter().filter(|sent| sent.status == Some(503)).count()
}

/// Returns the first tokens a second during the overload, as a fraction of the capacity.
fn goodput(overloaded: &Overloaded) -> f64 {
    let during = overloaded.requests.iter().filter(|sent| sent.first_token.is_some_and(|took| sent.at + took <= LASTS));
    during.count() as f64 / LASTS.as_secs_f64() / overloaded.capacity
}

#[expect(clippy::print_stdout, reason = "the table is in docs/reliability.md")]
fn print(prefill: PrefillPlace, overloaded: &Overloaded) {
    let (urgent, others) = (of(overloaded, URGENT), of(overloaded, 0));
    println!(
        "| {prefill:?} | {:.1}/s | {} of {} | {} of {} | {:.2} s | {:.2} s | {:.2} s | {:.2} s | {:.1} s | {:.1} s | {:.2} | {:.1} s |",
        overloaded.capacity,
        refused(&urgent),
        urgent.len(),
        refused(&others),
        others.len(),
        percentile(overloaded.idle_first_tokens.clone(), 99),
        percentile(overloaded.alone_first_tokens.clone(), 99),
        percentile(first_tokens(&urgent), 50),
        percentile(first_tokens(&urgent), 99),
        percentile(first_tokens(&others), 50),
        percentile(first_tokens(&others), 99),
        goodput(overloaded),
        overloaded.quiet_after.as_secs_f64(),
    );
}

#[test]
fn requests_of_the_better_priority_are_not_refused_and_wait_little_on_an_overloaded_cluster() {
    wait_little(PrefillPlace::Remote, 2.25);
}

#[test]
fn requests_of_the_better_priority_wait_little_if_decode_workers_prefill() {
    wait_little(PrefillPlace::Local, 3.0);
}

/// `single_max`: the longest time to a first token, as a multiple of that of a single request to an idle cluster.
fn wait_little(prefill: PrefillPlace, single_max: f64) {
    let overloaded = run(Overload {
        max_wait: Some(Duration::from_secs(10)),
        load: 2.0,
        lasts: LASTS,
        leaving_percent: 20,
        prefill,
        urgent_percent: 10,
    });
    let overloaded = overloaded.expect("the cluster becomes idle");
    print(prefill, &overloaded);
    let (urgent, others) = (of(&overloaded, URGENT), of(&overloaded, 0));
    assert_eq!(refused(&urgent), 0, "{prefill:?}: only requests of the default priority are refused");
    assert!(refused(&others) * 4 > others.len(), "{prefill:?}: the cluster is overloaded");
    let late = percentile(first_tokens(&urgent), 99);
    // Urgent prompts that arrive together wait for each other, on an idle cluster as well.
    let alone = percentile(overloaded.alone_first_tokens.clone(), 99);
    assert!(late <= 2.0 * alone, "{prefill:?}: a first token takes {late} s, and {alone} s without other requests");
    let idle = percentile(overloaded.idle_first_tokens.clone(), 99);
    assert!(late <= single_max * idle, "{prefill:?}: a first token takes {late} s, and {idle} s on an idle cluster");
    let goodput = goodput(&overloaded);
    assert!(goodput >= 0.9, "{prefill:?}: {goodput} of the capacity is used");
    assert!(overloaded.quiet_after <= Duration::from_secs(30), "{prefill:?}: {:?}", overloaded.quiet_after);
    assert_eq!(overloaded.findings, Vec::<String>::new(), "{prefill:?}");
    for sent in &overloaded.requests {
        let answered = match sent.status {
            Some(200) => sent.complete || sent.ended < Duration::from_secs(9),
            Some(503) => sent.retry_after.is_some(),
            // The client left before the response began.
            None => !sent.complete && sent.ended < Duration::from_secs(9),
            Some(_) => false,
        };
        assert!(answered, "{prefill:?}: {sent:?}");
    }
}
