//! The pages at `/chat` and `/dashboard`: their files, which are part of this program, and the JSON that the dashboard shows. Each request
//! for the JSON computes it from the routers' views of the cluster and from [`Recent`](crate::recent::Recent). The chat uses the API only.
//!
//! The pages load only files of this server; [`POLICY`] makes browsers enforce this rule. The pages add data to the document as text, never
//! as markup.

mod cluster;

use super::{app::App, health, request_id::HttpRequestId, unknown_path};
use crate::{
    clock::unix_ms,
    error::ApiError,
    recent::{PromptRecord, Refusal},
};
use axum::{
    Json, Router,
    extract::{Path, RawQuery, Request, State},
    http::{HeaderName, header},
    middleware::Next,
    response::{IntoResponse, Redirect, Response},
    routing::get,
};
use serde_json::json;
use std::{borrow::Cow, sync::Arc};

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const JS: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// The pages. Each has one line that links to the other page. The line is removed where the other page is not served.
const DASHBOARD: &str = include_str!("page/page.html");
const CHAT: &str = include_str!("page/chat.html");

/// The files of the pages, each with its name, content type and content.
const FILES: [(&str, &str, &str); 17] = [
    ("page.css", CSS, include_str!("page/page.css")),
    ("chat.css", CSS, include_str!("page/chat.css")),
    ("copy.js", JS, include_str!("page/copy.js")),
    ("markdown.js", JS, include_str!("page/markdown.js")),
    ("icon.svg", SVG, include_str!("page/icon.svg")),
    ("api.js", JS, include_str!("page/api.js")),
    ("main.js", JS, include_str!("page/main.js")),
    ("dom.js", JS, include_str!("page/dom.js")),
    ("metrics.js", JS, include_str!("page/metrics.js")),
    ("charts.js", JS, include_str!("page/charts.js")),
    ("cluster.js", JS, include_str!("page/cluster.js")),
    ("requests.js", JS, include_str!("page/requests.js")),
    ("timeline.js", JS, include_str!("page/timeline.js")),
    ("explain.js", JS, include_str!("page/explain.js")),
    ("why.js", JS, include_str!("page/why.js")),
    ("chat.js", JS, include_str!("page/chat.js")),
    ("terms.js", JS, include_str!("page/terms.js")),
];

/// The content security policy. Browsers load only files of this server, and do not run inline scripts or apply inline styles.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; \
                      base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
                      trusted-types 'none'";

const GUARDS: [(HeaderName, &str); 5] = [
    (header::CONTENT_SECURITY_POLICY, POLICY),
    (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    (header::REFERRER_POLICY, "no-referrer"),
    (HeaderName::from_static("cross-origin-resource-policy"), "same-origin"),
    (header::CACHE_CONTROL, "no-cache"),
];

/// Returns the routes of the dashboard, which has a link to the chat if `chat` is served as well.
pub(super) fn routes(chat: Neighbour) -> Router<Arc<App>> {
    Router::new()
        .route("/dashboard", get(async move || text(HTML, chat.shown_in(DASHBOARD))))
        .route("/dashboard/", get(async || Redirect::permanent("../dashboard")))
        .route("/dashboard/cluster", get(async |State(app): State<Arc<App>>| guarded(Json(app.cluster().await))))
        .route("/dashboard/requests", get(requests))
        .route("/dashboard/history", get(history))
        .route(
            "/dashboard/breakers",
            get(async |State(app): State<Arc<App>>| guarded(Json(json!({ "clients": app.heads.broken() })))),
        )
        // The metrics are also served below the page's path. So a proxy that routes by path can send all requests of a page to the same
        // frontend.
        .route("/dashboard/metrics", get(health::metrics))
        .route("/dashboard/{file}", get(file))
}

/// Returns the routes of the chat, which has a link to the dashboard if that is served as well.
pub(super) fn chat(dashboard: Neighbour) -> Router<Arc<App>> {
    Router::new()
        .route("/chat", get(async move || text(HTML, dashboard.shown_in(CHAT))))
        .route("/chat/", get(async || Redirect::permanent("../chat")))
        // A client whose base URL lacks /v1 posts to /chat/completions.
        .route("/chat/{file}", get(file).fallback(unknown_path))
}

/// Returns the route of `/`, which redirects to this page.
pub(super) fn start(page: &'static str) -> Router<Arc<App>> {
    Router::new().route("/", get(async move || Redirect::temporary(page)))
}

/// Whether a page's neighbour is served on the same port.
#[derive(Clone, Copy)]
pub(super) enum Neighbour {
    Served,
    Absent,
}

impl Neighbour {
    /// Returns the page, without the line that links to its neighbour if that is absent.
    fn shown_in(self, page: &'static str) -> Cow<'static, str> {
        match self {
            Self::Served => page.into(),
            Self::Absent => {
                page.lines().filter(|line| !line.contains(r#"class="neighbour""#)).flat_map(|line| [line, "\n"]).collect()
            }
        }
    }
}

async fn file(Path(name): Path<String>, request: Request) -> Response {
    match FILES.into_iter().find(|(file, ..)| *file == name) {
        Some((_, kind, content)) => text(kind, content),
        None => unknown_path(request).await.into_response(),
    }
}

/// The layer that records requests which are answered with an error.
pub(super) async fn refusals(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let id = request.extensions().get().map_or_else(String::new, |HttpRequestId(id)| id.clone());
    // Only this route has text from the client in its path.
    let path = request.uri().path();
    let endpoint = if path.starts_with("/v1/models/") { "/v1/models/{id}" } else { path }.to_owned();
    let response = next.run(request).await;
    if let (Some(error), Some(recent)) = (response.extensions().get::<Arc<ApiError>>(), &app.recent) {
        let (status, code) = (error.status().as_u16(), error.code());
        recent.refuse(Refusal { at_unix_ms: unix_ms(), request_id: id, endpoint, status, code });
    }
    response
}

/// Returns the sums over the prompts of the last hour, by worker.
async fn history(State(app): State<Arc<App>>) -> Response {
    let Some(recent) = &app.recent else { return ApiError::UnknownPath.into_response() };
    guarded(Json(json!({ "periods": recent.history() })))
}

/// Returns the recorded prompts, and the requests that were refused last. With `?after=N`, returns only the prompts with numbers greater
/// than N.
async fn requests(State(app): State<Arc<App>>, RawQuery(query): RawQuery) -> Response {
    let after = query.as_deref().and_then(|query| query.strip_prefix("after=")?.parse().ok()).unwrap_or(0);
    let Some(recent) = &app.recent else { return ApiError::UnknownPath.into_response() };
    let records = recent.after(after);
    let records: Vec<&PromptRecord> = records.iter().map(|record| &**record).collect();
    // Record numbers begin again at every start of the process. A page that receives another `since` than before therefore requests all
    // records.
    guarded(Json(json!({ "since": app.since, "max": recent.max, "requests": records, "refusals": recent.refusals() })))
}

fn text(kind: &'static str, content: impl Into<Cow<'static, str>>) -> Response {
    guarded(([(header::CONTENT_TYPE, kind)], content.into()))
}

fn guarded(response: impl IntoResponse) -> Response {
    (GUARDS, response).into_response()
}
