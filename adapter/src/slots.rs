//! The queue in front of an external engine. A request is submitted only when the engine can run it. So the engine's own queue stays short, and
//! limits, fairness and drains work as with Tandem's engine.

use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};
use tandem_engine::Refusal;
use tokio::sync::oneshot;

/// The limits on the number of requests that the engine runs at a time, on their blocks, and on the number of requests that wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLimits {
    /// The maximum number of requests in the engine.
    pub running: usize,
    /// Maximum number of KV blocks that the prompts of all requests in the engine may need together. A request that needs more runs alone.
    pub blocks: u64,
    /// The maximum number of requests that may wait for a place in the engine.
    pub waiting: usize,
}

/// Decides which request is submitted next. Of the accounts with waiting requests, the one with the fewest requests in the engine is next. An
/// account's requests are submitted in the order of their arrival.
pub(crate) struct Slots {
    limits: SlotLimits,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    accounts: BTreeMap<Arc<str>, Account>,
    running: usize,
    blocks: u64,
    waiting: usize,
    arrivals: u64,
}

#[derive(Default)]
struct Account {
    running: usize,
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    arrival: u64,
    blocks: u64,
    granted: oneshot::Sender<Slot>,
}

/// A request's permission to run in the engine. Dropping this value lets the next request run.
pub(crate) struct Slot {
    slots: Arc<Slots>,
    account: Arc<str>,
    blocks: u64,
}

/// A request in the queue. Dropping it removes the request from the queue.
pub(crate) struct QueuedRequest {
    slots: Arc<Slots>,
    account: Arc<str>,
    arrival: u64,
    granted: oneshot::Receiver<Slot>,
}

impl Slots {
    pub fn new(limits: SlotLimits) -> Arc<Self> {
        Arc::new(Self { limits, state: Mutex::default() })
    }

    /// Queues a request whose prompt needs this many blocks.
    ///
    /// # Errors
    /// Fails if the queue is full.
    pub fn enqueue(self: &Arc<Self>, account: &str, blocks: u64) -> Result<QueuedRequest, Refusal> {
        let account: Arc<str> = account.into();
        let (granted, receiver) = oneshot::channel();
        let arrival = {
            let mut state = self.state.lock();
            if state.waiting >= self.limits.waiting && !state.has_room(&self.limits, blocks) {
                return Err(Refusal::Full);
            }
            state.arrivals += 1;
            state.waiting += 1;
            let arrival = state.arrivals;
            state.accounts.entry(Arc::clone(&account)).or_default().waiting.push_back(Waiting { arrival, blocks, granted });
            arrival
        };
        self.grant();
        Ok(QueuedRequest { slots: Arc::clone(self), account, arrival, granted: receiver })
    }

    #[cfg(test)]
    fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.running, state.waiting)
    }

    /// Grants places to waiting requests while there are free places.
    fn grant(self: &Arc<Self>) {
        loop {
            let granted = {
                let mut state = self.state.lock();
                state.next(&self.limits).map(|(account, waiting)| {
                    let slot = Slot { slots: Arc::clone(self), account, blocks: waiting.blocks };
                    (waiting.granted, slot)
                })
            };
            let Some((granted, slot)) = granted else { return };
            // If the request has left the queue meanwhile, sending fails, and the dropped slot is free again.
            drop(granted.send(slot));
        }
    }
}

impl State {
    fn has_room(&self, limits: &SlotLimits, blocks: u64) -> bool {
        self.running == 0 || (self.running < limits.running && self.blocks + blocks <= limits.blocks)
    }

    /// Removes the next request from the queue and returns it; `None` if the queue is empty or there is no place for the request.
    fn next(&mut self, limits: &SlotLimits) -> Option<(Arc<str>, Waiting)> {
        let heads = self.accounts.iter().filter_map(|(name, account)| {
            let head = account.waiting.front()?;
            Some((account.running, head.arrival, head.blocks, Arc::clone(name)))
        });
        let (_, _, blocks, name) = heads.min_by_key(|(running, arrival, ..)| (*running, *arrival))?;
        if !self.has_room(limits, blocks) {
            return None;
        }
        let account = self.accounts.get_mut(&name)?;
        let waiting = account.waiting.pop_front()?;
        account.running += 1;
        self.waiting -= 1;
        self.running += 1;
        self.blocks += blocks;
        Some((name, waiting))
    }
}

impl QueuedRequest {
    /// Waits until the request may run in the engine.
    pub async fn slot(&mut self) -> Slot {
        match (&mut self.granted).await {
            Ok(slot) => slot,
            // The sender is dropped only together with the queue.
            Err(_) => std::future::pending().await,
        }
    }
}

impl Drop for QueuedRequest {
    fn drop(&mut self) {
        let mut state = self.slots.state.lock();
        let Some(account) = state.accounts.get_mut(&self.account) else { return };
        let before = account.waiting.len();
        account.waiting.retain(|waiting| waiting.arrival != self.arrival);
        let removed = before - account.waiting.len();
        if account.running == 0 && account.waiting.is_empty() {
            state.accounts.remove(&self.account);
        }
        state.waiting -= removed;
        drop(state);
        if removed > 0 {
            // The removed request may be one that did not fit, and the requests after it may fit.
            self.slots.grant();
        }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.slots.state.lock();
        state.running -= 1;
        state.blocks -= self.blocks;
        if let Some(account) = state.accounts.get_mut(&self.account) {
            account.running -= 1;
            if account.running == 0 && account.waiting.is_empty() {
                state.accounts.remove(&self.account);
            }
        }
        drop(state);
        self.slots.grant();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    fn slots(running: usize, blocks: u64, waiting: usize) -> Arc<Slots> {
        Slots::new(SlotLimits { running, blocks, waiting })
    }

    fn granted(queued: &mut QueuedRequest) -> Option<Slot> {
        queued.slot().now_or_never()
    }

    #[test]
    fn request_waits_for_a_slot_and_blocks_and_an_oversized_request_runs_alone() {
        let slots = slots(2, 10, 8);
        let mut requests: Vec<QueuedRequest> =
            [4, 4, 1, 20].map(|blocks| slots.enqueue("", blocks).expect("the queue has a free place")).into();
        let first = granted(&mut requests[0]).expect("the first slot is free");
        let second = granted(&mut requests[1]).expect("the second slot is free");
        assert!(granted(&mut requests[2]).is_none(), "both slots are in use");
        drop(first);
        let third = granted(&mut requests[2]).expect("a slot and enough blocks are free");
        drop(second);
        assert!(granted(&mut requests[3]).is_none(), "the request needs more blocks than the engine has");
        drop(third);
        assert!(granted(&mut requests[3]).is_some(), "a request of any size may run alone");
        assert_eq!(slots.counts(), (0, 0));
    }

    #[test]
    fn account_without_running_requests_is_served_before_an_account_with_many() {
        let slots = slots(2, 100, 16);
        let mut many: Vec<QueuedRequest> =
            (0..6).map(|_| slots.enqueue("many", 1).expect("the queue has a free place")).collect();
        let mut few = slots.enqueue("few", 1).expect("the queue has a free place");
        let running =
            [granted(&mut many[0]).expect("the first slot is free"), granted(&mut many[1]).expect("the second slot is free")];
        let [first, _second] = running;
        drop(first);
        assert!(granted(&mut few).is_some(), "the next slot goes to the account without running requests");
    }

    #[test]
    fn full_queue_refuses_requests_until_a_waiting_request_is_dropped() {
        let slots = slots(1, 10, 1);
        let mut first = slots.enqueue("", 1).expect("the queue is empty");
        let running = granted(&mut first).expect("the first slot is free");
        let waiting = slots.enqueue("", 1).expect("the queue has one free place");
        assert!(matches!(slots.enqueue("", 1), Err(Refusal::Full)));
        drop(waiting);
        let mut other = slots.enqueue("", 1).expect("the queue has one free place");
        assert_eq!(slots.counts(), (1, 1));
        drop((first, running));
        assert!(granted(&mut other).is_some());
    }

    #[test]
    fn request_dropped_before_it_uses_its_slot_releases_the_slot() {
        let slots = slots(1, 10, 4);
        let first = slots.enqueue("", 1).expect("the queue is empty");
        let mut second = slots.enqueue("", 1).expect("the queue has a free place");
        assert!(granted(&mut second).is_none());
        drop(first);
        assert!(granted(&mut second).is_some());
    }
}
