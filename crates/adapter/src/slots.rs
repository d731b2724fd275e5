//! The queue in front of an external engine. A request is submitted only when the engine can run it. So the engine's own queue stays short, and
//! limits, fairness and drains work as with Tandem's engine.

use parking_lot::Mutex;
use std::{collections::BTreeMap, sync::Arc};
use tandem_engine::Refusal;
use tandem_kv::Priority;
use tokio::sync::oneshot;

/// The limits on the number of requests that the engine runs at a time, on their blocks, and on the number of requests that wait.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SlotLimits {
    /// The maximum number of requests in the engine.
    pub running: usize,
    /// Maximum number of KV blocks that the prompts of all requests in the engine may need together. A request that needs more runs alone.
    pub blocks: u64,
    /// The maximum number of requests that may wait for a slot in the engine.
    pub waiting: usize,
}

/// Of this many submitted requests, one is the oldest in the queue, whatever its priority, so that no request starves.
const OLDEST_EVERY: u64 = 8;

/// A flow is the requests of one account that have one rank across accounts. The fields are the rank (the lowest is served first) and the
/// account.
type SlotFlow = (i32, Arc<str>);
/// The order in which a flow's requests are submitted: by priority within the account, then by arrival.
type SlotOrder = (i32, u64);

/// Decides which request is submitted next: one of the flow with the fewest requests in the engine, among the flows that no other flow outranks. One
/// of [`OLDEST_EVERY`] submitted requests is the oldest one instead.
pub(crate) struct Slots {
    limits: SlotLimits,
    state: Mutex<SlotState>,
}

#[derive(Default)]
struct SlotState {
    flows: BTreeMap<SlotFlow, FlowRequests>,
    running: usize,
    blocks: u64,
    waiting: usize,
    arrivals: u64,
    submitted: u64,
}

/// The requests of a flow.
#[derive(Default)]
struct FlowRequests {
    running: usize,
    waiting: BTreeMap<SlotOrder, SlotWaiter>,
}

struct SlotWaiter {
    blocks: u64,
    granted: oneshot::Sender<Slot>,
}

/// A request's permission to run in the engine. Dropping this value lets the next request run.
pub(crate) struct Slot {
    slots: Arc<Slots>,
    flow: SlotFlow,
    blocks: u64,
}

/// A request in the queue. Dropping it removes the request from the queue.
pub(crate) struct QueuedRequest {
    slots: Arc<Slots>,
    flow: SlotFlow,
    turn: SlotOrder,
    granted: oneshot::Receiver<Slot>,
}

impl Slots {
    pub fn new(limits: SlotLimits) -> Arc<Self> {
        Arc::new(Self { limits, state: Mutex::default() })
    }

    /// Returns [`SlotLimits::running`].
    pub fn running_max(&self) -> u32 {
        u32::try_from(self.limits.running).unwrap_or(u32::MAX)
    }

    /// Queues a request whose prompt needs this many blocks.
    ///
    /// # Errors
    /// Fails if the queue is full.
    pub fn enqueue(self: &Arc<Self>, account: &str, priority: Priority, blocks: u64) -> Result<QueuedRequest, Refusal> {
        let flow: SlotFlow = (priority.across, account.into());
        let (granted, receiver) = oneshot::channel();
        let turn = {
            let mut state = self.state.lock();
            if state.waiting >= self.limits.waiting && !state.has_room(&self.limits, blocks) {
                return Err(Refusal::Full);
            }
            state.arrivals += 1;
            state.waiting += 1;
            let turn = (priority.within, state.arrivals);
            state.flows.entry(flow.clone()).or_default().waiting.insert(turn, SlotWaiter { blocks, granted });
            turn
        };
        self.grant();
        Ok(QueuedRequest { slots: Arc::clone(self), flow, turn, granted: receiver })
    }

    #[cfg(test)]
    fn counts(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.running, state.waiting)
    }

    /// Grants slots to waiting requests while there are free slots.
    fn grant(self: &Arc<Self>) {
        loop {
            let granted = {
                let mut state = self.state.lock();
                state.next(&self.limits).map(|(flow, waiting)| {
                    let slot = Slot { slots: Arc::clone(self), flow, blocks: waiting.blocks };
                    (waiting.granted, slot)
                })
            };
            let Some((granted, slot)) = granted else { return };
            // If the request has left the queue meanwhile, sending fails, and the dropped slot is free again.
            drop(granted.send(slot));
        }
    }
}

impl SlotState {
    fn has_room(&self, limits: &SlotLimits, blocks: u64) -> bool {
        self.running == 0 || (self.running < limits.running && self.blocks + blocks <= limits.blocks)
    }

    /// Removes the next request from the queue and returns it; `None` if the queue is empty or the request does not fit into the limits.
    fn next(&mut self, limits: &SlotLimits) -> Option<(SlotFlow, SlotWaiter)> {
        let (flow, turn) = if (self.submitted + 1).is_multiple_of(OLDEST_EVERY) { self.oldest() } else { self.best() }?;
        let requests = self.flows.get(&flow)?;
        let blocks = requests.waiting.get(&turn)?.blocks;
        if !self.has_room(limits, blocks) {
            return None;
        }
        let requests = self.flows.get_mut(&flow)?;
        let waiting = requests.waiting.remove(&turn)?;
        requests.running += 1;
        self.submitted += 1;
        self.waiting -= 1;
        self.running += 1;
        self.blocks += blocks;
        Some((flow, waiting))
    }

    /// Returns the first waiting request of the flow with the fewest requests in the engine, among the flows that no other flow outranks.
    fn best(&self) -> Option<(SlotFlow, SlotOrder)> {
        let heads = self.flows.iter().filter_map(|(flow, requests)| {
            let (turn, _) = requests.waiting.first_key_value()?;
            Some((flow.0, requests.running, turn.1, (flow, turn)))
        });
        let (.., (flow, turn)) = heads.min_by_key(|(across, running, arrival, _)| (*across, *running, *arrival))?;
        Some((flow.clone(), *turn))
    }

    fn oldest(&self) -> Option<(SlotFlow, SlotOrder)> {
        let all = self.flows.iter().flat_map(|(flow, requests)| requests.waiting.keys().map(move |turn| (flow, turn)));
        let (flow, turn) = all.min_by_key(|(_, (_, arrival))| *arrival)?;
        Some((flow.clone(), *turn))
    }

    /// Removes the flow if it has no requests.
    fn forget_empty(&mut self, flow: &SlotFlow) {
        if self.flows.get(flow).is_some_and(|requests| requests.running == 0 && requests.waiting.is_empty()) {
            self.flows.remove(flow);
        }
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
        let removed = state.flows.get_mut(&self.flow).and_then(|requests| requests.waiting.remove(&self.turn));
        state.waiting -= usize::from(removed.is_some());
        state.forget_empty(&self.flow);
        drop(state);
        if removed.is_some() {
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
        if let Some(requests) = state.flows.get_mut(&self.flow) {
            requests.running -= 1;
        }
        state.forget_empty(&self.flow);
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
        let mut requests: Vec<QueuedRequest> = [4, 4, 1, 20]
            .map(|blocks| slots.enqueue("", Priority::default(), blocks).expect("the queue has a free place"))
            .into();
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
            (0..6).map(|_| slots.enqueue("many", Priority::default(), 1).expect("the queue has a free place")).collect();
        let mut few = slots.enqueue("few", Priority::default(), 1).expect("the queue has a free place");
        let running =
            [granted(&mut many[0]).expect("the first slot is free"), granted(&mut many[1]).expect("the second slot is free")];
        let [first, _second] = running;
        drop(first);
        assert!(granted(&mut few).is_some(), "the next slot goes to the account without running requests");
    }

    #[test]
    fn full_queue_refuses_requests_until_a_waiting_request_is_dropped() {
        let slots = slots(1, 10, 1);
        let mut first = slots.enqueue("", Priority::default(), 1).expect("the queue is empty");
        let running = granted(&mut first).expect("the first slot is free");
        let waiting = slots.enqueue("", Priority::default(), 1).expect("the queue has one free place");
        assert!(matches!(slots.enqueue("", Priority::default(), 1), Err(Refusal::Full)));
        drop(waiting);
        let mut other = slots.enqueue("", Priority::default(), 1).expect("the queue has one free place");
        assert_eq!(slots.counts(), (1, 1));
        drop((first, running));
        assert!(granted(&mut other).is_some());
    }

    #[test]
    fn request_dropped_before_it_uses_its_slot_releases_the_slot() {
        let slots = slots(1, 10, 4);
        let first = slots.enqueue("", Priority::default(), 1).expect("the queue is empty");
        let mut second = slots.enqueue("", Priority::default(), 1).expect("the queue has a free place");
        assert!(granted(&mut second).is_none());
        drop(first);
        assert!(granted(&mut second).is_some());
    }

    /// Drops the running requests one by one. Returns the names of the waiting ones in the order in which they are submitted.
    fn submitted(mut running: Vec<Slot>, mut waiting: Vec<(String, QueuedRequest)>) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(slot) = running.pop() {
            drop(slot);
            let granted: Vec<(usize, Slot)> =
                waiting.iter_mut().enumerate().filter_map(|(at, (_, request))| Some((at, granted(request)?))).collect();
            for (at, slot) in granted.into_iter().rev() {
                names.push(waiting.remove(at).0);
                running.push(slot);
            }
        }
        names
    }

    #[test]
    fn requests_are_submitted_by_rank_then_by_account_then_by_priority_and_arrival() {
        let slots = slots(1, 100, 64);
        let mut first = slots.enqueue("", Priority::default(), 1).expect("the queue is empty");
        let running = vec![granted(&mut first).expect("the slot is free")];
        let waiting =
            [("a", 0, 5), ("a", 0, -5), ("b", 0, 0), ("low", 3, 3), ("operator", -1, -1)].map(|(account, across, within)| {
                let queued = slots.enqueue(account, Priority { across, within }, 1).expect("the queue has a free place");
                (format!("{account} {within}"), queued)
            });
        // When the only slot is granted, no account has requests in the engine, so accounts of one rank follow the arrival of their first
        // requests.
        assert_eq!(submitted(running, waiting.into()), ["operator -1", "a -5", "a 5", "b 0", "low 3"]);
        drop(first);
        assert_eq!(slots.counts(), (0, 0));
        assert!(slots.state.lock().flows.is_empty());
    }

    #[test]
    fn request_of_the_lowest_priority_is_not_overtaken_forever() {
        let slots = slots(1, 100, 64);
        let mut first = slots.enqueue("", Priority::default(), 1).expect("the queue is empty");
        let running = vec![granted(&mut first).expect("the slot is free")];
        let enqueue = |number: i32, within| {
            let queued = slots.enqueue("", Priority { across: 0, within }, 1).expect("the queue has a free place");
            (format!("{number}"), queued)
        };
        let mut waiting = vec![enqueue(0, 9)];
        waiting.extend((1..20).map(|number| enqueue(number, 0)));
        let names = submitted(running, waiting);
        let at = names.iter().position(|name| name == "0").expect("all requests are submitted");
        assert!(at < OLDEST_EVERY as usize, "{names:?}");
    }
}
