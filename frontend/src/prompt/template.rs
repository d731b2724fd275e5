//! A conversation to the one text a model was trained on.

use minijinja::{Environment, Error, ErrorKind, context, syntax::SyntaxConfig, value::Serde};
use serde::Serialize;

/// ChatML, the form `--engine sim` talks.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const NAME: &str = "chat";

/// A model's chat template, compiled.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// A turn of a conversation.
#[derive(Serialize)]
pub(crate) struct Turn<'a> {
    /// `system`, `user` or `assistant`.
    pub(crate) role: &'static str,
    /// Always a text: templates cannot be trusted with anything else.
    pub(crate) content: &'a str,
}

impl ChatTemplate {
    /// Compiles a template as Hugging Face renders it: blocks take their line end with them, Python's methods work.
    pub(crate) fn new(source: &str, bos: &str, eos: &str) -> Result<Self, Error> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source.to_owned())?;
        Ok(Self { environment, bos: bos.to_owned(), eos: eos.to_owned() })
    }

    /// The template of `--engine sim`.
    pub(crate) fn chatml() -> Self {
        Self::new(CHATML, "", "<|im_end|>").expect("the built-in template compiles")
    }

    /// The conversation's text, up to where the assistant's next turn begins. Fails when the template refuses the conversation.
    pub(crate) fn render(&self, turns: &[Turn<'_>]) -> Result<String, Error> {
        self.environment.get_template(NAME)?.render(context! {
            messages => Serde(turns),
            add_generation_prompt => true,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_conversation_in_chatml() {
        let turns = [Turn { role: "system", content: "Be {{ brief }}." }, Turn { role: "user", content: "<b>Hi</b>" }];
        let text = ChatTemplate::chatml().render(&turns).expect("it renders");
        assert_eq!(
            text,
            "<|im_start|>system\nBe {{ brief }}.<|im_end|>\n<|im_start|>user\n<b>Hi</b><|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn python_methods_trimmed_blocks_and_refusals() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'system' %}\n{{ raise_exception('no system') }}\n\
                      {% endif %}\n{{ m.content.strip() | upper }}\n{% endfor %}";
        let template = ChatTemplate::new(source, "<s>", "</s>").expect("it compiles");
        assert_eq!(template.render(&[Turn { role: "user", content: " hi " }]).expect("it renders"), "<s>\nHI\n");
        let refused = template.render(&[Turn { role: "system", content: "x" }]).expect_err("it raises");
        assert_eq!(refused.detail(), Some("no system"));
    }

    #[test]
    fn a_broken_template_is_refused() {
        assert!(ChatTemplate::new("{% if %}", "", "").is_err());
    }
}
