//! One rank's share of a step: the launches of its kernels and GEMMs.

use crate::cuda::{
    CudaError,
    buffers::{Buffers, Gemms},
    device::{Device, Kernel, Launch, Memory, f32_argument},
    inputs::Lists,
    model::{Layer, Model},
    plan::Batch,
    sampling::{LOGPROB_BYTES, SampleInputs},
    shape::Shape,
};
use tandem_engine::{SampleRequest, SampledToken};

/// One rank's share of the current step.
pub(super) struct Step<'a, D: Device> {
    pub(super) model: &'a Model<D>,
    pub(super) device: &'a D,
    pub(super) buffers: &'a Buffers<D>,
    pub(super) kv: u64,
    pub(super) batch: &'a Batch,
    pub(super) lists: Lists,
}

impl<D: Device> Step<'_, D> {
    pub(super) fn embed(&self) -> Result<(), CudaError> {
        let (rows, buffers) = (self.batch.rows(), self.buffers);
        let rope =
            [self.lists.positions, self.model.frequencies.address(), buffers.rope.address(), self.model.magnitude.to_bits()];
        self.launch(Kernel::Rope, [rows, 1, 1], rope)?;
        let width = self.model.shape.width as u64;
        let embed = [self.lists.tokens, self.model.embedding.address(), buffers.residual.address(), width];
        self.launch(Kernel::Embed, [rows, 1, 1], embed)
    }

    /// Computes a layer's queries, keys and values, and stores keys and values in the KV memory.
    pub(super) fn keys(&self, index: usize) -> Result<(), CudaError> {
        let layer = &self.model.layers[index];
        self.norm(self.batch.rows(), 0, &layer.attention_norm)?;
        self.device.gemm(self.gemms(layer).qkv)?;
        self.store_kv(index, layer)
    }

    pub(super) fn attention(&self, index: usize) -> Result<(), CudaError> {
        self.attend(index)?;
        self.device.gemm(self.gemms(&self.model.layers[index]).attention_out)
    }

    pub(super) fn gemms(&self, layer: &Layer<D>) -> Gemms {
        self.buffers.gemms(self.model, layer, self.batch.rows())
    }

    pub(super) fn feed_forward(&self, index: usize) -> Result<(), CudaError> {
        let layer = &self.model.layers[index];
        self.norm(self.batch.rows(), 0, &layer.ffn_norm)?;
        let Gemms { gates, down, .. } = self.gemms(layer);
        self.device.gemm(gates)?;
        self.swiglu()?;
        self.device.gemm(down)
    }

    pub(super) fn swiglu(&self) -> Result<(), CudaError> {
        let (ffn, rows, buffers) = (self.model.shape.ffn, self.batch.rows(), self.buffers);
        // A thread of the kernel computes eight numbers.
        let blocks = (ffn / 8).div_ceil(Kernel::Swiglu.threads() as usize);
        self.launch(Kernel::Swiglu, [rows, blocks, 1], [buffers.gates.address(), buffers.inner.address(), ffn as u64])
    }

    /// Returns the logits of `logit_rows`, computed `each` rows at a time.
    pub(super) fn logits(&self, each: usize) -> Result<Vec<f32>, CudaError> {
        let (shape, wanted) = (&self.model.shape, self.batch.logit_rows.len());
        let mut logits = vec![0.0; wanted * shape.vocab_size];
        for (i, into) in logits.chunks_mut(each * shape.vocab_size).enumerate() {
            let rows = into.len() / shape.vocab_size;
            self.head(rows, self.lists.logit_rows + (i * each * 4) as u64)?;
            let mut bytes = vec![0; size_of_val(into)];
            self.device.download(self.buffers.logits.address(), &mut bytes)?;
            for (into, bytes) in into.iter_mut().zip(bytes.as_chunks::<4>().0) {
                *into = f32::from_le_bytes(*bytes);
            }
        }
        Ok(logits)
    }

    /// Returns the tokens of `sampled_rows`, computed `each` rows at a time.
    pub(super) fn sampled_tokens(&self, each: usize, sampling: &SampleInputs) -> Result<Vec<SampledToken>, CudaError> {
        let mut tokens = Vec::with_capacity(sampling.rows());
        for first in (0..sampling.rows()).step_by(each) {
            let rows = each.min(sampling.rows() - first);
            self.sample(first, rows, sampling.top_max())?;
            tokens.extend(self.read(first, rows, sampling)?);
        }
        Ok(tokens)
    }

    /// Uploads the masks of the rows with a constraint, after all work that is enqueued now. So the masks may be computed while that work
    /// runs.
    pub(super) fn upload_masks(&self, sampling: &SampleInputs, requests: &[SampleRequest<'_>]) -> Result<(), CudaError> {
        let masks = sampling.masks(requests, self.model.shape.vocab_size);
        self.device.upload(self.lists.tables + 4 * sampling.words_from as u64, &masks)
    }

    /// Enqueues the output head and the sampling for `rows` entries of `sampled_rows` from `first` on, with up to `top_max` alternatives
    /// per row.
    pub(super) fn sample(&self, first: usize, rows: usize, top_max: usize) -> Result<(), CudaError> {
        self.head(rows, self.lists.sampled_rows + (first * 4) as u64)?;
        self.launch_sampling(first, rows, top_max)
    }

    pub(super) fn launch_sampling(&self, first: usize, rows: usize, top_max: usize) -> Result<(), CudaError> {
        let (buffers, lists) = (self.buffers, &self.lists);
        let tokens = buffers.sampled.address();
        let arguments = [
            buffers.logits.address(),
            buffers.scratch.address(),
            self.model.shape.vocab_size as u64,
            lists.sample_settings + SampleInputs::offset(first),
            // Offsets of adjustments and of words are relative to this address.
            lists.tables,
            lists.tables,
            tokens,
            tokens + (rows * LOGPROB_BYTES) as u64,
            top_max as u64,
        ];
        self.launch(Kernel::Sample, [rows, 1, 1], arguments)
    }

    /// Waits for the tokens that `sample` computes for the same rows, and returns them.
    pub(super) fn read(&self, first: usize, rows: usize, sampling: &SampleInputs) -> Result<Vec<SampledToken>, CudaError> {
        let mut bytes = vec![0; rows * (1 + sampling.top_max()) * LOGPROB_BYTES];
        self.device.download(self.buffers.sampled.address(), &mut bytes)?;
        Ok(sampling.read(first, rows, &bytes))
    }

    /// Computes the logits of the rows in the list at this device address.
    pub(super) fn head(&self, rows: usize, list: u64) -> Result<(), CudaError> {
        self.norm(rows, list, &self.model.norm)?;
        self.device.gemm(self.buffers.head_gemm(self.model, rows))
    }

    /// Applies RMSNorm to the rows in the list at this device address, or to the first `rows` rows if the address is 0.
    pub(super) fn norm(&self, rows: usize, list: u64, weight: &Memory<D>) -> Result<(), CudaError> {
        let (stream, normed) = (self.buffers.residual.address(), self.buffers.normed.address());
        let width = self.model.shape.width as u64;
        self.launch(Kernel::RmsNorm, [rows, 1, 1], [stream, list, weight.address(), normed, width, f32_argument(self.model.eps)])
    }

    pub(super) fn store_kv(&self, index: usize, layer: &Layer<D>) -> Result<(), CudaError> {
        let shape = &self.model.shape;
        let optional = |memory: &Option<Memory<D>>| memory.as_ref().map_or(0, Memory::address);
        let arguments = [
            self.buffers.qkv.address(),
            optional(&layer.qkv_biases),
            optional(&layer.query_norm),
            optional(&layer.key_norm),
            self.buffers.rope.address(),
            self.lists.slots,
            self.kv,
            index as u64,
            f32_argument(self.model.eps),
        ];
        let grid = [self.batch.rows(), (shape.heads + 2 * shape.kv_heads).div_ceil(shape.store_heads()), 1];
        self.launch(Kernel::StoreKv, grid, arguments)
    }

    /// Computes attention. A prompt is split into tiles of tokens, the KV of a single token into partitions. If several thread blocks divide the
    /// KV of a tile, their partial results are merged like those of partitions.
    pub(super) fn attend(&self, index: usize) -> Result<(), CudaError> {
        let (shape, buffers, lists) = (&self.model.shape, self.buffers, &self.lists);
        let (qkv, attended) = (buffers.qkv.address(), buffers.attended.address());
        let (outs, sums, arrivals) =
            (buffers.partial_outputs.address(), buffers.partial_sums.address(), buffers.arrivals.address());
        // The kernels compute exponentials as powers of two.
        let scale = f32_argument((std::f64::consts::LOG2_E / (shape.head_dim as f64).sqrt()) as f32);
        let (tiles, partitions) = (self.batch.tiles.len(), self.batch.partitions.len());
        let mut arguments = [qkv, self.kv, lists.tables, lists.tiles, attended, outs, sums, arrivals, index as u64, scale];
        if tiles > 0 {
            let launch =
                Launch { kernel: Kernel::AttendPrompt, grid: [tiles, shape.kv_heads, 1], shared_bytes: shape.prompt_bytes() };
            self.device.launch(launch, &mut arguments)?;
        }
        if partitions > 0 {
            let grid = [partitions, shape.kv_heads, shape.group().div_ceil(Shape::TOKEN_ROWS)];
            let launch = Launch { kernel: Kernel::AttendToken, grid, shared_bytes: shape.token_bytes() };
            arguments[3] = lists.partitions;
            self.device.launch(launch, &mut arguments)?;
        }
        Ok(())
    }

    pub(super) fn launch<const N: usize>(
        &self,
        kernel: Kernel,
        grid: [usize; 3],
        mut arguments: [u64; N],
    ) -> Result<(), CudaError> {
        self.device.launch(Launch { kernel, grid, shared_bytes: 0 }, &mut arguments)
    }
}
