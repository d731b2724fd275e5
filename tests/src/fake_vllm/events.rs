//! Publishes the KV events of a fake vLLM server over real ZMQ sockets, in vLLM's encoding. Tests can make the publisher lose events.

use anyhow::{Context, Result};
use futures::{FutureExt, StreamExt, channel::mpsc as futures_mpsc};
use rmpv::Value;
use std::collections::VecDeque;
use tandem_adapter::{BlocksRemoved, BlocksStored, EngineEvent, EngineHash, ExtraKeys, UnknownMedium};
use tandem_kv::{ImageId, Tier};
use tokio::{
    sync::{mpsc, oneshot, watch},
    task::JoinSet,
};
use zeromq::{RouterSocket, Socket, SocketEvent, SocketRecv, SocketSend, XPubSocket, ZmqMessage};

/// The settings of a publisher.
#[derive(Clone, Debug)]
pub struct PublisherSettings {
    /// The ZMQ endpoint at which batches of KV events are published. Port 0 stands for any free port.
    pub endpoint: String,
    /// The ZMQ endpoint at which batches are replayed on request. Port 0 stands for any free port.
    pub replay_endpoint: String,
    /// The ZMQ topic under which batches of KV events are published.
    pub topic: String,
    /// The data-parallel rank that the batches name.
    pub data_parallel_rank: u32,
    /// The number of batches that are kept for replays.
    pub buffer_batches: usize,
}

impl Default for PublisherSettings {
    fn default() -> Self {
        let any_port = "tcp://127.0.0.1:0".to_owned();
        Self {
            endpoint: any_port.clone(),
            replay_endpoint: any_port,
            topic: "kv".to_owned(),
            data_parallel_rank: 0,
            buffer_batches: 10_000,
        }
    }
}

/// A publisher of KV events, which runs until this value is dropped.
pub struct Publisher {
    settings: PublisherSettings,
    commands: mpsc::Sender<Command>,
    subscriptions: watch::Receiver<usize>,
    _task: JoinSet<()>,
}

type Reply<T> = oneshot::Sender<T>;

enum Command {
    Publish(Vec<EngineEvent>, Reply<u64>),
    PublishBytes(Vec<u8>, Reply<u64>),
    DropNext(usize, Reply<()>),
    Forget(Reply<()>),
    Reopen { as_other_process: bool, reply: Reply<Result<()>> },
    Replay(bool, Reply<()>),
    Topic(String, Reply<()>),
}

impl Publisher {
    /// Starts a publisher with the default settings. The operating system chooses its ports.
    pub async fn bind() -> Result<Self> {
        Self::bind_with(PublisherSettings::default()).await
    }

    /// Starts a publisher with these settings.
    pub async fn bind_with(mut settings: PublisherSettings) -> Result<Self> {
        let (sockets, endpoint, replay_endpoint) = Sockets::bind(&settings).await?;
        (settings.endpoint, settings.replay_endpoint) = (endpoint, replay_endpoint);
        let (commands, receiver) = mpsc::channel(1);
        let (subscribed, subscriptions) = watch::channel(0);
        let mut task = JoinSet::new();
        let state = State { settings: settings.clone(), next: 0, kept: VecDeque::new(), to_drop: 0, answers: true, subscribed };
        task.spawn(state.run(sockets, receiver));
        Ok(Self { settings, commands, subscriptions, _task: task })
    }

    /// Returns the settings with the ports that were bound. vLLM returns these endpoints at `/kv_event_sources`.
    pub fn endpoints(&self) -> &PublisherSettings {
        &self.settings
    }

    /// Waits until there have been this many subscriptions since the publisher's start. A subscriber receives only batches that are
    /// published after its subscription.
    pub async fn subscribed(&mut self, subscriptions: usize) -> Result<()> {
        self.subscriptions.wait_for(|count| *count >= subscriptions).await.context("the publisher has ended")?;
        Ok(())
    }

    /// Publishes a batch of events. Returns the batch's number.
    pub async fn publish(&self, events: Vec<EngineEvent>) -> Result<u64> {
        self.command(|reply| Command::Publish(events, reply)).await
    }

    /// Publishes any payload in place of an encoded batch. Returns its number.
    pub async fn publish_bytes(&self, payload: Vec<u8>) -> Result<u64> {
        self.command(|reply| Command::PublishBytes(payload, reply)).await
    }

    /// Makes the publisher not send the next `batches` batches to subscribers, as if the subscribers were too slow. The batches can still
    /// be replayed.
    pub async fn drop_next(&self, batches: usize) -> Result<()> {
        self.command(|reply| Command::DropNext(batches, reply)).await
    }

    /// Drops all batches that the publisher keeps for replays.
    pub async fn forget(&self) -> Result<()> {
        self.command(Command::Forget).await
    }

    /// Sets whether the publisher answers requests for a replay from now on.
    pub async fn answer_replays(&self, answers: bool) -> Result<()> {
        self.command(|reply| Command::Replay(answers, reply)).await
    }

    /// Sets the topic under which later batches are published.
    pub async fn set_topic(&self, topic: &str) -> Result<()> {
        self.command(|reply| Command::Topic(topic.to_owned(), reply)).await
    }

    /// Closes all connections, and accepts new ones at the same endpoints.
    pub async fn disconnect(&self) -> Result<()> {
        self.command(|reply| Command::Reopen { as_other_process: false, reply }).await?
    }

    /// Restarts the publisher at the same endpoints, like a new process: batch numbers start at 0 again, and earlier batches cannot be
    /// replayed.
    pub async fn restart(&self) -> Result<()> {
        self.command(|reply| Command::Reopen { as_other_process: true, reply }).await?
    }

    async fn command<T>(&self, command: impl FnOnce(Reply<T>) -> Command) -> Result<T> {
        let (reply, done) = oneshot::channel();
        self.commands.send(command(reply)).await.ok().context("the publisher has ended")?;
        done.await.context("the publisher has ended")
    }
}

struct State {
    settings: PublisherSettings,
    next: u64,
    kept: VecDeque<(u64, Vec<u8>)>,
    to_drop: usize,
    answers: bool,
    subscribed: watch::Sender<usize>,
}

struct Sockets {
    publish: XPubSocket,
    replay: RouterSocket,
    accepted: futures_mpsc::Receiver<SocketEvent>,
}

impl Drop for Sockets {
    /// The connections must be closed explicitly, because an `XPubSocket` does not close them when it is dropped.
    fn drop(&mut self) {
        let backend = self.publish.backend();
        while let Some(Some(event)) = self.accepted.next().now_or_never() {
            if let SocketEvent::Accepted(_, subscriber) = event {
                backend.peer_disconnected(&subscriber);
            }
        }
    }
}

impl Sockets {
    async fn bind(settings: &PublisherSettings) -> Result<(Self, String, String)> {
        let (mut publish, mut replay) = (XPubSocket::new(), RouterSocket::new());
        let accepted = publish.monitor();
        let endpoint = publish.bind(&settings.endpoint).await?.to_string();
        let replay_endpoint = replay.bind(&settings.replay_endpoint).await?.to_string();
        Ok((Self { publish, replay, accepted }, endpoint, replay_endpoint))
    }
}

impl State {
    async fn run(mut self, mut sockets: Sockets, mut commands: mpsc::Receiver<Command>) {
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Reopen { as_other_process, reply }) => {
                        let reopened = self.reopen(sockets, as_other_process).await;
                        let (result, opened) = match reopened {
                            Ok(opened) => (Ok(()), Some(opened)),
                            Err(error) => (Err(error), None),
                        };
                        let _ = reply.send(result);
                        let Some(opened) = opened else { return };
                        sockets = opened;
                    }
                    Some(command) => self.execute(command, &mut sockets).await,
                    None => return,
                },
                // An error shows only that one subscriber has disconnected. A message whose first byte is 1 is a subscription.
                received = sockets.publish.recv() => {
                    if received.is_ok_and(|message| message.get(0).is_some_and(|frame| frame.first() == Some(&1))) {
                        self.subscribed.send_modify(|count| *count += 1);
                    }
                }
                received = sockets.replay.recv() => {
                    if let Ok(request) = received {
                        self.replay(request, &mut sockets.replay).await;
                    }
                }
            }
        }
    }

    async fn execute(&mut self, command: Command, sockets: &mut Sockets) {
        // Sending a reply fails only if the caller no longer waits for it.
        match command {
            Command::Publish(events, reply) => {
                let payload = encode(self.next as f64, &events, self.settings.data_parallel_rank);
                let _ = reply.send(self.publish(payload, sockets).await);
            }
            Command::PublishBytes(payload, reply) => {
                let _ = reply.send(self.publish(payload, sockets).await);
            }
            Command::DropNext(batches, reply) => {
                self.to_drop = batches;
                let _ = reply.send(());
            }
            Command::Forget(reply) => {
                self.kept.clear();
                let _ = reply.send(());
            }
            Command::Replay(answers, reply) => {
                self.answers = answers;
                let _ = reply.send(());
            }
            Command::Topic(topic, reply) => {
                self.settings.topic = topic;
                let _ = reply.send(());
            }
            Command::Reopen { .. } => unreachable!("the caller handles Reopen"),
        }
    }

    async fn publish(&mut self, payload: Vec<u8>, sockets: &mut Sockets) -> u64 {
        let number = self.next;
        self.next += 1;
        if self.to_drop > 0 {
            self.to_drop -= 1;
        } else {
            let frames = [self.settings.topic.clone().into_bytes(), number.to_be_bytes().to_vec(), payload.clone()];
            // Sending fails only if a subscriber has disconnected.
            let _ = sockets.publish.send(message(frames)).await;
        }
        self.kept.push_back((number, payload));
        if self.kept.len() > self.settings.buffer_batches {
            self.kept.pop_front();
        }
        number
    }

    async fn replay(&mut self, request: ZmqMessage, socket: &mut RouterSocket) {
        let frames = request.into_vec();
        let [client, _, from] = &frames[..] else { return };
        let Ok(from) = <[u8; 8]>::try_from(&from[..]).map(u64::from_be_bytes) else { return };
        if !self.answers {
            return;
        }
        let topic = self.settings.topic.as_bytes();
        let batches = self.kept.iter().filter(|(number, _)| *number >= from);
        let answers = batches.map(|(number, payload)| (topic, *number, &payload[..])).chain([(&b""[..], u64::MAX, &b""[..])]);
        for (topic, number, payload) in answers {
            let frames = [client.to_vec(), Vec::new(), topic.to_vec(), number.to_be_bytes().to_vec(), payload.to_vec()];
            if socket.send(message(frames)).await.is_err() {
                return;
            }
        }
    }

    async fn reopen(&mut self, mut sockets: Sockets, as_other_process: bool) -> Result<Sockets> {
        sockets.publish.unbind_all().await;
        sockets.replay.unbind_all().await;
        drop(sockets);
        if as_other_process {
            self.kept.clear();
            self.next = 0;
        }
        Ok(Sockets::bind(&self.settings).await?.0)
    }
}

fn message<const N: usize>(frames: [Vec<u8>; N]) -> ZmqMessage {
    let mut frames = frames.into_iter();
    let mut message = ZmqMessage::from(frames.next().unwrap_or_default());
    for frame in frames {
        message.push_back(frame.into());
    }
    message
}

/// Returns a batch in the encoding of vLLM 0.32. `time` is the time of the engine's clock.
pub fn encode(time: f64, events: &[EngineEvent], data_parallel_rank: u32) -> Vec<u8> {
    let events = events.iter().map(event).collect();
    let mut bytes = Vec::new();
    let batch = Value::Array(vec![time.into(), Value::Array(events), data_parallel_rank.into()]);
    rmpv::encode::write_value(&mut bytes, &batch).expect("writing to a vector does not fail");
    bytes
}

/// Encodes an event as vLLM does: an absent field is left out if vLLM's definition has a default value for it, and is nil otherwise.
fn event(event: &EngineEvent) -> Value {
    let map = |fields: Vec<(&str, Option<Value>)>| {
        Value::Map(fields.into_iter().filter_map(|(name, value)| Some((name.into(), value?))).collect())
    };
    match event {
        EngineEvent::Stored(BlocksStored {
            hashes,
            parent,
            tokens,
            block_size,
            lora,
            extra_keys,
            tier,
            group,
            kind,
            window_tokens,
            session,
        }) => map(vec![
            ("type", Some("BlockStored".into())),
            ("block_hashes", Some(list(hashes, hash))),
            ("parent_block_hash", Some(parent.as_ref().map_or(Value::Nil, hash))),
            ("token_ids", Some(list(tokens, |token| (*token).into()))),
            ("block_size", Some((*block_size).into())),
            ("lora_id", Some(if lora.is_some() { 1.into() } else { Value::Nil })),
            ("medium", Some(medium(tier))),
            ("lora_name", Some(lora.as_deref().map_or(Value::Nil, Into::into))),
            ("extra_keys", (!extra_keys.is_empty()).then(|| list(extra_keys, |of| keys(lora.as_deref(), of)))),
            ("group_idx", group.map(Into::into)),
            ("kv_cache_spec_kind", kind.as_deref().map(Into::into)),
            ("kv_cache_spec_sliding_window", window_tokens.map(Into::into)),
            ("session_id", session.as_deref().map(Into::into)),
        ]),
        EngineEvent::Removed(BlocksRemoved { hashes, tier, group }) => map(vec![
            ("type", Some("BlockRemoved".into())),
            ("block_hashes", Some(list(hashes, hash))),
            ("medium", Some(medium(tier))),
            ("group_idx", group.map(Into::into)),
        ]),
        EngineEvent::Cleared => map(vec![("type", Some("AllBlocksCleared".into()))]),
    }
}

fn list<T>(values: &[T], encode: impl Fn(&T) -> Value) -> Value {
    Value::Array(values.iter().map(encode).collect())
}

fn hash(hash: &EngineHash) -> Value {
    match hash {
        EngineHash::Number(number) => (*number).into(),
        EngineHash::Bytes(bytes) => Value::Binary(bytes.to_vec()),
    }
}

fn medium(tier: &Result<Tier, UnknownMedium>) -> Value {
    match tier {
        Ok(Tier::Device) => "GPU",
        Ok(Tier::Host) => "CPU",
        Ok(Tier::Disk) => "STORAGE",
        Ok(Tier::Store) => "EXTERNAL",
        Err(UnknownMedium(name)) => name,
    }
    .into()
}

/// vLLM lists the name of the LoRA, then the images as pairs of identity and offset, then the cache salt.
fn keys(lora: Option<&str>, keys: &ExtraKeys) -> Value {
    let pair = |id: ImageId, offset: i64| Value::Array(vec![id.to_string().into(), offset.into()]);
    let others = match keys {
        ExtraKeys::None => Vec::new(),
        ExtraKeys::Text(text) => vec![text.as_str().into()],
        ExtraKeys::Images { salt, images } => {
            let begun: Vec<_> = images.iter().map(|image| pair(image.id, image.at as i64)).collect();
            // If no image begins in the block, one of an earlier block continues in it.
            let continued = begun.is_empty().then(|| pair(ImageId([0; 32]), -1));
            continued.into_iter().chain(begun).chain(salt.as_deref().map(Into::into)).collect()
        }
        ExtraKeys::Other => vec![Value::Array(vec!["image".into(), 0.into()])],
    };
    let keys: Vec<Value> = lora.map(Into::into).into_iter().chain(others).collect();
    if keys.is_empty() { Value::Nil } else { Value::Array(keys) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tandem_adapter::kv_events::decode;

    /// Payloads that vLLM 0.32.0 published, as hexadecimal digits.
    const RECORDED: [&str; 4] = [
        include_str!("../../../crates/adapter/testdata/vllm-0.32/stored.hex"),
        include_str!("../../../crates/adapter/testdata/vllm-0.32/hits_then_stored.hex"),
        include_str!("../../../crates/adapter/testdata/vllm-0.32/cleared_then_stored.hex"),
        include_str!("../../../crates/adapter/testdata/vllm-0.32/removed_then_stored.hex"),
    ];

    #[test]
    fn encoded_blocks_of_a_lora_are_decoded_again() {
        let event = EngineEvent::Stored(BlocksStored {
            hashes: vec![EngineHash::Number(1), EngineHash::Number(2)],
            parent: None,
            tokens: vec![7, 8],
            block_size: 1,
            lora: Some("lora".to_owned()),
            extra_keys: vec![ExtraKeys::Text("salt".to_owned()), ExtraKeys::None],
            tier: Ok(Tier::Device),
            group: Some(0),
            kind: Some("sliding_window".to_owned()),
            window_tokens: Some(64),
            session: None,
        });
        assert_eq!(decode(&encode(0.0, std::slice::from_ref(&event), 3)).unwrap().events, [event]);
    }

    #[test]
    fn encoded_events_equal_recorded_payloads() {
        for digits in RECORDED {
            let digits: Vec<u8> = digits.chars().filter_map(|digit| digit.to_digit(16)).map(|digit| digit as u8).collect();
            let payload: Vec<u8> = digits.chunks_exact(2).map(|pair| pair[0] << 4 | pair[1]).collect();
            let time = f64::from_be_bytes(payload[2..10].try_into().unwrap());
            assert_eq!(encode(time, &decode(&payload).unwrap().events, 0), payload);
        }
    }
}
