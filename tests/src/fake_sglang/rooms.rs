//! The rooms in which fake prefill servers send KV to fake decode servers. As in SGLang, the servers do not compare the prompts of the two halves.

use parking_lot::Mutex;
use std::{
    collections::HashMap,
    sync::{Arc, LazyLock},
};
use tokio::sync::watch;

/// What a prefill server sends: its own prompt, and the first token of the answer.
#[derive(Clone, Debug)]
pub(super) struct SentKv {
    pub prompt: Vec<u32>,
    pub first: u32,
    pub cached_tokens: usize,
}

/// A room that both halves of a request know. It exists until both have left.
#[derive(Debug)]
pub(super) struct Room {
    sent: watch::Sender<Option<SentKv>>,
    taken: watch::Sender<bool>,
}

/// All rooms of the process by their numbers.
static ROOMS: LazyLock<Mutex<HashMap<u64, std::sync::Weak<Room>>>> = LazyLock::new(Mutex::default);

impl Room {
    pub fn enter(number: u64) -> Arc<Self> {
        let mut rooms = ROOMS.lock();
        rooms.retain(|_, room| room.strong_count() > 0);
        let existing = rooms.get(&number).and_then(std::sync::Weak::upgrade);
        existing.unwrap_or_else(|| {
            let room = Arc::new(Self { sent: watch::Sender::new(None), taken: watch::Sender::new(false) });
            rooms.insert(number, Arc::downgrade(&room));
            room
        })
    }

    /// Sends the KV. Returns when a decode server has it.
    pub async fn send(&self, kv: SentKv) {
        self.sent.send_replace(Some(kv));
        let _ = self.taken.subscribe().wait_for(|taken| *taken).await;
    }

    /// Waits for the KV.
    pub async fn take(&self) -> Option<SentKv> {
        let kv = self.sent.subscribe().wait_for(Option::is_some).await.ok()?.clone();
        self.taken.send_replace(true);
        kv
    }
}
