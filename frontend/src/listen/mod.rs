//! Accepts connections: limits their number and their times, and detects clients that have disconnected.

mod exchange;
mod places;
mod timed;

pub(crate) use places::{Peer, PeerAddress, Places};

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
use places::Place;
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

/// Serves what arrives until `drained`, and what has arrived by then to its end. Dropped, it drops all connections.
pub(crate) async fn serve(
    listener: Listener,
    routes: Router,
    places: Arc<Places>,
    unread_max: Duration,
    drained: impl Future<Output = ()>,
) {
    let mut drained = pin!(drained);
    let (mut connections, ending) = (JoinSet::new(), CancellationToken::new());
    let serving = |place| Serving { routes: routes.clone(), unread_max, ending: ending.clone(), place };
    match listener.into_arrivals() {
        Arrivals::Tcp(mut listener) => loop {
            tokio::select! {
                biased;
                () = &mut drained => break,
                Some(_) = connections.join_next() => {}
                (stream, address) = axum::serve::Listener::accept(&mut listener) => match places.take(Some(address.ip())) {
                    Some(place) => drop(connections.spawn(serving(place).run(without_delay(stream)))),
                    None => refuse(&stream),
                },
            }
        },
        Arrivals::Memory(mut arriving) => loop {
            tokio::select! {
                biased;
                () = &mut drained => break,
                Some(_) = connections.join_next() => {}
                Some(stream) = arriving.recv() => if let Some(place) = places.take(None) {
                    drop(connections.spawn(serving(place).run(stream)));
                },
                else => pending().await,
            }
        },
    }
    ending.cancel();
    while connections.join_next().await.is_some() {}
}

/// Without it a small event waits for the client's delayed acknowledgement of the one before: 40 ms.
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
    // A new socket's buffer is empty. If it fails all the same, the client sees the end of the connection.
    let _ = stream.try_write((head + &body).as_bytes());
}

/// What serving one connection needs.
struct Serving {
    routes: Router,
    unread_max: Duration,
    /// Cancelled: the connection closes when its request is answered.
    ending: CancellationToken,
    place: Place,
}

impl Serving {
    async fn run(self, io: impl AsyncRead + AsyncWrite + Send + 'static) {
        let exchange = Arc::new(Exchange::default());
        let io = Timed::new(io, Arc::clone(&exchange), self.unread_max);
        let (routes, address) = (TowerToHyperService::new(self.routes), self.place.address());
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
            tracing::debug!(%error, "a connection broke");
        }
    }
}
