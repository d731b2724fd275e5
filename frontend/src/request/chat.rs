//! `/v1/chat/completions`: the request.

use super::{Bounded, Content, Options, Whole, request, unbuilt};
use crate::{
    error::{ApiError, Problem},
    model::ServedModel,
    prompt::{EncodeError, RenderError, Tokenizer, Turn},
};
use serde::Deserialize;
use tandem_kv::TokenId;

/// Turns of a conversation; the body's size bounds their length.
const MESSAGES_MAX: usize = 16_384;

request! {
    /// As parsed.
    ChatRequest {
        messages: Bounded<Message, MESSAGES_MAX>,
        /// Wins over `max_tokens`, its older name, when both are there.
        max_completion_tokens: Whole,
        logprobs: bool,
        top_logprobs: Whole,
    } unbuilt {
        // OpenAI.
        audio, function_call = "none", prediction, reasoning_effort = "none", verbosity = "medium", web_search_options,
        // vLLM.
        add_generation_prompt = true, add_special_tokens, best_of = 1, chat_template, chat_template_kwargs, continue_final_message,
        documents, echo, enable_thinking, include_reasoning = true, media_io_kwargs, mm_processor_kwargs, reasoning, suffix,
        thinking = "disabled",
    }
}

/// A turn as sent.
#[derive(Deserialize)]
pub(crate) struct Message {
    role: Option<String>,
    #[serde(default)]
    content: Content,
    #[serde(default)]
    tool_calls: unbuilt::Setting,
    #[serde(default)]
    function_call: unbuilt::Setting,
}

/// As checked.
pub(crate) struct Chat {
    pub(crate) options: Options,
    /// The client's own bound.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) limit_param: &'static str,
    turns: Vec<(&'static str, String)>,
}

impl ChatRequest {
    pub(crate) fn check(mut self, model: &ServedModel) -> Result<Chat, ApiError> {
        let turns = turns(self.messages.take())?;
        let mut options = self.take_common()?.check(model)?;
        options.sampling.logprobs = top_logprobs(self.logprobs.unwrap_or(false), self.top_logprobs)?;
        let (limit_param, limit) = match self.max_completion_tokens {
            Some(limit) => ("max_completion_tokens", Some(limit)),
            None => ("max_tokens", self.max_tokens),
        };
        let max_tokens = limit.map(|Whole(found)| super::options::token_count(limit_param, found, 1)).transpose()?;
        super::options::check_min_tokens(&options, max_tokens)?;
        options.sampling.max_tokens = max_tokens;
        Ok(Chat { options, max_tokens, limit_param, turns })
    }
}

fn turns(messages: Option<Bounded<Message, MESSAGES_MAX>>) -> Result<Vec<(&'static str, String)>, ApiError> {
    let Bounded(messages) = messages.ok_or_else(|| ApiError::invalid("messages", Problem::Missing))?;
    if messages.is_empty() {
        return Err(ApiError::invalid("messages", Problem::Empty));
    }
    if messages.len() > MESSAGES_MAX {
        return Err(ApiError::invalid("messages", Problem::TooMany { max: MESSAGES_MAX, unit: "messages" }));
    }
    let turn = |(index, message): (usize, Message)| {
        let param = |field: &str| format!("messages[{index}].{field}");
        let role = match message.role.as_deref() {
            None => return Err(ApiError::invalid(param("role"), Problem::Missing)),
            // The newer name of the same thing; templates know the older.
            Some("system" | "developer") => "system",
            Some("user") => "user",
            Some("assistant") => "assistant",
            Some("tool" | "function") => return Err(ApiError::invalid(param("role"), Problem::Unsupported)),
            Some(_) => {
                let allowed = "'system', 'developer', 'user', 'assistant'";
                return Err(ApiError::invalid(param("role"), Problem::Choice { allowed }));
            }
        };
        unbuilt::check(&param("tool_calls"), &message.tool_calls, &[])?;
        unbuilt::check(&param("function_call"), &message.function_call, &[])?;
        Ok((role, message.content.0))
    };
    messages.into_iter().enumerate().map(turn).collect()
}

fn top_logprobs(logprobs: bool, top: Option<Whole>) -> Result<Option<u32>, ApiError> {
    let alternatives = super::options::alternatives("top_logprobs", top.map_or(0, |Whole(top)| top))?;
    if top.is_some() && !logprobs {
        return Err(ApiError::invalid("top_logprobs", Problem::Rule { rule: "is only allowed when 'logprobs' is true" }));
    }
    Ok(logprobs.then_some(alternatives))
}

impl Chat {
    /// Bytes of text.
    pub(crate) fn text_bytes(&self) -> usize {
        self.turns.iter().map(|(_, content)| content.len()).sum()
    }

    /// What rendering and encoding cost, in bytes of text: the template runs for each message, also for one without text.
    pub(crate) fn encoding_bytes(&self) -> usize {
        const MESSAGE: usize = 256;
        self.text_bytes() + MESSAGE * self.turns.len()
    }

    /// Renders and encodes the conversation.
    ///
    /// A message cannot speak for another: names of control tokens inside a content stay text, so no user's message can end
    /// its turn and begin one of the system. Raw prompts of `/v1/completions` are the client's to shape, and there the names count.
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
