//! Chooses the server of one HTTP request: reads the request as a frontend does, and places it on a worker that only observes its engine.
//!
//! A request that this process cannot read, or that generates no text, is placed by load alone, and its server answers it.

use super::wire;
use crate::{
    admission::Client,
    dispatch::{Booking, DispatchError, Prompt, placement::Placement},
    error::ApiError,
    http::{
        app::{App, EXPLAIN, HeaderOptions},
        body::{self, BodyForm, HeldBytes},
        chat, completions,
        incoming::{Incoming, Job},
        lifecycle,
        request_id::{self, ClientRequestId},
    },
    metrics::Endpoint,
};
use axum::http::{Method, StatusCode, request::Parts};
use bytes::Bytes;
use serde::Deserialize;
use serde_json::{Map, Value};
use std::{sync::Arc, time::Duration};
use tandem_api::{Options, RequestError, at_most};
use tandem_kv::{Namespace, Priority, cache_salt};
use tandem_proto::{
    TEXT_BYTES_MAX,
    ext_proc::{HeaderMap, ProcessingResponse},
};
use tokio::{sync::watch, time::timeout};

/// Maximum time for a placement. It takes less than a millisecond while a router answers.
const PLACEMENT_MAX: Duration = Duration::from_secs(5);

/// The part of a body that decides with which requests its prompt shares cached KV.
#[derive(Deserialize)]
struct NamespaceFields {
    model: Option<String>,
    cache_salt: Option<String>,
}

/// A placed request.
pub(super) struct Chosen {
    pub(super) booking: Booking,
    pub(super) prompt: Prompt,
    pub(super) placement: Placement,
    /// Whether the router has compared the prompt with the caches, so that the engine's count of cached tokens can be compared with its
    /// prediction.
    pub(super) is_compared: bool,
    /// The parts of the body that the server gets; none if this process does not change the body.
    pub(super) body: Vec<Bytes>,
}

/// Returns the kind of a request with this head, and whether its body has the prompt.
pub(super) fn kind(parts: &Parts) -> (Endpoint, bool) {
    let endpoint = match (&parts.method, parts.uri.path()) {
        (&Method::POST, "/v1/chat/completions") => Endpoint::Chat,
        (&Method::POST, "/v1/completions") => Endpoint::Completions,
        _ => return (Endpoint::Forwarded, false),
    };
    (endpoint, body::check_type(BodyForm::Json, &parts.headers).is_ok())
}

/// Reads the request's headers.
///
/// # Errors
/// The peer sent a header that it may not send, or a malformed one.
pub(super) fn incoming(app: &Arc<App>, parts: &Parts, endpoint: Endpoint) -> Result<Incoming, ApiError> {
    let mut admitted = app.admission.enter(endpoint, Arc::default());
    let traceparent = if app.trust.trusts(parts) { lifecycle::traceparent(&parts.headers) } else { String::new() };
    let span = app.tracer.request(&traceparent, endpoint.operation());
    let traceparent = span.traceparent().unwrap_or(traceparent);
    admitted.span = span;
    // The gateway sends the request to a server in any case, so a placement cannot be explained in place of the answer.
    let explained = |options: HeaderOptions| match options.explain {
        true => Err(ApiError::Untrusted { header: EXPLAIN }),
        false => Ok(options),
    };
    let header_options =
        app.header_options(parts, None).and_then(explained).inspect_err(|error| admitted.finish(wire::status(error)))?;
    // Without an account, the client is not known: the peer is the gateway.
    let client = (!header_options.account.is_empty()).then(|| Client::Account(header_options.account.clone()));
    Ok(Incoming {
        app: Arc::clone(app),
        id: request_id::new(),
        client_request_id: ClientRequestId::of(&parts.headers).map(|ClientRequestId(id)| id),
        admitted,
        header_options,
        traceparent,
        priority: Priority::default(),
        client,
        body: HeldBytes::new(),
        ignored: None,
        queued: watch::Sender::default(),
    })
}

/// Places a request. `body` is its whole body, if that has the prompt. With `subset`, only these endpoints may be chosen.
///
/// # Errors
/// No server can take the request now, or the request may not be sent to one.
pub(super) async fn choose(
    incoming: &mut Incoming,
    body: Option<Bytes>,
    subset: Option<Vec<String>>,
) -> Result<Chosen, ApiError> {
    let (mut model, mut parts, mut read) = (None, Vec::new(), None);
    if let Some(body) = body {
        (model, parts) = match incoming.parse::<NamespaceFields>(body.clone()).await {
            Ok(named) => (named.model.clone(), salted(incoming, named, body.clone()).await?),
            Err(error @ ApiError::Request(RequestError::Busy)) => return Err(error),
            // The server might read the body nevertheless, and would then answer from the cache of all accounts.
            Err(error) if incoming.header_options.cache_owner.is_some() => return Err(error),
            Err(_) => (None, vec![body.clone()]),
        };
        read = prompt_of(incoming, body).await?;
    }
    if let Some((prompt, is_only)) = read {
        match place(incoming, prompt, subset.as_deref()).await {
            // The prompt fits on no server. One of them says so to the client.
            Err(ApiError::Dispatch(DispatchError::Refused { .. })) => {}
            placed => {
                let (prompt, booking, placement) = placed?;
                return Ok(Chosen { booking, prompt, placement, is_compared: is_only, body: parts });
            }
        }
    }
    let prompt = by_load(incoming, model.as_deref())?;
    let (prompt, booking, placement) = place(incoming, prompt, subset.as_deref()).await?;
    Ok(Chosen { booking, prompt, placement, is_compared: false, body: parts })
}

/// Returns the prompt by which a request is placed, and whether it is the only one; `None` if this process cannot read the request.
///
/// # Errors
/// The request is shed.
async fn prompt_of(incoming: &mut Incoming, body: Bytes) -> Result<Option<(Prompt, bool)>, ApiError> {
    let prepared = match incoming.admitted.endpoint {
        Endpoint::Chat => chat::prepare(incoming, body).await,
        _ => completions::prepare(incoming, body).await,
    };
    match prepared {
        Ok(Job { prompts, .. }) => {
            let count = prompts.len() as u32;
            let longest = prompts.into_iter().map(|(prompt, _)| prompt).max_by_key(|prompt| prompt.tokens.len());
            // All prompts run on one server, so the router counts their sequences together.
            Ok(longest
                .map(|prompt| (Prompt { samples: prompt.samples.saturating_mul(count), equal: None, ..prompt }, count == 1)))
        }
        Err(ApiError::Request(error)) if !matches!(error, RequestError::Busy) => Ok(None),
        Err(ApiError::ModelNotFound { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns a prompt that stands for a request of which only its model may be known.
fn by_load(incoming: &mut Incoming, model: Option<&str>) -> Result<Prompt, ApiError> {
    let options = Options { samples: 1, ..Options::default() };
    if !incoming.admitted.is_reserved() {
        incoming.reserve(1, &options)?;
    }
    let models = &incoming.app.models;
    let served = model.and_then(|model| models.get(model)).unwrap_or_else(|| models.first().clone());
    Ok(Prompt { max_tokens: 0, ..incoming.prompt(&served, 0, vec![0].into(), &options, None) })
}

async fn place(
    incoming: &Incoming,
    mut prompt: Prompt,
    subset: Option<&[String]>,
) -> Result<(Prompt, Booking, Placement), ApiError> {
    if let (Some(wanted), Some(listed)) = (&mut prompt.endpoints, subset) {
        (wanted.only_listed, wanted.listed) = (true, listed.to_vec());
    }
    let placing = Booking::open(&incoming.app.dispatcher.routers, &prompt);
    let placed = timeout(PLACEMENT_MAX, placing).await.unwrap_or(Err(DispatchError::RouterClosed));
    let (booking, placement) = placed?;
    if placement.endpoints.is_empty() {
        // A router of an older version does not know observed engines.
        return Err(DispatchError::ClusterMismatch.into());
    }
    Ok((prompt, booking, placement))
}

/// Returns the parts of the body with the `cache_salt` of the request's namespace, by which the engine's blocks are known.
///
/// # Errors
/// The client's model or salt is too long, or the request is shed.
async fn salted(incoming: &Incoming, named: NamespaceFields, body: Bytes) -> Result<Vec<Bytes>, ApiError> {
    let app = &incoming.app;
    at_most("model", named.model.as_deref().map_or(0, str::len), TEXT_BYTES_MAX, "bytes")?;
    let (owner, own) = (incoming.header_options.cache_owner.as_deref(), tandem_api::cache_salt(named.cache_salt)?);
    let served = named.model.as_deref().map_or_else(|| Some(app.models.first().clone()), |model| app.models.get(model));
    let namespace = match served {
        Some(served) => App::namespace(&served.model, owner, &own),
        None => {
            let namespace = Namespace::new(named.model.as_deref().unwrap_or_default(), "", "", &own);
            owner.map_or(namespace.clone(), |owner| namespace.of_account(owner))
        }
    };
    let salt = cache_salt(&app.hash_key, &namespace);
    if own.is_empty() {
        return Ok(with_salt(&body, &salt));
    }
    let replace = move || {
        let mut fields: Map<String, Value> = serde_json::from_slice(&body).map_err(RequestError::Json)?;
        fields.insert("cache_salt".to_owned(), salt.into());
        Ok(vec![Bytes::from(Value::from(fields).to_string())])
    };
    Ok(app.parsing.run(incoming.client.as_ref(), replace).await?)
}

/// Returns the parts of an object's JSON with a further field.
fn with_salt(body: &Bytes, salt: &str) -> Vec<Bytes> {
    let end = body.iter().rposition(|byte| *byte == b'}').unwrap_or(body.len());
    let comma = if body[..end].trim_ascii_end().ends_with(b"{") { "" } else { "," };
    vec![body.slice(..end), format!("{comma}\"cache_salt\":\"{salt}\"").into(), body.slice(end..)]
}

/// Refuses a request whose headers were read.
pub(super) fn refuse(incoming: &mut Incoming, error: ApiError) -> ProcessingResponse {
    incoming.admitted.finish(wire::status(&error));
    wire::refusal(error)
}

/// Returns the status of an answer; 502 if the gateway reports none.
pub(super) fn status(headers: Option<&HeaderMap>) -> StatusCode {
    value(headers, ":status").and_then(|text| StatusCode::from_bytes(text).ok()).unwrap_or(StatusCode::BAD_GATEWAY)
}

/// Returns the length of an answer's body in bytes; `None` if the gateway reports none.
pub(super) fn content_length(headers: Option<&HeaderMap>) -> Option<u64> {
    str::from_utf8(value(headers, "content-length")?).ok()?.parse().ok()
}

/// Whether Envoy has answered the request itself, because its limits of requests or connections are reached.
pub(super) fn is_overload(headers: Option<&HeaderMap>) -> bool {
    value(headers, "x-envoy-overloaded").is_some()
}

fn value<'a>(headers: Option<&'a HeaderMap>, name: &str) -> Option<&'a [u8]> {
    let header = headers?.headers.iter().find(|header| header.key == name)?;
    Some(if header.raw_value.is_empty() { header.value.as_bytes() } else { &header.raw_value[..] })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salt_is_added_to_any_object_and_changes_nothing_else() {
        for body in [r#"{"a":1,"b":{"c":"}"}}"#, "{}", " { } \n", r#"{"a":[{}]}  "#] {
            let changed = with_salt(&Bytes::from(body), "0f").concat();
            let mut changed: Map<String, Value> = serde_json::from_slice(&changed).expect("it is an object");
            assert_eq!(changed.remove("cache_salt"), Some("0f".into()), "{body}");
            assert_eq!(Value::from(changed), serde_json::from_str::<Value>(body).expect("it is JSON"));
        }
    }
}
