//! One prompt's answer as a stream of [`AnswerEvent`]s.

use super::{event::AnswerEvent, samples::Samples};
use crate::dispatch::{DispatchError, Dispatcher, Generation, LateReport, Prompt};
use futures::{Stream, StreamExt, stream};
use std::sync::Arc;
use tandem_api::{LogprobsWith, TextOptions};
use tandem_text::{ServedModel, chat::OutputFormat};

/// Places the prompt, waits for its first token, and yields the answer's events. Resumes the generation if its worker is lost. The
/// stream owns the generation: dropping the stream ends the request on the router and the workers. With a `format`, a delta's text is
/// split into pieces, such as reasoning and tool calls.
pub(crate) fn answers(
    dispatcher: Arc<Dispatcher>,
    model: Arc<ServedModel>,
    prompt: Prompt,
    stop: Vec<String>,
    text: TextOptions,
    logprobs: LogprobsWith,
    format: Option<Arc<OutputFormat>>,
) -> impl Stream<Item = Result<AnswerEvent, DispatchError>> + Send {
    let samples = Samples::new(model, prompt.samples, &stop, text, &prompt.sampling, logprobs, format.as_deref());
    let answer = Answer { dispatcher, prompt: Box::new(prompt), generation: None, samples };
    stream::unfold(Some(answer), |answer| async move { Some(answer?.next().await) }).boxed()
}

/// An answer that has not ended.
struct Answer {
    dispatcher: Arc<Dispatcher>,
    prompt: Box<Prompt>,
    /// The running generation; `None` before the first token.
    generation: Option<Box<Generation>>,
    samples: Samples,
}

impl Answer {
    /// Returns the next event, and the rest of the answer unless it has ended.
    async fn next(mut self) -> (Result<AnswerEvent, DispatchError>, Option<Self>) {
        let Some(mut generation) = self.generation.take() else {
            return match self.dispatcher.start(&self.prompt).await {
                Ok(generation) => {
                    let facts = Box::new(generation.facts.clone());
                    (Ok(AnswerEvent::Started(facts)), Some(Self { generation: Some(Box::new(generation)), ..self }))
                }
                Err(error) => (Err(error), None),
            };
        };
        let error = loop {
            if let Some(event) = self.samples.next_event() {
                return (Ok(event), Some(Self { generation: Some(generation), ..self }));
            }
            if self.samples.all_ended() {
                if let Some(report) = generation.late_report(&self.prompt).await {
                    let event = match report {
                        LateReport::Scheduled(scheduled) => AnswerEvent::Scheduled(scheduled),
                        LateReport::Lost => AnswerEvent::ReportLost,
                    };
                    return (Ok(event), Some(Self { generation: Some(generation), ..self }));
                }
                generation.close(self.samples.generated_tokens()).await;
                return (Ok(AnswerEvent::Finished), None);
            }
            match generation.next(&self.prompt).await.map(|reply| self.samples.apply(reply)) {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => break generation.failed(reason),
                Err(error) => break error,
            }
        };
        match self.dispatcher.resume(*generation, error, &self.prompt, &self.samples.unfinished()).await {
            Ok(generation) => {
                let event = AnswerEvent::Resumed(generation.decode_worker().to_owned());
                (Ok(event), Some(Self { generation: Some(Box::new(generation)), ..self }))
            }
            Err(error) => (Err(error), None),
        }
    }
}
