//! The `Prefill` service: reads the first message of each stream, then runs an [`crate::attempt`].

use crate::{
    KvSending, PrefillWorker,
    attempt::attempt,
    export::export,
    failure::{LastMessage, PrefillEnd, Protocol},
    room,
};
use std::{sync::Arc, time::Duration};
use tandem_process::trace::Span;
use tandem_proto::v1::{PrefillReply, PrefillRequest, PrefillStart, prefill_reply, prefill_request, prefill_server::Prefill};
use tandem_worker::{Disconnected, Replies, ReplySender};
use tonic::{Request, Response, Status, Streaming};
use tracing::Instrument;

/// The time within which a stream must begin with its prompt. A decode worker sends the prompt when it opens the stream.
const START_WAIT: Duration = Duration::from_secs(10);

pub(crate) struct PrefillService(pub(crate) Arc<PrefillWorker>);

#[tonic::async_trait]
impl Prefill for PrefillService {
    type PrefillStream = Replies<PrefillReply>;

    async fn prefill(&self, request: Request<Streaming<PrefillRequest>>) -> Result<Response<Self::PrefillStream>, Status> {
        let mut messages = request.into_inner();
        let first = tokio::time::timeout(START_WAIT, messages.message()).await;
        let Ok(Some(PrefillRequest { message: Some(prefill_request::Message::Start(start)) })) = first.unwrap_or(Ok(None)) else {
            return Err(Protocol::MissingStart.into());
        };
        let worker = self.0.clone();
        let span = worker.common.settings.tracer.follow(&start.traceparent, "prefill");
        if span.is_sampled() {
            span.set("tandem.worker", worker.common.info.worker_id.clone());
            span.set("tandem.attempt", start.attempt);
            span.set("tandem.prompt_tokens", start.prompt.len() as u64);
        }
        let logged = span.logged(&start.request_id, start.attempt);
        let serve = |replies| async move { worker.serve(start, messages, replies, span).await }.instrument(logged);
        Ok(Response::new(self.0.common.requests.start(serve)))
    }
}

impl PrefillWorker {
    async fn serve(
        &self,
        start: PrefillStart,
        messages: Streaming<PrefillRequest>,
        replies: ReplySender<PrefillReply>,
        span: Span,
    ) -> Result<(), Disconnected> {
        let ended = tokio::select! {
            biased;
            ended = async {
                match &self.sending {
                    KvSending::Transfers(transfers) => attempt(self, transfers, start, messages, &replies, &span).await,
                    KvSending::Handles { hash_key } => export(self, hash_key, start, messages, &replies, &span).await,
                    KvSending::Rooms { hash_key, address } => {
                        room::send(self, (hash_key, address), start, messages, &replies, &span).await
                    }
                }
            } => ended,
            () = self.common.backend.hung() => Err(PrefillEnd::Hung),
        };
        let last = match ended {
            Ok(done) => prefill_reply::Message::Done(done),
            Err(ended) => {
                tracing::debug!(%ended, "prefill ended early");
                match ended.report(&self.common.info.instance_id) {
                    LastMessage::Nothing(disconnected) => return Err(disconnected),
                    LastMessage::Error(status) => {
                        span.fail("protocol");
                        return replies.fail(status).await;
                    }
                    LastMessage::Failure(failure) => {
                        span.fail(failure.reason().label());
                        prefill_reply::Message::Failure(failure)
                    }
                }
            }
        };
        replies.send(PrefillReply { message: Some(last) }).await
    }
}
