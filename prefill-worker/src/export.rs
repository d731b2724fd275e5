//! One attempt on an external engine: it computes the prompt, and the decode worker's engine pulls the KV with a handle.

use crate::{
    PrefillWorker,
    attempt::{next_message, send_scheduled, send_waiting, submit},
    failure::{PrefillEnd, Protocol},
};
use tandem_engine::{Event, KvHandle};
use tandem_kv::{HashKey, Namespace, prompt_digest};
use tandem_process::trace::Span;
use tandem_proto::v1::{
    self, PrefillChunk, PrefillDone, PrefillReply, PrefillRequest, PrefillStart, Submitted, prefill_reply, prefill_request,
};
use tandem_worker::{Disconnected, ReplySender, first_event};
use tokio::time::timeout;
use tonic::Streaming;

/// Runs one attempt until the KV is pulled. Dropping the future cancels the request on the engine. If the handle was sent already, the engine
/// releases the prompt's KV when its lease for the handle ends.
///
/// Engines do not check their leases. Therefore this worker sends an error after the handle has expired: a decode worker that was suspended for
/// longer than the handle is valid finds the error and does not use the handle.
pub(crate) async fn export(
    worker: &PrefillWorker,
    hash_key: &HashKey,
    mut start: PrefillStart,
    mut messages: Streaming<PrefillRequest>,
    replies: &ReplySender<PrefillReply>,
    span: &Span,
) -> Result<PrefillDone, PrefillEnd> {
    let prompt_digest = prompt_digest(hash_key, &Namespace::from_bytes(&start.cache_namespace), &start.prompt);
    let mut job = submit(worker, &mut start).await?;
    let mut first = true;
    let handle = loop {
        let event = async {
            if std::mem::take(&mut first) {
                first_event(&*worker.common.backend, None, job.next(), || send_waiting(replies)).await.map(Option::flatten)
            } else {
                Ok(job.next().await)
            }
        };
        let event = tokio::select! {
            biased;
            event = event => event?,
            early = next_message(&mut messages) => return Err(unexpected(early)),
        };
        match event {
            Some(Event::Submitted) => {
                replies.send(PrefillReply { message: Some(prefill_reply::Message::Submitted(Submitted::default())) }).await?;
            }
            Some(Event::Scheduled { cached }) => {
                send_scheduled(worker, cached, replies, span).await?;
            }
            Some(Event::Exported(handle)) => break handle,
            Some(Event::Refused(refusal)) => return Err(refusal.into()),
            _ => return Err(PrefillEnd::Engine),
        }
    };
    span.event("computed", &[]);
    drop(job);
    let mut outcome = HandleOutcome { worker, label: "abandoned" };
    let KvHandle { bytes, valid_for, chunks } = handle;
    let valid_ms = u32::try_from(valid_for.as_millis()).unwrap_or(u32::MAX);
    let message = prefill_reply::Message::KvHandle(v1::KvHandle { handle: bytes, prompt_digest, valid_ms });
    replies.send(PrefillReply { message: Some(message) }).await?;
    match timeout(valid_for, next_message(&mut messages)).await {
        Ok(Ok(prefill_request::Message::Pulled(_))) => outcome.label = "pulled",
        Ok(other) => return Err(unexpected(other)),
        Err(_) => {
            outcome.label = "expired";
            return Err(PrefillEnd::HandleExpired);
        }
    }
    let chunks = chunks.iter().map(|chunk| PrefillChunk::new(chunk.begun, chunk.took, chunk.tokens));
    Ok(PrefillDone { chunks: chunks.collect(), ipc_handle: Vec::new() })
}

/// Counts the outcome of a handle when dropped. Unless the handle was pulled, the engine holds its blocks until the handle's lease ends.
struct HandleOutcome<'a> {
    worker: &'a PrefillWorker,
    label: &'static str,
}

impl Drop for HandleOutcome<'_> {
    fn drop(&mut self) {
        self.worker.common.metrics.count_handle(self.label);
    }
}

/// Returns the reason for which a message, or the end of the stream, ends the attempt.
fn unexpected(message: Result<prefill_request::Message, Disconnected>) -> PrefillEnd {
    message.map_or_else(Into::into, |_| PrefillEnd::Protocol(Protocol::UnexpectedMessage))
}
