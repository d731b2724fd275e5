//! Runs a request's prompts and writes the answer, whole or as server-sent events. Both read the same pieces.

use super::{
    App,
    events::{First, events},
    explain::explain,
    lifecycle::Incoming,
    progress::{Kept, Progress},
    shape::{Choice, Envelope, Logprobs, Shape},
    unix_seconds,
};
use crate::{
    admission::Admitted,
    dispatch::{DispatchError, Prompt},
    error::ApiError,
    request::Options,
    stream::{Delta, Finish, Piece, TokenLogprobs, answers},
    usage::Usage,
};
use axum::{
    Json,
    response::{IntoResponse, Response},
};
use futures::{Stream, StreamExt, stream};
use std::{pin::Pin, sync::Arc, time::Duration};
use tandem_proto::v1::FailureReason;
use tokio::time::{Instant, timeout};

/// A request ready to run.
pub(super) struct Job {
    pub(super) shape: Shape,
    /// Each with the text it is to be answered with first, if that is asked for.
    pub(super) prompts: Vec<(Prompt, Option<String>)>,
    pub(super) options: Options,
}

/// Pieces with the numbers of their prompts.
type Pieces = Pin<Box<dyn Stream<Item = (usize, Result<Piece, DispatchError>)> + Send>>;

/// A running request.
pub(super) struct Run {
    app: Arc<App>,
    pieces: Pieces,
    pub(super) progress: Progress,
    echoes: Vec<Option<Echo>>,
    /// Characters of each prompt's text that were given.
    echoed_len: Vec<usize>,
    logprobs: bool,
    pub(super) shape: Shape,
    id: String,
    created: u64,
    pub(super) details: bool,
}

/// A prompt's text that is still to be given.
struct Echo {
    text: String,
    /// It is given with its logprobs, once they are there.
    with_logprobs: bool,
}

/// Sends status and headers when the first token or an error has come. A stream waits no longer than its interval for
/// comments; an error that comes later is an event.
pub(super) async fn respond(incoming: &mut Incoming, job: Job) -> Result<Response, ApiError> {
    if incoming.asked.explain {
        return explain(&incoming.app, job).await;
    }
    let stream_usage = job.options.stream;
    let mut run = Run::new(incoming, job);
    let Some(usage) = stream_usage else { return run.whole().await };
    let first = match timeout(incoming.app.keep_alive, run.next()).await {
        Ok(first) => First::Piece(first.transpose()?),
        Err(_) => First::Late,
    };
    let admitted = incoming.admitted.take().expect("a request is answered once, and holds its place until then");
    Ok(events(run, usage, admitted, first))
}

impl Run {
    fn new(incoming: &Incoming, job: Job) -> Self {
        let Job { shape, prompts, options } = job;
        let app = Arc::clone(&incoming.app);
        describe(incoming, shape, &options);
        let since = incoming.admitted.as_ref().map_or_else(Instant::now, Admitted::since);
        let sizes = prompts.iter().map(|(prompt, _)| (prompt.request_id.clone(), prompt.tokens.len() as u32));
        let endpoint = incoming.admitted.as_ref().map_or("", |admitted| admitted.endpoint().label());
        let kept = app.recent.clone().map(|recent| Kept { recent, endpoint, streamed: options.stream.is_some() });
        let progress =
            Progress::new(since, options.samples as usize, sizes, Arc::clone(&app.metrics), incoming.span.clone(), kept);
        let (mut streams, mut echoes) = (Vec::with_capacity(prompts.len()), Vec::with_capacity(prompts.len()));
        for (index, (prompt, echo)) in prompts.into_iter().enumerate() {
            echoes.push(echo.map(|text| Echo { text, with_logprobs: prompt.prompt_logprobs.is_some() }));
            let pieces = answers(Arc::clone(&app.dispatcher), Arc::clone(&app.model), prompt, options.stop.clone());
            streams.push(pieces.map(move |piece| (index, piece)).boxed());
        }
        Self {
            pieces: stream::select_all(streams).boxed(),
            progress,
            echoed_len: vec![0; echoes.len()],
            echoes,
            logprobs: options.sampling.logprobs.is_some(),
            shape,
            id: shape.id(&incoming.id),
            created: unix_seconds(),
            details: incoming.asked.details,
            app,
        }
    }

    /// The interval between comments while a stream has no tokens to send.
    pub(super) fn keep_alive(&self) -> Duration {
        self.app.keep_alive
    }

    /// The next piece and the number of its prompt; `None` when all prompts have ended. Cancel-safe: pieces stay in their streams until they
    /// are returned.
    pub(super) async fn next(&mut self) -> Option<Result<(usize, Piece), ApiError>> {
        let next = self.next_piece().await;
        if let Some(Err(error)) = &next {
            self.progress.fail(error.status());
        }
        next
    }

    async fn next_piece(&mut self) -> Option<Result<(usize, Piece), ApiError>> {
        let (index, piece) = tokio::select! {
            biased;
            next = self.pieces.next() => next?,
            () = self.app.admission.stopped() => return Some(Err(DispatchError::Stopped.into())),
        };
        let mut piece = match piece {
            Ok(piece) => piece,
            Err(error) => return Some(Err(error.into())),
        };
        if let Piece::Delta(delta) = &mut piece {
            // Offsets count from the beginning of the text that is given, an echoed prompt included.
            delta.logprobs.iter_mut().for_each(|entry| entry.text_offset += self.echoed_len[index]);
        }
        self.progress.note(index, &piece);
        Some(Ok((index, piece)))
    }

    /// What opens the answer of a prompt: its own text, if that is asked for. Comes once, before anything else of it.
    pub(super) fn echo(&mut self, index: usize, piece: &Piece) -> Result<Option<(String, Vec<TokenLogprobs>)>, ApiError> {
        let Some(echo) = &mut self.echoes[index] else { return Ok(None) };
        let logprobs = match piece {
            Piece::Started(_) if echo.with_logprobs => return Ok(None),
            Piece::Migrated | Piece::Prefilled(_) => return Ok(None),
            Piece::Started(_) => Vec::new(),
            Piece::PromptLogprobs(logprobs) => logprobs.clone(),
            // The worker was asked for the prompt's logprobs and goes on without.
            Piece::Delta(_) | Piece::Finished => {
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
        Envelope { id: &self.id, object, created: self.created, model: &self.app.model.id, choices, usage, tandem: None }
    }

    pub(super) fn logprobs<'a>(&'a self, tokens: &'a [TokenLogprobs]) -> Option<Logprobs<'a>> {
        self.logprobs.then_some(Logprobs { model: &self.app.model, tokens })
    }

    /// The whole answer at once.
    async fn whole(mut self) -> Result<Response, ApiError> {
        let samples = self.progress.samples();
        let mut choices: Vec<WholeChoice> = Vec::new();
        choices.resize_with(self.echoes.len() * samples, WholeChoice::default);
        while let Some(next) = self.next().await {
            let (index, piece) = next?;
            if let Some((text, logprobs)) = self.echo(index, &piece)? {
                for choice in &mut choices[index * samples..(index + 1) * samples] {
                    choice.text.push_str(&text);
                    choice.logprobs.extend_from_slice(&logprobs);
                }
            }
            if let Piece::Delta(delta) = piece {
                choices[index * samples + delta.sample as usize].push(delta);
            }
        }
        self.progress.finish();
        let written = choices
            .iter()
            .enumerate()
            .map(|(index, choice)| self.shape.whole(index, &choice.text, self.logprobs(&choice.logprobs), choice.finish))
            .collect();
        let mut envelope = self.envelope(self.shape.object(), written, Some(Some(self.progress.usage())));
        envelope.tandem = self.details.then(|| self.progress.details());
        Ok(Json(envelope).into_response())
    }
}

/// What is asked for, without what it says.
fn describe(incoming: &Incoming, shape: Shape, options: &Options) {
    let span = &incoming.span;
    if !span.is_sampled() {
        return;
    }
    let (operation, model) = (shape.endpoint().operation(), &incoming.app.model.id);
    span.rename(|| format!("{operation} {model}"));
    span.set("gen_ai.operation.name", operation);
    span.set("gen_ai.provider.name", "tandem");
    span.set("gen_ai.request.model", model.clone());
    span.set("gen_ai.response.model", model.clone());
    span.set("gen_ai.response.id", shape.id(&incoming.id));
    span.set("gen_ai.request.choice.count", options.samples);
    span.set("gen_ai.request.temperature", f64::from(options.sampling.temperature));
    span.set("gen_ai.request.top_p", f64::from(options.sampling.top_p));
    if let Some(max_tokens) = options.sampling.max_tokens {
        span.set("gen_ai.request.max_tokens", max_tokens);
    }
    span.set("tandem.stream", options.stream.is_some());
}

/// A choice of a whole answer as it grows.
#[derive(Default)]
struct WholeChoice {
    text: String,
    logprobs: Vec<TokenLogprobs>,
    finish: Option<Finish>,
}

impl WholeChoice {
    fn push(&mut self, delta: Delta) {
        self.text.push_str(&delta.text);
        self.logprobs.extend(delta.logprobs);
        self.finish = self.finish.or(delta.finish);
    }
}
