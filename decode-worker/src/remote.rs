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
use tandem_engine::{Event, Job, Started};
use tandem_node::worker::Direction;
use tandem_proto::v1::{PrefillDone, PrefillStart, Reason, Ticket, Way, WorkerRef, generate_reply::Message, worker_info::Role};
use tokio::time::Instant;

/// Runs one attempt. Dropping the future ends it on both workers.
pub(crate) async fn run(worker: &Worker, request: Request, prefill: WorkerRef, client: &Client) -> Result<(), Ended> {
    if !prefill.is_vouched(Role::Prefill, worker.channels.network().key()) {
        worker.metrics.count_unvouched();
        return Err(Ended::Unvouched);
    }
    request.generate.check(worker.engine.info())?;
    let waiting = worker.remote_waiting.try_acquire().map_err(|_| Ended::RemoteWaitingFull)?;
    let Request { attempt, traceparent, account, generate, output, start_within, .. } = request;
    let start = PrefillStart {
        request_id: generate.request_id.clone(),
        traceparent: client.span.traceparent().unwrap_or(traceparent),
        attempt,
        instance_id: prefill.instance_id.clone(),
        prompt: generate.shared(),
        cache_namespace: generate.namespace.as_bytes().to_vec(),
        account,
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
    let mut job = worker.engine.generate(generate).await?;
    let landed = land(worker, &mut job, &mut prefill, deadline).await?;
    drop(waiting);
    if landed.started.kv_transfer_bytes > 0 {
        let received = worker.metrics.transfer(ways::name(landed.way), Direction::Received);
        received.bytes.increment(landed.started.kv_transfer_bytes);
        received.duration.record(landed.started.kv_transfer.as_secs_f64());
    }
    client.send(Message::Started(convert::started(&landed.started))).await?;
    let goodbye = async {
        // The prefill worker is about to hear that its last block has landed. If all was here before, it computes for nothing:
        // closing the stream tells it.
        let mut done = landed.done;
        if landed.prefill_to_end
            && let Ok(Ok(Said::Done(late))) = tokio::time::timeout_at(deadline, prefill.next()).await
        {
            done = Some(late);
        }
        drop(prefill);
        client.prefilled(done.map(|done| done.chunks).unwrap_or_default()).await?;
        Ok::<(), Ended>(())
    };
    tokio::try_join!(forward(&mut job, output, client), goodbye).map(drop)
}

struct Landed {
    started: Started,
    way: Way,
    /// The prefill worker has said so already.
    done: Option<PrefillDone>,
    /// The prefill worker has not said that it is done, and has something to be done with.
    prefill_to_end: bool,
}

/// Reserves blocks, lets the prefill worker write into those which are missing, and waits until all is here.
async fn land(worker: &Worker, job: &mut Job, prefill: &mut Prefill, deadline: Instant) -> Result<Landed, Ended> {
    let not_landed = |prefill: &Prefill| Ended::NotLanded { prefill: prefill.instance_id().to_owned() };
    // The ticket, how many blocks it is for, and the way they take.
    let mut given: Option<(u64, usize, Chosen)> = None;
    let mut done = None;
    loop {
        tokio::select! {
            // What the engine has told counts before what the prefill worker says of it.
            biased;
            event = job.next() => match event {
                Some(Event::Reserved { ticket, missing_blocks }) => {
                    // Nothing has to go any way.
                    let offered = prefill.offered().filter(|_| !missing_blocks.is_empty());
                    let chosen = worker.ways.choose(prefill.instance_id(), offered, ticket).await;
                    let (way, communicator) = (chosen.way.into(), chosen.communicator.clone());
                    given = Some((ticket, missing_blocks.len(), chosen));
                    let address = worker.address.clone();
                    let ticket = Ticket { ticket, address, missing_blocks, way, communicator, ..Ticket::default() };
                    prefill.give(ticket.vouched(prefill.instance_id(), worker.channels.network().key()));
                }
                Some(Event::Started(started)) => {
                    let missing = given.as_ref().map_or(0, |(_, missing, _)| *missing);
                    let way = given.as_ref().map_or(Way::Tcp, |(_, _, chosen)| chosen.way);
                    let prefill_to_end = done.is_none() && missing > 0;
                    return Ok(Landed { started, way, done, prefill_to_end });
                }
                Some(Event::Revoked) => return Err(Ended::Revoked),
                _ => return Err(Ended::Engine),
            },
            said = prefill.next(), if done.is_none() => match said? {
                Said::Done(said) => {
                    done = Some(said);
                    if let Some((ticket, ..)) = given {
                        worker.engine.confirm(ticket).await;
                    }
                }
                // It waited for our ticket, which waited for our blocks.
                Said::Failure(failure) if given.is_none() && failure.reason() == Reason::Timeout => return Err(Ended::NoBlocks),
                Said::Failure(failure) => return Err(Ended::Prefill(failure)),
                Said::Scheduled(_) => return Err(prefill.lost()),
            },
            () = tokio::time::sleep_until(deadline) => {
                return Err(if given.is_none() { Ended::NoBlocks } else { not_landed(prefill) });
            }
        }
    }
}
