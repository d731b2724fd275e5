//! Sends two thousand requests while a worker is killed and restarted. The clients of a fifth of the requests disconnect. The usage that clients
//! received must equal the frontend's counters, series by series, and must reconcile with ledgers and metrics.

use crate::{
    cluster::{series, until},
    rig::{Rig, Shape},
};
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    ops::AddAssign,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};
use tandem::audit::MetricSamples;
use tandem_tests::{Answer, Client, Endpoint, prose};
use tokio::task::JoinSet;

const REQUESTS: usize = 2_000;
const CLIENTS: usize = 32;
/// The worker is killed when this many requests have ended.
const KILL_AFTER: usize = 700;
/// The number of tokens of an answer that is so long that its client disconnects before it ends.
const MANY_TOKENS: usize = 20_000;

/// The usage of many requests, as clients have received it or as the frontend has counted it.
#[derive(Debug, Default, PartialEq)]
struct Usage {
    requests: BTreeMap<[String; 3], u64>,
    prompts: u64,
    prompt_tokens: u64,
    completion_tokens: u64,
    cached: BTreeMap<[String; 2], u64>,
}

impl AddAssign for Usage {
    fn add_assign(&mut self, other: Self) {
        self.prompts += other.prompts;
        self.prompt_tokens += other.prompt_tokens;
        self.completion_tokens += other.completion_tokens;
        other.requests.into_iter().for_each(|(series, count)| *self.requests.entry(series).or_default() += count);
        other.cached.into_iter().for_each(|(series, tokens)| *self.cached.entry(series).or_default() += tokens);
    }
}

impl Usage {
    fn add_reply(&mut self, endpoint: Endpoint, model: &str, code: u16) {
        let endpoint = endpoint.path().trim_start_matches("/v1/").replace('/', "_");
        // The frontend may not have read the model of a request whose client disconnected, so the model is not compared.
        let model = if code == 499 { "" } else { model };
        *self.requests.entry([endpoint, model.to_owned(), code.to_string()]).or_default() += 1;
    }

    fn add_answer(&mut self, answer: &Answer) {
        let details = answer.details();
        let prompts = details["prompts"].as_array().map_or(std::slice::from_ref(details), Vec::as_slice);
        let mut by_tier = 0;
        for prompt in prompts {
            let source = prompt["cached_tokens_source"].as_str().expect("cached_tokens_source is a string");
            for (tier, tokens) in prompt["cached_tokens_by_tier"].as_object().expect("cached_tokens_by_tier is an object") {
                let tokens = tokens.as_u64().expect("the token count is a number");
                *self.cached.entry([source.to_owned(), tier.clone()]).or_default() += tokens;
                by_tier += tokens;
            }
        }
        assert_eq!(by_tier, answer.cached_tokens(), "{answer:?}");
        self.prompts += prompts.len() as u64;
        self.prompt_tokens += answer.usage("/prompt_tokens");
        self.completion_tokens += answer.usage("/completion_tokens");
    }

    fn of_frontend(page: &str) -> Self {
        let label = |series: &str, name: &str| {
            let value = series.split(&format!("{name}=\"")).nth(1).and_then(|rest| rest.split('"').next());
            value.unwrap_or_else(|| panic!("{series} has no label {name}")).to_owned()
        };
        let mut counted = Self::default();
        for (series, value) in page.lines().filter_map(|line| line.rsplit_once(' ')) {
            let value = || value.parse::<f64>().expect("the sample has a number") as u64;
            if series.starts_with("tandem_frontend_requests_total{") {
                let [endpoint, model, code] = ["endpoint", "model", "code"].map(|name| label(series, name));
                let model = if code == "499" { String::new() } else { model };
                *counted.requests.entry([endpoint, model, code]).or_default() += value();
            } else if series.starts_with("tandem_frontend_cached_tokens_total{") {
                counted.cached.insert(["source", "tier"].map(|name| label(series, name)), value());
            }
        }
        let mut samples = MetricSamples::default();
        samples.add(page);
        let sum = |name: &str| samples.sum(&format!("tandem_frontend_{name}"), "") as u64;
        counted.prompts = sum("request_cached_tokens_count");
        counted.prompt_tokens = sum("prompt_tokens_total");
        counted.completion_tokens = sum("completion_tokens_total");
        assert_eq!(sum("request_prompt_tokens_sum"), counted.prompt_tokens);
        assert_eq!(sum("request_completion_tokens_sum"), counted.completion_tokens);
        assert_eq!(sum("request_cached_tokens_sum"), counted.cached.values().sum::<u64>());
        for histogram in ["request_prompt_tokens", "request_completion_tokens", "request_cached_ratio"] {
            assert_eq!(sum(&format!("{histogram}_count")), counted.prompts, "{histogram}");
        }
        let disconnected: u64 = counted.requests.iter().filter(|([_, _, code], _)| code == "499").map(|(_, count)| count).sum();
        assert_eq!(sum("cancelled_total"), disconnected);
        assert_eq!(sum("request_duration_seconds_count"), counted.requests.values().sum::<u64>() - disconnected);
        counted
    }
}

/// Returns request `number`. The requests cover both endpoints, streamed and not, with several samples and prompts, and their prompts are
/// partly cached.
fn request(number: usize) -> (Endpoint, Value) {
    let endpoint = if number.is_multiple_of(3) { Endpoint::Chat } else { Endpoint::Completions };
    let text = |salt: usize| prose(&(salt % 40).to_string(), 10 + (salt * 37) % 60);
    let (tokens, stream) = (10 + number * 13 % 90, number.is_multiple_of(2));
    let mut options = match number % 7 {
        0 => json!({ "n": 2, "max_tokens": tokens / 2 }),
        1 if endpoint == Endpoint::Completions => json!({ "prompt": [text(number), text(number + 1)], "max_tokens": tokens }),
        2 => json!({ "max_tokens": tokens, "stop": ["a"], "seed": number }),
        _ => json!({ "max_tokens": tokens, "ignore_eos": true }),
    };
    if stream {
        options["stream"] = true.into();
        options["stream_options"] = json!({ "include_usage": true });
    }
    (endpoint, endpoint.request("sim", &text(number), options))
}

async fn complete(client: &Client, number: usize) -> anyhow::Result<Usage> {
    let (mut usage, (endpoint, mut body)) = (Usage::default(), request(number));
    let (model, code) = match number % 100 {
        11 => ("sim", 400),
        12 => ("", 404),
        _ if number % 5 == 3 => ("sim", 499),
        _ => ("sim", 200),
    };
    match code {
        400 => body["temperature"] = json!(-1),
        404 => body["model"] = json!("another"),
        499 => {
            body["max_tokens"] = json!(MANY_TOKENS);
            body["ignore_eos"] = json!(true);
            body["stream"] = json!(number.is_multiple_of(2));
            body.as_object_mut().expect("the body is an object").remove("stop");
        }
        _ => {}
    }
    match code {
        499 if number.is_multiple_of(2) => drop(client.send(endpoint.path(), &body).await?.chunk().await?),
        499 => client.send_and_disconnect(endpoint.path(), &body).await?,
        _ => {
            let answer = client.answer(endpoint.path(), &body).await?;
            anyhow::ensure!(answer.status == code && answer.done, "request {number}: {answer:?}");
            if code == 200 {
                usage.add_answer(&answer);
            }
        }
    }
    usage.add_reply(endpoint, model, code);
    Ok(usage)
}

#[test]
fn client_usage_equals_frontend_counters_under_failures() {
    let args = ["--sim-speedup", "20"].map(str::to_owned).to_vec();
    let mut rig = Rig::start(&Shape { args, ..Shape::default() });
    let (next, ended) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let mut clients = JoinSet::new();
    for _ in 0..CLIENTS {
        let (client, next, ended) = (rig.clients[0].clone(), next.clone(), ended.clone());
        let running = async move {
            let mut usage = Usage::default();
            loop {
                let number = next.fetch_add(1, Ordering::Relaxed);
                if number >= REQUESTS {
                    return anyhow::Ok(usage);
                }
                usage += complete(&client, number).await?;
                ended.fetch_add(1, Ordering::Relaxed);
            }
        };
        clients.spawn_on(running, rig.plan.runtime.handle());
    }
    until("requests are answered", || ended.load(Ordering::Relaxed), |ended| *ended >= KILL_AFTER);
    until(
        "the worker generates",
        || series(rig.process("d0"), "tandem_worker_kv_blocks{worker=\"d0\",state=\"in_use\"}"),
        |held| *held > 0.0,
    );
    rig.kill("d0");
    rig.restart("d0");
    let mut received = Usage::default();
    for usage in rig.plan.runtime.block_on(clients.join_all()) {
        received += usage.expect("every request has a reply");
    }
    rig.wait_until_connected();
    assert_eq!(received.requests.values().sum::<u64>(), REQUESTS as u64);
    assert!(received.cached.values().sum::<u64>() > 0 && rig.resumed() + rig.retried() > 0, "{received:#?}");
    let frontend = rig.process("f0");
    until("no request is in flight", || series(frontend, "tandem_frontend_inflight_requests"), |running| *running == 0.0);
    assert_eq!(Usage::of_frontend(&frontend.get("/metrics")), received);
    assert_eq!(rig.reconcile().findings, [""; 0]);
}
