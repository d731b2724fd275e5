//! Writes the answers of chats and plain completions: a list of choices. A stream has OpenAI's order: first the role (chat only), the text
//! and the finish reason of each choice, then usage if requested, then `[DONE]`. No `[DONE]` follows an error.

use super::{
    AnswerContext, AnswerFormat, AnswerPart, Delta, FinishReason, TokenLogprobs, Usage,
    chat::{ChatDelta, WholeMessage},
    envelope::{Choice, ChoiceFormat, Envelope, TokenFields},
    sse::{DONE, write_event, write_json},
};
use crate::options::StreamUsage;
use std::ops::Range;
use tandem_kv::TokenId;

/// A streamed answer.
pub(super) struct Chunks {
    pub(super) choices: ChoiceFormat,
    pub(super) usage: StreamUsage,
}

/// An answer that is not streamed.
pub(super) struct WholeChoices {
    format: ChoiceFormat,
    /// All samples of each prompt.
    choices: Vec<WholeChoice>,
    /// The logprobs of each prompt's tokens, if they have arrived.
    prompt_logprobs: Vec<Option<Vec<TokenLogprobs>>>,
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

impl AnswerFormat for Chunks {
    fn write(&mut self, context: &AnswerContext, out: &mut Vec<u8>, prompt: usize, part: AnswerPart) {
        let choices = choices(context, prompt);
        match part {
            AnswerPart::Started { echo } => {
                self.write_start(context, out, prompt);
                self.write_echo(context, out, choices, echo, &[]);
            }
            AnswerPart::PromptLogprobs { tokens, echo } => {
                self.write_echo(context, out, choices, echo, &echoed(context, &tokens))
            }
            AnswerPart::Delta(delta) => self.write_delta(context, out, choices.start + delta.sample as usize, &delta),
        }
    }

    /// Writes `[DONE]`, after a chunk without choices that has usage and details if the client requested them.
    fn write_end(&mut self, context: &AnswerContext, out: &mut Vec<u8>) {
        if self.usage.at_end || context.details.is_some() {
            let mut chunk = self.chunk(context, Vec::new(), Some(context.usage));
            chunk.tandem = context.details.as_ref();
            write_event(out, &chunk);
        }
        out.extend_from_slice(DONE);
    }
}

impl Chunks {
    /// Writes the chunks with the roles and the tokens of a prompt.
    fn write_start(&self, context: &AnswerContext, out: &mut Vec<u8>, prompt: usize) {
        let prompt_token_ids = context.prompt_token_ids(prompt);
        let choices = choices(context, prompt);
        for choice in choices.clone() {
            match self.choices {
                ChoiceFormat::Chat => {
                    let role = Choice::chat_chunk(choice, ChatDelta::role(), None, None, TokenFields::default());
                    let mut chunk = self.chunk(context, vec![role], self.usage_so_far(context));
                    chunk.tokens.prompt_token_ids = prompt_token_ids.filter(|_| choice == choices.start);
                    write_event(out, &chunk);
                }
                ChoiceFormat::Completions if prompt_token_ids.is_some() => {
                    let tokens = TokenFields { prompt_token_ids, token_ids: Some(&[]), ..TokenFields::default() };
                    self.write_chunk(context, out, Choice::text(choice, "", None, None, tokens));
                }
                ChoiceFormat::Completions => {}
            }
        }
    }

    fn write_echo(
        &self,
        context: &AnswerContext,
        out: &mut Vec<u8>,
        choices: Range<usize>,
        echo: Option<String>,
        logprobs: &[TokenLogprobs],
    ) {
        let Some(text) = echo else { return };
        for choice in choices {
            self.write_chunk(context, out, Choice::text(choice, &text, context.logprobs(logprobs), None, TokenFields::default()));
        }
    }

    fn write_delta(&self, context: &AnswerContext, out: &mut Vec<u8>, choice: usize, delta: &Delta) {
        match self.choices {
            ChoiceFormat::Chat => self.write_pieces(context, out, choice, delta),
            ChoiceFormat::Completions => {
                let tokens = tokens(context, &delta.token_ids);
                if !delta.text.is_empty() || !delta.logprobs.is_empty() || tokens.token_ids.is_some_and(|ids| !ids.is_empty()) {
                    let logprobs = context.logprobs(&delta.logprobs);
                    self.write_chunk(context, out, Choice::text(choice, &delta.text, logprobs, None, tokens));
                }
                if delta.finish.is_some() {
                    self.write_chunk(context, out, Choice::text(choice, "", None, delta.finish, self::tokens(context, &[])));
                }
            }
        }
    }

    /// Writes a chunk for each piece. The first chunk has the logprobs and the token ids of all pieces.
    fn write_pieces(&self, context: &AnswerContext, out: &mut Vec<u8>, choice: usize, delta: &Delta) {
        let none = tokens(context, &[]);
        let (mut logprobs, mut tokens) = (context.logprobs(&delta.logprobs), tokens(context, &delta.token_ids));
        let has_tokens = !delta.logprobs.is_empty() || tokens.token_ids.is_some_and(|ids| !ids.is_empty());
        for piece in &delta.pieces {
            self.write_chunk(context, out, Choice::chat_chunk(choice, ChatDelta::new(piece), logprobs, None, tokens));
            (logprobs, tokens) = (context.logprobs(&[]), none);
        }
        if delta.pieces.is_empty() && has_tokens {
            self.write_chunk(context, out, Choice::chat_chunk(choice, ChatDelta::content(""), logprobs, None, tokens));
        }
        if delta.finish.is_some() {
            self.write_chunk(context, out, Choice::chat_chunk(choice, ChatDelta::default(), None, delta.finish, none));
        }
    }

    fn write_chunk(&self, context: &AnswerContext, out: &mut Vec<u8>, choice: Choice<'_>) {
        write_event(out, &self.chunk(context, vec![choice], self.usage_so_far(context)));
    }

    fn usage_so_far(&self, context: &AnswerContext) -> Option<Usage> {
        self.usage.in_every_chunk.then_some(context.usage)
    }

    /// Returns a chunk of the streamed answer. If the client requested usage, every chunk has the field `usage`; otherwise no chunk has it.
    fn chunk<'a>(&self, context: &'a AnswerContext, choices: Vec<Choice<'a>>, usage: Option<Usage>) -> Envelope<'a> {
        envelope(context, self.choices.chunk_object(), choices, self.usage.at_end.then_some(usage))
    }
}

impl WholeChoice {
    fn written<'a>(
        &'a self,
        context: &'a AnswerContext,
        format: ChoiceFormat,
        index: usize,
        tokens: TokenFields<'a>,
    ) -> Choice<'a> {
        let logprobs = context.logprobs(&self.logprobs);
        match format {
            ChoiceFormat::Chat => Choice::chat(index, self.message.written(), logprobs, self.finish, tokens),
            ChoiceFormat::Completions => Choice::text(index, &self.text, logprobs, self.finish, tokens),
        }
    }
}

impl WholeChoices {
    pub(super) fn new(format: ChoiceFormat, context: &AnswerContext) -> Self {
        let prompts = context.prompt_token_ids.len();
        let mut choices = Vec::new();
        choices.resize_with(prompts * context.samples, WholeChoice::default);
        Self { format, choices, prompt_logprobs: vec![None; prompts] }
    }

    fn echo(&mut self, choices: Range<usize>, echo: Option<String>, logprobs: &[TokenLogprobs]) {
        let Some(text) = echo else { return };
        for choice in &mut self.choices[choices] {
            choice.text.push_str(&text);
            choice.logprobs.extend_from_slice(logprobs);
        }
    }
}

impl AnswerFormat for WholeChoices {
    fn write(&mut self, context: &AnswerContext, _: &mut Vec<u8>, prompt: usize, part: AnswerPart) {
        let choices = choices(context, prompt);
        match part {
            AnswerPart::Started { echo } => self.echo(choices, echo, &[]),
            AnswerPart::PromptLogprobs { tokens, echo } => {
                self.echo(choices, echo, &echoed(context, &tokens));
                // Adds the field `prompt_logprobs` only if it was requested: otherwise the echo alone has the logprobs of the prompt.
                if context.prompt_logprobs.is_some() {
                    self.prompt_logprobs[prompt] = Some(tokens);
                }
            }
            AnswerPart::Delta(delta) => {
                let choice = &mut self.choices[choices.start + delta.sample as usize];
                choice.text.push_str(&delta.text);
                delta.pieces.into_iter().for_each(|piece| choice.message.push(piece));
                choice.logprobs.extend(delta.logprobs);
                choice.token_ids.extend(delta.token_ids);
                choice.finish = choice.finish.or(delta.finish);
            }
        }
    }

    fn write_end(&mut self, context: &AnswerContext, out: &mut Vec<u8>) {
        let of_prompt = |prompt: usize| TokenFields {
            prompt_token_ids: context.prompt_token_ids(prompt),
            token_ids: None,
            prompt_logprobs: context.prompt_logprobs(self.prompt_logprobs[prompt].as_deref()),
        };
        let in_choices = self.format == ChoiceFormat::Completions;
        let written = self.choices.iter().enumerate().map(|(index, choice)| {
            let of_prompt = if in_choices { of_prompt(index / context.samples) } else { TokenFields::default() };
            let token_ids = context.token_ids.then_some(choice.token_ids.as_slice());
            choice.written(context, self.format, index, TokenFields { token_ids, ..of_prompt })
        });
        let mut envelope = envelope(context, self.format.object(), written.collect(), Some(Some(context.usage)));
        if !in_choices {
            envelope.tokens = of_prompt(0);
        }
        envelope.tandem = context.details.as_ref();
        write_json(out, &envelope);
    }
}

/// Returns the indices of the choices that answer a prompt.
fn choices(context: &AnswerContext, prompt: usize) -> Range<usize> {
    prompt * context.samples..(prompt + 1) * context.samples
}

/// Returns the logprobs of an echoed prompt's tokens, with as many alternatives as generated tokens have.
fn echoed(context: &AnswerContext, tokens: &[TokenLogprobs]) -> Vec<TokenLogprobs> {
    let mut echoed = tokens.to_vec();
    echoed.iter_mut().for_each(|entry| entry.top.truncate(context.logprobs.unwrap_or(0)));
    echoed
}

/// Returns the ids of generated tokens as fields, which are absent unless the request asked for ids.
fn tokens<'a>(context: &AnswerContext, token_ids: &'a [TokenId]) -> TokenFields<'a> {
    TokenFields { token_ids: context.token_ids.then_some(token_ids), ..TokenFields::default() }
}

fn envelope<'a>(
    context: &'a AnswerContext,
    object: &'static str,
    choices: Vec<Choice<'a>>,
    usage: Option<Option<Usage>>,
) -> Envelope<'a> {
    Envelope {
        id: &context.id,
        object,
        created: context.created,
        model: &context.model.id,
        choices,
        usage,
        tandem: None,
        tokens: TokenFields::default(),
    }
}
