//! The state of a frontend that all requests share.

use super::{body::Bodies, trust::Trust};
use crate::{
    admission::{Admission, Client, SequenceLimits},
    audit::LastAudit,
    calls::CallLog,
    clock::unix_time,
    cores::Cores,
    dispatch::{AttemptLimits, Dispatcher, Routers},
    error::ApiError,
    heads::Heads,
    keys::{self, Key, KeyCache, Keys},
    metrics::{FrontendMetrics, encodings},
    models::Models,
    passthrough::Passthrough,
    recent::Recent,
    render::{InvalidRenderer, Renderers},
    settings::{CacheIsolation, FrontendSettings},
};
use axum::http::{HeaderMap, HeaderName, header, request::Parts};
use lru::LruCache;
use parking_lot::Mutex;
use std::{collections::BTreeSet, num::NonZero, sync::Arc, time::Duration};
use tandem_api::{Problem, body_bytes_max};
use tandem_grammar::Constraint;
use tandem_kv::{HashKey, Namespace, Priority};
use tandem_process::{LogLimit, Metrics, Shutdown, trace::Tracer};
use tandem_proto::{
    channel::{Network, PeerRole},
    v1::Identity,
};
use tandem_text::{EncodingCache, ServedModel};

const DETAILS: HeaderName = HeaderName::from_static("x-tandem-details");
pub(super) const EXPLAIN: HeaderName = HeaderName::from_static("x-tandem-explain");
/// Maximum number of constraints whose passed checks are remembered. A constraint has 256 KiB at most.
const CHECKED_MAX: NonZero<usize> = NonZero::new(64).expect("not 0");
const MAX_WAIT: &str = "x-max-wait";
const PRIORITY: &str = "x-request-priority";

/// The options in a request's headers. The peer was allowed to send these headers.
pub(super) struct HeaderOptions {
    /// The answer has the object `tandem` (`x-tandem-details`).
    pub(super) details: bool,
    /// The reply explains the placement instead of answering the prompt (`x-tandem-explain`).
    pub(super) explain: bool,
    pub(super) account: String,
    /// The client's name for the operator: that of its key, or that of the program in its user agent.
    pub(super) client: String,
    /// The clients with which the request shares cached KV: those of this account, or of this account and key. `None`: all clients.
    pub(super) cache_owner: Option<String>,
    /// The longest time for which each prompt may wait in the queue (`x-max-wait`, at most the frontend's setting); `None`: no limit.
    pub(super) max_wait: Option<Duration>,
    /// The priority in the header `x-request-priority`; `None`: there is no such header.
    priority: Option<i32>,
}

pub(crate) struct App {
    pub(super) models: Models,
    pub(crate) passed: Passthrough,
    pub(super) dispatcher: Arc<Dispatcher>,
    pub(crate) metrics: Arc<FrontendMetrics>,
    pub(crate) admission: Admission,
    pub(super) block_size: u32,
    pub(super) hash_key: HashKey,
    pub(super) bodies: Bodies,
    pub(super) parsing: Cores,
    pub(super) encoding: Cores,
    pub(super) constraints: Cores,
    /// The constraints that have passed their check, by client, so that the time of a check reveals nothing about other clients'
    /// constraints.
    pub(super) checked: Mutex<LruCache<(Option<Client>, Constraint), ()>>,
    pub(super) encodings: Arc<EncodingCache>,
    pub(super) renderers: Renderers,
    pub(super) tracer: Tracer,
    /// See [`FrontendSettings::keep_alive`].
    pub(super) keep_alive: Duration,
    /// See [`FrontendSettings::max_wait`].
    max_wait: Option<Duration>,
    pub(super) trust: Trust,
    /// `None`: requests need no key.
    pub(super) keys: Option<Arc<Keys>>,
    /// `None`: there is no audit log.
    pub(crate) call_log: Option<CallLog>,
    account_header: Option<HeaderName>,
    cache_isolation: CacheIsolation,
    /// The time at which this process started, in seconds since 1970. Clients see it as the model's creation time.
    pub(super) since: u64,
    /// The ended prompts that the dashboard shows; `None`: there is no dashboard.
    pub(super) recent: Option<Arc<Recent>>,
    pub(super) heads: Heads,
    pub(super) audit: Option<LastAudit>,
    pub(super) failures_logged: LogLimit,
    /// See [`FrontendSettings::alternatives`].
    pub(super) alternatives: Option<u32>,
}

impl App {
    /// # Errors
    /// The address or the certificates of a renderer cannot be used.
    pub(crate) fn new(
        settings: FrontendSettings,
        keys: Option<Arc<Keys>>,
        trust: Trust,
        routers: &BTreeSet<String>,
        network: Network,
        registry: &Metrics,
        shutdown: Shutdown,
    ) -> Result<Self, InvalidRenderer> {
        let (metrics, limits) = (Arc::new(FrontendMetrics::new(registry)), AttemptLimits::of(&settings));
        let renderers = Renderers::new(settings.renderers)?;
        let identity = Identity {
            cluster: settings.cluster,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            block_size: settings.block_size,
            key_fingerprint: network.key().fingerprint().to_owned(),
            ..Identity::default()
        };
        let models = Models::new(settings.models, &identity);
        let identities = models.iter().map(|served| Arc::clone(&served.identity)).collect();
        let routers =
            Routers::new(routers, network.expecting(&[PeerRole::Router]), identities, settings.router_wait, Arc::clone(&metrics));
        let dispatcher = Dispatcher::new(routers, network.expecting(&[PeerRole::DecodeWorker]), limits, Arc::clone(&metrics));
        let body_max_bytes = settings.body_max_bytes.unwrap_or_else(|| body_bytes_max(models.context_length_max()));
        // One client may use half of the budget, so a larger body can never be read. It is refused with 413, because a client would retry
        // after a 503.
        let body_max_bytes = body_max_bytes.min(settings.bodies_max_bytes.div_ceil(2));
        let sequences = SequenceLimits { all: settings.concurrent_sequences, per_client: settings.sequences_per_client };
        Ok(Self {
            models,
            passed: settings.passthrough,
            dispatcher: Arc::new(dispatcher),
            admission: Admission::new(sequences, shutdown, Arc::clone(&metrics)),
            audit: settings.audit_result.map(|path| LastAudit::new(path, registry.clone())),
            failures_logged: LogLimit::default(),
            alternatives: settings.alternatives,
            metrics,
            block_size: settings.block_size,
            hash_key: network.key().hash_key(),
            bodies: Bodies::new(body_max_bytes, settings.bodies_max_bytes),
            parsing: Cores::default(),
            encoding: Cores::default(),
            constraints: Cores::one_for_each_client(),
            checked: Mutex::new(LruCache::new(CHECKED_MAX)),
            encodings: Arc::new(EncodingCache::new(settings.encoding_cache_bytes, encodings(registry))),
            renderers,
            tracer: settings.tracer,
            keep_alive: settings.keep_alive,
            max_wait: settings.max_wait,
            trust,
            keys,
            call_log: settings.audit_log.map(|file| CallLog::new(file, registry)),
            account_header: settings.account_header,
            cache_isolation: settings.cache_isolation,
            since: unix_time().as_secs(),
            heads: Heads::new(registry.clone()),
            recent: (settings.dashboard_requests > 0).then(|| Arc::new(Recent::new(settings.dashboard_requests))),
        })
    }

    /// Reads the options in a request's headers. The account is that of the request's key, if it has one.
    ///
    /// # Errors
    /// The peer sent a header that it may not send, or one of these headers is malformed.
    pub(super) fn header_options(&self, request: &Parts, key: Option<&Key>) -> Result<HeaderOptions, ApiError> {
        let account = match key {
            Some(key) => key.entry.account().to_owned(),
            None => self.account(request)?,
        };
        let cache_owner = match (key, self.cache_isolation) {
            // No account has a slash in its name, so this owner never equals an account.
            (Some(Key { entry, .. }), _) if entry.cache == KeyCache::Key => Some(format!("{account}/{}", entry.name)),
            (_, CacheIsolation::Account) => Some(account.clone()),
            (_, CacheIsolation::Shared) => None,
        };
        Ok(HeaderOptions {
            details: self.trust.flag(request, DETAILS)?,
            explain: self.trust.flag(request, EXPLAIN)?,
            account,
            client: client_name(&request.headers, key),
            cache_owner,
            max_wait: max_wait(&request.headers, self.max_wait)?,
            priority: priority(&request.headers)?,
        })
    }

    /// Returns a request's cache namespace: model, `cache_salt`, and [`HeaderOptions::cache_owner`].
    pub(super) fn namespace(model: &ServedModel, cache_owner: Option<&str>, cache_salt: &str) -> Namespace {
        let namespace = Namespace::new(&model.id, &model.revision, "", cache_salt);
        cache_owner.map_or(namespace.clone(), |owner| namespace.of_account(owner))
    }

    /// Reads the request's account.
    ///
    /// # Errors
    /// The peer is not trusted to set the account, or the ledger does not allow the name.
    fn account(&self, request: &Parts) -> Result<String, ApiError> {
        let Some(name) = &self.account_header else { return Ok(String::new()) };
        let mut values = request.headers.get_all(name).iter();
        let Some(value) = values.next() else { return Ok(String::new()) };
        if !self.trust.trusts(request) {
            return Err(ApiError::Untrusted { header: name.clone() });
        }
        let rule = "must occur once, start with a letter or digit, and have at most 64 letters, digits, -, _, ., : and @";
        let problem = || ApiError::invalid(name.as_str(), Problem::Rule { rule });
        // A header that occurs twice is refused: one of the two may come from the client and not from the proxy.
        let value = values.next().is_none().then_some(value);
        value.and_then(|value| value.to_str().ok()).filter(|name| keys::is_name(name)).map(str::to_owned).ok_or_else(problem)
    }
}

impl HeaderOptions {
    /// Returns the priority of a request: the one in its body (`in_body`), else the one in the header, else that of the key.
    ///
    /// The operator has set a key's priority, so it ranks the request among those of all accounts. A client without a key can rank its
    /// request below those of other accounts, but not above them.
    ///
    /// # Errors
    /// The client requests a better priority than that of its key.
    pub(super) fn priority(&self, in_body: Option<i32>, key: Option<&Key>) -> Result<Priority, ApiError> {
        let asked = in_body.map(|found| ("priority", found)).or(self.priority.map(|found| (PRIORITY, found)));
        let Some(key) = key else {
            let within = asked.map_or(0, |(_, found)| found);
            return Ok(Priority { across: within.max(0), within });
        };
        let best = key.entry.priority.unwrap_or(0);
        let (param, found) = asked.unwrap_or((PRIORITY, best));
        if found < best {
            return Err(ApiError::invalid(param, Problem::Priority { best, found }));
        }
        Ok(Priority { across: found, within: found })
    }
}

/// Returns the client's name for the operator. It has at most 128 bytes.
fn client_name(headers: &HeaderMap, key: Option<&Key>) -> String {
    if let Some(key) = key {
        return format!("key:{}", key.entry.name);
    }
    let agent = headers.get(header::USER_AGENT).and_then(|agent| agent.to_str().ok()).unwrap_or_default();
    let is_name = |letter: &char| letter.is_ascii_alphanumeric() || "-_.".contains(*letter);
    format!("agent:{}", agent.chars().take_while(is_name).take(32).collect::<String>())
}

/// Returns the priority in the header `x-request-priority`.
///
/// # Errors
/// The header is not a whole number of 32 bits, or occurs twice.
fn priority(headers: &HeaderMap) -> Result<Option<i32>, ApiError> {
    let mut values = headers.get_all(PRIORITY).iter();
    let Some(value) = values.next() else { return Ok(None) };
    let number = value.to_str().ok().and_then(|value| value.trim().parse().ok()).filter(|_| values.next().is_none());
    let rule = "must occur once, and be a whole number between -2147483648 and 2147483647";
    number.map(Some).ok_or_else(|| ApiError::invalid(PRIORITY, Problem::Rule { rule }))
}

/// Returns the limit on the wait in the header `x-max-wait`, but at most `limit`, which is the frontend's own limit.
///
/// # Errors
/// The header is not a positive number.
fn max_wait(headers: &HeaderMap, limit: Option<Duration>) -> Result<Option<Duration>, ApiError> {
    let Some(value) = headers.get(MAX_WAIT) else { return Ok(limit) };
    let seconds = value.to_str().ok().and_then(|value| value.parse::<f64>().ok()).filter(|seconds| *seconds > 0.0);
    let wait = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    let wait = wait.ok_or_else(|| ApiError::invalid(MAX_WAIT, Problem::Rule { rule: "must be a number of seconds above 0" }))?;
    Ok(Some(limit.map_or(wait, |limit| limit.min(wait))))
}
