//! Models whose requests are passed through, unchanged, to servers that Tandem does not route by KV, such as `vllm serve --runner pooling`.
//!
//! A request is sent to the healthy server with the fewest requests in flight. If a server does not begin an answer, the request is sent to
//! another one. No server gets a request twice.

use crate::metrics::PassthroughMetrics;
use axum::{
    body::Body,
    http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header},
    response::Response,
};
use bytes::Bytes;
use futures::future::{join_all, pending};
use parking_lot::Mutex;
use std::{collections::BTreeMap, convert::Infallible, sync::Arc, time::Duration};
use tandem_client::{HttpClient, HttpError, authorities, whole};
use tandem_process::{Metrics, Secret, retry::error_chain};
use tokio::time::{Instant, sleep, timeout};

const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
/// The time between two health checks of a server.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);
const CHECK_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum size of the answer to a health check, in bytes.
const CHECK_BYTES_MAX: usize = 64 << 10;
/// The maximum time without a byte of an answer. Transcribing hours of audio takes minutes.
pub(crate) const SILENCE_MAX: Duration = Duration::from_secs(600);
/// The number of servers that may be lost while they answer one request, because the request itself may be the cause (ADR 043).
const LOST_MAX: usize = 2;

/// The models whose requests are passed through, by id, with their servers. The default has none.
#[derive(Default)]
pub struct Passthrough(BTreeMap<String, Arc<ModelServers>>);

/// Why requests cannot be passed through with these settings.
#[derive(Debug, thiserror::Error)]
pub enum PassthroughError {
    /// The address of a server is invalid.
    #[error("{0:?} is not an http:// or https:// URL with a host and without a query")]
    Url(String),
    /// The key has characters that are not allowed in an HTTP header.
    #[error("the servers' key has characters that are not allowed in an HTTP header; check the file that holds the key")]
    Key,
    /// The certificates are not valid PEM.
    #[error("the servers' CA certificates are not valid PEM: {0}")]
    Certificate(String),
}

/// The servers of one model.
pub(crate) struct ModelServers {
    model: String,
    key: Option<Secret>,
    servers: Vec<(HttpClient, PassthroughMetrics)>,
    loads: Mutex<ServerLoads>,
}

#[derive(Default)]
struct ServerLoads {
    /// For each server: whether it is healthy, and its requests in flight. A server is healthy until a check or a request fails.
    servers: Vec<(bool, usize)>,
    /// The index of the server that comes first among equal ones.
    next: usize,
}

/// A request's place on a server. Dropping this value releases it.
pub(crate) struct PassedPlace {
    of: Arc<ModelServers>,
    at: usize,
    since: Instant,
}

impl Passthrough {
    /// Takes pairs of a model's id and the URL of a server. `key` is sent to all servers. `ca` has PEM certificates of authorities that are
    /// trusted besides the public ones.
    ///
    /// # Errors
    /// A URL, the key or a certificate is invalid.
    pub fn new(
        servers: impl IntoIterator<Item = (String, String)>,
        key: Option<Secret>,
        ca: Option<&[u8]>,
        metrics: &Metrics,
    ) -> Result<Self, PassthroughError> {
        let authorities = authorities(ca).map_err(PassthroughError::Certificate)?;
        if key.as_ref().is_some_and(|key| key.bearer().is_err()) {
            return Err(PassthroughError::Key);
        }
        let mut models: BTreeMap<String, ModelServers> = BTreeMap::new();
        for (model, url) in servers {
            let client = HttpClient::new(&url, authorities.clone(), CONNECT_TIMEOUT).map_err(|_| PassthroughError::Url(url))?;
            let of_model = models.entry(model.clone()).or_insert_with_key(|model| ModelServers {
                model: model.clone(),
                key: key.clone(),
                servers: Vec::new(),
                loads: Mutex::default(),
            });
            // A server that is named twice is one server.
            if of_model.servers.iter().all(|(other, _)| other.url() != client.url()) {
                let metrics = PassthroughMetrics::new(metrics, &model, client.url());
                of_model.servers.push((client, metrics));
                of_model.loads.get_mut().servers.push((true, 0));
            }
        }
        Ok(Self(models.into_iter().map(|(id, servers)| (id, servers.into())).collect()))
    }

    /// Returns the ids of the models.
    pub fn ids(&self) -> impl Iterator<Item = &String> {
        self.0.keys()
    }

    pub(crate) fn get(&self, id: &str) -> Option<&Arc<ModelServers>> {
        self.0.get(id)
    }

    /// Checks the health of all servers for ever.
    pub(crate) async fn watch(&self) -> Infallible {
        if self.0.is_empty() {
            return pending().await;
        }
        loop {
            join_all(self.0.values().flat_map(|model| (0..model.servers.len()).map(|at| model.check(at)))).await;
            sleep(CHECK_INTERVAL).await;
        }
    }
}

impl ModelServers {
    /// Sends a request with this path, query, headers and body to one server after the other, until one begins an answer. `None`: none does.
    pub(crate) async fn send(
        self: &Arc<Self>,
        path: &str,
        mut headers: HeaderMap,
        body: Bytes,
    ) -> Option<(Response, PassedPlace)> {
        headers.extend(self.authorization());
        let (mut tried, mut lost) = (Vec::new(), 0);
        while lost < LOST_MAX
            && let Some(place) = self.place(&tried)
        {
            tried.push(place.at);
            let sent = self.servers[place.at].0.send(Method::POST, path, headers.clone(), body.clone());
            match timeout(SILENCE_MAX, sent).await.unwrap_or(Err(HttpError::Timeout(SILENCE_MAX))) {
                Ok(answer) if answer.status() == StatusCode::SERVICE_UNAVAILABLE => place.failed("it answers 503"),
                Ok(answer) if answer.status() == StatusCode::UNAUTHORIZED => {
                    place.failed("it does not accept the key in --passthrough-key-file");
                }
                Ok(answer) => return Some((answer.map(Body::new), place)),
                Err(error) => {
                    lost += usize::from(!error.cannot_have_ended_the_server());
                    place.failed(&error_chain(&error));
                }
            }
        }
        None
    }

    fn authorization(&self) -> Option<(HeaderName, HeaderValue)> {
        Some((header::AUTHORIZATION, self.key.as_ref()?.bearer().ok()?))
    }

    /// Reserves a place on the server with the fewest requests in flight that was not tried yet. An unhealthy server gets a request only if
    /// no healthy one is left, because it may have recovered since its last check. Equal servers get requests in rotation.
    fn place(self: &Arc<Self>, tried: &[usize]) -> Option<PassedPlace> {
        let mut loads = self.loads.lock();
        let ServerLoads { servers, next } = &mut *loads;
        let count = servers.len();
        let untried = (0..count).map(|step| (*next + step) % count).filter(|at| !tried.contains(at));
        let at = untried.min_by_key(|at| (!servers[*at].0, servers[*at].1))?;
        *next = (at + 1) % count;
        servers[at].1 += 1;
        self.servers[at].1.inflight.increment(1.0);
        Some(PassedPlace { of: Arc::clone(self), at, since: Instant::now() })
    }

    /// Checks a server's `/health`. A server without this path, which answers 404, is healthy.
    async fn check(&self, at: usize) {
        let check = async {
            let headers = HeaderMap::from_iter(self.authorization());
            let answer = self.servers[at].0.send(Method::GET, "/health", headers, Bytes::new()).await?;
            let status = answer.status();
            // A connection is used again only if the answer was read.
            whole(answer, CHECK_BYTES_MAX).await?;
            Ok(status)
        };
        let health = match timeout(CHECK_TIMEOUT, check).await.unwrap_or(Err(HttpError::Timeout(CHECK_TIMEOUT))) {
            Ok(status) if status.is_success() || status == StatusCode::NOT_FOUND => Ok(()),
            Ok(status) => Err(format!("/health answers {}", status.as_u16())),
            Err(error) => Err(error_chain(&error)),
        };
        self.note_health(at, health);
    }

    fn note_health(&self, at: usize, health: Result<(), String>) {
        let (client, metrics) = &self.servers[at];
        metrics.healthy.set(f64::from(u8::from(health.is_ok())));
        let was_healthy = std::mem::replace(&mut self.loads.lock().servers[at].0, health.is_ok());
        let (model, server) = (&self.model, client.url());
        match health {
            Ok(()) if !was_healthy => tracing::info!(model, server, "the server of a passed-through model is healthy again"),
            Err(reason) if was_healthy => {
                tracing::warn!(model, server, reason, "the server of a passed-through model has failed")
            }
            _ => {}
        }
    }
}

impl PassedPlace {
    /// Records that the server has not answered, or not to the end. It is unhealthy until its next check.
    pub(crate) fn failed(&self, reason: &str) {
        self.of.servers[self.at].1.failures.increment(1);
        self.of.note_health(self.at, Err(reason.to_owned()));
    }

    /// Records that the answer is complete.
    pub(crate) fn answered(&self) {
        self.of.servers[self.at].1.duration.record(self.since.elapsed().as_secs_f64());
    }
}

impl Drop for PassedPlace {
    fn drop(&mut self) {
        self.of.loads.lock().servers[self.at].1 -= 1;
        self.of.servers[self.at].1.inflight.decrement(1.0);
    }
}
