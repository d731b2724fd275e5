//! The names of the same fields in each API, for errors.

/// The names of fields that differ between the APIs. The names about tools are parts of paths.
#[derive(Debug)]
pub struct ParamNames {
    /// The field with the prompt.
    pub prompt: &'static str,
    /// What the error about a prompt that is too long calls the prompt.
    pub(crate) prompt_in_text: &'static str,
    pub(crate) max_tokens: &'static str,
    pub(crate) max_completion_tokens: &'static str,
    pub(crate) stop: &'static str,
    pub(crate) reasoning_effort: &'static str,
    pub(crate) continue_final_message: &'static str,
    pub(crate) response_format: &'static str,
    pub(crate) json_schema: &'static str,
    pub(crate) schema_form: SchemaForm,
    /// The path from a tool, or from the choice of one, to its function.
    pub(crate) function: &'static str,
    pub(crate) parameters: &'static str,
    pub(crate) allowed_tools: &'static str,
}

/// Where the response format has the JSON schema.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum SchemaForm {
    /// In its member `json_schema`, with a name.
    Nested,
    /// In the format itself, with a name; or in `json_schema` if it has that member.
    Flat,
    /// In the format itself, without a name.
    Unnamed,
}

impl ParamNames {
    /// The names in `/v1/chat/completions`.
    pub const CHAT: Self = Self {
        prompt: "messages",
        prompt_in_text: "messages",
        max_tokens: "max_tokens",
        max_completion_tokens: "max_completion_tokens",
        stop: "stop",
        reasoning_effort: "reasoning_effort",
        continue_final_message: "continue_final_message",
        response_format: "response_format",
        json_schema: "response_format.json_schema",
        schema_form: SchemaForm::Nested,
        function: ".function",
        parameters: ".function.parameters",
        allowed_tools: ".allowed_tools",
    };

    /// The names in `/v1/completions`.
    pub const COMPLETION: Self = Self { prompt: "prompt", prompt_in_text: "prompt", ..Self::CHAT };

    /// The names in `/inference/v1/generate`.
    pub const GENERATE: Self = Self { prompt: "token_ids", prompt_in_text: "token_ids", ..Self::CHAT };

    /// The names in `/v1/responses`.
    pub const RESPONSES: Self = Self {
        prompt: "input",
        max_tokens: "max_output_tokens",
        max_completion_tokens: "max_output_tokens",
        reasoning_effort: "reasoning.effort",
        response_format: "text.format",
        json_schema: "text.format",
        schema_form: SchemaForm::Flat,
        function: "",
        parameters: ".parameters",
        allowed_tools: "",
        ..Self::CHAT
    };

    /// The names in `/v1/messages`.
    pub const MESSAGES: Self = Self {
        stop: "stop_sequences",
        reasoning_effort: "output_config.effort",
        continue_final_message: "messages",
        response_format: "output_config.format",
        json_schema: "output_config.format",
        schema_form: SchemaForm::Unnamed,
        function: "",
        parameters: ".input_schema",
        ..Self::CHAT
    };
}
