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
use tandem_proto::v1::{
    FinishReply, FinishRequest, GenerateReply, GenerateRequest, Scheduled, decode_server::Decode, generate_reply::Message,
};
use tandem_worker::{ClientGone, CountedJob, Replies, ScheduledPrompt};
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
        let withhold = worker.settings.worker.withhold_cached_tokens;
        let serve =
            |replies| async move { worker.serve(request, Client::new(replies, entry, span, withhold)).await }.instrument(logged);
        let replies = self.0.requests.start(serve);
        Ok(Response::new(replies))
    }

    async fn finish(&self, request: tonic::Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        let FinishRequest { instance_id, request_id, attempt } = request.into_inner();
        if instance_id == self.0.instance_id {
            self.0.finishing.finish(request_id, attempt);
        }
        Ok(Response::new(FinishReply {}))
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
        let prompt = u32::try_from(generate.shared().len()).unwrap_or(u32::MAX);
        let (request_id, account) = (generate.request_id.clone(), generate.account.clone());
        let counted = ScheduledPrompt { request_id: &request_id, attempt, account: &account, prompt, cached: None };
        let starting = async {
            let job = self.backend.generate(generate).await?;
            let mut job = CountedJob::new(job, &self.metrics, &self.ledger, counted);
            let first = job.next().await;
            Ok((job, first))
        };
        let (mut job, first) = in_time(start_within, starting, &self.instance_id).await?;
        let finish = match first {
            Some(Event::Scheduled { cached }) => {
                client.send_scheduled(cached).await?;
                None
            }
            Some(Event::Submitted) => {
                client.send(Message::Scheduled(Scheduled { reported_later: true, ..Scheduled::default() })).await?;
                Some(self.finishing.add(&request_id, attempt))
            }
            Some(Event::Refused(refusal)) => return Err(refusal.into()),
            _ => return Err(Ended::Engine),
        };
        forward(&mut job, output, client, finish.as_ref()).await
    }
}
