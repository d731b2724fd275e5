//! The `Decode` service: checks a request, then prefills its prompt here or on a prefill worker, and generates its tokens.

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
use tandem_proto::v1::{GenerateReply, GenerateRequest, decode_server::Decode, generate_reply::Message};
use tandem_worker::{Disconnected, Replies, ScheduledPrompt};
use tonic::{Response, Status};
use tracing::Instrument;

pub(crate) struct Service(pub(crate) Arc<Worker>);

#[tonic::async_trait]
impl Decode for Service {
    type GenerateStream = Replies<GenerateReply>;

    async fn generate(&self, request: tonic::Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let (worker, request) = (self.0.clone(), request.into_inner());
        let span = worker.common.settings.tracer.follow(&request.traceparent, "generate");
        if span.is_sampled() {
            span.set("tandem.worker", worker.common.info.worker_id.clone());
            span.set("tandem.attempt", request.attempt);
            span.set("gen_ai.request.model", worker.common.info.model.clone());
            span.set("gen_ai.usage.input_tokens", request.prompt.len() as u64);
            span.set("tandem.resumed", !request.generated.is_empty());
        }
        let logged = span.logged(&request.request_id, request.attempt);
        let entry = worker.common.ledger.attempt(&request.request_id, request.attempt, !request.generated.is_empty());
        let serve = |replies| async move { worker.serve(request, Client::new(replies, entry, span)).await }.instrument(logged);
        Ok(Response::new(self.0.common.requests.start(serve)))
    }
}

impl Worker {
    async fn serve(&self, request: GenerateRequest, client: Client) -> Result<(), Disconnected> {
        let ended = tokio::select! {
            biased;
            ended = self.run(request, &client) => ended,
            () = self.common.backend.hung() => Err(Ended::Hung),
        };
        let Err(ended) = ended else { return Ok(()) };
        tracing::debug!(%ended, "generation ended early");
        client.send(Message::Failure(ended.report(&self.common.info.instance_id)?)).await
    }

    async fn run(&self, request: GenerateRequest, client: &Client) -> Result<(), Ended> {
        let tandem_worker::Worker { info, backend, shutdown, .. } = &self.common;
        if request.instance_id != info.instance_id {
            return Err(Ended::WrongInstance { requested: request.instance_id });
        }
        if shutdown.is_draining() {
            return Err(Ended::Draining);
        }
        let request = Request::check(request, backend.info().vocab_size)?;
        match request.prefill.clone() {
            None => self.local(request, client).await,
            Some(prefill) => remote::run(self, request, prefill, client).await,
        }
    }

    async fn local(&self, request: Request, client: &Client) -> Result<(), Ended> {
        let Request { attempt, generate, output, start_within, .. } = request;
        let prompt = u32::try_from(generate.shared().len()).unwrap_or(u32::MAX);
        let (request_id, account) = (&generate.request_id.clone(), &generate.account.clone());
        let starting = async {
            let mut job = self.common.backend.generate(generate).await?;
            match job.next().await {
                Some(Event::Scheduled { cached_tokens }) => Ok((job, cached_tokens)),
                _ => Err(Ended::Engine),
            }
        };
        let (mut job, cached) = in_time(start_within, starting, &self.common.info.instance_id).await?;
        let scheduled = self.common.scheduled(ScheduledPrompt { request_id, attempt, account, prompt, cached });
        client.send(Message::Scheduled(scheduled)).await?;
        forward(&mut *job, output, client).await
    }
}
