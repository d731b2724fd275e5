//! Calls and reasoning in the formats of single models, and repairs of arguments.

use super::*;

#[test]
fn arguments_with_one_meaning_become_json() {
    let hermes = format(ToolCallParser::Hermes);
    for (written, arguments) in [
        ("{\"a\": \"l1\nl2\tl3\"}", r#"{"a": "l1\nl2\tl3"}"#),
        (r#"{"a": None, "b": [True, False, NaN, -Infinity]}"#, r#"{"a": null, "b": [true, false, null, null]}"#),
        (r#"{"a": 1, "b": [2, ], }"#, r#"{"a": 1, "b": [2 ] }"#),
        (r#"{'a': 'it\'s "b"'}"#, r#"{"a": "it's \"b\""}"#),
        (r#"{"a": "\d+\.\u00e9 \u12 \x"}"#, r#"{"a": "\\d+\\.\u00e9 \\u12 \\x"}"#),
        (r#"{"a": -1.5e3, "b": "None, }"}"#, r#"{"a": -1.5e3, "b": "None, }"}"#),
    ] {
        let call = ["call 0 f".to_owned(), format!("arguments 0 {arguments}")];
        let expected: Vec<&str> = call.iter().map(String::as_str).collect();
        check(&hermes, &format!("<tool_call>{{\"name\": \"f\", \"arguments\": {written}}}</tool_call>"), &expected);
        assert!(serde_json::from_str::<Value>(arguments).is_ok(), "{arguments}");
    }
    // What has no meaning is copied up to the end of the object, so that nothing leaks into the content.
    let broken = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": maybe <b>, \"c\": 1}}</tool_call>x";
    check(&hermes, broken, &["call 0 f", "arguments 0 {\"a\": maybe <b>, \"c\": 1}", "text x"]);
    // A closing tag ends arguments that are not complete.
    let cut = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": [1, 2</tool_call>x";
    check(&hermes, cut, &["call 0 f", "arguments 0 {\"a\": [1, 2]}", "text x"]);
    let quoted = "<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"</tool_call>\"}}</tool_call>";
    check(&hermes, quoted, &["call 0 f", "arguments 0 {\"a\": \"</tool_call>\"}"]);
    check(&hermes, "<tool_call>{'name': 'f', 'arguments': {'a': True}}</tool_call>", &["call 0 f", "arguments 0 {\"a\":true}"]);
}

#[test]
fn tags_within_a_value_belong_to_the_value() {
    let qwen = format(ToolCallParser::Qwen3Coder);
    let call = |body: &str| format!("<tool_call>\n<function=f>\n{body}\n</function>\n</tool_call>");
    for (body, arguments) in [
        ("<parameter=text>\ndef a(): return '</function>' # x\n</parameter>", r#"{"text":"def a(): return '</function>' # x"}"#),
        ("<parameter=text>\ndoc: <parameter=number> 3\n</parameter>", r#"{"text":"doc: <parameter=number> 3"}"#),
        ("<parameter=text>\na</parameter> b\n\n</parameter>\n", r#"{"text":"a</parameter> b\n"}"#),
        (
            "<parameter=text>\n</tool_call>\n</parameter>\n<parameter=number>1</parameter>",
            r#"{"text":"</tool_call>","number":1}"#,
        ),
        // Closing tags are omitted.
        ("<parameter=text>\na\n<parameter=number>\n3", r#"{"text":"a","number":3}"#),
        ("<parameter=text>", r#"{"text":""}"#),
    ] {
        check(&qwen, &call(body), &["call 0 f", &format!("arguments 0 {arguments}")]);
    }
    let without_end = "<tool_call><function=f>\n<parameter=text>\na\n</parameter>\n</tool_call>x";
    check(&qwen, without_end, &["call 0 f", "arguments 0 {\"text\":\"a\"}", "text x"]);
    // An element without a proper name is no argument.
    let unnamed = call("<parameter=number>7</parameter>\n<parameter=\necho hi\n</parameter>");
    check(&qwen, &unnamed, &["call 0 f", "arguments 0 {\"number\":7}", "text <parameter=\necho hi\n</parameter>"]);
    // A line feed within a tag ends it.
    check(&qwen, "<function=f\n></function>", &["text <function=f\n></function>"]);
    let broken = call("<parameter=text\n>a</parameter>");
    check(&qwen, &broken, &["call 0 f", "arguments 0 {}", "text <parameter=text\n>a</parameter>"]);
    // The answer ends within a value.
    check(&qwen, "<tool_call><function=f><parameter=text>\na</par", &["call 0 f", "arguments 0 {\"text\":\"a</par"]);
    check(&qwen, "<function=f><parameter=number>1", &["call 0 f", "arguments 0 {\"number\":1"]);
    let glm = format(ToolCallParser::Glm45);
    let said = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>say </tool_call> now</arg_value>\n</tool_call>x";
    check(&glm, said, &["call 0 f", "arguments 0 {\"text\":\"say </tool_call> now\"}", "text x"]);
    let unclosed = "<tool_call>f\n<arg_key>text</arg_key>\n<arg_value>a\n</tool_call>";
    check(&glm, unclosed, &["call 0 f", "arguments 0 {\"text\":\"a\"}"]);
}

#[test]
fn call_that_ends_within_a_tag_does_not_look_complete() {
    let qwen = format(ToolCallParser::Qwen3Coder);
    for (end, arguments) in [
        ("<parameter=te", "{<parameter=te"),
        ("<parameter=text>\na\n</parameter>\n<para", "{\"text\":\"a\",<para"),
        // The end of the call means nothing else.
        ("<parameter=text>\na\n</parameter>\n</func", "{\"text\":\"a\"}"),
        ("<parameter=text>\na\n</parameter>\n", "{\"text\":\"a\"}"),
    ] {
        check(&qwen, &format!("<function=f>\n{end}"), &["call 0 f", &format!("arguments 0 {arguments}")]);
    }
}

#[test]
fn line_feeds_around_a_value_belong_to_it_unless_the_template_writes_them() {
    for (parser, begin, end) in [
        (ToolCallParser::Glm45, "<tool_call>f<arg_key>text</arg_key><arg_value>", "</arg_value></tool_call>"),
        (ToolCallParser::MinimaxM2, "<minimax:tool_call><invoke name=\"f\"><parameter name=\"text\">", "</parameter></invoke>"),
        (
            ToolCallParser::DeepseekV32,
            "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"text\">",
            "</｜DSML｜parameter></｜DSML｜invoke>",
        ),
        (ToolCallParser::Qwen3Coder, "<function=f><parameter=text>\n", "\n</parameter></function>"),
    ] {
        check(&format(parser), &format!("{begin}\na\n{end}"), &["call 0 f", "arguments 0 {\"text\":\"\\na\\n\"}"]);
    }
}

#[test]
fn calls_without_arguments_and_lists_of_calls_are_parsed() {
    let deepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜><｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>";
    let two = ["call 0 f", "arguments 0 {}", "call 1 f", "arguments 1 {}"];
    check(&format(ToolCallParser::DeepseekV3), deepseek, &two);
    let kimi = "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|> <|tool_call_end|><|tool_calls_section_end|>x";
    check(&format(ToolCallParser::KimiK2), kimi, &["call 0 f", "arguments 0 {}", "text x"]);
    let hermes = format(ToolCallParser::Hermes);
    let call = "{\"name\": \"f\", \"arguments\": {}}";
    for between in [format!("{call}\n{call}\n"), format!("[{call}, {call}]")] {
        check(&hermes, &format!("<tool_call>{between}</tool_call>"), &two);
    }
    check(&hermes, &format!("<tool_call>{call}, x"), &["call 0 f", "arguments 0 {}", "text , x"]);
}

#[test]
fn text_arguments_between_tags_are_written_while_they_arrive() {
    let qwen = format(ToolCallParser::Qwen3Coder);
    let (mut parser, mut pieces) = (OutputParser::new(&qwen), Pieces::default());
    parser.push("<tool_call>\n<function=f>\n<parameter=text>\nfirst line\nsecond", &mut pieces);
    assert_eq!(described(pieces.into_vec()), ["call 0 f", "arguments 0 {\"text\":\"first line\\nsecond"]);
}

#[test]
fn values_between_tags_have_types_of_their_schema() {
    let schema = json!({
        "properties": {
            "reference": { "$ref": "#/$defs/K" }, "number": { "anyOf": [{ "$ref": "#/$defs/N" }, { "type": "null" }] },
            "all": { "allOf": [{ "$ref": "#/$defs/K" }] }, "any": {}, "choice": { "enum": [1, 2] }, "const": { "const": 5 },
            "flag": { "type": "boolean" }, "list": { "type": "array" }, "count": { "type": "integer" }, "text": { "enum": ["1", "2"] },
            "endless": { "$ref": "#/properties/endless" },
        },
        "$defs": { "K": { "type": "object" }, "N": { "type": "integer" } },
    });
    let tool = Tool::function("g".to_owned(), None, schema);
    let tools = Arc::new(Tools { list: vec![tool], choice: ToolChoice::Auto, parallel: true });
    let format = |parser| OutputFormat { tools: ToolFormat { parser, tools: Arc::clone(&tools) }, ..OutputFormat::default() };
    for (name, written, value) in [
        ("reference", "{\"a\": 1}", json!({ "a": 1 })),
        ("number", "7", json!(7)),
        ("number", "None", json!(null)),
        ("all", "{'a': True}", json!({ "a": true })),
        ("any", "[1]", json!([1])),
        ("any", "plain", json!("plain")),
        ("choice", "2", json!(2)),
        ("const", "5", json!(5)),
        ("flag", "TRUE", json!(true)),
        ("list", "['a', 'b']", json!(["a", "b"])),
        ("list", "None", json!(null)),
        ("count", "5.0", json!(5)),
        ("count", "5.5", json!("5.5")),
        ("count", "", json!("")),
        ("text", "1", json!("1")),
        ("endless", "1", json!(1)),
        ("unknown", "1", json!("1")),
    ] {
        for (parser, call) in [
            (ToolCallParser::Qwen3Coder, format!("<function=g><parameter={name}>{written}</parameter></function>")),
            (ToolCallParser::Glm45, format!("<tool_call>g<arg_key>{name}</arg_key><arg_value>{written}</arg_value></tool_call>")),
        ] {
            let arguments = format!("arguments 0 {}", json!({ name: value }));
            check(&format(parser), &call, &["call 0 g", &arguments]);
        }
    }
}

#[test]
fn calls_in_the_formats_of_minimax_and_deepseek_v32_are_parsed() {
    let minimax = "Yes.\n<minimax:tool_call>\n<invoke name=\"f\">\n<parameter name=\"text\">a</parameter>\n<parameter name=\"number\">7</parameter>\n\
                   </invoke>\n<invoke name=\"f\">\n</invoke>\n</minimax:tool_call>";
    let expected = ["text Yes.", "call 0 f", "arguments 0 {\"text\":\"a\",\"number\":7}", "call 1 f", "arguments 1 {}"];
    check(&format(ToolCallParser::MinimaxM2), minimax, &expected);
    let deepseek = "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"text\" string=\"true\">7</｜DSML｜parameter>\n\
                    <｜DSML｜parameter name=\"number\" string=\"false\">7</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>";
    check(&format(ToolCallParser::DeepseekV32), deepseek, &["call 0 f", "arguments 0 {\"text\":\"7\",\"number\":7}"]);
}

#[test]
fn calls_and_reasoning_in_the_format_of_gemma_4_are_parsed() {
    let thinking = ReasoningFormat { parser: ReasoningParser::Gemma4, is_open: false, is_hidden: false };
    let gemma = OutputFormat { reasoning: thinking, ..format(ToolCallParser::Gemma4) };
    for (text, expected) in [
        (
            "<|channel>thought\nhm\n<channel|>Yes.<|tool_call>call:f{text:<|\"|>a \"b\"\n<|\"|>,number:7,list:[1,{k:<|\"|>v<|\"|>}],maybe:None}<tool_call|>",
            &[
                "thought hm",
                "text Yes.",
                "call 0 f",
                "arguments 0 {\"text\":\"a \\\"b\\\"\\n\",\"number\":7,\"list\":[1,{\"k\":\"v\"}],\"maybe\":null}",
            ][..],
        ),
        (
            "<|tool_call>call:f{}<tool_call|><|tool_call>call:f{text:bare word}<tool_call|>",
            &["call 0 f", "arguments 0 {}", "call 1 f", "arguments 1 {\"text\":\"bare word\"}"],
        ),
        ("<|tool_call>call:f{\"text\":\"a\",list:[1,],}<tool_call|>", &["call 0 f", "arguments 0 {\"text\":\"a\",\"list\":[1]}"]),
        ("<|tool_call>call:f{list:[1<tool_call|>x", &["call 0 f", "arguments 0 {\"list\":[1]}", "text x"]),
        ("<|tool_call>call:g{}<tool_call|>", &["text <|tool_call>call:g{}<tool_call|>"]),
        ("<|channel>thought", &["thought thought"]),
    ] {
        check(&gemma, text, expected);
    }
    let chunks = ["\0<|tool_call>", "call:f{text:", "\0<|\"|>", "a", "\0<|\"|>", "}", "\0<tool_call|>", "\0<|tool_response>"];
    assert_eq!(split(&gemma, chunks), ["call 0 f", "arguments 0 {\"text\":\"a\"}"]);
}

#[test]
fn messages_of_harmony_are_reasoning_content_and_calls() {
    let harmony = format(ToolCallParser::Harmony);
    for (text, expected) in [
        (
            "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Hello!<|return|>",
            &["thought hm", "text Hello!"][..],
        ),
        (
            "<|channel|>analysis<|message|>need f<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"text\": \"x\"}<|call|>",
            &["thought need f", "call 0 f", "arguments 0 {\"text\": \"x\"}"],
        ),
        (" to=functions.f<|channel|>commentary json<|message|><|call|>", &["call 0 f", "arguments 0 {}"]),
        (
            "<|channel|>commentary<|message|>I will call it.<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{\"a\": ",
            &["text I will call it.", "call 0 f", "arguments 0 {\"a\": "],
        ),
        ("<|channel|>commentary to=functions.g<|message|>{}<|call|>", &["text {}"]),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>\
             <|start|>assistant<|channel|>commentary<|message|>c<|end|><|start|>assistant<|channel|>final<|message|>d<|return|>",
            &["thought a\nb", "text c\nd"],
        ),
        ("no header", &["text no header"]),
        ("<|channel|>final<|message|>a < b", &["text a < b"]),
        ("<|chan", &[]),
    ] {
        check(&harmony, text, expected);
    }
    let chunks = [
        "\0<|channel|>",
        "analysis",
        "\0<|message|>",
        "hm",
        "\0<|end|>",
        "\0<|start|>",
        "assistant",
        "\0<|channel|>",
        "final",
        "\0<|message|>",
        "Hi",
    ];
    assert_eq!(split(&harmony, chunks), ["thought hm", "text Hi"]);
    let (mut parser, mut pieces) = (OutputParser::new(&harmony), Pieces::default());
    parser.push("<|channel|>analysis<|message|>h", &mut pieces);
    assert!(parser.is_reasoning());
    // The constraint of a required call begins in the last channel.
    let required = OutputFormat {
        tools: ToolFormat { parser: ToolCallParser::Harmony, tools: Arc::new(tools(ToolChoice::Required)) },
        ..OutputFormat::default()
    };
    assert_eq!(required.reasoning_end(), Some("<|channel|>final<|message|>"));
    let text = "<|channel|>analysis<|message|>h<|end|><|start|>assistant<|channel|>final<|message|>[{\"name\": \"f\", \"parameters\": {}}]";
    check(&required, text, &["thought h", "call 0 f", "arguments 0 {}"]);
    let announced =
        text.replace("<|start|>assistant<|channel|>final", "<|channel|>commentary<|message|>a<|end|><|channel|>final");
    check(&required, &announced, &["thought h", "text a", "call 0 f", "arguments 0 {}"]);
}

#[test]
fn call_within_reasoning_that_is_not_closed_is_a_call() {
    let qwen =
        OutputFormat { reasoning: reasoning(ReasoningParser::Think, true).reasoning, ..format(ToolCallParser::Qwen3Coder) };
    for (text, expected) in [
        (
            "hm I call\n<tool_call>\n<function=f>\n</function>\n</tool_call>",
            &["thought hm I call", "call 0 f", "arguments 0 {}"][..],
        ),
        ("hm <tool_call> no</think>yes", &["thought hm <tool_call> no", "text yes"]),
        (
            "hm <tool_call><function=f></function></tool_call> but no</think>yes",
            &["thought hm <tool_call><function=f></function></tool_call> but no", "text yes"],
        ),
        (
            "hm <tool_call><function=f></function></tool_call> but",
            &["thought hm <tool_call><function=f></function></tool_call> but"],
        ),
        ("hm <tool_call><function=g></function>", &["thought hm <tool_call><function=g></function>"]),
        ("hm <tool_call><function=f><parameter=text>cut", &["thought hm <tool_call><function=f><parameter=text>cut"]),
        ("hm <tool", &["thought hm <tool"]),
    ] {
        check(&qwen, text, expected);
    }
}
