//! Lays out a step's chunks as the lists that the kernels read.

use super::shape::Shape;
use tandem_engine::{Chunk, Logits};

/// The minimum number of positions in a partition, which one thread block processes. A sequence with fewer positions is one partition.
const PARTITION_POSITIONS_MIN: usize = 256;
/// The slot number of padding rows. No KV is stored for it. kernels/model.cu has the same constant.
const NO_SLOT: u32 = u32::MAX;
/// The maximum number of rows in a padded decode step.
const DECODE_ROWS_MAX: usize = 256;
/// The intended number of `attend_token` thread blocks per multiprocessor. A multiprocessor runs two of them at a time; with more in its
/// queue, few multiprocessors are idle at the end of a launch.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// If several thread blocks of `attend_prompt` split the KV of one tile, each of them, except the last, reads at least this many positions.
const PART_POSITIONS_MIN: usize = 512;
/// The number of `attend_prompt` thread blocks that a multiprocessor runs at a time. Tiles are shared only if there are fewer.
const PROMPT_BLOCKS_PER_MULTIPROCESSOR: usize = 2;

/// The lists that describe a step: its rows (one token each, chunk after chunk), and the work items of the attention kernels.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// The slot at which each row's KV is stored: block × block size + offset in the block.
    pub slots: Vec<u32>,
    /// The chunks' block tables, concatenated.
    pub tables: Vec<u32>,
    /// The work of `attend_prompt`'s thread blocks: tiles of prompts, or parts of them. An entry has the tile's first row, its number of
    /// tokens, the position of its first token, its offset in `tables`, the first position that it reads, the position after the last one,
    /// the tile's first partition (after those of one-token chunks), and the number of positions of each part, 0 for a whole tile. Entries
    /// that read the most KV come first.
    pub tiles: Vec<[u32; 8]>,
    /// Partitions of the KV that the tokens of one-token chunks read. An entry has the token's row, its first position, the position after
    /// its last one, its offset in `tables`, the token's first partition, its number of partitions, and two unused numbers.
    pub partitions: Vec<[u32; 8]>,
    /// The number of one-token chunks.
    pub single_tokens: usize,
    /// The rows whose logits are returned.
    pub logit_rows: Vec<u32>,
    /// The rows for which a token is sampled on the device.
    pub sampled_rows: Vec<u32>,
}

impl Batch {
    /// Lays out the chunks of a step, for a device with this many multiprocessors.
    pub fn new(chunks: &[Chunk<'_>], shape: &Shape, multiprocessors: usize) -> Self {
        let mut batch = Self::default();
        let tile_tokens = shape.tile_tokens();
        let mut tiles = Vec::new();
        let partition_positions = partition_positions(chunks, shape, multiprocessors);
        for chunk in chunks {
            let (first_row, table) = (batch.tokens.len() as u32, batch.tables.len() as u32);
            let len = chunk.tokens.len() as u32;
            batch.tokens.extend_from_slice(chunk.tokens);
            for position in chunk.start..chunk.start + len {
                let block = chunk.blocks[position as usize / shape.block_size].0;
                batch.positions.push(position);
                batch.slots.push(block * shape.block_size as u32 + position % shape.block_size as u32);
            }
            let end = (chunk.start + len) as usize;
            batch.tables.extend(chunk.blocks[..end.div_ceil(shape.block_size)].iter().map(|block| block.0));
            if len == 1 {
                let (first, parts) = (batch.partitions.len() as u32, end.div_ceil(partition_positions) as u32);
                batch.partitions.extend((0..end).step_by(partition_positions).map(|begin| {
                    let end = (begin + partition_positions).min(end) as u32;
                    [first_row, begin as u32, end, table, first, parts, 0, 0]
                }));
                batch.single_tokens += 1;
            } else {
                for done in (0..len).step_by(tile_tokens) {
                    let tokens = (len - done).min(tile_tokens as u32);
                    tiles.push(Tile { row: first_row + done, tokens, position: chunk.start + done, table });
                }
            }
            let rows = match chunk.logits {
                Logits::None => 0..0,
                Logits::Last | Logits::Sample(_) => first_row + len - 1..first_row + len,
                Logits::All => first_row..first_row + len,
            };
            if matches!(chunk.logits, Logits::Sample(_)) {
                batch.sampled_rows.extend(rows);
            } else {
                batch.logit_rows.extend(rows);
            }
        }
        batch.divide(&tiles, shape, multiprocessors);
        batch
    }

    /// Divides the tiles into parts if there are too few of them to occupy all multiprocessors, as for a short chunk after a long prefix.
    fn divide(&mut self, tiles: &[Tile], shape: &Shape, multiprocessors: usize) {
        let wanted = prompt_parts(shape, multiprocessors);
        let positions: usize = tiles.iter().map(Tile::end).sum();
        let mut partition = self.partitions.len() as u32;
        for tile in tiles {
            let Tile { row, tokens, position, table } = *tile;
            let end = tile.end();
            let parts = (wanted * end / positions).min(end / PART_POSITIONS_MIN).max(1);
            let each = end.div_ceil(parts).next_multiple_of(Shape::TOKEN_POSITIONS);
            let parts = end.div_ceil(each) as u32;
            if parts == 1 {
                self.tiles.push([row, tokens, position, table, 0, end as u32, 0, 0]);
                continue;
            }
            for part in 0..parts {
                let begin = part * each as u32;
                let end = (end as u32).min(begin + each as u32);
                self.tiles.push([row, tokens, position, table, begin, end, partition, each as u32]);
            }
            partition += tokens * parts;
        }
        self.tiles.sort_by_key(|tile| (std::cmp::Reverse(tile[5] - tile[4]), tile[0], tile[4]));
    }

    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Pads a batch of one-token chunks to these numbers of rows and partitions. Added partitions are empty. Added rows attend to nothing
    /// and store no KV, but a token is sampled for them. Their numbers are undefined, and no other row depends on them.
    pub fn pad(&mut self, rows: usize, partitions: usize) {
        assert!(rows >= self.rows() && partitions >= self.partitions.len(), "a batch does not shrink");
        for row in self.rows() as u32..rows as u32 {
            self.tokens.push(0);
            self.positions.push(0);
            self.slots.push(NO_SLOT);
            self.sampled_rows.push(row);
        }
        self.partitions.resize(partitions, [0; 8]);
    }

    /// Returns the offset of the list after `tables`, in units of 16 bytes from the start of `tables`.
    pub fn offset_after_tables(&self) -> u32 {
        self.tables.len().div_ceil(4) as u32
    }
}

/// Consecutive tokens of a prompt, whose attention one thread block of each key head can compute.
struct Tile {
    row: u32,
    tokens: u32,
    position: u32,
    table: u32,
}

impl Tile {
    /// Returns the position after the last one that the tile reads.
    fn end(&self) -> usize {
        (self.position + self.tokens) as usize
    }
}

/// Returns the number of tiles, or parts of tiles, whose thread blocks occupy all multiprocessors.
fn prompt_parts(shape: &Shape, multiprocessors: usize) -> usize {
    PROMPT_BLOCKS_PER_MULTIPROCESSOR * multiprocessors / shape.kv_heads
}

/// Returns the maximum number of partitions of tiles that several thread blocks share.
pub(super) fn prompt_partitions_max(shape: &Shape, multiprocessors: usize) -> usize {
    prompt_parts(shape, multiprocessors) * shape.tile_tokens()
}

/// Returns the number of positions in a partition. Unless the minimum applies, it is so small that the partitions of all one-token chunks
/// occupy all multiprocessors.
fn partition_positions(chunks: &[Chunk<'_>], shape: &Shape, multiprocessors: usize) -> usize {
    let ends = chunks.iter().filter(|chunk| chunk.tokens.len() == 1).map(|chunk| chunk.start as usize + 1);
    let blocks_per_partition = shape.kv_heads * shape.group().div_ceil(Shape::TOKEN_ROWS);
    let parts = (BLOCKS_PER_MULTIPROCESSOR * multiprocessors).div_ceil(blocks_per_partition);
    ends.sum::<usize>().div_ceil(parts).next_multiple_of(Shape::TOKEN_POSITIONS).max(PARTITION_POSITIONS_MIN)
}

/// Returns the maximum number of partitions for this many one-token chunks.
pub(super) fn partitions_max(tokens: usize, shape: &Shape, multiprocessors: usize) -> usize {
    let blocks_per_partition = shape.kv_heads * shape.group().div_ceil(Shape::TOKEN_ROWS);
    tokens + (BLOCKS_PER_MULTIPROCESSOR * multiprocessors).div_ceil(blocks_per_partition)
}

/// Returns the number of rows to which a decode step is padded: 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48 and so on. So only a few different
/// numbers occur. Padding costs hardly any time, because a GEMM of few rows takes as long as reading its weights.
pub(super) fn padded_rows(rows: usize) -> usize {
    rows.next_multiple_of((rows.next_power_of_two() / 4).max(1))
}

/// Returns the numbers of rows of prompt steps whose GEMMs are planned in advance: the largest step, a half and a quarter of it, if they are
/// larger than decode steps.
pub(super) fn prompt_steps(largest: usize) -> impl Iterator<Item = usize> {
    [largest, largest / 2, largest / 4].into_iter().filter(|rows| *rows > DECODE_ROWS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::shape::Half;
    use tandem_kv::BlockId;
    use tandem_model::Pairs;

    const SHAPE: Shape = Shape {
        half: Half::BFloat16,
        layers: 2,
        width: 64,
        heads: 12,
        kv_heads: 2,
        head_dim: 16,
        ffn: 96,
        vocab_size: 50,
        block_size: 16,
        pairs: Pairs::Halves,
        small_shared_memory: false,
    };

    fn chunk<'a>(tokens: &'a [u32], start: u32, blocks: &'a [BlockId], logits: Logits<'a>) -> Chunk<'a> {
        Chunk { tokens, start, blocks, logits }
    }

    #[test]
    fn tiles_and_partitions_cover_every_token_and_position_once() {
        let tokens: Vec<u32> = (0..500).collect();
        let blocks: Vec<BlockId> = (0..400).rev().map(BlockId).collect();
        let chunks = [
            chunk(&tokens[..70], 30, &blocks, Logits::None),
            chunk(&tokens[..1], 5_000, &blocks, Logits::Last),
            chunk(&tokens[..1], 0, &blocks, Logits::Last),
            chunk(&tokens[..2], 16, &blocks[7..], Logits::All),
            chunk(&tokens[..300], 0, &blocks, Logits::Last),
        ];
        let batch = Batch::new(&chunks, &SHAPE, 4);
        assert_eq!(batch.rows(), 374);
        assert_eq!(batch.logit_rows, [70, 71, 72, 73, 373]);
        assert_eq!(batch.slots[..3], [398 * 16 + 14, 398 * 16 + 15, 397 * 16]);
        let mut attended = vec![0; batch.rows()];
        for [row, tokens, position, table, begin, end, _, each] in &batch.tiles {
            assert_eq!((*begin, *end, *each), (0, position + tokens, 0), "the tiles are too short to be shared");
            assert!((1..=21).contains(tokens), "a tile has 128 rows of 6 heads at most");
            for token in 0..*tokens {
                attended[(row + token) as usize] += 1;
                assert_eq!(batch.positions[(row + token) as usize], position + token);
                let block = batch.tables[*table as usize + (position + token) as usize / 16];
                assert_eq!(batch.slots[(row + token) as usize] / 16, block);
            }
        }
        for [row, _, _, _, first, parts, ..] in batch.partitions.iter().filter(|part| part[1] == 0) {
            attended[*row as usize] += 1;
            let mut next = 0;
            for part in &batch.partitions[*first as usize..(first + parts) as usize] {
                assert_eq!((part[0], part[1], part[4], part[5]), (*row, next, *first, *parts), "partitions are contiguous");
                assert!(part[2] > part[1]);
                next = part[2];
            }
            assert_eq!(next, batch.positions[*row as usize] + 1);
        }
        assert!(attended.iter().all(|times| *times == 1));
        let ends: Vec<u32> = batch.tiles.iter().map(|tile| tile[5]).collect();
        assert!(ends.is_sorted_by(|longer, shorter| longer >= shorter), "the longest tiles are first");
        assert!(batch.partitions.len() <= partitions_max(2, &SHAPE, 4));
    }

    #[test]
    fn short_chunks_after_long_prefixes_are_divided_among_all_multiprocessors() {
        let tokens: Vec<u32> = (0..500).collect();
        let blocks: Vec<BlockId> = (0..8_192).map(BlockId).collect();
        let batch_of = |chunks: &[(usize, u32)], multiprocessors| {
            let chunks: Vec<_> =
                chunks.iter().map(|(len, start)| chunk(&tokens[..*len], *start, &blocks, Logits::None)).collect();
            Batch::new(&chunks, &SHAPE, multiprocessors)
        };
        for chunks in [&[(40, 100_000)][..], &[(1, 9_000), (3, 20_000), (50, 700), (1, 3), (500, 60_000)], &[(2, 510)]] {
            let batch = batch_of(chunks, 132);
            assert_eq!(batch.single_tokens, chunks.iter().filter(|(len, _)| *len == 1).count());
            let shared: Vec<_> = batch.tiles.iter().filter(|tile| tile[7] > 0).collect();
            // The kernel computes the number of parts in the same way.
            let parts_of = |tile: &[u32; 8]| (tile[2] + tile[1]).div_ceil(tile[7]);
            let partitions = shared.iter().filter(|tile| tile[4] == 0).map(|tile| tile[1] * parts_of(tile)).sum::<u32>() as usize;
            assert!(partitions <= prompt_partitions_max(&SHAPE, 132));
            assert!(batch.tiles.len() <= prompt_parts(&SHAPE, 132).max(chunks.iter().map(|(len, _)| len.div_ceil(21)).sum()));
            // The number of results that each partition gets, and the positions that each token attends to.
            let mut written = vec![0; batch.partitions.len() + partitions];
            let mut attended = vec![0; batch.rows()];
            for tile @ [row, tokens, position, _, begin, end, first, each] in &batch.tiles {
                assert!(begin % 64 == 0 && begin < end && *end <= position + tokens);
                for token in 0..*tokens {
                    attended[(row + token) as usize] += end - begin;
                    if *each > 0 {
                        written[(first + token * parts_of(tile) + begin / each) as usize] += 1;
                    }
                }
            }
            let own = batch.partitions.len();
            assert!(written[..own].iter().all(|times| *times == 0), "partitions of one-token chunks are not used");
            assert!(written[own..].iter().all(|times| *times == 1), "each partition is written once");
            for tile in &batch.tiles {
                assert_eq!(attended[tile[0] as usize], tile[2] + tile[1], "the parts of a tile cover its positions once");
            }
        }
        // 40 tokens are two tiles; with two key heads, 132 parts would make 264 thread blocks, two for each multiprocessor. Parts consist of
        // whole tiles of positions, so there are a few less.
        assert_eq!(batch_of(&[(40, 100_000)], 132).tiles.len(), 129);
        assert_eq!(batch_of(&[(500, 60_000)], 132).tiles.len(), 120, "24 tiles in 5 parts each");
        assert_eq!(batch_of(&[(500, 60_000)], 12).tiles.len(), 24, "all multiprocessors have work");
    }

    #[test]
    fn padded_batches_have_few_sizes_and_at_most_1_5_rows_per_token() {
        let mut occurring: Vec<usize> = (1..=256).map(padded_rows).collect();
        assert!((1..=256).zip(&occurring).all(|(rows, padded)| (rows..=rows * 3 / 2).contains(padded)));
        occurring.dedup();
        assert_eq!(occurring, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]);
    }

    #[test]
    fn gemms_of_full_prompt_steps_are_planned_in_advance() {
        let planned = |largest| prompt_steps(largest).collect::<Vec<_>>();
        assert_eq!([planned(8_192), planned(600), planned(64)], [vec![8_192, 4_096, 2_048], vec![600, 300], vec![]]);
    }

    #[test]
    fn padding_a_batch_keeps_its_entries_and_tables() {
        let blocks: Vec<BlockId> = (0..40).map(BlockId).collect();
        let chunks = [600, 3, 20].map(|position| chunk(&[7], position, &blocks, Logits::Last));
        let mut batch = Batch::new(&chunks, &SHAPE, 4);
        let (plain, tables) = (Batch::new(&chunks, &SHAPE, 4), batch.tables.clone());
        batch.pad(4, 8);
        assert_eq!((batch.rows(), batch.partitions.len()), (4, 8));
        assert_eq!((&batch.slots[..3], &batch.partitions[..5]), (&plain.slots[..], &plain.partitions[..]));
        assert_eq!((batch.slots[3], batch.partitions[5]), (NO_SLOT, [0; 8]));
        assert_eq!(batch.tables, tables);
    }

    #[test]
    fn partitions_of_single_tokens_fill_the_device() {
        let blocks: Vec<BlockId> = (0..8_192).map(BlockId).collect();
        let parts = |sequences: usize, position: u32, multiprocessors: usize| {
            let chunks = vec![chunk(&[1], position, &blocks, Logits::Last); sequences];
            let batch = Batch::new(&chunks, &SHAPE, multiprocessors);
            assert!(batch.partitions.len() <= partitions_max(sequences, &SHAPE, multiprocessors), "{sequences} at {position}");
            batch.partitions.len()
        };
        // With two key heads, there are half as many partitions as thread blocks; their lengths are rounded to whole tiles.
        assert_eq!(parts(1, 100_000, 132), 261);
        assert_eq!(parts(1, 255, 132), 1);
        assert_eq!(parts(1, 256, 132), 2);
        assert_eq!(parts(256, 2_047, 132), 256);
        assert_eq!(parts(256, 100, 132), 256);
    }
}
