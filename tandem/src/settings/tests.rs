//! Where settings come from, and what is said of mistakes.

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
fn the_collector_may_be_named_as_opentelemetry_does() {
    let read = |args: &[&str], named: &str| {
        let args = ["tandem", "router"].iter().chain(args).map(OsString::from).collect();
        let env = |name: &OsStr| (name == "OTEL_EXPORTER_OTLP_ENDPOINT").then(|| OsString::from(named));
        let mut cli = Cli::read(args, env).expect("valid");
        cli.command.settings_mut().expect("a role has settings").telemetry.otlp_endpoint.clone()
    };
    assert_eq!(read(&[], "http://c:4317").as_deref(), Some("http://c:4317"));
    assert_eq!(read(&["--otlp-endpoint", "http://d:1"], "http://c:4317").as_deref(), Some("http://d:1"));
    assert_eq!(read(&[], ""), None);
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
        ("account-header = \"a b\"", "the name of an HTTP header"),
        ("trace-sample-ratio = 1.5", "a number from 0 to 1"),
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
