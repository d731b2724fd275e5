//! The `Decode` service: checks a request, then runs it here or with a prefill worker.

use crate::{DecodeWorkerSettings, convert::Request, failure::Ended, forward::forward, remote, ways::Ways};
use std::{
    sync::{Arc, Once},
    time::Duration,
};
use tandem_engine::Event;
use tandem_node::trace::Span;
use tandem_proto::{
    channel::Channels,
    v1::{
        GenerateReply, GenerateRequest, PrefillChunk, PrefillTimeline, Scheduled, decode_server::Decode, generate_reply::Message,
    },
};
use tandem_worker::{
    Backend, ClientGone, LedgerEntry, Replies, ReplySender, Requests, ScheduledPrompt, WorkerLedger, WorkerMetrics,
};
use tokio::sync::Semaphore;
use tonic::{Response, Status};
use tracing::Instrument;

/// What all requests share.
pub(crate) struct Worker {
    pub(crate) instance_id: String,
    /// Where prefill workers send blocks.
    pub(crate) address: String,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) settings: DecodeWorkerSettings,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) ways: Ways,
    pub(crate) requests: Requests,
    pub(crate) ledger: WorkerLedger,
    pub(crate) channels: Channels,
    pub(crate) remote_waiting: Semaphore,
}

pub(crate) struct Service(pub(crate) Arc<Worker>);

/// The client of one attempt.
pub(crate) struct Client {
    replies: ReplySender<GenerateReply>,
    /// What it has seen of the attempt is the attempt's outcome.
    entry: LedgerEntry,
    /// The attempt's.
    pub(crate) span: Span,
    began: Once,
}

impl Client {
    pub(crate) async fn send(&self, message: Message) -> Result<(), ClientGone> {
        let outcome: Option<fn(&LedgerEntry)> = match &message {
            Message::PromptLogprobs(_) | Message::Tokens(_) | Message::Finished(_) => Some(LedgerEntry::began),
            Message::Failure(_) => Some(LedgerEntry::failed),
            Message::Scheduled(_) | Message::DecodeStarted(_) | Message::PrefillTimeline(_) => None,
        };
        match &message {
            Message::Scheduled(_) => self.span.event("scheduled", &[]),
            Message::DecodeStarted(_) => self.span.event("started", &[]),
            Message::PrefillTimeline(_) => {}
            Message::Failure(failure) => self.span.fail(failure.reason().label()),
            _ => self.began.call_once(|| self.span.event("first token", &[])),
        }
        self.replies.send(GenerateReply { message: Some(message) }).await?;
        if let Some(tell) = outcome {
            tell(&self.entry);
        }
        Ok(())
    }

    /// What the prompt's prefill was cut into; says nothing of none.
    pub(crate) async fn prefilled(&self, chunks: Vec<PrefillChunk>) -> Result<(), ClientGone> {
        if chunks.is_empty() {
            return Ok(());
        }
        self.span.set("tandem.prefill_chunks", chunks.len() as u64);
        self.send(Message::PrefillTimeline(PrefillTimeline { chunks })).await
    }
}

/// What makes a prefill begin, unless it takes longer than it may; `culprit` would be to blame.
pub(crate) async fn in_time<T>(
    limit: Option<Duration>,
    starting: impl Future<Output = Result<T, Ended>>,
    culprit: &str,
) -> Result<T, Ended> {
    match limit {
        None => starting.await,
        Some(limit) => {
            tokio::time::timeout(limit, starting).await.unwrap_or_else(|_| Err(Ended::NotStarted { culprit: culprit.to_owned() }))
        }
    }
}

#[tonic::async_trait]
impl Decode for Service {
    type GenerateStream = Replies<GenerateReply>;

    async fn generate(&self, request: tonic::Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let (worker, request) = (self.0.clone(), request.into_inner());
        let span = worker.settings.worker.tracer.follow(&request.traceparent, "generate");
        if span.is_sampled() {
            span.set("tandem.worker", worker.settings.worker.worker_id.clone());
            span.set("tandem.attempt", request.attempt);
            span.set("gen_ai.request.model", worker.settings.worker.model.clone());
            span.set("gen_ai.usage.input_tokens", request.prompt.len() as u64);
            span.set("tandem.resumed", !request.generated.is_empty());
        }
        let logged = span.logged(&request.request_id, request.attempt);
        let entry = worker.ledger.attempt(&request.request_id, request.attempt, !request.generated.is_empty());
        let serve = |replies| {
            async move { worker.serve(request, Client { replies, entry, span, began: Once::new() }).await }.instrument(logged)
        };
        let replies = self.0.requests.start(serve);
        Ok(Response::new(replies))
    }
}

impl Worker {
    async fn serve(&self, request: GenerateRequest, client: Client) -> Result<(), ClientGone> {
        let ended = tokio::select! {
            biased;
            ended = self.run(request, &client) => ended,
            () = self.backend.hung() => Err(Ended::Hung),
        };
        let Err(ended) = ended else { return Ok(()) };
        tracing::debug!(%ended, "generation ended early");
        client.send(Message::Failure(ended.tell(&self.instance_id)?)).await
    }

    async fn run(&self, request: GenerateRequest, client: &Client) -> Result<(), Ended> {
        if request.instance_id != self.instance_id {
            return Err(Ended::WrongInstance { asked_for: request.instance_id });
        }
        if self.requests.is_draining() {
            return Err(Ended::Draining);
        }
        let request = Request::check(request, self.backend.info().vocab_size)?;
        match request.prefill.clone() {
            None => self.local(request, client).await,
            Some(prefill) => remote::run(self, request, prefill, client).await,
        }
    }

    async fn local(&self, request: Request, client: &Client) -> Result<(), Ended> {
        let Request { attempt, generate, output, start_within, .. } = request;
        let prompt_tokens = u32::try_from(generate.shared().len()).unwrap_or(u32::MAX);
        let (request_id, account) = (generate.request_id.clone(), generate.account.clone());
        let starting = async {
            let mut job = self.backend.generate(generate).await?;
            match job.next().await {
                Some(Event::Scheduled { cached_tokens }) => Ok((job, cached_tokens)),
                _ => Err(Ended::Engine),
            }
        };
        let (mut job, cached_tokens) = in_time(start_within, starting, &self.instance_id).await?;
        self.metrics.observe_scheduled(prompt_tokens, cached_tokens);
        let (request_id, account) = (&request_id, &account);
        self.ledger.scheduled(ScheduledPrompt { request_id, attempt, account, prompt: prompt_tokens, cached: cached_tokens });
        let reported = (!self.settings.worker.withhold_cached_tokens).then_some(cached_tokens);
        client.send(Message::Scheduled(Scheduled::on_device(reported))).await?;
        forward(&mut *job, output, client).await
    }
}
