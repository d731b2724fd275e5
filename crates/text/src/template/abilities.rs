//! Finds out what a template can render, by rendering short conversations.

use super::{ChatTemplate, RenderError};
use crate::chat::{
    Abilities, Conversation, Message, MessageForm, Role, SystemPlaces, TemplateOptions, Tool, ToolCall, ToolChoice, Tools,
};
use serde_json::{Map, json};

/// The names in the test conversations, which no template contains.
const NAME: &str = "tandem_probe";
const PARAMETER: &str = "tandem_probed";
/// The id of a tool call in the test conversations. Mistral's templates accept only ids of nine letters and digits.
const ID: &str = "a1b2c3d4e";

/// The error of a template that exceeds its limits for a short conversation.
pub(super) struct Endless;

/// Returns the template's abilities.
///
/// # Errors
/// Fails if the template exceeds its limits.
pub(super) fn probe(template: &ChatTemplate, bytes_max: usize) -> Result<Abilities, Endless> {
    let rendered = |messages: Vec<Message>, tools: Tools, abilities: Abilities| {
        let conversation = Conversation { messages, tools, template: TemplateOptions::default() };
        match template.render_here(conversation.variables(abilities), bytes_max) {
            Ok(text) => Ok(Some(text)),
            Err(RenderError::Refused(_)) => Ok(None),
            Err(_) => Err(Endless),
        }
    };
    let text = |role, text: &str| Message::new(role, text);
    let user = text(Role::User, "a");
    let without = |messages: Vec<Message>| rendered(messages, Tools::default(), Abilities::default());
    without(vec![user.clone()])?;
    let turns = |turns: &[(Role, &str)]| without(turns.iter().map(|(role, content)| text(*role, content)).collect());
    let ordered = |expected: &[(Role, &str)]| {
        let in_order = |rendered: String| {
            expected.iter().try_fold(&*rendered, |rest, (_, content)| rest.split_once(content).map(|(_, rest)| rest)).is_some()
        };
        Ok(turns(expected)?.is_some_and(in_order))
    };
    let (system, asked, answered, last) = ((Role::System, NAME), (Role::User, "q1"), (Role::Assistant, "a1"), (Role::User, "q2"));
    let head = (Role::System, "s1");
    // Some templates render the system message at the head next to the last question.
    let system = if turns(&[system, asked, answered, last])?.is_none_or(|text| !text.contains(NAME)) {
        SystemPlaces::Never
    } else if ordered(&[head, system, asked])?
        && ordered(&[head, asked, system])?
        && ordered(&[head, asked, answered, system, last])?
    {
        SystemPlaces::Anywhere
    } else {
        SystemPlaces::First
    };
    // A template that does not even render one question is not taken to require alternation.
    let alternates = ordered(&[asked])? && !ordered(&[asked, last])?;

    let tool = Tool::function(NAME.to_owned(), Some("b".to_owned()), json!({ "type": "object", "properties": {} }));
    let tools = Tools { list: vec![tool], choice: ToolChoice::Auto, parallel: true };
    let arguments = Map::from_iter([(PARAMETER.to_owned(), 1.into())]);
    let call = ToolCall { id: Some(ID.to_owned()), name: NAME.to_owned(), arguments };
    let called = Message { content: None, tool_calls: vec![call], ..text(Role::Assistant, "") };
    let result = Message { tool_call_id: Some(ID.to_owned()), name: Some(NAME.to_owned()), ..text(Role::Tool, "result") };
    let thinking = template.source().contains("message.thinking");
    let forms = [(false, false), (true, false), (false, true), (true, true)];
    for (null_content, text_arguments) in forms {
        let able = |described_tools| {
            let form = MessageForm { null_content, text_arguments, described_tools, thinking };
            Abilities { tools: Some(form), system, alternates }
        };
        if rendered(vec![user.clone()], tools.clone(), able(false))?.is_none_or(|text| !text.contains(NAME)) {
            break;
        }
        let history = rendered(vec![user.clone(), called.clone(), result.clone()], tools.clone(), able(false))?;
        if history.is_some_and(|text| text.contains(PARAMETER) && text.contains("result")) {
            let plain = Tools { list: vec![Tool::function(NAME.to_owned(), None, json!({}))], ..tools };
            return Ok(able(rendered(vec![user], plain, able(false))?.is_none()));
        }
    }
    Ok(Abilities { tools: None, system, alternates })
}

#[cfg(test)]
mod tests;
