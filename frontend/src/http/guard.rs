//! Refuses requests that browsers send for pages of other sites (cross-site request forgery), or for pages whose name resolves to this
//! server's address (DNS rebinding). Only browsers send a request's origin, in headers that pages cannot change.

use super::{
    body::discard,
    cors::{self, Origins},
    messages::errors,
    request_id::with_id,
    trailing_slash,
};
use crate::error::ApiError;
use axum::{
    Router,
    extract::{Request, State},
    http::{HeaderMap, Method, header, uri::Authority},
    middleware::{Next, from_fn, from_fn_with_state},
    response::{IntoResponse, Response},
};
use std::{net::IpAddr, sync::Arc};
use tandem_proto::channel::Listener;

/// The names accepted in the header `Host`, in addition to IP addresses; `None`: all names are accepted.
type Hosts = Option<Arc<[String]>>;

/// Adds the checks to `routes`. `Host` is checked if the listener is on a loopback address or `allowed_hosts` is not empty. Pages of
/// `origins` may use the API.
pub(crate) fn guarded(routes: Router, listener: &Listener, allowed_hosts: &[String], origins: Origins) -> Router {
    let on_loopback = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let hosts: Hosts = (on_loopback || !allowed_hosts.is_empty()).then(|| allowed_hosts.into());
    // The last layer is the outermost one, so that refusals have a request id, too.
    trailing_slash::ignored(routes)
        .layer(from_fn_with_state((hosts, origins), check))
        .layer(from_fn(errors::shaped))
        .layer(from_fn(with_id))
}

async fn check(State((hosts, origins)): State<(Hosts, Origins)>, request: Request, next: Next) -> Response {
    let (headers, method) = (request.headers(), request.method());
    if hosts.is_some_and(|hosts| !names_this_server(headers, &hosts)) {
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

/// Whether the header `Host` names this server. HTTP/1.0 clients may omit the header; browsers never do.
fn names_this_server(headers: &HeaderMap, hosts: &[String]) -> bool {
    let Some(host) = headers.get(header::HOST) else { return true };
    let Ok(authority) = Authority::try_from(host.as_bytes()) else { return false };
    let name = authority.host().trim_end_matches('.');
    let is_ip = name.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
    is_ip || name.eq_ignore_ascii_case("localhost") || hosts.iter().any(|allowed| allowed.eq_ignore_ascii_case(name))
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
    fn only_host_names_of_this_server_are_accepted() {
        let hosts = ["llm.example".to_owned()];
        for (host, ours) in [
            ("localhost", true),
            ("LocalHost.:8000", true),
            ("127.0.0.1:8000", true),
            ("[::1]:8000", true),
            ("192.168.0.7", true),
            ("llm.example:80", true),
            ("LLM.example", true),
            ("evil.example", false),
            ("localhost.evil.example", false),
            ("127.0.0.1.evil.example", false),
            ("llm.example@evil.example", false),
            ("", false),
            ("a b", false),
        ] {
            assert_eq!(names_this_server(&headers(&[("host", host)]), &hosts), ours, "{host}");
        }
        assert!(names_this_server(&headers(&[]), &hosts));
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
