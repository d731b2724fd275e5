//! Gives every request an id, which the response names in the header `x-request-id`.

use axum::{
    extract::Request,
    http::{HeaderMap, HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};
use std::sync::Arc;

pub(super) const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// A request's id, stored in the request's extensions. This server generates it, whatever the client sends.
#[derive(Clone)]
pub(super) struct HttpRequestId(pub(super) String);

/// The id that the client has sent in the header, for logs only: its visible ASCII characters, at most [`CLIENT_ID_MAX`] of them.
#[derive(Clone)]
pub(super) struct ClientRequestId(pub(super) Arc<str>);

const CLIENT_ID_MAX: usize = 128;

impl ClientRequestId {
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let visible = headers.get(HEADER)?.as_bytes().iter().filter(|byte| byte.is_ascii_graphic());
        let id: String = visible.take(CLIENT_ID_MAX).map(|byte| char::from(*byte)).collect();
        (!id.is_empty()).then(|| Self(id.into()))
    }
}

/// Returns a new id.
pub(super) fn new() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// The layer that sets the id. It is also applied to refusals, the dashboard and unknown paths.
pub(super) async fn with_id(mut request: Request, next: Next) -> Response {
    let id = new();
    let value = HeaderValue::from_str(&id).expect("hexadecimal digits are a valid header value");
    let of_client = ClientRequestId::of(request.headers());
    request.extensions_mut().insert(HttpRequestId(id));
    if let Some(id) = of_client {
        request.extensions_mut().insert(id);
    }
    let mut response = next.run(request).await;
    response.headers_mut().insert(HEADER, value);
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn id_of_the_client_is_bounded_and_visible() {
        let long = "x".repeat(1_000);
        let cases: [(&[u8], Option<&str>); 5] = [
            (b"abc-123", Some("abc-123")),
            (b"a b\tc\xff", Some("abc")),
            (b"", None),
            (b" \xc3\xa9", None),
            (long.as_bytes(), Some(&long[..CLIENT_ID_MAX])),
        ];
        for (sent, expected) in cases {
            let value = HeaderValue::from_bytes(sent).expect("the value may be sent");
            let found = ClientRequestId::of(&HeaderMap::from_iter([(HEADER, value)]));
            assert_eq!(found.as_ref().map(|ClientRequestId(id)| &**id), expected, "{sent:?}");
        }
        assert!(ClientRequestId::of(&HeaderMap::new()).is_none());
    }
}
