//! Answers requests for paths that this server does not have. Paths of OpenAI's API and of other servers get advice.

use super::body;
use crate::error::ApiError;
use axum::extract::Request;

const TEXT_ONLY: &str = "it generates text; use a server for this kind of model";
const PREFIX: &str = "set the client's base URL to this server's address followed by /v1";
const MESSAGES_PREFIX: &str = "set the client's base URL to this server's address without /v1";
const STATELESS: &str =
    "it keeps no answers, files or conversations; send the whole conversation to /v1/chat/completions or /v1/responses";
const GENERATE: &str =
    "use /v1/completions for a text, /v1/chat/completions for a conversation or /inference/v1/generate for token ids";
const OLLAMA: &str = "Ollama's API; use /v1/chat/completions, /v1/completions or /v1/models";
const TOKENS: &str = "use /tokenize or /detokenize";
const BATCH: &str = "send the requests one by one to /v1/chat/completions; they are batched as they arrive";
const OPERATOR: &str = "an operator's command of another server; see tandem --help";
const MODELS: &str = "/v1/models lists the served models";

/// Paths that a client of another server may request, and the advice for it. An entry applies to the path and to everything below it.
const KNOWN: &[(&str, &str)] = &[
    ("/v1/embeddings", TEXT_ONLY),
    ("/v1/audio", TEXT_ONLY),
    ("/v1/images", TEXT_ONLY),
    ("/v1/videos", TEXT_ONLY),
    ("/v1/moderations", TEXT_ONLY),
    ("/v1/rerank", TEXT_ONLY),
    ("/v2/rerank", TEXT_ONLY),
    ("/v2/embed", TEXT_ONLY),
    ("/v1/score", TEXT_ONLY),
    ("/v1/realtime", TEXT_ONLY),
    ("/rerank", TEXT_ONLY),
    ("/score", TEXT_ONLY),
    ("/pooling", TEXT_ONLY),
    ("/classify", TEXT_ONLY),
    ("/v1/classify", TEXT_ONLY),
    ("/embeddings", TEXT_ONLY),
    ("/embedding", TEXT_ONLY),
    ("/embed", TEXT_ONLY),
    ("/encode", TEXT_ONLY),
    ("/v1/batches", BATCH),
    ("/v1/messages/batches", BATCH),
    ("/v1/files", STATELESS),
    ("/v1/uploads", STATELESS),
    ("/v1/vector_stores", STATELESS),
    ("/v1/assistants", STATELESS),
    ("/v1/threads", STATELESS),
    ("/v1/conversations", STATELESS),
    ("/v1/responses", STATELESS),
    ("/v1/chat/completions", STATELESS),
    ("/v1/containers", STATELESS),
    ("/v1/evals", STATELESS),
    ("/v1/fine_tuning", TEXT_ONLY),
    ("/v1/engines", MODELS),
    ("/v1/complete", "use /v1/messages"),
    ("/v1/v1/messages", MESSAGES_PREFIX),
    ("/v1/v1", PREFIX),
    ("/chat/completions", PREFIX),
    ("/completions", PREFIX),
    ("/models", PREFIX),
    ("/responses", PREFIX),
    ("/messages", "use /v1/messages"),
    ("/api", OLLAMA),
    ("/generate", GENERATE),
    ("/generate_stream", GENERATE),
    ("/completion", GENERATE),
    ("/infill", GENERATE),
    ("/invocations", GENERATE),
    ("/v2/models", GENERATE),
    ("/inference", GENERATE),
    ("/apply-template", TOKENS),
    ("/tokenizer_info", TOKENS),
    ("/get_model_info", MODELS),
    ("/model_info", MODELS),
    ("/info", MODELS),
    ("/props", MODELS),
    ("/slots", MODELS),
    ("/health_generate", "use /ready"),
    ("/get_server_info", "use /version, /metrics or /v1/models"),
    ("/server_info", "use /version, /metrics or /v1/models"),
    ("/v1/load_lora_adapter", OPERATOR),
    ("/v1/unload_lora_adapter", OPERATOR),
    ("/reset_prefix_cache", OPERATOR),
    ("/flush_cache", OPERATOR),
    ("/sleep", OPERATOR),
    ("/wake_up", OPERATOR),
    ("/is_sleeping", OPERATOR),
    ("/start_profile", OPERATOR),
    ("/stop_profile", OPERATOR),
    ("/docs", "use /openapi.json"),
    ("/redoc", "use /openapi.json"),
];

/// Refuses a request for a path that this server does not have, after reading its body: a client reads the reply only after it has sent
/// its request.
pub(super) async fn refuse(request: Request) -> ApiError {
    let known = advice(request.uri().path());
    body::discard(request.into_body()).await;
    known.map_or(ApiError::UnknownPath, |(path, advice)| ApiError::Unserved { path, advice })
}

fn advice(path: &str) -> Option<(&'static str, &'static str)> {
    let covers = |known: &str| path.strip_prefix(known).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'));
    KNOWN.iter().copied().find(|(known, _)| covers(known))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn known_path_of_another_api_gets_advice() {
        for (path, expected) in [
            ("/v1/embeddings", Some(TEXT_ONLY)),
            ("/v1/audio/speech", Some(TEXT_ONLY)),
            ("/v1/messages/batches/b/results", Some(BATCH)),
            ("/v1/responses/resp_1/cancel", Some(STATELESS)),
            ("/v1/v1/chat/completions", Some(PREFIX)),
            ("/v1/v1/messages", Some(MESSAGES_PREFIX)),
            ("/api/chat", Some(OLLAMA)),
            ("/generate", Some(GENERATE)),
            ("/generates", None),
            ("/v1/embeddingsx", None),
            ("/", None),
            ("/v1", None),
        ] {
            assert_eq!(advice(path).map(|(_, advice)| advice), expected, "{path}");
        }
    }

    #[test]
    fn no_known_path_is_covered_by_an_earlier_one() {
        for (path, expected) in KNOWN {
            assert_eq!(advice(path), Some((*path, *expected)));
        }
    }
}
