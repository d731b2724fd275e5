//! Random answers: what is found in them must not depend on their chunks.

use super::*;
use clap::ValueEnum;
use proptest::prelude::*;

/// A text that looks like an answer, made of the tags of a format, of parts of arguments and of other texts.
fn answers() -> impl Strategy<Value = ((ToolCallParser, ReasoningParser, bool), Vec<&'static str>)> {
    const PARTS: [&str; 24] = [
        "f",
        "get_weather",
        "text",
        "number",
        "{",
        "}",
        "[",
        "]",
        "\"",
        "'",
        ":",
        ",",
        " ",
        "\n",
        "\\",
        "7",
        "None",
        "true",
        "x y",
        "é",
        "{\"name\": \"f\", \"arguments\": {",
        "{\"text\": \"",
        "<",
        "|>",
    ];
    let parsers = ToolCallParser::value_variants();
    let tags = |parser: ToolCallParser| -> Vec<&'static str> {
        match parser {
            ToolCallParser::None => vec![],
            ToolCallParser::Hermes => vec!["<tool_call>", "</tool_call>"],
            ToolCallParser::Qwen3Coder => {
                vec![
                    "<tool_call>",
                    "</tool_call>",
                    "<function=f>",
                    "<function=",
                    "</function>",
                    "<parameter=text>",
                    "<parameter=",
                    ">",
                    "</parameter>",
                ]
            }
            ToolCallParser::Glm45 => {
                vec!["<tool_call>f", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]
            }
            ToolCallParser::MinimaxM2 => {
                vec![
                    "<minimax:tool_call>",
                    "</minimax:tool_call>",
                    "<invoke name=\"f\">",
                    "</invoke>",
                    "<parameter name=\"text\">",
                    "</parameter>",
                ]
            }
            ToolCallParser::DeepseekV32 => vec![
                "<｜DSML｜function_calls>",
                "</｜DSML｜function_calls>",
                "<｜DSML｜invoke name=\"f\">",
                "</｜DSML｜invoke>",
                "<｜DSML｜parameter name=\"text\" string=\"true\">",
                "</｜DSML｜parameter>",
            ],
            ToolCallParser::Llama3Json | ToolCallParser::Json => vec!["<|python_tag|>", "[{\"name\": \"f\", \"parameters\": {"],
            ToolCallParser::Mistral => vec!["[TOOL_CALLS]", "[ARGS]", "[TOOL_CALLS]f{", "[CALL_ID]"],
            ToolCallParser::DeepseekV3 => vec![
                "<｜tool▁calls▁begin｜>",
                "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{",
                "<｜tool▁call▁end｜>",
                "<｜tool▁calls▁end｜>",
                "```json\n",
            ],
            ToolCallParser::KimiK2 => vec![
                "<|tool_calls_section_begin|>",
                "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{",
                "<|tool_call_end|>",
                "<|tool_calls_section_end|>",
            ],
            ToolCallParser::Gemma4 => vec!["<|tool_call>call:f{", "<tool_call|>", "<|\"|>", "<|channel>thought\n", "<channel|>"],
            ToolCallParser::Harmony => vec![
                "<|channel|>analysis<|message|>",
                "<|channel|>final<|message|>",
                "<|channel|>commentary to=functions.f<|message|>{",
                "<|end|>",
                "<|call|>",
                "<|start|>assistant",
            ],
        }
    };
    let thoughts = vec![ReasoningParser::None, ReasoningParser::Think, ReasoningParser::Gemma4];
    let formats = (prop::sample::select(parsers), prop::sample::select(thoughts), any::<bool>());
    formats.prop_flat_map(move |(parser, thoughts, is_open)| {
        // Tags are more frequent than other parts.
        let tags = tags(parser).into_iter().flat_map(|tag| [tag; 4]);
        let parts: Vec<&str> = PARTS.iter().copied().chain(tags).chain(["<think>", "</think>"]).collect();
        let format = (parser, thoughts, is_open);
        prop::collection::vec(prop::sample::select(parts), 0..40).prop_map(move |parts| (format, parts))
    })
}

/// Returns a tag as the name of a special token, and any other text as it is.
fn named(part: &str) -> String {
    let is_tag = part.len() > 3 && part.starts_with(['<', '[']);
    format!("{}{part}", if is_tag { "\0" } else { "" })
}

fn chars_of(text: &str) -> Vec<&str> {
    text.split("").filter(|char| !char.is_empty()).collect()
}

proptest! {
    // More cases: PROPTEST_CASES=100000.
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases.max(2_000), ..ProptestConfig::default() })]

    /// The deltas do not depend on the chunks. An answer without calls is given out whole.
    #[test]
    fn deltas_do_not_depend_on_chunks((names, parts) in answers(), cut in any::<prop::sample::Index>()) {
        let (parser, thoughts, is_open) = names;
        let format = OutputFormat { reasoning: reasoning(thoughts, is_open).reasoning, ..format(parser) };
        let text: String = parts.concat();
        let whole = split(&format, [&*text]);
        prop_assert_eq!(&split(&format, parts.iter().copied()), &whole, "in parts: {}", text);
        let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
        prop_assert_eq!(&split(&format, chars_of(&text)), &whole, "the characters of {}", text);
        let (first, second) = text.split_at(cuts[cut.index(cuts.len())]);
        prop_assert_eq!(&split(&format, [first, second]), &whole, "in two: {} {}", first, second);
        // The same if tags are special tokens.
        let named: Vec<String> = parts.iter().map(|part| named(part)).collect();
        let chars = named.iter().flat_map(|part| if part.starts_with('\0') { vec![&**part] } else { chars_of(part) });
        prop_assert_eq!(split(&format, chars), split(&format, named.iter().map(String::as_str)), "{:?}", named);
        if !whole.iter().any(|delta| delta.starts_with("call")) && parser != ToolCallParser::Harmony {
            let shown: String = whole.iter().map(|delta| delta.split_once(' ').map_or("", |(_, text)| text)).collect();
            let count = |text: &str, char: char| text.matches(char).count();
            for char in ['7', 'é', 'x'] {
                prop_assert_eq!(count(&shown, char), count(&text, char), "{:?} of {}", whole, text);
            }
        }
    }
}
