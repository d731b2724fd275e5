//! A request from its headers to its reply: reads the body, parses it, reserves its sequences, tokenises its texts, and counts how it
//! ended.

use super::{App, RequestId, app::Asked, body, context::elements_max};
use crate::{
    admission::{Admitted, Client},
    dispatch::Prompt,
    error::{ApiError, Problem},
    listen::{Peer, PeerAddress},
    metrics::Endpoint,
    prompt::reusable_hashes,
    request::{self, Options},
};
use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, request::Parts},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use serde::de::DeserializeOwned;
use std::sync::Arc;
use tandem_kv::TokenId;
use tandem_node::trace::Span;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Bodies longer than this are parsed on a blocking thread; shorter ones take less than a millisecond.
const PARSE_INLINE_BYTES: usize = 64 << 10;
/// Texts longer than this are tokenised on a blocking thread; shorter ones take a millisecond at most.
const ENCODE_INLINE_BYTES: usize = 4 << 10;

/// A request that was taken in, with what its headers say.
pub(super) struct Incoming {
    pub(super) app: Arc<App>,
    /// The request id, which this server makes; unique whatever the client sends.
    pub(super) id: String,
    /// Taken by a streamed answer, which finishes it.
    pub(super) admitted: Option<Admitted>,
    pub(super) asked: Asked,
    traceparent: String,
    /// The first span of the request's trace.
    pub(super) span: Span,
    /// The client that the limits count this request for.
    client: Option<Client>,
    /// The body's part of the budget, for as long as the request is parsed and encoded.
    body: body::Held,
}

/// Takes a request in, has `answer` answer it, and sees to it that every way out is counted.
pub(super) async fn handle<F>(app: Arc<App>, endpoint: Endpoint, request: Request, answer: F) -> Response
where
    F: AsyncFnOnce(&mut Incoming, Bytes) -> Result<Response, ApiError>,
{
    let (parts, body) = request.into_parts();
    let mut admitted = match app.admission.enter(endpoint) {
        Ok(admitted) => Some(admitted),
        Err(error) => {
            body::discard(body).await;
            return error.into_response();
        }
    };
    let RequestId(id) = parts.extensions.get().cloned().expect("every request has been named");
    let trusted = app.trust.trusts(&parts);
    // `traceparent` of an untrusted peer neither continues its trace nor decides about sampling.
    let traceparent = if trusted { traceparent(&parts.headers) } else { String::new() };
    let span = app.tracer.request(&traceparent, endpoint.operation());
    // Routers and workers continue this span, or the proxy's if this one is not sampled.
    let traceparent = span.traceparent().unwrap_or(traceparent);
    if let Some(admitted) = &mut admitted {
        admitted.trace(&span);
    }
    let asked = app.asked(&parts.headers, trusted);
    let client = client(asked.as_ref().map_or("", |asked| &asked.account), &app, &parts);
    let read = app.bodies.read(client.as_ref(), &parts.headers, body).await;
    let mut incoming =
        Incoming { app, id, admitted, asked: Asked::default(), traceparent, span, client, body: body::Held::default() };
    let result = match (read, asked) {
        (Ok(read), Ok(asked)) => {
            incoming.asked = asked;
            incoming.body = read.held;
            answer(&mut incoming, read.bytes).await
        }
        (Err(error), _) | (_, Err(error)) => Err(error),
    };
    let response = result.unwrap_or_else(|error| {
        tracing::debug!(request_id = %incoming.id, status = error.status().as_u16(), "refused");
        error.into_response()
    });
    if let Some(mut admitted) = incoming.admitted.take() {
        admitted.finish(response.status());
    }
    response
}

/// A request without an account is counted by the address that it came from, unless that is a listed proxy's: all its clients have it.
fn client(account: &str, app: &App, parts: &Parts) -> Option<Client> {
    if !account.is_empty() {
        return Some(Client::Account(account.to_owned()));
    }
    let PeerAddress(address) = parts.extensions.get().copied()?;
    (!app.trust.lists(address)).then(|| Client::Address(Peer::from(address)))
}

impl Incoming {
    /// Reads the body's JSON, without holding up others.
    pub(super) async fn parse<T: DeserializeOwned + Send + 'static>(&self, body: Bytes) -> Result<T, ApiError> {
        let elements_max = elements_max(self.app.model.context_length);
        if body.len() <= PARSE_INLINE_BYTES {
            return request::parse(&body, elements_max);
        }
        self.app.parsing.run(self.client.as_ref(), move || request::parse(&body, elements_max)).await
    }

    /// Runs `encode`, which makes tokens of this much text, without holding up others.
    pub(super) async fn encode<T: Send + 'static>(
        &self,
        text_bytes: usize,
        encode: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        if text_bytes <= ENCODE_INLINE_BYTES {
            return encode();
        }
        self.app.encoding.run(self.client.as_ref(), encode).await
    }

    /// Takes the sequences of this many prompts, all or none.
    pub(super) fn admit(&mut self, prompts: usize, options: &Options) -> Result<(), ApiError> {
        let sequences = prompts.saturating_mul(options.samples as usize);
        let client = self.client.clone();
        self.admitted.as_mut().map_or(Ok(()), |admitted| admitted.take(client, sequences))
    }

    /// The request's text is encoded: its body holds no memory any more.
    pub(super) fn body_is_done(&mut self) {
        self.body = body::Held::default();
    }

    /// Only the served model may be asked for.
    pub(super) fn check_model(&mut self, model: Option<&str>) -> Result<(), ApiError> {
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
    pub(super) fn prompt(&self, index: usize, tokens: Vec<TokenId>, options: &Options, prompt_logprobs: Option<u32>) -> Prompt {
        let namespace = self.app.namespace(&self.asked.account, &options.cache_salt);
        let room = self.app.model.context_length.saturating_sub(tokens.len() as u32);
        Prompt {
            request_id: format!("{}-{index}", self.id),
            traceparent: self.traceparent.clone(),
            span: self.span.clone(),
            account: self.asked.account.clone(),
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

/// The caller's trace, if it is one (W3C: `00-…-…-01`).
fn traceparent(headers: &HeaderMap) -> String {
    let value = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let valid = value.len() == 55 && value.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if valid { value.to_owned() } else { String::new() }
}
