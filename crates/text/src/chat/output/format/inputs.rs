//! How models write calls of tools whose only argument is a text, in parts for a constraint.

use super::{TOOL_CALL, ToolCallParser, elements, gemma::QUOTE, marked};
use crate::chat::INPUT;
use serde_json::Value;
use tandem_grammar::InputPlace;

impl ToolCallParser {
    /// Returns the ways in which a model writes a call of the tool with this name, which has the parameter [`INPUT`] only.
    pub fn input_places(self, name: &str) -> Vec<InputPlace> {
        let (quoted, input) = (Value::from(name).to_string(), Value::from(INPUT).to_string());
        // The arguments as a JSON object.
        let json = |begin: &[&str]| InputPlace::new(begin, &["{", &input, ":", "\""], None, &["}"]);
        // An object with the name and the arguments.
        let object = |open: &[&str], arguments: &str| {
            let begin: Vec<&str> = open.iter().copied().chain(["{", "\"name\"", ":", &*quoted]).collect();
            InputPlace::new(&begin, &[",", arguments, ":", "{", &input, ":", "\""], None, &["}", "}"])
        };
        match self {
            Self::None => Vec::new(),
            Self::Hermes => vec![object(&[TOOL_CALL], "\"arguments\"")],
            Self::Llama3Json | Self::Json => vec![object(&[], "\"parameters\"")],
            Self::Mistral => vec![
                object(&[], "\"arguments\""),
                json(&["[TOOL_CALLS]", name, "[ARGS]"]),
                json(&["[TOOL_CALLS]", name, "[CALL_ID]", "", "[ARGS]"]),
                InputPlace::new(&["[TOOL_CALLS]", name, "{"], &[&input, ":", "\""], None, &["}"]),
            ],
            Self::DeepseekV3 => {
                let marked::Marked { call, arguments, .. } = marked::DEEPSEEK;
                vec![json(&[call, name, arguments]), json(&[call, "function", arguments, name, "```json"])]
            }
            Self::KimiK2 => {
                let marked::Marked { call, arguments, .. } = marked::KIMI;
                vec![json(&[call, &format!("functions.{name}:"), "", arguments])]
            }
            Self::Qwen3Coder => vec![elements::QWEN.input_place(name)],
            Self::Glm45 => vec![elements::GLM.input_place(name)],
            Self::MinimaxM2 => vec![elements::MINIMAX.input_place(name)],
            Self::DeepseekV32 => vec![elements::DEEPSEEK_V32.input_place(name)],
            Self::Gemma4 => {
                vec![InputPlace::new(
                    &["<|tool_call>", &format!("call:{name}"), "{"],
                    &[&format!("{INPUT}:"), QUOTE],
                    Some(QUOTE),
                    &["}"],
                )]
            }
            Self::Harmony => {
                let to = format!("to=functions.{name}");
                // The channel may follow the recipient, and both may be followed by the type of the content.
                let header = |tags: &[&str]| {
                    let words = tags.iter().flat_map(|tag| [*tag, "", ""]);
                    json(&[&*to].into_iter().chain(words).chain(["<|message|>"]).collect::<Vec<_>>())
                };
                vec![header(&[]), header(&["<|channel|>"]), header(&["<|constrain|>"]), header(&["<|channel|>", "<|constrain|>"])]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::{OutputFormat, OutputParser, Piece, Pieces, ToolFormat};
    use super::*;
    use crate::chat::{Tool, ToolChoice, Tools};
    use serde_json::json;
    use std::sync::Arc;
    use tandem_grammar::{Kind, Matcher, Vocabulary};

    const INPUT_TEXT: &str = "go \"é\" \\ <x>\nend";

    fn tools() -> Tools {
        let parameters = json!({ "type": "object", "properties": { INPUT: { "type": "string" } } });
        let tool = |name: &str, input| Tool { input, ..Tool::function(name.to_owned(), None, parameters.clone()) };
        let grammar = Kind::Grammar("start: \"go \" /[^\\n]*/ LF \"end\"\n%import common.LF\n".to_owned());
        Tools { list: vec![tool("patch", Some(grammar)), tool("patch2", None)], choice: ToolChoice::Auto, parallel: true }
    }

    /// Returns the number of bytes of the text that the constraint allows.
    fn allowed(matcher: &mut Matcher, text: &str) -> usize {
        let mut allows = |byte: u8| {
            let mask = matcher.mask().expect("some token is allowed");
            mask.is_none_or(|mask| mask.allows(byte.into())) && matcher.accept(byte.into()).is_ok()
        };
        text.bytes().take_while(|byte| allows(*byte)).count()
    }

    /// What a model writes for calls in each format, with the input in place of `$`, and whether the input is encoded as JSON.
    const CALLS: [(ToolCallParser, &str, bool); 20] = [
        (ToolCallParser::Hermes, "<tool_call>\n{\"name\": \"NAME\", \"arguments\": {\"input\": \"$\"}}\n</tool_call>", true),
        (ToolCallParser::Hermes, "<tool_call>{\"name\":\"NAME\",\"arguments\":{\"input\":\"$\"}}</tool_call>", true),
        (
            ToolCallParser::Qwen3Coder,
            "<tool_call>\n<function=NAME>\n<parameter=input>\n$\n</parameter>\n</function>\n</tool_call>",
            false,
        ),
        (ToolCallParser::Llama3Json, "<|python_tag|>{\"name\": \"NAME\", \"parameters\": {\"input\": \"$\"}}", true),
        (ToolCallParser::Llama3Json, "{\"name\": \"NAME\", \"parameters\": {\"input\": \"$\"}}", true),
        (ToolCallParser::Json, "{\"name\": \"NAME\", \"parameters\": {\"input\": \"$\"}}", true),
        (ToolCallParser::Mistral, "[TOOL_CALLS][{\"name\": \"NAME\", \"arguments\": {\"input\": \"$\"}}]", true),
        (ToolCallParser::Mistral, "[TOOL_CALLS]NAME[ARGS]{\"input\": \"$\"}", true),
        (ToolCallParser::Mistral, "[TOOL_CALLS]NAME[CALL_ID]a1B2[ARGS]{\"input\": \"$\"}", true),
        (ToolCallParser::Mistral, "[TOOL_CALLS]NAME{\"input\": \"$\"}", true),
        (
            ToolCallParser::DeepseekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>NAME<｜tool▁sep｜>{\"input\": \"$\"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            true,
        ),
        (
            ToolCallParser::DeepseekV3,
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME\n```json\n{\"input\": \"$\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            true,
        ),
        (
            ToolCallParser::KimiK2,
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0<|tool_call_argument_begin|>{\"input\": \"$\"}<|tool_call_end|><|tool_calls_section_end|>",
            true,
        ),
        (ToolCallParser::Glm45, "<tool_call>NAME\n<arg_key>input</arg_key>\n<arg_value>$</arg_value>\n</tool_call>", false),
        (
            ToolCallParser::MinimaxM2,
            "<minimax:tool_call>\n<invoke name=\"NAME\">\n<parameter name=\"input\">$</parameter>\n</invoke>\n</minimax:tool_call>",
            false,
        ),
        (
            ToolCallParser::DeepseekV32,
            "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"NAME\">\n<｜DSML｜parameter name=\"input\" string=\"true\">$</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            false,
        ),
        (ToolCallParser::Gemma4, "<|tool_call>call:NAME{input:<|\"|>$<|\"|>}<tool_call|>", false),
        (
            ToolCallParser::Harmony,
            "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{\"input\": \"$\"}<|call|>",
            true,
        ),
        (ToolCallParser::Harmony, " to=functions.NAME<|channel|>commentary json<|message|>{\"input\": \"$\"}<|call|>", true),
        (
            ToolCallParser::Harmony,
            " to=functions.NAME<|channel|>commentary <|constrain|>json<|message|>{\"input\":\"$\"}<|call|>",
            true,
        ),
    ];

    fn call(form: &str, is_json: bool, name: &str, input: &str) -> String {
        let quoted = Value::from(input).to_string();
        form.replace("NAME", name).replace('$', if is_json { &quoted[1..quoted.len() - 1] } else { input })
    }

    #[test]
    fn grammar_of_an_input_is_enforced_in_the_form_that_the_parser_reads() {
        for (parser, form, is_json) in CALLS {
            let tools = tools();
            let kind = tools.call_inputs(parser).expect("the input has a grammar");
            let whole = Vocabulary::bytes().compile(&kind.into(), &[]).expect("the grammar can be enforced");
            let text = call(form, is_json, "patch", INPUT_TEXT);
            assert_eq!(allowed(&mut whole.clone(), &text), text.len(), "{text}");
            // Neither another text nor the call of another tool is affected.
            let other = call(form, is_json, "patch2", "no");
            assert_eq!(allowed(&mut whole.clone(), &other), other.len(), "{other}");
            let wrong = call(form, is_json, "patch", "gone");
            let found = allowed(&mut whole.clone(), &wrong);
            assert_eq!(found, wrong.find("gone").expect("it has the input") + 2, "{wrong}");
            let other = call(form, is_json, "patch", "go").replace("input", "other");
            assert!(allowed(&mut whole.clone(), &other) < other.len(), "{other}");

            let format = OutputFormat { tools: ToolFormat { parser, tools: Arc::new(tools) }, ..OutputFormat::default() };
            let (mut parser, mut pieces) = (OutputParser::new(&format), Pieces::default());
            parser.push(&text, &mut pieces);
            parser.finish(&mut pieces);
            let arguments = pieces.into_vec().into_iter().filter_map(|piece| match piece {
                Piece::Arguments { text, .. } => Some(text),
                _ => None,
            });
            let arguments: Value = serde_json::from_str(&arguments.collect::<String>()).expect("the text is a call");
            assert_eq!(arguments, json!({ INPUT: INPUT_TEXT }), "{text}");
        }
    }

    #[test]
    fn only_tools_with_a_grammar_constrain_an_answer() {
        let of = |change: &dyn Fn(&mut Tools), parser| {
            let mut tools = tools();
            change(&mut tools);
            tools.call_inputs(parser)
        };
        assert!(of(&|_| (), ToolCallParser::Hermes).is_some());
        assert_eq!(of(&|_| (), ToolCallParser::None), None);
        assert_eq!(of(&|tools| tools.list.truncate(0), ToolCallParser::Hermes), None);
        assert_eq!(of(&|tools| tools.list = vec![tools.list[0].clone(); 33], ToolCallParser::Hermes), None);
    }
}
