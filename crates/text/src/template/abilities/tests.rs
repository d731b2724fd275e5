use super::*;

const HEAD: &str = "{% if tools %}{{ tools | tojson }}{% endif %}";

fn abilities(source: &str) -> Abilities {
    ChatTemplate::new(source, "", "").expect("the template compiles").abilities()
}

fn forms(null_content: bool, text_arguments: bool) -> Option<MessageForm> {
    Some(MessageForm { null_content, text_arguments })
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
        assert_eq!(found, Abilities { tools: form, system: true }, "{source}");
        assert_eq!(abilities(source).tools, None, "without the list of tools: {source}");
    }
}

#[test]
fn template_without_tools_or_system_message_is_recognized() {
    let plain = "{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}";
    assert_eq!(abilities(plain), Abilities { tools: None, system: true });
    // The template shows the list of tools, but neither calls nor results.
    let half = format!("{HEAD}{{% for m in messages %}}{{{{ m.role }}}}{{% endfor %}}");
    assert_eq!(abilities(&half).tools, None);
    let gemma = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}{{ m.content }}{% endfor %}";
    assert_eq!(abilities(gemma), Abilities { tools: None, system: false });
    assert_eq!(ChatTemplate::chatml().abilities(), Abilities { tools: None, system: true });
}
