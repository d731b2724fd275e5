//! The request of `/v1/completions`.

pub use super::fields::Input;

use super::{
    fields::{PROMPTS_MAX, Prompts, Whole},
    names::ParamNames,
    options::{self, Options},
    parameters::CompletionRequest,
};
use crate::error::{Problem, RequestError, at_most};
use tandem_kv::TokenId;
use tandem_text::{EncodeError, NamespaceEncodings, ServedModel};

/// The default of `max_tokens`, as in OpenAI's API.
const MAX_TOKENS_DEFAULT: u32 = 16;
/// The maximum number of choices in an answer: `n` for each prompt.
const CHOICES_MAX: usize = 1024;

/// A checked request.
pub struct Completion {
    /// The checked parameters.
    pub options: Options,
    /// The limit on generated tokens.
    pub max_tokens: u32,
    /// Whether the answer begins with the prompt.
    pub echo: bool,
    /// The prompts, at least one.
    pub prompts: Vec<Input>,
    /// The beginning-of-sequence token that is put before each text; `None` if there is none.
    pub bos: Option<TokenId>,
}

impl CompletionRequest {
    /// Checks the request.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub fn check(mut self, model: &ServedModel) -> Result<Completion, RequestError> {
        let Prompts(prompts) = self.prompt.take().ok_or_else(|| RequestError::invalid("prompt", Problem::Missing))?;
        let bos = model.bos.filter(|_| self.add_special_tokens.unwrap_or(true));
        let is_empty = |input: &Input| match input {
            Input::Text(text) => text.is_empty() && bos.is_none(),
            Input::Tokens(tokens) => tokens.is_empty(),
        };
        if prompts.is_empty() || prompts.iter().any(is_empty) {
            return Err(RequestError::invalid("prompt", Problem::Empty));
        }
        at_most("prompt", prompts.len(), PROMPTS_MAX, "prompts")?;
        let vocab_size = model.tokenizer.vocab_size();
        let is_unknown = |token: &TokenId| *token as usize >= vocab_size;
        if prompts.iter().any(|input| matches!(input, Input::Tokens(tokens) if tokens.iter().any(is_unknown))) {
            return Err(RequestError::invalid("prompt", Problem::Vocabulary { vocab_size }));
        }
        let mut options = self.take_common()?.check(&ParamNames::COMPLETION, model)?;
        if self.best_of.is_some_and(|Whole(best_of)| best_of != i64::from(options.samples)) {
            return Err(RequestError::invalid("best_of", Problem::Rule { rule: "is not supported unless it equals 'n'" }));
        }
        at_most("n", prompts.len() * options.samples as usize, CHOICES_MAX, "choices over all prompts")?;
        options.sampling.logprobs = self.logprobs.map(|Whole(found)| options::alternatives("logprobs", found)).transpose()?;
        options::check_logprob_tokens(&options)?;
        let echo = self.echo.unwrap_or(false);
        let max_tokens = match self.max_tokens {
            None => MAX_TOKENS_DEFAULT,
            // With 0, nothing is generated: the answer only has the usage and what was requested about the prompt.
            Some(Whole(found)) => options::token_count("max_tokens", found, 0)?,
        };
        options::check_min_tokens(&options, Some(max_tokens))?;
        options.sampling.max_tokens = Some(max_tokens);
        Ok(Completion { options, max_tokens, echo, prompts, bos })
    }
}

impl Input {
    /// Returns the length of the text in bytes; 0 for token ids.
    pub fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
        }
    }

    /// Encodes the prompt. Also returns its text if it has one.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(
        self,
        bos: Option<TokenId>,
        model: &ServedModel,
        encodings: &NamespaceEncodings,
    ) -> Result<(Vec<TokenId>, Option<String>), RequestError> {
        match self {
            Self::Text(text) => {
                let encoded =
                    model.tokenizer.encode_prompt(&text, None, encodings).map_err(|_: EncodeError| RequestError::Failed)?;
                Ok((bos.into_iter().chain(encoded).collect(), Some(text)))
            }
            Self::Tokens(tokens) => Ok((tokens, None)),
        }
    }
}
