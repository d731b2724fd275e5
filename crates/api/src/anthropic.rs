//! The request of `/v1/messages` (Anthropic's API), which is converted to a chat.

use super::{
    agents::DeferredTools,
    anthropic_fields::{Block, Blocks, Choice, OutputConfig, Thinking, Turn},
    chat::{Chat, effort_with_effect},
    fields::{Bounded, MESSAGES_MAX, Stop},
    images::{self, ImageParts},
    names::ParamNames,
    parameters::{ChatRequest, MessagesRequest},
    tools::{Definition, RawChoice, RawTools, TOOLS_MAX},
};
use crate::error::{Problem, RequestError, at_most};
use serde_json::{Map, Value, json};
use tandem_text::{
    ServedModel,
    chat::{Message, Role, ToolCall},
};

/// The beginning of a line that a client puts before its system prompt for Anthropic's billing, sometimes in a block of its own. It differs
/// in every request, so it would prevent cache hits for the rest of the prompt.
const BILLING: &str = "x-anthropic-billing-header:";
/// The variables with which chat templates switch thinking on and off.
const THINKING: [&str; 2] = ["enable_thinking", "thinking"];

const NAMES: &ParamNames = &ParamNames::MESSAGES;

impl MessagesRequest {
    /// Checks a request that is to be answered.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub fn check(self, model: &ServedModel) -> Result<Chat, RequestError> {
        if self.max_tokens.is_none() {
            return Err(RequestError::invalid("max_tokens", Problem::Missing));
        }
        self.check_prompt(model)
    }

    /// Checks a request that only asks for the number of its prompt's tokens.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub fn check_prompt(mut self, model: &ServedModel) -> Result<Chat, RequestError> {
        let Bounded(tools) = self.tools.take().unwrap_or_default();
        at_most("tools", tools.len(), TOOLS_MAX, "tools")?;
        let (mut tools, mut left_out) = chat_tools(tools);
        let mut deferred = DeferredTools::of(&tools);
        let mut images = ImageParts::of(model);
        let messages = messages(self.system.take(), self.messages.take(), &mut deferred, &mut images)?;
        let all_deferred = !tools.is_empty() && tools.iter().all(|tool| tool.deferred);
        deferred.remove_unknown(&mut tools);
        let continued = messages.last().is_some_and(|last| last.role == Role::Assistant);
        if continued && messages.last().is_some_and(|last| !last.tool_calls.is_empty()) {
            let rule = "must not end with tool_use blocks; the user's next message has their tool_result blocks";
            return Err(RequestError::invalid("messages", Problem::Rule { rule }));
        }
        let (kwargs, include_reasoning) = thinking(self.thinking.take())?;
        let OutputConfig { effort, format } = self.output_config.take().unwrap_or_default();
        let explains_calls =
            all_deferred && self.tool_choice.as_ref().is_none_or(|choice| choice.kind.as_deref() != Some("none"));
        let (choice, parallel) = self.tool_choice.take().map_or(Ok((None, None)), Choice::check)?;
        let tools = RawTools { tools, choice, parallel };
        let effort = effort_with_effect(effort, model, NAMES, &mut left_out);
        let mut chat = ChatRequest::from(self.take_common()?);
        chat.response_format = format;
        if let Some(Bounded(stop)) = self.stop_sequences {
            chat.stop = Some(Stop(stop));
        }
        chat.max_tokens = self.max_tokens;
        chat.continue_final_message = continued.then_some(true);
        chat.chat_template_kwargs = Some(kwargs);
        (chat.include_reasoning, chat.reasoning_effort) = (Some(include_reasoning), effort);
        let mut chat = chat.check_with(messages, images, tools, NAMES, model)?;
        chat.options.check_one_text()?;
        chat.conversation.template.explains_calls = explains_calls;
        Ok(Chat { left_out, ..chat })
    }
}

/// Returns the variables of the chat template, and whether the answer shows the model's thinking. As in Anthropic's API, the model thinks
/// only if the client requests it. A model that always thinks does so without showing it.
fn thinking(config: Option<Thinking>) -> Result<(Map<String, Value>, bool), RequestError> {
    let Some(Thinking { kind, display }) = config else { return Ok((switches(false), false)) };
    let shown = display.as_deref() != Some("omitted");
    match kind.as_deref() {
        Some("enabled") => Ok((switches(true), shown)),
        Some("adaptive") => Ok((Map::new(), shown)),
        Some("disabled") => Ok((switches(false), false)),
        None => Err(RequestError::invalid("thinking.type", Problem::Missing)),
        Some(_) => Err(RequestError::invalid("thinking.type", Problem::Choice { allowed: "'enabled', 'adaptive', 'disabled'" })),
    }
}

fn switches(on: bool) -> Map<String, Value> {
    THINKING.map(|name| (name.to_owned(), on.into())).into_iter().collect()
}

impl Choice {
    /// Converts the choice to that of a chat. Also returns whether several calls are allowed.
    fn check(self) -> Result<(Option<RawChoice>, Option<bool>), RequestError> {
        let choice = match self.kind.as_deref() {
            Some(mode @ ("auto" | "none")) => RawChoice::Mode(mode.to_owned()),
            Some("any") => RawChoice::Mode("required".to_owned()),
            Some("tool") => RawChoice::function(self.name),
            None => return Err(RequestError::invalid("tool_choice.type", Problem::Missing)),
            Some(_) => {
                return Err(RequestError::invalid(
                    "tool_choice.type",
                    Problem::Choice { allowed: "'auto', 'any', 'tool', 'none'" },
                ));
            }
        };
        Ok((Some(choice), self.disable_parallel_tool_use.map(|disabled| !disabled)))
    }
}

/// Converts tools to those of a chat. Also returns the names of the tools that are left out: Anthropic's own, such as
/// `web_search_20250305`, which its servers run or only its models know.
fn chat_tools(tools: Vec<Value>) -> (Vec<Definition>, Vec<String>) {
    let (mut definitions, mut left_out) = (Vec::with_capacity(tools.len()), Vec::new());
    for (index, tool) in tools.into_iter().enumerate() {
        match tool["type"].as_str() {
            Some(kind) if kind != "custom" => left_out.push(format!("tools.{kind}")),
            _ => {
                let (at, deferred) = (format!("tools[{index}]"), tool["defer_loading"] == true);
                definitions.push(Definition { at, deferred, value: chat_tool(tool), input: None });
            }
        }
    }
    left_out.dedup();
    (definitions, left_out)
}

/// Converts a tool to that of a chat.
fn chat_tool(tool: Value) -> Value {
    let Value::Object(mut tool) = tool else { return tool };
    let mut function = Map::new();
    for (name, chat) in [("name", "name"), ("description", "description"), ("input_schema", "parameters"), ("strict", "strict")] {
        function.extend(tool.remove(name).map(|value| (chat.to_owned(), value)));
    }
    json!({ "type": "function", "function": function })
}

/// Converts the system prompt and the messages.
fn messages(
    system: Option<Blocks>,
    turns: Option<Bounded<Turn, MESSAGES_MAX>>,
    deferred: &mut DeferredTools,
    images: &mut ImageParts,
) -> Result<Vec<Message>, RequestError> {
    let Bounded(turns) = turns.ok_or_else(|| RequestError::invalid("messages", Problem::Missing))?;
    if turns.is_empty() {
        return Err(RequestError::invalid("messages", Problem::Empty));
    }
    at_most("messages", turns.len(), MESSAGES_MAX, "messages")?;
    let mut messages = Vec::with_capacity(turns.len() + 1);
    if let Some(text) = system.map(system_text).transpose()?.filter(|text| !text.is_empty()) {
        messages.push(Message::new(Role::System, text));
    }
    for (index, turn) in turns.into_iter().enumerate() {
        turn.add_to(&mut messages, &format!("messages[{index}]"), deferred, images)?;
    }
    Ok(messages)
}

fn system_text(system: Blocks) -> Result<String, RequestError> {
    let blocks = match system {
        Blocks::Text(text) => return Ok(without_billing(&text).to_owned()),
        Blocks::List(blocks) => blocks,
    };
    let texts = blocks.into_iter().enumerate().map(|(index, block)| {
        let at = format!("system[{index}]");
        if block.kind.as_deref() != Some("text") { Err(block.refused(&at)) } else { block.text(&at) }
    });
    let texts = texts.collect::<Result<Vec<_>, _>>()?;
    let texts = texts.iter().map(|text| (text, without_billing(text))).filter(|(text, rest)| !rest.is_empty() || text.is_empty());
    Ok(texts.map(|(_, rest)| rest).collect::<Vec<_>>().join("\n"))
}

/// Returns the text without a first line for Anthropic's billing.
fn without_billing(text: &str) -> &str {
    match text.starts_with(BILLING) {
        true => text.split_once('\n').map_or("", |(_, rest)| rest.trim_start_matches('\n')),
        false => text,
    }
}

impl Turn {
    fn add_to(
        self,
        messages: &mut Vec<Message>,
        at: &str,
        deferred: &mut DeferredTools,
        images: &mut ImageParts,
    ) -> Result<(), RequestError> {
        let missing = |field: &str| RequestError::invalid(format!("{at}.{field}"), Problem::Missing);
        let role = match self.role.as_deref() {
            None => return Err(missing("role")),
            Some("user") => Role::User,
            Some("assistant") => Role::Assistant,
            Some("system") => Role::System,
            Some(_) => {
                let allowed = "'user', 'assistant', 'system'";
                return Err(RequestError::invalid(format!("{at}.role"), Problem::Choice { allowed }));
            }
        };
        let blocks = match self.content.ok_or_else(|| missing("content"))? {
            Blocks::Text(text) => {
                messages.push(Message::new(role, text));
                return Ok(());
            }
            Blocks::List(blocks) => blocks,
        };
        let first = messages.len();
        let (mut message, mut texts) = (Message { content: None, ..Message::new(role, "") }, Vec::new());
        let mut before = images.len();
        for (index, block) in blocks.into_iter().enumerate() {
            let at = format!("{at}.content[{index}]");
            match (block.kind.as_deref(), role) {
                (Some("text"), _) => texts.push(block.text(&at)?),
                (Some("image"), Role::User) if images.are_read() => texts.push(images.add_source(&at, block.source)?),
                (Some("thinking"), Role::Assistant) => message.add_reasoning(&block.thinking.unwrap_or_default()),
                // Encrypted reasoning, calls and results of hosted tools: only the server that wrote them can use them.
                (Some("redacted_thinking" | "server_tool_use"), Role::Assistant) => {}
                (Some(kind), Role::Assistant) if kind.ends_with("_tool_result") => {}
                (Some("tool_use"), Role::Assistant) => message.tool_calls.push(block.call(&at)?),
                // A tool's result becomes a message of its own.
                (Some("tool_result"), Role::User) => {
                    if !texts.is_empty() {
                        messages.push(Message::new(role, images::joined(&std::mem::take(&mut texts), images.len() - before)));
                        before = images.len();
                    }
                    messages.push(block.result(&at, deferred)?);
                }
                _ => return Err(block.refused(&at)),
            }
        }
        message.content = (!texts.is_empty()).then(|| images::joined(&texts, images.len() - before));
        if message.content.is_some() || message.reasoning.is_some() || !message.tool_calls.is_empty() || messages.len() == first {
            if message.tool_calls.is_empty() {
                message.content.get_or_insert_default();
            }
            messages.push(message);
        }
        Ok(())
    }
}

impl Block {
    fn text(self, at: &str) -> Result<String, RequestError> {
        self.text.ok_or_else(|| RequestError::invalid(format!("{at}.text"), Problem::Missing))
    }

    fn call(self, at: &str) -> Result<ToolCall, RequestError> {
        let missing = |field: &str| RequestError::invalid(format!("{at}.{field}"), Problem::Missing);
        let name = self.name.ok_or_else(|| missing("name"))?;
        let id = self.id.ok_or_else(|| missing("id"))?;
        Ok(ToolCall { id: Some(id), name, arguments: self.input.ok_or_else(|| missing("input"))? })
    }

    fn result(self, at: &str, deferred: &mut DeferredTools) -> Result<Message, RequestError> {
        let missing = |field: &str| RequestError::invalid(format!("{at}.{field}"), Problem::Missing);
        let id = self.tool_use_id.ok_or_else(|| missing("tool_use_id"))?;
        let mut text = self.content.result_text(&format!("{at}.content"), deferred)?;
        // Marks a failed result in its text, because chat templates have no field for it.
        if self.is_error == Some(true) {
            text.insert_str(0, "Error: ");
        }
        Ok(Message { tool_call_id: Some(id), ..Message::new(Role::Tool, text) })
    }

    /// Returns the error for a block whose type is not supported here.
    fn refused(self, at: &str) -> RequestError {
        match self.kind {
            Some(kind) => RequestError::invalid(at, Problem::Block { kind }),
            None => RequestError::invalid(format!("{at}.type"), Problem::Missing),
        }
    }
}
