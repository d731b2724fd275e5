//! One prompt's way: queued, scheduled, computed, and sent block by block while later chunks compute.

use crate::{
    failure::{Ended, Protocol},
    service::Worker,
    ways::Chosen,
};
use futures::FutureExt;
use std::time::Duration;
use tandem_engine::{Event, Prefill};
use tandem_kv::{BlockAccess, Namespace, ReadyBlock, Ticket};
use tandem_node::trace::Span;
use tandem_proto::{
    NAMESPACE_BYTES_MAX, TEXT_BYTES_MAX,
    v1::{
        self, PrefillChunk, PrefillDone, PrefillReply, PrefillRequest, PrefillStart, ReadyBlocks, Scheduled, TransferPath,
        prefill_reply, prefill_request,
    },
};
use tandem_transfer::TransferError;
use tandem_worker::{ClientGone, Direction, Job, ReplySender, ScheduledPrompt};
use tokio::time::Instant;
use tonic::Streaming;

/// Runs one attempt until its blocks have landed. Dropping the future lets go of everything.
pub(crate) async fn attempt(
    worker: &Worker,
    start: PrefillStart,
    mut messages: Streaming<PrefillRequest>,
    replies: &ReplySender<PrefillReply>,
    span: &Span,
) -> Result<PrefillDone, Ended> {
    let mut job = submit(worker, &start).await?;
    let prompt_tokens = u32::try_from(start.prompt.len()).unwrap_or(u32::MAX);
    let (request_id, attempt, account) = (start.request_id, start.attempt, start.account);
    drop(start.prompt);

    let cached_tokens = match job.next().await {
        Some(Event::Scheduled { cached_tokens }) => cached_tokens,
        _ => return Err(Ended::Engine),
    };
    worker.metrics.observe_scheduled(prompt_tokens, cached_tokens);
    let (request_id, account) = (&request_id, &account);
    worker.ledger.scheduled(ScheduledPrompt { request_id, attempt, account, prompt: prompt_tokens, cached: cached_tokens });
    span.event("scheduled", &[]);
    span.set("tandem.cached_tokens", cached_tokens);
    if let Some(ways) = worker.ways.offered() {
        replies.send(PrefillReply { message: Some(prefill_reply::Message::TransferCapabilities(*ways)) }).await?;
    }
    let scheduled = Scheduled::on_device((!worker.settings.worker.withhold_cached_tokens).then_some(cached_tokens));
    replies.send(PrefillReply { message: Some(prefill_reply::Message::Scheduled(scheduled)) }).await?;

    // The engine computes meanwhile.
    let ticket = ticket(worker, &mut messages).await?;
    if !ticket.is_vouched(&worker.instance_id, &worker.key) {
        worker.metrics.count_unvouched();
        return Err(Ended::Protocol(Protocol::Unvouched));
    }
    check(&ticket, blocks(prompt_tokens, worker.backend.info().block_size))?;
    send(worker, job, ticket, span).await
}

async fn submit(worker: &Worker, start: &PrefillStart) -> Result<Box<dyn Job>, Ended> {
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
        prompt: start.prompt.clone(),
    };
    Ok(worker.backend.prefill(prefill).await?)
}

async fn ticket(worker: &Worker, messages: &mut Streaming<PrefillRequest>) -> Result<v1::Ticket, Ended> {
    let message = tokio::time::timeout(worker.settings.ticket_wait, messages.message()).await;
    match message.map_err(|_| Ended::NoTicket)? {
        Ok(Some(PrefillRequest { message: Some(prefill_request::Message::Ticket(ticket)) })) => Ok(ticket),
        Ok(Some(_)) => Err(Ended::Protocol(Protocol::UnexpectedMessage)),
        // Closing the stream lets go of everything.
        Ok(None) | Err(_) => Err(ClientGone.into()),
    }
}

/// Blocks that hold the KV of all tokens but the last.
fn blocks(prompt_tokens: u32, block_size: u32) -> u32 {
    prompt_tokens.saturating_sub(1).div_ceil(block_size)
}

fn check(ticket: &v1::Ticket, blocks: u32) -> Result<(), Ended> {
    let mut indices = ticket.missing_blocks.clone();
    indices.sort_unstable();
    let twice = indices.windows(2).any(|pair| pair[0] == pair[1]);
    if twice || indices.last().is_some_and(|last| *last >= blocks) {
        return Err(Ended::Protocol(Protocol::UnknownBlock));
    }
    Ok(())
}

/// Sends each missing block as soon as it is computed; returns when all is computed and all have landed.
async fn send(worker: &Worker, mut job: Box<dyn Job>, ticket: v1::Ticket, span: &Span) -> Result<PrefillDone, Ended> {
    let path = ticket.path();
    let v1::Ticket { ticket, address, missing_blocks, communicator, wants_ipc_handle, .. } = ticket;
    let ticket = Ticket::try_from(&ticket[..]).map_err(|_| Ended::Protocol(Protocol::InvalidTicket))?;
    let chosen = worker.ways.choose(path, &communicator)?;
    let transport = match chosen {
        Chosen::Content => worker.transport.name(),
        Chosen::Places => "cuda_ipc",
        Chosen::Line(_) => "nccl",
    };
    let sent = worker.metrics.transfer(transport, Direction::Sent);
    let mut push = worker.transport.open(&address, ticket).map_err(|error| match error {
        TransferError::Address(_) => Ended::Protocol(Protocol::InvalidAddress),
        error @ (TransferError::Refused(_) | TransferError::Gone(_)) => error.into(),
    })?;
    let (nothing_missing, blocks) = (missing_blocks.is_empty(), missing_blocks.len() as u64);
    let block_bytes = worker.backend.info().block_bytes;
    let bytes = blocks * block_bytes as u64;
    let mut transfer = Span::default();
    match chosen {
        Chosen::Content => job.send_blocks(missing_blocks, BlockAccess::Copied).await,
        Chosen::Places | Chosen::Line(_) => job.send_blocks(missing_blocks, BlockAccess::InPlace).await,
    }
    // What the way's bandwidth is measured by.
    let (mut moved, mut busy) = (0, Duration::ZERO);
    let mut first_block = None;
    let chunks = loop {
        let event = tokio::select! {
            biased;
            event = job.next() => event,
            error = push.broken() => return Err(error.into()),
        };
        let began = Instant::now();
        if first_block.is_none() && matches!(event, Some(Event::BlocksReady(_))) {
            first_block = Some(began);
            transfer = span.child("transfer");
        }
        let pass = async |blocks: usize| {
            for _ in 0..blocks {
                worker.link.pass().await;
            }
            (blocks * block_bytes) as u64
        };
        match event {
            Some(Event::BlocksReady(blocks)) if matches!(chosen, Chosen::Content) => {
                for ReadyBlock { index, content, .. } in blocks {
                    let bytes = pass(1).await;
                    push.send(index, content.into()).await?;
                    sent.bytes.increment(bytes);
                    moved += bytes;
                }
            }
            Some(Event::BlocksReady(blocks)) => {
                let bytes = pass(blocks.len()).await;
                match &chosen {
                    Chosen::Line(line) => {
                        line.send(ticket, blocks).await?;
                        sent.bytes.increment(bytes);
                        moved += bytes;
                    }
                    Chosen::Content | Chosen::Places => {
                        let (block_indices, source_blocks) = blocks.into_iter().map(|ready| (ready.index, ready.block.0)).unzip();
                        push.ready(ReadyBlocks { block_indices, source_blocks }).await?;
                        // They are copied while later ones are computed: of the last ones alone the end is waited for.
                        (moved, busy) = (bytes, Duration::ZERO);
                    }
                }
            }
            Some(Event::Computed(chunks)) => {
                span.event("computed", &[]);
                if !chunks.is_empty() {
                    span.set("tandem.prefill_chunks", chunks.len() as u64);
                }
                break chunks;
            }
            _ => return Err(Ended::Engine),
        }
        busy += began.elapsed();
    };
    let chunks = chunks.into_iter().map(|chunk| PrefillChunk::new(chunk.begun, chunk.took, chunk.tokens));
    let mut done = PrefillDone { chunks: chunks.collect(), ipc_handle: Vec::new() };
    if nothing_missing {
        return Ok(done);
    }
    let began = Instant::now();
    worker.link.settle().await;
    // Until here the job holds its blocks: what is on its way is never more than the cache, and what is copied from here has not changed.
    match &chosen {
        Chosen::Content => push.finish().await?,
        Chosen::Places | Chosen::Line(_) => {
            tokio::select! {
                biased;
                _ = job.next() => return Err(Ended::Engine),
                finished = push.finish() => finished?,
            }
            // An engine that failed meanwhile may have given them to others before the last were copied; it says so before it computes again.
            if job.next().now_or_never().is_some() {
                return Err(Ended::Engine);
            }
        }
    }
    drop(job);
    // The decode worker at the vouched address has taken blocks under the ticket, so the ticket is that of a live reservation.
    if wants_ipc_handle {
        done.ipc_handle = worker.ways.ipc_handle().to_vec();
    }
    if path == TransferPath::Tcp && !communicator.is_empty() {
        worker.ways.join(&address, communicator);
    }
    if matches!(chosen, Chosen::Places) {
        // Which of them were copied is known only now.
        sent.bytes.increment(bytes);
    }
    busy += began.elapsed();
    transfer.set("tandem.kv_transfer_blocks", blocks);
    transfer.set("tandem.kv_transfer_bytes", bytes);
    transfer.set("tandem.transport", transport);
    worker.metrics.observe_bandwidth(moved, busy);
    if let Some(first_block) = first_block {
        sent.duration.record(first_block.elapsed().as_secs_f64());
    }
    Ok(done)
}

#[cfg(test)]
mod overlap;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_blocks_of_the_prompt_may_be_asked_for_and_each_once() {
        let check = |missing: &[u32], prompt_tokens| {
            check(&v1::Ticket { missing_blocks: missing.to_vec(), ..Default::default() }, blocks(prompt_tokens, 16)).is_ok()
        };
        // The last token's KV is decode's to compute: a prompt of 33 tokens has two blocks to send.
        assert!(check(&[], 1) && check(&[1, 0], 33) && check(&[0, 1, 2], 34));
        assert!(!check(&[0], 1) && !check(&[2], 33) && !check(&[0, 1, 0], 33) && !check(&[u32::MAX], 33));
    }
}
