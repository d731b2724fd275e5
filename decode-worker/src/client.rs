//! The client of one attempt.

use std::sync::Once;
use tandem_engine::CachedTokens;
use tandem_node::trace::Span;
use tandem_proto::v1::{GenerateReply, PrefillChunk, PrefillTimeline, generate_reply::Message};
use tandem_worker::{ClientGone, LedgerEntry, ReplySender, scheduled};

/// The client of one attempt.
pub(crate) struct Client {
    replies: ReplySender<GenerateReply>,
    /// The messages that were sent decide the attempt's outcome.
    entry: LedgerEntry,
    /// The attempt's.
    pub(crate) span: Span,
    began: Once,
    withhold_cached_tokens: bool,
}

impl Client {
    pub(crate) fn new(replies: ReplySender<GenerateReply>, entry: LedgerEntry, span: Span, withhold_cached_tokens: bool) -> Self {
        Self { replies, entry, span, began: Once::new(), withhold_cached_tokens }
    }

    /// Sends a message; waits while the client is slow.
    pub(crate) async fn send(&self, message: Message) -> Result<(), ClientGone> {
        let outcome: Option<fn(&LedgerEntry)> = match &message {
            Message::PromptLogprobs(_) | Message::Tokens(_) | Message::Finished(_) => Some(LedgerEntry::began),
            Message::Failure(_) => Some(LedgerEntry::failed),
            Message::Scheduled(_) | Message::DecodeStarted(_) | Message::PrefillTimeline(_) => None,
        };
        match &message {
            Message::Scheduled(_) => self.span.event("scheduled", &[]),
            Message::DecodeStarted(_) => self.span.event("started", &[]),
            Message::PrefillTimeline(_) => {}
            Message::Failure(failure) => self.span.fail(failure.reason().label()),
            _ => self.began.call_once(|| self.span.event("first token", &[])),
        }
        self.replies.send(GenerateReply { message: Some(message) }).await?;
        if let Some(record) = outcome {
            record(&self.entry);
        }
        Ok(())
    }

    /// Reports the cached tokens of a prompt that this worker prefills.
    pub(crate) async fn send_scheduled(&self, cached: Option<CachedTokens>) -> Result<(), ClientGone> {
        self.send(Message::Scheduled(scheduled(cached.filter(|_| !self.withhold_cached_tokens)))).await
    }

    /// Sends the chunks of the prompt's prefill, if there are any.
    pub(crate) async fn prefilled(&self, chunks: Vec<PrefillChunk>) -> Result<(), ClientGone> {
        if chunks.is_empty() {
            return Ok(());
        }
        self.span.set("tandem.prefill_chunks", chunks.len() as u64);
        self.send(Message::PrefillTimeline(PrefillTimeline { chunks })).await
    }
}
