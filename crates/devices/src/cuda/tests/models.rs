//! Tests whole models, from tokens to logits, against the reference logits of `ci/goldens` and against the CPU engine.

use super::{emulated::ORDERS, *};
use crate::cpu::{CpuEngine, CpuModel, CpuSettings, Isa};
use tandem_model::ModelFile;

pub(super) const BLOCK_SIZE: usize = 4;
/// The shared memory of a thread block on Hopper, in bytes.
pub(super) const SHARED_MAX: usize = 227 << 10;
pub(super) const LIMITS: CudaLimits =
    CudaLimits { capacity_blocks: Some(64), engines: 1, step_tokens_max: 96, sequences_max: 8, urgent: false };

pub(super) fn load(file: &dyn ModelFile, order: u32) -> Arc<[Model<Emulated>]> {
    load_sharded(file, 1, order).unwrap()
}

pub(super) fn load_sharded(file: &dyn ModelFile, ranks: usize, order: u32) -> Result<Arc<[Model<Emulated>]>, CudaError> {
    let shards = (0..ranks).map(|rank| Shard { rank, ranks });
    shards
        .map(|shard| {
            Model::load(file, BLOCK_SIZE, SHARED_MAX, shard, weights::Origin::File, |shape| Ok(Emulated::new(shape, order)))
        })
        .collect()
}

pub(super) fn engine(file: &dyn ModelFile, order: u32) -> Runner<Emulated> {
    Runner::new(load(file, order), LIMITS).unwrap()
}

/// Returns a sequence's blocks in descending order, interleaved with those of other sequences.
pub(super) fn scattered(sequence: u32, sequences: u32) -> Vec<BlockId> {
    (0..24 / sequences).rev().map(|i| BlockId(i * sequences + sequence)).collect()
}

/// Runs the tokens in chunks of these lengths (the last length is repeated); returns all logits.
pub(super) fn run(engine: &mut dyn Engine, tokens: &[TokenId], blocks: &[BlockId], lens: &[usize]) -> Vec<f32> {
    let (mut logits, mut start, mut next) = (Vec::new(), 0, 0);
    while start < tokens.len() {
        let len = lens[next.min(lens.len() - 1)].min(tokens.len() - start);
        let chunk = Chunk { tokens: &tokens[start..start + len], start: start as u32, blocks, logits: Logits::All };
        logits.extend(engine.step(&[chunk]).unwrap().into_logits());
        (start, next) = (start + len, next + 1);
    }
    logits
}

/// Returns the relative error: the norm of the difference divided by the norm of the expected logits.
pub(super) fn error(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let squares = |numbers: &mut dyn Iterator<Item = f64>| numbers.map(|number| number * number).sum::<f64>().sqrt();
    let wrong = squares(&mut found.iter().zip(expected).map(|(found, expected)| f64::from(found - expected)));
    assert!(wrong.is_finite(), "logits are finite");
    wrong / squares(&mut expected.iter().map(|expected| f64::from(*expected)))
}

pub(super) fn cpu(file: &dyn ModelFile) -> CpuEngine {
    let settings = CpuSettings { block_size: BLOCK_SIZE as u32, capacity_blocks: 64, threads: 1, isa: Isa::detect() };
    CpuEngine::new(CpuModel::load(file).unwrap(), settings).unwrap()
}

/// Error bound for a few layers in 16-bit floats: bfloat16 has 8 significant bits, IEEE half precision 11.
pub(super) fn bound(half: Half) -> f64 {
    match half {
        Half::BFloat16 => 2e-2,
        Half::Float16 => 3e-3,
    }
}

#[test]
fn small_models_give_the_reference_logits() {
    for golden in goldens::goldens() {
        let (_, writer) = goldens::models().into_iter().find(|(name, _)| *name == golden.model).unwrap();
        let file = gguf(writer);
        let mut ours = engine(&file, ORDERS[0]);
        let all = run(&mut ours, &golden.tokens, &scattered(0, 1), &[golden.tokens.len()]);
        let expected: Vec<f32> = golden.logits.iter().map(|logit| *logit as f32).collect();
        let wrong = error(&all[all.len() - expected.len()..], &expected);
        let half = ours.shape().half;
        assert!(wrong < bound(half), "{}: wrong by {wrong} of the logits' size", golden.model);
    }
}

#[test]
fn logits_do_not_depend_on_chunks_or_thread_order() {
    for name in ["llama-f16", "qwen2-f32", "qwen3-bf16"] {
        let file = gguf(goldens::models().into_iter().find(|(known, _)| *known == name).unwrap().1);
        let mut random = Random::new(5);
        let tokens: Vec<TokenId> = (0..70).map(|_| random.below(33)).collect();
        let expected = run(&mut cpu(&file), &tokens, &scattered(0, 1), &[70]);
        for lens in [&[70][..], &[3, 1, 1, 40, 25]] {
            let orders = ORDERS.map(|order| {
                let mut ours = engine(&file, order);
                let logits = run(&mut ours, &tokens, &scattered(0, 1), lens);
                let kv: Vec<Vec<u8>> = (0..18).map(|block| read(&ours, BlockId(block))).collect();
                (logits.iter().map(|logit| logit.to_bits()).collect::<Vec<_>>(), kv)
            });
            assert!(orders.iter().all(|order| *order == orders[0]), "{name} in chunks of {lens:?}: a barrier is missing");
            let logits: Vec<f32> = orders[0].0.iter().map(|bits| f32::from_bits(*bits)).collect();
            let wrong = error(&logits, &expected);
            let half = engine(&file, 0).shape().half;
            assert!(wrong < bound(half), "{name} in chunks of {lens:?}: wrong by {wrong}");
        }
    }
}

pub(super) fn read(engine: &dyn Engine, block: BlockId) -> Vec<u8> {
    let mut bytes = vec![0; engine.describe().block_bytes];
    engine.read_block(block, &mut bytes).unwrap();
    bytes
}

/// One step computes prompts and single tokens of several sequences, which request different logits.
#[test]
fn mixed_step_gives_each_sequence_its_own_logits() {
    let file = gguf(goldens::models().into_iter().find(|(name, _)| *name == "qwen3-bf16").unwrap().1);
    let mut random = Random::new(6);
    let sequences: Vec<(Vec<TokenId>, usize, Logits<'_>)> =
        [(9, 1, Logits::Last), (20, 12, Logits::All), (24, 23, Logits::None), (5, 5, Logits::Last)]
            .into_iter()
            .map(|(len, new, logits)| ((0..len).map(|_| random.below(48)).collect(), new, logits))
            .collect();
    let blocks: Vec<_> = (0..4).map(|sequence| scattered(sequence, 4)).collect();
    let (mut together, mut expected) = (engine(&file, 0), Vec::new());
    for ((tokens, new, logits), blocks) in sequences.iter().zip(&blocks) {
        let before = tokens.len() - new;
        if before > 0 {
            run(&mut together, &tokens[..before], blocks, &[before]);
        }
        let alone = run(&mut cpu(&file), tokens, blocks, &[tokens.len()]);
        let vocab = alone.len() / tokens.len();
        expected.extend_from_slice(match logits {
            Logits::None => &[],
            Logits::Last | Logits::Sample(_) => &alone[(tokens.len() - 1) * vocab..],
            Logits::All => &alone[before * vocab..],
        });
    }
    let chunks: Vec<Chunk<'_>> = sequences
        .iter()
        .zip(&blocks)
        .map(|((tokens, new, logits), blocks)| {
            let start = tokens.len() - new;
            Chunk { tokens: &tokens[start..], start: start as u32, blocks, logits: *logits }
        })
        .collect();
    let logits = together.step(&chunks).unwrap().into_logits();
    let wrong = error(&logits, &expected);
    assert!(wrong < bound(Half::BFloat16), "wrong by {wrong}");
}

/// Decode on blocks copied from another engine equals decode on the original, bit for bit.
#[test]
fn blocks_can_be_moved_to_another_engine() {
    let file = gguf(goldens::models().into_iter().find(|(name, _)| *name == "llama-bf16").unwrap().1);
    let model = load(&file, 0);
    let [mut prefill, mut decode] = [(); 2].map(|()| Runner::new(Arc::clone(&model), LIMITS).unwrap());
    let mut random = Random::new(7);
    let tokens: Vec<TokenId> = (0..21).map(|_| random.below(48)).collect();
    let (from, to) = (scattered(0, 2), scattered(1, 2));
    run(&mut prefill, &tokens[..20], &from, &[20]);
    for (from, to) in from.iter().zip(&to).take(4) {
        decode.write_block(*to, &read(&prefill, *from)).unwrap();
    }
    decode.write_block(BlockId(40), &read(&prefill, from[4])).unwrap();
    decode.copy_block(BlockId(40), to[4]).unwrap();
    let last = |engine: &mut dyn Engine, blocks| {
        let chunk = Chunk { tokens: &tokens[20..], start: 20, blocks, logits: Logits::Last };
        engine.step(&[chunk]).unwrap().into_logits()
    };
    assert_eq!(last(&mut decode, &to), last(&mut prefill, &from));
}

#[test]
fn dropping_engine_and_model_frees_all_memory() {
    let file = gguf(goldens::models().into_iter().find(|(name, _)| *name == "qwen2-q8_0").unwrap().1);
    let model = load(&file, 0);
    let device = model[0].device.new_stream(Purpose::Steps).unwrap();
    let weights = device.allocated_bytes();
    let mut engine = Runner::new(Arc::clone(&model), LIMITS).unwrap();
    run(&mut engine, &[1; 30], &scattered(0, 1), &[30]);
    assert!(device.allocated_bytes() > weights);
    drop(engine);
    assert_eq!(device.allocated_bytes(), weights);
    drop(model);
    assert_eq!(device.allocated_bytes(), 0);
}

#[test]
fn unsupported_models_and_steps_are_refused_with_a_reason() {
    let refused = |sizes: Sizes| load_sharded(&gguf(file(sizes, 1)), 1, 0).err().expect("this sharding is refused").to_string();
    let fine = goldens::LLAMA;
    for (sizes, expected) in [
        (Sizes { head_dim: 20, ..fine }, "heads of a multiple of 8 numbers"),
        (Sizes { head_dim: 136, ..fine }, "128 at most"),
        (Sizes { width: 60, ..fine }, "a width that is a multiple of 8"),
        (Sizes { ffn: 97, ..fine }, "a feed-forward length that is a multiple of 8"),
    ] {
        let error = refused(sizes);
        assert!(error.contains(expected), "{error}");
    }
    let model = load(&gguf(file(fine, 1)), 0);
    let mut engine = Runner::new(Arc::clone(&model), LIMITS).unwrap();
    let blocks = scattered(0, 1);
    let error =
        |engine: &mut Runner<Emulated>, chunks: &[Chunk<'_>]| engine.step(chunks).expect_err("the step is refused").to_string();
    let chunk = |tokens, start| Chunk { tokens, start, blocks: &blocks, logits: Logits::None };
    assert!(error(&mut engine, &[chunk(&[48], 0)]).contains("beyond the vocabulary of 48"));
    assert!(error(&mut engine, &[chunk(&[], 0)]).contains("is empty"));
    assert!(error(&mut engine, &[chunk(&[1; 60], 0), chunk(&[1; 60], 0)]).contains("limits are 96 and 8"));
    assert!(error(&mut engine, &[chunk(&[1], 0); 9]).contains("9 sequences that advance by one token"));
    let too_much = Runner::new(model, CudaLimits { capacity_blocks: Some(1 << 20), ..LIMITS });
    assert!(matches!(too_much.err(), Some(CudaError::Memory { .. })));
}

/// The tokens that the engine samples on the device are those that the host samples from the same logits.
#[test]
fn device_samples_requested_rows_and_returns_the_logits_of_other_rows() {
    let file = gguf(goldens::models().into_iter().find(|(name, _)| *name == "llama-f16").unwrap().1);
    let mut engine = engine(&file, 0);
    let blocks: Vec<_> = (0..3).map(|sequence| scattered(sequence, 3)).collect();
    let tokens: [&[TokenId]; 3] = [&[1, 2, 3], &[4], &[5, 6]];
    let chunk = |i: usize, logits| Chunk { tokens: tokens[i], start: 0, blocks: &blocks[i], logits };
    let sampling = |seed| Sampling { seed, logprobs: Some(3), temperature: 3.0, ..Sampling::default() };
    let samplers: Vec<Sampler> = (0..2).map(|seed| Sampler::new(sampling(seed), &[])).collect();
    let plain = engine.step(&[chunk(0, Logits::Last), chunk(1, Logits::Last), chunk(2, Logits::All)]).unwrap().into_logits();
    let [first, second] = [samplers[0].request(3), samplers[1].request(1)].map(Logits::Sample);
    let output = engine.step(&[chunk(0, first), chunk(1, second), chunk(2, Logits::All)]).unwrap();
    let StepOutput::Sampled { tokens: sampled, logits } = output else { panic!("the device samples") };
    let vocab = plain.len() / 4;
    assert_eq!(logits, plain[2 * vocab..]);
    assert_eq!(sampled.len(), 2);
    for ((sampler, row), (sampled, position)) in samplers.iter().zip(plain.chunks(vocab)).zip(sampled.iter().zip([3, 1])) {
        let SampledToken { token, logprobs } = sampler.clone().sample(row, position);
        assert_eq!(sampled.token, token);
        let (found, expected) = (sampled.logprobs.as_ref().unwrap(), logprobs.unwrap());
        assert!((found.logprob - expected.logprob).abs() < 1e-5);
        let tokens = |top: &[tandem_engine::TokenLogprob]| top.iter().map(|top| top.token).collect::<Vec<_>>();
        assert_eq!(tokens(&found.top), tokens(&expected.top));
    }
}
