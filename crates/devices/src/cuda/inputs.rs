//! The lists that describe a step, as the kernels read them.

use super::{
    CudaError,
    device::{Device, Memory},
    plan::Batch,
    sampling::SampleInputs,
};
use std::sync::Arc;

/// Initial size of the buffer in bytes, enough for the lists of almost all steps: 256 sequences with 900 blocks each, or 20,000 prompt
/// tokens. Reallocating the buffer invalidates all CUDA graphs, and freeing the old one waits for the device.
pub(super) const BYTES: usize = 1 << 20;

/// The device buffer of a step's lists, uploaded with one copy.
pub(super) struct Inputs<D: Device> {
    pub memory: Memory<D>,
    bytes: Vec<u8>,
}

/// Device addresses of a step's lists.
pub(super) struct Lists {
    pub tokens: u64,
    pub positions: u64,
    pub slots: u64,
    pub tables: u64,
    pub tiles: u64,
    pub partitions: u64,
    pub logit_rows: u64,
    pub sampled_rows: u64,
    pub sample_settings: u64,
}

impl<D: Device> Inputs<D> {
    /// Allocates this many bytes; the buffer grows when needed.
    pub fn new(device: &Arc<D>, bytes: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: Memory::new(device, bytes)?, bytes: Vec::new() })
    }

    /// Copies a step's lists to the device, each aligned to 16 bytes. The lists whose lengths depend only on the numbers of rows and
    /// partitions come first. So they have the same addresses in all steps that are padded to the same numbers of rows and partitions.
    pub fn upload(&mut self, device: &Arc<D>, batch: &Batch, sampling: &SampleInputs) -> Result<Lists, CudaError> {
        self.bytes.clear();
        let mut lists = Lists {
            sample_settings: self.list(&sampling.settings),
            tokens: self.numbers(&batch.tokens),
            positions: self.numbers(&batch.positions),
            slots: self.numbers(&batch.slots),
            tiles: self.numbers(batch.tiles.as_flattened()),
            partitions: self.numbers(batch.partitions.as_flattened()),
            logit_rows: self.numbers(&batch.logit_rows),
            sampled_rows: self.numbers(&batch.sampled_rows),
            tables: self.numbers(&batch.tables),
        };
        let adjustments = self.list(&sampling.adjustments);
        assert_eq!(
            adjustments,
            lists.tables + u64::from(batch.offset_after_tables()) * 16,
            "offsets of adjustments count from the tables"
        );
        self.numbers(&sampling.words);
        if self.memory.bytes() < self.bytes.len() {
            self.memory = Memory::new(device, self.bytes.len().next_power_of_two())?;
        }
        device.upload(self.memory.address(), &self.bytes)?;
        let Lists { tokens, positions, slots, tables, tiles, partitions, logit_rows, sampled_rows, sample_settings } = &mut lists;
        for place in [tokens, positions, slots, tables, tiles, partitions, logit_rows, sampled_rows, sample_settings] {
            *place += self.memory.address();
        }
        Ok(lists)
    }

    /// Appends a list and returns its offset.
    fn list(&mut self, list: &[u8]) -> u64 {
        self.bytes.resize(self.bytes.len().next_multiple_of(16), 0);
        let place = self.bytes.len() as u64;
        self.bytes.extend_from_slice(list);
        place
    }

    fn numbers(&mut self, numbers: &[u32]) -> u64 {
        let place = self.list(&[]);
        let first = self.bytes.len();
        // A loop over slices of known length copies many numbers at a time. The block tables of a step may have 100,000 numbers.
        self.bytes.resize(first + 4 * numbers.len(), 0);
        let into = self.bytes[first..].as_chunks_mut::<4>().0;
        into.iter_mut().zip(numbers).for_each(|(into, number)| *into = number.to_le_bytes());
        place
    }
}
