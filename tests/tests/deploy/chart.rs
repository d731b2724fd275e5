//! Checks the manifests that ci/helm.sh renders from the Helm chart, with each of its files of values.

use super::{CLUSTER, SGLANG, VLLM, compose, deploy, names, read, value, with_variables};
use anyhow::{Context, Result, ensure};
use serde::Deserialize;
use serde_json::{Value, json};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    net::TcpListener,
    time::Duration,
};
use tandem::{Process, ServedProcess, cli, cli::Cli};
use tandem_proto::channel::{Peer, PeerRole};
use tandem_tests::{Client, sim_settings, start};

/// The folder of the rendered manifests, which ci/test.sh sets.
const FOLDER: &str = "TANDEM_CHART_MANIFESTS";
/// The kinds of objects that contain a pod's template.
const WORKLOADS: [&str; 3] = ["Deployment", "StatefulSet", "Job"];
/// The folder of Secrets in containers.
const SECRETS: &str = "/run/secrets/";
/// The label that names a pod's component.
const COMPONENT: &str = "app.kubernetes.io~1component";

/// The objects that one file of values yields.
struct Rendering {
    values: String,
    objects: Vec<Value>,
}

impl Rendering {
    fn of_kind<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = &'a Value> {
        self.objects.iter().filter(move |object| object["kind"] == *kind)
    }

    /// Returns each workload's name, and the specification of its pods.
    fn pods(&self) -> impl Iterator<Item = (String, &Value)> {
        let workloads = self.objects.iter().filter(|object| WORKLOADS.iter().any(|kind| object["kind"] == **kind));
        workloads.map(|object| {
            (format!("{}: {}", self.values, text(&object["metadata"]["name"])), &object["spec"]["template"]["spec"])
        })
    }
}

/// Returns all renderings. Without the folder, prints that the test is skipped and returns `None`.
fn renderings() -> Result<Option<Vec<Rendering>>> {
    let Ok(folder) = std::env::var(FOLDER) else {
        #[expect(clippy::print_stderr, reason = "a skipped test must be visible")]
        {
            eprintln!("SKIPPED: needs the rendered chart; run ci/helm.sh and set {FOLDER} to the folder that it prints");
        }
        return Ok(None);
    };
    let mut renderings = Vec::new();
    for file in fs::read_dir(&folder).with_context(|| folder.clone())? {
        let path = file?.path();
        let content = fs::read_to_string(&path)?;
        let documents = yaml_serde::Deserializer::from_str(&content).map(Option::<Value>::deserialize);
        let objects = documents.collect::<Result<Vec<_>, _>>()?.into_iter().flatten().collect();
        renderings.push(Rendering { values: path.file_stem().unwrap_or_default().to_string_lossy().into_owned(), objects });
    }
    ensure!(renderings.len() >= 6, "only {} renderings are in {folder}", renderings.len());
    Ok(Some(renderings))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map_or(&[], Vec::as_slice)
}

fn containers(pod: &Value) -> impl Iterator<Item = &Value> {
    list(&pod["initContainers"]).iter().chain(list(&pod["containers"]))
}

/// Returns the arguments of a container. Kubernetes replaces the variables in them.
fn arguments(container: &Value) -> Vec<String> {
    let replaced = |arg: &Value| text(arg).replace("$(POD_NAME)", "test-tandem-decode-0").replace("$(POD_IP)", "10.1.2.3");
    list(&container["args"]).iter().map(replaced).collect()
}

/// Returns the value of a flag, as `--flag=value`.
fn flag<'a>(arguments: &'a [String], name: &str) -> Option<&'a str> {
    arguments.iter().find_map(|arg| arg.strip_prefix(name)?.strip_prefix('='))
}

fn port(address: &str) -> Result<u64> {
    Ok(address.rsplit_once(':').context("the address has no port")?.1.parse()?)
}

/// Returns the number of a container's port with this name.
fn port_named(container: &Value, name: &str) -> Result<u64> {
    let port = list(&container["ports"]).iter().find(|port| port["name"] == *name).with_context(|| format!("the port {name}"))?;
    port["containerPort"].as_u64().context("the value is not a number")
}

#[test]
fn settings_and_ports_of_the_chart_exist_in_the_product() -> Result<()> {
    let Some(renderings) = renderings()? else { return Ok(()) };
    let secrets = tempfile::tempdir()?;
    let mut roles = BTreeSet::new();
    for (name, pod) in renderings.iter().flat_map(Rendering::pods) {
        for container in containers(pod).filter(|container| text(&container["image"]).contains("tandem:")) {
            let mut args = arguments(container);
            if args.is_empty() {
                continue;
            }
            // Files with secrets are read together with the settings.
            for arg in &mut args {
                let Some((flag, file)) = arg.split_once(SECRETS) else { continue };
                let file = secrets.path().join(file);
                fs::create_dir_all(file.parent().context("the value is not a folder")?)?;
                fs::write(&file, "x")?;
                *arg = format!("{flag}{}", file.display());
            }
            if container["name"] != "tandem" {
                if container["command"].is_null() {
                    read(args).with_context(|| name.clone())?;
                }
                continue;
            }
            roles.insert(args[0].clone());
            let variables = list(&container["env"]).iter().filter(|variable| text(&variable["name"]).starts_with("TANDEM_"));
            let variables = variables.map(|variable| (text(&variable["name"]).to_owned(), text(&variable["value"]).to_owned()));
            read(with_variables(args.clone(), &variables.collect()).with_context(|| name.clone())?)?;

            let service = if args[0] == "frontend" { "http" } else { "grpc" };
            for (name_of_port, setting) in [(service, "--listen"), ("admin", "--admin-listen")] {
                let listens = port(flag(&args, setting).context("the value is not an address")?)?;
                ensure!(port_named(container, name_of_port)? == listens, "{name}: {name_of_port} is not {listens}");
            }
            for (probe, path) in [("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", "/ready")] {
                ensure!(container[probe]["httpGet"] == json!({ "path": path, "port": "admin" }), "{name}: {probe}");
            }
            let grace: u64 = flag(&args, "--grace-period").context("there is no grace period")?.parse()?;
            let stop = &container["lifecycle"]["preStop"]["exec"]["command"][1];
            let stop: u64 = if stop.is_null() { 0 } else { text(stop).parse()? };
            let given = pod["terminationGracePeriodSeconds"].as_u64().context("the value is not a number")?;
            ensure!(given > grace + stop, "{name}: {given} s end before the process has drained");
        }
    }
    ensure!(roles.len() == 5, "only {roles:?} were found");
    Ok(())
}

#[test]
fn pods_of_the_chart_have_no_privileges_and_bounded_memory() -> Result<()> {
    let Some(renderings) = renderings()? else { return Ok(()) };
    for (name, pod) in renderings.iter().flat_map(Rendering::pods) {
        ensure!(pod["securityContext"]["runAsNonRoot"] == true, "{name}: runAsNonRoot");
        ensure!(pod["securityContext"]["seccompProfile"]["type"] == "RuntimeDefault", "{name}: seccompProfile");
        ensure!(pod["automountServiceAccountToken"] == false && pod["enableServiceLinks"] == false, "{name}: tokens and links");
        for shared in ["hostNetwork", "hostPID", "hostIPC"] {
            ensure!(pod[shared].is_null(), "{name}: {shared}");
        }
        for volume in list(&pod["volumes"]) {
            let kinds = names(volume).into_iter().filter(|key| key != "name").collect::<Vec<_>>();
            ensure!(
                kinds.iter().all(|kind| ["emptyDir", "secret", "configMap", "persistentVolumeClaim"].contains(&&**kind)),
                "{name}: {kinds:?}"
            );
        }
        for container in containers(pod) {
            let (security, called) = (&container["securityContext"], text(&container["name"]));
            ensure!(security["readOnlyRootFilesystem"] == true, "{name}, {called}: readOnlyRootFilesystem");
            ensure!(security["allowPrivilegeEscalation"] == false, "{name}, {called}: allowPrivilegeEscalation");
            ensure!(security["capabilities"]["drop"] == json!(["ALL"]), "{name}, {called}: capabilities");
            ensure!(security["privileged"].is_null(), "{name}, {called}: privileged");
            ensure!(container["resources"]["limits"]["memory"].is_string(), "{name}, {called}: no memory limit");
            // Serving processes read models only, unless a frontend downloads its tokenizer itself.
            let writes = |mount: &Value| mount["name"] == "models" && mount["readOnly"] != true;
            let tokenizes = |arg: &String| ["--engine=vllm", "--engine=sglang"].contains(&&**arg);
            let serves = called == "tandem" && !arguments(container).iter().any(tokenizes);
            ensure!(!serves || !list(&container["volumeMounts"]).iter().any(writes), "{name}, {called} may write to the models");
        }
    }
    Ok(())
}

#[test]
fn static_addresses_of_the_chart_belong_to_its_pods() -> Result<()> {
    let Some(renderings) = renderings()? else { return Ok(()) };
    let mut checked = 0;
    for rendering in &renderings {
        let files = rendering.of_kind("ConfigMap").flat_map(|map| text(&map["data"]["workers"]).lines().map(str::to_owned));
        let all_args = rendering.pods().flat_map(|(_, pod)| containers(pod).map(arguments).collect::<Vec<_>>());
        let listed = all_args.flat_map(|args| {
            let lists = ["--router", "--peers"].into_iter().filter_map(|name| flag(&args, name)).collect::<Vec<_>>().join(",");
            lists.split(',').filter(|address| !address.is_empty()).map(str::to_owned).collect::<Vec<_>>()
        });
        for address in files.chain(listed) {
            let (host, number) = address.split_once(':').context("the address has no port")?;
            let (pod, service) = host.split_once('.').context("the address does not name a pod and a Service")?;
            let (set, ordinal) = pod.rsplit_once('-').context("the pod's name has no number")?;
            let set = rendering.of_kind("StatefulSet").find(|object| object["metadata"]["name"] == *set);
            let spec = &set.with_context(|| format!("{}: {address} is of no StatefulSet", rendering.values))?["spec"];
            let scaler =
                rendering.of_kind("HorizontalPodAutoscaler").find(|scaler| scaler["metadata"]["name"] == spec["serviceName"]);
            let replicas = scaler.map_or(&spec["replicas"], |scaler| &scaler["spec"]["maxReplicas"]);
            ensure!(
                ordinal.parse::<u64>()? < replicas.as_u64().context("the value is not a number")?,
                "{address} does not exist"
            );
            ensure!(spec["serviceName"] == *service, "{address} is not a name in {}", spec["serviceName"]);
            let container = containers(&spec["template"]["spec"]).find(|container| container["name"] == "tandem");
            ensure!(port_named(container.context("a container")?, "grpc")?.to_string() == number, "{address}: the port");
            checked += 1;
        }
    }
    ensure!(checked >= 30, "only {checked} addresses were found");
    Ok(())
}

#[test]
fn each_pod_of_the_chart_has_the_certificate_of_its_own_role() -> Result<()> {
    // An endpoint picker calls routers as a frontend does.
    const SECRET_OF_ROLE: [(&str, &str); 6] = [
        ("frontend", "frontend"),
        ("frontend", "epp"),
        ("router", "router"),
        ("prefill", "prefill-worker"),
        ("decode", "decode-worker"),
        ("tool", "tool"),
    ];
    let Some(renderings) = renderings()? else { return Ok(()) };
    let (mut mounted, mut made) = (0, 0);
    for rendering in &renderings {
        for (name, pod) in rendering.pods() {
            let container = containers(pod).find(|container| container["name"] == "tandem");
            let Some(args) = container.map(arguments).filter(|args| flag(args, "--cluster-cert").is_some()) else { continue };
            for (setting, file) in [("--cluster-cert", "tls.crt"), ("--cluster-cert-key", "tls.key"), ("--cluster-ca", "ca.crt")]
            {
                ensure!(flag(&args, setting) == Some(&*format!("{SECRETS}cluster-tls/{file}")), "{name}: {setting}");
            }
            let volume =
                list(&pod["volumes"]).iter().find(|volume| volume["name"] == "cluster-tls").context("there is no volume")?;
            let (_, component) = text(&volume["secret"]["secretName"]).rsplit_once('-').context("the volume names no Secret")?;
            ensure!(SECRET_OF_ROLE.contains(&(component, &args[0])), "{name} has the certificate {volume}");
            mounted += 1;
        }
        for certificate in rendering.of_kind("Certificate").filter(|certificate| certificate["spec"]["isCA"].is_null()) {
            let (spec, cluster) = (&certificate["spec"], text(&certificate["metadata"]["name"]));
            let (cluster, component) = cluster.rsplit_once('-').context("the name does not have a cluster and a component")?;
            let role = SECRET_OF_ROLE.into_iter().find(|(secret, _)| *secret == component).context("there is no role")?.1;
            let role = PeerRole::ALL.into_iter().find(|known| known.name() == role).context("no process has this role")?;
            let peer = Peer { cluster: cluster.to_owned(), role };
            ensure!(spec["uris"] == json!([peer.uri("tandem.internal")]), "{spec}");
            ensure!(text(&spec["secretName"]) == format!("{cluster}-cert-{component}"), "{spec}");
            made += 1;
        }
    }
    ensure!(mounted == 11 && made == 5, "{mounted} pods have certificates, {made} certificates are made");
    Ok(())
}

/// Whether a rule of a policy permits this peer and this port.
fn permits(rule: &Value, peers: &str, component: &str, port: u64) -> bool {
    let component_of =
        |peer: &Value| peer.pointer(&format!("/podSelector/matchLabels/{COMPONENT}")).is_some_and(|name| *name == *component);
    let is_peer = rule[peers].is_null() || list(&rule[peers]).iter().any(component_of);
    is_peer && (rule["ports"].is_null() || list(&rule["ports"]).iter().any(|permitted| permitted["port"] == port))
}

#[test]
fn network_policies_permit_the_calls_of_the_product_and_no_others() -> Result<()> {
    const PORTS: [(&str, u64); 13] = [
        ("frontend", 8000),
        ("frontend", 9300),
        ("epp", 9002),
        ("epp", 9300),
        ("decode", 8000),
        ("router", 7000),
        ("router", 9000),
        ("prefill", 7100),
        ("prefill", 9100),
        ("decode", 7200),
        ("decode", 9200),
        ("etcd", 2379),
        ("nats", 4222),
    ];
    const CALLS: [(&str, u64); 16] = [
        ("frontend", 7000),
        ("epp", 7000),
        ("epp", 2379),
        ("router", 7000),
        ("frontend", 7200),
        ("router", 7200),
        ("prefill", 7200),
        ("router", 7100),
        ("decode", 7100),
        ("frontend", 2379),
        ("router", 2379),
        ("prefill", 2379),
        ("decode", 2379),
        ("router", 4222),
        ("prefill", 4222),
        ("decode", 4222),
    ];
    let Some(renderings) = renderings()? else { return Ok(()) };
    for rendering in &renderings {
        let selected = |policy: &Value| {
            policy.pointer(&format!("/spec/podSelector/matchLabels/{COMPONENT}")).map(|name| text(name).to_owned())
        };
        let policies: BTreeMap<String, &Value> =
            rendering.of_kind("NetworkPolicy").filter_map(|policy| Some((selected(policy)?, &policy["spec"]))).collect();
        ensure!(policies.len() >= 4, "{}: only {:?} have policies", rendering.values, policies.keys());
        let all = rendering.pods().flat_map(|(_, pod)| containers(pod).map(arguments).collect::<Vec<_>>());
        let open = all.into_iter().any(|args| {
            ["--engine=cuda", "--engine-kv-connector=nixl", "--engine-url=http://10.1.2.3:8000"]
                .iter()
                .any(|flag| args.iter().any(|arg| arg == flag))
        });
        for (from, caller) in &policies {
            for (to, port) in PORTS {
                let Some(called) = policies.get(to) else { continue };
                let leaves = list(&caller["egress"]).iter().any(|rule| permits(rule, "to", to, port));
                let arrives = list(&called["ingress"]).iter().any(|rule| permits(rule, "from", from, port));
                // Engines on GPUs move KV on ports that they choose.
                let is_worker = |component: &str| ["prefill", "decode"].contains(&component);
                let expected = CALLS.contains(&(from, port)) || (open && is_worker(from) && is_worker(to));
                let context = format!("{}: from {from} to port {port} of {to}", rendering.values);
                ensure!((leaves && arrives) == expected, "{context}: {leaves} and {arrives} instead of {expected}");
            }
        }
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_and_health_paths_of_the_chart_exist_in_the_product() -> Result<()> {
    let Some(renderings) = renderings()? else { return Ok(()) };
    let cluster = start(sim_settings()).await?;
    let client = Client::new(cluster.frontend());
    let served = client.get("/metrics").await?.1;
    let mut metrics = BTreeSet::new();
    for rendering in &renderings {
        for scaler in rendering.of_kind("HorizontalPodAutoscaler") {
            let named = list(&scaler["spec"]["metrics"]).iter().filter(|metric| metric["type"] == "Pods");
            metrics.extend(named.map(|metric| text(&metric["pods"]["metric"]["name"]).to_owned()));
        }
        for monitor in rendering.of_kind("ServiceMonitor") {
            let endpoint = &monitor["spec"]["endpoints"][0];
            ensure!(endpoint["path"] == "/metrics" && endpoint["port"] == "admin", "{endpoint}");
            let has_port = |service: &&Value| list(&service["spec"]["ports"]).iter().any(|port| port["name"] == "admin");
            let roles =
                rendering.pods().filter(|(_, pod)| containers(pod).any(|container| port_named(container, "admin").is_ok()));
            ensure!(
                rendering.of_kind("Service").filter(has_port).count() == roles.count(),
                "{}: not all roles have metrics",
                rendering.values
            );
        }
        for rules in rendering.of_kind("PrometheusRule") {
            let alerts: Value = yaml_serde::from_str(&fs::read_to_string(deploy("helm/tandem/files/alerts.yml"))?)?;
            ensure!(rules["spec"] == alerts, "{}: the alerts are not those of its file", rendering.values);
        }
    }
    ensure!(!metrics.is_empty(), "no rendering has a metric");
    for metric in metrics {
        ensure!(served.contains(&format!("\n{metric}{{worker=")), "{metric} does not exist");
    }
    for path in ["/live", "/ready"] {
        ensure!(client.get(path).await?.0 == 200, "the frontend has no {path}");
    }
    cluster.stop().await;

    let admin = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
    let args = ["tandem", "router", "--listen=127.0.0.1:0", &format!("--admin-listen={admin}")].map(Into::into).to_vec();
    let cli::Command::Router(router) = Cli::read(args, None)?.command else { anyhow::bail!("the command is not router") };
    let process = Process::router(router.role).await?;
    let client = Client::new(admin);
    for (path, status) in [("/live", 200), ("/ready", 503), ("/metrics", 200)] {
        ensure!(client.get(path).await?.0 == status, "the router's {path}");
    }
    process.drain(Duration::ZERO).await;
    Ok(())
}

#[test]
fn images_of_the_chart_are_those_that_the_dockerfile_builds() -> Result<()> {
    let values: Value = yaml_serde::from_str(&fs::read_to_string(deploy("helm/tandem/values.yaml"))?)?;
    let dockerfile = fs::read_to_string(deploy("Dockerfile"))?;
    for (target, image) in [("cpu", "tandem:cpu"), ("fetch", "tandem:fetch"), ("cuda", "tandem:cuda")] {
        ensure!(values["images"][target] == *image, "{target} is {}", values["images"][target]);
        ensure!(dockerfile.contains(&format!(" AS {target}\n")), "the Dockerfile has no target {target}");
    }
    let user = format!("--uid {}", values["podSecurityContext"]["runAsUser"]);
    ensure!(dockerfile.contains(&user), "the Dockerfile's user is not that of {user}");
    for (file, service, image) in [
        (VLLM, "vllm-prefill", "vllm"),
        (SGLANG, "sglang-prefill", "sglang"),
        (CLUSTER, "etcd", "etcd"),
        (CLUSTER, "nats", "nats"),
    ] {
        let set = value(&compose(file)?["services"][service]["image"])?;
        ensure!(values["images"][image] == *set, "{image} is {} here and {set} in {file}", values["images"][image]);
    }
    Ok(())
}
