//! The `Decode` service. It checks a request, has its prompt prefilled on this worker or on a prefill worker, and generates the tokens of
//! the answer.

use crate::{
    client::ClientStream,
    convert::{DecodeRequest, Invalid},
    failure::DecodeEnd,
    forward::{LateCount, forward, forward_late},
    remote,
    worker::{DecodeWorker, Receiving, in_queue},
};
use std::sync::Arc;
use tandem_engine::Event;
use tandem_kv::Namespace;
use tandem_proto::v1::{
    FinishReply, FinishRequest, GenerateReply, GenerateRequest, Scheduled, decode_server::Decode, generate_reply::Message,
};
use tandem_worker::{CountedJob, Disconnected, Replies, ScheduledPrompt};
use tonic::{Response, Status};
use tracing::Instrument;

pub(crate) struct DecodeService(pub(crate) Arc<DecodeWorker>);

#[tonic::async_trait]
impl Decode for DecodeService {
    type GenerateStream = Replies<GenerateReply>;

    async fn generate(&self, request: tonic::Request<GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let (worker, request) = (self.0.clone(), request.into_inner());
        let span = worker.common.settings.tracer.follow(&request.traceparent, "generate");
        if span.is_sampled() {
            span.set("tandem.worker", worker.common.info.worker_id.clone());
            span.set("tandem.attempt", request.attempt);
            let namespace = Namespace::from_bytes(&request.cache_namespace);
            span.set("gen_ai.request.model", namespace.model().unwrap_or_default().to_owned());
            span.set("gen_ai.usage.input_tokens", request.prompt.len() as u64);
            span.set("tandem.resumed", !request.generated.is_empty());
        }
        let logged = span.logged(&request.request_id, request.attempt);
        let entry = worker.common.ledger.attempt(&request.request_id, request.attempt, !request.generated.is_empty());
        let serve =
            |replies| async move { worker.serve(request, ClientStream::new(replies, entry, span)).await }.instrument(logged);
        Ok(Response::new(self.0.common.requests.poll(serve)))
    }

    async fn finish(&self, request: tonic::Request<FinishRequest>) -> Result<Response<FinishReply>, Status> {
        let FinishRequest { instance_id, request_id, attempt } = request.into_inner();
        if instance_id == self.0.common.info.instance_id {
            self.0.finishing.finish(request_id, attempt);
        }
        Ok(Response::new(FinishReply {}))
    }
}

impl DecodeWorker {
    async fn serve(&self, request: GenerateRequest, client: ClientStream) -> Result<(), Disconnected> {
        let ended = tokio::select! {
            biased;
            ended = self.run(request, &client) => ended,
            () = self.common.backend.hung() => Err(DecodeEnd::Hung),
        };
        let Err(ended) = ended else { return Ok(()) };
        tracing::debug!(%ended, "generation ended early");
        client.send(Message::Failure(ended.report(&self.common.info.instance_id)?)).await
    }

    async fn run(&self, request: GenerateRequest, client: &ClientStream) -> Result<(), DecodeEnd> {
        let tandem_worker::Worker { info, backend, shutdown, .. } = &self.common;
        if request.instance_id != info.instance_id {
            return Err(DecodeEnd::WrongInstance { requested: request.instance_id });
        }
        if shutdown.is_draining() {
            return Err(DecodeEnd::Draining);
        }
        // Only an engine that meets others in rooms lets them sample the first token.
        let for_prefill = matches!(self.receiving, Receiving::Rooms(_)).then(|| request.sampling.clone()).flatten();
        let request = DecodeRequest::check(request, backend.info().vocab_size)?;
        self.common.model_of(&request.generate.namespace)?;
        if !request.generate.images.is_empty() && !info.accepts_images {
            return Err(Invalid::NoImages.into());
        }
        match request.prefill.clone() {
            None => self.local(request, client).await,
            Some(prefill) => remote::run(self, request, (prefill, for_prefill), client).await,
        }
    }

    async fn local(&self, request: DecodeRequest, client: &ClientStream) -> Result<(), DecodeEnd> {
        let DecodeRequest { attempt, generate, output, start_within, wait_until, .. } = request;
        let prompt = u32::try_from(generate.shared().len()).unwrap_or(u32::MAX);
        let (namespace, request_id, account) =
            (&generate.namespace.clone(), &generate.request_id.clone(), &generate.account.clone());
        let model = self.common.model_of(namespace)?;
        let prompt = ScheduledPrompt { request_id, attempt, model, account, prompt, cached: None };
        let job = self.generate(generate, wait_until).await?;
        let mut job = CountedJob::new(job, &self.common, prompt);
        let first = in_queue(wait_until, self.first_event(start_within, job.next(), client)).await?;
        let mut scheduled = Scheduled { reported_later: true, ..Scheduled::default() };
        let late = match first {
            Some(Event::Scheduled { cached }) => {
                scheduled = self.common.scheduled(cached);
                None
            }
            Some(Event::Submitted) => Some(LateCount { worker: &self.common, attempt: self.finishing.add(request_id, attempt) }),
            Some(Event::Refused(refusal)) => return Err(refusal.into()),
            _ => return Err(DecodeEnd::Engine),
        };
        client.send(Message::Scheduled(scheduled)).await?;
        match late {
            Some(late) => forward_late(&mut job, output, client, &late).await,
            None => forward(&mut job, output, client).await,
        }
    }
}
