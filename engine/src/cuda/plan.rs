//! Lays out a step's chunks as the lists that the kernels read.

use super::shape::Shape;
use crate::{Chunk, Logits};

/// The minimum number of positions in a partition, which one thread block processes. A sequence with fewer positions is one partition.
const PARTITION_POSITIONS_MIN: usize = 256;
/// The slot number of padding rows. No KV is stored for it. kernels/model.cu has the same constant.
const NO_SLOT: u32 = u32::MAX;
/// The number of `attend_token` thread blocks per multiprocessor at which partitions aim. A multiprocessor runs two of them at a time; with
/// more in its queue, few multiprocessors are idle at the end of a launch.
const BLOCKS_PER_MULTIPROCESSOR: usize = 4;

/// The lists that describe a step: its rows (one token each, chunk after chunk), and the work items of the attention kernels.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub tokens: Vec<u32>,
    pub positions: Vec<u32>,
    /// The slot at which each row's KV is stored: block × block size + offset in the block.
    pub slots: Vec<u32>,
    /// The chunks' block tables, concatenated.
    pub tables: Vec<u32>,
    /// Tiles of prompts, each with its first row, its number of tokens, the position of its first token, and its offset in `tables`. Tiles
    /// that read the most KV come first.
    pub tiles: Vec<[u32; 4]>,
    /// Partitions of the KV that the tokens of one-token chunks read, each with its row, its first position, the position after its last
    /// one, and its offset in `tables`.
    pub partitions: Vec<[u32; 4]>,
    /// The tokens of one-token chunks, for which the results of their partitions are combined, each with its row, its first partition, its
    /// number of partitions, and an unused number.
    pub combined: Vec<[u32; 4]>,
    /// The rows whose logits are returned.
    pub logit_rows: Vec<u32>,
    /// The rows for which a token is sampled on the device.
    pub sampled_rows: Vec<u32>,
}

impl Batch {
    /// Lays out the chunks of a step, for a device with this many multiprocessors.
    pub fn new(chunks: &[Chunk<'_>], shape: &Shape, multiprocessors: usize) -> Self {
        let mut batch = Self::default();
        let tile_tokens = Shape::PROMPT_ROWS / shape.group();
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
                let first = batch.partitions.len() as u32;
                let starts = (0..end).step_by(partition_positions);
                let ends = starts.clone().map(|start| (start + partition_positions).min(end) as u32);
                batch.partitions.extend(starts.zip(ends).map(|(start, end)| [first_row, start as u32, end, table]));
                batch.combined.push([first_row, first, batch.partitions.len() as u32 - first, 0]);
            } else {
                for done in (0..len).step_by(tile_tokens) {
                    batch.tiles.push([first_row + done, (len - done).min(tile_tokens as u32), chunk.start + done, table]);
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
        batch.tiles.sort_by_key(|[row, tokens, position, _]| (std::cmp::Reverse(position + tokens), *row));
        batch
    }

    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Pads a batch of one-token chunks to these numbers of rows and partitions. Added partitions are empty. Added rows attend to nothing
    /// and store no KV, but a token is sampled for them.
    pub fn pad(&mut self, rows: usize, partitions: usize) {
        assert!(rows >= self.rows() && partitions >= self.partitions.len(), "a batch does not shrink");
        for row in self.rows() as u32..rows as u32 {
            self.tokens.push(0);
            self.positions.push(0);
            self.slots.push(NO_SLOT);
            self.combined.push([row, 0, 0, 0]);
            self.sampled_rows.push(row);
        }
        self.partitions.resize(partitions, [0; 4]);
    }

    /// Returns the offset of the list after `tables`, in units of 16 bytes from the start of `tables`.
    pub fn offset_after_tables(&self) -> u32 {
        self.tables.len().div_ceil(4) as u32
    }
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
        for [row, tokens, position, table] in &batch.tiles {
            assert!((1..=21).contains(tokens), "a tile has 128 rows of 6 heads at most");
            for token in 0..*tokens {
                attended[(row + token) as usize] += 1;
                assert_eq!(batch.positions[(row + token) as usize], position + token);
                let block = batch.tables[*table as usize + (position + token) as usize / 16];
                assert_eq!(batch.slots[(row + token) as usize] / 16, block);
            }
        }
        for [row, first, parts, _] in &batch.combined {
            attended[*row as usize] += 1;
            let parts = &batch.partitions[*first as usize..(first + parts) as usize];
            let mut next = 0;
            for part in parts {
                assert_eq!((part[0], part[1]), (*row, next), "partitions are contiguous");
                assert!(part[2] > part[1]);
                next = part[2];
            }
            assert_eq!(next, batch.positions[*row as usize] + 1);
        }
        assert!(attended.iter().all(|times| *times == 1));
        let ends: Vec<u32> = batch.tiles.iter().map(|[_, tokens, position, _]| tokens + position).collect();
        assert!(ends.is_sorted_by(|longer, shorter| longer >= shorter), "the longest tiles are first");
        assert!(batch.partitions.len() <= partitions_max(2, &SHAPE, 4));
    }

    #[test]
    fn padding_uses_few_row_counts_and_adds_at_most_half() {
        let mut occurring: Vec<usize> = (1..=256).map(padded_rows).collect();
        assert!((1..=256).zip(&occurring).all(|(rows, padded)| (rows..=rows * 3 / 2).contains(padded)));
        occurring.dedup();
        assert_eq!(occurring, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]);
    }

    #[test]
    fn padding_a_batch_keeps_its_entries_and_tables() {
        let blocks: Vec<BlockId> = (0..40).map(BlockId).collect();
        let chunks = [600, 3, 20].map(|position| chunk(&[7], position, &blocks, Logits::Last));
        let mut batch = Batch::new(&chunks, &SHAPE, 4);
        let (plain, tables) = (Batch::new(&chunks, &SHAPE, 4), batch.tables.clone());
        batch.pad(4, 8);
        assert_eq!((batch.rows(), batch.partitions.len(), batch.combined.len()), (4, 8, 4));
        assert_eq!(
            (&batch.slots[..3], &batch.partitions[..5], &batch.combined[..3]),
            (&plain.slots[..], &plain.partitions[..], &plain.combined[..])
        );
        assert_eq!((batch.slots[3], batch.combined[3], batch.partitions[5]), (NO_SLOT, [3, 0, 0, 0], [0; 4]));
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
