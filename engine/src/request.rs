//! What a job asks of an engine, and why it may be refused.

use crate::{EngineInfo, Sampling};
use tandem_kv::{Namespace, TokenId};

/// Compute the KV of all tokens of a prompt but the last, and hold it until the job is dropped.
#[derive(Clone, Debug)]
pub struct Prefill {
    /// Told to the router when the work shows in the load.
    pub request_id: String,
    /// The account that the request belongs to. Accounts with work get equal shares of the engine; the empty name is one account.
    pub account: String,
    /// Whose KV may be reused.
    pub namespace: Namespace,
    /// At least one token.
    pub prompt: Vec<TokenId>,
}

/// Continue a prompt.
#[derive(Clone, Debug)]
pub struct Generate {
    /// Told to the router when the work shows in the load.
    pub request_id: String,
    /// The account that the request belongs to. Accounts with work get equal shares of the engine; the empty name is one account.
    pub account: String,
    /// Whose KV may be reused.
    pub namespace: Namespace,
    /// At least one token.
    pub prompt: Vec<TokenId>,
    /// How tokens are chosen. Sample `i` draws as a request of its own with `seed + i` would.
    pub sampling: Sampling,
    /// How many continuations.
    pub samples: u32,
    /// Where the prompt's KV comes from.
    pub kv: KvSource,
    /// Logprobs of the prompt's own tokens, with this many alternatives; the prompt is then computed without cache reads.
    pub prompt_logprobs: Option<u32>,
    /// Samples that go on where another worker left them: only these run. Empty: all begin.
    pub generated: Vec<Generated>,
}

/// What a sample has generated before it came here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// Its number.
    pub sample: u32,
    /// In order; the first follows the prompt.
    pub tokens: Vec<TokenId>,
}

/// Names of accounts are kept while work of theirs waits, and come from the wire: longer ones are refused. Frontends send 64 at most.
const ACCOUNT_BYTES_MAX: usize = 256;

fn check_account(account: &str) -> Result<(), Refusal> {
    if account.len() > ACCOUNT_BYTES_MAX { Err(Refusal::LongAccount { len: account.len() }) } else { Ok(()) }
}

impl Prefill {
    /// Refuses what can never run on this engine, however idle it is.
    ///
    /// # Errors
    /// The cause.
    pub fn check(&self, info: &EngineInfo) -> Result<(), Refusal> {
        check_account(&self.account)?;
        info.check(self.prompt.len(), self.prompt.len(), 1)
    }
}

impl Generate {
    /// Refuses what can never run on this engine, however idle it is.
    ///
    /// # Errors
    /// The cause.
    pub fn check(&self, info: &EngineInfo) -> Result<(), Refusal> {
        check_account(&self.account)?;
        let len_max = self.len_max(info);
        info.check(self.prompt.len(), len_max, self.samples)?;
        match self.generated.iter().map(|generated| self.prompt.len() + generated.tokens.len()).max() {
            Some(needed) if needed > len_max => Err(Refusal::BeyondContext {
                needed: needed.try_into().unwrap_or(u32::MAX),
                context_length: len_max.try_into().unwrap_or(u32::MAX),
            }),
            _ => Ok(()),
        }
    }

    /// What all samples that run begin with: the prompt, and what resumed ones have generated alike. Its KV is computed once,
    /// here or elsewhere, but for its last token.
    pub fn shared(&self) -> Vec<TokenId> {
        let mut shared = self.prompt.clone();
        if let Some((first, others)) = self.generated.split_first() {
            let alike = |len: usize, other: &Generated| {
                first.tokens[..len].iter().zip(&other.tokens).take_while(|(token, other)| token == other).count()
            };
            shared.extend_from_slice(&first.tokens[..others.iter().fold(first.tokens.len(), alike)]);
        }
        shared
    }

    /// Tokens a sample may reach, the prompt's included. Without a limit: until the context or the cache is full.
    pub(crate) fn len_max(&self, info: &EngineInfo) -> usize {
        let prompt_len = self.prompt.len();
        if let Some(max_tokens) = self.sampling.max_tokens {
            return prompt_len.saturating_add(max_tokens as usize);
        }
        let size = info.block_size as usize;
        let shared = prompt_len.saturating_sub(1) / size;
        let each = (info.capacity_blocks as usize).saturating_sub(shared) / (self.samples as usize).max(1);
        ((shared + each) * size).min(info.context_length as usize).max(prompt_len + 1)
    }
}

impl EngineInfo {
    fn check(&self, prompt_len: usize, len_max: usize, samples: u32) -> Result<(), Refusal> {
        if prompt_len == 0 || samples == 0 {
            return Err(Refusal::Empty);
        }
        let Self { context_length, capacity_blocks, .. } = *self;
        if len_max > context_length as usize {
            return Err(Refusal::BeyondContext { needed: len_max.try_into().unwrap_or(u32::MAX), context_length });
        }
        // What all samples need at their ends, the prompt's full blocks shared. The last token's KV is never stored.
        let size = self.block_size as usize;
        let shared = (prompt_len - 1) / size;
        let each = (len_max - 1).max(prompt_len).div_ceil(size) - shared;
        let needed_blocks = shared + each * samples as usize;
        if needed_blocks > capacity_blocks as usize {
            let needed_blocks = needed_blocks.try_into().unwrap_or(u32::MAX);
            return Err(Refusal::BeyondCapacity { needed_blocks, capacity_blocks });
        }
        Ok(())
    }
}

/// Where the KV of a prompt (all tokens but the last) comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// Computed here.
    Local,
    /// Written block by block under a ticket ([`crate::Event::Reserved`]).
    Remote,
}

/// Why a job is not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The queue is full; try again later or elsewhere.
    #[error("the worker's queue is full")]
    Full,
    /// Longer than the model's context.
    #[error("prompt and new tokens need {needed} positions, the context has {context_length}")]
    BeyondContext {
        /// Prompt and `max_tokens`.
        needed: u32,
        /// The model's limit.
        context_length: u32,
    },
    /// Longer than the whole cache.
    #[error("the request needs {needed_blocks} KV blocks, the worker has {capacity_blocks}")]
    BeyondCapacity {
        /// Prompt and `max_tokens` of all samples.
        needed_blocks: u32,
        /// All blocks of the worker.
        capacity_blocks: u32,
    },
    /// Prompts have at least one token, requests at least one sample.
    #[error("the prompt is empty")]
    Empty,
    /// The name of the account is longer than any frontend sends.
    #[error("the account's name has {len} bytes, at most {ACCOUNT_BYTES_MAX} are allowed")]
    LongAccount {
        /// Of the name, in bytes.
        len: usize,
    },
    /// The engine has failed or is shut down.
    #[error("the engine is gone")]
    Gone,
}
