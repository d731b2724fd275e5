//! What connections are made of: TCP, or a network in memory on which tests lose, delay and cut them; and the cluster's key, which
//! every call over them carries.
//!
//! A part dials on the network that it listens on: it is given a [`Listener`] and asks it for the [`Network`].

use super::guard::{Bearer, Channel, Guard, OnRefused};
use crate::ClusterKey;
use std::{fmt, io, net::SocketAddr, sync::Arc};
use tokio::{io::DuplexStream, net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    codegen::{BoxFuture, Service},
    service::{InterceptorLayer, Routes},
    transport::{self, Endpoint, Error, Server, Uri},
};

/// How a process reaches others, and by which key they know each other. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Network {
    reach: Reach,
    key: ClusterKey,
}

#[derive(Clone, Default)]
enum Reach {
    /// The system's network.
    #[default]
    Tcp,
    /// One in memory.
    Memory(Arc<Dial>),
}

/// Connects to `host:port`: resolves when the connection is there, fails as a system's `connect` would.
pub type Dial = dyn Fn(&str) -> BoxFuture<DuplexStream, io::Error> + Send + Sync;

/// Where connections arrive, and the network they arrive from.
pub struct Listener {
    arrivals: Arrivals,
    network: Network,
}

/// Connections as they arrive.
pub enum Arrivals {
    /// At a socket.
    Tcp(TcpListener),
    /// From a network in memory; when the sender is gone, no more come.
    Memory(mpsc::Receiver<DuplexStream>),
}

impl Network {
    /// The system's network, among processes with this key.
    pub fn tcp(key: ClusterKey) -> Self {
        Self { reach: Reach::Tcp, key }
    }

    /// One in memory, among processes with this key.
    pub fn memory(dial: Arc<Dial>, key: ClusterKey) -> Self {
        Self { reach: Reach::Memory(dial), key }
    }

    /// The key of the cluster that is reached over it.
    pub fn key(&self) -> &ClusterKey {
        &self.key
    }

    /// Connects when first used, and again after a connection broke.
    pub fn connect_lazy(&self, endpoint: &Endpoint) -> Channel {
        self.guarded(match &self.reach {
            Reach::Tcp => endpoint.connect_lazy(),
            Reach::Memory(dial) => endpoint.connect_with_connector_lazy(Connector(dial.clone())),
        })
    }

    /// Connects now.
    ///
    /// # Errors
    /// The connection cannot be made.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Error> {
        let channel = match &self.reach {
            Reach::Tcp => endpoint.connect().await?,
            Reach::Memory(dial) => endpoint.connect_with_connector(Connector(dial.clone())).await?,
        };
        Ok(self.guarded(channel))
    }

    fn guarded(&self, channel: transport::Channel) -> Channel {
        Channel::new(channel, Bearer(self.key.clone()))
    }
}

impl fmt::Debug for Reach {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(match self {
            Self::Tcp => "Tcp",
            Self::Memory(_) => "Memory",
        })
    }
}

impl Listener {
    /// What arrives from this network.
    pub fn new(arrivals: Arrivals, network: Network) -> Self {
        Self { arrivals, network }
    }

    /// A socket of a cluster with this key.
    pub fn tcp(listener: TcpListener, key: ClusterKey) -> Self {
        Self::new(Arrivals::Tcp(listener), Network::tcp(key))
    }

    /// The network it is on.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// For what is not gRPC: connections are served by the caller, and nothing is asked of them.
    pub fn into_arrivals(self) -> Arrivals {
        self.arrivals
    }

    /// Where it listens; a network in memory has names only.
    ///
    /// # Errors
    /// The system does not say, or there is no address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.arrivals {
            Arrivals::Tcp(listener) => listener.local_addr(),
            Arrivals::Memory(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Whether only processes on this machine can reach it. A network in memory has no others.
    ///
    /// # Errors
    /// The system does not say.
    pub fn is_local(&self) -> io::Result<bool> {
        match &self.arrivals {
            Arrivals::Tcp(listener) => Ok(listener.local_addr()?.ip().is_loopback()),
            Arrivals::Memory(_) => Ok(true),
        }
    }

    /// Serves what arrives until `ended`, and what has arrived by then to its end. Calls without the cluster's key are refused with
    /// UNAUTHENTICATED, and `on_refused` is called for each.
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

/// A socket of a cluster without a key.
impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::tcp(listener, ClusterKey::default())
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
