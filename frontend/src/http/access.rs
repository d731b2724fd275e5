//! Decides which requests may use the API: with a file of API keys, each needs a key. Records every request in the audit log.

use super::{
    app::App,
    body::discard,
    request_id::{ClientRequestId, HttpRequestId},
};
use crate::{
    calls::{Call, CallHead},
    error::ApiError,
    keys::{Key, Quota},
};
use axum::{
    extract::{Request, State},
    http::{HeaderMap, HeaderName, HeaderValue, header},
    middleware::Next,
    response::{IntoResponse, Response},
};
use std::{sync::Arc, time::Duration};
use tandem_process::listen::{ClientNetwork, PeerAddress};

/// The header in which Anthropic's clients send a key.
const KEY_HEADER: HeaderName = HeaderName::from_static("x-api-key");
/// The scheme of the header `Authorization`.
const BEARER: &str = "bearer";

/// OpenAI's headers about the limits on requests and on tokens: the limit, what is left of it, and the time until all of it is available.
const QUOTA_HEADERS: [[HeaderName; 3]; 2] = [
    [
        HeaderName::from_static("x-ratelimit-limit-requests"),
        HeaderName::from_static("x-ratelimit-remaining-requests"),
        HeaderName::from_static("x-ratelimit-reset-requests"),
    ],
    [
        HeaderName::from_static("x-ratelimit-limit-tokens"),
        HeaderName::from_static("x-ratelimit-remaining-tokens"),
        HeaderName::from_static("x-ratelimit-reset-tokens"),
    ],
];

/// The middleware of the API's routes: refuses a request without a valid key if the frontend has keys, stores the [`Call`] in the extensions
/// of any other, and adds the quota headers of its key to the response.
pub(super) async fn checked(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let HttpRequestId(id) = request.extensions().get().cloned().expect("the outermost layer sets the id");
    let (key, refusal) = match app.keys.as_ref().map(|keys| sent(request.headers()).map(|sent| keys.find(sent))) {
        None => (None, None),
        Some(Some(Some(key))) => (Some(key), None),
        Some(Some(None)) => (None, Some((ApiError::UnknownKey, &app.metrics.keys_unknown))),
        Some(None) => (None, Some((ApiError::MissingKey, &app.metrics.keys_missing))),
    };
    let peer = request.extensions().get().map(|PeerAddress(address)| ClientNetwork::from(*address));
    let client_request_id = request.extensions().get().map(|ClientRequestId(id)| Arc::clone(id));
    let (method, path) = (request.method().as_str(), request.uri().path());
    let head = CallHead { request_id: &id, client_request_id, method, path, peer };
    let call = Arc::new(Call::begin(key, app.call_log.as_ref(), head));
    let mut response = match refusal {
        Some((error, counter)) => {
            counter.increment(1);
            // A client reads the reply only after it has sent its request.
            discard(request.into_body()).await;
            error.into_response()
        }
        None => {
            request.extensions_mut().insert(Arc::clone(&call));
            next.run(request).await
        }
    };
    call.answered(response.status());
    if let Some(key) = &call.key {
        response.headers_mut().extend(quota_headers(key));
    }
    response
}

/// Returns the key that a client sent: in the header `Authorization`, as OpenAI's clients send it, else in [`KEY_HEADER`].
fn sent(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).map(HeaderValue::as_bytes).and_then(|value| {
        let (scheme, key) = value.split_at_checked(BEARER.len())?;
        let key = key.strip_prefix(b" ").filter(|_| scheme.eq_ignore_ascii_case(BEARER.as_bytes()))?;
        Some(key.trim_ascii())
    });
    let key = bearer.or_else(|| headers.get(KEY_HEADER).map(|value| value.as_bytes().trim_ascii()));
    key.filter(|key| !key.is_empty())
}

fn quota_headers(key: &Key) -> impl Iterator<Item = (HeaderName, HeaderValue)> {
    key.quotas().into_iter().zip(QUOTA_HEADERS).filter_map(|(quota, names)| Some((quota?, names))).flat_map(|(quota, names)| {
        let Quota { limit, remaining, reset } = quota;
        let reset = HeaderValue::from_str(&duration(reset)).expect("digits and units are a valid header value");
        names.into_iter().zip([HeaderValue::from(limit), HeaderValue::from(remaining), reset])
    })
}

/// Writes a duration as OpenAI does, such as `6m0s`, `1.5s` and `20ms`. It is rounded up to milliseconds.
fn duration(duration: Duration) -> String {
    let ms = duration.as_nanos().div_ceil(1_000_000);
    let (minutes, rest) = (ms / 60_000, ms % 60_000);
    let seconds = |ms: u128| format!("{}s", ms as f64 / 1e3);
    match (minutes, rest) {
        (0, ..1000) => format!("{rest}ms"),
        (0, _) => seconds(rest),
        _ => format!("{minutes}m{}", seconds(rest)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        list.iter().map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value))).collect()
    }

    #[test]
    fn key_is_read_from_both_headers() {
        for (list, expected) in [
            (&[][..], None),
            (&[("authorization", "Bearer k")], Some("k")),
            (&[("authorization", "bearer  k ")], Some("k")),
            (&[("authorization", "Bearer ")], None),
            (&[("authorization", "Bearerk")], None),
            (&[("authorization", "Basic k")], None),
            (&[("authorization", "Basic k"), ("x-api-key", "j")], Some("j")),
            (&[("authorization", "Bearer k"), ("x-api-key", "j")], Some("k")),
            (&[("x-api-key", "j")], Some("j")),
            (&[("x-api-key", "")], None),
        ] {
            assert_eq!(sent(&headers(list)), expected.map(str::as_bytes), "{list:?}");
        }
    }

    #[test]
    fn durations_are_written_as_openai_does() {
        for (ms, expected) in
            [(0, "0ms"), (20, "20ms"), (1000, "1s"), (1500, "1.5s"), (59_999, "59.999s"), (60_000, "1m0s"), (366_400, "6m6.4s")]
        {
            assert_eq!(duration(Duration::from_millis(ms)), expected);
        }
        assert_eq!(duration(Duration::from_nanos(1)), "1ms", "a client that waits this long is not too early");
    }
}
