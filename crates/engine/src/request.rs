//! The requests to an engine, and the reasons for which an engine may refuse them.

use crate::{EngineInfo, Sampling};
use bytes::Bytes;
use std::{borrow::Cow, sync::Arc};
use tandem_kv::{ImageStart, Namespace, Priority, TokenId};

/// A request to compute the KV of a prompt's tokens except the last, and to keep it until the job is dropped.
#[derive(Clone, Debug)]
pub struct Prefill {
    /// The request's id. The first load report that includes the request's work contains the id, so that the router does not count the work
    /// twice.
    pub request_id: String,
    /// The account of the request. Active accounts get equal shares of the engine; the empty name counts as one account.
    pub account: String,
    /// The order in which the engine serves the request.
    pub priority: Priority,
    /// The isolation domain of the prefix cache: only KV of the same namespace is reused.
    pub namespace: Namespace,
    /// The token ids of the prompt; there is at least one.
    pub prompt: Vec<TokenId>,
    /// The parameters with which an external engine samples the first token of the answer, if it sends the KV to another engine in a room.
    pub first_token: Option<Box<Sampling>>,
}

/// A request to generate continuations of a prompt.
#[derive(Clone, Debug)]
pub struct Generate {
    /// The request's id. The first load report that includes the request's work contains the id, so that the router does not count the work
    /// twice.
    pub request_id: String,
    /// The account of the request. Active accounts get equal shares of the engine; the empty name counts as one account.
    pub account: String,
    /// The order in which the engine serves the request.
    pub priority: Priority,
    /// The isolation domain of the prefix cache: only KV of the same namespace is reused.
    pub namespace: Namespace,
    /// The token ids of the prompt; there is at least one.
    pub prompt: Vec<TokenId>,
    /// The sampling parameters. Sample `i` has the same tokens as a separate request with `seed + i` as its seed.
    pub sampling: Sampling,
    /// The number of continuations, which are called samples.
    pub samples: u32,
    /// The source of the prompt's KV.
    pub kv: KvSource,
    /// If set, logprobs of the prompt's own tokens are returned, each with this many alternatives, and the prompt is computed without
    /// blocks from the cache.
    pub prompt_logprobs: Option<u32>,
    /// The samples that resume where another worker stopped; no other samples run. If the list is empty, all samples start from the prompt.
    pub generated: Vec<Generated>,
    /// The images of the prompt, in order. Only external engines read images.
    pub images: Arc<[PromptImage]>,
}

/// An image of a prompt, which has a placeholder token for each vector that the engine computes from the image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptImage {
    /// The position of the first placeholder in the prompt, and the identity of the image.
    pub start: ImageStart,
    /// The number of placeholders; at least 1.
    pub len: usize,
    /// The media type of `data`, such as `image/png`.
    pub media_type: String,
    /// The bytes of the file.
    pub data: Bytes,
}

/// The tokens that a resumed sample has already generated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Generated {
    /// The number of the sample.
    pub sample: u32,
    /// The generated tokens in order; the first one follows the prompt.
    pub tokens: Vec<TokenId>,
}

/// Maximum length of an account name in bytes. Names are kept in memory while requests wait; frontends send at most 64 bytes.
const ACCOUNT_BYTES_MAX: usize = 256;

impl Prefill {
    /// Checks whether the request can run on this engine at all.
    ///
    /// # Errors
    /// Returns a [`Refusal`] that names the limit which the request exceeds.
    pub fn check(&self, info: &EngineInfo) -> Result<(), Refusal> {
        info.check(&self.account, self.prompt.len(), self.prompt.len(), 1)
    }
}

impl Generate {
    /// Checks whether the request can run on this engine at all.
    ///
    /// # Errors
    /// Returns a [`Refusal`] that names the limit which the request exceeds.
    pub fn check(&self, info: &EngineInfo) -> Result<(), Refusal> {
        let len_max = self.len_max(info);
        info.check(&self.account, self.prompt.len(), len_max, self.samples)?;
        let needed = self.generated.iter().map(|generated| self.prompt.len() + generated.tokens.len()).max();
        let beyond = needed.filter(|needed| *needed > len_max).map(clamped);
        beyond.map_or(Ok(()), |needed| Err(Refusal::BeyondContext { needed, context_length: clamped(len_max) }))
    }

    /// Returns the tokens that all samples share: the prompt, and the common beginning of the tokens that resumed samples have generated.
    /// The KV of these tokens, except the last, is computed once, on this worker or another.
    pub fn shared(&self) -> Vec<TokenId> {
        let mut shared = self.prompt.clone();
        if let Some((first, others)) = self.generated.split_first() {
            let common_len = |len: usize, other: &Generated| {
                first.tokens[..len].iter().zip(&other.tokens).take_while(|(token, other)| token == other).count()
            };
            shared.extend_from_slice(&first.tokens[..others.iter().fold(first.tokens.len(), common_len)]);
        }
        shared
    }

    /// Returns the maximum length of a sample in tokens, including the prompt. Without `max_tokens`, only the context and the size of the cache limit
    /// it.
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
    fn check(&self, account: &str, prompt_len: usize, len_max: usize, samples: u32) -> Result<(), Refusal> {
        if account.len() > ACCOUNT_BYTES_MAX {
            return Err(Refusal::LongAccount { len: account.len() });
        }
        if prompt_len == 0 || samples == 0 {
            return Err(Refusal::Empty);
        }
        let Self { context_length, capacity_blocks, .. } = *self;
        if len_max > context_length as usize {
            return Err(Refusal::BeyondContext { needed: clamped(len_max), context_length });
        }
        // The blocks of all samples at their full lengths are counted. The prompt's full blocks are shared, and the KV of a sample's last token is
        // never stored.
        let size = self.block_size as usize;
        let shared = (prompt_len - 1) / size;
        let each = (len_max - 1).max(prompt_len).div_ceil(size) - shared;
        let needed_blocks = shared + each * samples as usize;
        if needed_blocks > capacity_blocks as usize {
            return Err(Refusal::BeyondCapacity { needed_blocks: clamped(needed_blocks), capacity_blocks });
        }
        Ok(())
    }
}

fn clamped(number: usize) -> u32 {
    number.try_into().unwrap_or(u32::MAX)
}

/// The source of the KV of a prompt's tokens except the last.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvSource {
    /// The KV is computed on this worker.
    Local,
    /// Another worker writes the KV block by block under a ticket ([`crate::Event::Reserved`]).
    Remote,
    /// The external engine pulls the KV from another external engine, with a [`crate::KvHandle`] that the worker passes to the job after
    /// `Submitted`.
    Handle,
}

/// The reason why a job is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the fields")]
pub enum Refusal {
    /// The queue is full; the request may be retried later or on another worker.
    #[error("the worker's queue is full")]
    Full,
    /// The request is longer than the model's context.
    #[error(
        "the prompt and its new tokens need {needed} positions, but the model's context has {context_length}; shorten the prompt or lower max_tokens"
    )]
    BeyondContext { needed: u32, context_length: u32 },
    /// The request needs more blocks than the whole KV cache has.
    #[error(
        "the request needs {needed_blocks} KV blocks, but the worker has only {capacity_blocks}; shorten the prompt, or lower max_tokens or n"
    )]
    BeyondCapacity { needed_blocks: u32, capacity_blocks: u32 },
    /// The prompt has no tokens, or the request asks for no samples.
    #[error("the prompt is empty")]
    Empty,
    /// The account name is too long.
    #[error("the account name has {len} bytes, more than the limit of {ACCOUNT_BYTES_MAX}")]
    LongAccount { len: usize },
    /// The request needs a feature that the engine does not support.
    #[error("{0}")]
    Unsupported(Cow<'static, str>),
    /// The engine does not serve this model, a LoRA, any more.
    #[error("the engine does not serve the LoRA {0:?} any more")]
    Unloaded(String),
    /// The engine cannot be used, although other engines may serve the request: it cannot be reached, or does not speak the protocol. The request has
    /// not run.
    #[error("the engine cannot be used: {0}")]
    Unusable(Cow<'static, str>),
    /// The engine's thread has ended: the device is lost, or the process shuts down.
    #[error("the engine has shut down")]
    Gone,
}
