//! The admin endpoint: `/live`, `/ready` and `/metrics` of a process that serves gRPC.

use crate::{Metrics, Shutdown};
use axum::{
    Json, Router,
    http::{StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use std::{future::Future, io, sync::Arc};
use tokio::net::TcpListener;

/// Serves until the process drains. Each `/ready` request calls `ready`, which returns an error with the reason if the process cannot serve now.
///
/// # Errors
/// Fails if the server's socket fails.
pub async fn run<R>(
    listener: TcpListener,
    metrics: Metrics,
    ready: impl Fn() -> R + Send + Sync + 'static,
    shutdown: Shutdown,
) -> io::Result<()>
where
    R: Future<Output = Result<(), String>> + Send + 'static,
{
    let ready = Arc::new(ready);
    let check = move || {
        let ready = ready();
        async move {
            match ready.await {
                Ok(()) => status(StatusCode::OK, "ready"),
                Err(reason) => status(StatusCode::SERVICE_UNAVAILABLE, &reason),
            }
        }
    };
    let text = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    let routes = Router::new()
        .route("/live", get(async || status(StatusCode::OK, "ok")))
        .route("/ready", get(check))
        .route("/metrics", get(async move || (text, metrics.render())));
    tokio::select! {
        served = async { axum::serve(listener, routes).await } => served,
        () = shutdown.draining() => Ok(()),
    }
}

fn status(code: StatusCode, status: &str) -> Response {
    (code, Json(std::collections::BTreeMap::from([("status", status)]))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt},
        net::TcpStream,
    };

    async fn get(address: std::net::SocketAddr, path: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("the admin listener accepts connections");
        let request = format!("GET {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.expect("the admin server reads");
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.expect("the admin server answers");
        answer
    }

    #[tokio::test]
    async fn admin_listener_serves_health_and_metrics_until_shutdown() {
        let (metrics, shutdown) = (Metrics::default(), Shutdown::default());
        metrics.counter("tandem_x_total", "X.", &[]).increment(3);
        let state = Arc::new(Mutex::new(Err("no \"decode\" worker".to_owned())));
        let asked = state.clone();
        let ready = move || std::future::ready(asked.lock().clone());
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("the listener is bound");
        let serving = run(listener, metrics, ready, shutdown.clone());
        let story = async {
            assert!(get(address, "/live").await.starts_with("HTTP/1.1 200"));
            let unready = get(address, "/ready").await;
            assert!(unready.starts_with("HTTP/1.1 503") && unready.contains(r#"{"status":"no \"decode\" worker"}"#), "{unready}");
            *state.lock() = Ok(());
            assert!(get(address, "/ready").await.starts_with("HTTP/1.1 200"));
            assert!(get(address, "/metrics").await.contains("tandem_x_total 3"));
            assert!(get(address, "/other").await.starts_with("HTTP/1.1 404"));
            shutdown.stop();
        };
        let (served, ()) = tokio::join!(serving, story);
        served.expect("the server ends without an error");
    }
}
