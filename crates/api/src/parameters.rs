//! The tables of all parameters of OpenAI, vLLM, SGLang, Dynamo, Ollama and llama.cpp. An unsupported parameter is accepted if its value
//! does not change the answer: null, false, empty, or equal to the value after `=` in its table. docs/parameters.md explains the tables to
//! clients, and a test compares both.

use super::{
    anthropic_fields::{Blocks, Choice, OutputConfig, Thinking, Turn},
    constraint_forms,
    fields::{
        ALLOWED_TOKENS_MAX, BAD_WORDS_MAX, Bounded, BoundedMap, LOGIT_BIASES_MAX, LOGPROB_TOKENS_MAX, MESSAGES_MAX, Prompts,
        Reader, STOP_TOKENS_MAX, STOPS_MAX, Stop, Whole, readable,
    },
    limits::{
        ALTERNATIVES, BAD_WORD_CHARS_MAX, BIAS, CACHE_SALT_CHARS_MAX, FRACTION, PENALTY, PRIORITY, REPETITION, SAMPLES,
        TEMPERATURE, TOP_K, TOP_P,
    },
    messages::RawMessage,
    responses_fields::{INCLUDE_MAX, Reasoning, ResponsesInput, TextConfig},
    schema::{
        Both, Chars, Each, Efforts, Entries, Form, Limit, ModelId, NotEmpty, ObjectSchema, OneOf, TokenCount, TokenIds, Tools,
        Truncated, Variables,
    },
    tools::{RawChoice, TOOLS_MAX},
    unsupported::{Setting, accepted, check},
};
use crate::error::RequestError;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{
    Deserialize,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::{Map, Value, json};
use std::{borrow::Cow, collections::BTreeMap};

/// The maximum number of documents of a request.
pub(crate) const DOCUMENTS_MAX: usize = 1024;

#[derive(Clone, Copy, Default, JsonSchema)]
pub(crate) struct StreamOptions {
    pub(crate) include_usage: Option<bool>,
    pub(crate) continuous_usage_stats: Option<bool>,
}

/// The fields of [`StreamOptions`]. A derived implementation would also accept a list of them.
#[derive(Deserialize)]
struct StreamFields {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
}

readable! {
    [] StreamOptions, deserialize_map, "a map",

    fn visit_map<A: MapAccess<'de>>(self, object: A) -> Result<StreamOptions, A::Error> {
        let fields = StreamFields::deserialize(MapAccessDeserializer::new(object))?;
        Ok(StreamOptions { include_usage: fields.include_usage, continuous_usage_stats: fields.continuous_usage_stats })
    }
}

/// Parameters that never change the answer. They are accepted with every value.
pub(crate) const WITHOUT_EFFECT: [&str; 19] = [
    // Parameters of OpenAI.
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "user",
    // Parameters of vLLM. It ignores the first three itself. Tandem's text of special tokens never has spaces between them.
    "mm_payload",
    "return_mm_kwargs",
    "return_token_offsets",
    "request_id",
    "session_id",
    "spaces_between_special_tokens",
    "stream_interval",
    // Parameters of SGLang, Ollama and llama.cpp.
    "custom_labels",
    "rid",
    "keep_alive",
    "cache_prompt",
];

/// Adds a parameter to the schema of a request.
fn describe<T: JsonSchema>(
    schema: &mut ObjectSchema,
    generator: &mut SchemaGenerator,
    name: &'static str,
    limits: &[&dyn Limit],
) {
    if ["model", "messages", "prompt"].contains(&name) {
        schema.required::<T>(generator, name, limits);
    } else {
        schema.optional::<T>(generator, name, limits);
    }
}

/// Adds the rules that concern several parameters.
fn add_rules(schema: &mut ObjectSchema, name: &str) {
    let with = |properties: Value| json!({ "properties": properties });
    let set = |name: &str, value: Value| json!({ "properties": { name: value }, "required": [name] });
    let (absent, off) = (json!({ "type": "null" }), json!({ "enum": [false, null] }));
    let empty = json!({ "type": ["array", "null"], "maxItems": 0 });
    if name == "ChatRequest" {
        schema.either(
            with(json!({ "logprob_token_ids": empty, "top_logprobs": absent })),
            set("logprobs", json!({ "const": true })),
        );
    } else {
        schema.either(with(json!({ "logprob_token_ids": empty })), set("logprobs", json!({ "type": "integer" })));
    }
    if name == "SamplingParams" {
        ["model", "stream", "stream_options", "cache_salt", "priority"].into_iter().for_each(|field| schema.forbid(field));
        return;
    }
    let mut streamed = set("stream", json!({ "const": true }));
    streamed["properties"]["prompt_logprobs"] = absent.clone();
    schema.either(with(json!({ "stream": off, "stream_options": absent })), streamed);
    if name == "ChatRequest" {
        let [continued, begun] = continued_or_begun();
        schema.either(continued, begun);
    }
}

/// Returns the two schemas of which a chat satisfies one: the answer continues the last message, or begins one.
pub(crate) fn continued_or_begun() -> [Value; 2] {
    ["continue_final_message", "add_generation_prompt"].map(|name| json!({ "properties": { name: { "enum": [false, null] } } }))
}

/// Defines a type with the parameters that all endpoints have, and for each endpoint a request type with these and its own parameters. The
/// limits after `=` are those of the schema; the same constants are checked in `options`.
macro_rules! parameters {
    ($common:tt unsupported $refused:tt $($name:ident $own:tt unsupported $own_refused:tt)*
     ; $($other:ident $other_own:tt unsupported $other_refused:tt)*) => {
        parameters! { @common $common }
        $(parameters! { @request $name $own $common $own_refused $refused })*
        $(parameters! { @described $name $own $common $own_refused $refused })*
        $(parameters! { @request $other $other_own $common $other_refused {} })*
    };
    (@common { $($field:ident: $type:ty $(= $limit:expr)*,)* }) => {
        /// The parsed parameters that all endpoints have.
        #[derive(Default)]
        pub(crate) struct Common {
            $(pub(crate) $field: Option<$type>,)*
        }

        /// Returns a chat that has only the parameters that all endpoints have.
        impl From<Common> for ChatRequest {
            fn from(common: Common) -> Self {
                Self { $($field: common.$field,)* ..Self::default() }
            }
        }
    };
    (@described $name:ident { $($field:ident: $type:ty $(= $limit:expr)*,)* } { $($common:ident: $common_type:ty $(= $common_limit:expr)*,)* }
     { $($own_refused:ident $(= $own_accepted:literal)*,)* } { $($refused:ident $(= $accepted:literal)*,)* }) => {
        impl JsonSchema for $name {
            fn schema_name() -> Cow<'static, str> {
                stringify!($name).into()
            }

            fn json_schema(generator: &mut SchemaGenerator) -> Schema {
                let mut schema = ObjectSchema::default();
                if stringify!($name) != "SamplingParams" {
                    describe::<String>(&mut schema, generator, "model", &[&ModelId]);
                }
                let new_tokens = TokenCount(if stringify!($name) == "CompletionRequest" { 0 } else { 1 });
                describe::<Whole>(&mut schema, generator, "max_tokens", &[&new_tokens]);
                $(describe::<$type>(&mut schema, generator, stringify!($field), &[$(&$limit as &dyn Limit)*]);)*
                $(describe::<$common_type>(&mut schema, generator, stringify!($common), &[$(&$common_limit as &dyn Limit)*]);)*
                $(schema.unsupported(generator, stringify!($own_refused), &[$(accepted($own_accepted))*]);)*
                $(schema.unsupported(generator, stringify!($refused), &[$(accepted($accepted))*]);)*
                add_rules(&mut schema, stringify!($name));
                schema.finish()
            }
        }

        #[cfg(test)]
        impl $name {
            /// The names of the supported parameters.
            const SUPPORTED: &[&str] = &["model", "max_tokens", $(stringify!($field),)* $(stringify!($common),)*];
            /// The unsupported parameters, each with its entry in the table. They are accepted only with values that do not change the answer.
            const REFUSED: &[(&str, &str)] = &[
                $((stringify!($own_refused), concat!(stringify!($own_refused), $(" = ", stringify!($own_accepted))*)),)*
                $((stringify!($refused), concat!(stringify!($refused), $(" = ", stringify!($accepted))*)),)*
            ];
        }
    };
    (@request $name:ident { $($field:ident: $type:ty $(= $limit:expr)*,)* } { $($common:ident: $common_type:ty $(= $common_limit:expr)*,)* }
     { $($own_refused:ident $(= $own_accepted:literal)*,)* } { $($refused:ident $(= $accepted:literal)*,)* }) => {
        /// A parsed request.
        #[derive(Default, Deserialize)]
        pub struct $name {
            /// The model's id.
            pub model: Option<String>,
            pub(crate) max_tokens: Option<Whole>,
            $(pub(crate) $field: Option<$type>,)*
            $(pub(crate) $common: Option<$common_type>,)*
            $(#[serde(default)] $own_refused: Setting,)*
            $(#[serde(default)] $refused: Setting,)*
        }

        impl $name {
            /// Refuses unsupported parameters, and moves out the parameters that all endpoints have.
            pub(crate) fn take_common(&mut self) -> Result<Common, RequestError> {
                $(check(stringify!($own_refused), &self.$own_refused, &[$(accepted($own_accepted))*])?;)*
                $(check(stringify!($refused), &self.$refused, &[$(accepted($accepted))*])?;)*
                Ok(Common { $($common: self.$common.take(),)* })
            }
        }
    };
}

parameters! {
    {
        n: Whole = SAMPLES, stream: bool, stream_options: StreamOptions, min_tokens: Whole = TokenCount(0), temperature: f64 = TEMPERATURE, top_p: f64 = TOP_P, top_k: Whole = TOP_K, min_p: f64 = FRACTION,
        frequency_penalty: f64 = PENALTY, presence_penalty: f64 = PENALTY, repetition_penalty: f64 = REPETITION, logit_bias: BoundedMap<LOGIT_BIASES_MAX> = Entries(BIAS), seed: Whole,
        stop: Stop, stop_token_ids: Bounded<Whole, STOP_TOKENS_MAX> = Each(TokenIds), ignore_eos: bool, cache_salt: String = Chars(CACHE_SALT_CHARS_MAX),
        allowed_token_ids: Bounded<Whole, ALLOWED_TOKENS_MAX> = Both(NotEmpty, Each(TokenIds)), bad_words: Bounded<String, BAD_WORDS_MAX> = Each(Chars(BAD_WORD_CHARS_MAX)),
        logprob_token_ids: Bounded<Whole, LOGPROB_TOKENS_MAX> = Each(TokenIds), prompt_logprobs: Whole = ALTERNATIVES, truncate_prompt_tokens: Whole = Truncated, truncation_side: String = OneOf(&["left", "right"]),
        include_stop_str_in_output: bool, skip_special_tokens: bool, detokenize: bool, return_token_ids: bool,
        return_tokens_as_token_ids: bool, priority: Whole = PRIORITY,
        // Constraints on the text.
        response_format: Value = Form(constraint_forms::response_format_form), structured_outputs: Value = Form(constraint_forms::structured_outputs_form), guided_json: Value = Form(constraint_forms::schema_or_text_form), guided_regex: Value = Form(constraint_forms::text_form), guided_choice: Value = Form(constraint_forms::choices_form),
        guided_grammar: Value = Form(constraint_forms::text_form), structural_tag: Value = Form(constraint_forms::schema_or_text_form), json_schema: Value = Form(constraint_forms::schema_or_text_form), regex: Value = Form(constraint_forms::text_form), ebnf: Value = Form(constraint_forms::text_form), grammar: Value = Form(constraint_forms::text_form),
    } unsupported {
        // Parameters of OpenAI.
        functions, modalities = "text", moderation, store,
        // Parameters of vLLM.
        ec_transfer_params, guided_decoding_backend, guided_whitespace_pattern, kv_transfer_params, length_penalty = 1, logits_processors,
        repetition_detection, return_prompt_text, routed_experts_prompt_start = 0, thinking_token_budget, use_beam_search,
        vllm_xargs, watermarking,
        // Parameters of SGLang.
        bootstrap_host, bootstrap_port, bootstrap_room, custom_logit_processor, custom_params, data_parallel_rank, disagg_prefill_dp_rank,
        extra_key, images_config, input_ids, logit_processor, lora_path, ngram_corpus_id, no_stop_trim, return_cached_tokens_details,
        return_hidden_states, return_meta_info, return_prompt_token_ids, return_routed_experts, routed_dp_rank,
        routed_experts_start_len = 0, session_params, stop_regex,
        // Parameters of Dynamo.
        bad_words_token_ids, nvext, prompt_token_ids, token_data, weight_version,
        // Parameters of Ollama.
        _debug_render_only, context, format, images, options, raw, shift, system, template, think, truncate,
        // Parameters of llama.cpp.
        dry_multiplier = 0, dynatemp_range = 0, lora, mirostat = 0, n_predict, n_probs = 0, post_sampling_probs, repeat_penalty = 1,
        return_progress, return_tokens, samplers, t_max_predict_ms = 0, timings_per_token, typical_p = 1, xtc_probability = 0,
    }

    ChatRequest {
        // `max_completion_tokens` is the newer name of `max_tokens`. If a request has both, the newer name counts.
        messages: Bounded<RawMessage, MESSAGES_MAX> = NotEmpty, max_completion_tokens: Whole = TokenCount(1), logprobs: bool, top_logprobs: Whole = ALTERNATIVES,
        tools: Bounded<Value, TOOLS_MAX> = Tools, tool_choice: RawChoice, parallel_tool_calls: bool, reasoning_effort: String = Efforts,
        include_reasoning: bool, enable_thinking: bool, chat_template_kwargs: Map<String, Value> = Variables,
        documents: Bounded<Value, DOCUMENTS_MAX>, add_generation_prompt: bool, continue_final_message: bool,
    } unsupported {
        // Parameters of OpenAI.
        audio, function_call = "none", verbosity = "medium", web_search_options,
        // Parameters of vLLM.
        add_special_tokens, best_of = 1, chat_template, echo, media_io_kwargs, mm_processor_kwargs, reasoning, suffix,
        thinking = "disabled",
        // Parameters of SGLang and Dynamo.
        chat_template_args, max_dynamic_patch, min_dynamic_patch, separate_reasoning = true, stream_reasoning = true, task,
        use_audio_in_video,
    }

    CompletionRequest {
        prompt: Prompts, echo: bool, logprobs: Whole = ALTERNATIVES, best_of: Whole = SAMPLES, add_special_tokens: bool,
    } unsupported {
        prompt_embeds, suffix, tool_choice = "none", tools,
    }

    // The object `sampling_params` of `/inference/v1/generate`.
    SamplingParams {
        logprobs: Whole = ALTERNATIVES,
    } unsupported {
        best_of = 1, extra_args, flat_logprobs, output_kind = 0, prompt_logprob_start, prompt_logprob_token_ids,
        skip_reading_prefix_cache, tool_choice = "none", tools, trace_decode_token_ids,
    }
    ;
    // OpenAI's Responses API.
    ResponsesRequest {
        input: ResponsesInput, instructions: String, max_output_tokens: Whole, tools: Bounded<Value, TOOLS_MAX>, tool_choice: Value,
        parallel_tool_calls: bool, text: TextConfig, reasoning: Reasoning, top_logprobs: Whole, include: Bounded<String, INCLUDE_MAX>,
        metadata: BTreeMap<String, String>, truncation: String, user: String, safety_identifier: String, prompt_cache_key: String,
        service_tier: String, max_tool_calls: Whole,
    } unsupported {
        background, context_management, conversation, messages, moderation, previous_response_id, prompt,
    }

    // Anthropic's Messages API.
    MessagesRequest {
        messages: Bounded<Turn, MESSAGES_MAX>, system: Blocks, tools: Bounded<Value, TOOLS_MAX>, tool_choice: Choice,
        stop_sequences: Bounded<String, STOPS_MAX>, thinking: Thinking, output_config: OutputConfig,
    } unsupported {
        container, mcp_servers, thread,
    }
}

impl SamplingParams {
    /// Removes the parameters that only concern the text of an answer, for an answer without text.
    pub(crate) fn without_text(&mut self) {
        (self.detokenize, self.skip_special_tokens, self.include_stop_str_in_output) = (None, None, None);
    }

    /// Returns the name of a parameter in this object that belongs outside of it.
    pub(crate) fn misplaced(&self) -> Option<&'static str> {
        let placed = [
            ("model", self.model.is_some()),
            ("stream", self.stream.is_some()),
            ("stream_options", self.stream_options.is_some()),
            ("cache_salt", self.cache_salt.is_some()),
            ("priority", self.priority.is_some()),
        ];
        placed.into_iter().find_map(|(name, present)| present.then_some(name))
    }
}

#[cfg(test)]
mod tests;
