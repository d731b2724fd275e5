//! The router's choices on modelled clusters: real index, bookings and costs, and workers with real prefix caches whose time is
//! modelled. One token stands for a block, so that a trace of thousands of long prompts takes a second.

mod engines;
mod queues;
mod rules;
mod worlds;

use std::sync::Arc;
use tandem_kv::{Namespace, TokenId};

/// Times are in microseconds.
type Micros = u64;

/// One request: a number for each block of its prompt; a last one stands for the rest, which is never shared.
#[derive(Clone)]
struct Prompt {
    at: Micros,
    blocks: Arc<[TokenId]>,
    answer_tokens: u64,
}

fn namespace() -> Namespace {
    Namespace::new("m", "", "", "")
}

/// Says so where a test cannot run.
fn skipped() {
    std::io::Write::write_all(&mut std::io::stderr(), b"SKIPPED: no recorded trace\n").expect("stderr");
}

/// A generator that a seed decides.
pub(super) struct Draw(pub(super) u64);

impl Draw {
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

/// Documents of `blocks` blocks, each asked about `questions` times, in any order.
fn documents(count: u32, blocks: u32, questions: u32, seed: u64) -> Vec<Prompt> {
    let mut prompts = Vec::new();
    for (document, question) in (0..count).flat_map(|document| (0..questions).map(move |question| (document, question))) {
        let text = (0..blocks).map(|block| document << 16 | block);
        prompts.push(Prompt {
            at: 0,
            answer_tokens: 1,
            blocks: text.chain([u32::MAX - document * questions - question]).collect(),
        });
    }
    Draw(seed).shuffle(&mut prompts);
    prompts
}

/// The first requests of the recorded hour, `faster` times as fast. It lies beside the repository, not in it.
fn trace(count: usize, faster: f64) -> Option<Vec<Prompt>> {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/data/mooncake_conversation_trace.jsonl");
    let text = std::fs::read_to_string(path).ok()?;
    let number = |line: &str, key: &str| -> f64 {
        let (_, rest) = line.split_once(key).expect("the key is there");
        rest.split([',', '}']).next().and_then(|digits| digits.trim().parse().ok()).expect("a number")
    };
    let prompts = text.lines().take(count).map(|line| {
        let (_, ids) = line.split_once("\"hash_ids\": [").expect("the key is there");
        let ids = ids.split(']').next().expect("a list").split(", ").map(|id| id.parse().expect("an id"));
        let at = (number(line, "\"timestamp\":") * 1e3 / faster) as Micros;
        Prompt { at, answer_tokens: number(line, "\"output_length\":") as u64, blocks: ids.collect() }
    });
    Some(prompts.collect())
}
