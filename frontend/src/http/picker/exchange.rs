//! One stream of the protocol: one HTTP request of a gateway, and its answer.
//!
//! The request's head, and its body if that has the prompt, are held until the server is chosen. From then on, every byte is given back as it
//! comes. The first bytes of the answer end the prefill, and the end of the answer ends the booking. So does the end of the stream.

use super::{
    choice::{self, Chosen},
    usage::Tail,
    wire::{self, Then, answer, pieces},
};
use crate::{
    dispatch::{Booking, Prompt, placement::Placement},
    error::ApiError,
    http::{
        app::App,
        body::{BodyForm, HeldBytes},
        incoming::Incoming,
    },
    metrics::Endpoint,
    usage::{Cached, CachedSource, PromptUsage},
};
use axum::{
    body::Body,
    http::{StatusCode, request::Parts},
};
use bytes::Bytes;
use std::{collections::BTreeMap, convert::Infallible, future::pending, net::IpAddr, pin::pin, sync::Arc, time::Duration};
use tandem_proto::{
    ext_proc::{
        BodyResponse, BodySendMode, HeaderMap, HeadersResponse, HttpBody, HttpHeaders, ProcessingRequest, ProcessingResponse,
        TrailersResponse, processing_request::Request, processing_response::Response,
    },
    unknown_message,
};
use tokio::{
    sync::{OwnedSemaphorePermit, mpsc},
    time::timeout,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

/// The maximum time for the first message of a stream. A gateway opens the stream when it has read the headers.
const HEAD_MAX: Duration = Duration::from_secs(5);

pub(super) struct GatewayStream {
    pub(super) app: Arc<App>,
    /// The gateway's address.
    pub(super) peer: Option<IpAddr>,
    pub(super) messages: Streaming<ProcessingRequest>,
    pub(super) answers: mpsc::Sender<ProcessingResponse>,
    /// The stream's place among all open streams.
    pub(super) _permit: OwnedSemaphorePermit,
}

/// The head of the HTTP request.
struct RequestHead {
    parts: Parts,
    /// Whether the request has no body.
    ends: bool,
    subset: Option<Vec<String>>,
    modes: Modes,
}

/// How the gateway hands the bodies over.
#[derive(Clone, Copy)]
struct Modes {
    request: BodySendMode,
    answer: BodySendMode,
}

/// A request whose server is chosen.
struct PlacedRequest {
    incoming: Incoming,
    prompt: Prompt,
    placement: Placement,
    is_compared: bool,
    /// `None` once the answer is complete.
    booking: Option<Booking>,
    /// The booking of a complete answer, until the router has read its last messages.
    ended: Option<Booking>,
    status: StatusCode,
    has_begun: bool,
    /// The number of bytes of the answer that have not arrived; `None` if the answer's length is not known.
    left: Option<u64>,
    tail: Tail,
}

impl GatewayStream {
    /// Processes the request until the gateway closes the stream.
    ///
    /// # Errors
    /// The gateway's messages do not follow the protocol.
    pub(super) async fn run(mut self) -> Result<(), Status> {
        let Some(head) = self.head().await? else { return Ok(()) };
        let (endpoint, has_prompt) = choice::kind(&head.parts);
        let mut incoming = match choice::incoming(&self.app, &head.parts, endpoint) {
            Ok(incoming) => incoming,
            Err(error) => return self.send(wire::refusal(error)).await,
        };
        let is_streamed = head.modes.request == BodySendMode::FullDuplexStreamed;
        let holds = has_prompt && !head.ends && is_streamed;
        if !holds && !head.ends && endpoint != Endpoint::Forwarded && incoming.header_options.cache_owner.is_some() {
            // The server might read a body of this type nevertheless, and would then answer from the cache of all accounts.
            return self.send(choice::refuse(&mut incoming, ApiError::ContentType)).await;
        }
        let read = if holds { self.body(&incoming).await? } else { Some(Ok((None, HeldBytes::new(), Then::End))) };
        let (body, held, then) = match read {
            None => return Ok(()),
            Some(Ok(read)) => read,
            Some(Err(error)) => return self.send(choice::refuse(&mut incoming, error)).await,
        };
        let Chosen { booking, prompt, placement, is_compared, body } =
            match choice::choose(&mut incoming, body, head.subset).await {
                Ok(chosen) => chosen,
                Err(error) => return self.send(choice::refuse(&mut incoming, error)).await,
            };
        let endpoints: Vec<&str> = placement.endpoints.iter().map(|endpoint| &*endpoint.address).collect();
        self.send(wire::destination(&endpoints.join(","))).await?;
        if holds {
            for piece in pieces(body, then) {
                self.send(answer(Response::RequestBody(piece))).await?;
            }
            if then == Then::More {
                self.send(answer(Response::RequestTrailers(TrailersResponse {}))).await?;
            }
        }
        drop(held);
        let running = PlacedRequest {
            incoming,
            prompt,
            placement,
            is_compared,
            booking: Some(booking),
            ended: None,
            status: StatusCode::BAD_GATEWAY,
            has_begun: false,
            left: None,
            tail: Tail::default(),
        };
        self.relay(running, head.modes).await
    }

    async fn send(&self, message: ProcessingResponse) -> Result<(), Status> {
        // The receiver is dropped together with this exchange.
        self.answers.send(message).await.map_err(|_| Status::cancelled("the stream has ended"))
    }

    /// Returns the request's head; `None` if the gateway has closed the stream or has answered, or if the request is refused.
    async fn head(&mut self) -> Result<Option<RequestHead>, Status> {
        let late = |_| Status::deadline_exceeded("the request's headers have not arrived");
        let Some(message) = timeout(HEAD_MAX, self.messages.message()).await.map_err(late)?? else { return Ok(None) };
        let ProcessingRequest { request, metadata_context, observability_mode, protocol_config } = message;
        if observability_mode {
            return Err(Status::failed_precondition("an endpoint picker must be able to answer; unset observability_mode"));
        }
        let HttpHeaders { headers, end_of_stream } = match request {
            Some(Request::RequestHeaders(headers)) => headers,
            // The gateway itself has answered a request that has not reached its external processor.
            Some(Request::ResponseHeaders(_)) => return Ok(None),
            _ => return Err(Status::invalid_argument("set request_header_mode to SEND: the request's headers come first")),
        };
        // A gateway that does not name its modes follows the endpoint picker protocol.
        let full = BodySendMode::FullDuplexStreamed;
        let modes = protocol_config.map_or(Modes { request: full, answer: full }, |modes| Modes {
            request: modes.request_body_mode(),
            answer: modes.response_body_mode(),
        });
        let read = wire::head(headers, self.peer)?.and_then(|parts| Ok((parts, wire::subset(metadata_context.as_ref())?)));
        match read {
            Ok((parts, subset)) => Ok(Some(RequestHead { parts, ends: end_of_stream, subset, modes })),
            Err(error) => self.send(wire::refusal(error)).await.map(|()| None),
        }
    }

    /// Reads the whole body, within the limits of a frontend. Returns also what follows the body: trailers, or nothing. Returns `None` if the
    /// gateway has closed the stream, or has answered the request itself, so that no server gets it.
    ///
    /// # Errors
    /// The gateway's messages do not follow the protocol. The inner error is that of a body that is not accepted.
    async fn body(&mut self, incoming: &Incoming) -> Result<Option<Result<(Option<Bytes>, HeldBytes, Then), ApiError>>, Status> {
        let (chunks, received) = mpsc::channel::<Result<Bytes, Infallible>>(1);
        let feed = async {
            let chunks = chunks;
            loop {
                let Some(message) = self.messages.message().await? else { return Ok(None) };
                match message.request {
                    Some(Request::RequestBody(HttpBody { body, end_of_stream })) => {
                        // If the body is refused, its rest is not read.
                        chunks.send(Ok(body)).await.ok();
                        if end_of_stream {
                            return Ok(Some(Then::End));
                        }
                    }
                    Some(Request::RequestTrailers(_)) => return Ok(Some(Then::More)),
                    None => unknown_message("Process"),
                    Some(Request::RequestHeaders(_)) => return Err(Status::invalid_argument("a stream is for one request")),
                    Some(_) => return Ok(None),
                }
            }
        };
        let mut body = Body::from_stream(ReceiverStream::new(received));
        let mut read = pin!(self.app.bodies.collect(BodyForm::Json, incoming.client.as_ref(), &mut body));
        let (read, then) = tokio::select! {
            biased;
            // The body is refused.
            read = &mut read => (read, Then::End),
            then = feed => match then? {
                Some(then) => (read.await, then),
                None => return Ok(None),
            },
        };
        Ok(Some(read.map(|(bytes, held)| (Some(bytes), held, then))))
    }

    /// Gives back what the gateway sends, until it closes the stream.
    async fn relay(&mut self, mut running: PlacedRequest, modes: Modes) -> Result<(), Status> {
        loop {
            let message = tokio::select! {
                biased;
                message = self.messages.message() => message,
                never = maintain(&mut running.booking, &running.prompt) => match never {},
            };
            let Some(ProcessingRequest { request, metadata_context, .. }) = message? else { return Ok(()) };
            if let Some(served) = wire::served(metadata_context.as_ref()) {
                running.served_by(served);
            }
            match request {
                Some(Request::RequestBody(chunk)) => self.give_back(chunk, modes.request, Response::RequestBody).await?,
                Some(Request::RequestTrailers(_)) => self.send(answer(Response::RequestTrailers(TrailersResponse {}))).await?,
                Some(Request::ResponseHeaders(HttpHeaders { headers, end_of_stream })) => {
                    running.begin(headers.as_ref()).await;
                    if end_of_stream {
                        running.finish().await;
                    }
                    self.send(answer(Response::ResponseHeaders(HeadersResponse::default()))).await?;
                }
                Some(Request::ResponseBody(chunk)) => {
                    running.answered(&chunk.body).await;
                    // A client that has the last bytes may close the connection at once, and the gateway then resets this stream.
                    if chunk.end_of_stream || running.is_complete() {
                        running.finish().await;
                    }
                    self.give_back(chunk, modes.answer, Response::ResponseBody).await?;
                }
                Some(Request::ResponseTrailers(_)) => {
                    running.finish().await;
                    self.send(answer(Response::ResponseTrailers(TrailersResponse {}))).await?;
                }
                Some(Request::RequestHeaders(_)) => return Err(Status::invalid_argument("a stream is for one request")),
                None => unknown_message("Process"),
            }
            if let Some(booking) = running.ended.take() {
                booking.end().await;
            }
        }
    }

    /// Gives a chunk of a body back, or says that it stays as it is.
    async fn give_back(&self, chunk: HttpBody, mode: BodySendMode, wrap: fn(BodyResponse) -> Response) -> Result<(), Status> {
        if mode != BodySendMode::FullDuplexStreamed {
            return self.send(answer(wrap(BodyResponse::default()))).await;
        }
        for piece in pieces(vec![chunk.body], if chunk.end_of_stream { Then::End } else { Then::More }) {
            self.send(answer(wrap(piece))).await?;
        }
        Ok(())
    }
}

/// Keeps the request booked, as long as it is. Never returns. Cancel-safe.
async fn maintain(booking: &mut Option<Booking>, prompt: &Prompt) -> Infallible {
    match booking {
        Some(booking) => booking.maintain(prompt).await,
        None => pending().await,
    }
}

impl PlacedRequest {
    /// Records which endpoint has answered. If it is not the chosen one, the request is booked there.
    fn served_by(&mut self, address: &str) {
        let served = self.placement.endpoints.iter().skip(1).find(|endpoint| endpoint.address == address);
        if let (Some(booking), Some(endpoint)) = (&mut self.booking, served) {
            self.is_compared = false;
            booking.moved_to(&endpoint.instance_id);
        }
    }

    /// Records the answer's head. If the server could not be reached, the booking ends, and the router soon places nothing there: a server
    /// that is gone would otherwise seem to have the least load.
    async fn begin(&mut self, headers: Option<&HeaderMap>) {
        self.status = choice::status(headers);
        self.left = choice::content_length(headers);
        // A gateway's time limit (504) and its own overload say nothing about the server.
        if matches!(self.status, StatusCode::BAD_GATEWAY | StatusCode::SERVICE_UNAVAILABLE)
            && !choice::is_overload(headers)
            && let Some(mut booking) = self.booking.take()
        {
            self.incoming.admitted.finish(self.status);
            booking.engine_failed().await;
            self.ended = Some(booking);
        }
    }

    /// Whether all bytes of the answer have arrived, although the gateway may not have said so.
    fn is_complete(&self) -> bool {
        self.left == Some(0) || self.tail.is_done()
    }

    /// Records bytes of the answer. The first ones end the prefill.
    async fn answered(&mut self, bytes: &[u8]) {
        self.left = self.left.map(|left| left.saturating_sub(bytes.len() as u64));
        if bytes.is_empty() || !self.status.is_success() {
            return;
        }
        self.tail.add(bytes);
        if !std::mem::replace(&mut self.has_begun, true)
            && let Some(booking) = &mut self.booking
        {
            booking.prefill_finished(None).await;
        }
    }

    /// Records the end of the answer with the usage that the engine has counted, and reports it to the router.
    async fn finish(&mut self) {
        let Some(booking) = self.booking.take() else { return };
        let booking = self.ended.insert(booking);
        self.incoming.admitted.finish(self.status);
        let Some(usage) = self.tail.usage().filter(|_| self.status.is_success()) else { return };
        if let Some(tokens) = usage.cached_tokens().filter(|_| self.is_compared) {
            booking.cached_tokens_reported(tokens).await;
        }
        let cached =
            usage.cached_tokens().map(|tokens| Cached { tokens, source: CachedSource::Worker, by_tier: BTreeMap::new() });
        let usage = PromptUsage {
            prompt_tokens: usage.prompt_tokens,
            completion_tokens: usage.completion_tokens,
            reasoning_tokens: 0,
            cached,
        };
        self.incoming.app.metrics.prompt_finished(&usage, &self.placement.decode.worker.worker_id);
        booking.answer_finished(usage.completion_tokens.into()).await;
    }
}
