//! The `cache_salt` of a request to an engine. It separates namespaces in the engine's cache, and identifies the namespace of the engine's blocks.
//!
//! An engine hashes the salt into a prompt's first block and repeats it in the event that reports the block. The salt is 80 hexadecimal digits: first
//! the namespace's root hash, from which the sequence hashes are computed, then the namespace's SHA-256, so that two namespaces with the same root
//! hash share no blocks either. The namespace itself may be too long: vLLM accepts at most 128 characters.

use crate::{HashKey, Namespace, SequenceHash};
use ring::digest::{SHA256, digest};

/// The number of hexadecimal digits of a root hash.
const ROOT_DIGITS: usize = 16;
/// The number of hexadecimal digits of a salt.
const DIGITS: usize = ROOT_DIGITS + 64;

/// Returns the cache salt of requests in this namespace.
pub fn cache_salt(key: &HashKey, namespace: &Namespace) -> String {
    let root = namespace.root(key).0.to_be_bytes();
    let namespace = digest(&SHA256, namespace.as_bytes());
    root.iter().chain(namespace.as_ref()).map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the root hash in a salt; `None` if the text does not have the form of a Tandem salt.
pub fn root_hash(salt: &str) -> Option<SequenceHash> {
    let is_salt = salt.len() == DIGITS && salt.bytes().all(|digit| matches!(digit, b'0'..=b'9' | b'a'..=b'f'));
    let root = salt.get(..ROOT_DIGITS).filter(|_| is_salt)?;
    u64::from_str_radix(root, 16).ok().map(SequenceHash)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn salt_encodes_the_root_hash_and_differs_between_namespaces() {
        let key = HashKey::new([7; 16]);
        let namespaces = ["", "tenant-a", "tenant-b", &"x".repeat(4096)].map(|salt| Namespace::new("model", "main", "", salt));
        let salts = namespaces.each_ref().map(|namespace| cache_salt(&key, namespace));
        for (namespace, salt) in namespaces.iter().zip(&salts) {
            assert_eq!(root_hash(salt), Some(namespace.root(&key)));
            assert_eq!(salt.len(), DIGITS);
        }
        assert_eq!(salts.iter().collect::<std::collections::BTreeSet<_>>().len(), salts.len());
    }

    #[test]
    fn text_that_is_not_a_salt_has_no_root_hash() {
        let salt = cache_salt(&HashKey::NONE, &Namespace::new("model", "", "", ""));
        let wrong = [
            String::new(),
            "tenant-a".to_owned(),
            salt[1..].to_owned(),
            format!("{salt}0"),
            salt.to_uppercase().replace(|digit: char| digit.is_ascii_digit(), "A"),
            format!("+{}", &salt[1..]),
            "ä".repeat(DIGITS / 2),
        ];
        for text in wrong {
            assert_eq!(root_hash(&text), None, "{text}");
        }
    }
}
