//! The expected answer of a request: the tokens of one engine without a cluster, a cache or other requests, formatted by OpenAI's
//! rules.

use super::plan::{BLOCK_SIZE, Wanted};
use std::time::Duration;
use tandem_engine::{
    EngineHandle, EngineSettings, Event, FinishReason, Generate, KvSource, Sampling,
    sim::{SimEngine, SimSettings},
};
use tandem_kv::{HashKey, Namespace};
use tandem_model::sim::IM_END;

/// The choices of an answer.
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

/// Runs the request alone, in its own runtime.
pub(super) fn expected(wanted: &Wanted) -> Expected {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime without I/O needs nothing from the system");
    let settings = EngineSettings {
        chunk_budget: 4_096,
        batch_max: 8,
        queue_max: 1,
        prefix_caching: false,
        hash_key: HashKey::NONE,
        max_buffered_events: 1_024,
        step_max: Duration::from_secs(60),
    };
    let sim = SimSettings { block_size: BLOCK_SIZE, capacity_blocks: 128, ..SimSettings::default() };
    let generate = Generate {
        request_id: "alone".to_owned(),
        account: String::new(),
        namespace: Namespace::new("", "", "", ""),
        prompt: wanted.prompt.bytes().map(u32::from).collect(),
        sampling: Sampling {
            max_tokens: Some(wanted.max_tokens),
            temperature: wanted.temperature,
            seed: wanted.seed,
            stop_token_ids: if wanted.ignore_end { Vec::new() } else { vec![IM_END] },
            ..Sampling::default()
        },
        samples: wanted.samples,
        kv: KvSource::Local,
        prompt_logprobs: None,
        generated: Vec::new(),
    };
    let mut drawn: Vec<(Vec<u32>, &'static str)> = vec![(Vec::new(), ""); wanted.samples as usize];
    runtime.block_on(async {
        let engine = SimEngine::new(sim);
        let clock = engine.clock();
        let (engine, running) = EngineHandle::simulated(Box::new(engine), clock, settings, 0);
        let listening = async {
            let mut job = engine.generate(generate).await.expect("an empty engine takes it");
            while let Some(event) = job.next().await {
                match event {
                    Event::Token { sample, token, .. } => drawn[sample as usize].0.push(token),
                    Event::Finished { sample, reason } => {
                        drawn[sample as usize].1 = match reason {
                            FinishReason::Stop(_) => "stop",
                            FinishReason::Length => "length",
                        };
                    }
                    _ => {}
                }
            }
            drop(engine);
        };
        tokio::join!(running, listening);
    });
    let choices = drawn.into_iter().map(|(tokens, finish)| choice(&tokens, finish, wanted)).collect();
    Expected { choices }
}

/// Decodes bytes as text, up to a stop string, which ends the answer with the token that completes it.
fn choice(tokens: &[u32], finish: &'static str, wanted: &Wanted) -> Choice {
    let mut text = String::new();
    for (count, token) in (1..).zip(tokens) {
        if let Ok(byte) = u8::try_from(*token) {
            text.push(char::from(byte));
        }
        if let Some(start) = wanted.stop.as_ref().and_then(|stop| text.find(stop)) {
            text.truncate(start);
            return Choice { text, tokens: count, finish: "stop" };
        }
    }
    Choice { text, tokens: tokens.len() as u64, finish }
}
