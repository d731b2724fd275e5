//! Caches the token ids of texts, so that the earlier messages of a conversation are not encoded again with each turn.
//!
//! An entry is the text between two names of special tokens. [`Tokenizer`](super::Tokenizer) cuts a prompt at these names before any step
//! of the model's own algorithm, and encodes each part on its own. So the ids of a part depend only on its text and on whether it starts
//! the prompt. On a lookup, text, position and cache namespace are compared in full, so a collision of hashes is a miss.

use crate::tokenizer::PromptPart;
use foldhash::fast::RandomState;
use lru::LruCache;
use metrics::{Counter, Gauge};
use parking_lot::Mutex;
use std::{hash::BuildHasher, sync::Arc};
use tandem_kv::{Namespace, TokenId};

/// Parts shorter than this are not cached. Encoding them costs little more than a lookup.
const PART_BYTES_MIN: usize = 32;
/// The memory of an entry besides its text and ids, roughly.
const ENTRY_BYTES: usize = 192;

/// The entries of all namespaces. The entry that was used least recently is removed first.
pub struct EncodingCache {
    entries: Mutex<EncodingEntries>,
    /// The maximum memory of all entries; 0: nothing is cached.
    bytes_max: usize,
    hasher: RandomState,
    metrics: EncodingMetrics,
}

/// The metrics of an [`EncodingCache`].
pub struct EncodingMetrics {
    /// The memory in use, in bytes.
    pub bytes: Gauge,
    /// Bytes of text whose ids were found in the cache.
    pub hits: Counter,
    /// Bytes of text that had to be encoded.
    pub misses: Counter,
}

struct EncodingEntries {
    by_hash: LruCache<u64, Arc<CachedEncoding>>,
    bytes: usize,
}

struct CachedEncoding {
    namespace: Namespace,
    is_first: bool,
    text: Box<str>,
    ids: Box<[TokenId]>,
}

/// The entries of one namespace. Requests of other namespaces never hit them, so their timing does not reveal which texts are cached.
#[derive(Clone)]
pub struct NamespaceEncodings {
    cache: Arc<EncodingCache>,
    namespace: Namespace,
}

impl EncodingCache {
    /// Returns an empty cache of at most this many bytes.
    pub fn new(bytes_max: usize, metrics: EncodingMetrics) -> Self {
        let entries = Mutex::new(EncodingEntries { by_hash: LruCache::unbounded(), bytes: 0 });
        Self { entries, bytes_max, hasher: RandomState::default(), metrics }
    }

    /// Returns the entries of a namespace.
    pub fn of(self: &Arc<Self>, namespace: Namespace) -> NamespaceEncodings {
        NamespaceEncodings { cache: Arc::clone(self), namespace }
    }

    fn insert(&self, hash: u64, entry: CachedEncoding) {
        let bytes = entry.bytes();
        if bytes > self.bytes_max {
            return;
        }
        let mut removed = Vec::new();
        let mut entries = self.entries.lock();
        entries.bytes += bytes;
        removed.extend(entries.by_hash.put(hash, Arc::new(entry)));
        entries.bytes -= removed.iter().map(|entry| entry.bytes()).sum::<usize>();
        while entries.bytes > self.bytes_max
            && let Some((_, oldest)) = entries.by_hash.pop_lru()
        {
            entries.bytes -= oldest.bytes();
            removed.push(oldest);
        }
        self.metrics.bytes.set(entries.bytes as f64);
        // The removed entries are dropped after the lock is released.
        drop(entries);
    }
}

impl NamespaceEncodings {
    /// Appends the token ids of a part of a prompt: the cached ids or, on a cache miss, those that `encode` appends.
    ///
    /// # Errors
    /// `encode` fails.
    pub(super) fn encode<E>(
        &self,
        part: PromptPart<'_>,
        ids: &mut Vec<TokenId>,
        encode: impl FnOnce(&mut Vec<TokenId>) -> Result<(), E>,
    ) -> Result<(), E> {
        let (Self { cache, namespace }, PromptPart { text, is_first }) = (self, part);
        if text.len() < PART_BYTES_MIN || cache.bytes_max == 0 {
            return encode(ids);
        }
        let hash = cache.hasher.hash_one((namespace, is_first, text));
        let found = cache.entries.lock().by_hash.get(&hash).cloned();
        if let Some(entry) = found.filter(|entry| (&entry.namespace, entry.is_first, &*entry.text) == (namespace, is_first, text))
        {
            ids.extend_from_slice(&entry.ids);
            cache.metrics.hits.increment(text.len() as u64);
            return Ok(());
        }
        let start = ids.len();
        encode(ids)?;
        cache.metrics.misses.increment(text.len() as u64);
        let (namespace, text, ids) = (namespace.clone(), text.into(), ids[start..].into());
        cache.insert(hash, CachedEncoding { namespace, is_first, text, ids });
        Ok(())
    }
}

impl CachedEncoding {
    fn bytes(&self) -> usize {
        ENTRY_BYTES + self.text.len() + size_of_val(&*self.ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(bytes_max: usize) -> Arc<EncodingCache> {
        let metrics = EncodingMetrics { bytes: Gauge::noop(), hits: Counter::noop(), misses: Counter::noop() };
        Arc::new(EncodingCache::new(bytes_max, metrics))
    }

    fn first(text: &str) -> PromptPart<'_> {
        PromptPart { text, is_first: true }
    }

    /// Returns whether the text had to be encoded. In these tests, a text's ids are its bytes.
    fn computes(encodings: &NamespaceEncodings, part: PromptPart<'_>) -> bool {
        let (mut ids, mut computes) = (vec![7], false);
        let encode = |ids: &mut Vec<TokenId>| {
            computes = true;
            ids.extend(part.text.bytes().map(TokenId::from));
            Ok::<(), ()>(())
        };
        encodings.encode(part, &mut ids, encode).expect("these texts can be encoded");
        assert_eq!(ids[0], 7, "ids before the part stay");
        assert!(ids[1..].iter().copied().eq(part.text.bytes().map(TokenId::from)));
        computes
    }

    #[test]
    fn text_is_encoded_once_for_each_namespace_and_position() {
        let cache = cache(1 << 20);
        let text = "x".repeat(PART_BYTES_MIN);
        let namespace = Namespace::new("m", "r", "", "");
        let others = [Namespace::new("m", "r", "", "salt"), Namespace::new("n", "r", "", ""), namespace.of_account("a")];
        for namespace in others.into_iter().chain([namespace.clone()]) {
            let encodings = cache.of(namespace);
            for part in [true, false].map(|is_first| PromptPart { text: &text, is_first }) {
                assert!(computes(&encodings, part));
                assert!(!computes(&encodings, part));
            }
        }
        let (encodings, short) = (cache.of(namespace), first(&text[1..]));
        assert!(computes(&encodings, short) && computes(&encodings, short), "a short text");
    }

    #[test]
    fn memory_is_bounded_and_the_most_recently_used_text_stays_cached() {
        let texts: Vec<String> = (0..64).map(|index| format!("{index:>1000}")).collect();
        let entry = ENTRY_BYTES + 5 * texts[0].len();
        let cache = cache(8 * entry);
        let encodings = cache.of(Namespace::new("m", "r", "", ""));
        for text in &texts {
            assert!(computes(&encodings, first(text)));
            assert!(!computes(&encodings, first(&texts[0])), "a text in use stays");
            let entries = cache.entries.lock();
            let bytes: usize = entries.by_hash.iter().map(|(_, entry)| entry.bytes()).sum();
            assert_eq!(bytes, entries.bytes);
            assert!(bytes <= 8 * entry);
        }
        assert_eq!(cache.entries.lock().by_hash.len(), 8);
        let huge = "y".repeat(16 * entry);
        assert!(computes(&encodings, first(&huge)) && computes(&encodings, first(&huge)));
        assert!(!computes(&encodings, first(&texts[63])), "a text that is too long removes no other");
    }

    #[test]
    fn cache_of_zero_bytes_stores_nothing() {
        let encodings = cache(0).of(Namespace::new("m", "r", "", ""));
        let text = "x".repeat(1000);
        assert!(computes(&encodings, first(&text)) && computes(&encodings, first(&text)));
    }
}
