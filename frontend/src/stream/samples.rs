//! The state of a prompt's samples: the text, tokens and logprobs so far. Computes the events that follow from a worker's reply.

use super::event::AnswerEvent;
use std::{collections::VecDeque, sync::Arc};
use tandem_api::{
    LogprobsWith, TextOptions,
    answer::{Delta, FinishReason, TokenLogprobs},
};
use tandem_kv::TokenId;
use tandem_proto::v1::{FailureReason, Finished, ResumedSample, Sampling, Token, Tokens, finished, generate_reply::Message};
use tandem_text::{
    Detokenizer, ServedModel, StopMatcher,
    chat::{OutputFormat, OutputParser, Pieces},
};

pub(super) struct Samples {
    model: Arc<ServedModel>,
    samples: Vec<Sample>,
    /// Events that the caller has not fetched yet.
    events: VecDeque<AnswerEvent>,
}

struct Sample {
    text: TextOptions,
    /// Whether tokens are decoded: the answer has a text, or stop strings are to be found in it.
    decodes: bool,
    /// Stop strings are ignored in the text of this many tokens at the beginning of the sample.
    min_tokens: usize,
    /// `None`: no logprobs are requested.
    logprobs_with: Option<LogprobsWith>,
    detokenizer: Detokenizer,
    stop: StopMatcher,
    /// Splits the text into pieces, such as reasoning and tool calls; `None`: the text is not split.
    parser: Option<OutputParser>,
    /// All tokens generated so far, needed to resume the sample.
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
    pub(super) fn new(
        model: Arc<ServedModel>,
        samples: u32,
        stop: &[String],
        text: TextOptions,
        sampling: &Sampling,
        logprobs: LogprobsWith,
        format: Option<&OutputFormat>,
    ) -> Self {
        let sample = |_| Sample {
            text,
            decodes: !text.absent || !stop.is_empty(),
            min_tokens: sampling.min_tokens as usize,
            logprobs_with: sampling.logprobs.map(|_| logprobs),
            detokenizer: Detokenizer::default(),
            stop: StopMatcher::new(stop.to_vec(), text.stop_included),
            parser: format.filter(|_| !text.absent).map(OutputParser::new),
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

    /// Returns the number of tokens of all samples before their ends.
    pub(super) fn generated_tokens(&self) -> u64 {
        self.samples.iter().map(|sample| sample.tokens.len() as u64).sum()
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
            // These messages precede an attempt's first token, so here they come from a resume. They do not change the facts of the attempt
            // that generated the first token.
            Message::Waiting(_) | Message::DecodeStarted(_) => {}
        }
        Ok(())
    }

    fn sample(&mut self, index: u32) -> Result<&mut Sample, FailureReason> {
        self.samples.get_mut(index as usize).ok_or(FailureReason::EngineFailed)
    }

    /// Checks that the tokenizer has the token, because the output of an external engine is not trusted.
    fn check(&self, token: TokenId) -> Result<(), FailureReason> {
        let size = self.model.tokenizer.vocab_size();
        if (token as usize) < size {
            return Ok(());
        }
        tracing::warn!(
            model = self.model.id,
            "the engine has generated token {token}, but the model's tokenizer has only {size} tokens; check that the engine serves this model"
        );
        Err(FailureReason::EngineFailed)
    }

    fn tokens(&mut self, Tokens { sample: index, tokens }: Tokens) -> Result<(), FailureReason> {
        tokens.iter().try_for_each(|token| self.check(token.token))?;
        let model = Arc::clone(&self.model);
        let sample = self.sample(index)?;
        let mut delta = Delta { sample: index, ..Delta::default() };
        for token in tokens {
            if sample.ended {
                // The worker does not know the stop strings, so it may generate further tokens. They are ignored.
                break;
            }
            delta.token_ids.push(token.token);
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
        finished.stop_token.map_or(Ok(()), |token| self.check(token))?;
        let model = Arc::clone(&self.model);
        let sample = self.sample(finished.sample)?;
        if sample.ended {
            return Ok(());
        }
        let mut delta = Delta { sample: finished.sample, finish: Some(finish), ..Delta::default() };
        // A stop token counts like any other token, but the worker reports it only in this message.
        if let Some(token) = finished.stop_token {
            delta.token_ids.push(token);
            if sample.logprobs_with == Some(LogprobsWith::Tokens) {
                let stop = finished.stop_logprobs.unwrap_or(Token { token, ..Token::default() });
                delta.logprobs.push(with_offset(stop, sample.text_len));
            }
            if sample.text.stop_included {
                let text = sample.decode(&model, token);
                sample.text_len += text.chars().count();
                sample.match_stops(&text, &mut delta);
            }
        }
        sample.finish(&mut delta);
        self.emit(delta);
        Ok(())
    }

    fn emit(&mut self, mut delta: Delta) {
        if self.samples.get(delta.sample as usize).is_some_and(|sample| sample.text.absent) {
            delta.text.clear();
        }
        if !delta.token_ids.is_empty() || delta.finish.is_some() {
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
        let (id, text) = (token.token, self.decode(model, token.token));
        // Special tokens without text may be tags.
        let is_special = model.tokenizer.is_special(id) && !self.text.special_tokens;
        match self.logprobs_with {
            Some(LogprobsWith::Text) => self.logprobs.push_back(with_offset(token, self.text_len)),
            Some(LogprobsWith::Tokens) => delta.logprobs.push(with_offset(token, self.text_len)),
            None => {}
        }
        let was_reasoning = self.is_reasoning();
        self.emit_text(&text, delta);
        if is_special {
            self.emit_tag(&String::from_utf8_lossy(model.tokenizer.bytes(id)), delta);
        }
        self.split(delta);
        delta.reasoning_tokens += u32::from(was_reasoning && self.is_reasoning());
    }

    fn emit_text(&mut self, text: &str, delta: &mut Delta) {
        self.text_len += text.chars().count();
        let is_in_call = self.parser.as_ref().is_some_and(OutputParser::is_in_constrained_call);
        if self.tokens.len() <= self.min_tokens || is_in_call {
            let before = delta.text.len();
            self.stop.pass(text, &mut delta.text);
            self.emitted_len += delta.text[before..].chars().count();
            self.emit_logprobs(delta);
        } else {
            self.match_stops(text, delta);
        }
    }

    /// Returns the text that is complete with this token.
    fn decode(&mut self, model: &ServedModel, token: TokenId) -> String {
        let mut text = String::new();
        if self.decodes && (self.text.special_tokens || !model.tokenizer.is_special(token)) {
            self.detokenizer.push(model.tokenizer.bytes(token), &mut text);
        }
        text
    }

    /// Emits a special token's name if it is a tag. No stop string matches across a tag.
    fn emit_tag(&mut self, name: &str, delta: &mut Delta) {
        if self.ended || self.parser.as_ref().is_none_or(|parser| !parser.has_tag(name)) {
            return;
        }
        let before = delta.text.len();
        self.stop.finish(&mut delta.text);
        self.emitted_len += delta.text[before..].chars().count();
        self.split(delta);
        self.with_pieces(delta, |parser, pieces| parser.special(name, pieces));
    }

    /// Moves the delta's text to its pieces, if the text is split.
    fn split(&mut self, delta: &mut Delta) {
        if self.parser.is_none() {
            return;
        }
        let (text, ended) = (std::mem::take(&mut delta.text), self.ended);
        self.with_pieces(delta, |parser, pieces| {
            parser.push(&text, pieces);
            if ended {
                parser.finish(pieces);
            }
        });
        let Some(parser) = &self.parser else { return };
        if !ended && parser.is_complete() {
            self.ended = true;
            delta.logprobs.extend(self.logprobs.drain(..));
            delta.finish = Some(FinishReason::Stop);
        }
        if delta.finish == Some(FinishReason::Stop) && parser.has_complete_calls() {
            delta.finish = Some(FinishReason::ToolCalls);
        }
    }

    fn with_pieces(&mut self, delta: &mut Delta, step: impl FnOnce(&mut OutputParser, &mut Pieces)) {
        let Some(parser) = &mut self.parser else { return };
        let mut pieces = Pieces::from(std::mem::take(&mut delta.pieces));
        step(parser, &mut pieces);
        delta.pieces = pieces.into_vec();
    }

    fn is_reasoning(&self) -> bool {
        self.parser.as_ref().is_some_and(OutputParser::is_reasoning)
    }

    fn match_stops(&mut self, text: &str, delta: &mut Delta) {
        let before = delta.text.len();
        let stopped = self.stop.push(text, &mut delta.text).map(str::to_owned);
        self.emitted_len += delta.text[before..].chars().count();
        self.emit_logprobs(delta);
        if stopped.is_some() {
            // The tokens of the stop string count as generated, but the answer has neither their text nor their logprobs.
            self.logprobs.clear();
            self.ended = true;
            (delta.finish, delta.stop_string) = (Some(FinishReason::Stop), stopped);
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
        self.split(delta);
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
