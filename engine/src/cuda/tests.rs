//! The engine on the host: the same host code, the kernels' own sources, an emulated GPU. `emulation/shim.h` says what it shows.

mod attention;
mod emulated;
mod models;
mod sampling;

use super::{
    CudaError, CudaLimits,
    device::{Device, Kernel, Launch, Memory, single},
    draws::{Draws, LIKELIHOOD_BYTES},
    model::Model,
    runner::Runner,
    shape::{Half, Shape},
};
use crate::{
    Chunk, Draw, Engine, Logits,
    cpu::tests::{Random, Sizes, file, gguf, goldens},
    sampling::{Sampler, Sampling},
};
use emulated::Emulated;
use std::sync::Arc;
use tandem_kv::{BlockId, TokenId};
