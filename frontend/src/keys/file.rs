//! The file with the API keys: TOML, with a table `[[key]]` for each key. It has the keys' hashes, never the keys.

use ring::{
    digest::{SHA256, digest},
    rand::{SecureRandom, SystemRandom},
};
use serde::{Deserialize, Deserializer, Serialize, Serializer, de::Error as _};
use std::{
    collections::HashSet,
    fmt, fs, io,
    num::NonZeroU32,
    path::{Path, PathBuf},
};
use tandem_process::Secret;

/// The maximum size of the file. It suffices for 50,000 keys.
pub(super) const FILE_BYTES_MAX: u64 = 16 << 20;
/// The number of random bytes in a key. No attacker can try 2^256 keys, so a fast hash protects them as well as a slow one would.
const SECRET_BYTES: usize = 32;
/// The prefix of keys, by which scanners find keys in published code. Clients of OpenAI's API expect `sk-`.
const PREFIX: &str = "sk-tandem-";
/// The maximum length of the name of a key or an account, in bytes.
const NAME_MAX: usize = 64;
/// The rule for the names of keys and accounts.
const NAME_RULE: &str = "must start with a letter or digit, and have at most 64 letters, digits, -, _, ., : and @";

/// The API keys of a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ApiKeyFile {
    /// The keys, in the order of the file.
    #[serde(default, rename = "key")]
    pub keys: Vec<ApiKey>,
}

/// An API key and what a client may do with it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub struct ApiKey {
    /// The key's name, which no other key of the file has.
    pub name: String,
    /// The hash of the key.
    pub sha256: KeyHash,
    /// The day on which the key was made.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub created: Option<String>,
    /// The account for which requests with this key are counted; `None`: the account has the key's name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub account: Option<String>,
    /// The maximum number of requests in a minute; `None`: there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub requests_per_minute: Option<NonZeroU32>,
    /// The maximum number of prompt and completion tokens in a minute; `None`: there is no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens_per_minute: Option<NonZeroU32>,
    /// The maximum number of sequences (prompts × `n`) that run at a time; `None`: only the limits of all clients apply.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sequences: Option<NonZeroU32>,
    /// The priority of the key's requests, and the best that they may set; lower values are served earlier. `None`: 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub priority: Option<i32>,
    /// The ids of the models that the key may use; empty: all models.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub models: Vec<String>,
    /// The requests with which the key's requests share cached KV.
    #[serde(default, skip_serializing_if = "KeyCache::is_default")]
    pub cache: KeyCache,
}

/// The requests with which the requests of a key share cached KV.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum KeyCache {
    /// With the requests that the frontend's setting for the isolation of accounts allows.
    #[default]
    Account,
    /// Only with requests with the same key.
    Key,
}

impl KeyCache {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// The SHA-256 of a key. It is written as 64 hex digits.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct KeyHash(pub(super) [u8; 32]);

/// A file of API keys that cannot be used.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
pub enum ApiKeyFileError {
    #[error("the API keys in {} cannot be read; make the file with `tandem key add`", .path.display())]
    Unreadable { path: PathBuf, source: io::Error },
    #[error("the API keys in {} are invalid: {problem}; correct the file", .path.display())]
    Invalid { path: PathBuf, problem: String },
}

impl ApiKeyFile {
    /// Reads a file of API keys.
    ///
    /// # Errors
    /// The file cannot be read or is invalid.
    pub fn read(path: &Path) -> Result<Self, ApiKeyFileError> {
        let unreadable = |source| ApiKeyFileError::Unreadable { path: path.to_owned(), source };
        if fs::metadata(path).map_err(unreadable)?.len() > FILE_BYTES_MAX {
            return Err(unreadable(io::ErrorKind::FileTooLarge.into()));
        }
        Self::parse(path, &fs::read_to_string(path).map_err(unreadable)?)
    }

    /// Parses the text of the file at `path`.
    pub(super) fn parse(path: &Path, text: &str) -> Result<Self, ApiKeyFileError> {
        let invalid = |problem| ApiKeyFileError::Invalid { path: path.to_owned(), problem };
        // Only the message is used: the error's other text quotes the file.
        let parsed = toml::from_str::<Self>(text).map_err(|error| {
            let line = error.span().and_then(|span| text.get(..span.start)).map_or(1, |before| before.matches('\n').count() + 1);
            invalid(format!("line {line}: {}", error.message().replace('\n', ", ")))
        })?;
        parsed.problem().map_or(Ok(parsed), |problem| Err(invalid(problem)))
    }

    /// Returns what is wrong with these keys; `None` if they can be used.
    fn problem(&self) -> Option<String> {
        let (mut names, mut hashes) = (HashSet::new(), HashSet::new());
        for key in &self.keys {
            let ApiKey { name, account, sha256, .. } = key;
            if !is_name(name) {
                return Some(format!("the name {name:?} {NAME_RULE}"));
            }
            if let Some(account) = account.as_deref().filter(|account| !is_name(account)) {
                return Some(format!("the account {account:?} of {name} {NAME_RULE}"));
            }
            if !names.insert(name) {
                return Some(format!("two keys have the name {name}"));
            }
            if !hashes.insert(sha256) {
                return Some(format!("{name} has the hash of another key"));
            }
        }
        None
    }

    /// Adds a key with a new secret, of which only the hash is stored. Returns the secret.
    ///
    /// # Errors
    /// The name is in use, the name or the account is malformed, or the system has no random numbers.
    pub fn add(&mut self, make: impl FnOnce(KeyHash) -> ApiKey) -> Result<Secret, String> {
        let mut bytes = [0; SECRET_BYTES];
        SystemRandom::new().fill(&mut bytes).map_err(|_| "the system has no random numbers".to_owned())?;
        let secret = PREFIX.to_owned() + &hex(&bytes);
        self.keys.push(make(KeyHash::of(secret.as_bytes())));
        match self.problem() {
            Some(problem) => {
                self.keys.pop();
                Err(problem)
            }
            None => Ok(secret.into()),
        }
    }

    /// Returns the text of the file.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("the keys can be serialized")
    }
}

impl ApiKey {
    /// Returns the account for which requests with this key are counted.
    pub fn account(&self) -> &str {
        self.account.as_deref().unwrap_or(&self.name)
    }
}

impl KeyHash {
    pub(super) fn of(key: &[u8]) -> Self {
        let mut hash = [0; 32];
        hash.copy_from_slice(digest(&SHA256, key).as_ref());
        Self(hash)
    }
}

impl fmt::Debug for KeyHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&hex(&self.0))
    }
}

impl Serialize for KeyHash {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&hex(&self.0))
    }
}

impl<'de> Deserialize<'de> for KeyHash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let mut hash = [0; 32];
        let is_hash = text.len() == 2 * hash.len() && text.bytes().all(|digit| digit.is_ascii_hexdigit());
        if !is_hash {
            return Err(D::Error::custom("sha256 must have 64 hex digits; `tandem key add` writes it"));
        }
        for (byte, digits) in hash.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let digits = std::str::from_utf8(digits).map_err(D::Error::custom)?;
            *byte = u8::from_str_radix(digits, 16).map_err(D::Error::custom)?;
        }
        Ok(Self(hash))
    }
}

/// Whether the text may be the name of a key or an account.
pub(crate) fn is_name(text: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.:@".contains(&byte);
    text.len() <= NAME_MAX && text.starts_with(|first: char| first.is_ascii_alphanumeric()) && text.bytes().all(letter)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str, sha256: KeyHash) -> ApiKey {
        let name = name.to_owned();
        ApiKey {
            name,
            sha256,
            created: None,
            account: None,
            requests_per_minute: None,
            tokens_per_minute: None,
            max_sequences: None,
            priority: None,
            models: Vec::new(),
            cache: KeyCache::Account,
        }
    }

    fn parse(text: &str) -> Result<ApiKeyFile, String> {
        ApiKeyFile::parse(Path::new("keys.toml"), text).map_err(|error| error.to_string())
    }

    #[test]
    fn written_keys_can_be_read_back_and_hold_no_secret() {
        let mut file = ApiKeyFile::default();
        let secret = file.add(|hash| key("a", hash)).expect("the name is free");
        let full = |hash| ApiKey {
            created: Some("2026-01-02".to_owned()),
            account: Some("acme".to_owned()),
            requests_per_minute: NonZeroU32::new(60),
            tokens_per_minute: NonZeroU32::new(1000),
            max_sequences: NonZeroU32::new(4),
            priority: Some(-5),
            models: vec!["m".to_owned()],
            cache: KeyCache::Key,
            ..key("b", hash)
        };
        let other = file.add(full).expect("the name is free");
        assert_ne!(secret.expose(), other.expose());
        assert!(secret.expose().len() == PREFIX.len() + 64 && secret.expose().starts_with("sk-tandem-"));
        let text = file.to_toml();
        assert_eq!(parse(&text).expect("the text is valid"), file);
        assert!(!text.contains(&secret.expose()[PREFIX.len()..]), "{text}");
        assert_eq!(file.keys[0].sha256, KeyHash::of(secret.expose().as_bytes()));
        assert!(file.add(|hash| key("a", hash)).is_err_and(|error| error.contains("two keys")));
        assert!(file.add(|hash| key("", hash)).is_err());
        assert_eq!(file.keys.len(), 2, "a refused key is not kept");
    }

    #[test]
    fn invalid_key_files_are_refused_with_the_place_of_the_mistake() {
        let hash = "ab".repeat(32);
        let other = "cd".repeat(32);
        for (text, expected) in [
            ("[[key]]\nname = \"a\"\n", "missing field `sha256`"),
            ("[[key]]\nname = \"a\"\nsha256 = \"abc\"\n", "line 3: sha256 must have 64 hex digits"),
            (&format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\nrequests-per-minute = 0\n"), "line 4"),
            (&format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\nlimit = 1\n"), "unknown field `limit`"),
            (&format!("[[key]]\nname = \"a b\"\nsha256 = \"{hash}\"\n"), "must start with a letter or digit"),
            (&format!("[[key]]\nname = \"a\"\naccount = \"/\"\nsha256 = \"{hash}\"\n"), "the account \"/\" of a must"),
            (
                &format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\n[[key]]\nname = \"a\"\nsha256 = \"{other}\"\n"),
                "two keys have the name a",
            ),
            (
                &format!("[[key]]\nname = \"a\"\nsha256 = \"{hash}\"\n[[key]]\nname = \"b\"\nsha256 = \"{hash}\"\n"),
                "b has the hash of another key",
            ),
            ("[[key", "line 1"),
        ] {
            let error = parse(text).expect_err(text);
            assert!(error.contains(expected) && error.contains("keys.toml") && !error.contains('\n'), "{text}: {error}");
        }
        assert_eq!(parse("").expect("a file without keys is valid"), ApiKeyFile::default());
    }
}
