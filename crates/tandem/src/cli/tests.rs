//! Tests of the layers of settings, of printing them, and of refusals.

use super::*;
use crate::settings::{EngineKind, PickerArgs, PolicyKind};
use clap::{CommandFactory, ValueEnum};
use std::{ffi::OsString, io::Write};
use tandem_process::discovery::{MemberSource, Role as Member};

fn command(args: &[&str]) -> Result<Command, String> {
    let args = ["tandem"].iter().chain(args).map(OsString::from).collect();
    Cli::read(args, None).map(|cli| cli.command).map_err(|error| error.to_string())
}

fn up(args: &[&str], config: &str) -> Result<UpSettings, String> {
    let file = file(config);
    match command(&[&["up", "--config", file.path().to_str().expect("the path is UTF-8")], args].concat())? {
        Command::Up(up) => Ok(up.role),
        other => unreachable!("the command is up: {other:?}"),
    }
}

fn router(args: &[&str]) -> Result<Box<Serve<RouterProcess>>, String> {
    match command(&[&["router"], args].concat())? {
        Command::Router(router) => Ok(router),
        other => unreachable!("the command is router: {other:?}"),
    }
}

fn file(text: &str) -> tempfile::NamedTempFile {
    let mut file = tempfile::NamedTempFile::new().expect("the system can create a temporary file");
    file.write_all(text.as_bytes()).expect("the temporary file is writable");
    file
}

fn toml_of(role: &impl Serialize) -> String {
    toml::to_string(role).expect("the settings can be serialized")
}

#[test]
fn flags_override_the_file_and_the_file_overrides_defaults() {
    let config =
        "decode-workers = 3\nprefill-workers = 5\nlisten = \"127.0.0.1:9\"\nno-prefix-caching = true\nsim-speedup = 2.5\n";
    let settings = up(&["--prefill-workers", "4"], config).expect("all settings are valid");
    assert_eq!((settings.prefill_workers, settings.decode_workers), (4, 3));
    assert_eq!(settings.common.listen.port(), 9);
    assert!(settings.worker.no_prefix_caching);
    assert_eq!(settings.worker.sim.sim_speedup, 2.5);
    assert_eq!(settings.router.policy, PolicyKind::KvAware);
    assert!(!up(&[], "no-prefix-caching = false").expect("the settings are valid").worker.no_prefix_caching);
}

#[test]
fn trace_collector_defaults_to_opentelemetrys_environment_variable() {
    let read = |args: &[&str], named: &str| {
        let args = ["tandem", "router"].iter().chain(args).map(OsString::from).collect();
        match Cli::read(args, Some(named.into())).expect("the settings are valid").command {
            Command::Router(router) => router.role.common.telemetry.otlp_endpoint,
            other => unreachable!("the command is router: {other:?}"),
        }
    };
    assert_eq!(read(&[], "http://c:4317").as_deref(), Some("http://c:4317"));
    assert_eq!(read(&["--otlp-endpoint", "http://d:1"], "http://c:4317").as_deref(), Some("http://d:1"));
    assert_eq!(read(&[], ""), None);
}

#[test]
fn error_in_the_config_file_names_the_file() {
    for (config, expected) in [
        ("wrokers = 3", "unknown key `wrokers`"),
        ("decode-worker = 3", "unknown key `decode-worker`; did you mean `decode-workers`?"),
        ("qqq = 3", "unknown key `qqq`; `tandem up --print-config` prints the keys"),
        ("decode-workers = \"two\"", "'two' for '--decode-workers <N>': write a whole number"),
        ("grace-period = -1", "--grace-period <SECONDS>': write a whole number"),
        ("config = \"x\"", "unknown key `config`"),
        ("print-config = true", "unknown key `print-config`"),
        ("interval = 1", "unknown key `interval`"),
        ("decode-workers = 0", "--decode-workers"),
        ("engine = \"gpu\"", "possible values: cpu"),
        ("engine = [1]", "`engine` is not a plain value"),
        ("[router]\nlisten = 1", "`router` is a section, and this file has none"),
        ("[frontend]\nlisten = 1", "`frontend` is a section, and this file has none"),
        ("no-prefix-caching = \"maybe\"", "--no-prefix-caching"),
        ("sim-speedup = 0", "a number above 0"),
        ("account-header = \"a b\"", "the name of an HTTP header"),
        ("trace-sample-ratio = 1.5", "a number from 0 to 1"),
        ("= 3", "line 1 is not valid TOML"),
        ("\n\nlog = ", "line 3 is not valid TOML"),
        ("trusted-proxies = [\"10.0.0.0/8\"]", "write a list as one string with commas"),
    ] {
        let error = up(&[], config).expect_err(config);
        assert!(error.contains(expected) && error.contains("in /"), "{config}: {error}");
        assert_eq!(error.trim_end().lines().count(), 1, "{config}: {error}");
    }
}

#[test]
fn conflicting_settings_of_flags_and_file_are_refused() {
    let etcd = file("etcd = \"e:1\"\nnats-token = \"t\"");
    let path = etcd.path().to_str().expect("the path is UTF-8");
    let error = router(&["--config", path, "--workers", "w:1"]).expect_err("two worker lists are refused");
    assert!(error.contains("--workers cannot be used with --etcd"), "{error}");
    let error = router(&["--config", path]).expect_err("a NATS token without servers is refused");
    assert!(error.contains("--nats-token needs --nats"), "{error}");
    router(&["--config", path, "--nats", "n:1"]).expect("the settings of file and flags are valid together");
}

#[test]
fn printed_settings_can_be_read_back() {
    let mut settings = UpSettings::defaults();
    settings.model.model = Some("pypi:x==1".parse().expect("the model source is valid"));
    settings.router.policy = PolicyKind::LeastLoaded;
    settings.worker.sim.sim_kv_bytes_per_token = 1e6;
    settings.worker.no_prefix_caching = true;
    settings.worker.kv_capacity_tokens = Some(1024);
    let printed = toml_of(&settings);
    assert!(printed.contains("model = \"pypi:x==1\""), "{printed}");
    let mut read = up(&[], &printed).expect("printed settings are valid");
    // The tests may run with TANDEM_MODEL set, which overrides the file.
    if std::env::var_os("TANDEM_MODEL").is_some() {
        read.model.model.clone_from(&settings.model.model);
    }
    assert_eq!(read, settings);
}

#[test]
fn every_setting_has_an_environment_variable_and_help() {
    for role in Cli::command().get_subcommands().filter(|role| role.get_arguments().any(|arg| arg.get_id() == "print_config")) {
        for arg in role.get_arguments().filter(|arg| arg.get_id() != "print_config") {
            assert!(arg.get_env().is_some(), "{:?} has no environment variable", arg.get_id());
            assert!(arg.get_help().is_some_and(|help| help.to_string().len() > 10), "{:?} has no help", arg.get_id());
            assert!(arg.get_help_heading().is_some(), "{:?} is in no group", arg.get_id());
        }
        for (arg, heading) in [
            ("admin_listen", "Process"),
            ("config", "Process"),
            ("print_config", "Process"),
            ("worker_id", "Process"),
            ("decode_workers", "Workers"),
            ("router", "Discovery"),
            ("workers", "Discovery"),
            ("peers", "Discovery"),
        ] {
            let found = role.get_arguments().find(|found| found.get_id() == arg);
            assert!(found.is_none_or(|arg| arg.get_help_heading() == Some(heading)), "{arg} is not under {heading}");
        }
    }
}

#[test]
fn hugging_face_token_is_never_shown() {
    let settings = up(&["--hf-token", "secret"], "models-dir = \"/x\"").expect("the settings are valid");
    assert_eq!(settings.model.store.folder.models_dir, Some(PathBuf::from("/x")));
    for shown in [format!("{settings:?}"), toml_of(&settings)] {
        assert!(!shown.contains("secret"), "{shown}");
    }
}

#[test]
fn roles_listen_on_different_ports_and_find_each_other_by_default() {
    Cli::command().debug_assert();
    let router = router(&[]).expect("the default settings are valid").role;
    assert_eq!((router.common.listen.port(), router.process.admin_listen.port()), (7000, 9000));
    let Ok(Command::PrefillWorker(prefill)) = command(&["prefill-worker"]) else { panic!("the default settings are valid") };
    assert_eq!((prefill.role.common.listen.port(), prefill.role.process.admin_listen.port()), (7100, 9100));
    let Ok(Command::DecodeWorker(decode)) = command(&["decode-worker"]) else { panic!("the default settings are valid") };
    assert_eq!((decode.role.common.listen.port(), decode.role.process.admin_listen.port()), (7200, 9200));
    let Ok(Command::Frontend(frontend)) = command(&["frontend"]) else { panic!("the default settings are valid") };
    let routers = MemberSource::List(vec!["127.0.0.1:7000".to_owned()]);
    assert_eq!((frontend.role.common.listen.port(), frontend.role.routers()), (8000, routers));
    let workers = [prefill.role.common.listen, decode.role.common.listen].map(|address| address.to_string());
    assert_eq!(router.workers(), MemberSource::List(workers.to_vec()));
}

#[test]
fn invalid_command_line_is_refused_with_an_explanation() {
    for (args, expected) in [
        (&["router", "--prefill-workers", "3"][..], "--prefill-workers does not apply to `tandem router`, but to `tandem up`"),
        (
            &["router", "--model", "x.gguf"],
            "--model does not apply to `tandem router`, but to `tandem up`, `tandem prefill-worker`",
        ),
        (
            &["frontend", "--policy", "least_loaded"],
            "--policy does not apply to `tandem frontend`, but to `tandem up`, `tandem router`",
        ),
        (
            &["model", "rm", "x", "--json"],
            "--json does not apply to `tandem model rm`, but to `tandem model list`, `tandem model show`\n",
        ),
        (&["why", "--csv"], "--csv does not apply to `tandem why`, but to `tandem audit report`\n"),
        (&["router", "--nonsense"], "unexpected argument '--nonsense'"),
        (&["bench", "simulate", "--slo-percent", "5"], "Usage: tandem bench simulate [OPTIONS]"),
        (&["audit", "report", "--csv"], "Usage: tandem audit report [OPTIONS] --ledger <FILE>\n"),
        (&["prefill-worker", "--advertise", "h"], "write host:port"),
        (&["up", "--etcd", "h:1"], "--etcd"),
        (&["router", "--etcd", "h:1", "--workers", "h:1"], "cannot be used with"),
        (&["router", "--workers-file", "x", "--etcd", "h:1"], "cannot be used with"),
        (&["router", "--workers", "h:1", "--workers-file", "x"], "--workers cannot be used with --workers-file; set only one"),
        (&["frontend", "--router", "h:1", "--etcd", "h:1"], "cannot be used with"),
        (&["router", "--peers", "h:1", "--etcd", "h:1"], "cannot be used with"),
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
        (&["decode-worker", "--engine", "vllm"], "--engine vllm needs --engine-url"),
        (&["up", "--engine", "vllm"], "--engine vllm needs --engine-url"),
        (&["up", "--engine-url", "http://e:1"], "--engine-url needs --engine vllm"),
        (&["up", "--prefill-engine-url", "http://e:1"], "--prefill-engine-url needs --engine-url"),
        (&["up", "--trust-engine-model"], "--trust-engine-model needs --engine-url"),
        (&["decode-worker", "--engine", "vllm", "--engine-url", "http://e:1,http://f:1"], "a worker has one engine"),
        (&["prefill-worker", "--engine", "vllm", "--engine-url", "http://e:1"], "set --engine-kv-connector nixl"),
        (
            &["up", "--engine", "vllm", "--engine-url", "http://e:1,http://f:1", "--engine-events", "tcp://e:5"],
            "--engine-events with an endpoint is for one server",
        ),
        (
            &["decode-worker", "--engine", "vllm", "--engine-url", "http://e:1", "--engine-events-replay", "tcp://e:6"],
            "--engine-events-replay needs --engine-events with an endpoint",
        ),
        (
            &["up", "--engine", "vllm", "--engine-url", "http://e:1", "--no-prefix-caching"],
            "--no-prefix-caching has no effect with --engine vllm",
        ),
        (
            &["up", "--engine", "vllm", "--engine-url", "http://e:1", "--kv-capacity-tokens", "4096"],
            "--kv-capacity-tokens has no effect with --engine vllm",
        ),
        (
            &["decode-worker", "--engine", "vllm", "--engine-url", "http://e:1", "--slo-itl", "20"],
            "--slo-itl has no effect with --engine vllm",
        ),
        (&["epp", "--engine", "sglang", "--engine-url", "http://1.2.3.4:1"], "only vLLM servers can be observed"),
        (&["epp", "--engine-url", "http://1.2.3.4:1", "--api-keys-file", "x"], "--api-keys-file has no effect with `tandem epp`"),
        (&["epp", "--engine-url", "http://1.2.3.4:1", "--observe", "1.2.3.4:1"], "--observe is for decode workers"),
        (&["epp", "--engine-url", "http://1.2.3.4:1", "--router", "r:1"], "--router cannot be used with --engine-url"),
        (&["epp", "--engine-url", "http://1.2.3.4:1", "--etcd", "e:1"], "--etcd cannot be used with --engine-url"),
        (&["epp", "--model", "hf:a/b", "--policy", "least_loaded"], "--policy needs --engine-url"),
        (&["epp", "--model", "hf:a/b", "--tls-cert", "c"], "--tls-cert needs --tls-key"),
        (
            &["epp", "--model", "hf:a/b", "--tls-self-signed", "--tls-cert", "c", "--tls-key", "k"],
            "--tls-cert cannot be used with --tls-self-signed",
        ),
        (&["up", "--engine", "vllm", "--engine-url", "http://e:1", "--observe", "1.2.3.4:1"], "--observe is for decode workers"),
        (&["decode-worker", "--observe", "1.2.3.4:1"], "only vLLM servers can be observed"),
        (&["up", "--engine", "sglang"], "--engine sglang needs --engine-url with the URL of a SGLang server"),
        (
            &["decode-worker", "--engine", "sglang", "--engine-url", "http://e:1", "--engine-kv-connector", "nixl"],
            "--engine-kv-connector is for --engine vllm only",
        ),
        (
            &["up", "--engine", "sglang", "--engine-url", "http://e:1", "--engine-kv-lease", "60"],
            "--engine-kv-lease is for --engine vllm only",
        ),
        (
            &["up", "--engine", "sglang", "--engine-url", "http://e:1", "--no-prefix-caching"],
            "--no-prefix-caching has no effect with --engine sglang; start the SGLang server with --disable-radix-cache",
        ),
        (&["up", "--engine", "llama-cpp"], "--engine llama-cpp needs --engine-url with the URL of a llama.cpp server"),
        (&["prefill-worker", "--engine", "llama-cpp", "--engine-url", "http://e:1"], "llama.cpp's server cannot send KV"),
        (
            &["up", "--engine", "llama-cpp", "--engine-url", "http://e:1", "--prefill-engine-url", "http://f:1"],
            "--prefill-engine-url is not for --engine llama-cpp",
        ),
        (
            &["decode-worker", "--engine", "llama-cpp", "--engine-url", "http://e:1", "--engine-kv-connector", "nixl"],
            "--engine-kv-connector is not for --engine llama-cpp",
        ),
        (
            &["up", "--engine=llama-cpp", "--engine-url=http://e:1", "--account-header=x-a", "--trusted-proxies=10.0.0.1"],
            "llama.cpp's server cannot keep the caches of accounts apart",
        ),
        (&["up", "--served-model-name", ""], "a value is required for '--served-model-name <ID>'"),
        (&["up", "--kv-capacity-tokens", "5"], "--kv-capacity-tokens 5 is less than one block of 16 tokens"),
        (
            &["frontend", "--listen", "1", "--admin-listen", "1"],
            "--listen and --admin-listen are both 127.0.0.1:1; choose another",
        ),
        (&["router", "--listen", "9000"], "--listen and --admin-listen are both 127.0.0.1:9000; choose another"),
        (&["up", "--listen", "localhost"], "write a port, localhost:PORT, or IP:PORT"),
        (&["up", "--engine-events", "e:1"], "write discover, none, tcp://host:port or ipc://path"),
    ] {
        let error = command(args).expect_err("the arguments are invalid");
        assert!(error.contains(expected), "{args:?}: {error}");
        assert!(!error.contains("does not apply") || error.trim_end().lines().count() == 1, "{args:?}: {error}");
    }
}

#[test]
fn ports_and_localhost_are_addresses_of_this_machine() {
    for (listen, expected) in
        [("8001", "127.0.0.1:8001"), ("localhost:8001", "127.0.0.1:8001"), ("0.0.0.0:1", "0.0.0.0:1"), ("[::1]:2", "[::1]:2")]
    {
        assert_eq!(up(&["--listen", listen], "").expect("the address is valid").common.listen.to_string(), expected);
    }
    let router = router(&["--admin-listen", "9001", "--workers", "7101,localhost:7102", "--listen", "7001"]).expect("valid").role;
    assert_eq!((router.process.admin_listen.to_string(), router.common.listen.port()), ("127.0.0.1:9001".to_owned(), 7001));
    let workers = ["127.0.0.1:7101", "localhost:7102"].map(str::to_owned);
    assert_eq!(router.workers(), MemberSource::List(workers.to_vec()));
    match command(&["ready", "8001"]) {
        Ok(Command::Ready(args)) => {
            assert_eq!(args.server.server.map(|server| server.to_string()).as_deref(), Some("127.0.0.1:8001"))
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn frontend_of_external_engines_needs_their_model() {
    // The tests may run with TANDEM_MODEL set.
    if std::env::var_os("TANDEM_MODEL").is_none() {
        for args in [&["frontend", "--engine", "vllm"][..], &["epp"]] {
            let error = command(args).expect_err("the process has no tokenizer");
            assert!(error.contains("--engine vllm needs --model"), "{error}");
        }
    }
    command(&["frontend", "--engine", "vllm", "--model", "hf:a/b"]).expect("the arguments are valid");
}

#[test]
fn one_config_file_serves_all_roles_and_printed_settings_can_be_read_back() {
    let text = "block-size = 64\nprefill = \"remote\"\nworkers = \"a:1,b:2\"\nrouter = \"r:1,r:2\"\npeers = \"r:2\"\nsim-speedup = 9.0\n";
    let config = file(text);
    let path = config.path().to_str().expect("the path is UTF-8");
    let settings = router(&["--config", path]).expect("the file has only known settings");
    assert_eq!(settings.role.common.block_size, 64);
    let list = |list: &[&str]| list.iter().map(|&address| address.to_owned()).collect::<MemberSource>();
    assert_eq!((settings.role.workers(), settings.role.peers()), (list(&["a:1", "b:2"]), list(&["r:2"])));
    let Ok(Command::Frontend(frontend)) = command(&["frontend", "--config", path]) else {
        panic!("the file has only known settings")
    };
    assert_eq!(frontend.role.routers(), list(&["r:1", "r:2"]));

    let printed = settings.to_toml();
    assert!(printed.contains("workers = \"a:1,b:2\"") && !printed.contains("sim-speedup"), "{printed}");
    let config = file(&printed);
    let again = router(&["--config", config.path().to_str().expect("the path is UTF-8")]).expect("printed settings are valid");
    assert_eq!((again.role.clone(), again.to_toml()), (settings.role.clone(), printed));
    let config = file("wrokers = 1");
    let path = config.path().to_str().expect("the path is UTF-8");
    assert!(router(&["--config", path]).is_err_and(|error| error.contains("unknown key `wrokers`")));
}

#[test]
fn several_servers_are_listed_with_commas_or_one_flag_each() {
    let lists = ["--engine-url http://e:1,http://f:2", "--engine-url http://e:1 --engine-url http://f:2"];
    for list in lists {
        let args: Vec<&str> = "--engine vllm".split(' ').chain(list.split(' ')).collect();
        let settings = up(&args, "engine-key-file = \"/dev/null\"").map_err(|error| assert!(error.contains("empty"), "{error}"));
        assert!(settings.is_err(), "the file with the key is empty");
        let settings = up(&args, "").expect("valid");
        assert_eq!(settings.worker.external.engine_url, ["http://e:1", "http://f:2"], "{list}");
        let printed = toml_of(&settings);
        assert!(printed.contains("engine-url = \"http://e:1,http://f:2\""), "{printed}");
        assert_eq!(up(&[], &printed).expect("printed settings are valid"), settings);
    }
}

#[test]
fn llama_cpp_serves_accounts_if_the_prefix_cache_is_off_or_shared() {
    let args = "--engine llama-cpp --engine-url http://e:1 --account-header x-a --trusted-proxies 10.0.0.1";
    for more in ["--no-prefix-caching", "--cache-isolation shared"] {
        let args: Vec<&str> = args.split(' ').chain(more.split(' ')).collect();
        let settings = up(&args, "").expect("valid");
        assert_eq!(settings.model.engine, EngineKind::LlamaCpp);
        assert_eq!(up(&[], &toml_of(&settings)).expect("printed settings are valid"), settings);
    }
}

#[test]
fn etcd_replaces_member_lists_and_passwords_are_not_shown() {
    let args = "--etcd e:1,f:2 --cluster c --etcd-user u --etcd-password hidden --etcd-ca ca --etcd-cert cert --etcd-key key";
    let settings = router(&args.split(' ').collect::<Vec<_>>()).expect("the settings are valid");
    let MemberSource::Etcd(etcd, roles) = settings.role.workers() else { panic!("etcd is set") };
    assert_eq!((etcd.endpoints.join(" "), &*etcd.cluster, etcd.lease_ttl.as_secs()), ("e:1 f:2".to_owned(), "c", 10));
    assert_eq!(etcd.user.as_ref().map(|(name, password)| (&**name, password.expose())), Some(("u", "hidden".to_owned())));
    assert!(etcd.tls.is_some_and(|tls| tls.identity.is_some()));
    assert_eq!(roles, [Member::PrefillWorker, Member::DecodeWorker]);
    let printed = settings.to_toml();
    assert!(printed.contains("etcd = \"e:1,f:2\"") && !printed.contains("workers"), "{printed}");
    assert!(!printed.contains("hidden") && !format!("{settings:?}").contains("hidden"));
    let config = file(&printed.replace("etcd-user = \"u\"\n", ""));
    router(&["--config", config.path().to_str().expect("the path is UTF-8")]).expect("printed settings are valid");
}

#[test]
fn registered_address_is_reachable_for_other_processes() {
    let registered = |args: &[&str], listens: &str| {
        let discovery = router(args).expect("the settings are valid").role.process.discovery;
        discovery.registration(listens.parse().expect("the address is valid")).map_err(|error| error.to_string())
    };
    let address = |args, listens| registered(args, listens).map(|found| found.map(|(_, address)| address));
    assert_eq!(address(&[], "0.0.0.0:1"), Ok(None));
    assert_eq!(address(&["--etcd", "e:1"], "10.0.0.1:7"), Ok(Some("10.0.0.1:7".to_owned())));
    assert_eq!(address(&["--etcd", "e:1", "--advertise", "h:2"], "0.0.0.0:1"), Ok(Some("h:2".to_owned())));
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    assert_eq!(address(&["--etcd", "e:1"], "[::]:1"), Ok(Some(format!("{name}:1"))));
    let files =
        registered(&["--etcd", "e:1", "--etcd-ca", "/none"], "10.0.0.1:7").expect_err("a missing certificate file is refused");
    assert!(files.contains("/none cannot be read") && files.contains("--etcd-ca"), "{files}");
}

#[test]
fn further_models_are_parsed_with_their_ids_and_round_trip_through_printed_settings() {
    let frontend = |args: &[&str]| match command(&[&["frontend"], args].concat()) {
        Ok(Command::Frontend(frontend)) => Ok(frontend),
        other => Err(format!("{other:?}")),
    };
    let args = ["--extra-model", "small=pypi:package==1.0", "--extra-model", "b=/models/b,c=hf:org/name"];
    let settings = frontend(&args).expect("valid");
    let extra = &settings.role.frontend.extra_models;
    let shown: Vec<String> = extra.iter().map(ToString::to_string).collect();
    assert_eq!(shown, ["small=pypi:package==1.0", "b=/models/b", "c=hf:org/name"]);
    let config = file(&settings.to_toml());
    let again = frontend(&["--config", config.path().to_str().expect("the path is text")]).expect("printed settings are valid");
    assert_eq!(&again.role.frontend.extra_models, extra);
    for wrong in ["small", "=/models/b", "b=hf:name"] {
        assert!(frontend(&["--extra-model", wrong]).is_err(), "{wrong}");
    }
    assert!(router(&["--extra-model", "b=/models/b"]).is_err_and(|error| error.contains("`tandem frontend`")));
}

#[test]
fn changed_settings_are_those_that_differ_from_the_defaults_of_the_role() {
    let changed = |args: &[&str]| match command(args).expect("the settings are valid") {
        Command::Up(up) => up.changed("up"),
        Command::Router(router) => router.changed("router"),
        Command::DecodeWorker(worker) => worker.changed("decode-worker"),
        Command::Frontend(frontend) => frontend.changed("frontend"),
        other => unreachable!("{other:?}"),
    };
    // The environment of the tests may have variables that are settings.
    let own = |text: String, name: &str| {
        text.split(", ").filter(|setting| setting.starts_with(name)).map(str::to_owned).collect::<Vec<_>>()
    };
    assert_eq!(own(changed(&["up", "--engine", "sim", "--listen", "8001"]), "listen"), ["listen = \"127.0.0.1:8001\""]);
    assert_eq!(own(changed(&["router", "--workers", "a:1,b:2"]), "workers"), ["workers = \"a:1,b:2\""].map(str::to_owned));
    for role in ["up", "router", "decode-worker", "frontend"] {
        for setting in ["listen", "admin-listen", "block-size", "policy", "grace-period"] {
            assert_eq!(own(changed(&[role]), setting), [""; 0], "{role}");
        }
    }
}

#[test]
fn completions_of_each_shell_have_commands_and_flags() {
    for shell in clap_complete::Shell::value_variants() {
        let script = Cli::completions(*shell);
        assert!(["prefill-worker", "cluster-key-file", "completions"].iter().all(|word| script.contains(word)), "{shell}");
    }
    let script = file(&Cli::completions(clap_complete::Shell::Bash));
    let lists = format!(
        "source {}; COMP_WORDS=(tandem rout); COMP_CWORD=1; _tandem tandem rout; echo ${{COMPREPLY[@]}}",
        script.path().display()
    );
    let output = std::process::Command::new("bash").args(["-c", &lists]).output().expect("bash runs");
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "router route", "{output:?}");
}

#[test]
fn man_pages_describe_commands_flags_and_variables() {
    let folder = tempfile::tempdir().expect("the system can create a temporary folder");
    let pages = folder.path().join("man/man1");
    Cli::write_man_pages(&pages).expect("the folder is writable");
    for (name, expected) in [
        ("tandem.1", r"tandem\-prefill\-worker(1)"),
        ("tandem-up.1", r"\-\-decode\-workers"),
        ("tandem-router.1", "TANDEM_CLUSTER_KEY_FILE"),
        ("tandem-audit-report.1", "ledger"),
    ] {
        let page = std::fs::read_to_string(pages.join(name)).unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(page.contains(expected), "{name} lacks {expected}:\n{page}");
    }
    assert!(Cli::write_man_pages(&pages.join("tandem.1/below")).is_err(), "a file is no folder");
}

#[test]
fn endpoint_picker_has_workers_of_its_own_only_if_engines_are_named() {
    let epp = |args: &[&str]| match command(&[&["epp"], args].concat()).expect("the settings are valid") {
        Command::Epp(epp) => epp.role,
        other => unreachable!("the command is epp: {other:?}"),
    };
    let own = ["--engine-url", "http://1.2.3.4:1,http://1.2.3.5:1", "--fallback-endpoints", "2", "--policy", "least_loaded"];
    let own = epp(&own).with_workers();
    assert_eq!(own.worker.external.engine_url.len(), 2);
    assert_eq!((own.model.engine, own.common.listen.port()), (EngineKind::Vllm, 9002));
    let picker = own.picker.expect("an endpoint picker runs");
    assert_eq!((picker.args.fallback_endpoints, picker.admin_listen.map(|at| at.port())), (2, Some(9300)));
    assert_eq!(own.frontend.limits.max_body_bytes, Some(10 << 20));
    let alone = epp(&["--model", "hf:a/b", "--router", "r:1", "--max-body-bytes", "100"]).alone();
    assert_eq!((alone.picker, alone.frontend.limits.max_body_bytes), (Some(PickerArgs::default()), Some(100)));
    assert_eq!(alone.routers(), MemberSource::List(vec!["r:1".to_owned()]));
}
