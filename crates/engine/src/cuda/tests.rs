//! Tests of the engine on an emulated GPU: the same host code and kernel sources. `emulation/shim.h` describes which faults the emulation
//! detects.

mod attention;
mod emulated;
mod graphs;
mod models;
mod pools;
mod ranks;
mod sampling;

use super::{
    CudaError, CudaLimits,
    device::{Device, Kernel, Launch, Memory, Purpose, f32_argument},
    model::Model,
    runner::Runner,
    sampling::{LOGPROB_BYTES, SampleInputs},
    shape::{Half, Shape},
    shard::Shard,
    weights,
};
use crate::{
    Chunk, Engine, EngineError, Logits, SampleRequest, SampledToken, StepOutput,
    cpu::tests::{Random, Sizes, file, gguf, goldens},
    sampling::{MaskThreads, Prepared, Sampler, Sampling, compile},
};
use emulated::Emulated;
use std::sync::Arc;
use tandem_kv::{BlockId, TokenId};

fn sampled(output: StepOutput) -> Vec<SampledToken> {
    match output {
        StepOutput::Sampled { tokens, .. } => tokens,
        StepOutput::Logits(_) => panic!("the device samples"),
    }
}
