use super::*;
use crate::chat::{ReasoningParser, ToolCallParser};
use std::{collections::BTreeMap, fs, path::Path};

const HEAD: &str = "{% if tools %}{{ tools | tojson }}{% endif %}";

fn abilities(source: &str) -> Abilities {
    ChatTemplate::new(source, "", "").expect("the template compiles").abilities()
}

fn forms(null_content: bool, text_arguments: bool) -> Option<MessageForm> {
    Some(MessageForm { null_content, text_arguments, ..MessageForm::default() })
}

#[test]
fn probes_find_out_how_a_template_reads_tool_calls() {
    let qwen = "{% for m in messages %}{{ m.role + ':' + m.content }}{% for c in m.tool_calls %}{{ c.function.name }}\
                {{ c.function.arguments | tojson }}{% endfor %}{% endfor %}";
    let deepseek = "{% for m in messages %}{% if m.content is none %}{% for c in m['tool_calls'] %}\
                    {{ c['function']['name'] + '\n' + c['function']['arguments'] }}{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let text_only = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}";
    let null_only = "{% for m in messages %}{% if m.content is none %}{{ m.tool_calls | tojson }}{% else %}{{ m.content }}{% endif %}{% endfor %}";
    let mistral = "{% for m in messages %}{% if m.tool_calls is defined %}{% for c in m.tool_calls %}{% if c.id is not defined or \
                   c.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}{{ c.function | tojson }}{% endfor %}\
                   {% else %}{{ m.content }}{% endif %}{% endfor %}";
    for (source, form) in [
        (qwen, forms(false, false)),
        (deepseek, forms(true, true)),
        (text_only, forms(false, true)),
        (null_only, forms(true, false)),
        (mistral, forms(false, false)),
    ] {
        let found = abilities(&format!("{HEAD}{source}"));
        assert_eq!(found, Abilities { tools: form, ..Abilities::default() }, "{source}");
        assert_eq!(abilities(source).tools, None, "without the list of tools: {source}");
    }
}

#[test]
fn template_without_tools_or_system_message_is_recognized() {
    let plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
    assert_eq!(abilities(plain), Abilities::default());
    // The template renders the list of tools, but neither calls nor results.
    let half = format!("{HEAD}{{% for m in messages %}}{{{{ m.role }}}}{{% endfor %}}");
    assert_eq!(abilities(&half).tools, None);
    let gemma = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}";
    assert_eq!(abilities(gemma), Abilities { system: SystemPlaces::Never, ..Abilities::default() });
    assert_eq!(ChatTemplate::chatml().abilities(), Abilities::default());
}

/// The templates of real models, of which many refuse or move system messages in the middle of a conversation.
#[test]
fn system_messages_are_rendered_in_place_by_all_templates() {
    use SystemPlaces::{Anywhere, First, Never};
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci/goldens/templates");
    let mut found = BTreeMap::new();
    let files = fs::read_dir(folder).expect("the folder is readable").flatten();
    for entry in files.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "jinja")) {
        let source = fs::read_to_string(entry.path()).expect("the template is readable");
        let template = ChatTemplate::new(&source, "<s>", "</s>").expect("the template compiles");
        let name = entry.path().file_stem().expect("it is a file").to_string_lossy().into_owned();
        let abilities = template.abilities();
        let message = |(role, text): (Role, &str)| Message::new(role, text);
        let render = |messages: &[(Role, &str)], begins_answer| {
            let messages = messages.iter().copied().map(message).collect();
            let options = TemplateOptions { add_generation_prompt: begins_answer, ..TemplateOptions::default() };
            let conversation = Conversation { messages, tools: Tools::default(), template: options };
            let text = template.render(conversation.variables(abilities), 1 << 20);
            text.unwrap_or_else(|error| panic!("{name} refuses {:?}: {error:?}", conversation.messages))
        };
        let all = [
            (Role::System, "S1"),
            (Role::System, "S2"),
            (Role::User, "U1"),
            (Role::System, "S3"),
            (Role::Assistant, "A1"),
            (Role::System, "S4"),
            (Role::User, "U2"),
            (Role::System, "S5"),
            (Role::User, "U3"),
        ];
        let last = render(&all, true);
        // Mistral Nemo's template renders the system message at the head next to the last question.
        let moves_head = name == "mistral-nemo";
        let find = |text: &str| last.find(text).unwrap_or_else(|| panic!("{name} does not render {text}"));
        let places: Vec<usize> = all.iter().map(|(_, text)| find(text)).skip(if moves_head { 2 } else { 0 }).collect();
        assert!(places.is_sorted(), "{name}: {last}");
        // Each turn's prompt, without its generation prompt, is the beginning of the next turn's prompt.
        let first = render(&all[..4], false);
        assert!(moves_head || last.starts_with(first.trim_end()), "{name}:\n{first}\n\n{last}");
        found.insert(name, (abilities.system, abilities.alternates));
    }
    let expected = [
        ("qwen-3", (Anywhere, false)),
        ("qwen-3.5", (First, false)),
        ("llama-3.1", (Anywhere, false)),
        ("gemma-2", (Never, true)),
        ("mistral-nemo", (First, true)),
        ("deepseek-v3.1", (First, false)),
        ("gpt-oss", (First, false)),
    ];
    for (name, abilities) in expected {
        assert_eq!(found[name], abilities, "{name}");
    }
    assert_eq!(found.len(), 19);
}

/// An agent's turns: calls with reasoning, results, and system messages before and after the results.
#[test]
fn prompt_of_each_agent_turn_is_a_prefix_of_the_next_in_all_templates() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci/goldens/templates");
    let files = fs::read_dir(folder).expect("the folder is readable").flatten();
    let mut compared = 0;
    for entry in files.filter(|entry| entry.path().extension().is_some_and(|ending| ending == "jinja")) {
        let source = fs::read_to_string(entry.path()).expect("the template is readable");
        let template = ChatTemplate::new(&source, "<s>", "</s>").expect("the template compiles");
        let name = entry.path().file_stem().expect("it is a file").to_string_lossy().into_owned();
        let tool = Tool::function("find".to_owned(), Some("d".to_owned()), json!({ "type": "object", "properties": {} }));
        let tools = Tools { list: vec![tool], choice: ToolChoice::Auto, parallel: true };
        let id = |number: u32| Some(format!("a1b2c3d4{number}"));
        let call = |number: u32| {
            let call = ToolCall { id: id(number), name: "find".to_owned(), arguments: Map::new() };
            let reasoning = Some(format!("R{number}"));
            Message { content: None, reasoning, tool_calls: vec![call], ..Message::new(Role::Assistant, "") }
        };
        let result = |number: u32| {
            let text = format!("T{number}");
            Message { tool_call_id: id(number), name: Some("find".to_owned()), ..Message::new(Role::Tool, text) }
        };
        let system = |text: &str| Message::new(Role::System, text);
        let all = [
            system("S0"),
            Message::new(Role::User, "U1"),
            call(1),
            system("S1"),
            result(1),
            call(2),
            result(2),
            system("S2"),
            call(3),
            result(3),
        ];
        let render = |messages: &[Message]| {
            let template_options = TemplateOptions { add_generation_prompt: false, ..TemplateOptions::default() };
            let conversation = Conversation { messages: messages.to_vec(), tools: tools.clone(), template: template_options };
            let text = template.render(conversation.variables(template.abilities()), 1 << 20);
            text.unwrap_or_else(|error| panic!("{name} refuses {messages:?}: {error:?}"))
        };
        let whole = render(&all);
        // Mistral Nemo's template renders the system message at the head next to the last question, and leaves it out after a result.
        if name == "mistral-nemo" {
            continue;
        }
        for text in ["S0", "U1", "S1", "T1", "T2", "S2", "T3"] {
            assert!(whole.contains(text), "{name} does not render {text}: {whole}");
        }
        for end in [5, 8] {
            let earlier = render(&all[..end]);
            assert!(whole.starts_with(earlier.trim_end()), "{name}, {end} messages:\n{earlier}\n\n{whole}");
            compared += 1;
        }
    }
    assert_eq!(compared, 36);
}

/// A template whose answers have calls or reasoning in a format of their own must have a parser for it.
#[test]
fn templates_of_real_models_have_the_parsers_of_their_answers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci/goldens/templates");
    let expected = [
        ("deepseek-v3.1", ToolCallParser::DeepseekV3, ReasoningParser::Think),
        ("gemma-4", ToolCallParser::Gemma4, ReasoningParser::Gemma4),
        ("gpt-oss", ToolCallParser::Harmony, ReasoningParser::Harmony),
        ("hermes-3", ToolCallParser::Hermes, ReasoningParser::None),
        ("llama-3.1", ToolCallParser::Llama3Json, ReasoningParser::None),
        ("ministral-3", ToolCallParser::Mistral, ReasoningParser::Mistral),
        ("mistral-nemo", ToolCallParser::Mistral, ReasoningParser::None),
        ("mistral-small-3.2", ToolCallParser::Mistral, ReasoningParser::None),
        ("qwen-2.5", ToolCallParser::Hermes, ReasoningParser::None),
        ("qwen-3-coder", ToolCallParser::Qwen3Coder, ReasoningParser::None),
        ("qwen-3.5", ToolCallParser::Qwen3Coder, ReasoningParser::Think),
        ("qwen-3", ToolCallParser::Hermes, ReasoningParser::Think),
    ];
    for (name, calls, thoughts) in expected {
        let source = fs::read_to_string(folder.join(format!("{name}.jinja"))).expect("the template is readable");
        assert_eq!((ToolCallParser::of_template(&source), ReasoningParser::of_template(&source)), (calls, thoughts), "{name}");
        // A tool without a description is rendered.
        let template = ChatTemplate::new(&source, "<s>", "</s>").expect("the template compiles");
        let tool = Tool::function("find".to_owned(), None, json!({ "type": "object", "properties": {} }));
        let tools = Tools { list: vec![tool], choice: ToolChoice::Auto, parallel: true };
        let conversation =
            Conversation { messages: vec![Message::new(Role::User, "a")], tools, template: TemplateOptions::default() };
        let text = template.render(conversation.variables(template.abilities()), 1 << 20).expect("the template renders the tool");
        assert!(text.contains("find"), "{name}: {text}");
    }
    // gpt-oss continues the reasoning before a call when it gets the call's result.
    let source = fs::read_to_string(folder.join("gpt-oss.jinja")).expect("the template is readable");
    let template = ChatTemplate::new(&source, "", "").expect("the template compiles");
    let call = ToolCall { id: None, name: "find".to_owned(), arguments: Map::new() };
    let called =
        Message { content: None, reasoning: Some("R1".to_owned()), tool_calls: vec![call], ..Message::new(Role::Assistant, "") };
    let messages = vec![Message::new(Role::User, "a"), called, Message::new(Role::Tool, "b")];
    let conversation = Conversation { messages, tools: Tools::default(), template: TemplateOptions::default() };
    let text = template.render(conversation.variables(template.abilities()), 1 << 20).expect("the template renders the call");
    assert!(text.contains("<|channel|>analysis<|message|>R1<|end|><|start|>assistant to=functions.find"), "{text}");
}
