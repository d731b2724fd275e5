//! A prompt that is prefilled on another worker: requested there, reserved and received here, then continued here.
//!
//! While the prompt is queued on the prefill worker it holds no blocks here. Blocks are allocated when its prefill has begun, and released with
//! the job, however it ends.

use crate::{
    client::Client,
    convert::{self, Request},
    failure::Ended,
    forward::forward,
    prefill::{Prefill, Reply},
    worker::{Worker, in_time},
};
use tandem_engine::{Event, Started};
use tandem_proto::v1::{
    self, FailureReason, PrefillChunk, PrefillDone, PrefillStart, WorkerRef, generate_reply::Message, worker_info::Role,
};
use tandem_transfer::{Negotiated, ReceivePaths};
use tandem_worker::{Direction, Job};
use tokio::time::Instant;

/// Runs one attempt. Dropping the future ends it on both workers.
pub(crate) async fn run(worker: &Worker, request: Request, prefill: WorkerRef, client: &Client) -> Result<(), Ended> {
    if !prefill.has_signed_address(Role::Prefill, worker.channels.network().key()) {
        worker.metrics.count_unsigned_address();
        return Err(Ended::UnsignedAddress);
    }
    request.generate.check(worker.backend.info())?;
    let waiting = worker.remote_waiting.try_acquire().map_err(|_| Ended::RemoteWaitingFull)?;
    let Request { attempt, traceparent, generate, output, start_within, .. } = request;
    let start = PrefillStart {
        request_id: generate.request_id.clone(),
        traceparent: client.span.traceparent().unwrap_or(traceparent),
        attempt,
        instance_id: prefill.instance_id.clone(),
        prompt: generate.shared(),
        cache_namespace: generate.namespace.as_bytes().to_vec(),
        account: generate.account.clone(),
    };
    let culprit = prefill.instance_id.clone();
    let starting = async {
        let mut prefill = Prefill::open(&worker.channels, prefill, start).await?;
        match prefill.next().await? {
            Reply::Scheduled(scheduled) => Ok((prefill, scheduled)),
            Reply::Failure(failure) => Err(Ended::Prefill(failure)),
            Reply::Done(_) => Err(prefill.lost()),
        }
    };
    let (mut prefill, scheduled) = in_time(start_within, starting, &culprit).await?;
    client.send(Message::Scheduled(scheduled)).await?;
    let deadline = Instant::now() + worker.settings.receive_timeout;
    // Dropped after the job: while the ticket is live, its blocks can be received.
    let mut negotiated: Option<Negotiated> = None;
    let mut job = worker.backend.generate(generate).await?;
    let received = receive(worker, &mut *job, &mut prefill, &mut negotiated, deadline).await?;
    let label = negotiated.as_ref().map_or(ReceivePaths::fallback_label(), Negotiated::label);
    drop(negotiated);
    drop(waiting);
    let ReceivedBlocks { started, chunks } = received;
    if started.kv_transfer_bytes > 0 {
        let metrics = worker.metrics.transfer(label, Direction::Received);
        metrics.bytes.increment(started.kv_transfer_bytes);
        metrics.duration.record(started.kv_transfer.as_secs_f64());
    }
    client.send(Message::DecodeStarted(convert::started(&started))).await?;
    // If all blocks were cached here, the prefill worker need not compute: closing the stream stops it.
    drop(prefill);
    client.prefilled(chunks).await?;
    forward(&mut *job, output, client).await
}

struct ReceivedBlocks {
    started: Started,
    /// The chunks in which the prefill worker computed the prompt; none if all of it was cached here.
    chunks: Vec<PrefillChunk>,
}

/// Reserves blocks, lets the prefill worker write into those that are missing, and waits until it has confirmed that all of them
/// are written. Until then the written blocks may be forged.
async fn receive(
    worker: &Worker,
    job: &mut dyn Job,
    prefill: &mut Prefill,
    negotiated: &mut Option<Negotiated>,
    deadline: Instant,
) -> Result<ReceivedBlocks, Ended> {
    let mut done: Option<PrefillDone> = None;
    loop {
        tokio::select! {
            // An event of the engine counts before a message of the prefill worker about it.
            biased;
            event = job.next() => match event {
                Some(Event::Reserved { ticket: secret, missing_blocks }) => {
                    // With no missing blocks, no path is needed.
                    let offered = prefill.offered().filter(|_| !missing_blocks.is_empty());
                    let address = worker.address.clone();
                    let mut ticket =
                        v1::Ticket { ticket: secret.as_bytes().to_vec(), address, missing_blocks, ..v1::Ticket::default() };
                    *negotiated =
                        Some(worker.transfers.negotiate(prefill.instance_id(), offered, secret, &mut ticket).await);
                    prefill.give(ticket.with_signed_address(prefill.instance_id(), worker.channels.network().key()));
                }
                Some(Event::Started(started)) => {
                    return Ok(ReceivedBlocks { started, chunks: done.map(|done| done.chunks).unwrap_or_default() });
                }
                Some(Event::Revoked) => return Err(Ended::Revoked),
                Some(Event::WriteRefused(reason)) => {
                    let prefill = prefill.instance_id().to_owned();
                    tracing::warn!(%reason, prefill, "refused a write that a prompt's ticket does not allow; the prompt's prefill is repeated");
                    return Err(Ended::WriteRefused { prefill });
                }
                _ => return Err(Ended::Engine),
            },
            reply = prefill.next(), if done.is_none() => match reply? {
                Reply::Done(confirmation) => {
                    let Some(negotiated) = negotiated else { return Err(prefill.lost()) };
                    negotiated.confirmed(&confirmation).await;
                    done = Some(confirmation);
                }
                // It waited for the ticket, which waited for blocks of this worker.
                Reply::Failure(failure) if negotiated.is_none() && failure.reason() == FailureReason::Timeout => {
                    return Err(Ended::NoBlocks);
                }
                Reply::Failure(failure) => return Err(Ended::Prefill(failure)),
                Reply::Scheduled(_) => return Err(prefill.lost()),
            },
            () = tokio::time::sleep_until(deadline) => {
                return Err(match negotiated {
                    None => Ended::NoBlocks,
                    Some(_) => Ended::NotReceived { prefill: prefill.instance_id().to_owned() },
                });
            }
        }
    }
}
