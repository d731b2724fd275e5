//! A request from its headers to its reply: it is let in, its body is read, and every way out is counted.

use super::{App, RequestId, app::Asked, body};
use crate::{
    admission::Admitted,
    dispatch::Prompt,
    error::{ApiError, Problem},
    metrics::Endpoint,
    prompt::reusable_hashes,
    request::Options,
};
use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName},
    response::{IntoResponse, Response},
};
use std::sync::Arc;
use tandem_kv::TokenId;
use tandem_node::trace::Span;

const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// A request that was let in, with what its headers say.
pub(super) struct Incoming {
    pub(super) app: Arc<App>,
    /// Ours: unique, whatever the client calls its request.
    pub(super) id: String,
    /// Taken by a streamed answer, which finishes it.
    pub(super) admitted: Option<Admitted>,
    pub(super) asked: Asked,
    traceparent: String,
    /// The request's trace begins with it.
    pub(super) span: Span,
}

/// Lets a request in, has `answer` answer it, and sees to it that every way out is counted.
pub(super) async fn handle<F>(app: Arc<App>, endpoint: Endpoint, request: Request, answer: F) -> Response
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
    let RequestId(id) = parts.extensions.get().cloned().expect("every request has been named");
    let trusted = app.trust.trusts(&parts);
    // A stranger's trace is not joined, and whether the request is sampled is not the stranger's choice.
    let traceparent = if trusted { traceparent(&parts.headers) } else { String::new() };
    let span = app.tracer.request(&traceparent, endpoint.operation());
    // The processes behind go on with this span, or with that of the proxy if this one is not sampled.
    let traceparent = span.traceparent().unwrap_or(traceparent);
    if let Some(admitted) = &mut admitted {
        admitted.trace(&span);
    }
    let body_max_bytes = app.body_max_bytes;
    let asked = app.asked(&parts.headers, trusted);
    let mut incoming = Incoming { app, id, admitted, asked: Asked::default(), traceparent, span };
    let result = match (body::read(body, body_max_bytes).await, asked) {
        (Ok(body), Ok(asked)) => {
            incoming.asked = asked;
            answer(&mut incoming, body).await
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

impl Incoming {
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
