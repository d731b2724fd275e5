//! Handles a request from its headers to its reply: admits it, reads its body, answers it, and counts its outcome.

use super::{
    app::App,
    body::{self, BodyForm},
    explain::explain,
    incoming::{Incoming, Work},
    request_id::{ClientRequestId, HttpRequestId},
    respond::{Reply, respond},
};
use crate::{
    admission::{Admitted, Client},
    calls::Call,
    error::ApiError,
    metrics::Endpoint,
};
use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue, request::Parts},
    response::{IntoResponse, Response},
};
use bytes::Bytes;
use std::sync::Arc;
use tandem_kv::Priority;
use tandem_process::listen::{ClientNetwork, PeerAddress};
use tokio::sync::watch;

/// Names the fields of a request that this server does not know.
const IGNORED: HeaderName = HeaderName::from_static("x-tandem-ignored-parameters");
pub(super) const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");

/// Admits a request, converts its body to a job or an answer with `prepare`, and replies with the answer. Every outcome is counted.
pub(super) async fn handle<F, W>(app: Arc<App>, endpoint: Endpoint, request: Request, prepare: F) -> Response
where
    F: AsyncFnOnce(&mut Incoming, Bytes) -> Result<W, ApiError>,
    W: Into<Work>,
{
    let (parts, body) = request.into_parts();
    // Requests to the admin listener have no call.
    let call: Arc<Call> = parts.extensions.get().cloned().unwrap_or_default();
    let mut admitted = app.admission.enter(endpoint, Arc::clone(&call));
    let HttpRequestId(id) = parts.extensions.get().cloned().expect("the outermost layer sets the id");
    if let Some(Err(exceeded)) = call.key.as_ref().map(|key| key.take_request()) {
        body::discard(body).await;
        return refused(&id, admitted, exceeded.into());
    }
    // The `traceparent` of an untrusted peer is ignored: its trace is not continued, and it does not decide about sampling.
    let traceparent = if app.trust.trusts(&parts) { traceparent(&parts.headers) } else { String::new() };
    let span = app.tracer.request(&traceparent, endpoint.operation());
    // Routers and workers continue this span, or the proxy's span if this span is not sampled.
    let traceparent = span.traceparent().unwrap_or(traceparent);
    admitted.span = span;
    let header_options = app.header_options(&parts, call.key.as_deref());
    if let Ok(options) = &header_options {
        call.set_account(&options.account);
    }
    let client = client(header_options.as_ref().map_or("", |options| &options.account), &app, &parts);
    // The body is read even if the headers are refused: a client reads the reply only after it has sent its whole body.
    let read = app.bodies.read(BodyForm::of(endpoint), client.as_ref(), &parts.headers, body).await;
    let ((bytes, held), header_options) = match read.and_then(|read| Ok((read, header_options?))) {
        Ok(both) => both,
        Err(error) => return refused(&id, admitted, error),
    };
    let mut incoming = Incoming {
        app,
        id,
        client_request_id: parts.extensions.get().map(|ClientRequestId(id)| Arc::clone(id)),
        admitted,
        header_options,
        traceparent,
        priority: Priority::default(),
        client,
        body: held,
        ignored: None,
        queued: watch::Sender::default(),
    };
    let reply = match prepare(&mut incoming, bytes).await.map(Into::into) {
        Ok(Work::Answered(response)) => Ok(Reply::Whole(response)),
        Ok(Work::Passed(answer)) => Ok(Reply::Passed(answer)),
        Ok(Work::Run(job)) if incoming.header_options.explain => explain(&incoming.app, *job).await.map(Reply::Whole),
        Ok(Work::Run(job)) => respond(&incoming, *job).await,
        Err(error) => Err(error),
    };
    let Incoming { id, admitted, ignored, .. } = incoming;
    let mut response = match reply {
        Ok(reply) => reply.response(admitted),
        Err(error) => refused(&id, admitted, error),
    };
    let ignored = ignored.and_then(|ignored| HeaderValue::from_str(&ignored.joined()?).ok());
    response.headers_mut().extend(ignored.map(|names| (IGNORED, names)));
    response
}

fn refused(id: &str, mut admitted: Admitted, error: ApiError) -> Response {
    tracing::debug!(request_id = id, status = error.status().as_u16(), "request refused");
    admitted.finish(error.status());
    error.into_response()
}

/// Returns the client to whose limits the request counts: its account, else its address. `None` if there is no account and the address is
/// that of a trusted proxy, which many clients share.
fn client(account: &str, app: &App, parts: &Parts) -> Option<Client> {
    if !account.is_empty() {
        return Some(Client::Account(account.to_owned()));
    }
    let PeerAddress(address) = parts.extensions.get().copied()?;
    (!app.trust.lists(address)).then(|| Client::Address(ClientNetwork::from(address)))
}

/// Returns the value of the header `traceparent` if it has the form that W3C's trace context requires, else an empty string.
pub(super) fn traceparent(headers: &HeaderMap) -> String {
    let value = headers.get(TRACEPARENT).and_then(|value| value.to_str().ok()).unwrap_or_default();
    let valid = value.len() == 55 && value.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-');
    if valid { value.to_owned() } else { String::new() }
}
