//! A prompt of a request, with all data about it that routers and workers need.

use super::placement::Placement;
use std::{sync::Arc, time::Duration};
use tandem_kv::{Namespace, Priority, RequestId, SequenceHash, TokenId};
use tandem_process::trace::Span;
use tandem_proto::v1::{EqualPrompt, ExistingPlacement, Identity, Image, RoutePrompt, Sampling, WantedEndpoints};
use tokio::{
    sync::{OwnedSemaphorePermit, watch},
    time::Instant,
};

pub(crate) struct Prompt {
    /// The prompt's id, which this frontend generates.
    pub(crate) request_id: RequestId,
    /// The id that the client gave to the request, for the log.
    pub(crate) client_request_id: Option<Arc<str>>,
    /// The W3C trace context that routers and workers continue; empty if there is none.
    pub(crate) traceparent: String,
    pub(crate) span: Span,
    /// The account for which the request is counted; empty if none is known.
    pub(crate) account: String,
    /// The model, with all that routers and workers must agree on.
    pub(crate) identity: Arc<Identity>,
    pub(crate) tokens: Vec<TokenId>,
    /// The images among the tokens, in order.
    pub(crate) images: Vec<Image>,
    /// The share of the budget for bodies that the images use.
    pub(crate) _held: Vec<OwnedSemaphorePermit>,
    /// The sequence hashes of the prompt's full blocks that a worker may reuse.
    pub(crate) sequence_hashes: Vec<SequenceHash>,
    /// The number of leading blocks that a recent prompt in another cache namespace has as well.
    pub(crate) other_namespace_blocks: u32,
    pub(crate) namespace: Namespace,
    pub(crate) sampling: Sampling,
    pub(crate) samples: u32,
    /// The minimum number of tokens of each sample.
    pub(crate) min_tokens: u32,
    /// The maximum number of new tokens. The router estimates the load of the prompt from it.
    pub(crate) max_tokens: u32,
    /// The number of alternative tokens whose logprobs are returned for each token of the prompt; `None` if the prompt's logprobs are not
    /// requested.
    pub(crate) prompt_logprobs: Option<u32>,
    /// The longest time for which the prompt may wait in the queue; `None`: it may wait without a limit.
    pub(crate) max_wait: Option<Duration>,
    /// The time at which the last prefill of the request's prompts is estimated to begin. Set whenever a worker reports that a prompt of
    /// the request waits in its queue.
    pub(crate) queued: watch::Sender<Option<Instant>>,
    pub(crate) priority: Priority,
    /// The prompt's role among equal prompts; `None`: no other prompt of the request equals it.
    pub(crate) equal: Option<Equal>,
    /// The engines among which the router chooses, each observed by a worker; `None`: the prompt runs on workers that serve requests.
    pub(crate) endpoints: Option<WantedEndpoints>,
}

/// The role of a prompt that has equal prompts in its request. They are placed on the same workers, which then compute the prompt once.
pub(crate) enum Equal {
    /// The first of the equal prompts, which announces its placement to the others.
    First(watch::Sender<Option<EqualPrompt>>),
    Later(watch::Receiver<Option<EqualPrompt>>),
}

impl Prompt {
    /// Finds the first prompt in `earlier` that equals this one, so that this prompt is placed on the same workers. Does nothing if there
    /// is none, or if the prompt's KV cannot be reused.
    pub(crate) fn join_equal<'a>(&mut self, mut earlier: impl Iterator<Item = &'a mut Self>) {
        if self.sequence_hashes.is_empty() || self.prompt_logprobs.is_some() {
            return;
        }
        let Some(first) = earlier.find(|prompt| prompt.tokens == self.tokens) else { return };
        if let Equal::First(placed) = first.equal.get_or_insert_with(|| Equal::First(watch::Sender::new(None))) {
            self.equal = Some(Equal::Later(placed.subscribe()));
        }
    }

    /// Returns the workers of the first equal prompt of the request once it is placed; `None` if there is none, or if it was not placed.
    pub(super) async fn equal_placement(&self) -> Option<EqualPrompt> {
        let Some(Equal::Later(placed)) = &self.equal else { return None };
        placed.clone().wait_for(Option::is_some).await.ok()?.clone()
    }

    /// Announces this prompt's placement to the equal prompts of the request.
    pub(super) fn placed_on(&self, placement: &Placement) {
        if let Some(Equal::First(placed)) = &self.equal {
            let decode_instance_id = placement.decode.worker.instance_id.clone();
            let prefill_instance_id = placement.prefill.as_ref().map(|prefill| prefill.worker.instance_id.clone());
            placed.send_replace(Some(EqualPrompt { decode_instance_id, prefill_instance_id }));
        }
    }

    pub(super) fn wire_hashes(&self) -> Vec<u64> {
        self.sequence_hashes.iter().map(|hash| hash.0).collect()
    }

    /// Returns the message that requests a placement, on the workers of an equal prompt if there is one. With `existing`, the message
    /// requests that this placement be booked.
    pub(super) fn route_prompt(&self, existing: Option<ExistingPlacement>, equal_prompt: Option<EqualPrompt>) -> RoutePrompt {
        RoutePrompt {
            request_id: self.request_id.to_string(),
            traceparent: self.traceparent.clone(),
            model: self.identity.model.clone(),
            sequence_hashes: self.wire_hashes(),
            prompt_tokens: self.tokens.len() as u32,
            min_tokens: self.min_tokens,
            max_tokens: self.max_tokens,
            samples: self.samples,
            prompt_logits: self.prompt_logprobs.is_some(),
            has_images: !self.images.is_empty(),
            identity: Some((*self.identity).clone()),
            existing,
            max_wait_ms: self.max_wait.map_or(0, |max_wait| u32::try_from(max_wait.as_millis()).unwrap_or(u32::MAX).max(1)),
            account: self.account.clone(),
            priority: Some(self.priority.into()),
            equal_prompt,
            other_namespace_blocks: self.other_namespace_blocks,
            endpoints: self.endpoints.clone(),
        }
    }
}
