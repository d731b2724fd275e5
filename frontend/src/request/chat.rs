//! The request of `/v1/chat/completions`.

use super::{
    fields::{Bounded, MESSAGES_MAX, Whole},
    options::{self, Options},
    parameters::{ChatRequest, Message},
    unsupported,
};
use crate::{
    error::{ApiError, Problem, at_most},
    model::ServedModel,
    prompt::{EncodeError, RenderError, Tokenizer, Turn},
};
use tandem_kv::TokenId;

/// A checked request.
pub(crate) struct Chat {
    pub(crate) options: Options,
    /// The client's limit on generated tokens; `None` if the client set none.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) limit_param: &'static str,
    turns: Vec<(&'static str, String)>,
}

impl ChatRequest {
    /// Checks the request.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub(crate) fn check(mut self, model: &ServedModel) -> Result<Chat, ApiError> {
        let turns = turns(self.messages.take())?;
        let mut options = self.take_common()?.check(model)?;
        options.sampling.logprobs = top_logprobs(self.logprobs.unwrap_or(false), self.top_logprobs)?;
        let (limit_param, limit) = match self.max_completion_tokens {
            Some(limit) => ("max_completion_tokens", Some(limit)),
            None => ("max_tokens", self.max_tokens),
        };
        let max_tokens = limit.map(|Whole(found)| options::token_count(limit_param, found, 1)).transpose()?;
        options::check_min_tokens(&options, max_tokens)?;
        options.sampling.max_tokens = max_tokens;
        Ok(Chat { options, max_tokens, limit_param, turns })
    }
}

fn turns(messages: Option<Bounded<Message, MESSAGES_MAX>>) -> Result<Vec<(&'static str, String)>, ApiError> {
    let Bounded(messages) = messages.ok_or_else(|| ApiError::invalid("messages", Problem::Missing))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", Problem::Empty));
    }
    at_most("messages", messages.len(), MESSAGES_MAX, "messages")?;
    let turn = |(index, message): (usize, Message)| {
        let param = |field: &str| format!("messages[{index}].{field}");
        let role = match message.role.as_deref() {
            None => return Err(ApiError::invalid(param("role"), Problem::Missing)),
            // `developer` is the newer name of `system`. Chat templates know only `system`.
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some("tool" | "function") => return Err(ApiError::invalid(param("role"), Problem::Unsupported)),
            Some(_) => {
                let allowed = "'system', 'developer', 'user', 'assistant'";
                return Err(ApiError::invalid(param("role"), Problem::Choice { allowed }));
            }
        };
        unsupported::check(&param("tool_calls"), &message.tool_calls, &[])?;
        unsupported::check(&param("function_call"), &message.function_call, &[])?;
        Ok((role, message.content.0))
    };
    messages.into_iter().enumerate().map(turn).collect()
}

fn top_logprobs(logprobs: bool, top: Option<Whole>) -> Result<Option<u32>, ApiError> {
    let alternatives = options::alternatives("top_logprobs", top.map_or(0, |Whole(top)| top))?;
    if top.is_some() && !logprobs {
        return Err(ApiError::invalid("top_logprobs", Problem::Rule { rule: "is only allowed when 'logprobs' is true" }));
    }
    Ok(logprobs.then_some(alternatives))
}

impl Chat {
    /// Returns the total size of the messages' text, in bytes.
    pub(crate) fn text_bytes(&self) -> usize {
        self.turns.iter().map(|(_, content)| content.len()).sum()
    }

    /// Returns the cost of rendering and encoding as a number of bytes of text. It has a fixed cost per message, even without text, because
    /// the template runs for each message.
    pub(crate) fn encoding_bytes(&self) -> usize {
        const MESSAGE: usize = 256;
        self.text_bytes() + MESSAGE * self.turns.len()
    }

    /// Renders and encodes the conversation.
    ///
    /// Names of control tokens in a message's content are encoded as plain text, so that no user message can end its turn and begin a
    /// system message. In raw prompts of `/v1/completions` the names become control tokens.
    ///
    /// # Errors
    /// The model has no chat template, the template refuses the conversation, or its text is too long.
    pub(crate) fn encode(&self, model: &ServedModel) -> Result<Vec<TokenId>, ApiError> {
        let template = model.template.as_ref().ok_or(ApiError::NoChatTemplate)?;
        let Some(guard) = Tokenizer::guard(self.turns.iter().map(|(_, content)| content.as_str())) else {
            let rule = "must not hold all of the code points U+FDD0 to U+FDEF, which no text uses";
            return Err(ApiError::invalid("messages", Problem::Rule { rule }));
        };
        let marked: Vec<_> = self.turns.iter().map(|(role, content)| (*role, model.tokenizer.mark(content, guard))).collect();
        let turns: Vec<_> = marked.iter().map(|(role, content)| Turn { role, content }).collect();
        let text = template.render(&turns, model.rendered_bytes_max()).map_err(|error| match error {
            RenderError::Refused(source) => ApiError::Template(source),
            RenderError::Steps => ApiError::TemplateSteps,
            RenderError::TooLong => {
                let tokens_min = model.context_length as usize + 1;
                ApiError::PromptLength { context_length: model.context_length, tokens_min, param: "messages" }
            }
        })?;
        model.tokenizer.encode_guarded(&text, guard).map_err(|_: EncodeError| ApiError::Internal)
    }
}
