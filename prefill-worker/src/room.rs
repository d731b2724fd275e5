//! One attempt on an external engine that sends the KV to the decode worker's engine in a room.
//!
//! The decode worker draws the room as soon as the prompt has its place here, and both engines start together. An engine sends whatever prompt it
//! has, so the digests of both prompts are compared before this worker's engine starts.

use crate::{
    PrefillWorker,
    attempt::{next_message, send_scheduled, send_waiting, submit},
    failure::{PrefillEnd, Protocol},
};
use tandem_engine::{Event, KvHandle};
use tandem_kv::{HashKey, Namespace, prompt_digest};
use tandem_process::trace::Span;
use tandem_proto::v1::{PrefillDone, PrefillReply, PrefillRequest, PrefillStart, Submitted, prefill_reply, prefill_request};
use tandem_worker::{Job, ReplySender, first_event};
use tokio::time::timeout;
use tonic::Streaming;

/// Runs one attempt until the engine has sent the KV. Dropping the future aborts the request in the engine. `address` is where engines meet this
/// worker's engine.
pub(crate) async fn send(
    worker: &PrefillWorker,
    (hash_key, address): (&HashKey, &str),
    mut start: PrefillStart,
    mut messages: Streaming<PrefillRequest>,
    replies: &ReplySender<PrefillReply>,
    span: &Span,
) -> Result<PrefillDone, PrefillEnd> {
    let prompt_digest = prompt_digest(hash_key, &Namespace::from_bytes(&start.cache_namespace), &start.prompt);
    if start.sampling.is_none() {
        return Err(PrefillEnd::Protocol(Protocol::MissingSampling));
    }
    let mut job = submit(worker, &mut start).await?.counted_from_pull();
    match first_event(&*worker.common.backend, None, job.next(), || send_waiting(replies)).await? {
        Some(Some(Event::Submitted)) => {}
        Some(Some(Event::Refused(refusal))) => return Err(refusal.into()),
        _ => return Err(PrefillEnd::Engine),
    }
    let submitted = Submitted { room_address: address.to_owned() };
    replies.send(PrefillReply { message: Some(prefill_reply::Message::Submitted(submitted)) }).await?;
    let room = match timeout(worker.ticket_wait, next_message(&mut messages)).await.map_err(|_| PrefillEnd::NoRoom)?? {
        prefill_request::Message::Room(room) => room,
        _ => return Err(PrefillEnd::Protocol(Protocol::UnexpectedMessage)),
    };
    if room.prompt_digest != prompt_digest {
        return Err(PrefillEnd::OtherPrompt);
    }
    job.pull(KvHandle::of_room(address, room.room, worker.ticket_wait)).await;
    loop {
        let event = tokio::select! {
            biased;
            event = job.next() => event,
            early = next_message(&mut messages) => {
                return Err(early.map_or_else(Into::into, |_| PrefillEnd::Protocol(Protocol::UnexpectedMessage)));
            }
        };
        match event {
            Some(Event::Scheduled { cached }) => send_scheduled(worker, cached, replies, span).await?,
            Some(Event::Computed(_)) => break,
            Some(Event::Refused(refusal)) => return Err(refusal.into()),
            _ => return Err(PrefillEnd::Engine),
        }
    }
    span.event("computed", &[]);
    Ok(PrefillDone::default())
}
