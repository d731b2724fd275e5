//! Checks the handles for KV in external engines: each handle is used once, for the prompt for which it was made.

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

/// Used handles are kept for this time, which exceeds every lease, to refuse a second use.
const REMEMBERED: Duration = Duration::from_secs(600);

pub(crate) struct Handles {
    pub(crate) hash_key: HashKey,
    hasher: RandomState,
    used: Mutex<Used>,
}

#[derive(Default)]
struct Used {
    hashes: HashSet<u64>,
    by_age: VecDeque<(Instant, u64)>,
}

impl Handles {
    pub(crate) fn new(hash_key: HashKey) -> Self {
        Self { hash_key, hasher: RandomState::new(), used: Mutex::default() }
    }

    /// Marks a handle as used and returns it. Returns `None` if the handle was made for another prompt, is not valid, or was used before.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn handle(bytes: &[u8], prompt_digest: u64, valid_ms: u32) -> v1::KvHandle {
        v1::KvHandle { handle: bytes.to_vec(), prompt_digest, valid_ms }
    }

    #[tokio::test(start_paused = true)]
    async fn handle_is_accepted_only_once_and_only_for_its_prompt_before_it_expires() {
        let handles = Handles::new(HashKey::NONE);
        assert!(handles.take(handle(b"a", 8, 1_000), 7).is_none(), "the handle was made for another prompt");
        assert!(handles.take(handle(b"a", 7, 0), 7).is_none(), "the handle has expired");
        let taken = handles.take(handle(b"a", 7, 1_000), 7).expect("a refused handle does not count as used");
        assert_eq!((taken.bytes.as_slice(), taken.valid_for), (&b"a"[..], Duration::from_secs(1)));
        assert!(handles.take(handle(b"a", 7, 1_000), 7).is_none(), "the handle was used");
        assert!(handles.take(handle(b"b", 7, 1_000), 7).is_some());
        tokio::time::advance(REMEMBERED - Duration::from_secs(1)).await;
        assert!(handles.take(handle(b"a", 7, 1_000), 7).is_none(), "a used handle is remembered for longer than any lease");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(handles.take(handle(b"c", 7, 1_000), 7).is_some());
        assert_eq!(handles.used.lock().by_age.len(), 1, "old entries are dropped");
    }
}
