//! The tables of all parameters. An unsupported parameter is accepted if its value does not change the answer: null, false, empty, or
//! equal to the value after `=` in its table.

use super::{
    fields::{Bounded, BoundedMap, Content, LOGIT_BIASES_MAX, MESSAGES_MAX, Prompts, STOP_TOKENS_MAX, Stop, Whole},
    unsupported::{Setting, accepted, check},
};
use crate::error::ApiError;
use serde::Deserialize;

#[derive(Clone, Copy, Default, Deserialize)]
pub(super) struct StreamOptions {
    pub(super) include_usage: Option<bool>,
    pub(super) continuous_usage_stats: Option<bool>,
}

/// A message of a conversation as the client sent it.
#[derive(Deserialize)]
pub(super) struct Message {
    pub(super) role: Option<String>,
    #[serde(default)]
    pub(super) content: Content,
    #[serde(default)]
    pub(super) tool_calls: Setting,
    #[serde(default)]
    pub(super) function_call: Setting,
}

/// Defines a type with the parameters that both endpoints have, and for each endpoint a request type with these and its own parameters.
macro_rules! parameters {
    ($common:tt unsupported $refused:tt $($name:ident $own:tt unsupported $own_refused:tt)*) => {
        parameters! { @common $common }
        $(parameters! { @request $name $own $common $own_refused $refused })*
    };
    (@common { $($field:ident: $type:ty,)* }) => {
        /// The parsed parameters that both endpoints have.
        pub(super) struct Common {
            $(pub(super) $field: Option<$type>,)*
        }
    };
    (@request $name:ident { $($field:ident: $type:ty,)* } { $($common:ident: $common_type:ty,)* }
     { $($own_refused:ident $(= $own_accepted:literal)*,)* } { $($refused:ident $(= $accepted:literal)*,)* }) => {
        /// A parsed request.
        #[derive(Deserialize)]
        pub(crate) struct $name {
            pub(crate) model: Option<String>,
            pub(super) max_tokens: Option<Whole>,
            $(pub(super) $field: Option<$type>,)*
            $($common: Option<$common_type>,)*
            $(#[serde(default)] $own_refused: Setting,)*
            $(#[serde(default)] $refused: Setting,)*
        }

        impl $name {
            /// Refuses unsupported parameters, and moves out the parameters that both endpoints have.
            pub(super) fn take_common(&mut self) -> Result<Common, ApiError> {
                $(check(stringify!($own_refused), &self.$own_refused, &[$(accepted($own_accepted))*])?;)*
                $(check(stringify!($refused), &self.$refused, &[$(accepted($accepted))*])?;)*
                Ok(Common { $($common: self.$common.take(),)* })
            }
        }
    };
}

parameters! {
    {
        n: Whole, stream: bool, stream_options: StreamOptions, min_tokens: Whole, temperature: f64, top_p: f64, top_k: Whole, min_p: f64,
        frequency_penalty: f64, presence_penalty: f64, repetition_penalty: f64, logit_bias: BoundedMap<LOGIT_BIASES_MAX>, seed: Whole,
        stop: Stop, stop_token_ids: Bounded<i64, STOP_TOKENS_MAX>, ignore_eos: bool, cache_salt: String,
    } unsupported {
        // Parameters of OpenAI.
        functions, modalities = "text", response_format = "text", store, tool_choice = "none", tools,
        // Parameters of vLLM.
        allowed_token_ids, bad_words, detokenize = true, ec_transfer_params, guided_choice, guided_decoding_backend, guided_grammar,
        guided_json, guided_regex, guided_whitespace_pattern, include_stop_str_in_output, kv_transfer_params, length_penalty = 1,
        logits_processors, logprob_token_ids, priority = 0, prompt_logprobs, repetition_detection, return_token_ids,
        return_tokens_as_token_ids, skip_special_tokens = true, structural_tag, structured_outputs, thinking_token_budget,
        truncate_prompt_tokens, use_beam_search, vllm_xargs,
        // Parameters of SGLang.
        custom_logit_processor, custom_params, ebnf, input_ids, json_schema, logit_processor, lora_path, no_stop_trim, regex,
        return_hidden_states, return_routed_experts, session_params, stop_regex,
        // Parameters of Dynamo, Ollama and llama.cpp.
        nvext, format, options, raw, think, dry_multiplier = 0, grammar, mirostat = 0, n_probs = 0, typical_p = 1, xtc_probability = 0,
    }

    ChatRequest {
        // `max_completion_tokens` is the newer name of `max_tokens`. If a request has both, the newer name counts.
        messages: Bounded<Message, MESSAGES_MAX>, max_completion_tokens: Whole, logprobs: bool, top_logprobs: Whole,
    } unsupported {
        // Parameters of OpenAI.
        audio, function_call = "none", prediction, reasoning_effort = "none", verbosity = "medium", web_search_options,
        // Parameters of vLLM.
        add_generation_prompt = true, add_special_tokens, best_of = 1, chat_template, chat_template_kwargs, continue_final_message,
        documents, echo, enable_thinking, include_reasoning = true, media_io_kwargs, mm_processor_kwargs, reasoning, suffix,
        thinking = "disabled",
    }

    CompletionRequest {
        prompt: Prompts, echo: bool, logprobs: Whole, best_of: Whole,
    } unsupported {
        add_special_tokens = true, prompt_embeds, suffix,
    }
}
