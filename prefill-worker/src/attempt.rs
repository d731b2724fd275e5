//! One attempt: a prompt is queued, scheduled and computed, and its blocks are sent while later chunks are computed.

use crate::{
    PrefillWorker,
    failure::{PrefillEnd, Protocol},
};
use futures::FutureExt;
use tandem_engine::{CachedTokens, Event, Prefill};
use tandem_kv::Namespace;
use tandem_process::trace::Span;
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX, unknown_message,
    v1::{self, PrefillChunk, PrefillDone, PrefillReply, PrefillRequest, PrefillStart, Waiting, prefill_reply, prefill_request},
};
use tandem_transfer::{SendPaths, TicketError, Transfer, TransferError};
use tandem_worker::{CountedJob, Direction, Disconnected, Job, ReplySender, ScheduledPrompt, first_event};
use tonic::Streaming;

/// Runs one attempt until its blocks are written on the decode worker. Dropping the future cancels the prefill and releases its blocks.
pub(crate) async fn attempt(
    worker: &PrefillWorker,
    transfers: &SendPaths,
    mut start: PrefillStart,
    mut messages: Streaming<PrefillRequest>,
    replies: &ReplySender<PrefillReply>,
    span: &Span,
) -> Result<PrefillDone, PrefillEnd> {
    let prompt_tokens = u32::try_from(start.prompt.len()).unwrap_or(u32::MAX);
    let mut job = submit(worker, &mut start).await?;
    let first = first_event(&*worker.common.backend, None, job.next(), || send_waiting(replies)).await?;
    let Some(Some(Event::Scheduled { cached })) = first else { return Err(PrefillEnd::Engine) };
    if let Some(capabilities) = transfers.capabilities() {
        replies.send(PrefillReply { message: Some(prefill_reply::Message::TransferCapabilities(*capabilities)) }).await?;
    }
    send_scheduled(worker, cached, replies, span).await?;

    // The engine computes while this task waits for the ticket.
    let ticket = ticket(worker, &mut messages).await?;
    let missing_blocks = ticket.missing_blocks.clone();
    let transfer = transfers.open(ticket).inspect_err(|error| {
        if matches!(error, TransferError::Ticket(TicketError::UnsignedAddress)) {
            worker.common.metrics.count_unsigned_address();
        }
    })?;
    check(&missing_blocks, blocks(prompt_tokens, worker.common.backend.info().block_size))?;
    send(worker, job, missing_blocks, transfer, span).await
}

/// Reports that the prompt waits in the queue of an engine that makes progress.
pub(crate) async fn send_waiting(replies: &ReplySender<PrefillReply>) -> Result<(), Disconnected> {
    replies.send(PrefillReply { message: Some(prefill_reply::Message::Waiting(Waiting {})) }).await
}

pub(crate) async fn send_scheduled(
    worker: &PrefillWorker,
    cached: Option<CachedTokens>,
    replies: &ReplySender<PrefillReply>,
    span: &Span,
) -> Result<(), Disconnected> {
    span.event("scheduled", &[]);
    if let Some(cached) = cached {
        span.set("tandem.cached_tokens", cached.total());
    }
    replies.send(PrefillReply { message: Some(prefill_reply::Message::Scheduled(worker.common.scheduled(cached))) }).await
}

/// Checks the first message of an attempt and queues its prefill. The prompt is moved out of `start`.
pub(crate) async fn submit(worker: &PrefillWorker, start: &mut PrefillStart) -> Result<CountedJob, PrefillEnd> {
    let tandem_worker::Worker { info, backend, shutdown, .. } = &worker.common;
    if start.instance_id != info.instance_id {
        return Err(PrefillEnd::WrongInstance { requested: start.instance_id.clone() });
    }
    if shutdown.is_draining() {
        return Err(PrefillEnd::Draining);
    }
    let texts = [&start.request_id, &start.traceparent, &start.account];
    if texts.iter().any(|text| text.len() > TEXT_BYTES_MAX) || start.cache_namespace.len() > NAMESPACE_BYTES_MAX {
        return Err(PrefillEnd::TooLong);
    }
    let vocab_size = backend.info().vocab_size;
    if start.prompt.iter().any(|token| usize::try_from(*token).map_or(true, |token| token >= vocab_size)) {
        return Err(PrefillEnd::UnknownToken);
    }
    let sampling = start.sampling.take().map(|wire| tandem_worker::sampling(wire, vocab_size)).transpose()?;
    let first_token = sampling.map(|sampling| Box::new(sampling.of_sample(start.sample, start.generated)));
    let namespace = Namespace::from_bytes(&start.cache_namespace);
    let model = worker.common.model_of(&namespace)?;
    let prefill = Prefill {
        request_id: start.request_id.clone(),
        account: start.account.clone(),
        priority: start.priority.unwrap_or_default().into(),
        namespace: namespace.clone(),
        prompt: std::mem::take(&mut start.prompt),
        first_token,
    };
    let prompt = u32::try_from(prefill.prompt.len()).unwrap_or(u32::MAX);
    let job = backend.prefill(prefill).await?;
    if start.is_counted_elsewhere {
        return Ok(CountedJob::uncounted(job, &worker.common));
    }
    let PrefillStart { request_id, attempt, account, .. } = &*start;
    let prompt = ScheduledPrompt { request_id, attempt: *attempt, model, account, prompt, cached: None };
    Ok(CountedJob::new(job, &worker.common, prompt))
}

async fn ticket(worker: &PrefillWorker, messages: &mut Streaming<PrefillRequest>) -> Result<v1::Ticket, PrefillEnd> {
    let message = tokio::time::timeout(worker.ticket_wait, next_message(messages)).await;
    match message.map_err(|_| PrefillEnd::NoTicket)?? {
        prefill_request::Message::Ticket(ticket) => Ok(ticket),
        _ => Err(PrefillEnd::Protocol(Protocol::UnexpectedMessage)),
    }
}

/// Returns the decode worker's next message; skips kinds that this version does not know. A closed stream cancels the attempt. Cancel-safe.
pub(crate) async fn next_message(messages: &mut Streaming<PrefillRequest>) -> Result<prefill_request::Message, Disconnected> {
    loop {
        match messages.message().await {
            Ok(Some(PrefillRequest { message: Some(message) })) => return Ok(message),
            Ok(Some(_)) => unknown_message("Prefill"),
            Ok(None) | Err(_) => return Err(Disconnected),
        }
    }
}

/// Returns the number of blocks that hold the KV of all tokens but the last one.
fn blocks(prompt_tokens: u32, block_size: u32) -> u32 {
    prompt_tokens.saturating_sub(1).div_ceil(block_size)
}

/// Checks that a ticket names only blocks of the prompt, each once.
fn check(missing_blocks: &[u32], blocks: u32) -> Result<(), PrefillEnd> {
    let mut indices = missing_blocks.to_vec();
    indices.sort_unstable();
    let twice = indices.windows(2).any(|pair| pair[0] == pair[1]);
    if twice || indices.last().is_some_and(|last| *last >= blocks) {
        return Err(PrefillEnd::Protocol(Protocol::UnknownBlock));
    }
    Ok(())
}

/// Sends the missing blocks as soon as they are computed; returns when the prompt is computed and all of them are written.
async fn send(
    worker: &PrefillWorker,
    mut job: CountedJob,
    missing_blocks: Vec<u32>,
    mut transfer: Transfer,
    span: &Span,
) -> Result<PrefillDone, PrefillEnd> {
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
            _ => return Err(PrefillEnd::Engine),
        }
    };
    span.event("computed", &[]);
    if !chunks.is_empty() {
        span.set("tandem.prefill_chunks", chunks.len() as u64);
    }
    // The job pins its blocks until all of them are written, so blocks that are read in place do not change, and copied blocks take no more
    // memory than the cache.
    let sent = tokio::select! {
        biased;
        _ = job.next() => return Err(PrefillEnd::Engine),
        sent = transfer.finish() => sent?,
    };
    // If the engine failed meanwhile, blocks may have been reused before they were sent. The engine reports a failure before it computes the next
    // step, so the report has arrived by now.
    if job.next().now_or_never().is_some() {
        return Err(PrefillEnd::Engine);
    }
    drop(job);
    if let Some(transfer_span) = transfer_span {
        transfer_span.set("tandem.kv_transfer_blocks", blocks);
        transfer_span.set("tandem.kv_transfer_bytes", sent.bytes);
        transfer_span.set("tandem.transport", label);
        let metrics = &worker.common.metrics;
        let (bytes, duration) = metrics.transfer(label, Direction::Sent);
        bytes.increment(sent.bytes);
        duration.record(sent.duration.as_secs_f64());
        metrics.observe_bandwidth(sent.measured_bytes, sent.measured);
    }
    let chunks = chunks.into_iter().map(|chunk| PrefillChunk::new(chunk.begun, chunk.took, chunk.tokens));
    Ok(PrefillDone { chunks: chunks.collect(), ipc_handle: sent.ipc_handle })
}

#[cfg(test)]
mod tests {
    mod overlap;

    use super::*;

    #[test]
    fn ticket_that_names_a_block_twice_or_beyond_the_prompt_is_refused() {
        let check = |missing: &[u32], prompt_tokens| check(missing, blocks(prompt_tokens, 16)).is_ok();
        // The decode worker computes the KV of the last token, so a prompt of 33 tokens has two blocks to send.
        assert!(check(&[], 1) && check(&[1, 0], 33) && check(&[0, 1, 2], 34));
        assert!(!check(&[0], 1) && !check(&[2], 33) && !check(&[0, 1, 0], 33) && !check(&[u32::MAX], 33));
    }
}
