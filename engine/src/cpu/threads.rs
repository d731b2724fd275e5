//! The threads that compute one engine's steps, and memory that they use again.

use rayon::{ThreadPool, ThreadPoolBuildError, ThreadPoolBuilder, prelude::*};
use std::sync::{Mutex, PoisonError};

/// One thread is the caller's own; several are a pool whose idle threads sleep after a few microseconds.
pub(super) struct Threads(Option<ThreadPool>);

impl Threads {
    pub fn new(count: usize) -> Result<Self, ThreadPoolBuildError> {
        let pool = || ThreadPoolBuilder::new().num_threads(count).thread_name(|i| format!("engine-{i}")).build();
        Ok(Self((count > 1).then(pool).transpose()?))
    }

    pub fn count(&self) -> usize {
        self.0.as_ref().map_or(1, ThreadPool::current_num_threads)
    }

    /// Runs the work on one of the threads, from which [`Self::for_each`] reaches the others sooner.
    pub fn enter<R: Send>(&self, work: impl FnOnce() -> R + Send) -> R {
        match &self.0 {
            Some(pool) => pool.install(work),
            None => work(),
        }
    }

    /// Does every task once, in any order, and returns when all are done.
    pub fn for_each<T: Send>(&self, tasks: Vec<T>, work: impl Fn(T) + Send + Sync) {
        match &self.0 {
            Some(_) if tasks.len() > 1 => tasks.into_par_iter().with_max_len(1).for_each(work),
            _ => tasks.into_iter().for_each(work),
        }
    }
}

/// Values that tasks borrow one after the other; there are as many as tasks ever ran at the same time.
#[derive(Default)]
pub(super) struct Shelf<T>(Mutex<Vec<T>>);

impl<T: Default> Shelf<T> {
    pub fn with<R>(&self, work: impl FnOnce(&mut T) -> R) -> R {
        let mut value = self.0.lock().unwrap_or_else(PoisonError::into_inner).pop().unwrap_or_default();
        let result = work(&mut value);
        self.0.lock().unwrap_or_else(PoisonError::into_inner).push(value);
        result
    }
}
