//! `/v1/completions`: the request.

use super::{Options, PromptInput, Whole, request};
use crate::{
    error::{ApiError, Problem},
    model::ServedModel,
    prompt::{EncodeError, Special},
};
use tandem_kv::TokenId;

/// When the client sets none, as OpenAI's.
const MAX_TOKENS_DEFAULT: u32 = 16;
/// Continuations of all prompts together.
const CHOICES_MAX: usize = 1024;

request! {
    /// As parsed.
    CompletionRequest {
        prompt: PromptInput,
        echo: bool,
        logprobs: Whole,
        best_of: Whole,
    } unbuilt {
        add_special_tokens = true, prompt_embeds, suffix,
    }
}

/// As checked.
pub(crate) struct Completion {
    pub(crate) options: Options,
    pub(crate) max_tokens: u32,
    pub(crate) echo: bool,
    pub(crate) prompts: PromptInput,
}

/// A prompt's tokens and, when it is to be echoed, its text.
pub(crate) type Encoded = (Vec<TokenId>, Option<String>);

impl CompletionRequest {
    /// `prompts_max`: how many prompts one request may hold.
    pub(crate) fn check(mut self, model: &ServedModel, prompts_max: usize) -> Result<Completion, ApiError> {
        let prompts = self.prompt.take().ok_or_else(|| ApiError::invalid("prompt", Problem::Missing))?;
        let (prompts_len, any_empty) = match &prompts {
            PromptInput::Texts(texts) => (texts.len(), texts.iter().any(|text| text.is_empty() && model.bos.is_none())),
            PromptInput::Tokens(lists) => (lists.len(), lists.iter().any(Vec::is_empty)),
        };
        if prompts_len == 0 || any_empty {
            return Err(ApiError::invalid("prompt", Problem::Empty));
        }
        if prompts_len > prompts_max {
            return Err(ApiError::invalid("prompt", Problem::TooMany { max: prompts_max, unit: "prompts" }));
        }
        let vocab_size = model.tokenizer.vocab_size();
        if let PromptInput::Tokens(lists) = &prompts
            && lists.iter().flatten().any(|token| *token as usize >= vocab_size)
        {
            return Err(ApiError::invalid("prompt", Problem::Vocabulary { vocab_size }));
        }
        let mut options = self.take_common()?.check(model)?;
        if self.best_of.is_some_and(|Whole(best_of)| best_of != i64::from(options.samples)) {
            return Err(ApiError::invalid("best_of", Problem::Rule { rule: "is not supported unless it equals 'n'" }));
        }
        if prompts_len * options.samples as usize > CHOICES_MAX {
            return Err(ApiError::invalid("n", Problem::TooMany { max: CHOICES_MAX, unit: "choices over all prompts" }));
        }
        options.sampling.logprobs =
            self.logprobs.map(|Whole(found)| super::options::alternatives("logprobs", found)).transpose()?;
        let echo = self.echo.unwrap_or(false);
        let max_tokens = match self.max_tokens {
            None => MAX_TOKENS_DEFAULT,
            // Only an echoed prompt is an answer without new tokens.
            Some(Whole(found)) => super::options::token_count("max_tokens", found, u32::from(!echo))?,
        };
        super::options::check_min_tokens(&options, Some(max_tokens))?;
        options.sampling.max_tokens = Some(max_tokens);
        Ok(Completion { options, max_tokens, echo, prompts })
    }
}

impl Completion {
    /// How many prompts there are.
    pub(crate) fn prompts_len(&self) -> usize {
        match &self.prompts {
            PromptInput::Texts(texts) => texts.len(),
            PromptInput::Tokens(lists) => lists.len(),
        }
    }

    /// Bytes of text: whether encoding is worth another thread.
    pub(crate) fn text_bytes(&self) -> usize {
        match &self.prompts {
            PromptInput::Texts(texts) => texts.iter().map(String::len).sum(),
            PromptInput::Tokens(_) => 0,
        }
    }

    /// A prompt.
    pub(crate) fn encode(&self, index: usize, model: &ServedModel) -> Result<Encoded, ApiError> {
        match &self.prompts {
            PromptInput::Texts(texts) => {
                let text = &texts[index];
                let encoded = model.tokenizer.encode(text, Special::Parsed).map_err(|_: EncodeError| ApiError::Encode)?;
                let tokens = model.bos.into_iter().chain(encoded).collect();
                Ok((tokens, self.echo.then(|| text.clone())))
            }
            PromptInput::Tokens(lists) => {
                let tokens = &lists[index];
                Ok((tokens.clone(), self.echo.then(|| model.tokenizer.decode(tokens))))
            }
        }
    }
}
