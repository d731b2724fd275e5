//! Requests that would wait too long are refused.

use super::*;
use std::{collections::VecDeque, time::Duration};
use tokio::time::advance;

/// Two decode workers. [`Queues::serve`] lets one request get its first token every 50 ms.
struct Queues {
    scenario: Scenario,
    waiting: VecDeque<BookingId>,
}

impl Queues {
    fn new() -> Self {
        Self { scenario: Scenario::with(settings(PrefillPlace::Local), 0, 2), waiting: VecDeque::new() }
    }

    fn place(
        &mut self,
        max_wait: Option<Duration>,
        hashes: Arc<[SequenceHash]>,
        excluded: &[&str],
        attempt: u32,
    ) -> Result<String, PlacementError> {
        let request = PlacementRequest { max_wait, ..self.scenario.request(1_001, hashes) };
        let failed = excluded.iter().map(|instance| (*instance).into()).collect();
        let excluded = Excluded { failed, ..Excluded::default() };
        let (booking, placement) = self.scenario.state.place(&request, &excluded, attempt)?;
        self.waiting.push_back(booking);
        Ok(name(&placement.decode))
    }

    fn add(&mut self, requests: usize, excluded: &[&str]) {
        (0..requests).for_each(|_| drop(self.place(None, [].into(), excluded, 1).expect("a worker is eligible")));
    }

    async fn serve(&mut self, requests: usize) {
        for _ in 0..requests {
            advance(Duration::from_millis(50)).await;
            let booking = self.waiting.pop_front().expect("requests wait");
            self.scenario.state.on_prefilled(booking, Some(0));
            self.scenario.state.release(booking);
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);

#[tokio::test(start_paused = true)]
async fn request_that_would_wait_too_long_is_refused_until_the_queue_is_short_enough() {
    let mut queues = Queues::new();
    queues.add(100, &[]);
    queues.place(Some(SECOND), [].into(), &[], 1).expect("nothing is measured yet");
    for _ in 0..80 {
        queues.serve(1).await;
        queues.add(1, &[]);
    }
    queues.place(Some(6 * SECOND), [].into(), &[], 1).expect("the wait is about 5 s");
    let Err(PlacementError::Overloaded { retry_after }) = queues.place(Some(2 * SECOND), [].into(), &[], 1) else {
        panic!("the wait is about 5 s")
    };
    assert!((2.5..3.5).contains(&retry_after.as_secs_f64()), "{retry_after:?}");
    let metrics = queues.scenario.recorder.render();
    assert!(metrics.contains("tandem_router_overloaded_total 1\n"), "{metrics}");
    queues.place(None, [].into(), &[], 2).expect("an admitted request has no limit later");
    let served = (retry_after.as_secs_f64() * 20.0) as usize;
    queues.serve(served / 2).await;
    queues.place(Some(2 * SECOND), [].into(), &[], 1).expect_err("only half of the time has passed");
    queues.serve(served - served / 2 + 4).await;
    queues.place(Some(2 * SECOND), [].into(), &[], 1).expect("the queue has become shorter");
    while let Some(booking) = queues.waiting.pop_front() {
        queues.scenario.state.release(booking);
    }
    queues.scenario.assert_idle();
}

#[tokio::test(start_paused = true)]
async fn request_is_placed_on_another_worker_if_only_the_cheapest_one_has_a_long_queue() {
    let mut queues = Queues::new();
    let cached = hashes(1, 0, 62);
    queues.scenario.stored("d0", &cached);
    for name in ["d0", "d1"] {
        let load = Load { prefill_tokens_per_second: 1e5, prefill_measurements: 1, ..Load::default() };
        queues.scenario.reports(name, vec![], load, &[]);
    }
    queues.add(40, &["d1-1"]);
    for _ in 0..80 {
        queues.serve(1).await;
        queues.add(1, &["d1-1"]);
    }
    // The worker reports that it has computed the prompts, and the requests still wait for their first tokens.
    let all: Vec<String> = (0..=queues.scenario.requests).map(|number| format!("r{number}")).collect();
    let all: Vec<&str> = all.iter().map(String::as_str).collect();
    queues.scenario.reports("d0", vec![], Load { prefill_tokens_per_second: 1e5, ..Load::default() }, &all);
    assert_eq!(queues.place(None, cached.clone(), &[], 1).expect("there is no limit"), "d0");
    assert_eq!(queues.place(Some(SECOND), cached, &[], 1).expect("the other worker has no queue"), "d1");
}

/// Lets the worker report this prefill rate, and this number of prompt tokens in its queue.
fn report(queues: &mut Queues, name: &str, prefill_tokens_per_second: f64, pending_prefill_tokens: u64) {
    let load = Load { prefill_tokens_per_second, prefill_measurements: 1, pending_prefill_tokens, ..Load::default() };
    let all: Vec<String> = (0..=queues.scenario.requests).map(|number| format!("r{number}")).collect();
    queues.scenario.reports(name, vec![], load, &all.iter().map(String::as_str).collect::<Vec<_>>());
}

/// Returns the `retry_after`, in seconds, of a refused request with a limit of one second on its wait.
fn retry_after(queues: &mut Queues) -> f64 {
    match queues.place(Some(SECOND), [].into(), &[], 1) {
        Err(PlacementError::Overloaded { retry_after }) => retry_after.as_secs_f64(),
        other => panic!("the wait is longer than a second: {other:?}"),
    }
}

#[tokio::test(start_paused = true)]
async fn queue_without_a_measured_speed_is_served_at_three_quarters_of_the_prefill_rate() {
    let mut queues = Queues::new();
    for name in ["d0", "d1"] {
        report(&mut queues, name, 0.0, 30_000);
    }
    queues.place(Some(SECOND), [].into(), &[], 1).expect("no rate is measured, and no answer has ended");
    report(&mut queues, "d0", 1_000.0, 3_000);
    // The mean rate of the other workers is assumed for d1.
    report(&mut queues, "d1", 0.0, 6_000);
    let seconds = retry_after(&mut queues);
    assert!((2.99..3.01).contains(&seconds), "{seconds}");
    report(&mut queues, "d1", 0.0, 700);
    assert_eq!(queues.place(Some(SECOND), [].into(), &[], 1).expect("the queue is short enough"), "d1");
}

#[tokio::test(start_paused = true)]
async fn request_to_a_full_worker_waits_until_an_answer_ends() {
    let mut queues = Queues { scenario: Scenario::new(settings(PrefillPlace::Local)), waiting: VecDeque::new() };
    let full = WorkerInfo { sequences_max: 2, ..info(worker_info::Role::Decode, "d0") };
    queues.scenario.join(full).expect("the worker is the first one");
    let begin = |queues: &mut Queues| {
        queues.add(1, &[]);
        let booking = queues.waiting.pop_front().expect("the request was placed");
        queues.scenario.state.on_first_token(booking);
        queues.scenario.state.on_prefilled(booking, Some(0));
        booking
    };
    // The first answer has 100 tokens in 10 s, so later ones are expected to take as long.
    let measured = begin(&mut queues);
    advance(10 * SECOND).await;
    queues.scenario.state.on_answered(measured, 100);
    queues.scenario.state.release(measured);
    let first = begin(&mut queues);
    advance(2 * SECOND).await;
    let second = begin(&mut queues);
    let seconds = retry_after(&mut queues);
    assert!((6.9..7.1).contains(&seconds), "the first of the two answers ends after 8 s, not {} s", seconds + 1.0);
    queues.scenario.state.release(first);
    queues.place(Some(SECOND), [].into(), &[], 1).expect("a place is free");
    queues.scenario.state.release(second);
}

#[tokio::test(start_paused = true)]
async fn request_that_has_waited_for_its_limit_is_placed_again_only_on_a_worker_with_a_short_wait() {
    let mut queues = Queues::new();
    // The queue of d0 makes no progress, and the request has waited in it.
    queues.add(4, &["d1-1"]);
    advance(10 * SECOND).await;
    let excluded = Excluded { failed: ["d0-1".into()].into(), ..Excluded::default() };
    let request = PlacementRequest { max_wait: None, ..queues.scenario.request(1_001, [].into()) };
    let state = &mut queues.scenario.state;
    let refused = state.place_at_once(&request, None, Some(10 * SECOND));
    assert!(matches!(refused, Err(PlacementError::Overloaded { .. })), "{refused:?}");
    let (booking, placement) = state.place_at_once(&request, Some((&excluded, 2)), Some(10 * SECOND)).expect("d1 is idle");
    assert_eq!(name(&placement.decode), "d1");
    // The queue of d1 makes no progress either.
    advance(12 * SECOND).await;
    let Err(PlacementError::Overloaded { retry_after }) = state.place_at_once(&request, Some((&excluded, 2)), Some(10 * SECOND))
    else {
        panic!("no worker can begin at once")
    };
    assert_eq!(retry_after, 2 * SECOND);
    state.release(booking);
    let metrics = queues.scenario.recorder.render();
    assert!(metrics.contains("tandem_router_overloaded_total 2\n"), "{metrics}");
}
