//! Handles for KV in other engines: each is used once, for the prompt for which it was made.

use parking_lot::Mutex;
use std::{
    collections::{HashSet, VecDeque},
    hash::{BuildHasher, RandomState},
    time::Duration,
};
use tandem_engine::KvHandle;
use tandem_kv::HashKey;
use tandem_proto::v1;
use tokio::time::Instant;

/// The time for which used handles are remembered: longer than any lease.
const REMEMBERED: Duration = Duration::from_secs(600);

/// What is needed to check handles.
pub(crate) struct Handles {
    pub(crate) hash_key: HashKey,
    hasher: RandomState,
    used: Mutex<Used>,
}

/// Hashes of the handles that were used, the oldest first.
#[derive(Default)]
struct Used {
    hashes: HashSet<u64>,
    by_age: VecDeque<(Instant, u64)>,
}

impl Handles {
    pub(crate) fn new(hash_key: HashKey) -> Self {
        Self { hash_key, hasher: RandomState::new(), used: Mutex::default() }
    }

    /// Takes a handle for use: once, and for this prompt only.
    pub(crate) fn take(&self, handle: v1::KvHandle, digest: u64) -> Option<KvHandle> {
        let v1::KvHandle { handle: bytes, prompt_digest, valid_ms } = handle;
        if prompt_digest != digest || valid_ms == 0 {
            return None;
        }
        let (mut used, now, hash) = (self.used.lock(), Instant::now(), self.hasher.hash_one(&bytes));
        while let Some((_, oldest)) = used.by_age.front().copied().filter(|(at, _)| now.duration_since(*at) >= REMEMBERED) {
            used.by_age.pop_front();
            used.hashes.remove(&oldest);
        }
        let is_new = used.hashes.insert(hash);
        if is_new {
            used.by_age.push_back((now, hash));
        }
        is_new.then_some(KvHandle { bytes, valid_for: Duration::from_millis(valid_ms.into()), chunks: Vec::new() })
    }
}
