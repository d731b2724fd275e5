use super::*;
use crate::chat::{Conversation, Message, Role, TemplateOptions, Tools};

fn render(template: &ChatTemplate, turns: &[(Role, &str)], bytes_max: usize) -> Result<String, RenderError> {
    let messages = turns.iter().map(|(role, content)| Message::new(*role, *content)).collect();
    let conversation = Conversation { messages, tools: Tools::default(), template: TemplateOptions::default() };
    template.render(conversation.variables(template.abilities()), bytes_max)
}

#[test]
fn chatml_template_renders_roles_and_contents() {
    let turns = [(Role::System, "Be {{ brief }}."), (Role::User, "<b>Hi</b>")];
    let text = render(&ChatTemplate::chatml(), &turns, 1 << 10).expect("the template renders");
    assert_eq!(
        text,
        "<|im_start|>system\nBe {{ brief }}.<|im_end|>\n<|im_start|>user\n<b>Hi</b><|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn template_supports_python_methods_trimmed_blocks_and_raise_exception() {
    let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if m.content == 'x' %}\n{{ raise_exception('no x') }}\n\
                  {% endif %}\n{{ m.content.strip() | upper }}\n{% endfor %}";
    let template = ChatTemplate::new(source, "<s>", "</s>").expect("the template compiles");
    assert_eq!(render(&template, &[(Role::User, " hi ")], 1 << 10).expect("the template renders"), "<s>\nHI\n");
    let Err(RenderError::Refused(refused)) = render(&template, &[(Role::User, "x")], 1 << 10) else {
        panic!("the template must raise an exception");
    };
    assert_eq!(refused.detail(), Some("no x"));
}

#[test]
fn malformed_template_is_refused() {
    assert!(ChatTemplate::new("{% if %}", "", "").is_err());
}

#[test]
fn template_that_never_ends_is_refused_at_start() {
    const ROUNDS: &str = "{% for a in range(9999) %}{% for b in range(9999) %}";
    for body in ["{% set x = b %}", "text"] {
        // The template never ends, either for all conversations, or only for the test conversation that includes an answer.
        for condition in ["true", "messages | length > 2"] {
            let source = format!("{{% if {condition} %}}{ROUNDS}{body}{{% endfor %}}{{% endfor %}}{{% endif %}}");
            let refused = ChatTemplate::new(&source, "", "").map(drop).expect_err(&source);
            assert!(matches!(refused, ServedModelError::TemplateEndless(..)), "{refused}");
        }
    }
}

#[test]
fn quadratic_rendering_ends_at_its_step_limit() {
    let source = "{% for m in messages %}{% for o in messages %}{% set x = o.content %}{% endfor %}{% endfor %}x";
    let template = ChatTemplate::new(source, "", "").expect("the template ends for few messages");
    let turns: Vec<_> = (0..16_384).map(|_| (Role::User, "")).collect();
    assert!(render(&template, &turns[..100], 1).is_ok());
    assert!(matches!(render(&template, &turns, 1), Err(RenderError::Exhausted)));
}

#[test]
fn rendering_beyond_its_byte_limit_is_refused() {
    let source = "{% for m in messages %}{% for n in range(1000) %}{{ m.content }}{% endfor %}{% endfor %}";
    let template = ChatTemplate::new(source, "", "").expect("the template ends for short messages");
    let content = "x".repeat(1 << 20);
    let bomb = [(Role::User, content.as_str())];
    assert!(matches!(render(&template, &bomb, 4 << 20), Err(RenderError::TooLong)));
    assert_eq!(render(&template, &[(Role::User, "ab")], 2_000).expect("the text is exactly as long as the limit").len(), 2_000);
}

#[test]
fn longest_conversation_stays_within_the_step_limit() {
    let turns: Vec<_> = (0..16_384).map(|turn| ([Role::User, Role::Assistant][turn % 2], "ab")).collect();
    assert!(render(&ChatTemplate::chatml(), &turns, 1 << 20).is_ok());
}
