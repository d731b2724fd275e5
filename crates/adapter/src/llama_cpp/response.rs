//! Answers of llama.cpp's server.

use crate::{
    api::{EngineFailure, Finish},
    calls,
    failure::ErrorBody,
};
use serde::Deserialize;
use tandem_engine::{TokenLogprob, TokenLogprobs};
use tandem_kv::TokenId;

#[derive(Debug, PartialEq)]
pub(super) enum CompletionEvent {
    /// The server reports its progress in computing the prompt.
    Prompt {
        /// The number of prompt tokens whose KV was cached in the server's slot.
        cached_tokens: u32,
    },
    Token {
        token: TokenId,
        logprobs: Option<TokenLogprobs>,
        /// The text that this token completes. It includes the text of earlier tokens that ended within a UTF-8 character.
        text: String,
        /// The number of tokens that were generated so far.
        generated: u32,
    },
    End {
        finish: Finish,
        generated: u32,
        cached_tokens: Option<u32>,
    },
}

#[derive(Deserialize)]
struct Body {
    #[serde(default)]
    content: String,
    #[serde(default)]
    tokens: Vec<TokenId>,
    stop: Option<bool>,
    stop_type: Option<String>,
    tokens_predicted: Option<u32>,
    prompt_progress: Option<ServerProgress>,
    timings: Option<Timings>,
    #[serde(default)]
    completion_probabilities: Vec<CompletionSample>,
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
struct ServerProgress {
    cache: u32,
}

#[derive(Deserialize)]
struct Timings {
    cache_n: Option<u32>,
}

#[derive(Deserialize)]
struct CompletionSample {
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<TopToken>,
}

#[derive(Deserialize)]
struct TopToken {
    id: TokenId,
    logprob: f32,
}

/// Decodes one event of a streamed answer, with at most `top` alternatives for its token.
///
/// # Errors
/// Fails if the data is not an event, or if the event reports an error.
pub(super) fn event(data: &[u8], top: Option<u32>) -> Result<CompletionEvent, EngineFailure> {
    let Body {
        content: text,
        tokens,
        stop,
        stop_type,
        tokens_predicted,
        prompt_progress,
        timings,
        completion_probabilities,
        error,
    } = calls::json(data)?;
    if let Some(error) = error {
        return Err(EngineFailure::Failed(error.message()));
    }
    if let Some(ServerProgress { cache: cached_tokens }) = prompt_progress {
        return Ok(CompletionEvent::Prompt { cached_tokens });
    }
    let missing = |field: &str| EngineFailure::Protocol(format!("an event of an answer has no {field}"));
    let generated = tokens_predicted.ok_or_else(|| missing("tokens_predicted"))?;
    if stop == Some(true) {
        let finish = match stop_type.as_deref() {
            Some("eos") => Finish::Stop,
            Some("limit") => Finish::Length,
            other => return Err(EngineFailure::Protocol(format!("stop_type {other:?}"))),
        };
        return Ok(CompletionEvent::End { finish, generated, cached_tokens: timings.and_then(|timings| timings.cache_n) });
    }
    let [token] = *tokens.as_slice() else { return Err(missing("token")) };
    let logprobs = match top {
        None => None,
        Some(top) => {
            let sampled = completion_probabilities.into_iter().next().ok_or_else(|| missing("logprobs"))?;
            let top = sampled.top_logprobs.into_iter().take(top as usize);
            let top = top.map(|TopToken { id, logprob }| TokenLogprob { token: id, logprob }).collect();
            Some(TokenLogprobs { logprob: sampled.logprob, top })
        }
    };
    Ok(CompletionEvent::Token { token, logprobs, text, generated })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events were recorded from builds 10434 and 11549 of llama.cpp.
    const PROGRESS: &str = r#"{"index":0,"content":"","tokens":[0],"stop":false,"id_slot":-1,"tokens_predicted":0,"tokens_evaluated":50,"prompt_progress":{"total":50,"cache":49,"processed":49,"time_ms":0}}"#;
    const TOKEN: &str = r#"{"index":0,"content":"ad","tokens":[344],"stop":false,"id_slot":-1,"tokens_predicted":1,"tokens_evaluated":50,"completion_probabilities":[{"id":344,"token":"ad","bytes":[97,100],"logprob":-1.5,"top_logprobs":[{"id":344,"token":"ad","bytes":[97,100],"logprob":-1.5},{"id":261,"token":"at","bytes":[97,116],"logprob":-2.25}]}]}"#;
    const LAST: &str = r#"{"stop":true,"stop_type":"limit","tokens_predicted":3,"timings":{"cache_n":49,"prompt_n":1,"prompt_ms":11.283,"prompt_per_token_ms":11.283,"prompt_per_second":88.62891075068688,"predicted_n":3,"predicted_ms":22.399,"predicted_per_token_ms":7.466333333333334,"predicted_per_second":133.93455064958258}}"#;
    const ERROR: &str = r#"{"error":{"code":500,"message":"Context size has been exceeded.","type":"server_error"}}"#;

    #[test]
    fn streamed_answer_is_decoded() {
        let of = |data: &str, top| event(data.as_bytes(), top).expect("a recorded event is valid");
        assert_eq!(of(PROGRESS, Some(1)), CompletionEvent::Prompt { cached_tokens: 49 });
        let token = |logprobs| CompletionEvent::Token { token: 344, logprobs, text: "ad".to_owned(), generated: 1 };
        assert_eq!(of(TOKEN, None), token(None));
        let top = vec![TokenLogprob { token: 344, logprob: -1.5 }];
        assert_eq!(of(TOKEN, Some(1)), token(Some(TokenLogprobs { logprob: -1.5, top })));
        assert_eq!(of(TOKEN, Some(0)), token(Some(TokenLogprobs { logprob: -1.5, top: Vec::new() })));
        assert_eq!(of(LAST, None), CompletionEvent::End { finish: Finish::Length, generated: 3, cached_tokens: Some(49) });
        let end = of(&LAST.replace("limit", "eos"), None);
        assert_eq!(end, CompletionEvent::End { finish: Finish::Stop, generated: 3, cached_tokens: Some(49) });
    }

    #[test]
    fn errors_and_unknown_events_are_failures() {
        let failure = |data: &str, top| event(data.as_bytes(), top).expect_err("the event is an error");
        assert!(matches!(failure(ERROR, None), EngineFailure::Failed(message) if message.contains("Context size")));
        let unknown = [
            ("{", None),
            ("{}", None),
            (r#"{"stop":true,"stop_type":"word","tokens_predicted":1}"#, None),
            (r#"{"tokens":[],"tokens_predicted":1}"#, None),
            (r#"{"tokens":[1],"tokens_predicted":1}"#, Some(1)),
        ];
        for (data, top) in unknown {
            assert!(matches!(failure(data, top), EngineFailure::Protocol(_)), "{data}");
        }
    }
}
