//! The two ZMQ connections of a subscription to KV events.

use super::SubscriptionSettings;
use bytes::Bytes;
use futures::{StreamExt, channel::mpsc};
use std::{future::Future, time::Duration};
use tokio::time::timeout;
use zeromq::{DealerSocket, Endpoint, Host, Socket, SocketEvent, SocketRecv, SocketSend, SubSocket, ZmqError, ZmqMessage};

/// An endpoint to which no client can connect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an endpoint of KV events; write tcp://HOST:PORT or ipc://PATH")]
pub struct InvalidEndpoint(pub String);

#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    #[error(transparent)]
    Zmq(#[from] ZmqError),
    #[error("the engine does not answer in time")]
    TimedOut,
    #[error("the engine has closed the connection")]
    Closed,
    #[error("the engine sent a message that is not a numbered batch")]
    Protocol,
}

/// The batch number with which the engine marks the end of a replay.
const END: u64 = u64::MAX;

/// Checks that a client can connect to an endpoint. vLLM's own settings may have the host `*`, to which only a server can bind.
pub(super) fn check(endpoint: &str) -> Result<(), InvalidEndpoint> {
    let is_valid = match endpoint.parse() {
        Ok(Endpoint::Tcp(Host::Domain(host), _)) => host != "*",
        Ok(Endpoint::Tcp(_, port)) => port != 0,
        Ok(Endpoint::Ipc(Some(path))) => path.as_os_str() != "*",
        _ => false,
    };
    if is_valid { Ok(()) } else { Err(InvalidEndpoint(endpoint.to_owned())) }
}

pub(super) struct Live {
    socket: SubSocket,
    monitor: mpsc::Receiver<SocketEvent>,
    topic: String,
}

impl Live {
    pub async fn connect(settings: &SubscriptionSettings) -> Result<Self, SocketError> {
        let mut socket = SubSocket::new();
        let monitor = socket.monitor();
        socket.subscribe(&settings.topic).await?;
        in_time(settings.timeout, socket.connect(&settings.endpoint)).await?;
        Ok(Self { socket, monitor, topic: settings.topic.clone() })
    }

    /// Returns the next batch's number and payload. This method is cancel-safe.
    ///
    /// # Errors
    /// Fails if the connection was lost. The socket would reconnect by itself, without any sign that batches were missed.
    pub async fn next(&mut self) -> Result<(u64, Bytes), SocketError> {
        loop {
            let message = tokio::select! {
                biased;
                message = self.socket.recv() => message?,
                event = self.monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => return Err(SocketError::Closed),
                    Some(_) => continue,
                },
            };
            // A ZMQ subscription also receives messages of topics that begin with its own topic.
            if message.get(0).is_some_and(|topic| *topic == self.topic.as_bytes()) {
                return batch(&message);
            }
        }
    }
}

pub(super) struct Replay {
    socket: DealerSocket,
    limit: Duration,
}

impl Replay {
    pub async fn request(settings: &SubscriptionSettings, from: u64) -> Result<Self, SocketError> {
        let endpoint = settings.replay_endpoint.as_deref().ok_or(SocketError::Closed)?;
        let mut socket = DealerSocket::new();
        in_time(settings.timeout, socket.connect(endpoint)).await?;
        let frames = vec![Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())];
        let request = ZmqMessage::try_from(frames).map_err(|_| SocketError::Protocol)?;
        in_time(settings.timeout, socket.send(request)).await?;
        Ok(Self { socket, limit: settings.timeout })
    }

    pub async fn next(&mut self) -> Result<Option<(u64, Bytes)>, SocketError> {
        let message = in_time(self.limit, self.socket.recv()).await?;
        let (number, payload) = batch(&message)?;
        Ok((number != END).then_some((number, payload)))
    }
}

/// Returns a batch's number and payload, which are the last two frames of a message, after the topic and, in a replay, an empty frame.
fn batch(message: &ZmqMessage) -> Result<(u64, Bytes), SocketError> {
    let frame = |from_end: usize| message.len().checked_sub(from_end).and_then(|index| message.get(index));
    let number = frame(2).and_then(|number| <[u8; 8]>::try_from(&number[..]).ok()).map(u64::from_be_bytes);
    number.zip(frame(1).cloned()).ok_or(SocketError::Protocol)
}

async fn in_time<T>(limit: Duration, result: impl Future<Output = Result<T, ZmqError>>) -> Result<T, SocketError> {
    Ok(timeout(limit, result).await.map_err(|_| SocketError::TimedOut)??)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_endpoints_that_a_client_can_connect_to_are_accepted() {
        for valid in ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://engine-0.example:5557", "ipc:///run/vllm/events"] {
            assert_eq!(check(valid), Ok(()), "{valid}");
        }
        for invalid in
            ["", "127.0.0.1:5557", "tcp://*:5557", "tcp://127.0.0.1:0", "tcp://127.0.0.1", "inproc://events", "http://a:1"]
        {
            assert_eq!(check(invalid), Err(InvalidEndpoint(invalid.to_owned())), "{invalid}");
        }
    }

    #[test]
    fn batch_is_read_from_the_last_two_frames_of_a_message() {
        let message = |frames: &[&'static [u8]]| {
            ZmqMessage::try_from(frames.iter().map(|frame| Bytes::from_static(frame)).collect::<Vec<_>>()).unwrap()
        };
        let number: &[u8] = &[0, 0, 0, 0, 0, 0, 1, 2];
        for frames in [&[b"kv", number, b"payload"][..], &[b"", b"kv", number, b"payload"], &[b"", number, b"payload"]] {
            assert_eq!(batch(&message(frames)).unwrap(), (258, Bytes::from_static(b"payload")));
        }
        for frames in [&[b"payload".as_slice()][..], &[b"kv", b"1", b"payload"], &[number]] {
            assert!(batch(&message(frames)).is_err());
        }
    }
}
