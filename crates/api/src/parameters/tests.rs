use super::*;
use std::collections::BTreeSet;

/// The request fields of other servers' `/v1/chat/completions` and `/v1/completions`: those of OpenAI's client library 3.54.0, vLLM 0.32.0, and
/// SGLang, Dynamo and Ollama as of November 2026. Ollama's include those of its own API.
const CHAT_FIELDS: [(&str, &str); 5] = [
    (
        "OpenAI",
        "audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens messages metadata modalities \
         model moderation n parallel_tool_calls prediction presence_penalty prompt_cache_key prompt_cache_options prompt_cache_retention \
         reasoning_effort response_format safety_identifier seed service_tier stop store stream stream_options temperature tool_choice \
         tools top_logprobs top_p user verbosity web_search_options",
    ),
    (
        "vLLM",
        "add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template chat_template_kwargs \
         continue_final_message documents ec_transfer_params echo frequency_penalty ignore_eos include_reasoning \
         include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_completion_tokens \
         max_tokens media_io_kwargs messages min_p min_tokens mm_payload mm_processor_kwargs model n parallel_tool_calls \
         presence_penalty priority prompt_logprobs reasoning_effort repetition_detection repetition_penalty request_id response_format \
         return_mm_kwargs return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids \
         routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream \
         stream_interval stream_options structured_outputs temperature thinking_token_budget tool_choice tools top_k top_logprobs top_p \
         truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking",
    ),
    (
        "SGLang",
        "bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message custom_logit_processor \
         custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key frequency_penalty ignore_eos images_config input_ids \
         logit_bias logprobs lora_path max_completion_tokens max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens \
         model n ngram_corpus_id no_stop_trim parallel_tool_calls presence_penalty priority reasoning reasoning_effort regex \
         repetition_penalty response_format return_cached_tokens_details return_hidden_states return_meta_info return_prompt_token_ids \
         return_routed_experts return_token_ids rid routed_dp_rank routed_experts_start_len seed separate_reasoning session_id \
         session_params skip_special_tokens stop stop_regex stop_token_ids stream stream_options stream_reasoning task temperature \
         tool_choice tools top_k top_logprobs top_p use_audio_in_video user",
    ),
    (
        "Dynamo",
        "allowed_token_ids bad_words_token_ids cache_salt chat_template_args chat_template_kwargs detokenize guided_choice \
         guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output \
         media_io_kwargs min_p min_tokens nvext prompt_token_ids repetition_penalty return_token_ids return_tokens_as_token_ids \
         skip_special_tokens stop_token_ids thinking top_k truncate_prompt_tokens weight_version",
    ),
    (
        "Ollama",
        "_debug_render_only format frequency_penalty keep_alive logprobs max_tokens messages model options presence_penalty reasoning \
         reasoning_effort response_format seed shift stop stream stream_options temperature think tools top_logprobs top_p truncate",
    ),
];
const COMPLETION_FIELDS: [(&str, &str); 5] = [
    (
        "OpenAI",
        "best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop stream stream_options \
         suffix temperature top_p user",
    ),
    (
        "vLLM",
        "add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty ignore_eos \
         include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens \
         mm_payload model n presence_penalty priority prompt prompt_embeds prompt_logprobs repetition_detection repetition_penalty \
         request_id response_format return_mm_kwargs return_token_ids return_token_offsets return_tokens_as_token_ids \
         routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream \
         stream_interval stream_options structured_outputs suffix temperature thinking_token_budget top_k top_p truncate_prompt_tokens \
         truncation_side use_beam_search user vllm_xargs watermarking",
    ),
    (
        "SGLang",
        "best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor custom_params \
         data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty ignore_eos images_config json_schema logit_bias \
         logprobs lora_path max_tokens min_p min_tokens model n ngram_corpus_id no_stop_trim presence_penalty priority prompt regex \
         repetition_penalty response_format return_cached_tokens_details return_hidden_states return_routed_experts return_token_ids rid \
         routed_dp_rank routed_experts_start_len seed session_id session_params skip_special_tokens stop stop_regex stop_token_ids \
         stream stream_options suffix temperature top_k top_p user",
    ),
    (
        "Dynamo",
        "allowed_token_ids bad_words_token_ids cache_salt detokenize guided_choice guided_decoding_backend guided_grammar guided_json \
         guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output min_p min_tokens nvext prompt_token_ids \
         repetition_penalty return_token_ids return_tokens_as_token_ids skip_special_tokens stop_token_ids top_k truncate_prompt_tokens \
         weight_version",
    ),
    (
        "Ollama",
        "_debug_render_only context format frequency_penalty images keep_alive logprobs max_tokens model options presence_penalty prompt \
         raw seed shift stop stream stream_options suffix system temperature template think top_p truncate",
    ),
];

/// The fields of vLLM's object `sampling_params`.
const SAMPLING_FIELDS: [(&str, &str); 1] = [(
    "vLLM",
    "allowed_token_ids bad_words best_of detokenize extra_args flat_logprobs frequency_penalty ignore_eos include_stop_str_in_output \
     logit_bias logprob_token_ids logprobs max_tokens min_p min_tokens n output_kind presence_penalty prompt_logprob_start \
     prompt_logprob_token_ids prompt_logprobs repetition_detection repetition_penalty routed_experts_prompt_start seed \
     skip_reading_prefix_cache skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream_interval structured_outputs \
     temperature thinking_token_budget top_k top_p trace_decode_token_ids watermarking",
)];

/// The text of docs/parameters.md, which this module compares with the tables.
const PAGE: &str = include_str!("../../../../docs/parameters.md");

#[test]
fn every_field_of_another_server_is_supported_refused_or_without_effect() {
    let refused = |table: &'static [(&str, &str)]| table.iter().map(|(name, _)| *name);
    let known = |supported: &'static [&str], table| -> BTreeSet<&str> {
        let names = supported.iter().copied().chain(refused(table)).chain(WITHOUT_EFFECT);
        let count = names.clone().count();
        let known: BTreeSet<_> = names.collect();
        assert_eq!(known.len(), count, "a parameter is in more than one table");
        known
    };
    for (fields, known) in [
        (&SAMPLING_FIELDS[..], known(SamplingParams::SUPPORTED, SamplingParams::REFUSED)),
        (&CHAT_FIELDS, known(ChatRequest::SUPPORTED, ChatRequest::REFUSED)),
        (&COMPLETION_FIELDS, known(CompletionRequest::SUPPORTED, CompletionRequest::REFUSED)),
    ] {
        for (server, names) in fields {
            let unknown: Vec<_> = names.split_whitespace().filter(|name| !known.contains(name)).collect();
            assert!(unknown.is_empty(), "{server} has fields that are in no table: {unknown:?}");
        }
    }
}

/// Returns the text between the headings `from` and `to`.
fn section(from: &str, to: &str) -> &'static str {
    let (_, rest) = PAGE.split_once(&format!("\n## {from}\n")).expect("the page has the section");
    rest.split_once(&format!("\n## {to}\n")).map_or(rest, |(section, _)| section)
}

/// Returns all code spans of a section.
fn quoted(section: &str) -> BTreeSet<&str> {
    section.split('`').skip(1).step_by(2).collect()
}

#[test]
fn documentation_of_parameters_equals_the_tables() {
    let rows = section("Supported", "Refused").lines().filter_map(|line| line.strip_prefix("| `"));
    let (mut chat, mut completions) = (BTreeSet::new(), BTreeSet::new());
    for row in rows {
        let mut cells = row.split(" | ");
        let names: Vec<_> = cells.next().unwrap_or_default().trim_end_matches('`').split("`, `").collect();
        let endpoints = cells.next().expect("a row names its endpoints");
        assert!(["both", "chat", "completions"].contains(&endpoints), "{row}");
        for (own, list) in [("chat", &mut chat), ("completions", &mut completions)] {
            if endpoints == own || endpoints == "both" {
                list.extend(&names);
            }
        }
    }
    for (found, table) in [(chat, ChatRequest::SUPPORTED), (completions, CompletionRequest::SUPPORTED)] {
        assert_eq!(found, table.iter().copied().collect::<BTreeSet<_>>(), "the supported parameters of docs/parameters.md");
    }

    let entries = |table: &'static [(&str, &str)]| -> BTreeSet<&str> { table.iter().map(|(_, entry)| *entry).collect() };
    let (chat, completions) = (entries(ChatRequest::REFUSED), entries(CompletionRequest::REFUSED));
    let lists: Vec<_> = section("Refused", "Without effect").split("\n### ").skip(1).collect();
    let expected: [BTreeSet<_>; 3] = [&chat & &completions, &chat - &completions, &completions - &chat];
    assert_eq!(lists.len(), expected.len());
    for (list, expected) in lists.into_iter().zip(expected) {
        let entries: Vec<_> = expected.iter().map(|entry| format!("`{entry}`")).collect();
        let heading = list.lines().next().unwrap_or_default();
        assert_eq!(quoted(list), expected, "docs/parameters.md must list under {heading:?}: {}", entries.join(", "));
    }
    assert_eq!(quoted(section("Without effect", "")), BTreeSet::from(WITHOUT_EFFECT));
}
