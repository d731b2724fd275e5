//! The routers, and which of them is asked next.
//!
//! Requests go in turn to those that could place one when they were last heard of. A router that fails a request is asked last
//! from then on, until a look at all of them, once a second, finds it well: a router that is gone costs one request one failure.

use super::{DispatchError, Prompt, route::Held};
use crate::metrics::FrontendMetrics;
use futures::{Stream, stream::FuturesUnordered};
use parking_lot::{Mutex, MutexGuard};
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tandem_proto::{
    channel::{Channel, Network, endpoint},
    v1::{
        ExistingPlacement, ExplainReply, ExplainRequest, Identity, Placement, RoutePrompt, WorkersReply, WorkersRequest,
        router_client::RouterClient,
    },
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tonic::{Code, Response, Status};

/// How long a question about the cluster's state may take.
const ANSWER_WAIT: Duration = Duration::from_secs(2);
/// A router that has not placed a request by then is left for another, if there is one. Placing takes less than a millisecond.
const PLACEMENT_WAIT: Duration = Duration::from_secs(2);
/// A list that is empty may be one that has not come yet: etcd is asked when the frontend starts, and answers within milliseconds.
const LIST_WAIT: Duration = Duration::from_secs(2);
/// Before a running request asks again for a booking that every router has refused.
const REBOOK_PAUSE: Duration = Duration::from_secs(1);

/// All of them.
pub(crate) struct Routers {
    network: Network,
    identity: Identity,
    metrics: Arc<FrontendMetrics>,
    known: Mutex<Known>,
    /// How many are well.
    well: watch::Sender<usize>,
}

#[derive(Default)]
struct Known {
    routers: BTreeMap<Arc<str>, OneRouter>,
    turn: usize,
}

struct OneRouter {
    client: RouterClient<Channel>,
    is_well: bool,
    is_listed: bool,
}

/// One that can be asked.
#[derive(Clone)]
pub(super) struct Router {
    pub(super) address: Arc<str>,
    pub(super) client: RouterClient<Channel>,
}

impl Routers {
    /// Connects to them when they are first used.
    pub(crate) fn new(listed: &BTreeSet<String>, network: Network, identity: Identity, metrics: Arc<FrontendMetrics>) -> Self {
        let routers = Self { network, identity, metrics, known: Mutex::default(), well: watch::Sender::new(0) };
        routers.list(listed, false);
        routers
    }

    /// These are the routers from now on; where the list only `hints`, others stay for as long as they are well: a router that is cut
    /// off from etcd still places. What runs on others stays there.
    pub(crate) fn list(&self, listed: &BTreeSet<String>, hints: bool) {
        let mut known = self.lock();
        known.routers.iter_mut().for_each(|(address, router)| router.is_listed = listed.contains(&**address));
        known.routers.retain(|_, router| router.is_listed || hints && router.is_well);
        for address in listed {
            let endpoint = endpoint(address).expect("lists are checked when they are read");
            let new =
                || OneRouter { client: RouterClient::new(self.network.connect_lazy(&endpoint)), is_well: true, is_listed: true };
            known.routers.entry(address.as_str().into()).or_insert_with(new);
        }
        self.count(&known);
    }

    /// What this frontend takes the cluster for.
    pub(crate) fn identity(&self) -> &Identity {
        &self.identity
    }

    /// Asks all of them at once for their view of the cluster; the answers as they come, each with who gave it.
    pub(crate) fn views(&self) -> impl Stream<Item = (Arc<str>, Result<WorkersReply, DispatchError>)> {
        let ask = |Router { address, mut client }: Router| async move {
            let view = answer(client.workers(WorkersRequest {})).await;
            let can_place = |view: &WorkersReply| {
                view.unavailable_reason.is_none()
                    && view.identity.as_ref().is_none_or(|cluster| self.identity.fits(cluster).is_ok())
            };
            self.found(&address, view.as_ref().is_ok_and(can_place));
            (address, view)
        };
        self.all().0.into_iter().map(ask).collect::<FuturesUnordered<_>>()
    }

    /// Asks one after the other where a prompt would be placed, until one answers.
    pub(super) async fn explain(&self, request: ExplainRequest) -> Result<ExplainReply, DispatchError> {
        let mut failed = none();
        for Router { mut client, .. } in self.all().0 {
            match answer(client.explain(request.clone())).await {
                Ok(reply) => return Ok(reply),
                Err(error) => failed = error,
            }
        }
        Err(failed)
    }

    /// Has the prompt placed by the first that can.
    pub(super) async fn place(&self, prompt: &Prompt) -> Result<(Held, Placement), DispatchError> {
        let mut failed = none();
        let routers = self.somebody().await;
        let is_alone = routers.len() == 1;
        for router in routers {
            let placing = async {
                let mut held = Held::open(&router, self.prompt(prompt, None)).await?;
                let placement = held.placement().await?;
                Ok((held, placement))
            };
            // Nobody else is there to ask: it may take as long as the request may.
            let placed = if is_alone { placing.await } else { self.in_time(placing).await };
            match placed {
                Err(DispatchError::Refused { message }) => return Err(DispatchError::Refused { message }),
                Err(error) => {
                    let error = self.failed(&router.address, error);
                    // That one router has no worker for it tells more than that another does not answer.
                    if !matches!(failed, DispatchError::NoWorker { .. }) {
                        failed = error;
                    }
                }
                placed => return placed,
            }
        }
        Err(failed)
    }

    /// Has the first that can book what runs.
    pub(super) async fn book(&self, prompt: &RoutePrompt) -> Result<Held, DispatchError> {
        let mut failed = none();
        for router in self.in_turn() {
            match self.in_time(Held::open(&router, prompt.clone())).await {
                Err(error) => failed = self.failed(&router.address, error),
                held => {
                    self.metrics.rebooked.increment(1);
                    return held;
                }
            }
        }
        Err(failed)
    }

    /// The same, however long it takes until there is one.
    pub(super) async fn book_sometime(self: Arc<Self>, prompt: RoutePrompt) -> Held {
        loop {
            let mut well = self.well.subscribe();
            well.wait_for(|well| *well > 0).await.expect("this value holds the sender");
            match self.book(&prompt).await {
                Ok(held) => return held,
                Err(_) => sleep(REBOOK_PAUSE).await,
            }
        }
    }

    /// The prompt as routers see it.
    pub(super) fn prompt(&self, prompt: &Prompt, existing: Option<ExistingPlacement>) -> RoutePrompt {
        RoutePrompt {
            request_id: prompt.request_id.clone(),
            traceparent: prompt.traceparent.clone(),
            model: prompt.model.clone(),
            sequence_hashes: prompt.sequence_hashes.clone(),
            prompt_tokens: prompt.tokens.len() as u32,
            max_tokens: prompt.max_tokens,
            samples: prompt.samples,
            prompt_logits: prompt.prompt_logprobs.is_some(),
            identity: Some(self.identity.clone()),
            existing,
        }
    }

    /// Others may be asked if it takes longer.
    pub(super) async fn in_time<T>(&self, answer: impl Future<Output = Result<T, DispatchError>>) -> Result<T, DispatchError> {
        timeout(PLACEMENT_WAIT, answer).await.unwrap_or(Err(DispatchError::RouterClosed))
    }

    /// How many there are.
    pub(super) fn len(&self) -> usize {
        self.lock().routers.len()
    }

    /// The router could place a request when it was last heard of, or could not.
    pub(super) fn found(&self, address: &str, is_well: bool) {
        let mut known = self.lock();
        if let Some(router) = known.routers.get_mut(address) {
            router.is_well = is_well;
            if !is_well && !router.is_listed {
                known.routers.remove(address);
            }
        }
        self.count(&known);
    }

    /// Takes note of who has failed; gives the error back.
    fn failed(&self, address: &str, error: DispatchError) -> DispatchError {
        let of_the_request = match &error {
            DispatchError::Router(status) => matches!(status.code(), Code::InvalidArgument | Code::ResourceExhausted),
            DispatchError::NoWorker { .. } => true,
            _ => false,
        };
        if !of_the_request {
            tracing::debug!(router = address, %error, "the router is asked last from now on");
            self.found(address, false);
        }
        error
    }

    /// Those to be asked in turn. Where nobody is known, as in a frontend that has not read etcd's list yet, somebody is waited for.
    async fn somebody(&self) -> Vec<Router> {
        if self.len() == 0 {
            let mut well = self.well.subscribe();
            // Whether in time or not: what follows looks for itself.
            timeout(LIST_WAIT, well.wait_for(|well| *well > 0)).await.ok();
        }
        self.in_turn()
    }

    /// Those that are well, and then the others; each time another one is the first of its kind.
    fn in_turn(&self) -> Vec<Router> {
        let turn = {
            let mut known = self.lock();
            known.turn = known.turn.wrapping_add(1);
            known.turn
        };
        let (mut routers, well) = self.all();
        let others = routers.len() - well;
        routers[..well].rotate_left(turn % well.max(1));
        routers[well..].rotate_left(turn % others.max(1));
        routers
    }

    /// Those that are well, and then the others; and how many are well.
    fn all(&self) -> (Vec<Router>, usize) {
        let known = self.lock();
        let all = known.routers.iter().map(|(address, OneRouter { client, is_well, .. })| {
            (*is_well, Router { address: address.clone(), client: client.clone() })
        });
        let (well, others): (Vec<_>, Vec<_>) = all.partition(|(is_well, _)| *is_well);
        let count = well.len();
        (well.into_iter().chain(others).map(|(_, router)| router).collect(), count)
    }

    fn count(&self, known: &Known) {
        let well = known.routers.values().filter(|router| router.is_well).count();
        self.metrics.routers_well.set(well as f64);
        self.well.send_if_modified(|before| std::mem::replace(before, well) != well);
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock()
    }
}

async fn answer<T>(asking: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, DispatchError> {
    match timeout(ANSWER_WAIT, asking).await {
        Ok(reply) => Ok(reply.map_err(|status| DispatchError::Router(Box::new(status)))?.into_inner()),
        Err(_) => Err(DispatchError::Timeout { limit: ANSWER_WAIT }),
    }
}

/// What came of asking nobody.
fn none() -> DispatchError {
    DispatchError::Router(Box::new(Status::unavailable("no router is listed")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_node::Metrics;

    fn listed(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    fn routers(addresses: &[&str]) -> Routers {
        let metrics = Arc::new(FrontendMetrics::new(&Metrics::default(), "m"));
        Routers::new(&listed(addresses), Network::default(), Identity::default(), metrics)
    }

    #[tokio::test(start_paused = true)]
    async fn whoever_is_listed_soon_is_waited_for() {
        let (routers, started) = (routers(&[]), tokio::time::Instant::now());
        assert!(routers.somebody().await.is_empty());
        assert_eq!(started.elapsed(), LIST_WAIT, "nobody came");
        let comes = async {
            sleep(LIST_WAIT / 2).await;
            routers.list(&listed(&["a:1"]), true);
        };
        let (found, ()) = tokio::join!(routers.somebody(), comes);
        assert_eq!((found.len(), started.elapsed()), (1, LIST_WAIT * 3 / 2));
        assert_eq!((routers.somebody().await.len(), started.elapsed()), (1, LIST_WAIT * 3 / 2), "who is there is asked at once");
    }

    #[tokio::test]
    async fn off_a_list_that_only_hints_a_router_stays_while_it_is_well() {
        let routers = routers(&["a:1", "b:1", "c:1"]);
        let known = || routers.all().0.into_iter().map(|router| router.address.to_string()).collect::<BTreeSet<_>>();
        routers.found("c:1", false);
        routers.list(&listed(&[]), true);
        assert_eq!(known(), listed(&["a:1", "b:1"]));
        routers.found("a:1", false);
        assert_eq!(known(), listed(&["b:1"]), "it is not looked for any more");
        routers.list(&listed(&["a:1", "b:1"]), true);
        routers.found("a:1", false);
        assert_eq!(known(), listed(&["a:1", "b:1"]), "who is listed is looked for");
        routers.list(&listed(&["a:1"]), false);
        assert_eq!(known(), listed(&["a:1"]), "an operator's list is an order");
    }
}
