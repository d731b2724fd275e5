//! Lets web pages of listed origins use the API (cross-origin resource sharing). The operator's pages are never shared.

use axum::{
    http::{HeaderMap, HeaderValue, Method, StatusCode, header, request},
    response::{IntoResponse, Response},
};
use std::sync::Arc;

/// The prefixes of the paths that pages may use.
const SHARED: [&str; 2] = ["/v1/", "/inference/v1/"];
/// The prefix of Tandem's own request headers. Pages may not send these headers, because a browser on this machine is a trusted peer.
const OWN_HEADERS: &str = "x-tandem-";
/// How long a browser may keep the answer to a preflight request, in seconds. Chromium's maximum is two hours.
const KEPT_SECONDS: HeaderValue = HeaderValue::from_static("7200");
/// The response headers that pages may read besides the basic ones.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "x-request-id, request-id, retry-after, x-should-retry, x-tandem-ignored-parameters, x-ratelimit-limit-requests, \
     x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens, \
     x-ratelimit-reset-tokens",
);

/// The origins whose pages may use the API, such as `https://chat.example`; `*` stands for all origins.
#[derive(Clone, Default)]
pub(crate) struct Origins(Arc<[String]>);

impl Origins {
    pub(crate) fn new(origins: Vec<String>) -> Self {
        Self(origins.into())
    }

    /// Returns the value of `access-control-allow-origin` for a request that a web page sends; `None` if the page may not send it, or if
    /// the request is not from a page.
    pub(super) fn allow(&self, path: &str, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(header::ORIGIN)?;
        if !SHARED.iter().any(|shared| path.starts_with(shared)) {
            return None;
        }
        if self.0.iter().any(|listed| listed == "*") {
            return Some(HeaderValue::from_static("*"));
        }
        self.0.iter().any(|listed| listed.as_bytes() == origin.as_bytes()).then(|| origin.clone())
    }
}

/// Returns the reply to a preflight request; `None` if the request is none.
pub(super) fn preflight(request: &request::Parts) -> Option<Response> {
    if request.method != Method::OPTIONS || !request.headers.contains_key(header::ACCESS_CONTROL_REQUEST_METHOD) {
        return None;
    }
    let requested = request.headers.get(header::ACCESS_CONTROL_REQUEST_HEADERS).and_then(|names| names.to_str().ok());
    let names = requested.unwrap_or_default().split(',').map(str::trim);
    let allowed: Vec<&str> = names.filter(|name| !name.to_ascii_lowercase().starts_with(OWN_HEADERS)).collect();
    let mut response = StatusCode::NO_CONTENT.into_response();
    let headers = response.headers_mut();
    headers.insert(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST"));
    headers.extend(HeaderValue::from_str(&allowed.join(", ")).ok().map(|names| (header::ACCESS_CONTROL_ALLOW_HEADERS, names)));
    headers.insert(header::ACCESS_CONTROL_MAX_AGE, KEPT_SECONDS);
    Some(response)
}

/// Adds the headers that let a page of the allowed origin read the response.
pub(super) fn share(response: &mut Response, allowed: HeaderValue) {
    let headers = response.headers_mut();
    headers.insert(header::VARY, HeaderValue::from(header::ORIGIN));
    headers.insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, allowed);
    headers.insert(header::ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::Request;

    #[test]
    fn only_listed_origins_share_the_api_and_no_origin_shares_other_paths() {
        let listed = Origins::new(vec!["https://chat.example".to_owned()]);
        let all = Origins::new(vec!["*".to_owned()]);
        let allow = |origins: &Origins, path: &str, origin: &'static str| {
            let headers = [(header::ORIGIN, HeaderValue::from_static(origin))].into_iter().collect();
            origins.allow(path, &headers).map(|value| value.to_str().expect("the value is text").to_owned())
        };
        const CHAT: &str = "/v1/chat/completions";
        assert_eq!(allow(&listed, CHAT, "https://chat.example").as_deref(), Some("https://chat.example"));
        assert_eq!(allow(&all, CHAT, "https://any.example").as_deref(), Some("*"));
        for (path, origin) in [(CHAT, "https://evil.example"), (CHAT, "null"), (CHAT, "http://chat.example")] {
            assert_eq!(allow(&listed, path, origin), None, "{path} {origin}");
        }
        for path in ["/metrics", "/dashboard", "/dashboard/cluster", "/load", "/v1"] {
            assert_eq!(allow(&all, path, "https://any.example"), None, "{path}");
        }
        assert_eq!(all.allow(CHAT, &HeaderMap::new()), None);
    }

    #[test]
    fn preflight_allows_every_header_but_tandems_own() {
        let request = Request::options("/v1/models")
            .header("access-control-request-method", "GET")
            .header("access-control-request-headers", "authorization,x-stainless-os, X-Tandem-Explain");
        let (parts, ()) = request.body(()).expect("the request is well-formed").into_parts();
        let response = preflight(&parts).expect("the request is a preflight");
        assert_eq!(response.headers()["access-control-allow-headers"], "authorization, x-stainless-os");
        let (parts, ()) = Request::get("/v1/models").body(()).expect("the request is well-formed").into_parts();
        assert!(preflight(&parts).is_none());
    }
}
