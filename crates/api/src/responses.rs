//! The request of `/v1/responses`, which is converted to a chat.

use super::{
    agents::{Converted, DeferredTools, INPUT, Origin, visible},
    chat::{Chat, effort_with_effect},
    fields::{Bounded, MESSAGES_MAX, Whole},
    images::ImageParts,
    messages::Content,
    names::ParamNames,
    parameters::{ChatRequest, ResponsesRequest},
    responses_fields::{INCLUDE_MAX, Item, ResponsesInput},
    tools::{RawChoice, RawTools},
};
use crate::error::{Problem, RequestError, at_most};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::collections::{BTreeMap, HashSet};
use tandem_grammar::Kind;
use tandem_text::{
    ServedModel,
    chat::{Message, Role, ToolCall},
};

/// The limits of OpenAI's API for `metadata`.
const METADATA_MAX: usize = 16;
const METADATA_KEY_MAX: usize = 64;
const METADATA_VALUE_MAX: usize = 512;
/// The maximum length, in bytes, of a string that has no effect but to be repeated in the answer.
const REPEATED_BYTES_MAX: usize = 512;
const LOGPROBS: &str = "message.output_text.logprobs";
/// The accepted values of `include`. All but [`LOGPROBS`] have no effect, because answers of this server have no such items and are not encrypted.
const INCLUDABLE: [&str; 8] = [
    LOGPROBS,
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
];

const NAMES: &ParamNames = &ParamNames::RESPONSES;

/// A checked request.
pub struct Responses {
    /// The chat that the request is converted to.
    pub chat: Chat,
    /// The fields of the answer's object that repeat the request.
    pub repeated: Map<String, Value>,
    /// The tools that the client knows under another name or in another form, by the name that the model sees.
    pub origins: BTreeMap<String, Origin>,
}

impl ResponsesRequest {
    /// Checks the request.
    ///
    /// # Errors
    /// A parameter is missing, out of range or not supported.
    pub fn check(mut self, model: &ServedModel) -> Result<Responses, RequestError> {
        let mut left_out = Vec::new();
        let mut images = ImageParts::of(model);
        let messages = messages(self.instructions.as_deref(), self.input.take(), &mut left_out, &mut images)?;
        self.check_fixed()?;
        let wants_logprobs = self.wants_logprobs()?;
        let repeated = self.repeated()?;
        left_out.extend(self.ignored_text());
        let format = self.text.take().and_then(|text| text.format);
        let Bounded(tools) = self.tools.take().unwrap_or_default();
        let Converted { functions, origins, left_out: hosted, .. } = Converted::responses(tools)?;
        left_out.extend(hosted.into_iter().map(|kind| format!("tools.{kind}")));
        let effort = self.reasoning.take().and_then(|reasoning| reasoning.effort);
        let effort = effort_with_effect(effort, model, NAMES, &mut left_out);
        let tools = RawTools {
            tools: functions,
            choice: self.tool_choice.take().map(chat_choice).transpose()?,
            parallel: self.parallel_tool_calls,
        };
        let mut chat = ChatRequest::from(self.take_common()?);
        chat.response_format = format;
        chat.max_completion_tokens = self.max_output_tokens;
        (chat.logprobs, chat.top_logprobs) = (Some(wants_logprobs), self.top_logprobs.filter(|_| wants_logprobs));
        chat.reasoning_effort = effort;
        let chat = chat.check_with(messages, images, tools, NAMES, model)?;
        chat.options.check_one_text()?;
        let tools = &chat.conversation.tools;
        let constraint = chat.options.constraint.as_ref().map(|stated| &stated.constraint.kind);
        let is_enforced = tools.required_input().is_some() || matches!(constraint, Some(Kind::CallInputs(_)));
        if !is_enforced && tools.list.iter().any(|tool| tool.input.is_some()) {
            left_out.push("custom.format".to_owned());
        }
        Ok(Responses { chat: Chat { left_out, ..chat }, repeated, origins })
    }

    /// Checks the parameters that have no effect or only one supported value.
    fn check_fixed(&self) -> Result<(), RequestError> {
        let rule = |param: &str, rule| Err(RequestError::invalid(param, Problem::Rule { rule }));
        if self.max_tokens.is_some() {
            return rule("max_tokens", "is named 'max_output_tokens' here");
        }
        if self.truncation.as_deref().is_some_and(|truncation| truncation != "disabled") {
            return rule("truncation", "must be 'disabled': this server removes no items from the input");
        }
        // Answers have the complete reasoning, whatever summary the client requests.
        let summary = self.reasoning.as_ref().and_then(|reasoning| {
            let is_unknown = |value: &&str| !["auto", "concise", "detailed", "none"].contains(value);
            let of = |name, value: &Option<String>| value.as_deref().filter(is_unknown).map(|_| name);
            of("reasoning.summary", &reasoning.summary).or(of("reasoning.generate_summary", &reasoning.generate_summary))
        });
        if let Some(param) = summary {
            let allowed = "'auto', 'concise', 'detailed', 'none'";
            return Err(RequestError::invalid(param, Problem::Choice { allowed }));
        }
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_deref());
        if verbosity.is_some_and(|verbosity| !["low", "medium", "high"].contains(&verbosity)) {
            return Err(RequestError::invalid("text.verbosity", Problem::Choice { allowed: "'low', 'medium', 'high'" }));
        }
        Ok(())
    }

    /// Returns the name of the field `verbosity` if the request sets another value than the default, because it has no effect.
    fn ignored_text(&self) -> Option<String> {
        let verbosity = self.text.as_ref().and_then(|text| text.verbosity.as_deref());
        verbosity.filter(|verbosity| *verbosity != "medium").map(|_| "text.verbosity".to_owned())
    }

    fn wants_logprobs(&self) -> Result<bool, RequestError> {
        let Bounded(include) = self.include.as_ref().unwrap_or(const { &Bounded(Vec::new()) });
        at_most("include", include.len(), INCLUDE_MAX, "entries")?;
        if let Some(at) = include.iter().position(|value| !INCLUDABLE.contains(&value.as_str())) {
            let allowed = "the values that OpenAI's API documents, such as 'message.output_text.logprobs'";
            return Err(RequestError::invalid(format!("include[{at}]"), Problem::Choice { allowed }));
        }
        let wanted = include.iter().any(|value| value == LOGPROBS);
        if !wanted && self.top_logprobs.is_some_and(|Whole(top)| top != 0) {
            let rule = "has no effect unless 'include' has 'message.output_text.logprobs'; add it";
            return Err(RequestError::invalid("top_logprobs", Problem::Rule { rule }));
        }
        Ok(wanted)
    }

    /// Returns the fields of the answer's object that repeat the request.
    fn repeated(&self) -> Result<Map<String, Value>, RequestError> {
        let metadata = self.metadata.clone().unwrap_or_default();
        at_most("metadata", metadata.len(), METADATA_MAX, "entries")?;
        for (key, value) in &metadata {
            at_most("metadata", key.len(), METADATA_KEY_MAX, "bytes in each key")?;
            at_most(&format!("metadata.{key}"), value.len(), METADATA_VALUE_MAX, "bytes")?;
        }
        let texts = [
            ("user", &self.user),
            ("safety_identifier", &self.safety_identifier),
            ("prompt_cache_key", &self.prompt_cache_key),
            ("service_tier", &self.service_tier),
        ];
        for (param, text) in texts {
            at_most(param, text.as_ref().map_or(0, String::len), REPEATED_BYTES_MAX, "bytes")?;
        }
        let whole = |number: &Option<Whole>| number.map(|Whole(number)| number);
        let tools: Vec<&Value> = self.tools.iter().flat_map(|Bounded(tools)| tools).collect();
        let format = self.text.as_ref().and_then(|text| text.format.clone());
        let object = json!({
            "background": false,
            "conversation": null,
            "instructions": self.instructions,
            "max_output_tokens": whole(&self.max_output_tokens),
            "max_tool_calls": whole(&self.max_tool_calls),
            "metadata": metadata,
            "parallel_tool_calls": self.parallel_tool_calls.unwrap_or(true),
            "previous_response_id": null,
            "prompt": null,
            "prompt_cache_key": self.prompt_cache_key,
            "reasoning": { "effort": self.reasoning.as_ref().and_then(|reasoning| reasoning.effort.as_ref()), "summary": null },
            "safety_identifier": self.safety_identifier,
            "service_tier": "default",
            // Answers are never stored, whatever the request says.
            "store": false,
            "temperature": self.temperature.unwrap_or(1.0),
            "text": { "format": format.unwrap_or_else(|| json!({ "type": "text" })), "verbosity": "medium" },
            "tool_choice": self.tool_choice.clone().unwrap_or_else(|| "auto".into()),
            "tools": tools,
            "top_logprobs": whole(&self.top_logprobs).unwrap_or(0),
            "top_p": self.top_p.unwrap_or(1.0),
            "truncation": "disabled",
            "user": self.user,
        });
        let Value::Object(fields) = object else { return Ok(Map::new()) };
        Ok(fields)
    }
}

/// Converts the choice of a tool to that of a chat, with the names that the model sees.
fn chat_choice(choice: Value) -> Result<RawChoice, RequestError> {
    let typed = |source| RequestError::Type { param: "tool_choice".to_owned(), source };
    let name = |tool: &Value| tool["name"].as_str().map(|name| visible(tool["namespace"].as_str(), name));
    match choice["type"].as_str() {
        Some("function" | "custom") => Ok(RawChoice::function(name(&choice))),
        Some("allowed_tools") => {
            // Tools that only other servers can run cannot be called.
            let is_ours = |tool: &&Value| matches!(tool["type"].as_str(), None | Some("function" | "custom"));
            let tools = choice["tools"].as_array().into_iter().flatten().filter(is_ours);
            let mode = Deserialize::deserialize(&choice["mode"]).map_err(typed)?;
            Ok(RawChoice::allowed(mode, tools.map(name)))
        }
        _ => Deserialize::deserialize(choice).map_err(typed),
    }
}

/// Converts the instructions and the input to messages.
fn messages(
    instructions: Option<&str>,
    input: Option<ResponsesInput>,
    left_out: &mut Vec<String>,
    images: &mut ImageParts,
) -> Result<Vec<Message>, RequestError> {
    let mut messages: Vec<Message> = instructions.map(|text| Message::new(Role::System, text)).into_iter().collect();
    match input.ok_or_else(|| RequestError::invalid("input", Problem::Missing))? {
        ResponsesInput::Text(text) => messages.push(Message::new(Role::User, text)),
        ResponsesInput::Items(Bounded(items)) if items.is_empty() => return Err(RequestError::invalid("input", Problem::Empty)),
        ResponsesInput::Items(Bounded(items)) => {
            at_most("input", items.len(), MESSAGES_MAX, "items")?;
            let before = messages.len();
            let mut skipped = HashSet::new();
            for (index, item) in items.into_iter().enumerate() {
                if let Some(name) = item.of_other_server(&mut skipped) {
                    if !left_out.contains(&name) {
                        left_out.push(name);
                    }
                    continue;
                }
                item.add_to(&mut messages, &format!("input[{index}]"), images)?;
            }
            if messages.len() == before {
                return Err(RequestError::invalid("input", Problem::Empty));
            }
            let without_content = |message: &&mut Message| message.content.is_none() && message.tool_calls.is_empty();
            messages.iter_mut().filter(without_content).for_each(|message| message.content = Some(String::new()));
        }
    }
    Ok(messages)
}

/// The types of items that only other servers write or read.
const OTHER_SERVERS: [&str; 19] = [
    "apply_patch_call",
    "apply_patch_call_output",
    "code_interpreter_call",
    "compaction",
    "computer_call",
    "computer_call_output",
    "file_search_call",
    "image_generation_call",
    "local_shell_call",
    "local_shell_call_output",
    "mcp_approval_request",
    "mcp_approval_response",
    "mcp_call",
    "mcp_list_tools",
    "shell_call",
    "shell_call_output",
    "tool_search_call",
    "tool_search_output",
    "web_search_call",
];

impl Item {
    /// Returns the name of an item that no template can render: the call of a tool that another server runs, or its result. `skipped` has the ids of such
    /// calls.
    fn of_other_server(&self, skipped: &mut HashSet<String>) -> Option<String> {
        let kind = self.kind.as_deref()?;
        if OTHER_SERVERS.contains(&kind) {
            skipped.extend(self.call_id.clone());
            return Some(format!("input.{kind}"));
        }
        let is_result = kind.ends_with("_call_output") && self.call_id.as_ref().is_some_and(|id| skipped.contains(id));
        is_result.then(|| format!("input.{kind}"))
    }

    fn role(&self, param: &str) -> Result<Role, RequestError> {
        match self.role.as_deref() {
            None => Err(RequestError::invalid(param, Problem::Missing)),
            Some("system" | "developer") => Ok(Role::System),
            Some("user") => Ok(Role::User),
            Some("assistant") => Ok(Role::Assistant),
            Some(_) => {
                let allowed = "'system', 'developer', 'user', 'assistant'";
                Err(RequestError::invalid(param, Problem::Choice { allowed }))
            }
        }
    }

    /// Adds the item to the messages. Consecutive items of the assistant are one message: its reasoning, its text and its calls.
    fn add_to(self, messages: &mut Vec<Message>, at: &str, images: &mut ImageParts) -> Result<(), RequestError> {
        let param = |field: &str| format!("{at}.{field}");
        let missing = |field: &str| RequestError::invalid(param(field), Problem::Missing);
        match self.kind.as_deref() {
            None | Some("message") => {
                let role = self.role(&param("role"))?;
                let kinds: &[&str] = match role {
                    Role::Assistant => &["output_text", "input_text", "text", "refusal"],
                    _ => &["input_text", "output_text", "text"],
                };
                let images = (role == Role::User).then_some(images);
                let text = self.content.text(&param("content"), kinds, images)?.ok_or_else(|| missing("content"))?;
                if role == Role::Assistant {
                    let message = assistant(messages, |message| message.content.is_none() && message.tool_calls.is_empty());
                    message.content = Some(text);
                } else {
                    messages.push(Message::new(role, text));
                }
            }
            Some("reasoning") => {
                let text = match self.content.text(&param("content"), &["reasoning_text"], None)? {
                    Some(text) => Some(text),
                    None => self.summary.text(&param("summary"), &["summary_text"], None)?,
                };
                // Skips encrypted reasoning, which only the server that wrote it can read.
                if let Some(text) = text.filter(|text| !text.is_empty()) {
                    assistant(messages, |message| message.content.is_none() && message.tool_calls.is_empty())
                        .add_reasoning(&text);
                }
            }
            Some(kind @ ("function_call" | "custom_tool_call")) => {
                let id = self.call_id.ok_or_else(|| missing("call_id"))?;
                let name = visible(self.namespace.as_deref(), &self.name.ok_or_else(|| missing("name"))?);
                let arguments = if kind == "function_call" {
                    ToolCall::arguments(self.arguments.as_str().ok_or_else(|| missing("arguments"))?)
                } else {
                    Map::from_iter([(INPUT.to_owned(), self.input.ok_or_else(|| missing("input"))?.into())])
                };
                assistant(messages, |_| true).tool_calls.push(ToolCall { id: Some(id), name, arguments });
            }
            Some("function_call_output" | "custom_tool_call_output") => {
                let id = self.call_id.ok_or_else(|| missing("call_id"))?;
                if self.output.is_null() {
                    return Err(missing("output"));
                }
                let typed = |source| RequestError::Type { param: param("output"), source };
                let content = Content::deserialize(self.output).map_err(typed)?;
                let text = content.result_text(&param("output"), &mut DeferredTools::default())?;
                messages.push(Message { tool_call_id: Some(id), ..Message::new(Role::Tool, text) });
            }
            Some("item_reference") => {
                let rule = "refers to a stored item, but this server stores none; send the item itself";
                return Err(RequestError::invalid(at, Problem::Rule { rule }));
            }
            Some(_) => {
                let allowed = "'message', 'reasoning', 'function_call', 'function_call_output', 'custom_tool_call', 'custom_tool_call_output'";
                return Err(RequestError::invalid(param("type"), Problem::Choice { allowed }));
            }
        }
        Ok(())
    }
}

/// Returns the last message if it is the assistant's and can be continued, else a new message of the assistant.
fn assistant(messages: &mut Vec<Message>, continued: impl FnOnce(&Message) -> bool) -> &mut Message {
    if !messages.last().is_some_and(|last| last.role == Role::Assistant && continued(last)) {
        messages.push(Message { content: None, ..Message::new(Role::Assistant, "") });
    }
    messages.last_mut().expect("the list has a message")
}
