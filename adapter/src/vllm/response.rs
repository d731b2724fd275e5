//! Answers of vLLM's `/inference/v1/generate`.

use crate::{
    api::{Chunk, EngineFailure, Finish, Usage},
    failure::ErrorBody,
};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use tandem_engine::{TokenLogprob, TokenLogprobs};
use tandem_kv::TokenId;

/// A whole answer, or one event of a streamed one.
#[derive(Deserialize)]
pub(super) struct Answer {
    #[serde(default)]
    pub choices: Vec<Choice>,
    pub usage: Option<AnswerUsage>,
    #[serde(default)]
    pub prompt_logprobs: Option<Vec<Option<RankedTokens>>>,
    #[serde(default)]
    pub kv_transfer_params: Option<Value>,
    /// The error; an answer with an error has no other field. `None`: the request did not fail.
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
pub(super) struct Choice {
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Vec<TokenId>,
    logprobs: Option<Logprobs>,
}

#[derive(Deserialize)]
struct Logprobs {
    content: Vec<Sampled>,
}

/// The logprob of a sampled token, and its alternatives, which include the token itself.
#[derive(Deserialize)]
struct Sampled {
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<Alternative>,
}

#[derive(Deserialize)]
struct Alternative {
    token_id: TokenId,
    logprob: f32,
    rank: u32,
}

/// The alternatives of one position, by token.
type RankedTokens = HashMap<TokenId, Ranked>;

#[derive(Deserialize)]
pub(super) struct Ranked {
    logprob: f32,
    rank: u32,
}

#[derive(Deserialize)]
pub(super) struct AnswerUsage {
    prompt_tokens_details: Option<PromptTokensDetails>,
}

#[derive(Deserialize)]
struct PromptTokensDetails {
    cached_tokens: Option<u32>,
}

impl AnswerUsage {
    pub(super) fn cached_tokens(&self) -> Option<u32> {
        self.prompt_tokens_details.as_ref().and_then(|details| details.cached_tokens)
    }
}

/// Decodes one JSON answer.
///
/// # Errors
/// The JSON is not an answer, or reports an error.
pub(super) fn answer(json: &[u8]) -> Result<Answer, EngineFailure> {
    let answer: Answer = serde_json::from_slice(json).map_err(|error| EngineFailure::Protocol(error.to_string()))?;
    match answer.error {
        Some(error) => Err(EngineFailure::Failed(error.message())),
        None => Ok(answer),
    }
}

/// Decodes one event of a streamed answer, with at most `top` alternatives for each token.
///
/// # Errors
/// The JSON is not an answer, or reports an error.
pub(super) fn chunk(json: &[u8], top: Option<u32>) -> Result<Chunk, EngineFailure> {
    let Answer { choices, usage, .. } = answer(json)?;
    let mut chunk = Chunk::default();
    for Choice { finish_reason, token_ids, logprobs } in choices {
        chunk.finish = finish_reason.as_deref().map(finish).transpose()?;
        let mut logprobs = match (top, logprobs) {
            (Some(top), Some(logprobs)) if logprobs.content.len() == token_ids.len() => {
                logprobs.content.into_iter().map(|sampled| Some(sampled.with_top(top))).collect()
            }
            (Some(_), _) if !token_ids.is_empty() => {
                return Err(EngineFailure::Protocol("tokens lack the requested logprobs".to_owned()));
            }
            _ => vec![None; token_ids.len()],
        };
        chunk.tokens.extend(token_ids.into_iter().zip(logprobs.drain(..)));
    }
    chunk.usage = usage.map(|usage| Usage { cached_tokens: usage.cached_tokens() });
    Ok(chunk)
}

fn finish(reason: &str) -> Result<Finish, EngineFailure> {
    match reason {
        "stop" => Ok(Finish::Stop),
        "length" => Ok(Finish::Length),
        "abort" => Ok(Finish::Aborted),
        other => Err(EngineFailure::Protocol(format!("unknown finish_reason {other:?}"))),
    }
}

impl Sampled {
    fn with_top(mut self, top: u32) -> TokenLogprobs {
        self.top_logprobs.sort_by_key(|alternative| alternative.rank);
        let top = self.top_logprobs.into_iter().take(top as usize);
        let top = top.map(|Alternative { token_id, logprob, .. }| TokenLogprob { token: token_id, logprob }).collect();
        TokenLogprobs { logprob: self.logprob, top }
    }
}

/// Returns the logprobs of a prompt's tokens with at most `top` alternatives each; `None` for the first token.
///
/// # Errors
/// The answer does not have the logprobs of each token.
pub(super) fn prompt_logprobs(answer: Answer, prompt: &[TokenId], top: u32) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
    let missing = || EngineFailure::Protocol("the prompt's logprobs are missing".to_owned());
    let logprobs = answer.prompt_logprobs.filter(|logprobs| logprobs.len() == prompt.len()).ok_or_else(missing)?;
    let of_token = |(at, token, ranked): (usize, &TokenId, Option<RankedTokens>)| {
        let Some(ranked) = ranked.filter(|_| at > 0) else { return if at == 0 { Ok(None) } else { Err(missing()) } };
        let logprob = ranked.get(token).ok_or_else(missing)?.logprob;
        let mut ranked: Vec<_> = ranked.into_iter().collect();
        ranked.sort_by_key(|(_, Ranked { rank, .. })| *rank);
        let top = ranked.into_iter().take(top as usize);
        Ok(Some(TokenLogprobs {
            logprob,
            top: top.map(|(token, Ranked { logprob, .. })| TokenLogprob { token, logprob }).collect(),
        }))
    };
    prompt.iter().zip(logprobs).enumerate().map(|(at, (token, ranked))| of_token((at, token, ranked))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events that vLLM 0.32 has sent.
    const FIRST: &str = r#"{"request_id":"generate-tokens-a4","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[324],"routed_experts":null,"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":324,"logprob":-3.5,"rank":2,"top_logprobs":[{"token_id":324,"logprob":-3.5,"rank":2},{"token_id":344,"logprob":-3.25,"rank":1}]}]}}]}"#;
    const LAST: &str = r#"{"request_id":"generate-tokens-a4","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,"token_ids":[516],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":4}],"logprobs":null}]}"#;
    const USAGE: &str = r#"{"request_id":"generate-tokens-a4","usage":{"prompt_tokens":70,"total_tokens":74,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":64}},"output_mode":"tokens","choices":[]}"#;
    const ERROR: &str =
        r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#;

    #[test]
    fn streamed_answer_is_decoded() {
        let first = chunk(FIRST.as_bytes(), Some(1)).expect("the recorded event is valid");
        let top = vec![TokenLogprob { token: 344, logprob: -3.25 }];
        assert_eq!(first.tokens, [(324, Some(TokenLogprobs { logprob: -3.5, top }))]);
        assert_eq!((first.finish, first.usage), (None, None));
        let last = chunk(LAST.as_bytes(), None).expect("the recorded event is valid");
        assert_eq!((last.tokens.as_slice(), last.finish), (&[(516, None)][..], Some(Finish::Length)));
        let usage = chunk(USAGE.as_bytes(), None).expect("the recorded event is valid").usage;
        assert_eq!(usage, Some(Usage { cached_tokens: Some(64) }));
        assert!(
            matches!(chunk(ERROR.as_bytes(), None), Err(EngineFailure::Failed(message)) if message == "Internal server error")
        );
        assert!(matches!(chunk(LAST.as_bytes(), Some(1)), Err(EngineFailure::Protocol(_))), "logprobs are missing");
    }

    #[test]
    fn missing_cached_token_count_differs_from_zero() {
        let of = |usage: &str| {
            chunk(format!(r#"{{"choices":[],"usage":{usage}}}"#).as_bytes(), None).expect("the event is valid").usage
        };
        assert_eq!(of(r#"{"prompt_tokens":3}"#), Some(Usage { cached_tokens: None }));
        assert_eq!(of(r#"{"prompt_tokens_details":null}"#), Some(Usage { cached_tokens: None }));
        assert_eq!(of(r#"{"prompt_tokens_details":{"cached_tokens":0}}"#), Some(Usage { cached_tokens: Some(0) }));
    }

    #[test]
    fn prompt_logprobs_are_in_the_order_of_the_prompt() {
        let json = r#"{"choices":[],"usage":null,"prompt_logprobs":[null,{"20":{"logprob":-9.5,"rank":598,"decoded_token":"$"},"29":{"logprob":-0.5,"rank":1,"decoded_token":"-"}}]}"#;
        let of = |prompt: &[TokenId]| prompt_logprobs(answer(json.as_bytes()).expect("the answer is valid"), prompt, 1);
        let top = vec![TokenLogprob { token: 29, logprob: -0.5 }];
        assert_eq!(
            of(&[1, 20]).expect("the answer has logprobs for both tokens"),
            [None, Some(TokenLogprobs { logprob: -9.5, top })]
        );
        assert!(of(&[1]).is_err() && of(&[1, 21]).is_err());
    }
}
