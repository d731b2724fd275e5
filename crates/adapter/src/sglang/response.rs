//! Answers of SGLang's `/generate`.

use crate::{
    api::{AnswerChunk, EngineFailure, EngineUsage, Exported, Finish, WantedLogprobs},
    calls, failure,
};
use serde::{Deserialize, de::IgnoredAny};
use tandem_engine::{TokenLogprob, TokenLogprobs};
use tandem_kv::TokenId;

/// An answer, or one event of a streamed answer.
#[derive(Deserialize)]
pub(super) struct SglangAnswer {
    #[serde(default)]
    output_ids: Vec<TokenId>,
    #[serde(default)]
    meta_info: MetaInfo,
    /// `None` if the request did not fail. An answer with an error has no other field.
    error: Option<SglangError>,
}

/// What the server reports about a request. The lists belong to `output_ids`, or to the prompt.
#[derive(Default, Deserialize)]
#[serde(default)]
struct MetaInfo {
    finish_reason: Option<SglangFinish>,
    /// The number of tokens that were generated so far.
    completion_tokens: Option<usize>,
    cached_tokens: Option<u32>,
    output_token_logprobs: Vec<RankedToken>,
    output_top_logprobs: Vec<Option<Vec<RankedToken>>>,
    output_token_ids_logprobs: Vec<Option<Vec<RankedToken>>>,
    input_token_logprobs: Vec<RankedToken>,
    input_top_logprobs: Vec<Option<Vec<RankedToken>>>,
}

/// A token's logprob, its id and its text. The first token of a prompt has no logprob.
type RankedToken = (Option<f32>, TokenId, IgnoredAny);

#[derive(Deserialize)]
struct SglangFinish {
    #[serde(rename = "type")]
    kind: String,
    message: Option<String>,
    /// The HTTP status that the reason of an abort stands for; `None` if the request was aborted by a call.
    status_code: Option<u16>,
}

#[derive(Deserialize)]
struct SglangError {
    message: String,
    code: Option<u16>,
}

fn missing(what: &str) -> EngineFailure {
    EngineFailure::Protocol(format!("an answer has no {what}"))
}

/// Decodes one JSON answer.
///
/// # Errors
/// Fails if the JSON is not an answer, or reports an error.
pub(super) fn answer(json: &[u8]) -> Result<SglangAnswer, EngineFailure> {
    let answer: SglangAnswer = calls::json(json)?;
    match answer.error {
        Some(SglangError { message, code }) => Err(failure::of_status(code.unwrap_or(500), failure::shortened(&message))),
        None => Ok(answer),
    }
}

/// Returns whether a prefill server has sent a prompt's KV to a decode server, and how many of the prompt's tokens it had cached.
///
/// # Errors
/// Fails if the answer does not say how the request has ended, or if it reports an error.
pub(super) fn exported(answer: &SglangAnswer) -> Result<Exported, EngineFailure> {
    let handle = match answer.meta_info.finish_reason.as_ref().ok_or_else(|| missing("finish_reason"))?.finish()? {
        Finish::Aborted => Err(EngineFailure::Failed("the prefill was aborted".to_owned())),
        Finish::Length | Finish::Stop => Ok(None),
    };
    Ok(Exported { handle, cached_tokens: answer.meta_info.cached_tokens })
}

/// Decodes the events of a streamed answer. An event has either all tokens of the answer so far, or only the new ones
/// (`--incremental-streaming-output`). In both cases the new tokens are the last ones of the event, as many as its count of generated tokens has
/// grown.
pub(super) struct ChunkReader {
    wanted: WantedLogprobs,
    stop_token_ids: Vec<TokenId>,
    generated: usize,
    /// Whether the server has ended the request.
    pub has_ended: bool,
}

impl ChunkReader {
    pub fn new(wanted: WantedLogprobs, stop_token_ids: Vec<TokenId>) -> Self {
        Self { wanted, stop_token_ids, generated: 0, has_ended: false }
    }

    /// Prepares for the events of another request, which continues the answer. Returns the number of tokens of the last request.
    pub fn begin_again(&mut self) -> usize {
        self.has_ended = false;
        std::mem::take(&mut self.generated)
    }

    /// Returns the first stop token; `None` if no token ends the answer.
    pub fn stop_token(&self) -> Option<TokenId> {
        self.stop_token_ids.first().copied()
    }

    pub fn is_stop(&self, token: TokenId) -> bool {
        self.stop_token_ids.contains(&token)
    }

    /// Decodes one event. An answer ends at the first stop token, even if the server has continued.
    ///
    /// # Errors
    /// Fails if the JSON is not an answer, reports an error, or lacks tokens or logprobs.
    pub fn chunk(&mut self, json: &[u8]) -> Result<AnswerChunk, EngineFailure> {
        let SglangAnswer { output_ids, meta_info: meta, .. } = answer(json)?;
        self.has_ended = meta.finish_reason.is_some();
        let mut finish = meta.finish_reason.as_ref().map(SglangFinish::finish).transpose()?;
        let grown = meta.completion_tokens.and_then(|now| now.checked_sub(self.generated));
        // A request that is aborted before its first token may count one.
        let new = if output_ids.is_empty() { 0 } else { grown.ok_or_else(|| missing("valid completion_tokens"))? };
        let first = output_ids.len().checked_sub(new).ok_or_else(|| missing("output_ids for all completion_tokens"))?;
        self.generated += new;
        let new_ids = &output_ids[first..];
        let mut tokens: Vec<_> = new_ids.iter().copied().zip(self.logprobs(&meta, new)?).collect();
        if let Some(stop) = new_ids.iter().position(|token| self.is_stop(*token)) {
            tokens.truncate(stop + 1);
            finish = Some(Finish::Stop);
        }
        let counted = meta.cached_tokens.filter(|_| self.generated > 0);
        let usage = finish.map(|_| EngineUsage { cached_tokens: meta.cached_tokens, prompt_tokens: None });
        Ok(AnswerChunk { tokens, finish, counted, usage })
    }

    /// Returns the logprobs of the last `new` generated tokens, as far as the request asked for them.
    fn logprobs(&self, meta: &MetaInfo, new: usize) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
        let Some(top) = self.wanted.top else { return Ok(vec![None; new]) };
        let sampled = last(&meta.output_token_logprobs, new).ok_or_else(|| missing("output_token_logprobs"))?;
        let (alternatives, field) = match (self.wanted.tokens.is_empty(), top) {
            (false, _) => (&meta.output_token_ids_logprobs, "output_token_ids_logprobs"),
            (true, 0) => return Ok(sampled.iter().map(|sampled| logprobs(sampled, None, &self.wanted)).collect()),
            (true, _) => (&meta.output_top_logprobs, "output_top_logprobs"),
        };
        let alternatives = last(alternatives, new).ok_or_else(|| missing(field))?;
        let pairs = sampled.iter().zip(alternatives);
        Ok(pairs.map(|(sampled, alternatives)| logprobs(sampled, alternatives.as_ref(), &self.wanted)).collect())
    }
}

/// Returns the last `count` values; `None` if there are fewer.
fn last<T>(values: &[T], count: usize) -> Option<&[T]> {
    values.get(values.len().checked_sub(count)?..)
}

fn logprobs(
    (logprob, ..): &RankedToken,
    alternatives: Option<&Vec<RankedToken>>,
    wanted: &WantedLogprobs,
) -> Option<TokenLogprobs> {
    let known = |(logprob, token, _): &RankedToken| Some(TokenLogprob { token: *token, logprob: (*logprob)? });
    let alternatives: Vec<TokenLogprob> = alternatives.into_iter().flatten().filter_map(known).collect();
    Some(wanted.choose((*logprob)?, &alternatives))
}

impl SglangFinish {
    fn finish(&self) -> Result<Finish, EngineFailure> {
        match (&*self.kind, self.status_code) {
            ("stop", _) => Ok(Finish::Stop),
            ("length", _) => Ok(Finish::Length),
            ("abort", None) => Ok(Finish::Aborted),
            ("abort", Some(status)) => {
                Err(failure::of_status(status, failure::shortened(self.message.as_deref().unwrap_or("aborted"))))
            }
            (other, _) => Err(EngineFailure::Protocol(format!("unknown finish_reason {:?}", failure::shortened(other)))),
        }
    }
}

/// Returns the logprobs of a prompt's tokens with at most `top` alternatives each; `None` for the first token.
///
/// # Errors
/// Fails if the answer lacks the logprobs of a token, or has those of another prompt.
pub(super) fn prompt_logprobs(
    answer: &SglangAnswer,
    prompt: &[TokenId],
    top: u32,
) -> Result<Vec<Option<TokenLogprobs>>, EngineFailure> {
    let meta = &answer.meta_info;
    let wanted = WantedLogprobs { top: Some(top), tokens: Vec::new() };
    if !meta.input_token_logprobs.iter().map(|(_, token, _)| token).eq(prompt) {
        return Err(missing("input_token_logprobs for the whole prompt"));
    }
    let of_token = |(at, ranked): (usize, &RankedToken)| {
        let alternatives = meta.input_top_logprobs.get(at).and_then(Option::as_ref);
        match logprobs(ranked, alternatives.filter(|_| top > 0), &wanted).filter(|_| at > 0) {
            None if at > 0 => Err(missing("logprob of a token of the prompt")),
            logprobs => Ok(logprobs),
        }
    };
    meta.input_token_logprobs.iter().enumerate().map(of_token).collect()
}

#[cfg(test)]
mod tests;
