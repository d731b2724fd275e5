//! Checks that the chunks of a step are valid.

use crate::{Chunk, EngineInfo};

/// The error of an invalid chunk, which is a bug of the caller. The engine does not compute a step with such a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum ChunkError {
    /// A token id is not in the vocabulary.
    #[error("a chunk has a token id beyond the vocabulary of {vocab_size} tokens")]
    BeyondVocabulary { vocab_size: usize },
    /// A chunk is empty, or ends beyond the model's context.
    #[error("a chunk of {tokens} tokens from position {start} is empty or ends beyond the context of {context_length} tokens")]
    BeyondContext { start: u32, tokens: usize, context_length: u32 },
    /// A chunk has no block for one of its tokens, or names a block that is not in the KV memory.
    #[error("a chunk lacks a block for its tokens, or names one beyond the {capacity_blocks} blocks of the KV memory")]
    NoBlock { capacity_blocks: u32 },
}

impl EngineInfo {
    /// Checks that the engine can compute the chunk.
    ///
    /// # Errors
    /// Fails if the chunk is empty, lacks blocks, or exceeds the model or the KV memory.
    pub fn check_chunk(&self, chunk: &Chunk<'_>) -> Result<(), ChunkError> {
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
