//! API keys: which clients may send requests, and how many.
//!
//! A key is found by a keyed hash of its SHA-256 under a random key of this process, so the time of a lookup reveals nothing about the keys
//! in the file. A changed file replaces all keys at once. The use of a key (its buckets and running sequences) is kept when the file
//! changes, as long as the file has its hash. `docs/adr/039-api-keys.md` has the reasons.

mod file;
mod limits;

pub(crate) use file::is_name;
pub use file::{ApiKey, ApiKeyFile, ApiKeyFileError, KeyCache, KeyHash};
pub(crate) use limits::Quota;

use ::metrics::{Counter, Gauge};
use file::FILE_BYTES_MAX;
use limits::{Bucket, Shortage};
use parking_lot::Mutex;
use ring::{hmac, rand::SystemRandom};
use std::{collections::HashMap, convert::Infallible, fmt, num::NonZeroU32, path::PathBuf, sync::Arc, time::Duration};
use tandem_process::{Metrics, watched_file::WatchedFile};
use tokio::time::Instant;

/// The API keys that were read from a file at the start, for [`FrontendSettings::api_keys`](crate::FrontendSettings::api_keys).
#[derive(Debug)]
pub struct ApiKeys {
    path: PathBuf,
    keys: ApiKeyFile,
    file: WatchedFile,
}

pub(crate) struct Keys {
    blinding: hmac::Key,
    table: Mutex<Arc<Table>>,
    count: Gauge,
    outdated: Gauge,
    reload_failures: Counter,
}

type Tag = [u8; 32];
type Table = HashMap<Tag, Arc<Key>>;

/// A key with its use.
pub(crate) struct Key {
    pub(crate) entry: ApiKey,
    usage: Arc<Mutex<Usage>>,
}

/// The use of a key's limits.
#[derive(Debug, Default)]
struct Usage {
    requests: Option<Bucket>,
    tokens: Option<Bucket>,
    sequences: usize,
}

/// A limit of a key that a request exceeds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Exceeded {
    limit: Limit,
    per_minute: u32,
    needed: u32,
    /// The time after which the request would be accepted; `None`: the request needs more than the limit.
    retry_after: Option<Duration>,
}

/// The unit that a limit of a key counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Limit {
    Requests,
    Tokens,
}

impl fmt::Display for Exceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, per_minute, needed, .. } = self;
        match limit {
            Limit::Requests => write!(f, "This API key's limit of {per_minute} requests a minute is reached")?,
            Limit::Tokens if *needed == 0 => write!(f, "This API key's limit of {per_minute} tokens a minute is reached")?,
            Limit::Tokens => {
                write!(
                    f,
                    "The prompt has {needed} tokens, more than this API key's limit of {per_minute} tokens a minute leaves"
                )?;
            }
        }
        match self.retry_seconds() {
            Some(seconds) => write!(f, "; try again in {seconds} s"),
            None => f.write_str("; send a shorter prompt"),
        }
    }
}

impl Exceeded {
    /// Returns the whole seconds after which the request would be accepted; `None`: it needs more than the limit.
    pub(crate) fn retry_seconds(&self) -> Option<u16> {
        self.retry_after.map(|time| time.as_secs_f64().ceil().max(1.0) as u16)
    }
}

/// The reserved sequences of a key. Dropping this value releases them.
pub(crate) struct KeySequences {
    usage: Arc<Mutex<Usage>>,
    count: usize,
}

impl ApiKeys {
    /// Reads the keys.
    ///
    /// # Errors
    /// The file cannot be read or is invalid.
    pub fn open(path: PathBuf) -> Result<Self, ApiKeyFileError> {
        let opened = WatchedFile::open(path.clone(), FILE_BYTES_MAX);
        let (text, file) = opened.map_err(|source| ApiKeyFileError::Unreadable { path: path.clone(), source })?;
        Ok(Self { keys: ApiKeyFile::parse(&path, &text)?, path, file })
    }
}

impl Keys {
    /// Returns the keys, and a future that follows changes of their file for ever. If the file becomes unreadable or invalid, the keys stay
    /// as they are.
    pub(crate) fn new(opened: ApiKeys, metrics: &Metrics) -> (Arc<Self>, impl Future<Output = Infallible> + use<>) {
        let ApiKeys { path, keys: first, mut file } = opened;
        let keys = Arc::new(Self {
            blinding: hmac::Key::generate(hmac::HMAC_SHA256, &SystemRandom::new()).expect("the system has random numbers"),
            table: Mutex::default(),
            count: metrics.gauge("tandem_frontend_api_keys", "API keys in use.", &[]),
            outdated: metrics.gauge(
                "tandem_frontend_api_keys_outdated",
                "1 while the file with the API keys cannot be used, so that the last valid keys stay in use.",
                &[],
            ),
            reload_failures: metrics.counter(
                "tandem_frontend_api_keys_reload_failures_total",
                "Changes of the file with the API keys that could not be used.",
                &[],
            ),
        });
        keys.outdated.set(0.0);
        keys.reload_failures.increment(0);
        keys.replace(first);
        let watched = Arc::clone(&keys);
        let watch = async move {
            loop {
                let changed = file.changed().await;
                let changed = changed.map_err(|source| ApiKeyFileError::Unreadable { path: path.clone(), source });
                match changed.and_then(|text| ApiKeyFile::parse(&path, &text)) {
                    Ok(changed) => {
                        tracing::info!(keys = changed.keys.len(), "the API keys were read again");
                        watched.replace(changed);
                        watched.outdated.set(0.0);
                    }
                    Err(error) => {
                        let error = tandem_process::retry::error_chain(&error);
                        tracing::error!(
                            error,
                            "the last valid API keys stay in use, so no key is revoked until the file is valid"
                        );
                        watched.outdated.set(1.0);
                        watched.reload_failures.increment(1);
                    }
                }
            }
        };
        (keys, watch)
    }

    /// Replaces all keys. A key that was there before keeps its use.
    fn replace(&self, file: ApiKeyFile) {
        let before = Arc::clone(&self.table.lock());
        let now = Instant::now();
        let table = file.keys.into_iter().map(|entry| {
            let tag = self.tag(entry.sha256);
            let usage = before.get(&tag).map(|key| Arc::clone(&key.usage)).unwrap_or_default();
            usage.lock().set_limits(&entry, now);
            (tag, Arc::new(Key { entry, usage }))
        });
        let table: Table = table.collect();
        self.count.set(table.len() as f64);
        *self.table.lock() = Arc::new(table);
    }

    /// Returns the key that a client sent; `None` if there is no such key.
    pub(crate) fn find(&self, sent: &[u8]) -> Option<Arc<Key>> {
        let tag = self.tag(KeyHash::of(sent));
        let table = Arc::clone(&self.table.lock());
        table.get(&tag).cloned()
    }

    fn tag(&self, hash: KeyHash) -> Tag {
        let mut tag = Tag::default();
        tag.copy_from_slice(hmac::sign(&self.blinding, &hash.0).as_ref());
        tag
    }
}

impl Usage {
    fn set_limits(&mut self, entry: &ApiKey, now: Instant) {
        let set = |bucket: &mut Option<Bucket>, limit: Option<NonZeroU32>| match (limit, &mut *bucket) {
            (Some(limit), Some(bucket)) => bucket.resize(limit, now),
            (Some(limit), None) => *bucket = Some(Bucket::full(limit, now)),
            (None, _) => *bucket = None,
        };
        set(&mut self.requests, entry.requests_per_minute);
        set(&mut self.tokens, entry.tokens_per_minute);
    }

    fn take(&mut self, limit: Limit, needed: u32) -> Result<(), Exceeded> {
        let now = Instant::now();
        let bucket = match limit {
            Limit::Requests => &mut self.requests,
            Limit::Tokens => &mut self.tokens,
        };
        let Some(bucket) = bucket else { return Ok(()) };
        bucket.take(needed, now).map_err(|shortage| {
            let retry_after = match shortage {
                Shortage::Later(time) => Some(time),
                Shortage::Never => None,
            };
            Exceeded { limit, per_minute: bucket.quota(now).limit, needed, retry_after }
        })
    }
}

impl Key {
    /// Takes one request from the key's limit.
    ///
    /// # Errors
    /// The limit is reached.
    pub(crate) fn take_request(&self) -> Result<(), Exceeded> {
        self.usage.lock().take(Limit::Requests, 1)
    }

    /// Takes the tokens of a request's prompts from the key's limit.
    ///
    /// # Errors
    /// Fewer tokens are left.
    pub(crate) fn take_prompt_tokens(&self, tokens: u32) -> Result<(), Exceeded> {
        self.usage.lock().take(Limit::Tokens, tokens)
    }

    /// Takes tokens that were computed from the key's limit, even if fewer are left. Further requests then wait until the debt is refilled.
    pub(crate) fn charge_tokens(&self, tokens: u32) {
        if let Some(bucket) = &mut self.usage.lock().tokens {
            bucket.charge(tokens, Instant::now());
        }
    }

    /// Reserves sequences.
    ///
    /// # Errors
    /// The key's limit on sequences, which is returned, is reached.
    pub(crate) fn reserve(&self, count: usize) -> Result<KeySequences, usize> {
        let mut usage = self.usage.lock();
        if let Some(max) = self.entry.max_sequences.map(|max| max.get() as usize)
            && usage.sequences + count > max
        {
            return Err(max);
        }
        usage.sequences += count;
        Ok(KeySequences { usage: Arc::clone(&self.usage), count })
    }

    /// Returns what is left of the limits on requests and on tokens.
    pub(crate) fn quotas(&self) -> [Option<Quota>; 2] {
        let (now, mut usage) = (Instant::now(), self.usage.lock());
        let Usage { requests, tokens, .. } = &mut *usage;
        [requests, tokens].map(|bucket| bucket.as_mut().map(|bucket| bucket.quota(now)))
    }

    /// Whether the key may use the model with this id.
    pub(crate) fn allows(&self, model: &str) -> bool {
        self.entry.models.is_empty() || self.entry.models.iter().any(|allowed| allowed == model)
    }
}

impl Drop for KeySequences {
    fn drop(&mut self) {
        self.usage.lock().sequences -= self.count;
    }
}
