//! Conversion of sampling parameters from the wire to the engine's types. They are checked here, and only here.

use tandem_engine::{BadWord, Sampling};
use tandem_grammar::{CallInput, Constraint, InputPlace, Kind};
use tandem_kv::TokenId;
use tandem_proto::{
    TEXT_BYTES_MAX,
    v1::{self, constraint},
};

/// Maximum number of alternatives whose logprobs are returned for one token.
pub const LOGPROBS_MAX: u32 = 20;
/// Maximum number of tokens with a logit bias, the same as in the frontend.
const BIASES_MAX: usize = 1_024;
/// Maximum number of stop tokens: more than the number that a frontend lets a client set plus the number that a model has.
const STOP_TOKENS_MAX: usize = 1_024;
/// Maximum number of token sequences that must not be generated.
const BAD_WORD_FORMS_MAX: usize = 256;
/// Maximum length of a token sequence that must not be generated. Each step compares it with the last tokens of the sample.
const BAD_WORD_TOKENS_MAX: usize = 512;
/// The largest absolute value of a penalty or bias. Larger values have the same effect, and with this limit all logits stay finite.
const WEIGHT_MAX: f32 = 1_000.0;

/// The reason why sampling parameters are refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidSampling {
    /// A parameter is out of its range.
    #[error("{field} must be {allowed}")]
    OutOfRange {
        /// The parameter.
        field: &'static str,
        /// The values that it may have.
        allowed: &'static str,
    },
    /// A constraint has no kind that this version knows.
    #[error("constraint must have a kind")]
    NoConstraint,
}

/// Checks that all tokens that the sampling parameters name are in the model's vocabulary.
fn check_tokens(sampling: &Sampling, known: impl Fn(&TokenId) -> bool) -> Result<(), InvalidSampling> {
    let bad_tokens = sampling.bad_words.iter().flat_map(|word| word.forms.iter().flatten());
    for (field, all_known) in [
        ("allowed_token_ids", sampling.allowed_token_ids.iter().all(&known)),
        ("logprob_token_ids", sampling.logprob_token_ids.iter().all(&known)),
        ("bad_words", bad_tokens.into_iter().all(&known)),
    ] {
        if !all_known {
            return Err(InvalidSampling::OutOfRange { field, allowed: "token ids of the model's vocabulary" });
        }
    }
    Ok(())
}

/// Converts the sampling parameters of a request, and checks that they are in their ranges and name only tokens that the model has.
///
/// # Errors
/// A parameter is out of its range, or a constraint has no kind.
pub fn sampling(wire: v1::Sampling, vocab_size: usize) -> Result<Sampling, InvalidSampling> {
    let sampling = Sampling {
        max_tokens: wire.max_tokens,
        min_tokens: wire.min_tokens,
        temperature: wire.temperature,
        top_p: wire.top_p,
        top_k: wire.top_k,
        min_p: wire.min_p,
        frequency_penalty: wire.frequency_penalty,
        presence_penalty: wire.presence_penalty,
        repetition_penalty: wire.repetition_penalty,
        logit_bias: wire.logit_bias,
        seed: wire.seed,
        seed_is_given: wire.seed_is_given,
        stop_token_ids: wire.stop_token_ids,
        logprobs: wire.logprobs,
        allowed_token_ids: wire.allowed_token_ids.into(),
        bad_words: wire.bad_words.into_iter().map(bad_word).collect(),
        logprob_token_ids: wire.logprob_token_ids,
        constraint: match wire.constraint {
            Some(wire) => Some(constraint(wire)?),
            None if wire.call_inputs.is_empty() => None,
            None => Some(Kind::CallInputs(wire.call_inputs.into_iter().map(call_input).collect()).into()),
        },
    };
    let Sampling { top_p, repetition_penalty, min_tokens, max_tokens, .. } = sampling;
    let forms = || sampling.bad_words.iter().flat_map(|word| &word.forms);
    let is_weight = |weight: &f32| (-WEIGHT_MAX..=WEIGHT_MAX).contains(weight);
    // A NaN fails these checks, because it is in no range.
    for (field, allowed, holds) in [
        ("temperature", "between 0 and 100", (0.0..=100.0).contains(&sampling.temperature)),
        ("top_p", "above 0 and at most 1", top_p > 0.0 && top_p <= 1.0),
        ("min_p", "between 0 and 1", (0.0..=1.0).contains(&sampling.min_p)),
        ("frequency_penalty", "between -1000 and 1000", is_weight(&sampling.frequency_penalty)),
        ("presence_penalty", "between -1000 and 1000", is_weight(&sampling.presence_penalty)),
        ("repetition_penalty", "above 0 and at most 1000", repetition_penalty > 0.0 && repetition_penalty <= WEIGHT_MAX),
        ("logit_bias", "between -1000 and 1000", sampling.logit_bias.values().all(is_weight)),
        ("logit_bias", "of at most 1024 tokens", sampling.logit_bias.len() <= BIASES_MAX),
        ("stop_token_ids", "at most 1024 tokens", sampling.stop_token_ids.len() <= STOP_TOKENS_MAX),
        ("min_tokens", "at most max_tokens", max_tokens.is_none_or(|max_tokens| min_tokens <= max_tokens)),
        ("logprob_token_ids", "at most 20 tokens", sampling.logprob_token_ids.len() <= LOGPROBS_MAX as usize),
        ("bad_words", "at most 256 sequences of tokens", forms().count() <= BAD_WORD_FORMS_MAX),
        ("bad_words", "sequences of 1 to 512 tokens", forms().all(|form| (1..=BAD_WORD_TOKENS_MAX).contains(&form.len()))),
        ("bad_words", "texts of at most 1024 bytes", sampling.bad_words.iter().all(|word| word.text.len() <= TEXT_BYTES_MAX)),
        ("logprobs", "at most 20", sampling.logprobs.is_none_or(|top| top <= LOGPROBS_MAX)),
    ] {
        if !holds {
            return Err(InvalidSampling::OutOfRange { field, allowed });
        }
    }
    check_tokens(&sampling, |token| usize::try_from(*token).is_ok_and(|token| token < vocab_size))?;
    Ok(sampling)
}

fn bad_word(wire: v1::BadWord) -> BadWord {
    BadWord { text: wire.text, forms: wire.forms.into_iter().map(|form| form.tokens).collect() }
}

fn constraint(wire: v1::Constraint) -> Result<Constraint, InvalidSampling> {
    let v1::Constraint { kind, begins_after, lenient } = wire;
    let kind = match kind.ok_or(InvalidSampling::NoConstraint)? {
        constraint::Kind::JsonSchema(schema) => Kind::JsonSchema { schema, lenient },
        constraint::Kind::JsonObject(_) => Kind::JsonObject,
        constraint::Kind::Regex(regex) => Kind::Regex(regex),
        constraint::Kind::Choice(choices) => Kind::Choice(choices.texts),
        constraint::Kind::Grammar(grammar) => Kind::Grammar(grammar),
        constraint::Kind::StructuralTag(tags) => Kind::StructuralTag(tags),
    };
    if begins_after.len() > TEXT_BYTES_MAX {
        return Err(InvalidSampling::OutOfRange { field: "begins_after", allowed: "at most 1024 bytes" });
    }
    Ok(Constraint { kind, begins_after: Some(begins_after).filter(|marker| !marker.is_empty()) })
}

fn call_input(constraint::CallInput { places, grammar, regex }: constraint::CallInput) -> CallInput {
    let place = |constraint::InputPlace { begin, head, end, tail }| {
        let end = Some(end).filter(|end| !end.is_empty());
        InputPlace { begin, head, end, tail }
    };
    let kind = if grammar.is_empty() { Kind::Regex(regex) } else { Kind::Grammar(grammar) };
    CallInput { places: places.into_iter().map(place).collect(), kind }
}
