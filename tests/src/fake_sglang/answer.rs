//! Answers of a fake SGLang server: whole ones, and streams of events.

use super::{CONSTRAINED_TOKENS, CONSTRAINTS, END_TOKEN, Run};
use crate::fake_vllm::engine::next_token_of;
use axum::{
    Json,
    body::Body,
    response::{IntoResponse, Response},
};
use futures::{StreamExt, stream};
use serde_json::{Value, json};
use std::convert::Infallible;
use tokio::sync::watch;

/// A request while it generates an answer.
pub(super) struct Generation {
    pub run: Run,
    pub body: Value,
    pub lora: String,
    pub seed: Option<u64>,
    pub context: Vec<u32>,
    pub prompt_len: usize,
    pub cached_tokens: usize,
    pub is_aborted: watch::Receiver<bool>,
    /// The first token, if a prefill server has sampled it.
    pub first: Option<u32>,
    /// The number of tokens in events so far.
    pub sent: usize,
}

impl Generation {
    pub fn answer(self) -> Response {
        if self.body["stream"] == true {
            return self.streamed();
        }
        Json(self.event(Some(json!({ "type": "length", "length": 0 })))).into_response()
    }

    fn streamed(self) -> Response {
        let events = stream::unfold(Some(self), async |generation| {
            let mut generation = generation?;
            let finish = generation.step().await;
            let ends = finish.is_some();
            let event = generation.event(finish);
            generation.sent = generation.context.len() - generation.prompt_len;
            let done = if ends { "data: [DONE]\n\n" } else { "" };
            if ends {
                generation.run.abort_later();
            }
            Some((Ok::<_, Infallible>(format!("data: {event}\n\n{done}")), (!ends).then_some(generation)))
        });
        ([("content-type", "text/event-stream")], Body::from_stream(events.boxed())).into_response()
    }

    /// Generates a token. Returns the finish reason; `None` if more tokens follow.
    async fn step(&mut self) -> Option<Value> {
        tokio::select! {
            biased;
            _ = self.is_aborted.wait_for(|aborted| *aborted) => {
                return Some(json!({ "type": "abort", "message": "Aborted", "status_code": null, "err_type": null }));
            }
            () = tokio::time::sleep(self.run.server.settings.step) => {}
        }
        let token = self.first.take().unwrap_or_else(|| next_token_of(&self.lora, &self.context, self.seed));
        self.context.push(token);
        let params = &self.body["sampling_params"];
        let generated = self.context.len() - self.prompt_len;
        let stops = token == END_TOKEN || params["stop_token_ids"].as_array().is_some_and(|stops| stops.contains(&token.into()));
        let is_complete = CONSTRAINTS.iter().any(|field| !params[*field].is_null()) && generated == CONSTRAINED_TOKENS;
        if params["ignore_eos"] == false && stops || is_complete {
            return Some(json!({ "type": "stop", "matched": token }));
        }
        let max = params["max_new_tokens"].as_u64().unwrap_or(128);
        (generated as u64 >= max).then(|| json!({ "type": "length", "length": max }))
    }

    /// Returns the event with the tokens so far, or with the new ones.
    pub fn event(&self, finish_reason: Option<Value>) -> Value {
        let generated = &self.context[self.prompt_len..];
        let first = if self.run.server.settings.incremental { self.sent } else { 0 };
        let of = &generated[first..];
        let mut meta = json!({
            "id": self.run.rid, "finish_reason": finish_reason, "prompt_tokens": self.prompt_len, "weight_version": "default",
            "num_retractions": 0, "reasoning_tokens": 0, "completion_tokens": generated.len(), "cached_tokens": self.cached_tokens,
            "cached_tokens_details": { "device": self.cached_tokens, "host": 0 },
        });
        if self.body["return_logprob"] == true {
            let ranked = |token: u64, rank: u64| json!([-0.5 - rank as f64, token + rank, null]);
            let top = self.body["top_logprobs_num"].as_u64().unwrap_or(0);
            let tops = |tokens: &[u32]| -> Value {
                tokens.iter().map(|token| (0..top).map(|rank| ranked((*token).into(), rank)).collect::<Value>()).collect()
            };
            let of_tokens = |tokens: &[u32]| -> Value { tokens.iter().map(|token| ranked((*token).into(), 0)).collect() };
            (meta["output_token_logprobs"], meta["output_top_logprobs"]) = (of_tokens(of), tops(of));
            if let Some(requested) = self.body["token_ids_logprob"].as_array() {
                let each: Value = requested.iter().map(|token| json!([-4.0, token, null])).collect();
                meta["output_token_ids_logprobs"] = of.iter().map(|_| each.clone()).collect();
            }
            if self.body["logprob_start_len"] == 0 {
                let prompt = &self.context[..self.prompt_len];
                (meta["input_token_logprobs"], meta["input_top_logprobs"]) = (of_tokens(prompt), tops(prompt));
                (meta["input_token_logprobs"][0][0], meta["input_top_logprobs"][0]) = (Value::Null, Value::Null);
            }
        }
        json!({ "text": "", "output_ids": of, "meta_info": meta })
    }
}
