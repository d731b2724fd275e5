//! The logprobs of a prompt's tokens, in vLLM's format: a list with null for the first token, and an object for every other token. The object's
//! fields are the token and its alternatives.

use super::{
    TokenLogprobs,
    token::{finite, token_text},
};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Serialize, Serializer};
use std::{borrow::Cow, collections::BTreeMap};
use tandem_kv::TokenId;
use tandem_text::ServedModel;

#[derive(Clone, Copy)]
pub(super) struct PromptLogprobs<'a> {
    pub(super) model: &'a ServedModel,
    pub(super) tokens: &'a [TokenLogprobs],
    /// The number of alternatives for each token.
    pub(super) alternatives: usize,
}

/// A token of the prompt that has a logprob.
struct Position<'a> {
    model: &'a ServedModel,
    token: (TokenId, f32),
    top: &'a [(TokenId, f32)],
}

#[derive(JsonSchema, Serialize)]
struct Ranked {
    logprob: f32,
    /// The token's place in the list of the likeliest tokens, from 1; `None`: it is not one of the requested alternatives.
    rank: Option<usize>,
    decoded_token: String,
}

/// Returns a token's place in the list of the likeliest tokens, from 1; `None` if it is not in the list.
pub(super) fn rank(top: &[(TokenId, f32)], token: TokenId) -> Option<usize> {
    top.iter().position(|(other, _)| *other == token).map(|at| at + 1)
}

impl JsonSchema for PromptLogprobs<'_> {
    fn schema_name() -> Cow<'static, str> {
        "PromptLogprobs".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        generator.subschema_for::<Vec<Option<BTreeMap<String, Ranked>>>>()
    }
}

impl Serialize for PromptLogprobs<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.tokens.iter().map(|entry| {
            let top = &entry.top[..entry.top.len().min(self.alternatives)];
            entry.logprob.map(|logprob| Position { model: self.model, token: (entry.token, logprob), top })
        }))
    }
}

impl Serialize for Position<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let others = self.top.iter().filter(|(token, _)| *token != self.token.0);
        let ranked = |&(token, logprob): &(TokenId, f32)| {
            let ranked =
                Ranked { logprob: finite(logprob), rank: rank(self.top, token), decoded_token: token_text(self.model, token) };
            (token.to_string(), ranked)
        };
        serializer.collect_map(std::iter::once(&self.token).chain(others).map(ranked))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn prompt_logprobs_have_vllms_format() {
        let model = ServedModel::sim("m");
        let tokens = [
            TokenLogprobs { token: 104, logprob: None, top: Vec::new(), text_offset: 0 },
            TokenLogprobs { token: 105, logprob: Some(-2.0), top: vec![(106, -0.5), (105, -2.0)], text_offset: 1 },
            TokenLogprobs { token: 107, logprob: Some(f32::NEG_INFINITY), top: vec![(106, -0.5), (105, -2.0)], text_offset: 2 },
        ];
        let of = |alternatives| serde_json::to_value(PromptLogprobs { model: &model, tokens: &tokens, alternatives });
        let ranked = |logprob: f32, rank: Option<u32>, decoded_token: &str| json!({ "logprob": logprob, "rank": rank, "decoded_token": decoded_token });
        assert_eq!(
            of(2).expect("logprobs can be serialized"),
            json!([
                null,
                { "105": ranked(-2.0, Some(2), "i"), "106": ranked(-0.5, Some(1), "j") },
                { "107": ranked(-9999.0, None, "k"), "106": ranked(-0.5, Some(1), "j"), "105": ranked(-2.0, Some(2), "i") },
            ])
        );
        let alone = json!([null, { "105": ranked(-2.0, None, "i") }, { "107": ranked(-9999.0, None, "k") }]);
        assert_eq!(of(0).expect("logprobs can be serialized"), alone);
    }
}
