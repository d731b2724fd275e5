//! How processes connect: the HTTP/2 settings that both ends of every connection share.
//!
//! A silent peer becomes a closed connection within [`PING_INTERVAL`] + [`PING_TIMEOUT`], busy or idle: held streams are how
//! the parts notice each other's end.

mod guard;
mod network;

pub use guard::{Bearer, Channel, OnRefused};
pub use network::{Arrivals, Dial, Listener, Network};

use parking_lot::Mutex;
use std::{collections::HashMap, sync::Arc, time::Duration};
use tonic::transport::{Endpoint, Server, Uri, server::TcpIncoming};

/// Between pings.
pub const PING_INTERVAL: Duration = Duration::from_secs(5);

/// An unanswered ping closes the connection after this. Longer than a busy laptop leaves a thread waiting.
pub const PING_TIMEOUT: Duration = Duration::from_secs(10);

/// A connection that is not there by then will not come.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// The largest message: many times a KV block of a large model, and a prompt of millions of tokens.
pub const MESSAGE_BYTES_MAX: usize = 64 << 20;

/// Bytes on their way to a server, of one stream and of a whole connection. A stream's must hold a KV block (2 MiB and more),
/// or each block waits for a round trip; together they bound what a slow receiver makes the sender keep.
const REQUESTS_WINDOW: u32 = 4 << 20;
const REQUESTS_CONNECTION_WINDOW: u32 = 16 << 20;

/// Bytes in one piece on their way to a server. KV blocks in HTTP/2's smallest frames (16 KiB) cost both sides half as much time
/// again; larger frames than this hold up the other streams of their connection.
const REQUESTS_FRAME: u32 = 1 << 20;

/// Bytes on their way to a client, of one stream: tokens and cache events, thousands of messages. It alone bounds what is kept
/// for a reader that has stopped: all streams together are not bounded (this is HTTP/2's largest window), or those that are not
/// read would stop the others. HTTP/2's allowance for small messages nobody has read yet grows with that window, too; when it is
/// used up the whole connection breaks.
const REPLIES_WINDOW: u32 = 32 << 10;
const REPLIES_CONNECTION_WINDOW: u32 = (1 << 31) - 1;

/// Streams that a client may open and give up before the server has looked at them; more break the connection, and all other
/// streams with it. As many as a frontend serves at a time, and more: their clients may all leave at once.
const GIVEN_UP_MAX: usize = 16_384;

/// Peers one process talks to; more are other processes' old addresses.
const CHANNELS_MAX: usize = 1_024;

/// Not `host:port`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("a peer's address is not of the form host:port")]
pub struct InvalidAddress;

/// A server with the settings of this page.
pub fn server() -> Server {
    Server::builder()
        .http2_keepalive_interval(Some(PING_INTERVAL))
        .http2_keepalive_timeout(Some(PING_TIMEOUT))
        .initial_stream_window_size(REQUESTS_WINDOW)
        .initial_connection_window_size(REQUESTS_CONNECTION_WINDOW)
        .max_frame_size(REQUESTS_FRAME)
        .http2_max_pending_accept_reset_streams(Some(GIVEN_UP_MAX))
}

/// What arrives at a socket, without Nagle's delay.
pub fn incoming(listener: tokio::net::TcpListener) -> TcpIncoming {
    TcpIncoming::from(listener).with_nodelay(Some(true))
}

/// Connects to `host:port` when first used, and again after a connection broke.
pub fn endpoint(address: &str) -> Result<Endpoint, InvalidAddress> {
    let uri: Uri = format!("http://{address}").parse().map_err(|_| InvalidAddress)?;
    // Without a port, or with a path, it would be somewhere else than it says.
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
        // What still arrives for streams that were given up counts here, for the connection's whole life.
        .http2_max_local_error_reset_streams(None))
}

/// One connection a peer, shared by all calls to it. Cheap to clone.
#[derive(Clone, Default)]
pub struct Channels {
    network: Network,
    open: Arc<Mutex<HashMap<String, Channel>>>,
}

impl Channels {
    /// None yet, on this network.
    pub fn on(network: Network) -> Self {
        Self { network, open: Arc::default() }
    }

    /// The network that they are on.
    pub fn network(&self) -> &Network {
        &self.network
    }

    /// The connection to `host:port`. It is made by the first call on it.
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
    fn an_address_is_a_host_and_a_port() {
        for good in ["127.0.0.1:7100", "[::1]:7100", "worker-3.rack.example:7100"] {
            assert!(endpoint(good).is_ok(), "{good}");
        }
        for bad in ["", "host", "host:", "host:x", "host:70000", "host:1/path", "http://host:1", "a b:1", ":1", "::1:7100"] {
            assert_eq!(endpoint(bad).err(), Some(InvalidAddress), "{bad}");
        }
    }
}
