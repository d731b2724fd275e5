//! A prompt that is ready to be placed.

use tandem_kv::{Namespace, RequestId, SequenceHash, TokenId};
use tandem_node::trace::Span;
use tandem_proto::v1::{ExistingPlacement, Identity, RoutePrompt, Sampling};

/// One prompt, ready to be placed.
pub(crate) struct Prompt {
    /// Made by this server; a client cannot choose it.
    pub(crate) request_id: RequestId,
    /// The W3C trace context that routers and workers continue; empty if there is none.
    pub(crate) traceparent: String,
    /// The span of the whole request.
    pub(crate) span: Span,
    /// The account that the request is billed to; empty if none is known.
    pub(crate) account: String,
    pub(crate) model: String,
    pub(crate) tokens: Vec<TokenId>,
    /// The hashes of the full blocks that a worker may reuse.
    pub(crate) sequence_hashes: Vec<SequenceHash>,
    pub(crate) namespace: Namespace,
    pub(crate) sampling: Sampling,
    /// Continuations of the prompt.
    pub(crate) samples: u32,
    /// The maximum of new tokens, for the router's estimate.
    pub(crate) max_tokens: u32,
    /// Alternatives for each token of the prompt; `None` if its logprobs are not asked for.
    pub(crate) prompt_logprobs: Option<u32>,
}

impl Prompt {
    /// The hashes as they go over the wire.
    pub(super) fn wire_hashes(&self) -> Vec<u64> {
        self.sequence_hashes.iter().map(|hash| hash.0).collect()
    }

    /// The message that asks a router for a placement, or for a booking of the `existing` one.
    pub(super) fn route_prompt(&self, identity: &Identity, existing: Option<ExistingPlacement>) -> RoutePrompt {
        RoutePrompt {
            request_id: self.request_id.to_string(),
            traceparent: self.traceparent.clone(),
            model: self.model.clone(),
            sequence_hashes: self.wire_hashes(),
            prompt_tokens: self.tokens.len() as u32,
            max_tokens: self.max_tokens,
            samples: self.samples,
            prompt_logits: self.prompt_logprobs.is_some(),
            identity: Some(identity.clone()),
            existing,
        }
    }
}
