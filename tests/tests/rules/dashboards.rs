//! Tests that every Grafana panel and every alert has data. A real Prometheus scrapes a cluster under traffic and evaluates their
//! expressions.

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, TryStreamExt};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{ErrorKind, Write};
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use tandem::settings::UpSettings;
use tandem_tests::{Client, Endpoint, TestCluster, prose, sim_settings, start, wait_until};
use tempfile::TempDir;

const REQUESTS: u64 = 500;
const CONCURRENCY: usize = 16;
const PROMPTS_MAX: u32 = 64;
/// The value of Grafana's `$__rate_interval`, which is long enough to include the scrape before the traffic.
const RATE_INTERVAL: &str = "2m";

fn deploy(file: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy").join(file)
}

fn program(name: &str) -> Command {
    let mut command = Command::new(name);
    command.stdin(Stdio::null()).current_dir(deploy("."));
    command
}

fn missing(name: &str, error: std::io::Error) -> anyhow::Error {
    match error.kind() {
        ErrorKind::NotFound => {
            anyhow::anyhow!("{name} is missing: apt-get install prometheus, or leave it out: -- --skip a_real_")
        }
        _ => anyhow::anyhow!("{name} does not start: {error}"),
    }
}

/// Runs `promtool` on files of `deploy/` or on `input`. A failure includes its output.
fn promtool(args: &[&str], input: &str) -> Result<()> {
    let mut command = program("promtool");
    command.args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut process = command.spawn().map_err(|error| missing("promtool", error))?;
    process.stdin.take().context("stdin is not piped")?.write_all(input.as_bytes())?;
    let output = process.wait_with_output()?;
    let text = [output.stdout, output.stderr].concat();
    ensure!(output.status.success(), "promtool {}:\n{}", args.join(" "), String::from_utf8_lossy(&text));
    Ok(())
}

/// A Prometheus that scrapes one page every second and evaluates the alerts. Dropping it kills it.
struct Prometheus {
    process: Child,
    http: reqwest::Client,
    address: SocketAddr,
    folder: TempDir,
}

impl Prometheus {
    async fn start(page: SocketAddr) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        // YAML includes JSON, so this configuration is written as JSON.
        let config = json!({
            "global": { "scrape_interval": "1s", "evaluation_interval": "1s" },
            "rule_files": [deploy("helm/tandem/files/alerts.yml")],
            "scrape_configs": [{ "job_name": "tandem", "static_configs": [{ "targets": [page.to_string()] }] }],
        });
        fs::write(folder.path().join("prometheus.yml"), config.to_string())?;
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let log = File::create(folder.path().join("log"))?;
        let mut command = program("prometheus");
        command.arg(format!("--config.file={}", folder.path().join("prometheus.yml").display()));
        command.arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()));
        command.arg(format!("--web.listen-address={address}"));
        let process = command.stdout(log.try_clone()?).stderr(log).spawn().map_err(|error| missing("prometheus", error))?;
        let http = reqwest::Client::builder().no_proxy().build()?;
        let prometheus = Self { process, http, address, folder };
        let scrapes =
            wait_until("Prometheus scrapes", async || Ok(prometheus.scrapes().await.is_ok_and(|scrapes| scrapes >= 1.0)));
        scrapes.await.with_context(|| fs::read_to_string(prometheus.folder.path().join("log")).unwrap_or_default())?;
        Ok(prometheus)
    }

    async fn api(&self, path: &str, params: &[(&str, &str)]) -> Result<Value> {
        let url = reqwest::Url::parse_with_params(&format!("http://{}/api/v1/{path}", self.address), params)?;
        let answer: Value = self.http.get(url).send().await?.json().await?;
        ensure!(answer["status"] == "success", "{}", answer["error"]);
        Ok(answer["data"].clone())
    }

    async fn query(&self, expr: &str) -> Result<Vec<(Value, f64)>> {
        let data = self.api("query", &[("query", expr)]).await?;
        let series = data["result"].as_array().context("the result is not a list")?.iter().map(|series| {
            let value = series["value"][1].as_str().context("the value is not a string")?;
            Ok((series["metric"].clone(), value.parse()?))
        });
        series.collect()
    }

    async fn scrapes(&self) -> Result<f64> {
        Ok(self.query("count_over_time(up[1h]) * up").await?.first().map_or(0.0, |(_, scrapes)| *scrapes))
    }
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        // Killing fails if the process has already ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// Sends request `number`. The requests cover both endpoints, streamed and not, with partly cached prompts. Some are cancelled, one is
/// invalid, and one has too many prompts.
async fn request(client: &Client, model: &str, number: u64) -> Result<()> {
    let endpoint = if number.is_multiple_of(3) { Endpoint::Chat } else { Endpoint::Completions };
    let text = prose(&(number % 40).to_string(), 40 + (number as usize * 37) % 400);
    let long = json!({ "max_tokens": 20_000, "ignore_eos": true, "stream": true });
    let (endpoint, options, status) = match number {
        100 => (endpoint, json!({ "max_tokens": -3 }), 400),
        200 => (Endpoint::Completions, json!({ "prompt": vec!["x"; PROMPTS_MAX as usize] }), 503),
        // Logprobs of the prompt are requested, so the decode worker prefills the prompt.
        _ if number % 10 == 3 => (Endpoint::Completions, json!({ "echo": true, "logprobs": 1, "max_tokens": 4 }), 200),
        _ if number % 50 == 7 => (endpoint, long.clone(), 200),
        _ => (endpoint, json!({ "max_tokens": 4 + number % 30, "stream": number.is_multiple_of(2) }), 200),
    };
    let body = endpoint.request(model, &text, options);
    if body["ignore_eos"] == true {
        client.send(endpoint.path(), &body).await?.chunk().await?;
        return Ok(());
    }
    let _leaves_too_little_capacity = match status {
        503 => Some(client.send(endpoint.path(), &endpoint.request(model, &text, long)).await?),
        _ => None,
    };
    let answer = client.answer(endpoint.path(), &body).await?;
    ensure!(answer.status == status, "request {number}: {answer:?}");
    Ok(())
}

/// Returns a cluster in which every worker has had work of every kind, and a Prometheus that has scraped it.
async fn after_traffic() -> Result<(TestCluster, Prometheus)> {
    let mut settings = UpSettings { prefill_workers: 2, decode_workers: 2, ..sim_settings() };
    settings.model.max_concurrent_requests = PROMPTS_MAX;
    // All requests come from one address, and one request uses the whole capacity, so there must be no limit per account.
    settings.frontend.limits.max_sequences_per_account = Some(0);
    let cluster = start(settings).await?;
    cluster.write_audit_result(tandem::audit::Checked::default(), 0)?;
    let prometheus = Prometheus::start(cluster.frontend()).await?;
    let (client, model) = (Client::new(cluster.frontend()), cluster.model_id());
    // A rate needs two scrapes, so the requests are sent in two halves, with scrapes after each half. A series that the first half creates
    // increases in the second half, and a series that the last request creates is scraped several times.
    for half in [0..REQUESTS / 2, REQUESTS / 2..REQUESTS] {
        let requests = futures::stream::iter(half.map(|number| request(&client, &model, number)));
        requests.buffer_unordered(CONCURRENCY).try_collect::<()>().await?;
        let scrapes = prometheus.scrapes().await?;
        wait_until("Prometheus has scraped the traffic", async || Ok(prometheus.scrapes().await? >= scrapes + 3.0)).await?;
    }
    Ok((cluster, prometheus))
}

/// Returns the problem of a panel's expression; `None` if there is none. If the panel's legend names workers, the expression must show the
/// workers `shown`.
async fn problem_of(prometheus: &Prometheus, expr: &str, legend: &str, shown: &BTreeSet<&str>) -> Option<String> {
    let series = match prometheus.query(expr).await {
        Ok(series) => series,
        Err(error) => return Some(error.to_string()),
    };
    let finite: Vec<_> = series.iter().filter(|(_, value)| value.is_finite()).collect();
    let workers: BTreeSet<_> = finite.iter().filter_map(|(labels, _)| labels["worker"].as_str()).collect();
    if finite.is_empty() {
        return Some(format!("no data: {series:?}"));
    }
    (legend.contains("{{worker}}") && workers != *shown).then(|| format!("shows only {workers:?} of {shown:?}"))
}

/// Returns the metric selectors of a PromQL expression, without their ranges.
fn selectors(expr: &str) -> Vec<&str> {
    let begin = expr.match_indices("tandem_").map(|(at, _)| &expr[at..]);
    let whole = begin.map(|rest| {
        let name = rest.find(|letter: char| !letter.is_ascii_lowercase() && letter != '_').unwrap_or(rest.len());
        let labels = if rest[name..].starts_with('{') { rest[name..].find('}').map_or(0, |end| end + 1) } else { 0 };
        &rest[..name + labels]
    });
    whole.collect()
}

async fn panels(cluster: &TestCluster, prometheus: &Prometheus) -> Result<Vec<String>> {
    let all: BTreeSet<_> = cluster.inner().workers.iter().map(|worker| worker.id.as_str()).collect();
    let mut problems = Vec::new();
    for board in ["cluster", "router", "workers"] {
        let file = fs::read_to_string(deploy(&format!("grafana/dashboards/{board}.json")))?;
        let board: Value = serde_json::from_str(&file).with_context(|| board.to_owned())?;
        let variables = board["templating"]["list"].as_array().context("the dashboard has no variables")?;
        let variables: Vec<&str> = variables.iter().filter_map(|variable| variable["name"].as_str()).collect();
        if !variables.starts_with(&["datasource", "cluster", "namespace"]) {
            problems.push(format!("{} has the variables {variables:?}", board["title"]));
        }
        let panels = board["panels"].as_array().context("the dashboard has no panels")?;
        for panel in panels.iter().filter(|panel| panel["type"] != "row") {
            let name = format!("{}, {}", board["title"], panel["title"]);
            let text = |pointer: &str| panel.pointer(pointer).and_then(Value::as_str).is_some_and(|text| !text.is_empty());
            if !text("/description") || !text("/fieldConfig/defaults/unit") || panel["datasource"]["uid"] != "${datasource}" {
                problems.push(format!("{name} needs a description, a unit and the data source `${{datasource}}`"));
            }
            for target in panel["targets"].as_array().context("the panel has no targets")? {
                let (expr, legend) =
                    (target["expr"].as_str().context("the expression is not a string")?, &target["legendFormat"]);
                let chosen = r#"cluster=~"$cluster", namespace=~"$namespace""#;
                problems.extend(
                    { selectors(expr).into_iter() }
                        .filter(|selector| !selector.contains(chosen))
                        .map(|selector| format!("{name}: {selector} is not limited to the chosen clusters")),
                );
                // The tested cluster has neither label, as without a Prometheus that sets them.
                let expr = expr.replace("$__rate_interval", RATE_INTERVAL).replace("$cluster", ".*").replace("$namespace", ".*");
                // A panel that is repeated for each worker shows one worker at a time.
                let choices: Vec<&str> = if panel["repeat"] == "worker" { all.iter().copied().collect() } else { vec![".*"] };
                for choice in choices {
                    let expr = expr.replace("$worker", choice);
                    let legend = legend.as_str().unwrap_or_default();
                    problems
                        .extend(problem_of(prometheus, &expr, legend, &all).await.map(|what| format!("{name}: {expr}: {what}")));
                }
            }
        }
    }
    Ok(problems)
}

async fn alerts(prometheus: &Prometheus) -> Result<Vec<String>> {
    let runbook = fs::read_to_string(deploy("README.md"))?;
    let rules = prometheus.api("rules", &[]).await?;
    let groups = rules["groups"].as_array().context("the groups of rules are not a list")?;
    let mut problems = Vec::new();
    for rule in groups.iter().flat_map(|group| group["rules"].as_array().into_iter().flatten()) {
        let (name, expr) = (
            rule["name"].as_str().context("the name is not a string")?,
            rule["query"].as_str().context("the expression is not a string")?,
        );
        if rule["health"] != "ok" {
            problems.push(format!("{name} is {}: {}", rule["health"], rule["lastError"]));
        }
        let is_set = |key: &str| rule["annotations"][key].as_str().is_some_and(|text| !text.is_empty());
        if !["summary", "description", "action"].into_iter().all(is_set) || !rule["labels"]["severity"].is_string() {
            problems.push(format!("{name} needs a severity, a summary, a description and an action"));
        }
        if !runbook.contains(&format!("| `{name}` |")) {
            problems.push(format!("{name} has no row in deploy/README.md"));
        }
        // In a healthy cluster an alert's expression has no data, but each of its selectors has data.
        for selector in selectors(expr) {
            problems.extend(
                problem_of(prometheus, selector, "", &BTreeSet::new()).await.map(|what| format!("{name}: {selector}: {what}")),
            );
        }
    }
    ensure!(groups.len() >= 4, "alerts.yml was not read: {rules}");
    Ok(problems)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_panel_and_alert_has_data_in_a_real_prometheus() -> Result<()> {
    let (cluster, prometheus) = after_traffic().await?;
    let mut problems = panels(&cluster, &prometheus).await?;
    problems.extend(alerts(&prometheus).await?);
    ensure!(problems.is_empty(), "{}", problems.join("\n"));
    promtool(&["check", "metrics"], &Client::new(cluster.frontend()).get("/metrics").await?.1)?;
    cluster.stop().await;
    Ok(())
}

#[test]
fn promtool_accepts_the_configuration_and_each_alert_fires() -> Result<()> {
    promtool(&["check", "config", "--syntax-only", "prometheus.yml"], "")?;
    promtool(&["check", "rules", "helm/tandem/files/alerts.yml"], "")?;
    promtool(&["test", "rules", "alerts_test.yml"], "")
}
