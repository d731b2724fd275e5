//! Accepts connections, limits their number, applies HTTP's timeouts, and detects clients that have disconnected.
//!
//! A process that drains closes its listening socket at once, so that another process may serve the port. It closes no connection on which a
//! request may be under way: it serves the next request on each open connection, answers with `Connection: close`, and closes connections that
//! stay idle.

mod exchange;
mod hosts;
mod limits;
mod timed;
mod tls;

pub use hosts::Hosts;
pub use limits::{ClientNetwork, ConnectionLimits, ConnectionMetrics, PeerAddress, contains};
pub use timed::Drain;
pub use tls::{HTTP_1, HTTP_2, ServerCertificate, Tls, TlsFilesError, serve_grpc};

use axum::{
    Router,
    body::Body,
    http::{HeaderValue, header},
    response::Response,
};
use exchange::{Exchange, WatchedBody};
use hyper::{
    Request,
    body::Incoming,
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use limits::ConnectionPermit;
use std::{
    convert::Infallible,
    future::pending,
    net::{IpAddr, SocketAddr},
    sync::Arc,
    time::Duration,
};
use tandem_proto::channel::{Arrivals, Listener};
use timed::Timed;
use tokio::{
    io::{AsyncRead, AsyncWrite, DuplexStream},
    net::TcpStream,
    task::JoinSet,
};
use tokio_util::either::Either;

/// The maximum size of a connection's read buffer, which has to hold the request line and headers. Proxies allow headers of 8 to 32 KiB.
/// The buffers of 8,192 connections use 256 MiB at most.
const READ_BUFFER_BYTES: usize = 32 << 10;

/// The maximum number of open connections to an admin port. Probes, scrapers and a few viewers of the dashboard need less.
pub const ADMIN_CONNECTIONS_MAX: usize = 256;
/// The maximum number of connections to an admin port from one address, so that no host can keep out the probes of other hosts.
pub const ADMIN_CONNECTIONS_OF_ADDRESS_MAX: usize = 64;

/// Accepts connections until `drain` begins, then serves the open connections to the end of their last requests. Dropping the future closes
/// all connections. With `tls`, connections are encrypted. `unread_max`: a client that reads nothing of its response for this long is
/// disconnected.
pub async fn serve(
    listener: Listener,
    tls: Option<Tls>,
    routes: Router,
    limits: Arc<ConnectionLimits>,
    unread_max: Duration,
    drain: Drain,
) {
    let mut connections = JoinSet::new();
    let mut arrivals = listener.into_arrivals();
    let serve = |connections: &mut JoinSet<()>, stream, address| match (limits.acquire(address), stream) {
        (Some(permit), stream) => {
            let serving = Serving { routes: routes.clone(), unread_max, drain: drain.clone(), permit };
            match tls.clone() {
                None => drop(connections.spawn(serving.run(stream))),
                Some(tls) => drop(connections.spawn(serving.run_encrypted(tls, stream))),
            }
        }
        (None, Either::Left(stream)) if tls.is_none() => refuse(&stream, &limits.refusal),
        (None, _) => {}
    };
    loop {
        let (stream, address) = tokio::select! {
            biased;
            () = drain.begun.cancelled() => break,
            Some(_) = connections.join_next() => continue,
            accepted = accept(&mut arrivals) => accepted,
        };
        serve(&mut connections, stream, address);
    }
    for (stream, address) in close(arrivals) {
        serve(&mut connections, Either::Left(stream), Some(address));
    }
    while connections.join_next().await.is_some() {}
}

/// Closes the socket. Returns the connections that it had established and that have not been accepted; the kernel would reset them.
fn close(arrivals: Arrivals) -> Vec<(TcpStream, IpAddr)> {
    let Arrivals::Tcp(listener) = arrivals else { return Vec::new() };
    let Ok(listener) = listener.into_std() else { return Vec::new() };
    let accepted = std::iter::from_fn(|| listener.accept().ok());
    let stream = |(stream, address): (std::net::TcpStream, SocketAddr)| {
        stream.set_nonblocking(true).ok()?;
        stream.set_nodelay(true).ok();
        Some((TcpStream::from_std(stream).ok()?, address.ip()))
    };
    accepted.filter_map(stream).collect()
}

/// Returns the next connection and its peer's address, which is `None` for a connection in memory. Cancel-safe.
async fn accept(arrivals: &mut Arrivals) -> (Either<TcpStream, DuplexStream>, Option<IpAddr>) {
    match arrivals {
        Arrivals::Tcp(listener) => {
            let (stream, address) = axum::serve::Listener::accept(listener).await;
            // Without TCP_NODELAY, a small event waits up to 40 ms for the client's delayed acknowledgement of the previous event.
            if let Err(error) = stream.set_nodelay(true) {
                tracing::debug!(%error, "TCP_NODELAY cannot be set");
            }
            (Either::Left(stream), Some(address.ip()))
        }
        Arrivals::Memory(arriving) => match arriving.recv().await {
            Some(stream) => (Either::Right(stream), None),
            None => pending().await,
        },
    }
}

/// Sends a 503 response on a connection that exceeds a limit and is to be closed. Does not wait for the client.
fn refuse(stream: &TcpStream, body: &str) {
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    // A new socket's send buffer is empty, so this rarely fails. If it fails, the client sees only that the connection is closed.
    let _ = stream.try_write((head + body).as_bytes());
}

/// A connection that is being served.
struct Serving {
    routes: Router,
    unread_max: Duration,
    drain: Drain,
    permit: ConnectionPermit,
}

impl Serving {
    async fn run_encrypted(self, tls: Tls, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        match tls.accept(io).await {
            Ok(io) => self.run(io).await,
            Err(error) => tracing::debug!(%error, "a client's TLS handshake failed"),
        }
    }

    async fn run(self, io: impl AsyncRead + AsyncWrite + Send + 'static) {
        let exchange = Arc::new(Exchange::default());
        let io = Timed::new(io, Arc::clone(&exchange), self.unread_max, self.drain.clone());
        let (routes, address) = (TowerToHyperService::new(self.routes), self.permit.address);
        let service = service_fn(move |mut request: Request<Incoming>| {
            exchange.begin();
            if let Some(address) = address {
                request.extensions_mut().insert(address);
            }
            let answer = routes.call(request.map(Body::new));
            let answered = Arc::clone(&exchange);
            let draining = self.drain.begun.clone();
            async move {
                let mut response: Response = answer.await?;
                if draining.is_cancelled() {
                    // hyper closes the connection after this answer.
                    response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
                }
                let body = |body| WatchedBody::new(body, move || answered.end());
                Ok::<_, Infallible>(response.map(body))
            }
        });
        let served = http1::Builder::new().max_buf_size(READ_BUFFER_BYTES).serve_connection(TokioIo::new(io), service).await;
        if let Err(error) = served {
            tracing::debug!(%error, "a client's connection failed");
        }
    }
}
