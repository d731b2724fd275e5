//! Renders a conversation with a model's chat template.

use crate::model::error::ServedModelError;
use minijinja::{Environment, Error, ErrorKind, context, syntax::SyntaxConfig, value::Serde};
use serde::Serialize;
use std::io;

/// The template of ChatML, the conversation format of `--engine sim`.
const CHATML: &str = "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}\
     {% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

const NAME: &str = "chat";

/// The maximum number of instructions for one rendering. The templates of the supported families need fewer than 300 per message. This
/// limit allows 600 per message for the maximum number of messages; executing it takes about half a second.
const STEPS_MAX: u64 = 10_000_000;
/// The maximum text size for the short conversations with which [`ChatTemplate::new`] tests a template. Templates with a built-in system
/// message write a few KB.
const PROBE_BYTES_MAX: usize = 1 << 20;

/// A model's chat template, compiled.
pub(crate) struct ChatTemplate {
    environment: Environment<'static>,
    bos: String,
    eos: String,
}

/// One message of a conversation.
#[derive(Serialize)]
pub(crate) struct Turn<'a> {
    /// `system`, `user` or `assistant`.
    pub(crate) role: &'static str,
    pub(crate) content: &'a str,
}

/// Why a conversation cannot be rendered.
#[derive(Debug)]
pub(crate) enum RenderError {
    /// The template refuses the conversation, or its execution fails.
    Refused(Error),
    /// The template executes more than [`STEPS_MAX`] instructions.
    Steps,
    /// The text is longer than the caller allows.
    TooLong,
}

/// A writer that fails beyond `max` bytes.
struct Bounded {
    bytes: Vec<u8>,
    max: usize,
}

impl io::Write for Bounded {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        if self.bytes.len() + text.len() > self.max {
            return Err(io::ErrorKind::FileTooLarge.into());
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl ChatTemplate {
    /// Compiles a template with Hugging Face's settings: the line end after a block tag is trimmed, and methods of Python's types work. To
    /// detect a template that does not end, renders two short conversations, which the template may refuse.
    ///
    /// # Errors
    /// The template does not compile, or exceeds the limits for a short conversation.
    pub(crate) fn new(source: &str, bos: &str, eos: &str) -> Result<Self, ServedModelError> {
        let mut environment = Environment::new();
        environment.set_syntax(SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.set_fuel(Some(STEPS_MAX));
        environment.add_template_owned(NAME, source.to_owned())?;
        let template = Self { environment, bos: bos.to_owned(), eos: eos.to_owned() };
        let turns = ["system", "user", "assistant", "user"].map(|role| Turn { role, content: "a" });
        for probe in [&turns[..], &turns[1..2]] {
            if let Err(RenderError::Steps | RenderError::TooLong) = template.render(probe, PROBE_BYTES_MAX) {
                return Err(ServedModelError::TemplateEndless(STEPS_MAX, PROBE_BYTES_MAX));
            }
        }
        Ok(template)
    }

    /// Returns the template of `--engine sim`.
    pub(crate) fn chatml() -> Self {
        Self::new(CHATML, "", "<|im_end|>").expect("the built-in template compiles")
    }

    /// Renders the conversation, followed by the beginning of the assistant's next message. The text has at most `bytes_max` bytes.
    ///
    /// # Errors
    /// The template refuses the conversation, or exceeds [`STEPS_MAX`] or `bytes_max`.
    pub(crate) fn render(&self, turns: &[Turn<'_>], bytes_max: usize) -> Result<String, RenderError> {
        let context = context! {
            messages => Serde(turns),
            add_generation_prompt => true,
            bos_token => self.bos.as_str(),
            eos_token => self.eos.as_str(),
        };
        let mut text = Bounded { bytes: Vec::new(), max: bytes_max };
        let rendered = self.environment.get_template(NAME).and_then(|template| template.render_captured_to(context, &mut text));
        match rendered.map_err(|error| (error.kind(), error)) {
            Ok(_) => Ok(String::from_utf8(text.bytes).expect("templates write whole strings")),
            Err((ErrorKind::OutOfFuel, _)) => Err(RenderError::Steps),
            Err((ErrorKind::WriteFailure, _)) => Err(RenderError::TooLong),
            Err((_, error)) => Err(RenderError::Refused(error)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chatml_template_renders_roles_and_contents() {
        let turns = [Turn { role: "system", content: "Be {{ brief }}." }, Turn { role: "user", content: "<b>Hi</b>" }];
        let text = ChatTemplate::chatml().render(&turns, 1 << 10).expect("the template renders");
        assert_eq!(
            text,
            "<|im_start|>system\nBe {{ brief }}.<|im_end|>\n<|im_start|>user\n<b>Hi</b><|im_end|>\n<|im_start|>assistant\n"
        );
    }

    #[test]
    fn template_supports_python_methods_trimmed_blocks_and_raise_exception() {
        let source = "{{ bos_token }}\n{% for m in messages %}\n    {% if m.role == 'system' %}\n{{ raise_exception('no system') }}\n\
                      {% endif %}\n{{ m.content.strip() | upper }}\n{% endfor %}";
        let template = ChatTemplate::new(source, "<s>", "</s>").expect("the template compiles");
        assert_eq!(
            template.render(&[Turn { role: "user", content: " hi " }], 1 << 10).expect("the template renders"),
            "<s>\nHI\n"
        );
        let Err(RenderError::Refused(refused)) = template.render(&[Turn { role: "system", content: "x" }], 1 << 10) else {
            panic!("the template must raise an exception");
        };
        assert_eq!(refused.detail(), Some("no system"));
    }

    #[test]
    fn malformed_template_is_refused() {
        assert!(ChatTemplate::new("{% if %}", "", "").is_err());
    }

    #[test]
    fn template_that_never_ends_is_refused_at_start() {
        const ROUNDS: &str = "{% for a in range(9999) %}{% for b in range(9999) %}";
        for body in ["{% set x = b %}", "text"] {
            // The template never ends, either for all conversations or only for the test conversation that includes an answer.
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
        let turns: Vec<_> = (0..16_384).map(|_| Turn { role: "user", content: "" }).collect();
        assert!(template.render(&turns[..100], 1).is_ok());
        assert!(matches!(template.render(&turns, 1), Err(RenderError::Steps)));
    }

    #[test]
    fn rendering_beyond_its_byte_limit_is_refused() {
        let source = "{% for m in messages %}{% for n in range(1000) %}{{ m.content }}{% endfor %}{% endfor %}";
        let template = ChatTemplate::new(source, "", "").expect("the template ends for short messages");
        let content = "x".repeat(1 << 20);
        let bomb = [Turn { role: "user", content: &content }];
        assert!(matches!(template.render(&bomb, 4 << 20), Err(RenderError::TooLong)));
        assert_eq!(
            template
                .render(&[Turn { role: "user", content: "ab" }], 2_000)
                .expect("the text is exactly as long as the limit")
                .len(),
            2_000
        );
    }

    #[test]
    fn longest_conversation_stays_within_the_step_limit() {
        let turns: Vec<_> = (0..16_384).map(|turn| Turn { role: ["user", "assistant"][turn % 2], content: "ab" }).collect();
        assert!(ChatTemplate::chatml().render(&turns, 1 << 20).is_ok());
    }
}
