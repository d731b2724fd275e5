//! Gives every request an id, which its response has in the header `x-request-id`.

use axum::{
    extract::Request,
    http::{HeaderName, HeaderValue},
    middleware::Next,
    response::Response,
};

const HEADER: HeaderName = HeaderName::from_static("x-request-id");

/// A request's id, stored in the request's extensions. This server generates it, whatever the client sends.
#[derive(Clone)]
pub(super) struct HttpRequestId(pub(super) String);

/// The layer that sets the id. It is also applied to refusals, the dashboard and unknown paths.
pub(super) async fn with_id(mut request: Request, next: Next) -> Response {
    let id = uuid::Uuid::new_v4().simple().to_string();
    let value = HeaderValue::from_str(&id).expect("hexadecimal digits are a valid header value");
    request.extensions_mut().insert(HttpRequestId(id));
    let mut response = next.run(request).await;
    response.headers_mut().insert(HEADER, value);
    response
}
