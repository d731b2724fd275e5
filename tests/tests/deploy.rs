//! Checks that all services of `deploy/docker-compose.yml` are hardened. The scripts for passwords run against a real etcd and a real NATS.

#[path = "../../node/tests/servers/mod.rs"]
mod servers;

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use servers::Server;
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    process::{Command, Output, Stdio},
};
use tandem::model::Source;

/// The depth of nested merge keys: hardened, tandem, prefill, prefill-2.
const MERGES_MAX: usize = 4;

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file)
}

/// Returns the compose file with resolved anchors and merge keys; variables are not replaced.
fn compose() -> Result<Value> {
    let mut yaml: yaml_serde::Value = yaml_serde::from_str(&fs::read_to_string(deploy("docker-compose.yml"))?)?;
    // Each round resolves one level of nested merge keys.
    for _ in 0..MERGES_MAX {
        yaml.apply_merge()?;
    }
    Ok(serde_json::to_value(yaml)?)
}

fn services() -> Result<BTreeMap<String, Value>> {
    let services = compose()?["services"].as_object().context("a map of services")?.clone();
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
    for (name, service) in services()? {
        ensure!(service["read_only"] == true, "{name}: read_only");
        ensure!(service["cap_drop"] == serde_json::json!(["ALL"]), "{name}: cap_drop");
        ensure!(service["security_opt"] == serde_json::json!(["no-new-privileges:true"]), "{name}: security_opt");
        ensure!(service["pids_limit"].is_u64(), "{name}: pids_limit");
        ensure!(service["mem_limit"].is_string(), "{name}: mem_limit");
        ensure!(!names(&service["networks"]).is_empty(), "{name}: it is on the default network");
        ensure!(service["privileged"].is_null() && service["cap_add"].is_null(), "{name}: it adds rights again");
        let image = service["image"].as_str().context("an image")?;
        ensure!(image.starts_with("${"), "{name}: {image} cannot be set to a digest");
        for port in service["ports"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            ensure!(port.contains(":-127.0.0.1:"), "{name}: {port} is open to other hosts by default");
        }
    }
    Ok(())
}

#[test]
fn networks_separate_services_that_do_not_communicate() -> Result<()> {
    let (compose, services) = (compose()?, services()?);
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
fn serving_processes_have_secrets_and_a_pinned_model_and_download_nothing() -> Result<()> {
    let services = services()?;
    let model = format!("${{TANDEM_MODEL:-{}}}", Source::default());
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
        ensure!(!service["volumes"].as_array().context("volumes")?.iter().any(writable), "{name} may write to a volume");
    }
    Ok(())
}

/// Runs a command to its end; a failure includes its output.
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
    let made = names(&compose()?["secrets"]);
    ensure!(made.len() >= 5, "{made:?}");
    for name in &made {
        let secret = fs::read_to_string(one.join(name)).with_context(|| name.clone())?;
        ensure!(secret.len() >= 64 && secret != fs::read_to_string(other.join(name))?, "{name} is not random");
    }
    let nats = fs::read_to_string(one.join("nats.conf"))?;
    ensure!(nats.contains(&fs::read_to_string(one.join("nats_password"))?), "NATS has another password");
    make(&one)?;
    ensure!(fs::read_to_string(one.join("nats.conf"))? == nats, "a second run changes existing secrets");
    run(Command::new("nats-server").arg("-t").arg("-c").arg(one.join("nats.conf")))?;
    Ok(())
}

#[test]
fn etcd_requires_passwords_after_etcd_auth() -> Result<()> {
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
    // The script must also work after a change of the password, when the service restarts.
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
