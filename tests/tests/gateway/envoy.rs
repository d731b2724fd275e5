//! A real Envoy in front of the picker, with the configuration in deploy/gateway. Needs the program in the variable TANDEM_ENVOY, which ci/epp.sh
//! sets; without it, the test is skipped.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a skipped test must be visible, and figures are for the reader")]

use crate::rig::{Gateway, LIMIT, until};
use anyhow::{Context, Result, ensure};
use reqwest::{Client, Response, StatusCode};
use serde_json::{Value, json};
use std::{
    fs,
    process::{Child, Command, Stdio},
    time::Duration,
};
use tandem_tests::{
    fake_vllm::{FakeSettings, FakeVllm},
    workspace::root,
};
use tokio::{net::TcpListener, time::Instant};

/// A running Envoy. Dropping this value ends it.
struct Envoy {
    child: Child,
    /// The port whose requests ask the picker, and the port whose requests name their server.
    ports: [u16; 2],
    _folder: tempfile::TempDir,
}

impl Drop for Envoy {
    fn drop(&mut self) {
        self.child.kill().ok();
        self.child.wait().ok();
    }
}

impl Envoy {
    async fn start(program: &str, picker: u16) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut ports = [0; 2];
        for port in &mut ports {
            *port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        }
        let config = fs::read_to_string(root().join("deploy/gateway/envoy.yaml"))?;
        let config = config.replace("port_value: 8080", &format!("port_value: {}", ports[0]));
        let config = config.replace("port_value: 9002", &format!("port_value: {picker}"));
        // The second listener has neither the picker nor the filter that removes the client's header.
        let (start, end) =
            (config.find("    - name: clients").context("the listener")?, config.find("  clusters:").context("the end")?);
        let plain =
            config[start..end].replace("name: clients", "name: plain").replace(&ports[0].to_string(), &ports[1].to_string());
        let (filters, router) = ("                  # Otherwise", "                  - name: envoy.filters.http.router");
        let cut = plain.find(filters).context("the first filter")?..plain.find(router).context("the router")?;
        let plain = plain[..cut.start].to_owned() + &plain[cut.end..];
        let path = folder.path().join("envoy.yaml");
        fs::write(&path, config[..end].to_owned() + &plain + &config[end..])?;
        let mut command = Command::new(program);
        command.args(["--concurrency", "1", "--disable-hot-restart", "--log-level", "warn", "-c"]).arg(&path);
        let child = command.stdout(Stdio::null()).spawn().with_context(|| format!("{program} does not start"))?;
        let envoy = Self { child, ports, _folder: folder };
        for port in ports {
            until("Envoy listens", async || Ok(tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok())).await?;
        }
        Ok(envoy)
    }

    async fn post(&self, client: &Client, body: String) -> Result<Response> {
        let url = format!("http://127.0.0.1:{}/v1/completions", self.ports[0]);
        Ok(client.post(url).header("content-type", "application/json").body(body).timeout(LIMIT).send().await?)
    }

    /// Returns the processor time of a process so far.
    fn cpu(pid: u32) -> Result<Duration> {
        let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
        let fields: Vec<&str> = stat.rsplit_once(')').context("the process's name")?.1.split_whitespace().collect();
        let ticks: u64 = fields[11].parse::<u64>()? + fields[12].parse::<u64>()?;
        Ok(Duration::from_millis(ticks * 10))
    }

    /// Sends requests one after the other, and prints the times to their first chunks and the processor time of each.
    async fn measure(&self, client: &Client, name: &str, port: u16, endpoint: Option<&str>) -> Result<()> {
        const REQUESTS: u32 = 300;
        let own = std::process::id();
        let before = (Self::cpu(self.child.id())?, Self::cpu(own)?);
        let mut times = Vec::new();
        for number in 0..REQUESTS {
            let body = json!({ "model": "fake", "prompt": format!("{} {number}", "word ".repeat(400)), "max_tokens": 12, "stream": true });
            let mut request = client.post(format!("http://127.0.0.1:{port}/v1/completions")).json(&body).timeout(LIMIT);
            if let Some(endpoint) = endpoint {
                request = request.header("x-gateway-destination-endpoint", endpoint);
            }
            let since = Instant::now();
            let mut answer = request.send().await?;
            answer.chunk().await?.context("the answer is empty")?;
            times.push(since.elapsed());
            while answer.chunk().await?.is_some() {}
        }
        times.sort_unstable();
        let each = |now: Duration, then: Duration| (now - then).as_secs_f64() * 1e3 / f64::from(REQUESTS);
        let quantile = |part: f64| times[(part * (times.len() - 1) as f64) as usize].as_secs_f64() * 1e3;
        println!(
            "{name}: first chunk p50 {:.2} ms, p90 {:.2} ms; CPU a request: Envoy {:.2} ms, picker, client and servers {:.2} ms",
            quantile(0.5),
            quantile(0.9),
            each(Self::cpu(self.child.id())?, before.0),
            each(Self::cpu(own)?, before.1)
        );
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_sends_each_request_to_the_server_that_the_picker_chooses() -> Result<()> {
    let Ok(program) = std::env::var("TANDEM_ENVOY") else {
        eprintln!("SKIPPED: needs Envoy; ci/epp.sh installs it and runs this test");
        return Ok(());
    };
    let gateway = Gateway::with(2, FakeSettings::default(), |_| {}).await?;
    let envoy = Envoy::start(&program, gateway.cluster.frontend.port()).await?;
    let client = Client::new();
    let counts = || gateway.engines.iter().map(|engine| engine.seen().len()).collect::<Vec<_>>();
    let ask = async |prompt: String| {
        let before = counts();
        let answer = envoy.post(&client, json!({ "model": "fake", "prompt": prompt, "max_tokens": 4 }).to_string()).await?;
        ensure!(answer.status() == StatusCode::OK, "{}", answer.status());
        let usage: Value = answer.json::<Value>().await?["usage"].clone();
        gateway.indexed().await?;
        let engine = (0..2).find(|at| counts()[*at] > before[*at]).context("no engine has the request")?;
        anyhow::Ok((engine, usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)))
    };
    let mut engines = [0; 2];
    for number in 0..8 {
        let document = format!("document {number}: {}", format!("word{number} ").repeat(40));
        let (first, _) = ask(format!("{document}first")).await?;
        engines[first] += 1;
        for question in 0..4 {
            let (engine, cached) = ask(format!("{document}question {question}")).await?;
            assert_eq!(engine, first, "document {number}");
            assert!(cached >= document.len() as u64 / 32 * 32, "{cached} cached tokens of {}", document.len());
        }
    }
    assert!(engines.iter().all(|count| *count > 0), "{engines:?}");

    for bytes in [300 << 10, (10 << 20) - 100] {
        let body = json!({ "model": "fake", "prompt": "a", "max_tokens": 1, "user": "x".repeat(bytes) }).to_string();
        assert_eq!(envoy.post(&client, body).await?.status(), StatusCode::OK, "{bytes} bytes");
    }
    let large = json!({ "model": "fake", "prompt": "a", "user": "x".repeat(10 << 20) }).to_string();
    assert_eq!(envoy.post(&client, large).await?.status(), StatusCode::PAYLOAD_TOO_LARGE);
    let refused: Value = envoy.post(&client, "no JSON".to_owned()).await?.json().await?;
    assert_eq!(refused["error"]["message"], "not JSON", "the server answers");

    let streamed = json!({ "model": "fake", "prompt": "a", "max_tokens": 3_000, "stream": true }).to_string();
    let mut answer = envoy.post(&client, streamed).await?;
    answer.chunk().await?.context("the answer is empty")?;
    assert_eq!(gateway.bookings().await?, 1);
    drop(answer);
    until("the booking of a client that left has ended", async || Ok(gateway.bookings().await? == 0)).await?;

    let plain = gateway.endpoint(0);
    envoy.measure(&client, "without the picker", envoy.ports[1], Some(&plain)).await?;
    envoy.measure(&client, "with the picker", envoy.ports[0], None).await?;

    let running: usize = gateway.engines.iter().map(FakeVllm::running).sum();
    assert_eq!(running, 0);
    gateway.cluster.stop().await;
    let failed = envoy.post(&client, json!({ "model": "fake", "prompt": "a" }).to_string()).await?.status();
    assert!(failed.is_server_error(), "the picker has ended: {failed}");
    Ok(())
}
