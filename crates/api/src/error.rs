//! Why a request is refused before it runs.

use serde_json::Error as JsonError;
use std::borrow::Cow;

/// The reason that a request cannot be read, checked or encoded. All but the last two are faults of the client.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the variants and their fields")]
pub enum RequestError {
    #[error("The body is not valid JSON: {0}.")]
    Json(#[source] JsonError),
    #[error("The body is not valid UTF-8 (at byte {at}).")]
    Utf8 { at: usize },
    #[error("The body must be a JSON object.")]
    NoObject,
    #[error("The body is nested too deeply: at most {max} levels are allowed.")]
    Nesting { max: usize },
    #[error("The body has more than {max} JSON values (counted by commas and brackets); split it into several requests.")]
    Elements { max: usize },
    #[error("Invalid type or value for '{param}': {}.", in_json_words(.source))]
    Type { param: String, source: JsonError },
    #[error("'{param}' {problem}.")]
    Invalid { param: String, problem: Problem },
    #[error("The model has no chat template; use /v1/completions.")]
    NoChatTemplate { param: &'static str },
    #[error("The model's chat template refuses these messages: {}.", .source.detail().unwrap_or("the template failed"))]
    Template { param: &'static str, source: minijinja::Error },
    #[error(
        "The model's chat template takes too many steps, too much memory or too much time for these messages; send fewer or shorter messages."
    )]
    TemplateExhausted { param: &'static str },
    /// The message is the same as OpenAI's, because some clients search for it.
    #[error(
        "This model's maximum context length is {context_length} tokens. However, you requested {} tokens ({prompt_tokens} in the \
         {}, {new_tokens} in the completion). Please reduce the length of the {} or completion.",
        u64::from(*.prompt_tokens) + u64::from(*.new_tokens), .prompt, .prompt
    )]
    ContextLength {
        context_length: u32,
        prompt_tokens: u32,
        new_tokens: u32,
        /// What the message calls the prompt.
        prompt: &'static str,
        param: &'static str,
    },
    #[error(
        "This model's maximum context length is {context_length} tokens. However, your {prompt} resulted in at least {tokens_min} \
         tokens. Please reduce the length of the {prompt}."
    )]
    PromptLength { context_length: u32, tokens_min: usize, prompt: &'static str, param: &'static str },
    #[error("The server that reads the images refuses these messages: {message}.")]
    Renderer { message: String },
    #[error("Too many requests are running; try again shortly.")]
    Busy,
    #[error("The server failed to process the request; its log says why.")]
    Failed,
}

/// The problem with a field. In the error message, this text follows the field's name.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages describe the variants and their fields")]
pub enum Problem {
    #[error("is required")]
    Missing,
    #[error("must be {allowed}, but is {found}")]
    Range { allowed: &'static str, found: f64 },
    #[error("must not be empty")]
    Empty,
    #[error("must not be below {best}, the priority of this API key, but is {found}; lower values are served earlier")]
    Priority { best: i32, found: i32 },
    #[error("must have at most {max} {unit}")]
    TooMany { max: usize, unit: &'static str },
    #[error("must be one of {allowed}")]
    Choice { allowed: &'static str },
    #[error("must contain only token ids below {vocab_size}, the size of the vocabulary")]
    Vocabulary { vocab_size: usize },
    #[error("{rule}")]
    Rule { rule: &'static str },
    #[error("cannot be combined with '{other}'")]
    Conflict { other: String },
    #[error("cannot be enforced: {problem}")]
    Constraint { problem: String },
    #[error("is a part of type '{kind}', but the model reads only text; send parts of type 'text'")]
    Part { kind: String },
    #[error("is '{kind}', but this server supports only tools of type 'function'")]
    ToolType { kind: String },
    #[error("is a block of type '{kind}', which this server does not read here; send text")]
    Block { kind: String },
    #[error("is not supported by this server; leave it out")]
    Unsupported,
    #[error("is not supported by this server, which renders messages with the model's own chat template; leave it out")]
    Template,
}

impl RequestError {
    /// Returns an error of the field `param`.
    pub fn invalid(param: impl Into<String>, problem: Problem) -> Self {
        Self::Invalid { param: param.into(), problem }
    }

    /// Returns the error of a field that is within this object.
    pub(crate) fn within(self, object: &str) -> Self {
        match self {
            Self::Invalid { param, problem } => Self::Invalid { param: format!("{object}.{param}"), problem },
            other => other,
        }
    }

    /// Returns the field at fault, if the error is of one field.
    pub fn param(&self) -> Option<&str> {
        match self {
            Self::Type { param, .. } | Self::Invalid { param, .. } => Some(param),
            Self::ContextLength { param, .. }
            | Self::PromptLength { param, .. }
            | Self::NoChatTemplate { param }
            | Self::Template { param, .. }
            | Self::TemplateExhausted { param } => Some(param),
            Self::Json(_) | Self::Utf8 { .. } | Self::NoObject | Self::Nesting { .. } | Self::Elements { .. } => None,
            Self::Renderer { .. } | Self::Busy | Self::Failed => None,
        }
    }

    /// Returns the code by which programs recognise the error.
    pub fn code(&self) -> &'static str {
        match self {
            Self::Json(_) => "invalid_json",
            Self::Utf8 { .. } => "invalid_utf8",
            Self::NoObject | Self::Type { .. } => "invalid_type",
            Self::Nesting { .. } => "nesting_too_deep",
            Self::Elements { .. } => "too_many_values",
            Self::Invalid { problem, .. } => problem.code(),
            Self::NoChatTemplate { .. } => "unsupported_value",
            Self::Template { .. } => "invalid_value",
            Self::TemplateExhausted { .. } => "too_many",
            Self::ContextLength { .. } | Self::PromptLength { .. } => "context_length_exceeded",
            Self::Renderer { .. } => "image_refused",
            Self::Busy => "overloaded",
            Self::Failed => "internal_error",
        }
    }
}

impl Problem {
    fn code(&self) -> &'static str {
        match self {
            Self::Missing => "missing_required_parameter",
            Self::Range { .. }
            | Self::Choice { .. }
            | Self::Vocabulary { .. }
            | Self::Rule { .. }
            | Self::Conflict { .. }
            | Self::Constraint { .. }
            | Self::Priority { .. } => "invalid_value",
            Self::Empty => "empty_value",
            Self::TooMany { .. } => "too_many",
            Self::Unsupported | Self::Template => "unsupported_parameter",
            Self::Block { .. } | Self::Part { .. } | Self::ToolType { .. } => "unsupported_value",
        }
    }
}

/// Checks that a length or number is at most `max`.
///
/// # Errors
/// `found` is greater than `max`.
pub fn at_most(param: &str, found: usize, max: usize, unit: &'static str) -> Result<(), RequestError> {
    if found > max { Err(RequestError::invalid(param, Problem::TooMany { max, unit })) } else { Ok(()) }
}

/// Shortens a client's text that is to be quoted in an error.
pub fn shortened(text: &str) -> Cow<'_, str> {
    const BYTES_MAX: usize = 1000;
    if text.len() <= BYTES_MAX { text.into() } else { format!("{}…", &text[..text.floor_char_boundary(BYTES_MAX)]).into() }
}

/// Returns serde's error message with JSON type names in place of Rust's.
fn in_json_words(error: &JsonError) -> String {
    let text = error.to_string();
    let Some((found, (expected, place))) =
        text.rsplit_once("expected ").and_then(|(found, rest)| Some((found, rest.split_once(" at line ")?)))
    else {
        return text;
    };
    let expected = match expected {
        "i64" => "a whole number",
        "u32" => "a token id",
        "f64" => "a number",
        "a sequence" => "a list",
        "a map" => "an object",
        rust if rust.starts_with("struct ") => "an object",
        other => other,
    };
    format!("{found}expected {expected} at line {place}")
}
