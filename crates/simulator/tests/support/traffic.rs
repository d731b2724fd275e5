//! Made-up conversations, for simulations without a recording. Their numbers are close to those of the recorded ones: prompts of 12,000
//! tokens on average, of which a good third repeats earlier turns, and answers of 340 tokens.

use super::Lcg;
use std::time::Duration;
use tandem_simulator::SimulatedRequest;

/// The number of tokens in a block.
const BLOCK_TOKENS: u64 = 512;

/// The number of requests per second in the recording.
const RATE: f64 = 3.4;
/// The mean time from a request to the next turn of its conversation, in seconds.
const PAUSE_S: f64 = 40.0;
/// The fraction of turns that are followed by another turn.
const CONTINUES: f64 = 0.6;
/// The medians of three numbers: the blocks in a conversation's first prompt, the blocks that a later turn adds, and the tokens in an answer.
const FIRST_BLOCKS: f64 = 11.0;
const ADDED_BLOCKS: f64 = 4.0;
const ANSWER_TOKENS: f64 = 230.0;
/// The standard deviation of the natural logarithms of these three numbers.
const SPREAD: f64 = 0.9;
/// The maximum number of blocks in a prompt.
const BLOCKS_MAX: usize = 200;

impl Lcg {
    /// Returns a random number above 0 and at most 1.
    fn uniform(&mut self) -> f64 {
        (self.below(1 << 30) + 1) as f64 / f64::from(1 << 30)
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -self.uniform().ln() * mean
    }

    /// Returns a log-normally distributed number with this median.
    fn log_normal(&mut self, median: f64) -> f64 {
        let normal = (-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos();
        median * (SPREAD * normal).exp()
    }
}

/// Returns the first `count` requests of conversations that begin at random times. There are `faster` times as many requests per second as in
/// the recording, and answers are `answers` times as long. All prompts have their first block in common.
pub fn conversations(count: usize, faster: f64, answers: f64, seed: u64) -> Vec<SimulatedRequest> {
    let mut random = Lcg(seed);
    let (mut prompts, mut began, mut next_id) = (Vec::new(), 0.0, 1_u64);
    let mut add = |blocks: &mut Vec<u64>, count: f64| {
        let count = (count.ceil() as usize).min(BLOCKS_MAX.saturating_sub(blocks.len()));
        blocks.extend(next_id..next_id + count as u64);
        next_id += count as u64;
    };
    for _ in 0..count {
        began += random.exponential(1.0 / (RATE * faster * (1.0 - CONTINUES)));
        let (mut at, mut history) = (began, vec![0]);
        add(&mut history, random.log_normal(FIRST_BLOCKS));
        loop {
            let answer_tokens = (random.log_normal(ANSWER_TOKENS) * answers).ceil() as u64;
            prompts.push(SimulatedRequest {
                at: Duration::from_secs_f64(at),
                // The prompt ends with an incomplete block.
                prompt_tokens: (history.len() as u64 * BLOCK_TOKENS + BLOCK_TOKENS / 2) as u32,
                blocks: history.clone().into(),
                answer_tokens,
                max_tokens: 0,
            });
            if random.uniform() > CONTINUES || history.len() >= BLOCKS_MAX - 1 {
                break;
            }
            at += random.exponential(PAUSE_S);
            add(&mut history, random.log_normal(ADDED_BLOCKS) + answer_tokens as f64 / BLOCK_TOKENS as f64);
        }
    }
    prompts.sort_by_key(|prompt| prompt.at);
    prompts.truncate(count);
    prompts
}
