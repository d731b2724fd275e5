//! Settings of engines that run in other processes.

use super::common::with_commas;
use clap::{Args, ValueEnum};
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf, time::Duration};
use tandem_adapter::{
    ServerFailed,
    kv_events::{KvEvents, SharedStore},
    llama_cpp::LlamaCppSettings,
    sglang::SglangSettings,
    vllm::VllmSettings,
};
use tandem_kv::HashKey;
use tandem_process::Secret;

/// vLLM's own default of `kv_lease_duration`.
pub(crate) const KV_LEASE_SECONDS: u64 = 30;

/// The settings of a server that runs already and computes for a worker.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[command(next_help_heading = "External engine (--engine vllm, sglang, llama-cpp)")]
#[serde(rename_all = "kebab-case")]
pub struct ExternalArgs {
    /// URL of the server, such as http://127.0.0.1:8001. `tandem up` takes several, separated by commas; it starts a decode worker, which
    /// also prefills, for each of them (for each data-parallel rank, if a server has several)
    #[arg(long, env = "TANDEM_ENGINE_URL", value_name = "URLS", value_delimiter = ',')]
    #[serde(serialize_with = "with_commas")]
    pub engine_url: Vec<String>,

    /// Where the server publishes KV events: `discover` asks the server, `none` assumes that it has cached the prompts routed to it, or
    /// tcp://host:port or ipc://path
    #[arg(long, env = "TANDEM_ENGINE_EVENTS", value_name = "ENDPOINT", default_value = "discover", value_parser = events)]
    pub engine_events: String,

    /// Where the server replays KV events that were lost; needs --engine-events with an endpoint [default: lost events are not replayed, and
    /// the router forgets the server's cache]
    #[arg(long, env = "TANDEM_ENGINE_EVENTS_REPLAY", value_name = "ENDPOINT", value_parser = endpoint)]
    pub engine_events_replay: Option<String>,

    /// Topic of the server's KV events; with `--engine-events discover` the server names it
    #[arg(long, env = "TANDEM_ENGINE_EVENTS_TOPIC", value_name = "TOPIC", default_value = "")]
    pub engine_events_topic: String,

    /// File with the server's --api-key; read again for each connection to the server, and when the server refuses the key
    #[arg(long, env = "TANDEM_ENGINE_KEY_FILE", value_name = "FILE", value_parser = Secret::of_argument)]
    #[serde(skip)]
    pub engine_key_file: Option<Secret>,

    /// CA certificate (PEM) for verifying an https:// server, besides the public ones
    #[arg(long, env = "TANDEM_ENGINE_CA", value_name = "FILE")]
    pub engine_ca: Option<PathBuf>,

    /// The server's data-parallel rank that this worker uses, if the server has several; `tandem up` uses all
    #[arg(long, env = "TANDEM_ENGINE_RANK", value_name = "N")]
    pub engine_rank: Option<u32>,

    /// How vLLM servers move KV to each other. `nixl` needs vLLM's NixlConnector in both, and prefill workers need `nixl`. SGLang servers know it by
    /// their own flags
    #[arg(long, env = "TANDEM_ENGINE_KV_CONNECTOR", value_enum, default_value_t)]
    pub engine_kv_connector: KvConnector,

    /// How long the server holds a prompt's KV for another server, in seconds: vLLM's kv_lease_duration. KV is pulled in half this time or
    /// not at all
    #[arg(long, env = "TANDEM_ENGINE_KV_LEASE", value_name = "SECONDS", default_value_t = KV_LEASE_SECONDS, value_parser = clap::value_parser!(u64).range(2..=3_600))]
    pub engine_kv_lease: u64,

    /// Store that several servers share, such as STORAGE=nfs or CPU=mooncake: the medium that KV events name for it, and a name that is equal
    /// for all servers that load each other's blocks from it
    #[arg(long, env = "TANDEM_ENGINE_SHARED_STORE", value_name = "MEDIUM=NAME", value_parser = shared_store)]
    pub engine_shared_store: Option<String>,

    /// Only observe the vLLM server: report its cache and load, and refuse all requests, because they reach the server through a gateway at this address.
    /// `tandem epp` then places the gateway's requests on the server
    #[arg(long, env = "TANDEM_OBSERVE", value_name = "IP:PORT")]
    pub observe: Option<SocketAddr>,
}

fn shared_store(text: &str) -> Result<String, String> {
    text.parse::<SharedStore>().map(|_| text.to_owned())
}

/// How external engines move KV to each other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum KvConnector {
    /// They do not: each worker prefills its own prompts
    #[default]
    None,
    /// vLLM's NixlConnector
    Nixl,
}

impl ExternalArgs {
    fn events(&self) -> KvEvents {
        match &*self.engine_events {
            "discover" => KvEvents::Discover,
            "none" => KvEvents::None,
            endpoint => KvEvents::At {
                endpoint: endpoint.to_owned(),
                replay: self.engine_events_replay.clone(),
                topic: self.engine_events_topic.clone(),
            },
        }
    }

    fn shared_store(&self) -> Option<SharedStore> {
        self.engine_shared_store.as_ref().and_then(|store| store.parse().ok())
    }

    /// Returns how the SGLang server at `url` is used. `ca` is the content of the file `engine_ca`.
    pub(crate) fn sglang(&self, url: &str, ca: Option<Vec<u8>>, hash_key: HashKey, limits: &EngineLimits) -> SglangSettings {
        SglangSettings {
            url: url.to_owned(),
            key: self.engine_key_file.clone(),
            ca,
            rank: self.engine_rank,
            events: self.events(),
            block_size: Some(limits.block_size),
            hash_key,
            running_max: limits.running_max as usize,
            waiting_max: limits.waiting_max as usize,
            shared_store: self.shared_store(),
            silence_max: limits.silence_max,
            server_failed: ServerFailed::default(),
        }
    }

    /// Returns the settings with which a worker uses the server at `url`. `ca` is the content of the file `engine_ca`.
    pub(crate) fn vllm(&self, url: &str, ca: Option<Vec<u8>>, hash_key: HashKey, limits: &EngineLimits) -> VllmSettings {
        VllmSettings {
            url: url.to_owned(),
            key: self.engine_key_file.clone(),
            ca,
            rank: self.engine_rank,
            events: self.events(),
            block_size: Some(limits.block_size),
            hash_key,
            running_max: limits.running_max as usize,
            waiting_max: limits.waiting_max as usize,
            nixl: self.engine_kv_connector == KvConnector::Nixl,
            kv_lease: Duration::from_secs(self.engine_kv_lease),
            shared_store: self.shared_store(),
            silence_max: limits.silence_max,
            server_failed: ServerFailed::default(),
            observed_at: self.observe,
        }
    }

    /// Returns how the llama.cpp server at `url` is used. `ca` is the content of the file `engine_ca`.
    pub(crate) fn llama_cpp(&self, url: &str, ca: Option<Vec<u8>>, hash_key: HashKey, limits: &EngineLimits) -> LlamaCppSettings {
        LlamaCppSettings {
            url: url.to_owned(),
            key: self.engine_key_file.clone(),
            ca,
            block_size: limits.block_size,
            hash_key,
            waiting_max: limits.waiting_max as usize,
            prefix_caching: limits.prefix_caching,
            silence_max: limits.silence_max,
        }
    }
}

/// The block size and the limits that a worker applies to its server.
#[derive(Clone, Copy, Debug)]
pub(crate) struct EngineLimits {
    /// The number of tokens in a block of the cluster.
    pub(crate) block_size: u32,
    /// The maximum number of sequences that run on the server at a time.
    pub(crate) running_max: u32,
    /// The maximum number of sequences that may wait for a slot on the server.
    pub(crate) waiting_max: u32,
    /// Whether prompts reuse the KV of earlier ones. vLLM and SGLang servers decide that themselves.
    pub(crate) prefix_caching: bool,
    /// After this time without an answer to a health check and without progress, the server is treated as hung.
    pub(crate) silence_max: Duration,
}

fn events(text: &str) -> Result<String, &'static str> {
    if matches!(text, "discover" | "none") { Ok(text.to_owned()) } else { endpoint(text) }
}

fn endpoint(text: &str) -> Result<String, &'static str> {
    let known = text.starts_with("tcp://") || text.starts_with("ipc://");
    known.then(|| text.to_owned()).ok_or("write discover, none, tcp://host:port or ipc://path")
}
