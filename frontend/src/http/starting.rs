//! The answers of a frontend whose process is starting: it is live, but serves no requests and no pages yet.

use super::{Origins, body::discard, guarded};
use crate::{error::ApiError, metrics::FrontendMetrics};
use axum::{
    Json, Router,
    extract::Request,
    http::{HeaderName, HeaderValue, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::json;
use std::{sync::Arc, time::Duration};
use tandem_process::{
    Metrics, Shutdown,
    listen::{self, ADMIN_CONNECTIONS_MAX, ADMIN_CONNECTIONS_OF_ADDRESS_MAX, ConnectionLimits, Drain, Hosts, Tls},
    starting::step,
};
use tandem_proto::channel::Listener;
use tokio_util::sync::{CancellationToken, DropGuard};

/// The header that says to Tandem's own commands that the server is starting, and at which step it is.
const STARTING: HeaderName = HeaderName::from_static("x-tandem-starting");
/// The time after which a client may try again, in seconds.
const RETRY_AFTER: HeaderValue = HeaderValue::from_static("1");
/// The maximum wait for clients that still read the last answers.
const END_MAX: Duration = Duration::from_secs(1);
/// A client that reads nothing of its response for this long is disconnected.
const UNREAD_MAX: Duration = Duration::from_secs(30);

/// The answers on a listener of a frontend whose process is starting: 200 for `/live`, `/health` and `/ping`, and 503 for all else, with
/// the code `starting` and [the current step](tandem_process::starting). Dropping this value ends the answers.
pub struct StartingAnswers {
    ended: DropGuard,
    finished: CancellationToken,
}

impl StartingAnswers {
    /// Begins to answer requests, in a task of the process.
    pub fn begin(listener: impl Into<Listener>, tls: Option<Tls>, hosts: Hosts, metrics: &Metrics, process: &Shutdown) -> Self {
        let (ended, finished) = (CancellationToken::new(), CancellationToken::new());
        let serving = serve(listener.into(), tls, hosts, metrics.clone(), ended.clone());
        let finishes = finished.clone().drop_guard();
        process.spawn(async move {
            serving.await;
            drop(finishes);
        });
        Self { ended: ended.drop_guard(), finished }
    }

    /// Ends the answers. Returns when no later connection gets such an answer, even if a client still reads one.
    pub async fn end(self) {
        drop(self.ended);
        // A client that reads nothing must not delay the start.
        let _ = tokio::time::timeout(END_MAX, self.finished.cancelled()).await;
    }
}

async fn serve(listener: Listener, tls: Option<Tls>, hosts: Hosts, metrics: Metrics, ended: CancellationToken) {
    let live = || async { Json(json!({ "status": "ok" })) };
    let routes = Router::new()
        .route("/live", get(live))
        .route("/health", get(live))
        .route("/ping", get(live).post(live))
        .route(
            "/ready",
            get(async || unready((StatusCode::SERVICE_UNAVAILABLE, Json(json!({ "status": reason(), "code": "starting" }))))),
        )
        .fallback(refused);
    let is_local = listener.local_addr().is_ok_and(|address| address.ip().is_loopback());
    let checked = (is_local || !hosts.is_empty()).then_some(hosts);
    let limits = ConnectionLimits::new(
        ADMIN_CONNECTIONS_MAX,
        ADMIN_CONNECTIONS_OF_ADDRESS_MAX,
        Vec::new(),
        ApiError::Connections.failure().body().to_string(),
        FrontendMetrics::new(&metrics).connections,
    );
    let drain = Drain { begun: ended, idle_max: Duration::ZERO };
    listen::serve(listener, tls, guarded(routes, checked, Origins::default()), Arc::new(limits), UNREAD_MAX, drain).await;
}

/// Refuses a request after reading its body: a client reads the reply only after it has sent its request.
async fn refused(request: Request) -> Response {
    discard(request.into_body()).await;
    unready(ApiError::Starting { step: step() })
}

/// Adds the headers `retry-after` and [`STARTING`].
fn unready(response: impl IntoResponse) -> Response {
    let mut response = response.into_response();
    let headers = response.headers_mut();
    headers.insert(header::RETRY_AFTER, RETRY_AFTER);
    let visible: String = step().chars().filter(|char| char.is_ascii_graphic() || *char == ' ').collect();
    headers.extend(HeaderValue::from_str(&visible).ok().map(|step| (STARTING, step)));
    response
}

fn reason() -> String {
    match &*step() {
        "" => "starting".to_owned(),
        step => format!("starting: {step}"),
    }
}
