//! Ignores a slash at the end of a request's path. A redirect would not do: many clients send no body after one.

use axum::{Router, extract::Request, http::Uri, middleware::from_fn};

/// Returns routes that match with and without a slash at the path's end.
pub(super) fn ignored(routes: Router) -> Router {
    // A layer of `routes` itself would run after the route is chosen.
    Router::new().fallback_service(routes).layer(from_fn(async |mut request: Request, next: axum::middleware::Next| {
        if let Some(uri) = trimmed(request.uri()) {
            *request.uri_mut() = uri;
        }
        next.run(request).await
    }))
}

/// Returns the URI without the slashes at its path's end; `None` if there are none, or if the path is that of a page. The routes of pages
/// redirect instead, because pages name their files relative to their paths.
fn trimmed(uri: &Uri) -> Option<Uri> {
    let path = uri.path();
    let short = path.trim_end_matches('/');
    if short.len() == path.len() || ["/", "/chat/", "/dashboard/"].contains(&path) {
        return None;
    }
    let short = if short.is_empty() { "/" } else { short };
    let target = uri.query().map_or_else(|| short.to_owned(), |query| format!("{short}?{query}"));
    let mut parts = uri.clone().into_parts();
    parts.path_and_query = Some(target.parse().ok()?);
    Uri::from_parts(parts).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slashes_at_the_end_of_a_path_are_removed() {
        for (uri, expected) in [
            ("/v1/models/", Some("/v1/models")),
            ("/v1/models//?a=b/", Some("/v1/models?a=b/")),
            ("http://host/live/", Some("http://host/live")),
            ("//", Some("/")),
            ("/", None),
            ("/live", None),
            ("/live?x=/", None),
            ("/dashboard/", None),
            ("/chat/", None),
        ] {
            let found = trimmed(&uri.parse().expect("the URI is valid"));
            assert_eq!(found.map(|uri| uri.to_string()).as_deref(), expected, "{uri}");
        }
    }
}
