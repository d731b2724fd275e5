//! The requests of a simulation.

use std::{sync::Arc, time::Duration};
use tandem_kv::{HashKey, Namespace, SequenceHash, TokenId, sequence_hashes};
use tandem_load::trace::TraceBlocks;

/// The number of tokens that represent a block in the simulated caches: the two halves of the block's id.
pub(crate) const TOKENS_OF_ID: usize = 2;

/// A request to simulate.
#[derive(Clone, Debug, PartialEq)]
pub struct SimulatedRequest {
    /// The time at which the request arrives, counted from the beginning of the simulation.
    pub at: Duration,
    /// The number of tokens in the prompt, at least 1.
    pub prompt_tokens: u32,
    /// The ids of the prompt's full blocks. Two prompts share the blocks before the first id that differs.
    pub blocks: Arc<[u64]>,
    /// The number of tokens in the answer, at least 1.
    pub answer_tokens: u64,
    /// The maximum length of the answer that the request sets, which the router sees; 0 if the request sets none.
    pub max_tokens: u32,
}

/// A request that has arrived.
#[derive(Debug)]
pub(crate) struct Arrived {
    /// The request's number in the order of arrival.
    pub(crate) number: u64,
    /// The time at which the request was due, in microseconds.
    pub(crate) at: u64,
    pub(crate) prompt_tokens: u64,
    pub(crate) answer_tokens: u64,
    pub(crate) max_tokens: u32,
    /// The prompt's full blocks. [`TOKENS_OF_ID`] tokens represent each of them.
    pub(crate) tokens: Box<[TokenId]>,
    pub(crate) hashes: Arc<[SequenceHash]>,
}

impl SimulatedRequest {
    /// Makes a request from a row of a trace. Each block of the trace has `block_tokens` tokens. The request does not limit the length of its
    /// answer.
    pub fn of(at: Duration, mut row: TraceBlocks, block_tokens: u64) -> Self {
        row.hash_ids.truncate((row.input_length / block_tokens) as usize);
        Self {
            at,
            prompt_tokens: row.input_length.try_into().unwrap_or(u32::MAX),
            blocks: row.hash_ids.into(),
            answer_tokens: row.output_length,
            max_tokens: 0,
        }
    }
}

pub(crate) fn namespace() -> Namespace {
    Namespace::new("m", "", "", "")
}

impl Arrived {
    pub(crate) fn new(number: u64, at: u64, request: &SimulatedRequest) -> Self {
        let tokens: Box<[TokenId]> = request.blocks.iter().flat_map(|id| [*id as TokenId, (id >> 32) as TokenId]).collect();
        let hashes = sequence_hashes(&HashKey::NONE, &namespace(), TOKENS_OF_ID, &tokens).into();
        let (prompt_tokens, answer_tokens) = (request.prompt_tokens.into(), request.answer_tokens);
        Self { number, at, prompt_tokens, answer_tokens, max_tokens: request.max_tokens, tokens, hashes }
    }

    /// Returns how many leading blocks the prompts of the two requests have in common.
    pub(crate) fn common(&self, other: &Self) -> usize {
        self.hashes.iter().zip(&*other.hashes).take_while(|(one, other)| one == other).count()
    }

    /// Returns the maximum number of leading blocks that may be found in a cache. The last token of a prompt is always computed.
    pub(crate) fn reusable_blocks(&self, block_tokens: u64) -> u32 {
        ((self.prompt_tokens - 1) / block_tokens).min(self.hashes.len() as u64) as u32
    }
}
