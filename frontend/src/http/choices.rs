//! Writes the answers of chats and plain completions: a list of choices. A stream has OpenAI's order: first the role (chat only), the text
//! and the finish reason of each choice, then usage if requested, then `[DONE]`. No `[DONE]` follows an error.

use super::{
    answer::Run,
    chat_format::{ChatDelta, WholeMessage},
    format::{Choice, ChoiceFormat, Envelope, Logprobs, TokenFields},
    sse::{DONE, Format, write_event},
};
use crate::{
    error::ApiError,
    stream::{AnswerEvent, Delta, FinishReason, TokenLogprobs},
    usage::Usage,
};
use tandem_api::StreamUsage;
use tandem_kv::TokenId;

/// A streamed answer.
pub(super) struct Chunks {
    pub(super) run: Run,
    pub(super) choices: ChoiceFormat,
    pub(super) usage: StreamUsage,
}

/// An answer that is not streamed.
pub(super) struct Whole {
    run: Run,
    format: ChoiceFormat,
    /// All samples of each prompt.
    choices: Vec<WholeChoice>,
}

/// One choice of an answer that is not streamed. It grows while the answer is generated.
#[derive(Default)]
struct WholeChoice {
    /// The text of a plain completion.
    text: String,
    /// The message of a chat.
    message: WholeMessage,
    logprobs: Vec<TokenLogprobs>,
    token_ids: Vec<TokenId>,
    finish: Option<FinishReason>,
}

impl Format for Chunks {
    fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    fn write(&mut self, out: &mut Vec<u8>, prompt: usize, event: AnswerEvent) -> Result<(), ApiError> {
        let samples = self.run.progress.samples;
        let choices = prompt * samples..(prompt + 1) * samples;
        if let AnswerEvent::Started(_) = event {
            let prompt_token_ids = self.run.prompt_token_ids(prompt);
            for choice in choices.clone() {
                match self.choices {
                    ChoiceFormat::Chat => {
                        let role = Choice::chat_chunk(choice, ChatDelta::role(), None, None, TokenFields::default());
                        let mut chunk = self.chunk(vec![role], self.usage.in_every_chunk.then(|| self.run.progress.usage()));
                        chunk.tokens.prompt_token_ids = prompt_token_ids.filter(|_| choice == choices.start);
                        write_event(out, &chunk);
                    }
                    ChoiceFormat::Completions if prompt_token_ids.is_some() => {
                        let tokens = TokenFields { prompt_token_ids, token_ids: Some(&[]), ..TokenFields::default() };
                        self.write_chunk(out, Choice::text(choice, "", None, None, tokens));
                    }
                    ChoiceFormat::Completions => {}
                }
            }
        }
        if let Some((text, logprobs)) = self.run.echo(prompt, &event)? {
            for choice in choices.clone() {
                let logprobs = logprobs_of(&self.run, &logprobs);
                self.write_chunk(out, Choice::text(choice, &text, logprobs, None, TokenFields::default()));
            }
        }
        if let AnswerEvent::Delta(delta) = event {
            self.write_delta(out, choices.start + delta.sample as usize, &delta);
        }
        Ok(())
    }

    /// Writes `[DONE]`, after a chunk without choices that has usage and details if the client requested them.
    fn write_end(&mut self, out: &mut Vec<u8>) {
        if self.usage.at_end || self.run.details {
            let mut chunk = self.chunk(Vec::new(), Some(self.run.progress.usage()));
            chunk.tandem = self.run.details.then(|| self.run.progress.details());
            write_event(out, &chunk);
        }
        out.extend_from_slice(DONE);
    }
}

impl Chunks {
    fn write_delta(&self, out: &mut Vec<u8>, choice: usize, delta: &Delta) {
        match self.choices {
            ChoiceFormat::Chat => self.write_pieces(out, choice, delta),
            ChoiceFormat::Completions => {
                let tokens = self.tokens(&delta.token_ids);
                if !delta.text.is_empty() || !delta.logprobs.is_empty() || tokens.token_ids.is_some_and(|ids| !ids.is_empty()) {
                    let logprobs = logprobs_of(&self.run, &delta.logprobs);
                    self.write_chunk(out, Choice::text(choice, &delta.text, logprobs, None, tokens));
                }
                if delta.finish.is_some() {
                    self.write_chunk(out, Choice::text(choice, "", None, delta.finish, self.tokens(&[])));
                }
            }
        }
    }

    /// Returns the fields of generated tokens.
    fn tokens<'a>(&self, token_ids: &'a [TokenId]) -> TokenFields<'a> {
        TokenFields { token_ids: self.run.extras.token_ids.then_some(token_ids), ..TokenFields::default() }
    }

    /// Writes a chunk for each piece. The first one has the logprobs and the token ids of all.
    fn write_pieces(&self, out: &mut Vec<u8>, choice: usize, delta: &Delta) {
        let (mut logprobs, mut tokens) = (logprobs_of(&self.run, &delta.logprobs), self.tokens(&delta.token_ids));
        let has_tokens = !delta.logprobs.is_empty() || tokens.token_ids.is_some_and(|ids| !ids.is_empty());
        for piece in &delta.pieces {
            self.write_chunk(out, Choice::chat_chunk(choice, ChatDelta::new(piece), logprobs, None, tokens));
            (logprobs, tokens) = (logprobs_of(&self.run, &[]), self.tokens(&[]));
        }
        if delta.pieces.is_empty() && has_tokens {
            self.write_chunk(out, Choice::chat_chunk(choice, ChatDelta::content(""), logprobs, None, tokens));
        }
        if delta.finish.is_some() {
            let tokens = self.tokens(&[]);
            self.write_chunk(out, Choice::chat_chunk(choice, ChatDelta::default(), None, delta.finish, tokens));
        }
    }

    fn write_chunk(&self, out: &mut Vec<u8>, choice: Choice<'_>) {
        write_event(out, &self.chunk(vec![choice], self.usage.in_every_chunk.then(|| self.run.progress.usage())));
    }

    /// Returns a chunk of the streamed answer. If the client requested usage, every chunk has the field `usage`; otherwise no chunk has it.
    fn chunk<'a>(&'a self, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> Envelope<'a> {
        envelope(&self.run, self.choices.chunk_object(), choices, self.usage.at_end.then_some(usage))
    }
}

impl WholeChoice {
    fn written<'a>(&'a self, run: &'a Run, format: ChoiceFormat, index: usize, tokens: TokenFields<'a>) -> Choice<'a> {
        let logprobs = logprobs_of(run, &self.logprobs);
        match format {
            ChoiceFormat::Chat => Choice::chat(index, self.message.written(), logprobs, self.finish, tokens),
            ChoiceFormat::Completions => Choice::text(index, &self.text, logprobs, self.finish, tokens),
        }
    }
}

impl Whole {
    pub(super) fn new(run: Run, format: ChoiceFormat) -> Self {
        let mut choices = Vec::new();
        choices.resize_with(run.prompts() * run.progress.samples, WholeChoice::default);
        Self { run, format, choices }
    }
}

impl Format for Whole {
    fn run(&mut self) -> &mut Run {
        &mut self.run
    }

    fn write(&mut self, _: &mut Vec<u8>, prompt: usize, event: AnswerEvent) -> Result<(), ApiError> {
        let samples = self.run.progress.samples;
        if let Some((text, logprobs)) = self.run.echo(prompt, &event)? {
            for choice in &mut self.choices[prompt * samples..(prompt + 1) * samples] {
                choice.text.push_str(&text);
                choice.logprobs.extend_from_slice(&logprobs);
            }
        }
        if let AnswerEvent::Delta(delta) = event {
            let choice = &mut self.choices[prompt * samples + delta.sample as usize];
            choice.text.push_str(&delta.text);
            delta.pieces.into_iter().for_each(|piece| choice.message.push(piece));
            choice.logprobs.extend(delta.logprobs);
            choice.token_ids.extend(delta.token_ids);
            choice.finish = choice.finish.or(delta.finish);
        }
        Ok(())
    }

    fn write_end(&mut self, out: &mut Vec<u8>) {
        let run = &self.run;
        let prompt = |prompt| TokenFields {
            prompt_token_ids: run.prompt_token_ids(prompt),
            token_ids: None,
            prompt_logprobs: run.prompt_logprobs(prompt),
        };
        let in_choices = self.format == ChoiceFormat::Completions;
        let written = self.choices.iter().enumerate().map(|(index, choice)| {
            let of_prompt = if in_choices { prompt(index / run.progress.samples) } else { TokenFields::default() };
            let token_ids = run.extras.token_ids.then_some(choice.token_ids.as_slice());
            choice.written(run, self.format, index, TokenFields { token_ids, ..of_prompt })
        });
        let written = written.collect();
        let mut envelope = envelope(run, self.format.object(), written, Some(Some(run.progress.usage())));
        if !in_choices {
            envelope.tokens = prompt(0);
        }
        envelope.tandem = run.details.then(|| run.progress.details());
        serde_json::to_writer(out, &envelope).expect("the keys of an answer are strings");
    }
}

fn envelope<'a>(run: &'a Run, object: &'static str, choices: Vec<Choice<'a>>, usage: Option<Option<Usage>>) -> Envelope<'a> {
    Envelope {
        id: &run.id,
        object,
        created: run.created,
        model: &run.model.id,
        choices,
        usage,
        tandem: None,
        tokens: TokenFields::default(),
    }
}

fn logprobs_of<'a>(run: &'a Run, tokens: &'a [TokenLogprobs]) -> Option<Logprobs<'a>> {
    run.wants_logprobs.then_some(Logprobs { model: &run.model, tokens, as_ids: run.extras.tokens_as_ids })
}
