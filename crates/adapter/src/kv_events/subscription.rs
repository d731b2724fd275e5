//! Receives the KV events that one data-parallel rank of a server publishes, and detects each loss of events.
//!
//! vLLM and SGLang publish their KV events in batches, numbered from 0, on a PUB socket, which drops batches that a slow subscriber does not receive.
//! A ROUTER socket sends the most recent batches again on request (*replay*). A task reads both sockets and delivers each batch once and in
//! order:
//!
//! - At the start, the task requests a replay of all batches. If the engine no longer has the first batches, they are [`EventLoss`].
//! - If a batch's number shows a gap, the task requests a replay. A missing batch that the replay does not contain either is [`EventLoss`].
//! - After a loss, the task delivers all batches that the engine still has. A mirror built from these batches alone contains some of the cached
//!   blocks, and no block that is not cached.
//! - After a reconnect, and from time to time while no batch arrives, the task requests a replay from the last delivered batch on. The replay
//!   also reveals lost batches that no later batch has followed. If the replay lacks the last delivered batch, or has another batch with the same
//!   number, the engine has been restarted: [`MirrorUpdate::Restarted`].
//! - If a batch clears the cache, the batches before it do not matter, so their loss is not reported.

mod socket;
mod zmtp;

pub use zmtp::InvalidEndpoint;

use super::decode::{EventBatch, MalformedBatch, decode};
use crate::event::EngineEvent;
use socket::{EventReplay, Live};
use std::{
    convert::Infallible,
    hash::{DefaultHasher, Hash, Hasher},
    sync::Arc,
    time::Duration,
};
use tandem_process::Backoff;
use tokio::{
    sync::mpsc,
    task::JoinSet,
    time::{Instant, sleep},
};
use zmtp::{SocketError, ZmtpEndpoint};

/// The settings of a [`Subscription`].
#[derive(Clone, Debug)]
pub struct SubscriptionSettings {
    /// The ZMQ endpoint at which the engine publishes its batches: `tcp://HOST:PORT` or `ipc://PATH`.
    pub endpoint: String,
    /// The ZMQ endpoint at which the engine replays its batches; `None` if the engine offers no replays.
    pub replay_endpoint: Option<String>,
    /// The ZMQ topic under which the engine publishes its batches of KV events.
    pub topic: String,
    /// The data-parallel rank whose batches are published at `endpoint` and `replay_endpoint`.
    pub data_parallel_rank: u32,
    /// Time limit for connecting, and for the arrival of each batch of a replay.
    pub timeout: Duration,
    /// After this time without a batch, the task requests a replay to find lost batches.
    pub check_interval: Duration,
}

/// An update of the mirror: the next changes of the engine's prefix cache, or the reason to empty the mirror.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MirrorUpdate {
    /// The events of the next batch of the engine.
    Batch(Vec<EngineEvent>),
    /// Changes were lost, so the mirror must be emptied. The updates that follow have all events from some moment on. With them, the emptied mirror
    /// contains only blocks that the engine has cached; after the engine's next clear, it contains all of them.
    Lost(EventLoss),
    /// Another engine process publishes its events now. Its cache was empty at its start, and later updates have all of its events.
    Restarted,
}

/// The reason why changes of the engine's cache were lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EventLoss {
    /// The engine no longer has its first batches. The field is the number of these batches.
    #[error("the engine no longer has its first {0} batches of KV events")]
    History(u64),
    /// The batches with the numbers from `next` to `got - 1` were neither received nor replayed.
    #[error("the batches of KV events from {next} up to, but not including, {got} were lost")]
    Gap {
        /// The number of the first lost batch.
        next: u64,
        /// The number of the first batch after the lost batches.
        got: u64,
    },
    /// The connection was lost, and no replay is available for the batches that were published meanwhile.
    #[error("the connection for KV events was lost, and the engine does not replay the events that it has sent since then")]
    Disconnected,
    /// A batch cannot be decoded.
    #[error("a batch of KV events cannot be decoded")]
    Malformed(#[source] MalformedBatch),
    /// A batch is from another data-parallel rank.
    #[error("a batch of KV events is from data-parallel rank {0}, which is not this worker's")]
    OtherRank(u32),
}

/// A subscription to the updates of one data-parallel rank. Dropping it ends its task.
pub struct Subscription {
    updates: mpsc::Receiver<MirrorUpdate>,
    _task: JoinSet<()>,
}

/// Maximum number of updates that are buffered for the caller. While the buffer is full, the socket is not read, and batches are queued at the
/// engine.
const UPDATES_MAX: usize = 64;
/// The shortest pause between connection attempts; `PAUSE_MAX` is the longest. An engine needs about a minute to restart, and an attempt costs very
/// little.
const PAUSE_MIN: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// After this time without events, a new connection is first checked for lost events, by a replay. The check is early, because events may be
/// lost while the connection is made. The time doubles with each check, up to [`SubscriptionSettings::check_interval`].
const FIRST_CHECK: Duration = Duration::from_millis(250);

impl Subscription {
    /// Starts the task that receives the events. The task reconnects as often as needed.
    ///
    /// # Errors
    /// Fails if a client cannot connect to one of the endpoints.
    pub fn start(settings: SubscriptionSettings) -> Result<Self, InvalidEndpoint> {
        for endpoint in [Some(&settings.endpoint), settings.replay_endpoint.as_ref()].into_iter().flatten() {
            endpoint.parse::<ZmtpEndpoint>()?;
        }
        let (sender, updates) = mpsc::channel(UPDATES_MAX);
        let backoff = Backoff::new(PAUSE_MIN, PAUSE_MAX);
        let follower = Follower {
            settings: settings.into(),
            updates: sender,
            backoff,
            connected: None,
            position: BatchPosition::Start,
            live: None,
            missing: None,
            replays: false,
        };
        let mut task = JoinSet::new();
        task.spawn(follower.run());
        Ok(Self { updates, _task: task })
    }

    /// Returns the next update; `None` if the task that receives the events has failed. This method is cancel-safe.
    pub async fn next(&mut self) -> Option<MirrorUpdate> {
        self.updates.recv().await
    }
}

struct Follower {
    settings: Arc<SubscriptionSettings>,
    updates: mpsc::Sender<MirrorUpdate>,
    backoff: Backoff,
    /// The time at which the current connection became ready to receive batches; `None` without a connection.
    connected: Option<Instant>,
    position: BatchPosition,
    /// The number of the last batch that was received on the current connection; `None` before the connection's first batch.
    live: Option<u64>,
    /// A loss that the current replay has revealed and that is not reported yet. `None` if the replay has revealed no loss, or if a later
    /// batch of the replay clears the cache, because then the loss does not matter.
    missing: Option<EventLoss>,
    replays: bool,
}

/// The last batch that was delivered.
#[derive(Clone, Copy)]
enum BatchPosition {
    /// No batch was delivered yet, so the next batch has the number 0.
    Start,
    /// This batch and all batches before it were delivered.
    After(Seen),
    /// No batch was delivered since the last loss, so the next batch may have any number.
    Unknown,
}

/// A batch's number, with a digest of its payload that distinguishes it from another process's batch.
#[derive(Clone, Copy)]
struct Seen {
    number: u64,
    digest: u64,
}

impl Seen {
    fn new(number: u64, payload: &[u8]) -> Self {
        let mut hasher = DefaultHasher::new();
        payload.hash(&mut hasher);
        Self { number, digest: hasher.finish() }
    }
}

impl BatchPosition {
    /// Returns the number of the next batch; `None` if it may have any number.
    fn next(self) -> Option<u64> {
        match self {
            Self::Start => Some(0),
            Self::After(seen) => Some(seen.number + 1),
            Self::Unknown => None,
        }
    }

    /// Returns which batches were lost if the batch that follows has the number `got`.
    fn loss(self, got: u64) -> EventLoss {
        match self {
            Self::After(seen) => EventLoss::Gap { next: seen.number + 1, got },
            Self::Start | Self::Unknown => EventLoss::History(got),
        }
    }
}

/// Returns the last event that clears the cache, and all events after it; `None` if no event clears the cache.
fn since_clear(events: &[EngineEvent]) -> Option<Vec<EngineEvent>> {
    let cleared = events.iter().rposition(|event| *event == EngineEvent::Cleared)?;
    Some(events[cleared..].to_vec())
}

enum Replayed {
    /// All batches that the engine has were replayed.
    All,
    /// The replay itself has a gap: the engine drops messages that it cannot send at once.
    Interrupted,
    /// The replayed batches are from another process.
    OtherProcess,
    /// Batches are missing, and the loss was reported. The batches that the engine has are not delivered yet.
    Incomplete,
}

enum SubscriptionEnd {
    Unsubscribed,
    Failed(SocketError),
}

impl From<SocketError> for SubscriptionEnd {
    fn from(error: SocketError) -> Self {
        Self::Failed(error)
    }
}

impl Follower {
    async fn run(mut self) {
        loop {
            match self.follow().await {
                Ok(never) => match never {},
                Err(SubscriptionEnd::Unsubscribed) => return,
                Err(SubscriptionEnd::Failed(error)) => {
                    // Only a connection that has lasted resets the backoff, so the pauses grow if a publisher closes each connection soon.
                    if self.connected.take().is_some_and(|since| since.elapsed() > PAUSE_MAX) {
                        self.backoff.reset();
                    }
                    if self.backoff.is_new_error(&error.to_string()) {
                        tracing::warn!(endpoint = self.settings.endpoint, %error, "cannot receive KV events from the engine; retrying");
                    }
                    sleep(self.backoff.next_delay()).await;
                }
            }
        }
    }

    async fn follow(&mut self) -> Result<Infallible, SubscriptionEnd> {
        let mut live = Live::connect(&self.settings).await?;
        self.live = None;
        self.synchronise().await?;
        self.connected = Some(Instant::now());
        let mut until_check = FIRST_CHECK.min(self.settings.check_interval);
        loop {
            tokio::select! {
                biased;
                batch = live.next() => {
                    let (number, payload) = batch?;
                    self.receive(number, &payload).await?;
                }
                () = sleep(until_check), if self.settings.replay_endpoint.is_some() => {
                    until_check = (until_check * 2).min(self.settings.check_interval);
                    self.check().await?;
                }
            }
        }
    }

    async fn synchronise(&mut self) -> Result<(), SubscriptionEnd> {
        if self.settings.replay_endpoint.is_some() {
            match self.catch_up().await {
                Err(SubscriptionEnd::Failed(error)) => tracing::warn!(%error, "the engine does not replay its KV events"),
                other => return other,
            }
        }
        if matches!(self.position, BatchPosition::Start) {
            // The number of the first published batch that arrives later shows whether earlier batches were missed.
            return Ok(());
        }
        self.position = BatchPosition::Unknown;
        self.lose(EventLoss::Disconnected).await
    }

    /// Requests a replay to deliver batches that were published but not received. A failed replay is an error only if the previous replay
    /// succeeded.
    async fn check(&mut self) -> Result<(), SubscriptionEnd> {
        let has_replayed = self.replays;
        match self.catch_up().await {
            Err(SubscriptionEnd::Failed(_)) if !has_replayed => Ok(()),
            other => other,
        }
    }

    /// Delivers a published batch. If batches before it are missing, they are requested and delivered first.
    async fn receive(&mut self, number: u64, payload: &[u8]) -> Result<(), SubscriptionEnd> {
        if self.live.replace(number).is_some_and(|last| number <= last) {
            self.restart().await?;
        }
        if self.position.next().is_some_and(|next| number > next) && self.settings.replay_endpoint.is_some() {
            match self.catch_up().await {
                Err(SubscriptionEnd::Failed(error)) => tracing::warn!(%error, "the engine does not replay its KV events"),
                other => other?,
            }
        }
        let lost = match self.position.next() {
            // The replay has already delivered this batch.
            Some(next) if number < next => return Ok(()),
            Some(next) if number > next => Some(self.position.loss(number)),
            _ => None,
        };
        let events = self.decode(number, payload).await?;
        match (lost, since_clear(&events)) {
            (Some(_), Some(since)) => self.send(MirrorUpdate::Batch(since)).await,
            (Some(lost), None) => {
                self.lose(lost).await?;
                self.send(MirrorUpdate::Batch(events)).await
            }
            (None, _) => self.send(MirrorUpdate::Batch(events)).await,
        }
    }

    /// Replays all batches that were published after the last delivered batch.
    async fn catch_up(&mut self) -> Result<(), SubscriptionEnd> {
        let mut may_be_interrupted = true;
        loop {
            let before = self.position.next();
            let replayed = self.replay(may_be_interrupted).await;
            self.replays = replayed.is_ok();
            match replayed {
                Ok(Replayed::All) => return Ok(()),
                Ok(Replayed::Interrupted) => may_be_interrupted = self.position.next() > before,
                Ok(Replayed::OtherProcess) => self.restart().await?,
                Ok(Replayed::Incomplete) => self.position = BatchPosition::Unknown,
                Err(error) => {
                    self.lose_missing().await?;
                    return Err(error);
                }
            }
        }
    }

    /// Requests one replay from the last delivered batch on, and delivers its batches. If a batch is missing, nothing is delivered until an
    /// event of a later batch clears the cache; that event and all later ones are delivered.
    async fn replay(&mut self, may_be_interrupted: bool) -> Result<Replayed, SubscriptionEnd> {
        let mut known = if let BatchPosition::After(seen) = self.position { Some(seen) } else { None };
        let mut replay = EventReplay::request(&self.settings, known.map_or(0, |seen| seen.number)).await?;
        let mut is_first = true;
        while let Some((number, payload)) = replay.next().await? {
            let was_first = std::mem::take(&mut is_first);
            if let Some(seen) = known.take().filter(|seen| seen.number == number) {
                if Seen::new(number, &payload).digest != seen.digest {
                    return Ok(Replayed::OtherProcess);
                }
                continue;
            }
            match self.position.next() {
                Some(next) if number < next => continue,
                Some(next) if number > next && !was_first && may_be_interrupted => return Ok(Replayed::Interrupted),
                Some(next) if number > next => self.missing = Some(self.position.loss(number)),
                _ => {}
            }
            let events = self.decode(number, &payload).await?;
            if self.missing.is_none() {
                self.send(MirrorUpdate::Batch(events)).await?;
            } else if let Some(since) = since_clear(&events) {
                self.missing = None;
                self.send(MirrorUpdate::Batch(since)).await?;
            }
        }
        if known.is_some() {
            return Ok(Replayed::OtherProcess);
        }
        if self.missing.is_some() {
            self.lose_missing().await?;
            return Ok(Replayed::Incomplete);
        }
        Ok(Replayed::All)
    }

    /// Advances the position to this batch and returns the batch's events. If the batch is malformed or from another rank, reports a loss
    /// and returns no events.
    async fn decode(&mut self, number: u64, payload: &[u8]) -> Result<Vec<EngineEvent>, SubscriptionEnd> {
        self.position = BatchPosition::After(Seen::new(number, payload));
        let lost = match decode(payload) {
            Ok(EventBatch { events, data_parallel_rank }) => match data_parallel_rank {
                Some(rank) if rank != self.settings.data_parallel_rank => EventLoss::OtherRank(rank),
                _ => return Ok(events),
            },
            Err(error) => EventLoss::Malformed(error),
        };
        self.missing = None;
        self.lose(lost).await?;
        Ok(Vec::new())
    }

    async fn restart(&mut self) -> Result<(), SubscriptionEnd> {
        (self.position, self.missing) = (BatchPosition::Start, None);
        self.send(MirrorUpdate::Restarted).await
    }

    async fn lose_missing(&mut self) -> Result<(), SubscriptionEnd> {
        match self.missing.take() {
            Some(lost) => self.lose(lost).await,
            None => Ok(()),
        }
    }

    async fn lose(&mut self, lost: EventLoss) -> Result<(), SubscriptionEnd> {
        self.send(MirrorUpdate::Lost(lost)).await
    }

    async fn send(&mut self, update: MirrorUpdate) -> Result<(), SubscriptionEnd> {
        if update == MirrorUpdate::Batch(Vec::new()) {
            return Ok(());
        }
        self.updates.send(update).await.map_err(|_| SubscriptionEnd::Unsubscribed)
    }
}
