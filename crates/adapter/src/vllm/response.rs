//! Answers of vLLM's `/inference/v1/generate`.

use crate::{
    api::{AnswerChunk, EngineFailure, EngineUsage, Finish, WantedLogprobs},
    calls,
    failure::ErrorBody,
};
use serde::Deserialize;
use serde_json::Value;
use std::collections::HashMap;
use tandem_engine::{TokenLogprob, TokenLogprobs};
use tandem_kv::TokenId;

/// An answer, or one event of a streamed answer.
#[derive(Deserialize)]
pub(super) struct GenerateAnswer {
    #[serde(default)]
    pub choices: Vec<SampleChoice>,
    pub usage: Option<AnswerUsage>,
    #[serde(default)]
    pub prompt_logprobs: Option<Vec<Option<RankedTokens>>>,
    #[serde(default)]
    pub kv_transfer_params: Option<Value>,
    /// `None` if the request did not fail. An answer with an error has no other field.
    error: Option<ErrorBody>,
}

#[derive(Deserialize)]
pub(super) struct SampleChoice {
    finish_reason: Option<String>,
    #[serde(default)]
    token_ids: Vec<TokenId>,
    logprobs: Option<ChoiceLogprobs>,
}

#[derive(Deserialize)]
struct ChoiceLogprobs {
    content: Vec<SampledLogprob>,
}

#[derive(Deserialize)]
struct SampledLogprob {
    logprob: f32,
    #[serde(default)]
    top_logprobs: Vec<TopLogprob>,
}

#[derive(Deserialize)]
struct TopLogprob {
    token_id: TokenId,
    logprob: f32,
    rank: u32,
}

type RankedTokens = HashMap<TokenId, RankedLogprob>;

#[derive(Deserialize)]
pub(super) struct RankedLogprob {
    logprob: f32,
    rank: u32,
}

#[derive(Deserialize)]
pub(super) struct AnswerUsage {
    prompt_tokens: Option<u32>,
    prompt_tokens_details: Option<CachedTokenDetails>,
}

#[derive(Deserialize)]
struct CachedTokenDetails {
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
/// Fails if the JSON is not an answer, or reports an error.
pub(super) fn answer(json: &[u8]) -> Result<GenerateAnswer, EngineFailure> {
    let answer: GenerateAnswer = calls::json(json)?;
    match answer.error {
        Some(error) => Err(EngineFailure::Failed(error.message())),
        None => Ok(answer),
    }
}

/// Decodes one event of a streamed answer, with the logprobs that the request asked for.
///
/// # Errors
/// Fails if the JSON is not an answer, or reports an error.
pub(super) fn chunk(json: &[u8], wanted: &WantedLogprobs) -> Result<AnswerChunk, EngineFailure> {
    let GenerateAnswer { choices, usage, .. } = answer(json)?;
    let mut chunk = AnswerChunk::default();
    for SampleChoice { finish_reason, token_ids, logprobs } in choices {
        chunk.finish = finish_reason.as_deref().map(finish).transpose()?;
        let mut logprobs = match (wanted.top, logprobs) {
            (Some(_), Some(logprobs)) if logprobs.content.len() == token_ids.len() => {
                logprobs.content.into_iter().map(|sampled| Some(sampled.wanted(wanted))).collect()
            }
            (Some(_), _) if !token_ids.is_empty() => {
                return Err(EngineFailure::Protocol("the answer's tokens lack the requested logprobs".to_owned()));
            }
            _ => vec![None; token_ids.len()],
        };
        chunk.tokens.extend(token_ids.into_iter().zip(logprobs.drain(..)));
    }
    chunk.usage = usage.map(|usage| EngineUsage { cached_tokens: usage.cached_tokens(), prompt_tokens: usage.prompt_tokens });
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

impl SampledLogprob {
    fn wanted(mut self, wanted: &WantedLogprobs) -> TokenLogprobs {
        self.top_logprobs.sort_by_key(|alternative| alternative.rank);
        let known = |top: &TopLogprob| TokenLogprob { token: top.token_id, logprob: top.logprob };
        wanted.choose(self.logprob, &self.top_logprobs.iter().map(known).collect::<Vec<_>>())
    }
}

/// Returns the logprobs of a prompt's tokens with at most `top` alternatives each; `None` for the first token.
///
/// # Errors
/// Fails if the answer lacks the logprobs of a token.
pub(super) fn prompt_logprobs(
    answer: GenerateAnswer,
    prompt: &[TokenId],
    top: u32,
) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
    let missing = || EngineFailure::Protocol("the prompt's logprobs are missing".to_owned());
    let logprobs = answer.prompt_logprobs.filter(|logprobs| logprobs.len() == prompt.len()).ok_or_else(missing)?;
    let of_token = |(at, token, ranked): (usize, &TokenId, Option<RankedTokens>)| {
        let Some(ranked) = ranked.filter(|_| at > 0) else { return if at == 0 { Ok(None) } else { Err(missing()) } };
        let logprob = ranked.get(token).ok_or_else(missing)?.logprob;
        let mut ranked: Vec<_> = ranked.into_iter().collect();
        ranked.sort_by_key(|(_, RankedLogprob { rank, .. })| *rank);
        let top = ranked.into_iter().take(top as usize);
        Ok(Some(TokenLogprobs {
            logprob,
            top: top.map(|(token, RankedLogprob { logprob, .. })| TokenLogprob { token, logprob }).collect(),
        }))
    };
    prompt.iter().zip(logprobs).enumerate().map(|(at, (token, ranked))| of_token((at, token, ranked))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The events were recorded from vLLM 0.32.
    const FIRST: &str = r#"{"request_id":"generate-tokens-a4","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":null,"stop_reason":null,"token_ids":[324],"routed_experts":null,"sampling_mask":null,"weight_versions":null,"logprobs":{"content":[{"token_id":324,"logprob":-3.5,"rank":2,"top_logprobs":[{"token_id":324,"logprob":-3.5,"rank":2},{"token_id":344,"logprob":-3.25,"rank":1}]}]}}]}"#;
    const LAST: &str = r#"{"request_id":"generate-tokens-a4","usage":null,"output_mode":"tokens","choices":[{"index":0,"finish_reason":"length","stop_reason":null,"token_ids":[516],"routed_experts":null,"sampling_mask":null,"weight_versions":[{"version":"default","start":0,"end":4}],"logprobs":null}]}"#;
    const USAGE: &str = r#"{"request_id":"generate-tokens-a4","usage":{"prompt_tokens":70,"total_tokens":74,"completion_tokens":4,"prompt_tokens_details":{"cached_tokens":64}},"output_mode":"tokens","choices":[]}"#;
    const ERROR: &str =
        r#"{"error": {"message": "Internal server error", "type": "InternalServerError", "param": null, "code": 500}}"#;

    fn likeliest(top: u32) -> WantedLogprobs {
        WantedLogprobs { top: Some(top), tokens: Vec::new() }
    }

    #[test]
    fn requested_tokens_are_the_alternatives_in_the_requested_order() {
        let wanted = WantedLogprobs { top: Some(1), tokens: vec![344, 324] };
        let chunk = chunk(FIRST.as_bytes(), &wanted).expect("the recorded event is valid");
        let logprobs = chunk.tokens[0].1.as_ref().expect("the event has logprobs");
        assert_eq!(logprobs.top.iter().map(|top| (top.token, top.logprob)).collect::<Vec<_>>(), [(344, -3.25), (324, -3.5)]);
    }

    #[test]
    fn streamed_answer_is_decoded() {
        let first = chunk(FIRST.as_bytes(), &likeliest(1)).expect("the recorded event is valid");
        let top = vec![TokenLogprob { token: 344, logprob: -3.25 }];
        assert_eq!(first.tokens, [(324, Some(TokenLogprobs { logprob: -3.5, top }))]);
        assert_eq!((first.finish, first.usage), (None, None));
        let last = chunk(LAST.as_bytes(), &WantedLogprobs::default()).expect("the recorded event is valid");
        assert_eq!((last.tokens.as_slice(), last.finish), (&[(516, None)][..], Some(Finish::Length)));
        let usage = chunk(USAGE.as_bytes(), &WantedLogprobs::default()).expect("the recorded event is valid").usage;
        assert_eq!(usage, Some(EngineUsage { cached_tokens: Some(64), prompt_tokens: Some(70) }));
        assert!(
            matches!(chunk(ERROR.as_bytes(), &WantedLogprobs::default()), Err(EngineFailure::Failed(message)) if message == "Internal server error")
        );
        assert!(matches!(chunk(LAST.as_bytes(), &likeliest(1)), Err(EngineFailure::Protocol(_))), "logprobs are missing");
    }

    #[test]
    fn missing_cached_token_count_differs_from_zero() {
        let of = |usage: &str| {
            chunk(format!(r#"{{"choices":[],"usage":{usage}}}"#).as_bytes(), &WantedLogprobs::default())
                .expect("the event is valid")
                .usage
        };
        assert_eq!(of(r#"{"prompt_tokens":3}"#), Some(EngineUsage { cached_tokens: None, prompt_tokens: Some(3) }));
        assert_eq!(of(r#"{"prompt_tokens_details":null}"#), Some(EngineUsage::default()));
        assert_eq!(
            of(r#"{"prompt_tokens_details":{"cached_tokens":0}}"#),
            Some(EngineUsage { cached_tokens: Some(0), prompt_tokens: None })
        );
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
