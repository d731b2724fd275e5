//! Estimates when a request gets a place, and memory for its prompt, on the worker that decodes its answer.
//!
//! Engines serve accounts round-robin: a request competes with all sequences of its own account, and with as many of every other account.
//! If the worker has too few places or too little memory for these, some running answers have to end first. Tandem's own engines preempt
//! other requests' samples after the first instead (docs/adr/021-fair-shares.md), so on them a request competes only with the first sample
//! of each other request.
//!
//! An answer is expected to end at the usual length of answers with a similar limit. A longer answer is expected to continue for as long as
//! it is overdue. So the longer a worker's answers run, the longer the worker is expected to stay full.

use std::{collections::HashMap, sync::Arc, time::Duration};
use tandem_kv::Priority;
use tokio::time::Instant;

/// An answer that runs on a worker, or that will run there when its prompt is prefilled.
#[derive(Clone, Debug)]
pub(crate) struct BookedAnswer {
    /// The account of the request. Account and priority have their default values if another router has placed the request.
    pub(crate) account: Arc<str>,
    pub(crate) priority: Priority,
    pub(crate) length: Length,
    pub(crate) samples: u32,
    /// Time at which the router learned that the prompt was prefilled; `None`: the request still waits, or its prompt is being prefilled.
    pub(crate) since: Option<Instant>,
}

/// The expected length of an answer and its limits, in tokens of one sample.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Length {
    pub(crate) expected: f64,
    pub(crate) min: u32,
    /// The limit on the length; 0: not known.
    pub(crate) max: u32,
}

/// The places in the batch and the memory of a worker, for which one request competes.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Room {
    /// The number of sequences that the worker computes at once; 0: not known.
    pub(crate) sequences_max: u32,
    /// The number of sequences that run or wait on the worker.
    pub(crate) sequences: u32,
    /// The number of sequences that have blocks.
    pub(crate) running: u32,
    pub(crate) in_use_blocks: u32,
    pub(crate) available_blocks: u32,
    /// The number of blocks that the request's prompt takes.
    pub(crate) wanted_blocks: u32,
    /// Whether the engine preempts other requests' samples after the first in favour of this request.
    pub(crate) samples_yield: bool,
}

/// The mean speed of the answers that have ended.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct AnswerPace {
    /// The mean time of an answer.
    pub(crate) answer: Duration,
    /// The mean time of a token.
    pub(crate) token: Duration,
}

impl BookedAnswer {
    /// Returns the expected number of tokens of the answer, all samples together.
    pub(crate) fn tokens(&self) -> u64 {
        self.length.expected as u64 * u64::from(self.samples)
    }

    /// Returns the expected time until the answer ends or, if it does not run yet, the expected time from its start to its end.
    fn remaining(&self, pace: AnswerPace, now: Instant) -> Duration {
        let took = self.since.map_or(Duration::ZERO, |since| now.duration_since(since));
        let Length { expected, min, max } = self.length;
        let expected = pace.token.mul_f64(expected.max(min.into()));
        if took <= expected {
            return expected - took;
        }
        let longest = pace.token.saturating_mul(max).saturating_sub(took);
        let outlived = took - expected;
        // An answer that runs for longer than its `max_tokens` take at the mean speed is slower than others, so the limit says nothing
        // about it.
        if longest.is_zero() { outlived } else { outlived.min(longest) }
    }
}

impl Room {
    /// Returns how long a request of this account and priority waits for a place and for its memory. `booked` has all answers on the
    /// worker.
    pub(crate) fn wait<'a>(
        &self,
        booked: impl Iterator<Item = &'a BookedAnswer> + Clone,
        (account, priority): (&str, Priority),
        pace: AnswerPace,
        now: Instant,
    ) -> Duration {
        let room = if self.samples_yield { self.without_further_samples(booked.clone()) } else { *self };
        let Some(may_precede) = room.may_precede() else { return Duration::ZERO };
        let (mut own, mut others) = (Preceding::default(), HashMap::<&str, Preceding>::new());
        for answer in booked {
            let same_account = *answer.account == *account;
            // A running sequence keeps its place, even if the request outranks it.
            if answer.since.is_some() || !priority.outranks(answer.priority, same_account) {
                let of_account = if same_account { &mut own } else { others.entry(&answer.account).or_default() };
                let ends = if answer.since.is_some() { &mut of_account.running } else { &mut of_account.waiting };
                ends.push((answer.remaining(pace, now), if self.samples_yield { 1 } else { answer.samples.into() }));
            }
        }
        let share = count(&own.running) + count(&own.waiting) + 1;
        for other in others.into_values() {
            let running = first(other.running, share);
            own.waiting.extend(first(other.waiting, share - count(&running)));
            own.running.extend(running);
        }
        own.time_until(may_precede, pace.answer)
    }

    /// Returns the state of the worker if only the first sample of each request had a place and blocks. All sequences are assumed to have
    /// equally many blocks.
    fn without_further_samples<'a>(&self, booked: impl Iterator<Item = &'a BookedAnswer>) -> Self {
        let (mut further, mut further_running) = (0_u32, 0_u32);
        for answer in booked {
            let samples = answer.samples.saturating_sub(1);
            further = further.saturating_add(samples);
            further_running = further_running.saturating_add(if answer.since.is_some() { samples } else { 0 });
        }
        let running = self.running.saturating_sub(further_running);
        let kept = u64::from(self.in_use_blocks) * u64::from(running) / u64::from(self.running.max(1));
        let in_use_blocks = u32::try_from(kept).unwrap_or(u32::MAX);
        let yielded = self.in_use_blocks - in_use_blocks;
        Self {
            sequences: self.sequences.saturating_sub(further),
            running,
            in_use_blocks,
            available_blocks: self.available_blocks.saturating_add(yielded),
            ..*self
        }
    }

    /// Returns how many sequences may remain on the worker when the request gets its place and its blocks; `None`: the worker is not full.
    fn may_precede(&self) -> Option<u64> {
        let Self { sequences_max, sequences, running, in_use_blocks, available_blocks, wanted_blocks, .. } = *self;
        let by_places = (sequences_max > 0 && sequences >= sequences_max).then(|| u64::from(sequences_max) - 1);
        let lacks_memory = in_use_blocks > 0 && wanted_blocks > available_blocks;
        let by_memory = lacks_memory.then(|| {
            let left = (u64::from(in_use_blocks) + u64::from(available_blocks)).saturating_sub(wanted_blocks.into());
            left * u64::from(running) / u64::from(in_use_blocks)
        });
        by_places.into_iter().chain(by_memory).min()
    }
}

/// Numbers of sequences, each with the time after which they end.
type Ends = Vec<(Duration, u64)>;

/// The sequences that precede a request. The time of a waiting sequence is counted from its own start.
#[derive(Default)]
struct Preceding {
    running: Ends,
    waiting: Ends,
}

impl Preceding {
    /// Returns the time until at most `may_precede` of the sequences have not ended. Waiting sequences take the free places first. Each
    /// further waiting sequence takes the place of one that ends, and keeps it for the time `answer`.
    fn time_until(mut self, may_precede: u64, answer: Duration) -> Duration {
        let to_end = (count(&self.running) + count(&self.waiting)).saturating_sub(may_precede);
        let free = (may_precede + 1).saturating_sub(count(&self.running));
        self.running.extend(first(self.waiting, free));
        let placed = count(&self.running);
        if to_end == 0 || placed == 0 {
            return Duration::ZERO;
        }
        let rounds = u32::try_from((to_end - 1) / placed).unwrap_or(u32::MAX);
        let nth = (to_end - 1) % placed + 1;
        let last = first(self.running, nth).last().map_or(Duration::ZERO, |(end, _)| *end);
        last.saturating_add(answer.saturating_mul(rounds))
    }
}

fn count(sequences: &Ends) -> u64 {
    sequences.iter().map(|(_, count)| count).sum()
}

/// Returns the `max` sequences that end first, or all if there are fewer, in the order of their ends.
fn first(mut sequences: Ends, mut max: u64) -> Ends {
    sequences.sort_unstable();
    for (_, count) in &mut sequences {
        *count = (*count).min(max);
        max -= *count;
    }
    sequences.retain(|(_, count)| *count > 0);
    sequences
}

#[cfg(test)]
mod tests {
    use super::*;

    const PACE: AnswerPace = AnswerPace { answer: Duration::from_secs(2), token: Duration::from_millis(10) };

    /// Returns an answer that is expected to have 200 tokens and has been running for `took` seconds; `None`: it waits.
    fn answer(account: &str, took: Option<u64>, now: Instant) -> BookedAnswer {
        let length = Length { expected: 200.0, min: 0, max: 5_000 };
        let since = took.map(|took| now - Duration::from_secs(took));
        BookedAnswer { account: account.into(), priority: Priority::default(), length, samples: 1, since }
    }

    fn places(sequences_max: u32, sequences: usize) -> Room {
        let sequences = sequences as u32;
        Room {
            sequences_max,
            sequences,
            running: sequences,
            in_use_blocks: 0,
            available_blocks: 1_000,
            wanted_blocks: 10,
            samples_yield: false,
        }
    }

    fn wait(room: Room, booked: &[BookedAnswer], account: &str, pace: AnswerPace, now: Instant) -> f64 {
        room.wait(booked.iter(), (account, Priority::default()), pace, now).as_secs_f64()
    }

    fn now() -> Instant {
        Instant::now() + Duration::from_secs(1_000)
    }

    #[test]
    fn request_waits_until_an_answer_ends_if_all_places_are_taken() {
        let now = now();
        let two = [answer("a", Some(0), now), answer("a", Some(1), now)];
        assert_eq!(wait(places(3, 2), &two, "a", PACE, now), 0.0, "a place is free");
        assert_eq!(wait(places(0, 2), &two, "a", PACE, now), 0.0, "the number of places is not known");
        assert_eq!(wait(places(2, 2), &two, "a", PACE, now), 1.0, "the older answer ends first");
        let queue: Vec<_> = two.into_iter().chain((0..3).map(|_| answer("a", None, now))).collect();
        // The places become free after 1 and 2 s, and again after 3 and 4 s.
        assert_eq!(wait(places(2, 5), &queue, "a", PACE, now), 4.0);
        // Waiting answers fill the free places first. The first of the five then running ends after a second.
        assert_eq!(wait(places(5, 5), &queue, "a", PACE, now), 1.0);
        assert_eq!(wait(places(6, 5), &queue, "a", PACE, now), 0.0);
    }

    #[test]
    fn overdue_answer_is_expected_to_continue_for_as_long_as_it_is_overdue() {
        let now = now();
        let full = |took| [answer("a", Some(took), now), answer("a", Some(took), now)];
        let waits = [2, 10, 20, 45].map(|took| wait(places(2, 2), &full(took), "a", PACE, now));
        // At 10 ms per token, the limit of 5,000 tokens is reached after 50 s.
        assert_eq!(waits, [0.0, 8.0, 18.0, 5.0]);
        assert_eq!(wait(places(2, 2), &full(60), "a", PACE, now), 58.0, "slower than others");
        assert_eq!(wait(places(2, 2), &full(7), "a", AnswerPace::default(), now), 7.0, "nothing is measured yet");
        let mut certain = full(1);
        certain.iter_mut().for_each(|answer| answer.length.min = 3_000);
        assert_eq!(wait(places(2, 2), &certain, "a", PACE, now), 29.0);
    }

    #[test]
    fn request_competes_with_as_many_answers_of_another_account_as_of_its_own() {
        let now = now();
        let busy: Vec<_> = (0..8).map(|_| answer("a", Some(100), now)).collect();
        assert_eq!(wait(places(8, 8), &busy, "b", PACE, now), 0.0, "the account has its share of the places");
        let own = busy.into_iter().chain((0..4).map(|took| answer("b", Some(took), now))).collect::<Vec<_>>();
        assert_eq!(wait(places(8, 12), &own, "b", PACE, now), 1.0, "four answers of its own and five others precede it");
    }

    #[test]
    fn request_without_enough_blocks_waits_until_answers_end() {
        let now = now();
        let booked = [answer("a", Some(0), now), answer("a", Some(1), now)];
        let room = Room { running: 2, in_use_blocks: 100, available_blocks: 9, ..places(64, 2) };
        assert_eq!(wait(room, &booked, "a", PACE, now), 1.0);
        assert_eq!(wait(Room { wanted_blocks: 9, ..room }, &booked, "a", PACE, now), 0.0);
        assert_eq!(wait(Room { wanted_blocks: 90, ..room }, &booked, "a", PACE, now), 2.0, "both have to end");
    }

    #[test]
    fn further_samples_of_other_requests_delay_a_request_only_if_the_engine_does_not_preempt_them() {
        let now = now();
        let mut booked: Vec<_> = (0..10).map(|_| answer("a", Some(0), now)).collect();
        booked.iter_mut().for_each(|answer| answer.samples = 128);
        // All places and all memory are taken by 256 of 1,280 sequences.
        let full = Room { running: 256, in_use_blocks: 1_000, available_blocks: 0, ..places(256, 1_280) };
        assert_eq!(wait(full, &booked, "a", PACE, now), 2.0);
        let yields = Room { samples_yield: true, ..full };
        assert_eq!(wait(yields, &booked, "a", PACE, now), 0.0);
        let places = Room { sequences_max: 10, ..yields };
        assert_eq!(wait(places, &booked, "a", PACE, now), 2.0, "the first samples of ten requests fill ten places");
        // Of 1,280 running sequences, 1,270 are further samples. Their 1,270 blocks become available if they are preempted.
        let running = Room { running: 1_280, in_use_blocks: 1_280, wanted_blocks: 1_271, ..yields };
        assert_eq!(wait(running, &booked, "a", PACE, now), 2.0);
        assert_eq!(wait(Room { wanted_blocks: 1_270, ..running }, &booked, "a", PACE, now), 0.0);
    }
}
