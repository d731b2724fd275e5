//! Which chunks a device can compute.

use crate::{Chunk, EngineInfo};

/// A chunk that no step should have: the caller is wrong, and nothing is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// A token's id lies beyond the vocabulary.
    #[error("a token lies beyond the vocabulary of {vocab_size}")]
    BeyondVocabulary {
        /// How many tokens there are.
        vocab_size: usize,
    },
    /// A chunk is empty or ends beyond the context.
    #[error("a chunk of {tokens} tokens from position {start} is empty or ends beyond the context of {context_length}")]
    BeyondContext {
        /// Its first position.
        start: u32,
        /// Its length.
        tokens: usize,
        /// The model's limit.
        context_length: u32,
    },
    /// A chunk has no block for one of its tokens, or one that is not in the KV memory.
    #[error("a chunk lacks blocks, or has one beyond the {capacity_blocks} there are")]
    NoBlock {
        /// As set.
        capacity_blocks: u32,
    },
}

impl EngineInfo {
    /// Whether a chunk's tokens and blocks are such as the device has.
    pub(crate) fn check_chunk(&self, chunk: &Chunk<'_>) -> Result<(), ChunkError> {
        let &Self { vocab_size, context_length, block_size, capacity_blocks, .. } = self;
        let tokens = chunk.tokens.len();
        let end = chunk.start as usize + tokens;
        if tokens == 0 || end > context_length as usize {
            return Err(ChunkError::BeyondContext { start: chunk.start, tokens, context_length });
        }
        if chunk.tokens.iter().any(|token| *token as usize >= vocab_size) {
            return Err(ChunkError::BeyondVocabulary { vocab_size });
        }
        match chunk.blocks.get(..end.div_ceil(block_size as usize)) {
            Some(blocks) if blocks.iter().all(|block| block.0 < capacity_blocks) => Ok(()),
            _ => Err(ChunkError::NoBlock { capacity_blocks }),
        }
    }
}
