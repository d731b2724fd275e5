//! The `Prefill` service: reads the first message of each stream, then runs an [`crate::attempt`].

use crate::{
    PrefillWorkerSettings,
    attempt::attempt,
    export::export,
    failure::{Ended, Protocol, Told},
};
use std::sync::Arc;
use tandem_kv::HashKey;
use tandem_node::trace::Span;
use tandem_proto::v1::{PrefillReply, PrefillRequest, PrefillStart, prefill_reply, prefill_request, prefill_server::Prefill};
use tandem_transfer::SendPaths;
use tandem_worker::{Backend, ClientGone, Replies, ReplySender, Requests, WorkerLedger, WorkerMetrics};
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

/// The parts that all attempts share.
pub(crate) struct Worker {
    pub(crate) instance_id: String,
    pub(crate) backend: Arc<dyn Backend>,
    pub(crate) settings: PrefillWorkerSettings,
    pub(crate) metrics: Arc<WorkerMetrics>,
    pub(crate) sending: Sending,
    pub(crate) requests: Requests,
    pub(crate) ledger: WorkerLedger,
}

/// How KV leaves this worker.
pub(crate) enum Sending {
    /// Block by block, to the places that a ticket names.
    Transfers(SendPaths),
    /// By a handle for the prompt's KV; its digest uses this key.
    Handles { hash_key: HashKey },
}

pub(crate) struct Service(pub(crate) Arc<Worker>);

#[tonic::async_trait]
impl Prefill for Service {
    type PrefillStream = Replies<PrefillReply>;

    async fn prefill(&self, request: Request<Streaming<PrefillRequest>>) -> Result<Response<Self::PrefillStream>, Status> {
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(self.0.settings.ticket_wait, messages.message()).await;
        let Ok(Some(PrefillRequest { message: Some(prefill_request::Message::Start(start)) })) = first.unwrap_or(Ok(None)) else {
            return Err(Protocol::MissingStart.into());
        };
        let worker = self.0.clone();
        let span = worker.settings.worker.tracer.follow(&start.traceparent, "prefill");
        if span.is_sampled() {
            span.set("tandem.worker", worker.settings.worker.worker_id.clone());
            span.set("tandem.attempt", start.attempt);
            span.set("tandem.prompt_tokens", start.prompt.len() as u64);
        }
        let logged = span.logged(&start.request_id, start.attempt);
        let serve = |replies| async move { worker.serve(start, messages, replies, span).await }.instrument(logged);
        let replies = self.0.requests.start(serve);
        Ok(Response::new(replies))
    }
}

impl Worker {
    async fn serve(
        &self,
        start: PrefillStart,
        messages: Streaming<PrefillRequest>,
        replies: ReplySender<PrefillReply>,
        span: Span,
    ) -> Result<(), ClientGone> {
        let ended = tokio::select! {
            biased;
            ended = async {
                match &self.sending {
                    Sending::Transfers(transfers) => attempt(self, transfers, start, messages, &replies, &span).await,
                    Sending::Handles { hash_key } => export(self, hash_key, start, messages, &replies, &span).await,
                }
            } => ended,
            () = self.backend.hung() => Err(Ended::Hung),
        };
        let last = match ended {
            Ok(done) => prefill_reply::Message::Done(done),
            Err(ended) => {
                tracing::debug!(%ended, "prefill ended early");
                match ended.tell(&self.instance_id) {
                    Told::Nobody(gone) => return Err(gone),
                    Told::Error(status) => {
                        span.fail("protocol");
                        return replies.fail(status).await;
                    }
                    Told::Failure(failure) => {
                        span.fail(failure.reason().label());
                        prefill_reply::Message::Failure(failure)
                    }
                }
            }
        };
        replies.send(PrefillReply { message: Some(last) }).await
    }
}
