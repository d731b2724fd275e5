//! What connections are made of: TCP, or a network in memory on which tests lose, delay and cut them.
//!
//! Who listens on a network dials on it, too: a part is given a [`Listener`] and asks it for the [`Network`].

use std::{fmt, io, net::SocketAddr, sync::Arc};
use tokio::{io::DuplexStream, net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    codegen::{BoxFuture, Service},
    transport::{Channel, Endpoint, Error, Uri, server::Router},
};

/// How a process reaches others. Cheap to clone.
#[derive(Clone, Default)]
pub enum Network {
    /// The system's.
    #[default]
    Tcp,
    /// One in memory.
    Memory(Arc<Dial>),
}

/// Connects to `host:port`: resolves when the connection is there, fails as a system's `connect` would.
pub type Dial = dyn Fn(&str) -> BoxFuture<DuplexStream, io::Error> + Send + Sync;

/// Where connections arrive.
pub enum Listener {
    /// At a socket.
    Tcp(TcpListener),
    /// From a network in memory; when the sender is gone, no more come.
    Memory(mpsc::Receiver<DuplexStream>, Network),
}

impl Network {
    /// Connects when first used, and again after a connection broke.
    pub fn connect_lazy(&self, endpoint: &Endpoint) -> Channel {
        match self {
            Self::Tcp => endpoint.connect_lazy(),
            Self::Memory(dial) => endpoint.connect_with_connector_lazy(Connector(dial.clone())),
        }
    }

    /// Connects now.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Error> {
        match self {
            Self::Tcp => endpoint.connect().await,
            Self::Memory(dial) => endpoint.connect_with_connector(Connector(dial.clone())).await,
        }
    }
}

impl fmt::Debug for Network {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Tcp => "Tcp",
            Self::Memory(_) => "Memory",
        })
    }
}

impl Listener {
    /// The network it is on.
    pub fn network(&self) -> Network {
        match self {
            Self::Tcp(_) => Network::Tcp,
            Self::Memory(_, network) => network.clone(),
        }
    }

    /// Where it listens; a network in memory has names only.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match self {
            Self::Tcp(listener) => listener.local_addr(),
            Self::Memory(..) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Serves what arrives until `ended`, and what has arrived by then to its end.
    pub async fn serve(self, router: Router, ended: impl Future<Output = ()>) -> Result<(), Error> {
        match self {
            Self::Tcp(listener) => router.serve_with_incoming_shutdown(super::incoming(listener), ended).await,
            Self::Memory(arriving, _) => {
                let incoming = tokio_stream::StreamExt::map(ReceiverStream::new(arriving), io::Result::Ok);
                router.serve_with_incoming_shutdown(incoming, ended).await
            }
        }
    }
}

impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::Tcp(listener)
    }
}

/// As tonic wants it.
struct Connector(Arc<Dial>);

impl Service<Uri> for Connector {
    type Response = hyper_util::rt::TokioIo<DuplexStream>;
    type Error = io::Error;
    type Future = BoxFuture<Self::Response, io::Error>;

    fn poll_ready(&mut self, _: &mut std::task::Context<'_>) -> std::task::Poll<Result<(), io::Error>> {
        std::task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, to: Uri) -> Self::Future {
        let dialled = (self.0)(to.authority().map_or("", |authority| authority.as_str()));
        Box::pin(async { dialled.await.map(hyper_util::rt::TokioIo::new) })
    }
}
