//! Tensor parallelism: a model gives the same results on several devices as on one, up to the rounding of sums.

use super::{
    models::{LIMITS, bound, cpu, error, load_sharded, read, run, scattered},
    *,
};
use tandem_model::ModelFile;

fn engine(file: &dyn ModelFile, ranks: usize) -> Runner<Emulated> {
    Runner::new(load_sharded(file, ranks, 0).unwrap(), LIMITS).unwrap()
}

fn golden(name: &str) -> impl ModelFile {
    gguf(goldens::models().into_iter().find(|(known, _)| *known == name).unwrap().1)
}

fn tokens(len: usize) -> Vec<TokenId> {
    let mut random = Random::new(8);
    (0..len).map(|_| random.below(33)).collect()
}

/// The test covers all model families and weight types. The boundaries between shards of quantised matrices are inside quantisation blocks.
#[test]
fn two_ranks_give_the_reference_logits() {
    for golden in goldens::goldens() {
        let (_, writer) = goldens::models().into_iter().find(|(name, _)| *name == golden.model).unwrap();
        let mut ours = engine(&gguf(writer), 2);
        let all = run(&mut ours, &golden.tokens, &scattered(0, 1), &[golden.tokens.len()]);
        let expected: Vec<f32> = golden.logits.iter().map(|logit| *logit as f32).collect();
        let wrong = error(&all[all.len() - expected.len()..], &expected);
        assert!(wrong < bound(ours.shape().half), "{}: wrong by {wrong} of the logits' size", golden.model);
    }
}

#[test]
fn any_number_of_ranks_gives_the_cpu_engines_logits() {
    let sizes = Sizes { family: "qwen2", heads: 8, kv_heads: 4, ..goldens::LLAMA };
    let file = gguf(file(sizes, 9));
    let tokens = tokens(40);
    let expected = run(&mut cpu(&file), &tokens, &scattered(0, 1), &[40]);
    for ranks in [1, 2, 4] {
        let logits = run(&mut engine(&file, ranks), &tokens, &scattered(0, 1), &[3, 1, 1, 20, 1]);
        let wrong = error(&logits, &expected);
        assert!(wrong < bound(Half::BFloat16), "{ranks} ranks: wrong by {wrong}");
    }
}

/// Samples forty tokens of a greedy and of a random sequence on two engines. After each token, both engines continue with the token of the
/// first engine.
#[test]
fn two_ranks_sample_the_same_tokens_as_one_rank() {
    let file = golden("llama-f16");
    let mut engines = [1, 2].map(|ranks| engine(&file, ranks));
    let blocks = [scattered(0, 2), scattered(1, 2)];
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let samplers = [greedy, Sampling { seed: 4, ..Sampling::default() }].map(|sampling| Sampler::new(sampling, &[]));
    let mut sequences = [tokens(6), tokens(7)];
    for step in 0..40 {
        let chunk = |i: usize| {
            let start = if step == 0 { 0 } else { sequences[i].len() - 1 };
            let logits = Logits::Sample(samplers[i].request(sequences[i].len() as u32));
            Chunk { tokens: &sequences[i][start..], start: start as u32, blocks: &blocks[i], logits }
        };
        let [one, two] = engines.each_mut().map(|engine| sampled(engine.step(&[chunk(0), chunk(1)]).unwrap()));
        assert_eq!(
            one.iter().map(|sampled| sampled.token).collect::<Vec<_>>(),
            two.iter().map(|sampled| sampled.token).collect::<Vec<_>>()
        );
        sequences.iter_mut().zip(one).for_each(|(sequence, sampled)| sequence.push(sampled.token));
    }
}

/// Moved blocks must be equal bit for bit, and the other engine must be able to decode with them.
#[test]
fn blocks_can_be_moved_between_engines_of_one_two_and_four_ranks() {
    let file = gguf(file(Sizes { heads: 8, kv_heads: 4, ..goldens::LLAMA }, 10));
    let mut engines = [1, 2, 4, 1].map(|ranks| engine(&file, ranks));
    let tokens = tokens(21);
    let (from, to) = (scattered(0, 2), scattered(1, 2));
    run(&mut engines[1], &tokens[..20], &from, &[20]);
    let computed: Vec<Vec<u8>> = from.iter().take(5).map(|block| read(&engines[1], *block)).collect();
    assert!(computed.iter().all(|block| block.len() == engines[0].describe().block_bytes));
    let last = |engine: &mut dyn Engine, blocks| {
        let chunk = Chunk { tokens: &tokens[20..], start: 20, blocks, logits: Logits::Last };
        engine.step(&[chunk]).unwrap().into_logits()
    };
    let expected = last(&mut engines[1], &from);
    for i in [0, 2, 3] {
        for (block, bytes) in to.iter().zip(&computed) {
            engines[i].write_block(BlockId(40), bytes).unwrap();
            engines[i].copy_block(BlockId(40), *block).unwrap();
            assert_eq!(&read(&engines[i], *block), bytes);
        }
        let wrong = error(&last(&mut engines[i], &to), &expected);
        assert!(wrong < bound(engines[i].shape().half), "wrong by {wrong}");
    }
    // Blocks are copied to an engine with another number of ranks and back. They must be equal bit for bit.
    let mut alone = engine(&file, 1);
    run(&mut alone, &tokens[..20], &from, &[20]);
    let own: Vec<Vec<u8>> = from.iter().take(5).map(|block| read(&alone, *block)).collect();
    for ((from, to), bytes) in from.iter().zip(&to).zip(&own) {
        engines[2].write_block(*from, bytes).unwrap();
        alone.write_block(*to, &read(&engines[2], *from)).unwrap();
    }
    assert_eq!(last(&mut alone, &to), last(&mut alone, &from));
}

/// Tests all combinations: the rank is lost in the first all-reduce or in a later one, and the step returns no output, a sampled token, or
/// logits.
#[test]
fn lost_rank_fails_the_step_without_a_hang() {
    for (rank, sums) in [(0, 1), (1, 1), (1, 2)] {
        let sampler = Sampler::new(Sampling::default(), &[]);
        for logits in [Logits::None, Logits::Sample(sampler.request(9)), Logits::All] {
            let models = load_sharded(&golden("llama-f16"), 2, 0).unwrap();
            let devices: Vec<Emulated> = models.iter().map(|model| model.device.new_stream(Purpose::Steps).unwrap()).collect();
            let mut engine = Runner::new(models, LIMITS).unwrap();
            let (blocks, tokens) = (scattered(0, 1), tokens(9));
            run(&mut engine, &tokens[..8], &blocks, &[8]);
            devices[rank].fail_after(sums);
            let chunk = Chunk { tokens: &tokens[8..], start: 8, blocks: &blocks, logits };
            let lost = engine.step(&[chunk]);
            assert!(matches!(lost, Err(EngineError::Lost(_))), "rank {rank} after {sums} sums: {lost:?}");
            drop(engine);
            assert!(devices.iter().all(|device| device.allocated_bytes() == 0), "all memory is freed");
        }
    }
}

#[test]
fn each_rank_allocates_its_shard_only_and_frees_it_on_drop() {
    let file = golden("qwen2-q8_0");
    let [whole, shard] = [1, 2].map(|ranks| load_sharded(&file, ranks, 0).unwrap());
    let devices: Vec<Emulated> = shard.iter().map(|model| model.device.new_stream(Purpose::Steps).unwrap()).collect();
    let weights: Vec<usize> = devices.iter().map(Emulated::allocated_bytes).collect();
    assert!(weights.iter().all(|bytes| *bytes < whole[0].device.allocated_bytes()));
    assert!(weights[1] < weights[0], "only the first rank has the head");
    let mut engine = Runner::new(Arc::clone(&shard), LIMITS).unwrap();
    run(&mut engine, &[1; 30], &scattered(0, 1), &[30]);
    assert_eq!(engine.describe().block_bytes, 2 * shard[0].shape.block_bytes());
    assert_eq!(engine.describe().block_bytes, whole[0].shape.block_bytes());
    drop(engine);
    assert_eq!(devices.iter().map(Emulated::allocated_bytes).collect::<Vec<_>>(), weights);
    drop(shard);
    assert!(devices.iter().all(|device| device.allocated_bytes() == 0));
}

#[test]
fn uneven_tensor_parallelism_is_refused_with_the_possible_degrees() {
    let refused = |sizes, ranks| load_sharded(&gguf(file(sizes, 1)), ranks, 0).err().expect("the step is refused").to_string();
    let fine = goldens::LLAMA;
    for (sizes, ranks, expected) in [
        (fine, 3, "--tp 3 does not fit the model, which has 4 query heads, 2 key heads and 96 feed-forward columns"),
        (fine, 4, "use one of [1, 2]"),
        (Sizes { heads: 8, kv_heads: 8, ..fine }, 8, "use one of [1, 2, 4]"),
        (Sizes { ffn: 88, ..fine }, 2, "use one of [1]"),
    ] {
        let error = refused(sizes, ranks);
        assert!(error.contains(expected), "{error}");
    }
}
