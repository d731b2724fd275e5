//! A client of one ZMQ peer: ZMTP 3.0 without encryption (<https://rfc.zeromq.org/spec/23/>), as the sockets of vLLM and SGLang speak it.
//!
//! The peer needs no key and may be any process, so a frame's length is checked before memory is reserved for it.

use bytes::{Buf, BufMut, Bytes, BytesMut};
use std::{future::Future, io, path::PathBuf, str::FromStr, time::Duration};
use tokio::{
    io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt},
    net::{TcpStream, UnixStream},
    time::timeout,
};

/// Maximum size of a message, and so of each of its frames, in bytes. No longer batch is decoded.
pub(super) const MESSAGE_MAX: usize = crate::kv_events::decode::PAYLOAD_MAX;
/// Maximum number of frames in a message. The engines send at most four.
pub(super) const FRAMES_MAX: usize = 8;
/// The number of bytes that are read at once.
const READ: usize = 64 << 10;
/// The length of a greeting, in bytes.
const GREETING: usize = 64;
/// The flags of a frame.
const MORE: u8 = 1;
const LONG: u8 = 2;
const COMMAND: u8 = 4;

/// The address of a ZMQ peer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum ZmtpEndpoint {
    Tcp(String, u16),
    Ipc(PathBuf),
}

/// An endpoint to which no client can connect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not an endpoint of KV events; write tcp://HOST:PORT or ipc://PATH")]
pub struct InvalidEndpoint(pub String);

#[derive(Debug, thiserror::Error)]
pub(super) enum SocketError {
    #[error(transparent)]
    ZmtpEndpoint(#[from] InvalidEndpoint),
    #[error(transparent)]
    Io(#[from] io::Error),
    #[error("the engine does not answer in time")]
    TimedOut,
    #[error("the engine has closed the connection")]
    Closed,
    #[error("the peer does not support ZMTP 3 without encryption; check that the engine publishes its KV events at this port")]
    Greeting,
    #[error("the engine announced a message of more than {MESSAGE_MAX} bytes, which is the limit")]
    TooLong,
    #[error("the engine sent a message of more than {FRAMES_MAX} frames, which is the limit")]
    TooManyFrames,
    #[error("the engine sent a message that is not a numbered batch")]
    Protocol,
}

impl FromStr for ZmtpEndpoint {
    type Err = InvalidEndpoint;

    /// Reads an endpoint. vLLM's own settings may have the host `*`, to which only a server can bind.
    fn from_str(text: &str) -> Result<Self, InvalidEndpoint> {
        let invalid = || InvalidEndpoint(text.to_owned());
        if let Some(path) = text.strip_prefix("ipc://").filter(|path| !matches!(*path, "" | "*")) {
            return Ok(Self::Ipc(path.into()));
        }
        let (host, port) = text.strip_prefix("tcp://").and_then(|address| address.rsplit_once(':')).ok_or_else(invalid)?;
        let host = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
        match port.parse() {
            Ok(port @ 1..) if !matches!(host, "" | "*") => Ok(Self::Tcp(host.to_owned(), port)),
            _ => Err(invalid()),
        }
    }
}

trait Io: AsyncRead + AsyncWrite + Send + Unpin {}
impl<T: AsyncRead + AsyncWrite + Send + Unpin> Io for T {}

pub(super) struct ZmtpConnection {
    io: Box<dyn Io>,
    received: BytesMut,
    unsent: BytesMut,
    /// The frames of the message that has not arrived completely.
    frames: Vec<Bytes>,
}

struct Frame {
    flags: u8,
    body: Bytes,
}

impl ZmtpConnection {
    /// Connects to a peer as a socket of this type, and sends a first message.
    pub async fn open(endpoint: &str, role: &str, first: &[&[u8]], limit: Duration) -> Result<Self, SocketError> {
        in_time(limit, async {
            let io: Box<dyn Io> = match endpoint.parse()? {
                ZmtpEndpoint::Tcp(host, port) => Box::new(TcpStream::connect((host.as_str(), port)).await?),
                ZmtpEndpoint::Ipc(path) => Box::new(UnixStream::connect(path).await?),
            };
            Self::greet(io, role, first).await
        })
        .await
    }

    async fn greet(io: Box<dyn Io>, role: &str, first: &[&[u8]]) -> Result<Self, SocketError> {
        let mut connection = Self { io, received: BytesMut::new(), unsent: BytesMut::new(), frames: Vec::new() };
        let mut greeting = [0; GREETING];
        (greeting[0], greeting[9], greeting[10]) = (0xff, 0x7f, 3);
        greeting[12..16].copy_from_slice(b"NULL");
        connection.unsent.put_slice(&greeting);
        let length = u8::try_from(role.len()).expect("the names of socket types are short");
        connection.put(COMMAND, &[&b"\x05READY\x0bSocket-Type\0\0\0"[..], &[length], role.as_bytes()].concat());
        while connection.received.len() < GREETING {
            connection.exchange().await?;
        }
        let theirs = connection.received.split_to(GREETING);
        if theirs[0] != 0xff || theirs[9] & 1 == 0 || theirs[10] < 3 || !theirs[12..32].starts_with(b"NULL\0") {
            return Err(SocketError::Greeting);
        }
        if !connection.frame().await?.is(b"\x05READY") {
            return Err(SocketError::Greeting);
        }
        for (at, body) in first.iter().enumerate() {
            connection.put(if at + 1 < first.len() { MORE } else { 0 }, body);
        }
        connection.flush().await?;
        Ok(connection)
    }

    /// Returns the frames of the next message. This method is cancel-safe.
    pub async fn next(&mut self) -> Result<Vec<Bytes>, SocketError> {
        loop {
            let frame = self.frame().await?;
            if frame.is(b"\x04PING") {
                // The answer repeats the ping's context of at most 16 bytes, which follows a TTL of two bytes.
                let context = frame.body.get(7..).unwrap_or_default();
                self.put(COMMAND, &[&b"\x04PONG"[..], &context[..context.len().min(16)]].concat());
            }
            if frame.flags & COMMAND != 0 {
                continue;
            }
            self.frames.push(frame.body);
            if frame.flags & MORE == 0 {
                return Ok(std::mem::take(&mut self.frames));
            }
        }
    }

    async fn frame(&mut self) -> Result<Frame, SocketError> {
        loop {
            if let Some(frame) = self.parse()? {
                return Ok(frame);
            }
            self.exchange().await?;
        }
    }

    /// Takes the next frame from the received bytes; `None` if it has not arrived completely.
    fn parse(&mut self) -> Result<Option<Frame>, SocketError> {
        let mut header = &self.received[..];
        let Ok(flags) = header.try_get_u8() else { return Ok(None) };
        let length = if flags & LONG == 0 { header.try_get_u8().map(u64::from) } else { header.try_get_u64() };
        let Ok(length) = length else { return Ok(None) };
        let before: usize = self.frames.iter().map(Bytes::len).sum();
        let length = usize::try_from(length).ok().filter(|length| *length <= MESSAGE_MAX - before).ok_or(SocketError::TooLong)?;
        if self.frames.len() == FRAMES_MAX {
            return Err(SocketError::TooManyFrames);
        }
        if header.len() < length {
            return Ok(None);
        }
        self.received.advance(self.received.len() - header.len());
        Ok(Some(Frame { flags, body: self.received.split_to(length).freeze() }))
    }

    /// Sends the bytes that are not sent yet, and then receives more bytes.
    async fn exchange(&mut self) -> Result<(), SocketError> {
        self.flush().await?;
        self.received.reserve(READ);
        if self.io.read_buf(&mut self.received).await? == 0 { Err(SocketError::Closed) } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), SocketError> {
        while self.unsent.has_remaining() {
            self.io.write_buf(&mut self.unsent).await?;
        }
        Ok(())
    }

    fn put(&mut self, flags: u8, body: &[u8]) {
        match u8::try_from(body.len()) {
            Ok(length) => self.unsent.put_slice(&[flags, length]),
            Err(_) => {
                self.unsent.put_u8(flags | LONG);
                self.unsent.put_u64(body.len() as u64);
            }
        }
        self.unsent.put_slice(body);
    }
}

impl Frame {
    /// Returns whether the frame is this command. `command` is its name, preceded by the name's length in one byte.
    fn is(&self, command: &[u8]) -> bool {
        self.flags & COMMAND != 0 && self.body.starts_with(command)
    }
}

pub(super) async fn in_time<T>(limit: Duration, result: impl Future<Output = Result<T, SocketError>>) -> Result<T, SocketError> {
    timeout(limit, result).await.unwrap_or(Err(SocketError::TimedOut))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::duplex;

    /// Returns the first message in these bytes, which a peer sends after its greeting, and all bytes that the peer has received.
    async fn first_message(bytes: &[u8]) -> (Result<Vec<Bytes>, SocketError>, Vec<u8>) {
        let (client, mut peer) = duplex(32 << 20);
        let mut greeting = [0; GREETING];
        (greeting[0], greeting[9], greeting[10], greeting[11]) = (0xff, 0x7f, 3, 1);
        greeting[12..16].copy_from_slice(b"NULL");
        peer.write_all(&greeting).await.unwrap();
        peer.write_all(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03PUB").await.unwrap();
        peer.write_all(bytes).await.unwrap();
        peer.shutdown().await.unwrap();
        let mut connection = ZmtpConnection::greet(Box::new(client), "SUB", &[b"\x01kv"]).await.unwrap();
        let message = connection.next().await;
        drop(connection);
        let mut received = Vec::new();
        peer.read_to_end(&mut received).await.unwrap();
        (message, received)
    }

    fn long(flags: u8, length: u64) -> Vec<u8> {
        [&[flags | LONG][..], &length.to_be_bytes()].concat()
    }

    #[tokio::test]
    async fn message_of_several_frames_arrives_after_a_command() {
        let bytes = [&b"\x04\x07\x06UNKNOW\x01\x02kv\x01\x00"[..], &long(0, 300), &[7; 300]].concat();
        let (message, received) = first_message(&bytes).await;
        assert_eq!(message.unwrap(), [&b"kv"[..], b"", &[7; 300]]);
        assert!(received.ends_with(b"\x04\x19\x05READY\x0bSocket-Type\0\0\0\x03SUB\x00\x03\x01kv"));
    }

    #[tokio::test]
    async fn ping_is_answered_with_its_context() {
        let (message, received) = first_message(b"\x04\x0a\x04PING\x00\x01abc").await;
        assert!(matches!(message, Err(SocketError::Closed)));
        assert!(received.ends_with(b"\x04\x08\x04PONGabc"), "{received:?}");
    }

    #[tokio::test]
    async fn announced_length_above_the_limit_ends_the_connection() {
        for length in [MESSAGE_MAX as u64 + 1, 1 << 62, u64::MAX] {
            assert!(matches!(first_message(&long(0, length)).await.0, Err(SocketError::TooLong)), "{length}");
            assert!(matches!(first_message(&long(COMMAND, length)).await.0, Err(SocketError::TooLong)), "{length}");
        }
        let error = first_message(&long(0, u64::MAX)).await.0.unwrap_err().to_string();
        assert!(error.contains("16777216 bytes"), "{error}");
    }

    #[tokio::test]
    async fn size_and_number_of_the_frames_of_a_message_are_limited() {
        let half = MESSAGE_MAX / 2;
        let halves = [long(MORE, half as u64), vec![0; half], long(MORE, half as u64 + 1)].concat();
        assert!(matches!(first_message(&halves).await.0, Err(SocketError::TooLong)));
        assert!(matches!(first_message(&[MORE, 0].repeat(FRAMES_MAX + 1)).await.0, Err(SocketError::TooManyFrames)));
        let most = [[MORE, 0].repeat(FRAMES_MAX - 1), vec![0, 0]].concat();
        assert_eq!(first_message(&most).await.0.unwrap().len(), FRAMES_MAX);
    }

    #[test]
    fn only_endpoints_that_a_client_can_connect_to_are_accepted() {
        for valid in ["tcp://127.0.0.1:5557", "tcp://[::1]:5557", "tcp://engine-0.example:5557", "ipc:///run/vllm/events"] {
            valid.parse::<ZmtpEndpoint>().expect(valid);
        }
        for invalid in [
            "",
            "127.0.0.1:5557",
            "tcp://*:5557",
            "tcp://127.0.0.1:0",
            "tcp://127.0.0.1",
            "inproc://events",
            "http://a:1",
            "ipc://*",
        ] {
            assert_eq!(invalid.parse::<ZmtpEndpoint>(), Err(InvalidEndpoint(invalid.to_owned())), "{invalid}");
        }
    }
}
