//! Computes a step: all layers, for the tokens of all chunks.
//!
//! The rows of all chunks form one matrix, with a row for each token. Between the attention of one layer and that of the next, rows do not
//! depend on each other, so they are split into *slabs*. Each slab is computed on one thread. If there are few rows, they form a single
//! slab, which all threads compute together.

use super::{
    attention::{KvLayout, Place, Scratch, attend, store_kv},
    isa::Isa,
    linear::{Quantised, SHARED_ROWS, linear, quantise},
    math::{add, add_to_rows, rms_norm, rms_norm_in_place, rotate, rotations_at, swiglu},
    model::{CpuModel, Layer},
    threads::{BufferPool, Threads},
};
use tandem_engine::{Chunk, Logits};
use tandem_kv::BlockId;

/// The number of rows in a slab. The activations of so few rows fit into the second-level cache.
const SLAB_ROWS: usize = 32;
const ATTENTION_TOKENS: usize = 16;

#[derive(Default)]
pub(super) struct Buffers {
    /// The residual stream, in the layout `[rows][width]`.
    stream: Vec<f32>,
    /// The queries, in the layout `[rows][heads × head_dim]`. Attention overwrites them with its outputs.
    queries: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
    /// The cosines and sines for the rotary embedding, in the layout `[rows][head_dim / 2]`.
    rotations: Vec<[f32; 2]>,
    slabs: BufferPool<SlabBuffers>,
    scratches: BufferPool<Scratch>,
}

#[derive(Default)]
struct SlabBuffers {
    normed: Vec<f32>,
    quantised: Quantised,
    gate: Vec<f32>,
    up: Vec<f32>,
    /// The output of a sub-layer, which is added to the residual stream.
    change: Vec<f32>,
}

pub(super) struct Step<'a> {
    pub model: &'a CpuModel,
    pub isa: Isa,
    pub threads: &'a Threads,
    pub layout: &'a KvLayout,
    pub kv: &'a mut [u16],
    pub buffers: &'a mut Buffers,
}

/// Consecutive rows, which belong to consecutive tokens of one sequence.
#[derive(Clone, Copy)]
struct Run<'a> {
    start: usize,
    len: usize,
    blocks: &'a [BlockId],
}

impl Step<'_> {
    /// Computes the chunks. Writes their KV, and returns the requested rows of logits in the layout `[rows][vocab_size]`.
    pub fn run(mut self, chunks: &[Chunk<'_>]) -> Vec<f32> {
        let mut runs: Vec<Run<'_>> = chunks
            .iter()
            .map(|chunk| Run { start: chunk.start as usize, len: chunk.tokens.len(), blocks: chunk.blocks })
            .collect();
        self.embed(chunks);
        self.slabs(None, self.model.layers.first());
        for (index, layer) in self.model.layers.iter().enumerate() {
            self.store_kv(&runs, index);
            let next = self.model.layers.get(index + 1);
            if next.is_none() {
                // The last layer's KV is written, so from here on only the rows whose logits are requested are computed.
                self.keep_logit_rows(chunks, &mut runs);
            }
            self.attend(&runs, index);
            self.slabs(Some(layer), next);
        }
        self.logits()
    }

    fn embed(&mut self, chunks: &[Chunk<'_>]) {
        let config = &self.model.config;
        let Buffers { stream, queries, keys, values, rotations, .. } = &mut *self.buffers;
        let rows: usize = chunks.iter().map(|chunk| chunk.tokens.len()).sum();
        stream.resize(rows * config.width, 0.0);
        queries.resize(rows * config.heads * config.head_dim, 0.0);
        keys.resize(rows * self.layout.row_len(), 0.0);
        values.resize(rows * self.layout.row_len(), 0.0);
        let tokens = chunks.iter().flat_map(|chunk| chunk.tokens);
        for (token, into) in tokens.zip(stream.chunks_exact_mut(config.width)) {
            self.model.embedding.row(*token as usize, into);
        }
        rotations.clear();
        for chunk in chunks {
            for position in (chunk.start..).take(chunk.tokens.len()) {
                rotations_at(position, &config.rope, rotations);
            }
        }
    }

    /// Computes, for all rows, the operations between the attention of layer `finished` and that of layer `next`: the output projection and
    /// the feed-forward network of `finished`, then the queries, keys and values of `next`.
    fn slabs(&mut self, finished: Option<&Layer>, next: Option<&Layer>) {
        let (model, isa, threads) = (self.model, self.isa, self.threads);
        let (width, query_len, kv_len) = (model.config.width, self.layout.heads * self.layout.head_dim, self.layout.row_len());
        let Buffers { stream, queries, keys, values, rotations, slabs, .. } = &mut *self.buffers;
        let each = slab_rows(stream.len() / width, threads);
        let rotations = rotations.chunks(each * model.config.rope.frequencies.len());
        let states = stream.chunks_mut(each * width).zip(queries.chunks_mut(each * query_len));
        let kv = keys.chunks_mut(each * kv_len).zip(values.chunks_mut(each * kv_len));
        let tasks: Vec<_> = states
            .zip(kv)
            .zip(rotations)
            .map(|(((stream, queries), (keys, values)), rotations)| Slab {
                model,
                isa,
                threads,
                stream,
                queries,
                keys,
                values,
                rotations,
            })
            .collect();
        threads.for_each(tasks, |mut slab| {
            slabs.with(|buffers| {
                if let Some(layer) = finished {
                    slab.attention_out(layer, buffers);
                    slab.feed_forward(layer, buffers);
                }
                if let Some(layer) = next {
                    slab.project(layer, buffers);
                }
            });
        });
    }

    fn store_kv(&mut self, runs: &[Run<'_>], layer: usize) {
        let row_len = self.layout.row_len();
        let (mut keys, mut values) = (&self.buffers.keys[..], &self.buffers.values[..]);
        for run in runs {
            let place = Place { start: run.start, blocks: run.blocks, layer };
            let (these, those) = (keys.split_off(..run.len * row_len), values.split_off(..run.len * row_len));
            let (these, those) = (these.expect("every row has keys"), those.expect("every row has values"));
            store_kv(self.isa, self.layout, self.kv, place, these, those);
        }
    }

    fn attend(&mut self, runs: &[Run<'_>], layer: usize) {
        let (isa, layout, kv) = (self.isa, self.layout, &*self.kv);
        let group_len = layout.group() * layout.head_dim;
        let scratches = &self.buffers.scratches;
        let mut rest = self.buffers.queries.as_mut_slice();
        let mut tasks = Vec::new();
        for run in runs {
            let (rows, later) = rest.split_at_mut(run.len * layout.kv_heads * group_len);
            rest = later;
            let place = Place { start: run.start, blocks: run.blocks, layer };
            if run.len == 1 {
                tasks.extend(rows.chunks_exact_mut(group_len).enumerate().map(|(head, rows)| (place, head..head + 1, rows)));
                continue;
            }
            for (i, rows) in rows.chunks_mut(ATTENTION_TOKENS * layout.kv_heads * group_len).enumerate() {
                let place = Place { start: run.start + i * ATTENTION_TOKENS, ..place };
                tasks.push((place, 0..layout.kv_heads, rows));
            }
        }
        self.threads.for_each(tasks, |(place, kv_heads, rows)| {
            scratches.with(|scratch| attend(isa, layout, kv, place, kv_heads, rows, scratch));
        });
    }

    fn keep_logit_rows(&mut self, chunks: &[Chunk<'_>], runs: &mut Vec<Run<'_>>) {
        let Buffers { stream, queries, keys, values, rotations, .. } = &mut *self.buffers;
        let mut kept = Vec::new();
        let mut first = 0;
        for (chunk, run) in chunks.iter().zip(&mut *runs) {
            let end = first + run.len;
            let from = match chunk.logits {
                Logits::None => end,
                Logits::Last | Logits::Sample(_) => end - 1,
                Logits::All => first,
            };
            kept.extend(from..end);
            (run.start, run.len) = (run.start + from - first, end - from);
            first = end;
        }
        runs.retain(|run| run.len > 0);
        for (buffer, width) in [(stream, self.model.config.width), (queries, self.layout.heads * self.layout.head_dim)] {
            for (to, from) in kept.iter().enumerate() {
                buffer.copy_within(from * width..(from + 1) * width, to * width);
            }
            buffer.truncate(kept.len() * width);
        }
        // No later layer reads keys, values or rotations, so their rows stay where they are.
        let row_len = self.layout.row_len();
        keys.truncate(kept.len() * row_len);
        values.truncate(kept.len() * row_len);
        rotations.truncate(kept.len() * self.model.config.rope.frequencies.len());
    }

    fn logits(&mut self) -> Vec<f32> {
        let (model, isa, threads) = (self.model, self.isa, self.threads);
        let (width, vocab_size) = (model.config.width, model.config.vocab_size);
        let Buffers { stream, slabs, .. } = &mut *self.buffers;
        let rows = stream.len() / width;
        let mut logits = vec![0.0; rows * vocab_size];
        let each = slab_rows(rows, threads);
        let tasks: Vec<_> = stream.chunks(each * width).zip(logits.chunks_mut(each * vocab_size)).collect();
        threads.for_each(tasks, |(stream, logits)| {
            slabs.with(|SlabBuffers { normed, quantised, .. }| {
                normed.resize(stream.len(), 0.0);
                rms_norm(isa, stream, &model.norm, model.config.eps, normed);
                quantise(isa, normed, width, quantised);
                linear(threads, isa, (normed, width, quantised), [(model.head(), logits)]);
            });
        });
        logits
    }
}

fn slab_rows(rows: usize, threads: &Threads) -> usize {
    if rows <= SHARED_ROWS { rows.max(1) } else { rows.div_ceil(threads.count()).next_multiple_of(8).min(SLAB_ROWS) }
}

struct Slab<'a> {
    model: &'a CpuModel,
    isa: Isa,
    threads: &'a Threads,
    stream: &'a mut [f32],
    queries: &'a mut [f32],
    keys: &'a mut [f32],
    values: &'a mut [f32],
    rotations: &'a [[f32; 2]],
}

impl Slab<'_> {
    fn attention_out(&mut self, layer: &Layer, buffers: &mut SlabBuffers) {
        let (isa, query_len) = (self.isa, layer.attention_out.inputs);
        let SlabBuffers { quantised, change, .. } = buffers;
        change.resize(self.stream.len(), 0.0);
        quantise(isa, self.queries, query_len, quantised);
        linear(self.threads, isa, (self.queries, query_len, quantised), [(&layer.attention_out, change)]);
        add(isa, self.stream, change);
    }

    fn feed_forward(&mut self, layer: &Layer, buffers: &mut SlabBuffers) {
        let (isa, threads, config) = (self.isa, self.threads, &self.model.config);
        let SlabBuffers { normed, quantised, gate, up, change } = buffers;
        let rows = self.stream.len() / config.width;
        normed.resize(self.stream.len(), 0.0);
        change.resize(self.stream.len(), 0.0);
        gate.resize(rows * config.ffn, 0.0);
        up.resize(rows * config.ffn, 0.0);
        rms_norm(isa, self.stream, &layer.ffn_norm, config.eps, normed);
        quantise(isa, normed, config.width, quantised);
        linear(threads, isa, (normed, config.width, quantised), [(&layer.gate, gate), (&layer.up, up)]);
        swiglu(isa, gate, up);
        quantise(isa, gate, config.ffn, quantised);
        linear(threads, isa, (gate, config.ffn, quantised), [(&layer.down, change)]);
        add(isa, self.stream, change);
    }

    fn project(&mut self, layer: &Layer, buffers: &mut SlabBuffers) {
        let (isa, config) = (self.isa, &self.model.config);
        let SlabBuffers { normed, quantised, .. } = buffers;
        let (queries, keys, values) = (&mut *self.queries, &mut *self.keys, &mut *self.values);
        normed.resize(self.stream.len(), 0.0);
        rms_norm(isa, self.stream, &layer.attention_norm, config.eps, normed);
        quantise(isa, normed, config.width, quantised);
        let outputs = [(&layer.query, &mut *queries), (&layer.key, &mut *keys), (&layer.value, &mut *values)];
        linear(self.threads, isa, (normed, config.width, quantised), outputs);
        if let Some([query_biases, key_biases, value_biases]) = &layer.qkv_biases {
            add_to_rows(isa, queries, query_biases);
            add_to_rows(isa, keys, key_biases);
            add_to_rows(isa, values, value_biases);
        }
        if let Some([query_norm, key_norm]) = &layer.qk_norms {
            rms_norm_in_place(isa, queries, query_norm, config.eps);
            rms_norm_in_place(isa, keys, key_norm, config.eps);
        }
        let (query_len, key_len) = (config.heads * config.head_dim, config.kv_heads * config.head_dim);
        rotate(isa, queries, query_len, self.rotations, &config.rope, 1.0 / (config.head_dim as f32).sqrt());
        rotate(isa, keys, key_len, self.rotations, &config.rope, 1.0);
    }
}
