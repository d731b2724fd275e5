//! The `Decode` service: checks a request, then runs it here or with a prefill worker.

use crate::{
    client::Client,
    convert::Request,
    failure::Ended,
    forward::forward,
    remote,
    worker::{Worker, in_time},
};
use std::sync::Arc;
use tandem_engine::Event;
use tandem_proto::v1::{GenerateReply, GenerateRequest, Scheduled, decode_server::Decode, generate_reply::Message};
use tandem_worker::{ClientGone, Replies, ScheduledPrompt};
use tonic::{Response, Status};
use tracing::Instrument;

pub(crate) struct Service(pub(crate) Arc<Worker>);

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
        let serve = |replies| async move { worker.serve(request, Client::new(replies, entry, span)).await }.instrument(logged);
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
