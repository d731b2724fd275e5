//! The request of `/v1/chat/completions`.

use super::{
    calls,
    fields::{Bounded, Whole},
    images::ImageParts,
    limits::{RESERVED, VARIABLES_MAX},
    messages,
    names::ParamNames,
    options::{self, Options},
    parameters::{ChatRequest, DOCUMENTS_MAX},
    tools::{RawTools, definitions},
};
use crate::error::{Problem, RequestError, at_most};
use serde_json::{Map, Value};
use std::{borrow::Cow, sync::Arc};
use tandem_grammar::StackError;
use tandem_kv::TokenId;
use tandem_text::{
    ChatTemplate, EncodeError, NamespaceEncodings, RenderError, ServedModel, Tokenizer,
    chat::{Conversation, Message, OutputFormat, ReasoningFormat, TemplateOptions, ToolFormat},
};

/// The variables with which templates switch reasoning on and off.
const SWITCHES: [&str; 2] = ["enable_thinking", "thinking"];

/// A checked request.
pub struct Chat {
    /// The checked parameters.
    pub options: Options,
    /// The client's limit on generated tokens; `None` if the client set none.
    pub max_tokens: Option<u32>,
    /// The field that limits generated tokens, for errors.
    pub limit_param: &'static str,
    /// The messages, tools and options of the template.
    pub conversation: Conversation,
    /// Whether the answer shows the model's reasoning.
    pub include_reasoning: bool,
    /// The names of the request's fields and tools that have no effect on the answer.
    pub left_out: Vec<String>,
    /// The names of the request's fields, for errors.
    pub names: &'static ParamNames,
    /// The images of the conversation.
    pub images: ImageParts,
}

/// A conversation's tokens, and the format of the answer to it.
pub struct Encoded {
    /// The prompt's tokens.
    pub tokens: Vec<TokenId>,
    /// How the answer is split into reasoning, text and tool calls.
    pub format: OutputFormat,
}

impl ChatRequest {
    /// Checks the request.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub fn check(mut self, model: &ServedModel) -> Result<Chat, RequestError> {
        let mut images = ImageParts::of(model);
        let messages = messages::check(self.messages.take(), &mut images)?;
        let tools = RawTools {
            tools: definitions(self.tools.take())?,
            choice: self.tool_choice.take(),
            parallel: self.parallel_tool_calls,
        };
        self.check_with(messages, images, tools, &ParamNames::CHAT, model)
    }

    /// Checks a request that has these messages and tools in place of its own.
    ///
    /// # Errors
    /// A parameter is out of range or not supported.
    pub(crate) fn check_with(
        mut self,
        messages: Vec<Message>,
        images: ImageParts,
        tools: RawTools,
        names: &'static ParamNames,
        model: &ServedModel,
    ) -> Result<Chat, RequestError> {
        let tools = tools.check(names)?;
        let template = self.template_options(names, model)?;
        let mut options = self.take_common()?.check(names, model)?;
        calls::constrain(&mut options, &tools, model.tool_call_parser)?;
        options.sampling.logprobs = top_logprobs(self.logprobs, self.top_logprobs)?;
        options::check_logprob_tokens(&options)?;
        // Both fields are checked, although the newer one takes precedence.
        let older = self.max_tokens.map(|Whole(found)| options::token_count(names.max_tokens, found, 1)).transpose()?;
        let newer = self.max_completion_tokens;
        let newer = newer.map(|Whole(found)| options::token_count(names.max_completion_tokens, found, 1)).transpose()?;
        let limit_param = if newer.is_some() { names.max_completion_tokens } else { names.max_tokens };
        let max_tokens = newer.or(older);
        options::check_min_tokens(&options, max_tokens)?;
        options.sampling.max_tokens = max_tokens;
        let include_reasoning = self.include_reasoning.unwrap_or(true);
        let conversation = Conversation { messages, tools, template };
        Ok(Chat { options, max_tokens, limit_param, conversation, include_reasoning, left_out: Vec::new(), names, images })
    }

    fn template_options(&mut self, names: &ParamNames, model: &ServedModel) -> Result<TemplateOptions, RequestError> {
        let Bounded(documents) = self.documents.take().unwrap_or_default();
        at_most("documents", documents.len(), DOCUMENTS_MAX, "documents")?;
        let mut variables = self.chat_template_kwargs.take().unwrap_or_default();
        at_most("chat_template_kwargs", variables.len(), VARIABLES_MAX, "entries")?;
        if let Some(name) = RESERVED.iter().find(|name| variables.contains_key(**name)) {
            let rule = "must not be set here: this server, the model or another field of the request determines it";
            return Err(RequestError::invalid(format!("chat_template_kwargs.{name}"), Problem::Rule { rule }));
        }
        if let Some(enable_thinking) = self.enable_thinking {
            variables.entry("enable_thinking").or_insert(enable_thinking.into());
        }
        if let Some(effort) = self.reasoning_effort.take() {
            set_reasoning_effort(&mut variables, &effort, names.reasoning_effort, model.template.as_deref())?;
        }
        let continue_final_message = self.continue_final_message.unwrap_or(false);
        if continue_final_message && self.add_generation_prompt == Some(true) {
            let rule = "is not possible with 'add_generation_prompt': the answer either continues a message or begins one";
            return Err(RequestError::invalid(names.continue_final_message, Problem::Rule { rule }));
        }
        let add_generation_prompt = self.add_generation_prompt.unwrap_or(!continue_final_message);
        Ok(TemplateOptions { documents, variables, add_generation_prompt, continue_final_message, ..TemplateOptions::default() })
    }
}

/// All reasoning efforts. The first two are valid for every chat template.
pub(crate) const EFFORTS: [&str; 7] = ["none", "medium", "minimal", "low", "high", "xhigh", "max"];

/// Returns the reasoning efforts that are valid for the model's chat template.
pub fn efforts(template: Option<&ChatTemplate>) -> &'static [&'static str] {
    let knows = |name: &str| template.is_some_and(|template| template.reads(name));
    if knows("reasoning_effort") || SWITCHES.into_iter().any(knows) { &EFFORTS } else { &EFFORTS[..2] }
}

/// Returns the reasoning effort. If it is not valid for the model's chat template, returns `None` and adds the field's name to `left_out`,
/// because agents send the same effort to all models.
pub(crate) fn effort_with_effect(
    effort: Option<String>,
    model: &ServedModel,
    names: &ParamNames,
    left_out: &mut Vec<String>,
) -> Option<String> {
    let has_none = |effort: &str| EFFORTS.contains(&effort) && !efforts(model.template.as_deref()).contains(&effort);
    let (useless, effort) = (effort.as_deref().is_some_and(has_none), effort);
    if useless {
        left_out.push(names.reasoning_effort.to_owned());
    }
    effort.filter(|_| !useless)
}

/// Sets the chat template's variables for the reasoning effort. If the template can only switch reasoning on and off, every effort but
/// `none` switches it on.
fn set_reasoning_effort(
    variables: &mut Map<String, Value>,
    effort: &str,
    param: &str,
    template: Option<&ChatTemplate>,
) -> Result<(), RequestError> {
    let knows = |name: &str| template.is_some_and(|template| template.reads(name));
    match effort {
        "none" | "medium" | "minimal" | "low" | "high" | "xhigh" | "max" => {
            if !efforts(template).contains(&effort) {
                let rule = "is not supported by the model, whose chat template has no reasoning effort; leave it out";
                return Err(RequestError::invalid(param, Problem::Rule { rule }));
            }
        }
        _ => {
            let allowed = "'none', 'minimal', 'low', 'medium', 'high', 'xhigh', 'max'";
            return Err(RequestError::invalid(param, Problem::Choice { allowed }));
        }
    }
    variables.entry("reasoning_effort").or_insert(effort.into());
    for switch in SWITCHES.into_iter().filter(|switch| knows(switch)) {
        variables.entry(switch).or_insert((effort != "none").into());
    }
    Ok(())
}

fn top_logprobs(logprobs: Option<bool>, top: Option<Whole>) -> Result<Option<u32>, RequestError> {
    let alternatives = options::alternatives("top_logprobs", top.map_or(0, |Whole(top)| top))?;
    let wanted = logprobs == Some(true);
    if top.is_some() && !wanted {
        return Err(RequestError::invalid("top_logprobs", Problem::Rule { rule: "is only allowed when 'logprobs' is true" }));
    }
    Ok(wanted.then_some(alternatives))
}

impl Chat {
    /// Returns the total size of the conversation's text, in bytes.
    pub fn text_bytes(&self) -> usize {
        self.conversation.text_bytes()
    }

    /// Renders and encodes the conversation.
    ///
    /// Names of control tokens in the client's texts (messages, tools, arguments and so on) are encoded as plain text, so that no user
    /// message can end its turn and begin a system message. In raw prompts of `/v1/completions` the names become control tokens.
    ///
    /// # Errors
    /// The model has no chat template, the template refuses the conversation, or its text is too long.
    pub fn encode(&self, model: &ServedModel, encodings: &NamespaceEncodings) -> Result<Encoded, RequestError> {
        let param = self.names.prompt;
        let template = model.template.as_deref().ok_or(RequestError::NoChatTemplate { param })?;
        let mut conversation = self.conversation.clone();
        let mut suspicious = Vec::new();
        conversation.for_each_text(&mut |text| {
            if Tokenizer::may_hold_guard(text) {
                suspicious.push(text.clone());
            }
        });
        let Some(guard) = Tokenizer::guard(suspicious.iter().map(String::as_str)) else {
            let rule = "must not hold all of the code points U+FDD0 to U+FDEF, which no text uses";
            return Err(RequestError::invalid(param, Problem::Rule { rule }));
        };
        conversation.for_each_text(&mut |text| {
            if let Cow::Owned(marked) = model.tokenizer.mark(text, guard) {
                *text = marked;
            }
        });
        let end = String::from_iter([guard.char(); 2]);
        if conversation.template.continue_final_message {
            conversation.mark_end(&end);
        }
        let variables = conversation.variables(template.abilities());
        let mut text = template.render(variables, model.rendered_bytes_max()).map_err(|error| match error {
            RenderError::Refused(source) => RequestError::Template { param, source },
            RenderError::Exhausted => RequestError::TemplateExhausted { param },
            RenderError::Failed(StackError::Thread(_)) => RequestError::Busy,
            RenderError::Failed(StackError::Panic) => RequestError::Failed,
            RenderError::TooLong => {
                let tokens_min = model.usable_context() as usize + 1;
                let (context_length, prompt) = (model.usable_context(), self.names.prompt_in_text);
                RequestError::PromptLength { context_length, tokens_min, prompt, param }
            }
        })?;
        if conversation.template.continue_final_message && !cut_at_end(&mut text, &end) {
            let rule = "is not possible: the chat template does not render the last message as it is";
            return Err(RequestError::invalid(self.names.continue_final_message, Problem::Rule { rule }));
        }
        let format = self.output_format(model, &text);
        let tokens =
            model.tokenizer.encode_prompt(&text, Some(guard), encodings).map_err(|_: EncodeError| RequestError::Failed)?;
        Ok(Encoded { tokens, format })
    }

    pub(crate) fn output_format(&self, model: &ServedModel, prompt: &str) -> OutputFormat {
        let parser = model.reasoning_parser;
        let continued = self.conversation.messages.last().filter(|_| self.conversation.template.continue_final_message);
        let is_left_open = continued.and_then(|message| message.content.as_deref()).is_some_and(|text| parser.is_left_open(text));
        let is_open = is_left_open || parser.ends_with_open_tag(prompt);
        OutputFormat {
            reasoning: ReasoningFormat { parser, is_open, is_hidden: !self.include_reasoning },
            tools: ToolFormat { parser: model.tool_call_parser, tools: Arc::new(self.conversation.tools.clone()) },
        }
    }
}

/// Removes the mark at the end of the last message and all that follows it. If the template trims messages, removes white space before the
/// mark, too, as transformers does. Returns whether the text has the mark.
fn cut_at_end(text: &mut String, mark: &str) -> bool {
    let Some(at) = text.rfind(mark) else { return false };
    let is_trimmed = !text[at + mark.len()..].starts_with(' ');
    text.truncate(at);
    if is_trimmed {
        text.truncate(text.trim_end().len());
    }
    true
}
