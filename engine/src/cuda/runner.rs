//! An engine on a device: one step after the other.

use super::{
    CudaError, CudaLimits,
    device::{Device, Factors, Into, Kernel, Launch, Memory, Product, single},
    draws::{Draws, LIKELIHOOD_BYTES},
    memory::Sizes,
    model::{Layer, Model},
    plan::Batch,
    shape::Shape,
};
use crate::{Chunk, Draw, Drawn, Engine, EngineError, EngineInfo, StepOutput};
use std::{sync::Arc, time::Duration};
use tandem_kv::BlockId;

/// Computes one worker's steps.
pub(super) struct Runner<D: Device> {
    /// A queue of its own: engines of one device run beside each other.
    device: Arc<D>,
    limits: CudaLimits,
    sizes: Sizes,
    buffers: Buffers<D>,
    inputs: Inputs<D>,
    kv: Memory<D>,
    /// Last, so that it goes last: a step that broke off may still read its weights until this engine's memory has been given back.
    model: Arc<Model<D>>,
}

/// Used again in every step.
struct Buffers<D: Device> {
    stream: Memory<D>,
    normed: Memory<D>,
    qkv: Memory<D>,
    attended: Memory<D>,
    gates: Memory<D>,
    inner: Memory<D>,
    turns: Memory<D>,
    outs: Memory<D>,
    sums: Memory<D>,
    logits: Memory<D>,
    scratch: Memory<D>,
    /// Tokens that were drawn, and their logprobs.
    drawn: Memory<D>,
}

/// What the host says of a step, in one piece.
struct Inputs<D: Device> {
    memory: Memory<D>,
    bytes: Vec<u8>,
}

/// Where a step's lists are.
struct Lists {
    tokens: u64,
    positions: u64,
    slots: u64,
    tables: u64,
    tiles: u64,
    parts: u64,
    combined: u64,
    wanted: u64,
    drawn: u64,
    draws: u64,
    adjustments: u64,
}

impl<D: Device> Runner<D> {
    /// Takes all memory that steps will need.
    pub fn new(model: Arc<Model<D>>, limits: CudaLimits) -> Result<Self, CudaError> {
        let device = Arc::new(model.device.beside()?);
        let sizes = Sizes::new(&model.shape, &limits, device.processors(), model.free_bytes)?;
        let memory = |bytes| Memory::new(&device, bytes);
        let buffers = Buffers {
            stream: memory(sizes.stream)?,
            normed: memory(sizes.normed)?,
            qkv: memory(sizes.qkv)?,
            attended: memory(sizes.attended)?,
            gates: memory(sizes.gates)?,
            inner: memory(sizes.inner)?,
            turns: memory(sizes.turns)?,
            outs: memory(sizes.outs)?,
            sums: memory(sizes.sums)?,
            logits: memory(sizes.logits)?,
            scratch: memory(sizes.scratch)?,
            drawn: memory(0)?,
        };
        let inputs = Inputs { memory: memory(0)?, bytes: Vec::new() };
        let kv = memory(sizes.capacity_blocks as usize * model.shape.block_bytes())?;
        Ok(Self { model, device, limits, sizes, buffers, inputs, kv })
    }

    #[cfg(test)]
    pub fn shape(&self) -> &Shape {
        &self.model.shape
    }

    fn run(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<StepOutput, CudaError> {
        let info = self.describe();
        for chunk in chunks {
            info.check_chunk(chunk)?;
        }
        let batch = Batch::new(chunks, draws, &self.model.shape, self.device.processors());
        let (tokens_max, sequences_max) = (self.limits.step_tokens_max as usize, self.limits.sequences_max as usize);
        if batch.rows() > tokens_max || batch.combined.len() > sequences_max {
            let (tokens, sequences) = (batch.rows(), batch.combined.len());
            return Err(CudaError::StepTooLarge { tokens, sequences, tokens_max, sequences_max });
        }
        if chunks.is_empty() {
            return Ok(StepOutput::default());
        }
        let draws: Vec<Draw<'_>> = draws.iter().flatten().copied().collect();
        assert_eq!(draws.len(), batch.drawn.len(), "whoever has a draw wants the last token's logits");
        let draws = Draws::new(&draws, &[], self.model.shape.vocab_size);
        let drawn_bytes = draws.rows().min(self.sizes.logit_rows) * (1 + draws.top_max()) * LIKELIHOOD_BYTES;
        if self.buffers.drawn.bytes() < drawn_bytes {
            self.buffers.drawn = Memory::new(&self.device, drawn_bytes.next_power_of_two())?;
        }
        let lists = self.inputs.upload(&self.device, &batch, &draws)?;
        let step = Step {
            model: &self.model,
            device: &*self.device,
            buffers: &self.buffers,
            kv: self.kv.address(),
            batch: &batch,
            lists,
        };
        step.layers()?;
        let logits = step.logits(self.sizes.logit_rows)?;
        let drawn = step.draw(self.sizes.logit_rows, &draws)?;
        // Whoever measures the step measures all of it, and what fails fails here.
        self.device.wait()?;
        Ok(StepOutput { logits, drawn, simulated: Duration::ZERO })
    }

    fn block_address(&self, block: BlockId) -> u64 {
        assert!(block.0 < self.sizes.capacity_blocks, "blocks are those of the KV memory");
        self.kv.address() + u64::from(block.0) * self.model.shape.block_bytes() as u64
    }
}

impl<D: Device> Engine for Runner<D> {
    fn describe(&self) -> EngineInfo {
        EngineInfo {
            vocab_size: self.model.shape.vocab_size,
            context_length: self.model.context_length,
            block_size: self.model.shape.block_size as u32,
            capacity_blocks: self.sizes.capacity_blocks,
            block_bytes: self.model.shape.block_bytes(),
            simulated_block_transfer: Duration::ZERO,
        }
    }

    fn step(&mut self, chunks: &[Chunk<'_>]) -> Result<StepOutput, EngineError> {
        self.step_and_draw(chunks, &[])
    }

    fn step_and_draw(&mut self, chunks: &[Chunk<'_>], draws: &[Option<Draw<'_>>]) -> Result<StepOutput, EngineError> {
        self.run(chunks, draws).map_err(EngineError::from)
    }

    fn read_block(&self, block: BlockId, into: &mut [u8]) -> Result<(), EngineError> {
        assert_eq!(into.len(), self.model.shape.block_bytes(), "a block is read into as many bytes as it has");
        self.device.download(self.block_address(block), into).map_err(EngineError::from)
    }

    fn write_block(&mut self, block: BlockId, bytes: &[u8]) -> Result<(), EngineError> {
        assert_eq!(bytes.len(), self.model.shape.block_bytes(), "a block is written from as many bytes as it has");
        self.device.upload(self.block_address(block), bytes).map_err(EngineError::from)
    }

    fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), EngineError> {
        let copied = self.device.copy(self.block_address(from), self.block_address(to), self.model.shape.block_bytes());
        copied.map_err(EngineError::from)
    }
}

impl<D: Device> Inputs<D> {
    /// Copies a step's lists, each to a multiple of 16 bytes.
    fn upload(&mut self, device: &Arc<D>, batch: &Batch, draws: &Draws) -> Result<Lists, CudaError> {
        self.bytes.clear();
        let bytes = &mut self.bytes;
        let begin = |bytes: &mut Vec<u8>| {
            bytes.resize(bytes.len().next_multiple_of(16), 0);
            bytes.len() as u64
        };
        let plain = [&draws.settings, &draws.adjustments].map(|list| {
            let place = begin(bytes);
            bytes.extend_from_slice(list);
            place
        });
        let mut list = |numbers: &mut dyn Iterator<Item = u32>| {
            let place = begin(bytes);
            bytes.extend(numbers.flat_map(u32::to_le_bytes));
            place
        };
        let mut lists = Lists {
            tokens: list(&mut batch.tokens.iter().copied()),
            positions: list(&mut batch.positions.iter().copied()),
            slots: list(&mut batch.slots.iter().copied()),
            tables: list(&mut batch.tables.iter().copied()),
            tiles: list(&mut batch.tiles.iter().flatten().copied()),
            parts: list(&mut batch.parts.iter().flatten().copied()),
            combined: list(&mut batch.combined.iter().flatten().copied()),
            wanted: list(&mut batch.wanted.iter().copied()),
            drawn: list(&mut batch.drawn.iter().copied()),
            draws: plain[0],
            adjustments: plain[1],
        };
        if self.memory.bytes() < self.bytes.len() {
            self.memory = Memory::new(device, self.bytes.len().next_power_of_two())?;
        }
        device.upload(self.memory.address(), &self.bytes)?;
        let Lists { tokens, positions, slots, tables, tiles, parts, combined, wanted, drawn, draws, adjustments } = &mut lists;
        for place in [tokens, positions, slots, tables, tiles, parts, combined, wanted, drawn, draws, adjustments] {
            *place += self.memory.address();
        }
        Ok(lists)
    }
}

/// One step under way.
struct Step<'a, D: Device> {
    model: &'a Model<D>,
    device: &'a D,
    buffers: &'a Buffers<D>,
    kv: u64,
    batch: &'a Batch,
    lists: Lists,
}

/// The places of a layer's numbers that a product reads and writes.
struct Places<'a, D: Device> {
    weights: &'a Memory<D>,
    inputs: &'a Memory<D>,
    outputs: &'a Memory<D>,
}

impl<D: Device> Step<'_, D> {
    /// Embedding, then all layers; the stream of all rows is left, or only the KV where no logits are wanted.
    fn layers(&self) -> Result<(), CudaError> {
        let (shape, rows, buffers) = (&self.model.shape, self.batch.rows(), self.buffers);
        let turns =
            [self.lists.positions, self.model.frequencies.address(), buffers.turns.address(), self.model.magnitude.to_bits()];
        self.launch(Kernel::Turns, [rows, 1, 1], turns)?;
        let embed = [self.lists.tokens, self.model.embedding.address(), buffers.stream.address(), shape.width as u64];
        self.launch(Kernel::Embed, [rows, 1, 1], embed)?;
        for (index, layer) in self.model.layers.iter().enumerate() {
            let wide = |inputs, outputs, into| Product { rows, inputs, outputs, into };
            self.norm(rows, 0, &layer.attention_norm)?;
            let qkv = wide(shape.width, shape.qkv_dim(), Into::Halves);
            self.multiply(qkv, Places { weights: &layer.qkv, inputs: &buffers.normed, outputs: &buffers.qkv })?;
            self.store_kv(index, layer)?;
            if index + 1 == self.model.layers.len() && self.batch.wanted.is_empty() && self.batch.drawn.is_empty() {
                return Ok(());
            }
            self.attend(index)?;
            let out = wide(shape.query_dim(), shape.width, Into::Sum);
            self.multiply(out, Places { weights: &layer.attention_out, inputs: &buffers.attended, outputs: &buffers.stream })?;
            self.norm(rows, 0, &layer.ffn_norm)?;
            let gates = wide(shape.width, 2 * shape.ffn, Into::Halves);
            self.multiply(gates, Places { weights: &layer.gates, inputs: &buffers.normed, outputs: &buffers.gates })?;
            let eights = rows * shape.ffn / 8;
            let swiglu = [buffers.gates.address(), buffers.inner.address(), shape.ffn as u64, rows as u64];
            self.launch(Kernel::Swiglu, [eights.div_ceil(Kernel::Swiglu.threads() as usize), 1, 1], swiglu)?;
            let down = wide(shape.ffn, shape.width, Into::Sum);
            self.multiply(down, Places { weights: &layer.down, inputs: &buffers.inner, outputs: &buffers.stream })?;
        }
        Ok(())
    }

    /// The head, for the rows whose logits are wanted, so many at a time.
    fn logits(&self, each: usize) -> Result<Vec<f32>, CudaError> {
        let (shape, wanted) = (&self.model.shape, self.batch.wanted.len());
        let mut logits = vec![0.0; wanted * shape.vocab_size];
        for (i, into) in logits.chunks_mut(each * shape.vocab_size).enumerate() {
            let rows = into.len() / shape.vocab_size;
            self.head(rows, self.lists.wanted + (i * each * 4) as u64)?;
            let mut bytes = vec![0; size_of_val(into)];
            self.device.download(self.buffers.logits.address(), &mut bytes)?;
            for (into, bytes) in into.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *into = f32::from_le_bytes(*bytes);
            }
        }
        Ok(logits)
    }

    /// Tokens of the rows that have a draw, so many at a time.
    fn draw(&self, each: usize, draws: &Draws) -> Result<Vec<Drawn>, CudaError> {
        let (buffers, top_max) = (self.buffers, draws.top_max());
        let mut drawn = Vec::with_capacity(draws.rows());
        for first in (0..draws.rows()).step_by(each) {
            let rows = each.min(draws.rows() - first);
            self.head(rows, self.lists.drawn + (first * 4) as u64)?;
            let tokens = buffers.drawn.address();
            let arguments = [
                buffers.logits.address(),
                buffers.scratch.address(),
                self.model.shape.vocab_size as u64,
                self.lists.draws + Draws::offset(first),
                self.lists.adjustments,
                0,
                tokens,
                tokens + (rows * LIKELIHOOD_BYTES) as u64,
                top_max as u64,
            ];
            self.launch(Kernel::Sample, [rows, 1, 1], arguments)?;
            let mut bytes = vec![0; rows * (1 + top_max) * LIKELIHOOD_BYTES];
            self.device.download(tokens, &mut bytes)?;
            drawn.extend(draws.read(first, rows, &bytes));
        }
        Ok(drawn)
    }

    /// Logits of the rows in a list.
    fn head(&self, rows: usize, list: u64) -> Result<(), CudaError> {
        let shape = &self.model.shape;
        self.norm(rows, list, &self.model.norm)?;
        let product = Product { rows, inputs: shape.width, outputs: shape.vocab_size, into: Into::Singles };
        let (weights, inputs) = (self.model.head(), self.buffers.normed.address());
        self.device.multiply(shape.half, product, Factors { weights, inputs, outputs: self.buffers.logits.address() })
    }

    /// Normalised rows of the stream: those of the list at this address, or the first ones where there is none (0).
    fn norm(&self, rows: usize, list: u64, weight: &Memory<D>) -> Result<(), CudaError> {
        let (stream, normed) = (self.buffers.stream.address(), self.buffers.normed.address());
        let width = self.model.shape.width as u64;
        self.launch(Kernel::RmsNorm, [rows, 1, 1], [stream, list, weight.address(), normed, width, single(self.model.eps)])
    }

    fn store_kv(&self, index: usize, layer: &Layer<D>) -> Result<(), CudaError> {
        /// Heads that a block of the kernel takes.
        const HEADS: usize = 4;
        let shape = &self.model.shape;
        let optional = |memory: &Option<Memory<D>>| memory.as_ref().map_or(0, Memory::address);
        let arguments = [
            self.buffers.qkv.address(),
            optional(&layer.qkv_biases),
            optional(&layer.query_norm),
            optional(&layer.key_norm),
            self.buffers.turns.address(),
            self.lists.slots,
            self.kv,
            index as u64,
            single(self.model.eps),
        ];
        let grid = [self.batch.rows(), (shape.heads + 2 * shape.kv_heads).div_ceil(HEADS), 1];
        self.launch(Kernel::StoreKv, grid, arguments)
    }

    /// Prompts by tiles, single tokens by parts.
    fn attend(&self, index: usize) -> Result<(), CudaError> {
        let (shape, buffers, lists) = (&self.model.shape, self.buffers, &self.lists);
        let (qkv, attended) = (buffers.qkv.address(), buffers.attended.address());
        // Exponentials are powers of two.
        let scale = single((std::f64::consts::LOG2_E / (shape.head_dim as f64).sqrt()) as f32);
        let (tiles, parts, combined) = (self.batch.tiles.len(), self.batch.parts.len(), self.batch.combined.len());
        if tiles > 0 {
            let launch =
                Launch { kernel: Kernel::AttendPrompt, grid: [tiles, shape.kv_heads, 1], shared_bytes: shape.prompt_bytes() };
            self.device.launch(launch, &mut [qkv, self.kv, lists.tables, lists.tiles, attended, index as u64, scale])?;
        }
        if parts > 0 {
            let (outs, sums) = (buffers.outs.address(), buffers.sums.address());
            let grid = [parts, shape.kv_heads, shape.group().div_ceil(Shape::TOKEN_ROWS)];
            let launch = Launch { kernel: Kernel::AttendToken, grid, shared_bytes: shape.token_bytes() };
            self.device.launch(launch, &mut [qkv, self.kv, lists.tables, lists.parts, outs, sums, index as u64, scale])?;
            self.launch(Kernel::Combine, [combined, shape.heads, 1], [outs, sums, lists.combined, attended])?;
        }
        Ok(())
    }

    fn multiply(&self, product: Product, Places { weights, inputs, outputs }: Places<'_, D>) -> Result<(), CudaError> {
        let factors = Factors { weights: weights.address(), inputs: inputs.address(), outputs: outputs.address() };
        self.device.multiply(self.model.shape.half, product, factors)
    }

    fn launch<const N: usize>(&self, kernel: Kernel, grid: [usize; 3], mut arguments: [u64; N]) -> Result<(), CudaError> {
        self.device.launch(Launch { kernel, grid, shared_bytes: 0 }, &mut arguments)
    }
}
