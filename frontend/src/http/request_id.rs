//! Gives every request an id, which every response has as `x-request-id`.

use axum::{
    extract::Request,
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};

const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// The id of a request, an extension of it. This server generates it, whatever the client sends.
#[derive(Clone)]
pub(super) struct HttpRequestId(pub(super) String);

/// A layer that sets the id, also for refusals, the dashboard and unknown paths.
pub(super) async fn with_id(mut request: Request, next: Next) -> Response {
    let id = uuid::Uuid::new_v4().simple().to_string();
    let value = HeaderValue::from_str(&id).expect("hexadecimal digits are a valid header value");
    request.extensions_mut().insert(HttpRequestId(id));
    let mut response = next.run(request).await;
    response.headers_mut().insert(HEADER, value);
    response
}
