//! The transport of connections: TCP, or a network in memory, on which tests delay, interrupt and refuse connections; and the cluster key,
//! which authenticates every call. A service connects to its peers over the network that it listens on: its [`Listener`] has the
//! [`Network`].

use super::guard::{Bearer, Channel, Guard, OnRefused};
use crate::ClusterKey;
use std::{io, net::SocketAddr, sync::Arc};
use tokio::{io::DuplexStream, net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    codegen::{BoxFuture, Service},
    service::{InterceptorLayer, Routes},
    transport::{self, Endpoint, Error, Server, Uri},
};

/// The transport over which a process connects to others, and the cluster key of its calls. Cheap to clone.
#[derive(Clone, Default)]
pub struct Network {
    /// Connects in memory; `None`: over TCP.
    dial: Option<Arc<Dial>>,
    key: ClusterKey,
}

/// Connects to `host:port`: resolves with the connection, or fails like the operating system's `connect`.
pub type Dial = dyn Fn(&str) -> BoxFuture<DuplexStream, io::Error> + Send + Sync;

/// The source of incoming connections, and the network that they come from.
pub struct Listener {
    arrivals: Arrivals,
    network: Network,
}

/// The source of incoming connections.
pub enum Arrivals {
    /// Connections that arrive at a socket.
    Tcp(TcpListener),
    /// Connections of a network in memory, until the sender is dropped.
    Memory(mpsc::Receiver<DuplexStream>),
}

impl Network {
    /// Creates a network over TCP, for processes with this key.
    pub fn tcp(key: ClusterKey) -> Self {
        Self { dial: None, key }
    }

    /// Creates a network in memory, for processes with this key.
    pub fn memory(dial: Arc<Dial>, key: ClusterKey) -> Self {
        Self { dial: Some(dial), key }
    }

    /// Returns the cluster key.
    pub fn key(&self) -> &ClusterKey {
        &self.key
    }

    /// Returns a channel that connects at its first call, and again after its connection broke.
    pub fn connect_lazy(&self, endpoint: &Endpoint) -> Channel {
        self.guarded(match &self.dial {
            None => endpoint.connect_lazy(),
            Some(dial) => endpoint.connect_with_connector_lazy(Connector(dial.clone())),
        })
    }

    /// Connects immediately.
    ///
    /// # Errors
    /// The connection cannot be established.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Error> {
        let channel = match &self.dial {
            None => endpoint.connect().await?,
            Some(dial) => endpoint.connect_with_connector(Connector(dial.clone())).await?,
        };
        Ok(self.guarded(channel))
    }

    fn guarded(&self, channel: transport::Channel) -> Channel {
        Channel::new(channel, Bearer(self.key.clone()))
    }
}

impl Listener {
    /// Creates a listener for connections from this network.
    pub fn new(arrivals: Arrivals, network: Network) -> Self {
        Self { arrivals, network }
    }

    /// Creates a listener for a socket, in a cluster with this key.
    pub fn tcp(listener: TcpListener, key: ClusterKey) -> Self {
        Self::new(Arrivals::Tcp(listener), Network::tcp(key))
    }

    /// Returns the network of the listener.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the incoming connections without authentication, for a caller that serves another protocol than gRPC.
    pub fn into_arrivals(self) -> Arrivals {
        self.arrivals
    }

    /// Returns the address of the socket.
    ///
    /// # Errors
    /// The operating system returned an error, or the network is in memory and has names only.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.arrivals {
            Arrivals::Tcp(listener) => listener.local_addr(),
            Arrivals::Memory(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns whether only processes on this machine can connect, which is always true in memory.
    ///
    /// # Errors
    /// The operating system returned an error.
    pub fn is_local(&self) -> io::Result<bool> {
        match &self.arrivals {
            Arrivals::Tcp(listener) => Ok(listener.local_addr()?.ip().is_loopback()),
            Arrivals::Memory(_) => Ok(true),
        }
    }

    /// Accepts connections until `ended`, then serves the open connections to their end. Refuses calls without the cluster's bearer token
    /// with UNAUTHENTICATED, and calls `on_refused` for each.
    ///
    /// # Errors
    /// The server failed.
    pub async fn serve(
        self,
        server: Server,
        routes: Routes,
        on_refused: OnRefused,
        ended: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let guard = Guard { key: self.network.key, on_refused };
        let router = server.layer(InterceptorLayer::new(guard)).add_routes(routes);
        match self.arrivals {
            Arrivals::Tcp(listener) => router.serve_with_incoming_shutdown(super::incoming(listener), ended).await,
            Arrivals::Memory(arriving) => {
                let incoming = tokio_stream::StreamExt::map(ReceiverStream::new(arriving), io::Result::Ok);
                router.serve_with_incoming_shutdown(incoming, ended).await
            }
        }
    }
}

/// Creates a listener for a socket, in a cluster without a key.
impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::tcp(listener, ClusterKey::default())
    }
}

/// Adapts [`Dial`] to tonic.
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
