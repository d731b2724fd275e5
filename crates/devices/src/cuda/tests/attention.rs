//! Tests the attention kernels alone, with the head sizes of real models, against double precision on the same keys and values.

use super::{
    emulated::{ORDERS, narrow, widened},
    *,
};
use crate::cuda::plan::{Batch, prompt_partitions_max};
use tandem_model::Pairs;

const LAYERS: usize = 2;
const LAYER: usize = 1;

const fn shape(half: Half, heads: usize, kv_heads: usize, head_dim: usize, block_size: usize) -> Shape {
    let pairs = Pairs::Halves;
    Shape {
        half,
        layers: LAYERS,
        width: 64,
        heads,
        kv_heads,
        head_dim,
        ffn: 64,
        vocab_size: 8,
        block_size,
        pairs,
        small_shared_memory: false,
    }
}

/// A sequence's numbers of tokens: those `before` this step, and the `new` ones in it.
#[derive(Clone, Copy, Debug)]
struct Sequence {
    before: usize,
    new: usize,
}

struct Given {
    shape: Shape,
    blocks: Vec<Vec<BlockId>>,
    pool: Vec<u8>,
    qkv: Vec<u8>,
}

/// Returns random queries, keys and values; slots beyond a sequence's end hold NaNs.
fn given(shape: Shape, sequences: &[Sequence]) -> Given {
    let mut random = Random::new(11);
    let counts: Vec<usize> = sequences.iter().map(|s| (s.before + s.new).div_ceil(shape.block_size)).collect();
    let capacity = counts.iter().sum::<usize>();
    let mut free: Vec<BlockId> = (0..capacity as u32).map(BlockId).collect();
    let mut pool = vec![0xff; capacity * shape.block_bytes()];
    let mut blocks = Vec::new();
    for (sequence, count) in sequences.iter().zip(counts) {
        let own: Vec<BlockId> = (0..count).map(|_| free.swap_remove(random.below(free.len() as u32) as usize)).collect();
        for position in 0..sequence.before + sequence.new {
            for values in 0..2 {
                let at = place(&shape, own[position / shape.block_size], position % shape.block_size, values);
                for number in pool[at..at + shape.kv_heads * shape.head_dim * 2].as_chunks_mut::<2>().0 {
                    *number = narrow(shape.half, random.number());
                }
            }
        }
        blocks.push(own);
    }
    let rows: usize = sequences.iter().map(|sequence| sequence.new).sum();
    // The factor makes the scores large enough that the softmax is not flat.
    let qkv = (0..rows * shape.qkv_dim()).flat_map(|_| narrow(shape.half, random.number() * 3.0)).collect();
    Given { shape, blocks, pool, qkv }
}

/// Returns an offset in the pool for the tested layer: that of a slot's keys if `values` is 0, or that of its values if `values` is 1.
fn place(shape: &Shape, block: BlockId, slot: usize, values: usize) -> usize {
    let row = shape.kv_heads * shape.head_dim * 2;
    block.0 as usize * shape.block_bytes() + ((LAYER * 2 + values) * shape.block_size + slot) * row
}

/// Computes one row's attention in double precision.
fn expected(given: &Given, blocks: &[BlockId], row: usize, position: usize) -> Vec<f64> {
    let shape = &given.shape;
    let dim = shape.head_dim;
    let queries = widened(shape.half, &given.qkv[row * shape.qkv_dim() * 2..][..shape.query_dim() * 2]);
    let read = |position: usize, values, head: usize| {
        let at = place(shape, blocks[position / shape.block_size], position % shape.block_size, values) + head * dim * 2;
        widened(shape.half, &given.pool[at..at + dim * 2])
    };
    let mut out = Vec::new();
    for (head, query) in queries.chunks(dim).enumerate() {
        let kv_head = head / shape.group();
        let scores: Vec<f64> = (0..=position)
            .map(|at| query.iter().zip(read(at, 0, kv_head)).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt())
            .collect();
        let max = scores.iter().fold(f64::NEG_INFINITY, |max, score| max.max(*score));
        let shares: Vec<f64> = scores.iter().map(|score| (score - max).exp()).collect();
        let total: f64 = shares.iter().sum();
        let mut sum = vec![0.0; dim];
        for (at, share) in shares.iter().enumerate() {
            sum.iter_mut().zip(read(at, 1, kv_head)).for_each(|(sum, value)| *sum += share / total * value);
        }
        out.extend(sum);
    }
    out
}

/// Runs both kernels over the sequences; returns the outputs as bytes, as the kernels stored them.
fn attended(given: &Given, sequences: &[Sequence], order: u32) -> (Vec<u8>, Batch) {
    let shape = &given.shape;
    let device = Arc::new(Emulated::new(shape, order));
    let longest = vec![0; sequences.iter().map(|sequence| sequence.new).max().unwrap()];
    let chunks: Vec<Chunk<'_>> = sequences
        .iter()
        .zip(&given.blocks)
        .map(|(s, blocks)| Chunk { tokens: &longest[..s.new], start: s.before as u32, blocks, logits: Logits::None })
        .collect();
    let batch = Batch::new(&chunks, shape, device.multiprocessors());
    let numbers =
        |numbers: Vec<u32>| Memory::of(&device, &numbers.into_iter().flat_map(u32::to_le_bytes).collect::<Vec<_>>()).unwrap();
    let lists = |lists: &[u32]| numbers(lists.to_vec());
    let (qkv, pool) = (Memory::of(&device, &given.qkv).unwrap(), Memory::of(&device, &given.pool).unwrap());
    let (tables, tiles) = (numbers(batch.tables.clone()), lists(batch.tiles.as_flattened()));
    let partitions = lists(batch.partitions.as_flattened());
    let out = Memory::new(&device, batch.rows() * shape.query_dim() * 2).unwrap();
    let partial = batch.partitions.len() + prompt_partitions_max(shape, device.multiprocessors());
    let partial_outputs = Memory::new(&device, partial * shape.query_dim() * 4).unwrap();
    let partial_sums = Memory::new(&device, partial * shape.heads * 8).unwrap();
    let arrivals = numbers(vec![0; batch.rows() * shape.kv_heads * shape.group().div_ceil(Shape::TOKEN_ROWS)]);
    let (outs, sums, counters) = (partial_outputs.address(), partial_sums.address(), arrivals.address());
    let scale = f32_argument((std::f64::consts::LOG2_E / (shape.head_dim as f64).sqrt()) as f32);
    let (qkv, pool, tables) = (qkv.address(), pool.address(), tables.address());
    if !batch.tiles.is_empty() {
        let grid = [batch.tiles.len(), shape.kv_heads, 1];
        let launch = Launch { kernel: Kernel::AttendPrompt, grid, shared_bytes: shape.prompt_bytes() };
        let arguments = &mut [qkv, pool, tables, tiles.address(), out.address(), outs, sums, counters, LAYER as u64, scale];
        device.launch(launch, arguments).unwrap();
    }
    if !batch.partitions.is_empty() {
        let grid = [batch.partitions.len(), shape.kv_heads, shape.group().div_ceil(Shape::TOKEN_ROWS)];
        let launch = Launch { kernel: Kernel::AttendToken, grid, shared_bytes: shape.token_bytes() };
        let arguments = &mut [qkv, pool, tables, partitions.address(), out.address(), outs, sums, counters, LAYER as u64, scale];
        device.launch(launch, arguments).unwrap();
    }
    let mut bytes = vec![0; batch.rows() * shape.query_dim() * 2];
    device.download(out.address(), &mut bytes).unwrap();
    let mut left = vec![0xff; arrivals.bytes()];
    device.download(counters, &mut left).unwrap();
    assert!(left.iter().all(|byte| *byte == 0), "the counters are ready for the next layer");
    (bytes, batch)
}

fn compare(shape: Shape, sequences: &[Sequence]) {
    let given = given(shape, sequences);
    let orders = ORDERS.map(|order| attended(&given, sequences, order));
    assert!(orders.iter().all(|(bytes, _)| *bytes == orders[0].0), "{shape:?}, {sequences:?}: a barrier is missing");
    let found = widened(shape.half, &orders[0].0);
    let mut row = 0;
    for (sequence, blocks) in sequences.iter().zip(&given.blocks) {
        for token in 0..sequence.new {
            let expected = expected(&given, blocks, row, sequence.before + token);
            let found = &found[row * shape.query_dim()..][..shape.query_dim()];
            let largest = expected.iter().fold(0f64, |largest, number| largest.max(number.abs()));
            // Exponentials and results are rounded to 16-bit floats.
            let bound = largest * if shape.half == Half::BFloat16 { 8e-3 } else { 1e-3 };
            for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert!((found - expected).abs() < bound, "{shape:?}, row {row}, number {at}: {found} is not {expected}");
            }
            row += 1;
        }
    }
}

const fn sequence(before: usize, new: usize) -> Sequence {
    Sequence { before, new }
}

#[test]
fn prompts_attend_to_all_earlier_positions() {
    // Fewer heads than Qwen3-8B has, but of the same size. Chunks start inside a tile or block, or end at the end of one.
    compare(shape(Half::BFloat16, 4, 1, 128, 16), &[sequence(0, 33), sequence(70, 40), sequence(63, 2), sequence(128, 64)]);
    // The number of query heads per key head does not divide a tile, the head length is no multiple of 16, and the block size is odd.
    compare(shape(Half::Float16, 14, 2, 24, 5), &[sequence(0, 19), sequence(61, 7)]);
    compare(shape(Half::Float16, 2, 2, 64, 16), &[sequence(100, 130)]);
}

#[test]
fn single_tokens_attend_to_all_earlier_positions() {
    // Sequences of one and of several partitions, which end in the middle of tiles and at their boundaries.
    compare(
        shape(Half::BFloat16, 4, 1, 128, 16),
        &[sequence(0, 1), sequence(14, 1), sequence(63, 1), sequence(300, 1), sequence(777, 1)],
    );
    // More than 16 query heads per key head take two thread blocks.
    compare(shape(Half::Float16, 20, 1, 40, 7), &[sequence(5, 1), sequence(255, 1), sequence(256, 1)]);
    compare(shape(Half::Float16, 6, 6, 16, 1), &[sequence(90, 1)]);
}

#[test]
fn prompts_and_single_tokens_in_one_step_get_correct_attention() {
    compare(shape(Half::BFloat16, 9, 3, 64, 16), &[sequence(400, 1), sequence(30, 50), sequence(64, 1)]);
}

/// The emulated device has three multiprocessors, so that two blocks on each share the tiles of one chunk.
#[test]
fn thread_blocks_that_share_a_tile_give_correct_attention() {
    let large = shape(Half::BFloat16, 4, 1, 128, 16);
    for (shape, sequences) in [
        (large, &[sequence(1_300, 5)][..]),
        // A part may begin after the last position of a tile's first rows. A step may have shared tiles and whole ones.
        (large, &[sequence(1_023, 4), sequence(600, 1), sequence(0, 2)]),
        (small_shared(large), &[sequence(1_100, 40)]),
        (shape(Half::Float16, 6, 2, 24, 5), &[sequence(1_280, 3)]),
    ] {
        let given = given(shape, sequences);
        let (_, batch) = attended(&given, sequences, 0);
        assert!(batch.tiles.iter().any(|tile| tile[7] > 1), "{sequences:?}: no tile is shared");
        compare(shape, sequences);
    }
}

/// Returns the same shape with the smaller tiles for consumer GPUs, which have 99 KiB of shared memory per thread block.
const fn small_shared(shape: Shape) -> Shape {
    Shape { small_shared_memory: true, ..shape }
}

#[test]
fn tiles_for_small_shared_memory_give_correct_attention() {
    let shape = small_shared(shape(Half::BFloat16, 4, 1, 128, 16));
    assert!(shape.prompt_bytes() <= 99 << 10 && shape.token_bytes() <= 99 << 10);
    compare(shape, &[sequence(0, 33), sequence(63, 2), sequence(32, 40), sequence(333, 1), sequence(0, 1)]);
}

#[test]
fn host_constants_match_the_kernels() {
    let large = shape(Half::BFloat16, 4, 1, 128, 16);
    for shape in [large, small_shared(large), shape(Half::Float16, 14, 2, 24, 5), shape(Half::Float16, 6, 6, 16, 1)] {
        let found = Emulated::new(&shape, 0).constants();
        let known = [Shape::PROMPT_ROWS, shape.prompt_bytes(), Shape::TOKEN_ROWS, shape.token_bytes(), shape.store_heads()];
        assert_eq!(found.map(|constant| constant as usize), known);
        assert_eq!(Kernel::StoreKv.threads() as usize, Shape::STORE_THREADS);
    }
}
