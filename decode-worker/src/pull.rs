//! A prompt that another worker's external engine prefills, and whose KV this worker's engine pulls with a handle.
//!
//! The request gets its place in this worker's engine before the prefill is requested, so a handle never waits for a place. Engines do not
//! check handles, so this module does: a handle is used once, for the prompt for which it was made, on the stream on which it was received,
//! and only while it is valid.

use crate::{
    client::ClientStream,
    convert::{self, DecodeRequest},
    failure::DecodeEnd,
    forward::forward,
    handles::Handles,
    prefill::{PrefillNews, RemotePrefill},
    worker::{DecodeWorker, RemotePrompt, in_queue},
};
use futures::FutureExt;
use std::time::Duration;
use tandem_engine::{Event, Generate, KvSource};
use tandem_kv::prompt_digest;
use tandem_proto::v1::{self, PrefillDone, PrefillStart, WorkerRef, generate_reply::Message};
use tandem_worker::Job;
use tokio::time::{Instant, timeout_at};

/// Runs one attempt. Dropping the future ends the attempt on both workers.
pub(crate) async fn run(
    worker: &DecodeWorker,
    handles: &Handles,
    remote: RemotePrompt<'_>,
    client: &ClientStream,
) -> Result<(), DecodeEnd> {
    let RemotePrompt { request: DecodeRequest { generate, output, start_within, wait_until, .. }, start, prefill, waiting } =
        remote;
    let generate = Generate { kv: KvSource::Handle, ..generate };
    let digest = prompt_digest(&handles.hash_key, &generate.namespace, &start.prompt);
    let culprit = prefill.instance_id.clone();
    let limits = PlaceLimits { start_within, wait_until };
    let (mut job, mut prefill, first) = limits.places(worker, generate, (prefill, start), client).await?;
    let deadline = Instant::now() + worker.receive_timeout;
    let pulling = async {
        let handle = handle(&mut *job, &mut prefill, first, client).await?;
        // A failure message after the handle means that the handle has expired.
        let expired = prefill.next().now_or_never().is_some();
        let handle = handles.take(handle, digest).filter(|_| !expired);
        job.pull(handle.ok_or_else(|| DecodeEnd::BadHandle { prefill: culprit.clone() })?).await;
        match job.next().await {
            Some(Event::Started(started)) => Ok(started),
            other => Err(ended(other, &culprit)),
        }
    };
    let not_received = |_| Err(DecodeEnd::NotReceived { prefill: culprit.clone() });
    let started = timeout_at(deadline, pulling).await.unwrap_or_else(not_received)?;
    drop(waiting);
    client.send(Message::DecodeStarted(convert::started(&started))).await?;
    prefill.confirm_pulled();
    let chunks = async {
        if let Ok(PrefillNews::Done(PrefillDone { chunks, .. })) = prefill.next().await {
            client.prefilled(chunks).await?;
        }
        drop(prefill);
        Ok(())
    };
    tokio::try_join!(forward(&mut *job, output, client), chunks)?;
    Ok(())
}

/// How long an attempt waits for its places.
#[derive(Clone, Copy, Default)]
pub(crate) struct PlaceLimits {
    /// The time within which the prefill must begin; `None` sets no limit.
    pub(crate) start_within: Option<Duration>,
    /// The time until which the request may wait in the queue; `None` sets no limit.
    pub(crate) wait_until: Option<Instant>,
}

impl PlaceLimits {
    /// Waits for a place in this worker's engine, and then in the prefill worker's. Returns both halves, and the prefill worker's first message after
    /// the wait.
    pub(crate) async fn places(
        self,
        worker: &DecodeWorker,
        generate: Generate,
        (prefill, start): (WorkerRef, PrefillStart),
        client: &ClientStream,
    ) -> Result<(Box<dyn Job>, RemotePrefill, PrefillNews), DecodeEnd> {
        let Self { start_within, wait_until } = self;
        let mut job = worker.generate(generate, wait_until).await?;
        match in_queue(wait_until, worker.first_event(start_within, job.next(), client)).await? {
            Some(Event::Submitted) => {}
            other => return Err(ended(other, &worker.common.info.instance_id)),
        }
        let begin = RemotePrefill::begin(&worker.channels, prefill, start, start_within, client);
        let (prefill, first) = in_queue(wait_until, begin).await?;
        Ok((job, prefill, first))
    }
}

/// Waits for the prefill worker's handle. Meanwhile forwards that worker's count of cached tokens to the client.
async fn handle(
    job: &mut dyn Job,
    prefill: &mut RemotePrefill,
    first: PrefillNews,
    client: &ClientStream,
) -> Result<v1::KvHandle, DecodeEnd> {
    let (mut reply, mut scheduled) = (first, false);
    loop {
        match reply {
            PrefillNews::Waiting | PrefillNews::Submitted { .. } => {}
            PrefillNews::Scheduled(message) if !scheduled => {
                client.send(Message::Scheduled(message)).await?;
                scheduled = true;
            }
            PrefillNews::Handle(handle) if scheduled => return Ok(handle),
            PrefillNews::Failure(failure) => return Err(DecodeEnd::Prefill(failure)),
            PrefillNews::Scheduled(_) | PrefillNews::Handle(_) | PrefillNews::Done(_) => return Err(prefill.lost()),
        }
        reply = tokio::select! {
            biased;
            event = job.next() => return Err(ended(event, &prefill.instance_id)),
            reply = prefill.next() => reply?,
        };
    }
}

/// Returns the reason for which an event of this worker's job ends an attempt before its KV has arrived.
pub(crate) fn ended(event: Option<Event>, prefill: &str) -> DecodeEnd {
    match event {
        Some(Event::PullFailed) => DecodeEnd::NotPulled { prefill: prefill.to_owned() },
        Some(Event::Refused(refusal)) => refusal.into(),
        _ => DecodeEnd::Engine,
    }
}
