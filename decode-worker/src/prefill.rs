//! The client of a prefill worker: one `RemotePrefill` stream.

use crate::{client::ClientStream, failure::DecodeEnd, worker::in_time};
use std::time::Duration;
use tandem_proto::{
    channel::{Channels, MESSAGE_BYTES_MAX, has_ended, status_text},
    unknown_message,
    v1::{
        Failure, FailureReason, KvHandle, KvPulled, KvRoom, PrefillDone, PrefillReply, PrefillRequest, PrefillStart, Scheduled,
        Submitted, Ticket, TransferCapabilities, Waiting, WorkerRef, generate_reply, prefill_client::PrefillClient,
        prefill_reply, prefill_request::Message,
    },
};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

/// One prompt's prefill on another worker. Dropping this value cancels the prefill.
pub(crate) struct RemotePrefill {
    pub(crate) instance_id: String,
    /// The prefill worker's transfer capabilities, which it sends before the message `Scheduled`; `None` if it has sent none.
    pub(crate) offered: Option<TransferCapabilities>,
    requests: mpsc::Sender<PrefillRequest>,
    replies: Streaming<PrefillReply>,
}

pub(crate) enum PrefillNews {
    /// The prompt waits in the prefill worker's queue, whose engine makes progress.
    Waiting,
    /// The prompt has left the prefill worker's queue; `Scheduled` follows. The address of the room is empty if there is none.
    Submitted {
        room_address: String,
    },
    Scheduled(Scheduled),
    Handle(KvHandle),
    Done(PrefillDone),
    Failure(Failure),
}

impl RemotePrefill {
    /// Opens the stream; returns once the prefill worker has accepted it.
    async fn open(channels: &Channels, prefill: WorkerRef, start: PrefillStart) -> Result<Self, DecodeEnd> {
        let WorkerRef { instance_id, address, .. } = prefill;
        let lost = || DecodeEnd::PrefillLost { prefill: instance_id.clone() };
        let channel = channels.to(&address).map_err(|_| lost())?;
        // The channel has capacity for all messages that are sent: the start, then the ticket, the room, or the report that the KV was pulled.
        let (requests, receiver) = mpsc::channel(2);
        requests.try_send(PrefillRequest { message: Some(Message::Start(start)) }).map_err(|_| lost())?;
        let replies = PrefillClient::new(channel)
            .max_encoding_message_size(MESSAGE_BYTES_MAX)
            .prefill(ReceiverStream::new(receiver))
            .await
            .map_err(|status| {
                tracing::debug!("the prefill worker did not accept the stream: {}", status_text(&status));
                lost()
            })?
            .into_inner();
        Ok(Self { instance_id, offered: None, requests, replies })
    }

    /// Opens the stream and waits in the prefill worker's queue. Returns the stream and its first message after the wait. Forwards each report
    /// that the prompt still waits to the client.
    ///
    /// # Errors
    /// Fails if the prefill worker is lost, or if it reports nothing for `limit` (`None` sets no limit).
    pub(crate) async fn begin(
        channels: &Channels,
        prefill: WorkerRef,
        start: PrefillStart,
        limit: Option<Duration>,
        client: &ClientStream,
    ) -> Result<(Self, PrefillNews), DecodeEnd> {
        let culprit = prefill.instance_id.clone();
        let mut opened = in_time(limit, Self::open(channels, prefill, start), &culprit).await?;
        loop {
            match in_time(limit, opened.next(), &culprit).await? {
                PrefillNews::Waiting => client.send(generate_reply::Message::Waiting(Waiting {})).await?,
                first => return Ok((opened, first)),
            }
        }
    }

    /// Returns the next message; skips kinds of messages that this version does not know. If the stream is broken, the worker is considered lost.
    /// This method is cancel-safe.
    pub(crate) async fn next(&mut self) -> Result<PrefillNews, DecodeEnd> {
        loop {
            let reply = self.replies.message().await.map_err(|status| {
                tracing::debug!("the stream from the prefill worker was interrupted: {}", status_text(&status));
                if has_ended(&status) { DecodeEnd::PrefillGone { prefill: self.instance_id.clone() } } else { self.lost() }
            })?;
            return match reply.ok_or_else(|| self.lost())?.message {
                Some(prefill_reply::Message::Waiting(_)) => Ok(PrefillNews::Waiting),
                Some(prefill_reply::Message::Submitted(Submitted { room_address })) => {
                    Ok(PrefillNews::Submitted { room_address })
                }
                Some(prefill_reply::Message::Scheduled(scheduled)) => Ok(PrefillNews::Scheduled(scheduled)),
                Some(prefill_reply::Message::KvHandle(handle)) => Ok(PrefillNews::Handle(handle)),
                Some(prefill_reply::Message::Done(done)) => Ok(PrefillNews::Done(done)),
                Some(prefill_reply::Message::Failure(failure)) => self.failure(failure).map(PrefillNews::Failure),
                Some(prefill_reply::Message::TransferCapabilities(capabilities)) => {
                    self.offered = Some(capabilities);
                    continue;
                }
                None => {
                    unknown_message("Prefill");
                    continue;
                }
            };
        }
    }

    pub(crate) fn send_ticket(&self, ticket: Ticket) {
        // Sending fails only if the stream is broken, which `next` reports.
        let _ = self.requests.try_send(PrefillRequest { message: Some(Message::Ticket(ticket)) });
    }

    pub(crate) fn send_room(&self, room: KvRoom) {
        let _ = self.requests.try_send(PrefillRequest { message: Some(Message::Room(room)) });
    }

    pub(crate) fn confirm_pulled(&self) {
        let _ = self.requests.try_send(PrefillRequest { message: Some(Message::Pulled(KvPulled {})) });
    }

    pub(crate) fn lost(&self) -> DecodeEnd {
        DecodeEnd::PrefillLost { prefill: self.instance_id.clone() }
    }

    /// Checks a failure. If its reason is unknown, the worker is considered lost.
    fn failure(&self, mut failure: Failure) -> Result<Failure, DecodeEnd> {
        if matches!(FailureReason::try_from(failure.reason), Err(_) | Ok(FailureReason::Unspecified)) {
            return Err(self.lost());
        }
        if failure.instance_id.is_empty() {
            failure.instance_id = self.instance_id.clone();
        }
        Ok(failure)
    }
}
