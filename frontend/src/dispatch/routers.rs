//! The known routers, their health, and the order in which they are used.
//!
//! Requests are sent round-robin to the healthy routers. A router that fails a request becomes unhealthy and is used last, until a
//! health check, which runs once a second for all routers, finds it healthy. While no router answers, for example because the only one
//! restarts, new requests wait for a short time, and routers are checked more often.

use super::{
    availability::check,
    error::DispatchError,
    placement::Placement,
    prompt::Prompt,
    router_stream::{Router, RouterStream},
};
use crate::metrics::FrontendMetrics;
use futures::{Stream, stream::FuturesUnordered};
use parking_lot::Mutex;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};
use tandem_proto::{
    channel::{Channel, Network, endpoint},
    v1::{
        EqualPrompt, ExplainReply, ExplainRequest, Identity, RoutePrompt, WorkersReply, WorkersRequest,
        router_client::RouterClient,
    },
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout, timeout_at},
};
use tonic::{Response, Status};

/// The maximum time for a router to send its view of the cluster or the explanation of a placement.
const VIEW_TIMEOUT: Duration = Duration::from_secs(2);
/// The maximum time to wait for one router's placement or booking if there is another router to try. A placement takes less than a
/// millisecond.
const PLACEMENT_TIMEOUT: Duration = Duration::from_secs(2);
/// The time between two tries to book a running request.
const REBOOK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval at which all routers' health is checked. A recovered router is used again after this time at the latest.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// The interval at which all routers' health is checked while requests wait for a router.
const HELD_CHECK_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct Routers {
    network: Network,
    /// The identities of the served models. A router is healthy if it could place a request for one of them.
    identities: Vec<Arc<Identity>>,
    /// See [`FrontendSettings::router_wait`](crate::FrontendSettings::router_wait).
    wait_max: Duration,
    metrics: Arc<FrontendMetrics>,
    known: Mutex<Known>,
    healthy: watch::Sender<usize>,
    /// The number of requests that wait for a router.
    held: watch::Sender<usize>,
}

/// A request that waits for a router. Dropping it ends the wait.
struct Held<'a>(&'a Routers);

#[derive(Default)]
struct Known {
    routers: BTreeMap<Arc<str>, KnownRouter>,
    /// Incremented for each request. Selects the router with which the round-robin order begins.
    round: usize,
}

struct KnownRouter {
    client: RouterClient<Channel>,
    health: Health,
    is_member: bool,
}

/// Whether a router could place a request when it was last called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    Healthy,
    Unhealthy,
}

/// The source of a list of routers. The source decides whether known routers that the list lacks are removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MemberList {
    /// A list from the operator. Other routers are not used.
    Static,
    /// A list from etcd. A healthy router that the list lacks is kept: it may have lost its connection to etcd and still place requests.
    Advisory,
}

impl Routers {
    /// The routers in `members` count as healthy until a call fails. No connection is opened before its first use.
    pub(crate) fn new(
        members: &BTreeSet<String>,
        network: Network,
        identities: Vec<Arc<Identity>>,
        wait_max: Duration,
        metrics: Arc<FrontendMetrics>,
    ) -> Self {
        let (healthy, held) = (watch::Sender::new(0), watch::Sender::new(0));
        let routers = Self { network, identities, wait_max, metrics, known: Mutex::default(), healthy, held };
        routers.set_members(members, MemberList::Static);
        routers
    }

    /// Replaces the known routers. Requests that are booked with a removed router remain booked there.
    pub(crate) fn set_members(&self, members: &BTreeSet<String>, list: MemberList) {
        let mut known = self.known.lock();
        known.routers.iter_mut().for_each(|(address, router)| router.is_member = members.contains(&**address));
        let stays = |router: &KnownRouter| list == MemberList::Advisory && router.health == Health::Healthy;
        known.routers.retain(|_, router| router.is_member || stays(router));
        for address in members {
            let endpoint = endpoint(address).expect("member lists are checked when they are read");
            let new = || KnownRouter {
                client: RouterClient::new(self.network.connect_lazy(&endpoint)),
                health: Health::Healthy,
                is_member: true,
            };
            known.routers.entry(address.as_str().into()).or_insert_with(new);
        }
        self.publish_count(&known);
    }

    /// Requests each router's view of the cluster, from all routers at the same time. Yields the answers as they arrive, each with the
    /// router's address, and updates the routers' health.
    pub(crate) fn views(&self) -> impl Stream<Item = (Arc<str>, Result<WorkersReply, DispatchError>)> {
        let view = |Router { address, mut client }: Router| async move {
            let view = reply(client.workers(WorkersRequest {})).await;
            let can_place = view.as_ref().is_ok_and(|view| self.identities.iter().any(|identity| check(identity, view).is_ok()));
            self.set_health(&address, if can_place { Health::Healthy } else { Health::Unhealthy });
            (address, view)
        };
        self.by_health().0.into_iter().map(view).collect::<FuturesUnordered<_>>()
    }

    /// Requests the explanation of a placement from one router after the other, until a router answers.
    ///
    /// # Errors
    /// No router answers. The error is that of the last router tried.
    pub(super) async fn explain(&self, request: ExplainRequest) -> Result<ExplainReply, DispatchError> {
        let mut last = DispatchError::NoRouter;
        for Router { mut client, .. } in self.by_health().0 {
            match reply(client.explain(request.clone())).await {
                Ok(reply) => return Ok(reply),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Requests a placement from one router after the other, until a router can place the prompt. While no router answers, waits for one.
    ///
    /// # Errors
    /// No router can place the prompt, or a router reports that no worker can ever run the prompt, or that it would wait too long.
    pub(super) async fn place(
        &self,
        prompt: &Prompt,
        equal_prompt: Option<&EqualPrompt>,
    ) -> Result<(RouterStream, Placement), DispatchError> {
        self.answered(|| self.place_once(prompt, equal_prompt)).await
    }

    /// Calls the routers with `call`. If no router answers, calls them again when one is healthy, within [`Routers::wait_max`].
    ///
    /// # Errors
    /// The last call failed.
    async fn answered<T, F>(&self, call: impl Fn() -> F) -> Result<T, DispatchError>
    where
        F: Future<Output = Result<T, DispatchError>>,
    {
        let deadline = Instant::now() + self.wait_max;
        let mut held = None;
        loop {
            let error = match call().await {
                Err(error) if error.is_router_lost() => error,
                answered => return answered,
            };
            held.get_or_insert_with(|| Held::new(self));
            let mut healthy = self.healthy.subscribe();
            let found = timeout_at(deadline, healthy.wait_for(|count| *count > 0)).await.is_ok();
            if !found || Instant::now() >= deadline {
                return Err(error);
            }
        }
    }

    async fn place_once(
        &self,
        prompt: &Prompt,
        equal_prompt: Option<&EqualPrompt>,
    ) -> Result<(RouterStream, Placement), DispatchError> {
        let mut last = DispatchError::NoRouter;
        let routers = self.round_robin();
        let only_one = routers.len() == 1;
        for router in routers {
            let placing = async {
                let mut stream = RouterStream::open(&router, prompt.route_prompt(None, equal_prompt.cloned())).await?;
                let placement = stream.placement().await?;
                Ok((stream, placement))
            };
            // If there is no other router, only the timeout for the first token bounds the wait.
            let placed = if only_one { placing.await } else { in_time(placing).await };
            match placed {
                // The other routers know the same workers, so they would refuse the request, too.
                Err(error @ (DispatchError::Refused { .. } | DispatchError::Overloaded { .. })) => return Err(error),
                Err(error) => {
                    let error = self.note_failure(&router.address, error);
                    // Keeps a router's report that no worker is available, because it says more than the error of an unreachable router.
                    if !matches!(last, DispatchError::NoWorker { .. }) {
                        last = error;
                    }
                }
                placed => return placed,
            }
        }
        Err(last)
    }

    /// Tries the routers in order until one books a request that is already placed.
    ///
    /// # Errors
    /// No router can book it. The error is that of the last router tried.
    pub(super) async fn book(&self, prompt: &RoutePrompt) -> Result<RouterStream, DispatchError> {
        let mut last = DispatchError::NoRouter;
        for router in self.round_robin() {
            match in_time(RouterStream::open(&router, prompt.clone())).await {
                Err(error) => last = self.note_failure(&router.address, error),
                stream => {
                    self.metrics.rebooked.increment(1);
                    return stream;
                }
            }
        }
        Err(last)
    }

    /// Like [`Routers::book`], but waits for a router while none answers.
    ///
    /// # Errors
    /// No router can book it. The error is that of the last router tried.
    pub(super) async fn book_soon(&self, prompt: &RoutePrompt) -> Result<RouterStream, DispatchError> {
        self.answered(|| self.book(prompt)).await
    }

    /// Like [`Routers::book`], but retries until a router has booked the request.
    pub(super) async fn book_when_possible(self: Arc<Self>, prompt: RoutePrompt) -> RouterStream {
        loop {
            let mut healthy = self.healthy.subscribe();
            healthy.wait_for(|count| *count > 0).await.expect("`self` keeps the sender");
            match self.book(&prompt).await {
                Ok(stream) => return stream,
                Err(_) => sleep(REBOOK_INTERVAL).await,
            }
        }
    }

    /// Resolves when the routers' health has to be checked again: after [`CHECK_INTERVAL`], or sooner while requests wait for a router.
    pub(crate) async fn check_is_due(&self) {
        let mut held = self.held.subscribe();
        sleep(HELD_CHECK_INTERVAL).await;
        timeout(CHECK_INTERVAL - HELD_CHECK_INTERVAL, held.wait_for(|held| *held > 0)).await.ok();
    }

    /// Returns the addresses of the known routers.
    pub(crate) fn addresses(&self) -> Vec<Arc<str>> {
        self.known.lock().routers.keys().cloned().collect()
    }

    pub(super) fn len(&self) -> usize {
        self.known.lock().routers.len()
    }

    /// Sets a router's health. A router that becomes unhealthy and is missing from the latest list of members is removed.
    pub(super) fn set_health(&self, address: &str, health: Health) {
        let mut known = self.known.lock();
        if let Some(router) = known.routers.get_mut(address) {
            router.health = health;
            if health == Health::Unhealthy && !router.is_member {
                known.routers.remove(address);
            }
        }
        self.publish_count(&known);
    }

    /// Marks the router unhealthy, unless the request or the lack of workers caused the failure. Returns the error.
    fn note_failure(&self, address: &str, error: DispatchError) -> DispatchError {
        if error.is_router_lost() || matches!(error, DispatchError::ClusterMismatch) {
            tracing::debug!(router = address, %error, "router marked unhealthy; requests try it after all others");
            self.set_health(address, Health::Unhealthy);
        }
        error
    }

    /// Returns the healthy routers, then the unhealthy routers. Both groups are rotated by one router from call to call.
    fn round_robin(&self) -> Vec<Router> {
        let round = {
            let mut known = self.known.lock();
            known.round = known.round.wrapping_add(1);
            known.round
        };
        let (mut routers, healthy) = self.by_health();
        let unhealthy = routers.len() - healthy;
        routers[..healthy].rotate_left(round % healthy.max(1));
        routers[healthy..].rotate_left(round % unhealthy.max(1));
        routers
    }

    /// Returns the healthy routers followed by the unhealthy routers, and the number of healthy routers.
    fn by_health(&self) -> (Vec<Router>, usize) {
        let known = self.known.lock();
        let all = known.routers.iter().map(|(address, KnownRouter { client, health, .. })| {
            (*health, Router { address: address.clone(), client: client.clone() })
        });
        let (healthy, unhealthy): (Vec<_>, Vec<_>) = all.partition(|(health, _)| *health == Health::Healthy);
        let count = healthy.len();
        (healthy.into_iter().chain(unhealthy).map(|(_, router)| router).collect(), count)
    }

    fn publish_count(&self, known: &Known) {
        let healthy = known.routers.values().filter(|router| router.health == Health::Healthy).count();
        self.metrics.healthy_routers.set(healthy as f64);
        self.healthy.send_if_modified(|before| std::mem::replace(before, healthy) != healthy);
    }
}

/// Bounds the wait for one router by [`PLACEMENT_TIMEOUT`], after which the caller can try another router.
pub(super) async fn in_time<T>(answer: impl Future<Output = Result<T, DispatchError>>) -> Result<T, DispatchError> {
    timeout(PLACEMENT_TIMEOUT, answer).await.unwrap_or(Err(DispatchError::RouterClosed))
}

async fn reply<T>(call: impl Future<Output = Result<Response<T>, Status>>) -> Result<T, DispatchError> {
    let reply = timeout(VIEW_TIMEOUT, call).await.map_err(|_| DispatchError::Timeout { limit: VIEW_TIMEOUT })?;
    Ok(reply?.into_inner())
}

impl<'a> Held<'a> {
    fn new(routers: &'a Routers) -> Self {
        routers.held.send_modify(|held| *held += 1);
        routers.metrics.held_requests.increment(1.0);
        Self(routers)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.held.send_modify(|held| *held -= 1);
        self.0.metrics.held_requests.decrement(1.0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tandem_process::Metrics;

    const WAIT: Duration = Duration::from_secs(2);

    fn set(addresses: &[&str]) -> BTreeSet<String> {
        addresses.iter().map(|address| (*address).to_owned()).collect()
    }

    fn routers(addresses: &[&str]) -> Routers {
        let metrics = Arc::new(FrontendMetrics::new(&Metrics::default()));
        Routers::new(&set(addresses), Network::default(), vec![Arc::default()], WAIT, metrics)
    }

    /// Calls the routers in paused time. A call fails while no router is healthy. Returns the result, the time, and the number of calls.
    async fn call(routers: &Routers) -> (Result<(), DispatchError>, Duration, usize) {
        let (started, calls) = (Instant::now(), AtomicUsize::new(0));
        let called = routers.answered(|| {
            calls.fetch_add(1, Ordering::Relaxed);
            std::future::ready(if routers.by_health().1 > 0 { Ok(()) } else { Err(DispatchError::NoRouter) })
        });
        let result = called.await;
        (result, started.elapsed(), calls.into_inner())
    }

    #[tokio::test(start_paused = true)]
    async fn request_waits_until_a_router_is_healthy() {
        let routers = routers(&[]);
        let (refused, took, _) = call(&routers).await;
        assert!(
            matches!(refused, Err(DispatchError::NoRouter)) && took == WAIT,
            "no router has registered: {refused:?}, {took:?}"
        );
        let registers = async {
            sleep(WAIT / 2).await;
            assert_eq!(*routers.held.borrow(), 2);
            routers.set_members(&set(&["a:1"]), MemberList::Advisory);
        };
        let (one, other, ()) = tokio::join!(call(&routers), call(&routers), registers);
        for (result, took, calls) in [one, other] {
            assert!(result.is_ok() && took == WAIT / 2 && calls == 2, "{result:?} after {took:?} and {calls} calls");
        }
        assert_eq!(*routers.held.borrow(), 0);
        let (result, took, calls) = call(&routers).await;
        assert!(result.is_ok() && took.is_zero() && calls == 1, "requests do not wait for a healthy router");
    }

    #[tokio::test(start_paused = true)]
    async fn request_that_a_router_has_refused_does_not_wait() {
        let (routers, started) = (routers(&["a:1"]), Instant::now());
        let no_worker = || std::future::ready(Err::<(), _>(DispatchError::NoWorker { message: "none".to_owned() }));
        assert!(matches!(routers.answered(no_worker).await, Err(DispatchError::NoWorker { .. })));
        assert!(started.elapsed().is_zero());
    }

    #[tokio::test(start_paused = true)]
    async fn routers_are_checked_more_often_while_requests_wait() {
        let (routers, started) = (routers(&[]), Instant::now());
        routers.check_is_due().await;
        assert_eq!(started.elapsed(), CHECK_INTERVAL);
        let waits = async {
            sleep(HELD_CHECK_INTERVAL * 4).await;
            Held::new(&routers)
        };
        let (_held, ()) = tokio::join!(waits, routers.check_is_due());
        assert_eq!(started.elapsed(), CHECK_INTERVAL + HELD_CHECK_INTERVAL * 4);
        routers.check_is_due().await;
        assert_eq!(started.elapsed(), CHECK_INTERVAL + HELD_CHECK_INTERVAL * 5);
    }

    #[tokio::test]
    async fn router_missing_from_an_advisory_list_is_kept_while_healthy() {
        let routers = routers(&["a:1", "b:1", "c:1"]);
        let known = || routers.by_health().0.into_iter().map(|router| router.address.to_string()).collect::<BTreeSet<_>>();
        routers.set_health("c:1", Health::Unhealthy);
        routers.set_members(&set(&[]), MemberList::Advisory);
        assert_eq!(known(), set(&["a:1", "b:1"]));
        routers.set_health("a:1", Health::Unhealthy);
        assert_eq!(known(), set(&["b:1"]), "an unhealthy router that is not on the list is removed");
        routers.set_members(&set(&["a:1", "b:1"]), MemberList::Advisory);
        routers.set_health("a:1", Health::Unhealthy);
        assert_eq!(known(), set(&["a:1", "b:1"]), "an unhealthy router on the list is kept");
        routers.set_members(&set(&["a:1"]), MemberList::Static);
        assert_eq!(known(), set(&["a:1"]), "a router that is not on a static list is removed");
    }
}
