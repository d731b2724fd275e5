//! The transport of connections, and the cluster key and certificates that authenticate every call. The transport is TCP, or a network in
//! memory, on which tests delay, interrupt and refuse connections. A service connects to its peers over the [`Network`] of its own
//! [`Listener`].

use super::{
    direct::{DirectCalls, DirectListener, Transport},
    guard::{Bearer, Guard, OnRefused},
    peer::PeerRole,
    tls::{ClusterTls, Dialer, accepted},
};
use crate::ClusterKey;
use std::{io, net::SocketAddr, sync::Arc};
use tokio::{io::DuplexStream, net::TcpListener, sync::mpsc};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    codegen::{BoxFuture, Service},
    service::{Routes, interceptor::InterceptedService},
    transport::{self, Endpoint, Error, Server, Uri},
};
use tower_layer::Layer;

/// The transport over which a process connects to others, and the cluster key of its calls. It is cheap to clone.
#[derive(Clone, Default)]
pub struct Network {
    dial: Option<Arc<Dial>>,
    key: ClusterKey,
    /// The certificate of this process; `None`: connections are not encrypted.
    tls: Option<ClusterTls>,
    /// The roles of the processes to which this process connects.
    expected: &'static [PeerRole],
    /// The services of this process, if its parts call each other directly.
    pub(super) direct: Option<DirectCalls>,
}

/// A way to call the process at an address, with the cluster's bearer token if the cluster has a key. It is cheap to clone.
pub type Channel = InterceptedService<Transport, Bearer>;

/// A function that connects to `host:port`. Its future returns the connection, or fails like the operating system's `connect`.
pub type Dial = dyn Fn(&str) -> BoxFuture<DuplexStream, io::Error> + Send + Sync;

/// A source of incoming connections, and the network from which they arrive.
pub struct Listener {
    arrivals: Arrivals,
    network: Network,
}

/// A source of incoming connections: a socket, or a network in memory.
pub enum Arrivals {
    /// Connections that arrive at a socket.
    Tcp(TcpListener),
    /// Connections from a network in memory. No more arrive once the sender is dropped.
    Memory(mpsc::Receiver<DuplexStream>),
}

impl Network {
    /// Creates a network over TCP, for processes with this key.
    pub fn tcp(key: ClusterKey) -> Self {
        Self { key, ..Self::default() }
    }

    /// Encrypts all connections over TCP, and lets only processes with a certificate of the cluster connect.
    #[must_use]
    pub fn with_tls(self, tls: Option<ClusterTls>) -> Self {
        Self { tls, ..self }
    }

    /// Returns this network for connections to processes of these roles. A process whose certificate has another role is refused.
    #[must_use]
    pub fn expecting(&self, expected: &'static [PeerRole]) -> Self {
        Self { expected, ..self.clone() }
    }

    /// Returns whether calls of the processes that listen on this network need the cluster's key or a certificate.
    pub fn checks_callers(&self) -> bool {
        self.key.is_set() || self.tls.is_some()
    }

    /// Lets the parts of this process that listen on this network, or on clones of it, call each other without connections.
    #[must_use]
    pub fn with_direct_calls(self) -> Self {
        Self { direct: Some(DirectCalls::default()), ..self }
    }

    /// Creates a network in memory, for processes with this key.
    pub fn memory(dial: Arc<Dial>, key: ClusterKey) -> Self {
        Self { dial: Some(dial), key, ..Self::default() }
    }

    /// Returns the key of the cluster on this network.
    pub fn key(&self) -> &ClusterKey {
        &self.key
    }

    /// Returns a channel that connects at its first call. If the connection breaks, the channel connects again at the next call.
    pub fn connect_lazy(&self, endpoint: &Endpoint) -> Channel {
        let connection = match (&self.dial, self.dialer()) {
            (Some(dial), _) => endpoint.connect_with_connector_lazy(Connector(dial.clone())),
            (None, Some(dialer)) => endpoint.connect_with_connector_lazy(dialer),
            (None, None) => endpoint.connect_lazy(),
        };
        self.guarded(connection, endpoint)
    }

    /// Connects immediately, unless this process serves at the address.
    ///
    /// # Errors
    /// Fails if the connection cannot be established.
    pub async fn connect(&self, endpoint: &Endpoint) -> Result<Channel, Error> {
        if self.direct.as_ref().is_some_and(|direct| direct.serves(address(endpoint))) {
            return Ok(self.connect_lazy(endpoint));
        }
        let connection = match (&self.dial, self.dialer()) {
            (Some(dial), _) => endpoint.connect_with_connector(Connector(dial.clone())).await?,
            (None, Some(dialer)) => endpoint.connect_with_connector(dialer).await?,
            (None, None) => endpoint.connect().await?,
        };
        Ok(self.guarded(connection, endpoint))
    }

    fn dialer(&self) -> Option<Dialer> {
        Some(Dialer { tls: self.tls.clone()?, expected: self.expected })
    }

    fn guarded(&self, connection: transport::Channel, endpoint: &Endpoint) -> Channel {
        let direct = self.direct.clone().map(|direct| (direct, address(endpoint).into()));
        Channel::new(Transport::new(connection, direct), Bearer(self.key.clone()))
    }
}

impl Listener {
    /// Creates a listener that accepts these connections, which arrive from `network`.
    pub fn new(arrivals: Arrivals, network: Network) -> Self {
        Self { arrivals, network }
    }

    /// Creates a listener for a socket, in a cluster with this key.
    pub fn tcp(listener: TcpListener, key: ClusterKey) -> Self {
        Self::new(Arrivals::Tcp(listener), Network::tcp(key))
    }

    /// Returns the network from which the connections arrive.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the source of connections. Connections taken from it are not authenticated; this is for a caller that serves another
    /// protocol than gRPC.
    pub fn into_arrivals(self) -> Arrivals {
        self.arrivals
    }

    /// Returns the address at which the socket listens.
    ///
    /// # Errors
    /// Fails if the operating system returns an error, or if the listener belongs to a network in memory, which has no socket addresses.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        match &self.arrivals {
            Arrivals::Tcp(listener) => listener.local_addr(),
            Arrivals::Memory(_) => Err(io::ErrorKind::Unsupported.into()),
        }
    }

    /// Returns whether only processes on this machine can connect. In a network in memory this is always true.
    ///
    /// # Errors
    /// Fails if the operating system returns an error.
    pub fn is_local(&self) -> io::Result<bool> {
        match &self.arrivals {
            Arrivals::Tcp(listener) => Ok(listener.local_addr()?.ip().is_loopback()),
            Arrivals::Memory(_) => Ok(true),
        }
    }

    /// Accepts connections and direct calls until `ended` resolves, then serves the open ones to their end. Dropping the future breaks
    /// direct calls. A call without the cluster's bearer token is
    /// refused with UNAUTHENTICATED, one that the caller's certificate does not allow with PERMISSION_DENIED, and a connection without a
    /// certificate of the cluster is closed. `on_refused` is called for each.
    ///
    /// # Errors
    /// Fails if the server fails.
    pub async fn serve(
        self,
        server: Server,
        routes: Routes,
        on_refused: OnRefused,
        ended: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let address = self.local_addr();
        let Network { key, tls, direct, .. } = self.network;
        let guard = Guard { key, has_roles: tls.is_some(), on_refused: on_refused.clone() };
        // A process may call itself, whatever its role.
        let unrestricted = Guard { has_roles: false, ..guard.clone() };
        let direct = direct.zip(address.ok());
        let direct = direct.map(|(direct, address)| direct.serve(address.to_string(), unrestricted.layer(routes.clone())));
        let ended = async {
            ended.await;
            direct.iter().for_each(DirectListener::close);
        };
        let router = server.layer(guard).add_routes(routes);
        match (self.arrivals, tls) {
            (Arrivals::Tcp(listener), None) => router.serve_with_incoming_shutdown(super::incoming(listener), ended).await?,
            (Arrivals::Tcp(listener), Some(tls)) => {
                let handshake = move |stream| tls.clone().admit(stream, on_refused.clone());
                let incoming = Box::pin(accepted(super::incoming(listener), handshake));
                router.serve_with_incoming_shutdown(incoming, ended).await?;
            }
            (Arrivals::Memory(arriving), _) => {
                let incoming = tokio_stream::StreamExt::map(ReceiverStream::new(arriving), io::Result::Ok);
                router.serve_with_incoming_shutdown(incoming, ended).await?;
            }
        }
        if let Some(direct) = &direct {
            direct.ended().await;
        }
        Ok(())
    }
}

/// Returns the endpoint's address, `host:port`.
fn address(endpoint: &Endpoint) -> &str {
    endpoint.uri().authority().map_or("", |authority| authority.as_str())
}

/// Creates a listener for a socket, in a cluster without a key.
impl From<TcpListener> for Listener {
    fn from(listener: TcpListener) -> Self {
        Self::tcp(listener, ClusterKey::default())
    }
}

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
