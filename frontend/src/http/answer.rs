//! Runs a request's prompts and writes the answer, either as one JSON object or as server-sent events. Both forms are made from the same
//! [`AnswerEvent`]s.

use super::{
    app::App,
    format::{Choice, Envelope, Logprobs},
    incoming::{Incoming, Job},
    progress::{Progress, Recording},
};
use crate::{
    clock::unix_time,
    dispatch::DispatchError,
    error::ApiError,
    metrics::Endpoint,
    model::{Served, ServedModel},
    request::{Options, StreamUsage},
    stream::{AnswerEvent, FinishReason, TokenLogprobs, answers},
    usage::Usage,
};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use std::{pin::Pin, sync::Arc, time::Duration};
use tandem_proto::v1::FailureReason;
use tokio::time::timeout;

/// The reply to a request whose answer has begun. `first` is the first event of a stream. `None`: no event has occurred yet, so the stream
/// begins with a comment.
pub(super) enum Reply {
    Whole(Response),
    Stream { run: Box<Run>, usage: StreamUsage, first: Option<(usize, AnswerEvent)> },
}

/// The events of all prompts, each with the index of its prompt.
type Events = Pin<Box<dyn Stream<Item = (usize, Result<AnswerEvent, DispatchError>)> + Send>>;

/// A request that is being answered.
pub(super) struct Run {
    app: Arc<App>,
    model: Arc<ServedModel>,
    events: Events,
    pub(super) progress: Progress,
    echoes: Vec<Option<Echo>>,
    /// The number of characters of each prompt that the answer has echoed.
    echoed_len: Vec<usize>,
    logprobs: bool,
    pub(super) endpoint: Endpoint,
    /// The time without an event after which a stream sends a comment to keep the connection open.
    pub(super) keep_alive: Duration,
    id: String,
    created: u64,
    pub(super) details: bool,
}

/// The text of a prompt that is still to be echoed.
struct Echo {
    text: String,
    /// Whether the prompt's logprobs are echoed, too. If so, the text is sent only when the logprobs have arrived.
    with_logprobs: bool,
}

/// Runs the job to the end of its answer. If the answer is streamed, runs the job only until its first event or until a comment has to be
/// sent.
///
/// # Errors
/// The answer failed before it began. A later error is sent as an event of the stream.
pub(super) async fn respond(incoming: &Incoming, job: Job) -> Result<Reply, ApiError> {
    let stream_usage = job.options.stream;
    let mut run = Run::new(incoming, job);
    let Some(usage) = stream_usage else { return run.whole().await.map(Reply::Whole) };
    let first = timeout(run.keep_alive, run.next()).await.ok().flatten().transpose()?;
    Ok(Reply::Stream { run: Box::new(run), usage, first })
}

impl Run {
    fn new(incoming: &Incoming, job: Job) -> Self {
        let Job { served: Served { model, .. }, prompts, options } = job;
        let (app, endpoint, since) = (Arc::clone(&incoming.app), incoming.admitted.endpoint, incoming.admitted.since);
        describe(incoming, &model.id, &options);
        let sizes = prompts.iter().map(|(prompt, _)| (prompt.request_id.clone(), prompt.tokens.len() as u32));
        let recording = |recent| Recording { recent, endpoint: endpoint.label(), streamed: options.stream.is_some() };
        let recording = app.recent.clone().map(recording);
        let span = incoming.admitted.span.clone();
        let progress = Progress::new(since, options.samples as usize, sizes, Arc::clone(&app.metrics), span, recording);
        let (mut streams, mut echoes) = (Vec::with_capacity(prompts.len()), Vec::with_capacity(prompts.len()));
        for (index, (prompt, echo)) in prompts.into_iter().enumerate() {
            echoes.push(echo.map(|text| Echo { text, with_logprobs: prompt.prompt_logprobs.is_some() }));
            let events = answers(Arc::clone(&app.dispatcher), Arc::clone(&model), prompt, options.stop.clone());
            streams.push(events.map(move |event| (index, event)).boxed());
        }
        Self {
            events: stream::select_all(streams).boxed(),
            progress,
            echoed_len: vec![0; echoes.len()],
            echoes,
            logprobs: options.sampling.logprobs.is_some(),
            endpoint,
            keep_alive: app.keep_alive,
            id: endpoint.answer_id(&incoming.id),
            created: unix_time().as_secs(),
            details: incoming.header_options.details,
            app,
            model,
        }
    }

    /// Returns the next event and the index of its prompt; `None` when all prompts have ended. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Result<(usize, AnswerEvent), ApiError>> {
        let next = self.next_event().await;
        if let Some(Err(error)) = &next {
            self.progress.fail(error.status());
        }
        next
    }

    async fn next_event(&mut self) -> Option<Result<(usize, AnswerEvent), ApiError>> {
        let (index, event) = tokio::select! {
            biased;
            next = self.events.next() => next?,
            () = self.app.admission.shutdown.stopped() => return Some(Err(DispatchError::Stopped.into())),
        };
        let mut event = match event {
            Ok(event) => event,
            Err(error) => return Some(Err(error.into())),
        };
        if let AnswerEvent::Delta(delta) = &mut event {
            // Offsets count from the beginning of the answer's text, which includes an echoed prompt.
            delta.logprobs.iter_mut().for_each(|entry| entry.text_offset += self.echoed_len[index]);
        }
        self.progress.record(index, &event);
        Some(Ok((index, event)))
    }

    /// Returns the prompt's text if it is to be echoed, with its logprobs if they were requested. The text is returned only once, before
    /// any generated text.
    ///
    /// # Errors
    /// The worker did not send the requested logprobs of the prompt.
    pub(super) fn echo(&mut self, index: usize, event: &AnswerEvent) -> Result<Option<(String, Vec<TokenLogprobs>)>, ApiError> {
        let Some(echo) = &mut self.echoes[index] else { return Ok(None) };
        let logprobs = match event {
            AnswerEvent::Started(_) if echo.with_logprobs => return Ok(None),
            AnswerEvent::Scheduled(_) | AnswerEvent::Resumed | AnswerEvent::Prefilled(_) => return Ok(None),
            AnswerEvent::Started(_) => Vec::new(),
            AnswerEvent::PromptLogprobs(logprobs) => logprobs.clone(),
            // The prompt's logprobs are still missing, but the worker must send them before the first generated token.
            AnswerEvent::Delta(_) | AnswerEvent::Finished => {
                let error = ApiError::from(DispatchError::Lost { reason: FailureReason::EngineFailed });
                self.progress.fail(error.status());
                return Err(error);
            }
        };
        let text = std::mem::take(&mut echo.text);
        self.echoes[index] = None;
        self.echoed_len[index] = text.chars().count();
        Ok(Some((text, logprobs)))
    }

    pub(super) fn envelope<'a>(
        &'a self,
        object: &'static str,
        choices: Vec<Choice<'a>>,
        usage: Option<Option<Usage>>,
    ) -> Envelope<'a> {
        Envelope { id: &self.id, object, created: self.created, model: &self.model.id, choices, usage, tandem: None }
    }

    pub(super) fn logprobs<'a>(&'a self, tokens: &'a [TokenLogprobs]) -> Option<Logprobs<'a>> {
        self.logprobs.then_some(Logprobs { model: &self.model, tokens })
    }

    async fn whole(mut self) -> Result<Response, ApiError> {
        let samples = self.progress.samples;
        let mut choices: Vec<WholeChoice> = Vec::new();
        choices.resize_with(self.echoes.len() * samples, WholeChoice::default);
        while let Some(next) = self.next().await {
            let (index, event) = next?;
            if let Some((text, logprobs)) = self.echo(index, &event)? {
                for choice in &mut choices[index * samples..(index + 1) * samples] {
                    choice.text.push_str(&text);
                    choice.logprobs.extend_from_slice(&logprobs);
                }
            }
            if let AnswerEvent::Delta(delta) = event {
                let choice = &mut choices[index * samples + delta.sample as usize];
                choice.text.push_str(&delta.text);
                choice.logprobs.extend(delta.logprobs);
                choice.finish = choice.finish.or(delta.finish);
            }
        }
        self.progress.finish();
        let written = choices
            .iter()
            .enumerate()
            .map(|(index, choice)| self.endpoint.whole(index, &choice.text, self.logprobs(&choice.logprobs), choice.finish))
            .collect();
        let mut envelope = self.envelope(self.endpoint.object(), written, Some(Some(self.progress.usage())));
        envelope.tandem = self.details.then(|| self.progress.details());
        Ok(Json(envelope).into_response())
    }
}

/// Records the request's parameters in its span, without the prompt's text.
fn describe(incoming: &Incoming, model: &str, options: &Options) {
    let (span, endpoint) = (&incoming.admitted.span, incoming.admitted.endpoint);
    if !span.is_sampled() {
        return;
    }
    let operation = endpoint.operation();
    span.rename(|| format!("{operation} {model}"));
    span.set("gen_ai.operation.name", operation);
    span.set("gen_ai.provider.name", "tandem");
    span.set("gen_ai.request.model", model.to_owned());
    span.set("gen_ai.response.model", model.to_owned());
    span.set("gen_ai.response.id", endpoint.answer_id(&incoming.id));
    span.set("gen_ai.request.choice.count", options.samples);
    span.set("gen_ai.request.temperature", f64::from(options.sampling.temperature));
    span.set("gen_ai.request.top_p", f64::from(options.sampling.top_p));
    if let Some(max_tokens) = options.sampling.max_tokens {
        span.set("gen_ai.request.max_tokens", max_tokens);
    }
    span.set("tandem.stream", options.stream.is_some());
}

/// One choice of an answer that is not streamed. It grows while the answer is generated.
#[derive(Default)]
struct WholeChoice {
    text: String,
    logprobs: Vec<TokenLogprobs>,
    finish: Option<FinishReason>,
}
