//! An engine's buffers on one device, and the GEMMs that read and write them.

use super::{
    CudaError,
    device::{Device, Epilogue, Gemm, Memory, Operands},
    memory::Sizes,
    model::{Layer, Model},
    sampling::ROW_BYTES,
    shape::Shape,
    shard::Shard,
};
use std::sync::Arc;

/// The buffers of one device, which every step of the engine reuses. [`Sizes`] describes each of them.
pub(super) struct Buffers<D: Device> {
    pub residual: Memory<D>,
    pub normed: Memory<D>,
    pub qkv: Memory<D>,
    pub attended: Memory<D>,
    pub gates: Memory<D>,
    pub inner: Memory<D>,
    pub rope: Memory<D>,
    pub partial_outputs: Memory<D>,
    pub partial_sums: Memory<D>,
    /// The counters of the attention kernels, in [`Sizes::arrivals`] bytes. Each kernel expects zeros and leaves zeros.
    pub arrivals: Memory<D>,
    pub logits: Memory<D>,
    pub scratch: Memory<D>,
    /// Sampled tokens and their logprobs.
    pub sampled: Memory<D>,
}

/// The GEMMs of one layer.
pub(super) struct Gemms {
    pub qkv: (Gemm, Operands),
    pub attention_out: (Gemm, Operands),
    pub gates: (Gemm, Operands),
    pub down: (Gemm, Operands),
}

impl<D: Device> Buffers<D> {
    /// Allocates all buffers of a rank. Only the first rank has an output head; the others' buffers of the head are empty.
    pub fn new(device: &Arc<D>, sizes: &Sizes, shard: Shard) -> Result<Self, CudaError> {
        let memory = |bytes| Memory::new(device, bytes);
        let of_head = |bytes| memory(if shard.rank == 0 { bytes } else { 0 });
        Ok(Self {
            residual: memory(sizes.residual)?,
            normed: memory(sizes.normed)?,
            qkv: memory(sizes.qkv)?,
            attended: memory(sizes.attended)?,
            gates: memory(sizes.gates)?,
            inner: memory(sizes.inner)?,
            rope: memory(sizes.rope)?,
            partial_outputs: memory(sizes.partial_outputs)?,
            partial_sums: memory(sizes.partial_sums)?,
            arrivals: Memory::of(device, &vec![0; sizes.arrivals])?,
            logits: of_head(sizes.logits)?,
            scratch: of_head(sizes.scratch)?,
            sampled: of_head(sizes.head_rows_max * ROW_BYTES)?,
        })
    }

    /// Returns the GEMMs of a layer in a step with this many rows.
    pub fn gemms(&self, model: &Model<D>, layer: &Layer<D>, rows: usize) -> Gemms {
        let shape @ &Shape { half, width, ffn, .. } = &model.shape;
        let gemm = |weights, (inputs, from), (outputs, to), epilogue| {
            (Gemm { half, rows, inputs, outputs, epilogue }, operands(weights, from, to))
        };
        // The first rank adds its result to the residual stream. The other ranks overwrite their copies of the stream with their results.
        // The all-reduce then gives every rank the updated stream.
        let to_residual = if model.shard.rank == 0 { Epilogue::AddSingle } else { Epilogue::StoreSingle };
        let (normed, residual) = ((width, &self.normed), (width, &self.residual));
        Gemms {
            qkv: gemm(&layer.qkv, normed, (shape.qkv_dim(), &self.qkv), Epilogue::StoreHalf),
            attention_out: gemm(&layer.attention_out, (shape.query_dim(), &self.attended), residual, to_residual),
            gates: gemm(&layer.gates, normed, (2 * ffn, &self.gates), Epilogue::StoreHalf),
            down: gemm(&layer.down, (ffn, &self.inner), residual, to_residual),
        }
    }

    /// Returns the four GEMMs of a layer, each with the operands of all layers.
    pub fn gemms_of_layers(&self, model: &Model<D>, rows: usize) -> Vec<(Gemm, Vec<Operands>)> {
        let mut all: Vec<(Gemm, Vec<Operands>)> = Vec::new();
        for layer in &model.layers {
            let Gemms { qkv, attention_out, gates, down } = self.gemms(model, layer, rows);
            for (place, (gemm, operands)) in [qkv, attention_out, gates, down].into_iter().enumerate() {
                match all.get_mut(place) {
                    Some((_, of_layers)) => of_layers.push(operands),
                    None => all.push((gemm, vec![operands])),
                }
            }
        }
        all
    }

    /// Returns the GEMM that computes this many rows of logits.
    pub fn head_gemm(&self, model: &Model<D>, rows: usize) -> (Gemm, Operands) {
        let Shape { half, width: inputs, vocab_size: outputs, .. } = model.shape;
        let gemm = Gemm { half, rows, inputs, outputs, epilogue: Epilogue::StoreSingle };
        (gemm, operands(model.head(), &self.normed, &self.logits))
    }
}

fn operands<D: Device>(weights: &Memory<D>, inputs: &Memory<D>, outputs: &Memory<D>) -> Operands {
    Operands { weights: weights.address(), inputs: inputs.address(), outputs: outputs.address() }
}
