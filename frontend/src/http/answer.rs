//! Runs a request's prompts. The events of their answers become the parts that a format writes.

use super::{
    app::App,
    incoming::{Incoming, Job},
    progress::{Progress, Recording},
};
use crate::{
    clock::unix_time,
    dispatch::DispatchError,
    error::ApiError,
    models::Served,
    stream::{AnswerEvent, answers},
};
use bytes::Bytes;
use futures::{
    FutureExt, StreamExt,
    future::{BoxFuture, poll_fn},
    stream::{self, BoxStream},
};
use std::{
    pin::{Pin, pin},
    sync::Arc,
    task::Poll,
    time::Duration,
};
use tandem_api::{
    Options,
    answer::{AnswerContext, AnswerFormat, AnswerPart},
};
use tandem_process::{LogLimit, Woken};
use tandem_proto::v1::FailureReason;
use tandem_text::ServedModel;
use tokio::{
    sync::watch,
    time::{Instant, Sleep, sleep},
};

/// The events of all prompts, each with the index of its prompt.
type Events = BoxStream<'static, (usize, Result<AnswerEvent, DispatchError>)>;

/// A request that is being answered.
pub(super) struct Run {
    app: Arc<App>,
    events: Events,
    progress: Progress,
    /// The data about this request that the answer's format uses.
    pub(super) context: AnswerContext,
    prompts: Vec<PromptState>,
    log: FailureLog,
    /// The time without an event after which a stream sends a comment to keep the connection open.
    keep_alive: Duration,
    /// Measures this time. It is set again only when it has passed, because events are frequent.
    clock: Pin<Box<Sleep>>,
    /// When the prefills of prompts that wait in workers' queues are estimated to begin.
    queued: Woken<BoxStream<'static, Option<Instant>>>,
    /// Resolves when the process stops.
    stopped: Woken<BoxFuture<'static, ()>>,
    /// Whether the answer has the object `tandem`.
    details: bool,
}

/// The log's fields about a request whose answer fails.
struct FailureLog {
    request_id: String,
    client_request_id: Option<Arc<str>>,
    account: String,
    model: Arc<ServedModel>,
}

impl FailureLog {
    /// Logs that the answer has failed. The metrics count all failures; the log has fewer lines if there are very many.
    fn write(&self, error: &ApiError, limit: &LogLimit) {
        let ApiError::Dispatch(failure) = error else { return };
        if !failure.is_failure() {
            return;
        }
        if let Some(left_out) = limit.admit() {
            tracing::warn!(
                request_id = self.request_id,
                client_request_id = self.client_request_id.as_deref(),
                account = Some(&*self.account).filter(|account| !account.is_empty()),
                model = self.model.id,
                worker = failure.workers(),
                code = error.code(),
                left_out,
                "answer failed: {error}"
            );
        }
    }
}

struct PromptState {
    /// The prompt's text, if it is still to be repeated. If the prompt's logprobs are repeated, too, it waits for them.
    echo: Option<String>,
    /// The number of characters of the prompt that the answer repeats.
    echo_len: usize,
    /// Whether the logprobs of the prompt's tokens were requested and have not arrived.
    awaits_logprobs: bool,
}

impl Run {
    /// Starts the job. Also returns the format of its answer.
    pub(super) fn new(incoming: &Incoming, job: Job) -> (Self, Box<dyn AnswerFormat>) {
        let Job { served: Served { model, .. }, prompts, options, style, pieces } = job;
        let (app, endpoint, since) = (Arc::clone(&incoming.app), incoming.admitted.endpoint, incoming.admitted.since);
        let tokens = prompts.iter().map(|(prompt, _)| prompt.tokens.as_slice());
        let context = AnswerContext::new(&style, Arc::clone(&model), &incoming.id, &options, tokens, unix_time().as_secs());
        describe(incoming, &context, &options);
        let sizes = prompts.iter().map(|(prompt, _)| (prompt.request_id.clone(), prompt.tokens.len() as u32));
        let recording = |recent| Recording { recent, endpoint: endpoint.label(), streamed: options.stream.is_some() };
        let recording = app.recent.clone().map(recording);
        let records = (incoming.admitted.span.clone(), Arc::clone(&incoming.admitted.call));
        let progress = Progress::new(since, options.samples as usize, sizes, Arc::clone(&app.metrics), records, recording);
        let (mut streams, mut states) = (Vec::with_capacity(prompts.len()), Vec::with_capacity(prompts.len()));
        for (index, (prompt, echo)) in prompts.into_iter().enumerate() {
            let echo_len = echo.as_ref().map_or(0, |text| text.chars().count());
            states.push(PromptState { echo, echo_len, awaits_logprobs: prompt.prompt_logprobs.is_some() });
            let (dispatcher, model) = (Arc::clone(&app.dispatcher), Arc::clone(&model));
            let stop = options.stop.clone();
            let events = answers(dispatcher, model, prompt, stop, options.text, style.logprobs(), pieces.clone());
            streams.push(events.map(move |event| (index, event)).boxed());
        }
        // `select_all` would wake this task again after each event.
        let events = match streams.len() {
            1 => Woken::new(streams.swap_remove(0)).boxed(),
            _ => stream::select_all(streams).boxed(),
        };
        let shutdown = app.admission.shutdown.clone();
        let stopped = async move { shutdown.stopped().await }.boxed();
        let format = style.format(&context);
        let log = FailureLog {
            request_id: incoming.id.clone(),
            client_request_id: incoming.client_request_id.clone(),
            account: incoming.header_options.account.clone(),
            model: Arc::clone(&context.model),
        };
        let run = Self {
            log,
            events,
            progress,
            context,
            prompts: states,
            keep_alive: app.keep_alive,
            clock: Box::pin(sleep(app.keep_alive)),
            queued: Woken::new(changes(incoming.queued.subscribe())),
            stopped: Woken::new(stopped),
            details: incoming.header_options.details,
            app,
        };
        (run, format)
    }

    /// Returns the next part of the answer and the index of its prompt; `None` when all prompts have ended. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Result<(usize, AnswerPart), ApiError>> {
        let next = self.next_part().await;
        if let Some(Err(error)) = &next {
            self.progress.fail(error.status());
            self.log.write(error, &self.app.failures_logged);
            self.end();
        }
        next
    }

    /// Returns the next part for a stream. If a comment has to be sent before it, returns the comment as the error; `Err(None)` stands for
    /// the comment that keeps the connection open. Cancel-safe.
    pub(super) async fn next_or_comment(&mut self) -> Result<Option<Result<(usize, AnswerPart), ApiError>>, Option<Bytes>> {
        let until = Instant::now() + self.keep_alive;
        poll_fn(|context| {
            // Both are cancel-safe, so they can be polled in turns.
            if let Poll::Ready(next) = pin!(self.next()).poll(context) {
                return Poll::Ready(Ok(next));
            }
            if let Poll::Ready(Some(begins)) = self.queued.poll_next_unpin(context) {
                return Poll::Ready(Err(begins.map(|begins| queued_comment(begins.saturating_duration_since(Instant::now())))));
            }
            pin!(reached(&mut self.clock, until)).poll(context).map(|()| Err(None))
        })
        .await
    }

    /// Records that the answer is complete.
    pub(super) fn finish(&mut self) {
        self.progress.finish();
        self.context.completed = Some(unix_time().as_secs());
        self.end();
    }

    fn end(&mut self) {
        self.context.usage = self.progress.usage();
        self.context.details = self.details.then(|| self.progress.details());
    }

    async fn next_part(&mut self) -> Option<Result<(usize, AnswerPart), ApiError>> {
        loop {
            let (index, event) = tokio::select! {
                biased;
                next = self.events.next() => next?,
                () = &mut self.stopped => return Some(Err(DispatchError::Stopped.into())),
            };
            let event = match event {
                Ok(event) => event,
                Err(error) => return Some(Err(error.into())),
            };
            let prompt = &mut self.prompts[index];
            // Fails the answer if generated tokens come before the prompt's logprobs, which violates the protocol.
            if prompt.awaits_logprobs && matches!(event, AnswerEvent::Delta(_) | AnswerEvent::Finished) {
                return Some(Err(DispatchError::Lost {
                    reason: FailureReason::EngineFailed,
                    worker: self.progress.decode_worker(index),
                }
                .into()));
            }
            self.progress.record(index, &event);
            if let Some(part) = prompt.part(event) {
                // Only parts that have the usage need the sum over all prompts, which is too costly for each token.
                if self.context.has_usage_at(&part) {
                    self.context.usage = self.progress.usage();
                    let is_unknown = self.context.usage.prompt_tokens_details.cached_tokens.is_none();
                    self.context.cached_estimate = is_unknown.then(|| self.progress.cached_estimate());
                }
                return Some(Ok((index, part)));
            }
        }
    }
}

impl PromptState {
    /// Returns the part of the answer that follows from the event; `None`: the answer does not have it.
    fn part(&mut self, event: AnswerEvent) -> Option<AnswerPart> {
        match event {
            AnswerEvent::Started(_) => {
                Some(AnswerPart::Started { echo: if self.awaits_logprobs { None } else { self.echo.take() } })
            }
            AnswerEvent::PromptLogprobs(tokens) if std::mem::take(&mut self.awaits_logprobs) => {
                Some(AnswerPart::PromptLogprobs { tokens, echo: self.echo.take() })
            }
            AnswerEvent::Delta(mut delta) => {
                // Offsets count from the beginning of the answer's text, which includes a repeated prompt.
                delta.logprobs.iter_mut().for_each(|entry| entry.text_offset += self.echo_len);
                Some(AnswerPart::Delta(delta))
            }
            _ => None,
        }
    }
}

/// Records the request's parameters in its span, without the prompt's text.
fn describe(incoming: &Incoming, AnswerContext { model, id, .. }: &AnswerContext, options: &Options) {
    let (span, endpoint) = (&incoming.admitted.span, incoming.admitted.endpoint);
    if !span.is_sampled() {
        return;
    }
    let operation = endpoint.operation();
    span.rename(|| format!("{operation} {}", model.id));
    span.set("gen_ai.operation.name", operation);
    span.set("gen_ai.provider.name", "tandem");
    span.set("gen_ai.request.model", model.id.clone());
    span.set("gen_ai.response.model", model.id.clone());
    span.set("gen_ai.response.id", id.clone());
    span.set("gen_ai.request.choice.count", options.samples);
    span.set("gen_ai.request.temperature", f64::from(options.sampling.temperature));
    span.set("gen_ai.request.top_p", f64::from(options.sampling.top_p));
    if let Some(max_tokens) = options.sampling.max_tokens {
        span.set("gen_ai.request.max_tokens", max_tokens);
    }
    span.set("tandem.stream", options.stream.is_some());
}

/// Resolves when this time has come. Cancel-safe.
async fn reached(clock: &mut Pin<Box<Sleep>>, time: Instant) {
    loop {
        clock.as_mut().await;
        if Instant::now() >= time {
            return;
        }
        clock.as_mut().reset(time);
    }
}

/// Returns the next values of a channel. The stream does not end.
fn changes<T: Clone + Send + Sync + 'static>(values: watch::Receiver<T>) -> BoxStream<'static, T> {
    stream::unfold(values, async |mut values| {
        values.changed().await.ok()?;
        let value = values.borrow_and_update().clone();
        Some((value, values))
    })
    .chain(stream::pending())
    .boxed()
}

/// Returns the comment of server-sent events for a stream whose prompts wait in a queue for about this time.
fn queued_comment(wait: Duration) -> Bytes {
    match wait.as_secs_f64().ceil() {
        // The estimate has passed, or there is none.
        0.0 => Bytes::from_static(b": queued\n\n"),
        seconds => format!(": queued, about {seconds} s\n\n").into(),
    }
}
