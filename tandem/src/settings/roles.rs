//! What the roles take as processes of their own: those flags of `tandem up` that concern them, and a few of their own.
//!
//! There is one list of the flags that both know, [`UpSettings`], so that one file may hold the settings of a whole cluster:
//! each role takes what concerns it and leaves the rest. On the command line a flag of another role is a mistake.

use super::{Cli, DiscoveryFlags, NatsFlags, UpSettings};
use clap::{Arg, Args, CommandFactory, parser::ValueSource};
use serde::{Serialize, Serializer};
use std::{net::SocketAddr, path::PathBuf};
use tandem_node::discovery::{MemberSource, Role};
use tandem_proto::channel;

/// What `tandem up` calls its cluster, and everybody who is not told otherwise.
pub(crate) const CLUSTER: &str = "tandem";

const FRONTEND: &str = "frontend";
const ROUTER: &str = "router";
const PREFILL: &str = "prefill-worker";
const DECODE: &str = "decode-worker";
const ALL: &[&str] = &[FRONTEND, ROUTER, PREFILL, DECODE];
const WITH_MODEL: &[&str] = &[FRONTEND, PREFILL, DECODE];
const WORKERS: &[&str] = &[PREFILL, DECODE];
/// Subcommands that are part of a cluster or send requests to its processes.
const KEYED: &[&str] = &[FRONTEND, ROUTER, PREFILL, DECODE, "top"];

/// Which roles take a flag of `tandem up`.
const TAKEN: &[(&str, &[&str])] = &[
    ("model", WITH_MODEL),
    ("served-model-name", ALL),
    ("models-dir", WITH_MODEL),
    ("hf-endpoint", WITH_MODEL),
    ("hf-token", WITH_MODEL),
    ("hf-token-file", WITH_MODEL),
    ("offline", WITH_MODEL),
    ("engine", WITH_MODEL),
    ("prefill-workers", &[]),
    ("decode-workers", &[]),
    ("listen", ALL),
    ("block-size", ALL),
    ("kv-capacity-tokens", WORKERS),
    ("threads", WORKERS),
    ("device", WORKERS),
    ("tp", WORKERS),
    ("prefill-chunk-budget", WORKERS),
    ("batch-max", WORKERS),
    ("step-timeout", WORKERS),
    ("prefill", &[ROUTER]),
    ("kv-transfer", WORKERS),
    ("no-prefix-caching", WORKERS),
    ("policy", &[ROUTER]),
    ("grace-period", ALL),
    ("max-concurrent-requests", WITH_MODEL),
    ("max-sequences-per-account", &[FRONTEND]),
    ("max-body-bytes", &[FRONTEND]),
    ("max-bodies-bytes", &[FRONTEND]),
    ("max-connections", &[FRONTEND]),
    ("max-connections-per-address", &[FRONTEND]),
    ("allowed-hosts", &[FRONTEND]),
    ("resumes", &[FRONTEND]),
    ("dashboard-requests", &[FRONTEND]),
    ("audit-result", &[FRONTEND]),
    ("ledger", WORKERS),
    ("account-header", &[FRONTEND]),
    ("cluster-key-file", KEYED),
    ("cache-isolation", &[FRONTEND]),
    ("trusted-proxies", &[FRONTEND]),
    ("expose-details", &[FRONTEND]),
    ("sim-speedup", WORKERS),
    ("sim-prefill-tokens-per-second", WORKERS),
    ("sim-prefill-overhead-ms", WORKERS),
    ("sim-decode-step-ms", WORKERS),
    ("sim-decode-per-sequence-ms", WORKERS),
    ("sim-kv-bytes-per-token", WORKERS),
    ("sim-transfer-bytes-per-second", WORKERS),
    ("log", ALL),
    ("log-format", ALL),
    ("otlp-endpoint", ALL),
    ("trace-sample-ratio", ALL),
];

/// Flags that etcd makes needless.
const LISTS: &[&str] = &["workers", "workers-file"];

/// What a role does not share with `tandem up` (which has nothing of its own).
pub trait Own: Args + Serialize {
    /// The subcommand's name.
    const ROLE: &'static str;
}

/// `tandem up`: all there is.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
pub struct UpFlags {}

/// `tandem frontend`
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct FrontendFlags {
    /// The cluster's name; a router of another name is not used
    #[arg(long, env = "TANDEM_CLUSTER", value_name = "NAME", default_value = CLUSTER, value_parser = cluster_name)]
    pub cluster: String,

    /// host:port of every router's gRPC, with commas between; they need not be up yet
    #[arg(
        long,
        env = "TANDEM_ROUTER",
        value_name = "ADDRESSES",
        value_delimiter = ',',
        default_value = "127.0.0.1:7000",
        value_parser = address,
        conflicts_with = "etcd"
    )]
    #[serde(serialize_with = "with_commas")]
    pub router: Vec<String>,

    /// Address of the operator's HTTP port, with /metrics, /dashboard, /live, /ready and /openapi.json. Use a loopback address unless other
    /// hosts may see the cluster's addresses and the sizes and times of all requests [default: none; --listen serves all of these]
    #[arg(long, env = "TANDEM_ADMIN_LISTEN", value_name = "ADDRESS")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub admin_listen: Option<SocketAddr>,

    /// Who finds it, and how it finds routers.
    #[command(flatten)]
    #[serde(flatten)]
    pub discovery: DiscoveryFlags,
}

/// `tandem router`
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct RouterFlags {
    /// What it has in common with the workers.
    #[command(flatten)]
    #[serde(flatten)]
    pub process: ProcessFlags,

    /// host:port of every worker's gRPC, prefill and decode, with commas between; they need not be up yet
    #[arg(
        long,
        env = "TANDEM_WORKERS",
        value_name = "ADDRESSES",
        value_delimiter = ',',
        default_value = "127.0.0.1:7100,127.0.0.1:7200",
        value_parser = address,
        conflicts_with = "etcd"
    )]
    #[serde(serialize_with = "with_commas")]
    pub workers: Vec<String>,

    /// A file with one host:port a line instead; it is read again when it changes, so that workers come and go
    #[arg(long, env = "TANDEM_WORKERS_FILE", value_name = "FILE", conflicts_with = "etcd")]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers_file: Option<PathBuf>,

    /// host:port of the other routers' gRPC, with commas between; they need not be up yet, and this router may be among them
    #[arg(long, env = "TANDEM_PEERS", value_name = "ADDRESSES", value_delimiter = ',', value_parser = address, conflicts_with = "etcd")]
    #[serde(skip_serializing_if = "Vec::is_empty", serialize_with = "with_commas")]
    pub peers: Vec<String>,
}

/// `tandem prefill-worker`
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct PrefillFlags {
    /// What it has in common with the other roles that speak gRPC.
    #[command(flatten)]
    #[serde(flatten)]
    pub process: ProcessFlags,

    /// Its stable name, and the label of its metrics [default: its role, this host's name and the port]
    #[arg(long, env = "TANDEM_WORKER_ID", value_name = "NAME", value_parser = worker_name)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub worker_id: Option<String>,
}

/// `tandem decode-worker`
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct DecodeFlags {
    /// What all workers have.
    #[command(flatten)]
    #[serde(flatten)]
    pub worker: PrefillFlags,
}

/// What router and workers have in common.
#[derive(Args, Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub struct ProcessFlags {
    /// The cluster's name; processes of another name are refused
    #[arg(long, env = "TANDEM_CLUSTER", value_name = "NAME", default_value = CLUSTER, value_parser = cluster_name)]
    pub cluster: String,

    /// Where /live, /ready and /metrics are, over HTTP; this machine only, because nothing here asks who reads
    #[arg(long, env = "TANDEM_ADMIN_LISTEN", value_name = "ADDRESS", default_value = "127.0.0.1:9000")]
    pub admin_listen: SocketAddr,

    /// Who finds it, and how.
    #[command(flatten)]
    #[serde(flatten)]
    pub discovery: DiscoveryFlags,

    /// How routers hear of caches.
    #[command(flatten)]
    #[serde(flatten)]
    pub events: NatsFlags,
}

impl Own for UpFlags {
    const ROLE: &'static str = "up";
}

impl Own for FrontendFlags {
    const ROLE: &'static str = FRONTEND;
}

impl Own for RouterFlags {
    const ROLE: &'static str = ROUTER;
}

impl Own for PrefillFlags {
    const ROLE: &'static str = PREFILL;
}

impl Own for DecodeFlags {
    const ROLE: &'static str = DECODE;
}

impl RouterFlags {
    /// Where the workers are.
    pub fn workers(&self) -> MemberSource {
        match (self.process.discovery.etcd(&self.process.cluster), &self.workers_file) {
            (Some(etcd), _) => MemberSource::Etcd(etcd, vec![Role::PrefillWorker, Role::DecodeWorker]),
            (None, Some(file)) => MemberSource::File(file.clone()),
            (None, None) => MemberSource::List(self.workers.clone()),
        }
    }

    /// Where the other routers are.
    pub fn peers(&self) -> MemberSource {
        routers(&self.process.discovery, &self.process.cluster, &self.peers)
    }
}

impl FrontendFlags {
    /// Where the routers are.
    pub fn routers(&self) -> MemberSource {
        routers(&self.discovery, &self.cluster, &self.router)
    }
}

fn routers(discovery: &DiscoveryFlags, cluster: &str, listed: &[String]) -> MemberSource {
    match discovery.etcd(cluster) {
        Some(etcd) => MemberSource::Etcd(etcd, vec![Role::Router]),
        None => MemberSource::List(listed.to_vec()),
    }
}

/// Whether the role takes this flag, if it is one of `tandem up`'s.
pub(super) fn takes(role: &str, flag: &str) -> bool {
    TAKEN.iter().find(|(name, _)| *name == flag).is_none_or(|(_, roles)| role == UpFlags::ROLE || roles.contains(&role))
}

/// The command line, with the defaults and the help of each role.
pub(super) fn command() -> clap::Command {
    let ports = [(ROUTER, "127.0.0.1:7000", "127.0.0.1:9000"), (PREFILL, "127.0.0.1:7100", "127.0.0.1:9100")];
    let ports = ports.into_iter().chain([(DECODE, "127.0.0.1:7200", "127.0.0.1:9200")]);
    let command = ALL.iter().fold(Cli::command(), |command, role| {
        command.mut_subcommand(role, |command| command.mut_args(|arg| if taken(role, &arg) { arg } else { foreign(arg) }))
    });
    ports.fold(command, |command, (role, listen, admin)| {
        command.mut_subcommand(role, |command| {
            let command = command
                .mut_arg("listen", |arg| {
                    arg.default_value(listen)
                        .help("Where its gRPC listens; this machine only, because nothing here asks who calls")
                })
                .mut_arg("admin_listen", |arg| arg.default_value(admin));
            if role != ROUTER {
                return command;
            }
            command.mut_arg("served_model_name", |arg| {
                arg.help("The id that workers must serve [default: that of the worker that joins first]")
            })
        })
    })
}

/// A flag that was given to a role that has no use for it.
pub(super) fn misplaced(role: &clap::Command, matches: &clap::ArgMatches) -> Option<String> {
    let given = |arg: &&Arg| matches.value_source(arg.get_id().as_str()) == Some(ValueSource::CommandLine);
    let misplaced = role.get_arguments().filter(|arg| !taken(role.get_name(), arg)).find(given)?;
    misplaced.get_long().map(str::to_owned)
}

fn taken(role: &str, arg: &Arg) -> bool {
    arg.get_long().is_none_or(|flag| takes(role, flag))
}

/// Not shown, and deaf to the environment; [`misplaced`] finds who gives it.
fn foreign(arg: Arg) -> Arg {
    arg.hide(true).env(None::<&str>)
}

/// The settings that a role takes, as a file for `--config`.
pub(super) fn to_toml<F: Own>(settings: &UpSettings, own: &F) -> String {
    let mut table = toml::Table::try_from(settings).expect("settings are plain values");
    table.retain(|key, _| takes(F::ROLE, key));
    table.extend(toml::Table::try_from(own).expect("settings are plain values"));
    if table.contains_key("etcd") {
        // Defaults that do not count, and that could not be given beside it.
        LISTS.iter().for_each(|list| drop(table.remove(*list)));
    }
    toml::to_string(&table).expect("settings are plain values")
}

pub(super) fn with_commas<S: Serializer>(list: &[String], serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&list.join(","))
}

pub(crate) fn address(text: &str) -> Result<String, &'static str> {
    channel::endpoint(text).map(|_| text.to_owned()).map_err(|_| "write host:port")
}

/// Part of names in other systems, where dots separate.
fn cluster_name(text: &str) -> Result<String, &'static str> {
    named(text, "-_").ok_or("write 1 to 64 letters, digits, - and _")
}

fn worker_name(text: &str) -> Result<String, &'static str> {
    named(text, "-_.").ok_or("write 1 to 64 letters, digits, -, _ and .")
}

fn named(text: &str, signs: &str) -> Option<String> {
    let fits = |letter: char| letter.is_ascii_alphanumeric() || signs.contains(letter);
    ((1..=64).contains(&text.len()) && text.chars().all(fits)).then(|| text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::super::{Command, Serve};
    use super::*;
    use std::ffi::OsString;

    fn read(args: &[&str]) -> Result<Command, String> {
        let args = ["tandem"].iter().chain(args).map(OsString::from).collect();
        Cli::read(args, |_| None).map(|cli| cli.command).map_err(|error| error.to_string())
    }

    fn router(args: &[&str]) -> Result<Box<Serve<RouterFlags>>, String> {
        match read(&[&["router"], args].concat())? {
            Command::Router(router) => Ok(router),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_flag_of_up_is_somebodys_or_nobodys_and_the_list_says_whose() {
        let up = UpSettings::augment_args(clap::Command::new("up"));
        let flags: Vec<&str> = up.get_arguments().filter_map(Arg::get_long).collect();
        let listed: Vec<&str> = TAKEN.iter().map(|(flag, _)| *flag).collect();
        for flag in &flags {
            assert!(listed.contains(flag), "TAKEN does not say which roles take --{flag}");
        }
        assert_eq!(listed.len(), flags.len(), "TAKEN lists flags that there are not: {listed:?}");
    }

    #[test]
    fn each_role_has_its_ports_and_knows_the_others() {
        command().debug_assert();
        let router = router(&[]).expect("defaults");
        assert_eq!((router.settings.listen.port(), router.own.process.admin_listen.port()), (7000, 9000));
        let Ok(Command::PrefillWorker(prefill)) = read(&["prefill-worker"]) else { panic!("defaults") };
        assert_eq!((prefill.settings.listen.port(), prefill.own.process.admin_listen.port()), (7100, 9100));
        let Ok(Command::DecodeWorker(decode)) = read(&["decode-worker"]) else { panic!("defaults") };
        assert_eq!((decode.settings.listen.port(), decode.own.worker.process.admin_listen.port()), (7200, 9200));
        let Ok(Command::Frontend(frontend)) = read(&["frontend"]) else { panic!("defaults") };
        assert_eq!((frontend.settings.listen.port(), frontend.own.router), (8000, vec!["127.0.0.1:7000".to_owned()]));
        let workers = [prefill.settings.listen, decode.settings.listen].map(|address| address.to_string());
        assert_eq!(router.own.workers(), MemberSource::List(workers.to_vec()));
    }

    #[test]
    fn mistakes_are_told() {
        for (args, told) in [
            (&["router", "--prefill-workers", "3"][..], "`tandem router` has no --prefill-workers"),
            (&["router", "--model", "x.gguf"], "`tandem router` has no --model"),
            (&["frontend", "--policy", "random"], "`tandem frontend` has no --policy"),
            (&["prefill-worker", "--advertise", "h"], "write host:port"),
            (&["up", "--etcd", "h:1"], "--etcd"),
            (&["router", "--etcd", "h:1", "--workers", "h:1"], "cannot be used with"),
            (&["router", "--workers-file", "x", "--etcd", "h:1"], "cannot be used with"),
            (&["router", "--etcd", "h:1,h"], "write host:port"),
            (&["router", "--etcd", "h:1", "--etcd-user", "u"], "--etcd-password"),
            (&["router", "--etcd", "h:1", "--etcd-password", "p"], "--etcd-user"),
            (&["router", "--etcd-ca", "x"], "--etcd"),
            (&["router", "--etcd", "h:1", "--etcd-ca", "x", "--etcd-cert", "x"], "--etcd-key"),
            (&["up", "--router", "h:1"], "--router"),
            (&["router", "--workers", "h:1,h"], "write host:port"),
            (&["frontend", "--router", "h:1,http://h:1"], "write host:port"),
            (&["router", "--peers", "h"], "write host:port"),
            (&["decode-worker", "--worker-id", "a b"], "letters"),
            (&["decode-worker", "--cluster", "a.b"], "letters"),
        ] {
            let error = read(args).expect_err("it is a mistake");
            assert!(error.contains(told), "{args:?}: {error}");
        }
    }

    #[test]
    fn one_file_serves_all_roles_and_what_is_printed_can_be_read_back() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tandem.toml");
        let path = file.to_str().expect("text");
        let text = "block-size = 64\nprefill = \"remote\"\nworkers = \"a:1,b:2\"\nrouter = \"r:1,r:2\"\npeers = \"r:2\"\nsim-speedup = 9.0\n";
        std::fs::write(&file, text).expect("ours");
        let settings = router(&["--config", path]).expect("all of it is known");
        assert_eq!((settings.settings.block_size, settings.own.workers.len(), settings.own.peers.len()), (64, 2, 1));
        assert_eq!(settings.settings.sim.sim_speedup, 1.0, "that is for workers");
        let Ok(Command::Frontend(frontend)) = read(&["frontend", "--config", path]) else { panic!("all of it is known") };
        assert_eq!(frontend.own.router, ["r:1", "r:2"]);

        let printed = settings.to_toml();
        assert!(printed.contains("workers = \"a:1,b:2\"") && !printed.contains("sim-speedup"), "{printed}");
        std::fs::write(&file, &printed).expect("ours");
        let again = router(&["--config", path]).expect("what we print is valid");
        assert_eq!((again.own.clone(), again.to_toml()), (settings.own.clone(), printed));
        std::fs::write(&file, "wrokers = 1").expect("ours");
        assert!(router(&["--config", path]).is_err_and(|error| error.contains("unknown key `wrokers`")));
    }

    #[test]
    fn with_etcd_no_list_counts_and_no_password_is_shown() {
        let args = "--etcd e:1,f:2 --cluster c --etcd-user u --etcd-password hidden --etcd-ca ca --etcd-cert cert --etcd-key key";
        let settings = router(&args.split(' ').collect::<Vec<_>>()).expect("valid");
        let MemberSource::Etcd(etcd, roles) = settings.own.workers() else { panic!("etcd was asked for") };
        assert_eq!((etcd.endpoints.join(" "), &*etcd.cluster, etcd.lease_ttl.as_secs()), ("e:1 f:2".to_owned(), "c", 10));
        assert_eq!(etcd.user.as_ref().map(|(name, password)| (&**name, password.expose())), Some(("u", "hidden")));
        assert!(etcd.tls.is_some_and(|tls| tls.identity.is_some()));
        assert_eq!(roles, [Role::PrefillWorker, Role::DecodeWorker]);
        let printed = settings.to_toml();
        assert!(printed.contains("etcd = \"e:1,f:2\"") && !printed.contains("workers"), "{printed}");
        assert!(!printed.contains("hidden") && !format!("{settings:?}").contains("hidden"));
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tandem.toml");
        std::fs::write(&file, printed.replace("etcd-user = \"u\"\n", "")).expect("ours");
        router(&["--config", file.to_str().expect("text")]).expect("what we print is valid");
    }

    #[test]
    fn the_address_on_the_list_is_one_that_others_can_use() {
        let registered = |args: &[&str], listens: &str| {
            let settings = router(args).expect("valid").own.process.discovery;
            settings.registration("c", listens.parse().expect("an address")).map_err(|error| error.to_string())
        };
        let address = |args, listens| registered(args, listens).map(|found| found.map(|(_, address)| address));
        assert_eq!(address(&[], "0.0.0.0:1"), Ok(None));
        assert_eq!(address(&["--etcd", "e:1"], "10.0.0.1:7"), Ok(Some("10.0.0.1:7".to_owned())));
        assert_eq!(address(&["--etcd", "e:1", "--advertise", "h:2"], "0.0.0.0:1"), Ok(Some("h:2".to_owned())));
        let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
        assert_eq!(address(&["--etcd", "e:1"], "[::]:1"), Ok(Some(format!("{name}:1"))));
        let files = registered(&["--etcd", "e:1", "--etcd-ca", "/none"], "10.0.0.1:7").expect_err("there is no such file");
        assert!(files.contains("/none cannot be read") && files.contains("--etcd-ca"), "{files}");
    }
}
