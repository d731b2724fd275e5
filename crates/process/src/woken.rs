//! A future or a stream that is polled only when it has been woken.

use futures::{Stream, task::AtomicWaker};
use std::{
    fmt,
    pin::Pin,
    sync::{
        Arc,
        atomic::{
            AtomicBool,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
    task::{Context, Poll, Wake, Waker},
};

/// A future or a stream of a task that is polled often for other reasons: this value costs little while nothing new happens in it.
///
/// `futures::stream::FuturesUnordered` filters polls, too, but it wakes its task again after each poll of all its futures.
pub struct Woken<T> {
    inner: T,
    wakes: Arc<Wakes>,
    /// Wakes `wakes`.
    waker: Waker,
}

struct Wakes {
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl Wake for Wakes {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.is_woken.store(true, Release);
        self.task.wake();
    }
}

impl<T> Woken<T> {
    /// Wraps a future or a stream.
    pub fn new(inner: T) -> Self {
        let wakes = Arc::new(Wakes { is_woken: AtomicBool::new(true), task: AtomicWaker::new() });
        Self { inner, waker: Waker::from(Arc::clone(&wakes)), wakes }
    }

    /// Returns whether this value has been woken, or was ready, since it was polled for the last time.
    pub fn is_woken(&self) -> bool {
        self.wakes.is_woken.load(Acquire)
    }

    fn poll_with<R>(&mut self, context: &mut Context<'_>, poll: impl FnOnce(&mut T, &mut Context<'_>) -> Poll<R>) -> Poll<R> {
        self.wakes.task.register(context.waker());
        if !self.wakes.is_woken.swap(false, AcqRel) {
            return Poll::Pending;
        }
        let polled = poll(&mut self.inner, &mut Context::from_waker(&self.waker));
        if polled.is_ready() {
            self.wakes.is_woken.store(true, Release);
        }
        polled
    }
}

impl<T> fmt::Debug for Woken<T> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_struct("Woken").finish_non_exhaustive()
    }
}

impl<F: Future + Unpin> Future for Woken<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        self.poll_with(context, |inner, context| Pin::new(inner).poll(context))
    }
}

impl<S: Stream + Unpin> Stream for Woken<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        self.poll_with(context, |inner, context| Pin::new(inner).poll_next(context))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::{StreamExt, stream, task::noop_waker};
    use std::cell::Cell;

    #[test]
    fn stream_is_polled_once_for_each_wake_and_until_it_is_pending() {
        let (polls, items, waker) = (Cell::new(0), Cell::new(2), Cell::new(noop_waker()));
        let mut woken = Woken::new(stream::poll_fn(|context| {
            polls.set(polls.get() + 1);
            waker.set(context.waker().clone());
            if items.get() == 0 {
                return Poll::Pending;
            }
            items.set(items.get() - 1);
            Poll::Ready(Some(()))
        }));
        let task = Arc::new(Wakes { is_woken: AtomicBool::new(false), task: AtomicWaker::new() });
        let task_waker = Waker::from(Arc::clone(&task));
        let mut poll = |waker: &Waker| woken.poll_next_unpin(&mut Context::from_waker(waker)).is_ready();
        let is_woken = || task.is_woken.swap(false, AcqRel);
        let polled: Vec<bool> = (0..5).map(|_| poll(&noop_waker())).collect();
        assert_eq!((polled, polls.get(), is_woken()), (vec![true, true, false, false, false], 3, false));
        // The last task that polled is woken, even if the stream was not polled for it.
        assert!(!poll(&task_waker));
        items.set(1);
        waker.replace(noop_waker()).wake();
        assert!(is_woken() && poll(&task_waker) && !poll(&task_waker) && !poll(&task_waker));
        assert_eq!((polls.get(), is_woken()), (5, false));
    }
}
