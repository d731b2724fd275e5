//! Times every kernel and every GEMM alone, with the arguments and geometry of real steps. `bench/gpu.sh` compares the times with the GPU's
//! ceilings.

use super::{Rank, Runner, Step};
use crate::cuda::{
    CudaError, CudaLimits,
    buffers::Gemms,
    device::{Device, Epilogue, Gemm, Memory, Operands},
    model::Model,
    plan::{Batch, padded_rows},
    sampling::SampleInputs,
    shape::Shape,
    weights,
};
use std::sync::Arc;
use tandem_engine::{Chunk, Logits, Sampler, Sampling};
use tandem_kv::BlockId;
use tokio::time::Instant;

/// The number of copies that are timed. Their mean time gives the GPU's copy rate.
const COPIES: u32 = 8;

/// The kernels and GEMMs that are timed.
#[derive(Clone, Copy, Debug)]
pub enum TimingCase {
    /// The GPU's highest rates: a GEMM of three square matrices of `width`, and a copy of `copy_bytes` bytes.
    Ceilings {
        /// Rows and columns of the matrices.
        width: usize,
        /// The number of bytes that are copied. Each is read once and written once.
        copy_bytes: usize,
    },
    /// The kernels of a step that computes `new` tokens of one sequence after `before` others.
    Prompt {
        /// The number of tokens whose KV is already computed.
        before: usize,
        /// The number of tokens that are computed.
        new: usize,
    },
    /// The kernels of a step that decodes one token for each of `batch` sequences of `context` tokens.
    Decode {
        /// The number of sequences.
        batch: usize,
        /// The number of tokens of each sequence, including the new one.
        context: usize,
    },
}

/// The time of a kernel or GEMM, and the minimum work for its result.
#[derive(Clone, Debug)]
pub struct Timing {
    /// The name of the kernel, or of the GEMM's place in the layer.
    pub what: &'static str,
    /// The step to which the kernel belongs, such as `decode 32 x 2048`.
    pub case: String,
    /// The mean duration of one launch.
    pub seconds: f64,
    /// The number of floating-point operations.
    pub flop: f64,
    /// The number of bytes that must be read from memory or written to it at least once.
    pub bytes: f64,
}

impl TimingCase {
    fn name(self) -> String {
        match self {
            Self::Ceilings { .. } => "ceiling".to_owned(),
            Self::Prompt { before, new } => format!("prompt {new} after {before}"),
            Self::Decode { batch, context } => format!("decode {batch} x {context}"),
        }
    }

    /// Returns three numbers: the sequences of a step, the new tokens of each sequence, and all tokens of each sequence.
    fn sequences(self) -> (usize, usize, usize) {
        match self {
            Self::Ceilings { .. } => (0, 0, 0),
            Self::Prompt { before, new } => (1, new, before + new),
            Self::Decode { batch, context } => (batch, 1, context),
        }
    }
}

/// Times all cases, and passes each result to `report` at once.
pub(in crate::cuda) fn measure<D: Device>(
    models: &Arc<[Model<D>]>,
    cases: &[TimingCase],
    report: &mut dyn FnMut(Timing),
) -> Result<(), CudaError> {
    let shape = models[0].shape;
    for case in cases {
        if let TimingCase::Ceilings { width, copy_bytes } = *case {
            ceilings(&models[0], width, copy_bytes, report)?;
            continue;
        }
        let (count, new, context) = case.sequences();
        let blocks_each = context.div_ceil(shape.block_size);
        let limits = CudaLimits {
            capacity_blocks: Some((count * blocks_each) as u32),
            engines: 1,
            step_tokens_max: (count * new) as u32,
            sequences_max: count as u32,
            urgent: false,
        };
        let mut runner = Runner::new(Arc::clone(models), limits)?;
        runner.fill_with_numbers()?;
        runner.measure_step(*case, report)?;
    }
    Ok(())
}

fn ceilings<D: Device>(
    model: &Model<D>,
    width: usize,
    copy_bytes: usize,
    report: &mut dyn FnMut(Timing),
) -> Result<(), CudaError> {
    let device = &model.device;
    let pattern = Memory::of(device, &weights::drawn(model.shape.half))?;
    let matrix = || weights::fill(device, &pattern, width * width * 2);
    let (weights, inputs, outputs) = (matrix()?, matrix()?, matrix()?);
    let gemm = Gemm { half: model.shape.half, rows: width, inputs: width, outputs: width, epilogue: Epilogue::StoreHalf };
    let operands = Operands { weights: weights.address(), inputs: inputs.address(), outputs: outputs.address() };
    device.prepare(&[(gemm, vec![operands])], super::PREPARE_MAX)?;
    let case = TimingCase::Ceilings { width, copy_bytes }.name();
    let seconds = seconds_of(&**device, 8, |_| device.gemm((gemm, operands)))?;
    report(Timing {
        what: "gemm",
        case: case.clone(),
        seconds,
        flop: 2.0 * (width as f64).powi(3),
        bytes: 6.0 * (width as f64).powi(2),
    });
    let (from, to) = (weights::fill(device, &pattern, copy_bytes)?, Memory::new(device, copy_bytes)?);
    // No graph is used, because the copies of a graph run on a copy engine, at half the rate that kernels and other copies reach.
    let copies = || (0..COPIES).try_for_each(|_| device.copy(from.address(), to.address(), copy_bytes));
    let seconds = second_run(&**device, copies)? / f64::from(COPIES);
    report(Timing { what: "copy", case, seconds, flop: 0.0, bytes: 2.0 * copy_bytes as f64 });
    Ok(())
}

/// Returns the mean seconds of `work`, which is launched `times` times by one CUDA graph, so that the host's time is not included. The
/// second replay counts, because the first one may include one-time work.
fn seconds_of<D: Device>(device: &D, times: usize, work: impl Fn(usize) -> Result<(), CudaError>) -> Result<f64, CudaError> {
    work(0)?;
    let graph = device.capture(|| (0..times).try_for_each(&work))?;
    Ok(second_run(device, || device.replay(&graph))? / times as f64)
}

/// Runs `launch` twice, and returns the seconds from the second launch to the end of its work.
fn second_run<D: Device>(device: &D, launch: impl Fn() -> Result<(), CudaError>) -> Result<f64, CudaError> {
    launch()?;
    device.wait()?;
    let began = Instant::now();
    launch()?;
    device.wait()?;
    Ok(began.elapsed().as_secs_f64())
}

impl<D: Device> Runner<D> {
    /// Writes random numbers to all memory that a step reads, because the speed of a GPU depends on the values of its data.
    fn fill_with_numbers(&self) -> Result<(), CudaError> {
        let Rank { device, buffers, kv, .. } = &self.ranks[0];
        let pattern = Memory::of(device, &weights::drawn(self.shape().half))?;
        let singles = (0..1 << 18).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 8) as f32 / (1 << 22) as f32 - 2.0);
        let singles = Memory::of(device, &singles.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())?;
        let halves = [&buffers.normed, &buffers.qkv, &buffers.attended, &buffers.gates, &buffers.inner, &**kv];
        let filled = halves.map(|memory| (memory, &pattern)).into_iter();
        for (memory, pattern) in filled.chain([(&buffers.residual, &singles), (&buffers.logits, &singles)]) {
            for at in (0..memory.bytes()).step_by(pattern.bytes()) {
                device.copy(pattern.address(), memory.address() + at as u64, pattern.bytes().min(memory.bytes() - at))?;
            }
        }
        device.wait()
    }

    fn measure_step(&mut self, case: TimingCase, report: &mut dyn FnMut(Timing)) -> Result<(), CudaError> {
        let (count, new, context) = case.sequences();
        let blocks_each = context.div_ceil(self.shape().block_size);
        let blocks: Vec<BlockId> = (0..(count * blocks_each) as u32).map(BlockId).collect();
        let tokens: Vec<u32> = (0..new).map(|token| (token % self.shape().vocab_size) as u32).collect();
        let greedy = Sampler::new(Sampling { temperature: 0.0, ..Sampling::default() }, &[]);
        let drawn = Sampler::new(Sampling { temperature: 0.8, top_p: 0.95, top_k: 40, ..Sampling::default() }, &[]);
        for (mode, sampler) in [("sample, greedy", greedy), ("sample, top-k and top-p", drawn)] {
            let requests = vec![sampler.request(context as u32); count];
            let chunks: Vec<Chunk<'_>> = blocks
                .chunks(blocks_each)
                .zip(&requests)
                .map(|(blocks, request)| Chunk {
                    tokens: &tokens,
                    start: (context - new) as u32,
                    blocks,
                    logits: Logits::Sample(*request),
                })
                .collect();
            let mut batch = Batch::new(&chunks, self.shape(), self.ranks[0].device.multiprocessors());
            let mut sampling = SampleInputs::new(&requests, batch.offset_after_tables(), self.shape().vocab_size);
            if new == 1 {
                let rows = padded_rows(count).min(self.limits.sequences_max as usize);
                batch.pad(rows, batch.partitions.len());
                sampling.pad(rows);
            }
            let Rank { device, inputs, .. } = &mut self.ranks[0];
            let lists = inputs.upload(device, &batch, &sampling)?;
            let Rank { device, buffers, kv, .. } = &self.ranks[0];
            let step = Step { model: &self.models[0], device: &**device, buffers, kv: kv.address(), batch: &batch, lists };
            if mode == "sample, greedy" {
                step.measure_layers(case, report)?;
                step.measure_head(case, sampling.rows(), report)?;
            }
            step.measure_sampling(case, mode, sampling.rows(), report)?;
        }
        Ok(())
    }
}

impl<D: Device> Step<'_, D> {
    /// Times the kernels and GEMMs of the layers. Launches use the layers in turn, so that their weights and KV come from memory and not
    /// from the L2 cache.
    fn measure_layers(&self, case: TimingCase, report: &mut dyn FnMut(Timing)) -> Result<(), CudaError> {
        let (shape, layers, rows) = (self.model.shape, &self.model.layers, self.batch.rows());
        let layer = |i: usize| &layers[i % layers.len()];
        // Long kernels are launched less often.
        let times = if rows > 1_024 { 6 } else { layers.len().max(12) };
        let all = rows as f64;
        let numbers = |count: usize, bytes: usize| all * count as f64 * bytes as f64;
        let mut time = |what, flop, bytes, work: &dyn Fn(usize) -> Result<(), CudaError>| {
            let seconds = seconds_of(self.device, times, work)?;
            report(Timing { what, case: case.name(), seconds, flop, bytes });
            Ok::<_, CudaError>(())
        };
        // A call of the step's `embed` launches both kernels.
        time("rope + embed", 0.0, numbers(shape.head_dim, 4) + numbers(shape.width, 6), &|_| self.embed())?;
        time("rms_norm", 0.0, numbers(shape.width, 6), &|i| self.norm(rows, 0, &layer(i).ffn_norm))?;
        time("store_kv", 0.0, numbers(shape.qkv_dim(), 4), &|i| self.store_kv(i % layers.len(), layer(i)))?;
        let (flop, bytes) = self.attention_work(&shape);
        let attention = if self.batch.tiles.is_empty() { "attend_token" } else { "attend_prompt" };
        time(attention, flop, bytes, &|i| self.attend(i % layers.len()))?;
        time("swiglu", 0.0, numbers(shape.ffn, 6), &|_| self.swiglu())?;
        type Pick = fn(Gemms) -> (Gemm, Operands);
        let picks: [(&'static str, Pick); 4] = [
            ("gemm qkv", |gemms| gemms.qkv),
            ("gemm attention out", |gemms| gemms.attention_out),
            ("gemm gates", |gemms| gemms.gates),
            ("gemm down", |gemms| gemms.down),
        ];
        for (what, pick) in picks {
            let (flop, bytes) = gemm_work(pick(self.gemms(layer(0))).0);
            time(what, flop, bytes, &|i| self.device.gemm(pick(self.gemms(layer(i)))))?;
        }
        Ok(())
    }

    /// Returns the floating-point operations of the attention of one layer, and the bytes of keys and values that it reads once.
    fn attention_work(&self, shape: &Shape) -> (f64, f64) {
        let scores: f64 = self.batch.positions.iter().map(|position| f64::from(*position) + 1.0).sum();
        let tokens = self.batch.partitions.iter().map(|part| part[2] - part[1]);
        let prompts = self.batch.tiles.iter().map(|tile| tile[5]).max();
        let read: f64 = tokens.chain(prompts).map(f64::from).sum();
        (4.0 * scores * shape.query_dim() as f64, 2.0 * read * shape.kv_row_bytes() as f64)
    }

    fn measure_head(&self, case: TimingCase, rows: usize, report: &mut dyn FnMut(Timing)) -> Result<(), CudaError> {
        let gemm = self.buffers.head_gemm(self.model, rows);
        self.device.prepare(&[(gemm.0, vec![gemm.1])], super::PREPARE_MAX)?;
        let (flop, bytes) = gemm_work(gemm.0);
        let seconds = seconds_of(self.device, 8, |_| self.device.gemm(gemm))?;
        report(Timing { what: "gemm head", case: case.name(), seconds, flop, bytes });
        Ok(())
    }

    /// Times the sampling of rows of random logits.
    fn measure_sampling(
        &self,
        case: TimingCase,
        what: &'static str,
        rows: usize,
        report: &mut dyn FnMut(Timing),
    ) -> Result<(), CudaError> {
        let bytes = rows as f64 * self.model.shape.vocab_size as f64 * 4.0;
        let seconds = seconds_of(self.device, 8, |_| self.launch_sampling(0, rows, 0))?;
        report(Timing { what, case: case.name(), seconds, flop: 0.0, bytes });
        Ok(())
    }
}

/// Returns a GEMM's floating-point operations, and the bytes of its matrices.
fn gemm_work(gemm: Gemm) -> (f64, f64) {
    let [rows, inputs, outputs] = [gemm.rows, gemm.inputs, gemm.outputs].map(|number| number as f64);
    let written = match gemm.epilogue {
        Epilogue::StoreHalf => 2.0,
        Epilogue::StoreSingle => 4.0,
        Epilogue::AddSingle => 8.0,
    };
    (2.0 * rows * inputs * outputs, 2.0 * inputs * (outputs + rows) + written * rows * outputs)
}
