//! The expected answer of a request. It consists of the tokens that one engine generates without a cluster, a cache or other requests,
//! decoded to text, and of OpenAI's finish reasons.

use super::plan::{BLOCK_SIZE, RequestSpec};
use crate::services::engine_settings;
use tandem_devices::sim::{SimEngine, SimSettings};
use tandem_engine::{EngineHandle, EngineSettings, Event, FinishReason, Generate, KvSource, Sampling};
use tandem_kv::{Namespace, Priority};
use tandem_model::sim::IM_END;

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Expected {
    pub(super) choices: Vec<Choice>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    pub(super) text: String,
    pub(super) tokens: u64,
    pub(super) finish: &'static str,
}

/// Runs the request on an engine that has no other requests, and returns the answer.
pub(super) fn expected(spec: &RequestSpec) -> Expected {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without I/O needs nothing from the system");
    let settings = EngineSettings { chunk_budget: 4_096, prefix_caching: false, ..engine_settings() };
    let sim = SimSettings { block_size: BLOCK_SIZE, capacity_blocks: 128, ..SimSettings::default() };
    let generate = Generate {
        request_id: "alone".to_owned(),
        account: String::new(),
        priority: Priority::default(),
        namespace: Namespace::new("", "", "", ""),
        prompt: spec.prompt.bytes().map(u32::from).collect(),
        sampling: Sampling {
            max_tokens: Some(spec.max_tokens),
            temperature: spec.temperature,
            seed: spec.seed,
            stop_token_ids: if spec.ignore_end { Vec::new() } else { vec![IM_END] },
            ..Sampling::default()
        },
        samples: spec.samples,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
        images: [].into(),
    };
    let mut generated: Vec<(Vec<u32>, &'static str)> = vec![(Vec::new(), ""); spec.samples as usize];
    runtime.block_on(async {
        let engine = SimEngine::new(sim);
        let clock = engine.clock();
        let (engine, running) = EngineHandle::simulated(Box::new(engine), clock, settings, 0);
        let receiving = async {
            let mut job = engine.generate(generate).await.expect("an idle engine accepts the request");
            while let Some(event) = job.next().await {
                match event {
                    Event::Token { sample, token, .. } => generated[sample as usize].0.push(token),
                    Event::Finished { sample, reason } => {
                        generated[sample as usize].1 = match reason {
                            FinishReason::Stop(_) | FinishReason::Complete => "stop",
                            FinishReason::Length => "length",
                        };
                    }
                    _ => {}
                }
            }
            drop(engine);
        };
        tokio::join!(running, receiving);
    });
    let choices = generated.into_iter().map(|(tokens, finish)| choice(&tokens, finish, spec)).collect();
    Expected { choices }
}

/// Decodes tokens, each of which is a byte, to text. The token that completes a stop string counts as the last one. The stop string is not
/// part of the text.
fn choice(tokens: &[u32], finish: &'static str, spec: &RequestSpec) -> Choice {
    let mut text = String::new();
    for (count, token) in (1..).zip(tokens) {
        if let Ok(byte) = u8::try_from(*token) {
            text.push(char::from(byte));
        }
        if let Some(start) = spec.stop.as_ref().and_then(|stop| text.find(stop)) {
            text.truncate(start);
            return Choice { text, tokens: count, finish: "stop" };
        }
    }
    Choice { text, tokens: tokens.len() as u64, finish }
}
