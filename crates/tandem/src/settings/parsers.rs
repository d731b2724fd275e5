//! Settings of how models' answers are split into reasoning, content and tool calls.

use super::common::with_commas;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::{fmt, str::FromStr};
use tandem_text::{
    ServedModel,
    chat::{ReasoningParser, ToolCallParser},
};

/// The parsers of answers.
#[derive(Args, Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ParserArgs {
    /// How the models write tool calls: none, hermes, qwen3_coder, llama3_json, mistral, deepseek_v3, kimi_k2, glm45, minimax_m2,
    /// deepseek_v32, gemma4, harmony or json. With several models, ID=PARSER sets it for one; repeat the flag, or separate parsers by commas
    /// [default: as the model's chat template shows]
    #[arg(long, env = "TANDEM_TOOL_CALL_PARSER", value_name = "[ID=]PARSER", value_delimiter = ',', help_heading = "Model")]
    #[serde(serialize_with = "with_commas")]
    pub tool_call_parser: Vec<ForModel<ToolCallParser>>,

    /// How the models mark their reasoning: none, think, mistral, kimi, seed_oss, cohere, gemma4 or harmony. With several models, ID=PARSER
    /// sets it for one; repeat the flag, or separate parsers by commas [default: as the model's chat template shows]
    #[arg(long, env = "TANDEM_REASONING_PARSER", value_name = "[ID=]PARSER", value_delimiter = ',', help_heading = "Model")]
    #[serde(serialize_with = "with_commas")]
    pub reasoning_parser: Vec<ForModel<ReasoningParser>>,
}

/// A value for the model with this id, or for all models without a value of their own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForModel<T> {
    /// The id of the model; `None`: the value is for all models.
    pub id: Option<String>,
    /// The value.
    pub value: T,
}

impl<T: ValueEnum> FromStr for ForModel<T> {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // An id may have `=`, a parser's name has none.
        let (id, name) = text.rsplit_once('=').map_or((None, text), |(id, name)| (Some(id.to_owned()), name));
        let value = T::from_str(name, false).map_err(|_| format!("there is no parser {name}; write one of: {}", names::<T>()))?;
        Ok(Self { id, value })
    }
}

impl<T: ValueEnum> fmt::Display for ForModel<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(id) = &self.id {
            write!(f, "{id}=")?;
        }
        f.write_str(self.value.to_possible_value().as_ref().map_or("", |value| value.get_name()))
    }
}

/// Returns the names of all parsers.
fn names<T: ValueEnum>() -> String {
    let names: Vec<String> =
        T::value_variants().iter().filter_map(T::to_possible_value).map(|value| value.get_name().to_owned()).collect();
    names.join(", ")
}

impl ParserArgs {
    /// Returns an id that names none of the models.
    pub(crate) fn unknown_id(&self, models: &[&ServedModel]) -> Option<&str> {
        let tool_call = self.tool_call_parser.iter().filter_map(|parser| parser.id.as_deref());
        let mut ids = tool_call.chain(self.reasoning_parser.iter().filter_map(|parser| parser.id.as_deref()));
        ids.find(|id| models.iter().all(|model| model.id != *id))
    }

    /// Returns the model with the parsers that these settings have for it.
    pub(crate) fn applied(&self, model: ServedModel) -> ServedModel {
        let (tool_call, reasoning) = (of_model(&self.tool_call_parser, &model.id), of_model(&self.reasoning_parser, &model.id));
        let model = model.with_parsers(tool_call, reasoning);
        if tool_call.is_none() && model.has_unknown_calls() {
            tracing::warn!(
                model = model.id,
                parsers = names::<ToolCallParser>(),
                "the chat template has tool-call tags, but this model's parser recognises only calls in plain JSON, so others stay in the content; if the model writes the format of one of these parsers, name it with --tool-call-parser"
            );
        }
        model
    }
}

/// Returns the last value for the model with this id, or else the last value for all models.
fn of_model<T: Copy>(values: &[ForModel<T>], id: &str) -> Option<T> {
    let last = |wanted: Option<&str>| values.iter().rev().find(|value| value.id.as_deref() == wanted);
    last(Some(id)).or_else(|| last(None)).map(|found| found.value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[derive(clap::Parser)]
    struct Command {
        #[command(flatten)]
        parsers: ParserArgs,
    }

    #[test]
    fn help_lists_all_parsers() {
        for (flag, names) in [("tool_call_parser", names::<ToolCallParser>()), ("reasoning_parser", names::<ReasoningParser>())] {
            let command = Command::command();
            let flag = command.get_arguments().find(|argument| argument.get_id() == flag).expect("the flag exists");
            let help = flag.get_help().expect("the flag has help").to_string().replace(" or ", ", ");
            assert!(help.contains(&names), "{help} must list {names}");
        }
    }

    #[test]
    fn parser_for_one_model_overrides_the_parser_for_all_models() {
        let parse = |text: &str| text.parse::<ForModel<ToolCallParser>>();
        let values = ["a=mistral", "hermes", "b=c=none"].map(|text| parse(text).expect("the parser exists"));
        assert_eq!(of_model(&values, "a"), Some(ToolCallParser::Mistral));
        assert_eq!(of_model(&values, "b=c"), Some(ToolCallParser::None));
        assert_eq!(of_model(&values, "x"), Some(ToolCallParser::Hermes));
        assert_eq!(of_model::<ToolCallParser>(&[], "x"), None);
        let shown: Vec<String> = values.iter().map(ToString::to_string).collect();
        assert_eq!(shown, ["a=mistral", "hermes", "b=c=none"]);
        assert!(parse("a=nothing").expect_err("the parser does not exist").contains("llama3_json"));
        let args = ParserArgs { tool_call_parser: values.to_vec(), ..ParserArgs::default() };
        let model = ServedModel::sim("a");
        assert_eq!(args.unknown_id(&[&model]), Some("b=c"));
    }
}
