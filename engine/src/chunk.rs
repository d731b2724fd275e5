//! Validation of chunks.

use crate::{Chunk, EngineInfo};

/// An invalid chunk: a bug of the caller. The step computes nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// A token id is not in the vocabulary.
    #[error("a token lies beyond the vocabulary of {vocab_size}")]
    BeyondVocabulary {
        /// The number of token ids in the vocabulary.
        vocab_size: usize,
    },
    /// A chunk is empty or ends beyond the context.
    #[error("a chunk of {tokens} tokens from position {start} is empty or ends beyond the context of {context_length}")]
    BeyondContext {
        /// The position of its first token.
        start: u32,
        /// The number of its tokens.
        tokens: usize,
        /// The model's context length, in tokens.
        context_length: u32,
    },
    /// A chunk has no block for one of its tokens, or one that is not in the KV memory.
    #[error("a chunk lacks blocks, or has one beyond the capacity of {capacity_blocks}")]
    NoBlock {
        /// The number of blocks in the KV memory.
        capacity_blocks: u32,
    },
}

impl EngineInfo {
    /// Checks that a chunk's tokens, positions and blocks exist on the device.
    ///
    /// # Errors
    ///
    /// [`ChunkError`] names what is out of range.
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
