//! The state of a prompt's samples: the text, tokens and logprobs so far. Computes the events that follow from a worker's reply.

use super::{
    detokenizer::Detokenizer,
    event::{AnswerEvent, Delta, FinishReason, TokenLogprobs},
    stop::StopMatcher,
};
use crate::model::ServedModel;
use std::{collections::VecDeque, sync::Arc};
use tandem_kv::TokenId;
use tandem_proto::v1::{FailureReason, Finished, ResumedSample, Sampling, Token, Tokens, finished, generate_reply::Message};

pub(super) struct Samples {
    model: Arc<ServedModel>,
    samples: Vec<Sample>,
    /// Events that the caller has not fetched yet.
    events: VecDeque<AnswerEvent>,
}

struct Sample {
    /// Stop strings are ignored in the text of this many tokens at the beginning of the sample.
    min_tokens: usize,
    wants_logprobs: bool,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// All tokens before the sample's end, needed to resume it.
    tokens: Vec<TokenId>,
    /// The number of decoded characters, whether sent or held back.
    text_len: usize,
    /// The number of characters that were sent.
    emitted_len: usize,
    /// The logprobs of the tokens whose text is held back.
    logprobs: VecDeque<TokenLogprobs>,
    ended: bool,
}

impl Samples {
    pub(super) fn new(model: Arc<ServedModel>, samples: u32, stop: &[String], sampling: &Sampling) -> Self {
        let sample = |_| Sample {
            min_tokens: sampling.min_tokens as usize,
            wants_logprobs: sampling.logprobs.is_some(),
            detokenizer: Detokenizer::default(),
            stop: StopMatcher::new(stop.to_vec()),
            tokens: Vec::new(),
            text_len: 0,
            emitted_len: 0,
            logprobs: VecDeque::new(),
            ended: false,
        };
        Self { model, samples: (0..samples).map(sample).collect(), events: VecDeque::new() }
    }

    pub(super) fn next_event(&mut self) -> Option<AnswerEvent> {
        self.events.pop_front()
    }

    pub(super) fn all_ended(&self) -> bool {
        self.samples.iter().all(|sample| sample.ended)
    }

    /// Returns the samples that have not ended, each with its tokens so far.
    pub(super) fn unfinished(&self) -> Vec<ResumedSample> {
        let generated = |(sample, state): (u32, &Sample)| ResumedSample { sample, tokens: state.tokens.clone() };
        (0..).zip(&self.samples).filter(|(_, state)| !state.ended).map(generated).collect()
    }

    /// Applies a reply of the worker.
    ///
    /// # Errors
    /// The worker reports a failure, or its reply is invalid. The attempt has failed for the returned reason.
    pub(super) fn apply(&mut self, reply: Message) -> Result<(), FailureReason> {
        match reply {
            Message::Tokens(tokens) => self.tokens(tokens)?,
            Message::Finished(finished) => self.finished(finished)?,
            Message::PromptLogprobs(prompt) => {
                let event = AnswerEvent::PromptLogprobs(self.prompt_logprobs(prompt.tokens));
                self.events.push_back(event);
            }
            Message::PrefillTimeline(timeline) => self.events.push_back(AnswerEvent::Prefilled(timeline.chunks)),
            Message::Scheduled(scheduled) => self.events.push_back(AnswerEvent::Scheduled(scheduled)),
            Message::Failure(failure) => return Err(failure.reason()),
            // This message precedes an attempt's first token, so here it comes from a resume. It does not change the facts of the attempt
            // that generated the first token.
            Message::DecodeStarted(_) => {}
        }
        Ok(())
    }

    fn sample(&mut self, index: u32) -> Result<&mut Sample, FailureReason> {
        self.samples.get_mut(index as usize).ok_or(FailureReason::EngineFailed)
    }

    fn tokens(&mut self, Tokens { sample: index, tokens }: Tokens) -> Result<(), FailureReason> {
        let model = Arc::clone(&self.model);
        let sample = self.sample(index)?;
        let mut delta = Delta { sample: index, ..Delta::default() };
        for token in tokens {
            if sample.ended {
                // The worker does not know the stop strings, so it may generate further tokens. They are ignored.
                break;
            }
            delta.tokens += 1;
            sample.push(&model, token, &mut delta);
        }
        self.emit(delta);
        Ok(())
    }

    fn finished(&mut self, finished: Finished) -> Result<(), FailureReason> {
        let finish = match finished.reason() {
            finished::FinishReason::Stop => FinishReason::Stop,
            finished::FinishReason::Length => FinishReason::Length,
            finished::FinishReason::Unspecified => return Err(FailureReason::EngineFailed),
        };
        let sample = self.sample(finished.sample)?;
        if sample.ended {
            return Ok(());
        }
        let mut delta = Delta { sample: finished.sample, finish: Some(finish), ..Delta::default() };
        // A stop token counts like any other token, but the worker reports it only in this message.
        delta.tokens = u32::from(finished.stop_token.is_some());
        sample.finish(&mut delta);
        self.emit(delta);
        Ok(())
    }

    fn emit(&mut self, delta: Delta) {
        if delta.tokens > 0 || delta.finish.is_some() {
            self.events.push_back(AnswerEvent::Delta(delta));
        }
    }

    fn prompt_logprobs(&self, tokens: Vec<Token>) -> Vec<TokenLogprobs> {
        let (mut detokenizer, mut text, mut text_offset) = (Detokenizer::default(), String::new(), 0);
        let entry = |token: Token| {
            let offset = text_offset;
            text.clear();
            detokenizer.push(self.model.tokenizer.bytes(token.token), &mut text);
            text_offset += text.chars().count();
            with_offset(token, offset)
        };
        tokens.into_iter().map(entry).collect()
    }
}

impl Sample {
    fn push(&mut self, model: &ServedModel, token: Token, delta: &mut Delta) {
        self.tokens.push(token.token);
        let mut text = String::new();
        // Special tokens have no visible text.
        if !model.tokenizer.is_special(token.token) {
            self.detokenizer.push(model.tokenizer.bytes(token.token), &mut text);
        }
        if self.wants_logprobs {
            self.logprobs.push_back(with_offset(token, self.text_len));
        }
        self.text_len += text.chars().count();
        if self.tokens.len() <= self.min_tokens {
            let before = delta.text.len();
            self.stop.pass(&text, &mut delta.text);
            self.emitted_len += delta.text[before..].chars().count();
            self.emit_logprobs(delta);
        } else {
            self.match_stops(&text, delta);
        }
    }

    fn match_stops(&mut self, text: &str, delta: &mut Delta) {
        let before = delta.text.len();
        let stopped = self.stop.push(text, &mut delta.text);
        self.emitted_len += delta.text[before..].chars().count();
        self.emit_logprobs(delta);
        if stopped {
            // The tokens of the stop string count as generated, but the answer has neither their text nor their logprobs.
            self.logprobs.clear();
            self.ended = true;
            delta.finish = Some(FinishReason::Stop);
        }
    }

    fn finish(&mut self, delta: &mut Delta) {
        let mut tail = String::new();
        self.detokenizer.finish(&mut tail);
        if !tail.is_empty() {
            self.text_len += 1;
            self.match_stops(&tail, delta);
        }
        if !self.ended {
            self.stop.finish(&mut delta.text);
            delta.logprobs.extend(self.logprobs.drain(..));
        }
        self.ended = true;
    }

    /// Emits the logprobs of the tokens whose text begins within the emitted text. If no text is held back, emits the logprobs of all
    /// tokens.
    fn emit_logprobs(&mut self, delta: &mut Delta) {
        let all = self.emitted_len == self.text_len;
        while self.logprobs.front().is_some_and(|entry| all || entry.text_offset < self.emitted_len) {
            delta.logprobs.extend(self.logprobs.pop_front());
        }
    }
}

fn with_offset(token: Token, text_offset: usize) -> TokenLogprobs {
    let top = token.top.iter().map(|entry| (entry.token, entry.logprob)).collect();
    TokenLogprobs { token: token.token, logprob: token.logprob, top, text_offset }
}

#[cfg(test)]
mod tests;
