//! A job on an external engine: while its events are polled, it waits for a slot, sends its requests to the engine and reports their events.

use crate::{
    api::{AnswerChunk, Api, EngineCall, EngineFailure, EngineUsage, Finish, RoomCall},
    engine_load::LoadShare,
    http,
    shared::{AdapterState, Tiers},
    slots::{QueuedRequest, Slot},
};
use futures::{
    FutureExt,
    future::{BoxFuture, try_join_all},
};
use std::{
    iter,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};
use tandem_engine::{
    CachedTokens, Event, FinishReason, Generate, Generated, KvHandle, KvSource, Prefill, Refusal, Sampling, Started,
    TokenLogprobs,
};
use tandem_kv::TokenId;
use tandem_process::{Woken, retry::error_chain};
use tandem_worker::Job;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, timeout},
};
use tokio_util::sync::CancellationToken;

/// The time after which a request that has not ended is aborted again.
const ABORT_AGAIN: Duration = Duration::from_secs(1);
/// Maximum number of events that are reported at once. While this many events wait, the engine's answer is not read.
const EVENTS_MAX: usize = 64;

/// A job on an external engine. Dropping it ends the job's requests in the engine.
pub(crate) struct AdapterJob {
    events: mpsc::Receiver<Event>,
    handle: Option<oneshot::Sender<KvHandle>>,
    cancelled: CancellationToken,
    /// The work; `None` once it has ended.
    running: Option<Woken<BoxFuture<'static, ()>>>,
}

#[tonic::async_trait]
impl Job for AdapterJob {
    fn poll_next(&mut self, context: &mut Context<'_>) -> Poll<Option<Event>> {
        // The work reports its events while it is polled, so nothing has to wake this task for them.
        self.running.take_if(|running| running.poll_unpin(context).is_ready());
        match self.events.try_recv() {
            Ok(event) => Poll::Ready(Some(event)),
            Err(_) if self.running.is_some() => Poll::Pending,
            Err(_) => Poll::Ready(None),
        }
    }

    async fn pull(&mut self, handle: KvHandle) {
        // Sending fails only if the job has ended, which the job's events report.
        self.handle.take().map(|sender| sender.send(handle));
    }

    fn cancel(&mut self) {
        self.cancelled.cancel();
    }
}

struct Task {
    api: Arc<dyn Api>,
    shared: Arc<AdapterState>,
    events: mpsc::Sender<Event>,
    cancelled: CancellationToken,
}

enum JobEnd {
    Dropped,
    Event(Event),
}

impl From<EngineFailure> for JobEnd {
    fn from(failure: EngineFailure) -> Self {
        match failure.refusal() {
            Some(refusal) => {
                if matches!(refusal, Refusal::Unusable(_)) {
                    tracing::warn!("{refusal}");
                }
                Self::Event(Event::Refused(refusal))
            }
            None => {
                tracing::warn!(error = %error_chain(&failure), "a request to the engine failed");
                Self::Event(Event::Failed)
            }
        }
    }
}

fn start<F>(
    shared: &Arc<AdapterState>,
    api: &Arc<dyn Api>,
    waiting: QueuedWork,
    run: impl FnOnce(Task, SubmittedRequest) -> F + Send + 'static,
) -> AdapterJob
where
    F: Future<Output = Result<(), JobEnd>> + Send,
{
    let (events, receiver) = mpsc::channel(EVENTS_MAX);
    let ((sender, handle), cancelled) = (oneshot::channel(), CancellationToken::new());
    let task = Task { api: Arc::clone(api), shared: Arc::clone(shared), events: events.clone(), cancelled: cancelled.clone() };
    let (shared, api) = (Arc::clone(shared), Arc::clone(api));
    let running = async move {
        let QueuedWork { mut queued, work } = waiting;
        let slot = tokio::select! {
            biased;
            () = task.cancelled.cancelled() => return,
            slot = queued.slot() => slot,
        };
        let submitted = Instant::now();
        work.submitted();
        let running = SubmittedRequest { _slot: slot, work, handle, submitted };
        if events.send(Event::Submitted).await.is_err() {
            return;
        }
        if let Err(JobEnd::Event(event)) = run(task, running).await {
            shared.server_failed.check_after(&event, &*api).await;
            drop(events.send(event).await);
        }
    };
    AdapterJob { events: receiver, handle: Some(sender), cancelled, running: Some(Woken::new(running.boxed())) }
}

struct QueuedWork {
    queued: QueuedRequest,
    work: LoadShare,
}

struct SubmittedRequest {
    _slot: Slot,
    work: LoadShare,
    handle: oneshot::Receiver<KvHandle>,
    submitted: Instant,
}

pub(crate) fn prefill(shared: &Arc<AdapterState>, api: &Arc<dyn Api>, prefill: Prefill) -> Result<AdapterJob, Refusal> {
    let Prefill { request_id, account, priority, namespace, prompt, first_token } = prefill;
    let queued = shared.slots.enqueue(&account, priority, shared.blocks(prompt.len()))?;
    let call = EngineCall { request_id: shared.request_id(&request_id), namespace, tokens: prompt, images: Arc::default() };
    let new_tokens = call.tokens.len() - shared.known_tokens(&call.namespace, &call.tokens, &[]);
    let work = LoadShare::new(&shared.engine_load, request_id, new_tokens, (call.tokens.len(), 1));
    Ok(start(
        shared,
        api,
        QueuedWork { queued, work },
        |task, running| async move { task.export(call, first_token, running).await },
    ))
}

pub(crate) fn generate(shared: &Arc<AdapterState>, api: &Arc<dyn Api>, generate: Generate) -> Result<AdapterJob, Refusal> {
    let queued = shared.slots.enqueue(&generate.account, generate.priority, shared.blocks(generate.prompt.len()))?;
    let samples = if generate.generated.is_empty() { generate.samples as usize } else { generate.generated.len() };
    let images: Vec<_> = generate.images.iter().map(|image| image.start).collect();
    let new_tokens = match generate.kv {
        KvSource::Handle => 0,
        KvSource::Local | KvSource::Remote => {
            generate.prompt.len() - shared.known_tokens(&generate.namespace, &generate.prompt, &images)
        }
    };
    let work = LoadShare::new(&shared.engine_load, generate.request_id.clone(), new_tokens, (generate.prompt.len(), samples));
    Ok(start(shared, api, QueuedWork { queued, work }, |task, running| async move { task.generate(generate, running).await }))
}

impl Task {
    async fn send(&self, event: Event) -> Result<(), JobEnd> {
        self.events.send(event).await.map_err(|_| JobEnd::Dropped)
    }

    /// Checks that the model has these tokens, as far as the server reports the size of its vocabulary.
    fn check(&self, mut tokens: impl Iterator<Item = TokenId>) -> Result<(), EngineFailure> {
        let size = self.shared.info.vocab_size;
        tokens.find(|token| *token as usize >= size).map_or(Ok(()), |token| {
            Err(EngineFailure::Protocol(format!("it has token {token}, but the model's vocabulary has only {size} tokens")))
        })
    }

    async fn export(self, call: EngineCall, first_token: Option<Box<Sampling>>, running: SubmittedRequest) -> Result<(), JobEnd> {
        let SubmittedRequest { _slot, work, handle, mut submitted } = running;
        let room = match first_token {
            Some(sampling) => {
                let room = tokio::select! {
                    biased;
                    () = self.cancelled.cancelled() => return Err(JobEnd::Dropped),
                    room = handle => room.map_err(|_| JobEnd::Dropped)?,
                };
                submitted = Instant::now();
                Some(RoomCall { room, sampling: *sampling })
            }
            None => None,
        };
        let tiers = self.shared.tiers(&call);
        let exporting = self.api.export(&call, room);
        tokio::pin!(exporting);
        let exported = tokio::select! {
            biased;
            exported = &mut exporting => exported?,
            () = self.cancelled.cancelled() => {
                // The server ignores an abort that arrives before the request.
                loop {
                    self.api.abort(&call.request_id).await;
                    if let Ok(exported) = timeout(ABORT_AGAIN, &mut exporting).await {
                        break exported?;
                    }
                }
            }
        };
        // For a request that is aborted before its first token, vLLM always reports 0 cached tokens, even if it had found some.
        let is_aborted = exported.handle.is_err() && self.cancelled.is_cancelled();
        let cached = exported.cached_tokens.filter(|_| !is_aborted).map(|tokens| tiers.split(tokens));
        let known = exported.cached_tokens.map_or(tiers.known(), |tokens| tokens as usize);
        let took = submitted.elapsed();
        self.send(Event::Scheduled { cached }).await?;
        if is_aborted {
            return Err(JobEnd::Dropped);
        }
        let handle = exported.handle?;
        work.begun(call.tokens.len().saturating_sub(known), took);
        self.shared.computed(&call);
        self.send(handle.map_or_else(|| Event::Computed(Vec::new()), Event::Exported)).await
    }

    async fn generate(self, generate: Generate, running: SubmittedRequest) -> Result<(), JobEnd> {
        let SubmittedRequest { _slot, work, handle, submitted } = running;
        // If the KV comes from another engine, the time to the first token contains only the pull, not the other engine's prefill.
        let (handle, submitted) = match generate.kv {
            KvSource::Handle => (Some(handle.await.map_err(|_| JobEnd::Dropped)?), Instant::now()),
            KvSource::Local | KvSource::Remote => (None, submitted),
        };
        let request_id = self.shared.request_id(&generate.request_id);
        let (namespace, images) = (generate.namespace.clone(), Arc::clone(&generate.images));
        let base = EngineCall { request_id, namespace, tokens: generate.shared(), images };
        let tiers = self.shared.tiers(&base);
        if let Some(top) = generate.prompt_logprobs {
            // The engine does not use its prefix cache for a request that asks for the prompt's logprobs.
            let call = EngineCall { request_id: format!("{}-prompt", base.request_id), ..base.clone() };
            let logprobs = self.api.prompt_logprobs(&call, top).await?;
            self.check(logprobs.iter().flat_map(alternatives))?;
            self.send(Event::Scheduled { cached: Some(CachedTokens::default()) }).await?;
            self.send(Event::Started(Started { queue: work.queued(), ..Started::default() })).await?;
            self.send(Event::PromptLogprobs(logprobs)).await?;
        }
        let samples = match &generate.generated {
            none if none.is_empty() => (0..generate.samples).map(|sample| Generated { sample, tokens: Vec::new() }).collect(),
            resumed => resumed.clone(),
        };
        let answer = SampleSet {
            task: &self,
            generate: &generate,
            base: &base,
            tiers,
            work: &work,
            submitted,
            begun: CancellationToken::new(),
            reports_prompt: generate.prompt_logprobs.is_none(),
            counts_prompt: generate.prompt_logprobs.is_none() && handle.is_none(),
        };
        let mut handle = handle;
        let samples = samples.into_iter().enumerate().map(|(position, sample)| answer.sample(position, sample, handle.take()));
        try_join_all(samples).await?;
        // Records the prompt if no sample has begun, which means that only its logprobs were requested. Samples that have begun have recorded
        // it already. A cancelled request records nothing, because the engine may not have cached its blocks.
        if !answer.begun.is_cancelled() && !self.cancelled.is_cancelled() {
            self.shared.computed(&base);
        }
        Ok(())
    }
}

/// Returns the tokens that are reported as alternatives of a token.
fn alternatives(logprobs: &Option<TokenLogprobs>) -> impl Iterator<Item = TokenId> {
    logprobs.iter().flat_map(|logprobs| logprobs.top.iter().map(|alternative| alternative.token))
}

/// The samples of one generation. Each is a separate request to the engine, with its own seed, as in Tandem's engine.
struct SampleSet<'a> {
    task: &'a Task,
    generate: &'a Generate,
    base: &'a EngineCall,
    tiers: Tiers,
    work: &'a LoadShare,
    submitted: Instant,
    /// Cancelled when the first sample has its first token. Only then are the other samples submitted, so that they find the prompt in the engine's
    /// cache.
    begun: CancellationToken,
    /// Whether the first sample reports [`Event::Started`]. If prompt logprobs were requested, the event was reported before the samples, so this
    /// is false.
    reports_prompt: bool,
    /// Whether the first sample reports the number of cached tokens: not if prompt logprobs were requested or the KV comes from another
    /// worker. The numbers of the other samples are not reported, because they include the blocks that the first sample has stored.
    counts_prompt: bool,
}

impl SampleSet<'_> {
    /// Generates the sample at this position of the answer.
    async fn sample(&self, position: usize, generated: Generated, handle: Option<KvHandle>) -> Result<(), JobEnd> {
        let is_first = position == 0;
        if !is_first {
            tokio::select! {
                biased;
                () = self.task.cancelled.cancelled() => return Ok(()),
                () = self.begun.cancelled() => {}
            }
        }
        let Generated { sample, tokens } = generated;
        let sampling = self.generate.sampling.of_sample(sample, tokens.len() as u32);
        // The engine generates at least one token. If the limit is reached, that token is not reported.
        let is_silent = self.generate.sampling.max_tokens.is_some_and(|max| max as usize <= tokens.len());
        if is_silent && !(is_first && (self.reports_prompt || handle.is_some())) {
            return self.task.send(Event::Finished { sample, reason: FinishReason::Length }).await;
        }
        let call = EngineCall {
            request_id: format!("{}-{sample}", self.base.request_id),
            namespace: self.base.namespace.clone(),
            tokens: [&self.generate.prompt, &*tokens].concat(),
            images: Arc::clone(&self.base.images),
        };
        let sent_tokens = call.tokens.len();
        let room = (self.task.shared.info.context_length as usize).saturating_sub(call.tokens.len()).max(1);
        let run = SampleRun {
            set: self,
            sample,
            is_first,
            is_silent,
            left: sampling.max_tokens.map_or(room, |max| room.min(max as usize)),
            // An engine pulls KV even after the lease of the KV has ended, so the adapter checks the time. The lease is twice as long as the handle
            // is valid.
            lease_ends: handle.as_ref().map(|handle| Instant::now() + 2 * handle.valid_for),
            call,
            sent_tokens,
            is_aborted: false,
            has_begun: false,
            counted: None,
            last_token: None,
            finish: None,
        };
        match run.run(&sampling, handle).await? {
            Some(reason) => self.task.send(Event::Finished { sample, reason }).await,
            // The cancelled sample returns no error, because an error would also end the other samples before the first sample has reported the
            // number of cached tokens.
            None => Ok(()),
        }
    }
}

/// One sample, while the engine generates it.
struct SampleRun<'a> {
    set: &'a SampleSet<'a>,
    sample: u32,
    is_first: bool,
    /// Whether the sample's only token is not reported, because the client asked for 0 tokens.
    is_silent: bool,
    /// The request to the engine. The generated tokens are appended to its tokens.
    call: EngineCall,
    /// The number of tokens that the request began with.
    sent_tokens: usize,
    /// The number of tokens that the sample may still have.
    left: usize,
    /// The time at which the lease of the KV that the engine pulls ends; `None` if it pulls no KV.
    lease_ends: Option<Instant>,
    is_aborted: bool,
    has_begun: bool,
    /// The number of the prompt's cached tokens, if the engine has reported it before its last message.
    counted: Option<u32>,
    last_token: Option<TokenId>,
    finish: Option<Finish>,
}

impl SampleRun<'_> {
    /// Returns the reason why the sample ended; `None` if it was cancelled.
    async fn run(mut self, sampling: &Sampling, handle: Option<KvHandle>) -> Result<Option<FinishReason>, JobEnd> {
        let task = self.set.task;
        let mut chunks = task.api.generate(&self.call, sampling, handle).await.map_err(|failure| self.failed(failure))?;
        loop {
            let (chunk, arrived) = tokio::select! {
                biased;
                next = http::next_arrival(&mut chunks) => next,
                () = task.cancelled.cancelled(), if !self.is_aborted => {
                    self.is_aborted = true;
                    task.api.abort(&self.call.request_id).await;
                    continue;
                }
            };
            let lost = || EngineFailure::Protocol("the engine's stream ended before its message with the usage".to_owned());
            let chunk = chunk.unwrap_or_else(|| Err(lost())).map_err(|failure| self.failed(failure))?;
            let is_last = chunk.usage.is_some();
            let Some(usage) = self.on_chunk(chunk, arrived).await? else { continue };
            is_last.then(|| http::read_end(chunks));
            return self.on_end(usage).await;
        }
    }

    fn failed(&self, failure: EngineFailure) -> JobEnd {
        // A lost connection is a failure of this worker's engine.
        let is_answer = matches!(failure, EngineFailure::Denied { .. } | EngineFailure::Protocol(_) | EngineFailure::Failed(_));
        if self.lease_ends.is_some() && !self.has_begun && is_answer {
            tracing::warn!(error = %error_chain(&failure), "the engine could not pull a prompt's KV from the prefill worker's engine");
            return JobEnd::Event(Event::PullFailed);
        }
        failure.into()
    }

    /// Reports the tokens of a chunk. Returns the engine's report if the chunk is the last one.
    async fn on_chunk(&mut self, chunk: AnswerChunk, arrived: Option<Instant>) -> Result<Option<EngineUsage>, JobEnd> {
        let SampleSet { task, work, .. } = self.set;
        let AnswerChunk { mut tokens, mut finish, counted, mut usage } = chunk;
        if tokens.len() > self.left {
            tracing::warn!("the engine has generated more tokens than the request allows; the answer ends at the limit");
            tokens.truncate(self.left);
            finish = Some(Finish::Length);
            usage.get_or_insert_default();
        }
        self.left -= tokens.len();
        task.check(tokens.iter().flat_map(|(token, logprobs)| iter::once(*token).chain(alternatives(logprobs))))?;
        if self.counted.is_none() && counted.is_some() {
            self.counted = counted;
            self.count(counted).await?;
        }
        if !self.has_begun && !tokens.is_empty() {
            if self.lease_ends.is_some_and(|end| Instant::now() > end) {
                tracing::warn!("a prompt's KV was pulled after the end of its lease, and is not used");
                return Err(JobEnd::Event(Event::PullFailed));
            }
            self.has_begun = true;
            self.begin().await?;
        }
        work.generated(tokens.len(), arrived);
        for (token, logprobs) in tokens {
            self.last_token = Some(token);
            self.call.tokens.push(token);
            if !self.is_silent {
                task.send(Event::Token { sample: self.sample, token, logprobs }).await?;
            }
        }
        self.finish = finish.or(self.finish);
        Ok(usage)
    }

    async fn on_end(mut self, usage: EngineUsage) -> Result<Option<FinishReason>, JobEnd> {
        let reason = match (self.finish, self.last_token) {
            _ if self.is_silent => Some(FinishReason::Length),
            (Some(Finish::Stop), Some(token)) => Some(FinishReason::Stop(token)),
            (Some(Finish::Length), _) => Some(FinishReason::Length),
            (Some(Finish::Aborted), _) if self.is_aborted => None,
            _ => return Err(EngineFailure::Protocol("the answer ended without a valid finish_reason".to_owned()).into()),
        };
        usage.check(&self.call, self.sent_tokens);
        if self.counted.is_none() {
            // For a request that is aborted before its first token, vLLM always reports 0 cached tokens, even if it had found some.
            self.count(usage.cached_tokens.filter(|_| self.has_begun || !self.is_aborted)).await?;
        }
        if self.has_begun {
            // The engine does not compute the KV of an answer's last token.
            self.call.tokens.pop();
            self.set.task.shared.computed(&self.call);
        }
        Ok(reason)
    }

    /// Reports the number of the prompt's cached tokens, if this sample is the one that reports it.
    async fn count(&self, tokens: Option<u32>) -> Result<(), JobEnd> {
        if !(self.is_first && self.set.counts_prompt) {
            return Ok(());
        }
        self.set.task.send(Event::Scheduled { cached: tokens.map(|tokens| self.set.tiers.split(tokens)) }).await
    }

    /// Records that the prompt is computed, if this sample is the first one.
    async fn begin(&self) -> Result<(), JobEnd> {
        if !self.is_first {
            return Ok(());
        }
        let SampleSet { task, work, tiers, begun, submitted, reports_prompt, .. } = self.set;
        begun.cancel();
        let took = submitted.elapsed();
        let pulls = self.lease_ends.is_some();
        let known = self.counted.map_or(tiers.known(), |tokens| tokens as usize);
        work.begun(if pulls { 0 } else { self.call.tokens.len().saturating_sub(known) }, took);
        if !reports_prompt {
            return Ok(());
        }
        let started = Started {
            queue: work.queued(),
            kv_transfer: if pulls { took } else { Duration::ZERO },
            kv_transfer_bytes: 0,
            chunks: Vec::new(),
        };
        task.send(Event::Started(started)).await
    }
}

#[cfg(test)]
pub(crate) mod tests;
