//! Tests of samples that resume at the token where another worker stopped.

use super::*;
use crate::Generated;
use proptest::prelude::*;

/// Returns the job that resumes `job` on another worker. `kept` has the number of tokens that each sample had generated, or `None` if the sample had
/// ended.
fn rest(job: &Generate, whole: &[Vec<TokenId>], kept: &[Option<usize>]) -> Generate {
    let generated = |(sample, kept): (u32, &Option<usize>)| {
        let tokens = &whole[sample as usize];
        kept.map(|kept| Generated { sample, tokens: tokens[..kept.min(tokens.len() - 1)].to_vec() })
    };
    Generate { generated: (0..).zip(kept).filter_map(generated).collect(), ..job.clone() }
}

fn check(job: &Generate, kept: &[Option<usize>], capacity: u32, budget: u32) {
    let whole = alone(job.clone());
    let rest = rest(job, &whole, kept);
    if rest.generated.is_empty() {
        return;
    }
    let mut world = World::new(capacity, EngineSettings { chunk_budget: budget, ..SETTINGS });
    world.machine.generate(0, rest.clone(), world.now).expect("a resumed job fits if the whole job did");
    world.run();
    for Generated { sample, tokens } in &rest.generated {
        let all = [tokens.as_slice(), &world.tokens(0, *sample)].concat();
        assert_eq!(all, whole[*sample as usize], "sample {sample} from token {}", tokens.len());
    }
    let finished = |event: &&Event| matches!(event, Event::Finished { .. });
    assert_eq!(world.events[&0].iter().filter(finished).count(), rest.generated.len(), "samples that ended are not resumed");
    assert_eq!(world.ended, [0]);
    world.assert_idle();
}

fn penalised(len: usize, max_tokens: u32) -> Generate {
    let mut job = generate(prompt("from the boundary", len), max_tokens);
    job.sampling.frequency_penalty = 0.7;
    job.sampling.presence_penalty = 0.4;
    job.sampling.repetition_penalty = 1.3;
    job.sampling.min_tokens = 11;
    job.sampling.stop_token_ids = b"etaoin".map(TokenId::from).to_vec();
    job
}

#[test]
fn resumed_samples_continue_penalties_lengths_and_random_numbers() {
    for len in [1, 16, 17, 40] {
        for kept in [0, 1, 5, 10, 11, 12, 30] {
            check(&penalised(len, 60), &[Some(kept)], 64, 64);
        }
    }
}

#[test]
fn resumed_sample_at_its_token_limit_finishes_immediately() {
    let job = generate(prompt("at the limit", 30), 9);
    let mut resumed = Generate { generated: vec![Generated { sample: 0, tokens: alone(job.clone())[0].clone() }], ..job.clone() };
    let mut world = World::new(64, SETTINGS);
    world.machine.generate(0, resumed.clone(), world.now).expect("the job fits in the cache");
    world.run();
    assert!(world.tokens(0, 0).is_empty());
    assert!(matches!(world.events[&0].last(), Some(Event::Finished { reason: FinishReason::Length, .. })));
    world.assert_idle();
    resumed.generated[0].tokens.push(1);
    let beyond = world.machine.generate(1, resumed, world.now);
    assert_eq!(beyond, Err(Refusal::BeyondContext { needed: 40, context_length: 39 }));
}

#[test]
fn resumed_job_receives_the_kv_of_prompt_and_generated_tokens() {
    for (kept, common_blocks) in [(vec![Some(20)], 4), (vec![Some(20), None, Some(3)], 3)] {
        let mut job = penalised(40, 60);
        job.samples = kept.len() as u32;
        let whole = alone(job.clone());
        let rest = rest(&job, &whole, &kept);
        let (mut source, mut destination) = (World::new(64, SETTINGS), World::new(64, SETTINGS));
        source.machine.prefill(0, prefill(rest.shared()), source.now).expect("the job fits in the cache");
        source.machine.send_blocks(0, (0..64).collect(), BlockAccess::Copied);
        source.run();
        let remote = Generate { kv: KvSource::Remote, ..rest.clone() };
        destination.machine.generate(0, remote, destination.now).expect("the job fits in the cache");
        destination.run();
        let (ticket, missing) = destination.reserved(0).expect("blocks are available");
        assert_eq!(missing.len(), common_blocks, "only blocks that all samples share are missing");
        for (index, payload) in source.blocks(0) {
            destination.write(ticket, index, &payload).expect("the ticket allows the write");
        }
        destination.confirm(ticket);
        destination.run();
        for Generated { sample, tokens } in &rest.generated {
            assert_eq!([tokens.as_slice(), &destination.tokens(0, *sample)].concat(), whole[*sample as usize]);
        }
        destination.assert_idle();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]

    /// Each sample has the same text as when the job runs alone and without interruption, however the job is interrupted and however small
    /// the cache is.
    #[test]
    fn job_resumed_at_any_token_has_the_same_text(
        len in 1..70usize,
        max_tokens in 1..50u32,
        seed in 0..8u64,
        greedy in any::<bool>(),
        kept in prop::collection::vec(prop::option::of(0..50usize), 1..4),
        spare in 0..8u32,
        budget in 1..80u32,
    ) {
        let mut job = penalised(len, max_tokens);
        job.sampling.min_tokens = job.sampling.min_tokens.min(max_tokens);
        job.sampling.seed = seed;
        job.sampling.temperature = if greedy { 0.0 } else { 1.0 };
        job.samples = kept.len() as u32;
        let capacity = (len as u32 + max_tokens).div_ceil(16) * job.samples + spare;
        check(&job, &kept, capacity, budget);
    }
}
