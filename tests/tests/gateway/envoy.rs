//! A real Envoy in front of the picker, with the configuration in deploy/gateway. Needs the program in the variable TANDEM_ENVOY, which ci/epp.sh
//! sets; without it, the test is skipped.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a skipped test must be visible, and figures are for the reader")]

use crate::{
    encrypted::self_signed,
    reference,
    rig::{DESTINATION, Gateway, LIMIT, until},
};
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
    /// Starts Envoy with the configuration in deploy/gateway, and these further settings of the picker's cluster.
    async fn start(program: &str, picker: u16, further: &str) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let mut ports = [0; 2];
        for port in &mut ports {
            *port = TcpListener::bind("127.0.0.1:0").await?.local_addr()?.port();
        }
        let config = fs::read_to_string(root().join("deploy/gateway/envoy.yaml"))?;
        let config = config.replace("port_value: 8080", &format!("port_value: {}", ports[0]));
        let config = config.replace("port_value: 9002", &format!("port_value: {picker}"));
        let (before, after) = config.split_once("      load_assignment:").context("the picker's cluster")?;
        let config = format!("{before}{further}      load_assignment:{after}");
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
}

/// A way of requests to the servers, and what was measured on it.
struct Way<'a> {
    name: &'static str,
    envoy: &'a Envoy,
    port: u16,
    /// The server of all requests, if no picker chooses it.
    endpoint: Option<String>,
    times: Vec<Duration>,
    /// The processor time of Envoy, and of this process.
    cpu: [Duration; 2],
}

impl<'a> Way<'a> {
    fn new(name: &'static str, envoy: &'a Envoy, endpoint: Option<String>) -> Self {
        let port = envoy.ports[usize::from(endpoint.is_some())];
        Self { name, envoy, port, endpoint, times: Vec::new(), cpu: [Duration::ZERO; 2] }
    }

    /// Sends requests one after the other. Adds the times to their first chunks, and the processor time of Envoy and of this process, which has
    /// the picker, the client and the servers.
    async fn measure(&mut self, client: &Client, count: u32) -> Result<()> {
        let processes = [self.envoy.child.id(), std::process::id()];
        let cpu = || Ok::<_, anyhow::Error>([Envoy::cpu(processes[0])?, Envoy::cpu(processes[1])?]);
        let before = cpu()?;
        for number in 0..count {
            let body = json!({ "model": "fake", "prompt": format!("{} {number}", "word ".repeat(400)), "max_tokens": 12, "stream": true });
            let mut request = client.post(format!("http://127.0.0.1:{}/v1/completions", self.port)).json(&body).timeout(LIMIT);
            if let Some(endpoint) = &self.endpoint {
                request = request.header(DESTINATION, endpoint);
            }
            let since = Instant::now();
            let mut answer = request.send().await?;
            answer.chunk().await?.context("the answer is empty")?;
            self.times.push(since.elapsed());
            while answer.chunk().await?.is_some() {}
        }
        for ((total, after), before) in self.cpu.iter_mut().zip(cpu()?).zip(before) {
            *total += after - before;
        }
        Ok(())
    }

    fn print(&mut self) {
        self.times.sort_unstable();
        let count = self.times.len();
        let quantile = |part: f64| self.times[(part * (count - 1) as f64) as usize].as_secs_f64() * 1e3;
        let [envoy, own] = self.cpu.map(|total| total.as_secs_f64() * 1e3 / count as f64);
        println!(
            "{}: first chunk p50 {:.2} ms, p90 {:.2} ms of {count}; CPU a request: Envoy {envoy:.2} ms, picker, client and servers {own:.2} ms",
            self.name,
            quantile(0.5),
            quantile(0.9),
        );
    }
}

/// Asks several questions about each of eight documents, whose first answers say where they are cached.
struct Documents<'a> {
    gateway: &'a Gateway,
    envoy: &'a Envoy,
    client: &'a Client,
}

impl Documents<'_> {
    /// Returns a text of full blocks of the engine, so that texts which begin with it differ in whole blocks only.
    fn text(number: usize) -> String {
        format!("{:<256}", format!("document {number}: {}", format!("word{number} ").repeat(40)))
    }

    /// Sends a prompt. Returns the engine that got it, and the number of tokens that it found in its cache.
    async fn ask(&self, prompt: String) -> Result<(usize, u64)> {
        let counts = || self.gateway.engines.iter().map(|engine| engine.seen().len()).collect::<Vec<_>>();
        let before = counts();
        let answer =
            self.envoy.post(self.client, json!({ "model": "fake", "prompt": prompt, "max_tokens": 4 }).to_string()).await?;
        ensure!(answer.status() == StatusCode::OK, "{}", answer.status());
        let usage: Value = answer.json::<Value>().await?["usage"].clone();
        self.gateway.indexed().await?;
        let after = counts();
        let engine = (0..after.len()).find(|at| after[*at] > before[*at]).context("no engine has the request")?;
        Ok((engine, usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or(0)))
    }

    /// Asks a question about each document. Each must reach the engine that has the document, and find all of its full blocks.
    async fn question(&self, question: &str, places: &[usize]) -> Result<()> {
        for (number, place) in places.iter().enumerate() {
            let document = Self::text(number);
            let (engine, cached) = self.ask(format!("{document}{question}")).await?;
            ensure!(engine == *place, "document {number} is on engine {place}, but engine {engine} got {question}");
            ensure!(cached >= document.len() as u64, "{cached} cached tokens of {}", document.len());
        }
        Ok(())
    }
}

/// Sends bodies of 300 kB and of nearly 10 MB, which reach the server, and a longer one, which does not.
async fn send_large_bodies(envoy: &Envoy, client: &Client) -> Result<()> {
    for bytes in [300 << 10, (10 << 20) - 100] {
        let body = json!({ "model": "fake", "prompt": "a", "max_tokens": 1, "user": "x".repeat(bytes) }).to_string();
        let since = Instant::now();
        ensure!(envoy.post(client, body).await?.status() == StatusCode::OK, "{bytes} bytes");
        println!("a body of {bytes} bytes: {:.0} ms", since.elapsed().as_secs_f64() * 1e3);
    }
    let large = json!({ "model": "fake", "prompt": "a", "user": "x".repeat(10 << 20) }).to_string();
    ensure!(envoy.post(client, large).await?.status() == StatusCode::PAYLOAD_TOO_LARGE);
    let refused: Value = envoy.post(client, "no JSON".to_owned()).await?.json().await?;
    ensure!(refused["error"]["message"] == "not JSON", "the server answers: {refused}");
    Ok(())
}

/// Leaves answers in the middle. Each booking must end within a second.
async fn leave_answers(gateway: &Gateway, envoy: &Envoy, client: &Client) -> Result<()> {
    let mut slowest = Duration::ZERO;
    for _ in 0..10 {
        let streamed = json!({ "model": "fake", "prompt": "a", "max_tokens": 3_000, "stream": true }).to_string();
        let mut answer = envoy.post(client, streamed).await?;
        answer.chunk().await?.context("the answer is empty")?;
        ensure!(gateway.bookings().await? == 1);
        let since = Instant::now();
        drop(answer);
        until("the booking of a client that left has ended", async || Ok(gateway.bookings().await? == 0)).await?;
        slowest = slowest.max(since.elapsed());
    }
    println!("the booking of a client that leaves ends within {:.0} ms (the longest of 10)", slowest.as_secs_f64() * 1e3);
    ensure!(slowest < Duration::from_secs(1), "{slowest:?}");
    Ok(())
}

/// Returns the path of Envoy. Without one, prints that the test is skipped.
fn program() -> Option<String> {
    let program = std::env::var("TANDEM_ENVOY").ok();
    if program.is_none() {
        eprintln!("SKIPPED: needs Envoy; ci/epp.sh installs it and runs this test");
    }
    program
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_asks_a_picker_over_tls() -> Result<()> {
    const TLS: &str = "      transport_socket:
        name: envoy.transport_sockets.tls
        typed_config: { '@type': type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext }\n";
    let Some(program) = program() else { return Ok(()) };
    let gateway = Gateway::with(1, FakeSettings::default(), self_signed).await?;
    let (port, client) = (gateway.cluster.frontend.port(), Client::new());
    let body = || json!({ "model": "fake", "prompt": "a", "max_tokens": 4 }).to_string();
    for (further, answers) in [(TLS, true), ("", false)] {
        let envoy = Envoy::start(&program, port, further).await?;
        let status = envoy.post(&client, body()).await?.status();
        assert_eq!(status == StatusCode::OK, answers, "{status} with {further}");
    }
    gateway.cluster.stop().await;
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn envoy_sends_each_request_to_the_server_that_the_picker_chooses() -> Result<()> {
    let Some(program) = program() else { return Ok(()) };
    let gateway = Gateway::with(2, FakeSettings::default(), |_| {}).await?;
    let envoy = Envoy::start(&program, gateway.cluster.frontend.port(), "").await?;
    let client = Client::new();
    let documents = Documents { gateway: &gateway, envoy: &envoy, client: &client };
    let mut places = Vec::new();
    for number in 0..8 {
        places.push(documents.ask(Documents::text(number) + "question 0").await?.0);
    }
    assert!((0..2).all(|engine| places.contains(&engine)), "{places:?}");
    for question in 1..5 {
        documents.question(&format!("question {question}"), &places).await?;
    }
    send_large_bodies(&envoy, &client).await?;
    leave_answers(&gateway, &envoy, &client).await?;

    let gateway = gateway.restart().await?;
    gateway.indexed().await?;
    let documents = Documents { gateway: &gateway, envoy: &envoy, client: &client };
    documents.question("question after the picker's restart", &places).await?;

    let least = Envoy::start(&program, reference::start(gateway.endpoint(0)).await?, "").await?;
    let mut ways = [
        Way::new("without a picker", &envoy, Some(gateway.endpoint(0))),
        Way::new("with a picker that always names one server", &least, None),
        Way::new("with Tandem's picker", &envoy, None),
    ];
    // The ways take turns, so that other load on the machine meets all.
    for round in 0..6 {
        for way in &mut ways {
            way.measure(&client, 50).await.with_context(|| format!("round {round}"))?;
        }
    }
    ways.iter_mut().for_each(Way::print);

    let running: usize = gateway.engines.iter().map(FakeVllm::running).sum();
    assert_eq!(running, 0);
    gateway.cluster.stop().await;
    let failed = envoy.post(&client, json!({ "model": "fake", "prompt": "a" }).to_string()).await?.status();
    assert!(failed.is_server_error(), "the picker has ended: {failed}");
    Ok(())
}
