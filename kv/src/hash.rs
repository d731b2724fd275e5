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
