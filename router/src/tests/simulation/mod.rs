//! Simulations of the router on modelled clusters. The index, bookings, costs and prefix caches are real; time is modelled. One token
//! stands for a block, so that the simulation of thousands of long prompts takes only a second.

mod engine;
mod engines;
mod queues;
mod rules;
mod traffic;
mod worlds;

use std::sync::Arc;
use tandem_kv::{Namespace, TokenId};

/// A time in microseconds.
type Micros = u64;

/// One request. Its prompt has one token for each block; the last token stands for the incomplete block at the end, which is never shared.
#[derive(Clone)]
struct Prompt {
    at: Micros,
    blocks: Arc<[TokenId]>,
    answer_tokens: u64,
    /// The limit that the request sets for its answer; 0: none.
    max_tokens: u32,
}

fn namespace() -> Namespace {
    Namespace::new("m", "", "", "")
}

/// Prints that a test is skipped.
fn skipped() {
    std::io::Write::write_all(&mut std::io::stderr(), b"SKIPPED: no recorded trace\n").expect("stderr is writable");
}

/// A pseudo-random number generator (a linear congruential one).
struct Lcg(u64);

impl Lcg {
    fn below(&mut self, bound: usize) -> usize {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 33) as usize) % bound
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for last in (1..items.len()).rev() {
            items.swap(last, self.below(last + 1));
        }
    }
}

/// Returns prompts in random order: `questions` questions about each of `count` documents of `blocks` blocks.
fn documents(count: u32, blocks: u32, questions: u32, seed: u64) -> Vec<Prompt> {
    let mut prompts = Vec::new();
    for (document, query) in (0..count).flat_map(|document| (0..questions).map(move |query| (document, query))) {
        let text = (0..blocks).map(|block| document << 16 | block);
        prompts.push(Prompt {
            at: 0,
            answer_tokens: 1,
            max_tokens: 0,
            blocks: text.chain([u32::MAX - document * questions - query]).collect(),
        });
    }
    Lcg(seed).shuffle(&mut prompts);
    prompts
}

/// Returns the first recorded requests, which arrive `faster` times as fast as recorded; `None` without the recording, which is not part of
/// the repository. The variable `TANDEM_TRACE` names its file.
fn trace(count: usize, faster: f64) -> Option<Vec<Prompt>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data/mooncake_conversation_trace.jsonl");
    let path = std::env::var_os("TANDEM_TRACE").unwrap_or_else(|| path.into());
    let text = std::fs::read_to_string(path).ok()?;
    let number = |line: &str, key: &str| -> f64 {
        let (_, rest) = line.split_once(key).expect("the line has the key");
        rest.split([',', '}']).next().and_then(|digits| digits.trim().parse().ok()).expect("the line has a number")
    };
    let prompts = text.lines().take(count).map(|line| {
        let (_, ids) = line.split_once("\"hash_ids\": [").expect("the line has the key");
        let ids = ids
            .split(']')
            .next()
            .expect("hash_ids ends with a bracket")
            .split(", ")
            .map(|id| id.parse().expect("a block id is a number"));
        let at = (number(line, "\"timestamp\":") * 1e3 / faster) as Micros;
        Prompt { at, answer_tokens: number(line, "\"output_length\":") as u64, max_tokens: 0, blocks: ids.collect() }
    });
    Some(prompts.collect())
}
