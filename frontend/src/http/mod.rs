//! The HTTP edge: routes, bodies, answers.

mod answer;
mod body;
mod chat;
mod completions;
mod dashboard;
mod events;
mod explain;
mod health;
mod models;
mod progress;
mod readiness;
mod shape;

pub(crate) use progress::PromptDetails;

use crate::{
    FrontendSettings,
    admission::{Admission, Admitted},
    audit::LastAudit,
    dispatch::{Dispatcher, Limits, Prompt, Routers},
    error::{ApiError, Problem},
    metrics::{Endpoint, FrontendMetrics},
    model::ServedModel,
    prompt::reusable_hashes,
    recent::Recent,
    request::Options,
};
use axum::{
    Router,
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue},
    response::{IntoResponse, Response},
    routing::{get, post},
};
use std::{collections::BTreeSet, sync::Arc};
use tandem_kv::{HashKey, TokenId};
use tandem_node::{
    Metrics, Shutdown,
    trace::{Span, Tracer},
};
use tandem_proto::{link::Network, v1::Identity};

/// Prompts in one request.
const PROMPTS_MAX: usize = 128;
/// Texts longer than this are encoded on a thread of their own, so that others' tokens need not wait: about a millisecond.
const ENCODE_INLINE_BYTES: usize = 4 << 10;
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const DETAILS: HeaderName = HeaderName::from_static("x-tandem-details");
const EXPLAIN: HeaderName = HeaderName::from_static("x-tandem-explain");
/// Letters in the name of an account.
const ACCOUNT_MAX: usize = 64;
const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// What all requests share.
pub(crate) struct App {
    model: Arc<ServedModel>,
    dispatcher: Arc<Dispatcher>,
    metrics: Arc<FrontendMetrics>,
    admission: Admission,
    block_size: u32,
    /// Under which the cluster hashes prompts.
    hash_key: HashKey,
    body_max_bytes: usize,
    prompts_max: usize,
    tracer: Tracer,
    account_header: Option<HeaderName>,
    /// When this process began, in seconds since 1970: the age of the model as clients see it.
    since: u64,
    /// For the page at `/dashboard`; `None`: there is none.
    recent: Option<Arc<Recent>>,
    audit: Option<LastAudit>,
}

impl App {
    pub(crate) fn new(
        settings: FrontendSettings,
        routers: &BTreeSet<String>,
        network: Network,
        metrics: &Metrics,
        shutdown: Shutdown,
    ) -> Self {
        let metrics = Arc::new(FrontendMetrics::new(metrics, settings.model.id()));
        let identity = Identity {
            cluster: settings.cluster,
            version: env!("CARGO_PKG_VERSION").to_owned(),
            model: settings.model.id().to_owned(),
            revision: settings.model.revision().to_owned(),
            block_size: settings.block_size,
            key_fingerprint: network.key().fingerprint().to_owned(),
        };
        let hash_key = network.key().hash_key();
        let limits = Limits {
            attempts: settings.attempts,
            attempt_timeout: settings.attempt_timeout,
            first_token_timeout: settings.first_token_timeout,
            resumes: settings.resumes,
        };
        let routers = Routers::new(routers, network.clone(), identity, Arc::clone(&metrics));
        let dispatcher = Dispatcher::new(routers, network, limits, Arc::clone(&metrics));
        Self {
            model: Arc::new(settings.model),
            dispatcher: Arc::new(dispatcher),
            admission: Admission::new(settings.concurrent_requests, shutdown, Arc::clone(&metrics)),
            audit: settings.audit_result.map(|path| LastAudit::new(path, Arc::clone(&metrics))),
            metrics,
            block_size: settings.block_size,
            hash_key,
            body_max_bytes: settings.body_max_bytes,
            // A batch that could never be let in must not be told to try again.
            prompts_max: PROMPTS_MAX.min(settings.concurrent_requests),
            tracer: settings.tracer,
            account_header: settings.account_header,
            since: unix_seconds(),
            recent: (settings.dashboard_requests > 0).then(|| Arc::new(Recent::new(settings.dashboard_requests))),
        }
    }

    pub(crate) fn admission(&self) -> &Admission {
        &self.admission
    }

    /// Whom a request is for, if somebody in front of us says so. What cannot stand in a ledger is refused: it would be on nobody's bill.
    fn account(&self, headers: &HeaderMap) -> Result<String, ApiError> {
        let Some(name) = &self.account_header else { return Ok(String::new()) };
        let mut values = headers.get_all(name).iter();
        let Some(value) = values.next() else { return Ok(String::new()) };
        let fits = |name: &&str| {
            let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
            name.len() <= ACCOUNT_MAX && name.starts_with(|first: char| first.is_ascii_alphanumeric()) && name.bytes().all(letter)
        };
        let rule = "must be there once, with at most 64 letters, digits, -, _, ., : and @, a letter or digit first";
        let problem = || ApiError::invalid(name.as_str(), Problem::Rule { rule });
        // Of two, one may be the client's own.
        let value = values.next().is_none().then_some(value);
        value.and_then(|value| value.to_str().ok()).filter(fits).map(str::to_owned).ok_or_else(problem)
    }
}

/// Everything there is. Bodies are taken as JSON whatever their content type says.
pub(crate) fn routes(app: Arc<App>) -> Router {
    let dashboard = if app.recent.is_some() { dashboard::routes() } else { Router::new() };
    dashboard
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*id}", get(models::one))
        .route("/health", get(health::live))
        .route("/live", get(health::live))
        .route("/ready", get(health::ready))
        .route("/metrics", get(health::metrics))
        .route("/openapi.json", get(health::openapi))
        .fallback(async || ApiError::UnknownPath)
        .method_not_allowed_fallback(async || ApiError::Method)
        .with_state(app)
}

/// A request that was let in, with what its headers say.
struct Incoming {
    app: Arc<App>,
    /// Ours: unique, whatever the client calls its request.
    id: String,
    /// Taken by a streamed answer, which finishes it.
    admitted: Option<Admitted>,
    details: bool,
    /// Instead of an answer, why it would be placed where.
    explain: bool,
    traceparent: String,
    /// The request's trace begins with it.
    span: Span,
    account: String,
}

/// Lets a request in, has `answer` answer it, and sees to it that every way out is counted.
async fn handle<F>(app: Arc<App>, endpoint: Endpoint, request: Request, answer: F) -> Response
where
    F: AsyncFnOnce(&mut Incoming, bytes::Bytes) -> Result<Response, ApiError>,
{
    let (parts, body) = request.into_parts();
    let mut admitted = match app.admission.enter(endpoint) {
        Ok(admitted) => Some(admitted),
        Err(error) => {
            body::discard(body).await;
            return error.into_response();
        }
    };
    let id = uuid::Uuid::new_v4().simple().to_string();
    let wants = |name| parts.headers.get(name).is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"true"));
    let (details, explain, traceparent) = (wants(DETAILS), wants(EXPLAIN), traceparent(&parts.headers));
    let span = app.tracer.request(&traceparent, endpoint.operation());
    // Whoever is behind goes on with ours, or with the client's.
    let traceparent = span.traceparent().unwrap_or(traceparent);
    if let Some(admitted) = &mut admitted {
        admitted.trace(&span);
    }
    let body_max_bytes = app.body_max_bytes;
    let account = app.account(&parts.headers);
    let mut incoming = Incoming { app, id, admitted, details, explain, traceparent, span, account: String::new() };
    let result = match (body::read(body, body_max_bytes).await, account) {
        (Ok(body), Ok(account)) => {
            incoming.account = account;
            answer(&mut incoming, body).await
        }
        (Err(error), _) | (_, Err(error)) => Err(error),
    };
    let mut response = result.unwrap_or_else(|error| {
        tracing::debug!(request_id = %incoming.id, status = error.status().as_u16(), "refused");
        error.into_response()
    });
    if let Some(mut admitted) = incoming.admitted.take() {
        admitted.finish(response.status());
    }
    if let Ok(id) = HeaderValue::from_str(&incoming.id) {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

impl Incoming {
    /// Only the served model may be asked for.
    fn check_model(&mut self, model: Option<&str>) -> Result<(), ApiError> {
        match model {
            None => Err(ApiError::invalid("model", Problem::Missing)),
            Some(model) if model == self.app.model.id => {
                if let Some(admitted) = &mut self.admitted {
                    admitted.model_is_known();
                }
                Ok(())
            }
            Some(model) => Err(ApiError::ModelNotFound { model: model.to_owned() }),
        }
    }

    /// The prompt as it goes to router and worker. `index`: of how many in this request it is.
    fn prompt(&self, index: usize, tokens: Vec<TokenId>, options: &Options, prompt_logprobs: Option<u32>) -> Prompt {
        let namespace = self.app.model.namespace(&options.cache_salt);
        let room = self.app.model.context_length.saturating_sub(tokens.len() as u32);
        Prompt {
            request_id: format!("{}-{index}", self.id),
            traceparent: self.traceparent.clone(),
            span: self.span.clone(),
            account: self.account.clone(),
            model: self.app.model.id.clone(),
            sequence_hashes: reusable_hashes(&self.app.hash_key, &namespace, self.app.block_size, &tokens),
            tokens,
            namespace,
            sampling: options.sampling.clone(),
            samples: options.samples,
            max_tokens: options.sampling.max_tokens.unwrap_or(room),
            prompt_logprobs,
        }
    }
}

/// Refuses a text that cannot fit before it is encoded, which takes minutes for the longest body that is read.
fn check_text(model: &ServedModel, text_bytes: usize, param: &'static str) -> Result<(), ApiError> {
    let (context_length, tokens_min) = (model.context_length, model.tokenizer.tokens_min(text_bytes));
    if tokens_min <= context_length as usize {
        return Ok(());
    }
    Err(ApiError::PromptLength { context_length, tokens_min, param })
}

/// Whether prompt and new tokens (at least `new_tokens`) fit into the model's context.
fn check_context(
    model: &ServedModel,
    prompt_tokens: usize,
    new_tokens: u32,
    param: &'static str,
    limit_param: &'static str,
) -> Result<(), ApiError> {
    let context_length = model.context_length;
    let prompt_tokens = u32::try_from(prompt_tokens).unwrap_or(u32::MAX);
    if u64::from(prompt_tokens) + u64::from(new_tokens) <= u64::from(context_length) {
        return Ok(());
    }
    // The culprit: a prompt that leaves no room for a token, else the wish for too many.
    let param = if prompt_tokens >= context_length { param } else { limit_param };
    Err(ApiError::ContextLength { context_length, prompt_tokens, new_tokens, param, limit_param })
}

/// Runs `encode` here when there is little text, else where it holds up nobody.
async fn encode<T: Send + 'static>(
    text_bytes: usize,
    encode: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    if text_bytes <= ENCODE_INLINE_BYTES {
        return encode();
    }
    tokio::task::spawn_blocking(encode).await.unwrap_or(Err(ApiError::Encode))
}

/// The client's trace, if it is one (W3C: `00-…-…-01`).
fn traceparent(headers: &HeaderMap) -> String {
    let value = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let valid = value.len() == 55 && value.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if valid { value.to_owned() } else { String::new() }
}

fn unix_seconds() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |since| since.as_secs())
}
