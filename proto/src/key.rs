//! The cluster key: one secret that all processes of a cluster share, and the subkeys that are derived from it.
//!
//! Each use has a subkey of its own (HMAC-SHA256 of the use's name under the secret), so a value that one use reveals does not help to
//! attack another. Without a key, hashes are made under [`HashKey::NONE`], calls carry no bearer token, nothing is signed and every
//! signature is accepted. `docs/adr/019-cluster-key.md` has the reasons.

use ring::{
    hmac,
    rand::{SecureRandom, SystemRandom},
};
use std::{fmt, sync::Arc};
use tandem_kv::HashKey;
use tonic::metadata::{Ascii, MetadataValue};

/// Minimum length of the secret in bytes: the output length of HMAC-SHA256. A shorter secret could be guessed from derived values.
pub const SECRET_BYTES_MIN: usize = 32;

/// The length of a signature in bytes.
pub const SIGNATURE_BYTES: usize = 32;

/// The error of a secret with fewer than [`SECRET_BYTES_MIN`] bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the cluster key has {bytes} bytes, but needs at least {SECRET_BYTES_MIN}")]
pub struct TooShort {
    /// The length of the secret in bytes.
    pub bytes: usize,
}

/// The purpose of a signature. A signature that was made for one purpose is not valid for another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// A signature of a batch of KV events that is published over a message broker.
    Events,
    /// A signature of a worker's address, to which other workers connect.
    Address,
    /// A signature of a process's registration in etcd. It is needed because other programs may write to etcd.
    Registration,
}

/// The key of a cluster, or no key (the default). It is cheap to clone, and is never printed.
#[derive(Clone, Default)]
pub struct ClusterKey(Option<Arc<Subkeys>>);

struct Subkeys {
    hash: HashKey,
    fingerprint: String,
    bearer: MetadataValue<Ascii>,
    /// The HMAC tag of the bearer token. Tags are compared instead of tokens, so that the comparison takes the same time for every presented value.
    bearer_tag: hmac::Tag,
    comparing: hmac::Key,
    signing: [hmac::Key; 3],
}

impl ClusterKey {
    /// Derives a key from the bytes of a secret, which may be any bytes.
    ///
    /// # Errors
    /// Fails if the secret has fewer than [`SECRET_BYTES_MIN`] bytes.
    pub fn new(secret: &[u8]) -> Result<Self, TooShort> {
        if secret.len() < SECRET_BYTES_MIN {
            return Err(TooShort { bytes: secret.len() });
        }
        let secret = hmac::Key::new(hmac::HMAC_SHA256, secret);
        let derived = |label: &str| hmac::sign(&secret, format!("tandem/1/{label}").as_bytes());
        let subkey = |label| hmac::Key::new(hmac::HMAC_SHA256, derived(label).as_ref());
        let mut hash = [0; 16];
        hash.copy_from_slice(&derived("hash").as_ref()[..16]);
        let mut bearer: MetadataValue<Ascii> =
            format!("Bearer {}", hex(derived("bearer").as_ref())).parse().expect("hex digits are valid in metadata");
        bearer.set_sensitive(true);
        let comparing = subkey("comparing");
        Ok(Self(Some(Arc::new(Subkeys {
            hash: HashKey::new(hash),
            fingerprint: hex(&derived("fingerprint").as_ref()[..8]),
            bearer_tag: hmac::sign(&comparing, bearer.as_bytes()),
            bearer,
            comparing,
            signing: ["events", "address", "registration"].map(subkey),
        }))))
    }

    /// Makes a key from a random secret, for a cluster that runs in one process.
    pub fn random() -> Self {
        Self::new(&Self::random_secret()).expect("the secret is long enough")
    }

    /// Returns a new secret, which is taken from the system's randomness.
    pub fn random_secret() -> [u8; SECRET_BYTES_MIN] {
        let mut secret = [0; SECRET_BYTES_MIN];
        SystemRandom::new().fill(&mut secret).expect("the system has randomness");
        secret
    }

    /// Returns whether the cluster has a key.
    pub fn is_set(&self) -> bool {
        self.0.is_some()
    }

    /// Returns the key with which sequence hashes are computed; [`HashKey::NONE`] if the cluster has no key.
    pub fn hash_key(&self) -> HashKey {
        self.0.as_ref().map_or(HashKey::NONE, |keys| keys.hash)
    }

    /// Returns a text that is equal for processes with the same key, and reveals nothing else about the key. It is empty if the cluster has no key.
    pub fn fingerprint(&self) -> &str {
        self.0.as_ref().map_or("", |keys| &keys.fingerprint)
    }

    pub(crate) fn bearer(&self) -> Option<&MetadataValue<Ascii>> {
        self.0.as_ref().map(|keys| &keys.bearer)
    }

    pub(crate) fn admits(&self, presented: Option<&[u8]>) -> bool {
        let Some(keys) = &self.0 else { return true };
        hmac::verify(&keys.comparing, presented.unwrap_or_default(), keys.bearer_tag.as_ref()).is_ok()
    }

    /// Returns the signature of the parts, which covers their order and their lengths. It has [`SIGNATURE_BYTES`] bytes, or is empty if the cluster
    /// has no key.
    pub fn sign(&self, purpose: Purpose, parts: &[&[u8]]) -> Vec<u8> {
        let Some(keys) = &self.0 else { return Vec::new() };
        hmac::sign(&keys.signing[purpose as usize], &joined(parts)).as_ref().to_vec()
    }

    /// Returns whether a process with this key has signed these parts for this purpose. Without a key, every signature is accepted.
    pub fn verifies(&self, purpose: Purpose, parts: &[&[u8]], signature: &[u8]) -> bool {
        let Some(keys) = &self.0 else { return true };
        hmac::verify(&keys.signing[purpose as usize], &joined(parts), signature).is_ok()
    }
}

impl PartialEq for ClusterKey {
    fn eq(&self, other: &Self) -> bool {
        self.fingerprint() == other.fingerprint()
    }
}

impl Eq for ClusterKey {}

impl fmt::Debug for ClusterKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "ClusterKey(…)" } else { "ClusterKey(none)" })
    }
}

/// Joins parts, each after its length, so that no two different lists of parts give equal bytes.
fn joined(parts: &[&[u8]]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(parts.iter().map(|part| 8 + part.len()).sum());
    for part in parts {
        bytes.extend((part.len() as u64).to_le_bytes());
        bytes.extend(*part);
    }
    bytes
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    fn key(secret: &[u8]) -> ClusterKey {
        ClusterKey::new(secret).expect("the secret is long enough")
    }

    fn one() -> ClusterKey {
        key(b"0123456789abcdef0123456789abcdef")
    }

    /// The values were computed with Python's `hmac` and `hashlib`: HMAC-SHA256(secret, "tandem/1/…"). If this test fails, processes of two
    /// versions can no longer authenticate each other.
    #[test]
    fn derived_keys_equal_reference_values() {
        assert_eq!(one().fingerprint(), "658b4719de0e0b76");
        assert_eq!(
            one().bearer().expect("the process has a cluster key").as_bytes(),
            b"Bearer 7c9f67f22f6f7bfeb1a1bbe8c084bfbbb9916d205c68aa0eb806f37faac70d9d"
        );
        assert_eq!(
            one().hash_key(),
            HashKey::new([0x24, 0x77, 0x2d, 0x57, 0x07, 0xa2, 0x6e, 0x5d, 0x7e, 0x19, 0x1c, 0xee, 0xf4, 0x9b, 0xe4, 0x00])
        );
        assert_eq!(
            hex(&one().sign(Purpose::Events, &[b"a", b"bc"])),
            "90b651aa558335f25ff5723d9efb82e63f207e80b7fd79a1090aa2161904f4de"
        );
    }

    #[test]
    fn short_secret_is_refused() {
        assert_eq!(ClusterKey::new(&[7; 31]).err(), Some(TooShort { bytes: 31 }));
        assert!(ClusterKey::new(&[7; 32]).is_ok() && ClusterKey::new(&[7; 1_000]).is_ok());
    }

    #[test]
    fn only_the_bearer_of_the_same_key_is_admitted() {
        let (ours, other) = (one(), ClusterKey::random());
        let admits = |key: &ClusterKey, bearer: Option<&MetadataValue<Ascii>>| key.admits(bearer.map(MetadataValue::as_bytes));
        assert!(admits(&ours, ours.bearer()) && admits(&other, other.bearer()));
        assert!(!admits(&ours, other.bearer()) && !ours.admits(None));
        let bearer = ours.bearer().expect("the process has a cluster key").to_str().expect("the bearer is ASCII").to_owned();
        for wrong in ["", "Bearer", &bearer[..bearer.len() - 1], &format!("{bearer}0"), &bearer.to_uppercase()] {
            assert!(!ours.admits(Some(wrong.as_bytes())), "{wrong}");
        }
        let none = ClusterKey::default();
        assert!(none.admits(None) && admits(&none, other.bearer()) && none.bearer().is_none());
    }

    #[test]
    fn signature_is_valid_only_for_its_key_purpose_and_parts() {
        let (ours, other, none) = (one(), ClusterKey::random(), ClusterKey::default());
        let signature = ours.sign(Purpose::Events, &[b"cluster", b"instance"]);
        assert!(ours.verifies(Purpose::Events, &[b"cluster", b"instance"], &signature));
        assert!(!ours.verifies(Purpose::Address, &[b"cluster", b"instance"], &signature));
        assert!(!ours.verifies(Purpose::Events, &[b"clusteri", b"nstance"], &signature));
        assert!(!ours.verifies(Purpose::Events, &[b"cluster", b"instance", b""], &signature));
        assert!(!ours.verifies(Purpose::Events, &[b"cluster", b"instance"], &signature[..31]));
        assert!(!ours.verifies(Purpose::Events, &[b"cluster", b"instance"], b""));
        assert!(!other.verifies(Purpose::Events, &[b"cluster", b"instance"], &signature));
        assert!(none.verifies(Purpose::Events, &[b"anything"], b"") && none.sign(Purpose::Events, &[b"anything"]).is_empty());
    }

    #[test]
    fn key_is_never_printed_and_every_use_has_its_own_subkey() {
        let keys = one();
        assert_eq!(format!("{keys:?} {:?}", ClusterKey::default()), "ClusterKey(…) ClusterKey(none)");
        assert!(!format!("{:?}", keys.bearer()).contains("Bearer"));
        let purposes = [Purpose::Events, Purpose::Address, Purpose::Registration];
        let signatures: BTreeSet<_> = purposes.into_iter().map(|purpose| keys.sign(purpose, &[b"x"])).collect();
        assert_eq!(signatures.len(), 3);
        assert_ne!(ClusterKey::random().fingerprint(), ClusterKey::random().fingerprint());
    }
}
