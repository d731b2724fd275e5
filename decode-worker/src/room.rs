//! A prompt whose KV another worker's external engine sends to this worker's engine in a room.
//!
//! Both engines get the request at the same time. The prefill worker's engine samples the first token, and no token leaves this worker before the
//! prefill worker has confirmed that its engine has sent the KV: an engine whose partner was aborted may answer from incomplete KV.
//!
//! An engine that meets others in rooms computes no prompts, and a room is for one sample. So each sample of a request has its own prefill. The
//! first one counts the prompt; the others begin after it, and find the prompt in the cache of the prefill worker's engine.

use crate::{
    client::ClientStream,
    convert::{self, DecodeRequest, Output},
    failure::DecodeEnd,
    forward::forward,
    prefill::{PrefillNews, RemotePrefill},
    pull::{PlaceLimits, ended},
    worker::{DecodeWorker, RemotePrompt},
};
use futures::future::try_join_all;
use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};
use tandem_engine::{Event, Generate, Generated, KvHandle, KvSource, Refusal, Started, new_room};
use tandem_kv::{HashKey, prompt_digest};
use tandem_proto::v1::{FailureReason, KvRoom, PrefillStart, Scheduled, WorkerRef, generate_reply::Message};
use tandem_worker::Job;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// After this time, a further sample tries again to get a place that was not free.
const PLACE_PAUSE: Duration = Duration::from_millis(100);
/// The longest host:port of a room, in bytes.
const ADDRESS_BYTES_MAX: usize = 262;

/// Runs one attempt. Dropping the future aborts both halves of each sample. `hash_key` is the key of the prompt digest.
pub(crate) async fn run(
    worker: &DecodeWorker,
    hash_key: &HashKey,
    remote: RemotePrompt<'_>,
    client: &ClientStream,
) -> Result<(), DecodeEnd> {
    let RemotePrompt { request, start, prefill, waiting } = remote;
    let DecodeRequest { generate, output, start_within, wait_until, .. } = request;
    let samples = match generate.generated.is_empty() {
        true => (0..generate.samples).map(|sample| Generated { sample, tokens: Vec::new() }).collect(),
        false => generate.generated.clone(),
    };
    let begun = &CancellationToken::new();
    let (mut waiting, generate, stop_tokens) = (Some(waiting), &generate, &output.stop_tokens);
    let halves = |position: usize, generated: Generated| Halves {
        worker,
        hash_key,
        client,
        start: PrefillStart {
            prompt: [&generate.prompt, &*generated.tokens].concat(),
            is_counted_elsewhere: position > 0,
            sample: generated.sample,
            generated: u32::try_from(generated.tokens.len()).unwrap_or(u32::MAX),
            ..start.clone()
        },
        generate: Generate { kv: KvSource::Handle, generated: vec![generated], ..generate.clone() },
        prefill: prefill.clone(),
        limits: PlaceLimits { start_within, wait_until },
    };
    let runs = samples.into_iter().enumerate().map(|(position, generated)| {
        let (halves, waiting) = (halves(position, generated), waiting.take());
        async move {
            let (mut job, started) = if position == 0 {
                halves.begin().await?
            } else {
                begun.cancelled().await;
                halves.begin_when_free().await?
            };
            drop(waiting);
            if position == 0 {
                begun.cancel();
                client.send(Message::DecodeStarted(convert::started(&started))).await?;
            }
            let output = Output { samples: 1, stop_tokens: stop_tokens.clone(), prompt: Vec::new() };
            forward(&mut *job, output, client).await
        }
    });
    try_join_all(runs).await.map(drop)
}

/// Both halves of one sample, until its KV has arrived.
struct Halves<'a> {
    worker: &'a DecodeWorker,
    hash_key: &'a HashKey,
    client: &'a ClientStream,
    start: PrefillStart,
    generate: Generate,
    prefill: WorkerRef,
    limits: PlaceLimits,
}

impl Halves<'_> {
    /// Begins a further sample of an answer that is being sent. It waits as long as the client does, because a failure would end the answer.
    async fn begin_when_free(self) -> Result<(Box<dyn Job>, Started), DecodeEnd> {
        let halves = Self { limits: PlaceLimits::default(), ..self };
        loop {
            match halves.begin().await {
                Err(DecodeEnd::Refused(Refusal::Full)) => {}
                Err(DecodeEnd::Prefill(failure)) if failure.reason() == FailureReason::AtCapacity => {}
                ended => return ended,
            }
            sleep(PLACE_PAUSE).await;
        }
    }

    /// Runs both halves until the prefill worker has confirmed its half. Returns this worker's half, which has its first token.
    async fn begin(&self) -> Result<(Box<dyn Job>, Started), DecodeEnd> {
        let Self { worker, hash_key, client, start, generate, prefill, limits } = self;
        let counting = Some(*client).filter(|_| !start.is_counted_elsewhere);
        let digest = prompt_digest(hash_key, &generate.namespace, &start.prompt);
        let (culprit, this) = (prefill.instance_id.clone(), worker.common.info.instance_id.clone());
        let (mut job, mut prefill, first) =
            limits.places(worker, generate.clone(), (prefill.clone(), start.clone()), client).await?;
        let address = match first {
            PrefillNews::Submitted { room_address } if (1..=ADDRESS_BYTES_MAX).contains(&room_address.len()) => room_address,
            PrefillNews::Failure(failure) => return Err(DecodeEnd::Prefill(failure)),
            _ => return Err(prefill.lost()),
        };
        let room = new_room();
        prefill.send_room(KvRoom { room, prompt_digest: digest });
        job.pull(KvHandle::of_room(&address, room, worker.receive_timeout)).await;
        if let Some(client) = counting {
            // The prefill worker knows the count only when it has sent the KV.
            client.send(Message::Scheduled(Scheduled { reported_later: true, ..Scheduled::default() })).await?;
        }
        // The side that has not done its part is the cause of a timeout.
        let is_confirmed = AtomicBool::new(false);
        let confirmed = async {
            confirmed(&mut prefill, counting).await?;
            is_confirmed.store(true, Ordering::Relaxed);
            Ok(())
        };
        let started = async {
            match job.next().await {
                Some(Event::Started(started)) => Ok(started),
                other => Err(ended(other, &culprit)),
            }
        };
        let both = timeout(worker.receive_timeout, async { tokio::try_join!(confirmed, started) }).await;
        let ((), started) = both.unwrap_or_else(|_| {
            let culprit = if is_confirmed.load(Ordering::Relaxed) { this } else { culprit.clone() };
            Err(DecodeEnd::NotReceived { prefill: culprit })
        })?;
        Ok((job, started))
    }
}

/// Waits until the prefill worker has confirmed that its engine has sent the KV. Forwards that worker's count of cached tokens to the client
/// `counting`; `None` if another sample has counted the prompt.
async fn confirmed(prefill: &mut RemotePrefill, counting: Option<&ClientStream>) -> Result<(), DecodeEnd> {
    let mut is_scheduled = false;
    loop {
        match prefill.next().await? {
            PrefillNews::Waiting => {}
            PrefillNews::Scheduled(scheduled) if !is_scheduled => {
                is_scheduled = true;
                if let Some(client) = counting {
                    client.send(Message::Scheduled(scheduled)).await?;
                }
            }
            PrefillNews::Done(_) if is_scheduled => return Ok(()),
            PrefillNews::Failure(failure) => return Err(DecodeEnd::Prefill(failure)),
            PrefillNews::Scheduled(_) | PrefillNews::Submitted { .. } | PrefillNews::Handle(_) | PrefillNews::Done(_) => {
                return Err(prefill.lost());
            }
        }
    }
}
