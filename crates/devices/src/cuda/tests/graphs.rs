//! Compares replayed steps with the same steps launched kernel by kernel.

use super::{
    models::{BLOCK_SIZE, SHARED_MAX, read},
    sampling::SHAPE,
    *,
};
use crate::cuda::{
    graphs::{Bucket, Graphs},
    plan::Batch,
};
use std::sync::atomic::{AtomicUsize, Ordering};
use tandem_grammar::{Kind, Vocabulary};

const LIMITS: CudaLimits =
    CudaLimits { capacity_blocks: Some(256), engines: 1, step_tokens_max: 96, sequences_max: 8, urgent: false };
/// The number of blocks that several sequences share at their beginning. The blocks are filled with random KV.
const SHARED_BLOCKS: u32 = 150;
/// The number of blocks that belong to one sequence alone.
const OWN_BLOCKS: u32 = 10;

struct Sequence {
    /// The step in which the sequence begins.
    begins: usize,
    /// The number of positions before the prompt. Their blocks are shared with other sequences.
    before: usize,
    prompt: usize,
    /// The number of tokens that are sampled.
    samples: usize,
    sampling: Sampling,
}

fn sequences() -> Vec<Sequence> {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let random_sampling = Sampling { temperature: 2.0, ..Sampling::default() };
    let penalised = Sampling { repetition_penalty: 1.5, frequency_penalty: 0.5, ..random_sampling.clone() };
    let with_logprobs = Sampling { logprobs: Some(2), top_k: 9, ..random_sampling.clone() };
    let all = [
        (0, 0, 5, 34, &penalised),
        (0, 252, 1, 26, &random_sampling),
        (3, 0, 1, 6, &with_logprobs),
        (4, 400, 1, 9, &penalised),
        (7, 0, 3, 22, &random_sampling),
        (10, 100, 1, 14, &greedy),
        // A long sequence that starts late. If the buffers are empty at first, its lists move to other addresses after steps of the same
        // size have been captured.
        (13, 600, 1, 12, &greedy),
        (17, 0, 1, 20, &with_logprobs),
    ];
    let sequence = |(seed, (begins, before, prompt, samples, sampling)): (u64, (_, _, _, _, &Sampling))| Sequence {
        begins,
        before,
        prompt,
        samples,
        sampling: Sampling { seed, ..sampling.clone() },
    };
    (0..).zip(all).map(sequence).collect()
}

/// Runs all sequences to their end; returns the tokens that were sampled in each step, and the KV of all blocks.
fn generate(engine: &mut dyn Engine) -> (Vec<Vec<SampledToken>>, Vec<Vec<u8>>) {
    let (sequences, mut random) = (sequences(), Random::new(8));
    for block in 0..SHARED_BLOCKS {
        let numbers = engine.describe().block_bytes / 2;
        let bytes: Vec<u8> = (0..numbers).flat_map(|_| emulated::narrow(Half::BFloat16, random.number())).collect();
        engine.write_block(BlockId(block), &bytes).unwrap();
    }
    let mut tokens: Vec<Vec<TokenId>> =
        sequences.iter().map(|sequence| (0..sequence.prompt).map(|_| random.below(48)).collect()).collect();
    // Some sequences have a constraint: letters of two groups follow each other. Their steps sample after the replay of a graph.
    let letters: Vec<u8> = (b'A'..).take(engine.describe().vocab_size).collect();
    let vocabulary = Vocabulary::new(letters.chunks(1).map(|letter| (letter, false)), letters.len());
    let alternating = Kind::Regex("([A-F][H-Q])*".to_owned()).into();
    let mut samplers: Vec<Sampler> = sequences
        .iter()
        .zip(&tokens)
        .map(|(sequence, prompt)| {
            let sampler = Sampler::new(sequence.sampling.clone(), prompt);
            let is_constrained = sequence.sampling.seed % 3 == 1;
            let sampler = if is_constrained { sampler.constrained(&vocabulary, &alternating).unwrap() } else { sampler };
            sampler.for_sample(0, &[])
        })
        .collect();
    let blocks: Vec<Vec<BlockId>> = (0..)
        .zip(&sequences)
        .map(|(i, sequence)| {
            let own = SHARED_BLOCKS + i * OWN_BLOCKS..SHARED_BLOCKS + (i + 1) * OWN_BLOCKS;
            (0..(sequence.before / BLOCK_SIZE) as u32).chain(own.rev()).map(BlockId).collect()
        })
        .collect();
    let steps = sequences.iter().map(|sequence| sequence.begins + sequence.samples).max().unwrap();
    let sampled_tokens = (0..steps).map(|step| {
        let runs = |i: &usize| (sequences[*i].begins..sequences[*i].begins + sequences[*i].samples).contains(&step);
        let running: Vec<usize> = (0..sequences.len()).filter(runs).collect();
        let chunk = |i: &usize| {
            let (sequence, all) = (&sequences[*i], &tokens[*i]);
            let first = if step == sequence.begins { 0 } else { all.len() - 1 };
            let start = (sequence.before + first) as u32;
            let request = samplers[*i].request((sequence.before + all.len()) as u32);
            Chunk { tokens: &all[first..], start, blocks: &blocks[*i], logits: Logits::Sample(request) }
        };
        let chunks: Vec<Chunk<'_>> = running.iter().map(chunk).collect();
        let sampled_tokens = sampled(engine.step(&chunks).unwrap());
        assert_eq!(sampled_tokens.len(), running.len());
        for (i, sampled_tokens) in running.iter().zip(&sampled_tokens) {
            tokens[*i].push(sampled_tokens.token);
            samplers[*i].accept(sampled_tokens.token).expect("the token is allowed");
        }
        sampled_tokens
    });
    let sampled_tokens = sampled_tokens.collect();
    (sampled_tokens, (0..256).map(|block| read(engine, BlockId(block))).collect())
}

/// Runs batches of 1 to 6 sequences that start and end in different steps. Some sequences fit in one partition of the attention, others need
/// several. Their lists of blocks grow, and change their place in the batch's table.
#[test]
fn replayed_steps_equal_direct_steps_and_leave_other_blocks_unchanged() {
    let file = gguf(goldens::models().into_iter().find(|(name, _)| *name == "qwen3-bf16").unwrap().1);
    let engine = |order| {
        let open = |shape: &Shape| Ok(Emulated::new(shape, order));
        let mut model =
            Model::load(&file, BLOCK_SIZE, SHARED_MAX, Shard { rank: 0, ranks: 1 }, weights::Origin::File, open).unwrap();
        model.context_length = 1_000;
        let device = model.device.new_stream(Purpose::Steps).unwrap();
        (Runner::new(Arc::from([model]), LIMITS).unwrap(), device)
    };
    let (plain, plain_device) = engine(0);
    let expected = generate(&mut plain.without_graphs());
    assert_eq!(plain_device.capture_counts(), [0, 0]);
    let same = |(sampled_tokens, blocks): (Vec<Vec<SampledToken>>, Vec<Vec<u8>>)| {
        for (step, (found, expected)) in sampled_tokens.iter().zip(&expected.0).enumerate() {
            assert_eq!(found, expected, "in step {step}");
        }
        for (block, (found, expected)) in blocks.iter().zip(&expected.1).enumerate() {
            assert!(found == expected, "block {block} differs");
        }
    };
    let steps = expected.0.len();
    let (mut replaying, device) = engine(3);
    same(generate(&mut replaying));
    let [recorded, replayed] = device.capture_counts();
    assert!(
        recorded > 2 && replayed > recorded * 2 && replayed * 2 > steps,
        "{recorded} captures, {replayed} replays in {steps} steps"
    );
    let (moving, device) = engine(0);
    same(generate(&mut moving.with_empty_buffers()));
    let [again, fewer] = device.capture_counts();
    assert!((again..replayed).contains(&fewer), "{again} captures, {fewer} replays where {replayed} were possible");
    let (mut plain, device) = engine(0);
    device.refuse_capture(true);
    same(generate(&mut plain));
    assert_eq!(device.capture_counts(), [1, 0], "no second capture is tried soon");
}

#[test]
fn recorded_graphs_serve_all_decode_steps_without_logprobs_and_change_no_result() {
    let file = gguf(goldens::models().into_iter().find(|(name, _)| *name == "llama-bf16").unwrap().1);
    let engine = || {
        let model = super::models::load(&file, 0);
        let device = model[0].device.new_stream(Purpose::Steps).unwrap();
        (Runner::new(model, LIMITS).unwrap(), device)
    };
    let steps = |engine: &mut dyn Engine| {
        let sampler = Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() }, &[]);
        let blocks: Vec<Vec<BlockId>> = (0..8).map(|i| (8 * i..8 * i + 8).map(BlockId).collect()).collect();
        let (mut computed, mut tokens) = ([0; 8], Vec::new());
        for batch in [1, 2, 5, 8, 8, 3, 7] {
            let request = |i: usize| Logits::Sample(sampler.request(computed[i] + 1));
            let chunk = |i: usize| Chunk { tokens: &[5], start: computed[i], blocks: &blocks[i], logits: request(i) };
            tokens.extend(sampled(engine.step(&(0..batch).map(chunk).collect::<Vec<_>>()).unwrap()));
            computed[..batch].iter_mut().for_each(|computed| *computed += 1);
        }
        assert!(tokens.iter().all(|sampled| sampled.token < 48));
        tokens
    };
    let (plain, _) = engine();
    let expected = steps(&mut plain.without_graphs());
    let (runner, device) = engine();
    let mut runner = runner.with_recorded_graphs().unwrap();
    let [recorded, replayed] = device.capture_counts();
    assert_eq!(recorded, replayed);
    assert_eq!(steps(&mut runner), expected);
    assert_eq!(device.capture_counts(), [recorded, replayed + 7], "every step is a replay");
    let (refusing, device) = engine();
    device.refuse_capture(true);
    let mut refusing = refusing.with_recorded_graphs().unwrap();
    assert!(refusing.refused_graphs() >= 1, "refusals are counted, and the engine starts");
    assert_eq!(steps(&mut refusing), expected);
}

#[test]
fn least_recently_used_graph_is_evicted() {
    let (device, mut graphs) = (Emulated::new(&SHAPE, 0), Graphs::new(10, 20));
    let mut run = |rows, addresses| {
        let worked = AtomicUsize::new(0);
        let work = || {
            worked.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        graphs.run(&device, Bucket { rows, partitions: 1, top_max: 0, samples: true }, addresses, work).unwrap();
        worked.into_inner()
    };
    assert_eq!([1, 1, 1].map(|rows| run(rows, [1, 2])), [1, 1, 0], "run, captured, replayed");
    for rows in 2..1_000 {
        assert_eq!(run(1, [1, 2]), 0, "a graph used in every second step is kept");
        assert_eq!([run(rows, [1, 2]), run(rows, [1, 2])], [1, 1]);
    }
    assert_eq!([999, 750, 2].map(|rows| run(rows, [1, 2])), [0, 0, 1]);
    assert_eq!([999, 999].map(|rows| run(rows, [1, 3])), [1, 1], "all graphs are discarded when the lists move");
    assert_eq!(device.capture_counts()[0], 1_000);
}

#[test]
fn refused_capture_is_retried_after_a_pause_that_doubles() {
    let (device, mut graphs) = (Emulated::new(&SHAPE, 0), Graphs::new(10, 20));
    let mut step = |rows| {
        let worked = AtomicUsize::new(0);
        let work = || {
            worked.fetch_add(1, Ordering::Relaxed);
            Ok(())
        };
        graphs.run(&device, Bucket { rows, partitions: 1, top_max: 0, samples: true }, [1, 2], work).unwrap();
        (worked.into_inner(), device.capture_counts())
    };
    assert_eq!([step(1), step(1), step(1)], [(1, [0, 0]), (1, [1, 1]), (0, [1, 2])]);
    device.refuse_capture(true);
    step(2);
    assert_eq!(step(2), (2, [2, 2]), "the step is recorded in vain, and then launched");
    assert_eq!(step(1), (0, [2, 3]), "the graph that exists is still used");
    // Counts the steps until the number of captures reaches `captures`.
    let mut until = |captures| (1..).find(|_| step(2).1[0] == captures).unwrap();
    assert_eq!([until(3), until(4)], [63, 128]);
    device.refuse_capture(false);
    assert_eq!(until(5), 256);
    assert_eq!(
        (step(2), step(3).0, step(3).1[0]),
        ((0, [5, 5]), 1, 6),
        "the bucket has a graph, and others are recorded at once"
    );
}

#[test]
fn only_small_fully_sampled_decode_steps_use_a_graph() {
    let graphs = Graphs::<Emulated>::new(10, 20);
    let (blocks, sampler) = ([BlockId(0); 4], Sampler::new(Sampling::default(), &[]));
    let sample = Logits::Sample(sampler.request(1));
    let bucket = |chunks: &[(usize, Logits<'_>)]| {
        let chunk = |(len, logits): &(usize, _)| Chunk { tokens: &[1, 2][..*len], start: 0, blocks: &blocks, logits: *logits };
        let chunks: Vec<Chunk<'_>> = chunks.iter().map(chunk).collect();
        let batch = Batch::new(&chunks, &SHAPE, 3);
        graphs.bucket(&batch, &SampleInputs::default()).map(|bucket| (bucket.rows, bucket.partitions))
    };
    assert_eq!(bucket(&[(1, sample); 5]), Some((6, 8)));
    assert_eq!(bucket(&[(1, sample); 9]), Some((10, 16)));
    let others: [&[_]; 4] =
        [&[(1, sample); 11], &[(1, sample), (2, sample)], &[(1, sample), (1, Logits::Last)], &[(1, Logits::All); 2]];
    for chunks in others {
        assert_eq!(bucket(chunks), None, "{chunks:?}");
    }
}
