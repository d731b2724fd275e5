//! One prompt's answer as a stream of [`AnswerEvent`]s.

use super::{event::AnswerEvent, samples::Samples};
use crate::{
    dispatch::{DispatchError, Dispatcher, Generation, Prompt},
    model::ServedModel,
};
use futures::{Stream, StreamExt, stream};
use std::sync::Arc;

/// Places the prompt, waits for its first token, and yields the answer's events, also after a resume. The stream owns the generation:
/// dropping it ends the request everywhere. It is ended in order after the last sample, even if the worker computes ahead.
pub(crate) fn answers(
    dispatcher: Arc<Dispatcher>,
    model: Arc<ServedModel>,
    prompt: Prompt,
    stop: Vec<String>,
) -> impl Stream<Item = Result<AnswerEvent, DispatchError>> + Send {
    let samples = Samples::new(model, prompt.samples, &stop, &prompt.sampling);
    stream::unfold(Answer::Waiting { dispatcher, prompt: Box::new(prompt), samples }, |answer| answer.next()).boxed()
}

enum Answer {
    Waiting { dispatcher: Arc<Dispatcher>, prompt: Box<Prompt>, samples: Samples },
    Running(Running),
    Ended,
}

struct Running {
    dispatcher: Arc<Dispatcher>,
    prompt: Box<Prompt>,
    generation: Box<Generation>,
    samples: Samples,
}

impl Answer {
    async fn next(self) -> Option<(Result<AnswerEvent, DispatchError>, Self)> {
        match self {
            Self::Waiting { dispatcher, prompt, samples } => Some(match dispatcher.start(&prompt).await {
                Ok(generation) => {
                    let facts = Box::new(generation.facts.clone());
                    let running = Running { dispatcher, prompt, generation: Box::new(generation), samples };
                    (Ok(AnswerEvent::Started(facts)), Self::Running(running))
                }
                Err(error) => (Err(error), Self::Ended),
            }),
            Self::Running(running) => Some(running.next().await),
            Self::Ended => None,
        }
    }
}

impl Running {
    async fn next(mut self) -> (Result<AnswerEvent, DispatchError>, Answer) {
        let error = loop {
            if let Some(event) = self.samples.next_event() {
                return (Ok(event), Answer::Running(self));
            }
            if self.samples.all_ended() {
                self.generation.close().await;
                return (Ok(AnswerEvent::Finished), Answer::Ended);
            }
            match self.generation.next(&self.prompt).await {
                Ok(reply) => match self.samples.apply(reply) {
                    Ok(()) => {}
                    Err(reason) => break self.generation.failed(reason),
                },
                Err(error) => break error,
            }
        };
        let Self { dispatcher, prompt, generation, samples } = self;
        match dispatcher.resume(*generation, error, &prompt, &samples.unfinished()).await {
            Ok(generation) => {
                let running = Self { dispatcher, prompt, generation: Box::new(generation), samples };
                (Ok(AnswerEvent::Resumed), Answer::Running(running))
            }
            Err(error) => (Err(error), Answer::Ended),
        }
    }
}
