//! The thread pool of one engine, and pooled buffers.

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

/// A waiting thread checks its condition this many times before it sleeps. The checks take a few microseconds.
const SPINS: usize = 300;

/// A thread pool whose caller also executes tasks. Idle threads sleep. The caller never waits for a helper thread that has not started on a
/// job: if the machine is busy and has not scheduled a helper, the caller does its work. ADR 003 compares the pool with rayon.
pub(super) struct Threads {
    shared: Arc<Shared>,
    helpers: Vec<JoinHandle<()>>,
}

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    job_added: Condvar,
    helpers_left: Condvar,
    /// `jobs` and `inside` are copies of the fields in `state`, which are read without its lock.
    jobs: AtomicUsize,
    inside: AtomicUsize,
}

#[derive(Default)]
struct State {
    job: Option<&'static (dyn Fn() + Sync)>,
    jobs: usize,
    inside: usize,
    asleep: usize,
    panicked: bool,
    stop: bool,
}

impl Threads {
    /// Starts `count - 1` helper threads.
    ///
    /// # Errors
    /// Fails if the system cannot start a thread.
    pub fn new(count: usize) -> io::Result<Self> {
        let mut threads = Self { shared: Arc::default(), helpers: Vec::new() };
        for i in 1..count {
            let shared = threads.shared.clone();
            threads.helpers.push(Builder::new().name(format!("engine-{i}")).spawn(move || shared.run_helper())?);
        }
        Ok(threads)
    }

    pub fn count(&self) -> usize {
        1 + self.helpers.len()
    }

    /// Runs every task once, in any order, and returns when all are done. A call from within a task runs on the calling thread only.
    ///
    /// # Panics
    /// Panics if a task panics.
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
        // SAFETY: only the lifetime changes. `PostedJob` removes the job and waits until no helper works on it before `job` and its borrows
        // end, whether this function returns or unwinds.
        #[expect(unsafe_code, reason = "a borrowed job is lent to threads that outlive the borrow")]
        let job = unsafe { std::mem::transmute::<&(dyn Fn() + Sync), &'static (dyn Fn() + Sync)>(job) };
        let posted = self.shared.post(job);
        job();
        drop(posted);
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.shared.lock().stop = true;
        self.shared.job_added.notify_all();
        for helper in self.helpers.drain(..) {
            let _ = helper.join();
        }
    }
}

/// A job on which helper threads may work until this value is dropped.
struct PostedJob<'a>(&'a Shared);

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// Offers a job to the helper threads. Returns `None` if there is a job already, or if a helper thread still works on the last job; the caller
    /// must then do all of the work.
    fn post(&self, job: &'static (dyn Fn() + Sync)) -> Option<PostedJob<'_>> {
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
            self.job_added.notify_all();
        }
        Some(PostedJob(self))
    }

    fn run_helper(&self) {
        let mut seen = 0;
        loop {
            spin(|| self.jobs.load(Ordering::Acquire) != seen);
            let mut state = self.lock();
            while state.jobs == seen && !state.stop {
                state.asleep += 1;
                self.job_added.wait(&mut state);
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
                self.helpers_left.notify_one();
            }
        }
    }
}

impl Drop for PostedJob<'_> {
    fn drop(&mut self) {
        self.0.lock().job = None;
        spin(|| self.0.inside.load(Ordering::Acquire) == 0);
        let mut state = self.0.lock();
        while state.inside > 0 {
            self.0.helpers_left.wait(&mut state);
        }
        let panicked = std::mem::take(&mut state.panicked);
        drop(state);
        assert!(!panicked || std::thread::panicking(), "a thread of the engine panicked");
    }
}

/// Busy-waits for a few microseconds at most.
fn spin(until: impl Fn() -> bool) {
    for _ in 0..SPINS {
        if until() {
            return;
        }
        spin_loop();
    }
}

/// Reusable values that tasks borrow. The pool holds at most as many values as tasks have ever run at the same time.
#[derive(Default)]
pub(super) struct BufferPool<T>(Mutex<Vec<T>>);

impl<T: Default> BufferPool<T> {
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
    fn every_task_runs_once_before_the_call_returns() {
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
    fn task_may_start_and_await_further_tasks() {
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
    fn panic_of_a_task_reaches_the_caller_and_the_pool_stays_usable() {
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
