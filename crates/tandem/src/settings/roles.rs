//! The roles: `tandem up` and each process of a cluster, composed of the groups of settings that it takes.

#![expect(missing_docs, reason = "the groups of settings document themselves")]

use super::{
    ClusterTlsArgs, CommonArgs, DiscoveryArgs, ExternalArgs, FrontendArgs, HostArgs, ItlArgs, ModelArgs, NatsArgs, RestartArgs,
    RouterArgs, WorkerArgs,
    common::{address, listen_address, with_commas},
    discovery::name,
};
use clap::Args;
use serde::Serialize;
use std::{net::SocketAddr, path::PathBuf};
use tandem_process::discovery::{MemberSource, Role as Member};

/// The settings of `tandem up`: all parts of a cluster in one process.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct UpSettings {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: CommonArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelArgs,

    /// Prefill workers, which compute prompts. The default is two, so that routing by cached prefix has a choice. With --engine vllm there is
    /// one for each server in --prefill-engine-url
    #[arg(long, env = "TANDEM_PREFILL_WORKERS", help_heading = "Workers", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub prefill_workers: u32,

    /// Decode workers, which generate. The default is one, because it decodes many requests at once. With --engine vllm there is one for each
    /// server in --engine-url
    #[arg(long, env = "TANDEM_DECODE_WORKERS", help_heading = "Workers", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub decode_workers: u32,

    /// URLs of the vLLM or SGLang servers that only prefill, separated by commas. vLLM's need its NixlConnector, as those in --engine-url do;
    /// SGLang's need --disaggregation-mode prefill, and those in --engine-url --disaggregation-mode decode
    #[arg(
        long,
        env = "TANDEM_PREFILL_ENGINE_URL",
        help_heading = "External engine (--engine vllm, sglang, llama-cpp)",
        value_name = "URLS",
        value_delimiter = ','
    )]
    #[serde(serialize_with = "with_commas")]
    pub prefill_engine_url: Vec<String>,

    /// Without --model, use the tokenizer and chat template of the Hugging Face repository that a server of another machine names. A server of
    /// this machine is always trusted. A server of another machine never chooses a file of this one
    #[arg(long, env = "TANDEM_TRUST_ENGINE_MODEL", help_heading = "External engine (--engine vllm, sglang, llama-cpp)")]
    pub trust_engine_model: bool,

    #[command(flatten)]
    #[serde(flatten)]
    pub worker: WorkerArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub frontend: FrontendArgs,

    /// Set for `tandem epp`: an endpoint picker runs in place of the frontend, and the workers only observe their servers.
    #[arg(skip)]
    #[serde(skip)]
    pub picker: Option<PickerPorts>,
}

/// What an endpoint picker with its own router and workers has besides the settings of `tandem up`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct PickerPorts {
    /// Its own settings.
    pub args: PickerArgs,
    /// The address of its admin port.
    pub admin_listen: Option<SocketAddr>,
}

/// The settings that only endpoint pickers have.
#[derive(Args, Clone, Copy, Debug, Default, PartialEq, Serialize)]
#[command(next_help_heading = "Gateway")]
#[serde(rename_all = "kebab-case")]
pub struct PickerArgs {
    /// How many servers to name besides the chosen one, for a gateway that tries them in order when it cannot reach the first. The default names
    /// none, because Envoy's ORIGINAL_DST clusters do not understand a list
    #[arg(long, env = "TANDEM_FALLBACK_ENDPOINTS", value_name = "N", default_value_t = 0, value_parser = clap::value_parser!(u32).range(0..=8))]
    pub fallback_endpoints: u32,

    /// Serve --listen with TLS and a certificate that this process makes at its start, for gateways that use TLS and do not check the certificate.
    /// For those that check it, set --tls-cert
    #[arg(long, env = "TANDEM_TLS_SELF_SIGNED")]
    pub tls_self_signed: bool,
}

/// The settings of `tandem epp`.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct EppProcess {
    #[command(flatten)]
    #[serde(flatten)]
    pub frontend: FrontendProcess,
    #[command(flatten)]
    #[serde(flatten)]
    pub external: ExternalArgs,

    /// Without --model, use the tokenizer and chat template of the Hugging Face repository that a server of another machine names
    #[arg(long, env = "TANDEM_TRUST_ENGINE_MODEL", help_heading = "External engine (--engine vllm, sglang, llama-cpp)")]
    pub trust_engine_model: bool,

    #[command(flatten)]
    #[serde(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub itl: ItlArgs,

    #[command(flatten)]
    #[serde(flatten)]
    pub picker: PickerArgs,
}

/// The settings of `tandem frontend`.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FrontendProcess {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: CommonArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelArgs,

    /// host:port of every router's gRPC, separated by commas; they may start later [default: 127.0.0.1:7000]
    #[arg(long, env = "TANDEM_ROUTER", help_heading = "Discovery", value_name = "ADDRESSES", value_delimiter = ',', value_parser = address)]
    #[serde(serialize_with = "with_commas")]
    router: Vec<String>,

    /// Address of the admin port (HTTP), with /metrics, /dashboard, /live, /ready and /openapi.json. Use a loopback address unless other
    /// hosts may see the cluster's addresses and the sizes and times of all requests [default: none; --listen serves all of these]
    #[arg(long, env = "TANDEM_ADMIN_LISTEN", help_heading = "Process", value_name = "ADDRESS", value_parser = listen_address)]
    pub admin_listen: Option<SocketAddr>,

    #[command(flatten)]
    #[serde(flatten)]
    pub cluster_tls: ClusterTlsArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub restart: RestartArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub discovery: DiscoveryArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub frontend: FrontendArgs,

    /// Set for an endpoint picker.
    #[arg(skip)]
    #[serde(skip)]
    pub picker: Option<PickerArgs>,
}

/// The settings of `tandem router`.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RouterProcess {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: CommonArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub process: ProcessArgs,

    /// host:port of every worker's gRPC, prefill and decode, separated by commas; they may start later [default:
    /// 127.0.0.1:7100,127.0.0.1:7200]
    #[arg(long, env = "TANDEM_WORKERS", help_heading = "Discovery", value_name = "ADDRESSES", value_delimiter = ',', value_parser = address)]
    #[serde(serialize_with = "with_commas")]
    workers: Vec<String>,

    /// File with one worker's host:port a line, in place of --workers. It is read again when it changes, so that workers can be added and
    /// removed
    #[arg(long, env = "TANDEM_WORKERS_FILE", help_heading = "Discovery", value_name = "FILE")]
    workers_file: Option<PathBuf>,

    /// host:port of the other routers' gRPC, separated by commas; they may start later, and this router may be among them
    #[arg(long, env = "TANDEM_PEERS", help_heading = "Discovery", value_name = "ADDRESSES", value_delimiter = ',', value_parser = address)]
    #[serde(serialize_with = "with_commas")]
    peers: Vec<String>,

    #[command(flatten)]
    #[serde(flatten)]
    pub router: RouterArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub itl: ItlArgs,
}

/// The settings of `tandem prefill-worker` and `tandem decode-worker`.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct WorkerProcess {
    #[command(flatten)]
    #[serde(flatten)]
    pub common: CommonArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub process: ProcessArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub model: ModelArgs,

    /// The worker's stable name, and the label of its metrics [default: its role, this host's name and the port]
    #[arg(long, env = "TANDEM_WORKER_ID", help_heading = "Process", value_name = "NAME", value_parser = worker_name)]
    pub worker_id: Option<String>,

    #[command(flatten)]
    #[serde(flatten)]
    pub worker: WorkerArgs,
}

/// The settings that every process of a router or a worker has.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProcessArgs {
    /// Address of /live, /ready and /metrics over HTTP. The default accepts connections from this machine only, because readers are not
    /// authenticated
    #[arg(long, env = "TANDEM_ADMIN_LISTEN", help_heading = "Process", value_name = "ADDRESS", default_value = "127.0.0.1:9000", value_parser = listen_address)]
    pub admin_listen: SocketAddr,

    #[command(flatten)]
    #[serde(flatten)]
    pub hosts: HostArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub discovery: DiscoveryArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub events: NatsArgs,
    #[command(flatten)]
    #[serde(flatten)]
    pub cluster_tls: ClusterTlsArgs,
}

impl UpSettings {
    /// Returns the defaults; variables of the environment have no effect.
    pub fn defaults() -> Self {
        let command = Self::augment_args(clap::Command::new("up")).mut_args(|arg| arg.env(None::<&str>));
        let matches = command.try_get_matches_from(["up"]).expect("every setting has a default");
        <Self as clap::FromArgMatches>::from_arg_matches(&matches).expect("the defaults are valid")
    }
}

impl EppProcess {
    /// The default size limit of a body: that of the reference implementation of endpoint pickers.
    pub(crate) const BODY_BYTES_MAX: usize = 10 << 20;

    /// Returns the settings of an endpoint picker whose router and workers are other processes.
    pub fn alone(mut self) -> FrontendProcess {
        self.frontend.frontend.limits.max_body_bytes.get_or_insert(Self::BODY_BYTES_MAX);
        FrontendProcess { picker: Some(self.picker), ..self.frontend }
    }

    /// Returns the settings of an endpoint picker with a router, and a worker for each server in `--engine-url`, in its process.
    pub fn with_workers(self) -> UpSettings {
        let (external, router, slo_itl) = (self.external.clone(), self.router.clone(), self.itl.slo_itl);
        let (trust_engine_model, args) = (self.trust_engine_model, self.picker);
        let FrontendProcess { common, model, admin_listen, frontend, .. } = self.alone();
        let defaults = UpSettings::defaults();
        UpSettings {
            common,
            model,
            trust_engine_model,
            worker: WorkerArgs { external, slo_itl, ..defaults.worker },
            router,
            frontend,
            picker: Some(PickerPorts { args, admin_listen }),
            ..defaults
        }
    }
}

impl FrontendProcess {
    /// Returns the source of the routers' addresses.
    pub fn routers(&self) -> MemberSource {
        self.discovery.members(&[Member::Router], or_default(&self.router, &["127.0.0.1:7000"]))
    }
}

impl RouterProcess {
    /// Returns the source of the workers' addresses.
    pub fn workers(&self) -> MemberSource {
        match &self.workers_file {
            Some(file) => MemberSource::File(file.clone()),
            None => {
                let list = or_default(&self.workers, &["127.0.0.1:7100", "127.0.0.1:7200"]);
                self.process.discovery.members(&[Member::PrefillWorker, Member::DecodeWorker], list)
            }
        }
    }

    /// Returns the source of the other routers' addresses.
    pub fn peers(&self) -> MemberSource {
        self.process.discovery.members(&[Member::Router], self.peers.clone())
    }
}

fn or_default(list: &[String], default: &[&str]) -> Vec<String> {
    if list.is_empty() { default.iter().map(|&address| address.to_owned()).collect() } else { list.to_vec() }
}

fn worker_name(text: &str) -> Result<String, &'static str> {
    name(text, "-_.").ok_or("write 1 to 64 letters, digits, -, _ and .")
}
