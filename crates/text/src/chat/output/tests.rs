mod cost;
mod formats;
mod random;

use super::*;
use crate::chat::{Tool, ToolChoice};
use serde_json::{Value, json};

/// Tools `f` and `get_weather`. The schema of `f` has a parameter of each type.
fn tools(choice: ToolChoice) -> Tools {
    let properties = json!({
        "text": { "type": "string" }, "number": { "type": "integer" }, "list": { "type": "array" },
        "maybe": { "anyOf": [{ "type": "boolean" }, { "type": "null" }] },
    });
    let tool = |name: &str, properties: &Value| {
        Tool::function(name.to_owned(), None, json!({ "type": "object", "properties": properties }))
    };
    Tools { list: vec![tool("f", &properties), tool("get_weather", &json!({}))], choice, parallel: true }
}

fn format(parser: ToolCallParser) -> OutputFormat {
    let tools = ToolFormat { parser, tools: Arc::new(tools(ToolChoice::Auto)) };
    OutputFormat { reasoning: ReasoningFormat::default(), tools }
}

fn reasoning(parser: ReasoningParser, is_open: bool) -> OutputFormat {
    OutputFormat { reasoning: ReasoningFormat { parser, is_open, is_hidden: false }, tools: ToolFormat::default() }
}

fn described(pieces: Vec<Piece>) -> Vec<String> {
    let piece = |piece| match piece {
        Piece::Reasoning(text) => format!("thought {text}"),
        Piece::Content(text) => format!("text {text}"),
        Piece::ToolCall { index, name, .. } => format!("call {index} {name}"),
        Piece::Arguments { index, text } => format!("arguments {index} {text}"),
    };
    pieces.into_iter().map(piece).collect()
}

/// Returns the deltas of a text that arrives in these chunks. A chunk that begins with `\0` is the name of a special token.
fn split<'a>(format: &OutputFormat, chunks: impl IntoIterator<Item = &'a str>) -> Vec<String> {
    let (mut parser, mut pieces) = (OutputParser::new(format), Pieces::default());
    for chunk in chunks {
        match chunk.strip_prefix('\0') {
            Some(name) => parser.special(name, &mut pieces),
            None => parser.push(chunk, &mut pieces),
        }
    }
    parser.finish(&mut pieces);
    described(pieces.into_vec())
}

/// Checks the deltas of the text if it arrives in one chunk, in single characters, and in each division into two or three chunks.
fn check(format: &OutputFormat, text: &str, expected: &[&str]) {
    assert_eq!(split(format, [text]), expected, "{text}");
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
    let chars = cuts.windows(2).map(|window| &text[window[0]..window[1]]);
    assert_eq!(split(format, chars), expected, "the characters of {text}");
    for (index, first) in cuts.iter().enumerate() {
        for second in &cuts[index..] {
            let chunks = [&text[..*first], &text[*first..*second], &text[*second..]];
            assert_eq!(split(format, chunks), expected, "{chunks:?}");
        }
    }
}

#[test]
fn reasoning_is_separated_from_the_answer() {
    let think = |is_open| reasoning(ReasoningParser::Think, is_open);
    for (is_open, text, expected) in [
        (false, "<think>\nbecause\n\nso\n</think>\n\nyes\n", &["thought because\n\nso", "text yes\n"][..]),
        (false, "\n<think>because</think>yes", &["thought because", "text yes"]),
        (false, "yes <think>no</think>", &["text yes <think>no</think>"]),
        (false, "<thin ice>", &["text <thin ice>"]),
        (false, "<think>endless", &["thought endless"]),
        (false, "<think>a</thin", &["thought a</thin"]),
        (false, "<think>\n\n</think>\n\nyes", &["text yes"]),
        (false, "\n\nyes", &["text \n\nyes"]),
        (false, "", &[]),
        (true, "because\n</think>\nyes</think>", &["thought because", "text yes</think>"]),
        (true, "<think>\nbecause</think>yes", &["thought because", "text yes"]),
        (true, "\n\n", &[]),
        (true, "x < y </think>", &["thought x < y "]),
    ] {
        check(&think(is_open), text, expected);
    }
    check(&reasoning(ReasoningParser::Kimi, false), "◁think▷a◁/think▷b", &["thought a", "text b"]);
    let hidden = ReasoningFormat { parser: ReasoningParser::Think, is_open: false, is_hidden: true };
    check(&OutputFormat { reasoning: hidden, ..OutputFormat::default() }, "<think>a</think>b", &["text b"]);
}

#[test]
fn calls_in_the_format_of_hermes_are_parsed() {
    let hermes = format(ToolCallParser::Hermes);
    for (text, expected) in [
        (
            "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": [1, \"}\"]}}\n</tool_call>",
            &["call 0 f", "arguments 0 {\"a\": [1, \"}\"]}"][..],
        ),
        (
            "Sure.\n<tool_call>{\"name\":\"f\",\"arguments\":{}}</tool_call>\n<tool_call>{\"name\":\"get_weather\",\"arguments\":{}}</tool_call>\n",
            &["text Sure.", "call 0 f", "arguments 0 {}", "call 1 get_weather", "arguments 1 {}"],
        ),
        ("<tool_call>{\"arguments\": {\"a\": 1}, \"name\": \"f\"}</tool_call>", &["call 0 f", "arguments 0 {\"a\":1}"]),
        ("<tool_call>{\"name\": \"f\"}</tool_call>", &["call 0 f", "arguments 0 {}"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": \"{}\"}</tool_call>", &["call 0 f", "arguments 0 {}"]),
        (
            "<tool_call>{\"name\": \"f\", \"arguments\": {}, \"id\": {\"x\": 1}}</tool_call>ok",
            &["call 0 f", "arguments 0 {}", "text ok"],
        ),
        // The model has omitted the closing brace or the closing tag.
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}</tool_call>", &["call 0 f", "arguments 0 {}"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}}", &["call 0 f", "arguments 0 {}"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool", &["call 0 f", "arguments 0 {}"]),
        // The answer has ended within the arguments.
        ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b", &["call 0 f", "arguments 0 {\"a\": \"b"]),
        // Text that is no call is content.
        (
            "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>",
            &["text <tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>"],
        ),
        ("<tool_call>no</tool_call>\n", &["text <tool_call>no</tool_call>\n"]),
        ("<tool_call>{\"name\": 7}</tool_call>", &["text <tool_call>{\"name\": 7}</tool_call>"]),
        ("<tool_call>{\"name\": \"f\", \"arguments\": 7}", &["text <tool_call>{\"name\": \"f\", \"arguments\": 7}"]),
        ("<tool_call>{\"name\": \"f\", x}", &["text <tool_call>{\"name\": \"f\", x}"]),
        ("<tool_call>{\"na", &["text <tool_call>{\"na"]),
        ("a <tool_", &["text a <tool_"]),
        ("a\n\nb\n", &["text a\n\nb\n"]),
        ("<tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}", &["text <tool_call>", "call 0 f", "arguments 0 {}"]),
    ] {
        check(&hermes, text, expected);
    }
}

#[test]
fn json_calls_without_tags_are_parsed() {
    let untagged = format(ToolCallParser::Json);
    for (text, expected) in [
        ("{\"name\": \"f\", \"parameters\": {\"a\": 1}}", &["call 0 f", "arguments 0 {\"a\": 1}"][..]),
        (
            "\n[{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"get_weather\", \"arguments\": {}}]\n",
            &["call 0 f", "arguments 0 {}", "call 1 get_weather", "arguments 1 {}"],
        ),
        ("{\"type\": \"function\", \"function\": {\"name\": \"f\", \"arguments\": {}}}", &["call 0 f", "arguments 0 {}"]),
        ("{\"name\": \"Bob\", \"parameters\": {}}", &["text {\"name\": \"Bob\", \"parameters\": {}}"]),
        ("{\"answer\": 42}", &["text {\"answer\": 42}"]),
        ("[1, 2]", &["text [1, 2]"]),
        ("a {\"name\": \"f\", \"parameters\": {}}", &["text a {\"name\": \"f\", \"parameters\": {}}"]),
        (" \n", &["text  \n"]),
    ] {
        check(&untagged, text, expected);
    }
    let llama = format(ToolCallParser::Llama3Json);
    for (text, expected) in [
        ("{\"name\": \"f\", \"parameters\": {\"a\": \"x\"}}", &["call 0 f", "arguments 0 {\"a\": \"x\"}"][..]),
        (
            "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"f\", \"parameters\": {}}",
            &["call 0 f", "arguments 0 {}", "call 1 f", "arguments 1 {}"],
        ),
        ("<|python_tag|>print(1)", &["text <|python_tag|>print(1)"]),
    ] {
        check(&llama, text, expected);
    }
}

#[test]
fn calls_in_the_format_of_mistral_are_parsed() {
    let mistral = format(ToolCallParser::Mistral);
    for (text, expected) in [
        (
            "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"a\": 1}}, {\"name\": \"f\", \"arguments\": {}}]",
            &["call 0 f", "arguments 0 {\"a\": 1}", "call 1 f", "arguments 1 {}"][..],
        ),
        (
            "Well[TOOL_CALLS]f{\"a\": 1}[TOOL_CALLS]get_weather[ARGS]{}",
            &["text Well", "call 0 f", "arguments 0 {\"a\": 1}", "call 1 get_weather", "arguments 1 {}"],
        ),
        ("[TOOL_CALLS]f[CALL_ID]a1b2c3d4e[ARGS]{\"a\": 1}", &["call 0 f", "arguments 0 {\"a\": 1}"]),
        ("[TOOL_CALLS]g{\"a\": 1}", &["text [TOOL_CALLS]g{\"a\": 1}"]),
        ("[TOOL", &["text [TOOL"]),
    ] {
        check(&mistral, text, expected);
    }
    let (mut parser, mut pieces) = (OutputParser::new(&mistral), Pieces::default());
    parser.push("[TOOL_CALLS]f{}", &mut pieces);
    let Some(Piece::ToolCall { id, .. }) = pieces.into_vec().into_iter().next() else { panic!("the first piece is the call") };
    assert!(id.len() == 9 && id.bytes().all(|byte| byte.is_ascii_alphanumeric()), "{id}");
}

#[test]
fn calls_in_the_formats_of_deepseek_and_kimi_are_parsed() {
    let deepseek = format(ToolCallParser::DeepseekV3);
    for (text, expected) in [
        (
            "Hm.\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"`\"}\n```<｜tool▁call▁end｜>\n\
             <｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            &["text Hm.", "call 0 f", "arguments 0 {\"a\": \"`\"}", "call 1 f", "arguments 1 {}"][..],
        ),
        (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            &["call 0 f", "arguments 0 {\"a\": 1}"],
        ),
        ("<｜tool▁calls▁begin｜>none", &["text <｜tool▁calls▁begin｜>none"]),
    ] {
        check(&deepseek, text, expected);
    }
    check(
        &format(ToolCallParser::KimiK2),
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{\"a\": 1}<|tool_call_end|>\
         <|tool_calls_section_end|>",
        &["call 0 f", "arguments 0 {\"a\": 1}"],
    );
}

#[test]
fn arguments_between_xml_tags_have_the_types_of_the_schema() {
    let qwen = format(ToolCallParser::Qwen3Coder);
    let call = "<tool_call>\n<function=f>\n<parameter=text>\n7\n</parameter>\n<parameter=number>\n7\n</parameter>\n<parameter=list>\n[1]\n\
                </parameter>\n<parameter=maybe>\nTrue\n</parameter>\n</function>\n</tool_call>";
    let arguments = "arguments 0 {\"text\":\"7\",\"number\":7,\"list\":[1],\"maybe\":true}";
    check(&qwen, call, &["call 0 f", arguments]);
    check(&qwen, "<function=f></function>", &["call 0 f", "arguments 0 {}"]);
    check(
        &qwen,
        "<tool_call><function=f><parameter=number>many</parameter><parameter=text>\na\nb\n</parameter></function></tool_call>x",
        &["call 0 f", "arguments 0 {\"number\":\"many\",\"text\":\"a\\nb\"}", "text x"],
    );
    check(&qwen, "<tool_call><function=g></function>", &["text <tool_call><function=g></function>"]);
    let glm = format(ToolCallParser::Glm45);
    let call = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a\nb</arg_value>\n<arg_key>number</arg_key>\n<arg_value>7</arg_value>\n</tool_call>";
    check(&glm, call, &["call 0 f", "arguments 0 {\"text\":\"a\\nb\",\"number\":7}"]);
    check(&glm, "<tool_call>f</tool_call>", &["call 0 f", "arguments 0 {}"]);
}

#[test]
fn required_calls_are_parsed_from_json_of_their_schema() {
    let forced = |choice| OutputFormat {
        reasoning: ReasoningFormat { parser: ReasoningParser::Think, is_open: true, is_hidden: false },
        tools: ToolFormat { parser: ToolCallParser::Hermes, tools: Arc::new(tools(choice)) },
    };
    let named = forced(ToolChoice::Named("f".to_owned()));
    check(&named, "hm</think>\n\n{\"a\": {}}", &["thought hm", "call 0 f", "arguments 0 {\"a\": {}}"]);
    let required = forced(ToolChoice::Required);
    check(
        &required,
        "</think>[{\"name\": \"f\", \"parameters\": {}}, {\"name\": \"f\", \"parameters\": {\"a\": 1}}]",
        &["call 0 f", "arguments 0 {}", "call 1 f", "arguments 1 {\"a\": 1}"],
    );
}

#[test]
fn answer_is_complete_after_its_only_call() {
    let mut only = tools(ToolChoice::Auto);
    only.parallel = false;
    let tools = ToolFormat { parser: ToolCallParser::Hermes, tools: Arc::new(only) };
    let format = OutputFormat { reasoning: ReasoningFormat::default(), tools };
    let call = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}</tool_call>";
    check(&format, &format!("a{call}\n{call}b"), &["text a", "call 0 f", "arguments 0 {\"a\": 1}"]);
    let (mut parser, mut pieces) = (OutputParser::new(&format), Pieces::default());
    parser.push("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1", &mut pieces);
    assert!(!parser.is_complete());
    parser.push("}", &mut pieces);
    assert!(parser.is_complete());
}

#[test]
fn special_tokens_are_tags_but_never_content() {
    let mistral = format(ToolCallParser::Mistral);
    assert_eq!(split(&mistral, ["a", "\0[TOOL_CALLS]", "f", "\0[ARGS]", "{}"]), ["text a", "call 0 f", "arguments 0 {}"]);
    assert_eq!(split(&mistral, ["a", "\0[TOOL_CALLS]", "g", "\0[ARGS]", "{}"]), ["text ag{}"]);
    assert_eq!(split(&mistral, ["a", "\0</s>", "b", "\0[ARGS]", "c"]), ["text abc"]);
    let llama = format(ToolCallParser::Llama3Json);
    assert_eq!(split(&llama, ["\0<|python_tag|>", "print(1)"]), ["text print(1)"]);
    let think = reasoning(ReasoningParser::Mistral, false);
    assert_eq!(split(&think, ["\0[THINK]", "a", "\0[INST]", "\0[/THINK]", "b", "\0[THINK]"]), ["thought a", "text b"]);
    // A call may begin although the reasoning was not closed.
    let both = OutputFormat { reasoning: reasoning(ReasoningParser::Think, true).reasoning, ..format(ToolCallParser::KimiK2) };
    let call = ["hm", "\0<|tool_call_begin|>", "functions.f:0", "\0<|tool_call_argument_begin|>", "{}", "\0<|tool_call_end|>"];
    assert_eq!(split(&both, call), ["thought hm", "call 0 f", "arguments 0 {}"]);
}

#[test]
fn special_token_within_arguments_does_not_complete_a_call() {
    let complete = |parser, chunks: &[&str]| {
        let (mut parser, mut pieces) = (OutputParser::new(&format(parser)), Pieces::default());
        for chunk in chunks {
            match chunk.strip_prefix('\0') {
                Some(name) => parser.special(name, &mut pieces),
                None => parser.push(chunk, &mut pieces),
            }
        }
        parser.finish(&mut pieces);
        parser.has_complete_calls()
    };
    for (parser, begin, end) in [
        (ToolCallParser::Hermes, "<tool_call>{\"name\": \"f\", \"arguments\": {\"text\": \"a", "\"}}</tool_call>"),
        (ToolCallParser::Llama3Json, "{\"name\": \"f\", \"parameters\": {\"text\": \"a", "\"}}"),
        (ToolCallParser::Mistral, "[TOOL_CALLS]f[ARGS]{\"text\": [1, \"a", "\"]}"),
        (ToolCallParser::Harmony, "<|channel|>commentary to=functions.f<|message|>{\"text\": \"a", "\"}"),
    ] {
        let closing = if parser == ToolCallParser::Harmony { "\0<|call|>" } else { "\0<|other|>" };
        assert!(!complete(parser, &[begin, closing]), "{parser:?}");
        assert!(complete(parser, &[begin, end, closing]), "{parser:?}");
        // A tag within a text, as a token, ends the call as well.
        assert!(!complete(parser, &[begin, "\0</tool_call>"]) || parser == ToolCallParser::Harmony, "{parser:?}");
    }
    let two = "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>";
    let cut = "<tool_call>{\"name\": \"f\", \"arguments\": {\"text\": \"";
    assert!(complete(ToolCallParser::Hermes, &[cut, "\0<|other|>", "\n", two]), "the last call counts");
}

#[test]
fn required_input_is_the_whole_answer() {
    let mut all = tools(ToolChoice::Named("f".to_owned()));
    all.list[0].input = Some(tandem_grammar::Kind::Regex("(.|\n)*".to_owned()));
    let tools = ToolFormat { parser: ToolCallParser::Hermes, tools: Arc::new(all) };
    let format = OutputFormat { reasoning: ReasoningFormat::default(), tools };
    let text = "{\"q\": \"\u{e9}\"}\n\\<tool_call>";
    let arguments = json!({ "input": text }).to_string().replace("\":\"{", "\": \"{");
    check(&format, text, &["call 0 f", &format!("arguments 0 {arguments}")]);
    check(&format, "", &[]);
    // Further deltas may hold only the end of the input.
    let ended = split(&format, [text, "\0<|im_end|>"]).concat().replace("arguments 0 \"}", "\"}");
    assert_eq!(ended, format!("call 0 farguments 0 {arguments}"));
}

#[test]
fn parsers_are_chosen_by_the_chat_template() {
    for (source, tools, thoughts) in [
        ("<tool_call>\n{\"name\"", ToolCallParser::Hermes, ReasoningParser::None),
        ("<tool_call> </think>", ToolCallParser::Hermes, ReasoningParser::Think),
        ("<tool_call>\n<function=", ToolCallParser::Qwen3Coder, ReasoningParser::None),
        ("[TOOL_CALLS] [THINK][/THINK]", ToolCallParser::Mistral, ReasoningParser::Mistral),
        ("<|python_tag|> <|eot_id|>", ToolCallParser::Llama3Json, ReasoningParser::None),
        ("<｜tool▁calls▁begin｜> </think>", ToolCallParser::DeepseekV3, ReasoningParser::Think),
        ("<tool_call>{name}\n<arg_key>", ToolCallParser::Glm45, ReasoningParser::None),
        ("{{ tools }}", ToolCallParser::Json, ReasoningParser::None),
    ] {
        assert_eq!((ToolCallParser::of_template(source), ReasoningParser::of_template(source)), (tools, thoughts), "{source}");
    }
}
