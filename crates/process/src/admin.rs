//! The admin endpoint: `/live`, `/ready` and `/metrics` of a process that serves gRPC.

use crate::{
    Metrics, Shutdown,
    listen::{ADMIN_CONNECTIONS_MAX, ADMIN_CONNECTIONS_OF_ADDRESS_MAX, ConnectionLimits, ConnectionMetrics, Drain, Hosts, serve},
};
use axum::{
    Json, Router,
    extract::Request,
    http::{StatusCode, header},
    middleware::{Next, from_fn},
    response::{IntoResponse, Response},
    routing::get,
};
use serde_json::{Value, json};
use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};
use tandem_proto::channel::Listener;
use tokio_util::sync::CancellationToken;

/// The time limit of a client that does not read its response. After this time without reading, the client is disconnected.
const UNREAD_MAX: Duration = Duration::from_secs(30);

/// Serves until the process drains. Each `/ready` request calls `ready`, which returns an error with the reason if the process cannot serve
/// now. Requests whose `Host` header is not accepted by `hosts` are refused with 421.
///
/// # Errors
/// This function never fails. It has the same return type as the process's other services.
pub async fn run<R>(
    listener: impl Into<Listener>,
    hosts: Hosts,
    metrics: Metrics,
    ready: impl Fn() -> R + Send + Sync + 'static,
    shutdown: Shutdown,
) -> Result<(), Infallible>
where
    R: Future<Output = Result<(), String>> + Send + 'static,
{
    let connections = ConnectionMetrics {
        open: metrics.gauge("tandem_admin_connections", "Open connections to the admin port.", &[]),
        refused: metrics.counter(
            "tandem_admin_connections_refused_total",
            "Connections to the admin port refused by its limit.",
            &[],
        ),
    };
    let refusal = body("too many connections").to_string();
    let limits = Arc::new(ConnectionLimits::new(
        ADMIN_CONNECTIONS_MAX,
        ADMIN_CONNECTIONS_OF_ADDRESS_MAX,
        Vec::new(),
        refusal,
        connections,
    ));
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
    let known = move |request: Request, next: Next| {
        let accepted = hosts.accept(request.headers());
        async move { if accepted { next.run(request).await } else { status(StatusCode::MISDIRECTED_REQUEST, UNKNOWN_HOST) } }
    };
    let text = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    let routes = Router::new()
        .route("/live", get(async || status(StatusCode::OK, "ok")))
        .route("/ready", get(check))
        .route("/metrics", get(async move || (text, metrics.render())))
        .layer(from_fn(known));
    let drain = Drain { begun: CancellationToken::new(), idle_max: Duration::ZERO };
    tokio::select! {
        () = serve(listener.into(), None, routes, limits, UNREAD_MAX, drain) => {}
        () = shutdown.draining() => {}
    }
    Ok(())
}

const UNKNOWN_HOST: &str =
    "the name in the header 'Host' is not one of this server's; use its IP address, or add the name to --allowed-hosts";

fn body(status: &str) -> Value {
    json!({ "status": status })
}

fn status(code: StatusCode, status: &str) -> Response {
    (code, Json(body(status))).into_response()
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;
    use tandem_proto::channel::{Arrivals, Network};
    use tokio::{
        io::{AsyncReadExt, AsyncWriteExt, DuplexStream, duplex},
        net::{TcpListener, TcpStream},
        sync::mpsc,
        time::Instant,
    };

    async fn get(address: std::net::SocketAddr, path: &str, host: &str) -> String {
        let mut stream = TcpStream::connect(address).await.expect("the admin listener accepts connections");
        let request = format!("GET {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\n\r\n");
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
        let hosts = Hosts::new(["decode-0".to_owned()]);
        let serving = run(listener, hosts, metrics, ready, shutdown.clone());
        let story = async {
            assert!(get(address, "/live", "localhost").await.starts_with("HTTP/1.1 200"));
            let unready = get(address, "/ready", "localhost").await;
            assert!(unready.starts_with("HTTP/1.1 503") && unready.contains(r#"{"status":"no \"decode\" worker"}"#), "{unready}");
            *state.lock() = Ok(());
            assert!(get(address, "/ready", "localhost").await.starts_with("HTTP/1.1 200"));
            for host in ["localhost:9200", "127.0.0.1", "10.0.0.7:9200", "[::1]", "decode-0:9200"] {
                assert!(get(address, "/metrics", host).await.contains("tandem_x_total 3"), "{host}");
            }
            for (path, host) in [("/metrics", "evil.example"), ("/live", "evil.example:9200"), ("/other", "evil.example")] {
                let refused = get(address, path, host).await;
                assert!(refused.starts_with("HTTP/1.1 421") && refused.contains("--allowed-hosts"), "{refused}");
            }
            assert!(get(address, "/other", "localhost").await.starts_with("HTTP/1.1 404"));
            shutdown.stop();
        };
        let (Ok(()), ()) = tokio::join!(serving, story);
    }

    #[tokio::test(start_paused = true)]
    async fn connections_with_incomplete_heads_are_closed_and_connections_are_limited() {
        let (dial, arriving) = mpsc::channel::<DuplexStream>(8);
        let metrics = Metrics::default();
        let listener = Listener::new(Arrivals::Memory(arriving), Network::default());
        let ready = || std::future::ready(Ok(()));
        let mut serving = tokio::task::JoinSet::new();
        serving.spawn(run(listener, Hosts::default(), metrics.clone(), ready, Shutdown::default()));
        let since = Instant::now();
        let mut half = Vec::new();
        for _ in 0..ADMIN_CONNECTIONS_MAX + 1 {
            let (mut ours, theirs) = duplex(1 << 16);
            ours.write_all(b"GET /metrics HTTP/1.1\r\nhost: loc").await.expect("the pipe has space");
            dial.send(theirs).await.expect("the admin server accepts");
            half.push(ours);
        }
        let closed_after = async |stream: &mut DuplexStream| {
            stream.read_to_end(&mut Vec::new()).await.expect("the connection is closed");
            since.elapsed().as_secs()
        };
        let mut last = half.pop().expect("there are connections");
        assert_eq!(closed_after(&mut last).await, 0, "the limit is reached");
        assert!(metrics.render().contains("tandem_admin_connections_refused_total 1"));
        for stream in &mut half {
            assert_eq!(closed_after(stream).await, 10);
        }
        let (mut ours, theirs) = duplex(1 << 16);
        dial.send(theirs).await.expect("the admin server accepts");
        ours.write_all(b"GET /live HTTP/1.1\r\nhost: [::1]\r\nconnection: close\r\n\r\n").await.expect("the pipe has space");
        let mut answer = String::new();
        ours.read_to_string(&mut answer).await.expect("the admin server answers");
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }
}
