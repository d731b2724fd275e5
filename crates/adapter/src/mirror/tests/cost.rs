//! Measures the cost of a block.

use super::*;
use std::io::Write;
use tokio::time::Instant;

/// Stores prompts of 30,000 tokens in blocks of 16 as vLLM reports them, in two sizes of events, and removes them, so that a cache of a million
/// tokens stays full. Prints the time for a stored and removed block.
#[test]
#[ignore = "it is a measurement: run it alone, with optimisation"]
fn measures_the_cost_of_a_block() {
    const TOKENS: usize = 16;
    const BLOCKS: usize = 1_875;
    const PROMPTS: usize = 33;
    let settings = |settings: &mut MirrorSettings| {
        (settings.block_size, settings.engine_block_size, settings.engine_blocks_max) = (16, 16, 1 << 20);
        settings.device_blocks = 1 << 20;
    };
    let hashes_of = |prompt: usize| (0..BLOCKS).map(move |block| number(tandem_kv::mix((prompt * BLOCKS + block) as u64)));
    for step in [1, 128] {
        let mut mirror = mirror_with(settings);
        let mut turns = Vec::new();
        for prompt in 0..PROMPTS * 4 {
            let tokens: Vec<TokenId> = (0..BLOCKS * TOKENS).map(|at| (prompt * 7919 + at) as TokenId).collect();
            let hashes: Vec<EngineHash> = hashes_of(prompt).collect();
            let stored = |at: usize, end: usize| BlocksStored {
                hashes: hashes[at..end].to_vec(),
                parent: at.checked_sub(1).map(|before| hashes[before].clone()),
                tokens: tokens[at * TOKENS..end * TOKENS].to_vec(),
                block_size: TOKENS as u32,
                extra_keys: if at == 0 { vec![ExtraKeys::Text(cache_salt(&KEY, &namespace()))] } else { Vec::new() },
                ..first_blocks(&[0], Vec::new())
            };
            let steps = (0..BLOCKS).step_by(step);
            let mut events: Vec<EngineEvent> = steps.map(|at| EngineEvent::Stored(stored(at, (at + step).min(BLOCKS)))).collect();
            if let Some(old) = prompt.checked_sub(PROMPTS) {
                let hashes = hashes_of(old).collect::<Vec<_>>().into_iter().rev().collect();
                events.push(EngineEvent::Removed(BlocksRemoved { hashes, tier: Ok(Tier::Device), group: Some(0) }));
            }
            // A prompt's events are applied in parts, and the parts' changes are taken, as for each message of an engine.
            let started = Instant::now();
            for part in events.chunks(8) {
                mirror.apply(part);
                std::hint::black_box(mirror.take());
            }
            if prompt >= PROMPTS {
                turns.push(started.elapsed().as_secs_f64() * 1e9 / BLOCKS as f64);
            }
        }
        assert_eq!(mirror.cached_blocks(), PROMPTS * BLOCKS);
        turns.sort_by(f64::total_cmp);
        let (median, best) = (turns[turns.len() / 2], turns[0]);
        let line = format!(
            "events of {step} blocks: {median:.0} ns for a block that is stored and one that is removed (best {best:.0})\n"
        );
        std::io::stderr().write_all(line.as_bytes()).expect("stderr is writable");
    }
}
