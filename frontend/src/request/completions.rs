//! The request of `/v1/completions`.

use super::{
    fields::{PROMPTS_MAX, PromptInput, Whole},
    options::{self, Options},
    request,
};
use crate::{
    error::{ApiError, Problem},
    model::ServedModel,
    prompt::{EncodeError, Special},
};
use tandem_kv::TokenId;

/// The default of `max_tokens`, as in OpenAI's API.
const MAX_TOKENS_DEFAULT: u32 = 16;
/// Continuations of all prompts together.
const CHOICES_MAX: usize = 1024;

request! {
    /// The request as parsed.
    CompletionRequest {
        prompt: PromptInput,
        echo: bool,
        logprobs: Whole,
        best_of: Whole,
    } unsupported {
        add_special_tokens = true, prompt_embeds, suffix,
    }
}

/// The request as checked.
pub(crate) struct Completion {
    pub(crate) options: Options,
    pub(crate) max_tokens: u32,
    pub(crate) echo: bool,
    pub(crate) prompts: Vec<Input>,
}

/// One prompt of a request.
pub(crate) enum Input {
    Text(String),
    Tokens(Vec<TokenId>),
}

/// A prompt's tokens and, when it is to be echoed, its text.
pub(crate) type Encoded = (Vec<TokenId>, Option<String>);

impl CompletionRequest {
    /// Checks the request.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub(crate) fn check(mut self, model: &ServedModel) -> Result<Completion, ApiError> {
        let prompts = self.prompt.take().ok_or_else(|| ApiError::invalid("prompt", Problem::Missing))?;
        let (prompts_len, any_empty) = match &prompts {
            PromptInput::Texts(texts) => (texts.len(), texts.iter().any(|text| text.is_empty() && model.bos.is_none())),
            PromptInput::Tokens(lists) => (lists.len(), lists.iter().any(Vec::is_empty)),
        };
        if prompts_len == 0 || any_empty {
            return Err(ApiError::invalid("prompt", Problem::Empty));
        }
        if prompts_len > PROMPTS_MAX {
            return Err(ApiError::invalid("prompt", Problem::TooMany { max: PROMPTS_MAX, unit: "prompts" }));
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
        options.sampling.logprobs = self.logprobs.map(|Whole(found)| options::alternatives("logprobs", found)).transpose()?;
        let echo = self.echo.unwrap_or(false);
        let max_tokens = match self.max_tokens {
            None => MAX_TOKENS_DEFAULT,
            // 0 is allowed for an echoed prompt only: without new tokens there would be no answer.
            Some(Whole(found)) => options::token_count("max_tokens", found, u32::from(!echo))?,
        };
        options::check_min_tokens(&options, Some(max_tokens))?;
        options.sampling.max_tokens = Some(max_tokens);
        let prompts = match prompts {
            PromptInput::Texts(texts) => texts.into_iter().map(Input::Text).collect(),
            PromptInput::Tokens(lists) => lists.into_iter().map(Input::Tokens).collect(),
        };
        Ok(Completion { options, max_tokens, echo, prompts })
    }
}

impl Input {
    /// Bytes of text to encode.
    pub(crate) fn text_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(_) => 0,
        }
    }

    /// Encodes the prompt; the text is returned if it is to be echoed.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub(crate) fn encode(self, echo: bool, model: &ServedModel) -> Result<Encoded, ApiError> {
        match self {
            Self::Text(text) => {
                let encoded = model.tokenizer.encode(&text, Special::Parsed).map_err(|_: EncodeError| ApiError::Internal)?;
                Ok((model.bos.into_iter().chain(encoded).collect(), echo.then_some(text)))
            }
            Self::Tokens(tokens) => {
                let text = echo.then(|| model.tokenizer.decode(&tokens));
                Ok((tokens, text))
            }
        }
    }
}
