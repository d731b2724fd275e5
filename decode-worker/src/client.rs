//! Sends the messages of an attempt to its client. The attempt's span and ledger entry record the main ones: when the attempt was scheduled
//! (span only), its first token, and its failure.

use std::sync::Once;
use tandem_process::trace::Span;
use tandem_proto::v1::{GenerateReply, PrefillChunk, PrefillTimeline, generate_reply::Message};
use tandem_worker::{Disconnected, LedgerEntry, ReplySender};

pub(crate) struct ClientStream {
    replies: ReplySender<GenerateReply>,
    entry: LedgerEntry,
    pub(crate) span: Span,
    scheduled: Once,
    began: Once,
}

impl ClientStream {
    pub(crate) fn new(replies: ReplySender<GenerateReply>, entry: LedgerEntry, span: Span) -> Self {
        Self { replies, entry, span, scheduled: Once::new(), began: Once::new() }
    }

    pub(crate) async fn send(&self, message: Message) -> Result<(), Disconnected> {
        let mut outcome: Option<fn(&LedgerEntry)> = None;
        match &message {
            // `Scheduled` is sent again if the cached tokens are reported later. Its event is recorded only once.
            Message::Scheduled(_) => self.scheduled.call_once(|| self.span.event("scheduled", &[])),
            Message::DecodeStarted(_) => self.span.event("started", &[]),
            Message::Waiting(_) | Message::PrefillTimeline(_) => {}
            Message::PromptLogprobs(_) | Message::Tokens(_) | Message::Finished(_) => {
                self.began.call_once(|| self.span.event("first token", &[]));
                outcome = Some(LedgerEntry::began);
            }
            Message::Failure(failure) => {
                self.span.fail(failure.reason().label());
                outcome = Some(LedgerEntry::failed);
            }
        }
        self.replies.send(GenerateReply { message: Some(message) }).await?;
        if let Some(record) = outcome {
            record(&self.entry);
        }
        Ok(())
    }

    pub(crate) async fn prefilled(&self, chunks: Vec<PrefillChunk>) -> Result<(), Disconnected> {
        if chunks.is_empty() {
            return Ok(());
        }
        self.span.set("tandem.prefill_chunks", chunks.len() as u64);
        self.send(Message::PrefillTimeline(PrefillTimeline { chunks })).await
    }
}
