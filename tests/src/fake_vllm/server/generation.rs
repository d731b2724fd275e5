//! The answer of a fake vLLM server.

use super::*;
use std::io;

pub(super) struct Generation {
    pub(super) run: Run,
    pub(super) context: Vec<u32>,
    /// What the tokens depend on besides the context: the name of the LoRA and the files of the images.
    pub(super) inputs: String,
    pub(super) params: Value,
    pub(super) max_tokens: usize,
    pub(super) generated: usize,
    pub(super) is_aborted: watch::Receiver<bool>,
    pub(super) usage: Value,
}

impl Generation {
    /// Generates a token. Returns the token, which is `None` if the request was aborted, and the finish reason, which is `None` if more
    /// tokens follow.
    async fn step(&mut self) -> (Option<u32>, Option<&'static str>) {
        let step = self.run.engine.settings.step;
        tokio::select! {
            biased;
            _ = self.is_aborted.wait_for(|aborted| *aborted) => {
                // vLLM loses the count of cached tokens of a request without generated tokens, so the fake server does, too.
                if let Some(cached) = self.usage.pointer_mut("/prompt_tokens_details/cached_tokens").filter(|_| self.generated == 0) {
                    *cached = 0.into();
                }
                return (None, Some("abort"));
            }
            () = tokio::time::sleep(step) => {}
        }
        let seed = (self.params["temperature"] != 0.0).then(|| self.params["seed"].as_u64().unwrap_or(0));
        let token = next_token_of(&self.inputs, &self.context, seed);
        self.context.push(token);
        self.generated += 1;
        let stops = self.params["stop_token_ids"].as_array().is_some_and(|stops| stops.contains(&token.into()));
        let finish = if stops { Some("stop") } else { (self.generated == self.max_tokens).then_some("length") };
        (Some(token), finish)
    }

    fn choice(&self, token: Option<u32>, finish: Option<&str>) -> Value {
        let tokens: Vec<u32> = token.into_iter().collect();
        let logprobs = self.params["logprobs"].as_u64().map(|top| {
            let content: Vec<Value> = tokens
                .iter()
                .map(|token| {
                    let top: Vec<Value> = (0..top)
                        .map(|rank| json!({ "token_id": token + rank as u32, "logprob": -0.5 - rank as f64, "rank": rank + 1 }))
                        .collect();
                    json!({ "token_id": token, "logprob": -0.5, "rank": 1, "top_logprobs": top })
                })
                .collect();
            json!({ "content": content })
        });
        json!({ "index": 0, "finish_reason": finish, "stop_reason": null, "token_ids": tokens, "logprobs": logprobs })
    }

    pub(super) fn streamed(self) -> Response {
        let id = self.run.id.clone();
        let chunks = stream::unfold((Some(self), false), move |(generation, finished)| {
            let id = id.clone();
            async move {
                let mut generation = generation?;
                if generation.run.engine.crashed.load(Ordering::SeqCst) {
                    return Some((Err(io::Error::other("crashed")), (None, true)));
                }
                if finished {
                    let last = json!({ "request_id": id, "usage": generation.usage, "output_mode": "tokens", "choices": [] });
                    return Some((Ok(format!("data: {last}\n\ndata: [DONE]\n\n")), (None, true)));
                }
                let (token, finish) = generation.step().await;
                let choice = generation.choice(token, finish);
                let chunk = json!({ "request_id": id, "usage": null, "output_mode": "tokens", "choices": [choice] });
                Some((Ok(format!("data: {chunk}\n\n")), (Some(generation), finish.is_some())))
            }
        });
        let kind = [("content-type", "text/event-stream; charset=utf-8")];
        (kind, Body::from_stream(chunks)).into_response()
    }

    pub(super) async fn whole(mut self, tokens: &[u32], transfer: &Value, id: &str) -> Response {
        let (mut generated, mut last) = (Vec::new(), None);
        while last.is_none() {
            let (token, finish) = self.step().await;
            generated.extend(token);
            last = finish;
        }
        let engine = &self.run.engine;
        let params = (transfer["do_remote_decode"] == true && last != Some("abort")).then(|| {
            let remote = format!("{id}-{}", engine.next.fetch_add(1, Ordering::SeqCst));
            let held = HeldKv { tokens: tokens.to_vec(), until: Instant::now() + engine.settings.lease };
            engine.settings.fabric.lock().insert((engine.id.clone(), remote.clone()), held);
            json!({
                "do_remote_prefill": true, "do_remote_decode": false, "remote_block_ids": [[1]], "remote_engine_id": engine.id,
                "remote_request_id": remote, "remote_host": "127.0.0.1", "remote_port": 1, "tp_size": 1,
                "remote_num_tokens": tokens.len(),
                "remote_prefill_cached_tokens": self.usage.pointer("/prompt_tokens_details/cached_tokens"),
            })
        });
        let prompt_logprobs = self.params["prompt_logprobs"].as_u64().map(|_| {
            let of = |(at, token): (usize, &u32)| {
                if at == 0 { Value::Null } else { json!({ token.to_string(): { "logprob": -1.0, "rank": 1 } }) }
            };
            tokens.iter().enumerate().map(of).collect::<Vec<_>>()
        });
        let choice = json!({ "index": 0, "finish_reason": last, "stop_reason": null, "token_ids": generated, "logprobs": null });
        Json(json!({
            "request_id": id, "usage": self.usage, "prompt_logprobs": prompt_logprobs, "kv_transfer_params": params,
            "output_mode": "tokens", "choices": [choice],
        }))
        .into_response()
    }
}
