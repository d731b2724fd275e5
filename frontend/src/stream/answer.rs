//! One prompt's answer as a stream of [`Piece`]s.

use super::{
    Delta, Finish, Piece, TokenLogprobs,
    detokenise::Detokeniser,
    stop::{StopMatcher, Stopped},
};
use crate::{
    dispatch::{Attempt, DispatchError, Dispatcher, Prompt},
    model::ServedModel,
};
use futures::{Stream, StreamExt, stream};
use std::{collections::VecDeque, sync::Arc};
use tandem_kv::TokenId;
use tandem_proto::v1::{FailureReason, Finished, ResumedSample, Token, Tokens, finished, generate_reply};

/// Places the prompt, waits for its first token, and gives what comes, also from those who go on after a loss. The stream owns the prompt's attempt: dropping it ends
/// the request everywhere, and it is let go when the last sample has ended, whatever decode computes ahead.
pub(crate) fn answers(
    dispatcher: Arc<Dispatcher>,
    model: Arc<ServedModel>,
    prompt: Prompt,
    stop: Vec<String>,
) -> impl Stream<Item = Result<Piece, DispatchError>> + Send {
    let samples = Samples::new(model, prompt.samples, &stop, &prompt);
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
    attempt: Box<Attempt>,
    samples: Samples,
}

impl Answer {
    async fn next(self) -> Option<(Result<Piece, DispatchError>, Self)> {
        match self {
            Self::Waiting { dispatcher, prompt, samples } => Some(match dispatcher.start(&prompt).await {
                Ok(attempt) => {
                    let facts = Box::new(attempt.facts.clone());
                    let running = Running { dispatcher, prompt, attempt: Box::new(attempt), samples };
                    (Ok(Piece::Started(facts)), Self::Running(running))
                }
                Err(error) => (Err(error), Self::Ended),
            }),
            Self::Running(running) => Some(running.next().await),
            Self::Ended => None,
        }
    }
}

impl Running {
    async fn next(mut self) -> (Result<Piece, DispatchError>, Answer) {
        let failed = loop {
            if let Some(piece) = self.samples.pieces.pop_front() {
                return (Ok(piece), Answer::Running(self));
            }
            if self.samples.all_ended() {
                self.attempt.close().await;
                return (Ok(Piece::Finished), Answer::Ended);
            }
            match self.attempt.next(&self.prompt).await {
                Ok(reply) => match self.samples.apply(reply) {
                    Ok(()) => {}
                    Err(reason) => break self.attempt.failed(reason),
                },
                Err(failed) => break failed,
            }
        };
        let Self { dispatcher, prompt, attempt, samples } = self;
        match dispatcher.resume(*attempt, failed, &prompt, &samples.unfinished()).await {
            Ok(attempt) => {
                (Ok(Piece::Migrated), Answer::Running(Self { dispatcher, prompt, attempt: Box::new(attempt), samples }))
            }
            Err(error) => (Err(error), Answer::Ended),
        }
    }
}

/// What has been said so far by each sample. Pure: replies in, pieces out.
struct Samples {
    model: Arc<ServedModel>,
    samples: Vec<Sample>,
    /// Tokens before which stop strings do not count.
    min_tokens: u32,
    logprobs: bool,
    pieces: VecDeque<Piece>,
}

struct Sample {
    detokeniser: Detokeniser,
    stop: StopMatcher,
    /// All that came before its end, for whoever goes on.
    tokens: Vec<TokenId>,
    /// Characters decoded, given or held back.
    text_len: usize,
    /// Characters given.
    given_len: usize,
    /// Of tokens whose text is not given yet.
    logprobs: VecDeque<TokenLogprobs>,
    ended: bool,
}

impl Samples {
    fn new(model: Arc<ServedModel>, samples: u32, stop: &[String], prompt: &Prompt) -> Self {
        let sample = |_| Sample {
            detokeniser: Detokeniser::default(),
            stop: StopMatcher::new(stop.to_vec()),
            tokens: Vec::new(),
            text_len: 0,
            given_len: 0,
            logprobs: VecDeque::new(),
            ended: false,
        };
        Self {
            model,
            samples: (0..samples).map(sample).collect(),
            min_tokens: prompt.sampling.min_tokens,
            logprobs: prompt.sampling.logprobs.is_some(),
            pieces: VecDeque::new(),
        }
    }

    fn all_ended(&self) -> bool {
        self.samples.iter().all(|sample| sample.ended)
    }

    /// What those that have not ended have generated.
    fn unfinished(&self) -> Vec<ResumedSample> {
        let generated = |(sample, state): (u32, &Sample)| ResumedSample { sample, tokens: state.tokens.clone() };
        (0..).zip(&self.samples).filter(|(_, state)| !state.ended).map(generated).collect()
    }

    /// Fails with the reason why its attempt is no use any more.
    fn apply(&mut self, reply: generate_reply::Message) -> Result<(), FailureReason> {
        match reply {
            generate_reply::Message::Tokens(tokens) => self.tokens(tokens),
            generate_reply::Message::Finished(finished) => self.finished(finished),
            generate_reply::Message::PromptLogprobs(prompt) => {
                let piece = Piece::PromptLogprobs(self.prompt_logprobs(prompt.tokens));
                self.pieces.push_back(piece);
                Ok(())
            }
            generate_reply::Message::PrefillTimeline(prefilled) => {
                self.pieces.push_back(Piece::Prefilled(prefilled.chunks));
                Ok(())
            }
            generate_reply::Message::Failure(failure) => Err(failure.reason()),
            // They belong before the first token and change nothing now: the facts are frozen.
            generate_reply::Message::Scheduled(_) | generate_reply::Message::DecodeStarted(_) => Ok(()),
        }
    }

    fn sample(&mut self, index: u32) -> Result<&mut Sample, FailureReason> {
        self.samples.get_mut(index as usize).ok_or(FailureReason::EngineFailed)
    }

    fn tokens(&mut self, Tokens { sample: index, tokens }: Tokens) -> Result<(), FailureReason> {
        let (model, min_tokens, logprobs) = (Arc::clone(&self.model), self.min_tokens, self.logprobs);
        let sample = self.sample(index)?;
        let mut delta = Delta { sample: index, ..Delta::default() };
        for token in tokens {
            if sample.ended {
                // Decode ran ahead of a stop string.
                break;
            }
            delta.tokens += 1;
            sample.push(&model, token, Rules { min_tokens, logprobs }, &mut delta);
        }
        self.give(delta);
        Ok(())
    }

    fn finished(&mut self, finished: Finished) -> Result<(), FailureReason> {
        let finish = match finished.reason() {
            finished::FinishReason::Stop => Finish::Stop,
            finished::FinishReason::Length => Finish::Length,
            finished::FinishReason::Unspecified => return Err(FailureReason::EngineFailed),
        };
        let sample = self.sample(finished.sample)?;
        if sample.ended {
            return Ok(());
        }
        let mut delta = Delta { sample: finished.sample, finish: Some(finish), ..Delta::default() };
        // A stop token was generated as any other, but it is told only here.
        delta.tokens = u32::from(finished.stop_token.is_some());
        sample.finish(&mut delta);
        self.give(delta);
        Ok(())
    }

    fn give(&mut self, delta: Delta) {
        if delta.tokens > 0 || delta.finish.is_some() {
            self.pieces.push_back(Piece::Delta(delta));
        }
    }

    fn prompt_logprobs(&self, tokens: Vec<Token>) -> Vec<TokenLogprobs> {
        let (mut detokeniser, mut text, mut text_offset) = (Detokeniser::default(), String::new(), 0);
        let entry = |token: Token| {
            let offset = text_offset;
            text.clear();
            detokeniser.push(self.model.tokenizer.bytes(token.token), &mut text);
            text_offset += text.chars().count();
            with_offset(token, offset)
        };
        tokens.into_iter().map(entry).collect()
    }
}

#[derive(Clone, Copy)]
struct Rules {
    min_tokens: u32,
    logprobs: bool,
}

impl Sample {
    fn push(&mut self, model: &ServedModel, token: Token, rules: Rules, delta: &mut Delta) {
        self.tokens.push(token.token);
        let mut text = String::new();
        // Special tokens are not for readers.
        if !model.tokenizer.is_special(token.token) {
            self.detokeniser.push(model.tokenizer.bytes(token.token), &mut text);
        }
        if rules.logprobs {
            self.logprobs.push_back(with_offset(token, self.text_len));
        }
        self.text_len += text.chars().count();
        if self.tokens.len() <= rules.min_tokens as usize {
            let before = delta.text.len();
            self.stop.pass(&text, &mut delta.text);
            self.given_len += delta.text[before..].chars().count();
            self.give_logprobs(delta);
        } else {
            self.match_stops(&text, delta);
        }
    }

    fn match_stops(&mut self, text: &str, delta: &mut Delta) {
        let before = delta.text.len();
        let stopped = self.stop.push(text, &mut delta.text);
        self.given_len += delta.text[before..].chars().count();
        self.give_logprobs(delta);
        if stopped == Stopped::Yes {
            // The tokens of the stop itself are counted but not shown.
            self.logprobs.clear();
            self.ended = true;
            delta.finish = Some(Finish::Stop);
        }
    }

    fn finish(&mut self, delta: &mut Delta) {
        let mut tail = String::new();
        self.detokeniser.finish(&mut tail);
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

    /// Those of tokens that begin in given text, and, when nothing is held back, all.
    fn give_logprobs(&mut self, delta: &mut Delta) {
        let all = self.given_len == self.text_len;
        while self.logprobs.front().is_some_and(|entry| all || entry.text_offset < self.given_len) {
            delta.logprobs.extend(self.logprobs.pop_front());
        }
    }
}

fn with_offset(token: Token, text_offset: usize) -> TokenLogprobs {
    let top = token.top.iter().map(|entry| (entry.token, entry.logprob)).collect();
    TokenLogprobs { token: token.token, logprob: token.logprob, top, text_offset }
}

#[cfg(test)]
#[path = "answer_tests.rs"]
mod tests;
