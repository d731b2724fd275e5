//! Connections between processes: the HTTP/2 settings that both ends of every connection share.
//! The connection to a silent peer is closed within [`PING_INTERVAL`] + [`PING_TIMEOUT`], whether it is busy or idle. A service notices
//! that a peer has ended when the peer's streams end.

mod direct;
mod ended;
mod guard;
mod network;
mod peer;
mod tls;

pub use direct::Transport;
pub use ended::{has_ended, status_text};
pub use guard::{Bearer, OnRefused};
pub use network::{Arrivals, Channel, Dial, Listener, Network};
pub use peer::{Peer, PeerRole};
pub use tls::{ClusterTls, ClusterTlsError, TlsPem, accepted};

use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tonic::transport::{Endpoint, Server, Uri, server::TcpIncoming};

/// The time between two keep-alive pings.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);

/// A connection is closed if a ping is not answered within this time, which exceeds the time that a live peer's thread waits for a processor of a
/// busy laptop.
pub const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// Time limit of an attempt to connect.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Maximum size of a message in bytes. It is many times the size of a large model's KV block, and enough for a prompt of millions of tokens.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// The HTTP/2 window of one stream to a server: the maximum number of bytes in flight. It must hold a KV block (2 MiB and more), otherwise each block
/// waits for a round trip. Together with the window of the whole connection, it bounds the bytes that a sender buffers for a slow receiver.
const REQUESTS_WINDOW: u32 = 4 << 20;
const REQUESTS_CONNECTION_WINDOW: u32 = 16 << 20;

/// The largest HTTP/2 frame to a server, in bytes. With HTTP/2's smallest frames (16 KiB), KV blocks would cost both ends 1.5 times as much processor
/// time. Larger frames than this would delay the other streams of their connection.
const REQUESTS_FRAME: u32 = 1 << 20;

/// The HTTP/2 window of one stream to a client. Thousands of messages with tokens or KV events may be in flight on a stream, and only this window
/// bounds the bytes that are buffered for a client that has stopped reading. The connection's window is HTTP/2's largest, because otherwise streams
/// that are not read would block the others. HTTP/2's allowance for small unread messages also grows with the connection's window; a connection that
/// exceeds this allowance breaks.
const REPLIES_WINDOW: u32 = 32 << 10;
const REPLIES_CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// The number of streams that a client may open and reset before the server has accepted them. If a client resets more, its connection breaks with
/// all of its streams. The limit exceeds the number of streams that a frontend serves at a time, because all of the frontend's clients may disconnect
/// together.
const PENDING_RESETS_MAX: usize = 16_384;

/// Maximum number of channels that one process keeps. If there are more, some belong to addresses that are no longer used, and the process drops all
/// of its channels.
const CHANNELS_MAX: usize = 1_024;

/// The error of an address that is not of the form `host:port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a peer's address is not of the form host:port")]
pub struct InvalidAddress;

/// Returns a gRPC server with the settings of this module.
pub fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .initial_stream_window_size(REQUESTS_WINDOW)
        .initial_connection_window_size(REQUESTS_CONNECTION_WINDOW)
        .max_frame_size(REQUESTS_FRAME)
        .http2_max_pending_accept_reset_streams(Some(PENDING_RESETS_MAX))
}

/// Accepts the connections of a socket, and disables Nagle's algorithm on them.
pub fn incoming(listener: tokio::net::TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

/// Returns the endpoint for `host:port`, with the settings of this module.
///
/// # Errors
/// Fails if the address is not of the form `host:port`.
pub fn endpoint(address: &str) -> Result<Endpoint, InvalidAddress> {
    let uri: Uri = format!("http://{address}").parse().map_err(|_| InvalidAddress)?;
    // Without a port, or with a path, the endpoint would connect to another address.
    if uri.port_u16().is_none()
        || uri.host().is_none_or(str::is_empty)
        || uri.authority().is_none_or(|authority| authority.as_str() != address)
    {
        return Err(InvalidAddress);
    }
    Ok(Endpoint::from(uri)
        .connect_timeout(CONNECT_TIMEOUT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(PING_INTERVAL)
        .keep_alive_timeout(PING_TIMEOUT)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(REPLIES_WINDOW)
        .initial_connection_window_size(REPLIES_CONNECTION_WINDOW)
        // The limit is switched off: over the whole life of a connection it would count the messages that arrive for streams that the client
        // has reset.
        .http2_max_local_error_reset_streams(None))
}

/// Keeps one connection for each peer, which all calls to that peer share. It is cheap to clone.
#[derive(Clone, Default)]
pub struct Channels {
    network: Network,
    open: Arc<Mutex<HashMap<String, Channel>>>,
}

impl Channels {
    /// Creates an empty set of channels on this network.
    pub fn on(network: Network) -> Self {
        Self { network, open: Arc::default() }
    }

    /// Returns the network over which the channels connect.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// Returns the channel to `host:port`. The channel connects at its first call.
    ///
    /// # Errors
    /// Fails if the address is not of the form `host:port`.
    pub fn to(&self, address: &str) -> Result<Channel, InvalidAddress> {
        let mut channels = self.open.lock();
        if let Some(channel) = channels.get(address) {
            return Ok(channel.clone());
        }
        if channels.len() == CHANNELS_MAX {
            channels.clear();
        }
        let channel = self.network.connect_lazy(&endpoint(address)?);
        channels.insert(address.to_owned(), channel.clone());
        Ok(channel)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_accepts_host_and_port_only() {
        for good in ["127.0.0.1:7100", "[::1]:7100", "worker-3.rack.example:7100"] {
            assert!(endpoint(good).is_ok(), "{good}");
        }
        for bad in ["", "host", "host:", "host:x", "host:70000", "host:1/path", "http://host:1", "a b:1", ":1", "::1:7100"] {
            assert_eq!(endpoint(bad).err(), Some(InvalidAddress), "{bad}");
        }
    }
}
