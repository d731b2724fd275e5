//! One attempt: a prompt is queued, scheduled, computed, and its blocks are sent while later chunks compute.

use crate::{
    failure::{Ended, Protocol},
    service::Worker,
};
use futures::FutureExt;
use tandem_engine::{Event, Prefill};
use tandem_kv::Namespace;
use tandem_node::trace::Span;
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{
        self, PrefillChunk, PrefillDone, PrefillReply, PrefillRequest, PrefillStart, Scheduled, prefill_reply, prefill_request,
    },
};
use tandem_transfer::{TicketError, Transfer, TransferError};
use tandem_worker::{ClientGone, Direction, Job, ReplySender, ScheduledPrompt};
use tonic::Streaming;

/// Runs one attempt until its blocks are written on the decode worker. Dropping the future releases all that it holds.
pub(crate) async fn attempt(
    worker: &Worker,
    mut start: PrefillStart,
    mut messages: Streaming<PrefillRequest>,
    replies: &ReplySender<PrefillReply>,
    span: &Span,
) -> Result<PrefillDone, Ended> {
    let prompt_tokens = u32::try_from(start.prompt.len()).unwrap_or(u32::MAX);
    let mut job = submit(worker, &mut start).await?;
    let (request_id, attempt, account) = (start.request_id, start.attempt, start.account);
    let cached_tokens = match job.next().await {
        Some(Event::Scheduled { cached_tokens }) => cached_tokens,
        _ => return Err(Ended::Engine),
    };
    worker.metrics.observe_scheduled(prompt_tokens, cached_tokens);
    let (request_id, account) = (&request_id, &account);
    worker.ledger.scheduled(ScheduledPrompt { request_id, attempt, account, prompt: prompt_tokens, cached: cached_tokens });
    span.event("scheduled", &[]);
    span.set("tandem.cached_tokens", cached_tokens);
    if let Some(capabilities) = worker.transfers.capabilities() {
        replies.send(PrefillReply { message: Some(prefill_reply::Message::TransferCapabilities(*capabilities)) }).await?;
    }
    let scheduled = Scheduled::on_device((!worker.settings.worker.withhold_cached_tokens).then_some(cached_tokens));
    replies.send(PrefillReply { message: Some(prefill_reply::Message::Scheduled(scheduled)) }).await?;

    // The engine computes meanwhile.
    let ticket = ticket(worker, &mut messages).await?;
    let missing_blocks = ticket.missing_blocks.clone();
    let transfer = worker.transfers.open(ticket).inspect_err(|error| {
        if matches!(error, TransferError::Ticket(TicketError::UnsignedAddress)) {
            worker.metrics.count_unsigned_address();
        }
    })?;
    check(&missing_blocks, blocks(prompt_tokens, worker.backend.info().block_size))?;
    send(worker, job, missing_blocks, transfer, span).await
}

/// Checks an attempt and queues its prefill, which takes the prompt.
async fn submit(worker: &Worker, start: &mut PrefillStart) -> Result<Box<dyn Job>, Ended> {
    if start.instance_id != worker.instance_id {
        return Err(Ended::WrongInstance { asked_for: start.instance_id.clone() });
    }
    if worker.requests.is_draining() {
        return Err(Ended::Draining);
    }
    let texts = [&start.request_id, &start.traceparent, &start.account];
    if texts.iter().any(|text| text.len() > TEXT_BYTES_MAX) || start.cache_namespace.len() > NAMESPACE_BYTES_MAX {
        return Err(Ended::TooLong);
    }
    let vocab_size = worker.backend.info().vocab_size;
    if start.prompt.iter().any(|token| usize::try_from(*token).map_or(true, |token| token >= vocab_size)) {
        return Err(Ended::UnknownToken);
    }
    let prefill = Prefill {
        request_id: start.request_id.clone(),
        account: start.account.clone(),
        namespace: Namespace::from_bytes(&start.cache_namespace),
        prompt: std::mem::take(&mut start.prompt),
    };
    Ok(worker.backend.prefill(prefill).await?)
}

async fn ticket(worker: &Worker, messages: &mut Streaming<PrefillRequest>) -> Result<v1::Ticket, Ended> {
    let message = tokio::time::timeout(worker.settings.ticket_wait, messages.message()).await;
    match message.map_err(|_| Ended::NoTicket)? {
        Ok(Some(PrefillRequest { message: Some(prefill_request::Message::Ticket(ticket)) })) => Ok(ticket),
        Ok(Some(_)) => Err(Ended::Protocol(Protocol::UnexpectedMessage)),
        // A closed stream cancels the attempt.
        Ok(None) | Err(_) => Err(ClientGone.into()),
    }
}

/// Returns how many blocks hold the KV of all tokens but the last.
fn blocks(prompt_tokens: u32, block_size: u32) -> u32 {
    prompt_tokens.saturating_sub(1).div_ceil(block_size)
}

fn check(missing_blocks: &[u32], blocks: u32) -> Result<(), Ended> {
    let mut indices = missing_blocks.to_vec();
    indices.sort_unstable();
    let twice = indices.windows(2).any(|pair| pair[0] == pair[1]);
    if twice || indices.last().is_some_and(|last| *last >= blocks) {
        return Err(Ended::Protocol(Protocol::UnknownBlock));
    }
    Ok(())
}

/// Sends the missing blocks as soon as they are computed; returns when the prompt is computed and all of them are written.
async fn send(
    worker: &Worker,
    mut job: Box<dyn Job>,
    missing_blocks: Vec<u32>,
    mut transfer: Transfer,
    span: &Span,
) -> Result<PrefillDone, Ended> {
    let (label, blocks) = (transfer.label(), missing_blocks.len() as u64);
    job.send_blocks(missing_blocks, transfer.access()).await;
    let mut transfer_span = None;
    let chunks = loop {
        let event = tokio::select! {
            biased;
            event = job.next() => event,
            error = transfer.interrupted() => return Err(error.into()),
        };
        match event {
            Some(Event::BlocksReady(blocks)) => {
                transfer_span.get_or_insert_with(|| span.child("transfer"));
                transfer.send(blocks).await?;
            }
            Some(Event::Computed(chunks)) => break chunks,
            _ => return Err(Ended::Engine),
        }
    };
    span.event("computed", &[]);
    if !chunks.is_empty() {
        span.set("tandem.prefill_chunks", chunks.len() as u64);
    }
    // The job holds its blocks until here: copies of blocks that are being sent never exceed the cache, and blocks that are read in place do not change.
    let sent = tokio::select! {
        biased;
        _ = job.next() => return Err(Ended::Engine),
        sent = transfer.finish() => sent?,
    };
    // An engine that failed meanwhile may have reused blocks before the last were read; it reports that before it computes again.
    if job.next().now_or_never().is_some() {
        return Err(Ended::Engine);
    }
    drop(job);
    if let Some(transfer_span) = transfer_span {
        transfer_span.set("tandem.kv_transfer_blocks", blocks);
        transfer_span.set("tandem.kv_transfer_bytes", sent.bytes);
        transfer_span.set("tandem.transport", label);
        let metrics = worker.metrics.transfer(label, Direction::Sent);
        metrics.bytes.increment(sent.bytes);
        metrics.duration.record(sent.duration.as_secs_f64());
        worker.metrics.observe_bandwidth(sent.measured_bytes, sent.measured);
    }
    let chunks = chunks.into_iter().map(|chunk| PrefillChunk::new(chunk.begun, chunk.took, chunk.tokens));
    Ok(PrefillDone { chunks: chunks.collect(), ipc_handle: sent.ipc_handle })
}

#[cfg(test)]
mod overlap;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_may_name_only_blocks_of_the_prompt_each_once() {
        let check = |missing: &[u32], prompt_tokens| check(missing, blocks(prompt_tokens, 16)).is_ok();
        // The last token's KV is decode's to compute: a prompt of 33 tokens has two blocks to send.
        assert!(check(&[], 1) && check(&[1, 0], 33) && check(&[0, 1, 2], 34));
        assert!(!check(&[0], 1) && !check(&[2], 33) && !check(&[0, 1, 0], 33) && !check(&[u32::MAX], 33));
    }
}
