//! Admission: limits the number of sequences that run at a time, in total and for each client. The sequences of a request are released when
//! its [`Admitted`] is dropped.

use crate::{
    calls::Call,
    error::ApiError,
    keys::KeySequences,
    metrics::{Endpoint, FrontendMetrics},
};
use axum::http::StatusCode;
use parking_lot::Mutex;
use std::sync::Arc;
use tandem_process::{Counts, Shutdown, listen::ClientNetwork, trace::Span};
use tokio::time::Instant;
use tokio_util::task::{TaskTracker, task_tracker::TaskTrackerToken};

/// The client to which [`SequenceLimits::per_client`] applies: the account if a trusted proxy names one, else the client's address.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Client {
    Account(String),
    /// The client's IPv4 address, or the IPv6 network to which its address belongs.
    Address(ClientNetwork),
}

/// Limits on the number of sequences (prompts × `n`) that run at a time.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SequenceLimits {
    pub(crate) all: usize,
    /// The maximum number of sequences of one client; `None`: one client may use all sequences.
    pub(crate) per_client: Option<usize>,
}

/// Admits requests. Cheap to clone.
#[derive(Clone)]
pub(crate) struct Admission {
    sequences: Arc<Sequences>,
    running: TaskTracker,
    pub(crate) shutdown: Shutdown,
    metrics: Arc<FrontendMetrics>,
}

struct Sequences {
    limits: SequenceLimits,
    used: Mutex<Counts<Client>>,
}

/// An admitted request. Dropping this value releases the request's sequences and decrements the gauges. If the request was not marked as
/// finished before, it counts as cancelled, because its client has disconnected.
pub(crate) struct Admitted {
    pub(crate) endpoint: Endpoint,
    pub(crate) since: Instant,
    /// The id of the model that the request names, if that model is served or passed through; else empty.
    pub(crate) model: String,
    /// The span that records the end of the request.
    pub(crate) span: Span,
    /// The request's key and its line in the audit log.
    pub(crate) call: Arc<Call>,
    finished: bool,
    /// The number of reserved sequences, and the client to whose limit they count; no client if there is no limit for each client. `None`
    /// while the request is being read and parsed.
    reserved: Option<(usize, Option<Client>)>,
    /// The sequences that count towards the limit of the request's key.
    _of_key: Option<KeySequences>,
    sequences: Arc<Sequences>,
    metrics: Arc<FrontendMetrics>,
    _running: TaskTrackerToken,
}

impl Admission {
    pub(crate) fn new(limits: SequenceLimits, shutdown: Shutdown, metrics: Arc<FrontendMetrics>) -> Self {
        let sequences = Arc::new(Sequences { limits, used: Mutex::default() });
        Self { sequences, running: TaskTracker::new(), shutdown, metrics }
    }

    /// Admits a request, so that its body may be read. When its sequences can be counted, [`Admitted::reserve`] reserves them.
    pub(crate) fn enter(&self, endpoint: Endpoint, call: Arc<Call>) -> Admitted {
        self.metrics.reading_requests.increment(1.0);
        Admitted {
            endpoint,
            since: Instant::now(),
            model: String::new(),
            span: Span::default(),
            call,
            finished: false,
            reserved: None,
            _of_key: None,
            sequences: Arc::clone(&self.sequences),
            metrics: Arc::clone(&self.metrics),
            _running: self.running.token(),
        }
    }

    /// Returns the number of requests that were admitted and have not ended.
    pub(crate) fn running(&self) -> usize {
        self.running.len()
    }
}

impl Admitted {
    /// Reserves all `sequences` of the request (prompts × `n`), or none and fails. Must be called once, when the request has been parsed.
    /// Requests are not queued here, because a queue would only hide the overload.
    ///
    /// # Errors
    /// The limit of the key, of the client or of all clients is reached.
    pub(crate) fn reserve(&mut self, client: Option<Client>, sequences: usize) -> Result<(), ApiError> {
        let SequenceLimits { all, per_client } = self.sequences.limits;
        let client = client.zip(per_client);
        let max = client.as_ref().map_or(all, |(_, per_client)| all.min(*per_client));
        let key = self.call.key.as_ref();
        let max = key.and_then(|key| key.entry.max_sequences).map_or(max, |of_key| max.min(of_key.get() as usize));
        if sequences > max {
            return Err(ApiError::TooManySequences { sequences, max });
        }
        let of_key = key.map(|key| key.reserve(sequences)).transpose().map_err(|max| ApiError::ClientLimit { max })?;
        let mut used = self.sequences.used.lock();
        if let Some((client, per_client)) = &client
            && used.of(client) + sequences > *per_client
        {
            return Err(ApiError::ClientLimit { max: *per_client });
        }
        if used.all + sequences > all {
            return Err(ApiError::Overloaded);
        }
        let client = client.map(|(client, _)| client);
        used.add(client.as_ref(), sequences);
        self.reserved = Some((sequences, client));
        self._of_key = of_key;
        self.metrics.reading_requests.decrement(1.0);
        self.metrics.inflight_requests.increment(1.0);
        self.metrics.inflight_sequences.increment(sequences as f64);
        Ok(())
    }

    /// Whether the request's sequences are reserved.
    pub(crate) fn is_reserved(&self) -> bool {
        self.reserved.is_some()
    }

    pub(crate) fn finish(&mut self, status: StatusCode) {
        self.finished = true;
        self.call.answered(status);
        self.span.set("http.response.status_code", u32::from(status.as_u16()));
        if status.is_server_error() {
            self.span.fail("server_error");
        }
        self.metrics.finished(self.endpoint, &self.model, status, self.since.elapsed());
    }
}

impl Drop for Admitted {
    fn drop(&mut self) {
        match &self.reserved {
            Some((sequences, client)) => {
                self.sequences.used.lock().remove(client.as_ref(), *sequences);
                self.metrics.inflight_requests.decrement(1.0);
                self.metrics.inflight_sequences.decrement(*sequences as f64);
            }
            None => self.metrics.reading_requests.decrement(1.0),
        }
        if !self.finished {
            self.span.fail("cancelled");
            self.call.cancelled();
            self.metrics.cancelled(self.endpoint, &self.model);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_process::Metrics;

    fn admission(all: usize, per_client: Option<usize>) -> (Admission, Metrics, Shutdown) {
        let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
        let frontend = Arc::new(FrontendMetrics::new(&metrics));
        (Admission::new(SequenceLimits { all, per_client }, shutdown.clone(), frontend), metrics, shutdown)
    }

    fn admit(admission: &Admission, account: &str, sequences: usize) -> Result<Admitted, ApiError> {
        let mut admitted = admission.enter(Endpoint::Completions, Arc::default());
        admitted.reserve(Some(Client::Account(account.to_owned())), sequences)?;
        Ok(admitted)
    }

    #[tokio::test]
    async fn request_reserves_all_its_sequences_or_none_and_releases_them() {
        let (admission, metrics, _shutdown) = admission(3, None);
        let three = admit(&admission, "a", 3).expect("three sequences are free");
        assert!(metrics.render().contains("tandem_frontend_inflight_sequences 3"), "{}", metrics.render());
        assert!(matches!(admit(&admission, "b", 1), Err(ApiError::Overloaded)));
        drop(three);
        let one = admit(&admission, "a", 1).expect("all sequences were released");
        assert!(matches!(admit(&admission, "b", 3), Err(ApiError::Overloaded)));
        let _two = admit(&admission, "b", 2).expect("the refused request reserved no sequences");
        assert!(matches!(admit(&admission, "a", 4), Err(ApiError::TooManySequences { sequences: 4, max: 3 })));
        drop((one, _two));
        for line in ["inflight_requests 0", "inflight_sequences 0", "reading_requests 0", "cancelled_total 6"] {
            assert!(metrics.render().contains(&format!("tandem_frontend_{line}")), "{line} in {}", metrics.render());
        }
    }

    #[tokio::test]
    async fn one_client_cannot_use_more_than_its_share_of_sequences() {
        let (admission, _metrics, _shutdown) = admission(4, Some(2));
        let first = admit(&admission, "a", 2).expect("the client has two free sequences");
        assert!(matches!(admit(&admission, "a", 1), Err(ApiError::ClientLimit { max: 2 })));
        assert!(matches!(admit(&admission, "a", 3), Err(ApiError::TooManySequences { sequences: 3, max: 2 })));
        let _other = admit(&admission, "b", 2).expect("another client has its own limit");
        drop(first);
        drop(admit(&admission, "a", 1).expect("the client's sequences were released"));
        assert_eq!(admission.sequences.used.lock().by_key.len(), 1, "a client without sequences is removed");
    }
}
