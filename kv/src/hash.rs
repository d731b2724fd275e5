//! The identity of a block: a hash over its tokens and everything before it.

use crate::TokenId;
use std::sync::Arc;
use xxhash_rust::xxh3::xxh3_64;

/// Identifies a full block *and all before it*. A hint: owners of KV compare tokens on every hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceHash(pub u64);

/// Everything but the tokens that decides whose KV may be shared. Prompts of different namespaces never share a block.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Namespace(Arc<[u8]>);

impl Namespace {
    /// The parts are written with their lengths, so no two different lists of parts give equal bytes.
    pub fn new(model: &str, revision: &str, lora: &str, cache_salt: &str) -> Self {
        let mut bytes = Vec::new();
        for part in [model, revision, lora, cache_salt] {
            bytes.extend((part.len() as u64).to_le_bytes());
            bytes.extend(part.as_bytes());
        }
        Self(bytes.into())
    }

    /// The same for one account alone. The account is a part after all others, which every namespace without one lacks: so that of an
    /// account without a name differs from it, too.
    pub fn of_account(&self, account: &str) -> Self {
        Self([&*self.0, &(account.len() as u64).to_le_bytes(), account.as_bytes()].concat().into())
    }

    /// As it came over the wire.
    pub fn from_bytes(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }

    /// As it goes over the wire.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }

    /// The hash that stands for the parent of a prompt's first block.
    pub(crate) fn root(&self) -> SequenceHash {
        SequenceHash(xxh3_64(&self.0))
    }
}

impl SequenceHash {
    /// The hash of a block of `tokens` that follows the block with this hash.
    pub(crate) fn child(self, tokens: &[TokenId]) -> Self {
        let mut bytes = Vec::with_capacity(8 + tokens.len() * 4);
        bytes.extend(self.0.to_le_bytes());
        for token in tokens {
            bytes.extend(token.to_le_bytes());
        }
        Self(xxh3_64(&bytes))
    }
}

/// The hashes of all full blocks of `tokens`.
pub fn sequence_hashes(namespace: &Namespace, block_size: usize, tokens: &[TokenId]) -> Vec<SequenceHash> {
    let mut last = namespace.root();
    tokens
        .chunks_exact(block_size)
        .map(|block| {
            last = last.child(block);
            last
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROMPT: [TokenId; 13] = [1, 2, 3, 4, 5, 6, 7, 8, 151_643, u32::MAX, 0, 9, 10];

    /// Computed with Python's `xxhash` from the layout alone: parts and tokens little-endian, lengths as 64 bits. If this
    /// fails, routers and workers of two versions no longer mean the same block.
    #[test]
    fn the_identity_of_a_block_does_not_drift() {
        let namespace = Namespace::new("SmolLM2-135M-Instruct", "main", "", "tenant-a");
        let expected = [0x95a6_de66_4b0e_fa67, 0x9de4_945e_254d_ba47, 0x06f0_5ef8_dc0c_ef49].map(SequenceHash);
        assert_eq!(sequence_hashes(&namespace, 4, &PROMPT), expected);
    }

    #[test]
    fn only_full_blocks_have_a_hash() {
        let namespace = Namespace::new("model", "", "", "");
        for (tokens, blocks) in [(0, 0), (3, 0), (4, 1), (7, 1), (8, 2), (13, 3)] {
            assert_eq!(sequence_hashes(&namespace, 4, &PROMPT[..tokens]).len(), blocks, "{tokens} tokens");
        }
    }

    #[test]
    fn every_part_of_a_namespace_separates() {
        let all = [
            Namespace::new("model", "", "", ""),
            Namespace::new("other", "", "", ""),
            Namespace::new("model", "main", "", ""),
            Namespace::new("model", "", "main", ""),
            Namespace::new("model", "", "", "main"),
            Namespace::new("model", "", "", "salt"),
        ];
        let mut firsts: Vec<_> = all.iter().map(|namespace| sequence_hashes(namespace, 4, &PROMPT)[0]).collect();
        firsts.sort();
        firsts.dedup();
        assert_eq!(firsts.len(), all.len());
    }

    #[test]
    fn a_part_cannot_be_moved_into_the_next() {
        let glued = [("ab", "c"), ("a", "bc"), ("abc", ""), ("", "abc")];
        let mut bytes: Vec<_> = glued.iter().map(|(model, revision)| Namespace::new(model, revision, "", "")).collect();
        // A part that imitates a length.
        bytes.push(Namespace::new("a\u{1}\0\0\0\0\0\0\0b", "", "", ""));
        bytes.push(Namespace::new("a", "b", "", ""));
        bytes.sort();
        bytes.dedup();
        assert_eq!(bytes.len(), glued.len() + 2);
    }

    #[test]
    fn accounts_share_with_no_other_account_and_not_with_prompts_of_none() {
        let salted = |salt| Namespace::new("model", "main", "", salt);
        let plain = salted("");
        let imitated = salted("salt\u{1}\0\0\0\0\0\0\0a");
        let all = [
            plain.clone(),
            plain.of_account(""),
            plain.of_account("a"),
            plain.of_account("b"),
            salted("a"),
            salted("a").of_account("b"),
            salted("b").of_account("a"),
            salted("salt").of_account("a"),
            imitated,
            plain.of_account("a").of_account("b"),
        ];
        let distinct: std::collections::BTreeSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), all.len());
        assert_eq!(plain.of_account("a"), salted("").of_account("a"));
    }

    #[test]
    fn a_namespace_survives_the_wire() {
        let namespace = Namespace::new("model", "main", "", "salt");
        assert_eq!(Namespace::from_bytes(namespace.as_bytes()), namespace);
    }

    #[test]
    fn a_hash_stands_for_everything_before_it() {
        let namespace = Namespace::new("model", "", "", "");
        let tail = [5, 6, 7, 8];
        let after = |head: [TokenId; 4]| sequence_hashes(&namespace, 4, &[head, tail].concat())[1];
        assert_ne!(after([1, 2, 3, 4]), after([1, 2, 4, 3]));
        assert_ne!(after([1, 2, 3, 4]), sequence_hashes(&namespace, 4, &tail)[0]);
        assert_eq!(after([1, 2, 3, 4]), after([1, 2, 3, 4]));
    }
}
