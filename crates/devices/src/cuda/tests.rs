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
use crate::cpu::tests::{Random, Sizes, file, gguf, goldens};
use emulated::Emulated;
use std::sync::Arc;
use tandem_engine::{Chunk, Engine, EngineError, Logits, SampleRequest, SampledToken, Sampler, Sampling, StepOutput};
use tandem_kv::{BlockId, TokenId};

fn sampled(output: StepOutput) -> Vec<SampledToken> {
    match output {
        StepOutput::Sampled { tokens, .. } => tokens,
        StepOutput::Logits(_) => panic!("the device samples"),
    }
}
