//! Checks that all services of the compose files in `deploy` are hardened, and that the settings of Tandem's services exist. Checks the Helm
//! chart in the same way. The scripts for passwords run against a real etcd and a real NATS.

#[path = "deploy/chart.rs"]
mod chart;
#[path = "../../crates/process/tests/servers/mod.rs"]
mod servers;

use anyhow::{Context, Result, anyhow, ensure};
use clap::CommandFactory;
use serde_json::Value;
use servers::Server;
use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::OsString,
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tandem::cli::Cli;
use tandem_model_store::ModelSource;

/// The maximum number of levels of nested merge keys in a compose file: hardened, tandem, prefill, prefill-2.
const MERGES_MAX: usize = 4;

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file)
}

/// The compose file of a whole cluster whose engines are Tandem's own.
const CLUSTER: &str = "docker-compose.yml";
/// The compose file of a Tandem cluster in front of vLLM servers.
const VLLM: &str = "docker-compose.vllm.yml";
/// The compose file of a Tandem cluster in front of SGLang servers.
const SGLANG: &str = "docker-compose.sglang.yml";

/// Returns a compose file with resolved anchors and merge keys. Variables are not replaced.
fn compose(file: &str) -> Result<Value> {
    let mut yaml: yaml_serde::Value = yaml_serde::from_str(&fs::read_to_string(deploy(file))?)?;
    // Each round resolves one level of nested merge keys.
    for _ in 0..MERGES_MAX {
        yaml.apply_merge()?;
    }
    Ok(serde_json::to_value(yaml)?)
}

fn services(file: &str) -> Result<BTreeMap<String, Value>> {
    let services = compose(file)?["services"].as_object().context("services is not an object")?.clone();
    ensure!(services.len() >= 9, "only {} services were found", services.len());
    Ok(services.into_iter().collect())
}

fn names(list: &Value) -> BTreeSet<String> {
    match list {
        Value::Array(names) => names.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
        Value::Object(map) => map.keys().cloned().collect(),
        _ => BTreeSet::new(),
    }
}

#[test]
fn compose_services_have_no_privileges_and_bounded_resources() -> Result<()> {
    for (name, service) in services(CLUSTER)?.into_iter().chain(services(VLLM)?).chain(services(SGLANG)?) {
        ensure!(service["read_only"] == true, "{name}: read_only");
        ensure!(service["cap_drop"] == serde_json::json!(["ALL"]), "{name}: cap_drop");
        ensure!(service["security_opt"] == serde_json::json!(["no-new-privileges:true"]), "{name}: security_opt");
        ensure!(service["pids_limit"].is_u64(), "{name}: pids_limit");
        ensure!(service["mem_limit"].is_string(), "{name}: mem_limit");
        ensure!(!names(&service["networks"]).is_empty(), "{name} is on the default network");
        ensure!(service["privileged"].is_null() && service["cap_add"].is_null(), "{name} adds privileges");
        let image = service["image"].as_str().context("image is not a string")?;
        ensure!(image.starts_with("${"), "{name}: {image} cannot be set to a digest");
        for port in service["ports"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            ensure!(port.contains(":-127.0.0.1:"), "{name}: {port} is open to other hosts by default");
        }
    }
    Ok(())
}

#[test]
fn networks_separate_services_that_do_not_communicate() -> Result<()> {
    let (compose, services) = (compose(CLUSTER)?, services(CLUSTER)?);
    let on = |service: &str| names(&services[service]["networks"]);
    let together = |one: &str, other: &str| !on(one).is_disjoint(&on(other));
    for (one, other) in [
        ("proxy", "router"),
        ("proxy", "decode"),
        ("proxy", "etcd"),
        ("proxy", "nats"),
        ("proxy", "prometheus"),
        ("grafana", "router"),
        ("grafana", "frontend"),
        ("grafana", "etcd"),
        ("prometheus", "etcd"),
        ("prometheus", "nats"),
        ("model", "router"),
        ("model", "etcd"),
    ] {
        ensure!(!together(one, other), "{one} can reach {other}");
    }
    for (one, other) in [
        ("proxy", "frontend"),
        ("frontend", "router"),
        ("decode", "prefill-2"),
        ("decode", "nats"),
        ("decode-2", "prometheus"),
        ("etcd-auth", "etcd"),
        ("grafana", "prometheus"),
    ] {
        ensure!(together(one, other), "{one} cannot reach {other}");
    }
    for network in ["cluster", "control", "monitoring"] {
        ensure!(compose["networks"][network]["internal"] == true, "{network} is not internal");
    }
    Ok(())
}

#[test]
fn serving_processes_have_secrets_and_a_pinned_model_and_download_no_model() -> Result<()> {
    let services = services(CLUSTER)?;
    let model = format!("${{TANDEM_MODEL:-{}}}", ModelSource::default());
    ensure!(services["model"]["command"][2] == *model, "the service fetches {}", services["model"]["command"]);
    for name in ["router", "frontend", "prefill", "decode", "prefill-2", "decode-2"] {
        let service = &services[name];
        let settings = &service["environment"];
        ensure!(settings["TANDEM_MODEL"] == *model, "{name} serves {}", settings["TANDEM_MODEL"]);
        ensure!(settings["TANDEM_OFFLINE"] == "true", "{name}: TANDEM_OFFLINE");
        let secrets = names(&service["secrets"]);
        for (setting, secret) in [
            ("TANDEM_CLUSTER_KEY_FILE", "cluster_key"),
            ("TANDEM_ETCD_PASSWORD_FILE", "etcd_password"),
            ("TANDEM_NATS_PASSWORD_FILE", "nats_password"),
        ] {
            ensure!(secrets.contains(secret), "{name}: {secret}");
            ensure!(settings[setting] == *format!("/run/secrets/{secret}"), "{name}: {setting}");
        }
        let writable = |volume: &Value| volume.as_str().is_some_and(|volume| !volume.ends_with(":ro"));
        ensure!(
            !service["volumes"].as_array().context("volumes is not a list")?.iter().any(writable),
            "{name} may write to a volume"
        );
    }
    Ok(())
}

/// The folders of a container with the settings for `TANDEM_MTLS`, and with the certificate of its role.
const SETTINGS: &str = "/etc/tandem";
const CERTIFICATES: &str = "/run/certificates";

#[test]
fn each_service_reads_the_certificate_of_its_own_role() -> Result<()> {
    let mut roles = BTreeSet::new();
    for (name, service) in services(CLUSTER)?.into_iter().chain(services(VLLM)?).chain(services(SGLANG)?) {
        if service["environment"]["TANDEM_CLUSTER_KEY_FILE"].is_null() {
            continue;
        }
        let role = service["command"][0].as_str().context("there is no role")?.to_owned();
        ensure!(
            service["environment"]["TANDEM_CONFIG"] == format!("{SETTINGS}/${{TANDEM_MTLS:-off}}.toml"),
            "{name}: TANDEM_CONFIG"
        );
        for volume in
            [format!("./mtls:{SETTINGS}:ro"), format!("${{SECRETS_DIR:-./secrets}}/certificates/{role}:{CERTIFICATES}:ro")]
        {
            ensure!(names(&service["volumes"]).contains(&volume), "{name} does not mount {volume}");
        }
        roles.insert(role);
    }
    ensure!(roles.len() == 4, "only {roles:?} were found");
    for (file, certificate) in [("on", true), ("off", false)] {
        let path = deploy(&format!("mtls/{file}.toml")).display().to_string();
        for role in &roles {
            let args = ["tandem", role, "--config", &path].map(OsString::from).to_vec();
            let settings = format!("{:?}", Cli::read(args, None)?.command);
            let is_set = settings.contains(&format!("cluster_cert: Some(\"{CERTIFICATES}/cert.pem\")"));
            ensure!(is_set == certificate, "{role}, {file}: {settings}");
        }
    }
    Ok(())
}

fn with_defaults(text: &str) -> Result<String> {
    let Some((before, rest)) = text.split_once("${") else { return Ok(text.to_owned()) };
    let (variable, after) = rest.split_once('}').context("a variable has no closing brace")?;
    let (_, default) = variable.split_once(":-").with_context(|| format!("{variable} has no default"))?;
    Ok(format!("{before}{default}{}", with_defaults(after)?))
}

fn texts(list: &Value) -> Result<Vec<String>> {
    let text = |item: &Value| with_defaults(item.as_str().context("the value is not a text")?);
    list.as_array().context("the value is not a list")?.iter().map(text).collect()
}

fn value(value: &Value) -> Result<String> {
    match value {
        Value::String(text) => with_defaults(text),
        other => Ok(other.to_string()),
    }
}

/// Reads a command line of `tandem` as the binary does.
fn read(args: Vec<String>) -> Result<()> {
    let given = args.join(" ");
    let args = ["tandem".to_owned()].into_iter().chain(args).map(OsString::from).collect();
    Cli::read(args, None).map(drop).map_err(|error| anyhow!("tandem {given}: {error}"))
}

/// Returns the command line of a role with the flags that environment variables stand for.
fn with_variables(mut command: Vec<String>, variables: &BTreeMap<String, String>) -> Result<Vec<String>> {
    let cli = Cli::command();
    let role = cli.find_subcommand(&command[0]).with_context(|| format!("{} is no role", command[0]))?;
    for (variable, setting) in variables {
        let has_variable = |arg: &&clap::Arg| arg.get_env().is_some_and(|env| env == variable.as_str());
        let arg =
            role.get_arguments().find(has_variable).with_context(|| format!("{variable} is no setting of {}", command[0]))?;
        let flag = format!("--{}", arg.get_long().context("a setting has no flag")?);
        if arg.get_action().takes_values() {
            command.extend([flag, setting.clone()]);
        } else {
            ensure!(setting == "true", "{variable} is {setting}");
            command.push(flag);
        }
    }
    Ok(command)
}

#[test]
fn settings_of_vllm_and_sglang_services_exist_and_are_valid() -> Result<()> {
    let mut roles = BTreeSet::new();
    for (name, service) in services(VLLM)?.into_iter().chain(services(SGLANG)?) {
        let is_tandem =
            service["image"].as_str().is_some_and(|image| image.contains("tandem")) && service["entrypoint"].is_null();
        if !is_tandem {
            continue;
        }
        let command = texts(&service["command"])?;
        roles.insert(command[0].clone());
        let variables = service["environment"].as_object().context("there are no settings")?.iter();
        let in_container = format!("{SETTINGS}/");
        let here = format!("{}/", deploy("mtls").display());
        let variables = variables.map(|(name, setting)| Ok((name.clone(), value(setting)?.replace(&in_container, &here))));
        let variables = variables.collect::<Result<_>>()?;
        read(with_variables(command, &variables).with_context(|| name.clone())?)?;
    }
    ensure!(roles.len() == 4, "only {roles:?} were found");
    Ok(())
}

/// Checks the engines of a file: each has one worker, as many sequences as the worker, and reaches no other process of Tandem. Returns the engines.
fn engines(file: &str, prefix: &str, sequences_flag: &str) -> Result<BTreeMap<String, Value>> {
    let (compose, services) = (compose(file)?, services(file)?);
    let on = |service: &str| names(&services[service]["networks"]);
    let engines: BTreeSet<&str> = services.keys().filter(|name| name.starts_with(prefix)).map(String::as_str).collect();
    ensure!(engines.len() == 3, "{engines:?}");
    let mut driven = BTreeSet::new();
    for (name, service) in &services {
        let command = texts(&service["command"]).unwrap_or_default();
        let Some(url) = command.iter().skip_while(|arg| *arg != "--engine-url").nth(1) else { continue };
        let engine = url
            .strip_prefix("http://")
            .and_then(|url| url.strip_suffix(":8000"))
            .context("the setting is not the URL of a service")?;
        ensure!(engines.contains(engine) && driven.insert(engine.to_owned()), "{name}: {url}");
        ensure!(!on(name).is_disjoint(&on(engine)), "{name} cannot reach {engine}");
        let sequences = &service["environment"]["TANDEM_BATCH_MAX"];
        let parts = ["entrypoint", "command"].map(|part| services[engine][part].as_array().cloned().unwrap_or_default());
        ensure!(
            parts.concat().iter().skip_while(|flag| *flag != sequences_flag).nth(1) == Some(sequences),
            "{name}: {sequences}"
        );
    }
    ensure!(driven.len() == engines.len(), "only {driven:?} have workers");
    let mut gpus = BTreeSet::new();
    for engine in &engines {
        for other in ["frontend", "router", "weights"] {
            ensure!(on(engine).is_disjoint(&on(other)), "{engine} can reach {other}");
        }
        gpus.insert(value(&services[*engine]["environment"]["CUDA_VISIBLE_DEVICES"])?);
    }
    ensure!(gpus.len() == engines.len(), "engines share {gpus:?}");
    for network in ["cluster", "engines"] {
        ensure!(compose["networks"][network]["internal"] == true, "{network} is not internal");
    }
    Ok(engines.into_iter().map(|engine| (engine.to_owned(), services[engine].clone())).collect())
}

#[test]
fn each_engine_has_one_worker_and_reaches_no_other_process_of_tandem() -> Result<()> {
    let mut hosts = BTreeSet::new();
    for (engine, service) in engines(VLLM, "vllm-", "--max-num-seqs")? {
        let host = service["environment"]["VLLM_NIXL_SIDE_CHANNEL_HOST"].as_str().context("there is no address")?;
        ensure!(service["networks"]["engines"]["ipv4_address"] == *host, "{engine}: {host} is not the engine's address");
        hosts.insert(host.to_owned());
    }
    ensure!(hosts.len() == 3, "engines share {hosts:?}");
    for (engine, service) in engines(SGLANG, "sglang-", "--max-running-requests")? {
        let mode = if engine == "sglang-prefill" { "prefill" } else { "decode" };
        ensure!(texts(&service["command"])?[..2] == ["--disaggregation-mode", mode], "{engine}");
    }
    Ok(())
}

fn run(command: &mut Command) -> Result<Output> {
    let output = command.stdin(Stdio::null()).output().with_context(|| format!("{command:?}"))?;
    ensure!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(output)
}

#[test]
fn secrets_are_random_persistent_and_owner_only() -> Result<()> {
    let (one, other) = (tempfile::tempdir()?, tempfile::tempdir()?);
    let make = |folder: &Path| run(Command::new("bash").arg(deploy("secrets.sh")).arg(folder));
    let (one, other) = (one.path().join("s"), other.path().join("s"));
    make(&one)?;
    make(&other)?;
    ensure!(fs::metadata(&one)?.permissions().mode() & 0o777 == 0o700, "other users can read the folder");
    let made = names(&compose(CLUSTER)?["secrets"]);
    ensure!(made.len() >= 5, "{made:?}");
    for name in &made {
        let secret = fs::read_to_string(one.join(name)).with_context(|| name.clone())?;
        ensure!(secret.len() >= 64 && secret != fs::read_to_string(other.join(name))?, "{name} is not random");
    }
    let nats = fs::read_to_string(one.join("nats.conf"))?;
    ensure!(nats.contains(&fs::read_to_string(one.join("nats_password"))?), "NATS does not have this password");
    make(&one)?;
    ensure!(fs::read_to_string(one.join("nats.conf"))? == nats, "a second run changes existing secrets");
    run(Command::new("nats-server").arg("-t").arg("-c").arg(one.join("nats.conf")))?;
    Ok(())
}

#[test]
fn etcd_requires_passwords_after_its_setup_script() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let secrets = folder.path().join("secrets");
    run(Command::new("bash").arg(deploy("secrets.sh")).arg(&secrets))?;
    let etcd = Server::etcd(&[]);
    let url = format!("http://{}", etcd.address());
    let enable = || {
        let mut script = Command::new("python3");
        script.arg("-B").arg(deploy("etcd_auth.py")).arg(&url);
        run(script.arg(secrets.join("etcd_root_password")).arg(secrets.join("etcd_password")))
    };
    enable()?;
    // The script must also work after the password has changed and the service has restarted.
    fs::write(secrets.join("etcd_password"), "new")?;
    enable()?;
    let check = r"
import sys; sys.path.insert(0, sys.argv[1])
from etcd_auth import ask, in_base64
url = sys.argv[2]
token = ask(url, 'auth/authenticate', {'name': 'tandem', 'password': 'new'})['token']
ask(url, 'kv/put', {'key': in_base64('/tandem/c/x'), 'value': ''}, token)
for key, token in (('/tandem/c/x', None), ('/other', token), ('/tandem0', token)):
    try:
        ask(url, 'kv/put', {'key': in_base64(key), 'value': ''}, token)
    except RuntimeError:
        continue
    sys.exit(f'{key} was written')
";
    run(Command::new("python3").args(["-B", "-c", check]).arg(deploy(".")).arg(&url))?;
    Ok(())
}
