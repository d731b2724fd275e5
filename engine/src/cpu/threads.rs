//! The threads that compute one engine's steps, and memory that they use again.

use parking_lot::{Condvar, Mutex, MutexGuard};
use std::{
    hint::spin_loop,
    io,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    thread::{Builder, JoinHandle},
};

/// How often a thread looks whether there is something to do before it sleeps: a few microseconds.
const LOOKS: usize = 300;

/// The calling thread and its helpers. Who has nothing to do sleeps, and nobody waits for a helper that has not begun: on a busy machine
/// the caller does the work of those who are put off their processors.
pub(super) struct Threads {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// A job has come, or the end.
    come: Condvar,
    /// The last helper has left the job.
    left: Condvar,
    /// Of `state`, to be looked at without its lock.
    jobs: AtomicUsize,
    inside: AtomicUsize,
}

#[derive(Default)]
struct State {
    job: Option<&'static (dyn Fn() + Sync)>,
    /// Jobs that ever came.
    jobs: usize,
    /// Helpers at work on the job.
    inside: usize,
    asleep: usize,
    panicked: bool,
    stop: bool,
}

impl Threads {
    /// Starts all but one of so many.
    pub fn new(count: usize) -> io::Result<Self> {
        let mut threads = Self { shared: Arc::default(), helpers: Vec::new() };
        for i in 1..count {
            let shared = threads.shared.clone();
            threads.helpers.push(Builder::new().name(format!("engine-{i}")).spawn(move || shared.help())?);
        }
        Ok(threads)
    }

    pub fn count(&self) -> usize {
        1 + self.helpers.len()
    }

    /// Does every task once, in any order, and returns when all are done. Within a task: on the thread that calls.
    pub fn for_each<T: Send>(&self, tasks: Vec<T>, work: impl Fn(T) + Sync) {
        if tasks.len() <= 1 || self.helpers.is_empty() {
            return tasks.into_iter().for_each(work);
        }
        let tasks = Mutex::new(tasks.into_iter());
        let next = || tasks.lock().next();
        let job = || {
            while let Some(task) = next() {
                work(task);
            }
        };
        let job: &(dyn Fn() + Sync) = &job;
        // SAFETY: only the lifetime changes. `Given` takes the job back and waits until no helper is inside before `job` and what it borrows
        // end, whether this function returns or unwinds.
        #[expect(unsafe_code, reason = "a borrowed job is lent to threads that outlive the borrow")]
        let job = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(job) };
        let given = self.shared.give(job);
        job();
        drop(given);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.come.notify_all();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

/// A job that helpers may join until this is dropped.
struct Given<'a>(&'a Shared);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// `None` when there is a job already, or somebody still at work on it: whoever is within it goes on alone.
    fn give(&self, job: &'static (dyn Fn() + Sync)) -> Option<Given<'_>> {
        let mut state = self.lock();
        if state.job.is_some() || state.inside > 0 {
            return None;
        }
        state.job = Some(job);
        state.jobs += 1;
        self.jobs.store(state.jobs, Ordering::Release);
        let asleep = state.asleep;
        drop(state);
        if asleep > 0 {
            self.come.notify_all();
        }
        Some(Given(self))
    }

    /// A helper's life.
    fn help(&self) {
        let mut seen = 0;
        loop {
            look(|| self.jobs.load(Ordering::Acquire) != seen);
            let mut state = self.lock();
            while state.jobs == seen && !state.stop {
                state.asleep += 1;
                self.come.wait(&mut state);
                state.asleep -= 1;
            }
            if state.stop {
                return;
            }
            seen = state.jobs;
            let Some(job) = state.job else { continue };
            state.inside += 1;
            self.inside.store(state.inside, Ordering::Release);
            drop(state);
            let panicked = catch_unwind(AssertUnwindSafe(job)).is_err();
            let mut state = self.lock();
            state.panicked |= panicked;
            state.inside -= 1;
            self.inside.store(state.inside, Ordering::Release);
            if state.inside == 0 {
                self.left.notify_one();
            }
        }
    }
}

impl Drop for Given<'_> {
    fn drop(&mut self) {
        self.0.lock().job = None;
        look(|| self.0.inside.load(Ordering::Acquire) == 0);
        let mut state = self.0.lock();
        while state.inside > 0 {
            self.0.left.wait(&mut state);
        }
        let panicked = std::mem::take(&mut state.panicked);
        drop(state);
        assert!(!panicked || std::thread::panicking(), "a thread of the engine panicked");
    }
}

/// Waits a few microseconds at most.
fn look(until: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if until() {
            return;
        }
        spin_loop();
    }
}

/// Values that tasks borrow one after the other; there are as many as tasks ever ran at the same time.
#[derive(Default)]
pub(super) struct Shelf<T>(Mutex<Vec<T>>);

impl<T: Default> Shelf<T> {
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let mut value = self.0.lock().pop().unwrap_or_default();
        let result = work(&mut value);
        self.0.lock().push(value);
        result
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_is_done_once_before_the_call_returns() {
        let threads = Threads::new(4).unwrap();
        for round in 0..2_000 {
            let done: Vec<_> = (0..round % 40).map(|_| AtomicUsize::new(0)).collect();
            threads.for_each(done.iter().collect(), |count: &AtomicUsize| {
                count.fetch_add(1, Ordering::Relaxed);
            });
            assert!(done.iter().all(|count| count.load(Ordering::Relaxed) == 1), "round {round}");
        }
    }

    #[test]
    fn tasks_within_tasks_are_done_too() {
        let threads = Threads::new(3).unwrap();
        let done = AtomicUsize::new(0);
        for _ in 0..200 {
            threads.for_each((0..8).collect(), |_| {
                threads.for_each((0..4).collect(), |_: i32| {
                    done.fetch_add(1, Ordering::Relaxed);
                });
            });
        }
        assert_eq!(done.into_inner(), 200 * 8 * 4);
    }

    #[test]
    fn a_panic_in_a_task_reaches_the_caller_and_the_threads_go_on() {
        let threads = Threads::new(3).unwrap();
        for unlucky in 0..20 {
            let run = || threads.for_each((0..20).collect(), |task| assert_ne!(task, unlucky));
            assert!(catch_unwind(AssertUnwindSafe(run)).is_err());
        }
        let done = AtomicUsize::new(0);
        threads.for_each((0..100).collect(), |_: i32| {
            done.fetch_add(1, Ordering::Relaxed);
        });
        assert_eq!(done.into_inner(), 100);
    }
}
