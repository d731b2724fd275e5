//! Accepts connections: limits their number and their times, and detects clients that have disconnected.

mod exchange;
mod limits;
mod timed;

pub(crate) use limits::{ConnectionLimits, Peer, PeerAddress};

use crate::error::ApiError;
use axum::{Router, body::Body, http::Version, response::Response};
use exchange::{Exchange, Phase, Watched};
use hyper::{
    Request,
    body::{Body as _, Incoming},
    server::conn::http1,
    service::{Service, service_fn},
};
use hyper_util::{rt::TokioIo, service::TowerToHyperService};
use limits::ConnectionPermit;
use std::{convert::Infallible, future::pending, pin::pin, sync::Arc, time::Duration};
use tandem_proto::channel::{Arrivals, Listener};
use timed::Timed;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::TcpStream,
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// Memory for reading from a connection, request line and headers included. Proxies allow headers of 8 to 32 KiB; 8,192
/// connections hold 256 MiB at most.
const READ_BUFFER_BYTES: usize = 32 << 10;

/// Accepts connections until `drained` resolves, then serves the open ones to the end of their requests. Dropping the future drops all
/// connections.
pub(crate) async fn serve(
    listener: Listener,
    routes: Router,
    limits: Arc<ConnectionLimits>,
    unread_max: Duration,
    drained: impl Future<Output = ()>,
) {
    let mut drained = pin!(drained);
    let (mut connections, ending) = (JoinSet::new(), CancellationToken::new());
    let serving = |permit| Serving { routes: routes.clone(), unread_max, ending: ending.clone(), permit };
    match listener.into_arrivals() {
        Arrivals::Tcp(mut listener) => loop {
            tokio::select! {
                biased;
                () = &mut drained => break,
                Some(_) = connections.join_next() => {}
                (stream, address) = axum::serve::Listener::accept(&mut listener) => match limits.acquire(Some(address.ip())) {
                    Some(permit) => drop(connections.spawn(serving(permit).run(without_delay(stream)))),
                    None => refuse(&stream),
                },
            }
        },
        Arrivals::Memory(mut arriving) => loop {
            tokio::select! {
                biased;
                () = &mut drained => break,
                Some(_) = connections.join_next() => {}
                Some(stream) = arriving.recv() => if let Some(permit) = limits.acquire(None) {
                    drop(connections.spawn(serving(permit).run(stream)));
                },
                else => pending().await,
            }
        },
    }
    ending.cancel();
    while connections.join_next().await.is_some() {}
}

/// Sets TCP_NODELAY: without it a small event waits up to 40 ms for the client's delayed acknowledgement of the previous one.
fn without_delay(stream: TcpStream) -> TcpStream {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "TCP_NODELAY cannot be set");
    }
    stream
}

/// Sends the reason for closing a connection beyond the limit, if the socket accepts it at once; the server does not wait for this client.
fn refuse(stream: &TcpStream) {
    let error = ApiError::Connections;
    let body = serde_json::to_string(&error.body()).expect("an error is plain data with texts as keys");
    let head = format!(
        "HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 1\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    // A new socket's buffer is empty, so this rarely fails; if it does, the client sees the connection close.
    let _ = stream.try_write((head + &body).as_bytes());
}

/// A connection that is being served.
struct Serving {
    routes: Router,
    unread_max: Duration,
    /// When it is cancelled, the connection closes after the answer of its request.
    ending: CancellationToken,
    permit: ConnectionPermit,
}

impl Serving {
    async fn run(self, io: impl AsyncRead + AsyncWrite + Send + 'static) {
        let exchange = Arc::new(Exchange::default());
        let io = Timed::new(io, Arc::clone(&exchange), self.unread_max);
        let (routes, address) = (TowerToHyperService::new(self.routes), self.permit.address());
        let service = service_fn(move |mut request: Request<Incoming>| {
            let has_body = !request.body().is_end_stream();
            exchange.begin(if has_body { Phase::Reading } else { Phase::Answering }, request.version() != Version::HTTP_10);
            if let Some(address) = address {
                request.extensions_mut().insert(address);
            }
            let read = Arc::clone(&exchange);
            let answer = routes.call(request.map(|body| Body::new(Watched::new(body, move || read.request_is_read()))));
            let answered = Arc::clone(&exchange);
            async move {
                let response: Response = answer.await?;
                let body = |body| Watched::new(body, move || answered.end());
                Ok::<_, Infallible>(response.map(body))
            }
        });
        let mut connection =
            pin!(http1::Builder::new().max_buf_size(READ_BUFFER_BYTES).serve_connection(TokioIo::new(io), service));
        let served = tokio::select! {
            served = connection.as_mut() => served,
            () = self.ending.cancelled() => {
                connection.as_mut().graceful_shutdown();
                connection.await
            }
        };
        if let Err(error) = served {
            tracing::debug!(%error, "connection failed");
        }
    }
}
