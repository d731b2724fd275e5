//! A prompt that is prefilled on another worker: asked for, reserved, landed, then continued here.
//!
//! While the prompt waits on the prefill worker it holds nothing here but its place in the line. Blocks are taken when its
//! prefill has begun, and given back with the job, whatever ends first.

use crate::{
    convert::{self, Request},
    failure::Ended,
    forward::forward,
    prefill::{Prefill, Said},
    service::{Client, Worker, in_time},
    ways::{self, Chosen},
};
use tandem_engine::{Event, Started};
use tandem_kv::Ticket;
use tandem_proto::v1::{
    self, FailureReason, PrefillChunk, PrefillDone, PrefillStart, TransferPath, WorkerRef, generate_reply::Message,
    worker_info::Role,
};
use tandem_worker::{Direction, Job};
use tokio::time::Instant;

/// Runs one attempt. Dropping the future ends it on both workers.
pub(crate) async fn run(worker: &Worker, request: Request, prefill: WorkerRef, client: &Client) -> Result<(), Ended> {
    if !prefill.is_vouched(Role::Prefill, worker.channels.network().key()) {
        worker.metrics.count_unvouched();
        return Err(Ended::Unvouched);
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
            Said::Scheduled(scheduled) => Ok((prefill, scheduled)),
            Said::Failure(failure) => Err(Ended::Prefill(failure)),
            Said::Done(_) => Err(prefill.lost()),
        }
    };
    let (mut prefill, scheduled) = in_time(start_within, starting, &culprit).await?;
    client.send(Message::Scheduled(scheduled)).await?;
    let deadline = Instant::now() + worker.settings.landing_wait;
    // The ticket, and the way its blocks take. Dropped after the job: as long as the ticket is live, its blocks have a source.
    let mut given: Option<(Ticket, Chosen)> = None;
    let mut job = worker.backend.generate(generate).await?;
    let landed = land(worker, &mut *job, &mut prefill, &mut given, deadline).await?;
    drop(given);
    drop(waiting);
    if landed.started.kv_transfer_bytes > 0 {
        let received = worker.metrics.transfer(ways::name(landed.way), Direction::Received);
        received.bytes.increment(landed.started.kv_transfer_bytes);
        received.duration.record(landed.started.kv_transfer.as_secs_f64());
    }
    client.send(Message::DecodeStarted(convert::started(&landed.started))).await?;
    // If all blocks were cached here, the prefill worker need not compute: closing the stream stops it.
    drop(prefill);
    client.prefilled(landed.chunks).await?;
    forward(&mut *job, output, client).await
}

struct Landed {
    started: Started,
    way: TransferPath,
    /// In which the prefill worker computed it; none if all was here before.
    chunks: Vec<PrefillChunk>,
}

/// Reserves blocks, lets the prefill worker write into those which are missing, and waits until it has confirmed that all of them
/// are here. Until then the written blocks may be forged.
async fn land(
    worker: &Worker,
    job: &mut dyn Job,
    prefill: &mut Prefill,
    given: &mut Option<(Ticket, Chosen)>,
    deadline: Instant,
) -> Result<Landed, Ended> {
    let not_landed = |prefill: &Prefill| Ended::NotLanded { prefill: prefill.instance_id().to_owned() };
    let mut done: Option<PrefillDone> = None;
    loop {
        tokio::select! {
            // What the engine has told counts before what the prefill worker says of it.
            biased;
            event = job.next() => match event {
                Some(Event::Reserved { ticket, missing_blocks }) => {
                    // Nothing has to go any way.
                    let offered = prefill.offered().filter(|_| !missing_blocks.is_empty());
                    let chosen = worker.ways.choose(prefill.instance_id(), offered, ticket).await;
                    let (path, communicator) = (chosen.way.into(), chosen.communicator.clone());
                    let wants_ipc_handle = chosen.wants_ipc_handle;
                    *given = Some((ticket, chosen));
                    let (ticket, address) = (ticket.as_bytes().to_vec(), worker.address.clone());
                    let address_signature = Vec::new();
                    let ticket =
                        v1::Ticket { ticket, address, missing_blocks, path, communicator, wants_ipc_handle, address_signature };
                    prefill.give(ticket.vouched(prefill.instance_id(), worker.channels.network().key()));
                }
                Some(Event::Started(started)) => {
                    let way = given.as_ref().map_or(TransferPath::Tcp, |(_, chosen)| chosen.way);
                    return Ok(Landed { started, way, chunks: done.map(|done| done.chunks).unwrap_or_default() });
                }
                Some(Event::Revoked) => return Err(Ended::Revoked),
                Some(Event::WriteRefused(why)) => {
                    let prefill = prefill.instance_id().to_owned();
                    tracing::warn!(%why, prefill, "refused a write that a prompt's ticket does not allow; the prompt's prefill is repeated");
                    return Err(Ended::WriteRefused { prefill });
                }
                _ => return Err(Ended::Engine),
            },
            said = prefill.next(), if done.is_none() => match said? {
                Said::Done(said) => {
                    let Some((ticket, chosen)) = given else { return Err(prefill.lost()) };
                    worker.ways.confirm(*ticket).await;
                    worker.ways.landed(chosen, prefill.instance_id(), &said);
                    done = Some(said);
                }
                // It waited for our ticket, which waited for our blocks.
                Said::Failure(failure) if given.is_none() && failure.reason() == FailureReason::Timeout => return Err(Ended::NoBlocks),
                Said::Failure(failure) => return Err(Ended::Prefill(failure)),
                Said::Scheduled(_) => return Err(prefill.lost()),
            },
            () = tokio::time::sleep_until(deadline) => {
                return Err(if given.is_none() { Ended::NoBlocks } else { not_landed(prefill) });
            }
        }
    }
}
