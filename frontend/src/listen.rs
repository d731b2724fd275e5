//! Connections as axum wants them, and given up where nobody reads.

use axum::{
    extract::connect_info::Connected,
    serve::{IncomingStream, Listener},
};
use std::{
    future::pending,
    io,
    net::{IpAddr, SocketAddr},
    pin::Pin,
    time::Duration,
};
use tokio::{io::DuplexStream, sync::mpsc};
use tokio_io_timeout::TimeoutWriter;

/// Where a request's connection comes from; an extension of every request that came over TCP, as axum's `ConnectInfo`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PeerAddress(pub(crate) IpAddr);

impl<L: Listener<Addr = SocketAddr>> Connected<IncomingStream<'_, Impatient<L>>> for PeerAddress {
    fn connect_info(stream: IncomingStream<'_, Impatient<L>>) -> Self {
        Self(stream.remote_addr().ip())
    }
}

/// Connections that break when their client takes nothing of what is there for it for `unread_max`.
pub struct Impatient<L> {
    pub listener: L,
    pub unread_max: Duration,
}

impl<L: Listener> Listener for Impatient<L> {
    type Io = Pin<Box<TimeoutWriter<L::Io>>>;
    type Addr = L::Addr;

    async fn accept(&mut self) -> (Self::Io, L::Addr) {
        let (connection, address) = self.listener.accept().await;
        let mut connection = TimeoutWriter::new(connection);
        connection.set_timeout(Some(self.unread_max));
        (Box::pin(connection), address)
    }

    fn local_addr(&self) -> io::Result<L::Addr> {
        self.listener.local_addr()
    }
}

/// Connections made in memory.
pub struct Arriving(pub mpsc::Receiver<DuplexStream>);

impl Listener for Arriving {
    type Io = DuplexStream;
    type Addr = ();

    async fn accept(&mut self) -> (DuplexStream, ()) {
        match self.0.recv().await {
            Some(stream) => (stream, ()),
            None => pending().await,
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}
