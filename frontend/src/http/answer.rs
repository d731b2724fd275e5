//! Runs a request's prompts. The events of their answers become JSON in an endpoint's format.

use super::{
    app::App,
    incoming::{Incoming, Job},
    progress::{Progress, Recording},
    prompt_logprobs::PromptLogprobs,
    style::Style,
};
use crate::{
    clock::unix_time,
    dispatch::DispatchError,
    error::ApiError,
    models::Served,
    stream::{AnswerEvent, TokenLogprobs, answers},
};
use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use std::{pin::Pin, sync::Arc, time::Duration};
use tandem_api::{Options, StreamUsage};
use tandem_kv::TokenId;
use tandem_proto::v1::FailureReason;
use tandem_text::ServedModel;
use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

/// The events of all prompts, each with the index of its prompt.
type Events = Pin<Box<dyn Stream<Item = (usize, Result<AnswerEvent, DispatchError>)> + Send>>;

/// A request that is being answered.
pub(super) struct Run {
    app: Arc<App>,
    pub(super) model: Arc<ServedModel>,
    events: Events,
    pub(super) progress: Progress,
    echoes: Vec<Option<Echo>>,
    /// The number of characters of each prompt that the answer has echoed.
    echoed_len: Vec<usize>,
    /// Whether the client requested logprobs.
    pub(super) wants_logprobs: bool,
    pub(super) extras: Extras,
    /// The tokens of each prompt; empty unless the answer has them.
    prompt_token_ids: Vec<Vec<TokenId>>,
    /// The logprobs of each prompt's tokens, if the answer has them and they have arrived.
    prompt_logprobs: Vec<Option<Vec<TokenLogprobs>>>,
    /// The time without an event after which a stream sends a comment to keep the connection open.
    keep_alive: Duration,
    /// When the prefills of prompts that wait in workers' queues are estimated to begin.
    queued: watch::Receiver<Option<Instant>>,
    /// The answer's id.
    pub(super) id: String,
    /// The request's id.
    pub(super) request_id: String,
    pub(super) created: u64,
    pub(super) details: bool,
}

/// What a client requested besides the text of the answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extras {
    /// Whether the answer has the ids of the prompt's and the generated tokens.
    pub(super) token_ids: bool,
    /// Whether logprobs name tokens by their ids.
    pub(super) tokens_as_ids: bool,
    /// The number of alternatives for each generated token and each echoed token of the prompt.
    echoed_alternatives: usize,
    /// The number of alternatives for each token of the prompt; `None`: the answer does not have the prompt's logprobs.
    prompt_alternatives: Option<usize>,
}

/// The text of a prompt that is still to be echoed.
struct Echo {
    text: String,
    /// Whether the prompt's logprobs are echoed, too. If so, the text is sent only when the logprobs have arrived.
    with_logprobs: bool,
}

impl Run {
    /// Starts the job.
    pub(super) fn new(incoming: &Incoming, job: Job) -> (Self, Style, Option<StreamUsage>) {
        let Job { served: Served { model, .. }, prompts, options, style, pieces } = job;
        let (app, endpoint, since) = (Arc::clone(&incoming.app), incoming.admitted.endpoint, incoming.admitted.since);
        let id = style.answer_id(&incoming.id);
        describe(incoming, &model.id, &id, &options);
        let sizes = prompts.iter().map(|(prompt, _)| (prompt.request_id.clone(), prompt.tokens.len() as u32));
        let recording = |recent| Recording { recent, endpoint: endpoint.label(), streamed: options.stream.is_some() };
        let recording = app.recent.clone().map(recording);
        let records = (incoming.admitted.span.clone(), Arc::clone(&incoming.admitted.call));
        let progress = Progress::new(since, options.samples as usize, sizes, Arc::clone(&app.metrics), records, recording);
        let (mut streams, mut echoes) = (Vec::with_capacity(prompts.len()), Vec::with_capacity(prompts.len()));
        let mut prompt_token_ids = Vec::with_capacity(prompts.len());
        for (index, (prompt, echo)) in prompts.into_iter().enumerate() {
            prompt_token_ids.push(if options.token_ids { prompt.tokens.clone() } else { Vec::new() });
            echoes.push(echo.map(|text| Echo { text, with_logprobs: prompt.prompt_logprobs.is_some() }));
            let (dispatcher, model) = (Arc::clone(&app.dispatcher), Arc::clone(&model));
            let stop = options.stop.clone();
            let events = answers(dispatcher, model, prompt, stop, options.text, style.logprobs(), pieces.clone());
            streams.push(events.map(move |event| (index, event)).boxed());
        }
        let run = Self {
            events: stream::select_all(streams).boxed(),
            progress,
            echoed_len: vec![0; echoes.len()],
            echoes,
            wants_logprobs: options.sampling.logprobs.is_some(),
            extras: Extras {
                token_ids: options.token_ids,
                tokens_as_ids: options.tokens_as_ids,
                echoed_alternatives: options.sampling.logprobs.unwrap_or(0) as usize,
                prompt_alternatives: options.prompt_logprobs.map(|top| top as usize),
            },
            prompt_logprobs: vec![None; prompt_token_ids.len()],
            prompt_token_ids,
            keep_alive: app.keep_alive,
            queued: incoming.queued.subscribe(),
            id,
            request_id: incoming.id.clone(),
            created: unix_time().as_secs(),
            details: incoming.header_options.details,
            app,
            model,
        };
        (run, style, options.stream)
    }

    /// Returns the logprobs of a prompt's tokens, if the answer has them.
    pub(super) fn prompt_logprobs(&self, prompt: usize) -> Option<PromptLogprobs<'_>> {
        let tokens = self.prompt_logprobs[prompt].as_deref()?;
        Some(PromptLogprobs { model: &self.model, tokens, alternatives: self.extras.prompt_alternatives.unwrap_or(0) })
    }

    /// Returns the tokens of a prompt, if the answer has them.
    pub(super) fn prompt_token_ids(&self, prompt: usize) -> Option<&[TokenId]> {
        self.extras.token_ids.then(|| self.prompt_token_ids[prompt].as_slice())
    }

    /// Returns the number of prompts.
    pub(super) fn prompts(&self) -> usize {
        self.echoes.len()
    }

    /// Returns the next event and the index of its prompt; `None` when all prompts have ended. Cancel-safe.
    pub(super) async fn next(&mut self) -> Option<Result<(usize, AnswerEvent), ApiError>> {
        let next = self.next_event().await;
        if let Some(Err(error)) = &next {
            self.progress.fail(error.status());
        }
        next
    }

    /// Returns the next event for a stream, or the comment that is to be sent before it; `None` for the one that keeps the connection open.
    /// Cancel-safe.
    pub(super) async fn next_or_comment(&mut self) -> Result<Option<Result<(usize, AnswerEvent), ApiError>>, Option<Bytes>> {
        let (keep_alive, mut queued) = (self.keep_alive, self.queued.clone());
        tokio::select! {
            biased;
            next = self.next() => return Ok(next),
            Ok(()) = queued.changed() => {}
            () = sleep(keep_alive) => return Err(None),
        }
        let begins = *queued.borrow_and_update();
        self.queued = queued;
        Err(begins.map(|begins| queued_comment(begins.saturating_duration_since(Instant::now()))))
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
        match &event {
            AnswerEvent::PromptLogprobs(logprobs) if self.extras.prompt_alternatives.is_some() => {
                self.prompt_logprobs[index] = Some(logprobs.clone());
            }
            // The worker must send them before the first generated token.
            AnswerEvent::Delta(_) | AnswerEvent::Finished
                if self.extras.prompt_alternatives.is_some() && self.prompt_logprobs[index].is_none() =>
            {
                return Some(Err(DispatchError::Lost { reason: FailureReason::EngineFailed }.into()));
            }
            _ => {}
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
            AnswerEvent::Scheduled(_) | AnswerEvent::ReportLost | AnswerEvent::Resumed | AnswerEvent::Prefilled(_) => {
                return Ok(None);
            }
            AnswerEvent::Started(_) => Vec::new(),
            AnswerEvent::PromptLogprobs(logprobs) => {
                let mut logprobs = logprobs.clone();
                logprobs.iter_mut().for_each(|entry| entry.top.truncate(self.extras.echoed_alternatives));
                logprobs
            }
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
}

/// Records the request's parameters in its span, without the prompt's text.
fn describe(incoming: &Incoming, model: &str, id: &str, options: &Options) {
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
    span.set("gen_ai.response.id", id.to_owned());
    span.set("gen_ai.request.choice.count", options.samples);
    span.set("gen_ai.request.temperature", f64::from(options.sampling.temperature));
    span.set("gen_ai.request.top_p", f64::from(options.sampling.top_p));
    if let Some(max_tokens) = options.sampling.max_tokens {
        span.set("gen_ai.request.max_tokens", max_tokens);
    }
    span.set("tandem.stream", options.stream.is_some());
}

/// Returns the comment of server-sent events for a stream whose prompts wait in a queue for about this time.
fn queued_comment(wait: Duration) -> Bytes {
    match wait.as_secs_f64().ceil() {
        // The estimate has passed, or there is none.
        0.0 => Bytes::from_static(b": queued\n\n"),
        seconds => format!(": queued, about {seconds} s\n\n").into(),
    }
}
