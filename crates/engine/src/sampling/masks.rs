//! The threads that compute masks. Accounts share the time of the threads equally, however many samples they have.

use parking_lot::{Condvar, Mutex};
use std::{
    collections::{BTreeMap, VecDeque},
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{Arc, Weak},
    time::Duration,
};
use tandem_grammar::{Mask, MatchError, Matcher};
use tokio::{sync::Notify, time::Instant};

/// The tokens that may follow; `None` if all tokens may follow.
pub(crate) type MaskResult = Result<Option<Mask>, MatchError>;

/// The state of a sample, locked while a thread computes its mask.
pub(super) struct State {
    pub matcher: Matcher,
    pub mask: Option<MaskResult>,
}

impl State {
    /// Computes the mask. A panic becomes an error of this sample, and its matcher is not used again.
    fn compute(&mut self, mask: impl Fn(&mut Matcher) -> MaskResult) {
        let computed = catch_unwind(AssertUnwindSafe(|| mask(&mut self.matcher)));
        self.mask = Some(computed.unwrap_or(Err(MatchError::Failed)));
    }
}

/// Threads that compute masks. They end when the last clone of this value is dropped.
#[derive(Clone)]
pub(crate) struct MaskThreads(Option<Arc<Owner>>);

struct Owner(Arc<Queue>);

struct Queue {
    turns: Mutex<Turns<Weak<Mutex<State>>>>,
    changed: Condvar,
}

impl Drop for Owner {
    fn drop(&mut self) {
        self.0.turns.lock().is_closed = true;
        self.0.changed.notify_all();
    }
}

impl MaskThreads {
    /// Starts `count` threads, which notify `wake` after each mask.
    ///
    /// # Errors
    /// Fails if the system cannot start this many threads.
    pub fn start(count: usize, wake: Arc<Notify>) -> io::Result<Self> {
        Self::start_with(count, wake, Matcher::mask)
    }

    pub fn start_with(
        count: usize,
        wake: Arc<Notify>,
        mask: impl Fn(&mut Matcher) -> MaskResult + Clone + Send + 'static,
    ) -> io::Result<Self> {
        // If a thread cannot be started, dropping the owner ends the earlier ones.
        let owner = Arc::new(Owner(Arc::new(Queue { turns: Mutex::default(), changed: Condvar::new() })));
        for _ in 0..count {
            let (queue, wake, mask) = (Arc::clone(&owner.0), Arc::clone(&wake), mask.clone());
            let compute = move || queue.compute(&wake, mask);
            std::thread::Builder::new().name("tandem-masks".to_owned()).spawn(compute)?;
        }
        Ok(Self(Some(owner)))
    }

    /// Starts no threads: each mask is computed where it is requested. So the steps of a simulation do not depend on the speed of the machine.
    pub fn none() -> Self {
        Self(None)
    }

    /// Requests the mask of a sample. The sample must have no mask and must not be in the queue.
    pub(super) fn request(&self, account: &Arc<str>, state: &Arc<Mutex<State>>) {
        match &self.0 {
            Some(owner) => {
                owner.0.turns.lock().push(account, Arc::downgrade(state));
                owner.0.changed.notify_one();
            }
            None => state.lock().compute(Matcher::mask),
        }
    }
}

impl Queue {
    fn compute(&self, wake: &Notify, mask: impl Fn(&mut Matcher) -> MaskResult) {
        let mut turns = self.turns.lock();
        while !turns.is_closed {
            let Some((account, state)) = turns.start() else {
                self.changed.wait(&mut turns);
                continue;
            };
            drop(turns);
            let began = Instant::now();
            // Computes no mask if the sample has ended.
            if let Some(state) = state.upgrade() {
                state.lock().compute(&mask);
                wake.notify_one();
            }
            turns = self.turns.lock();
            turns.end(&account, began.elapsed());
        }
    }
}

/// A queue that is fair to accounts: the next job belongs to the account with the fewest running jobs; among accounts with equally many, to
/// the account that has used the least time.
struct Turns<T> {
    accounts: BTreeMap<Arc<str>, Share<T>>,
    /// The greatest used time of an account whose job was started. An account that has had no jobs for a while is treated as if it had used this
    /// time.
    clock: Duration,
    is_closed: bool,
}

struct Share<T> {
    queued: VecDeque<T>,
    running: usize,
    used: Duration,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { accounts: BTreeMap::new(), clock: Duration::ZERO, is_closed: false }
    }
}

impl<T> Turns<T> {
    fn push(&mut self, account: &Arc<str>, job: T) {
        let new = || Share { queued: VecDeque::new(), running: 0, used: self.clock };
        self.accounts.entry(Arc::clone(account)).or_insert_with(new).queued.push_back(job);
    }

    fn start(&mut self) -> Option<(Arc<str>, T)> {
        let waiting = self.accounts.iter_mut().filter(|(_, share)| !share.queued.is_empty());
        let (account, share) = waiting.min_by_key(|(_, share)| (share.running, share.used))?;
        let (account, job) = (Arc::clone(account), share.queued.pop_front()?);
        share.running += 1;
        self.clock = self.clock.max(share.used);
        // An idle account's entry is removed once `clock` has reached the time that the account has used.
        self.accounts.retain(|_, share| !share.queued.is_empty() || share.running > 0 || share.used > self.clock);
        Some((account, job))
    }

    fn end(&mut self, account: &str, took: Duration) {
        if let Some(share) = self.accounts.get_mut(account) {
            share.running -= 1;
            share.used += took;
        }
        if self.accounts.values().all(|share| share.queued.is_empty() && share.running == 0) {
            self.accounts.clear();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Serves `count` jobs of accounts that always have a job; a job of each account takes the given time. Returns each account's time.
    fn served(accounts: &[(&str, u64)], count: usize, queued: usize) -> BTreeMap<Arc<str>, Duration> {
        let (mut turns, mut used) = (Turns::default(), BTreeMap::new());
        for (account, took) in accounts {
            (0..queued).for_each(|_| turns.push(&Arc::from(*account), *took));
        }
        for _ in 0..count {
            let (account, took) = turns.start().expect("a job waits");
            turns.end(&account, Duration::from_millis(took));
            turns.push(&account, took);
            *used.entry(account).or_default() += Duration::from_millis(took);
        }
        used
    }

    #[test]
    fn accounts_get_equal_mask_time_even_if_their_masks_take_different_times() {
        // With one job each, an account is idle between its jobs.
        for queued in [1, 64] {
            let used = served(&[("a", 1), ("b", 10), ("c", 5)], 1_300, queued);
            let (least, most) = (used.values().min().expect("three accounts"), used.values().max().expect("three accounts"));
            assert!(used.len() == 3 && *most - *least <= Duration::from_millis(20), "{used:?}");
        }
    }

    #[test]
    fn account_that_was_idle_gets_no_credit_and_waits_for_one_job_of_another() {
        let mut turns = Turns::default();
        let (busy, quiet): (Arc<str>, Arc<str>) = ("busy".into(), "quiet".into());
        (0..100).for_each(|_| turns.push(&busy, 10));
        for _ in 0..50 {
            let (account, took) = turns.start().expect("a job waits");
            turns.end(&account, Duration::from_millis(took));
        }
        (0..50).for_each(|_| turns.push(&quiet, 10));
        let mut next = || {
            let (account, took) = turns.start().expect("a job waits");
            turns.end(&account, Duration::from_millis(took));
            account
        };
        let order: Vec<_> = (0..10).map(|_| next()).collect();
        assert!(order[..2].contains(&quiet), "{order:?}");
        assert!((4..=6).contains(&order.iter().filter(|account| **account == quiet).count()), "{order:?}");
    }

    #[test]
    fn jobs_of_different_accounts_run_concurrently_and_an_idle_queue_has_no_entries() {
        let mut turns = Turns::default();
        let (many, one): (Arc<str>, Arc<str>) = ("many".into(), "one".into());
        (0..3).for_each(|job| turns.push(&many, job));
        assert_eq!(turns.start(), Some((Arc::clone(&many), 0)));
        turns.push(&one, 9);
        assert_eq!(turns.start(), Some((Arc::clone(&one), 9)));
        turns.end(&one, Duration::from_millis(1));
        assert_eq!(turns.start(), Some((Arc::clone(&many), 1)), "no thread idles while a job waits");
        assert_eq!(turns.start(), Some((Arc::clone(&many), 2)));
        assert_eq!(turns.start(), None);
        (0..3).for_each(|_| turns.end(&many, Duration::from_millis(1)));
        assert!(turns.accounts.is_empty());
    }
}
