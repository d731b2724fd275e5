//! The requests that wait on one worker for their first tokens, and the speed at which this queue moves.
//!
//! The speed is measured, so it includes everything that limits the worker: its device, its places, its blocks, and the worker that
//! decodes. A period shows the worker's full speed only if work was waiting all the time: if some of the requests that waited at the
//! beginning still wait at the end. Other periods show only a lower bound of the speed.

use std::{collections::BTreeMap, sync::Arc, time::Duration};
use tandem_kv::Priority;
use tokio::time::Instant;

/// The work of a request in addition to its new prompt tokens: about the fixed cost of a step, in tokens.
const REQUEST_TOKENS: u64 = 64;
/// The shortest period over which the speed is measured. If requests wait for less than that, the speed of their queue is not known.
const PERIOD_MIN: Duration = Duration::from_secs(1);
/// The age at which a period has half the weight of the latest one in the measured speed.
const HALF_LIFE: Duration = Duration::from_secs(10);
/// The age after which a measured speed is not used any more.
const SPEED_MAX_AGE: Duration = Duration::from_secs(60);

/// One request in a queue. The default entry stands for a request that is in no queue.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueEntry {
    account: Arc<str>,
    priority: Priority,
    work: u64,
}

impl QueueEntry {
    /// Returns the entry of a request with `new_tokens` prompt tokens to compute.
    pub(crate) fn new(account: Arc<str>, priority: Priority, new_tokens: u64) -> Self {
        Self { account, priority, work: new_tokens + REQUEST_TOKENS }
    }
}

/// The requests that wait on the worker that prefills them.
#[derive(Debug)]
pub(crate) struct PrefillQueue {
    /// The work of the waiting requests by priority and account. Every entry has at least one request.
    waiting: BTreeMap<(Priority, Arc<str>), Equals>,
    summary: QueueSummary,
    period: SpeedPeriod,
    /// The time of the latest sign of progress: a request got its first token, the worker reported that it prefills, or a request joined
    /// the empty queue.
    moved_at: Instant,
    /// The measured speed, and when it was measured; `None` until then.
    speed: Option<(Speed, Instant)>,
}

/// The waiting requests of one account and priority: the work of each, in ascending order, and the sum.
#[derive(Debug, Default)]
struct Equals {
    each: Vec<u64>,
    work: u64,
}

/// What a placement needs to know of most queues.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct QueueSummary {
    /// The number of waiting requests.
    requests: usize,
    /// The priority of all requests; `None` if they differ, or if there are none.
    priority: Option<Priority>,
    /// The least and the most work of a request.
    work: (u64, u64),
}

impl QueueSummary {
    pub(crate) fn is_empty(self) -> bool {
        self.requests == 0
    }

    /// Returns the same as [`PrefillQueue::behind`]; `None` if the summary does not tell.
    pub(crate) fn behind(self, priority: Priority, new_tokens: u64, shortest_first: bool) -> Option<Behind> {
        let (least, most) = self.work;
        let own = new_tokens + REQUEST_TOKENS;
        let requests = match shortest_first {
            _ if self.priority != Some(priority) => return None,
            true if least > own => self.requests,
            true if most > own => return None,
            true | false => 0,
        };
        Some(Behind { requests, share: if requests > 0 { 1.0 } else { 0.0 }, outranked: 0.0 })
    }
}

/// The waiting requests that a worker would serve after a request that joins the queue now.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Behind {
    /// The number of requests behind the new one that have the new one's rank.
    pub(crate) requests: usize,
    /// The part of the queue's work that belongs to `requests`.
    pub(crate) share: f64,
    /// The part of the queue's work that belongs to requests which the new one outranks.
    pub(crate) outranked: f64,
}

/// A period over which the speed is measured.
#[derive(Debug)]
struct SpeedPeriod {
    since: Instant,
    /// The work of all requests that waited at the beginning of the period.
    at_first: u64,
    /// The work of the requests that got their first token.
    served: u64,
    /// The work of all requests that have left the queue.
    left: u64,
}

/// Work, and the time that it took: sums over periods, in which older periods have less weight.
#[derive(Clone, Copy, Debug, Default)]
struct Speed {
    work: f64,
    seconds: f64,
}

/// How a request leaves a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Departure {
    /// With its first token.
    Served,
    /// It was cancelled, or it is placed again.
    Abandoned,
}

impl QueueEntry {
    pub(crate) fn owner(&self) -> (&str, Priority) {
        (&self.account, self.priority)
    }
}

impl PrefillQueue {
    pub(crate) fn new(now: Instant) -> Self {
        Self {
            waiting: BTreeMap::new(),
            summary: QueueSummary::default(),
            period: SpeedPeriod { since: now, at_first: 0, served: 0, left: 0 },
            moved_at: now,
            speed: None,
        }
    }

    pub(crate) fn join(&mut self, request: &QueueEntry, now: Instant) {
        if request.work > 0 {
            let was_empty = self.waiting.is_empty();
            let equals = self.waiting.entry((request.priority, request.account.clone())).or_default();
            equals.each.insert(equals.each.partition_point(|work| *work < request.work), request.work);
            equals.work += request.work;
            self.summarize();
            if was_empty {
                self.moved_at = now;
            }
        }
    }

    /// Records that the worker has computed prompt tokens.
    pub(crate) fn on_prefilling(&mut self, now: Instant) {
        self.moved_at = now;
    }

    /// Removes a request that has joined the queue.
    pub(crate) fn leave(&mut self, QueueEntry { account, priority, work }: &QueueEntry, left: Departure, now: Instant) {
        let key = (*priority, account.clone());
        let Some(equals) = self.waiting.get_mut(&key) else { return };
        let Ok(at) = equals.each.binary_search(work) else { return };
        equals.each.remove(at);
        equals.work -= work;
        if equals.each.is_empty() {
            self.waiting.remove(&key);
        }
        self.summarize();
        self.period.left += work;
        if left == Departure::Served {
            self.period.served += work;
            self.moved_at = now;
        }
        let SpeedPeriod { since, at_first, served, left } = self.period;
        let took = now.duration_since(since);
        if took < PERIOD_MIN {
            return;
        }
        if left >= at_first {
            self.at_least(Speed { work: served as f64, seconds: took.as_secs_f64() }, now);
            self.begin_period(now);
        } else if served * 2 >= at_first {
            // All work of a request is counted when the request leaves, although part of it was done earlier. The error is small once half
            // of the queue has been served.
            self.measure(Speed { work: served as f64, seconds: took.as_secs_f64() }, now);
            self.begin_period(now);
        }
    }

    /// Returns the speed of the queue in work per second; `None`: it is not known.
    pub(crate) fn speed(&self, now: Instant) -> Option<f64> {
        recent(self.measured_speed(), now)
    }

    /// Returns the measured speed, and when it was measured.
    pub(crate) fn measured_speed(&self) -> Option<(f64, Instant)> {
        self.speed.map(|(speed, measured)| (speed.per_second(), measured))
    }

    /// Returns how long `request` would wait if it joined the queue and the queue had this speed. It waits for all work that outranks it,
    /// for all work of its account that it does not outrank, and, because workers serve accounts round-robin, for as much work of every
    /// other account of its rank. If the queue has made no progress for some time, a request with work before it is expected to wait for at
    /// least as long again.
    pub(crate) fn wait(&self, request: &QueueEntry, speed: f64, now: Instant) -> Duration {
        let (mut ahead, mut own, mut others) = (0, 0, BTreeMap::<&str, u64>::new());
        for ((priority, account), Equals { work, .. }) in &self.waiting {
            let same_account = *account == request.account;
            if priority.outranks(request.priority, same_account) {
                own += if same_account && priority.across == request.priority.across { *work } else { 0 };
                ahead += work;
            } else if same_account && *priority == request.priority {
                own += work;
                ahead += work;
            } else if !same_account && priority.across == request.priority.across {
                *others.entry(account).or_default() += work;
            }
        }
        let still = if ahead > 0 { now.duration_since(self.moved_at) } else { Duration::ZERO };
        ahead += others.into_values().map(|work| work.min(own + request.work)).sum::<u64>();
        Duration::try_from_secs_f64(ahead as f64 / speed).unwrap_or(Duration::MAX).max(still)
    }

    /// Returns which waiting requests would be served after a new request: those that the new one outranks and, if the worker computes
    /// short prompts first (`shortest_first`), those of equal rank with more work.
    pub(crate) fn behind(&self, account: &str, priority: Priority, new_tokens: u64, shortest_first: bool) -> Behind {
        let (mut requests, mut behind, mut outranked, mut all) = (0, 0, 0, 0_u64);
        for ((of, owner), Equals { each, work }) in &self.waiting {
            all += work;
            let same_account = **owner == *account;
            if priority.outranks(*of, same_account) {
                outranked += work;
            } else if shortest_first && !of.outranks(priority, same_account) {
                let longer = &each[each.partition_point(|work| *work <= new_tokens + REQUEST_TOKENS)..];
                requests += longer.len();
                behind += longer.iter().sum::<u64>();
            }
        }
        let share = |work: u64| work as f64 / all.max(1) as f64;
        Behind { requests, share: share(behind), outranked: share(outranked) }
    }

    fn work(&self) -> u64 {
        self.waiting.values().map(|equals| equals.work).sum()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn summary(&self) -> QueueSummary {
        self.summary
    }

    fn summarize(&mut self) {
        let mut summary = QueueSummary { work: (u64::MAX, 0), ..QueueSummary::default() };
        for ((priority, _), Equals { each, .. }) in &self.waiting {
            summary.priority = Some(*priority).filter(|priority| summary.requests == 0 || summary.priority == Some(*priority));
            summary.requests += each.len();
            if let (Some(least), Some(most)) = (each.first(), each.last()) {
                summary.work = (summary.work.0.min(*least), summary.work.1.max(*most));
            }
        }
        self.summary = summary;
    }

    fn begin_period(&mut self, now: Instant) {
        self.period = SpeedPeriod { since: now, at_first: self.work(), served: 0, left: 0 };
    }

    /// Adds a period in which work was always waiting to the measured speed.
    fn measure(&mut self, speed: Speed, now: Instant) {
        let (before, measured) = self.speed.unwrap_or((Speed::default(), now));
        let kept = (-now.duration_since(measured).as_secs_f64() / HALF_LIFE.as_secs_f64()).exp2();
        let Speed { work, seconds } = speed;
        self.speed = Some((Speed { work: before.work * kept + work, seconds: before.seconds * kept + seconds }, now));
    }

    /// Raises the measured speed, if there is one, to the speed of a period in which no work may have been waiting for some time.
    fn at_least(&mut self, speed: Speed, now: Instant) {
        if self.speed.is_some_and(|(known, _)| known.per_second() < speed.per_second()) {
            self.speed = Some((speed, now));
        }
    }
}

/// Returns a measured speed unless it is too old to be used.
pub(crate) fn recent(measured: Option<(f64, Instant)>, now: Instant) -> Option<f64> {
    measured.filter(|(_, at)| now.duration_since(*at) <= SPEED_MAX_AGE).map(|(speed, _)| speed)
}

impl Speed {
    fn per_second(self) -> f64 {
        self.work / self.seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(account: &str, new_tokens: u64) -> QueueEntry {
        QueueEntry::new(account.into(), Priority::default(), new_tokens - REQUEST_TOKENS)
    }

    /// Returns how long one more request of the account would wait; `None` if the speed is not known.
    fn wait(queue: &PrefillQueue, account: &str, now: Instant) -> Option<f64> {
        Some(queue.wait(&request(account, 1_000), queue.speed(now)?, now).as_secs_f64())
    }

    /// Returns a queue of `requests` equal requests of 1,000 tokens at the start.
    fn queue(requests: usize, start: Instant) -> PrefillQueue {
        let mut queue = PrefillQueue::new(start);
        (0..requests).for_each(|_| queue.join(&request("a", 1_000), start));
        queue
    }

    /// Lets one request leave and another one join `requests` times, at intervals of `every`. Returns the time at the end.
    fn keeps_moving(queue: &mut PrefillQueue, requests: u32, every: Duration, left: Departure, start: Instant) -> Instant {
        for number in 1..=requests {
            let now = start + every * number;
            queue.leave(&request("a", 1_000), left, now);
            queue.join(&request("a", 1_000), now);
        }
        start + every * requests
    }

    #[test]
    fn estimated_wait_is_the_queued_work_at_the_measured_speed() {
        let start = Instant::now();
        let mut queue = queue(40, start);
        assert_eq!(wait(&queue, "a", start), None, "nothing is known before the queue has moved");
        let now = keeps_moving(&mut queue, 60, Duration::from_millis(100), Departure::Served, start);
        let waits = wait(&queue, "a", now).expect("the speed is known");
        assert!((3.9..4.1).contains(&waits), "{waits}");
        // The worker becomes four times slower. The estimate follows, because newer periods have more weight in the measured speed.
        let now = keeps_moving(&mut queue, 100, Duration::from_millis(400), Departure::Served, now);
        let waits = wait(&queue, "a", now).expect("the speed is known");
        assert!((14.0..16.1).contains(&waits), "{waits}");
        assert_eq!(wait(&queue, "a", now + SPEED_MAX_AGE * 2), None, "an old speed is not used");
        // The worker becomes twenty times faster, so that no request waits for a second any more.
        for number in 1..=200 {
            let now = now + Duration::from_millis(20) * number;
            queue.leave(&request("a", 1_000), Departure::Served, now);
            queue.join(&request("a", 1_000), now);
        }
        let waits = wait(&queue, "a", now + 4 * PERIOD_MIN).expect("the speed is known");
        assert!((0.7..0.9).contains(&waits), "{waits}");
    }

    #[test]
    fn estimated_wait_is_at_least_the_time_since_the_queue_last_moved() {
        let start = Instant::now();
        let mut queue = queue(40, start);
        let now = keeps_moving(&mut queue, 60, Duration::from_millis(100), Departure::Served, start);
        let later = now + Duration::from_secs(20);
        assert!(wait(&queue, "a", now).is_some_and(|waits| waits < 4.2));
        assert_eq!(wait(&queue, "a", later), Some(20.0));
        assert!(wait(&queue, "b", later).is_some_and(|waits| waits < 0.2), "the worker may serve another account at once");
        let (all, mut queue) = (request("a", 1_000), queue);
        (0..39).for_each(|_| queue.leave(&all, Departure::Abandoned, later));
        assert_eq!(wait(&queue, "a", later), Some(20.0), "a request that is cancelled shows no movement");
        queue.leave(&all, Departure::Served, later);
        queue.join(&all, later);
        assert!(wait(&queue, "a", later).is_some_and(|waits| waits < 4.2));
    }

    #[test]
    fn queue_without_a_backlog_has_no_measured_speed() {
        let start = Instant::now();
        // Three requests wait for 0.3 s each. The worker could perhaps serve many more, so its speed is not known.
        let mut short = queue(3, start);
        let now = keeps_moving(&mut short, 200, Duration::from_millis(100), Departure::Served, start);
        assert_eq!(wait(&short, "a", now), None);
        // Nothing is served, because all clients leave.
        let mut abandoned = queue(40, start);
        let now = keeps_moving(&mut abandoned, 200, Duration::from_millis(100), Departure::Abandoned, start);
        assert_eq!(wait(&abandoned, "a", now), None);
        // Short prompts overtake a long one, which the worker computes meanwhile. Their speed is not that of the worker.
        let mut passed = PrefillQueue::new(start);
        passed.join(&request("a", 100_000), start);
        for number in 1..=20 {
            let now = start + Duration::from_millis(500) * number;
            passed.join(&request("a", 100), now);
            passed.leave(&request("a", 100), Departure::Served, now);
        }
        assert_eq!(wait(&passed, "a", start + Duration::from_secs(11)), None);
    }

    #[test]
    fn request_waits_for_as_much_work_of_another_account_as_of_its_own() {
        let start = Instant::now();
        let mut queue = queue(40, start);
        let now = keeps_moving(&mut queue, 60, Duration::from_millis(100), Departure::Served, start);
        let wait = |queue: &PrefillQueue, account| wait(queue, account, now).expect("the speed is known");
        assert!((0.09..0.11).contains(&wait(&queue, "b")), "the first request of an account waits for one of the other account");
        (0..10).for_each(|_| queue.join(&request("b", 1_000), now));
        assert!((2.0..2.2).contains(&wait(&queue, "b")), "{}", wait(&queue, "b"));
        assert!((4.9..5.1).contains(&wait(&queue, "a")), "{}", wait(&queue, "a"));
    }

    #[test]
    fn request_waits_only_for_work_that_it_does_not_outrank() {
        let start = Instant::now();
        let mut queue = queue(40, start);
        let now = keeps_moving(&mut queue, 60, Duration::from_millis(100), Departure::Served, start);
        let speed = queue.speed(now).expect("the speed is known");
        // Account `a` has 4 s of work at 10 requests a second, with the priority 0.
        let request =
            |account: &str, across, within| QueueEntry::new(account.into(), Priority { across, within }, 1_000 - REQUEST_TOKENS);
        let (urgent, later) = (request("a", 0, -5), request("a", 7, 7));
        (0..10).for_each(|_| queue.join(&urgent, now));
        (0..10).for_each(|_| queue.join(&later, now));
        for (request, expected) in [
            (request("a", 0, -5), 1.0),
            (request("a", 0, -6), 0.0),
            (request("a", 0, 0), 5.0),
            (request("a", 7, 7), 6.0),
            (request("a", 6, 6), 5.0),
            // The priority that a client chooses has no effect on other accounts.
            (request("b", 0, -9), 0.1),
            (request("b", 0, 0), 0.1),
            (request("b", 3, 3), 5.0),
            // The operator's ranks precede all accounts.
            (request("b", -1, -1), 0.0),
        ] {
            let waits = queue.wait(&request, speed, now).as_secs_f64();
            assert!((waits - expected).abs() < 0.05 * expected + 0.01, "{request:?}: {waits} s, not {expected} s");
        }
        let behind = |across, within| queue.behind("a", Priority { across, within }, 1_000 - REQUEST_TOKENS, true);
        assert_eq!(behind(7, 7), Behind::default());
        assert_eq!(behind(0, 0), Behind { outranked: 10.0 / 60.0, ..Behind::default() });
        assert_eq!(behind(-1, -1), Behind { outranked: 1.0, ..Behind::default() });
        for (request, count) in [(urgent, 10), (later, 10), (self::request("a", 1_000), 40)] {
            (0..count).for_each(|_| queue.leave(&request, Departure::Abandoned, now));
        }
        assert!(queue.is_empty());
    }

    #[test]
    fn shorter_prompts_of_equal_rank_precede_only_if_the_engine_computes_them_first() {
        let now = Instant::now();
        let mut queue = PrefillQueue::new(now);
        [("a", 500), ("a", 3_000), ("b", 6_500)].into_iter().for_each(|(of, tokens)| queue.join(&request(of, tokens), now));
        let behind =
            |work, shortest_first| queue.behind("a", Priority::default(), work - REQUEST_TOKENS.min(work), shortest_first);
        assert_eq!(behind(100, true), Behind { requests: 3, share: 1.0, outranked: 0.0 });
        assert_eq!(behind(500, true), Behind { requests: 2, share: 0.95, outranked: 0.0 });
        assert_eq!(behind(9_000, true), Behind::default());
        assert_eq!(behind(100, false), Behind::default());
    }

    #[test]
    fn queue_is_empty_when_all_requests_have_left() {
        let start = Instant::now();
        let mut queue = queue(3, start);
        queue.join(&QueueEntry::default(), start);
        for left in [Departure::Served, Departure::Abandoned, Departure::Served] {
            assert!(!queue.is_empty());
            queue.leave(&request("a", 1_000), left, start);
        }
        queue.leave(&QueueEntry::default(), Departure::Served, start);
        assert!(queue.is_empty());
    }
}
