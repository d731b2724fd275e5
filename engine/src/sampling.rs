//! From logits to a token.

use std::collections::HashMap;
use tandem_kv::TokenId;

/// How a sample's tokens are chosen. The defaults are OpenAI's.
#[derive(Clone, Debug)]
pub struct Sampling {
    /// Upper bound of new tokens; 0 generates nothing, `None` goes on until the context or the cache is full.
    pub max_tokens: Option<u32>,
    /// Stop tokens are not drawn before this many.
    pub min_tokens: u32,
    /// 0 is greedy.
    pub temperature: f32,
    /// Keep the likeliest tokens that together have this probability.
    pub top_p: f32,
    /// Keep this many of the likeliest tokens; 0 keeps all.
    pub top_k: u32,
    /// Keep tokens at least this likely, relative to the likeliest.
    pub min_p: f32,
    /// Subtracted once for every time the token was generated.
    pub frequency_penalty: f32,
    /// Subtracted if the token was generated.
    pub presence_penalty: f32,
    /// Divides (or multiplies, when negative) logits of tokens seen in prompt or output; 1 is off.
    pub repetition_penalty: f32,
    /// Added to the logits of these tokens.
    pub logit_bias: HashMap<TokenId, f32>,
    /// With the position it decides every draw.
    pub seed: u64,
    /// The sample ends with the first of these.
    pub stop_token_ids: Vec<TokenId>,
    /// Logprobs of the chosen token and of this many alternatives.
    pub logprobs: Option<u32>,
}

/// A token and the log of its probability (before temperature and penalties).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TokenLogprob {
    /// The token.
    pub token: TokenId,
    /// Natural logarithm.
    pub logprob: f32,
}

/// The chosen token's logprob, and the likeliest alternatives in order.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenLogprobs {
    /// Of the token that was chosen.
    pub logprob: f32,
    /// As many as were asked for.
    pub top: Vec<TokenLogprob>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            max_tokens: Some(16),
            min_tokens: 0,
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            frequency_penalty: 0.0,
            presence_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: HashMap::new(),
            seed: 0,
            stop_token_ids: Vec::new(),
            logprobs: None,
        }
    }
}
