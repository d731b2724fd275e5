//! The two ZMQ connections of a subscription to KV events.

use super::{
    SubscriptionSettings,
    zmtp::{SocketError, ZmtpConnection, in_time},
};
use bytes::Bytes;
use std::time::Duration;

/// The batch number with which the engine marks the end of a replay.
const END: u64 = u64::MAX;

pub(super) struct Live {
    connection: ZmtpConnection,
    topic: String,
}

impl Live {
    pub async fn connect(settings: &SubscriptionSettings) -> Result<Self, SocketError> {
        let topic = settings.topic.clone();
        let subscribe = [b"\x01", topic.as_bytes()].concat();
        let connection = ZmtpConnection::open(&settings.endpoint, "SUB", &[&subscribe], settings.timeout).await?;
        Ok(Self { connection, topic })
    }

    /// Returns the next batch's number and payload. This method is cancel-safe.
    ///
    /// # Errors
    /// Fails if the connection was lost.
    pub async fn next(&mut self) -> Result<(u64, Bytes), SocketError> {
        loop {
            let message = self.connection.next().await?;
            // A ZMQ subscription also receives messages of topics that begin with its own topic.
            if message.first().is_some_and(|topic| *topic == self.topic.as_bytes()) {
                return batch(&message).and_then(|(number, payload)| match number {
                    END => Err(SocketError::Protocol),
                    _ => Ok((number, payload)),
                });
            }
        }
    }
}

pub(super) struct EventReplay {
    connection: ZmtpConnection,
    limit: Duration,
}

impl EventReplay {
    pub async fn request(settings: &SubscriptionSettings, from: u64) -> Result<Self, SocketError> {
        let (endpoint, limit) = (settings.replay_endpoint.as_deref().ok_or(SocketError::Closed)?, settings.timeout);
        let connection = ZmtpConnection::open(endpoint, "DEALER", &[b"", &from.to_be_bytes()], limit).await?;
        Ok(Self { connection, limit })
    }

    pub async fn next(&mut self) -> Result<Option<(u64, Bytes)>, SocketError> {
        let (number, payload) = batch(&in_time(self.limit, self.connection.next()).await?)?;
        Ok((number != END).then_some((number, payload)))
    }
}

/// Returns a batch's number and payload, which are the last two frames of a message, after the topic and, in a replay, an empty frame.
fn batch(message: &[Bytes]) -> Result<(u64, Bytes), SocketError> {
    let frame = |from_end: usize| message.len().checked_sub(from_end).and_then(|index| message.get(index));
    let number = frame(2).and_then(|number| <[u8; 8]>::try_from(&number[..]).ok()).map(u64::from_be_bytes);
    number.zip(frame(1).cloned()).ok_or(SocketError::Protocol)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_is_read_from_the_last_two_frames_of_a_message() {
        let message = |frames: &[&'static [u8]]| frames.iter().map(|frame| Bytes::from_static(frame)).collect::<Vec<_>>();
        let number: &[u8] = &[0, 0, 0, 0, 0, 0, 1, 2];
        for frames in [&[b"kv", number, b"payload"][..], &[b"", b"kv", number, b"payload"], &[b"", number, b"payload"]] {
            assert_eq!(batch(&message(frames)).unwrap(), (258, Bytes::from_static(b"payload")));
        }
        for frames in [&[b"payload".as_slice()][..], &[b"kv", b"1", b"payload"], &[number]] {
            assert!(batch(&message(frames)).is_err());
        }
    }
}
