//! A request whose prompt is prefilled on another worker: this worker requests the prefill, reserves blocks, receives the KV and generates.
//!
//! While the prompt is queued on the prefill worker it has no blocks here. Its blocks are allocated when its prefill has begun, and are
//! released with the job, however the job ends.

use crate::{
    client::ClientStream,
    convert::{self, DecodeRequest},
    failure::DecodeEnd,
    forward::forward,
    prefill::{PrefillNews, RemotePrefill},
    pull, room,
    worker::{DecodeWorker, Receiving, RemotePrompt, in_queue},
};
use std::{convert::Infallible, future::pending};
use tandem_engine::{Event, Started};
use tandem_proto::v1::{
    self, FailureReason, PrefillChunk, PrefillDone, PrefillStart, WorkerRef, generate_reply::Message, worker_info::Role,
};
use tandem_transfer::{Negotiated, ReceivePaths};
use tandem_worker::{Direction, Job};
use tokio::time::Instant;

/// Runs one attempt. Dropping the future ends the attempt on both workers.
pub(crate) async fn run(
    worker: &DecodeWorker,
    request: DecodeRequest,
    (prefill, sampling): (WorkerRef, Option<v1::Sampling>),
    client: &ClientStream,
) -> Result<(), DecodeEnd> {
    if !prefill.has_signed_address(Role::Prefill, worker.channels.network().key()) {
        worker.common.metrics.count_unsigned_address();
        return Err(DecodeEnd::UnsignedAddress);
    }
    request.generate.check(worker.common.backend.info())?;
    let waiting = worker.remote_waiting.try_acquire().map_err(|_| DecodeEnd::RemoteWaitingFull)?;
    let generate = &request.generate;
    let start = PrefillStart {
        request_id: generate.request_id.clone(),
        traceparent: client.span.traceparent().unwrap_or_else(|| request.traceparent.clone()),
        attempt: request.attempt,
        instance_id: prefill.instance_id.clone(),
        prompt: generate.shared(),
        cache_namespace: generate.namespace.as_bytes().to_vec(),
        account: generate.account.clone(),
        priority: Some(generate.priority.into()),
        sampling,
        ..PrefillStart::default()
    };
    let remote = RemotePrompt { request, start, prefill, waiting };
    match &worker.receiving {
        Receiving::Transfers(transfers) => run_with_transfers(worker, transfers, remote, client).await,
        Receiving::Handles(handles) => pull::run(worker, handles, remote, client).await,
        Receiving::Rooms(hash_key) => room::run(worker, hash_key, remote, client).await,
        Receiving::None => Err(DecodeEnd::NoKvExchange),
    }
}

/// Receives the KV in blocks over a transfer path.
async fn run_with_transfers(
    worker: &DecodeWorker,
    transfers: &ReceivePaths,
    remote: RemotePrompt<'_>,
    client: &ClientStream,
) -> Result<(), DecodeEnd> {
    let RemotePrompt { request: DecodeRequest { generate, output, start_within, wait_until, .. }, start, prefill, waiting } =
        remote;
    let begin = RemotePrefill::begin(&worker.channels, prefill, start, start_within, client);
    let (mut prefill, first) = in_queue(wait_until, begin).await?;
    let scheduled = match first {
        PrefillNews::Scheduled(scheduled) => scheduled,
        PrefillNews::Failure(failure) => return Err(DecodeEnd::Prefill(failure)),
        PrefillNews::Waiting | PrefillNews::Submitted { .. } | PrefillNews::Handle(_) | PrefillNews::Done(_) => {
            return Err(prefill.lost());
        }
    };
    client.send(Message::Scheduled(scheduled)).await?;
    let received_by = Instant::now() + worker.receive_timeout;
    // Values are dropped in the reverse order of their declaration. The negotiated path is declared before the job, so blocks can be received as long
    // as the job's ticket is live.
    let mut negotiated: Option<Negotiated> = None;
    let mut job = worker.generate(generate, wait_until).await?;
    let received =
        receive((worker, transfers), &mut *job, &mut prefill, &mut negotiated, Deadlines { wait_until, received_by }).await?;
    let label = negotiated.as_ref().map_or(ReceivePaths::fallback_label(), Negotiated::label);
    drop(negotiated);
    drop(waiting);
    let ReceivedBlocks { started, chunks } = received;
    if started.kv_transfer_bytes > 0 {
        let (bytes, duration) = worker.common.metrics.transfer(label, Direction::Received);
        bytes.increment(started.kv_transfer_bytes);
        duration.record(started.kv_transfer.as_secs_f64());
    }
    client.send(Message::DecodeStarted(convert::started(&started))).await?;
    // If this worker has cached all blocks, the prefill is not needed: closing its stream stops it.
    drop(prefill);
    client.prefilled(chunks).await?;
    forward(&mut *job, output, client).await
}

struct Deadlines {
    /// The time until which this worker must have a place and blocks for the prompt; `None` sets no limit.
    wait_until: Option<Instant>,
    /// The time until which all blocks must be written.
    received_by: Instant,
}

struct ReceivedBlocks {
    started: Started,
    /// The chunks in which the prefill worker computed the prompt; empty if this worker had cached all of the prompt's blocks.
    chunks: Vec<PrefillChunk>,
}

/// Reserves blocks, sends a ticket for the missing ones, and waits until the prefill worker has confirmed that all of them are written.
/// Before this confirmation the written blocks may be forged.
async fn receive(
    (worker, transfers): (&DecodeWorker, &ReceivePaths),
    job: &mut dyn Job,
    prefill: &mut RemotePrefill,
    negotiated: &mut Option<Negotiated>,
    Deadlines { wait_until, received_by }: Deadlines,
) -> Result<ReceivedBlocks, DecodeEnd> {
    let mut done: Option<PrefillDone> = None;
    let overdue = in_queue(wait_until, pending::<Result<Infallible, DecodeEnd>>());
    tokio::pin!(overdue);
    loop {
        tokio::select! {
            // The branches are polled in this order, so that an event of the engine is handled before the prefill worker's message about the same
            // change.
            biased;
            event = job.next() => match event {
                Some(Event::Reserved { ticket: secret, missing_blocks }) => {
                    // If all blocks are cached, no transfer path is needed.
                    let offered = prefill.offered.as_ref().filter(|_| !missing_blocks.is_empty());
                    let address = worker.address.clone();
                    let mut ticket =
                        v1::Ticket { ticket: secret.as_bytes().to_vec(), address, missing_blocks, ..v1::Ticket::default() };
                    *negotiated =
                        Some(transfers.negotiate(&prefill.instance_id, offered, secret, &mut ticket).await);
                    prefill.send_ticket(ticket.with_signed_address(&prefill.instance_id, worker.channels.network().key()));
                }
                Some(Event::Started(started)) => {
                    return Ok(ReceivedBlocks { started, chunks: done.map(|done| done.chunks).unwrap_or_default() });
                }
                Some(Event::Revoked) => return Err(DecodeEnd::Revoked),
                Some(Event::WriteRefused(reason)) => {
                    let prefill = prefill.instance_id.clone();
                    tracing::warn!(%reason, prefill, "refused a write that a prompt's ticket does not allow; the prompt's prefill is repeated");
                    return Err(DecodeEnd::WriteRefused { prefill });
                }
                _ => return Err(DecodeEnd::Engine),
            },
            reply = prefill.next(), if done.is_none() => match reply? {
                PrefillNews::Done(confirmation) => {
                    let Some(negotiated) = negotiated else { return Err(prefill.lost()) };
                    negotiated.confirmed(&confirmation).await;
                    done = Some(confirmation);
                }
                // The ticket did not arrive at the prefill worker in time, because this worker had no free blocks for the prompt.
                PrefillNews::Failure(failure) if negotiated.is_none() && failure.reason() == FailureReason::Timeout => {
                    return Err(DecodeEnd::NoBlocks);
                }
                PrefillNews::Failure(failure) => return Err(DecodeEnd::Prefill(failure)),
                PrefillNews::Waiting | PrefillNews::Submitted { .. } | PrefillNews::Scheduled(_) | PrefillNews::Handle(_) => {
                    return Err(prefill.lost());
                }
            },
            Err(overdue) = &mut overdue, if negotiated.is_none() => return Err(overdue),
            () = tokio::time::sleep_until(received_by) => {
                return Err(match negotiated {
                    None => DecodeEnd::NoBlocks,
                    Some(_) => DecodeEnd::NotReceived { prefill: prefill.instance_id.clone() },
                });
            }
        }
    }
}
