//! Refuses requests that browsers send for pages of other sites (cross-site request forgery), or for pages whose name resolves to this
//! server's address (DNS rebinding). Only browsers send a request's origin, in headers that pages cannot change.

use super::{
    body::discard,
    cors::{self, Origins},
    messages,
    request_id::with_id,
    trailing_slash,
};
use crate::error::ApiError;
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, Method},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
};
use tandem_process::listen::Hosts;

/// Adds the checks to `routes`. `hosts`: the names accepted in the header `Host`; `None`: all names. Pages of `origins` may use the API.
pub(crate) fn guarded(routes: Router, hosts: Option<Hosts>, origins: Origins) -> Router {
    // The last layer is the outermost one, so that refusals have a request id, too.
    trailing_slash::ignored(routes)
        .layer(from_fn_with_state((hosts, origins), check))
        .layer(from_fn(messages::shaped))
        .layer(from_fn(with_id))
}

async fn check(State((hosts, origins)): State<(Option<Hosts>, Origins)>, request: Request, next: Next) -> Response {
    let (headers, method) = (request.headers(), request.method());
    if hosts.is_some_and(|hosts| !hosts.accept(headers)) {
        return refused(request, ApiError::Host).await;
    }
    if let Some(allowed) = origins.allow(request.uri().path(), headers) {
        let (parts, body) = request.into_parts();
        let mut response = match cors::preflight(&parts) {
            Some(response) => response,
            None => next.run(Request::from_parts(parts, body)).await,
        };
        cors::share(&mut response, allowed);
        return response;
    }
    if is_cross_origin(headers, method) {
        return refused(request, ApiError::Origin).await;
    }
    next.run(request).await
}

/// Replies with the error after reading the body, because a client reads the reply only after it has sent its request.
async fn refused(request: Request, error: ApiError) -> Response {
    discard(request.into_body()).await;
    error.into_response()
}

/// Whether a page of another origin sends the request. Requests that follow a link on such a page do not count, because that page cannot
/// read the response.
fn is_cross_origin(headers: &HeaderMap, method: &Method) -> bool {
    let text = |name: &str| headers.get(name).map(|value| value.to_str().unwrap_or("unreadable"));
    if text("sec-fetch-mode") == Some("navigate") && matches!(*method, Method::GET | Method::HEAD) {
        return false;
    }
    match (text("sec-fetch-site"), text("origin")) {
        (Some("same-origin" | "none"), _) | (None, None) => false,
        (Some(_), _) => true,
        // Browsers from before 2023 send only `Origin`.
        (None, Some(origin)) => origin.split_once("://").map(|(_, authority)| authority) != text("host"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::{HeaderName, HeaderValue};

    fn headers(list: &[(&'static str, &'static str)]) -> HeaderMap {
        let header =
            |(name, value): &(&'static str, &'static str)| (HeaderName::from_static(name), HeaderValue::from_static(value));
        list.iter().map(header).collect()
    }

    #[test]
    fn cross_origin_requests_are_refused() {
        const HOST: (&str, &str) = ("host", "127.0.0.1:8000");
        for (method, sent, foreign) in [
            (Method::POST, &[HOST][..], false),
            (Method::POST, &[HOST, ("origin", "http://127.0.0.1:8000")], false),
            (Method::POST, &[HOST, ("origin", "http://127.0.0.1:9000")], true),
            (Method::POST, &[HOST, ("origin", "https://evil.example")], true),
            (Method::POST, &[HOST, ("origin", "null")], true),
            (Method::POST, &[HOST, ("origin", "https://llm.example"), ("sec-fetch-site", "same-origin")], false),
            (Method::POST, &[HOST, ("sec-fetch-site", "none")], false),
            (Method::POST, &[HOST, ("sec-fetch-site", "cross-site")], true),
            (Method::POST, &[HOST, ("sec-fetch-site", "same-site")], true),
            (Method::GET, &[HOST, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "no-cors")], true),
            (Method::GET, &[HOST, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], false),
            (Method::POST, &[HOST, ("sec-fetch-site", "cross-site"), ("sec-fetch-mode", "navigate")], true),
        ] {
            assert_eq!(is_cross_origin(&headers(sent), &method), foreign, "{method} {sent:?}");
        }
    }
}
